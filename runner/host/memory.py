"""What this process may do with memory: mbind(2) and ``RLIMIT_MEMLOCK``."""

from __future__ import annotations

import ctypes
import mmap
import resource

from runner.errors import HostError
from runner.host.populate import bind


def try_mbind(numa_node: int) -> OSError | None:
    """Bind a page of our own to *numa_node* and return what the kernel objects to, if anything.

    A seccomp profile may answer for the kernel: only trying tells.
    Raises :class:`~runner.errors.HostError` on a machine whose number of the system call is not known here.
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
            del first  # a mapping that is looked into cannot be closed
    return None


def read_memlock_limit() -> int | None:
    """Return how many bytes a process that we start may lock, ``None`` without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
