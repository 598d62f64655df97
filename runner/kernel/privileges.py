"""The rights of this process over the host: the cgroup namespace it is in, and the capabilities it keeps."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from runner.base.errors import HostError, doing

CAP_DAC_OVERRIDE, CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_SYS_NICE, CAP_SYS_RESOURCE = 1, 19, 21, 23, 24
"""``include/uapi/linux/capability.h``."""
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWCGROUP = 0x02000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    """32 capabilities (capget(2)); the higher ones are in a second structure."""

    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def enter_cgroup_namespace(process: Path) -> None:
    """Enter the cgroup namespace of *process*, a directory of procfs, unless this process is in it already.

    Afterwards this process sees the cgroup paths that *process* sees (cgroup_namespaces(7)). Needs CAP_SYS_ADMIN and CAP_SYS_PTRACE. Raises
    :class:`~runner.base.errors.HostError`.
    """
    try:
        fd = os.open(process / "ns" / "cgroup", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.path.samestat(os.fstat(fd), (process.parent / "self" / "ns" / "cgroup").stat()):
                return
            _checked(_libc().setns(fd, _CLONE_NEWCGROUP))  # os.setns is Python 3.12's
        finally:
            os.close(fd)
    except OSError as error:
        raise HostError(
            f"cannot enter the cgroup namespace of {process}", remedy="it takes CAP_SYS_ADMIN and CAP_SYS_PTRACE"
        ) from error


def keep_capabilities(kept: Iterable[int]) -> None:
    """Give up every capability except those of *kept* that this process has; no program that it executes gets more.

    The bounding set is not changed, because it no longer matters ("no_new_privs", ``Documentation/userspace-api/no_new_privs.rst``), and
    CAP_SETPCAP is not needed. To be called before threads are started, for each thread has capabilities of its own. Raises
    :class:`~runner.base.errors.HostError`.
    """
    libc, header, sets = _libc(), _Header(_CAPABILITY_VERSION_3, 0), (_Sets * 2)()
    mask = sum(1 << number for number in kept)
    with doing("give capabilities away"):
        _checked(libc.capget(ctypes.byref(header), sets))
        for half, found in enumerate(sets):
            found.permitted &= mask >> 32 * half & 0xFFFFFFFF
            found.effective, found.inheritable = found.permitted, 0
        _checked(libc.capset(ctypes.byref(header), sets))
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread of *parent* that has forked it ends (``PR_SET_PDEATHSIG``).

    Raises :class:`~runner.base.errors.HostError`, also if the parent has ended already.
    """
    with doing("end with the parent"):
        _checked(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        raise HostError("the parent has ended")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
