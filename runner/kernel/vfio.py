"""The nodes of VFIO and of iommufd (``Documentation/driver-api/vfio.rst``, ``Documentation/userspace-api/iommufd.rst``)."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import PurePosixPath

import attrs

from runner.errors import HostError


@attrs.frozen
class Node:
    """What was found at *path*: *reason* is why it does not open, *busy* that this is because somebody else has it open."""

    path: PurePosixPath
    error: str | None
    busy: bool
    everyone: bool


def look_at_node(path: PurePosixPath) -> Node:
    """Open the node at *path* for a moment.

    Opening a group does nothing to its devices, and a second opener is refused (EBUSY), whichever way the first one took
    (``vfio_group_fops_open``).
    """
    mode = 0
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a pure path
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Node(path, error.strerror, error.errno == errno.EBUSY, _admits_everyone(mode))
    return Node(path, None, busy=False, everyone=_admits_everyone(mode))


def _admits_everyone(mode: int) -> bool:
    wanted = stat.S_IROTH | stat.S_IWOTH
    return mode & wanted == wanted


def give(path: PurePosixPath, uid: int) -> int:
    """Let the user *uid* own the node at *path*, and return who owned it."""
    try:
        owner = os.stat(path).st_uid  # noqa: PTH116 - a pure path
        os.chown(path, uid, -1)
    except OSError as error:
        raise HostError(f"cannot let user {uid} own {str(path)!r}; it takes CAP_CHOWN") from error
    return owner
