"""The right of this process to say on which NUMA node its memory is: mbind(2)."""

from __future__ import annotations

import ctypes
import mmap

from runner.base.errors import HostError
from runner.kernel.preallocate import bind


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
