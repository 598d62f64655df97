"""The handles that every part of an instance needs: they exist for as long as this process supervises it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import attrs
import trio

from runner.base.errors import HostError, RunnerError, explain
from runner.base.events import InstanceEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.tasks import Announcements
from runner.base.values import define, frozen
from runner.facts.roots import Roots
from runner.instance.gate import Changes, StopRequest
from runner.instance.guest_state import GuestState
from runner.instance.held import Held
from runner.instance.timeouts import InstanceTimeouts
from runner.kernel.child_processes import Process, Processes, open_processes
from runner.kernel.procfs import Procfs

if TYPE_CHECKING:
    # imports cost PID 1 time: few instances inherit any descriptor, and metrics are asked for later
    from runner.kernel.inherited_fds import InheritedFd
    from runner.kernel.sockets import Socket
    from runner.protocol.instance_metrics import QemuUpdateOutcome, RenewalOutcome

T = TypeVar("T")

log = logging.getLogger(__name__)

ENDS_WITHIN = 1.0
"""Seconds that a background task may take after it was cancelled; it ends at its next checkpoint."""


@define
class Faults:
    """Failures of releases; each is logged when it happens, and all of them decide the exit status."""

    sentences: list[str] = attrs.field(factory=list)
    begun: Callable[[], None] = lambda: None
    """Called before each release."""
    own: Exception | None = None
    """The fault of this program that ends the instance, because :class:`Renewal` did not allow to survive it."""

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
    renewals: Counter[RenewalOutcome] = attrs.field(factory=Counter)
    """Renewals of this program."""
    qemu_updates: Counter[QemuUpdateOutcome] = attrs.field(factory=Counter)
    """Updates of QEMU that were begun."""


@define
class ConnectedDaemon:
    """The daemon of a NIC or share, which serves one connection and ends with it; another one may replace it when QEMU is updated."""

    process: Process
    connection: Socket | None
    """QEMU's end; ``None`` if QEMU had it before this program began."""

    def replace(self, process: Process) -> Process:
        """Let another daemon serve the NIC or share; return the previous one, whose end then has no meaning."""
        before, self.process = self.process, process
        return before


ResumeAfterLoop = Callable[[Exception], "Renewal | tuple[str, ...]"]
"""Lets this program continue as a fresh process image after its event loop has ended with an error. If that is not allowed, it returns the
state for another loop of this process to power the guest down, or the resources that could not be released without any loop."""

ResumeAfterFault = Callable[[Exception], Awaitable[None]]
"""Lets this program continue as a fresh process image after its own fault; returns if that is not allowed."""


@define
class Renewal:
    """The renewals of this process so far, and what the next one needs; the state that is carried over is in :class:`Held`."""

    held: Held = attrs.field(factory=Held)
    generation: int = 0
    """Number of renewals of this process."""
    resume_after_fault: ResumeAfterFault | None = None
    """Set only while the guest runs and everything is held."""
    resume_after_loop: ResumeAfterLoop | None = None
    """Set only while everything is held and the guest has begun to run; an event loop that ends by itself runs no release."""
    loop_ended_by: Exception | None = None
    """The error of the previous event loop of this process, whose state this loop has taken over to release it."""
    unfinished: Callable[[], str] = lambda: ""
    """Returns the reason why the state cannot be carried over at this moment, though no change is in progress; empty if it can."""
    leaving: list[Callable[[], None]] = attrs.field(factory=list)
    """Functions called just before exec, for resources that are not carried over."""
    outcome: RenewalOutcome | None = None
    """The outcome of the last renewal."""
    reason: str = ""
    """The reason why the previous program continues, or this one has become a fresh image."""
    digest: str = ""
    """The digest of this program; empty for the one that was started first."""
    strict: bool = False
    """Whether a misplaced thread is a reason to go back to the previous program."""
    own_faults: list[float] = attrs.field(factory=list)
    """The times of recent faults of its own that this program survived, on the kernel's clock."""
    entry: str = ""
    """The module through which a program takes over: ``resume`` of the command line, which this module cannot import."""

    def unreleased(self, *alive: str) -> str:
        """Return the sentence of a fault: the children *alive*, and all held resources, are left, because no event loop released them."""
        named = ", ".join([*alive, *self.held.blocks])
        return f"could not release {named} and what else was made: the event loop has ended"

    @contextmanager
    def possible(self, resume_after_fault: ResumeAfterFault, unfinished: Callable[[], str]) -> Iterator[None]:
        """Allow renewals while the block runs; the guest runs in it, and everything is held."""
        self.held.commit()
        self.resume_after_fault, self.unfinished = resume_after_fault, unfinished
        try:
            yield
        except (trio.Cancelled, BaseExceptionGroup):
            # This program never cancels the nest: a task of the event loop itself has failed, and signals no longer wake it up.
            if self.entry and self.resume_after_loop is not None:
                self.resume_after_loop(HostError("a task of the event loop itself has failed"))
            raise
        finally:
            self.resume_after_fault = None

    @contextmanager
    def outliving_the_loop(self, resume_after_loop: ResumeAfterLoop) -> Iterator[None]:
        """Call *resume_after_loop* if the event loop ends in the block, when everything is held and no task runs on."""
        self.resume_after_loop = resume_after_loop
        try:
            yield
        finally:
            self.resume_after_loop = None


@frozen
class Supervisor:
    """The handles that every part of an instance needs."""

    processes: Processes
    nursery: trio.Nursery
    """For background tasks; each ends with the block that started it."""
    stop: StopRequest
    changes: Changes
    faults: Faults
    roots: Roots
    procfs: Procfs
    counters: Counters = attrs.field(factory=Counters)
    daemons: list[ConnectedDaemon] = attrs.field(factory=list)
    """The daemons without which the guest cannot live."""
    restarted: Announcements = attrs.field(factory=Announcements)
    """Restarts of children."""
    guest_state: GuestState = attrs.field(factory=GuestState)
    inherited_fds: Mapping[str, InheritedFd] = attrs.field(factory=dict)
    """The descriptors that another process has opened for this instance, by name."""
    log_limit: LogRateLimit = attrs.field(factory=LogRateLimit)
    """For messages that the guest, or a client of a socket, can cause endlessly."""
    renewal: Renewal = attrs.field(factory=Renewal)
    timeouts: InstanceTimeouts = InstanceTimeouts()
    clock: trio.abc.Clock = attrs.field(factory=trio.lowlevel.current_clock)
    """The event loop's clock, which can be read even after the loop has ended."""

    @property
    def held(self) -> Held:
        """Everything that outlives this program's image: requested by name, created or found."""
        return self.renewal.held

    @asynccontextmanager
    async def background_task(self, task: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Run *task* for as long as the block runs, and no step longer; it may be cancelled at any moment.

        All background tasks run in one nursery at the root, not in one for each, so that an error of the block is raised unchanged, and not
        wrapped in an exception group for each of them.
        """
        scope = trio.CancelScope()
        ended = trio.Event()

        async def run() -> None:
            try:
                with scope:
                    await surviving(self.renewal, self.faults, self.stop, task)
            finally:
                ended.set()

        self.nursery.start_soon(run)
        try:
            yield
        finally:
            # If the block ends during a takeover, the previous program continues: nothing may be released before that.
            self.held.go_back()
            scope.cancel()
            # The task may be about to act: a child must not be started again after it was stopped.
            with trio.move_on_after(ENDS_WITHIN, shield=True):
                await ended.wait()


async def surviving(renewal: Renewal, faults: Faults, stop: StopRequest, task: Callable[[], Awaitable[T]]) -> T | None:
    """Run *task* and return its result; while the guest runs, a bug of this program in it does not end the guest.

    This process continues as a fresh image of the same program, or if that is not allowed, asks the guest to power down; then the result is
    ``None``.
    """
    try:
        return await task()
    except Exception as error:
        if renewal.resume_after_fault is None:
            raise
        log.exception(InstanceEvent.BUG)
        await renewal.resume_after_fault(error)
        faults.own = error
        stop.ask("a fault of instance-runner")
        return None


def kernel_time(moment: float, clock: trio.abc.Clock) -> float:
    """Convert *moment* on *clock*, the event loop's, to the kernel's clock, which the next program shares."""
    return time.monotonic() - (clock.current_time() - moment)


def loop_time(moment: float) -> float:
    """Convert *moment* on the kernel's clock to the clock of the event loop (see :func:`kernel_time`)."""
    return trio.current_time() - (time.monotonic() - moment)


@asynccontextmanager
async def open_supervisor(
    stop: StopRequest,
    faults: Faults,
    prefix: tuple[str, ...] = (),
    renewal: Renewal | None = None,
    timeouts: InstanceTimeouts = InstanceTimeouts(),  # noqa: B008 - frozen
    roots: Roots = Roots(),  # noqa: B008 - frozen
) -> AsyncIterator[Supervisor]:
    """Hold the reaper and the nursery of background tasks. *prefix* goes before every child's argv."""
    renewal = renewal or Renewal()
    held = renewal.held
    observing = partial(surviving, renewal, faults, stop)
    async with open_processes(prefix, observing) as processes, trio.open_nursery() as nursery:
        held.keep(processes, orphans="orphans")
        counters, changes, procfs = held.value("counters", Counters), Changes(stop), Procfs(roots.proc)
        supervisor = Supervisor(
            processes, nursery, stop, changes, faults, roots, procfs, counters, renewal=renewal, timeouts=timeouts
        )
        try:
            yield supervisor
        finally:
            supervisor.log_limit.log_left_out()
            stop.log_limit.log_left_out()
        nursery.cancel_scope.cancel()
