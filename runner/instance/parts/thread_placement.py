"""Putting QEMU's vCPU threads onto their CPUs, and reading every thread back from the kernel before the guest runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import PlacementError
from runner.base.values import define, frozen
from runner.facts.threads import ThreadStatus
from runner.kernel.child_processes import Process, Processes
from runner.kernel.procfs import Procfs
from runner.kernel.scheduler import pin, read_mask
from runner.placement.backends import Placement
from runner.placement.children import Role, role_of_child
from runner.placement.threads import ObservedThread, Receipt, ThreadRules, sentences
from runner.protocol.qmp import VcpuThread

if TYPE_CHECKING:
    from runner.instance.parts.cgroups.active import ActivePlacement

READINGS = 3
"""Consecutive readings of all threads, each of a few milliseconds; float's CPUs change once for a pod that starts or ends."""


@frozen
class QemuThreads:
    """QEMU's process, and its threads by role as QEMU reports them."""

    process: Process
    vcpus: Sequence[VcpuThread]
    iothreads: Collection[int] = ()
    """Their tids."""
    indices: Mapping[int, int] = attrs.field(init=False)
    """tid → index of the vCPU."""

    @indices.default
    def _indices(self) -> dict[int, int]:
        return {vcpu.tid: vcpu.index for vcpu in self.vcpus}

    def role(self, tid: int) -> tuple[Role, int | None]:
        """Return the role of QEMU's thread *tid*, and its index if it is a vCPU."""
        if (index := self.indices.get(tid)) is not None:
            return Role.VCPU, index
        return Role.IOTHREAD if tid in self.iothreads else Role.EMULATOR, None


def place_threads(
    processes: Processes, procfs: Procfs, active: ActivePlacement, placement: Placement, qemu: QemuThreads
) -> Receipt:
    """Give every vCPU thread its CPU, read every thread of the instance back from the kernel, and return the receipt.

    Raises :exc:`~runner.base.errors.PlacementError` when anything is not as *placement* wants it.
    """
    active.admit(qemu.process.pid)
    enter_places(active, placement, qemu.vcpus)
    return read_back(processes, procfs, active, placement, qemu)


def enter_places(
    active: ActivePlacement,
    placement: Placement,
    vcpus: Sequence[VcpuThread],
    first: int = 0,
    entered: list[int] | None = None,
) -> None:
    """Give every thread in float of *vcpus* its CPU, from the vCPU with the index *first* on; append their tids to *entered*.

    Raises :exc:`~runner.base.errors.HostError`, also if QEMU does not have one thread for each vCPU of *placement*.
    """
    pins = placement.pins
    if [vcpu.index for vcpu in vcpus] != list(range(len(pins))) or len({vcpu.tid for vcpu in vcpus}) != len(pins):
        raise PlacementError(
            f"cannot pin the vCPUs: QEMU has {len(vcpus)} vCPU threads for {len(pins)} CPUs '{placement.cpus}'"
        )
    # Confine first, pin second: a thread that enters a cgroup without the CPUs of its mask gets all of the cgroup's CPUs.
    for vcpu in vcpus[first:]:
        active.confine(vcpu.tid)
        if entered is not None:
            entered.append(vcpu.tid)
    for vcpu in vcpus[first:]:
        pin(vcpu.tid, CpuSet([pins[vcpu.index]]))


def read_back(
    processes: Processes, procfs: Procfs, active: ActivePlacement, placement: Placement, qemu: QemuThreads
) -> Receipt:
    """Read every thread of the instance from the kernel, and return the receipt.

    Raises :exc:`~runner.base.errors.PlacementError` when anything is not as *placement* wants it.
    """
    rules = ThreadRules(placement.cpus, placement.pins, placement.shared, active.cgroups)
    return verified(Receipt(placement.backend, rules, read_threads(processes, procfs, active, qemu)))


def verified(receipt: Receipt) -> Receipt:
    """Return *receipt*. Raises :exc:`~runner.base.errors.PlacementError` when a thread breaks the rules."""
    if violations := receipt.violations():
        raise PlacementError("cannot place the threads: " + "; ".join(sentences(violations)))
    return receipt


def read_threads(
    processes: Processes, procfs: Procfs, active: ActivePlacement, qemu: QemuThreads
) -> tuple[ObservedThread, ...]:
    """Return the current threads of this process and its children, as the kernel shows them.

    Float's CPUs change with the kubelet's shared pool: if they changed during the reading, the threads are read again.
    """
    readings = 0
    while True:
        before = read_mask()
        threads = tuple(_threads(processes, ThreadReader(procfs, active.members()), qemu))
        readings += 1
        if readings == READINGS or read_mask() == before:
            return threads


def _threads(processes: Processes, reader: ThreadReader, qemu: QemuThreads) -> Iterator[ObservedThread]:
    for thread in reader.threads(os.getpid()):
        yield ObservedThread(Role.RUNNER, None, thread)
    for process in processes:
        if process is qemu.process:
            for thread in reader.threads(process.pid):
                yield ObservedThread(*qemu.role(thread.tid), thread)
        else:
            role = role_of_child(process.role)
            for thread in reader.threads(process.pid):
                yield ObservedThread(role, None, thread)


@define
class ThreadReader:
    """Reads the threads of this container, most of them from the kernel's data about a whole cgroup.

    A thread's own files in /proc take the kernel and this process ten times as long as its line in ``cgroup.threads`` and
    ``sched_getaffinity(2)``, which have the same information. One thread of each group is read in full, for the group's path and the memory
    nodes, which the kernel sets alike for all threads of a cpuset (``cpuset_update_tasks_nodemask``).
    """

    procfs: Procfs
    groups: Sequence[frozenset[int]]
    """The threads of each cgroup; a thread that is in none of them is read in full."""
    _known: dict[int, ThreadStatus] = attrs.field(factory=dict, init=False)
    """Index of a group → its thread that was read in full."""

    def threads(self, pid: int) -> Iterator[ThreadStatus]:
        """Yield the current threads of *pid*; a thread that ends meanwhile is left out."""
        for tid in self.procfs.thread_ids(pid):
            if (thread := self._read(pid, tid)) is not None:
                yield thread

    def _read(self, pid: int, tid: int) -> ThreadStatus | None:
        group = next((index for index, members in enumerate(self.groups) if tid in members), None)
        if group is not None and (known := self._known.get(group)) is not None:
            return self._read_briefly(pid, tid, known)
        thread = self.procfs.thread(pid, tid)
        if group is not None and thread is not None:
            self._known[group] = thread
        return thread

    def _read_briefly(self, pid: int, tid: int, known: ThreadStatus) -> ThreadStatus | None:
        found = self.procfs.name_and_last_cpu(pid, tid)
        if found is None:
            return None
        try:
            cpus = read_mask(tid)
        except ProcessLookupError:
            return None
        name, last_cpu = found
        return ThreadStatus(pid, tid, name, known.cgroup, cpus, known.mems, last_cpu)
