"""The memory of a guest, its NUMA nodes, and the charge of its pod, as far as they can be read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.facts.roots import Roots
from runner.inspect.observation import (
    GuestMemory,
    PodCharge,
    Unknown,
)
from runner.kernel.cgroup import Cgroup
from runner.kernel.procfs import Procfs
from runner.placement.children import Role
from runner.placement.threads import (
    ObservedThread,
)

_GUEST_RAM = re.compile(r"/memfd:.*-ram[0-9]*\\040\(deleted\)", re.ASCII)
"""The file in memory that is the guest's RAM, as ``numa_maps`` writes it."""


def guest_memory(procfs: Procfs, qemu: int | None) -> GuestMemory | Unknown:
    """Return the NUMA nodes on which the RAM of *qemu*'s guest is, and those that it is bound to."""
    if qemu is None:
        return Unknown("there is no QEMU")
    try:
        mappings = procfs.mappings(qemu)
    except HostError as error:
        return Unknown(f"{explain(error)}; inspect on the node, as root")
    if mappings is None:
        return Unknown("QEMU has ended, or the kernel knows no NUMA nodes")
    small: Counter[int] = Counter()
    huge: Counter[int] = Counter()
    bound: set[int] = set()
    remote_bytes = 0
    for mapping in mappings:
        if not mapping.huge and not _GUEST_RAM.fullmatch(mapping.file):
            continue
        (huge if mapping.huge else small).update(mapping.resident)
        bound |= set(mapping.bound)
        remote_bytes += sum(
            size for node, size in mapping.resident.items() if mapping.bound and node not in mapping.bound
        )
    return GuestMemory(dict(small), dict(huge), CpuSet(bound), remote_bytes)


def pod_charge(roots: Roots, threads: Iterable[ObservedThread]) -> PodCharge | Unknown:
    """Return the memory charged to the pod's cgroup, which is the anchor's."""
    path = next((each.thread.cgroup for each in threads if each.role is Role.ANCHOR), "")
    if not path:
        return Unknown("the pod's cgroup is not known: there is no anchor, or no cgroup v2")
    try:
        return PodCharge(path, Cgroup(roots.cgroup).at(path).charge())
    except (HostError, ValueError) as error:
        return Unknown(f"the charge of the pod's cgroup '{path}' cannot be read: {explain(error)}")
