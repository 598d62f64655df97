"""Facts that are parsed: name servers, the version of virtiofsd, and what the beginning of a file says."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address
from pathlib import PurePosixPath

import pytest

from runner.facts.file_formats import HEAD, identify
from runner.facts.host import Resolver, Virtiofsd

PATH = PurePosixPath("/usr/libexec/virtiofsd")


def test_a_resolver_is_read_whole() -> None:
    text = "# from the kubelet\nnameserver 127.0.0.53\nnameserver 10.96.0.10\nnameserver fe80::1%eth0\nnameserver fd00::a\n"
    found = Resolver.parse(
        text
        + "nameserver not-an-address\nnameserver\nsearch one.example bad_$name . two.example\noptions ndots:5 edns0\n"
    )
    assert found == Resolver(
        (IPv4Address("127.0.0.53"), IPv4Address("10.96.0.10")),
        ("one.example", "bad_$name", "two.example"),
        (IPv6Address("fe80::1%eth0"), IPv6Address("fd00::a")),
        ("ndots:5", "edns0"),
    )
    assert Resolver.parse("") == Resolver()


@pytest.mark.parametrize(
    ("output", "rust", "version"),
    [
        ("virtiofsd 1.13.2", True, (1, 13, 2)),
        ("virtiofsd backend 1.8.0", True, (1, 8, 0)),
        ("virtiofsd version 7.2.22 (Debian 1:7.2+dfsg-7)", False, (7, 2, 22)),
    ],
)
def test_virtiofsd_is_known_by_its_version_output(output: str, version: tuple[int, ...], *, rust: bool) -> None:
    assert Virtiofsd.parse(PATH, output) == Virtiofsd(PATH, rust, version)


def test_an_unknown_virtiofsd_is_none() -> None:
    assert Virtiofsd.parse(PATH, "unrecognized option '--version'") is None


def elf(headers: int, apart: int, notes: bytes) -> bytes:
    """Return the head of an ELF file for x86-64 with so many program headers, each so many bytes *apart*, all of the same *notes*."""
    there = headers if apart else 1
    at = 64 + 56 * there
    head = struct.pack("<16sHHIQQQIHHH", b"\x7fELF\2\1\1", 2, 62, 1, 0, 64, 0, 0, 64, apart, headers).ljust(64, b"\0")
    head += struct.pack("<IIQQQQ", 4, 0, at, 0, 0, len(notes)).ljust(56, b"\0") * there
    return (head + notes).ljust(HEAD, b"\0")[:HEAD]


def name_of(head: bytes) -> str | None:
    found = identify(head)
    return found and found.name


def test_a_kernel_has_its_entry_in_a_note() -> None:
    other, entry = (struct.pack("<III", 4, 8, kind) + b"Xen\0" + bytes(8) for kind in (6, 18))
    assert name_of(elf(1, 56, other + entry)) == "PVH"
    assert name_of(elf(10, 56, other * 30 + entry)) == "PVH"
    assert name_of(elf(1, 56, other)) == "ELF"


def test_what_a_guest_has_written_to_its_disk_costs_little() -> None:
    """65,535 headers that are one, of notes without a name or content: minutes for each look at it without a bound."""
    assert name_of(elf(65_535, 0, bytes(HEAD - 120))) == "ELF"
