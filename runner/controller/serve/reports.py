"""The reports of this node's instances: how often one may come, and how the latest of all are read.

Each instance has one call of ``reportInstance`` under way on a socket of its own, which is answered when the next report is
wanted. Nothing of a report but numbers by known names is kept (:mod:`runner.protocol.instance_metrics`), one for each
registered instance; after a restart of this program the instances report again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import attrs
import trio

from runner.base.values import frozen
from runner.protocol.instance_metrics import FAMILIES, Report, ReportedValue, as_json

Samples = Mapping[tuple[str, ...], float]


@frozen
class ReportIntervals:
    """Seconds."""

    fetch: float = 1.0
    """For all reports that are wanted together."""
    least: float = 0.5
    """Between two reports of an instance that were not wanted."""
    texts: float = 60.0
    """For which a text of an instance stays, whatever it says: each one makes new series."""


@attrs.define(eq=False)
class _Instance:
    """The reports of one instance."""

    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """One report at a time."""
    report: Report = attrs.field(factory=dict)
    at: float = -1e9
    """When it came, on trio's clock."""
    wanted: trio.Event | None = None
    """Set to want the next one; ``None`` while that is owed."""
    came: trio.Event = attrs.field(factory=trio.Event)
    """Set when the one that was wanted has come."""
    owed: bool = False
    _texts: dict[str, tuple[Samples, float]] = attrs.field(factory=dict)
    """Family → its texts, and since when they stand."""

    def note(self, report: Report, now: float, kept: float) -> None:
        """Take *report* for the latest, with those of its texts that may have changed."""
        texts = {
            name: self._text(name, samples, now, kept)
            for name, samples in report.items()
            if any(label.text for label in FAMILIES[name].labels)
        }
        self.report, self.at, self.owed = {**report, **texts}, now, False
        self.came.set()

    def _text(self, name: str, samples: Samples, now: float, kept: float) -> Samples:
        before, since = self._texts.get(name, (samples, now))
        if before != samples and now < since + kept:
            return before
        self._texts[name] = (samples, since if before == samples else now)
        return samples

    def want(self) -> None:
        """Answer the call that is under way."""
        if self.wanted is not None:
            self.wanted.set()
            self.wanted = None


@frozen
class Reports:
    """The latest report of each instance."""

    intervals: ReportIntervals = attrs.field(factory=ReportIntervals)
    _instances: dict[str, _Instance] = attrs.field(factory=dict)
    """By the uid of the pod."""

    async def take(self, pod_uid: str, report: Report, registered: Callable[[], Collection[str]]) -> None:
        """Take *report* of an instance that has proved that it is *pod_uid*, and return when the next one is wanted.

        Of instances that are not *registered* any more nothing is kept.
        """
        if pod_uid not in self._instances:
            self._forget(registered())
        instance = self._instances.setdefault(pod_uid, _Instance())
        async with instance.turn:
            if not instance.owed:
                await trio.sleep_until(instance.at + self.intervals.least)
            if self._instances.get(pod_uid) is not instance:
                return  # forgotten meanwhile: no further report of it will be wanted
            instance.note(report, trio.current_time(), self.intervals.texts)
            instance.want()  # by a connection that this one replaces
            wanted = instance.wanted = trio.Event()
        await wanted.wait()

    async def fetch(self, registered: Collection[str]) -> None:
        """Get the latest report of each instance that is *registered*; see :class:`ReportIntervals`.

        An instance that owes the report before is not waited for.
        """
        self._forget(registered)
        asked = [each for each in self._instances.values() if each.wanted is not None]
        for each in asked:
            each.owed, each.came = True, trio.Event()
            each.want()
        with trio.move_on_after(self.intervals.fetch):
            for each in asked:
                await each.came.wait()

    def _forget(self, registered: Collection[str]) -> None:
        for gone in self._instances.keys() - set(registered):
            self._instances.pop(gone).want()

    def latest(self, registered: Collection[str]) -> Mapping[str, Report]:
        """Return the latest report of each instance that is *registered* and has made one."""
        return {uid: each.report for uid, each in self._instances.items() if uid in registered and each.report}

    def ages(self, registered: Collection[str]) -> Mapping[str, float]:
        """Return how many seconds ago each of them came."""
        now = trio.current_time()
        return {uid: now - self._instances[uid].at for uid in self.latest(registered)}

    def to_json(self, pod_uid: str) -> dict[str, ReportedValue] | None:
        """Return what the instance has reported, and how many seconds ago; ``None`` if it has not."""
        instance = self._instances.get(pod_uid)
        if instance is None or not instance.report:
            return None
        return {"seconds_ago": round(trio.current_time() - instance.at, 1), **as_json(instance.report)}
