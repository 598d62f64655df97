"""The mount points of the kernel's file systems, and the directory of the container's files about its devices."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Self

from runner.base.values import frozen

CONTROLLER_CGROUP = PurePosixPath("/sys/fs/cgroup/stelia")
"""The cgroup of the node's controller, by default."""
CONTROLLER_SOCKET = PurePosixPath("/run/instance-cgroup-controller/controller.sock")
"""Its socket, by default."""
KUBELET_DIRECTORY = PurePosixPath("/var/lib/kubelet")
"""The kubelet's ``--root-dir``, by default."""


@frozen
class Roots:
    """The mount points of one machine; other roots than the defaults read another machine's or a recorded tree."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    cgroup: Path = Path("/sys/fs/cgroup")
    """The mount point of cgroup version 2."""
    claims: Path = Path("/var/run/kubernetes.io/dra-device-attributes")
    """The directory with the files about the devices of resource claims (KEP-5304, ``ContainerDir``)."""

    @classmethod
    def below(cls, root: Path) -> Self:
        """Return the mount points of the machine whose root directory is *root*."""
        return cls(
            root / "proc",
            root / "sys",
            root / "dev",
            root / "sys/fs/cgroup",
            root / "var/run/kubernetes.io/dra-device-attributes",
        )
