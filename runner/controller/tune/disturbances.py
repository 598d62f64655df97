"""The settings of the machine that keep disturbances other than threads off an instance's CPUs (pure).

No setting has a name for "as before", so what was there before is recorded, in a file, before it is first changed. What is
wanted is derived anew each time: from the instances there are, and from the recorded value as far as one of ours is still
in force.

Other programs change the same settings meanwhile. A set of CPUs is one in which each program takes and puts back its own
(CRI-O does so with the interrupts' default), and a value that is not ours was derived from ours as often as not. So it is
the CPUs that were taken or added that are undone, one by one, and all others stay as they are found. A setting with a
single value, and the mask of an interrupt, which drivers and irqbalance set as a whole, are compared instead: a value of
another program's becomes the one to go back to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, assert_never, get_args

import attrs

from runner.base.cpuset import CpuSet
from runner.base.table import some
from runner.base.values import frozen

SettingKind = Literal["interrupt", "work_queue", "latency", "governor", "cache", "irqbalance", "power"]
UnsetKind = SettingKind | Literal["all"]
"""What could not be changed; *all*: no setting of any kind."""
UNSET_KINDS: tuple[UnsetKind, ...] = (*get_args(SettingKind), "all")


class _ListOfCpus:
    """A setting whose value is a list of CPUs."""

    def members(self, value: str) -> CpuSet:
        """Return the CPUs of a list."""
        return CpuSet.parse(value)

    def value(self, members: CpuSet) -> str:
        """Return the list of these CPUs."""
        return str(members)


@frozen
class AwayFrom(_ListOfCpus):
    """CPUs without those of the instances (*occupied*).

    Where a mask has no others, it gets those of *near*, and failing that all *online* ones that are left. With *prefer_near*
    it keeps to *near* as far as it may: for the vectors of a passed-through device.
    """

    occupied: CpuSet
    online: CpuSet
    near: CpuSet = attrs.field(factory=CpuSet)
    prefer_near: bool = False

    def target(self, before: str) -> str:
        """Return the mask for one that was *before*."""
        mask = CpuSet.parse(before)
        if not self.occupied:
            return before
        left, near = mask - self.occupied, (self.near & self.online) - self.occupied
        choices = ([left & near] if self.prefer_near else []) + [left, near, self.online - self.occupied]
        return str(next((cpus for cpus in choices if not cpus.isdisjoint(self.online)), mask))


@frozen
class Added(_ListOfCpus):
    """CPUs in addition to those that were there: the ones that irqbalance leaves alone."""

    cpus: CpuSet

    def target(self, before: str) -> str:
        """Return the list for one that was *before*."""
        return str(CpuSet.parse(before) | self.cpus)


@frozen
class Fixed:
    """One value, or with ``None`` the one that was there."""

    value: str | None

    def target(self, before: str) -> str:
        """Return the value for one that was *before*."""
        return before if self.value is None else self.value


@frozen
class WaysBelow:
    """The ways of a cache below the first that is given away, as a hexadecimal mask; ``None``: all that were there."""

    first: int | None

    def members(self, value: str) -> CpuSet:
        """Return the numbers of the ways of a mask."""
        return CpuSet.parse_mask(value)

    def value(self, members: CpuSet) -> str:
        """Return the mask of these ways."""
        return f"{sum(1 << way for way in members):x}"

    def target(self, before: str) -> str:
        """Return the mask for one that was *before*."""
        ways = int(before, 16)
        return before if self.first is None else f"{ways & (1 << self.first) - 1:x}"


Rule = AwayFrom | Added | Fixed | WaysBelow


@frozen
class Setting:
    """A setting of the machine as it was found."""

    path: str
    """Where it is; what it is recorded under."""
    kind: SettingKind
    current: str
    rule: Rule
    owner: str = ""
    """Whose it is: the handlers of an interrupt. Another owner's record says nothing about it."""
    begins_as: str = ""
    """The setting from which a new one takes its value: an interrupt that is new since an instance came."""
    placed: bool = False
    """Whether other programs choose its whole value, as irqbalance does for an interrupt.

    A value with at most half of the CPUs that were written last is then their choice, and is what will be given back. One with
    more of them is the written value with a change, and what was there *before* gets the same change.
    """

    @property
    def wanted(self) -> bool:
        """Return whether an instance needs it to be different from what it was."""
        match self.rule:
            case AwayFrom(occupied):
                return bool(occupied)
            case Added(cpus):
                return bool(cpus)
            case Fixed(value):
                return value is not None
            case WaysBelow(first):
                return first is not None
            case _ as never:
                assert_never(never)


@frozen
class Record:
    """The value of a setting *before*, and the values that are *ours*, the last of them as it was written last.

    One of them that is found again is not another program's.
    """

    before: str
    ours: tuple[str, ...]
    owner: str = ""


@frozen
class SettingChange:
    """A value to be written."""

    setting: Setting
    value: str


@frozen
class Decision:
    """The values to be written, and the records that are needed before and while they are."""

    changes: tuple[SettingChange, ...]
    records: Mapping[str, Record]
    takes: bool
    """Whether anything is taken that was not recorded yet: then the records have to be written first."""


def decide(
    settings: Iterable[Setting], records: Mapping[str, Record], lasting: Iterable[str] = (), *, recordable: bool = True
) -> Decision:
    """Return what to write so that each of *settings* is as its rule says, and the records for it.

    The records of the settings *lasting* stay although they were not found: these may come back with the value of ours.
    Where nothing is *recordable*, what the records have is given back as far as it is not wanted any more, and nothing else
    is changed.
    """
    changes, kept, takes = [], {path: records[path] for path in lasting if path in records}, False
    for found in settings:
        record, setting = _record_of(found, records), found
        if not recordable:
            if record is None:
                continue
            setting = attrs.evolve(found, rule=_limited(found.rule, record))
        ours = record is not None and setting.current in record.ours
        before = _before(setting, record, records)
        target = setting.rule.target(before)
        written = record.ours[-1] if record is not None else setting.current
        needed = None
        if setting.wanted or setting.current != before or written != before:
            # All of them: the writing may be refused, take effect later, or this program be killed before it. After a change
            # by another program the one in force is known, and earlier ones would be compared with what was not there then.
            earlier = dict.fromkeys(
                value for value in (*([written] if ours else []), setting.current) if value != target
            )
            needed = Record(before, (*earlier, target), setting.owner)
        recorded = needed is None or (record is not None and _covers(setting.rule, record, needed))
        if not recordable and not recorded and record is not None:
            kept[setting.path] = record
            continue
        takes |= not recorded
        if needed is not None:
            kept[setting.path] = needed
        if setting.current != target or written != target:
            changes.append(SettingChange(setting, target))
    return Decision(tuple(changes), kept, takes)


def settled(decision: Decision, refused: Iterable[str], late: Iterable[str] = ()) -> Mapping[str, Record]:
    """Return the records that are left when *decision*'s values have been written.

    Those of the settings *refused* stay, and those of *late*, which show a value some time after it was written.
    """
    records, stay = dict(decision.records), {*refused, *late}
    for change in decision.changes:
        path = change.setting.path
        if path in records and path not in stay:
            records[path] = attrs.evolve(records[path], ours=(change.value,))
            if change.value == records[path].before and not change.setting.wanted:
                del records[path]
    return records


def _record_of(setting: Setting, records: Mapping[str, Record]) -> Record | None:
    record = _usable_record(setting, records.get(setting.path))
    return record if record is not None and record.owner == setting.owner else None


def _usable_record(setting: Setting, record: Record | None) -> Record | None:
    """Return *record*, or ``None`` if what is in it was never a value of *setting*."""
    try:
        if record is not None:
            for value in (record.before, *record.ours):
                setting.rule.target(value)
    except ValueError:
        return None
    return record


def _before(setting: Setting, record: Record | None, records: Mapping[str, Record]) -> str:
    """Return the value that *setting* would have without the instances."""
    if record is None:
        beginning = _usable_record(setting, records.get(setting.begins_as))
        return beginning.before if beginning is not None and setting.current in beginning.ours else setting.current
    if setting.current in record.ours:
        return record.before
    rule = setting.rule
    if isinstance(rule, Fixed):
        return setting.current
    current, written = rule.members(setting.current), rule.members(record.ours[-1])
    if setting.placed and 2 * len(current & written) <= len(written):
        return setting.current
    taken, added = _difference(rule, record)
    return rule.value((current | taken) - added)


def _difference(rule: AwayFrom | Added | WaysBelow, record: Record) -> tuple[CpuSet, CpuSet]:
    """Return what may have been taken from the value that was there before, and what may have been added to it."""
    before, ours = rule.members(record.before), [rule.members(each) for each in record.ours]
    return (
        CpuSet.union(before - each for each in ours),
        CpuSet.union(each - before for each in ours),
    )


def _covers(rule: Rule, record: Record, needed: Record) -> bool:
    """Tell whether *record* suffices to give back all that *needed* has."""
    if isinstance(rule, Fixed):
        return record.before == needed.before and {*needed.ours} <= {record.before, *record.ours}
    return all(less <= more for less, more in zip(_difference(rule, needed), _difference(rule, record), strict=True))


def _limited(rule: Rule, record: Record) -> Rule:
    """Return *rule* without what *record* does not have."""
    match rule:
        case Fixed(value):
            return rule if value in record.ours else Fixed(None)
        case AwayFrom(occupied):
            return attrs.evolve(rule, occupied=occupied & _difference(rule, record)[0])
        case Added(cpus):
            return Added(cpus & _difference(rule, record)[1])
        case WaysBelow(first):
            return rule if first in _difference(rule, record)[0] else WaysBelow(None)
        case _ as never:
            assert_never(never)


def parse_records(text: str, boot: str) -> dict[str, Record]:
    """Return the records in *text*; none of those of another *boot*. Raises ``ValueError``, ``RecursionError``."""
    match json.loads(text):
        case {"boot": str(written), "settings": dict(settings)}:
            return {path: _parse_record(each) for path, each in settings.items()} if written == boot else {}
        case _:
            raise ValueError("it has no 'boot' and 'settings'")


def _parse_record(value: object) -> Record:
    match value:
        case {"before": str(before), "ours": [str(), *_] as ours, "owner": str(owner)} if all(
            isinstance(each, str) for each in ours
        ):
            return Record(before, tuple(ours), owner)
        case _:
            raise ValueError(f"{value!r} is no record of a setting")


def format_records(records: Mapping[str, Record], boot: str) -> str:
    """Return the text of which :func:`parse_records` is the inverse."""
    settings = {
        path: {"before": record.before, "ours": list(record.ours), "owner": record.owner}
        for path, record in sorted(records.items())
    }
    return json.dumps({"boot": boot, "settings": settings}, separators=(",", ":"))


@frozen
class Unset:
    """A setting that could not be changed or read, and why."""

    kind: UnsetKind
    path: str
    """The setting, or the pod UID or group that it is for."""
    reason: str


MOST_REASONS = 4
"""Reasons of one kind of setting that are given; the others are counted."""


def sentences(unset: Iterable[Unset], managed: Mapping[str, str], occupied: CpuSet) -> Iterator[str]:
    """Yield why instances' CPUs are disturbed nevertheless; *managed* are the interrupts that cannot be moved, by number."""
    if managed:
        named = some(f"{number} ({handlers})" for number, handlers in managed.items())
        yield (
            f"cannot move interrupts {named} off CPUs '{occupied}': the kernel manages them for the drivers; boot "
            f"with `isolcpus=managed_irq,{occupied}`"
        )
    reasons: dict[UnsetKind, list[str]] = {}
    for each in unset:
        reasons.setdefault(each.kind, []).append(each.reason)
    for kind, several in reasons.items():
        yield from several[:MOST_REASONS]
        if len(several) > MOST_REASONS:
            yield f"{len(several) - MOST_REASONS} more settings could not be changed kind={kind}"
