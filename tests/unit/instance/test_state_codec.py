from __future__ import annotations

import json
from collections import Counter
from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from pathlib import PurePosixPath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.judgement import Judgement, Level
from runner.base.values import Fd
from runner.instance.renewal.names import KINDS, NAMES
from runner.instance.renewal.state_codec import field_types, from_document, to_document
from runner.kernel.child_processes import ProcessRecord
from runner.kernel.files import Descriptor
from runner.kernel.log_file import LogFileRecord
from runner.placement.backends import AffinityPlacement, Placement
from runner.placement.children import Role
from runner.plan.instance import InstancePlan, plan_instance
from runner.spec.instance import parse_instance
from tests.support.plans import EPYC, FACTS, KERNEL

SPECS = {
    "minimal": KERNEL,
    "everything": KERNEL
    + """
[cpu]
accel = "tcg"
[[network]]
[[share]]
tag = "share"
path = "/srv"
[[disk]]
path = "/disk"
[guest]
ready = "console:up"
[cloud_init]
hostname = "a"
[display]
vnc = true
""",
}


def carried(value: object, kind: Any) -> Any:
    """Return *value*, which is of the type *kind*, as the next program finds it."""
    return from_document(json.loads(json.dumps(to_document(value, kind, []))), kind, "it")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, None),
        (True, bool),
        (7, int),
        (1.5, float),
        (float("inf"), float),
        ("text", str),
        ("text", Literal["text", "json"]),
        (b"\x00\xff", bytes),
        (None, bytes | None),
        ((1, ("a", None)), tuple[int, tuple[str, int | None]]),
        ([1, 2], list[int]),
        ({1: "a"}, dict[int, str]),
        ({"kind": "a key of ours"}, dict[str, str]),
        (Counter({"dnsmasq": 2}), Counter[str]),
        (Counter({"text": 2}), Counter[Literal["text", "json"]]),
        ({"a": [1, None, {"b": "c"}]}, dict[str, object]),
        (frozenset({1, 2}), frozenset[int]),
        ({3}, set[int]),
        (PurePosixPath("/a"), PurePosixPath),
        (CpuSet([0, 2, 3]), CpuSet),
        (IPv4Interface("10.0.0.1/24"), IPv4Interface),
        (IPv6Address("fe80::1"), IPv4Address | IPv6Address),
        (IPv4Address("10.0.0.1"), IPv4Address | IPv6Address),
        (Role.VCPU, Role),
        (Judgement("one", Level.WARNING, "two"), Judgement),
        (AffinityPlacement(CpuSet([1]), (1,), CpuSet([0]), shared=False), Placement),
        (ProcessRecord("qemu", 7, 9, 20, b"half a l", ("one",)), ProcessRecord),
    ],
)
def test_a_value_comes_back_as_it_was(value: object, kind: Any) -> None:
    found = carried(value, kind)
    assert found == value
    assert type(found) is type(value)


def test_descriptors_are_listed() -> None:
    numbers: list[int] = []
    value = (7, LogFileRecord(8), LogFileRecord(-1), Descriptor(9))
    to_document(value, tuple[Fd, LogFileRecord, LogFileRecord, Descriptor], numbers)
    assert numbers == [7, 8, 9]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("facts", [FACTS, EPYC])
def test_a_plan_comes_back_as_it_was(spec: str, facts: Any) -> None:
    whole = plan_instance("spec.toml", parse_instance("spec.toml", SPECS[spec].encode()), facts)
    plan = attrs.evolve(whole, machine=attrs.evolve(whole.machine, seed=None))
    found = carried(plan, InstancePlan)
    assert isinstance(found, InstancePlan)
    assert found == plan
    assert carried(found, InstancePlan) == plan


def test_what_has_its_default_is_left_out() -> None:
    """So an older program, which has no such field, understands a newer one that does not use it."""
    assert to_document(LogFileRecord(-1), LogFileRecord, []) == {"fd": -1}


def test_no_module_and_no_class_is_named() -> None:
    plan = plan_instance("spec.toml", parse_instance("spec.toml", SPECS["everything"].encode()), FACTS)
    plan = attrs.evolve(plan, machine=attrs.evolve(plan.machine, seed=None))
    document = to_document(plan, InstancePlan, [])
    assert document["placement"]["kind"] == "affinity"
    assert document["machine"]["networks"][0]["kind"] == "bridged"
    assert "Plan" not in json.dumps(document)


@pytest.mark.parametrize(
    ("document", "kind", "sentence"),
    [
        ({"fd": -1, "newer": 1}, LogFileRecord, "it has no newer here"),
        ({}, LogFileRecord, "it is none here"),
        ({"fd": "a"}, LogFileRecord, "it is none here"),
        ({"kind": "another"}, Placement, "it has the kind 'another', which is none here"),
        ({}, Placement, "it has the kind None, which is none here"),
        ("neither", IPv4Address | IPv6Address, "it is none here"),
        ("another", Literal["text", "json"], "it is none here"),
        (7, str, "it is none here"),
        ({"a": 1}, list[int], "it is none here"),
        ([1], tuple[int, int], "it is none here"),
    ],
)
def test_what_is_not_known_is_named(document: Any, kind: Any, sentence: str) -> None:
    with pytest.raises(HostError, match=f"cannot understand the state of the runner before: {sentence}"):
        from_document(document, kind, "it")


def test_no_secret_is_carried_over() -> None:
    plan = plan_instance("spec.toml", parse_instance("spec.toml", SPECS["everything"].encode()), FACTS)
    with pytest.raises(HostError, match="cannot carry over a value of the class 'SeedPlan'"):
        to_document(plan, InstancePlan, [])


@pytest.mark.parametrize("value", [object(), len, {1: "no text"}, PurePosixPath("/a")])
def test_nothing_else_is_carried_over(value: object) -> None:
    with pytest.raises(HostError, match="cannot carry over a value of the class"):
        to_document(value, object, [])


def test_every_type_of_the_table_can_be_written_and_read() -> None:
    """No class of it names a type that is not imported, and each class where several may be has a kind."""
    seen: set[Any] = set()

    def look(kind: Any) -> None:
        if isinstance(kind, type) and kind in seen:
            return
        if isinstance(kind, type):
            seen.add(kind)
        if attrs.has(kind):
            for each in field_types(kind).values():
                look(each)
            return
        classes = [each for each in get_args(kind) if attrs.has(each)]
        if get_origin(kind) in (Union, UnionType) and len(classes) > 1:
            assert set(classes) <= KINDS.keys(), kind
        for each in get_args(kind):
            look(each)

    for name in NAMES.values():
        look(name.type)
    assert {InstancePlan, ProcessRecord} <= seen
