"""The QEMU Machine Protocol over an inherited socket.

``qemu.qmp``'s own client is asyncio. Bridged to trio it hangs in ``disconnect()`` while a command is stuck, and its reader
is a task, which may be cancelled already when a release needs a reply. Its message and error classes alone would be
forty lines saved, for 12 ms and 1.7 MB that importing asyncio costs PID 1. So the conversation is ours, and it has one
rule: *whoever waits, reads*. There is no reader task and nothing to start or stop; who waits for a reply hands the events
that arrive meanwhile to whoever asks for them next, and the other way round.

Errors by whose fault they are::

    QmpError                 the conversation failed
     ├─ MonitorClosedError       QEMU hung up: it exited, or is about to
     ├─ MonitorGarbledError      QEMU said what is not QMP
     └─ CommandRefusedError      QEMU understood the command and refused it; the conversation goes on
"""

from __future__ import annotations

import array
import itertools
import json
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from runner.errors import HostError

log = logging.getLogger(__name__)

LONGEST_LINE = 4 << 20
"""Bytes; the longest reply there is, ``query-qmp-schema``, has about 250 KiB."""

KEPT_EVENTS = 1000
"""Events kept for nobody in particular; a guest can make QEMU send them without end."""


class QmpError(HostError):
    """The conversation with QEMU failed."""


class ExecInterruptedError(QmpError):
    """QEMU hung up."""


class BadReplyError(QmpError):
    """QEMU said what is not QMP."""


class ExecuteError(QmpError):
    """QEMU refused a command; *kind* is its error class, such as ``CommandNotFound``."""

    def __init__(self, command: str, kind: str, description: str) -> None:
        self.kind = kind
        super().__init__(f"cannot execute {command!r}: {description}")


Message = dict[str, Any]


@attrs.frozen
class QmpEvent:
    """Something QEMU tells without being asked (``qapi/*.json``)."""

    name: str
    data: Mapping[str, object]


@attrs.frozen
class VcpuThread:
    """One vCPU as ``query-cpus-fast`` gives it."""

    index: int
    tid: int


class Monitor:
    """One conversation with one QEMU; use :meth:`greet` to begin it.

    Any number of tasks may wait in its methods at once, and each may be cancelled: the reply to an abandoned command is
    dropped when it comes. Only a command cancelled while half of it is on the wire ends the conversation.
    """

    def __init__(self, ours: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        self._received = bytearray()
        self._greeting: Message | None = None
        self._expected: dict[str, Message | None] = {}
        self._events: deque[QmpEvent] = deque(maxlen=KEPT_EVENTS)
        self._numbers = itertools.count(1)
        self._sending = trio.Lock()
        self._reading = False
        self._news = trio.lowlevel.ParkingLot()
        self._failure: QmpError | None = None

    async def greet(self) -> str:
        """Wait for QEMU's greeting, enter command mode and return QEMU's version."""
        await self._until(lambda: self._greeting is not None)
        greeting = self._greeting or {}
        try:
            version = greeting["QMP"]["version"]["qemu"]
            text = ".".join(str(version[part]) for part in ("major", "minor", "micro"))
        except (KeyError, TypeError) as error:
            raise self._fail(BadReplyError(f"cannot understand QEMU's greeting {greeting!r}")) from error
        await self.execute("qmp_capabilities")
        return text

    async def execute(
        self, command: str, arguments: Mapping[str, object] | None = None, *, passing: Sequence[int] = ()
    ) -> object:
        """Execute *command* and return what it returns; descriptors *passing* with it stay the caller's.

        Raises :exc:`ExecuteError` when QEMU refuses it, another :exc:`QmpError` when the conversation is over.
        """
        number = str(next(self._numbers))
        request: Message = {"execute": command, "id": number}
        if arguments is not None:
            request["arguments"] = arguments
        # Before it is sent: another reader may have the reply before we are back from sending.
        self._expected[number] = None
        try:
            await self._send(json.dumps(request).encode() + b"\n", passing)
            await self._until(lambda: self._expected[number] is not None)
            reply = self._expected[number]
        finally:
            del self._expected[number]
        assert reply is not None  # noqa: S101 - waited for
        if "error" in reply:
            try:
                refusal = ExecuteError(command, reply["error"]["class"], reply["error"]["desc"])
            except (KeyError, TypeError) as error:
                raise self._fail(
                    BadReplyError(f"cannot understand QEMU's refusal of {command!r}: {reply!r}")
                ) from error
            raise refusal
        result: object = reply["return"]
        return result

    async def event(self) -> QmpEvent:
        """Return the oldest event nobody has seen, as soon as there is one."""
        await self._until(lambda: bool(self._events))
        return self._events.popleft()

    async def vcpu_threads(self) -> tuple[VcpuThread, ...]:
        """Return the threads of the vCPUs, by vCPU index (``query-cpus-fast``)."""
        reply: Any = await self.execute("query-cpus-fast")
        try:
            vcpus: list[dict[str, int]] = list(reply)
            return tuple(
                sorted(
                    (VcpuThread(vcpu["cpu-index"], vcpu["thread-id"]) for vcpu in vcpus), key=lambda vcpu: vcpu.index
                )
            )
        except (KeyError, TypeError) as error:
            raise self._fail(BadReplyError(f"cannot understand QEMU's list of vCPUs: {reply!r}")) from error

    def close(self) -> None:
        """Hang up; every waiter gets :exc:`ExecInterruptedError`."""
        self._fail(ExecInterruptedError("cannot talk to QEMU: the conversation was ended"))
        self._stream.socket.close()

    async def iothreads(self) -> dict[int, str]:
        """Return the iothreads' ids by thread (``query-iothreads``)."""
        reply: Any = await self.execute("query-iothreads")
        try:
            return {int(each["thread-id"]): str(each["id"]) for each in reply}
        except (KeyError, TypeError, ValueError) as error:
            raise self._fail(BadReplyError(f"cannot understand QEMU's list of iothreads: {reply!r}")) from error

    async def _send(self, line: bytes, passing: Sequence[int] = ()) -> None:
        async with self._sending:
            if self._failure is not None:
                raise self._failure
            await trio.lowlevel.checkpoint_if_cancelled()
            try:
                if passing:  # they travel with the first byte
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passing))
                    line = line[await self._stream.socket.sendmsg([line], [rights]) :]
                if line:  # else a cancellation would be taken for one in the middle of it
                    await self._stream.send_all(line)
            except (trio.BrokenResourceError, OSError) as error:
                raise self._fail(ExecInterruptedError("cannot talk to QEMU: it hung up")) from error
            except trio.Cancelled:
                self._fail(ExecInterruptedError("cannot talk to QEMU: a command was abandoned half-sent"))
                raise

    async def _until(self, happened: Callable[[], bool]) -> None:
        """Read until something *happened*; when another task reads already, let it."""
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
        """Read once and take in every whole line.

        What ends the conversation is remembered, not raised: the lines before it may hold what somebody waits for.
        """
        try:
            data = await self._stream.receive_some(1 << 16)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._fail(ExecInterruptedError("cannot talk to QEMU: it hung up"))
            return
        if not data:
            rest = f" in the middle of {bytes(self._received[:80])!r}" if self._received else ""
            self._fail(ExecInterruptedError(f"cannot talk to QEMU: it hung up{rest}"))
            return
        searched = len(self._received)
        self._received += data
        while (end := self._received.find(b"\n", searched)) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            searched = 0
            if line.strip():
                self._take_in(line)
        if len(self._received) > LONGEST_LINE:
            self._fail(BadReplyError(f"cannot understand QEMU: it sent a line of more than {LONGEST_LINE} bytes"))

    def _take_in(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._fail(BadReplyError(f"cannot understand QEMU: it sent {line[:80]!r}"))
        elif "event" in message:
            data = message.get("data")
            event = QmpEvent(str(message["event"]), data if isinstance(data, dict) else {})
            log.debug("qmp event name=%s data=%s", event.name, dict(event.data))
            self._events.append(event)
        elif "QMP" in message:
            self._greeting = message
        elif (number := str(message.get("id"))) in self._expected and ("return" in message or "error" in message):
            self._expected[number] = message
        else:
            log.debug("qmp message for nobody message=%r", message)

    def _fail(self, failure: QmpError) -> QmpError:
        """Remember the first *failure*, which ends the conversation, and return it."""
        self._failure = self._failure or failure
        self._news.unpark_all()
        return self._failure
