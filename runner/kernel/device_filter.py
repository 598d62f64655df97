"""The device filter of a cgroup: an eBPF program that decides which device nodes its members may make and open.

cgroup-v2.rst, "Device controller": there are no control files; a program of the type ``BPF_PROG_TYPE_CGROUP_DEVICE`` that is
attached to the cgroup is run for each mknod(2) of a device and each open(2) of one, and its result 0 is EPERM. The cgroups
below are under it too. It is an allow-list here, as in the OCI runtime specification (config-linux.md, "Allowed Device list").

A descriptor that is open already is not asked about: it may be passed on, inherited and used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self, get_args

from runner.base.errors import HostError, doing
from runner.base.values import frozen

DeviceKind = Literal["b", "c"]
"""Block and character devices, as mknod(1) and the OCI runtime specification write them."""

_KINDS: dict[DeviceKind, int] = {"b": 1, "c": 2}
"""``BPF_DEVCG_DEV_BLOCK`` and ``_CHAR`` (``include/uapi/linux/bpf.h``)."""
_ACCESS = {"m": 1, "r": 2, "w": 4}
"""``BPF_DEVCG_ACC_MKNOD``, ``_READ`` and ``_WRITE``."""

_RULE = re.compile(r"([bc]) (\d{1,10}|\*):(\d{1,10}|\*) ([rwm]{1,3})")
_LARGEST_MAJOR, _LARGEST_MINOR = (1 << 12) - 1, (1 << 20) - 1
"""``MINORBITS`` of ``include/linux/kdev_t.h``."""


@frozen
class DeviceRule:
    """Devices that may be used, and how: *access* has letters of ``rwm``; ``None`` stands for every number."""

    kind: DeviceKind
    major: int | None
    minor: int | None
    access: str = "rw"

    def __str__(self) -> str:
        major, minor = ("*" if number is None else str(number) for number in (self.major, self.minor))
        return f"{self.kind} {major}:{minor} {self.access}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a rule in the form of ``docker run --device-cgroup-rule``, such as ``c 10:232 rw``.

        Raises ``ValueError``.
        """
        match = _RULE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no rule like 'c 10:232 rw' or 'b 8:* r'")
        kind = next(kind for kind in get_args(DeviceKind) if kind == match[1])
        major, minor = (None if number == "*" else int(number) for number in match.group(2, 3))
        if (major or 0) > _LARGEST_MAJOR or (minor or 0) > _LARGEST_MINOR:
            raise ValueError(f"{text!r} has a number above {_LARGEST_MAJOR}:{_LARGEST_MINOR}")
        return cls(kind, major, minor, "".join(letter for letter in "rwm" if letter in match[4]))


DEFAULT_RULES = (
    # OCI runtime specification, config-linux.md, "Default Devices"
    DeviceRule("c", 1, 3),  # null
    DeviceRule("c", 1, 5),  # zero
    DeviceRule("c", 1, 7),  # full
    DeviceRule("c", 1, 8),  # random
    DeviceRule("c", 1, 9),  # urandom
    DeviceRule("c", 5, 0),  # tty
    DeviceRule("c", 5, 1),  # console
    DeviceRule("c", 5, 2),  # ptmx
    DeviceRule("c", 136, None),  # the terminals of a devpts (UNIX98_PTY_SLAVE_MAJOR)
    # include/linux/miscdevice.h
    DeviceRule("c", 10, 200),  # net/tun
    DeviceRule("c", 10, 232),  # kvm
    DeviceRule("c", 10, 238),  # vhost-net
)
"""The devices that every container may open, and those with fixed numbers that guests need.

A process in float can open no others. PID 1 opens the pod's further devices (disks, VFIO, vhost-vsock) in the pod's own cgroup, where the
container runtime's filter decides.
"""


def macvtap_rules(procfs: Path) -> tuple[DeviceRule, ...]:
    """Return the rule for the taps of macvtaps, whose major number the kernel chooses; none while the driver is not loaded.

    A container runtime can allow a single tap only if it exists before the container does, as one made by a device plugin: its minor number
    is known only then.
    """
    with doing(f"read {procfs / 'devices'}"):
        lines = (procfs / "devices").read_text().partition("Block devices:")[0].splitlines()
    return tuple(DeviceRule("c", int(line.split()[0]), None) for line in lines if line.split()[1:] == ["macvtap"])


# -- the program -----------------------------------------------------------------------------------------------------

# Documentation/bpf/standardization/instruction-set.rst: class, source and operation of an opcode
_LDXW, _MOV, _MOVX, _ANDX, _RSH, _AND, _JNE, _EXIT = 0x61, 0xB7, 0xBF, 0x5F, 0x77, 0x57, 0x55, 0x95
_R0, _CONTEXT, _KIND, _WANTED, _MAJOR, _MINOR = range(6)
"""Registers: the result, the address of a ``struct bpf_cgroup_dev_ctx``, and the fields read from it."""


def _instruction(opcode: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", opcode, to | source << 4, offset, value)


def assemble(rules: Iterable[DeviceRule]) -> bytes:
    """Return the program that allows an access if one of *rules* allows all of it, and denies any other.

    ``access_type`` of the context holds the kind in its lower half and the requested access in its upper half.
    """
    return b"".join(
        (
            _instruction(_LDXW, _KIND, _CONTEXT, 0),
            _instruction(_MOVX, _WANTED, _KIND),
            _instruction(_AND, _KIND, value=0xFFFF),
            _instruction(_RSH, _WANTED, value=16),
            _instruction(_LDXW, _MAJOR, _CONTEXT, 4),
            _instruction(_LDXW, _MINOR, _CONTEXT, 8),
            *map(_rule_instructions, rules),
            _instruction(_MOV, _R0, value=0),
            _instruction(_EXIT),
        )
    )


def _rule_instructions(rule: DeviceRule) -> bytes:
    """Return the instructions that end the program with 1 if *rule* allows the access, and otherwise fall through."""
    refused = ~sum(_ACCESS[letter] for letter in rule.access) & 0xFFFF
    tests: list[tuple[bytes, int, int]] = [  # instructions before a comparison, its register, and the expected value
        (b"", _KIND, _KINDS[rule.kind]),
        (_instruction(_MOV, _R0, value=refused) + _instruction(_ANDX, _R0, _WANTED), _R0, 0),
        *(
            (b"", register, number)
            for register, number in ((_MAJOR, rule.major), (_MINOR, rule.minor))
            if number is not None
        ),
    ]
    code = _instruction(_MOV, _R0, value=1) + _instruction(_EXIT)
    for before, register, expected in reversed(tests):
        code = before + _instruction(_JNE, register, offset=len(code) // 8, value=expected) + code
    return code


# -- bpf(2) ----------------------------------------------------------------------------------------------------------

_BPF = 321
"""The number of the system call on x86-64 (``arch/x86/entry/syscalls/syscall_64.tbl``); the C library has no name for it."""
_PROG_LOAD, _PROG_ATTACH = 5, 8
"""``enum bpf_cmd``."""
_PROG_TYPE_CGROUP_DEVICE = 15
_CGROUP_DEVICE = 6
"""``enum bpf_attach_type``."""
_EXCLUSIVE = 0
"""The attach flags: descendants may not have a program of their own, and an attached program is replaced atomically (the comment on
``BPF_F_ALLOW_OVERRIDE`` in ``include/uapi/linux/bpf.h``; ``__cgroup_bpf_attach``)."""


def attach_device_filter(rules: Iterable[DeviceRule], cgroup: Path) -> int:
    """Attach the program of *rules* to *cgroup*, replacing an earlier one, and return the cgroup's id.

    The program stays attached as long as the cgroup exists, even after this process has ended. Needs CAP_SYS_ADMIN (or CAP_BPF and
    CAP_NET_ADMIN). Raises :class:`~runner.base.errors.HostError`.
    """
    what = f"cannot attach the device filter to {cgroup}"
    try:
        directory = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(what) from error
    try:
        program = _load(assemble(rules))
        try:
            _bpf(_PROG_ATTACH, struct.pack("=IIII", directory, program, _CGROUP_DEVICE, _EXCLUSIVE))
        finally:
            os.close(program)
        return os.fstat(directory).st_ino
    except OSError as error:
        denied = error.errno in {errno.EPERM, errno.EACCES}
        remedy = "it takes CAP_SYS_ADMIN" if denied else "it takes a kernel with CONFIG_CGROUP_BPF, and cgroup v2"
        raise HostError(what, remedy=remedy) from error
    finally:
        os.close(directory)


def cgroup_id(cgroup: Path) -> int | None:
    """Return the id of *cgroup*, the inode of its directory, which is never reused; ``None`` if the cgroup does not exist."""
    try:
        return cgroup.stat().st_ino
    except OSError:
        return None


def _load(program: bytes) -> int:
    code, license_ = ctypes.create_string_buffer(program, len(program)), ctypes.create_string_buffer(b"Apache-2.0")
    addresses = ctypes.addressof(code), ctypes.addressof(license_)
    name = b"instance_filter"  # as bpftool shows it; at most 15 letters
    return _bpf(
        _PROG_LOAD,
        struct.pack("=IIQQIIQII16s", _PROG_TYPE_CGROUP_DEVICE, len(program) // 8, *addresses, 0, 0, 0, 0, 0, name),
    )


def _bpf(command: int, attributes: bytes) -> int:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    argument = ctypes.create_string_buffer(attributes, len(attributes))
    result = syscall(ctypes.c_long(_BPF), ctypes.c_int(command), argument, ctypes.c_uint(len(attributes)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
