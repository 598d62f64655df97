"""Descriptors sent and received over Unix stream sockets (``SCM_RIGHTS``, unix(7)): the one place that does either.

The kernel installs received descriptors in the very ``recvmsg`` that returns their bytes. So each gets its
owner before anything else happens: no error and no cancellation leaves one open.

A receiver that wants no descriptors has to close those that it is sent, and the last close of a file may take as long as its sender
likes: of a TCP socket with ``SO_LINGER`` and data that its peer does not take, days (``inet_release``); of a memfd the time to
free its pages. The kernel closes those that are not received in the call that takes their bytes, and those that are still in
the queue of a connection in the close(2) of that. From Linux 6.16 on it refuses them where they are sent
(:func:`~runner.kernel.sockets.refuse_fds`); before, bytes are looked at before they are taken (:func:`receive_without_fds`,
:func:`holds_fds`).
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import trio

from runner.base.errors import HostError
from runner.kernel.waiting import persistently

_INT = array.array("i").itemsize
_CHUNK = 1 << 16


class TooManyFdsError(HostError):
    """The peer has sent more descriptors than it may."""


class TruncatedFdsError(HostError):
    """The kernel could not install every descriptor that was sent: this process has too many open."""


class FdsSentError(HostError):
    """The peer has sent descriptors, although none are taken: they stay in the queue of the connection."""


class TooManyFdsInFlightError(HostError):
    """The kernel sends no more descriptors of this user at the moment; nothing was sent."""


async def send_with_fds(connection: trio.socket.SocketType, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send all of *data*, and with its first byte *fds*, which stay the caller's. Raises as :func:`begin_to_send` does."""
    rest = await begin_to_send(connection, data, fds)
    while rest:
        rest = rest[await persistently(partial(connection.send, rest)) :]


async def begin_to_send(connection: trio.socket.SocketType, data: bytes, fds: Sequence[int] = ()) -> memoryview:
    """Send the part of *data* for which there is room, with its first byte *fds*, and return the rest; cancelled, it has sent nothing.

    Raises ``OSError`` when the peer has hung up, and :exc:`TooManyFdsInFlightError` when more descriptors of this user were sent and not
    yet received, by any process, than ``RLIMIT_NOFILE`` of this process says (``too_many_unix_fds``, ``net/unix``).
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        return memoryview(data)[await persistently(partial(connection.sendmsg, [data], rights)) :]
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        raise TooManyFdsInFlightError(
            "cannot send descriptors: processes of this user have sent too many that were not received",
            remedy="CAP_SYS_RESOURCE lifts that limit",
        ) from error


async def receive_with_fds(
    connection: trio.socket.SocketType, size: int, most: int, own: Callable[[int], object]
) -> bytes:
    """Receive up to *size* bytes; *own* becomes the owner of each descriptor that comes with them, closed on exec.

    Returns no bytes when the peer has hung up. Raises :exc:`TooManyFdsError` for more than *most* descriptors and
    :exc:`TruncatedFdsError` if this process cannot hold them; all of them are closed then. Raises ``OSError``.
    """
    space = socket.CMSG_SPACE(most * _INT) if most else 0
    data, ancillary, flags, _ = await persistently(partial(connection.recvmsg, size, space, socket.MSG_CMSG_CLOEXEC))
    fds = list(_fds(ancillary))
    try:
        # CMSG_SPACE is a multiple of 8 bytes: an odd number leaves room for one more.
        if len(fds) > most or (flags & socket.MSG_CTRUNC and len(fds) == most):
            raise TooManyFdsError(f"cannot receive descriptors: more than {most} were sent")
        if flags & socket.MSG_CTRUNC:
            raise TruncatedFdsError("cannot receive descriptors: this process has no room for all of them")
        while fds:
            own(fds.pop(0))
    finally:
        for fd in fds:
            os.close(fd)
    return data


async def receive_without_fds(connection: trio.socket.SocketType, size: int) -> bytes:
    """Receive up to *size* bytes. Raises :exc:`FdsSentError` where descriptors came with them, and ``OSError``."""
    # Urgent data is data like other: else the kernel drops it, and its descriptors, without showing either.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
    data, _, flags, _ = await persistently(partial(connection.recvmsg, size, 0, socket.MSG_PEEK))
    if flags & socket.MSG_CTRUNC:
        raise FdsSentError("cannot take what the peer has sent: descriptors came with it")
    return await connection.recv(len(data)) if data else b""  # exactly these: the next ones may have some


def hang_up(connection: trio.socket.SocketType | socket.socket) -> None:
    """Close *connection*, unless descriptors are in its queue: then it stays open for the life of this process, also through exec.

    A process that ends waits for no last close (``inet_release``: ``PF_EXITING``).
    """
    if connection.fileno() < 0:
        return
    if holds_fds(connection):
        if isinstance(connection, trio.socket.SocketType):
            trio.lowlevel.notify_closing(connection)
        os.set_inheritable(connection.detach(), True)
    else:
        connection.close()


def holds_fds(connection: trio.socket.SocketType | socket.socket) -> bool:
    """Shut *connection* down, take what is left in its queue, and tell whether the peer has sent descriptors, which stay there."""
    plain = socket.socket(fileno=connection.fileno())
    try:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        plain.shutdown(socket.SHUT_RDWR)  # from here on the peer cannot send
        while True:
            data, _, flags, _ = plain.recvmsg(_CHUNK, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if flags & socket.MSG_CTRUNC:
                return True
            if not data:
                return False
            plain.recv(len(data))
    except OSError:  # the peer has gone, and with its end all of the queue was read
        return False
    finally:
        plain.detach()


def _fds(ancillary: Sequence[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) - len(content) % _INT])
            yield from numbers
