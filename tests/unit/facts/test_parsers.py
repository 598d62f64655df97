"""Facts that are parsed from text: name servers, and the version of virtiofsd."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from pathlib import PurePosixPath

import pytest

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
