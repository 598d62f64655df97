"""QEMU: born paused, resumed once, powered down, gone."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import TypeVar

import attrs
import trio

from runner.errors import HostError, Status, explain
from runner.instance import disks
from runner.instance.daemons import Shares, death_of
from runner.instance.memory import MBIND_REMEDY
from runner.instance.network import NicBackend
from runner.instance.supervisor import Supervisor, first_of
from runner.kernel import files
from runner.kernel.character_devices import vhost_vsock
from runner.kernel.processes import Command, Process, stop_bound
from runner.kernel.sockets import Socket, connected_pair
from runner.plan.argv.qemu import QemuFds, qemu_argv
from runner.plan.firmware import ForgottenVariables, VariablesPlan
from runner.plan.guest_devices import GuestPlan
from runner.plan.host_checks import too_old
from runner.plan.instance import InstancePlan, ShutdownPlan
from runner.plan.machine import FilePlan, MachinePlan
from runner.protocol.qmp import Monitor, QmpError, QmpEvent, VcpuThread

log = logging.getLogger(__name__)

T = TypeVar("T")

PRESSED_EVERY = 1.0
"""Seconds between two presses of the power button: a guest that is still booting does not hear the first ones."""

EXITS_WITHIN = 1.0
"""Seconds between the end of the QMP conversation and QEMU's exit, when it is QEMU that ends."""

AGENT_ANSWERS_WITHIN = 1.0
"""Seconds an agent in the guest may take to answer before the guest's power button is pressed instead."""

REMEDIES = (
    (
        re.compile("cannot bind memory to host NUMA nodes"),
        MBIND_REMEDY,
    ),
    (
        # EINVAL is what the second one to bind a device by its own node gets (vfio_df_device_first_open).
        re.compile(": vfio .*(Device or resource busy|error bind device .*Invalid argument)"),
        "another process has the device or one of its IOMMU group; `fuser /dev/vfio/*` on the node names it",
    ),
    (
        re.compile(": vfio .*Cannot allocate memory"),
        "VFIO locks all guest RAM: `ulimit -l` of the container, and what else its user has locked, say how much may be",
    ),
    (
        re.compile(": vfio .*(Operation not permitted|Permission denied)"),
        "let the container use the devices' nodes in /dev/vfio: a device plugin's resource, or `--device`",
    ),
)
"""What mends it, by what QEMU says when it does not start."""


@attrs.frozen
class GuestAgentChannel:
    """Both ends of the guest agent's channel, if it has one."""

    ours: Socket | None = None
    theirs: Socket | None = None


@asynccontextmanager
async def guest_agent_channel(guest: GuestPlan) -> AsyncIterator[GuestAgentChannel]:
    """Hold the guest agent's channel; nobody reads it until the guest is to go."""
    if not guest.agent:
        yield GuestAgentChannel()
        return
    with connected_pair("the guest agent") as (ours, theirs):
        yield GuestAgentChannel(ours, theirs)


@attrs.frozen
class QemuEndpoints:
    """The ends that QEMU gets a copy of; ours are closed then, so that each end sees the other's death."""

    ram: Sequence[files.Descriptor]
    wires: Sequence[NicBackend]
    shares: Shares
    console: Socket
    agent: GuestAgentChannel

    def close_our_copies(self) -> None:
        """Close our copies."""
        self.console.close()
        if self.agent.theirs is not None:
            self.agent.theirs.close()
        for each in self.ram:
            each.close()
        for wire in self.wires:
            wire.close_our_copies()
        for connection in self.shares.sockets:
            connection.close()


@attrs.frozen
class GuestEnd:
    """Why the guest does not run any more."""

    status: Status
    detail: str


_REASONS = {
    "guest-shutdown": GuestEnd(Status.GUEST_SHUTDOWN, "the guest shut itself down"),
    "guest-reset": GuestEnd(Status.GUEST_RESET, "the guest rebooted"),
    "guest-panic": GuestEnd(Status.GUEST_PANICKED, "the guest's kernel panicked"),
}
"""The guest's own reasons among ``ShutdownCause`` (``qapi/run-state.json``); every other one is QEMU's or ours."""


_HUNG = GuestEnd(Status.GUEST_HUNG, "the guest hung: it fed its watchdog no more")


class Qemu:
    """One QEMU that has greeted."""

    def __init__(self, process: Process, monitor: Monitor, agent: Socket | None) -> None:
        self.process = process
        self.disk_events = disks.DiskEvents()
        self._monitor = monitor
        self._agent = agent
        self._agent_listens = False
        """What QEMU said last of the agent's port: whether a program in the guest has it open."""
        self._end: GuestEnd | None = None

    @property
    def monitor(self) -> Monitor:
        """The conversation with QEMU; its events are heard by :meth:`ended` alone."""
        return self._monitor

    async def greeted(self) -> str:
        """Wait for QEMU to greet, and return its version, or say what it said instead."""
        try:
            return await self._monitor.greet()
        except QmpError as error:
            failure = error
        with trio.move_on_after(EXITS_WITHIN):
            await self.process.wait()
            how = self.process.how_it_ended()
            # QEMU explains an error of VFIO's in further lines, and they are not the error.
            said = next((line for line in reversed(self.process.last_words) if ": vfio " in line), how)
            remedy = next((f"; {remedy}" for words, remedy in REMEDIES if words.search(said)), "")
            raise HostError(f"cannot start QEMU: it {how if said in how else f'{how}, and before {said!r}'}{remedy}")
        raise HostError("cannot start QEMU") from failure

    async def vcpu_threads(self) -> tuple[VcpuThread, ...]:
        """Return the vCPUs' threads by index."""
        return await self._monitor.vcpu_threads()

    async def iothreads(self) -> dict[int, str]:
        """Return the iothreads' ids by thread."""
        return await self._monitor.iothreads()

    async def resume(self) -> None:
        """Let the guest run."""
        await self._monitor.execute("cont")

    async def show(self, connection: int) -> None:
        """Have QEMU's VNC server serve the descriptor *connection*, which stays the caller's to close.

        Whoever may open our socket may see the guest: nobody is asked for a password.
        """
        await self._monitor.execute("getfd", {"fdname": "vnc"}, passing=(connection,))
        await self._monitor.execute("add_client", {"protocol": "vnc", "fdname": "vnc", "skipauth": True})

    async def ended(self) -> GuestEnd:
        """Return why the guest does not run any more, as soon as that is so."""
        return await first_of(self._stopped_running, self._exited)

    async def _stopped_running(self) -> GuestEnd:
        try:
            # Remembered, because QEMU says it once and whoever hears it may have been given up on in that very moment.
            while self._end is None:
                event = await self._monitor.event()
                if event.name == "VSERPORT_CHANGE" and event.data.get("id") == "agent":
                    self._agent_listens = event.data.get("open") is True
                    log.info("the guest agent %s", "is there" if self._agent_listens else "has gone")
                self.disk_events.hear(event)
                self._end = _meaning(event)
        except QmpError as error:
            with trio.move_on_after(EXITS_WITHIN):
                return await self._exited()
            return GuestEnd(Status.MACHINE_DIED, f"QEMU can no longer be controlled: {explain(error)}")
        return self._end

    async def _exited(self) -> GuestEnd:
        await self.process.wait()
        return GuestEnd(death_of("qemu").status, f"QEMU {self.process.how_it_ended()}")

    async def power_down(self, plan: ShutdownPlan) -> GuestEnd:
        """Ask the guest to power down, again and again, within its share of the grace period.

        Returns with ``STOPPED`` if it did, ``FORCED_OFF`` if its time ran out, else what became of it instead.
        """
        with trio.move_on_after(plan.power_down):
            ended = await first_of(self.ended, partial(self._ask_to_power_down, plan.power_down / 2))
            # It went down because we asked; a reboot is its way to say so when the button means reboot to it.
            if ended.status in {Status.GUEST_SHUTDOWN, Status.GUEST_RESET}:
                return GuestEnd(Status.STOPPED, "the guest powered down when asked to")
            return ended
        return GuestEnd(
            Status.FORCED_OFF, f"the guest did not power down within {plan.power_down:g} s and was switched off"
        )

    async def _ask_to_power_down(self, patience: float) -> GuestEnd:
        """Ask the agent, which gets *patience* seconds if it is there, then press the power button for ever.

        A QEMU that does not answer is pressed no more, because its reply may never come.
        """
        try:
            await self._monitor.execute("set-action", {"reboot": "shutdown"})
            if self._agent is not None and self._agent_listens:
                await _told_by_agent(self._agent, patience)
            while True:
                await self._monitor.execute("system_powerdown")
                await trio.sleep(PRESSED_EVERY)
        except QmpError as error:
            log.warning("%s", explain(error))
        await trio.sleep_forever()
        raise AssertionError

    async def quit(self, plan: ShutdownPlan, supervisor: Supervisor) -> None:
        """End QEMU: ``quit``, SIGTERM, SIGKILL, each within its share."""
        with trio.move_on_after(plan.quit):
            await first_of(self._quit, self.process.wait)
        if self.process.returncode is None:
            log.warning("QEMU does not quit; it gets a SIGTERM")
        await supervisor.processes.stop(self.process, plan.terminate)

    async def _quit(self) -> int:
        try:
            await self._monitor.execute("quit")
        except QmpError as error:
            log.debug("quit was not answered: %s", error)
        return await self.process.wait()


async def _told_by_agent(line: Socket, patience: float) -> None:
    """Have the agent shut the guest down; returns when that is refused or has not ended the guest within *patience* seconds.

    The guest is not trusted: an agent that does not answer costs :data:`AGENT_ANSWERS_WITHIN` seconds.
    """
    try:
        from runner.protocol.guest_agent import (  # here, because most of its life an instance does not need it
            AgentError,
            GuestAgent,
        )
    except (ImportError, OSError, MemoryError) as error:
        log.warning("the guest agent is not asked: %s; pressing the power button", explain(error))
        return
    agent = GuestAgent(line)
    try:
        with trio.fail_after(min(AGENT_ANSWERS_WITHIN, patience)):
            await agent.ping()
        log.info("the guest agent is asked to shut the guest down")
        with trio.fail_after(patience):
            log.warning("the guest agent refuses to shut the guest down: %s", await agent.shut_down())
    except trio.TooSlowError:
        log.warning("the guest agent does nothing; pressing the power button")
    except AgentError as error:
        log.warning("%s", explain(error))


def _meaning(event: QmpEvent) -> GuestEnd | None:
    """Return what *event* says about the guest's end, if anything."""
    if event.name == "SHUTDOWN":
        reason = str(event.data.get("reason"))
        return _REASONS.get(reason) or GuestEnd(
            Status.MACHINE_DIED, f"QEMU shut down by itself, giving the reason {reason!r}"
        )
    if event.name == "GUEST_PANICKED":
        return _REASONS["guest-panic"]
    if event.name == "WATCHDOG":
        log.warning("the guest's watchdog was not fed action=%s", event.data.get("action"))
        return _HUNG if event.data.get("action") == "pause" else None
    if event.name == "RESET":
        log.info("the guest was reset reason=%s", event.data.get("reason"))
    return None


@asynccontextmanager
async def paused_qemu(
    supervisor: Supervisor, plan: InstancePlan, wiring: QemuEndpoints, memory_cgroup_fd: int | None
) -> AsyncIterator[Qemu]:
    """Hold a QEMU that has greeted, and whose guest has not run yet.

    It is born in the cgroup of *memory_cgroup_fd* (a descriptor of its ``cgroup.procs``; ``None``: where we are) and has all
    of its memory when it greets, if the plan says so: a page is charged to the group that touches it first, for ever.
    """
    with connected_pair("QMP") as (ours, theirs), ExitStack() as lent:
        if plan.machine.passthrough.devices:
            from runner.instance.passthrough import groups_lent  # here, because few guests have devices of their own

            lent.enter_context(groups_lent(supervisor, plan.machine.passthrough))
        process = _spawn(supervisor, plan.machine, plan.state_directory, theirs, wiring, memory_cgroup_fd)
        machine = Qemu(process, Monitor(ours), wiring.agent.ours)
        try:
            theirs.close()
            wiring.close_our_copies()
            version = await started_within(plan.start_timeout, lambda: supervisor.unless_stopped(machine.greeted))
            lent.close()
            log.info("QEMU is up pid=%d version=%s", process.pid, version)
            if (reason := too_old(version)) is not None:
                raise HostError(f"cannot use this QEMU: {reason}; install a newer one")
            yield machine
        finally:
            bound = plan.shutdown.quit + stop_bound(plan.shutdown.terminate)
            with supervisor.faults.recorded("end QEMU"), trio.move_on_after(bound, shield=True):
                await machine.quit(plan.shutdown, supervisor)


async def started_within(patience: float, step: Callable[[], Awaitable[T]]) -> T:
    """Do one *step* of the start that waits for QEMU's word, within *patience* seconds or not at all."""
    try:
        with trio.fail_after(patience):
            return await step()
    except trio.TooSlowError:
        raise HostError(f"cannot start QEMU: it has said nothing on QMP for {patience:g} s") from None


def _spawn(
    supervisor: Supervisor,
    plan: MachinePlan,
    directory: PurePosixPath,
    qmp: Socket,
    wiring: QemuEndpoints,
    memory_cgroup_fd: int | None,
) -> Process:
    """Start QEMU with a copy of everything it needs, and hold none of it afterwards."""
    with ExitStack() as held:

        def file(found: FilePlan) -> int:
            return held.enter_context(files.copied(found.path) if found.copied else files.opened(found.path))

        named = {"kernel": plan.kernel, "initrd": plan.initrd, "firmware": plan.firmware}
        numbers = {name: file(found) for name, found in named.items() if found is not None}
        if plan.firmware_vars is not None:
            numbers["firmware-vars"] = held.enter_context(_variables(plan.firmware_vars))
        if plan.seed is not None:
            numbers["seed"] = held.enter_context(files.filled_memory("cloud-init seed", plan.seed.image()))
        vsock = plan.guest.vsock
        for disk in plan.disks:
            numbers |= held.enter_context(disks.opened(disk, directory))
        devices: dict[str, int] = {}
        if plan.passthrough.devices:
            from runner.instance.passthrough import handed_over

            devices = held.enter_context(handed_over(plan.passthrough))
        if plan.lockable:
            from runner.kernel.memory import lockable  # here, because few guests have anything locked

            held.enter_context(lockable(plan.lockable))
        descriptors = QemuFds(
            qmp=qmp.fileno(),
            console=wiring.console.fileno(),
            ram=tuple(each.number for each in wiring.ram),
            files=numbers,
            wires=tuple(wire.numbers() for wire in wiring.wires),
            shares=tuple(connection.fileno() for connection in wiring.shares.sockets),
            devices=devices,
            guest_agent_channel=None if wiring.agent.theirs is None else wiring.agent.theirs.fileno(),
            vhost_vsock=None if vsock is None else held.enter_context(vhost_vsock(vsock.cid, exact=vsock.exact)),
        )
        if descriptors.vhost_vsock is not None:
            log.info("the guest's vsock context identifier is %d", descriptors.vhost_vsock[1])
        command = Command("qemu", tuple(qemu_argv(plan, descriptors)), descriptors.numbers(), entering=memory_cgroup_fd)
        user = plan.user
        if user.uid != 0:
            command = attrs.evolve(command, uid=user.uid, gid=user.gid, groups=user.groups)
        return supervisor.processes.spawn(command)


@contextmanager
def _variables(plan: VariablesPlan) -> Iterator[int]:
    """Hold the firmware's variable store, which is made now if it is missing."""
    if isinstance(plan, ForgottenVariables):
        with files.copied(plan.template, write=True) as store:
            yield store
        return
    if plan.template is not None:
        files.copy_new(plan.template, plan.path)
        log.info("made the firmware's variable store %s", plan.path)
    with files.opened(plan.path, write=True, following=False) as store:
        yield store
