"""The mounts of cgroups, and the options of version 2, which all its mounts share (``Documentation/admin-guide/cgroup-v2.rst``).

Each mount of cgroup2 in the first cgroup namespace gives all of them its own options (``apply_cgroup_root_flags`` of
``kernel/cgroup/cgroup.c``). A container runtime that makes one for a privileged container so takes away what systemd has set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.mount_api import CMD_RECONFIGURE, SET_FLAG, configure, pick_file_system
from runner.kernel.mounts import read_mounts

NSDELEGATE = "nsdelegate"
"""The option that makes a cgroup namespace a border: its processes move none across it, and do not write the limits of its root."""


@frozen
class CgroupMounts:
    """The mount points of cgroups."""

    unified: str | None
    """The mount point of version 2."""
    legacy: Mapping[str, str]
    """Controller of version 1 → its mount point."""
    options: tuple[str, ...] = ()
    """The options of version 2 besides ``rw`` and ``ro``."""

    @property
    def delegates(self) -> bool:
        """Return whether version 2 is mounted with ``nsdelegate``."""
        return NSDELEGATE in self.options


def read_cgroup_mounts(proc: Path) -> CgroupMounts:
    """Return the mount points of cgroups in this process's mount namespace; none if its mounts cannot be read."""
    unified, legacy = None, {}
    options: tuple[str, ...] = ()
    with suppress(HostError):
        for mount in read_mounts(proc):
            named = tuple(word for word in mount.options if word not in {"rw", "ro"})
            if mount.kind == "cgroup2":
                unified, options = unified or str(mount.point), named
            elif mount.kind == "cgroup":
                legacy.update(dict.fromkeys(named, str(mount.point)))
    return CgroupMounts(unified, legacy, options)


def set_options(mount_point: str, options: tuple[str, ...]) -> None:
    """Give version 2, mounted at *mount_point*, exactly *options*.

    The caller needs CAP_SYS_ADMIN. From another cgroup namespace than the first, the kernel changes nothing and reports no error. Raises
    ``OSError``.
    """
    context = pick_file_system(mount_point)
    try:
        for option in options:
            configure(context, SET_FLAG, option)
        configure(context, CMD_RECONFIGURE)
    finally:
        os.close(context)
