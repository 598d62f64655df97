"""The back end ``affinity``: CPU masks alone, which need no rights and no cgroup v2.

It cannot keep other processes off the vCPUs' CPUs, and every start says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from runner.cpuset import CpuSet
from runner.instance.daemons import RestartedChild
from runner.instance.supervisor import Supervisor
from runner.kernel.scheduler import pin, read_mask
from runner.placement.backends import AffinityPlacement
from runner.values import frozen

if TYPE_CHECKING:
    from runner.instance.carried import CarriedMask


@frozen
class FloatMask:
    """Float without cgroups: there is nothing to move a thread into, and a child inherits the mask of this process."""

    cgroups: None = None
    memory_cgroup_fd: None = None
    pod_cgroup_fd: None = None

    def admit(self, pid: int) -> None:
        pass

    def confine(self, tid: int) -> None:
        pass

    def members(self) -> Sequence[frozenset[int]]:
        return ()

    def release(self, tid: int) -> None:
        pin(tid, read_mask())

    def in_pod_cgroup(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sealed(self) -> AbstractAsyncContextManager[str]:
        return nullcontext("placement 'affinity' has no cgroups")

    async def settle(self) -> None:
        pass


@contextmanager
def pinned_off_vcpus(
    supervisor: Supervisor, placement: AffinityPlacement, anchors: Sequence[RestartedChild]
) -> Iterator[FloatMask]:
    """Hold this process and the *anchors* on float's CPUs; at the end this process has its former mask."""
    with supervisor.carry_over.taking("cgroups") as carried:
        before = read_mask() if carried is None else carried.before
    supervisor.carry_over.offer("cgroups", lambda: _carried(before))
    try:
        if carried is None:
            pin(0, placement.float_cpus)
            for anchor in anchors:
                pin(anchor.process.pid, placement.float_cpus)
        yield FloatMask()
    finally:
        with supervisor.faults.recorded("take back this process's CPU mask"):
            pin(0, before)


def _carried(before: CpuSet) -> CarriedMask:
    from runner.instance.carried import CarriedMask

    return CarriedMask(before)
