from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.kubelet.pod import Container, ContainerKind, Pod
from runner.node_plan.admission import REJECTION, Kubelet, KubeletConfiguration, Outcome, SimulatedNode
from runner.node_plan.cpu_manager import exclusive_cpus
from runner.node_plan.device_manager import Devices
from runner.node_plan.quirks import KubeletConfigError, Quirk
from runner.node_plan.topology_manager import Hint

pytestmark = pytest.mark.kubelet_model

HOSTS = Path(__file__).parents[2] / "data/hosts"
MIB, GIB = 1 << 20, 1 << 30
ALL = frozenset(Quirk)


def host(sockets: int, numa_nodes: int, cores: int, threads: int = 2, memory: int = 8) -> Hardware:
    """Build *sockets* of *numa_nodes* of *cores* of *threads*; a NUMA node has *memory* GiB, 1 of it in hugepages."""
    total = sockets * numa_nodes * cores
    cpus = (
        Cpu(core + thread * total, core, core // (numa_nodes * cores), 0, core // cores)
        for thread in range(threads)
        for core in range(total)
    )
    count = sockets * numa_nodes
    nodes = (
        NumaNode(
            here,
            memory * GIB,
            tuple(10 if here == there else 20 + abs(here - there) for there in range(count)),
            (HugepagePool(2 * MIB, 512, 512),),
        )
        for here in range(count)
    )
    return Hardware(tuple(sorted(cpus, key=lambda cpu: cpu.cpu)), tuple(nodes))


CONFIGURATION = KubeletConfiguration(
    cpu_manager_policy="static",
    reserved_cpus=CpuSet((0,)),
    memory_manager_policy="Static",
    reserved_memory={0: {"memory": GIB}},
    topology_manager_policy="restricted",
)


def node(hardware: Hardware, quirks: frozenset[Quirk] = ALL, **changes: Any) -> SimulatedNode:
    """Start a kubelet; on each NUMA node there is one device of a resource of its own."""
    configuration = attrs.evolve(CONFIGURATION, **changes)
    devices: Devices = {device_on(each.id): {each.id: 1} for each in hardware.numa_nodes}
    return Kubelet.configured(hardware, configuration, devices=devices, quirks=quirks).empty_node


def device_on(numa_node: int) -> str:
    return f"example.com/on-{numa_node}"


def one(uid: str, cpus: int, gib: int = 0, near: int | None = None) -> Pod:
    devices = {} if near is None else {device_on(near): 1}
    return Pod(uid, (Container("c", cpus * 1000, {"memory": gib * GIB}, devices=devices),))


def test_an_instance_of_40_cpus_on_a_dual_epyc() -> None:
    hardware = Hardware.from_json((HOSTS / "epyc-7543-2s-nps1.json").read_text())
    empty = node(
        hardware,
        reserved_cpus=CpuSet((0, 64)),
        cpu_manager_policy_options={"full-pcpus-only": "true"},
        topology_manager_policy="single-numa-node",
    )
    admission = empty.admit(one("instance", 40, 64))
    assert admission.admitted
    assert {name: str(cpus) for name, cpus in admission.cpus.items()} == {"c": "1-20,65-84"}
    assert str(admission.node.shared_pool) == "0,21-64,85-127"
    assert str(admission.node.available) == "21-63,85-127"
    assert admission.affinity == {"c": Hint(1, preferred=True)}
    assert admission.memory["c"][0].numa_nodes == (0,)


CONTAINERS = st.builds(
    lambda millicpus, gib, pages, kind: (millicpus, gib, pages, kind),
    st.sampled_from([500, 1000, 2000, 2000, 3000, 4000, 6000]),
    st.integers(0, 6),
    st.sampled_from([0, 0, 256, 512]),
    st.sampled_from([ContainerKind.APP, ContainerKind.APP, ContainerKind.INIT, ContainerKind.SIDECAR]),
)


def pod(uid: str, containers: list[tuple[int, int, int, ContainerKind]]) -> Pod:
    made = [
        Container(f"c{place}", millicpus, {"memory": gib * GIB, "hugepages-2Mi": pages * MIB}, kind)
        for place, (millicpus, gib, pages, kind) in enumerate(containers)
    ]
    return Pod(uid, tuple(sorted(made, key=lambda each: each.kind is ContainerKind.APP)))


@given(
    st.sampled_from([host(1, 1, 4), host(2, 1, 4), host(2, 2, 3), host(1, 4, 2, 1)]),
    st.sampled_from(["none", "best-effort", "restricted", "single-numa-node"]),
    st.sampled_from(["container", "pod"]),
    st.sampled_from(
        [
            "strict-cpu-reservation",
            "full-pcpus-only",
            "distribute-cpus-across-numa",
            "distribute-cpus-across-cores",
            "prefer-align-cpus-by-uncorecache",
        ]
    ),
    st.lists(st.tuples(st.lists(CONTAINERS, min_size=1, max_size=3), st.booleans()), max_size=8),
)
@settings(max_examples=200)
def test_allocations_of_a_node_add_up_after_every_step(
    hardware: Hardware,
    policy: str,
    scope: str,
    option: str,
    pods: list[tuple[list[tuple[int, int, int, ContainerKind]], bool]],
) -> None:
    empty = node(
        hardware,
        cpu_manager_policy_options={option: "true"},
        topology_manager_policy=policy,
        topology_manager_scope=scope,
    )
    manager = empty.kubelet.cpu_manager
    assert manager
    current = empty
    running: list[str] = []
    leaking = False
    for number, (containers, one_goes) in enumerate(pods):
        if running and one_goes:
            current = current.without(running.pop(0))
        asked = pod(str(number), containers)
        admission = current.admit(asked)
        assert current.admit(asked) == admission
        assert admission.outcome in {Outcome.ADMITTED, Outcome.REJECTED}
        current = admission.node
        if current.shared_pool:  # without one, as under strict-cpu-reservation, the kubelet would not start again
            manager.validate(current.cpus)
        for name, cpus in admission.cpus.items():
            wanted = next(exclusive_cpus(asked, each) for each in asked.containers if each.name == name)
            assert len(cpus) == wanted
            assert cpus.isdisjoint(manager.reserved)
        for one_pod, another in itertools.combinations(current.cpus.assignments.values(), 2):
            assert all(a.isdisjoint(b) for a in one_pod.values() for b in another.values())
        if admission.admitted:
            running.append(asked.pod_uid)
            assert set(admission.cpus) == {each.name for each in asked.containers if exclusive_cpus(asked, each)}
            assert set(admission.memory) == {each.name for each in asked.containers}
        for numa_node in current.memory.numa_nodes.values():
            for table in numa_node.tables.values():
                assert table.free + table.reserved == table.allocatable
                assert table.free >= 0
        leaking = leaking or overlapping(current)
    current = current.without(*running)
    assert current.shared_pool == empty.shared_pool
    assert current.available == empty.available
    if not leaking:
        assert current.memory.numa_nodes == empty.memory.numa_nodes


def overlapping(current: SimulatedNode) -> bool:
    """Tell whether memory is booked on sets of NUMA nodes that overlap without being the same."""
    booked = {
        frozenset(block.numa_nodes)
        for containers in current.memory.assignments.values()
        for blocks in containers.values()
        for block in blocks
    }
    return any(one & other for one, other in itertools.combinations(booked, 2))


def test_memory_is_lost_where_one_numa_node_of_a_group_is_booked_alone() -> None:
    # The hints keep groups apart, but the affinity they are merged to may be one NUMA node of a group, and for a
    # single one the kubelet does not search further. What is released then comes back to whichever NUMA node is first.
    empty = node(host(3, 1, 4), topology_manager_policy="best-effort")
    first = empty.admit(one("first", 1, 8)).node
    assert [memory.cells for memory in first.memory.numa_nodes.values()] == [(0, 1), (0, 1), (2,)]
    second = first.admit(one("filler", 1, 6)).node.admit(one("second", 1, 5)).node.without("first", "filler")
    mixed = second.admit(one("alone", 1, 3, near=0)).node
    assert mixed.memory.assignments["alone"]["c"][0].numa_nodes == (0,)
    lost = mixed.without("second").without("alone").memory.numa_nodes
    assert {numa_node: memory.tables["memory"].reserved // GIB for numa_node, memory in lost.items()} == {
        0: 0,
        1: 3,
        2: 0,
    }


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=6), st.integers(1, 7), st.integers(0, 8))
@settings(max_examples=150)
def test_one_numa_node_is_found_exactly_when_there_is_one(before: list[tuple[int, int]], cpus: int, gib: int) -> None:
    current = node(host(2, 2, 3), topology_manager_policy="single-numa-node")
    for number, (some_cpus, some_gib) in enumerate(before):
        current = current.admit(one(str(number), some_cpus, some_gib)).node
    current = current.without()
    manager = current.kubelet.cpu_manager
    assert manager
    fitting = [
        numa_node
        for numa_node, memory in current.memory.numa_nodes.items()
        if len(current.available & CpuSet(manager.topology.numa_nodes[numa_node])) >= cpus
        and memory.tables["memory"].free >= gib * GIB
    ]
    admission = current.admit(one("last", cpus, gib))
    assert admission.admitted == bool(fitting)
    if fitting:
        assert admission.affinity["c"] == Hint(1 << fitting[0], preferred=True)
        assert admission.cpus["c"] <= CpuSet(manager.topology.numa_nodes[fitting[0]])


def test_memory_that_fits_nowhere_costs_the_cpus_until_the_next_admission() -> None:
    empty = node(host(2, 1, 4))
    admission = empty.admit(one("p", 2, 99))
    assert (admission.outcome, admission.reason) == (Outcome.REJECTED, "UnexpectedAdmissionError")
    assert admission.cpus["c"] == CpuSet((1, 9))
    assert admission.node.shared_pool == empty.shared_pool - CpuSet((1, 9))
    # One CPU is the sibling of the reserved one: what is broken already is used up first.
    assert admission.node.admit(one("q", 1)).node.shared_pool == empty.shared_pool - CpuSet((8,))
    fixed = node(host(2, 1, 4), ALL - {Quirk.EMPTY_MEMORY_HINTS}).admit(one("p", 2, 99))
    assert (fixed.reason, fixed.cpus) == (REJECTION, {})


def test_a_kubelet_that_would_hang_is_reported_and_nothing_is_changed() -> None:
    # The free CPUs of the livelock: NUMA nodes with 5, 5, 4 and 2, among them half cores.
    options = {"distribute-cpus-across-numa": "true", "full-pcpus-only": "true"}
    empty = node(
        host(4, 1, 3),
        reserved_cpus=CpuSet.parse("8,10-11,14,17,20,22-23"),
        cpu_manager_policy_options=options,
        topology_manager_policy="none",
        memory_manager_policy="None",
        reserved_memory={},
    )
    assert str(empty.available) == "0-7,9,12-13,15-16,18-19,21"
    # The kubelet counts whole cores before it searches, which keeps such a request out as long as the half cores are
    # half reserved ones.
    admission = empty.admit(one("p", 10))
    assert admission.admitted
    kubelet = empty.kubelet
    assert kubelet.cpu_manager
    manager = attrs.evolve(kubelet.cpu_manager, reserved=CpuSet())  # pods take the halves instead
    pool = attrs.evolve(empty.cpus, shared_pool=empty.available)
    hanging = attrs.evolve(empty, kubelet=attrs.evolve(kubelet, cpu_manager=manager), cpus=pool)
    admission = hanging.admit(one("p", 14))
    assert admission.outcome is Outcome.HANGS
    assert admission.message.startswith("this kubelet would hang: ")
    assert (admission.reason, admission.node) == ("", hanging)


def test_a_kubelet_that_would_panic_is_reported() -> None:
    empty = node(
        Hardware.from_json((HOSTS / "power9-2s.json").read_text()),
        topology_manager_policy_options={"prefer-closest-numa-nodes": "true"},
    )
    admission = empty.admit(one("p", 8))
    assert admission.outcome is Outcome.CRASHES
    assert admission.message.startswith("this kubelet would panic: ")
    assert admission.node == empty


def test_cpus_come_from_the_numa_node_of_the_devices() -> None:
    empty = node(host(2, 1, 4))
    admission = empty.admit(one("p", 2, 1, near=1))
    assert str(admission.cpus["c"]) == "4,12"
    assert admission.memory["c"][0].numa_nodes == (1,)
    together = node(host(2, 1, 4), topology_manager_scope="pod").admit(one("p", 2, 1, near=1))
    assert together.cpus == admission.cpus
    assert [step.container for step in together.steps] == [None]
    assert list(together.steps[0].hints) == ["device", "cpu", "memory"]


def test_policy_none_asks_no_provider() -> None:
    admission = node(host(2, 1, 4), topology_manager_policy="none").admit(one("p", 2, 1))
    assert admission.admitted
    assert (admission.steps, admission.affinity) == ((), {})


def test_a_node_without_managers_admits_anything() -> None:
    empty = node(host(2, 1, 4), cpu_manager_policy="none", memory_manager_policy="None")
    admission = empty.admit(one("p", 99, 99))
    assert admission.admitted
    assert (admission.cpus, admission.memory) == ({}, {})
    assert empty.available == CpuSet()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"topology_manager_policy_options": {"max-allowable-numa-nodes": "7"}},
            'the minimum value of "max-allowable-numa-nodes" should not be less than 8',
        ),
        (
            {"topology_manager_policy_options": {"max-allowable-numa-nodes": "many"}},
            (
                'unable to convert policy option to integer "max-allowable-numa-nodes":'
                ' strconv.Atoi: parsing "many": invalid syntax'
            ),
        ),
        ({"topology_manager_policy_options": {"x": "1"}}, 'unknown Topology Manager Policy option: "x"'),
        ({"topology_manager_policy": "strict"}, 'unknown policy: "strict"'),
        ({"topology_manager_scope": "node"}, 'unknown scope: "node"'),
        ({"cpu_manager_policy": "dynamic"}, 'unknown policy: "dynamic"'),
        ({"memory_manager_policy": "static"}, 'unknown policy: "static"'),
        (
            {
                "topology_manager_policy": "single-numa-node",
                "cpu_manager_policy_options": {"align-by-socket": "true"},
            },
            "Topolgy manager single-numa-node policy is incompatible with CPUManager align-by-socket policy option",
        ),
    ],
)
def test_configurations_that_no_kubelet_starts_with(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KubeletConfigError) as caught:
        node(host(2, 1, 4), **changes)
    assert str(caught.value) == message


def test_more_numa_nodes_than_allowed_need_the_option_or_policy_none() -> None:
    wide = Hardware.from_json((HOSTS / "epyc-9754-2s-nps4-cxl.json").read_text())
    with pytest.raises(KubeletConfigError, match=r"^unsupported on machines with more than 8 NUMA Nodes$"):
        node(wide)
    node(wide, topology_manager_policy="none")
    admission = node(wide, topology_manager_policy_options={"max-allowable-numa-nodes": "16"}).admit(one("p", 40, 200))
    # One NUMA node of 192 GiB has the CPUs, only two together or one of CXL memory have the memory.
    assert admission.reason == REJECTION


def test_a_version_that_is_not_known_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"cannot predict kubelet 1\.38"):
        Kubelet.configured(host(1, 1, 2), attrs.evolve(CONFIGURATION, minor=38))
    Kubelet.configured(host(1, 1, 2), attrs.evolve(CONFIGURATION, minor=33))
