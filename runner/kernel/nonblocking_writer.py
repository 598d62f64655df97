"""Standard output and error, written without ever waiting.

A container's log pipe may have no reader, a terminal may be stopped, a descriptor may be closed: none of that may stop
PID 1 or the guest. What cannot be written at once is kept in a bounded backlog. A write that does not fit is dropped, whole,
and so is every later one until the backlog is written: then the reader receives the number of dropped bytes, in their place.
The controller's log is written in the same way, because the instances of a whole node wait for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from collections.abc import Callable
from types import TracebackType
from typing import Self

import trio

from runner.kernel.waiting import writable

BACKLOG = 1 << 18
"""Bytes kept for a reader that is slow."""


def dropped_message(size: int) -> bytes:
    """Return the message for a reader that has missed *size* bytes."""
    return f"\n[{size} bytes of output were dropped: the reader was too slow]\n".encode()


class NonBlockingWriter:
    """A writer to a copy of *fd*; *dropped* makes the message about dropped bytes. A context manager that closes the copy.

    Example::

        with NonBlockingWriter(1) as stdout:
            nursery.start_soon(stdout.drain)
            stdout.write(data)
    """

    def __init__(self, fd: int, dropped: Callable[[int], bytes] = dropped_message) -> None:
        self._dropped_message = dropped
        self._backlog = bytearray()
        self._waiting = trio.Event()
        self._dropped = 0
        self._fd: int | None = None
        self._poll: select.poll | None = None
        """Asks before each write whether it would block; ``None`` where the copy never blocks."""
        try:
            self._fd = _reopened(fd)
        except (PermissionError, FileNotFoundError):  # it belongs to another user; there is no /proc
            self._fd = os.dup(fd)
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLOUT)
        except OSError:  # closed, or its reader is gone: there is nothing to write to
            return

    @property
    def unwritten(self) -> bytes:
        """Return the bytes still to be written, followed by the message about dropped bytes."""
        return bytes(self._backlog) + (self._dropped_message(self._dropped) if self._dropped else b"")

    def begin_with(self, data: bytes) -> None:
        """Write *data*, which another program's :attr:`unwritten` returned, before anything else."""
        self._backlog[:0] = data
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        self._close()

    @property
    def dropping(self) -> bool:
        """Tell whether a write would be dropped now, so that nothing need be formatted for it; :meth:`drop` counts it."""
        return self._fd is None or (self._dropped > 0 and len(self._backlog) > 0)

    def drop(self, size: int) -> None:
        """Count *size* bytes that were not even formatted, because :attr:`dropping` was true."""
        self._dropped += size

    def write(self, data: bytes) -> None:
        """Write *data*, or keep it, or drop it; never waits, never fails."""
        if self._fd is None:
            return
        if self._dropped or len(self._backlog) + len(data) > BACKLOG:
            self._dropped += len(data)
        else:
            self._backlog += data
        self.flush()

    def flush(self) -> None:
        """Write as much of the backlog as the reader has room for, and then the message about bytes dropped since."""
        while self._fd is not None and (self._backlog or self._dropped):
            if not self._backlog:
                self._backlog += self._dropped_message(self._dropped)
                self._dropped = 0
            if self._poll is not None and not self._poll.poll(0):
                self._wait_for_room()
                return
            try:
                # At most PIPE_BUF: so much fits when poll(2) reports room.
                written = os.write(self._fd, self._backlog[: 1 << 12])
            except BlockingIOError:
                self._wait_for_room()
                return
            except OSError:
                self._close()
                return
            del self._backlog[:written]

    async def drain(self) -> None:
        """Write the backlog as the reader makes room; runs until cancelled, asleep while there is no backlog."""
        while True:
            self._waiting = (
                trio.Event()
            )  # a new event: a task of an event loop that has ended may still wait for the old one
            if not self._backlog:
                await self._waiting.wait()
            with contextlib.suppress(trio.ClosedResourceError):
                while self._backlog and self._fd is not None:
                    await writable(self._fd)
                    self.flush()

    def _wait_for_room(self) -> None:
        if trio.lowlevel.in_trio_run():
            self._waiting.set()

    def _close(self) -> None:
        if self._fd is not None:
            if trio.lowlevel.in_trio_run():
                trio.lowlevel.notify_closing(self._fd)
            os.close(self._fd)
            self._fd = None
        self._backlog.clear()


def _reopened(fd: int) -> int:
    """Return a non-blocking descriptor of the file that *fd* refers to.

    ``O_NONBLOCK`` belongs to the open file description, which we share with the process that started us: setting it on *fd*
    would change that process's terminal. Opening ``/proc/self/fd/N`` makes a description of our own for a pipe or a terminal.
    A regular file never blocks, and needs the shared description because the file offset lives there.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    copy = os.dup(fd)
    if stat.S_ISSOCK(mode):  # cannot be reopened, and no other process depends on its blocking
        os.set_blocking(copy, False)
    return copy
