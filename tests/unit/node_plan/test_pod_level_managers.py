"""Pods with resources of their own (``spec.resources``) on a kubelet with the gate ``PodLevelResourceManagers``.

Answers of the real kubelet to such pods are compared in ``test_vectors.py``; here is one test for each rule.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Hardware
from runner.kubelet.pod import Container, ContainerKind, Pod, QosClass
from runner.kubelet.state import Block, CpuState
from runner.node_plan.admission import Kubelet, KubeletConfiguration, SimulatedNode
from runner.node_plan.device_manager import Devices
from runner.node_plan.quirks import Quirk

pytestmark = pytest.mark.kubelet_model

HOSTS = Path(__file__).parents[2] / "data/hosts"
MIB, GIB = 1 << 20, 1 << 30
EPYC = Hardware.from_json((HOSTS / "epyc-7543-2s-nps1.json").read_text())
CONFIGURATION = KubeletConfiguration(
    cpu_manager_policy="static",
    reserved_cpus=CpuSet((0, 64)),
    memory_manager_policy="Static",
    reserved_memory={0: {"memory": GIB}},
    topology_manager_policy="restricted",
    topology_manager_scope="pod",
    pod_level_resource_managers=True,
)
GPU = "nvidia.com/gpu"
NO_DEVICES: Devices = {}


def node(devices: Devices = NO_DEVICES, quirks: frozenset[Quirk] | None = None, **changes: Any) -> SimulatedNode:
    configuration = attrs.evolve(CONFIGURATION, **changes)
    return Kubelet.configured(EPYC, configuration, devices=devices, quirks=quirks).empty_node


def own(name: str, cpus: float, gib: int = 1, kind: ContainerKind = ContainerKind.APP) -> Container:
    """Return a container whose requests equal its limits."""
    return Container(name, int(1000 * cpus), {"memory": gib * GIB}, kind)


def sharing(name: str, kind: ContainerKind = ContainerKind.APP) -> Container:
    """Return a container without requests."""
    return Container(name, kind=kind, guaranteed=False)


def whole(cpus: float, gib: int, *containers: Container, **changes: Any) -> Pod:
    """Return a pod whose own requests are *cpus* and *gib* of memory."""
    requests = {"cpu": int(1000 * cpus), "memory": gib * GIB}
    return attrs.evolve(Pod("p", containers, pod_level_resources=True, pod_level_requests=requests), **changes)


FETCH = sharing("fetch", ContainerKind.INIT)
LOGS = sharing("logs", ContainerKind.SIDECAR)
PROXY = own("proxy", 1, 1, ContainerKind.SIDECAR)
METRICS = sharing("metrics")
VM = own("vm", 4, 4)
POD = whole(8, 8, FETCH, PROXY, LOGS, VM, METRICS)


def held(of: SimulatedNode) -> dict[str, str]:
    return {name: str(cpus) for name, cpus in of.cpus.assignments.get("p", {}).items()}


def gibs(of: SimulatedNode) -> dict[str, int]:
    blocks = of.memory.assignments.get("p", {})
    return {name: sum(block.size for block in listed) // GIB for name, listed in blocks.items()}


def test_scope_pod_divides_the_pods_resources_among_its_containers() -> None:
    admission = node().admit(POD)
    assert admission.admitted
    after = admission.node
    assert {uid: str(cpus) for uid, cpus in after.cpus.pod_assignments.items()} == {"p": "1-4,65-68"}
    assert held(after) == {
        "fetch": "1-4,65-68",
        "proxy": "1",
        "logs": "4,65,68",
        "vm": "2-3,66-67",
        "metrics": "4,65,68",
    }
    assert after.memory.pod_assignments == {"p": (Block((0,), "memory", 8 * GIB),)}
    assert gibs(after) == {"fetch": 8, "proxy": 1, "logs": 3, "vm": 4, "metrics": 3}
    assert after.memory.numa_nodes[0].assignments == 1
    assert after.memory.numa_nodes[0].tables["memory"].reserved == 8 * GIB
    assert str(after.shared_pool) == "0,5-64,69-127"
    ended = after.without("p")
    assert (ended.shared_pool, ended.memory.numa_nodes) == (node().shared_pool, node().memory.numa_nodes)
    assert (ended.cpus.pod_assignments, ended.memory.pod_assignments) == ({}, {})


def test_scope_container_gives_exclusive_cpus_to_containers_and_the_nodes_shared_pool_to_others() -> None:
    after = node(topology_manager_scope="container").admit(whole(8, 8, PROXY, VM)).node
    assert held(after) == {"proxy": "1", "vm": "2-3,66-67"}
    assert gibs(after) == {"proxy": 1, "vm": 4}
    assert (after.cpus.pod_assignments, after.memory.pod_assignments) == ({}, {})
    without_memory = node(topology_manager_scope="container", memory_manager_policy="None").admit(POD).node
    assert held(without_memory) == {"proxy": "1", "vm": "2-3,66-67"}


@pytest.mark.parametrize(
    ("change", "pod"),
    [
        ({"pod_level_resource_managers": False}, POD),
        ({"pod_level_resources": False}, POD),
        ({"minor": 35}, POD),
        ({}, attrs.evolve(POD, qos=QosClass.BURSTABLE)),
    ],
)
def test_without_the_gates_and_for_other_qos_classes_nothing_is_assigned(change: dict[str, Any], pod: Pod) -> None:
    after = node(**change).admit(pod).node
    assert (held(after), gibs(after), after.cpus.pod_assignments) == ({}, {}, {})
    assert after.shared_pool == node().shared_pool


@pytest.mark.parametrize(("cpus", "gib"), [(1.5, 2), (0, 2), (2, 0)])
def test_a_container_has_its_own_cpus_only_with_whole_ones_and_memory_equal_to_limits(cpus: float, gib: int) -> None:
    odd = attrs.evolve(own("odd", cpus, gib), guaranteed=bool(cpus and gib))
    after = node().admit(whole(8, 8, VM, odd)).node
    assert held(after) == {"vm": "1-2,65-66", "odd": "3-4,67-68"}
    # Memory of its own does not depend on whole CPUs.
    assert gibs(after) == {"vm": 4, "odd": 2 if cpus == 1.5 else 4}


def test_a_pod_level_request_that_is_not_whole_makes_no_cpus_exclusive() -> None:
    after = node().admit(whole(4.5, 8, VM)).node
    assert (held(after), gibs(after)) == ({}, {"vm": 4})
    assert held(node(topology_manager_scope="container").admit(whole(4.5, 8, VM)).node) == {"vm": "1-2,65-66"}


def test_an_init_container_has_what_the_sidecars_before_it_leave() -> None:
    first, second = own("first", 6, 6, ContainerKind.INIT), attrs.evolve(FETCH, name="second")
    after = node().admit(whole(8, 8, first, PROXY, second, VM)).node
    assert held(after) == {"first": "1-3,65-67", "proxy": "1", "second": "2-4,65-68", "vm": "2-3,66-67"}
    assert gibs(after) == {"first": 6, "proxy": 1, "second": 7, "vm": 4}


SUM = "pod rejected, sum of exclusive container {} requests equals pod budget, leaving no {} for shared containers"
INIT = "pod rejected, pod has shared init containers but no {} available for them"
SIDECAR = own("sidecar", 4, 4, ContainerKind.SIDECAR)


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (whole(4, 8, VM, METRICS), SUM.format("cpu", "cpus")),
        (whole(4, 8, LOGS, VM), SUM.format("cpu", "cpus")),
        (whole(8, 4, LOGS, VM), SUM.format("memory", "memory")),
        (whole(4, 8, SIDECAR, FETCH, own("vm", 0.5)), INIT.format("cpus")),
        (whole(8, 4, SIDECAR, FETCH, own("vm", 0.5, 0)), INIT.format("memory")),
    ],
)
def test_a_pod_that_leaves_nothing_for_its_other_containers_is_rejected(pod: Pod, message: str) -> None:
    loose = node(topology_manager_policy="best-effort").admit(pod)
    assert (loose.reason, loose.message) == ("EmptyPodSharedPoolError", message)
    strict = node().admit(pod)
    assert (strict.reason, strict.message) == (
        "TopologyAffinityError",
        "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager",
    )


def test_huge_pages_that_one_container_has_alone_reject_a_pod_with_others() -> None:
    vm = attrs.evolve(VM, memory={"memory": GIB, "hugepages-2Mi": GIB})
    pod = whole(8, 8, LOGS, vm)
    for huge, message in ((1, SUM.format("hugepages-2Mi", "memory")), (2, "")):
        requests = {**pod.pod_level_requests, "hugepages-2Mi": huge * GIB}
        hardware = attrs.evolve(EPYC, numa_nodes=tuple(map(with_huge_pages, EPYC.numa_nodes)))
        configuration = attrs.evolve(CONFIGURATION, topology_manager_policy="best-effort")
        empty = Kubelet.configured(hardware, configuration).empty_node
        assert empty.admit(attrs.evolve(pod, pod_level_requests=requests)).message == message


def with_huge_pages(numa_node: Any) -> Any:
    pools = tuple(attrs.evolve(pool, total=1024, free=1024) for pool in numa_node.hugepages if pool.size == 2 * MIB)
    return attrs.evolve(numa_node, hugepages=pools)


def test_rejections_by_the_topology_manager_name_the_scope() -> None:
    admission = node(topology_manager_scope="container").admit(whole(120, 8, own("vm", 120)))
    assert (admission.reason, admission.message) == (
        "TopologyAffinityError",
        "Pod Scope pod with pod-level resources failed admission with a container-level topology manager",
    )


def test_only_the_pods_sum_must_be_of_whole_cores() -> None:
    options = {"full-pcpus-only": "true"}
    strict = node(cpu_manager_policy_options=options)
    pod = whole(4, 8, own("a", 3), own("b", 1))
    assert held(strict.admit(pod).node) == {"a": "1-2,65", "b": "66"}
    assert strict.admit(whole(5, 8, own("a", 4), METRICS)).reason == "SMTAlignmentError"
    each = node(cpu_manager_policy_options=options, topology_manager_scope="container")
    assert each.admit(pod).reason == "SMTAlignmentError"


def test_only_the_cpus_of_the_pod_as_a_whole_come_back() -> None:
    # With unequal cores a container may have been given CPUs that are not its pod's (kubernetes#140495).
    manager = node().kubelet.cpu_manager
    assert manager
    state = CpuState("static", CpuSet.parse("0,5"), {"p": {"vm": CpuSet.parse("1-3")}}, {"p": CpuSet.parse("1-2")})
    after = manager.without(state, "p")
    assert (str(after.shared_pool), after.assignments, after.pod_assignments) == ("0-2,5", {}, {})


# --- faults of 1.36 ---------------------------------------------------------------------------------------------------

NO_NODES = "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available"
CONFLICT = "[memorymanager] preferred hint violates NUMA node allocation"


@pytest.mark.parametrize(
    ("policy", "pod", "message"),
    [
        ("none", whole(8, 8, LOGS, VM), NO_NODES),
        ("single-numa-node", whole(8, 8, LOGS, VM), NO_NODES),
        ("restricted", whole(8, 8, LOGS, VM), ""),
        ("restricted", whole(8, 8, VM, METRICS), CONFLICT),
        ("best-effort", whole(8, 8, VM, METRICS), CONFLICT),
    ],
)
def test_scope_container_rejects_containers_without_memory_to_book(policy: str, pod: Pod, message: str) -> None:
    admission = node(topology_manager_policy=policy, topology_manager_scope="container").admit(pod)
    assert admission.message == (message and f"Allocate failed due to {message}, which is unexpected")
    assert admission.admitted == (not message)
    if not message:
        assert admission.memory["logs"] == ()


def test_a_memory_request_of_nothing_is_not_one_that_fits_nowhere() -> None:
    fixed = node(quirks=frozenset(Quirk) - {Quirk.EMPTY_MEMORY_HINTS}, topology_manager_scope="container")
    assert fixed.admit(whole(8, 8, LOGS, VM)).admitted


def test_a_pod_that_is_admitted_again_after_a_restart_loses_its_cpus() -> None:
    pod = whole(4, 8, VM)
    once = node().admit(pod).node
    twice = once.admit(pod)
    assert twice.admitted
    assert (held(once), held(twice.node)) == ({"vm": "1-2,65-66"}, {"vm": "3-4,67-68"})
    assert str(twice.node.shared_pool | twice.node.cpus.exclusive()) == "0,3-64,67-127"
    # Its shared containers have other CPUs than they request, which is none.
    shared = node().admit(POD).node
    assert shared.admit(POD).reason == "TopologyAffinityError"


def test_devices_are_assigned_when_the_containers_start() -> None:
    gpus = [attrs.evolve(VM, devices={GPU: count}) for count in (1, 3)]
    enough, too_few = (
        node({GPU: {1: 2}}, topology_manager_policy="best-effort").admit(whole(8, 8, gpu)) for gpu in gpus
    )
    assert enough.devices == {"vm": {GPU: {1: 1}}}
    assert too_few.admitted
    assert too_few.devices == {}
