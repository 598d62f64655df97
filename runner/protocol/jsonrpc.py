"""JSON-RPC 2.0 (https://www.jsonrpc.org/specification) over a stream of lines: framing, checking, answering.

A message is one line. Because people type them, a message *printed over several lines* is accepted too: a line that holds nothing but ``{``
or ``[`` opens it, the matching bracket alone at the beginning of a line closes it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import trio

from runner.base.strict_json import parse_json
from runner.base.values import frozen
from runner.kernel.line_reader import LineFramer, OverlongError

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
SERVER_ERROR = -32000
BUSY = -32005
"""A server's that has reached its limit of connections or requests."""
"""The first of the codes for errors that a server defines (-32000 to -32099)."""

LONGEST_BATCH = 64
"""Most requests in one batch; larger batches are refused as a whole, because answers are larger than the shortest requests."""

_BRACKETS = {b"{": b"}", b"[": b"]"}

Attached = Callable[[ExitStack], Sequence[int]]
"""Opens the descriptors that are sent with an answer; the stack closes them, and nothing else may, because sending may take long.

Raises :exc:`~runner.base.errors.HostError`, or :class:`RpcError` for another answer."""


class RpcError(Exception):
    """The error that answers a request, with the descriptors of *attached*.

    The client receives *message* and *remedy* as one sentence, and the remedy also in the *data*.
    """

    def __init__(
        self,
        code: int,
        message: str,
        data: Mapping[str, object] | None = None,
        attached: Attached | None = None,
        *,
        remedy: str = "",
    ) -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.data = {**(data or {}), "remedy": remedy} if remedy else data
        self.attached = attached


@frozen
class RpcResult:
    """The result of a method: a JSON value, and the descriptors that are sent with it."""

    value: object
    attached: Attached | None = None


@frozen
class Reply:
    """An encoded response: a line, and the descriptors to open and send with its first byte."""

    line: bytes
    attached: Attached | None = None

    def replaced(self, error: RpcError) -> bytes:
        """Return the line that answers the same request with *error*; a batch has no descriptors, so there is one request."""
        return _line(_failure(json.loads(self.line)["id"], error))


Call = Callable[[str, "Mapping[str, object] | list[object]"], Awaitable[RpcResult]]
"""Calls a method by name; raises :class:`RpcError`."""


_Response = tuple[dict[str, object], Attached | None]


class MessageFramer:
    """Cuts a stream of bytes into messages; holds at most *limit* bytes of an unfinished one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._framer = LineFramer(limit)
        self._opened = bytearray()
        """The lines so far of a message printed over several lines."""
        self._closing = b""

    @property
    def unfinished(self) -> bool:
        """Tell whether a message printed over several lines has been begun and not completed."""
        return bool(self._closing)

    @property
    def has_line(self) -> bool:
        """Tell whether :meth:`step` has lines left to handle."""
        return self._framer.has_line

    def feed(self, data: bytes) -> None:
        """Append *data*, received from the client."""
        self._framer.feed(data)

    def step(self) -> Iterator[bytes]:
        """Yield the messages that the next lines complete, as many lines as one step may handle.

        Raises :class:`OverlongError`, after which the stream is lost.
        """
        for line in self._framer.step():
            yield from self._take(line + b"\n")
        if not self.has_line and len(self._framer) + len(self._opened) > self._limit:
            raise OverlongError

    def flush(self) -> Iterator[bytes]:
        """Yield the incomplete rest as a message: the client will send no more."""
        rest = bytes(self._opened) + self._framer.take_rest()
        self._close()
        if rest.strip():
            yield rest

    def _take(self, line: bytes) -> Iterator[bytes]:
        if len(line) + len(self._opened) > self._limit:
            raise OverlongError
        bare = line.rstrip()
        if self._closing and len(bare) > 1 and bare[:1] in _BRACKETS:
            # A whole message at the beginning of a line: the message begun before it will never be completed.
            yield self._close()
        if self._closing:
            self._opened += line
            if bare == self._closing:
                yield self._close()
        elif bare in _BRACKETS:
            self._opened += line
            self._closing = _BRACKETS[bare]
        elif bare:
            yield line

    def _close(self) -> bytes:
        message = bytes(self._opened)
        self._opened.clear()
        self._closing = b""
        return message


async def answer(message: bytes, call: Call) -> Reply | None:
    """Answer one message, a batch included; return ``None`` if it gets no response (notifications).

    Requests of a batch are done one after another, and their results come without descriptors.
    """
    await trio.lowlevel.checkpoint()  # so that a client that sends endlessly does not block the others
    try:
        document = parse_message(message)
    except ValueError as error:
        return Reply(format_error(RpcError(PARSE_ERROR, f"Parse error: {error}")))
    if not isinstance(document, list):
        found = await _respond(document, call)
        return None if found is None else Reply(_line(found[0]), found[1])
    if not 0 < len(document) <= LONGEST_BATCH:
        many = f"a batch of {len(document)}, and 1 to {LONGEST_BATCH} are allowed"
        return Reply(format_error(RpcError(INVALID_REQUEST, f"Invalid Request: {many}")))
    responses = [response for request in document if (response := await _respond(request, call)) is not None]
    return Reply(_line([response for response, _ in responses])) if responses else None


def parse_message(text: bytes) -> object:
    """Return the value of one JSON text (:mod:`runner.base.strict_json`). Raises ``ValueError``, also if it is not UTF-8."""
    try:
        return parse_json(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


async def _respond(request: object, call: Call) -> _Response | None:
    await trio.lowlevel.checkpoint()
    identifier = request.get("id") if isinstance(request, dict) else None
    if isinstance(identifier, bool | dict | list):
        identifier = None
    try:
        method, params = _checked(request)
    except RpcError as error:  # answered even without an id: an invalid request is no notification either
        return _failure(identifier, error), None
    response: _Response
    try:
        result = await call(method, params)
    except RpcError as error:
        response = _failure(identifier, error), error.attached
    else:
        response = {"jsonrpc": "2.0", "result": result.value, "id": identifier}, result.attached
    return response if isinstance(request, dict) and "id" in request else None


def _checked(request: object) -> tuple[str, Mapping[str, object] | list[object]]:
    if not isinstance(request, dict):
        raise RpcError(INVALID_REQUEST, "Invalid Request: it must be an object")
    if isinstance(request.get("id"), bool | dict | list):
        raise RpcError(INVALID_REQUEST, "Invalid Request: 'id' must be a string, a number or null")
    if request.get("jsonrpc") != "2.0":
        raise RpcError(INVALID_REQUEST, "Invalid Request: 'jsonrpc' must be \"2.0\"")
    method = request.get("method")
    if not isinstance(method, str):
        raise RpcError(INVALID_REQUEST, "Invalid Request: 'method' must be a string")
    params = request.get("params", {})
    if not isinstance(params, dict | list):
        raise RpcError(INVALID_REQUEST, "Invalid Request: 'params' must be an object or an array")
    return method, params


def _failure(identifier: object, error: RpcError) -> dict[str, object]:
    encoded: dict[str, object] = {"code": error.code, "message": str(error)}
    if error.data is not None:
        encoded["data"] = dict(error.data)
    return {"jsonrpc": "2.0", "error": encoded, "id": identifier}


def format_error(error: RpcError) -> bytes:
    """Return the response line for *error* that belongs to no particular request."""
    return _line(_failure(None, error))


def _line(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
