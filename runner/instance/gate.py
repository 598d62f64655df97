"""The gate: one change of a running instance at a time; a table says what each kind of change does to each other kind.

Example::

    async with changes.begin(Kind.DISK, "a disk is being attached"):
        ...

A stop is a change as well: it overtakes all others here, and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

import attrs
import trio

from runner.base.errors import RefusedError
from runner.base.events import InstanceEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.table import duration
from runner.base.tasks import Announcements
from runner.base.values import define

if TYPE_CHECKING:
    from runner.instance.control_json import ChangeDocument

log = logging.getLogger(__name__)

ANSWERED_WITHIN = 1.0
"""Seconds in which the clients of changes receive the error that the instance ends; sending it takes some steps of the event loop."""


class Kind(Enum):
    """The kind of a change; the value completes "cannot"."""

    START = "start the instance"
    """A step of the start."""
    DISK = "change a disk"
    VCPUS = "change the number of vCPUs"
    CPUS_LOST = "make room on the CPUs that are left"
    PLACEMENT = "put the vCPUs back on their CPUs"
    QEMU_UPDATE = "update QEMU"
    RENEWAL = "renew the runner"
    FAULT = "continue after a fault of this program"
    """By a renewal as well, which nobody has asked for and the guest needs: it waits where that is refused."""
    STOP = "stop the instance"
    """A requested stop, or the end of a guest that has ended by itself."""


class Precedence(Enum):
    """The decision about a change that is requested while another one is in progress, or was requested before it and waits."""

    WAIT = "wait"
    REFUSE = "refuse"
    """The change is refused."""
    OVERTAKE = "overtake"
    """The change is made next; the one in progress is cancelled, and undoes what it can within a time limit of its own."""


_W, _R, _O = Precedence.WAIT, Precedence.REFUSE, Precedence.OVERTAKE

# fmt: off
_TABLE = {
    # in progress:     START DISK VCPUS CPUS_LOST PLACEMENT QEMU_UPDATE RENEWAL FAULT STOP
    Kind.START:        (_W,  _W,  _W,   _W,       _W,       _W,         _W,     _W,   _R),
    Kind.DISK:         (_W,  _W,  _W,   _R,       _W,       _W,         _R,     _R,   _R),
    Kind.VCPUS:        (_W,  _W,  _W,   _R,       _W,       _W,         _R,     _R,   _R),
    Kind.CPUS_LOST:    (_W,  _O,  _W,   _W,       _W,       _W,         _O,     _O,   _R),
    Kind.PLACEMENT:    (_W,  _W,  _W,   _W,       _W,       _W,         _O,     _O,   _R),
    Kind.QEMU_UPDATE:  (_W,  _W,  _W,   _R,       _W,       _W,         _R,     _R,   _R),
    Kind.RENEWAL:      (_W,  _W,  _W,   _W,       _W,       _W,         _R,     _R,   _R),
    Kind.FAULT:        (_W,  _W,  _W,   _W,       _W,       _W,         _W,     _W,   _R),
    Kind.STOP:         (_O,  _O,  _O,   _O,       _O,       _O,         _O,     _O,   _W),
}
# fmt: on
"""One row for each requested kind.

A change is refused where waiting could last: CPUs are lost until the controller has given others, and exec ends a client's connection. The
loss of CPUs does not wait 15 s for a guest to release a disk; it does wait for one that releases a vCPU, because it moves those vCPUs
itself. A renewal leaves nothing half done: it begins anew when it was overtaken.
"""

PRECEDENCE: Mapping[tuple[Kind, Kind], Precedence] = {
    (coming, other): found for coming, row in _TABLE.items() for other, found in zip(Kind, row, strict=True)
}
"""(requested, in progress) → the decision."""


class StopRequestedError(Exception):
    """The start was given up because a stop was requested; not an error, but the start ends like one."""


class OvertakenError(RefusedError):
    """A change was given up for another one."""


class StopRequest:
    """The request to stop this instance; the first one counts, later ones change nothing."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self.reason = ""
        self.signals: set[int] = set()
        """The signals that were received and not acted upon yet: the event loop has to deliver them, and may end before it does."""
        self.log_limit = LogRateLimit()
        self._acts: list[Callable[[], None]] = []

    @property
    def clause(self) -> str:
        """Return the clause that names the request to others."""
        return f"the instance was asked to stop ({self.reason})"

    def ask(self, reason: str) -> None:
        """Ask to stop."""
        if self._event.is_set():
            self.log_limit.log(log.info, InstanceEvent.STOP_REQUESTED_AGAIN, reason)
            return
        log.info(InstanceEvent.STOP_REQUESTED, reason)
        self.reason = reason
        self._event.set()
        for act in self._acts:
            act()

    def call_when_asked(self, act: Callable[[], None]) -> None:
        """Call *act* at the first request; call it now if there was one."""
        self._acts.append(act)
        if self._event.is_set():
            act()

    async def asked(self) -> None:
        """Wait for the first request."""
        await self._event.wait()


@define
class LiveChange:
    """A change that is in progress, or waits to be."""

    kind: Kind
    what: str
    """A clause that names it, such as ``a disk is being attached``."""
    since: float = attrs.field(factory=trio.current_time)
    """The time of the request, or once the change is in progress, the time of its begin, on trio's clock."""
    left: str = ""
    """The part of the change that remains when it is overtaken, as a clause; empty if none does."""
    by: LiveChange | None = None
    """The change that has overtaken it."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    def __str__(self) -> str:
        return f"{self.what} (for {duration(trio.current_time() - self.since)})"

    def to_json(self) -> ChangeDocument:
        """Return the change, and the seconds for which it has been in progress."""
        return {"what": self.what, "seconds": round(trio.current_time() - self.since, 1)}


class Changes:
    """The changes of one instance, each made within :meth:`begin`."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._current: LiveChange | None = None
        self._waiting: list[LiveChange] = []
        """The waiting changes; the next one is first."""
        self._moved = Announcements()
        """Announces that a change was requested or has ended."""
        self._clients = 0
        stop.call_when_asked(self._request_stop)

    @property
    def current(self) -> LiveChange | None:
        """The change that is in progress."""
        return self._current

    def making(self, kind: Kind) -> bool:
        """Return whether a change of *kind* is in progress."""
        return self._current is not None and self._current.kind is kind

    async def over(self, *kinds: Kind) -> None:
        """Wait until no change of these *kinds* is in progress."""
        while any(map(self.making, kinds)):
            await self._moved.next.wait()

    async def stopping(self) -> str:
        """Wait until the instance ends, and return the reason as a clause."""
        while self._current is None or self._current.kind is not Kind.STOP:
            await self._moved.next.wait()
        return self._current.what

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Count a client that waits for its change in the block; :meth:`answered` waits for the end of each block."""
        self._clients += 1
        try:
            yield
        finally:
            self._clients -= 1
            self._moved.announce()

    async def answered(self) -> None:
        """Wait until each client has received the result of its change; the tasks that answer them end with the instance."""
        with trio.move_on_after(ANSWERED_WITHIN):
            while self._clients:
                await self._moved.next.wait()

    @asynccontextmanager
    async def begin(self, kind: Kind, what: str) -> AsyncIterator[LiveChange]:
        """Change the instance in the block, as soon as :data:`PRECEDENCE` allows it; *what* is a clause that names the change.

        Raises :exc:`~runner.base.errors.RefusedError` if the change is refused, and :exc:`OvertakenError` if the block was cancelled for
        another change; for a step of the start, :exc:`StopRequestedError` in both cases.
        """
        change = self._request(kind, what)
        try:
            if (ahead := next(iter(self._known()))) is not change and kind not in {Kind.START, Kind.STOP}:
                log.info(InstanceEvent.CHANGE_WAITING, kind.name.lower(), str(ahead))
            while self._current is not None or self._waiting[0] is not change:
                await self._moved.next.wait()
                self._check(change)
        finally:
            self._waiting.remove(change)
            self._moved.announce()
        change.since, self._current = trio.current_time(), change
        try:
            with change.scope:
                yield change
        finally:
            if kind is not Kind.STOP:  # nothing follows a stop
                self._current = None
            self._moved.announce()
        if change.scope.cancelled_caught and change.by is not None:
            self._raise_because_of(change, change.by)

    def _known(self) -> list[LiveChange]:
        return [*(() if self._current is None else (self._current,)), *self._waiting]

    def _request(self, kind: Kind, what: str) -> LiveChange:
        """Queue a change before those that it overtakes; cancel the one in progress if that is overtaken. Raises as :meth:`begin` does."""
        if kind is Kind.STOP and (asked := next((each for each in self._waiting if each.kind is kind), None)):
            asked.what = what
            return asked
        change = LiveChange(kind, what)
        self._check(change)
        overtaken = (at for at, each in enumerate(self._waiting) if _precedence(change, each) is Precedence.OVERTAKE)
        self._waiting.insert(next(overtaken, len(self._waiting)), change)
        if self._current is not None and _precedence(change, self._current) is Precedence.OVERTAKE:
            self._current.by = change
            self._current.scope.cancel()
        self._moved.announce()
        return change

    def _check(self, change: LiveChange) -> None:
        """Raise as :meth:`begin` does if *change* is refused because of one in progress, or one before it in the queue."""
        for other in self._known():
            if other is change:
                return
            if _precedence(change, other) is Precedence.REFUSE:
                self._raise_because_of(change, other)

    def _raise_because_of(self, change: LiveChange, other: LiveChange) -> NoReturn:
        """Raise the error that ends *change* because of *other*."""
        if change.kind is Kind.START:
            raise StopRequestedError(self._stop.reason)
        if change.by is not None:
            raise OvertakenError("; ".join(filter(None, (f"cannot {change.kind.value}: {other.what}", change.left))))
        if other.kind is Kind.STOP:
            raise RefusedError(f"cannot {change.kind.value} now: {other.what}")
        raise RefusedError(f"cannot {change.kind.value} now: {other}", remedy="ask again later")

    def _request_stop(self) -> None:
        self._request(Kind.STOP, self._stop.clause)


def _precedence(change: LiveChange, other: LiveChange) -> Precedence:
    return PRECEDENCE[change.kind, other.kind]
