"""The life of one instance: the resources it holds, their order, and its end.

The lines of :func:`run_instance` are in the order of the start; the teardown goes through them from the last to the first.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import trio

from runner.base.errors import Status, explain
from runner.base.events import InstanceEvent
from runner.base.tasks import first_of
from runner.instance import optional_parts
from runner.instance.gate import Kind, StopRequestedError
from runner.instance.optional_parts import (
    bridged,
    devices_returned,
    display_shown,
    entered_cgroups,
    macvtaps_added,
    networked,
    running_instance,
    shared,
)
from runner.instance.parts.console import console_shown
from runner.instance.parts.daemons import RestartedChild, anchored, lost_daemon, refuse_dead
from runner.instance.parts.guest_memory import guest_memory
from runner.instance.parts.paused_qemu import OpenedFiles, QemuEndpoints, guest_agent_channel, opened_files, paused_qemu
from runner.instance.parts.qemu import GuestEnd, Qemu, started_within
from runner.instance.parts.state_directory import discard_leftovers
from runner.instance.supervisor import Supervisor, surviving
from runner.instance.watch.readiness import Readiness
from runner.kernel import files
from runner.kernel.sockets import CONTROL_SOCKET, QMP_SOCKET, Socket, listening
from runner.kernel.waiting import readable
from runner.placement.children import FATAL
from runner.plan.instance import InstancePlan, ShutdownPlan

if TYPE_CHECKING:
    from runner.instance.change.running_instance import RunningInstance
    from runner.instance.optional_parts import Serve
    from runner.instance.parts.cgroups.active import ActivePlacement
    from runner.placement.backends import Placement
    from runner.placement.threads import Receipt

log = logging.getLogger(__name__)

EnterCgroups = Callable[
    [Supervisor, "Placement", Sequence[RestartedChild]], AbstractAsyncContextManager["ActivePlacement"]
]
"""Holds a placement: :func:`~runner.instance.optional_parts.entered_cgroups`."""

IMPORTED_AGAIN = 1.0
"""Seconds until the next attempt when descriptors or memory are short."""


async def run_instance(
    plan: InstancePlan,
    supervisor: Supervisor,
    show: Callable[[bytes], None],
    count_from: Callable[[Receipt], None],
    enter: EnterCgroups = entered_cgroups,
) -> GuestEnd:
    """Hold everything that *plan* names for as long as the guest runs, and return how it ended.

    *show* is called with the guest's output, *count_from* with the places of its threads, first while it does not run yet;
    *enter* holds its placement.

    Raises :exc:`~runner.base.errors.RunnerError` when the start failed; everything acquired has then been released, and failed releases are
    in ``supervisor.faults``.
    """
    readiness = Readiness(supervisor, plan)

    def watch_and_show(data: bytes) -> None:
        readiness.console.feed(data)
        if plan.console.stdout:
            show(data)

    try:
        async with (
            _state(supervisor, plan) as directory,
            anchored(supervisor, plan.anchor) as anchors,
            _opened(supervisor, plan) as opened,
            enter(supervisor, plan.placement, anchors) as active,
            guest_memory(supervisor, plan, active.pod_cgroup_fd) as ram,
            macvtaps_added(supervisor, plan) as macvtaps,
            networked(supervisor, plan, macvtaps, active.in_pod_cgroup) as nic_backends,
            bridged(supervisor, plan),
            shared(supervisor, plan, directory) as shares,
            console_shown(supervisor, plan.console, watch_and_show, directory) as console,
            devices_returned(supervisor, plan, active.in_pod_cgroup),
            guest_agent_channel(supervisor, plan.machine.guest) as agent,
            paused_qemu(
                supervisor,
                plan,
                QemuEndpoints(opened, ram, nic_backends, shares, console, agent),
                active.memory_cgroup_fd,
                running_instance,
                readiness.observe,
            ) as machine,
            running_instance()(supervisor, plan, active, machine, count_from) as running,  # imported while QEMU started
            display_shown(supervisor, plan, machine, directory),
            _controlled(running, directory),
        ):
            return await _run_guest(running, readiness)
    except StopRequestedError:
        return GuestEnd(Status.STOPPED, "asked to stop before the guest ran")


async def _run_guest(running: RunningInstance, readiness: Readiness) -> GuestEnd:
    """Let the guest run until it ends or is powered down, and return how it ended."""
    supervisor, machine, receipts = running.supervisor, running.machine, running.receipts

    async def begin() -> None:
        refuse_dead(supervisor)
        await started_within(supervisor, running.plan.start_timeout, machine.resume)
        log.info(InstanceEvent.GUEST_STARTED)

    await supervisor.held.once("guest runs", begin)
    with supervisor.renewal.outliving_the_loop(partial(optional_parts.resume_after_loop, supervisor)):
        async with readiness.kept(machine, receipts.read, receipts.busiest_vcpu):
            resume_after_fault = partial(optional_parts.resume_after_fault, supervisor)
            with supervisor.renewal.possible(resume_after_fault, running.unfinished):
                async with optional_parts.guest_verified(running):
                    wait = partial(_wait_for_the_end, running)
                    ended = await surviving(supervisor.renewal, supervisor.faults, supervisor.stop, wait)
        ended = ended or GuestEnd(Status.STOPPED, "")  # after a bug that is not survived, which has asked to stop
        over = trio.current_time()
        why = f"the instance ends: {ended.detail}" if ended.detail else supervisor.stop.clause
        async with supervisor.changes.begin(Kind.STOP, why):
            await supervisor.changes.answered()
            return await _powered_down(running.plan.shutdown, machine, ended, over)


async def _wait_for_the_end(running: RunningInstance) -> GuestEnd:
    """Wait for the guest's end, a request to stop, the death of a connected daemon or lost CPUs; return which of them happened."""
    supervisor, machine = running.supervisor, running.machine

    async def asked() -> GuestEnd:
        await supervisor.stop.asked()
        return GuestEnd(Status.STOPPED, "")

    async def lost() -> GuestEnd:
        dead = await lost_daemon(supervisor)
        with trio.move_on_after(supervisor.timeouts.cause):  # they end when QEMU does: then QEMU's death is the cause
            return await machine.ended()
        why = dead.why_it_ended()
        log.error(InstanceEvent.CHILD_LOST, dead.role, why)
        return GuestEnd(FATAL[dead.role], f"{dead.role} {why}")

    return await first_of(machine.ended, asked, lost, partial(optional_parts.cpus_lost, running))


async def _powered_down(plan: ShutdownPlan, machine: Qemu, ended: GuestEnd, over: float) -> GuestEnd:
    """Power the guest down unless it has *ended* by itself; its share of the grace period begins at *over*, on trio's clock."""
    if ended.status is Status.STOPPED:
        return await machine.power_down(plan, over)
    if ended.status in {Status.SERVICE_DIED, Status.CPUS_LOST}:
        await machine.power_down(plan, over)
    return ended


@asynccontextmanager
async def _opened(supervisor: Supervisor, plan: InstancePlan) -> AsyncIterator[OpenedFiles]:
    """Hold the files and devices of :func:`opened_files`; none if QEMU has them already."""
    nothing = OpenedFiles({}, {}, None, ExitStack())
    with supervisor.held.passed_on(lambda: opened_files(plan), nothing) as opened:
        yield opened


@asynccontextmanager
async def _state(supervisor: Supervisor, plan: InstancePlan) -> AsyncIterator[int]:
    """Hold a descriptor of the state directory; it is removed at the end unless something is kept in it."""
    # Claimed for as long as it is open, also by another program: the lock belongs to the open file description.
    with supervisor.held.fd("state directory", lambda: _claimed(plan.state_directory)) as directory:
        try:
            yield directory
        finally:
            with supervisor.faults.recorded("remove the state directory"):
                files.remove_directory_if_empty(plan.state_directory)


@contextmanager
def _claimed(path: PurePosixPath) -> Iterator[int]:
    with files.directory(path) as directory:
        files.claim(directory, path)
        discard_leftovers(directory, path)
        yield directory


@asynccontextmanager
async def _controlled(running: RunningInstance, directory: int) -> AsyncIterator[None]:
    """Hold the control socket and the operators' QMP socket; what serves each is imported at its first connection."""
    supervisor = running.supervisor
    recorded, held = supervisor.faults.recorded, supervisor.held
    with (
        listening(directory, CONTROL_SOCKET, recorded, held.socket) as control,
        listening(directory, QMP_SOCKET, recorded, held.socket) as qmp,
    ):
        control_server = partial(optional_parts.control_server, running)
        qmp_server = partial(optional_parts.qmp_server, running.machine)
        async with (
            supervisor.background_task(partial(_served, control, control_server)),
            supervisor.background_task(partial(_served, qmp, qmp_server)),
        ):
            yield


async def _served(listener: Socket, load: Callable[[], Serve]) -> None:
    """Serve the clients that connect to *listener*, until cancelled, with the module that *load* imports at the first connection."""
    while True:
        await readable(listener)
        try:
            serve = load()
        except (ImportError, OSError, MemoryError) as error:  # no reason to end a running guest
            log.warning(InstanceEvent.CONTROL_SOCKET_DELAYED, explain(error))
            await trio.sleep(IMPORTED_AGAIN)
        else:
            await serve(listener)
