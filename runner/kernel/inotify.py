"""inotify(7): wait for files to change instead of polling them.

Python has no binding of it, so its two calls are made through the C library. Changes of a cgroup's files are reported
too, including those that the kernel makes itself ("[Un]populated Notification" of cgroup-v2.rst: "file modified event").
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import attrs
import trio

from runner.base.values import frozen
from runner.kernel.limits import limited
from runner.kernel.waiting import readable

MODIFY = 0x00000002
CLOSE_WRITE = 0x00000008
MOVED_TO = 0x00000080
CREATE = 0x00000100
DELETE = 0x00000200
DELETE_SELF = 0x00000400
MOVE_SELF = 0x00000800
QUEUE_OVERFLOW = 0x00004000
IGNORED = 0x00008000
ONLYDIR = 0x01000000

_EVENT = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len; the name follows
_BUFFER = 64 * 1024


@frozen
class FileEvent:
    """An event of *name* in the watched directory *watch*, or of the directory itself where *name* is empty.

    ``QUEUE_OVERFLOW`` in *mask* (*watch* is -1) means that events were lost.
    """

    watch: int
    mask: int
    name: str


@attrs.define(eq=False)
class Inotify:
    """An inotify queue; made by :func:`watching`.

    Two limits count all processes of a user together, for root across all containers. While the limit allows no queue, nothing is reported,
    and each :meth:`watch` tries to create one again.
    """

    _library: ctypes.CDLL
    _fd: int = -1
    _opened: trio.Event = attrs.field(factory=trio.Event)

    def watch(self, path: Path, mask: int) -> int:
        """Report the events of *mask* in *path*; a second call for the same inode returns the same number.

        Raises :class:`HostError`, with a ``FileNotFoundError`` as its cause where there is no such path, and with a remedy at
        one of the limits.
        """
        if self._fd < 0:
            self._open(path)
        number = self._library.inotify_add_watch(self._fd, os.fsencode(path), mask)
        if number < 0:
            error = _last_error()
            raise limited(f"cannot watch {path}", error, "inotify", os.geteuid()) from error
        return int(number)

    def _open(self, path: Path) -> None:
        self._fd = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            error = _last_error()
            raise limited(f"cannot watch {path}", error, "inotify", os.geteuid()) from error
        self._opened.set()

    def close(self) -> None:
        """Close it, with every watch."""
        if self._fd >= 0:
            os.close(self._fd)

    async def receive(self) -> tuple[FileEvent, ...]:
        """Wait for at least one event and return all that are queued, in order."""
        await self._opened.wait()
        while True:
            await readable(self._fd)
            if events := self.pending():
                return events

    def pending(self) -> tuple[FileEvent, ...]:
        """Return the events that are queued now, in order."""
        if self._fd < 0:
            return ()
        with contextlib.suppress(BlockingIOError):
            return parse_events(os.read(self._fd, _BUFFER))
        return ()


@contextlib.contextmanager
def watching() -> Iterator[Inotify]:
    """Hold an inotify queue; every watch ends with it."""
    queue = Inotify(ctypes.CDLL(None, use_errno=True))
    try:
        yield queue
    finally:
        queue.close()


def parse_events(data: bytes) -> tuple[FileEvent, ...]:
    """Parse the events that one ``read`` returned; the kernel never splits an event."""
    events = []
    offset = 0
    while offset < len(data):
        watch, mask, _, length = _EVENT.unpack_from(data, offset)
        offset += _EVENT.size
        events.append(FileEvent(watch, mask, os.fsdecode(data[offset : offset + length].rstrip(b"\0"))))
        offset += length
    return tuple(events)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
