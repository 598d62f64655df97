"""Text for people: tables with columns as wide as their widest cell, and durations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield *rows*, all of one length, as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def duration(seconds: float) -> str:
    """Return *seconds* for people, in their two largest units: ``2 h 5 min``."""
    left = int(seconds)
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def some(words: Iterable[str], most: int = 4) -> str:
    """Return the first *most* of *words*, each once, and how many more there are."""
    listed = list(dict.fromkeys(words))
    left = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {left} more" if left > 0 else "")
