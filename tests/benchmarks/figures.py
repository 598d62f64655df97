"""The measured figures, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Samples = Sequence[float]

HEAD = ("figure", "instance-runner", "min … max (rounds)", "peers", "ratio", "goal", "met")


@dataclass(frozen=True)
class Goal:
    """The limit of the median; *name* is the program whose figure it is, if it is another program's."""

    limit: float
    at_least: bool = False
    name: str = ""

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        if not self.limit:
            return "0"
        return f"{'≥' if self.at_least else '≤'} {self.name or f'{self.limit:g}'}"


@dataclass(frozen=True)
class Figure:
    """One row: our samples, those of the peers, and the goal if there is one."""

    name: str
    samples: Samples
    peers: Mapping[str, Samples] = field(default_factory=dict)
    goal: Goal | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.goal.met(self.median)

    def ratios(self) -> dict[str, float | None]:
        """Our median divided by each peer's."""
        medians = {peer: statistics.median(samples) for peer, samples in self.peers.items()}
        return {peer: self.median / median if median else None for peer, median in medians.items()}

    def cells(self) -> tuple[str, ...]:
        met = {None: "", True: "yes", False: "**no**"}[self.met]
        return (
            self.name,
            _short(self.median),
            f"{_short(min(self.samples))} … {_short(max(self.samples))} ({len(self.samples)})"
            if len(self.samples) > 1
            else "",
            " · ".join(f"{peer} {_short(statistics.median(samples))}" for peer, samples in self.peers.items()),
            " · ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in self.ratios().values()),
            "" if self.goal is None else str(self.goal),
            met,
        )

    def to_json(self) -> dict[str, object]:
        goal = self.goal and {"limit": self.goal.limit, "at_least": self.goal.at_least, "is": str(self.goal)}
        return {
            "name": self.name,
            "median": self.median,
            "samples": list(self.samples),
            "peers": {
                peer: {"median": statistics.median(samples), "samples": list(samples)}
                for peer, samples in self.peers.items()
            },
            "ratios": self.ratios(),
            "goal": goal,
            "met": self.met,
        }


def _short(value: float) -> str:
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}"


def markdown(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the table's lines, with aligned columns."""
    rows = [HEAD, *(figure.cells() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    rows.insert(1, tuple("-" * width for width in widths))
    for row in rows:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
