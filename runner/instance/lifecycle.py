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
from runner.host import files
from runner.host.processes import Process
from runner.host.sockets import CONTROL_SOCKET, listening
from runner.instance.console import console_shown
from runner.instance.display import display_shown
from runner.instance.host import Host, StopRequestedError, first_of
from runner.instance.machine import Ended, Machine, Wiring, agent_line, paused_machine, started_within
from runner.instance.memory import guest_memory
from runner.instance.networks import dhcp_served, networked
from runner.instance.placement import Receipt, confined
from runner.instance.receipts import RECEIPT, Receipts, machine_threads
from runner.instance.seats import Seat, placed
from runner.instance.services import anchored, death_of, first_dead, shared
from runner.plan.instance import InstancePlan, ShutdownPlan

log = logging.getLogger(__name__)

READY = "ready"
"""A file in the state directory, there while the guest runs."""

IMPORTED_AGAIN = 1.0
"""Seconds until the next attempt when descriptors or memory are short."""

CAUSE_WITHIN = 0.2
"""Seconds within which QEMU's death shows when a daemon has ended because of it."""


async def run_instance(plan: InstancePlan, host: Host, show: Callable[[bytes], None]) -> Ended:
    """Hold everything *plan* names for as long as the guest runs, and return how it ended.

    Raises :exc:`~runner.errors.RunnerError` when the start failed; whatever was acquired has been released then, and
    what could not be released is in ``host.faults``.
    """
    try:
        async with (
            _state(host, plan) as directory,
            anchored(host, plan.anchor) as anchors,
            placed(host, plan.placement, anchors) as seat,
            guest_memory(host, plan, seat) as ram,
            networked(host, plan.networks) as wires,
            dhcp_served(host, plan.dhcp),
            shared(host, plan.shares, directory) as shares,
            console_shown(host, plan.console, show, directory) as console,
            _devices_passed(host, plan),
            agent_line(plan.machine.guest) as agent,
            paused_machine(host, plan, Wiring(ram, wires, shares, console, agent), seat.birthplace) as machine,
            _receipted(host, plan, seat, machine) as receipts,
            display_shown(host, machine, directory, vnc=plan.machine.vnc),
            _controlled(host, plan, directory, machine, receipts),
        ):
            await started_within(plan.patience, lambda: host.unless_stopped(machine.resume))
            log.info("the guest runs")
            servants = [*shares.daemons, *(wire.daemon for wire in wires if wire.daemon is not None)]
            with _ready(host, plan.state_directory, receipts.read):
                why = await _wait_for_the_end(host, machine, servants)
            return await _powered_down(plan.shutdown, machine, why)
    except StopRequestedError:
        return Ended(Status.STOPPED, "asked to stop before the guest ran")


async def _wait_for_the_end(host: Host, machine: Machine, servants: Sequence[Process]) -> Ended:
    """Wait for the guest's end, a request to stop, or the death of what the guest needs, and return which it was."""

    async def asked() -> Ended:
        await host.stop.asked()
        return Ended(Status.STOPPED, "")

    async def lost() -> Ended:
        dead = await first_dead(servants)
        with trio.move_on_after(CAUSE_WITHIN):  # they end when QEMU does: then QEMU's death is the cause
            return await machine.ended()
        log.error("%s %s; the guest cannot live without it", dead.role, dead.how_it_ended())
        return Ended(death_of(dead.role).status, f"{dead.role} {dead.how_it_ended()}")

    return await first_of(machine.ended, asked, lost)


async def _powered_down(plan: ShutdownPlan, machine: Machine, ended: Ended) -> Ended:
    """Power the guest down unless it has *ended* by itself."""
    if ended.status is Status.STOPPED:
        return await machine.power_down(plan)
    if ended.status is Status.SERVICE_DIED:
        await machine.power_down(plan)
    return ended


@asynccontextmanager
async def _devices_passed(host: Host, plan: InstancePlan) -> AsyncIterator[None]:
    """Hold the promise that every device of the host's is as it was when QEMU has gone."""
    if not plan.machine.passing.devices:
        yield
        return
    from runner.instance.devices import devices_passed  # here, because few guests have devices of their own

    async with devices_passed(host, plan.machine.passing, plan.shutdown.devices_back):
        yield


@asynccontextmanager
async def _state(host: Host, plan: InstancePlan) -> AsyncIterator[int]:
    """Hold a descriptor of the state directory; it is removed at the end unless something is kept in it."""
    with files.directory(plan.state_directory) as directory:
        files.claim(directory, plan.state_directory)
        for name in (READY, RECEIPT):  # of one that was killed here
            files.discard(plan.state_directory / name)
        try:
            yield directory
        finally:
            with host.faults.recorded("remove the state directory"):
                files.remove_directory_if_empty(plan.state_directory)


@asynccontextmanager
async def _receipted(host: Host, plan: InstancePlan, seat: Seat, machine: Machine) -> AsyncIterator[Receipts]:
    """Hold the vCPUs confined to their CPUs, with the kernel's word for it in the state directory."""
    threads = await started_within(plan.patience, lambda: host.unless_stopped(partial(machine_threads, machine, plan)))
    receipts = Receipts(host, plan, machine, threads, seat, confined(host, seat, plan.placement, threads))
    for line in receipts.receipt.table():
        log.info("placement: %s", line)
    receipts.publish()
    try:
        async with host.observed(seat.settle):
            yield receipts
    finally:
        with host.faults.recorded("remove the receipt"):
            files.remove(plan.state_directory / RECEIPT)


@asynccontextmanager
async def _controlled(
    host: Host, plan: InstancePlan, directory: int, machine: Machine, receipts: Receipts
) -> AsyncIterator[None]:
    """Hold the control socket; what serves it is imported when somebody asks for the first time."""
    with listening(directory, CONTROL_SOCKET) as listener:

        async def serve() -> None:
            while True:
                await trio.lowlevel.wait_readable(listener)
                try:
                    from runner.instance.control import accept
                    from runner.instance.live import LiveDisks
                except (ImportError, OSError, MemoryError) as error:  # no reason to end a guest that runs
                    log.warning("the control socket cannot be served yet: %s", explain(error))
                    await trio.sleep(IMPORTED_AGAIN)
                else:
                    await accept(listener, LiveDisks(plan, machine.monitor, machine.disk_news, receipts.verify))

        async with host.observed(serve):
            yield


@contextmanager
def _ready(host: Host, directory: PurePosixPath, read: Callable[[], Receipt]) -> Iterator[None]:
    """Say to whoever asks that the guest runs and nobody wants it to end: by a file, and by the pages."""
    path = directory / READY

    def withdraw() -> None:
        with host.faults.recorded("remove the sign that the guest runs"):
            files.remove(path)

    with ExitStack() as held:
        try:
            files.publish(path, b"")
        except HostError as error:  # no reason to end a guest that runs
            log.warning("%s", explain(error))
        else:
            held.callback(withdraw)
        held.enter_context(host.standing.running(read))
        yield
