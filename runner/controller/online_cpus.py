"""What this machine has, as far as cpusets care: read anew each time, because CPUs come and go."""

from __future__ import annotations

from pathlib import Path

import attrs

from runner.cpuset import CpuSet
from runner.errors import HostError


@attrs.frozen
class OnlineCpus:
    """The CPUs and memory nodes of the machine."""

    present: CpuSet
    """CPUs that are plugged in; a cpuset may name them whether they are online or not."""
    online: CpuSet
    """CPUs that run something now."""
    memory_nodes: CpuSet
    """NUMA nodes that have memory."""


def read_online_cpus(sys: Path) -> OnlineCpus:
    """Read the machine from sysfs mounted at *sys* (``Documentation/ABI/stable/sysfs-devices-{system-cpu,node}``).

    A kernel without NUMA has one node, 0. Raises :class:`HostError`.
    """
    cpus = sys / "devices" / "system" / "cpu"
    nodes = sys / "devices" / "system" / "node" / "has_memory"
    try:
        return OnlineCpus(
            present=CpuSet.parse((cpus / "present").read_text()),
            online=CpuSet.parse((cpus / "online").read_text()),
            memory_nodes=CpuSet.parse(nodes.read_text()) if nodes.exists() else CpuSet([0]),
        )
    except (OSError, ValueError) as error:
        raise HostError(f"cannot read the machine's CPUs and memory nodes from {sys}") from error
