"""The report of all findings, as lines and as JSON (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs

from runner.check.finding import CheckReport, Level

COLOURS = {Level.OK: "32", Level.UNKNOWN: "36", Level.WARNING: "33", Level.FATAL: "1;31"}
"""Level → parameters of the terminal's SGR sequence (ECMA-48, "select graphic rendition")."""


def report_json(report: CheckReport) -> dict[str, Any]:
    """Return *report* as plain values."""
    findings = [{**attrs.asdict(finding), "level": finding.level.value} for finding in report.findings]
    return {"version": 1, "place": report.place.value, "verdict": report.verdict.value, "findings": findings}


def report_lines(report: CheckReport, *, colour: bool) -> Iterator[str]:
    """Yield *report* for an operator, the worst last, next to the prompt."""
    width = max((len(finding.check) for finding in report.findings), default=0)
    order = list(Level)
    for finding in sorted(report.findings, key=lambda finding: order.index(finding.level)):
        word = f"{finding.level.value:7}"
        if colour:
            word = f"\x1b[{COLOURS[finding.level]}m{word}\x1b[0m"
        yield f"{word}  {finding.check:{width}}  {finding.found}"
        if finding.level in {Level.WARNING, Level.FATAL}:
            yield f"{'':9}{'':{width}}    why   {finding.matters}"
        if finding.remedy:
            yield f"{'':9}{'':{width}}    fix   {finding.remedy}"
    count = Counter(finding.level for finding in report.findings)
    yield f"{report.place.value}: " + ", ".join(
        f"{count[level]} {level.value}" for level in reversed(order) if count[level]
    )
