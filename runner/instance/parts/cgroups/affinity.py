"""The back end ``affinity``: CPU masks alone, which need no rights and no cgroup v2.

It cannot keep other processes off the vCPUs' CPUs, and every start says so.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import PlacementError
from runner.base.values import define
from runner.instance.parts.daemons import RestartedChild
from runner.instance.supervisor import Supervisor
from runner.kernel.scheduler import pin, read_mask
from runner.placement.backends import AffinityPlacement, Placement


@define
class FloatMask:
    """Float without cgroups: threads are not moved, and children inherit the mask of this process."""

    placement: AffinityPlacement
    _supervisor: Supervisor
    cgroups: None = None
    memory_cgroup_fd: None = None
    pod_cgroup_fd: None = None
    _confined: set[int] = attrs.field(factory=set)
    """The tids of the vCPU threads."""

    def admit(self, pid: int) -> None:
        pass

    def confine(self, tid: int) -> None:
        self._confined.add(tid)

    def forget(self, tid: int) -> None:
        self._confined.discard(tid)

    def members(self) -> Sequence[frozenset[int]]:
        return ()

    def release(self, tid: int) -> None:
        self._confined.discard(tid)
        pin(tid, read_mask())

    def container_cpus(self) -> CpuSet:
        # The CPUs at the start: the mask of this process at that time.
        return self.placement.cpus | self.placement.float_cpus

    @property
    def loses_cpus(self) -> bool:
        return False

    async def change(self, placement: Placement) -> None:
        await trio.lowlevel.checkpoint()
        assert isinstance(placement, AffinityPlacement)  # noqa: S101 - a change of ours keeps the back end
        if placement.float_cpus != self.placement.float_cpus:
            self._pin_float(placement.float_cpus)
        self.placement = placement

    async def follow(self, placement: Placement) -> None:
        await self.change(placement)

    def _pin_float(self, cpus: CpuSet) -> None:
        supervisor = self._supervisor
        for pid in (os.getpid(), *(process.pid for process in supervisor.processes)):
            for tid in set(supervisor.procfs.thread_ids(pid)) - self._confined:
                try:
                    pin(tid, cpus)
                except PlacementError as error:
                    if not isinstance(error.__cause__, ProcessLookupError):  # it has ended
                        raise

    def adopt(self, placement: Placement) -> None:
        assert isinstance(placement, AffinityPlacement)  # noqa: S101 - a change of ours keeps the back end
        self.placement = placement

    def in_pod_cgroup(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sealed(self) -> AbstractAsyncContextManager[str]:
        return nullcontext("placement 'affinity' has no cgroups")

    async def settle(self) -> None:
        pass


@asynccontextmanager
async def pinned_off_vcpus(
    supervisor: Supervisor, placement: AffinityPlacement, anchors: Sequence[RestartedChild]
) -> AsyncIterator[FloatMask]:
    """Hold this process and the *anchors* on float's CPUs; at the end this process has its former mask."""
    held = supervisor.held

    def enter() -> None:
        pin(0, placement.float_cpus)
        for anchor in anchors:
            pin(anchor.process.pid, placement.float_cpus)

    before = held.value("mask", read_mask)
    try:
        held.value("in float", enter)
        active = FloatMask(placement, supervisor, confined=held.value("vCPU threads", set[int]))
        held.keep(active, placement="placement")
        yield active
    finally:
        with supervisor.faults.recorded("take back this process's CPU mask"):
            pin(0, before)
