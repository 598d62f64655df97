"""What the nest of an instance stands on: handles that exist for as long as this process does its work."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

import attrs
import trio

from runner.errors import RunnerError, explain
from runner.kernel.processes import Processes, open_processes
from runner.kernel.procfs import Procfs

if TYPE_CHECKING:
    from runner.instance.thread_placement import Receipt  # it stands on this module
    from runner.kernel.inherited_fds import InheritedFd

log = logging.getLogger(__name__)

T = TypeVar("T")

ENDS_WITHIN = 1.0
"""Seconds an observer that was cancelled may take; it ends at its next checkpoint."""


class StopRequestedError(Exception):
    """The start was given up because somebody asked to stop; not an error, but the start ends like one."""


class StopRequest:
    """Whether somebody asked this instance to end; the first asking counts, later ones change nothing."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Ask to stop."""
        if self._event.is_set():
            log.info("asked to stop again reason=%s", reason)
            return
        log.info("asked to stop reason=%s", reason)
        self.reason = reason
        self._event.set()

    async def asked(self) -> None:
        """Return as soon as somebody has asked."""
        await self._event.wait()

    def check(self) -> None:
        """Raise :exc:`StopRequestedError` if somebody has asked."""
        if self._event.is_set():
            raise StopRequestedError(self.reason)


@attrs.define
class Faults:
    """What could not be released; each is logged when it happens, and all of them decide the exit status."""

    sentences: list[str] = attrs.field(factory=list)

    @contextmanager
    def recorded(self, what: str) -> Iterator[None]:
        """Record a failure of the release in the block, and go on with the next one."""
        try:
            yield
        except (RunnerError, OSError, trio.TooSlowError) as error:
            sentence = f"could not {what}: {explain(error)}"
            log.error("fault: %s", sentence)  # noqa: TRY400 - told in one line; the log is for operators
            self.sentences.append(sentence)


@attrs.define
class Counters:
    """What has happened since the start; counters only ever grow."""

    restarts: Counter[str] = attrs.field(factory=Counter)
    """Children that ended and were started again, by role."""
    swept: int = 0
    """Processes and threads of others that were moved off the vCPUs' CPUs."""
    console: int = 0
    """Bytes the guest has said on its console."""


@attrs.define
class GuestState:
    """How the guest stands, for whoever asks from outside."""

    phase: str = "starting"
    """``starting``, ``running`` or ``stopping``."""
    since: float | None = None
    """When it began to run, on trio's clock."""
    read: Callable[[], Receipt] | None = None
    """Reads back from the kernel where every thread is now; only while it runs."""

    @contextmanager
    def running(self, read: Callable[[], Receipt]) -> Iterator[None]:
        """Say that the guest runs for as long as the block does."""
        self.phase, self.since, self.read = "running", trio.current_time(), read
        try:
            yield
        finally:
            self.phase, self.read = "stopping", None


@attrs.frozen
class Supervisor:
    """The handles every part of the nest needs."""

    processes: Processes
    nursery: trio.Nursery
    """For tasks that only observe; each ends with the block that started it."""
    stop: StopRequest
    faults: Faults
    procfs: Procfs
    counters: Counters = attrs.field(factory=Counters)
    guest_state: GuestState = attrs.field(factory=GuestState)
    handed: Mapping[str, InheritedFd] = attrs.field(factory=dict)
    """The descriptors that somebody else has opened for us, by name."""

    @asynccontextmanager
    async def background_task(self, observe: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Run the task *observe* for as long as the block runs, and not a step longer; it may be cancelled at any moment.

        All observers live in one nursery at the root, and not in one of their own, so that an error of the block passes
        as it is instead of in an exception group for each thing that is held.
        """
        scope = trio.CancelScope()
        ended = trio.Event()

        async def watch() -> None:
            try:
                with scope:
                    await observe()
            finally:
                ended.set()

        self.nursery.start_soon(watch)
        try:
            yield
        finally:
            scope.cancel()
            # It may be about to act already: who was to be started again must not be born after it was stopped.
            with trio.move_on_after(ENDS_WITHIN, shield=True):
                await ended.wait()

    async def unless_stopped(self, act: Callable[[], Awaitable[T]]) -> T:
        """Do *act*, but give it up and raise :exc:`StopRequestedError` as soon as somebody asks to stop."""
        self.stop.check()

        async def stopped() -> T:
            await self.stop.asked()
            raise StopRequestedError(self.stop.reason)

        return await first_of(act, stopped)


@asynccontextmanager
async def open_supervisor(stop: StopRequest, faults: Faults, prefix: tuple[str, ...] = ()) -> AsyncIterator[Supervisor]:
    """Hold the root of everything: the reaper and the nursery of observers. *prefix* goes before every child's argv."""
    async with open_processes(prefix) as processes, trio.open_nursery() as nursery:
        yield Supervisor(processes, nursery, stop, faults, Procfs())
        nursery.cancel_scope.cancel()


async def first_of(*acts: Callable[[], Awaitable[T]]) -> T:
    """Do all *acts* at once and return (or raise) what the first to end returns (or raises); the others are cancelled."""
    ended: list[Callable[[], T]] = []

    async with trio.open_nursery() as nursery:

        async def run(act: Callable[[], Awaitable[T]]) -> None:
            ended.append(await capture(act))
            nursery.cancel_scope.cancel()

        for act in acts:
            nursery.start_soon(run, act)
    return ended[0]()


async def capture(act: Callable[[], Awaitable[T]]) -> Callable[[], T]:
    """Do *act* and return a function that returns, or raises, what it did: to be called beyond a nursery, which would wrap it."""
    try:
        value = await act()
    except Exception as error:  # noqa: BLE001 - raised where the result is asked for
        return partial(_raise, error)
    return lambda: value


def _raise(error: Exception) -> NoReturn:
    raise error
