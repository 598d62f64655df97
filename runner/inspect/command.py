"""``instance-runner inspect``: from where to look, how often, and what to show of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import trio

from runner.errors import Status, UsageError
from runner.facts.roots import Roots
from runner.inspect.observation import Observation
from runner.inspect.observe import observe_container, observe_node
from runner.inspect.render import report_json, report_lines, state_lines
from runner.inspect.rules import InspectionReport, judge
from runner.kernel.cgroup import Cgroup

_CLEAR = "\x1b[H\x1b[2J"
"""Cursor home, erase the screen (ECMA-48)."""


@attrs.frozen
class Where:
    """Where instances may be found."""

    receipt: Path
    """The receipt of the container's own instance."""
    root: Cgroup
    """The controller's tree on the node."""
    kubelet: Path
    """The kubelet's directory on the node."""
    roots: Roots
    wanted: str
    """How the uuid of an instance on the node begins; empty for all, or for the container's own."""

    def has_receipt(self) -> bool:
        """Tell whether this is the container of a running instance."""
        return os.path.lexists(self.receipt)


async def inspect(where: Where, every: float | None, show: Callable[[InspectionReport], None]) -> None:
    """Look, judge and *show* what was found, again and again *every* so many seconds until cancelled, or once.

    Raises :class:`UsageError` when there is nothing to look at, :class:`~runner.errors.HostError` when /proc cannot be
    read.
    """
    while True:
        show(judge(await _look(where)))
        if every is None:
            return
        await trio.sleep(every)


async def _look(where: Where) -> Observation:
    inside, outside = where.has_receipt(), where.root.exists()
    if where.wanted or (outside and not inside):
        return await observe_node(where.roots, where.root, where.kubelet, where.wanted)
    if not inside and not outside:
        raise UsageError(
            f"cannot find an instance: there is neither {where.receipt} nor {where.root.path}; run this in an instance's "
            "container or on a node with the controller, or name --state-dir or --root"
        )
    return observe_container(where.roots, where.receipt)


@attrs.define
class Screen:
    """What is written of one report after the other: each whole, or what differs from the one before."""

    as_json: bool
    redraw: bool
    """Each report takes the place of the one before on the terminal."""
    repeated: bool
    """More reports follow."""
    status: Status = Status.STOPPED
    """What the last report comes to."""
    _before: list[str] = attrs.field(factory=list)

    def text(self, report: InspectionReport) -> str:
        """Return what is to be written of *report*, now that those before it have been written."""
        self.status = Status.FINDINGS if report.violated else Status.STOPPED
        if not self.repeated:
            whole = [json.dumps(report_json(report), indent=1)] if self.as_json else list(report_lines(report))
            return "".join(f"{line}\n" for line in whole)
        if self.redraw and not self.as_json:
            return _CLEAR + "".join(f"{line}\n" for line in report_lines(report))
        before, self._before = self._before, list(state_lines(report))
        changes = list(_changes(before, self._before))
        if self.as_json and changes:
            changes = [json.dumps(report_json(report))]
        return "".join(f"{line}\n" for line in changes)


def _changes(before: list[str], after: list[str]) -> Iterator[str]:
    yield from (f"- {line}" for line in before if line not in after)
    yield from (f"+ {line}" for line in after if line not in before)
