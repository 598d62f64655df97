"""The server's side of the QEMU Machine Protocol: one session on one connection (``docs/interop/qmp-spec.rst``).

A session greets, expects ``qmp_capabilities``, and then answers commands one after another, in order, and sends events. It
offers no capabilities: out-of-band commands would overtake others. A client need not end its messages with a line end, and
``qemu.qmp`` does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial

import attrs
import trio

from runner.base.errors import RunnerError, explain
from runner.base.values import define
from runner.kernel.connections import hung_up
from runner.kernel.fd_passing import send_with_fds
from runner.kernel.partial_imports import without_init
from runner.kernel.waiting import persistently
from runner.protocol.qmp import ExecuteError, QmpEvent

with without_init("qemu.qmp"):
    from qemu.qmp.error import ProtocolError
    from qemu.qmp.message import Message

LONGEST_REQUEST = 64 * 1024
"""Bytes of one message from the client."""

DEEPEST_REQUEST = 100
"""Objects and arrays inside one another in a message; Python's parser and QEMU's give up at about 1000."""

KEPT_EVENTS = 1000
"""Events kept for a client that does not read; further ones are dropped."""

Execute = Callable[[str, "Mapping[str, object] | None", trio.CancelScope], Awaitable[object]]
"""Executes a command and returns its result; raises :exc:`~runner.base.errors.RunnerError` to refuse it.

The scope is cancelled when the client has gone, so that the result is no longer needed.
"""

ObservedBy = Callable[[Callable[[QmpEvent], None]], AbstractContextManager[None]]
"""Calls a function with each event while the block runs, as :meth:`~runner.protocol.qmp.Monitor.observed_by`."""

# A lone quotation mark begins a string that has not ended.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)
_SPACE = b" \t\r\n"


class BadRequestError(Exception):
    """The client has sent data that are no QMP message; the begin of the next message cannot be found."""


class _CommandError(Exception):
    """A command that is answered with an error of class *kind*."""

    def __init__(self, description: str, kind: str = "GenericError") -> None:
        super().__init__(description)
        self.kind = kind


class ObjectFramer:
    """Cuts a stream of bytes into JSON objects, ignoring anything between them; holds at most *longest* bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        """Append *data*, received from the client."""
        self._buffer += data

    def next_object(self) -> bytes | None:
        """Return the next object, or ``None`` if more data is needed. Raises :exc:`BadRequestError`."""
        self._buffer = self._buffer.lstrip(_SPACE)
        if self._buffer[:1] not in {b"", b"{"}:
            raise BadRequestError(f"JSON parse error, no object: {self._buffer[:80]!r}")
        depth = 0
        for token in _TOKEN.finditer(self._buffer):
            if token[0] == b'"':
                break
            depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(token[0], 0)
            if depth > DEEPEST_REQUEST:
                raise BadRequestError(f"a message may be nested {DEEPEST_REQUEST} deep")
            if depth == 0:
                message, self._buffer = self._buffer[: token.end()], self._buffer[token.end() :]
                return message
        if len(self._buffer) > self._longest:
            raise BadRequestError(f"a message may have {self._longest} bytes")
        return None


@define
class QmpSession:
    """The conversation with one client on a connection that stays the caller's to close."""

    _connection: trio.socket.SocketType
    _version: object
    _execute: Execute
    _observed_by: ObservedBy
    _sending: trio.Lock = attrs.field(factory=trio.Lock)
    _negotiated: trio.Event = attrs.field(factory=trio.Event)
    _gone: bool = False
    _wanted: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def serve(self) -> None:
        """Serve the client until it hangs up, or has sent data that are not QMP."""
        with suppress(OSError):
            await self._send({"QMP": {"version": self._version, "capabilities": []}})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_events)
            nursery.start_soon(self._notice_the_end)
            with suppress(OSError):
                try:
                    await self._answer_commands()
                except BadRequestError as error:
                    await self._send(_error(str(error)))
            nursery.cancel_scope.cancel()

    async def _notice_the_end(self) -> None:
        """Stop waiting for QEMU's reply once the client has hung up, because the wait would keep the client's place occupied."""
        with suppress(OSError):
            await hung_up(self._connection)
            self._gone = True
            self._wanted.cancel()

    async def _answer_commands(self) -> None:
        framer = ObjectFramer(LONGEST_REQUEST)
        while data := await persistently(partial(self._connection.recv, LONGEST_REQUEST)):
            framer.feed(data)
            while (text := framer.next_object()) is not None:
                await self._send(await self._answer(_parsed(text)))

    async def _answer(self, request: Message) -> dict[str, object]:
        number = {"id": request["id"]} if "id" in request else {}
        try:
            return {"return": await self._result(request), **number}
        except _CommandError as error:
            return {**_error(str(error), error.kind), **number}

    async def _result(self, request: Message) -> object:
        command, arguments = request.get("execute"), request.get("arguments")
        if not isinstance(command, str):
            raise _CommandError("QMP input lacks member 'execute'")
        if arguments is not None and not isinstance(arguments, dict):
            raise _CommandError("QMP input member 'arguments' must be an object")
        if not _is_json(arguments):
            raise _CommandError("QMP input member 'arguments' has a number or a character that JSON does not have")
        if (command == "qmp_capabilities") is self._negotiated.is_set():
            raise _CommandError(_OUT_OF_TURN[self._negotiated.is_set()], "CommandNotFound")
        if not self._negotiated.is_set():
            self._negotiated.set()
            return {}
        self._wanted = trio.CancelScope()
        if self._gone:  # commands sent before are still executed
            self._wanted.cancel()
        try:
            return await self._execute(command, arguments, self._wanted)
        except ExecuteError as error:  # in QEMU's own words
            raise _CommandError(error.description, error.kind) from error
        except RunnerError as error:
            raise _CommandError(explain(error)) from error

    async def _send_events(self) -> None:
        await self._negotiated.wait()
        put, take = trio.open_memory_channel[QmpEvent](KEPT_EVENTS)

        def keep(event: QmpEvent) -> None:
            with suppress(trio.WouldBlock):
                put.send_nowait(event)

        with suppress(OSError), self._observed_by(keep):
            async for event in take:
                await self._send(event.message)

    async def _send(self, message: Mapping[str, object]) -> None:
        async with self._sending:
            await _send(self._connection, message)


async def turn_away(connection: trio.socket.SocketType, reason: str) -> None:
    """Send an error with *reason* instead of a greeting. Raises ``OSError`` when the client has hung up."""
    await _send(connection, _error(reason))


async def _send(connection: trio.socket.SocketType, message: Mapping[str, object]) -> None:
    await send_with_fds(connection, bytes(Message(message)) + b"\r\n")


_OUT_OF_TURN = (
    "Expecting capabilities negotiation with 'qmp_capabilities'",
    "Capabilities negotiation is already complete, command ignored",
)
"""QEMU's errors for a command before the negotiation, and for a second negotiation (``monitor/qmp.c``)."""


def _parsed(text: bytes) -> Message:
    try:
        return Message(text)
    except (ProtocolError, ValueError, RecursionError) as error:
        raise BadRequestError(f"JSON parse error in {text[:80]!r}") from error


def _is_json(value: object) -> bool:
    """Tell whether QEMU's parser accepts *value*: NaN, Infinity and lone surrogates cause an error without an id."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


def _error(description: str, kind: str = "GenericError") -> dict[str, object]:
    return {"error": {"class": kind, "desc": description}}
