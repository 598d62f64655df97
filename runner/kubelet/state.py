"""The states of the kubelet's CPU Manager and Memory Manager, as frozen values.

They are the types of ``pkg/kubelet/cm/{cpumanager,memorymanager}/state/state.go``. :mod:`runner.kubelet.state_files`
parses them from the kubelet's files; :mod:`~runner.node_plan.cpu_manager` and :mod:`~runner.node_plan.memory_manager` change
them. They have a module of their own so that the controller, which only reads them, does not import the managers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.kubelet.numa_masks import numa_nodes_of
from runner.kubelet.pod import Pod

CpuPolicy = Literal["static", "none"]
MemoryPolicy = Literal["Static", "None"]
T = TypeVar("T")


@frozen
class CpuState:
    """The state of the CPU Manager (``cpu_manager_state``); under policy ``none`` it is empty."""

    policy: CpuPolicy
    shared_pool: CpuSet
    """``defaultCpuSet``: the CPUs of all containers without exclusive CPUs."""
    assignments: Mapping[str, Mapping[str, CpuSet]] = attrs.field(factory=dict)
    """Pod UID → container → exclusive CPUs."""
    pod_assignments: Mapping[str, CpuSet] = attrs.field(factory=dict)
    """Pod UID → exclusive CPUs of the pod as a whole (gate ``PodLevelResourceManagers``), which its containers share."""
    unattributed: CpuSet = attrs.field(factory=CpuSet)
    """Exclusive CPUs of containers whose pod the file does not name (version 1)."""
    reusable: Mapping[str, CpuSet] = attrs.field(factory=dict)
    """Pod UID → CPUs of its init containers that its later containers may use again; not in the file."""

    def choices(self, pod_uid: str) -> tuple[CpuSet, ...]:
        """Return the exclusive CPU sets of pod *pod_uid* (of its containers and of the pod), without repetition, sorted."""
        found = {*self.assignments.get(pod_uid, {}).values(), self.pod_assignments.get(pod_uid, CpuSet())}
        return tuple(sorted((cpus for cpus in found if cpus), key=list))

    def assigned_to(self, pod_uid: str) -> CpuSet:
        """Return all exclusive CPUs of pod *pod_uid*."""
        return _union(self.choices(pod_uid))

    def assigned(self) -> Mapping[str, CpuSet]:
        """Return all exclusive CPUs by pod UID."""
        return {pod_uid: self.assigned_to(pod_uid) for pod_uid in sorted({*self.assignments, *self.pod_assignments})}

    def exclusive(self) -> CpuSet:
        """Return all exclusive CPUs, including those of unknown pods."""
        return _union([*self.assigned().values(), self.unattributed])


def without_pod(pod_uid: str, assignments: Mapping[str, T]) -> dict[str, T]:
    """Return *assignments* (by pod UID) without those of pod *pod_uid*."""
    return {pod: given for pod, given in assignments.items() if pod != pod_uid}


def _union(sets: Iterable[CpuSet]) -> CpuSet:
    return functools.reduce(CpuSet.__or__, sets, CpuSet())


@frozen
class MemoryTable:
    """One resource on one NUMA node, in bytes (``state.MemoryTable``); *allocatable* is the sum of *reserved* and *free*."""

    total: int
    system_reserved: int
    allocatable: int
    reserved: int
    free: int

    @classmethod
    def empty(cls, total: int, system_reserved: int, allocatable: int) -> MemoryTable:
        """Return the table of a NUMA node without pods."""
        return cls(total, system_reserved, allocatable, 0, allocatable)

    def moved(self, amount: int) -> MemoryTable:
        """Return the table with *amount* more reserved (less if negative)."""
        return attrs.evolve(self, reserved=self.reserved + amount, free=self.free - amount)


@frozen
class NumaMemory:
    """The memory of one NUMA node (``state.NUMANodeState``)."""

    assignments: int
    """The number of blocks that are booked on it."""
    tables: Mapping[str, MemoryTable]
    """By resource: ``memory`` and each ``hugepages-<size>``."""
    cells: tuple[int, ...]
    """The NUMA nodes of its group, including itself: while a container's memory spans several NUMA nodes, no other container's may span a
    different group of them."""


@frozen
class Block:
    """*size* bytes of *resource* booked on *numa_nodes* together (``state.Block``)."""

    numa_nodes: tuple[int, ...]
    resource: str
    size: int


@frozen
class MemoryState:
    """The state of the Memory Manager (``memory_manager_state``); under policy ``None`` it is empty."""

    policy: MemoryPolicy
    numa_nodes: Mapping[int, NumaMemory]
    assignments: Mapping[str, Mapping[str, tuple[Block, ...]]] = attrs.field(factory=dict)
    """Pod UID → container → its blocks."""
    pod_assignments: Mapping[str, tuple[Block, ...]] = attrs.field(factory=dict)
    """Pod UID → blocks of the pod as a whole (gate ``PodLevelResourceManagers``).

    Only these are booked for such a pod: the blocks of its containers are parts of them.
    """
    reusable: Mapping[str, Mapping[tuple[int, str], int]] = attrs.field(factory=dict)
    """UID of the pod that was admitted last → (mask, resource) → bytes that its init containers booked; not in the file."""

    def booked_for(self, pod_uid: str) -> Mapping[str, tuple[Block, ...]]:
        """Return the blocks of pod *pod_uid* by container; blocks of the whole pod have the empty name."""
        if pod_uid in self.pod_assignments:
            return {"": self.pod_assignments[pod_uid]}
        return self.assignments.get(pod_uid, {})

    def reusable_by(self, pod: Pod, resource: str) -> dict[int, int]:
        """Return the bytes of *resource* that *pod* may use again, by mask of NUMA nodes (``getPodReusableMemory``)."""
        places = self.reusable.get(pod.pod_uid, {})
        return {mask: amount for (mask, name), amount in places.items() if name == resource}

    def free(self, mask: int, resource: str) -> int:
        """Return the free bytes of *resource* on the NUMA nodes of *mask* together."""
        return sum(
            self.numa_nodes[each].tables[resource].free
            for each in numa_nodes_of(mask)
            if resource in self.numa_nodes[each].tables
        )
