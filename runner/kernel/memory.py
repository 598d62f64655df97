"""The rights of this process over memory: mbind(2) and ``RLIMIT_MEMLOCK``."""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from runner.base.errors import HostError
from runner.kernel.preallocate import bind

_UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
CAP_IPC_LOCK, _CAP_SYS_RESOURCE = 14, 24
"""``include/uapi/linux/capability.h``."""


def try_mbind(numa_node: int) -> OSError | None:
    """Bind a page of this process to *numa_node* and return the kernel's error, if any.

    A seccomp profile may refuse the call, so only a trial shows whether it works. Raises :class:`~runner.base.errors.HostError` on an
    architecture whose number of the system call is not known here.
    """
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        first = ctypes.c_char.from_buffer(page)
        try:
            bind(ctypes.addressof(first), mmap.PAGESIZE, [numa_node])
        except KeyError as error:
            raise HostError(
                f"cannot try mbind: the number of the system call is not known for {error.args[0]}"
            ) from None
        except OSError as error:
            return error
        finally:
            del first  # a mapping with an exported buffer cannot be closed
    return None


def read_lockable(capabilities: Collection[int]) -> int | None:
    """Return the bytes that a child started within :func:`lockable` may lock, ``None`` without a limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if hard == resource.RLIM_INFINITY or _CAP_SYS_RESOURCE in capabilities else hard


@contextmanager
def lockable(size: int) -> Iterator[None]:
    """Let children started in the block lock *size* bytes, as far as possible: above the hard limit this needs CAP_SYS_RESOURCE."""
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
