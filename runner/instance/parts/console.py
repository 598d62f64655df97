"""The guest's serial console: shown on standard output, kept in a file, and shared among the clients attached to it.

A client, which must be root in this PID namespace, opens ``console.sock`` in the state directory and sends one line of JSON,
``{"write": true, "steal": false}``; it receives another, ``{"writes": true}``. Then both directions are the console's bytes.
Up to :data:`MOST_CLIENTS` clients read; one writes.
"""

from __future__ import annotations

import json
import logging
import os
import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio

from runner.base.events import InstanceEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.tasks import first_of
from runner.base.values import define
from runner.facts.roots import Roots
from runner.instance.supervisor import Supervisor
from runner.kernel.connections import serve_connections
from runner.kernel.line_reader import LineFramer, OverlongError, pieces, receive_line
from runner.kernel.log_file import LogFile, kept_log
from runner.kernel.nonblocking_writer import NonBlockingWriter
from runner.kernel.peers import PeerError, Peers
from runner.kernel.sockets import CONSOLE_SOCKET, Socket, listening
from runner.kernel.waiting import persistently, receive, writable
from runner.plan.instance import ConsolePlan

log = logging.getLogger(__name__)

FLUSHED_WITHIN = 0.25
"""Seconds for the guest's last output to be shown after QEMU has ended."""

REPLAYED = 8 << 10
"""Bytes of earlier output that a client receives first."""

MOST_CLIENTS = 8
"""Clients attached at a time."""
MOST_CONNECTIONS = 32
"""Open connections, including those that have not sent their request yet; a further one is closed."""
REQUEST_WITHIN = 5.0
"""Seconds a client may take to send its request."""
LONGEST_REQUEST = 256
"""Bytes of a client's request, without its line end."""

RENEWED = b"\r\n[the runner is renewed: attach again; the guest runs on]\r\n"

STOLEN = b"\r\n[another console writes now, this one only reads]\r\n"


@define
class ConsoleClient:
    """A client that is attached."""

    output: NonBlockingWriter


class Console:
    """Our end of the serial line.

    *show* receives the guest's output in pieces of few lines, and an empty piece at its end.
    """

    def __init__(self, line: Socket, show: Callable[[bytes], None], log_file: LogFile, log_limit: LogRateLimit) -> None:
        line.setblocking(False)
        self._line = line
        self._show = show
        self._log_file = log_file
        self._log_limit = log_limit
        self.replay = b""
        """The last output, which a client receives first."""
        self.received = b""
        """Guest output that was read and not passed on yet."""
        self._clients: list[ConsoleClient] = []
        self._writer: ConsoleClient | None = None
        self._waiting = trio.Lock()
        """Only one task may wait until the guest reads again: meanwhile another client may have become the writer."""
        self.ended = trio.Event()
        """Set when QEMU has closed its end, and all of its output was shown."""

    async def read_guest(self) -> None:
        """Pass the guest's output on until it ends; each piece of few lines is one step of the event loop."""
        if self.ended.is_set():  # before another program was executed
            return
        while True:
            self.received = self.received or await self._receive()
            if not self.received:
                break
            for piece in pieces(self.received):
                self.received = self.received[len(piece) :]
                self._take_in(piece)
                await trio.lowlevel.checkpoint()
        self._show(b"")
        self.ended.set()

    async def _receive(self) -> bytes:
        try:
            return await receive(self._line, 1 << 16)
        except (trio.ClosedResourceError, OSError):  # QEMU has ended
            return b""

    def take_leave(self) -> None:
        """Tell every client to attach again, because its connection does not survive a renewal."""
        for client in self._clients:
            client.output.write(RENEWED)

    def _take_in(self, data: bytes) -> None:
        self._show(data)
        missing = self._log_file.missing
        if self._log_file.write(data):
            self._report_log_file(missing)
        self.replay = (self.replay + data)[-REPLAYED:]
        for client in self._clients:
            client.output.write(data)

    def _report_log_file(self, missing: int) -> None:
        """Log that the log file cannot be written, or can be written again; it then lacks *missing* bytes of output."""
        if (error := self._log_file.error) is not None:
            self._log_limit.log(log.warning, InstanceEvent.CONSOLE_LOG_GIVEN_UP, error)
        else:
            self._log_limit.log(log.info, InstanceEvent.CONSOLE_LOG_GOES_ON, missing)

    async def accept(self, listener: Socket) -> None:
        """Serve the clients that connect; runs until cancelled, asleep while none does."""
        await serve_connections(listener, self._serve, most=MOST_CONNECTIONS)

    async def _serve(self, connection: trio.socket.SocketType, accepted_at: float) -> None:
        with NonBlockingWriter(connection.fileno()) as output:
            framer = LineFramer(LONGEST_REQUEST)
            request = await _attach_request(connection, framer)
            if request is None:
                return
            if not may_attach(connection, accepted_at):
                self._log_limit.log(log.warning, InstanceEvent.CONSOLE_CLIENT_REFUSED)
                output.write(
                    _line(error="only root in the instance's own PID namespace may attach; use `kubectl exec`")
                )
                return
            if len(self._clients) >= MOST_CLIENTS:
                output.write(_line(error=f"{MOST_CLIENTS} are attached already"))
                return
            client = ConsoleClient(output)
            self._clients.append(client)
            try:
                self._settle_writer(client, request)
                output.write(_line(writes=self._writer is client) + self.replay)
                async with trio.open_nursery() as both:
                    both.start_soon(output.drain)
                    await self._pass_on_input(connection, client, framer.take_rest())
                    both.cancel_scope.cancel()
            finally:
                self._clients.remove(client)
                if self._writer is client:
                    self._writer = None

    def _settle_writer(self, client: ConsoleClient, request: dict[str, object]) -> None:
        if request.get("write") is not True:
            return
        if self._writer is not None:
            if request.get("steal") is not True:
                return
            self._writer.output.write(STOLEN)
        self._writer = client

    async def _pass_on_input(self, connection: trio.socket.SocketType, client: ConsoleClient, data: bytes) -> None:
        """Pass on *data* and what *client* types while it is the writer; return when it has detached.

        A guest that does not read delays this client only. Input not passed on when the client detaches is lost.
        """
        data = data or await _receive(connection)
        while data:
            while data and self._writer is client:
                try:
                    data = data[self._line.send(data) :]
                except BlockingIOError:
                    if not await first_of(self._wait_for_room, partial(self._hung_up, connection)):
                        return
                except OSError:  # QEMU has ended: no input can be passed on, but its last output is still to be read
                    break
            data = await _receive(connection)

    async def _wait_for_room(self) -> bool:
        async with self._waiting:
            await writable(self._line)
        return True

    async def _hung_up(self, connection: trio.socket.SocketType) -> bool:
        """Wait until the client has hung up, even with unread input; return ``False``, because it needs no more service."""
        try:
            with select.epoll() as end:  # trio's own waits for input too
                end.register(connection.fileno(), select.EPOLLRDHUP)
                await trio.lowlevel.wait_readable(end.fileno())
        except OSError as error:  # descriptors are short, and the rest of this program needs them more
            self._log_limit.log(log.warning, InstanceEvent.CONSOLE_CLIENT_DETACHED, error.strerror)
        return False


def may_attach(connection: trio.socket.SocketType, accepted_at: float) -> bool:
    """Tell whether the client is root, or this process's own user, in this process's PID namespace."""
    peers = Peers(Roots().proc)
    try:
        peer = peers.identify(connection, accepted_at)
    except PeerError:  # it has ended, or its PID namespace is not visible
        return False
    return peer.user_id in {0, os.geteuid()} and peer.pid_namespace == peers.own_namespace()


async def _attach_request(connection: trio.socket.SocketType, framer: LineFramer) -> dict[str, object] | None:
    """Return the client's first line, or ``None`` if it is not a valid request; *framer* keeps the data after it."""
    line = None
    with trio.move_on_after(REQUEST_WITHIN):
        try:
            line = await receive_line(partial(_receive, connection), framer)
        except OverlongError:
            return None
    try:
        request = json.loads(line or b"")
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def _line(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


async def _receive(connection: trio.socket.SocketType, size: int = 1 << 16) -> bytes:
    """Receive up to *size* bytes; return none when the peer has closed its end, even if it left data of ours unread."""
    try:
        return await persistently(partial(connection.recv, size))
    except OSError:
        return b""


@asynccontextmanager
async def console_shown(
    supervisor: Supervisor, plan: ConsolePlan, show: Callable[[bytes], None], directory: int
) -> AsyncIterator[Socket | None]:
    """Hold QEMU's end of the serial console, unless QEMU has it already, and serve the clients that attach by the socket in *directory*.

    The guest's output goes to *show* in pieces of few lines, and empty output at its end.
    """

    def count_and_show(data: bytes) -> None:
        supervisor.counters.console += len(data)
        if data:
            supervisor.guest_state.signs_of_life.console_written.set()
        show(data)

    held = supervisor.held
    log_kept = partial(kept_log, plan.log, plan.log_size)
    with (
        held.pair("console", "the serial console") as (ours, theirs),
        held.block("console log", log_kept, log_kept, LogFile.record) as log_file,
        listening(directory, CONSOLE_SOCKET, supervisor.faults.recorded, held.socket) as listener,
    ):
        console = Console(ours, count_and_show, log_file, supervisor.log_limit)
        held.keep(console, replay="console replay", received="console received")
        if held.current("console ended", console.ended.is_set):
            console.ended.set()
        supervisor.renewal.leaving.append(console.take_leave)
        async with (
            supervisor.background_task(partial(console.accept, listener)),
            supervisor.background_task(console.read_guest),
        ):
            try:
                yield theirs
            finally:
                if theirs is not None:
                    theirs.close()
                with trio.move_on_after(FLUSHED_WITHIN, shield=True):
                    await console.ended.wait()
