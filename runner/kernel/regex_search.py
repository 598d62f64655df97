"""Searches by a regular expression that cost a bounded time, whatever the expression and the text are.

Python's matcher backtracks, so some expressions take exponential time for a text of 40 characters, and PID 1 has one thread. The
matcher looks for signals while it works (``MAYBE_CHECK_SIGNALS`` in ``Modules/_sre/sre_lib.h``): a timer of the CPU time that this
process uses (setitimer(2), ITIMER_VIRTUAL), which other load on the machine does not shorten, ends it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from types import FrameType


class SlowSearchError(Exception):
    """A search took longer than its bound."""


def search_any(pattern: re.Pattern[str], texts: Iterable[str], seconds: float) -> bool:
    """Tell whether *pattern* is found in one of *texts*. Raises :exc:`SlowSearchError` after *seconds* of CPU time in all.

    To be called in the main thread, which alone receives signals in Python.
    """
    searching = True

    def give_up(_number: int, _frame: FrameType | None) -> None:
        if searching:  # the signal may come just after the search
            raise SlowSearchError

    before = signal.signal(signal.SIGVTALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        return any(pattern.search(text) is not None for text in texts)
    finally:
        searching = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
