"""The reports of this node's instances: their rate limit, and reading the latest of all.

Each instance has one open call of ``reportInstance`` on a separate socket, which is answered when the next report is wanted. Only numbers
by known names are kept from a report (:mod:`runner.protocol.instance_metrics`), one for each registered instance; after a restart of this
program the instances report again.
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
    """Intervals in seconds."""

    fetch: float = 1.0
    """Time limit for all reports that are wanted together."""
    least: float = 0.5
    """Shortest time between two reports of an instance that were not wanted."""
    texts: float = 60.0
    """For which the texts of an instance are kept unchanged, because each new text makes new series."""


@attrs.define(eq=False)
class _Instance:
    """The reports of one instance."""

    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """One report at a time."""
    report: Report = attrs.field(factory=dict)
    at: float = -1e9
    """Arrival time of the last report, on trio's clock."""
    wanted: trio.Event | None = None
    """Set to ask for the next one; ``None`` while that is outstanding."""
    came: trio.Event = attrs.field(factory=trio.Event)
    """Set when the wanted report has arrived."""
    owed: bool = False
    """Whether a wanted report has not arrived yet; it is stored at once, however soon after the last one."""
    _texts: dict[str, tuple[Samples, float]] = attrs.field(factory=dict)
    """Family → its texts, and the time since which they are kept."""

    def note(self, report: Report, now: float, kept: float) -> None:
        """Keep *report* as the latest, and those texts in it that may have changed."""
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
        """Answer the open call."""
        if self.wanted is not None:
            self.wanted.set()
            self.wanted = None


@frozen
class Reports:
    """The latest report of each instance."""

    intervals: ReportIntervals = attrs.field(factory=ReportIntervals)
    _instances: dict[str, _Instance] = attrs.field(factory=dict)
    """Instances by the uid of the pod."""

    async def take(self, pod_uid: str, report: Report, registered: Callable[[], Collection[str]]) -> None:
        """Store *report* of an instance that has proved to be *pod_uid*, and return when the next one is wanted.

        Reports of instances that are no longer *registered* are dropped.
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
            instance.want()  # for the connection that this one replaces
            wanted = instance.wanted = trio.Event()
        await wanted.wait()

    async def fetch(self, registered: Collection[str]) -> None:
        """Get the latest report of each instance that is *registered*; see :class:`ReportIntervals`.

        An instance whose previous report is outstanding is not waited for.
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
        """Return the seconds since the latest report of each of them."""
        now = trio.current_time()
        return {uid: now - self._instances[uid].at for uid in self.latest(registered)}

    def to_json(self, pod_uid: str) -> dict[str, ReportedValue] | None:
        """Return the instance's latest report, and its age in seconds; ``None`` if there is none."""
        instance = self._instances.get(pod_uid)
        if instance is None or not instance.report:
            return None
        return {"seconds_ago": round(trio.current_time() - instance.at, 1), **as_json(instance.report)}
