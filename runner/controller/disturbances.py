"""What else than threads disturbs an instance's CPUs, and the settings of the machine that keep it away (pure).

No setting has a name for "as before", so what was there before is recorded, in a file, before it is first changed. What is
wanted is derived anew each time: from the instances there are, and from the recorded value as far as one of ours is still
in force. A value of another program's (an administrator, a driver, irqbalance) becomes the one to go back to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, assert_never, get_args

import attrs

from runner.cpuset import CpuSet
from runner.values import frozen

SettingKind = Literal["interrupt", "work_queue", "latency", "governor", "cache", "irqbalance"]
KINDS: tuple[SettingKind, ...] = get_args(SettingKind)


@frozen
class AwayFrom:
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
class Added:
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

    @property
    def wanted(self) -> bool:
        """Whether an instance needs it to be different from what it was."""
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
    """What a setting was *before*, and the values that are *ours*, the last of them as it was written last.

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
    """The values to be written, after the records have been."""

    changes: tuple[SettingChange, ...]
    records: Mapping[str, Record]


def decide(settings: Iterable[Setting], records: Mapping[str, Record], lasting: Iterable[str] = ()) -> Decision:
    """Return what to write so that each of *settings* is as its rule says, and the records that are needed after it.

    The records of the settings *lasting* stay although they were not found: these may come back with the value of ours.
    """
    changes, kept = [], {path: records[path] for path in lasting if path in records}
    for setting in settings:
        record = _record_of(setting, records)
        before = _before(setting, record, records)
        target = setting.rule.target(before)
        written = record.ours[-1] if record is not None else setting.current
        if setting.current != target or written != target:
            changes.append(SettingChange(setting, target))
        if setting.wanted or setting.current != before or written != before:
            # All of them: the writing may be refused, take effect later, or this program be killed before it.
            earlier = dict.fromkeys(value for value in (written, setting.current) if value != target)
            kept[setting.path] = Record(before, (*earlier, target), setting.owner)
    return Decision(tuple(changes), kept)


def _record_of(setting: Setting, records: Mapping[str, Record]) -> Record | None:
    record = _usable_record(setting, records.get(setting.path))
    return record if record is not None and record.owner == setting.owner else None


def _usable_record(setting: Setting, record: Record | None) -> Record | None:
    """Return *record*, or ``None`` if what is in it was never a value of *setting*."""
    try:
        if record is not None:
            setting.rule.target(record.before)
    except ValueError:
        return None
    return record


def _before(setting: Setting, record: Record | None, records: Mapping[str, Record]) -> str:
    if record is not None:
        return record.before if setting.current in record.ours else setting.current
    beginning = _usable_record(setting, records.get(setting.begins_as))
    return beginning.before if beginning is not None and setting.current in beginning.ours else setting.current


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
class Missing:
    """What could not be set: its *path*, and why."""

    kind: SettingKind
    path: str
    reason: str


SHOWN = 4
"""Interrupts that a sentence names, and settings of one kind."""


def sentences(missing: Iterable[Missing], managed: Mapping[str, str], occupied: CpuSet) -> Iterator[str]:
    """Yield why an instance's CPUs are disturbed nevertheless; *managed* are the interrupts that cannot be moved, by number."""
    if managed:
        named = ", ".join(f"{number} ({handlers})" for number, handlers in [*managed.items()][:SHOWN])
        more = f" and {len(managed) - SHOWN} more" if len(managed) > SHOWN else ""
        yield (
            f"cannot move interrupts {named}{more} off CPUs '{occupied}': the kernel manages them for the drivers; boot "
            f"with `isolcpus=managed_irq,{occupied}`"
        )
    reasons: dict[SettingKind, list[str]] = {}
    for each in missing:
        reasons.setdefault(each.kind, []).append(each.reason)
    for kind, several in reasons.items():
        yield from several[:SHOWN]
        if len(several) > SHOWN:
            yield f"{len(several) - SHOWN} more settings could not be changed kind={kind}"
