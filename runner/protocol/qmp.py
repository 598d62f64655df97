"""The QEMU Machine Protocol (QMP) over an inherited socket.

``qemu.qmp`` checks the messages. Its client is asyncio: bridged to trio it hangs in ``disconnect()`` while a command is stuck, and its
reader is a task, which may be cancelled already when a release needs a reply. So this module implements the client itself, with one rule:
*the task that waits, reads*. There is no reader task and nothing to start or stop. Whichever task reads an event passes it to all
observers, in QEMU's order and before it reads on, and keeps a reply for the task that waits for it.

Errors, by the side that is at fault::

    QmpError                    the conversation failed, or a command did
     ├─ ExecInterruptedError    neither side: QEMU hung up, because it exited or is about to
     ├─ BadReplyError           QEMU, or this module: the reply is not QMP as this module knows it
     ├─ SilentError             QEMU: it is stopped, or its main loop hangs; the conversation goes on if it answers later
     └─ ExecuteError            the command: QEMU understood it and refused it; the conversation goes on

Each has the request as ``sent`` and QEMU's data as ``received``, if there are any.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import attrs
import trio

from runner.base.errors import HostError
from runner.base.events import InstanceEvent
from runner.base.values import LONGEST_TEXT, frozen, short_text, whole_number
from runner.kernel.fd_passing import TooManyFdsInFlightError, begin_to_send, hang_up, send_with_fds
from runner.kernel.line_reader import LineFramer, OverlongError
from runner.kernel.partial_imports import without_init
from runner.kernel.waiting import receive

with without_init("qemu.qmp"):  # which imports asyncio: 12 ms and 1.6 MB instead of 1 ms
    from qemu.qmp.error import ProtocolError
    from qemu.qmp.message import Message
    from qemu.qmp.models import ErrorResponse, Greeting

log = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_LINE = 4 << 20
"""Bytes; the longest reply that this program asks for, to ``query-qmp-schema``, has about 250 KiB.

A longer reply fails its command alone: operators may ask for others."""

LONGEST_EVENT = 4 << 10
"""Bytes of the longest event that is kept; QEMU's own have less than 1 KiB. Of a longer one only its arrival is noted."""
KEPT_EVENTS = 1000
"""Events kept until a task observes them; a guest can make QEMU send them endlessly."""

_HUNG_UP = "cannot talk to QEMU: it hung up"

_REPLY = re.compile(rb'\s*\{\s*"(?:return|error|id)"')
"""The beginning of a reply."""


class QmpError(HostError):
    """The conversation with QEMU failed, or a command did."""

    def __init__(self, sentence: str, *, sent: Mapping[str, object] | None = None, received: object = None) -> None:
        super().__init__(sentence)
        self.sent = sent
        """The request, if the error belongs to one."""
        self.received = received
        """The data that QEMU sent: a message, or bytes that are not one."""


class ExecInterruptedError(QmpError):
    """QEMU hung up, or this side did."""


class BadReplyError(QmpError):
    """QEMU sent data that are not QMP, or a reply without a value that the command promises."""


class SilentError(QmpError):
    """QEMU does not answer in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"QEMU does not answer: it has owed a reply for {seconds:.0f} s, because a debugger, a core dump or a freezer has "
            "stopped it, or its main loop waits for a file system or a device of the host"
        )


class ExecuteError(QmpError):
    """QEMU refused a command; *kind* is its error class, such as ``CommandNotFound``."""

    def __init__(self, sent: Mapping[str, object], received: ErrorResponse) -> None:
        self.kind = received.error.class_[:LONGEST_TEXT]
        self.description = received.error.desc[:LONGEST_TEXT]
        super().__init__(f"cannot execute {sent['execute']!r}: {self.description}", sent=sent, received=received)

    @property
    def in_process_of_unplug(self) -> bool:
        """Return whether the guest is asked for the device already (``qmp_device_del`` of QEMU); "Hot-unplug failed: …" is a failure."""
        return self.description.endswith("is already in the process of unplug")


@frozen
class QmpEvent:
    """A message that QEMU sends unasked (``qapi/*.json``), with the scalar values of its *data*."""

    name: str
    data: Mapping[str, object]
    message: Mapping[str, object] = attrs.field(factory=dict)
    """All of it, as QEMU has sent it."""

    @classmethod
    def of(cls, message: Mapping[str, object]) -> QmpEvent:
        """Return the event that *message* is."""
        data = message.get("data")
        scalars = data.items() if isinstance(data, dict) else ()
        return cls(
            str(message["event"]), {key: each for key, each in scalars if not isinstance(each, dict | list)}, message
        )


@frozen
class VcpuThread:
    """The thread of one vCPU, as ``query-cpus-fast`` returns it."""

    index: int
    tid: int


class MonitorRecord(NamedTuple):
    """The state of a conversation with QEMU between two commands."""

    greeting: str
    """QEMU's greeting, as JSON."""
    next_number: int
    """The number of the next command; replies to abandoned commands have earlier numbers."""
    unfinished: bytes = b""
    """Bytes of an incomplete line that were read."""
    skipping: bool = False
    unanswered: tuple[str, ...] = ()
    events: tuple[tuple[str, str], ...] = ()
    """Events that no task has observed yet: name, and data as JSON."""


class Monitor:
    """A conversation with one QEMU; :meth:`greet` begins it.

    Any number of tasks may wait in its methods at once, and each may be cancelled: the reply to an abandoned command is
    dropped when it comes. Only a command cancelled while half of it is sent ends the conversation.

    Example::

        monitor = Monitor(ours)
        await monitor.greet()
        await monitor.execute("cont")
    """

    def __init__(self, ours: socket.socket) -> None:
        self._ours = ours
        self._socket = trio.socket.from_stdlib_socket(ours)
        self._lines = LineFramer(LONGEST_LINE)
        self._greeting: Message | None = None
        self._observers: list[Callable[[QmpEvent], None]] = []
        self._expected: dict[str, Message | None] = {}
        self._unanswered: deque[str] = deque()
        """The numbers of the commands without a reply, including abandoned ones, in the order of their replies."""
        self._owed_since = 0.0
        """The time since which QEMU has owed the next reply, if it owes one."""
        self._replies = 0
        self._skipping = False
        """Whether the next bytes belong to an overlong line."""
        self._events: deque[QmpEvent] = deque(maxlen=KEPT_EVENTS)
        """The events that no task has observed yet."""
        self._numbers = itertools.count(1)
        self._sending = trio.Lock()
        self._reading = False
        self._news = trio.lowlevel.ParkingLot()
        self._failure: QmpError | None = None

    @property
    def busy(self) -> bool:
        """Return whether a command is being sent, or a task waits for its reply."""
        return bool(self._expected) or self._sending.locked()

    def fileno(self) -> int:
        """Return the number of its descriptor."""
        return self._socket.fileno()

    def record(self) -> MonitorRecord:
        """Return the state that another program needs to continue the conversation."""
        next_number = next(self._numbers)
        self._numbers = itertools.count(next_number)
        return MonitorRecord(
            json.dumps(dict(self._greeting or {})),
            next_number,
            self._lines.held,
            self._skipping,
            tuple(self._unanswered),
            tuple((event.name, json.dumps(dict(event.data))) for event in self._events),
        )

    def continue_from(self, record: MonitorRecord) -> Monitor:
        """Continue the conversation of the previous program, which is past its greeting; return this monitor."""
        self._greeting = Message(json.loads(record.greeting))
        self._numbers = itertools.count(record.next_number)
        self._lines.feed(record.unfinished)
        self._skipping = record.skipping
        self._unanswered.extend(record.unanswered)
        self._owed_since = trio.current_time()
        self._events.extend(QmpEvent.of({"event": name, "data": json.loads(data)}) for name, data in record.events)
        return self

    async def greet(self) -> str:
        """Wait for QEMU's greeting, enter command mode and return QEMU's version."""
        await self.until(lambda: self._greeting is not None)
        greeting = dict(self._greeting or {})
        try:
            Greeting(greeting)
            text = self.version
        except (LookupError, TypeError, ValueError) as error:
            sentence = f"cannot understand QEMU's greeting {greeting!r:.1000}"
            raise self._fail(BadReplyError(sentence, received=greeting)) from error
        await self.execute("qmp_capabilities")
        return text

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, object] | None = None,
        *,
        fds: Sequence[int] = (),
        wanted: trio.CancelScope | None = None,
    ) -> object:
        """Execute *command* and return its result; the descriptors *fds* are sent along and stay the caller's.

        Once *wanted* is cancelled, the wait for the reply ends; the command has then been sent completely, so that the conversation can
        continue. Raises :exc:`ExecuteError` when QEMU refuses it, another :exc:`QmpError` when the conversation, or the wait, is over.
        """
        number = str(next(self._numbers))
        request: dict[str, object] = {"execute": command, "id": number}
        if arguments is not None:
            request["arguments"] = arguments
        # Before it is sent: another task may read the reply before this one is back from sending.
        self._expected[number] = None
        try:
            await self._send(request, fds)
            with wanted or trio.CancelScope():
                await self.until(lambda: self._expected[number] is not None)
            reply = self._expected[number]
        finally:
            del self._expected[number]
        if reply is None:
            raise ExecInterruptedError(
                f"cannot wait for the reply to {command!r}: it is not wanted any more", sent=request
            )
        if "error" in reply:
            try:
                refusal = ExecuteError(request, ErrorResponse(reply))
            except (KeyError, TypeError) as error:
                sentence = f"cannot understand QEMU's refusal of {command!r}: {dict(reply)!r:.1000}"
                raise self._fail(BadReplyError(sentence, sent=request, received=reply)) from error
            raise refusal
        return reply["return"]

    async def query(
        self,
        command: str,
        parse: Callable[[Any], T],
        arguments: Mapping[str, object] | None = None,
        *,
        fds: Sequence[int] = (),
    ) -> T:
        """Execute *command* as :meth:`execute` does, and return *parse* of its result.

        QEMU may be under the guest's control, so *parse* validates everything (:func:`whole_number`, :func:`short_text`). If it fails,
        :exc:`BadReplyError` is raised, and the conversation continues.
        """
        reply = await self.execute(command, arguments, fds=fds)
        try:
            return parse(reply)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            sentence = f"cannot understand QEMU's answer to {command!r}: {reply!r:.1000}"
            raise BadReplyError(sentence, sent={"execute": command}, received=reply) from error

    @property
    def owed_for(self) -> float:
        """Seconds for which QEMU has owed the next reply; 0 if it owes none."""
        return trio.current_time() - self._owed_since if self._unanswered else 0.0

    async def silent(self, seconds: float) -> SilentError:
        """Wait until QEMU has owed a reply for *seconds*, and return the error for that."""
        while (left := seconds - self.owed_for) > 0:  # noqa: ASYNC110 - it may owe another one by then
            await trio.sleep(left)
        return SilentError(self.owed_for)

    async def answers(self) -> str:
        """Wait until QEMU answers, and return the guest's ``RunState``; empty if the answer was to another command.

        QEMU executes commands in order, so while it owes a reply no further command is sent. The caller sets a time limit.
        """
        if not self._unanswered:
            return await self.run_state()
        before = self._replies
        await self.until(lambda: self._replies != before)
        return ""

    async def run_state(self) -> str:
        """Return the guest's ``RunState`` (``query-status``)."""
        return await self.query("query-status", lambda reply: short_text(reply["status"]))

    async def within(self, seconds: float, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of *ask*, which waits for QEMU. Raises :exc:`SilentError` after *seconds*.

        Example::

            await monitor.within(5, monitor.run_state)
        """
        with trio.move_on_after(seconds):
            return await ask()
        raise SilentError(max(self.owed_for, seconds))

    @property
    def greeting(self) -> Mapping[str, object]:
        """Return QEMU's greeting; it is empty before :meth:`greet` has returned."""
        return self._greeting or {}

    @property
    def version(self) -> str:
        """Return QEMU's version, such as ``11.1.3``, by its greeting."""
        greeting: Any = self.greeting
        numbers = greeting["QMP"]["version"]["qemu"]
        return ".".join(str(whole_number(numbers[part])) for part in ("major", "minor", "micro"))

    @contextmanager
    def observed_by(self, observe: Callable[[QmpEvent], None]) -> Iterator[None]:
        """Call *observe*, which must not raise, with each event while the block runs; observers are called in the order of their blocks.

        Events that came before anybody observed are kept, the newest :data:`KEPT_EVENTS`, and are passed on at the next reading.
        """
        observers = self._observers  # another conversation may take them over
        observers.append(observe)
        try:
            yield
        finally:
            observers.remove(observe)

    def take_over_observers(self, before: Monitor) -> None:
        """Pass this conversation's events to the observers of *before*, and its events to none of them."""
        self._observers, before._observers = before._observers, self._observers

    def _pass_on(self) -> None:
        while self._observers and self._events:
            event = self._events.popleft()
            for observe in self._observers:
                observe(event)

    async def vcpu_threads(self) -> tuple[VcpuThread, ...]:
        """Return the threads of the vCPUs, by vCPU index (``query-cpus-fast``)."""

        def parse(reply: Any) -> tuple[VcpuThread, ...]:
            vcpus = (VcpuThread(whole_number(each["cpu-index"]), whole_number(each["thread-id"])) for each in reply)
            return tuple(sorted(vcpus, key=lambda vcpu: vcpu.index))

        return await self.query("query-cpus-fast", parse)

    def close(self) -> None:
        """Hang up; every waiting task gets :exc:`ExecInterruptedError`."""
        self._fail(ExecInterruptedError("cannot talk to QEMU: the conversation was ended"))
        hang_up(self._socket)

    async def iothreads(self) -> dict[int, str]:
        """Return the iothreads' ids by thread (``query-iothreads``)."""
        return await self.query(
            "query-iothreads", lambda reply: {whole_number(each["thread-id"]): short_text(each["id"]) for each in reply}
        )

    async def _send(self, request: Mapping[str, object], fds: Sequence[int]) -> None:
        async with self._sending:
            if self._failure is not None:
                raise self._failure
            await trio.lowlevel.checkpoint_if_cancelled()
            number, begun = str(request["id"]), False
            try:
                if not self._unanswered:
                    self._owed_since = trio.current_time()
                self._unanswered.append(number)
                rest = await begin_to_send(self._socket, json.dumps(request).encode() + b"\n", fds)
                begun = True
                if rest:
                    await send_with_fds(self._socket, bytes(rest))
            except (trio.ClosedResourceError, OSError) as error:
                raise self._fail(ExecInterruptedError(_HUNG_UP, sent=request)) from error
            except (trio.Cancelled, TooManyFdsInFlightError):
                if begun:
                    sentence = "cannot talk to QEMU: a command was abandoned half-sent"
                    self._fail(ExecInterruptedError(sentence, sent=request))
                else:  # nothing was sent, and no reply comes
                    with suppress(ValueError):  # unless QEMU, which may be the guest's, has replied before
                        self._unanswered.remove(number)
                raise

    async def until(self, happened: Callable[[], bool]) -> None:
        """Read until *happened* is true; while another task reads, wait for its result."""
        self._pass_on()
        while not happened():
            if self._failure is not None:
                raise self._failure
            if self._reading:
                await self._news.park()
                continue
            self._reading = True
            try:
                await self._read()
            finally:
                self._reading = False
                self._news.unpark_all()

    async def _read(self) -> None:
        """Process the next complete lines, as many as one step may handle; read if there are none.

        An error that ends the conversation is remembered, not raised, because earlier lines may hold a reply that another task waits for.
        """
        if self._lines.has_line:
            await trio.lowlevel.checkpoint()
        else:
            await self._receive()
        try:
            for line in self._lines.step():
                if line.strip():
                    self._take_in(line)
        except OverlongError:
            self._take_in_overlong(self._lines.take_rest())

    def _take_in_overlong(self, data: bytes) -> None:
        """Fail the command whose reply is too long to be held, and drop that line.

        QEMU executes commands, and replies, in their order ("Issuing Commands" of ``docs/interop/qmp-spec.rst``).
        """
        sentence = f"it sent a line of more than {LONGEST_LINE} bytes"
        if not self._unanswered or not _REPLY.match(data[:100]):
            self._fail(BadReplyError(f"cannot understand QEMU: {sentence}"))
            return
        error = {"class": "GenericError", "desc": f"{sentence}; ask for less"}
        self._take_in_message(Message({"error": error, "id": self._unanswered[0]}))
        self._skip(data)

    def _skip(self, data: bytes) -> None:
        """Drop the bytes of the overlong line; process the rest."""
        _, end, rest = data.partition(b"\n")
        self._skipping = not end
        self._lines.feed(rest)

    async def _receive(self) -> None:
        try:
            data = await receive(self._ours, 1 << 16)
        except (trio.ClosedResourceError, OSError):
            self._fail(ExecInterruptedError(_HUNG_UP))
            return
        if not data:
            unfinished = self._lines.take_rest()
            where = f" in the middle of {unfinished[:80]!r}" if unfinished else ""
            self._fail(ExecInterruptedError(f"{_HUNG_UP}{where}", received=unfinished or None))
        elif self._skipping:
            self._skip(data)
        else:
            self._lines.feed(data)

    def _take_in(self, line: bytes) -> None:
        try:
            message = Message(line)
        except (ProtocolError, ValueError, RecursionError):  # errors of Python's parser are not always wrapped
            self._fail(BadReplyError(f"cannot understand QEMU: it sent {line[:80]!r}", received=line))
            return
        if "event" in message and len(line) > LONGEST_EVENT:
            message = Message({"event": f"an event of {len(line)} bytes"})
        self._take_in_message(message)

    def _take_in_message(self, message: Message) -> None:
        number = str(message.get("id"))
        if "return" in message or "error" in message:
            with suppress(ValueError):  # a reply to nothing that was asked is no answer
                self._unanswered.remove(number)
                self._replies += 1
                self._owed_since = trio.current_time()
        if "event" in message:
            event = QmpEvent.of(message)
            log.debug(InstanceEvent.QMP_EVENT, event.name, dict(event.data))
            self._events.append(event)
            self._pass_on()
        elif "QMP" in message and self._greeting is None:
            self._greeting = message
        elif number in self._expected and ("return" in message or "error" in message):
            self._expected[number] = message
        else:
            log.debug(InstanceEvent.QMP_MESSAGE_UNEXPECTED, message)

    def _fail(self, failure: QmpError) -> QmpError:
        """Remember the first *failure*, which ends the conversation, and return it."""
        self._failure = self._failure or failure
        self._news.unpark_all()
        return self._failure
