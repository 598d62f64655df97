"""A log file of bounded size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from runner.errors import HostError, explain
from runner.kernel.files import append

if TYPE_CHECKING:
    from runner.kernel.carried import CarriedLogFile  # only a runner that is renewed carries any


class LogFile:
    """A file to append to; when it would exceed *most* bytes it is renamed to ``….1``, replacing the previous one.

    So the newest *most* bytes are always there, and never more than twice as many. Only a regular file is renamed.
    """

    def __init__(self, path: PurePosixPath, most: int, carried: CarriedLogFile | None = None) -> None:
        self.error: str | None = None
        """Why writing has stopped; ``None`` while it works."""
        self._path = path
        self._most = most
        self._fd, self._size = -1, None
        if carried is None:
            self._fd = append(path)
        elif carried.file is None:
            self.error = carried.error
            return
        else:
            self._fd = carried.file.number
        found = os.fstat(self._fd)
        self._size = found.st_size if stat.S_ISREG(found.st_mode) else None

    def carried(self) -> CarriedLogFile:
        """Return what the program that renews this one must know of it."""
        from runner.kernel.carried import CarriedFd, CarriedLogFile

        return CarriedLogFile(CarriedFd(self._fd) if self._fd >= 0 else None, self.error)

    def write(self, data: bytes) -> bool:
        """Write *data* and return ``False`` at the first failure, after which nothing is written."""
        if self.error is not None:
            return True
        try:
            if self._size is not None:
                if self._size + len(data) > self._most:
                    self._rotate()
                self._size += len(data)
            rest = memoryview(data)
            while rest:  # a disk that is nearly full takes a part, and refuses the next
                rest = rest[os.write(self._fd, rest) :]
        except (OSError, HostError) as error:
            self.error = explain(error)
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rotate(self) -> None:
        os.replace(self._path, f"{self._path}.1")  # noqa: PTH105 - a pure path
        self.close()
        self._fd = append(self._path)
        self._size = 0


@contextmanager
def kept_log(path: PurePosixPath, most: int, carried: CarriedLogFile | None = None) -> Iterator[LogFile]:
    """Hold an open log file."""
    file = LogFile(path, most, carried)
    try:
        yield file
    finally:
        file.close()
