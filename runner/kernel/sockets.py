"""Unix sockets that exist before the process that serves them."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePath

import attrs
import trio

from runner.base.errors import HostError, explain
from runner.base.events import SharedEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.values import define, frozen
from runner.kernel.fd_passing import send_with_fds
from runner.kernel.limits import limited
from runner.kernel.peers import boot_time
from runner.kernel.waiting import SHORT, persistently, shortages

log = logging.getLogger(__name__)

Socket = socket.socket

Hold = Callable[[str, Callable[[], AbstractContextManager[Socket]]], AbstractContextManager[Socket]]
"""Holds the socket of a name, which the function makes where there is none yet."""

_PAUSE = 1.0
"""Seconds until the next attempt to accept after a shortage: the rest of this program needs the resource more."""
_TOGETHER = 512
"""Connections that are accepted, 0.02 ms each, before other tasks have their turn."""
_SERVED_TOGETHER = 16
"""Peers of which one connection each is served in one turn."""
_MOST_PEERS = 1024
"""Peers whose connections may wait."""

CONSOLE_SOCKET, CONTROL_SOCKET, QMP_SOCKET = "console.sock", "control.sock", "qmp.sock"
"""The names of the sockets that a runner listens on, in its state directory, while the guest runs."""


@contextmanager
def connected_pair(purpose: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Hold both ends of a stream; a caller that passes an end to a child closes its own copy afterwards."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise limited(f"cannot make a socket pair for {purpose}", error) from error
    with ours, theirs:
        yield ours, theirs


@contextmanager
def adopted_socket(number: int) -> Iterator[socket.socket]:
    """Hold the socket of a descriptor that came through exec."""
    try:
        found = socket.socket(fileno=number)
    except OSError as error:
        raise HostError(f"cannot take over the socket {number}") from error
    with found:
        yield found


@contextmanager
def listening_pair(purpose: str, directory: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Hold a listening socket and the one connection that waits in its queue.

    virtiofsd serves the first connection it accepts. The socket is therefore bound in *directory* (a descriptor of a
    directory that only we may enter) and unlinked before another process learns of it; any process of the network
    namespace could race for an abstract address.
    """
    with ExitStack() as held:
        try:
            listener, client = (held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(2))
            _introduce(listener, client, directory)
        except OSError as error:
            raise limited(f"cannot make a listening socket for {purpose}", error) from error
        yield listener, client


def _introduce(listener: socket.socket, client: socket.socket, directory: int) -> None:
    path = _beneath(directory, _momentary())
    try:
        listen_at(listener, path, 1)
        client.connect(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - a path through a descriptor


def listen_at(listener: Socket, path: str, backlog: int, mode: int = 0o600) -> None:
    """Let *listener* listen at *path*, to which those connect whom *mode* lets write. Raises ``OSError``."""
    listener.bind(path)
    os.chmod(path, mode)  # noqa: PTH101 - a path through a descriptor; until the next line no connection is taken
    listener.listen(backlog)


def _momentary() -> str:
    """Return a temporary name of a socket, recognisable if a killed process leaves it behind."""
    return f"{os.urandom(8).hex()}.sock"


@frozen
class Manners:
    """The way a program listens: who may connect (*mode*), how many may wait (*backlog*), and the texts of its errors."""

    where: str
    """The socket's directory."""
    another: str
    """The error message if another program listens there, with its remedy."""
    mode: int = 0o600
    backlog: int = 128


IN_STATE_DIRECTORY = Manners(
    "in the state directory", "another runner listens there; give each instance a --state-dir of its own"
)


def _made(_name: str, make: Callable[[], AbstractContextManager[Socket]]) -> AbstractContextManager[Socket]:
    return make()


@contextmanager
def listening(
    directory: int,
    name: str,
    recorded: Callable[[str], AbstractContextManager[None]],
    hold: Hold = _made,
    manners: Manners = IN_STATE_DIRECTORY,
) -> Iterator[Socket]:
    """Hold a listening, non-blocking socket *name* in *directory* (a descriptor).

    *hold* holds it, and makes it if it does not exist yet. At the end it is removed, in a block of *recorded*, which handles the
    ``OSError`` if that fails, and the :exc:`~runner.base.errors.HostError` if another file has replaced it, which is left in place. A
    socket on which no process listens was left by a killed process, and is replaced atomically.
    """
    path = _beneath(directory, name)
    with hold(name, lambda: _new_listener(path, _beneath(directory, _momentary()), name, manners)) as listener:
        listener.setblocking(False)
        inode = _inode(path)
        try:
            yield listener
        finally:
            with recorded(f"remove the socket {name!r}"), contextlib.suppress(FileNotFoundError):
                if os.lstat(path).st_ino != inode:
                    raise HostError("something else has taken its place, and is left")
                os.unlink(path)  # noqa: PTH108 - a path through a descriptor


def _inode(path: str) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_ino
    return None


@contextmanager
def _new_listener(path: str, momentary: str, name: str, manners: Manners) -> Iterator[Socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            _check_free(path, manners.another)
            _replace(listener, path, momentary, manners)
        except (OSError, HostError) as error:
            raise HostError(f"cannot listen at {name!r} {manners.where}") from error
        yield listener


def _replace(listener: Socket, path: str, momentary: str, manners: Manners) -> None:
    try:
        listen_at(listener, momentary, manners.backlog, manners.mode)
        os.rename(momentary, path)  # noqa: PTH104 - paths through a descriptor
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(momentary)  # noqa: PTH108 - the same
        raise


def _check_free(path: str, another: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise HostError("there is something else of that name, no socket; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asking:
        try:
            asking.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:  # a process listens, with a full queue
            pass
    raise HostError(another)


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


Accepted = tuple[trio.socket.SocketType, float]
"""A connection, and the time at which it was accepted, on the clock of processes' start times."""


async def _accepted_together(listener: Socket, most: int, *, wait: bool) -> list[Accepted]:
    """Return the connections that wait at *listener*, at most *most*, which the caller closes; with *wait* at least one.

    Accepted one at a time, each would cost a turn of all other tasks. *listener* does not block.
    """
    found: list[Accepted] = []
    if wait:
        first = await accepted(trio.socket.from_stdlib_socket(listener))
        found.append((first, boot_time()))
    else:
        await trio.lowlevel.checkpoint()
    # No more connections wait, or no descriptor is left; the next call that waits reports the latter.
    with contextlib.suppress(OSError):
        while len(found) < most:
            connection = trio.socket.from_stdlib_socket(listener.accept()[0])
            # The time is taken before: a younger process is not the one that connected.
            found.append((connection, boot_time()))
    return found


@define
class WaitingConnections:
    """Connections that are accepted and not served yet; one connection of each peer is served in its turn.

    The kernel's queue is the same for all peers, and full as soon as one connects without end.
    """

    most: int
    """The most connections that may wait; a peer without a waiting one may have one more."""
    of_each: int
    """The most connections of one peer that may wait."""
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
        found: list[Accepted] = []
        while not found:
            accepted_now = await _accepted_together(listener, _TOGETHER, wait=not self._waiting)
            of = peer()
            for each in accepted_now:
                try:
                    self._add(of(each[0]), each)
                except OSError:
                    each[0].close()
            for key in list(islice(self._waiting, _SERVED_TOGETHER)):
                mine = self._waiting.pop(key)
                found.append(mine.pop(0))
                if mine:
                    self._waiting[key] = mine
        self._count -= len(found)
        return found

    def _add(self, key: Hashable, each: Accepted) -> None:
        mine = self._waiting.get(key, [])
        full = self._count >= self.most or len(mine) >= self.of_each if mine else len(self._waiting) >= _MOST_PEERS
        if full:
            each[0].close()
        else:
            self._waiting.setdefault(key, mine).append(each)
            self._count += 1

    def close(self) -> None:
        """Close the waiting connections."""
        for connection, _ in chain.from_iterable(self._waiting.values()):
            connection.close()


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
) -> None:
    """Serve the connections that *listener* gets until cancelled, each in a task of its own; asleep while none comes.

    *serve* takes a connection and the time at which it was accepted, by the clock of processes' start times; the connection is closed
    afterwards. A failing connection does not affect the others: an ``OSError`` ends its connection, any other error is logged as a bug of
    this program. *peer* and *waiting*, the bounds of :class:`WaitingConnections`, share turns among clients. When *most* connections are
    open, a further one is closed.
    """
    queue, limit = WaitingConnections(*waiting), LogRateLimit()

    async def serve_one(connection: trio.socket.SocketType, accepted_at: float) -> None:
        with connection:
            try:
                await trio.lowlevel.checkpoint()
                await serve(connection, accepted_at)
            except OSError as error:
                log.debug(SharedEvent.CONNECTION_LOST, explain(error))
            except Exception:  # noqa: BLE001 - logged with its traceback
                limit.log(log.exception, SharedEvent.CONNECTION_BUG)

    try:
        async with trio.open_nursery() as nursery:
            while True:
                for connection, accepted_at in await queue.next_of_each(listener, peer):
                    if len(nursery.child_tasks) < most:
                        nursery.start_soon(serve_one, connection, accepted_at)
                    else:
                        connection.close()
    finally:
        queue.close()
        limit.log_left_out()


_COPIED = 1 << 16
"""Bytes that are copied at once."""


async def copy_between(one: trio.socket.SocketType, other: trio.socket.SocketType) -> None:
    """Copy data between two connections in both directions, until both peers have sent everything, or one is lost."""

    async def copy(source: trio.socket.SocketType, target: trio.socket.SocketType) -> None:
        while data := await persistently(partial(source.recv, _COPIED)):
            await send_with_fds(target, data)
        target.shutdown(socket.SHUT_WR)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy, one, other)
            nursery.start_soon(copy, other, one)
    except* OSError as lost:
        log.debug(SharedEvent.CONNECTION_LOST, explain(lost.exceptions[0]))
    finally:
        one.close()
        other.close()


async def hung_up(connection: trio.socket.SocketType) -> None:
    """Wait until the peer has closed *connection*, even with unread bytes; a peer that only ends its sending direction does not count.

    ``EPOLLHUP`` is reported without being asked for (``unix_poll`` of ``net/unix/af_unix.c``).
    """

    async def wait() -> None:
        with select.epoll() as end:
            end.register(connection.fileno(), 0)
            await trio.lowlevel.wait_readable(end.fileno())

    await persistently(wait)


@contextmanager
def reachable(path: PurePath) -> Iterator[str]:
    """Hold an address of the socket at *path*, which may be longer than an address (108 bytes, unix(7))."""
    number = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _beneath(number, path.name)
    finally:
        os.close(number)


@contextmanager
def connected(directory: Path, name: str, within: float) -> Iterator[socket.socket]:
    """Hold a connection to the socket *name* in *directory*, on which a runner listens (:func:`listening`).

    Until :func:`unbounded` is called each call that waits for the runner takes at most *within* seconds, and raises
    ``BlockingIOError`` then: a process that is stopped accepts nothing, and answers nothing. Raises
    :exc:`~runner.base.errors.HostError` where nothing listens.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _bound(connection, within)
        try:
            with reachable(directory / name) as address:
                connection.connect(address)
        except BlockingIOError:  # its queue of connections stayed full
            raise
        except OSError as error:
            raise HostError(
                f"cannot connect to {str(directory / name)!r}; is an instance running, and this its --state-dir"
            ) from error
        yield connection


def unbounded(connection: Socket) -> None:
    """Remove the time limit of calls on *connection*."""
    _bound(connection, 0)


def _bound(connection: Socket, seconds: float) -> None:
    """Limit the duration of each call on a blocking socket, including ``connect`` (socket(7): ``SO_SNDTIMEO``); 0 means no limit."""
    value = struct.pack("ll", int(seconds), round(seconds % 1 * 1e6))  # struct timeval
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, value)


def _beneath(directory: int, name: str) -> str:
    # Through the descriptor, because sun_path holds 107 bytes and the directory's own path may be longer.
    return f"/proc/self/fd/{directory}/{name}"
