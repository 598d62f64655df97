"""The back end ``delegated``: this process makes both cgroups, for vCPUs and for all other threads, in the container's own cgroup.

They separate the processes of the container from each other. Processes outside of it must be kept off its CPUs by other means.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, PlacementError
from runner.base.values import frozen
from runner.instance.parts.cgroups.entered import EnteredCgroups, InForce, adopted_fds
from runner.instance.parts.cgroups.float import entered_float
from runner.instance.parts.daemons import RestartedChild
from runner.instance.supervisor import Supervisor
from runner.kernel.cgroup import Cgroup
from runner.kernel.cgroup_fds import CgroupFds, open_cgroup_fds
from runner.placement.backends import DelegatedPlacement, Placement
from runner.placement.threads import CgroupPaths

EMPTY_WITHIN = 1.0
"""Seconds for the kernel to report a cgroup as empty after its last thread was reaped; measured: a millisecond."""


@frozen
class DelegatedCgroups(EnteredCgroups[DelegatedPlacement]):
    """Cgroups that this process made in the cgroup *scope*, the container's own."""

    scope: Cgroup = attrs.field(kw_only=True)

    def in_pod_cgroup(self) -> AbstractContextManager[None]:
        return nullcontext()  # a cgroup below the pod's is under its device filter

    def sealed(self) -> AbstractAsyncContextManager[str]:
        return nullcontext("placement 'delegated' has no controller, which makes partitions")

    async def settle(self) -> None:
        pass  # QEMU's kernel threads were created in float

    def container_cpus(self) -> CpuSet:
        return self.scope.effective_cpus()

    async def change(self, placement: Placement) -> None:
        await trio.lowlevel.checkpoint()
        assert isinstance(placement, DelegatedPlacement)  # noqa: S101 - a change of ours keeps the back end
        wanted = ((self.scope.child("float"), placement.float_cpus), (self.scope.child("instance"), placement.cpus))
        for cgroup, cpus in wanted:  # a CPU that moves is in neither for a moment, and never in both
            if kept := cgroup.cpus() & cpus:
                cgroup.set_cpus(kept)
        for cgroup, cpus in wanted:
            _give(cgroup, cpus)
        self.adopt(placement)

    async def follow(self, placement: Placement) -> None:
        await self.change(placement)


@asynccontextmanager
async def delegated_cgroups(
    supervisor: Supervisor, placement: DelegatedPlacement, anchors: Sequence[RestartedChild]
) -> AsyncIterator[DelegatedCgroups]:
    """Make the container's own cgroup the root of a threaded tree, and restore it at the end.

    The order matters: switching cpuset on while processes are in the cgroup succeeds either way, but an ordinary child
    made after it could never hold anything ("Threads" of cgroup-v2.rst).
    """
    held = supervisor.held
    pod = held.value("pod's cgroup", supervisor.procfs.cgroup)
    scope = Cgroup(supervisor.roots.cgroup).at(pod)
    before = held.value("controllers", scope.enabled)
    float_cgroup, instance = scope.child("float"), scope.child("instance")
    in_force = InForce(placement)
    held.keep(in_force, placement="placement")
    named = CgroupPaths(pod, float_cgroup.name, instance.name)
    try:
        held.value("cgroups made", lambda: _make(placement, scope, float_cgroup, instance))
        with held.block("cgroup descriptors", lambda: _opened(float_cgroup, instance, scope), adopted_fds) as fds:
            cgroups = EnteredCgroups(named, None, fds, in_force, held.value("vCPU threads", set[int]))
            async with entered_float(supervisor, anchors, cgroups) as entered:
                confined = entered.confined
                yield DelegatedCgroups(entered.cgroups, None, fds, in_force, confined, scope=scope)
    finally:
        with supervisor.faults.recorded("remove the cgroups"), trio.move_on_after(EMPTY_WITHIN + 1, shield=True):
            for cgroup in (instance, float_cgroup):
                await _remove(cgroup)
            if "cpuset" in scope.enabled() - before:
                scope.write("cgroup.subtree_control", "-cpuset")


def _make(placement: DelegatedPlacement, scope: Cgroup, float_cgroup: Cgroup, instance: Cgroup) -> None:
    for cgroup in (float_cgroup, instance):
        cgroup.create()
        cgroup.make_threaded()
    scope.enable(["cpuset"])
    for cgroup, cpus in ((float_cgroup, placement.float_cpus), (instance, placement.cpus)):
        _give(cgroup, cpus)


def _give(cgroup: Cgroup, cpus: CpuSet) -> None:
    effective = cgroup.set_cpus(cpus)
    if effective != cpus:
        raise PlacementError(f"cannot give {cgroup.path} the CPUs '{cpus}': the kernel lets it have '{effective}'")


@contextmanager
def _opened(float_cgroup: Cgroup, instance: Cgroup, pod: Cgroup) -> Iterator[CgroupFds]:
    with ExitStack() as stack:
        yield open_cgroup_fds(float_cgroup, instance, pod, stack)


async def _remove(cgroup: Cgroup) -> None:
    with trio.move_on_after(EMPTY_WITHIN):
        while not cgroup.remove():  # noqa: ASYNC110 - no event comes in time: cgroup.events is 14 ms late
            await trio.sleep(0.005)
    if cgroup.exists():
        threads = " ".join(map(str, sorted(cgroup.threads())))
        raise HostError(f"cannot remove {cgroup.path}: threads {threads} are still in it")
