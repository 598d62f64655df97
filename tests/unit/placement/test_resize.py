from __future__ import annotations

from pathlib import Path, PurePosixPath

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.facts.hardware import Hardware
from runner.placement.backends import AffinityPlacement, ControllerPlacement, DelegatedPlacement
from runner.placement.resize import more_pins, moved_pins, unlike, with_pins

HOSTS = Path(__file__).parents[2] / "data/hosts"
EPYC = Hardware.from_json((HOSTS / "epyc-7543-2s-nps1.json").read_text())
CPUS = st.sets(st.integers(0, 127), min_size=1, max_size=20).map(CpuSet)


@given(before=CPUS, more=CPUS, data=st.data())
def test_a_vcpu_keeps_its_cpu_when_others_are_plugged(before: CpuSet, more: CpuSet, data: st.DataObject) -> None:
    pins = tuple(data.draw(st.permutations(list(before))))
    available = before | more
    if not more - before:
        return
    count = data.draw(st.integers(len(pins) + 1, len(available)))
    found = more_pins(pins, available, count, EPYC)
    assert found[: len(pins)] == pins
    assert len(set(found)) == len(found) == count
    assert CpuSet(found) <= available


def test_too_few_cpus_are_refused() -> None:
    with pytest.raises(RefusedError, match="cannot place 2 vCPUs: there are 1 exclusive CPUs"):
        more_pins((1, 65), CpuSet.parse("1-2,65"), 4, EPYC)


def test_new_vcpus_get_whole_cores_where_there_are_some() -> None:
    assert more_pins((1, 65), CpuSet.parse("1-3,65-67"), 6, EPYC) == (1, 65, 2, 66, 3, 67)


@given(before=CPUS, after=CPUS, data=st.data())
def test_a_vcpu_moves_only_if_its_cpu_is_lost(before: CpuSet, after: CpuSet, data: st.DataObject) -> None:
    pins = tuple(data.draw(st.permutations(list(before))))[: len(after)]
    found = moved_pins(pins, after)
    assert len(set(found)) == len(found) == len(pins)
    assert CpuSet(found) <= after
    assert all(now == was for now, was in zip(found, pins, strict=True) if was in after)


def test_what_a_container_has_and_no_vcpu_is_floats_but_under_the_controller() -> None:
    available = CpuSet.parse("4-7")
    delegated = DelegatedPlacement(CpuSet([4]), (4,), CpuSet.parse("5-6"), shared=False, sweep=True)
    assert with_pins(delegated, available, (4, 6)) == attrs.evolve(
        delegated, cpus=CpuSet([4, 6]), pins=(4, 6), float_cpus=CpuSet([5, 7])
    )
    affinity = AffinityPlacement(CpuSet([4]), (4,), CpuSet.parse("5-6"), shared=False)
    alone = with_pins(affinity, CpuSet([4, 5]), (4, 5))
    assert alone == AffinityPlacement(CpuSet([4, 5]), (4, 5), CpuSet([4, 5]), shared=True)
    controller = ControllerPlacement(CpuSet([4]), (4,), PurePosixPath("/socket"), "uid", enforced=True)
    assert with_pins(controller, available, (4, 6)) == attrs.evolve(controller, cpus=available, pins=(4, 6))


@pytest.mark.parametrize(("pins", "others"), [((0, 1), ""), ((0, 64), ""), ((0, 4), "4"), ((4, 5, 32), "32")])
def test_cpus_of_another_cache_are_named(pins: tuple[int, ...], others: str) -> None:
    assert str(unlike(pins, EPYC)) == others
