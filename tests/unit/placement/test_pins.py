from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.facts.hardware import Cpu, Hardware, NumaNode
from runner.placement.pins import Pinning, PinPolicy, choose_cpus, place

HOSTS = Path(__file__).parents[2] / "data/hosts"


def host(name: str) -> Hardware:
    return Hardware.from_json((HOSTS / f"{name}.json").read_text())


EPYC = host("epyc-7543-2s-nps1")
EVERY_HOST = [pytest.param(host(path.stem), id=path.stem) for path in sorted(HOSTS.glob("*.json"))]


def found(placement: Pinning) -> dict[str, str]:
    return {finding.subject: finding.found for finding in placement.findings}


def kinds(placement: Pinning) -> dict[str, str]:
    """Return the kind of each finding, and the CPUs with which it begins."""
    return {kind: sentence.split()[1] for kind, sentence in found(placement).items()}


def test_whole_cores_are_packed_by_siblings() -> None:
    placement = place(40, CpuSet.parse("1-20,65-84"), EPYC)
    assert placement.policy is PinPolicy.PACKED_SIBLINGS
    assert placement.pins[:6] == (1, 65, 2, 66, 3, 67)
    assert placement.threads == 2
    assert placement.findings == ()


def test_linear_puts_vcpu_i_on_the_ith_cpu() -> None:
    placement = place(40, CpuSet.parse("1-20,65-84"), EPYC, policy=PinPolicy.LINEAR)
    assert placement.pins == (*range(1, 21), *range(65, 85))
    assert placement.threads == 1
    # Where siblings are neighbours, linear is packed.
    assert place(8, CpuSet.parse("8-15"), host("power9-2s"), policy=PinPolicy.LINEAR).threads == 4


def test_half_cores_are_linear_and_a_remark() -> None:
    placement = place(4, CpuSet.parse("1-3,65"), EPYC)
    assert placement.policy is PinPolicy.LINEAR
    assert kinds(placement) == {"half-core": "2-3"}
    placement = place(4, CpuSet.parse("1-3,65"), EPYC, others=CpuSet.parse("66"))
    assert kinds(placement) == {"sibling-of-another": "2", "half-core": "3"}
    assert "CPUs 2 share their cores with CPUs 66, which are exclusive to another pod" in placement.findings[0].found


def test_packed_half_cores_come_after_the_whole_ones() -> None:
    placement = place(5, CpuSet.parse("1-3,65,67"), EPYC, policy=PinPolicy.PACKED_SIBLINGS)
    assert placement.pins == (1, 65, 3, 67, 2)
    assert placement.threads == 1


def test_more_cpus_than_vcpus_and_numa_nodes_are_remarks() -> None:
    placement = place(4, CpuSet.parse("31-33,95-97"), EPYC)
    assert placement.pins == (31, 95, 32, 96)
    assert placement.threads == 2
    assert found(placement).keys() == {"across-numa-nodes", "unused-cpus"}
    assert "2 on 0, 2 on 1" in found(placement)["across-numa-nodes"]
    assert "CPUs 33,97 " in found(placement)["unused-cpus"]


def test_unequal_cores_are_a_remark() -> None:
    placement = place(4, CpuSet.parse("14-17"), host("core-i9-13900k"))
    assert placement.threads == 1
    assert "2 efficiency and 2 performance" in found(placement)["unequal-cores"]


@pytest.mark.parametrize(
    ("vcpus", "cpus", "message"),
    [
        (12, "1-11", "cannot place 12 vCPUs: there are 11 exclusive CPUs (1-11); ask for as many CPUs as vCPUs"),
        (0, "1-11", "cannot place 0 vCPUs: an instance has at least one"),
        (2, "1,200", "cannot place vCPUs on CPUs 200: the host has no such online CPUs"),
    ],
)
def test_an_impossible_placement_is_refused(vcpus: int, cpus: str, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        place(vcpus, CpuSet.parse(cpus), EPYC)
    assert str(caught.value) == message


def test_no_placement_has_two_vcpus_on_one_cpu_or_none() -> None:
    with pytest.raises(ValueError, match="two vCPUs on CPU 5"):
        Pinning((1, 5, 5), PinPolicy.LINEAR, 1)
    with pytest.raises(ValueError, match="a placement of no vCPUs"):
        Pinning((), PinPolicy.LINEAR, 1)


@pytest.mark.parametrize("hardware", EVERY_HOST)
@given(data=st.data())
@settings(max_examples=15)
def test_every_vcpu_has_one_cpu_of_its_own(hardware: Hardware, data: st.DataObject) -> None:
    cpus = data.draw(st.sets(st.sampled_from(list(hardware.online)), min_size=1, max_size=40))
    vcpus = data.draw(st.integers(1, len(cpus)))
    policy = data.draw(st.sampled_from([None, *PinPolicy]))
    placement = place(vcpus, CpuSet(cpus), hardware, policy=policy)
    assert len(placement.pins) == vcpus
    assert len(placement.cpus) == vcpus
    assert placement.cpus <= CpuSet(cpus)
    for start in range(0, vcpus, placement.threads) if placement.threads > 1 else ():
        assert CpuSet(placement.pins[start : start + placement.threads]) == hardware.siblings(placement.pins[start])


# --- without a kubelet ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "allowed", "count", "chosen"),
    [
        ("epyc-7543-2s-nps1", "0-127", 8, "4-7,68-71"),  # CPU 0's socket is not whole any more, and used up first
        ("epyc-7543-2s-nps1", "0-31,64-95", 8, "4-7,68-71"),  # the first L3 cache has lost CPU 0's core
        ("epyc-7543-2s-nps1", "0-127", 128, "0-127"),
        ("epyc-7543-2s-nps4", "0-127", 32, "8-15,16-23,72-79,80-87"),
        ("epyc-7543-2s-nps1", "0-63", 4, "4-7"),  # no whole core may be used, but one L3 cache
        ("core-i9-13900k", "0-31", 8, "2-9"),
        ("core-i9-13900k", "0-31", 16, "16-31"),  # 14 fast ones without CPU 0's core; 16 equal ones are better
        ("core-i9-13900k", "0-15", 16, "0-15"),
        ("core-i9-13900k", "0-31", 20, "2-15,16-21"),
        ("ryzen-7840u-nosmt", "0-15", 3, "2,4,6"),
        ("vm-8", "0-7", 8, "0-7"),
        ("power9-2s", "0-3", 3, "1-3"),  # there is no core but CPU 0's
        ("power9-2s", "0-127", 6, "4-7,10-11"),
        ("vm-8", "0", 1, "0"),
        ("epyc-9754-2s-nps4-cxl", "0-511", 96, "8-55,264-311"),
    ],
)
def test_chosen_cpus(name: str, allowed: str, count: int, chosen: str) -> None:
    assert choose_cpus(host(name), CpuSet.parse(allowed), count) == CpuSet.parse(chosen)


def test_cpus_that_are_not_there_are_not_chosen() -> None:
    with pytest.raises(RefusedError) as caught:
        choose_cpus(host("ryzen-7840u-nosmt"), CpuSet.parse("0-3,99"), 3)
    assert str(caught.value) == "cannot choose 3 CPUs: only 2 may be used (0,2); ask for fewer vCPUs"
    with pytest.raises(RefusedError, match="cannot choose 0 CPUs: "):
        choose_cpus(host("vm-8"), CpuSet.parse("0"), 0)


SMALL = Hardware(
    tuple(Cpu(cpu, cpu & ~1, cpu // 8, cpu // 8, cpu // 4, cpu // 8) for cpu in range(16)),
    tuple(NumaNode(node, 1 << 30, tuple(10 if node == other else 20 for other in range(4))) for node in range(4)),
)
"""Two sockets of two NUMA nodes of two cores of two CPUs."""


@given(st.sets(st.integers(0, 15), min_size=1), st.data())
@settings(max_examples=300)
def test_no_other_set_is_better_aligned_or_breaks_fewer_cores(allowed: set[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(allowed)))
    chosen = choose_cpus(SMALL, CpuSet(allowed), count)
    assert len(chosen) == count
    assert chosen <= CpuSet(allowed)
    without_first = CpuSet(allowed) - SMALL.siblings(0)
    pool = without_first if len(without_first) >= count else CpuSet(allowed)
    assert chosen <= pool

    def cost(cpus: CpuSet) -> tuple[int, int]:
        numa_nodes = {SMALL.by_cpu[cpu].numa_node for cpu in cpus}
        broken = {SMALL.by_cpu[cpu].core for cpu in cpus if not SMALL.siblings(cpu) <= cpus}
        return len(numa_nodes), len(broken)

    # Every subset of up to 16 CPUs is too many to try: cores count only by how many of their CPUs are taken.
    best = min(cost(CpuSet(itertools.chain.from_iterable(parts))) for parts in _by_core(pool, count))
    assert cost(chosen) == best


def _by_core(pool: CpuSet, count: int) -> list[tuple[tuple[int, ...], ...]]:
    choices = []
    for siblings in SMALL.cores.values():
        members = tuple(siblings & pool)
        choices.append([members[:taken] for taken in range(len(members) + 1)])
    return [parts for parts in itertools.product(*choices) if sum(map(len, parts)) == count]
