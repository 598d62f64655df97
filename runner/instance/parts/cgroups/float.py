"""Entering float, the cgroup of all threads but the vCPUs, and leaving it: what the back ends with cgroups share."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import attrs

from runner.base.errors import HostError, PlacementError
from runner.base.events import InstanceEvent
from runner.instance.parts.cgroups.entered import EnteredCgroups, P
from runner.instance.parts.cgroups.strays import processes_of_others, sweep
from runner.instance.parts.daemons import RestartedChild
from runner.instance.supervisor import Supervisor
from runner.kernel.cgroup import Cgroup
from runner.kernel.scheduler import read_mask, unpin
from runner.placement.backends import ControllerPlacement, DelegatedPlacement
from runner.placement.threads import CgroupPaths

log = logging.getLogger(__name__)

FROZEN_IN = {"do_freezer_trap", "get_signal"}
"""The kernel functions in which a process of a frozen cgroup waits (``kernel/signal.c``): the first is mostly inlined."""


@asynccontextmanager
async def entered_float(
    supervisor: Supervisor,
    anchors: Sequence[RestartedChild],
    active: EnteredCgroups[P],
) -> AsyncIterator[EnteredCgroups[P]]:
    """Hold this process in float; every process that is in float at the end is moved to the pod's cgroup.

    Its children start in float, except for the anchors: an anchor that is started again enters the pod's cgroup. *active* holds the paths
    of float and of the instance's cgroup below their common parent. Their full paths, relative to the cgroup namespace of this process, can
    only be read once it is inside.
    """
    named, command = active.cgroups, anchors[0].command

    def enter() -> CgroupPaths:
        active.admit(0)
        _lift_mask(supervisor, anchors)
        return _read_paths(supervisor, active.placement, named)

    try:
        active = attrs.evolve(active, cgroups=supervisor.held.value("cgroups", enter))
        for anchor in anchors:
            anchor.command = attrs.evolve(command, entering=active.pod_cgroup_fd)
        async with AsyncExitStack() as stack:
            if active.placement.sweep:
                sweeping = partial(sweep, supervisor.processes, supervisor.procfs, supervisor.counters, active)
                await stack.enter_async_context(supervisor.background_task(sweeping))
            yield active
    finally:
        for anchor in anchors:
            anchor.command = command
        if is_frozen(named.pod, supervisor, anchors):
            log.warning(InstanceEvent.CONTAINER_FROZEN, named.pod)
        else:
            _return_to_pod(supervisor, active, named)


def is_frozen(pod: str, supervisor: Supervisor, anchors: Sequence[RestartedChild]) -> bool:
    """Tell whether the container's cgroup at the path *pod* is frozen (``podman pause``): a process that enters it stops there.

    Processes in float are not frozen, and end there; the controller then removes the empty cgroups. A container without cgroupfs recognises
    it by the *anchors*, which are in that cgroup.
    """
    events = None
    with contextlib.suppress(HostError):
        events = Cgroup(supervisor.roots.cgroup).at(pod).read_if_there("cgroup.events")
    if events is not None:
        return "frozen 1" in events.splitlines()
    return any(supervisor.procfs.waits_in(anchor.process.pid) in FROZEN_IN for anchor in anchors)


def _return_to_pod(supervisor: Supervisor, active: EnteredCgroups[P], named: CgroupPaths) -> None:
    with supervisor.faults.recorded("return what else is in float to the pod's cgroup"):
        own = supervisor.procfs.cgroup()
        for pid in processes_of_others(supervisor.processes, supervisor.procfs):
            with contextlib.suppress(HostError):  # it has ended
                if supervisor.procfs.cgroup(pid) == own != named.pod:
                    active.return_to_pod(pid)
    with supervisor.faults.recorded("return to the pod's cgroup"):
        active.return_to_pod(0)


def _lift_mask(supervisor: Supervisor, anchors: Sequence[RestartedChild]) -> None:
    """Let this process and the *anchors*, and so all that it starts, run on all CPUs of their cgroups.

    Since Linux 6.2 a mask that the container runtime inherits from its unit (``CPUAffinity=``) applies in every cgroup (``user_cpus_ptr``):
    all QEMU threads but the vCPUs would be limited to float's CPUs within that mask.
    """
    unpin(0)
    for pid in (os.getpid(), *(anchor.process.pid for anchor in anchors)):
        for tid in supervisor.procfs.thread_ids(pid):
            with contextlib.suppress(PlacementError):  # it has ended
                unpin(tid)


def _read_paths(
    supervisor: Supervisor, placement: ControllerPlacement | DelegatedPlacement, named: CgroupPaths
) -> CgroupPaths:
    """Return the paths of the cgroups. Raises :exc:`~runner.base.errors.PlacementError` unless this process is in float."""
    own = supervisor.procfs.cgroup()
    taken = read_mask() & placement.cpus
    if not own.endswith(f"/{named.float_cgroup}") or (taken and not placement.shared):
        raise PlacementError(
            f"cannot enter {named.float_cgroup!r}: this process is in {own!r} and may run on '{taken}' of the vCPUs' CPUs"
        )
    log.info(InstanceEvent.FLOAT_ENTERED, own, read_mask())
    return CgroupPaths(named.pod, own, own.removesuffix(named.float_cgroup) + named.instance)
