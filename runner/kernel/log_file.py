"""A log file of bounded size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from runner.errors import HostError, explain
from runner.kernel.files import append


class LogFile:
    """A file to append to; when it would hold more than *most* bytes it is renamed to ``….1``, which replaces an older ``….1``.

    So the newest *most* bytes are always there, and never more than twice as many. Only a regular file has a size.
    """

    def __init__(self, path: PurePosixPath, most: int) -> None:
        self.error: str | None = None
        """The reason why writing has been given up."""
        self._path = path
        self._most = most
        self._fd = append(path)
        found = os.fstat(self._fd)
        self._size = found.st_size if stat.S_ISREG(found.st_mode) else None

    def write(self, data: bytes) -> bool:
        """Write *data*; return ``False`` when that fails for the first time, after which nothing is written."""
        if self.error is not None:
            return True
        try:
            if self._size is not None:
                if self._size + len(data) > self._most:
                    self._rotate()
                self._size += len(data)
            os.write(self._fd, data)
        except (OSError, HostError) as error:
            self.error = explain(error)
            self.close()
            return False
        return True

    def close(self) -> None:
        """Close the file unless it is closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rotate(self) -> None:
        os.replace(self._path, f"{self._path}.1")  # noqa: PTH105 - a pure path
        self.close()
        self._fd = append(self._path)
        self._size = 0


@contextmanager
def kept_log(path: PurePosixPath, most: int) -> Iterator[LogFile]:
    """Hold a log file open for appending. Raises :exc:`~runner.errors.HostError`."""
    file = LogFile(path, most)
    try:
        yield file
    finally:
        file.close()
