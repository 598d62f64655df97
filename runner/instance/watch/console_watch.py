"""The search in the output of the guest's console: for a panic of its kernel, and for the sign that it is ready."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from runner.base.errors import escaped
from runner.base.values import define

LONGEST = 4 << 10
"""Bytes of a line that are looked at; the rest of a longer one is not."""

SEARCHED_WITHIN = 0.1
"""Seconds of CPU time in which a pattern must be found, or not, in one piece of the output."""
SEARCHED_AT_MOST, SEARCHED_SHARE = 1.0, 0.1
"""Seconds of CPU time for all searches, and the share of the time by which what is left of them grows again.

A guest chooses its lines, and its pieces: a pattern may take just less than its bound for each byte that it prints.
"""

_PANIC = b"Kernel panic - not syncing"
"""What Linux prints first when it panics (``panic()`` in ``kernel/panic.c``)."""
_PANIC_LINE = re.compile(rb"(?:<[0-7]>)?(?:\[ *[0-9]+\.[0-9]+\])?(?:\[ *[TC][0-9]+\])? ?" + _PANIC)
"""The beginning of that line: its level, its time and its caller before it (``info_print_prefix()`` in ``kernel/printk/printk.c``).

A log that the guest prints on its console has other words before it.
"""
_MOST_CHARACTERS = 200
"""Characters of that line that are reported."""

Search = Callable[[re.Pattern[str], list[bytes], float], bool | None]
"""Tells whether the pattern is in one of some lines; ``None`` if that takes more than so many seconds of CPU time."""


@define
class ConsoleWatch:
    """Watches the bytes that the console passes on; it reads nothing itself, and holds one line of at most :data:`LONGEST` bytes."""

    panicked: Callable[[str], None]
    """Called with the line by which the guest's kernel says that it has panicked."""
    found: Callable[[], None]
    """Called when the pattern is found; it is not looked for again until :attr:`pattern` is set again."""
    too_slow: Callable[[], None]
    """Called when the search is given up because the pattern takes too long."""
    search: Search | None = None
    """Not there where there is never a pattern."""
    pattern: re.Pattern[str] | None = None
    """What is looked for in each line, and in the begun one, as a prompt has no line end."""
    _line: bytes = b""
    """The begun line."""
    _left: float = SEARCHED_AT_MOST
    """Seconds of CPU time that are left for searches."""
    _searched: float = 0.0
    """When the last search began, on the monotonic clock."""

    def feed(self, data: bytes) -> None:
        """Take a piece of the output, which has few lines; it costs a bounded time."""
        if len(self._line) == LONGEST and b"\n" not in data:
            return  # what is looked at is the same as before
        text = self._line + data
        if self.pattern is None and _PANIC not in text:
            self._line = text[text.rfind(b"\n") + 1 :][:LONGEST]
            return
        lines = [line[:LONGEST] for line in text.split(b"\n")]
        self._line = lines[-1]
        for line in lines[:-1]:  # whole, because it is reported
            if _PANIC_LINE.match(line):
                self.panicked(escaped(line.rstrip(b"\r").decode(errors="replace"))[:_MOST_CHARACTERS])
        if self.pattern is not None and self.search is not None:
            self._search(self.search, self.pattern, lines)

    @property
    def begun(self) -> tuple[bytes, float]:
        """The begun line, and the seconds of CPU time that are left for searches."""
        return self._line, self._left

    @begun.setter
    def begun(self, begun: tuple[bytes, float]) -> None:
        self._line, self._left = begun

    def forget(self) -> None:
        """Forget the begun line: the guest was reset."""
        self._line = b""

    def _search(self, search: Search, pattern: re.Pattern[str], lines: list[bytes]) -> None:
        now, begun = time.monotonic(), time.thread_time()
        self._left = min(self._left + SEARCHED_SHARE * (now - self._searched), SEARCHED_AT_MOST)
        self._searched = now
        if (found := search(pattern, lines, SEARCHED_WITHIN)) is None:
            self._left = 0
        self._left -= time.thread_time() - begun
        if found:
            self.pattern = None
            self.found()
        elif self._left <= 0:
            self.pattern = None
            self.too_slow()
