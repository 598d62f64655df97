from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode, hugepages_resource
from runner.kubelet.numa_masks import mask_of
from runner.kubelet.pod import Container, ContainerKind, Pod, QosClass
from runner.kubelet.state import Block, MemoryState
from runner.node_plan.memory_manager import (
    MemoryManager,
    check_reservation,
    peak_memory,
)
from runner.node_plan.quirks import AllocationError, KubeletConfigError
from runner.node_plan.topology_manager import Hint, HintList

pytestmark = pytest.mark.kubelet_model

MIB, GIB = 1 << 20, 1 << 30
ANY = Hint(None, preferred=False)


def manager(*memory: int, hugepages: int = 0, reserved: int = 1) -> MemoryManager:
    """Configure NUMA nodes of *memory* GiB, of each *hugepages* GiB in pages of 2 MiB; *reserved* GiB on the first."""
    pages = hugepages * GIB // (2 * MIB)
    nodes = tuple(
        NumaNode(number, size * GIB, (10,) * len(memory), (HugepagePool(2 * MIB, pages, pages),))
        for number, size in enumerate(memory)
    )
    return MemoryManager.configured(Hardware((Cpu(0, 0, 0, 0, 0),), nodes), {0: {"memory": reserved * GIB}})


def container(name: str, gib: int, hugepages: int = 0, kind: ContainerKind = ContainerKind.APP) -> Container:
    return Container(name, 1000, {"memory": gib * GIB, "hugepages-2Mi": hugepages * GIB}, kind)


def booked(state: MemoryState) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return by NUMA node: GiB reserved for pods, number of assignments, group."""
    return [
        (memory.tables["memory"].reserved // GIB, memory.assignments, memory.cells)
        for memory in state.numa_nodes.values()
    ]


def enumerated(state: MemoryState, requests: Mapping[str, int]) -> list[Hint]:
    """Make the hints mask by mask as the kubelet does, for a pod with nothing to use again."""
    numa_nodes = sorted(state.numa_nodes)
    narrowest = len(numa_nodes)
    fitting = []
    for size in range(1, len(numa_nodes) + 1):
        for chosen in itertools.combinations(numa_nodes, size):
            here = [state.numa_nodes[each] for each in chosen]
            if any(sum(each.tables[name].allocatable for each in here) < need for name, need in requests.items()):
                continue
            narrowest = min(narrowest, size)
            if size == 1 and len(here[0].cells) > 1:
                continue
            if size > 1 and any(each.assignments and each.cells != chosen for each in here):
                continue
            if any(sum(each.tables[name].free for each in here) < need for name, need in requests.items()):
                continue
            fitting.append(chosen)
    return [Hint(mask_of(chosen), len(chosen) == narrowest) for chosen in fitting]


AMOUNTS = st.tuples(st.integers(0, 14), st.sampled_from([0, 0, 1, 3]))


@given(st.lists(AMOUNTS, max_size=8), AMOUNTS, st.sampled_from([(8, 8, 8, 8), (12, 6, 6), (4, 20)]))
@settings(max_examples=150)
def test_hints_equal_those_found_mask_by_mask(
    pods: list[tuple[int, int]], asked: tuple[int, int], memory: tuple[int, ...]
) -> None:
    kubelet = manager(*memory, hugepages=2)
    state = kubelet.initial
    for number, amounts in enumerate(pods):
        each = container("c", *amounts)
        try:
            state = kubelet.allocate(state, Pod(str(number), (each,)), each, ANY)
        except AllocationError:
            continue
        for numa in state.numa_nodes.values():
            for table in numa.tables.values():
                assert table.reserved + table.free == table.allocatable
                assert min(table.reserved, table.free) >= 0
    last = container("c", *asked)
    assert list(kubelet.numa_hints(state, Pod("last", (last,)), last.memory)) == enumerated(state, last.memory)
    for number in range(len(pods)):
        state = kubelet.without(state, str(number))
    assert state.numa_nodes == kubelet.initial.numa_nodes


def test_a_host_s_memory_is_what_hugepages_and_reservations_leave() -> None:
    tables = manager(8, 8, hugepages=2).initial.numa_nodes[0].tables
    assert tables["memory"].allocatable == 5 * GIB
    assert tables["hugepages-2Mi"].allocatable == 2 * GIB
    assert hugepages_resource(GIB) == "hugepages-1Gi"
    assert hugepages_resource(64 * 1024) == "hugepages-64Ki"


def test_a_request_wider_than_one_numa_node_makes_a_group() -> None:
    kubelet = manager(8, 8, 8)
    wide, narrow = container("wide", 10), container("narrow", 5)
    state = kubelet.allocate(kubelet.initial, Pod("a", (wide,)), wide, ANY)
    assert booked(state) == [(7, 2, (0, 1)), (3, 2, (0, 1)), (0, 0, (2,))]
    hints = kubelet.hints(state, Pod("b", (narrow,)), narrow) or {}
    # NUMA nodes 0 and 1 serve this group only, and have no 5 GiB left between them but 5 exactly.
    assert list(hints) == ["memory", "hugepages-2Mi"]
    for listed in hints.values():
        assert list(listed or ()) == [Hint(0b100, preferred=True), Hint(0b011, preferred=False)]


def test_a_request_that_fits_nowhere_has_no_hints() -> None:
    kubelet = manager(8, 8)
    huge = container("c", 99)
    assert kubelet.hints(kubelet.initial, Pod("p", (huge,)), huge) == {}
    assert kubelet.pod_hints(kubelet.initial, Pod("p", (huge,))) == {}


@pytest.mark.parametrize(
    ("gib", "affinity", "message"),
    [
        (
            99,
            Hint(None, preferred=True),
            "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available",
        ),
        (7, Hint(None, preferred=True), "[memorymanager] failed to find the default preferred hint"),
        (99, Hint(1, preferred=True), "[memorymanager] failed to find NUMA nodes to extend the current topology hint"),
        (7, Hint(4, preferred=True), "[memorymanager] failed to find the extended preferred hint"),
        (2, Hint(3, preferred=False), "[memorymanager] preferred hint violates NUMA node allocation"),
    ],
)
def test_a_failed_allocation_has_the_kubelet_s_message(gib: int, affinity: Hint, message: str) -> None:
    kubelet = manager(8, 8, 8, 8)
    state = kubelet.initial
    for name, numa_node in (("a", 0), ("b", 1)):
        first = container("c", 3)
        state = kubelet.allocate(state, Pod(name, (first,)), first, Hint(1 << numa_node, preferred=True))
    for numa_node in (2, 3):
        second = container("c", 2)
        state = kubelet.allocate(state, Pod(f"c{numa_node}", (second,)), second, Hint(12, preferred=False))
    asked = container("c", gib)
    with pytest.raises(AllocationError) as caught:
        kubelet.allocate(state, Pod("p", (asked,)), asked, affinity)
    assert str(caught.value) == message


def test_affinity_that_is_too_narrow_is_extended() -> None:
    kubelet = manager(8, 8, 8)
    wide = container("c", 12)
    state = kubelet.allocate(kubelet.initial, Pod("p", (wide,)), wide, Hint(0b010, preferred=False))
    assert state.assignments["p"]["c"][0] == Block((0, 1), "memory", 12 * GIB)


def test_memory_of_init_containers_is_used_again_and_the_sum_stays_right() -> None:
    kubelet = manager(16, 16)
    containers = (
        container("init", 3, kind=ContainerKind.INIT),
        container("sidecar", 1, kind=ContainerKind.SIDECAR),
        container("app", 5),
    )
    pod = Pod("p", containers)
    state = kubelet.initial
    for each in containers:
        state = kubelet.allocate(state, pod, each, Hint(1, preferred=True))
    sizes = {name: blocks[0].size // GIB for name, blocks in state.assignments["p"].items()}
    assert sizes == {"init": 0, "sidecar": 1, "app": 5}
    assert booked(state)[0][0] == 6
    assert peak_memory(pod) == {"memory": 6 * GIB, "hugepages-2Mi": 0}
    again = kubelet.allocate(state, pod, containers[2], Hint(1, preferred=True))
    assert again.numa_nodes == state.numa_nodes
    assert kubelet.without(state, "p").numa_nodes == kubelet.initial.numa_nodes


def test_hints_for_booked_memory_are_regenerated() -> None:
    kubelet = manager(8, 8)
    each = Container("c", 1000, {"memory": 2 * GIB})
    pod = Pod("p", (each,))
    state = kubelet.allocate(kubelet.initial, pod, each, Hint(2, preferred=True))
    assert kubelet.hints(state, pod, each) == {"memory": HintList.of([Hint(2, preferred=True)])}
    assert kubelet.pod_hints(state, pod) == {"memory": HintList.of([Hint(2, preferred=True)])}
    assert kubelet.hints(state, pod, Container("c", 1000, {"memory": GIB})) is None


def test_only_guaranteed_pods_are_booked() -> None:
    kubelet = manager(8, 8)
    each = container("c", 2)
    for pod in (Pod("p", (each,), QosClass.BURSTABLE), Pod("p", (each,), pod_level_resources=True)):
        assert kubelet.hints(kubelet.initial, pod, each) is None
        assert kubelet.pod_hints(kubelet.initial, pod) is None
        assert kubelet.allocate(kubelet.initial, pod, each, ANY) == kubelet.initial


def test_reservations_that_no_kubelet_starts_with() -> None:
    with pytest.raises(KubeletConfigError, match=r"^\[memorymanager\] you should specify the system reserved memory$"):
        manager(8, 8, reserved=0)
    check_reservation({0: {"memory": GIB}, 1: {"memory": GIB}}, {"memory": 2 * GIB})
    with pytest.raises(KubeletConfigError) as caught:
        check_reservation({0: {"memory": 1536 * MIB}}, {"memory": 2 * GIB})
    assert str(caught.value) == (
        'the total amount "1536Mi" of type "memory" is not equal to the value "2Gi"'
        " determined by Node Allocatable feature"
    )
