"""What this process may do with memory: mbind(2) and ``RLIMIT_MEMLOCK``."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from runner.errors import HostError

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call by machine: glibc has no function for it."""
_MPOL_BIND = 2
_UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
_CAP_SYS_RESOURCE = 24
"""``include/uapi/linux/capability.h``."""
_MASK_BITS = 1024


def try_mbind(numa_node: int) -> OSError | None:
    """Bind a page of our own to *numa_node* and return what the kernel objects to, if anything.

    A seccomp profile may answer for the kernel: only trying tells.
    Raises :class:`~runner.errors.HostError` on a machine whose number of the system call is not known here.
    """
    machine = os.uname().machine
    number = _MBIND.get(machine)
    if number is None:
        raise HostError(f"cannot try mbind: the number of the system call is not known for {machine}")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[numa_node // 64] = 1 << numa_node % 64
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        first = ctypes.c_char.from_buffer(page)
        address = ctypes.c_void_p(ctypes.addressof(first))
        size = ctypes.c_ulong(mmap.PAGESIZE)
        failed = syscall(ctypes.c_long(number), address, size, _MPOL_BIND, mask, ctypes.c_ulong(_MASK_BITS), 0)
        code = ctypes.get_errno()
        del first, address  # a mapping that is looked into cannot be closed
    return OSError(code, os.strerror(code)) if failed else None


def read_lockable(capabilities: Collection[int]) -> int | None:
    """Return how many bytes a process that we start may lock once :func:`lockable` has helped, ``None`` without a limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if hard == resource.RLIM_INFINITY or _CAP_SYS_RESOURCE in capabilities else hard


@contextmanager
def lockable(size: int) -> Iterator[None]:
    """Let what is started in the block lock *size* bytes, as far as we may: more than the hard limit takes CAP_SYS_RESOURCE."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= size:
        yield
        return
    try:
        try:
            enough = hard == resource.RLIM_INFINITY or hard >= size
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard) if enough else _UNLIMITED)
        except ValueError:  # not allowed, and root with CAP_IPC_LOCK does not need it
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
