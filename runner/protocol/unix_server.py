"""The JSON-RPC server on Unix sockets: the limits and timeouts of its clients.

A conversation is a sequence of messages, answered one after another in order. The connection of a client that sends nothing for a while is
closed, so clients open a connection for a request and do not keep it. A client that hangs up while its request is processed does not stop
the processing. A client that sends descriptors along is hung up on, and they are never received (:mod:`runner.kernel.fd_passing`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import attrs
import trio

from runner.base.errors import HostError, explain
from runner.base.events import SharedEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.values import frozen
from runner.kernel.connections import HangUp, close, serve_connections
from runner.kernel.fd_passing import FdsSentError, receive_without_fds, send_with_fds
from runner.kernel.line_reader import OverlongError
from runner.kernel.peers import Peer, Peers
from runner.kernel.sockets import Socket
from runner.kernel.waiting import SHORT, shortages
from runner.protocol.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    SERVER_ERROR,
    MessageFramer,
    Reply,
    RpcError,
    RpcResult,
    answer,
    format_error,
)

log = logging.getLogger(__name__)

_CHUNK = 16 * 1024

UNSENT = "host"
"""The reason in the error for a request that was carried out, but whose descriptors could not be sent."""


Identify = Callable[[], Peer]
"""Returns the process that connected. Raises :exc:`~runner.kernel.peers.PeerError` once it has ended."""


@frozen
class SocketLimits:
    """The limits of a server's clients."""

    message: int = 16 * 1024
    """Bytes of one message, which takes up to 2 ms to parse."""
    connections: int = 64
    """Open connections. A further one replaces the oldest idle connection of the peer with the most, among those with an idle one, if that
    is fairer or if it is its peer's first: a pod may have as many containers, each a peer with one connection."""
    newcomers: int = 192
    """Open connections beyond those, for peers without another one: a connection whose request is processed is never closed, and may take
    minutes."""
    connections_per_peer: int = 16
    """Open connections of one peer. As many more may wait to be admitted; further ones are closed without an answer."""
    in_flight: int = 5
    """Requests of one peer that are processed at a time."""
    first_byte: float = 5.0
    """Seconds from the connection to the first byte of its first message."""
    idle: float = 30.0
    """Seconds from the answer to one message to the end of the next, and for sending an answer."""
    unfinished: float = 1.0
    """Seconds for the rest of a message printed over several lines, and for a refused client to hang up."""


class RpcService(Protocol):
    """The service of a :class:`UnixServer`."""

    @property
    def peers(self) -> Peers:
        """Return the lookup of peers."""

    def admit(self, identify: Identify) -> int:
        """Return the key under which the peer's connections and requests are counted. Raises :exc:`RpcError` to refuse it."""

    async def call(self, identify: Identify, method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
        """Carry out the peer's request. Raises :exc:`RpcError`."""

    def busy(self, reason: str) -> RpcError:
        """Return the error for a peer that exceeds a limit."""


@attrs.define(eq=False)
class _Client:
    connection: trio.socket.SocketType
    identify: Identify
    key: int
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    working: bool = False
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """Shared by all connections of the peer: one message of each peer is parsed in a turn of the event loop."""


def _idle(client: _Client) -> bool:
    return not client.working


@frozen
class UnixServer:
    """Carries messages between clients and *service*."""

    service: RpcService
    limits: SocketLimits
    hang_up: HangUp = close
    _clients: dict[int, list[_Client]] = attrs.field(factory=dict)
    """Admitted clients by peer, the oldest first."""
    _in_flight: Counter[int] = attrs.field(factory=Counter)
    _refused: list[trio.CancelScope] = attrs.field(factory=list)
    """The scopes of refused clients that have not hung up yet, in the order of their refusals."""
    _log_limit: LogRateLimit = attrs.field(factory=LogRateLimit)

    @property
    def connections(self) -> int:
        """Return the number of connections that were admitted and are open."""
        return sum(map(len, self._clients.values()))

    @property
    def in_flight(self) -> int:
        """Return the number of requests that are being processed."""
        return self._in_flight.total()

    async def accept(self, listener: Socket) -> None:
        """Accept connections until cancelled; a failing connection does not affect the others."""
        limits = self.limits
        waiting = limits.connections + limits.newcomers, limits.connections_per_peer
        try:
            await serve_connections(listener, self._serve, self._containers, waiting=waiting, hang_up=self.hang_up)
        finally:
            self._log_limit.log_left_out()

    def _containers(self) -> Callable[[trio.socket.SocketType], int]:
        return partial(self.service.peers.container, own_namespace=self.service.peers.own_namespace())

    async def _serve(self, connection: trio.socket.SocketType, accepted_at: float) -> None:
        """Serve one client. Raises ``OSError`` where the connection is lost."""
        key: int | None = None
        try:
            identify = partial(self.service.peers.identify, connection, accepted_at)
            key = self.service.admit(identify)
            client = _Client(connection, identify, key)
            with self._admitted(client), client.scope:
                await self._exchange(client)
        except RpcError as error:
            await self._refuse(connection, error)
        except OSError as error:
            if error.errno not in SHORT:  # short while identifying it; a short connection is waited for
                raise
            await self._refuse(connection, self._short(error))
        except HostError as error:
            self._log_limit.log(log.warning, SharedEvent.CONNECTION_ENDED, explain(error), peer=key)

    def _short(self, error: OSError) -> RpcError:
        """Return the error for a client that cannot be served now, because this process lacks descriptors or memory."""
        shortages.note(error)
        return self.service.busy(f"{error.strerror}, which others have")

    async def _refuse(self, connection: trio.socket.SocketType, error: RpcError) -> None:
        """Send *error* and wait until the client has sent its data or hung up; otherwise its sending could fail, and it would not read.

        As many such clients may wait as may be connected; a further one replaces the first of them, so that a peer that connects endlessly
        keeps no other out.
        """
        if len(self._refused) >= self.limits.connections:
            self._refused.pop(0).cancel()
        with contextlib.suppress(OSError, FdsSentError), trio.move_on_after(self.limits.unfinished) as scope:
            self._refused.append(scope)
            try:
                await send_with_fds(connection, format_error(error))
                connection.shutdown(socket.SHUT_WR)
                await receive_without_fds(connection, _CHUNK)
            finally:
                if scope in self._refused:
                    self._refused.remove(scope)

    async def _exchange(self, client: _Client) -> None:
        framer = MessageFramer(self.limits.message)
        deadline = trio.current_time() + self.limits.first_byte
        silent = True
        while True:
            data = b""
            rest = trio.current_time() + self.limits.unfinished if framer.unfinished else math.inf
            with trio.move_on_at(min(deadline, rest)) as timeout:
                try:
                    data = await receive_without_fds(client.connection, _CHUNK)
                except FdsSentError:
                    raise RpcError(
                        INVALID_REQUEST, "Invalid Request: descriptors came with it, and none are taken"
                    ) from None
            if timeout.cancelled_caught and not framer.unfinished:
                return
            if silent and data:
                silent, deadline = False, trio.current_time() + self.limits.idle
            try:
                if await self._answer_all(client, framer, data):
                    deadline = trio.current_time() + self.limits.idle
            except OverlongError:
                text = f"Invalid Request: a message may have {self.limits.message} bytes"
                raise RpcError(INVALID_REQUEST, text) from None
            if not data and not timeout.cancelled_caught:
                return

    async def _answer_all(self, client: _Client, framer: MessageFramer, data: bytes) -> bool:
        """Answer every message that *data* completes; return whether there was one. Raises :exc:`OverlongError`.

        Empty data mark the end: then an incomplete message is taken as complete.
        """
        answered = False
        framer.feed(data)
        while True:
            for message in framer.step() if data else framer.flush():
                await self._answer(client, message)
                answered = True
            if not framer.has_line:
                return answered
            await trio.lowlevel.checkpoint()

    async def _answer(self, client: _Client, message: bytes) -> None:
        async def call(method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
            with self._working(client):
                try:
                    return await self.service.call(client.identify, method, params)
                except RpcError:
                    raise
                except Exception as error:
                    if isinstance(error, OSError) and error.errno in SHORT:
                        raise self._short(error) from error
                    self._log_limit.log(log.exception, SharedEvent.METHOD_BUG, method, peer=client.key)
                    raise RpcError(INTERNAL_ERROR, "Internal error") from error

        async with client.turn:
            await trio.lowlevel.checkpoint()
        reply = await answer(message, call)
        if reply is None:
            return
        try:
            await self._send(client.connection, reply)
        except RpcError as instead:  # nothing was sent yet
            await self._send(client.connection, Reply(reply.replaced(instead)))
        except HostError as error:  # an error of a descriptor: nothing was sent yet
            self._log_limit.log(log.warning, SharedEvent.DESCRIPTORS_UNSENT, explain(error), peer=client.key)
            refusal = RpcError(SERVER_ERROR, explain(error), {"reason": UNSENT})
            await self._send(client.connection, Reply(reply.replaced(refusal)))

    async def _send(self, connection: trio.socket.SocketType, reply: Reply) -> None:
        """Send *reply*, its descriptors with the first byte.

        Raises ``OSError`` also if the client does not read, and :exc:`HostError` or :exc:`RpcError` if no descriptors are available.
        """
        with contextlib.ExitStack() as stack:
            fds = () if reply.attached is None else reply.attached(stack)
            with trio.move_on_after(self.limits.idle) as timeout:
                await send_with_fds(connection, reply.line, fds)
        if timeout.cancelled_caught:
            raise TimeoutError(errno.ETIMEDOUT, "the client does not read its answer")

    @contextlib.contextmanager
    def _admitted(self, client: _Client) -> Iterator[None]:
        """Count *client* among the open connections. Raises :exc:`RpcError` if the limit is reached."""
        count = len(self._clients.get(client.key, ()))
        most = self.limits.connections if count else self.limits.connections + self.limits.newcomers
        full = self.connections >= self.limits.connections and not self._hang_up_on_the_greediest(count)
        if (full and self.connections >= most) or count >= self.limits.connections_per_peer:
            raise self.service.busy(f"{count} of {self.connections} open connections are yours")
        mine = self._clients.setdefault(client.key, [])
        if mine:
            client.turn = mine[0].turn
        mine.append(client)
        try:
            yield
        finally:
            if client in mine:
                self._forget(client)

    def _hang_up_on_the_greediest(self, count: int) -> bool:
        """Make room for a peer with *count* connections, by closing an idle one of a peer that still has more without it.

        For a peer without connections, an idle one is closed even if no other peer has more than one, because its client can connect again.
        """
        most = max((each for each in self._clients.values() if any(map(_idle, each))), key=len, default=[])
        if not most or (count and len(most) <= count + 1):
            return False
        idle = next(filter(_idle, most))
        self._forget(idle)
        idle.scope.cancel()
        return True

    def _forget(self, client: _Client) -> None:
        self._clients[client.key].remove(client)
        if not self._clients[client.key]:
            del self._clients[client.key]

    @contextlib.contextmanager
    def _working(self, client: _Client) -> Iterator[None]:
        """Count a request. Raises :exc:`RpcError` if the peer has reached its limit."""
        if self._in_flight[client.key] >= self.limits.in_flight:
            raise self.service.busy(f"{self._in_flight[client.key]} requests of yours are being worked on")
        self._in_flight[client.key] += 1
        client.working = True
        try:
            yield
        finally:
            client.working = False
            self._in_flight[client.key] -= 1
            if not self._in_flight[client.key]:
                del self._in_flight[client.key]
