"""Decisions about the machine's settings: what is written, what is recorded, and what comes back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.controller.tune.disturbances import (
    Added,
    AwayFrom,
    Fixed,
    ManagedInterrupt,
    Record,
    Rule,
    Setting,
    Unset,
    WaysBelow,
    decide,
    format_records,
    parse_records,
    sentences,
    settled,
)

ONLINE = CpuSet(range(16))
DEFAULT = "proc/irq/default_smp_affinity"


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


def away(occupied: str, near: str = "", *, prefer_near: bool = False) -> AwayFrom:
    return AwayFrom(cpus(occupied), ONLINE, cpus(near), prefer_near=prefer_near)


@pytest.mark.parametrize(
    ("rule", "before", "target"),
    [
        (away(""), "0-31", "0-31"),
        (away("2-3"), "0-15", "0-1,4-15"),
        (away("2-3"), "0-31", "0-1,4-31"),
        (away("2-3"), "5", "5"),
        (away("2-3", "0-7"), "2", "0-1,4-7"),
        (away("0-7", "0-7"), "2", "8-15"),
        (away("0-15", "0-7"), "2", "2"),
        # a mask whose other CPUs are offline would be refused
        (away("2-3", "0-7"), "2,20", "0-1,4-7"),
        (away("2-3", "0-7", prefer_near=True), "0-15", "0-1,4-7"),
        (away("2-3", "0-7", prefer_near=True), "9", "9"),
        (away("0-7", "0-7", prefer_near=True), "0-15", "8-15"),
        (Added(cpus("2-3")), "", "2-3"),
        (Added(cpus("")), "5", "5"),
        (Added(cpus("2-3")), "3,5", "2-3,5"),
        (Fixed("performance"), "powersave", "performance"),
        (Fixed(None), "powersave", "powersave"),
        (WaysBelow(12), "ffff", "fff"),
        (WaysBelow(None), "ffff", "ffff"),
    ],
)
def test_the_target_of_a_rule(rule: Rule, before: str, target: str) -> None:
    assert rule.target(before) == target


@attrs.define
class FakeMachine:
    """Settings in a kernel, and the file of records; :meth:`tune` may die before any of its writes."""

    values: dict[str, str]
    records: Mapping[str, Record] = attrs.field(factory=dict)
    refused: frozenset[str] = frozenset()
    handlers: dict[str, str] = attrs.field(factory=dict)

    def tune(self, occupied: str, *, dies_after: int | None = None, recordable: bool = True) -> None:
        settings = [
            Setting(
                path, "interrupt", value, away(occupied), self.handlers.get(path, ""), DEFAULT, placed=path != DEFAULT
            )
            for path, value in sorted(self.values.items(), key=lambda pair: pair[0] != DEFAULT)
        ]
        decision = decide(settings, self.records)
        if decision.unrecorded and not recordable:
            decision = decide(settings, self.records, recordable=False)
        if dies_after == 0:
            return
        if decision.unrecorded:
            self.records = parse_records(format_records(decision.records, "boot"), "boot")
        for number, change in enumerate(decision.changes, 1):
            if dies_after == number:
                return
            if change.setting.path not in self.refused:
                self.values[change.setting.path] = change.value
        if recordable:
            self.records = settled(decision, self.refused)


def machine() -> FakeMachine:
    return FakeMachine({DEFAULT: "0-15", "a": "0-15", "b": "3", "c": "8-9"})


def test_an_instance_comes_and_goes() -> None:
    found = machine()
    before = dict(found.values)
    found.tune("2-3")
    assert found.values == {DEFAULT: "0-1,4-15", "a": "0-1,4-15", "b": "0-1,4-15", "c": "8-9"}
    assert set(found.records) == {DEFAULT, "a", "b", "c"}
    found.tune("2-3,8-9")
    assert found.values["c"] == "0-1,4-7,10-15"
    found.tune("8-9")
    assert found.values["b"] == "3"
    found.tune("")
    assert found.values == before
    assert found.records == {}


@pytest.mark.parametrize("deaths", list(itertools.product(range(6), repeat=2)))
def test_wherever_it_is_killed_everything_comes_back(deaths: tuple[int, int]) -> None:
    found = machine()
    before = dict(found.values)
    found.tune("2-3", dies_after=deaths[0])
    found.tune("3,8-9", dies_after=deaths[1])
    found.tune("3,8-9")
    assert all(cpus(value).isdisjoint(cpus("3,8-9")) for value in found.values.values())
    found.tune("", dies_after=deaths[0])
    found.tune("")
    found.tune("")
    assert found.values == before
    assert found.records == {}


def test_what_another_program_sets_meanwhile_is_what_comes_back() -> None:
    found = machine()
    found.tune("2-3")
    found.values["a"] = "1-3"
    found.tune("2-3")
    assert found.values["a"] == "1"
    found.tune("")
    assert found.values["a"] == "1-3"


def take(found: FakeMachine, path: str, taken: str) -> None:
    """Take CPUs out of a mask as another program does it: read, clear their bits, write."""
    found.values[path] = str(cpus(found.values[path]) - cpus(taken))


def put_back(found: FakeMachine, path: str, given: str) -> None:
    found.values[path] = str(cpus(found.values[path]) | cpus(given))


STEPS = ("instance comes", "instance goes", "other comes", "other goes")


@pytest.mark.parametrize(
    "order", [each for each in itertools.permutations(STEPS) if each.index(STEPS[0]) < each.index(STEPS[1])]
)
@pytest.mark.parametrize("path", [DEFAULT, "a"])
@pytest.mark.parametrize("seen", [True, False])
def test_beside_a_program_that_takes_and_puts_back_its_own_cpus(
    order: tuple[str, ...], path: str, *, seen: bool
) -> None:
    """In every order all CPUs are there again when both have gone; *seen*: there is a pass after each of its steps."""
    found = machine()
    if order.index("other goes") < order.index("other comes"):
        take(found, path, "5-6")  # its container was there first
        expected = "0-4,7-15"  # and another one comes
    else:
        expected = "0-15"
    occupied = ""
    for step in order:
        match step:
            case "other comes":
                take(found, path, "5-6")
            case "other goes":
                put_back(found, path, "5-6")
            case _:
                occupied = "2-3" if step == "instance comes" else ""
        if seen or step.startswith("instance"):
            found.tune(occupied)
        assert cpus(found.values[path]).isdisjoint(cpus(occupied))
    found.tune("")
    assert found.values[path] == expected
    assert found.records == {}


def test_what_another_program_takes_after_the_end_stays_its_own() -> None:
    """Its container may have the CPUs of the instance that has just ended."""
    found = machine()
    found.tune("2-3")
    found.tune("")
    take(found, DEFAULT, "2-3")
    found.tune("")
    assert found.values[DEFAULT] == "0-1,4-15"
    found.tune("8-9")
    found.tune("")
    assert found.values[DEFAULT] == "0-1,4-15"


def test_an_interrupt_that_another_program_places_anew_stays_where_it_is() -> None:
    """As irqbalance does it, and a driver with its own hints: what was there before says nothing any more."""
    found = machine()
    found.tune("2-3")
    found.values |= {"a": "5", "b": "7"}
    found.tune("2-3")
    found.tune("")
    assert (found.values["a"], found.values["b"]) == ("5", "7")


def test_giving_back_needs_no_room_for_records() -> None:
    found = machine()
    before = dict(found.values)
    found.tune("2-3,8-9")
    taken = dict(found.values)
    found.tune("2-3,5,8-9", recordable=False)
    assert found.values == taken, "nothing is taken that could not be given back"
    found.tune("2,5", recordable=False)
    assert found.values == {DEFAULT: "0-1,3-15", "a": "0-1,3-15", "b": "3", "c": "8-9"}
    found.tune("5", recordable=False)
    assert found.values == before
    found.tune("")
    assert (found.values, found.records) == (before, {})


def test_a_single_value_is_given_back_without_room_for_records() -> None:
    setting = Setting("governor", "governor", "powersave", Fixed("performance"))
    taken = decide([setting], {})
    assert taken.unrecorded
    assert decide([setting], {}, recordable=False).changes == ()
    found = attrs.evolve(setting, current="performance", rule=Fixed(None))
    given_back = decide([found], settled(taken, ()))
    assert not given_back.unrecorded
    assert [change.value for change in given_back.changes] == ["powersave"]
    assert settled(given_back, ()) == {}


def test_ways_that_another_program_takes_are_not_given_back() -> None:
    setting = Setting("L3", "cache", "fff", WaysBelow(8))
    taken = decide([setting], {})
    found = attrs.evolve(setting, current="7f", rule=WaysBelow(None))
    assert [change.value for change in decide([found], settled(taken, ())).changes] == ["f7f"]


def test_an_interrupt_that_is_new_comes_back_to_what_new_ones_begin_with() -> None:
    found = machine()
    found.tune("2-3")
    found.values["new"] = found.values[DEFAULT]
    found.values["narrow"] = "7"
    found.tune("2-3")
    found.tune("")
    assert (found.values["new"], found.values["narrow"]) == ("0-15", "7")


def test_an_administrators_mask_that_equals_the_reduced_default_is_his() -> None:
    found = FakeMachine({DEFAULT: "0-15", "a": "0-1,4-15"})
    found.tune("2-3")
    found.tune("2-3")
    found.tune("")
    assert found.values == {DEFAULT: "0-15", "a": "0-1,4-15"}


def test_a_number_that_another_device_has_now_begins_anew() -> None:
    found = machine()
    found.handlers = {"b": "old"}
    found.tune("2-3")
    found.handlers, found.values["b"] = {"b": "new"}, "12"
    found.tune("2-3")
    found.tune("")
    assert found.values["b"] == "12"


def test_a_refused_change_is_tried_again_and_changes_nothing_else() -> None:
    found = machine()
    found.refused = frozenset({"a"})
    found.tune("2-3")
    assert found.values["a"] == "0-15"
    found.refused = frozenset()
    found.tune("2-3")
    assert found.values["a"] == "0-1,4-15"
    found.tune("")
    assert found.values == machine().values


def test_a_value_that_takes_effect_later_is_taken_back() -> None:
    """Irqbalance shows what it was told only after it has looked at the machine again."""
    setting = Setting("irqbalance", "irqbalance", "", Added(cpus("2-3")), "77")
    decision = decide([setting], {})
    assert [change.value for change in decision.changes] == ["2-3"]
    ended = decide([attrs.evolve(setting, rule=Added(cpus("")))], decision.records)
    assert [change.value for change in ended.changes] == [""]
    shown_late = decide([attrs.evolve(setting, current="2-3", rule=Added(cpus("")))], ended.records)
    assert [change.value for change in shown_late.changes] == [""]
    assert decide([attrs.evolve(setting, rule=Added(cpus("")))], shown_late.records).changes == ()


def test_records_of_what_may_come_back_last() -> None:
    record = Record("powersave", ("performance",))
    assert decide([], {"a": record, "b": record}, ["a"]).records == {"a": record}


def test_records_of_another_boot_mean_nothing() -> None:
    record = Record("0-15", ("0-15", "0-1"), "nvme")
    text = format_records({"a": record}, "this")
    assert parse_records(text, "this") == {"a": record}
    assert parse_records(text, "next") == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"boot": "b"}',
        '{"boot": "b", "settings": {"a": {"before": "", "ours": [], "owner": ""}}}',
        '{"boot": "b", "settings": {"a": {"before": "", "ours": [1], "owner": ""}}}',
        '{"boot": "b", "settings": {"a": {"before": 1, "ours": [""], "owner": ""}}}',
    ],
)
def test_records_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_records(text, "b")


def test_the_interrupts_that_cannot_be_moved_are_named_with_the_remedy() -> None:
    managed = [ManagedInterrupt(str(number), f"nvme0q{number}") for number in range(6)]
    [first, second] = sentences([Unset("work_queue", "x", "cannot write x")], managed, cpus("2-3"))
    assert first == (
        "cannot move interrupts 0 (nvme0q0), 1 (nvme0q1), 2 (nvme0q2), 3 (nvme0q3) and 2 more off CPUs '2-3': the kernel "
        "manages them for the drivers; boot with `isolcpus=managed_irq,2-3`"
    )
    assert second == "cannot write x"


def test_a_thousand_refusals_are_a_few_sentences() -> None:
    unset = [Unset("interrupt", str(number), f"cannot write {number}") for number in range(1000)]
    lines = list(sentences([*unset, Unset("governor", "x", "cannot write x")], [], cpus("2-3")))
    assert lines == [
        *(f"cannot write {number}" for number in range(4)),
        "996 more settings could not be changed kind=interrupt",
        "cannot write x",
    ]
