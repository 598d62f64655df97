"""The kernel's calls for mounts of Linux 5.2, which have the same numbers on every machine but Alpha; glibc has functions since 2.36."""

from __future__ import annotations

import ctypes
import os

_FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK = 430, 431, 432, 433
_CLOEXEC = 1
"""``FSOPEN_CLOEXEC``, ``FSMOUNT_CLOEXEC`` and ``FSPICK_CLOEXEC``."""
SET_FLAG, CMD_CREATE, CMD_RECONFIGURE = 0, 6, 7
"""The commands of fsconfig (``include/uapi/linux/mount.h``)."""
_AT_FDCWD = -100


def open_file_system(name: str) -> int:
    """Return the context of a new file system of the kind *name*. Raises ``OSError``."""
    return _call(_FSOPEN, name.encode(), _CLOEXEC)


def pick_file_system(mount_point: str) -> int:
    """Return a context that changes the file system at *mount_point*. Raises ``OSError``."""
    return _call(_FSPICK, _AT_FDCWD, mount_point.encode(), _CLOEXEC)


def configure(context: int, command: int, key: str | None = None) -> None:
    """Carry out *command* on *context*, for the option *key* if it needs one. Raises ``OSError``."""
    _call(_FSCONFIG, context, command, None if key is None else key.encode(), None, 0)


def mount_detached(context: int) -> int:
    """Return a descriptor of a new mount of *context*, which has no mount point and ends with it. Raises ``OSError``."""
    return _call(_FSMOUNT, context, _CLOEXEC, 0)


def _call(number: int, *arguments: bytes | int | None) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    result: int = library.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
