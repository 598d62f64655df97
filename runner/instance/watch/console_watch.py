"""The search in the output of the guest's console: for a panic of its kernel, and for the sign that it is ready."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from runner.base.errors import escaped
from runner.base.values import define

LONGEST = 4 << 10
"""Bytes of a line that are searched; the rest of a longer line is not."""

SEARCHED_WITHIN = 0.1
"""Seconds of CPU time for the search in one piece of the output."""
SEARCHED_AT_MOST, SEARCHED_SHARE = 1.0, 0.1
"""Seconds of CPU time for all searches, and the share of elapsed time by which the remaining budget grows again.

A guest chooses its lines and pieces: a pattern may take just less than its limit for each byte that the guest prints.
"""

_PANIC = b"Kernel panic - not syncing"
"""The first words of Linux when it panics (``panic()`` in ``kernel/panic.c``)."""
_PANIC_LINE = re.compile(rb"(?:<[0-7]>)?(?:\[ *[0-9]+\.[0-9]+\])?(?:\[ *[TC][0-9]+\])? ?" + _PANIC)
"""The beginning of that line: its level, its time and its caller before it (``info_print_prefix()`` in ``kernel/printk/printk.c``).

In a log that the guest prints on its console, other words precede it.
"""
_MOST_CHARACTERS = 200
"""Characters of that line that are reported."""

Search = Callable[[re.Pattern[str], list[bytes], float], bool | None]
"""Searches lines for a pattern within a number of seconds of CPU time; returns ``None`` if they do not suffice."""


@define
class ConsoleWatch:
    """Watches the bytes that the console passes on; it reads nothing itself, and holds one line of at most :data:`LONGEST` bytes."""

    panicked: Callable[[str], None]
    """Called with the line in which the guest's kernel reports its panic."""
    found: Callable[[], None]
    """Called when the pattern is found; the search resumes when :attr:`pattern` is set again."""
    too_slow: Callable[[], None]
    """Called when the search is given up because the pattern takes too long."""
    search: Search | None = None
    """``None`` if there is never a pattern."""
    pattern: re.Pattern[str] | None = None
    """The pattern searched for in each line, and in the incomplete last line, because a prompt has no line end."""
    _line: bytes = b""
    """The incomplete last line."""
    _left: float = SEARCHED_AT_MOST
    """Seconds of CPU time left for searches."""
    _searched: float = 0.0
    """The time of the last search's begin, on the monotonic clock."""

    def feed(self, data: bytes) -> None:
        """Process a piece of the output, which has few lines; the time it takes is bounded."""
        if len(self._line) == LONGEST and b"\n" not in data:
            return  # the searched part is the same as before
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
        """The incomplete last line, and the seconds of CPU time left for searches."""
        return self._line, self._left

    @begun.setter
    def begun(self, begun: tuple[bytes, float]) -> None:
        self._line, self._left = begun

    def forget(self) -> None:
        """Forget the incomplete last line: the guest was reset."""
        self._line = b""

    def _search(self, search: Search, pattern: re.Pattern[str], lines: list[bytes]) -> None:
        now, begun = time.monotonic(), time.thread_time()
        self._left = min(self._left + SEARCHED_SHARE * (now - self._searched), SEARCHED_AT_MOST)
        self._searched = now
        if (matches := search(pattern, lines, SEARCHED_WITHIN)) is None:
            self._left = 0
        self._left -= time.thread_time() - begun
        if matches:
            self.pattern = None
            self.found()
        elif self._left <= 0:
            self.pattern = None
            self.too_slow()
