from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import IPv4Interface, IPv6Address
from pathlib import PurePosixPath
from typing import Any

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.instance.renewal.codec import decode, encode
from runner.kernel.carried import CarriedFd, CarriedLogFile, CarriedProcess
from runner.placement.children import Role
from runner.plan.instance import InstancePlan, plan_instance
from runner.spec.instance import parse_instance
from tests.unit.plan.test_plan import EPYC, FACTS, KERNEL

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


def carried(value: object) -> Any:
    """Return *value* as the next program gets it."""
    return decode(json.loads(json.dumps(encode(value, []))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        1.5,
        float("inf"),
        "text",
        b"\x00\xff",
        (1, ("a", None)),
        [1, [2]],
        {1: "a", ("b", 2): [3]},
        {"$": "a key of ours"},
        frozenset({1, 2}),
        {3},
        PurePosixPath("/a"),
        CpuSet([0, 2, 3]),
        IPv4Interface("10.0.0.1/24"),
        IPv6Address("fe80::1"),
        Role.VCPU,
        CarriedProcess("qemu", 7, 1234, CarriedFd(9), 20, b"half a l", ("one",)),
    ],
)
def test_a_value_comes_back_as_it_was(value: object) -> None:
    found = carried(value)
    assert found == value
    assert type(found) is type(value)


def test_descriptors_are_listed() -> None:
    numbers: list[int] = []
    encode({"a": (CarriedFd(7), CarriedLogFile(CarriedFd(8)))}, numbers)
    assert numbers == [7, 8]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("facts", [FACTS, EPYC])
def test_a_plan_comes_back_as_it_was(spec: str, facts: Any) -> None:
    whole = plan_instance("spec.toml", parse_instance("spec.toml", SPECS[spec].encode()), facts)
    plan = attrs.evolve(whole, machine=attrs.evolve(whole.machine, seed=None))
    found = carried(plan)
    assert isinstance(found, InstancePlan)
    assert found == plan
    assert carried(found) == plan


def test_what_has_its_default_is_left_out() -> None:
    """So an older program, which has no such field, understands a newer one that does not use it."""
    assert encode(CarriedLogFile(None), []) == {"$": "kernel.carried.CarriedLogFile", "file": None}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = encode(CarriedLogFile(None, "disk full"), [])
    change(document)
    found: dict[str, Any] = document
    return found


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (changed(lambda each: each.update(newer=1)), "kernel.carried.CarriedLogFile has no newer here"),
        (changed(lambda each: each.pop("file")), "kernel.carried.CarriedLogFile: "),
        ({"$": "kernel.carried.CarriedAnother"}, "there is no kernel.carried.CarriedAnother here"),
        ({"$": "another_room.Value"}, "there is no another_room.Value here"),
        ({"$": "kernel.files.publish", "path": "/etc/passwd"}, "kernel.files.publish is no value here"),
    ],
)
def test_what_is_not_known_is_named(document: Any, sentence: str) -> None:
    with pytest.raises(HostError) as caught:
        decode(document)
    message = f"{caught.value}: {caught.value.__cause__}"
    assert message.startswith("cannot understand the state of the runner before: ")
    assert sentence in message


def test_no_secret_is_carried_over() -> None:
    plan = plan_instance("spec.toml", parse_instance("spec.toml", SPECS["everything"].encode()), FACTS)
    with pytest.raises(HostError, match="cannot carry over a value of the class 'Secret'"):
        encode(plan, [])


@attrs.frozen
class Foreign:
    """A class of another package."""


@pytest.mark.parametrize("value", [object(), Foreign(), len])
def test_nothing_else_is_carried_over(value: object) -> None:
    with pytest.raises(HostError, match="cannot carry over a value of the class"):
        encode(value, [])
