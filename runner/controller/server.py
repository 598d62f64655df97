"""The controller's Unix socket: who may say how much, and for how long.

A conversation is a sequence of messages, answered one after another in order. Whoever says nothing for a while is
sent away, so a client opens a connection when it has something to ask and does not keep it. Descriptors that a client
sends along are never received: the kernel closes them (unix(7), ``SCM_RIGHTS`` without a buffer for it).
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import math
import os
import socket
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs
import trio

from runner.controller import identity
from runner.controller.methods import CODES, RpcMethods
from runner.errors import HostError, explain
from runner.kernel.peers import Peer, PeerError, boot_time
from runner.protocol.jsonrpc import (
    INVALID_REQUEST,
    Framer,
    OverlongError,
    Reply,
    RpcError,
    RpcResult,
    answer,
    format_error,
)

log = logging.getLogger(__name__)

_CHUNK = 64 * 1024
_BACKLOG = 64
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


@attrs.frozen
class SocketLimits:
    """What one client may take of the controller."""

    message: int = 64 * 1024
    """Bytes of one message."""
    connections: int = 64
    """Open connections."""
    connections_per_peer: int = 16
    """Open connections of one container (or of one process of the node)."""
    in_flight: int = 5
    """Requests of one container (or process of the node) that are being worked on."""
    first_byte: float = 5.0
    """Seconds from the connection to its first message's first byte."""
    idle: float = 30.0
    """Seconds from one message to the end of the next, and to send an answer."""
    unfinished: float = 1.0
    """Seconds for the rest of a message that is printed over several lines."""


@contextlib.contextmanager
def listening(path: Path) -> Iterator[trio.socket.SocketType]:
    """Hold a socket that accepts connections at *path* from the moment the block begins.

    Anyone may connect: what he may do is decided by who he is. A socket left behind by a dead controller is replaced
    in one step, one that somebody answers at, or a file of another kind, is not touched. Raises :class:`HostError`.
    """
    _check_free(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            temporary.unlink(missing_ok=True)
            listener.bind(str(temporary))
            temporary.chmod(0o666)
            inode = temporary.stat().st_ino
            listener.listen(_BACKLOG)
            temporary.rename(path)
        except OSError as error:
            raise HostError(f"cannot listen at {path}; its directory must exist and be writable") from error
        try:
            yield trio.socket.from_stdlib_socket(listener)
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:  # not one that a successor has put there meanwhile
                    path.unlink()


def _check_free(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise HostError(f"cannot listen at {path}: something that is no socket is there; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener that is too busy to queue us is alive as well (EAGAIN)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass
        except OSError as error:
            raise HostError(f"cannot listen at {path}") from error
    raise HostError(f"cannot listen at {path}: another controller answers there; end it first")


@attrs.frozen
class Server:
    """Carries messages between clients and *registrar*."""

    registrar: RpcMethods
    limits: SocketLimits
    _connections: Counter[int] = attrs.field(factory=Counter)
    _in_flight: Counter[int] = attrs.field(factory=Counter)

    async def accept(self, listener: trio.socket.SocketType) -> None:
        """Accept connections for ever; one that fails takes no other with it."""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    connection, _ = await listener.accept()
                except OSError as error:
                    # Out of descriptors or memory, and nothing tells when there are some again; or the client has
                    # gone before it was accepted (accept(2): "already-pending network errors").
                    log.warning("cannot accept a connection reason=%r", explain(error))
                    await trio.sleep(0.1 if error.errno in _OUT_OF_RESOURCES else 0)
                    continue
                nursery.start_soon(self._converse, connection, boot_time())

    async def _converse(self, connection: trio.socket.SocketType, accepted_at: float) -> None:
        await trio.lowlevel.checkpoint()
        identify = partial(self.registrar.peers.identify, connection, accepted_at)
        with connection:
            try:
                key = self._key(identify)
                with self._counted(key):
                    await self._exchange(connection, identify, key)
            except RpcError as error:
                with contextlib.suppress(OSError), trio.move_on_after(self.limits.unfinished):
                    await connection.send(format_error(error))
            except OSError as error:
                log.debug("connection lost reason=%r", explain(error))
            except HostError as error:
                log.warning("connection ended reason=%r", explain(error))
            except Exception:
                log.exception("connection ended by a fault of this program")

    async def _exchange(self, connection: trio.socket.SocketType, identify: partial[Peer], key: int) -> None:
        framer = Framer(self.limits.message)
        deadline = trio.current_time() + self.limits.first_byte
        silent = True
        while True:
            data = b""
            rest = trio.current_time() + self.limits.unfinished if framer.unfinished else math.inf
            with trio.move_on_at(min(deadline, rest)) as patience:
                data = await connection.recv(_CHUNK)
            if patience.cancelled_caught and not framer.unfinished:
                return
            if silent and data:
                silent, deadline = False, trio.current_time() + self.limits.idle
            try:
                # Where nothing more comes, what there is of a message is all of it.
                for message in framer.feed(data) if data else framer.flush():
                    await self._answer(connection, identify, key, message)
                    deadline = trio.current_time() + self.limits.idle
            except OverlongError:
                text = f"Invalid Request: a message may have {self.limits.message} bytes"
                await self._send(connection, Reply(format_error(RpcError(INVALID_REQUEST, text))))
                return
            if not data and not patience.cancelled_caught:
                return

    async def _answer(
        self, connection: trio.socket.SocketType, identify: partial[Peer], key: int, message: bytes
    ) -> None:
        async def call(method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
            with self._working(key):
                return await self.registrar.call(identify, method, params)

        reply = await answer(message, call)
        if reply is not None:
            await self._send(connection, reply)

    async def _send(self, connection: trio.socket.SocketType, reply: Reply) -> None:
        """Send *reply*, its descriptors with the first byte. Raises ``OSError`` also if the client does not read."""
        with contextlib.ExitStack() as stack:
            fds = []
            for group, file in reply.passing:
                fds.append(group.open(file))
                stack.callback(os.close, fds[-1])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            with trio.move_on_after(self.limits.idle) as patience:
                sent = await connection.sendmsg([reply.line], rights)
                while sent < len(reply.line):
                    sent += await connection.send(reply.line[sent:])
        if patience.cancelled_caught:
            raise TimeoutError(errno.ETIMEDOUT, "the client does not read its answer")

    def _key(self, identify: partial[Peer]) -> int:
        """Return what a peer's connections and requests are counted by: its container, or itself on the node.

        Raises :class:`RpcError` for a peer that cannot be seen from here.
        """
        try:
            peer = identify()
        except PeerError as error:
            if self.registrar.trusting:
                return 0
            self.registrar.keeper.tally.refusals[identity.IDENTITY] += 1
            raise RpcError(CODES[identity.IDENTITY], explain(error), {"reason": identity.IDENTITY}) from error
        return peer.pid if peer.pid_namespace == self.registrar.peers.own_namespace() else peer.pid_namespace

    @contextlib.contextmanager
    def _counted(self, key: int) -> Iterator[None]:
        if self._connections.total() >= self.limits.connections or (
            self._connections[key] >= self.limits.connections_per_peer
        ):
            raise self._busy(f"{self._connections[key]} of {self._connections.total()} open connections are yours")
        with self._one_more(self._connections, key):
            yield

    @contextlib.contextmanager
    def _working(self, key: int) -> Iterator[None]:
        if self._in_flight[key] >= self.limits.in_flight:
            raise self._busy(f"{self._in_flight[key]} requests of yours are being worked on")
        with self._one_more(self._in_flight, key):
            yield

    @contextlib.contextmanager
    def _one_more(self, counter: Counter[int], key: int) -> Iterator[None]:
        counter[key] += 1
        try:
            yield
        finally:
            counter[key] -= 1
            if not counter[key]:
                del counter[key]

    def _busy(self, why: str) -> RpcError:
        self.registrar.keeper.tally.refusals[identity.BUSY] += 1
        return RpcError(CODES[identity.BUSY], f"cannot take more: {why}; wait for them", {"reason": identity.BUSY})
