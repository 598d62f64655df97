"""The guest's serial console: told on standard output, kept in a file, and shared among those who attach to it.

Whoever may open ``console.sock`` in the state directory says in one line of JSON what it wants, ``{"write": true,
"steal": false}``, and is told in another what it gets, ``{"writes": true}``. Then both directions are the console's bytes.
Any number reads, up to :data:`MOST_READERS`; one writes.
"""

from __future__ import annotations

import json
import logging
import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import attrs
import trio

from runner.instance.supervisor import Supervisor, first_of
from runner.kernel.log_file import LogFile, kept_log
from runner.kernel.nonblocking_writer import NonBlockingWriter
from runner.kernel.sockets import CONSOLE_SOCKET, Socket, accepted, connected_pair, listening
from runner.plan.instance import ConsolePlan

log = logging.getLogger(__name__)

FLUSHED_WITHIN = 0.25
"""Seconds given to what the guest said last, when QEMU has gone already."""

KEPT = 8 << 10
"""Bytes shown to whoever attaches: what the guest said before."""

MOST_READERS = 8
WISHED_WITHIN = 5.0
"""Seconds a client may take to say what it wants."""
LONGEST_WISH = 256

STOLEN = b"\r\n[another console writes now, this one only reads]\r\n"


@attrs.define(eq=False)
class ConsoleClient:
    """Somebody who is attached."""

    outlet: NonBlockingWriter


class Console:
    """Our end of the serial line."""

    def __init__(self, line: Socket, heard: Callable[[bytes], None], log_file: LogFile) -> None:
        line.setblocking(False)
        self._line = line
        self._heard = heard
        self._log_file = log_file
        self._said = bytearray()
        self._readers: list[ConsoleClient] = []
        self._writer: ConsoleClient | None = None
        self._waiting = trio.Lock()
        """Only one task may wait until the guest reads on: another one may have become the writer meanwhile."""
        self.silent = trio.Event()
        """QEMU has closed its end, and what it said was told."""

    async def listen(self) -> None:
        """Tell everybody what the guest says, until there is nothing more."""
        line = trio.socket.from_stdlib_socket(self._line)
        while data := await _received(line):
            self._heard(data)
            if not self._log_file.write(data):
                log.warning("the console's log file is given up: %s", self._log_file.error)
            self._said += data
            del self._said[:-KEPT]
            for reader in self._readers:
                reader.outlet.write(data)
        self._heard(b"")
        self.silent.set()

    async def admit(self, listener: Socket) -> None:
        """Serve those who attach; runs until cancelled, asleep while nobody comes."""
        door = trio.socket.from_stdlib_socket(listener)
        async with trio.open_nursery() as attached:
            while True:
                attached.start_soon(self._serve, await accepted(door))

    async def _serve(self, client: trio.socket.SocketType) -> None:
        with client, NonBlockingWriter(client.fileno()) as outlet:
            wish = await _attach_request(client)
            if wish is None:
                return
            if len(self._readers) >= MOST_READERS:
                outlet.write(_line(error=f"{MOST_READERS} are attached already"))
                return
            reader = ConsoleClient(outlet)
            self._readers.append(reader)
            try:
                self._settle_writer(reader, wish)
                outlet.write(_line(writes=self._writer is reader) + self._said)
                async with trio.open_nursery() as both:
                    both.start_soon(outlet.drain)
                    await self._type(client, reader)
                    both.cancel_scope.cancel()
            finally:
                self._readers.remove(reader)
                if self._writer is reader:
                    self._writer = None

    def _settle_writer(self, reader: ConsoleClient, wish: dict[str, object]) -> None:
        if wish.get("write") is not True:
            return
        if self._writer is not None:
            if wish.get("steal") is not True:
                return
            self._writer.outlet.write(STOLEN)
        self._writer = reader

    async def _type(self, client: trio.socket.SocketType, reader: ConsoleClient) -> None:
        """Pass on what *reader* types while it is the writer; return when it has detached.

        A guest that reads nothing lets it wait, and nobody else. What has not been passed on when it detaches is lost.
        """
        while data := await _received(client):
            while data and self._writer is reader:
                try:
                    data = data[self._line.send(data) :]
                except BlockingIOError:
                    if not await first_of(self._room, partial(_hung_up, client)):
                        return
                except OSError:  # QEMU has gone: there is nobody to type to, but last words to be read
                    break

    async def _room(self) -> bool:
        async with self._waiting:
            await trio.lowlevel.wait_writable(self._line)
        return True


async def _hung_up(client: trio.socket.SocketType) -> bool:
    """Wait until *client* has gone, whatever it has typed before; ``False``, as there is no more to do for it."""
    try:
        with select.epoll() as end:  # trio's waits for data too
            end.register(client.fileno(), select.EPOLLRDHUP)
            await trio.lowlevel.wait_readable(end.fileno())
    except OSError as error:  # there is no descriptor, and others of ours need it more
        log.warning("somebody is detached, as the guest reads nothing: %s", error.strerror)
    return False


async def _attach_request(client: trio.socket.SocketType) -> dict[str, object] | None:
    """Return the client's first line, or ``None`` if there is none that can be understood."""
    line = b""
    with trio.move_on_after(WISHED_WITHIN):
        while not line.endswith(b"\n"):
            if len(line) > LONGEST_WISH or not (byte := await _received(client, 1)):
                return None
            line += byte
    try:
        wish = json.loads(line)
    except ValueError:
        return None
    return wish if isinstance(wish, dict) else None


def _line(**told: object) -> bytes:
    return json.dumps(told).encode() + b"\n"


async def _received(stream: trio.socket.SocketType, most: int = 1 << 16) -> bytes:
    try:
        return await stream.recv(most)
    except OSError:  # the other end went with input of ours unread
        return b""


@asynccontextmanager
async def console_shown(
    supervisor: Supervisor, plan: ConsolePlan, show: Callable[[bytes], None], directory: int
) -> AsyncIterator[Socket]:
    """Hold the far end of the serial console, and serve whoever attaches by the socket in *directory*.

    What the guest says is *show*n, if the plan says so; without data it was the last.
    """

    def heard(data: bytes) -> None:
        supervisor.counters.console += len(data)
        if plan.stdout:
            show(data)

    with (
        connected_pair("the serial console") as (ours, theirs),
        kept_log(plan.log, plan.log_size) as log_file,
        listening(directory, CONSOLE_SOCKET) as listener,
    ):
        console = Console(ours, heard, log_file)
        async with (
            supervisor.background_task(partial(console.admit, listener)),
            supervisor.background_task(console.listen),
        ):
            try:
                yield theirs
            finally:
                theirs.close()
                with trio.move_on_after(FLUSHED_WITHIN, shield=True):
                    await console.silent.wait()
