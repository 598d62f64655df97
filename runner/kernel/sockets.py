"""Unix sockets that exist before the process that serves them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path, PurePath

from runner.base.errors import HostError, doing
from runner.base.values import frozen
from runner.kernel.limits import limited

Socket = socket.socket

SO_PASSRIGHTS = 83
"""``include/uapi/asm-generic/socket.h``, Linux 6.16; Python 3.13 has no name for it."""

Hold = Callable[[str, Callable[[], AbstractContextManager[Socket]]], AbstractContextManager[Socket]]
"""Holds the socket of a name, which the function makes where there is none yet."""


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


def refuse_fds(receiver: socket.socket) -> bool:
    """Let the kernel refuse all descriptors that are sent to *receiver*, or to a connection that it accepts, with EPERM.

    Return whether it does: before Linux 6.16 it cannot.
    """
    with contextlib.suppress(OSError):
        receiver.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        return True
    return False


@contextmanager
def adopted_socket(number: int) -> Iterator[socket.socket]:
    """Hold the socket of a descriptor that came through exec."""
    with doing(f"take over the socket {number}"):
        adopted = socket.socket(fileno=number)
    with adopted:
        yield adopted


@contextmanager
def hung_up_on(held: AbstractContextManager[Socket]) -> Iterator[Socket]:
    """Hold the connection *held* to a program that may have sent descriptors."""
    from runner.kernel.fd_passing import hang_up  # here, because this module is used before trio is imported

    with held as connection:
        try:
            yield connection
        finally:
            hang_up(connection)


@contextmanager
def listening_pair(purpose: str, directory: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Hold a listening socket and the one connection that waits in its queue.

    virtiofsd serves the first connection it accepts. The socket is therefore bound in *directory* (a descriptor of a
    directory that only we may enter) and unlinked before another process learns of it; any process of the network
    namespace could race for an abstract address.
    """
    with ExitStack() as stack:
        try:
            listener, client = (
                stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(2)
            )
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
    """Let *listener* listen at *path*, where users connect that *mode* lets write. Raises ``OSError``."""
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
    """The error message if another program listens there, and its *remedy*."""
    remedy: str
    mode: int = 0o600
    backlog: int = 128


IN_STATE_DIRECTORY = Manners(
    "in the state directory", "another runner listens there", "give each instance a --state-dir of its own"
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
            refuse_fds(listener)
            _check_free(path, manners)
            _replace_socket(listener, path, momentary, manners)
        except (OSError, HostError) as error:
            raise HostError(f"cannot listen at {name!r} {manners.where}") from error
        yield listener


def _replace_socket(listener: Socket, path: str, momentary: str, manners: Manners) -> None:
    try:
        listen_at(listener, momentary, manners.backlog, manners.mode)
        os.rename(momentary, path)  # noqa: PTH104 - paths through a descriptor
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(momentary)  # noqa: PTH108 - the same
        raise


def _check_free(path: str, manners: Manners) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise HostError("there is something else of that name, no socket", remedy="remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asking:
        try:
            asking.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:  # a process listens, with a full queue
            pass
    raise HostError(manners.another, remedy=manners.remedy)


@contextmanager
def reachable(path: PurePath) -> Iterator[str]:
    """Hold an address of the socket at *path*, which may be longer than an address (108 bytes, unix(7))."""
    number = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _beneath(number, path.name)
    finally:
        os.close(number)


START_INSTANCE = "start an instance, or name the --state-dir of one that runs"
"""The remedy where no runner listens."""


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
            raise HostError(f"cannot connect to {str(directory / name)!r}", remedy=START_INSTANCE) from error
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
