"""Judgements: the finding about a subject, its level, the reason why it matters, and its remedy.

``check``, ``inspect``, the trace and the plans have no other words for it: people get them by
:func:`~runner.base.subject.judgement_lines`, programs by :meth:`Judgement.to_json`.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Level(enum.Enum):
    """Levels of a judgement, from best to worst."""

    OK = "ok"
    UNKNOWN = "unknown"
    """It cannot be judged from here, and may be either."""
    WARNING = "warning"
    """An instance starts or runs, and is slower, less isolated from others or less than was asked for."""
    ERROR = "error"
    """An instance does not start here, or a running one is not as it must be."""


class Judgement(NamedTuple):
    """A finding about a *subject*: what was *found*; *why* it matters and the *remedy* are empty if there are none.

    A named tuple, because an attrs class costs PID 1 a quarter of a millisecond more.
    """

    subject: str
    level: Level
    found: str
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}" if self.remedy else self.found

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**self._asdict(), "level": self.level.value}
