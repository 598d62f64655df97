"""The handles that every part of an instance needs: they exist for as long as this process supervises it."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, RunnerError, explain
from runner.base.events import InstanceEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.tasks import Announcements
from runner.base.values import define, frozen
from runner.instance.change.gate import Changes, StopRequest
from runner.instance.held import Held
from runner.instance.timeouts import InstanceTimeouts
from runner.instance.watch.signs_of_life import SignsOfLife
from runner.kernel.processes import Processes, open_processes
from runner.kernel.procfs import Procfs

if TYPE_CHECKING:
    from runner.kernel.inherited_fds import InheritedFd  # few instances inherit any, and PID 1 pays for what it imports
    from runner.placement.threads import Receipt
    from runner.protocol.qmp import Monitor

log = logging.getLogger(__name__)

MINUTE = 60.0
"""Seconds for which a reset of the guest counts."""

RESETS_OF_A_LOOP = 3
"""Resets within :data:`MINUTE` by which a guest does not get up; an installer, or a first boot, makes one or two."""

ENDS_WITHIN = 1.0
"""Seconds that a background task may take after it was cancelled; it ends at its next checkpoint."""


@define
class Faults:
    """Failures of releases; each is logged when it happens, and all of them decide the exit status."""

    sentences: list[str] = attrs.field(factory=list)
    begun: Callable[[], None] = lambda: None
    """Called before each release."""
    own: Exception | None = None
    """The fault of this program that ends the instance: it was not to be survived by a :class:`Renewal`."""

    @contextmanager
    def recorded(self, what: str) -> Iterator[None]:
        """Record a failure of the release in the block, and go on with the next one."""
        self.begun()
        try:
            yield
        except (RunnerError, OSError, trio.TooSlowError) as error:
            sentence = f"could not {what}: {explain(error)}"
            log.error(InstanceEvent.RELEASE_FAILED, sentence)  # noqa: TRY400 - one line without a traceback; the log is for operators
            self.sentences.append(sentence)


@define
class Counters:
    """Counters since the start; the numbers only grow."""

    restarts: Counter[str] = attrs.field(factory=Counter)
    """Children that ended and were started again, by role."""
    swept: int = 0
    """Processes and threads of others that were moved off the vCPUs' CPUs."""
    console: int = 0
    """Bytes that the guest has written to its console."""
    resets: int = 0
    """Resets of the guest."""
    renewals: Counter[str] = attrs.field(factory=Counter)
    """Renewals of this program, by :data:`RenewalOutcome`."""
    qemu_updates: Counter[str] = attrs.field(factory=Counter)
    """Updates of QEMU that were begun, by :data:`QemuUpdateOutcome`."""


Phase = Literal["starting", "running", "stopping"]

RenewalOutcome = Literal["renewed", "fell_back", "resumed"]
"""Another program has taken over; it could not, and the one before continues; this one continues after a fault of its own."""

QemuUpdateOutcome = Literal["updated", "fell_back", "lost"]
"""Another QEMU has the guest; the one before continues; the one before does not continue either, and the instance ends."""

ResumeAfterLoop = Callable[[Exception], "Renewal | tuple[str, ...]"]
"""Has this program continue as a fresh process image after its event loop has ended with an error. Where that may not be done, it
returns what another loop of this process takes over to power the guest down, or what could not be released without any loop."""

ResumeAfterFault = Callable[[Exception], Awaitable[None]]
"""Has this program continue as a fresh process image after its own fault; returns if that may not be done."""


@define
class Renewal:
    """The way in which this program has come to run the instance, and in which another one may; what it holds is in :class:`Held`."""

    held: Held = attrs.field(factory=Held)
    generation: int = 0
    """How often this process has been renewed."""
    resume_after_fault: ResumeAfterFault | None = None
    """Only while the guest runs and everything is held."""
    resume_after_loop: ResumeAfterLoop | None = None
    """Only while everything is held and the guest has begun to run; an event loop that ends by itself runs no release."""
    loop_ended_by: Exception | None = None
    """The error by which the event loop of this process ended that had held what this one takes over, to release it."""
    unfinished: Callable[[], str] = lambda: ""
    """Returns why the state cannot be carried over at this moment, though no change is in progress; empty if it can."""
    leaving: list[Callable[[], None]] = attrs.field(factory=list)
    """Called just before exec, for what does not go along."""
    outcome: RenewalOutcome | None = None
    """What came of the last renewal."""
    reason: str = ""
    """Why the program before continues, or this one has become a fresh image."""
    digest: str = ""
    """The digest of this program; empty for the one that was started first."""
    strict: bool = False
    """Whether a thread that is not in its place is a reason to execute the program before."""
    own_faults: list[float] = attrs.field(factory=list)
    """When this program survived faults of its own lately, on the kernel's clock."""
    entry: str = ""
    """The module by which a program takes over: ``resume`` of the command line, which stands above all that this module knows."""

    def unreleased(self, *alive: str) -> str:
        """Return the fault that what is held, and the children *alive*, could not be released where no event loop runs."""
        named = ", ".join([*alive, *self.held.blocks])
        return f"could not release {named} and what else was made: the event loop has ended"

    @contextmanager
    def possible(self, resume_after_fault: ResumeAfterFault, unfinished: Callable[[], str]) -> Iterator[None]:
        """Let this process be renewed while the block runs: the guest runs, and everything is held."""
        self.held.commit()
        self.resume_after_fault, self.unfinished = resume_after_fault, unfinished
        try:
            yield
        except (trio.Cancelled, BaseExceptionGroup):
            # Nothing of this program cancels the nest: a task of the event loop's own has failed, and no signal wakes it up any more.
            if self.entry and self.resume_after_loop is not None:
                self.resume_after_loop(HostError("a task of the event loop itself has failed"))
            raise
        finally:
            self.resume_after_fault = None

    @contextmanager
    def outliving_the_loop(self, resume_after_loop: ResumeAfterLoop) -> Iterator[None]:
        """Call *resume_after_loop* if the event loop ends in the block: everything is held, and nothing runs on."""
        self.resume_after_loop = resume_after_loop
        try:
            yield
        finally:
            self.resume_after_loop = None


class RunningQemu(Protocol):
    """The QEMU that has the guest, as far as its figures are asked for."""

    updates: int
    """How often another QEMU has taken its place."""

    @property
    def monitor(self) -> Monitor:
        """The conversation with it."""


@define
class GuestState:
    """The state of the guest, as probes and metrics show it."""

    phase: Phase = "starting"
    since: float | None = None
    """When it began to run, on trio's clock."""
    read: Callable[[], Receipt] | None = None
    """Reads back from the kernel where every thread is now; only while it runs."""
    machine: RunningQemu | None = None
    """The QEMU that has it; only while it runs."""
    changes: Announcements = attrs.field(factory=Announcements)
    """Changes of :attr:`phase` and :meth:`reasons`."""
    registered: trio.Event = attrs.field(factory=trio.Event)
    """Set when the controller knows the instance."""
    placed: Callable[[Receipt], None] | None = None
    """Called with the first receipt of a QEMU, while the guest does not run yet."""
    waits_for: str = ""
    """Why a guest that runs is not ready yet: the sign that it has not given since it was reset; empty if it has."""
    cpus_lost: str = ""
    """Which CPUs the container has lost, while the vCPUs make room; empty otherwise."""
    offline: CpuSet = attrs.field(factory=CpuSet)
    """The CPUs of vCPUs that the machine has taken offline."""
    panic: str = ""
    """How its kernel has said that it has panicked since it was reset, such as a line of its console; empty if it has not."""
    halted: str = ""
    """Why a guest that has not ended executes nothing, such as that it is suspended; empty if it runs."""
    no_address: dict[str, str] = attrs.field(factory=dict)
    """Why the guest does not get the address of a network that it has asked for, by the network's bridge."""
    qemu_silent: str = ""
    """Why nothing is known of a guest whose QEMU does not answer; empty if it does."""
    resets: deque[float] = attrs.field(factory=lambda: deque(maxlen=1000))
    """When it was reset in the last minute, on trio's clock; see :meth:`resets_lately`."""
    signs_of_life: SignsOfLife = attrs.field(factory=SignsOfLife)
    changed: Callable[[], None] = lambda: None
    """Called when :attr:`cpus_lost`, :attr:`offline` or :attr:`no_address` has changed."""
    ask_qemu: Callable[[], None] = lambda: None
    """Asks QEMU whether it answers, without waiting for it: only where a client asks for the guest's state, so that an idle
    PID 1 stays asleep."""

    def set_cpus_lost(self, cpus_lost: str) -> None:
        """Set :attr:`cpus_lost`."""
        if cpus_lost != self.cpus_lost:
            self.cpus_lost = cpus_lost
            self.changed()

    def set_offline(self, offline: CpuSet) -> None:
        """Set :attr:`offline`."""
        if offline != self.offline:
            self.offline = offline
            self.changed()

    def set_no_address(self, bridge: str, reason: str) -> None:
        """Set :attr:`no_address` of the network with *bridge*; with an empty *reason* it has the address."""
        if reason != self.no_address.get(bridge, ""):
            self.no_address[bridge] = reason
            self.changed()

    def resets_lately(self) -> int:
        """Return how often the guest was reset in the last minute."""
        since = trio.current_time() - MINUTE
        while self.resets and self.resets[0] <= since:
            self.resets.popleft()
        return len(self.resets)

    @property
    def unready(self) -> str:
        """Return why the guest is not ready; empty if it is."""
        return next(filter(None, (sentence for _, sentence in self.reasons())), "")

    def reasons(self) -> Iterator[tuple[str, str]]:
        """Yield what may keep it from being ready, first what the others follow from: the reason's name, and the sentence.

        The name is that of a label of a metric; the sentence is empty for what is as it should be.
        """
        yield "phase", "" if self.phase == "running" else self.phase
        yield "cpus_lost", self.cpus_lost
        offline = f"the CPUs '{self.offline}' of vCPUs are offline: these share the instance's other CPUs"
        yield "cpus_offline", offline if self.offline else ""
        yield "qemu_silent", self.qemu_silent
        yield "halted", self.halted and f"the guest does not run: {self.halted}"
        yield "panicked", self.panic and f"the guest's kernel has panicked: {self.panic}"
        resets = self.resets_lately()
        again = f"the guest does not get up: it was reset {resets} times in the last minute"
        yield "resets", again if resets >= RESETS_OF_A_LOOP else ""
        silence = self.signs_of_life.silence
        yield "silent", "" if silence is None else f"the guest is silent: {silence}"
        yield "no_address", next(filter(None, self.no_address.values()), "")
        yield "awaits_sign", self.waits_for

    @contextmanager
    def running(self, read: Callable[[], Receipt], machine: RunningQemu, since: float | None = None) -> Iterator[None]:
        """Note that the guest runs in *machine* for as long as the block does; it has run *since* then, by default now."""
        self.phase, self.since = "running", trio.current_time() if since is None else since
        self.read, self.machine = read, machine
        self.changes.announce()
        try:
            yield
        finally:
            self.phase, self.read, self.machine = "stopping", None, None
            self.changes.announce()


@frozen
class Supervisor:
    """The handles that every part of an instance needs."""

    processes: Processes
    nursery: trio.Nursery
    """For background tasks, which only observe; each ends with the block that started it."""
    stop: StopRequest
    changes: Changes
    faults: Faults
    procfs: Procfs
    counters: Counters = attrs.field(factory=Counters)
    restarted: Announcements = attrs.field(factory=Announcements)
    """Restarts of children."""
    guest_state: GuestState = attrs.field(factory=GuestState)
    inherited_fds: Mapping[str, InheritedFd] = attrs.field(factory=dict)
    """The descriptors that another process has opened for this instance, by name."""
    log_limit: LogRateLimit = attrs.field(factory=LogRateLimit)
    """For messages that the guest, or a client of a socket, can cause without end."""
    renewal: Renewal = attrs.field(factory=Renewal)
    timeouts: InstanceTimeouts = InstanceTimeouts()
    clock: trio.abc.Clock = attrs.field(factory=trio.lowlevel.current_clock)
    """The event loop's, which can be read when that has ended."""

    @property
    def held(self) -> Held:
        """Everything that outlives this program's image: asked for by name, made or found."""
        return self.renewal.held

    @asynccontextmanager
    async def background_task(self, observe: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Run the task *observe* for as long as the block runs, and no step longer; it may be cancelled at any moment.

        All background tasks run in one nursery at the root, not in one for each, so that an error of the block is raised
        as it is, and not wrapped in an exception group for each of them.
        """
        scope = trio.CancelScope()
        ended = trio.Event()

        async def watch() -> None:
            try:
                with scope:
                    await self.surviving(observe)
            finally:
                ended.set()

        self.nursery.start_soon(watch)
        try:
            yield
        finally:
            self.held.go_back()
            scope.cancel()
            # It may be about to act already: a child must not be started again after it was stopped.
            with trio.move_on_after(ENDS_WITHIN, shield=True):
                await ended.wait()

    async def surviving(self, observe: Callable[[], Awaitable[None]]) -> None:
        """Run *observe*; while the guest runs, a fault of this program in it does not end the guest.

        This process continues as a fresh image of the same program, or where that may not be, asks the guest to power down.
        """
        try:
            await observe()
        except Exception as error:
            if self.renewal.resume_after_fault is None:
                raise
            log.exception(InstanceEvent.BUG)
            await self.renewal.resume_after_fault(error)
            self.faults.own = error
            self.stop.ask("a fault of instance-runner")


def kernel_time(moment: float, clock: trio.abc.Clock) -> float:
    """Return on the kernel's clock a *moment* on *clock*, that of the event loop, which another program does not have."""
    return time.monotonic() - (clock.current_time() - moment)


def loop_time(moment: float) -> float:
    """Return on the clock of the event loop a *moment* on the kernel's (:func:`kernel_time`)."""
    return trio.current_time() - (time.monotonic() - moment)


@asynccontextmanager
async def open_supervisor(
    stop: StopRequest,
    faults: Faults,
    prefix: tuple[str, ...] = (),
    renewal: Renewal | None = None,
    timeouts: InstanceTimeouts = InstanceTimeouts(),  # noqa: B008 - frozen
) -> AsyncIterator[Supervisor]:
    """Hold the reaper and the nursery of background tasks. *prefix* goes before every child's argv."""
    renewal = renewal or Renewal()
    held = renewal.held
    async with open_processes(prefix) as processes, trio.open_nursery() as nursery:
        processes.orphans = held.current("orphans", lambda: processes.orphans)
        counters, changes = held.value("counters", Counters), Changes(stop)
        supervisor = Supervisor(
            processes, nursery, stop, changes, faults, Procfs(), counters, renewal=renewal, timeouts=timeouts
        )
        processes.observing = supervisor.surviving
        try:
            yield supervisor
        finally:
            supervisor.log_limit.log_left_out()
            stop.log_limit.log_left_out()
        nursery.cancel_scope.cancel()
