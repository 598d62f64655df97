"""The device filter's program, run by an interpreter of the instructions it is made of, against the rules it was made from."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from runner.kernel.device_filter import DEFAULT_RULES, DeviceRule, assemble, macvtap_rules

MKNOD, READ, WRITE = 1, 2, 4
BLOCK, CHARACTER = 1, 2
"""``include/uapi/linux/bpf.h``."""
KINDS = {"b": BLOCK, "c": CHARACTER}
U64 = (1 << 64) - 1


def run(program: bytes, kind: int, access: int, major: int, minor: int) -> int:
    """Run *program* with a ``struct bpf_cgroup_dev_ctx`` and return its result (RFC 9669)."""
    context = struct.pack("=III", access << 16 | kind, major, minor)
    instructions = list(struct.iter_unpack("<BBhi", program))
    registers: dict[int, int] = {1: 0}
    at = 0
    while True:
        opcode, both, offset, value = instructions[at]
        to, source, at = both & 15, both >> 4, at + 1
        match opcode:
            case 0x61:
                assert source == 1, "only the context is memory that may be read"
                [registers[to]] = struct.unpack_from("=I", context, offset)
            case 0xB7:
                registers[to] = value & U64
            case 0xBF:
                registers[to] = registers[source]
            case 0x57:
                registers[to] &= value & U64
            case 0x5F:
                registers[to] &= registers[source]
            case 0x77:
                registers[to] >>= value
            case 0x55:
                assert offset > 0, "the verifier takes no loop without a bound"
                at += offset if registers[to] != value & U64 else 0
            case 0x95:
                return registers[0]
            case _:
                raise AssertionError(f"instruction {opcode:#x} is none of ours")


def allowed(*rules: str) -> set[tuple[str, str, int, int]]:
    """Return what a program of *rules* allows in a small world: kind, access, major, minor."""
    program = assemble(DeviceRule.parse(rule) for rule in rules)
    letters = {"m": MKNOD, "r": READ, "w": WRITE, "rw": READ | WRITE, "rwm": MKNOD | READ | WRITE, "": 0}
    return {
        (kind, access, major, minor)
        for kind, number in KINDS.items()
        for access, wanted in letters.items()
        for major in (0, 1, 8)
        for minor in (0, 3, (1 << 20) - 1)
        if run(program, number, wanted, major, minor)
    }


def test_without_rules_nothing_is_allowed() -> None:
    assert allowed() == set()


def test_a_rule_allows_its_devices_and_its_access_alone() -> None:
    assert allowed("c 1:3 rw") == {("c", access, 1, 3) for access in ("r", "w", "rw", "")}
    assert allowed("b 8:0 r") == {("b", access, 8, 0) for access in ("r", "")}
    assert allowed("b 8:0 mr") == {("b", access, 8, 0) for access in ("m", "r", "")}


def test_a_star_is_every_number() -> None:
    minors, majors = (0, 3, (1 << 20) - 1), (0, 1, 8)
    assert allowed("c 8:* w") == {("c", access, 8, minor) for access in ("w", "") for minor in minors}
    assert allowed("b *:3 r") == {("b", access, major, 3) for access in ("r", "") for major in majors}
    assert len(allowed("b *:* rwm")) == 6 * 9


def test_rules_are_added_up_and_each_is_for_itself() -> None:
    """Two rules that allow one access each do not allow both at once; the kernel's own list does it the same way."""
    both = allowed("c 1:3 r", "c 1:3 w", "b 8:* r")
    assert both == allowed("c 1:3 r") | allowed("c 1:3 w") | allowed("b 8:* r")
    assert ("c", "rw", 1, 3) not in both


@pytest.mark.parametrize(
    ("name", "major", "minor"),
    [
        ("null", 1, 3),
        ("zero", 1, 5),
        ("full", 1, 7),
        ("random", 1, 8),
        ("urandom", 1, 9),
        ("tty", 5, 0),
        ("console", 5, 1),
        ("ptmx", 5, 2),
        ("pts/7", 136, 7),
        ("net/tun", 10, 200),
        ("kvm", 10, 232),
        ("vhost-net", 10, 238),
    ],
)
def test_the_default_rules_open_what_a_guest_is_run_with(name: str, major: int, minor: int) -> None:
    program = assemble(DEFAULT_RULES)
    assert run(program, CHARACTER, READ | WRITE, major, minor), name
    assert not run(program, CHARACTER, MKNOD, major, minor), "nobody makes nodes"
    assert not run(program, BLOCK, READ, major, minor), "nobody opens disks"


@pytest.mark.parametrize(
    "number", [(1, 1), (1, 4), (1, 11), (4, 64), (10, 183), (10, 196), (10, 229), (10, 237), (10, 241), (246, 1)]
)
def test_the_default_rules_open_neither_memory_nor_ports_nor_other_devices(number: tuple[int, int]) -> None:
    """/dev/mem, /dev/port, /dev/kmsg, a serial line, hwrng, VFIO's container, FUSE, loop-control, vhost-vsock, a macvtap."""
    assert not run(assemble(DEFAULT_RULES), CHARACTER, READ, *number)


def test_every_kind_of_block_device_is_refused() -> None:
    program = assemble(DEFAULT_RULES)
    opened = [m for m in range(1 << 12) for access in (MKNOD, READ, 0) if run(program, BLOCK, access, m, 0)]
    assert opened == []


@pytest.mark.parametrize("text", ["c 10:232 rw", "b 8:* r", "c *:* rwm", "b 259:1048575 w"])
def test_a_rule_is_written_as_it_is_read(text: str) -> None:
    assert str(DeviceRule.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10:232",
        "c 10:232",
        "a *:* rwm",
        "c 10 rw",
        "c 10:232 x",
        "c -1:2 r",
        "c 4096:0 r",
        "b 8:1048576 r",
        "c 1:3  r",
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no rule|has a number above"):
        DeviceRule.parse(text)


def test_macvtap_is_allowed_by_the_number_that_the_kernel_has_given_it(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text(
        "Character devices:\n  1 mem\n246 macvtap\n\nBlock devices:\n  8 sd\n246 macvtap\n"
    )
    assert list(map(str, macvtap_rules(tmp_path))) == ["c 246:* rw"]
    (tmp_path / "devices").write_text("Character devices:\n  1 mem\n\nBlock devices:\n  8 sd\n")
    assert macvtap_rules(tmp_path) == ()
