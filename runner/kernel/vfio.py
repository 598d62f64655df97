"""The nodes of VFIO and of iommufd (``Documentation/driver-api/vfio.rst``, ``Documentation/userspace-api/iommufd.rst``)."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import PurePosixPath

from runner.base.errors import doing
from runner.facts.pci import DeviceNode


def probe_node(path: PurePosixPath) -> DeviceNode:
    """Open the node at *path* for a moment and return the result.

    Opening a group does nothing to its devices. A second opener is refused (EBUSY), whether the first one uses the group
    or iommufd (``vfio_group_fops_open``).
    """
    mode = 0
    reason: OSError | None = None
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a pure path
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        reason = error
    return DeviceNode(
        path,
        None if reason is None else reason.strerror,
        busy=reason is not None and reason.errno == errno.EBUSY,
        everyone=not (stat.S_IROTH | stat.S_IWOTH) & ~mode,
    )


def change_owner(path: PurePosixPath, user_id: int) -> int:
    """Let the user *user_id* own the node at *path*, and return the user who owned it before."""
    with doing(f"let user {user_id} own {str(path)!r}", remedy="it takes CAP_CHOWN"):
        owner = os.stat(path).st_uid  # noqa: PTH116 - a pure path
        os.chown(path, user_id, -1)
    return owner
