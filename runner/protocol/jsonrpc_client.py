"""The client of JSON-RPC 2.0 over a Unix stream socket, one message a line; with some answers come descriptors."""

from __future__ import annotations

import errno
import json
import random
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import PurePosixPath

import attrs
import trio

from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.fd_passing import receive_with_fds, send_with_fds
from runner.kernel.files import Descriptor
from runner.kernel.line_reader import LineFramer, OverlongError, receive_line
from runner.kernel.sockets import reachable
from runner.kernel.waiting import persistently
from runner.protocol.jsonrpc import BUSY

LONGEST_RESPONSE = 1 << 16
"""Bytes of a response, without its line end."""
LONGEST_LIST = 1 << 20
"""Bytes of a node's list of instances, which may be a thousand."""
_MOST_FDS = 16
"""Descriptors that may come with one response."""
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED}
_BUSY = {errno.EAGAIN, errno.ECONNRESET, errno.EPIPE}
"""EAGAIN: the queue of connections is full; the server runs, and cannot accept yet. The others: the connection was closed in favour of
another one, or the server has just ended."""
CONNECTED_WITHIN = 2.0
"""Seconds for a place in the queue of connections."""
_ATTEMPTS_APART = (0.001, 0.005)
"""Seconds between two attempts, random, so that runners that start together do not collide again."""


class CallRefusedError(HostError):
    """The server refused; *code* is its JSON-RPC error code, *data* further values."""

    def __init__(self, sentence: str, code: int, data: Mapping[str, object] | None = None, *, remedy: str = "") -> None:
        super().__init__(sentence, remedy=remedy)
        self.code = code
        self.data = data or {}


class ServerAbsentError(HostError):
    """No process answers at the server's socket, or it is busy; a later attempt may succeed."""


class ServerBusyError(ServerAbsentError):
    """The server has reached its limit of requests; it may answer within milliseconds."""


@frozen
class ReceivedFds:
    """Descriptors that were received; *stack* closes them."""

    stack: ExitStack
    descriptors: list[Descriptor] = attrs.field(factory=list)

    def take(self, number: int) -> None:
        """Own the open descriptor *number*."""
        self.descriptors.append(Descriptor(number))
        self.stack.callback(self.descriptors[-1].close)


async def ask(
    server: str,
    path: PurePosixPath,
    method: str,
    params: Mapping[str, object],
    received: ReceivedFds | None = None,
) -> object:
    """Call *method* of the server at *path*, and return its result; *server* names it in errors, such as ``"the instance"``.

    Descriptors that come with it go to *received*; without it the kernel closes them. Raises :class:`CallRefusedError`,
    :class:`ServerAbsentError`, :class:`ServerBusyError`, or :exc:`~runner.base.errors.HostError` for a response that is not understood.
    """
    async with connected(server, path) as connection:
        return await connection.call(method, params, received)


@frozen
class RpcConnection:
    """A connection to a *server*, for successive calls."""

    _connection: trio.socket.SocketType
    _server: str

    async def call(self, method: str, params: Mapping[str, object], received: ReceivedFds | None = None) -> object:
        """Return the result of *method*; descriptors sent with it go to *received*, or are closed by the kernel without it.

        Raises :class:`CallRefusedError`, :class:`ServerBusyError`, :exc:`~runner.base.errors.HostError` for a response
        that is not understood, and ``OSError``.
        """
        request = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
        await send_with_fds(self._connection, json.dumps(request, separators=(",", ":")).encode() + b"\n")
        longest = LONGEST_LIST if method == "listInstances" else LONGEST_RESPONSE
        response = await _response(self._connection, received, self._server, longest)
        return _result(method, response, self._server)


@asynccontextmanager
async def connected(server: str, path: PurePosixPath) -> AsyncIterator[RpcConnection]:
    """Hold a connection to *server* at *path*; an ``OSError`` of the block counts as one of this connection.

    Raises :class:`ServerAbsentError`, or :exc:`~runner.base.errors.HostError`.
    """
    with (
        _explained(path, server),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connecting,
    ):
        with reachable(path) as address:
            await _connect(connecting, address)
        yield RpcConnection(trio.socket.from_stdlib_socket(connecting), server)


@contextmanager
def _explained(path: PurePosixPath, server: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _BUSY:
            raise ServerBusyError(f"cannot reach {server} at {str(path)!r}") from error
        if error.errno in _ABSENT:
            raise ServerAbsentError(f"cannot reach {server} at {str(path)!r}") from error
        raise HostError(f"cannot talk to {server} at {str(path)!r}") from error


async def _connect(connection: socket.socket, address: str) -> None:
    """Connect the non-blocking *connection*; wait :data:`CONNECTED_WITHIN` for a place in the server's queue.

    A full queue causes EAGAIN at once (``unix_stream_connect`` of ``net/unix/af_unix.c``), and no event reports a free place. Even if
    another process fills the queue endlessly, a place is free every few attempts, for microseconds.
    """
    deadline = trio.current_time() + CONNECTED_WITHIN
    while True:
        try:
            connection.connect(address)
        except BlockingIOError:
            if trio.current_time() >= deadline:
                raise
        else:
            return
        await trio.sleep(random.uniform(*_ATTEMPTS_APART))  # noqa: S311 - no secret


async def _response(
    connection: trio.socket.SocketType, received: ReceivedFds | None, server: str, longest: int
) -> bytes:
    async def receive(size: int) -> bytes:
        if received is None:
            return await persistently(partial(connection.recv, size))
        return await receive_with_fds(connection, size, _MOST_FDS - len(received.descriptors), received.take)

    try:
        line = await receive_line(receive, LineFramer(longest), chunk=LONGEST_RESPONSE)
    except OverlongError:
        raise HostError(f"cannot understand {server}: its answer is longer than {longest} bytes") from None
    if line is None:
        raise ConnectionResetError(errno.ECONNRESET, "it hung up before it had answered")
    return line


def _result(method: str, response: bytes, server: str) -> object:
    try:
        document = json.loads(response)
    except (ValueError, RecursionError) as error:
        raise HostError(f"cannot understand {server}: it answered {method!r} with {response[:200]!r}") from error
    match document:
        case {"error": {"code": int(code), "message": str(message)} as error}:
            given = error.get("data")
            data = given if isinstance(given, dict) else {}
            remedy = str(data.get("remedy", ""))
            sentence = message.removesuffix(f"; {remedy}")
            if code == BUSY:
                raise ServerBusyError(sentence, remedy=remedy)
            raise CallRefusedError(sentence, code, data, remedy=remedy)
        case {"result": result}:
            return result
    raise HostError(f"cannot understand {server}: it answered {method!r} with {response[:200]!r}")
