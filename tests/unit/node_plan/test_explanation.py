from __future__ import annotations

from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Hardware
from runner.kubelet.pod import Container, Pod, QosClass
from runner.node_plan.admission import Kubelet, KubeletConfiguration, Outcome, SimulatedNode
from runner.node_plan.explanation import explain
from runner.node_plan.topology_manager import Policy

pytestmark = pytest.mark.kubelet_model

HOSTS = Path(__file__).parents[2] / "data/hosts"
GIB = 1 << 30
GPU = "nvidia.com/gpu"


def node(policy: str, scope: str = "container") -> SimulatedNode:
    """Start a kubelet on the host with two NUMA nodes of 64 CPUs and about 512 GiB, 192 of them in hugepages."""
    hardware = Hardware.from_json((HOSTS / "epyc-7543-2s-nps1.json").read_text())
    configuration = KubeletConfiguration(
        cpu_manager_policy="static",
        reserved_cpus=CpuSet((0, 64)),
        memory_manager_policy="Static",
        reserved_memory={0: {"memory": 4 * GIB}},
        topology_manager_policy=policy,
        topology_manager_scope=scope,
    )
    return Kubelet.configured(hardware, configuration, devices={GPU: {1: 2}}).empty_node


def one(uid: str, cpus: int, *, gpus: int = 0, **memory: int) -> Pod:
    requests = {resource.replace("_", "-"): gib * GIB for resource, gib in memory.items()}
    return Pod(uid, (Container("vm", cpus * 1000, requests, devices={GPU: gpus} if gpus else {}),))


def test_an_admitted_pod() -> None:
    explanation = explain(node("single-numa-node"), one("p", 40, memory=8, hugepages_1Gi=80))
    assert explanation.admission.admitted
    (merge,) = explanation.merges
    assert [str(each) for each in merge.asked] == [
        "cpu: prefers {0} or {1}",
        "memory: prefers {0} or {1}",
        "hugepages-1Gi: prefers {0} or {1}",
    ]
    assert merge.why == "{0} is the narrowest set that all of cpu, memory, hugepages-1Gi prefer"
    assert merge.permutations == 27
    assert (explanation.shortages, explanation.alternatives) == ((), ())


def test_a_pod_that_fits_only_across_numa_nodes() -> None:
    busy = node("restricted")
    for uid in ("a", "b"):
        busy = busy.admit(one(uid, 40, memory=8)).node
    explanation = explain(busy, one("p", 30, memory=8))
    assert explanation.admission.reason == "TopologyAffinityError"
    (merge,) = explanation.merges
    assert [str(each) for each in merge.asked] == [
        "cpu: fits on {0,1}, but prefers none of them: fewer NUMA nodes would do on an empty host",
        "memory: prefers {0} or {1}",
    ]
    assert merge.why == "cpu prefers nothing on the node as it is now, and policy restricted admits nothing else"
    (shortage,) = explanation.shortages
    assert str(shortage) == (
        "cpu: 30 CPUs wanted; NUMA node 1 has most, 24 CPUs free, and 6 CPUs more would have to be"
    )
    assert [(each.policy, each.outcome) for each in explanation.alternatives] == [
        (Policy.NONE, Outcome.ADMITTED),
        (Policy.BEST_EFFORT, Outcome.ADMITTED),
        (Policy.SINGLE_NUMA_NODE, Outcome.REJECTED),
    ]
    assert len(explanation.alternatives[1].cpus["vm"]) == 30
    # With what is reported as missing the pod fits.
    assert explain(busy, one("p", 30 - shortage.missing, memory=8)).admission.admitted


def test_resources_that_prefer_different_numa_nodes() -> None:
    full = node("restricted").admit(one("a", 10, gpus=1, memory=500 - 192)).node
    explanation = explain(full, one("p", 10, gpus=1, memory=64))
    (merge,) = explanation.merges
    assert merge.why == (
        "no set of NUMA nodes is preferred by all of nvidia.com/gpu, cpu, memory,"
        " and policy restricted admits nothing else"
    )
    assert explanation.shortages == ()


def test_devices_that_are_all_assigned() -> None:
    explanation = explain(node("restricted").admit(one("a", 1, gpus=2, memory=1)).node, one("p", 1, gpus=1, memory=1))
    assert explanation.admission.reason == "TopologyAffinityError"
    assert str(explanation.merges[0].asked[0]) == "nvidia.com/gpu: fits on no set of NUMA nodes"
    assert explanation.merges[0].why == (
        "nvidia.com/gpu fits nowhere on the node as it is now, and policy restricted admits nothing else"
    )
    assert [str(each) for each in explanation.shortages] == [
        "nvidia.com/gpu: 1 device wanted; NUMA node 1 has most, 0 devices free, and 1 device more would have to be"
    ]


def test_memory_that_fits_nowhere() -> None:
    explanation = explain(node("best-effort", scope="pod"), one("p", 10, memory=2000))
    assert explanation.admission.reason == "UnexpectedAdmissionError"
    (merge,) = explanation.merges
    assert [str(each) for each in merge.asked] == [
        "cpu: prefers {0} or {1}",
        "memory: fits on no set of NUMA nodes, which this kubelet takes for no preference",
    ]
    assert merge.why == "{0} is the narrowest set that cpu prefers"
    (shortage,) = explanation.shortages
    assert shortage.resource == "memory"
    assert shortage.numa_nodes == (0, 1)
    assert shortage.wanted == 2000 * GIB
    assert all(each.outcome is Outcome.REJECTED for each in explanation.alternatives)


def test_best_effort_takes_what_is_left() -> None:
    busy = node("best-effort").admit(one("a", 50, memory=1)).node
    busy = busy.admit(one("b", 50, memory=1)).node
    explanation = explain(busy, one("p", 20, memory=1))
    assert explanation.admission.admitted
    assert explanation.merges[0].why == (
        "cpu prefers nothing on the node as it is now; {0} is the best that is left, and policy best-effort takes it"
    )


def test_policy_none_and_pods_without_preference() -> None:
    explanation = explain(node("none"), one("p", 200, memory=1))
    assert explanation.merges == ()
    assert [str(each) for each in explanation.shortages] == [
        "cpu: 200 CPUs wanted; NUMA nodes 0,1 have most, 126 CPUs free, and 74 CPUs more would have to be"
    ]
    shared = Pod("p", (Container("vm", 500),), QosClass.BURSTABLE)
    assert explain(node("restricted"), shared).merges[0].why == "no resource has a preference"
