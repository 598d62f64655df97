"""Watching the container's CPUs while the guest runs: the kubelet takes or replaces some of them (resize in place).

No event reports all of it. The kubelet first writes its state, from which the controller takes the CPUs from the instance's cgroup at once,
and up to 10 s later the container's ``cpuset.cpus``; while the controller is away, the file changes first. So both are read: the CPUs that
the vCPU threads may use, and that file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, PlacementError, RefusedError, RunnerError, Status, explain
from runner.base.events import InstanceEvent
from runner.base.values import frozen
from runner.instance.change.running_instance import RunningInstance
from runner.instance.change.vcpus import Vcpus, vcpus_of
from runner.instance.gate import Kind, LiveChange
from runner.instance.parts.cgroups.active import ActivePlacement
from runner.instance.parts.qemu import GuestEnd
from runner.kernel.hardware_reader import read_online
from runner.kernel.scheduler import pin, read_mask
from runner.placement.backends import ControllerPlacement, Placement

log = logging.getLogger(__name__)


@frozen
class LostCpus:
    """CPUs of vCPUs that the container no longer has."""

    cpus: CpuSet
    available: CpuSet
    """The CPUs that the container has."""
    sure: bool
    """Whether the container's own cgroup shows the loss; otherwise only the vCPU threads' masks do."""

    def __str__(self) -> str:
        return f"the container no longer has the CPUs '{self.cpus}' of some vCPUs; it has '{self.available}'"


async def keep_vcpus_on_container_cpus(running: RunningInstance) -> GuestEnd:
    """Put the vCPUs on the remaining CPUs, each time the container has lost some; return when that fails."""
    supervisor, vcpus = running.supervisor, vcpus_of(running)
    while True:
        await trio.sleep(supervisor.timeouts.cpus_looked)
        await running.machine.decided()
        _watch_offline(vcpus)
        if (lost := find_lost_cpus(vcpus)) is not None:
            supervisor.log_limit.log(log.warning, InstanceEvent.CPUS_LOST, lost)
            supervisor.guest_state.set_cpus_lost(str(lost))
            if lost.sure:
                vcpus.leave(lost.available)  # at once: a change in progress may take long
            change = supervisor.changes.begin(Kind.CPUS_LOST, str(lost))
        elif _unsettled(vcpus):
            change = supervisor.changes.begin(Kind.PLACEMENT, "the vCPUs are being put back on their CPUs")
        else:
            continue
        try:
            async with change as begun:
                if (end := await (_fit(vcpus, None) if lost is None else _make_room(vcpus, begun))) is not None:
                    return end
        except RefusedError:  # refused for a stop, which ends this task
            return await trio.sleep_forever()


async def _make_room(vcpus: Vcpus, change: LiveChange) -> GuestEnd | None:
    """Put the vCPUs on the remaining CPUs, or on their own if the container has them all again.

    Return ``None`` when they are there, and the guest's end if that is impossible.
    """
    state, timeouts = vcpus.supervisor.guest_state, vcpus.supervisor.timeouts
    since, before = change.since, find_lost_cpus(vcpus)
    while state.cpus_lost:
        if (lost := find_lost_cpus(vcpus)) is not None:
            if lost != before:
                since, before = trio.current_time(), lost
            change.what = str(lost)
            state.set_cpus_lost(change.what)
        sure = lost is None or lost.sure or trio.current_time() >= since + timeouts.displaced
        if sure and (end := await _fit(vcpus, lost)) is not None:
            return end
        if state.cpus_lost:
            await trio.sleep(timeouts.cpus_looked)
            _watch_offline(vcpus)
    return None


def _watch_offline(vcpus: Vcpus) -> None:
    """Log the vCPUs' CPUs that have gone offline, and those that are online again.

    The container still has them, so there is nothing to do: the kernel runs their vCPUs on the other CPUs of the instance's cgroup
    (``Documentation/core-api/cpu_hotplug.rst``), and on their own again once these are online.
    """
    state = vcpus.supervisor.guest_state
    offline = _offline(vcpus)
    if gone := offline - state.offline:
        log.warning(InstanceEvent.CPUS_OFFLINE, gone)
    if back := state.offline - offline:
        log.info(InstanceEvent.CPUS_ONLINE, back)
    state.set_offline(offline)


def _offline(vcpus: Vcpus) -> CpuSet:
    """Return the vCPUs' CPUs that are offline; the last known ones if the kernel's list cannot be read."""
    try:
        return CpuSet(vcpus.active.placement.pins) - read_online(vcpus.supervisor.roots.sys)
    except HostError:
        return vcpus.supervisor.guest_state.offline


def _unsettled(vcpus: Vcpus) -> bool:
    """Tell whether threads or cgroups differ from the placement in force, although the container has all vCPUs' CPUs.

    A thread may have ended, or have another mask: Linux before 6.2 gives all threads all CPUs of a cgroup whose CPUs have changed. CPUs
    without a vCPU may no longer belong to the instance.
    """
    placement = vcpus.active.placement
    placed = sum(len(mask) == 1 and placement.pins[vcpu] in mask for vcpu, mask in _masks(vcpus))
    return (
        bool(vcpus.supervisor.guest_state.cpus_lost)
        or placed != len(vcpus.threads)
        or vcpus.receipts.receipt.rules.pins != placement.pins
        or bool(_divided(placement) - _kept(vcpus.active))
    )


def _kept(active: ActivePlacement) -> CpuSet:
    """Return the container's CPUs, provided that it has all of the vCPUs' CPUs.

    The controller also takes CPUs without a vCPU; they are then in float, in which this process runs.
    """
    placement = active.placement
    kept = _named_by_container(active) or _divided(placement)
    if isinstance(placement, ControllerPlacement):
        kept -= read_mask()
    return kept | CpuSet(placement.pins)  # no effective cpuset lists an offline CPU


def _divided(placement: Placement) -> CpuSet:
    """Return the CPUs that *placement* divides among the vCPUs and, in some back ends, float."""
    return placement.cpus if isinstance(placement, ControllerPlacement) else placement.cpus | placement.float_cpus


async def _fit(vcpus: Vcpus, lost: LostCpus | None) -> GuestEnd | None:
    """Pin each vCPU to a CPU of its own, of those that remain if some are *lost*; return the guest's end if these are too few.

    All other threads are moved off the instance's CPUs.
    """
    supervisor = vcpus.supervisor

    def find() -> CpuSet | None:
        if (now := find_lost_cpus(vcpus)) is None:
            return _kept(vcpus.active) if _unsettled(vcpus) else None
        return None if lost is None else now.available

    try:
        await vcpus.fit(find)
    except RunnerError as error:
        if lost is None or not isinstance(error, RefusedError):
            # The next check tries again: the controller may be away, and until it is back the vCPUs share the allowed CPUs.
            supervisor.log_limit.log(log.warning, InstanceEvent.VCPUS_NOT_PLACED_ANEW, explain(error))
            return None
        if vcpus.machine.ends:
            await trio.sleep_forever()  # the guest's end follows
        if find_lost_cpus(vcpus) != lost:
            return None  # the container has other CPUs by now
        detail = f"{lost}: {explain(error)}"
        log.error(InstanceEvent.GUEST_WITHOUT_CPUS, detail)  # noqa: TRY400 - one line
        return GuestEnd(Status.CPUS_LOST, detail)
    supervisor.guest_state.set_cpus_lost("")
    return None


def find_lost_cpus(vcpus: Vcpus) -> LostCpus | None:
    """Return the vCPUs' CPUs that the container no longer has, ``None`` if it has all."""
    own, named = CpuSet(vcpus.active.placement.pins), _named_by_container(vcpus.active)
    shown = _shown_by_threads(vcpus, named)
    sure = bool(named) and not own <= named
    available = named if sure else shown
    if available is None:
        return None
    # An offline CPU still belongs to the container, although the kernel has moved its threads.
    lost = own - available - _offline(vcpus)
    return LostCpus(lost, available, sure) if lost else None


def _shown_by_threads(vcpus: Vcpus, named: CpuSet) -> CpuSet | None:
    """Return the CPUs of a thread that cannot run on its own CPU, which are all CPUs of its cgroup; ``None`` if each thread can.

    A thread that is not on its own CPU may merely have another mask, unless *named*, the CPUs that the container's cgroup lists, lacks its
    CPU. *named* is empty if that cgroup is not visible.
    """
    pins = vcpus.active.placement.pins
    for vcpu, mask in _masks(vcpus):
        taken = bool(named) and pins[vcpu] not in named
        if pins[vcpu] not in mask and (taken or not _may_have(vcpus, vcpu, pins[vcpu])):
            return mask
    return None


def _may_have(vcpus: Vcpus, vcpu: int, cpu: int) -> bool:
    """Pin the thread of a vCPU to its own CPU, and return whether the kernel allows it."""
    try:
        pin(vcpus.threads[vcpu].tid, CpuSet([cpu]))
    except PlacementError:
        return False
    return True


def _masks(vcpus: Vcpus) -> Iterator[tuple[int, CpuSet]]:
    """Yield each vCPU that has a CPU, with the CPUs that its thread may run on."""
    for vcpu in vcpus.threads[: len(vcpus.active.placement.pins)]:
        with contextlib.suppress(ProcessLookupError):  # it has been unplugged
            yield vcpu.index, read_mask(vcpu.tid)


def _named_by_container(active: ActivePlacement) -> CpuSet:
    """Return the CPUs listed by the container's cgroup; empty if it is not visible."""
    try:
        return active.container_cpus()
    except HostError:
        return CpuSet()
