"""The life of one instance: what is held, in which order, and how it ends.

The order of the lines in :func:`run_instance` is the order of the start, and read from below the order of the teardown.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import PurePosixPath

import trio

from runner.errors import HostError, Status, explain
from runner.instance.cgroups.active import ActivePlacement, entered_cgroups
from runner.instance.console import console_shown
from runner.instance.daemons import anchored, death_of, first_dead, shared
from runner.instance.display import display_shown
from runner.instance.memory import guest_memory
from runner.instance.network import dhcp_served, networked
from runner.instance.qemu import GuestEnd, Qemu, QemuEndpoints, guest_agent_channel, paused_qemu, started_within
from runner.instance.receipts import RECEIPT, Receipts, machine_threads
from runner.instance.supervisor import StopRequestedError, Supervisor, first_of
from runner.instance.thread_placement import Receipt, confined
from runner.kernel import files
from runner.kernel.processes import Process
from runner.kernel.sockets import CONTROL_SOCKET, listening
from runner.plan.instance import InstancePlan, ShutdownPlan

log = logging.getLogger(__name__)

READY = "ready"
"""A file in the state directory, there while the guest runs."""

IMPORTED_AGAIN = 1.0
"""Seconds until the next attempt when descriptors or memory are short."""

CAUSE_WITHIN = 0.2
"""Seconds within which QEMU's death shows when a daemon has ended because of it."""


async def run_instance(plan: InstancePlan, supervisor: Supervisor, show: Callable[[bytes], None]) -> GuestEnd:
    """Hold everything *plan* names for as long as the guest runs, and return how it ended.

    Raises :exc:`~runner.errors.RunnerError` when the start failed; whatever was acquired has been released then, and
    what could not be released is in ``supervisor.faults``.
    """
    try:
        async with (
            _state(supervisor, plan) as directory,
            anchored(supervisor, plan.anchor) as anchors,
            entered_cgroups(supervisor, plan.placement, anchors) as seat,
            guest_memory(supervisor, plan, seat) as ram,
            networked(supervisor, plan.networks) as wires,
            dhcp_served(supervisor, plan.dhcp),
            shared(supervisor, plan.shares, directory) as shares,
            console_shown(supervisor, plan.console, show, directory) as console,
            _devices_passed(supervisor, plan),
            guest_agent_channel(plan.machine.guest) as agent,
            paused_qemu(
                supervisor, plan, QemuEndpoints(ram, wires, shares, console, agent), seat.memory_cgroup_fd
            ) as machine,
            _receipted(supervisor, plan, seat, machine) as receipts,
            display_shown(supervisor, machine, directory, vnc=plan.machine.vnc),
            _controlled(supervisor, plan, directory, machine, receipts),
        ):
            await started_within(plan.start_timeout, lambda: supervisor.unless_stopped(machine.resume))
            log.info("the guest runs")
            servants = [*shares.daemons, *(wire.daemon for wire in wires if wire.daemon is not None)]
            with _ready(supervisor, plan.state_directory, receipts.read):
                why = await _wait_for_the_end(supervisor, machine, servants)
            return await _powered_down(plan.shutdown, machine, why)
    except StopRequestedError:
        return GuestEnd(Status.STOPPED, "asked to stop before the guest ran")


async def _wait_for_the_end(supervisor: Supervisor, machine: Qemu, servants: Sequence[Process]) -> GuestEnd:
    """Wait for the guest's end, a request to stop, or the death of what the guest needs, and return which it was."""

    async def asked() -> GuestEnd:
        await supervisor.stop.asked()
        return GuestEnd(Status.STOPPED, "")

    async def lost() -> GuestEnd:
        dead = await first_dead(servants)
        with trio.move_on_after(CAUSE_WITHIN):  # they end when QEMU does: then QEMU's death is the cause
            return await machine.ended()
        log.error("%s %s; the guest cannot live without it", dead.role, dead.how_it_ended())
        return GuestEnd(death_of(dead.role).status, f"{dead.role} {dead.how_it_ended()}")

    return await first_of(machine.ended, asked, lost)


async def _powered_down(plan: ShutdownPlan, machine: Qemu, ended: GuestEnd) -> GuestEnd:
    """Power the guest down unless it has *ended* by itself."""
    if ended.status is Status.STOPPED:
        return await machine.power_down(plan)
    if ended.status is Status.SERVICE_DIED:
        await machine.power_down(plan)
    return ended


@asynccontextmanager
async def _devices_passed(supervisor: Supervisor, plan: InstancePlan) -> AsyncIterator[None]:
    """Hold the promise that every device of the host's is as it was when QEMU has gone."""
    if not plan.machine.passthrough.devices:
        yield
        return
    from runner.instance.passthrough import devices_passed  # here, because few guests have devices of their own

    async with devices_passed(supervisor, plan.machine.passthrough, plan.shutdown.devices_back):
        yield


@asynccontextmanager
async def _state(supervisor: Supervisor, plan: InstancePlan) -> AsyncIterator[int]:
    """Hold a descriptor of the state directory; it is removed at the end unless something is kept in it."""
    with files.directory(plan.state_directory) as directory:
        files.claim(directory, plan.state_directory)
        for name in (READY, RECEIPT):  # of one that was killed here
            files.discard(plan.state_directory / name)
        try:
            yield directory
        finally:
            with supervisor.faults.recorded("remove the state directory"):
                files.remove_directory_if_empty(plan.state_directory)


@asynccontextmanager
async def _receipted(
    supervisor: Supervisor, plan: InstancePlan, seat: ActivePlacement, machine: Qemu
) -> AsyncIterator[Receipts]:
    """Hold the vCPUs confined to their CPUs, with the kernel's word for it in the state directory."""
    threads = await started_within(
        plan.start_timeout, lambda: supervisor.unless_stopped(partial(machine_threads, machine, plan))
    )
    receipts = Receipts(supervisor, plan, machine, threads, seat, confined(supervisor, seat, plan.placement, threads))
    for line in receipts.receipt.table():
        log.info("placement: %s", line)
    receipts.publish()
    try:
        async with supervisor.background_task(seat.settle):
            yield receipts
    finally:
        with supervisor.faults.recorded("remove the receipt"):
            files.remove(plan.state_directory / RECEIPT)


@asynccontextmanager
async def _controlled(
    supervisor: Supervisor, plan: InstancePlan, directory: int, machine: Qemu, receipts: Receipts
) -> AsyncIterator[None]:
    """Hold the control socket; what serves it is imported when somebody asks for the first time."""
    with listening(directory, CONTROL_SOCKET) as listener:

        async def serve() -> None:
            while True:
                await trio.lowlevel.wait_readable(listener)
                try:
                    from runner.instance.control.hotplug import DiskHotplug
                    from runner.instance.control.server import accept
                except (ImportError, OSError, MemoryError) as error:  # no reason to end a guest that runs
                    log.warning("the control socket cannot be served yet: %s", explain(error))
                    await trio.sleep(IMPORTED_AGAIN)
                else:
                    await accept(listener, DiskHotplug(plan, machine.monitor, machine.disk_events, receipts.verify))

        async with supervisor.background_task(serve):
            yield


@contextmanager
def _ready(supervisor: Supervisor, directory: PurePosixPath, read: Callable[[], Receipt]) -> Iterator[None]:
    """Say to whoever asks that the guest runs and nobody wants it to end: by a file, and by the pages."""
    path = directory / READY

    def withdraw() -> None:
        with supervisor.faults.recorded("remove the sign that the guest runs"):
            files.remove(path)

    with ExitStack() as held:
        try:
            files.publish(path, b"")
        except HostError as error:  # no reason to end a guest that runs
            log.warning("%s", explain(error))
        else:
            held.callback(withdraw)
        held.enter_context(supervisor.guest_state.running(read))
        yield
