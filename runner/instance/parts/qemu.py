"""QEMU: started paused, resumed once, powered down, ended."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from runner.base.errors import HostError, Status, explain
from runner.base.events import InstanceEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.tasks import Announcements, first_of
from runner.base.values import frozen
from runner.instance.gate import Changes, Kind
from runner.instance.held import Held
from runner.instance.parts.guest_memory import MBIND_REMEDY
from runner.instance.parts.qemu_events import HANDLED, IGNORED, DiskEvents
from runner.instance.supervisor import Supervisor
from runner.kernel.child_processes import Command, Process
from runner.placement.children import FATAL
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.instance import ShutdownPlan
from runner.plan.machine import MachinePlan
from runner.protocol.qmp import BadReplyError, Monitor, QmpError, QmpEvent, VcpuThread

if TYPE_CHECKING:
    from runner.instance.parts.shares import HeldShare
    from runner.protocol.guest_agent import GuestAgent

log = logging.getLogger(__name__)

T = TypeVar("T")

PRESSED_EVERY = 1.0
"""Seconds between two presses of the power button: a guest that is still booting ignores the first ones."""

EXITS_WITHIN = 1.0
"""Seconds between the end of the QMP conversation and QEMU's exit, when it is QEMU that ends."""

QEMU_ANSWERS_WITHIN = 5.0
"""Seconds that QEMU may take to answer before the guest is not ready; the main loop of an emulated guest may be busy for one second."""

AGENT_ANSWERS_WITHIN = 1.0
"""Seconds an agent in the guest may take to answer before the guest's power button is pressed instead."""

REMEDIES = (
    (
        re.compile("cannot bind memory to host NUMA nodes"),
        MBIND_REMEDY,
    ),
    (
        # A second process that binds a device by its own node gets EINVAL (vfio_df_device_first_open).
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
    (
        # target/i386/kvm/kvm.c, accel/kvm/kvm-all.c: its assertions, and its own words
        re.compile(r"/kvm/kvm[a-z-]*\.c:|\b[Kk][Vv][Mm][ :_]|failed to set MSR"),
        'KVM runs no guest here: set cpu.accel to "tried", which emulates the guest then, or to "tcg"',
    ),
)
"""The remedy, by the error that QEMU prints before it ends."""


def _remedy(output: str) -> str:
    """Return the remedy for the error that QEMU printed before it ended, empty if none is known."""
    return next((remedy for words, remedy in REMEDIES if words.search(output)), "")


@frozen
class GuestEnd:
    """The reason why the guest no longer runs."""

    status: Status
    detail: str


_REASONS = {
    "guest-shutdown": GuestEnd(Status.GUEST_SHUTDOWN, "the guest shut itself down"),
    "guest-reset": GuestEnd(Status.GUEST_RESET, "the guest rebooted"),
    "guest-panic": GuestEnd(Status.GUEST_PANICKED, "the guest's kernel panicked"),
}
"""The guest's own reasons among ``ShutdownCause`` (``qapi/run-state.json``); the others are QEMU's or this program's."""


_HUNG = GuestEnd(Status.GUEST_HUNG, "the guest hung: it stopped feeding its watchdog")


class Qemu:
    """One QEMU that has greeted."""

    def __init__(
        self,
        process: Process,
        monitor: Monitor,
        agent: Callable[[], GuestAgent] | None,
        changes: Changes,
        log_limit: LogRateLimit,
    ) -> None:
        self.process = process
        self.disk_events = DiskEvents(log_limit)
        self._changes = changes
        self._log_limit = log_limit
        self._monitor = monitor
        self._agent = agent
        self.agent_listens = False
        """Whether a program in the guest has the agent's port open, according to QEMU's last event about it."""
        self._suspended = False
        """Whether the guest sleeps, according to QEMU's last event about it."""
        self._end: GuestEnd | None = None
        self.fds: QemuFds | None = None
        """Copies of its descriptors, which the next QEMU gets as well; ``None`` if it cannot be updated."""
        self.updates = 0
        """Number of times that another QEMU has taken over the guest."""
        self.shares: tuple[HeldShare, ...] = ()
        self._replaced = Announcements()
        """Announces that another QEMU has taken over the guest."""

    @property
    def monitor(self) -> Monitor:
        """The connection to QEMU."""
        return self._monitor

    def keep_state(self, held: Held) -> None:
        """Hold the state of the conversation with QEMU, and what is known from its events."""
        monitor = self._monitor
        held.value("conversation", lambda: monitor, monitor.continue_from, lambda _: self._monitor.record())
        held.keep(self, agent_listens="agent listens", updates="QEMU's updates", _suspended="suspended")
        for device in held.current("unplugged", lambda: self.disk_events.all_unplugged):
            self.disk_events.unplugged(device).set()

    @property
    def unfinished(self) -> str:
        """Return the activity that a renewal would interrupt, as a clause; empty if there is none."""
        if self.ends:
            return "the guest ends"
        return "a QMP command is being executed" if self._monitor.busy else ""

    @property
    def ends(self) -> bool:
        """Return whether the guest has ended, or QEMU has."""
        return self.guest_ended or self.process.returncode is not None

    @property
    def guest_ended(self) -> bool:
        """Return whether QEMU has reported the guest's end."""
        return self._end is not None

    async def decided(self) -> None:
        """Wait until it is decided which QEMU has the guest."""
        await self._changes.over(Kind.QEMU_UPDATE)

    def replace(self, process: Process, monitor: Monitor) -> tuple[Process, Monitor]:
        """Let another QEMU have the guest; return the previous one, whose end then has no meaning."""
        before = self.process, self._monitor
        monitor.take_over_observers(self._monitor)
        self.process, self._monitor = process, monitor
        self.updates += 1
        self._replaced.announce()
        return before

    async def greeted(self) -> str:
        """Wait for QEMU to greet and return its version.

        Raises :exc:`~runner.base.errors.HostError` with the error that QEMU printed instead.
        """
        try:
            return await self._monitor.greet()
        except QmpError as error:
            failure = error
        with trio.move_on_after(EXITS_WITHIN):
            await self.process.wait()
            how = self.process.how_it_ended()
            # QEMU prints hints after an error of VFIO, so the last line is not the error.
            output = next((line for line in reversed(self.process.last_lines) if ": vfio " in line), how)
            ended = how if output in how else f"{how}, and before {output!r}"
            raise HostError(f"cannot start QEMU: it {ended}", remedy=_remedy(output) or self.process.limit())
        raise HostError("cannot start QEMU") from failure

    async def vcpu_threads(self) -> tuple[VcpuThread, ...]:
        """Return the vCPUs' threads by index.

        Raises :exc:`~runner.protocol.qmp.BadReplyError` if a thread does not belong to QEMU, which may be under the guest's control and
        name this process.
        """
        vcpus = await self._monitor.vcpu_threads()
        for vcpu in vcpus:
            if not os.path.exists(f"/proc/{self.process.pid}/task/{vcpu.tid}"):  # noqa: ASYNC240, PTH110 - the kernel's
                raise BadReplyError(f"cannot pin thread {vcpu.tid} for vCPU {vcpu.index}: it is not a thread of QEMU")
        return vcpus

    async def iothreads(self) -> dict[int, str]:
        """Return the iothreads' ids by thread."""
        return await self._monitor.iothreads()

    async def resume(self) -> None:
        """Let the guest run."""
        await self._monitor.execute("cont")

    async def show(self, connection: int) -> None:
        """Let QEMU's VNC server serve the descriptor *connection*, which stays the caller's to close.

        Every process that may open the display's socket may see the guest: there is no password.
        """
        await self._monitor.execute("getfd", {"fdname": "vnc"}, fds=(connection,))
        await self._monitor.execute("add_client", {"protocol": "vnc", "fdname": "vnc", "skipauth": True})

    def observe(self, event: QmpEvent) -> None:
        """Follow and log *event*; others observe it afterwards."""
        self._log(event)
        self._log_unknown(event)
        if event.name == "VSERPORT_CHANGE" and event.data.get("id") == "agent":
            self.agent_listens = event.data.get("open") is True
        if event.name in {"SUSPEND", "WAKEUP", "RESET"}:
            self._suspended = event.name == "SUSPEND"
        self.disk_events.handle(event)
        self._end = self._end or _meaning(event)

    async def agent_answers(self) -> bool:
        """Tell whether the guest agent answers; the caller sets a time limit, because an absent agent sends no error."""
        if self._agent is None:
            return False
        try:
            await self._agent().ping()
        except HostError as error:
            log.debug(InstanceEvent.GUEST_AGENT_SILENT, explain(error))
            return False
        return True

    async def ended(self) -> GuestEnd:
        """Wait until the guest no longer runs, and return the reason."""
        while True:
            process = self.process
            ended: GuestEnd | None = await first_of(self._stopped_running, self._exited, self._replaced.next.wait)
            await self.decided()
            if ended is not None and process is self.process:
                return ended

    async def _stopped_running(self) -> GuestEnd:
        try:
            while self._end is None:
                await self._monitor.until(lambda: self.guest_ended)
        except QmpError as error:
            with trio.move_on_after(EXITS_WITHIN):
                return await self._exited()
            return GuestEnd(Status.MACHINE_DIED, f"QEMU can no longer be controlled: {explain(error)}")
        return self._end

    def _log(self, event: QmpEvent) -> None:
        """Log the guest's events at a limited rate."""
        match event.name:
            case "VSERPORT_CHANGE" if event.data.get("id") == "agent":
                there = event.data.get("open") is True
                self._log_limit.log(
                    log.info, InstanceEvent.GUEST_AGENT_CONNECTED if there else InstanceEvent.GUEST_AGENT_DISCONNECTED
                )
            case "WATCHDOG":
                self._log_limit.log(log.warning, InstanceEvent.GUEST_WATCHDOG_EXPIRED, event.data.get("action"))
            case "RESET":
                self._log_limit.log(log.info, InstanceEvent.GUEST_RESET, event.data.get("reason"))
            case "MEMORY_FAILURE":
                recipient, action = event.data.get("recipient"), event.data.get("action")
                self._log_limit.log(log.error, InstanceEvent.HOST_MEMORY_FAILED, recipient, action)

    def _log_unknown(self, event: QmpEvent) -> None:
        if event.name not in HANDLED | IGNORED:
            self._log_limit.log(log.warning, InstanceEvent.QEMU_EVENT_UNKNOWN, event.name)

    async def _exited(self) -> GuestEnd:
        await self.process.wait()
        how = self.process.how_it_ended()
        remedy = _remedy(how) or self.process.limit()
        return GuestEnd(FATAL["qemu"], f"QEMU {how}; {remedy}" if remedy else f"QEMU {how}")

    async def power_down(self, plan: ShutdownPlan, over: float) -> GuestEnd:
        """Ask the guest to power down, again and again, within its share of the grace period, which has begun at *over*.

        Returns ``STOPPED`` if it did, ``FORCED_OFF`` if its time ran out, otherwise the other reason of its end.
        """
        with trio.move_on_at(over + plan.power_down):
            ended = await first_of(self.ended, partial(self._ask_to_power_down, plan.power_down / 2))
            # It powered down on request; a guest may be configured to reboot on the button instead.
            if ended.status in {Status.GUEST_SHUTDOWN, Status.GUEST_RESET}:
                return GuestEnd(Status.STOPPED, "the guest powered down when asked to")
            return ended
        return GuestEnd(
            Status.FORCED_OFF, f"the guest did not power down within {plan.power_down:g} s and was switched off"
        )

    async def _ask_to_power_down(self, agent_seconds: float) -> GuestEnd:
        """Ask the agent, if there is one, for *agent_seconds*; then press the power button until cancelled.

        When QEMU refuses or does not answer, the button is not pressed again, because a reply may never come.
        """
        try:
            await self._monitor.execute("set-action", {"reboot": "shutdown"})
            if self._agent is not None and self.agent_listens:
                await _shut_down_by_agent(self._agent, agent_seconds)
            while True:
                if self._suspended:  # a suspended guest ignores the button, and may have unwritten data
                    await self._monitor.execute("system_wakeup")
                await self._monitor.execute("system_powerdown")
                await trio.sleep(PRESSED_EVERY)
        except QmpError as error:
            log.warning(InstanceEvent.POWER_DOWN_NOT_ASKED, explain(error))
        await trio.sleep_forever()
        raise AssertionError

    async def quit(self, plan: ShutdownPlan, supervisor: Supervisor) -> None:
        """End QEMU: ``quit``, SIGTERM, SIGKILL, each within its share."""
        await self.decided()
        with trio.move_on_after(plan.quit):
            await first_of(self._quit, self.process.wait)
        if self.process.returncode is None:
            log.warning(InstanceEvent.QEMU_TERMINATED)
        await supervisor.processes.stop(self.process, plan.terminate)

    async def _quit(self) -> int:
        try:
            await self._monitor.execute("quit")
        except QmpError as error:
            log.debug(InstanceEvent.QEMU_QUIT_UNANSWERED, error)
        return await self.process.wait()


async def _shut_down_by_agent(reach: Callable[[], GuestAgent], seconds: float) -> None:
    """Ask the agent to shut the guest down; return when it refuses, or the guest still runs after *seconds*.

    The guest is not trusted: an agent that does not answer costs :data:`AGENT_ANSWERS_WITHIN` seconds.
    """
    try:
        agent = reach()
    except (ImportError, OSError, MemoryError) as error:
        log.warning(InstanceEvent.GUEST_AGENT_NOT_ASKED, explain(error))
        return
    try:
        with trio.fail_after(min(AGENT_ANSWERS_WITHIN, seconds)):
            await agent.ping()
        log.info(InstanceEvent.GUEST_AGENT_ASKED)
        with trio.fail_after(seconds):
            log.warning(InstanceEvent.GUEST_AGENT_REFUSED, await agent.shut_down())
    except trio.TooSlowError:
        log.warning(InstanceEvent.GUEST_AGENT_TIMED_OUT)
    except HostError as error:
        log.warning(InstanceEvent.POWER_DOWN_NOT_ASKED, explain(error))


def _meaning(event: QmpEvent) -> GuestEnd | None:
    """Return the end of the guest that *event* reports, if it reports one."""
    if event.name == "SHUTDOWN":
        reason = str(event.data.get("reason"))
        return _REASONS.get(reason) or GuestEnd(
            Status.MACHINE_DIED, f"QEMU shut down by itself, giving the reason {reason!r}"
        )
    if event.name == "GUEST_PANICKED":
        return _REASONS["guest-panic"]
    if event.name == "WATCHDOG" and event.data.get("action") == "pause":
        return _HUNG
    return None


async def started_within(supervisor: Supervisor, seconds: float, step: Callable[[], Awaitable[T]]) -> T:
    """Run one *step* of the start, which waits for QEMU. Raises :exc:`~runner.base.errors.HostError` after so many *seconds*."""
    try:
        with trio.fail_after(seconds):
            async with supervisor.changes.begin(Kind.START, "QEMU is being started"):
                return await step()
    except trio.TooSlowError:
        raise HostError(f"cannot start QEMU: it has sent nothing on QMP for {seconds:g} s") from None


def spawn_qemu(
    supervisor: Supervisor,
    plan: MachinePlan,
    descriptors: QemuFds,
    memory_cgroup_fd: int | None,
    incoming: tuple[str, ...] = (),
    more: tuple[int, ...] = (),
) -> Process:
    """Start QEMU with copies of all *descriptors*, and of *more*, which the options *incoming* name."""
    argv = (*qemu_argv(plan, descriptors), *incoming)
    command = Command("qemu", argv, (*descriptors.numbers(), *more), entering=memory_cgroup_fd)
    return supervisor.processes.spawn(command.of_user(plan.user.user_id, plan.user.group_id, plan.user.groups))
