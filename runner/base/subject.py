"""The subjects that are judged, and how judgements about them are shown: no running instance needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from runner.base.errors import escaped
from runner.base.judgement import Judgement, Level
from runner.base.values import frozen

FORMAT: Final = 2
"""The ``version`` of every JSON document with judgements; it grows when a field goes or gets another meaning."""
MOST_SHOWN = 12
"""Judgements of one subject and level that people are shown; machines get all."""

_ORDER = tuple(Level)
_COLOURS = {Level.OK: "32", Level.UNKNOWN: "36", Level.WARNING: "33", Level.ERROR: "1;31"}
"""Level → parameters of the terminal's SGR sequence (ECMA-48, "select graphic rendition")."""


@frozen
class Subject:
    """A subject that is judged: its *name* for machines, and *why* the result matters."""

    name: str
    why: str

    def ok(self, found: str) -> Judgement:
        """Return a judgement that needs no change."""
        return Judgement(self.name, Level.OK, found, self.why)

    def unknown(self, found: str, remedy: str = "") -> Judgement:
        """Return a judgement of level ``unknown``; *remedy* says how it could be judged."""
        return Judgement(self.name, Level.UNKNOWN, found, self.why, remedy)

    def warning(self, found: str, remedy: str) -> Judgement:
        """Return a judgement of level ``warning``: an instance is slower, less isolated, or has less than was asked for."""
        return Judgement(self.name, Level.WARNING, found, self.why, remedy)

    def error(self, found: str, remedy: str) -> Judgement:
        """Return a judgement of level ``error``: an instance cannot start, or a running one is not as it must be."""
        return Judgement(self.name, Level.ERROR, found, self.why, remedy)


def rank(judgement: Judgement) -> int:
    """Return the severity of *judgement* as a number; 0 is ``ok``."""
    return _ORDER.index(judgement.level)


def worst(judgements: Iterable[Judgement]) -> Level:
    """Return the worst level of *judgements*, ``ok`` if there are none."""
    return _ORDER[max(map(rank, judgements), default=0)]


def judgement_lines(judgements: Sequence[Judgement], *, width: int = 0, colour: bool = False) -> Iterator[str]:
    """Yield *judgements* for people, in their order; the column of their subjects has *width* characters or more.

    Neighbours that share reason and remedy have them below the last one.
    """
    width = max((width, *(len(each.subject) for each in judgements)))
    for (subject, level), group in groupby(judgements, lambda each: (each.subject, each.level)):
        word = f"\x1b[{_COLOURS[level]}m{level.value:7}\x1b[0m" if colour else f"{level.value:7}"
        same = [*group]
        shown, left = same[:MOST_SHOWN], len(same) - MOST_SHOWN
        for each, following in zip(shown, (*shown[1:], None), strict=True):
            yield f"{word}  {subject:{width}}  {escaped(each.found)}"
            if following is None or (following.why, following.remedy) != (each.why, each.remedy):
                if left > 0 and following is None:
                    yield f"{'':9}{'':{width}}  and {left} more; --json names all"
                if each.why and level in {Level.WARNING, Level.ERROR}:
                    yield f"{'':9}{'':{width}}    why   {escaped(each.why)}"
                if each.remedy:
                    yield f"{'':9}{'':{width}}    fix   {escaped(each.remedy)}"
