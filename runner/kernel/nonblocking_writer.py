"""Standard output and error, written without ever waiting.

A container's log pipe may have no reader, a terminal may be stopped, a descriptor may be closed: none of that may stop
PID 1 or the guest. What cannot be written at once waits in a bounded backlog; a write that does not fit is dropped, whole,
and counted.
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

BACKLOG = 1 << 18
"""Bytes kept for a reader that is slow."""


def dropped_message(size: int) -> bytes:
    """Return what a reader that is back is told of *size* bytes he has missed."""
    return f"\n[{size} bytes of output were dropped: nobody was reading]\n".encode()


class NonBlockingWriter:
    """One descriptor to write to, and what is said there of dropped bytes; a context manager that closes what it opened."""

    def __init__(self, fd: int, dropped: Callable[[int], bytes] = dropped_message) -> None:
        self._said_of_dropped = dropped
        self._backlog = bytearray()
        self._waiting = trio.Event()
        self._dropped = 0
        self._fd: int | None = None
        self._asked_first: select.poll | None = None
        try:
            self._fd = _reopened(fd)
        except PermissionError:  # it belongs to another user: what would wait is found out before each write instead
            self._fd = os.dup(fd)
            self._asked_first = select.poll()
            self._asked_first.register(self._fd, select.POLLOUT)
        except OSError:  # closed, or its reader is gone: there is nobody to tell
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        self._give_up()

    def write(self, data: bytes) -> None:
        """Write *data*, or keep it, or drop it; never waits, never fails."""
        if self._fd is None:
            return
        if self._dropped and not self._backlog:
            self._backlog += self._said_of_dropped(self._dropped)
            self._dropped = 0
        if len(self._backlog) + len(data) > BACKLOG:
            self._dropped += len(data)
        else:
            self._backlog += data
        self.flush()

    def flush(self) -> None:
        """Write as much of the backlog as goes at once."""
        while self._backlog and self._fd is not None:
            if self._asked_first is not None and not self._asked_first.poll(0):
                self._waiting.set()
                return
            try:
                # At most PIPE_BUF: so much fits when poll(2) says that anything does.
                written = os.write(self._fd, self._backlog[: 1 << 12])
            except BlockingIOError:
                self._waiting.set()
                return
            except OSError:
                self._give_up()
                return
            del self._backlog[:written]

    async def drain(self) -> None:
        """Write the backlog as the reader makes room; runs until cancelled, asleep while there is none."""
        while True:
            await self._waiting.wait()
            self._waiting = trio.Event()
            with contextlib.suppress(trio.ClosedResourceError):
                while self._backlog and self._fd is not None:
                    await trio.lowlevel.wait_writable(self._fd)
                    self.flush()

    def _give_up(self) -> None:
        if self._fd is not None:
            if trio.lowlevel.in_trio_run():
                trio.lowlevel.notify_closing(self._fd)
            os.close(self._fd)
            self._fd = None
        self._backlog.clear()


def _reopened(fd: int) -> int:
    """Return a descriptor of what *fd* refers to that never waits.

    ``O_NONBLOCK`` belongs to the open file description, which we share with whoever started us: setting it on *fd* would
    change their terminal. Opening ``/proc/self/fd/N`` makes a description of our own for a pipe or a terminal. A regular
    file never waits, and needs the shared description because the file offset lives there.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    copy = os.dup(fd)
    if stat.S_ISSOCK(mode):  # cannot be reopened; nobody minds there
        os.set_blocking(copy, False)
    return copy
