"""The life of one instance: what is held, in which order, and how it ends.

The order of the lines in :func:`run_instance` is the order of the start, and upside down that of the teardown.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from importlib import import_module
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import trio

from runner.base.errors import Status, explain
from runner.base.events import InstanceEvent
from runner.base.tasks import first_of
from runner.instance.change.gate import Kind, StopRequestedError
from runner.instance.parts.cgroups.active import ActivePlacement, entered_cgroups
from runner.instance.parts.console import console_shown
from runner.instance.parts.daemons import anchored, first_dead, refuse_dead, shared
from runner.instance.parts.display import display_shown
from runner.instance.parts.memory import guest_memory
from runner.instance.parts.qemu import (
    GuestEnd,
    OpenedFiles,
    Qemu,
    QemuEndpoints,
    guest_agent_channel,
    opened_files,
    paused_qemu,
    started_within,
)
from runner.instance.parts.state_directory import RECEIPT, discard_leftovers
from runner.instance.supervisor import Renewal, Supervisor
from runner.instance.watch.readiness import Readiness
from runner.kernel import files
from runner.kernel.processes import Process
from runner.kernel.sockets import CONTROL_SOCKET, QMP_SOCKET, Socket, listening
from runner.kernel.waiting import readable
from runner.placement.children import FATAL
from runner.plan.instance import InstancePlan, ShutdownPlan

if TYPE_CHECKING:
    from runner.instance.change.hotplug import AttachedDisk, DiskHotplug  # imported at the first request
    from runner.instance.parts.network import NicBackend
    from runner.instance.watch.receipts import Receipts

log = logging.getLogger(__name__)

Serve = Callable[[Socket], Awaitable[None]]
"""Serves the clients of a listening socket until cancelled."""

IMPORTED_AGAIN = 1.0
"""Seconds until the next attempt when descriptors or memory are short."""


async def run_instance(plan: InstancePlan, supervisor: Supervisor, show: Callable[[bytes], None]) -> GuestEnd:
    """Hold everything that *plan* names for as long as the guest runs, and return how it ended.

    Raises :exc:`~runner.base.errors.RunnerError` when the start failed; everything that was acquired has been released then,
    and what could not be released is in ``supervisor.faults``.
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
            entered_cgroups(supervisor, plan.placement, anchors) as active,
            guest_memory(supervisor, plan, active.pod_cgroup_fd) as ram,
            _networked(supervisor, plan, active.in_pod_cgroup) as nic_backends,
            shared(supervisor, plan.shares, directory) as shares,
            console_shown(supervisor, plan.console, watch_and_show, directory) as console,
            _passthrough_held(supervisor, plan, active.in_pod_cgroup),
            guest_agent_channel(supervisor, plan.machine.guest) as agent,
            paused_qemu(
                supervisor,
                plan,
                QemuEndpoints(opened, ram, nic_backends, shares, console, agent),
                active.memory_cgroup_fd,
                _import_next_steps,
            ) as machine,
            _placed_threads(supervisor, plan, active, machine) as receipts,
            display_shown(supervisor, machine, directory, vnc=plan.machine.vnc),
            _controlled(supervisor, directory, receipts),
        ):
            passts = [nic.daemon for nic in nic_backends if nic.daemon is not None]

            def daemons() -> Sequence[Process]:
                return [*(share.process for share in shares.daemons), *passts]

            async def begin() -> None:
                refuse_dead(daemons())
                await started_within(supervisor, plan.start_timeout, machine.resume)
                log.info(InstanceEvent.GUEST_STARTED)

            await supervisor.held.once("guest runs", begin)
            with supervisor.renewal.outliving_the_loop(partial(_resume_after_loop, supervisor)):
                async with readiness.kept(machine, receipts.read, receipts.busiest_vcpu):
                    unfinished = partial(_unfinished, machine, receipts)
                    with supervisor.renewal.possible(partial(_resume_after_fault, supervisor), unfinished):
                        ended = await _ended(supervisor, machine, daemons, receipts)
                over = trio.current_time()
                async with supervisor.changes.begin(Kind.STOP, f"the instance ends: {ended.detail}"):
                    await supervisor.changes.answered()
                    return await _powered_down(plan.shutdown, machine, ended, over)
    except StopRequestedError:
        return GuestEnd(Status.STOPPED, "asked to stop before the guest ran")


async def _ended(
    supervisor: Supervisor,
    machine: Qemu,
    daemons: Callable[[], Sequence[Process]],
    receipts: Receipts,
) -> GuestEnd:
    """Wait for the end, and where a fault of this program cannot be survived, have the guest power down."""
    ended = GuestEnd(Status.STOPPED, "")

    async def wait() -> None:
        nonlocal ended
        ended = await _wait_for_the_end(supervisor, machine, daemons, partial(_cpus_lost, receipts))

    async with AsyncExitStack() as held:
        if supervisor.held.resuming:
            from runner.instance.renewal.after import verify_guest  # here, because few runners are renewed

            await held.enter_async_context(supervisor.background_task(partial(verify_guest, machine, receipts)))
        await supervisor.surviving(wait)
    return ended


def _unfinished(machine: Qemu, receipts: Receipts) -> str:
    """Return what a program that renews this one could not go on with, empty if nothing."""
    return machine.unfinished or receipts.misplaced()


async def _resume_after_fault(supervisor: Supervisor, error: Exception) -> None:
    from runner.instance.renewal.upgrade import resume_after_fault  # here, because nothing else needs it

    await resume_after_fault(supervisor, error)


def _resume_after_loop(supervisor: Supervisor, error: Exception) -> Renewal | tuple[str, ...]:
    from runner.instance.renewal.after_loop import resume_after_loop  # here, because nothing else needs it

    return resume_after_loop(supervisor, error)


async def _wait_for_the_end(
    supervisor: Supervisor,
    machine: Qemu,
    daemons: Callable[[], Sequence[Process]],
    cpus_lost: Callable[[], Awaitable[GuestEnd]],
) -> GuestEnd:
    """Wait for the guest's end, a request to stop, the death of one of the *daemons* or lost CPUs; return which it was."""

    async def asked() -> GuestEnd:
        await supervisor.stop.asked()
        return GuestEnd(Status.STOPPED, "")

    async def lost() -> GuestEnd:
        while True:
            dead = await first_dead(daemons())
            await machine.decided()
            if dead in daemons():  # else it has ended with the QEMU that it served
                break
        with trio.move_on_after(supervisor.timeouts.cause):  # they end when QEMU does: then QEMU's death is the cause
            return await machine.ended()
        why = dead.why_it_ended()
        log.error(InstanceEvent.CHILD_LOST, dead.role, why)
        return GuestEnd(FATAL[dead.role], f"{dead.role} {why}")

    return await first_of(machine.ended, asked, lost, cpus_lost)


async def _cpus_lost(receipts: Receipts) -> GuestEnd:
    """Follow the CPUs of the container; return when the guest cannot run on those that are left."""
    if not receipts.active.loses_cpus:
        await trio.sleep_forever()
    # Here, because not every placement loses any.
    from runner.instance.parts.vcpus import Vcpus
    from runner.instance.watch.cpu_watch import lost_cpus_left

    return await lost_cpus_left(receipts, Vcpus(receipts))


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
    with supervisor.held.passed_on(lambda: opened_files(plan.machine, plan.state_directory), nothing) as opened:
        yield opened


@asynccontextmanager
async def _networked(
    supervisor: Supervisor, plan: InstancePlan, in_pod_cgroup: Callable[[], AbstractContextManager[None]]
) -> AsyncIterator[tuple[NicBackend, ...]]:
    """Hold every network of the guest, and a dnsmasq on each that has one; device nodes are made *in_pod_cgroup*."""
    if not plan.networks:
        yield ()
        return
    from runner.instance.parts.network import dhcp_served, networked  # here, because some guests have no network

    async with (
        networked(supervisor, plan.networks, in_pod_cgroup) as nic_backends,
        dhcp_served(supervisor, plan.dhcp),
    ):
        yield nic_backends


@asynccontextmanager
async def _passthrough_held(
    supervisor: Supervisor, plan: InstancePlan, in_pod_cgroup: Callable[[], AbstractContextManager[None]]
) -> AsyncIterator[None]:
    """Hold the host's PCI devices that the guest gets; at the end, wait until each is as it was before."""
    if not plan.machine.passthrough.devices:
        yield
        return
    from runner.instance.parts.passthrough import devices_returned  # here, because few guests have devices of their own

    async with devices_returned(supervisor, plan.machine.passthrough, plan.shutdown.devices_back, in_pod_cgroup):
        yield


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


def _import_next_steps() -> None:
    """Import what :func:`_placed_threads` needs."""
    import_module("runner.instance.watch.receipts")


@asynccontextmanager
async def _placed_threads(
    supervisor: Supervisor, plan: InstancePlan, active: ActivePlacement, machine: Qemu
) -> AsyncIterator[Receipts]:
    """Hold the vCPU threads on their CPUs, and the receipt that proves it in the state directory."""
    # Here, because it was imported while QEMU started.
    from runner.instance.parts.thread_placement import QemuThreads, place_threads
    from runner.instance.watch.receipts import PlacedThreads, Receipts, query_threads

    async def place() -> Receipts:
        threads = await started_within(supervisor, plan.start_timeout, partial(query_threads, machine, plan))
        receipt = place_threads(supervisor.processes, supervisor.procfs, active, plan.placement, threads)
        if supervisor.guest_state.placed is not None:
            supervisor.guest_state.placed(receipt)
        return Receipts(supervisor, plan, machine, threads, active, receipt)

    def adopt(found: PlacedThreads) -> Receipts:
        threads = QemuThreads(machine.process, found.vcpus, found.iothreads)
        return Receipts(supervisor, plan, machine, threads, active, found.receipt, found.unplugged)

    receipts = await supervisor.held.once("threads", place, lambda: receipts.placed(), adopt)  # noqa: PLW0108 - made here
    supervisor.held.before_commit(receipts.reread)
    async with (
        _sealed_cpus(supervisor, active, receipts),
        supervisor.background_task(active.settle),
        supervisor.background_task(receipts.follow_restarts),
    ):
        yield receipts


@asynccontextmanager
async def _sealed_cpus(supervisor: Supervisor, active: ActivePlacement, receipts: Receipts) -> AsyncIterator[None]:
    """Hold all others off the vCPUs' CPUs as far as this host can, and the receipt that says so."""
    async with active.sealed() as reason:
        supervisor.held.value("placement confirmed", lambda: receipts.confirm(reason))
        try:
            yield
        finally:
            with supervisor.faults.recorded("remove the receipt"):
                files.remove(receipts.plan.state_directory / RECEIPT)


@asynccontextmanager
async def _controlled(supervisor: Supervisor, directory: int, receipts: Receipts) -> AsyncIterator[None]:
    """Hold the control socket and the operators' QMP socket; what serves each is imported at its first connection."""
    recorded = supervisor.faults.recorded
    plan, active, machine = receipts.plan, receipts.active, receipts.machine
    hotplug: DiskHotplug | None = None

    def control_server() -> Serve:
        nonlocal hotplug
        from runner.instance.change.hotplug import DiskHotplug
        from runner.instance.control.server import accept
        from runner.instance.control.status import StatusReader
        from runner.instance.parts.vcpus import Vcpus

        hotplug = DiskHotplug(plan, machine, supervisor.changes, receipts.verify, active.in_pod_cgroup, attached)
        status = StatusReader(supervisor, plan, machine, receipts, hotplug, Vcpus(receipts))
        return lambda listener: accept(listener, status)

    def qmp_server() -> Serve:
        from runner.instance.control.qmp import accept

        return lambda listener: accept(listener, lambda: machine.monitor)

    held = supervisor.held
    with (
        listening(directory, CONTROL_SOCKET, recorded, held.socket) as control,
        listening(directory, QMP_SOCKET, recorded, held.socket) as qmp,
    ):
        nothing: tuple[AttachedDisk, ...] = ()
        attached = held.value("disks", lambda: nothing, lambda: attached if hotplug is None else hotplug.attached)
        for each in attached:
            machine.disk_events.unplugged(each.plan.name)  # known from now on, and set if it was
        async with (
            supervisor.background_task(partial(_served, control, control_server)),
            supervisor.background_task(partial(_served, qmp, qmp_server)),
        ):
            yield


async def _served(listener: Socket, load: Callable[[], Serve]) -> None:
    """Serve the clients that connect to *listener*, until cancelled, by what *load* imports at the first connection."""
    while True:
        await readable(listener)
        try:
            serve = load()
        except (ImportError, OSError, MemoryError) as error:  # no reason to end a guest that runs
            log.warning(InstanceEvent.CONTROL_SOCKET_DELAYED, explain(error))
            await trio.sleep(IMPORTED_AGAIN)
        else:
            await serve(listener)
