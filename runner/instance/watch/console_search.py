"""The search for the pattern of ``guest.ready`` in the guest's output."""

from __future__ import annotations

import re
from collections.abc import Iterable

from runner.kernel.regex_search import SlowSearchError, search_any
from runner.protocol.terminal_escapes import shown_lines


def search_lines(pattern: re.Pattern[str], lines: Iterable[bytes], seconds: float) -> bool | None:
    """Tell whether *pattern* is found in one of *lines*, read as a terminal shows them; ``None`` after *seconds* of CPU time."""
    texts = (shown for line in lines for shown in shown_lines(line))
    try:
        return search_any(pattern, texts, seconds)
    except SlowSearchError:
        return None
