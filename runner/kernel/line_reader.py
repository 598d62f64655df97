"""The one line reader: it bounds the bytes held for a line and the lines handled in one step of the event loop.

A step is what runs between two checkpoints. A peer that sends 64 KiB of line ends gives 65,536 lines with one read: handled in
one step, they would keep every other task waiting, the one that answers SIGTERM included.

It is part of ``kernel`` because the output of children and the messages of the host's agent are read here, and ``kernel`` may not import
``protocol``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import trio

LINES_PER_STEP = 256
"""Lines handled between two checkpoints."""


class OverlongError(Exception):
    """A line or a message is longer than its bound."""


class LineFramer:
    """Cuts a stream of bytes into lines of at most *longest* bytes, the line end not counted.

    A longer line raises :exc:`OverlongError`; with *split* it is returned in pieces of *longest* bytes instead.

    Example::

        framer.feed(await connection.recv(1 << 16))
        for line in framer.step():
            handle(line)
    """

    def __init__(self, longest: int, *, split: bool = False) -> None:
        self._longest = longest
        self._split = split
        self._buffer = bytearray()
        self._searched = 0
        """Bytes at the beginning of the buffer that hold no whole line end."""
        self._end = b"\n"

    def __len__(self) -> int:
        """Return the number of bytes held."""
        return len(self._buffer)

    @property
    def has_line(self) -> bool:
        """Tell whether a whole line is there, so that :meth:`step` yields something without more data."""
        return self._find(b"\n") >= 0

    @property
    def held(self) -> bytes:
        """Return the bytes held."""
        return bytes(self._buffer)

    def feed(self, data: bytes) -> None:
        """Append *data*, received from the peer, to the buffer."""
        self._buffer += data

    def next_line(self, end: bytes = b"\n") -> bytes | None:
        """Return the next line without its *end*, or ``None`` if more data is needed. Raises :exc:`OverlongError`.

        An overlong line is not consumed: every later call raises as well.
        """
        end_at = self._find(end)
        # Without an end, the last bytes may be the beginning of one.
        if (end_at if end_at >= 0 else len(self._buffer) - len(end) + 1) > self._longest:
            if not self._split:
                raise OverlongError
            return self._take(self._longest, self._longest)
        return None if end_at < 0 else self._take(end_at, end_at + len(end))

    def step(self, most: int = LINES_PER_STEP) -> Iterator[bytes]:
        """Yield up to *most* lines; the caller checkpoints before it asks for more. Raises :exc:`OverlongError`."""
        for _ in range(most):
            line = self.next_line()
            if line is None:
                return
            yield line

    def drop_lines(self, keep: int) -> tuple[int, list[bytes]]:
        """Drop every whole line at once; return how many were dropped, and the last *keep* of them.

        With *split*, the held part of an overlong line is dropped too, in pieces of *longest* bytes that count as lines: a peer
        that sends no line end could otherwise fill the memory while its lines are dropped.
        """
        last = self._buffer.rfind(b"\n")
        count = self._buffer.count(b"\n", 0, last + 1)
        lines = self._take(last, last + 1).rsplit(b"\n", keep) if count else []
        pieces = len(self._buffer) // self._longest if self._split else 0
        for _ in range(pieces):
            lines.append(self._take(self._longest, self._longest))
        return count + pieces, lines[-keep:]

    def take_rest(self) -> bytes:
        """Return all bytes held, whole lines or not, and hold none."""
        return self._take(len(self._buffer), len(self._buffer))

    def _find(self, end: bytes) -> int:
        if end != self._end:
            self._searched, self._end = 0, end
        found = self._buffer.find(end, self._searched)
        self._searched = found if found >= 0 else max(0, len(self._buffer) - len(end) + 1)
        return found

    def _take(self, length: int, consumed: int) -> bytes:
        line = bytes(self._buffer[:length])
        del self._buffer[:consumed]
        self._searched = 0
        return line


async def receive_line(
    receive: Callable[[int], Awaitable[bytes]], framer: LineFramer, end: bytes = b"\n", chunk: int = 1 << 12
) -> bytes | None:
    """Return the next line, or ``None`` if the peer hung up before its *end*; *receive* takes up to *chunk* bytes.

    Each line costs a checkpoint, so one line is one step. A cancellation loses nothing. Raises :exc:`OverlongError`, and
    what *receive* raises.
    """
    await trio.lowlevel.checkpoint()
    while (line := framer.next_line(end)) is None:
        data = await receive(chunk)
        if not data:
            return None
        framer.feed(data)
    return line


def pieces(data: bytes, lines: int = LINES_PER_STEP) -> Iterator[bytes]:
    """Yield *data* in pieces of at most *lines* line ends each, for callers that handle bytes instead of lines."""
    begin = 0
    while begin < len(data):
        end = begin
        for _ in range(lines):
            end = data.find(b"\n", end) + 1
            if end == 0:
                end = len(data)
                break
        yield data[begin:end]
        begin = end
