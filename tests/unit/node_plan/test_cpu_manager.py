from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.facts.hardware import Hardware
from runner.kubelet.numa_masks import mask_of
from runner.kubelet.pod import Container, ContainerKind, Pod, QosClass
from runner.kubelet.state import CpuState
from runner.node_plan.cpu_assignment import CpuFacts, CpuTopology, take_distributed, take_packed
from runner.node_plan.cpu_manager import CpuManager, CpuPolicyOptions, exclusive_cpus_of_pod
from runner.node_plan.quirks import (
    FROM_SOURCE_MINOR,
    AllocationError,
    KubeletConfigError,
    KubeletHangsError,
    Quirk,
    quirks_of,
)
from runner.node_plan.topology_manager import Hint, HintList

pytestmark = pytest.mark.kubelet_model

HOSTS = Path(__file__).parents[2] / "data/hosts"
ALL = frozenset(Quirk)
Take = Callable[[CpuTopology, CpuSet, int], CpuSet]


def regular(sockets: int, numa_nodes: int, cores: int, threads: int, uncores: int = 1) -> CpuTopology:
    """Build *sockets* of *numa_nodes* of *cores* (in *uncores* caches) of *threads*, numbered first threads first."""
    total = sockets * numa_nodes * cores
    return CpuTopology(
        tuple(
            CpuFacts(
                cpu=core + thread * total,
                core=core,
                socket=core // (numa_nodes * cores),
                numa_node=core // cores,
                uncore=core // cores * uncores + core % cores * uncores // cores,
            )
            for thread in range(threads)
            for core in range(total)
        )
    )


SMALL_WORLDS = [
    pytest.param(regular(*shape), id="x".join(map(str, shape)))
    for shape in [(1, 1, 3, 2), (2, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 1), (1, 4, 2, 1), (4, 1, 1, 2), (1, 2, 4, 1, 2)]
]

TAKES: dict[str, Take] = {
    "packed": take_packed,
    "spread": lambda topology, free, count: take_packed(topology, free, count, spread=True),
    "uncore": lambda topology, free, count: take_packed(topology, free, count, prefer_uncore=True),
    "distributed": take_distributed,
    "distributed cores": lambda topology, free, count: take_distributed(
        topology, free, count, group=topology.cpus_per_core
    ),
}


def subsets(items: Iterable[int]) -> Iterator[CpuSet]:
    items = list(items)
    for size in range(len(items) + 1):
        yield from map(CpuSet, itertools.combinations(items, size))


@pytest.mark.parametrize("topology", SMALL_WORLDS)
@pytest.mark.parametrize("name", TAKES)
def test_every_small_host_gives_the_cpus_asked_for_or_an_error(topology: CpuTopology, name: str) -> None:
    for free in subsets(topology.all):
        for count in range(len(topology.all) + 2):
            if count > len(free):
                with pytest.raises(AllocationError) as caught:
                    TAKES[name](topology, free, count)
                assert str(caught.value) == (
                    f"not enough cpus available to satisfy request: requested={count}, available={len(free)}"
                )
                continue
            cpus = TAKES[name](topology, free, count)
            assert len(cpus) == count
            assert cpus <= free


@given(st.data())
@settings(max_examples=100)
def test_the_order_that_cpus_are_listed_in_decides_nothing(data: st.DataObject) -> None:
    topology = data.draw(st.sampled_from([regular(2, 2, 3, 2, 3), regular(1, 4, 2, 2), regular(4, 1, 2, 1)]))
    free = CpuSet(data.draw(st.sets(st.sampled_from(sorted(topology.all)))))
    count = data.draw(st.integers(0, len(free)))
    shuffled = CpuTopology(tuple(data.draw(st.permutations(topology.cpus))))
    for name in ("packed", "spread", "uncore", "distributed"):
        assert TAKES[name](topology, free, count) == TAKES[name](shuffled, free, count)


def test_the_best_combination_is_overwritten() -> None:
    topology = regular(1, 8, 4, 1)
    everything = CpuSet(topology.all)
    assert str(take_distributed(topology, everything, 16)) == "0-11,28-31"
    assert str(take_distributed(topology, everything, 16, quirks=ALL - {Quirk.COMBINATIONS_OVERWRITTEN})) == "0-15"


def test_a_livelock_is_reported_and_a_fixed_kubelet_takes_whole_cores() -> None:
    # NUMA nodes with 5, 5, 4 and 2 free CPUs give 2 each, and 6 more are wanted. Between them the first two have 6,
    # but two of these are half cores.
    topology = regular(4, 1, 3, 2)
    free = CpuSet.parse("0-7,9,12-13,15-16,18-19,21")
    with pytest.raises(KubeletHangsError) as caught:
        take_distributed(topology, free, 14, group=2)
    assert str(caught.value) == (
        "this kubelet would hang: 2 of 14 CPUs are left to take in groups of 2,"
        " and NUMA nodes 0,1 have no whole group left (kubernetes#140730)"
    )
    assert str(take_distributed(topology, free, 14, group=2, quirks=ALL - {Quirk.LIVELOCK})) == (
        "0-1,3-4,6-7,9,12-13,15-16,18-19,21"
    )


def test_an_assigned_cpu_is_assigned_again_where_cores_are_unequal() -> None:
    # A desktop: two cores with two CPUs, four with one. An average core has one CPU, so a core with one free CPU
    # counts as whole and is taken whole.
    cores = [0, 0, 2, 2, 4, 5, 6, 7]
    topology = CpuTopology(tuple(CpuFacts(cpu, core, 0, 0, 0) for cpu, core in enumerate(cores)))
    free = CpuSet.parse("1-7")
    assert str(take_packed(topology, free, 6)) == "0-1,4-7"
    assert str(take_packed(topology, free, 6, quirks=ALL - {Quirk.WHOLE_CORES_UNCHECKED})) == "2-7"


def manager(host: str, reserved: str, **options: str) -> CpuManager:
    topology = CpuTopology.of(Hardware.from_json((HOSTS / f"{host}.json").read_text()))
    parsed = CpuPolicyOptions.parse({name.replace("_", "-"): value for name, value in options.items()})
    return CpuManager.configured(topology, parsed, reserved_cpus=CpuSet.parse(reserved), reserved_millicpus=0)


def one(name: str, cpus: int, kind: ContainerKind = ContainerKind.APP) -> Container:
    return Container(name, cpus * 1000, kind=kind)


def test_an_instance_of_40_cpus_on_a_dual_epyc() -> None:
    kubelet = manager("epyc-7543-2s-nps1", "0,64", full_pcpus_only="true")
    instance = one("gpu-instance", 40)
    state = kubelet.allocate(kubelet.initial, Pod("a", (instance,)), instance, None)
    assert str(state.assignments["a"]["gpu-instance"]) == "1-20,65-84"
    assert str(state.shared_pool) == "0,21-64,85-127"
    assert kubelet.without(state, "a").shared_pool == kubelet.initial.shared_pool


@pytest.mark.parametrize(
    ("millicpus", "cpus"), [(1, "0"), (1000, "0"), (2000, "0,8"), (2001, "0-1,8"), (9000, "0-4,8-11")]
)
def test_reserved_cpus_are_chosen_like_any_other(millicpus: int, cpus: str) -> None:
    kubelet = CpuManager.configured(
        regular(2, 1, 4, 2), CpuPolicyOptions(), reserved_cpus=CpuSet(), reserved_millicpus=millicpus
    )
    assert str(kubelet.reserved) == cpus


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full-pcpus": "true"}, 'unknown CPU Manager Policy option: "full-pcpus"'),
        (
            {"full-pcpus-only": "yes"},
            'bad value for option "full-pcpus-only": strconv.ParseBool: parsing "yes": invalid syntax',
        ),
        *(
            (
                {one: "true", other: "true"},
                f"static policy options {one} and {other} can not be used at the same time",
            )
            for one, other in [
                ("full-pcpus-only", "distribute-cpus-across-cores"),
                ("distribute-cpus-across-numa", "distribute-cpus-across-cores"),
                ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"),
                ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"),
            ]
        ),
    ],
)
def test_options_that_no_kubelet_starts_with(options: dict[str, str], message: str) -> None:
    with pytest.raises(KubeletConfigError) as caught:
        CpuPolicyOptions.parse(options)
    assert str(caught.value) == message


def test_options_may_be_false_together() -> None:
    options = {"full-pcpus-only": "true", "distribute-cpus-across-cores": "false"}
    assert CpuPolicyOptions.parse(options) == CpuPolicyOptions(full_pcpus_only=True)


@pytest.mark.parametrize(
    ("cpus", "millicpus", "options", "message"),
    [
        (
            "",
            0,
            CpuPolicyOptions(),
            "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero",
        ),
        (
            "0,99",
            0,
            CpuPolicyOptions(),
            "[cpumanager] unable to build the reserved physical CPUs from the reserved set: unknown CPU ID: 99",
        ),
        (
            "",
            8001,
            CpuPolicyOptions(),
            "[cpumanager] unable to reserve the required amount of CPUs (size of  did not equal 9)",
        ),
        (
            "0",
            0,
            CpuPolicyOptions(align_by_socket=True),
            "Align by socket is not compatible with hardware where number of sockets are more than number of NUMA",
        ),
    ],
)
def test_reservations_that_no_kubelet_starts_with(
    cpus: str, millicpus: int, options: CpuPolicyOptions, message: str
) -> None:
    # Two sockets in one NUMA node, as a machine with NUMA switched off shows them.
    topology = CpuTopology(tuple(CpuFacts(cpu, cpu, cpu // 4, 0, 0) for cpu in range(8)))
    with pytest.raises(KubeletConfigError) as caught:
        CpuManager.configured(topology, options, reserved_cpus=CpuSet.parse(cpus), reserved_millicpus=millicpus)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("strict", "pool", "given", "message"),
    [
        ("false", "1-7", {}, 'not all reserved cpus: "0" are present in defaultCpuSet: "1-7"'),
        ("true", "0-7", {}, 'some of strictly reserved cpus: "0" are present in defaultCpuSet: "0-7"'),
        ("false", "0-7", {"c": "6-7"}, 'pod: p, container: c cpuset: "6-7" overlaps with default cpuset "0-7"'),
        (
            "false",
            "0-3",
            {"c": "6-7"},
            'current set of available CPUs "0-7" doesn\'t match with CPUs in state "0-3,6-7"',
        ),
    ],
)
def test_states_that_no_kubelet_starts_with(strict: str, pool: str, given: dict[str, str], message: str) -> None:
    kubelet = manager("vm-8", "0", strict_cpu_reservation=strict)
    assignments = {"p": {name: CpuSet.parse(cpus) for name, cpus in given.items()}}
    with pytest.raises(KubeletConfigError) as caught:
        kubelet.validate(CpuState("static", CpuSet.parse(pool), assignments))
    assert str(caught.value) == message
    kubelet.validate(kubelet.initial)


def test_the_cpus_of_init_containers_are_used_again_but_not_those_of_sidecars() -> None:
    kubelet = manager("vm-8", "0")
    containers = (
        one("init", 2, ContainerKind.INIT),
        one("sidecar", 1, ContainerKind.SIDECAR),
        one("app", 3),
    )
    pod = Pod("p", containers)
    state = kubelet.initial
    for container in containers:
        state = kubelet.allocate(state, pod, container, None)
    assert {name: str(cpus) for name, cpus in state.assignments["p"].items()} == {
        "init": "1-2",
        "sidecar": "1",
        "app": "2-4",
    }
    assert str(state.shared_pool) == "0,5-7"
    assert exclusive_cpus_of_pod(pod) == 4


@pytest.mark.parametrize(
    ("container", "qos", "pod_level"),
    [
        (Container("c", 1500), QosClass.GUARANTEED, False),
        (Container("c", 2000), QosClass.BURSTABLE, False),
        (Container("c", 2000), QosClass.GUARANTEED, True),
    ],
)
def test_containers_without_exclusive_cpus(container: Container, qos: QosClass, *, pod_level: bool) -> None:
    kubelet = manager("vm-8", "0")
    pod = Pod("p", (container,), qos, pod_level)
    assert kubelet.allocate(kubelet.initial, pod, container, None) == kubelet.initial
    assert kubelet.hints(kubelet.initial, pod, container) is None
    assert kubelet.pod_hints(kubelet.initial, pod) is None


def test_hints_of_a_container_with_cpus_are_regenerated() -> None:
    kubelet = manager("epyc-7543-2s-nps4", "0,64")
    container = one("c", 8)
    pod = Pod("p", (container,))
    state = kubelet.allocate(kubelet.initial, pod, container, mask_of([3]))
    only_there = {mask_of([3, *others]) for size in range(8) for others in itertools.combinations(range(8), size)}
    hints = kubelet.hints(state, pod, container)
    assert hints is not None
    assert set(hints["cpu"] or ()) == {Hint(mask, preferred=mask == 8) for mask in only_there}
    assert kubelet.pod_hints(state, pod) == hints
    grown = Pod("p", (one("c", 10),))
    assert kubelet.hints(state, grown, grown.containers[0]) == {"cpu": HintList()}
    assert kubelet.pod_hints(state, grown) == {"cpu": HintList()}


def test_versions_that_are_not_known_are_refused() -> None:
    assert quirks_of(35) == ALL
    assert quirks_of(36) == ALL - {Quirk.DEVICE_HINTS_EVERYWHERE}
    assert quirks_of(37) == {
        Quirk.COMBINATIONS_OVERWRITTEN,
        Quirk.WHOLE_UNITS_UNCHECKED,
        Quirk.EMPTY_MEMORY_HINTS,
    }
    for minor in (32, FROM_SOURCE_MINOR + 1):
        with pytest.raises(RefusedError, match=rf"cannot predict kubelet 1\.{minor}: "):
            quirks_of(minor)
