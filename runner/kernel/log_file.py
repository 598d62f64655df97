"""A log file of bounded size."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from runner.base.errors import HostError, explain
from runner.base.values import Fd
from runner.kernel.files import append


class LogFileRecord(NamedTuple):
    """An open log file; *fd* is negative where it could not be opened again. *missing* bytes were not written, for *error*."""

    fd: Fd
    error: str | None = None
    missing: int = 0


class LogFile:
    """A file to append to; when it would exceed *most* bytes it is renamed to ``….1``, replacing the previous one.

    So the newest *most* bytes are always kept, and at most twice as many. Only a regular file is renamed. One that somebody has removed is
    made again by the next write; one that somebody has renamed is written to until it is full.
    """

    def __init__(self, path: PurePosixPath, most: int, found: LogFileRecord | None = None) -> None:
        self.error: str | None = None
        """The reason why the last write failed; ``None`` while writing works."""
        self.missing = 0
        """Bytes that were not written since it has failed; once there is room again, a mark in their place has their number."""
        self._path = path
        self._most = most
        self._fd = -1
        self._size: int | None = None
        if found is None:
            self._open()
        else:
            self._fd, self.error, self.missing = found.fd, found.error, found.missing
            if self._fd >= 0:
                self._look_at_size()

    def record(self) -> LogFileRecord:
        """Return the state that the next program needs to continue the log."""
        return LogFileRecord(self._fd, self.error, self.missing)

    def write(self, data: bytes) -> bool:
        """Write *data*; return whether writing has just begun to fail, or works again (see :attr:`error` and :attr:`missing`)."""
        before, missed = self.error, self.missing
        mark = b"\n[%d bytes of output are missing here: %b]\n" % (missed, (before or "").encode()) if missed else b""
        text = memoryview(mark + data)
        try:
            if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:  # somebody has removed it
                self.close()
            if self._fd < 0:
                self._open()
            if self._size is not None and self._size + len(text) > self._most:
                self._rotate()
            while text:  # a nearly full disk takes part of the data and refuses the rest
                written = os.write(self._fd, text)
                text = text[written:]
                if self._size is not None:
                    self._size += written
        except (OSError, HostError) as error:
            self.error = explain(error)
            self.missing = min(len(text), len(data)) + (missed if len(text) > len(data) else 0)
        else:
            self.error, self.missing = None, 0
        return (self.error is None) != (before is None)

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._fd = append(self._path)
        self._look_at_size()

    def _look_at_size(self) -> None:
        status = os.fstat(self._fd)
        self._size = status.st_size if stat.S_ISREG(status.st_mode) else None

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody has renamed it
            os.replace(self._path, f"{self._path}.1")  # noqa: PTH105 - a pure path
        self.close()
        self._open()


@contextlib.contextmanager
def kept_log(path: PurePosixPath, most: int, found: LogFileRecord | None = None) -> Iterator[LogFile]:
    """Hold an open log file; *found* is the record of one that the previous program held."""
    file = LogFile(path, most, found)
    try:
        yield file
    finally:
        file.close()
