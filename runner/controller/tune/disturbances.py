"""The settings of the machine that keep disturbances other than threads off an instance's CPUs (pure).

The kernel keeps no former value of a setting, so the value is recorded in a file before the first change. The desired value is derived anew
each time: from the present instances, and from the recorded value as long as a value of ours is still in force.

Other programs change the same settings meanwhile. In a set of CPUs each program removes and restores its own CPUs (CRI-O does so with the
interrupts' default), and another program's value is often derived from ours. So the CPUs that were removed or added are restored one by
one, and all others stay as found. A setting with a single value, and the mask of an interrupt, which drivers and irqbalance set as a whole,
are compared instead: another program's value becomes the one to restore.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, assert_never, get_args

import attrs

from runner.base.cpuset import CpuSet
from runner.base.table import some
from runner.base.values import frozen

SettingKind = Literal["interrupt", "work_queue", "latency", "governor", "cache", "irqbalance", "power"]
UnsetKind = SettingKind | Literal["all"]
"""The kind of a setting that could not be changed; *all*: no settings of any kind."""
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

    If no CPU of the former mask remains, the mask gets those of *near*, or else all remaining *online* ones. With *prefer_near* it uses the
    CPUs of *near* if possible: for the vectors of a passed-through device.
    """

    occupied: CpuSet
    online: CpuSet
    near: CpuSet = attrs.field(factory=CpuSet)
    prefer_near: bool = False

    def target(self, before: str) -> str:
        """Return the mask that replaces *before*."""
        mask = CpuSet.parse(before)
        if not self.occupied:
            return before
        left, near = mask - self.occupied, (self.near & self.online) - self.occupied
        choices = ([left & near] if self.prefer_near else []) + [left, near, self.online - self.occupied]
        return str(next((cpus for cpus in choices if not cpus.isdisjoint(self.online)), mask))


@frozen
class Added(_ListOfCpus):
    """CPUs added to the former ones: CPUs that irqbalance leaves alone."""

    cpus: CpuSet

    def target(self, before: str) -> str:
        """Return the list that replaces *before*."""
        return str(CpuSet.parse(before) | self.cpus)


@frozen
class Fixed:
    """A single value, or with ``None`` the former one."""

    value: str | None

    def target(self, before: str) -> str:
        """Return the value that replaces *before*."""
        return before if self.value is None else self.value


@frozen
class WaysBelow:
    """The ways of a cache below the first assigned one, as a hexadecimal mask; ``None``: all former ones."""

    first: int | None

    def members(self, value: str) -> CpuSet:
        """Return the numbers of the ways of a mask."""
        return CpuSet.parse_mask(value)

    def value(self, members: CpuSet) -> str:
        """Return the mask of these ways."""
        return f"{sum(1 << way for way in members):x}"

    def target(self, before: str) -> str:
        """Return the mask that replaces *before*."""
        ways = int(before, 16)
        return before if self.first is None else f"{ways & (1 << self.first) - 1:x}"


Rule = AwayFrom | Added | Fixed | WaysBelow


@frozen
class Setting:
    """A setting of the machine as it was found."""

    path: str
    """Its path, which is also the key of its record."""
    kind: SettingKind
    current: str
    rule: Rule
    owner: str = ""
    """Its owner: the handlers of an interrupt. A record of another owner does not apply to it."""
    begins_as: str = ""
    """The setting whose value a new setting begins with: for an interrupt that is newer than the instances."""
    placed: bool = False
    """Whether other programs choose its whole value, as irqbalance does for an interrupt.

    A value with at most half of the CPUs last written is their choice, and becomes the value to restore. A value with more of them is the
    written one with a change, which is also applied to *before*.
    """

    @property
    def wanted(self) -> bool:
        """Return whether an instance needs another value than the former one."""
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
    """The former value *before* of a setting, and the values that are *ours*, the last one written at the end.

    If one of them is found, no other program has changed the setting.
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
    """The values to be written, and the records needed before and during the writing."""

    changes: tuple[SettingChange, ...]
    records: Mapping[str, Record]
    unrecorded: bool
    """Whether a change is not recorded yet: then the records have to be written first."""


def decide(
    settings: Iterable[Setting], records: Mapping[str, Record], lasting: Iterable[str] = (), *, recordable: bool = True
) -> Decision:
    """Return the values to write so that each of *settings* follows its rule, and the records for them.

    Records of the settings *lasting* are kept although they were not found: these may return with a value of ours. Unless *recordable*,
    recorded values that are no longer needed are restored, and nothing else is changed.
    """
    changes, kept, unrecorded = [], {path: records[path] for path in lasting if path in records}, False
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
            # All of them, because the write may be refused or take effect later, or this program may be killed before it. After a change by
            # another program the value in force is known, and earlier ones no longer apply.
            earlier = dict.fromkeys(
                value for value in (*([written] if ours else []), setting.current) if value != target
            )
            needed = Record(before, (*earlier, target), setting.owner)
        recorded = needed is None or (record is not None and _covers(setting.rule, record, needed))
        if not recordable and not recorded and record is not None:
            kept[setting.path] = record
            continue
        unrecorded |= not recorded
        if needed is not None:
            kept[setting.path] = needed
        if setting.current != target or written != target:
            changes.append(SettingChange(setting, target))
    return Decision(tuple(changes), kept, unrecorded)


def settled(decision: Decision, refused: Iterable[str], late: Iterable[str] = ()) -> Mapping[str, Record]:
    """Return the records that remain after *decision*'s values have been written.

    Those of the settings *refused* stay, and those of *late*, whose values appear some time after they were written.
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
    """Return *record*, or ``None`` if its values were never those of *setting*."""
    try:
        if record is not None:
            for value in (record.before, *record.ours):
                setting.rule.target(value)
    except ValueError:
        return None
    return record


def _before(setting: Setting, record: Record | None, records: Mapping[str, Record]) -> str:
    """Return the value that *setting* would have without instances."""
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
    """Return the CPUs that may have been removed from the former value, and those that may have been added."""
    before, ours = rule.members(record.before), [rule.members(each) for each in record.ours]
    return (
        CpuSet.union(before - each for each in ours),
        CpuSet.union(each - before for each in ours),
    )


def _covers(rule: Rule, record: Record, needed: Record) -> bool:
    """Tell whether *record* suffices to restore everything that *needed* has."""
    if isinstance(rule, Fixed):
        return record.before == needed.before and {*needed.ours} <= {record.before, *record.ours}
    return all(less <= more for less, more in zip(_difference(rule, needed), _difference(rule, record), strict=True))


def _limited(rule: Rule, record: Record) -> Rule:
    """Return *rule* without CPUs that *record* does not have."""
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
    """Return the records in *text*, or none if it was written in another *boot*. Raises ``ValueError``, ``RecursionError``."""
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
    """Return *records* as a text that :func:`parse_records` reads."""
    settings = {
        path: {"before": record.before, "ours": list(record.ours), "owner": record.owner}
        for path, record in sorted(records.items())
    }
    return json.dumps({"boot": boot, "settings": settings}, separators=(",", ":"))


@frozen
class Unset:
    """A setting that could not be changed or read, with the reason."""

    kind: UnsetKind
    path: str
    """The setting, or the pod UID or group that requested it."""
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


@frozen
class ManagedInterrupt:
    """An interrupt that the kernel manages for its driver, so that it refuses to move."""

    number: str
    handlers: str


MOST_REASONS = 4
"""Reasons shown for one kind of setting; the others are counted."""


def sentences(unset: Iterable[Unset], managed: Sequence[ManagedInterrupt], occupied: CpuSet) -> Iterator[str]:
    """Yield the reasons why instances' CPUs, which are *occupied*, are still disturbed."""
    if managed:
        named = some(f"{each.number} ({each.handlers})" for each in managed)
        yield (
            f"cannot move interrupts {named} off CPUs '{occupied}': the kernel manages them for the drivers; boot "
            f"with `isolcpus=managed_irq,{occupied}`"
        )
    reasons: dict[UnsetKind, list[str]] = {}
    for each in unset:
        reasons.setdefault(each.kind, []).append(str(each))
    for kind, several in reasons.items():
        yield from several[:MOST_REASONS]
        if len(several) > MOST_REASONS:
            yield f"{len(several) - MOST_REASONS} more settings could not be changed kind={kind}"
