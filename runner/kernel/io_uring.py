"""A probe for io_uring: the kernel has it, and neither a sysctl nor a seccomp profile forbids it."""

from __future__ import annotations

import ctypes
import os

_IO_URING_SETUP = 425
"""The number of the system call, the same on every machine (``include/uapi/asm-generic/unistd.h``)."""
_PARAMETERS = 120
"""Bytes of ``struct io_uring_params``."""


def try_io_uring() -> OSError | None:
    """Create a ring, close it, and return the kernel's error, if any."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    ring = syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), ctypes.create_string_buffer(_PARAMETERS))
    if ring < 0:
        code = ctypes.get_errno()
        return OSError(code, os.strerror(code))
    os.close(ring)
    return None
