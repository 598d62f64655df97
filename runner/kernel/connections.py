"""Connections to a listening socket: accepted, bounded in number, and served."""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
from collections.abc import Awaitable, Callable, Hashable
from itertools import chain, islice

import attrs
import trio

from runner.base.errors import explain
from runner.base.events import SharedEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.values import define
from runner.kernel.fd_passing import FdsSentError, hang_up, receive_without_fds, send_with_fds
from runner.kernel.peers import boot_time
from runner.kernel.sockets import Socket
from runner.kernel.waiting import SHORT, persistently, shortages

log = logging.getLogger(__name__)

Accepted = tuple[trio.socket.SocketType, float]
"""A connection, and the time at which it was accepted, on the clock of processes' start times."""

_PAUSE = 1.0
"""Seconds until the next attempt to accept after a shortage: the rest of this program needs the resource more."""
_TOGETHER = 512
"""Connections that are accepted, 0.02 ms each, before other tasks have their turn."""
_SERVED_TOGETHER = 16
"""Peers of which one connection each is served in one turn."""
_MOST_PEERS = 1024
"""Peers whose connections may wait."""


async def accepted(listener: trio.socket.SocketType) -> trio.socket.SocketType:
    """Return the next connection, which the caller closes.

    While this process has no descriptor or memory for it, try again after a pause: no event reports their return.
    """
    while True:
        try:
            return (await listener.accept())[0]
        except OSError as error:
            if error.errno in SHORT:
                shortages.note(error)
                await trio.sleep(_PAUSE)
            else:  # the client disconnected before its connection was accepted (accept(2))
                log.debug(SharedEvent.CONNECTION_ABORTED, error.strerror)
                await trio.lowlevel.checkpoint()


async def _accepted_together(listener: Socket, most: int, *, wait: bool) -> list[Accepted]:
    """Return the connections that wait at *listener*, at most *most*, which the caller closes; with *wait* at least one.

    Accepted one at a time, each would cost a turn of all other tasks. *listener* does not block.
    """
    connections: list[Accepted] = []
    if wait:
        first = await accepted(trio.socket.from_stdlib_socket(listener))
        connections.append((first, boot_time()))
    else:
        await trio.lowlevel.checkpoint()
    # No more connections wait, or no descriptor is left; the next call that waits reports the latter.
    with contextlib.suppress(OSError):
        while len(connections) < most:
            connection = trio.socket.from_stdlib_socket(listener.accept()[0])
            # The time is taken before: a younger process is not the one that connected.
            connections.append((connection, boot_time()))
    return connections


HangUp = Callable[[trio.socket.SocketType], None]
"""Closes a connection; never raises."""


def close(connection: trio.socket.SocketType) -> None:
    """Close *connection*, and what is in its queue."""
    connection.close()


@define
class WaitingConnections:
    """Connections that are accepted and not served yet; one connection of each peer is served in its turn.

    The kernel's queue is the same for all peers, and full as soon as one connects without end.
    """

    most: int
    """The most connections that may wait; a peer without a waiting one may have one more."""
    of_each: int
    """The most connections of one peer that may wait."""
    hang_up: HangUp = close
    _waiting: dict[Hashable, list[Accepted]] = attrs.field(factory=dict)
    """Waiting connections by peer; the peer that was served longest ago comes first."""
    _count: int = 0

    async def next_of_each(
        self, listener: Socket, peer: Callable[[], Callable[[trio.socket.SocketType], Hashable]]
    ) -> list[Accepted]:
        """Accept the connections that wait at *listener*, then return the first connection of each of the next peers.

        At least one is returned. The function that *peer* returns names the peer of a connection, or raises ``OSError`` if the peer is
        gone. Connections beyond the bounds are closed.
        """
        connections: list[Accepted] = []
        while not connections:
            accepted_now = await _accepted_together(listener, _TOGETHER, wait=not self._waiting)
            of = peer()
            for each in accepted_now:
                try:
                    self._add(of(each[0]), each)
                except OSError:
                    self.hang_up(each[0])
            for key in list(islice(self._waiting, _SERVED_TOGETHER)):
                mine = self._waiting.pop(key)
                connections.append(mine.pop(0))
                if mine:
                    self._waiting[key] = mine
        self._count -= len(connections)
        return connections

    def _add(self, key: Hashable, each: Accepted) -> None:
        mine = self._waiting.get(key, [])
        full = self._count >= self.most or len(mine) >= self.of_each if mine else len(self._waiting) >= _MOST_PEERS
        if full:
            self.hang_up(each[0])
        else:
            self._waiting.setdefault(key, mine).append(each)
            self._count += 1

    def close(self) -> None:
        """Close the waiting connections."""
        for connection, _ in chain.from_iterable(self._waiting.values()):
            self.hang_up(connection)


def one_peer() -> Callable[[trio.socket.SocketType], Hashable]:
    """Return a function that treats all clients as one peer."""
    return lambda connection: None  # noqa: ARG005


async def serve_connections(
    listener: Socket,
    serve: Callable[[trio.socket.SocketType, float], Awaitable[None]],
    peer: Callable[[], Callable[[trio.socket.SocketType], Hashable]] = one_peer,
    *,
    waiting: tuple[int, int] = (_MOST_PEERS, _MOST_PEERS),
    most: float = math.inf,
    hang_up: HangUp = close,
) -> None:
    """Serve the connections that *listener* gets until cancelled, each in a task of its own; asleep while none comes.

    *serve* takes a connection and the time at which it was accepted, by the clock of processes' start times; the connection is closed
    afterwards. A failing connection does not affect the others: an ``OSError`` ends its connection, any other error is logged as a bug of
    this program. *peer* and *waiting*, the bounds of :class:`WaitingConnections`, share turns among clients. When *most* connections are
    open, a further one is closed. *hang_up* closes connections.
    """
    queue, limit = WaitingConnections(*waiting, hang_up=hang_up), LogRateLimit()

    async def serve_one(connection: trio.socket.SocketType, accepted_at: float) -> None:
        try:
            await trio.lowlevel.checkpoint()
            await serve(connection, accepted_at)
        except OSError as error:
            log.debug(SharedEvent.CONNECTION_LOST, explain(error))
        except Exception:  # noqa: BLE001 - logged with its traceback
            limit.log(log.exception, SharedEvent.CONNECTION_BUG)
        finally:
            hang_up(connection)

    try:
        async with trio.open_nursery() as nursery:
            while True:
                for connection, accepted_at in await queue.next_of_each(listener, peer):
                    if len(nursery.child_tasks) < most:
                        nursery.start_soon(serve_one, connection, accepted_at)
                    else:
                        hang_up(connection)
    finally:
        queue.close()
        limit.log_left_out()


_COPIED = 1 << 16
"""Bytes that are copied at once."""


async def copy_between(one: trio.socket.SocketType, other: trio.socket.SocketType) -> None:
    """Copy data between two connections in both directions, until both peers have sent everything, or one is lost."""

    async def copy(source: trio.socket.SocketType, target: trio.socket.SocketType) -> None:
        while data := await receive_without_fds(source, _COPIED):
            await send_with_fds(target, data)
        target.shutdown(socket.SHUT_WR)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy, one, other)
            nursery.start_soon(copy, other, one)
    except* (OSError, FdsSentError) as lost:
        log.debug(SharedEvent.CONNECTION_LOST, explain(lost.exceptions[0]))
    finally:
        for each in (one, other):
            hang_up(each)


async def hung_up(connection: trio.socket.SocketType) -> None:
    """Wait until the peer has closed *connection*, even with unread bytes; a peer that only ends its sending direction does not count.

    ``EPOLLHUP`` is reported without being asked for (``unix_poll`` of ``net/unix/af_unix.c``).
    """

    async def wait() -> None:
        with select.epoll() as end:
            end.register(connection.fileno(), 0)
            await trio.lowlevel.wait_readable(end.fileno())

    await persistently(wait)
