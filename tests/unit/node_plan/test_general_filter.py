"""The comparison with Node Allocatable: the kubelet's own test tables, and an independent model on random pods.

The tables are those of Kubernetes 1.36.2: ``TestGeneralPredicates`` (``pkg/kubelet/lifecycle/predicate_test.go``),
``TestEnoughRequests`` (``pkg/scheduler/framework/plugins/noderesources/fit_test.go``) and ``TestGetPodsToPreempt``
(``pkg/kubelet/preemption/preemption_test.go``), in numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Hardware
from runner.kubelet.pod import (
    CPU,
    EPHEMERAL_STORAGE,
    MEMORY,
    SYSTEM_CRITICAL_PRIORITY,
    Container,
    ContainerKind,
    Pod,
    QosClass,
)
from runner.node_plan.admission import Kubelet, KubeletConfiguration, Outcome, SimulatedNode
from runner.node_plan.general_filter import (
    PODS,
    Insufficient,
    NodeAllocatable,
    PreemptionError,
    insufficient,
    preempted,
)

pytestmark = pytest.mark.kubelet_model

VM_8 = Hardware.from_json((Path(__file__).parents[2] / "data/hosts/vm-8.json").read_text())
HUGE = "hugepages-2Mi"
INIT, SIDECAR = ContainerKind.INIT, ContainerKind.SIDECAR
TEN_AND_TWENTY = NodeAllocatable({CPU: 10, MEMORY: 20, HUGE: 5, EPHEMERAL_STORAGE: 20}, 32)
MIB = 1 << 20


def asking(millicpus: int = 0, memory: int = 0, huge: int = 0, *inits: Container, **more: Any) -> Pod:
    app = Container("app", millicpus, {MEMORY: memory, HUGE: huge})
    return Pod("pod", (*inits, app), QosClass.BURSTABLE, **more)


def init(millicpus: int, memory: int, name: str = "init", kind: ContainerKind = INIT, huge: int = 0) -> Container:
    return Container(name, millicpus, {MEMORY: memory, HUGE: huge}, kind)


def whole(**requests: int) -> dict[str, Any]:
    named = {CPU: requests.get("cpu", 0), MEMORY: requests.get("memory", 0), HUGE: requests.get("huge", 0)}
    return {
        "pod_level_resources": True,
        "pod_level_requests": {key: amount for key, amount in named.items() if amount},
    }


@pytest.mark.parametrize(
    ("pod", "other", "expected"),
    [
        (asking(), asking(9, 19), []),
        (asking(8, 10), asking(5, 19), [(CPU, 8, 5, 10), (MEMORY, 10, 19, 20)]),
        (asking(), asking(10, 20), []),
        (asking(1, 1), asking(10, 20), [(CPU, 1, 10, 10), (MEMORY, 1, 20, 20)]),
        (asking(1, 1, 0, init(3, 1)), asking(8, 19), [(CPU, 3, 8, 10)]),
        (asking(1, 1, 0, init(3, 1, "a"), init(2, 1, "b")), asking(8, 19), [(CPU, 3, 8, 10)]),
        (asking(1, 1, 0, init(1, 3)), asking(9, 19), [(MEMORY, 3, 19, 20)]),
        (asking(1, 1, 0, init(1, 1)), asking(9, 19), []),
        (asking(1, 1, 0, init(1, 1, "a"), init(1, 1, "b")), asking(9, 19), []),
        (asking(2, 1), asking(9, 5), [(CPU, 2, 9, 10)]),
        (asking(5, 1), asking(5, 19), []),
        (asking(4, 1, 0, init(5, 1)), asking(5, 19), []),
        (asking(1, 1, 10), asking(), [(HUGE, 10, 0, 5)]),
        (asking(0, 0, 0, init(1, 1, huge=10)), asking(), [(HUGE, 10, 0, 5)]),
        (asking(1, 1, 3), asking(0, 0, 2), []),
        (asking(1, 1, 4), asking(0, 0, 2), [(HUGE, 4, 2, 5)]),
        (asking(1, 1, overhead={CPU: 3, MEMORY: 13}), asking(5, 5), []),
        (asking(1, 1, overhead={CPU: 1, MEMORY: 15}), asking(5, 5), [(MEMORY, 16, 5, 20)]),
        (asking(1, 1, **whole(cpu=1, memory=2)), asking(5, 5), []),
        (asking(1, 1, **whole(cpu=7, memory=2)), asking(5, 5), [(CPU, 7, 5, 10)]),
        (asking(1, 1, **whole(cpu=3, memory=2)), asking(5, 19), [(MEMORY, 2, 19, 20)]),
        (asking(**whole(cpu=3, memory=2, huge=5)), asking(), []),
        (asking(1, 1, 3, **whole(cpu=3, memory=2, huge=5)), asking(), []),
        (asking(**whole(cpu=3, memory=2, huge=10)), asking(), [(HUGE, 10, 0, 5)]),
        # Sidecars run together with every later container (TestRestartableInitContainers).
        (asking(1, 1, 0, init(1, 1, "s", SIDECAR), init(2, 1, "i")), asking(7, 5), []),
        (asking(1, 1, 0, init(1, 1, "s", SIDECAR), init(3, 1, "i")), asking(7, 5), [(CPU, 4, 7, 10)]),
        (asking(1, 1, 0, init(3, 1, "i"), init(1, 1, "s", SIDECAR)), asking(7, 5), []),
        (
            attrs.evolve(asking(), containers=(Container("c", ephemeral_storage=21),)),
            asking(),
            [(EPHEMERAL_STORAGE, 21, 0, 20)],
        ),
    ],
)
def test_the_kubelets_own_table(pod: Pod, other: Pod, expected: Sequence[tuple[str, int, int, int]]) -> None:
    assert [attrs.astuple(each) for each in insufficient(pod, [other], TEN_AND_TWENTY)] == expected


def test_pods_are_counted_before_their_requests_and_unknown_storage_is_enough() -> None:
    full = NodeAllocatable({CPU: 10}, 1)
    found = insufficient(asking(11), [asking()], full)
    assert [str(each) for each in found] == [
        "Node didn't have enough resource: pods, requested: 1, used: 1, capacity: 1",
        "Node didn't have enough resource: cpu, requested: 11, used: 0, capacity: 10",
    ]
    assert [each.reason for each in found] == ["OutOfpods", "OutOfcpu"]
    # A resource that the node does not have, such as a size of huge pages, has the capacity 0.
    assert [each.reason for each in insufficient(asking(0, 0, 1), [], full)] == ["OutOfhugepages-2Mi"]
    stored = attrs.evolve(asking(), containers=(Container("c", ephemeral_storage=1),))
    assert insufficient(stored, [], full) == ()


# --- preemption -------------------------------------------------------------------------------------------------------


def named(name: str, amount: int, qos: QosClass = QosClass.BURSTABLE, priority: int | None = None) -> Pod:
    memory = {MEMORY: amount * MIB} if amount else {}
    return Pod(name, (Container("c", amount, memory),), qos, priority=priority)


BEST_EFFORT = named("best-effort", 0, QosClass.BEST_EFFORT)
BURSTABLE, BIG_BURSTABLE = named("burstable", 100), named("big burstable", 300)
GUARANTEED = named("guaranteed", 100, QosClass.GUARANTEED)
BIG_GUARANTEED = named("big guaranteed", 300, QosClass.GUARANTEED)
CLUSTER_CRITICAL = named("cluster critical", 100, priority=SYSTEM_CRITICAL_PRIORITY)
NODE_CRITICAL = named("node critical", 100, priority=SYSTEM_CRITICAL_PRIORITY + 100)
EVERY = (BEST_EFFORT, BURSTABLE, BIG_BURSTABLE, GUARANTEED, BIG_GUARANTEED)


def missing(cpu: int, memory: int, pods: int) -> list[Insufficient]:
    amounts = {CPU: cpu, MEMORY: memory * MIB, PODS: pods}
    return [Insufficient(resource, amount, 0, 0) for resource, amount in amounts.items() if amount]


@pytest.mark.parametrize(
    ("preemptor", "others", "requirements", "expected"),
    [
        (CLUSTER_CRITICAL, (), (0, 0, 0), []),
        (CLUSTER_CRITICAL, (), (0, 0, 1), "[(res: pods, q: 1), ]"),
        (CLUSTER_CRITICAL, (BURSTABLE,), (100, 100, 1), [BURSTABLE]),
        (
            CLUSTER_CRITICAL,
            (BURSTABLE,),
            (200, 200, 2),
            "[(res: cpu, q: 100), (res: memory, q: 104857600), (res: pods, q: 1), ]",
        ),
        (CLUSTER_CRITICAL, (BURSTABLE, BEST_EFFORT), (0, 0, 1), [BEST_EFFORT]),
        (CLUSTER_CRITICAL, (BURSTABLE, GUARANTEED), (0, 0, 1), [BURSTABLE]),
        (CLUSTER_CRITICAL, (BEST_EFFORT, BIG_BURSTABLE, BURSTABLE), (100, 100, 0), [BURSTABLE]),
        (CLUSTER_CRITICAL, (BEST_EFFORT, BURSTABLE, BIG_BURSTABLE), (150, 150, 0), [BIG_BURSTABLE]),
        (CLUSTER_CRITICAL, EVERY, (350, 350, 0), [BIG_BURSTABLE, BURSTABLE]),
        (CLUSTER_CRITICAL, EVERY, (0, 550, 0), [BIG_BURSTABLE, BIG_GUARANTEED]),
        (NODE_CRITICAL, (CLUSTER_CRITICAL,), (100, 0, 0), [CLUSTER_CRITICAL]),
        (CLUSTER_CRITICAL, (NODE_CRITICAL,), (100, 0, 0), "[(res: cpu, q: 100), ]"),
        # A static pod without a priority is critical, and preempts none that is (types.Preemptable).
        (attrs.evolve(BURSTABLE, static=True), (CLUSTER_CRITICAL, BEST_EFFORT), (0, 0, 1), [BEST_EFFORT]),
        (attrs.evolve(BURSTABLE, static=True), (CLUSTER_CRITICAL,), (20, 0, 0), "[(res: cpu, q: 20), ]"),
    ],
)
def test_the_pods_that_the_kubelet_ends_for_a_critical_one(
    preemptor: Pod, others: Sequence[Pod], requirements: tuple[int, int, int], expected: list[Pod] | str
) -> None:
    if isinstance(expected, list):
        assert list(preempted(preemptor, missing(*requirements), others)) == expected
        return
    with pytest.raises(PreemptionError) as caught:
        preempted(preemptor, missing(*requirements), others)
    assert str(caught.value) == (
        "preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: "
        + expected
    )


def test_what_ending_a_pod_gives_back_is_its_pod_level_request_and_its_overhead() -> None:
    """``GetResourceRequest`` differs from the filter: no containers of such a pod, no overhead without a request."""
    level = asking(100, 0, **whole(memory=1), overhead={CPU: 5, MEMORY: 7})
    critical = attrs.evolve(asking(), pod_uid="critical", static=True)
    with pytest.raises(PreemptionError):
        preempted(critical, [Insufficient(CPU, 1, 0, 0)], [level])
    assert preempted(critical, [Insufficient(MEMORY, 8, 0, 0)], [level]) == (level,)
    with pytest.raises(PreemptionError):
        preempted(critical, [Insufficient(MEMORY, 9, 0, 0)], [level])


# --- in the admission -------------------------------------------------------------------------------------------------


def node(allocatable: Mapping[str, int], pods: int = 110, *, minor: int = 36, gate: bool = True) -> SimulatedNode:
    """Return a node of 8 CPUs, one of them reserved."""
    configuration = KubeletConfiguration(
        minor=minor, cpu_manager_policy="static", reserved_cpus=CpuSet([0]), pod_level_resources=gate
    )
    empty = Kubelet.configured(VM_8, configuration).empty_node
    return attrs.evolve(empty, allocatable=NodeAllocatable(allocatable, pods))


def instance(name: str, cpus: int, **more: Any) -> Pod:
    return Pod(name, (Container("vm", 1000 * cpus, {MEMORY: 1}),), **more)


DAEMON = Pod("daemon", (Container("d", 20),), QosClass.BURSTABLE)


def test_a_daemons_20m_cost_the_next_instance_a_whole_cpu() -> None:
    empty = node({CPU: 7000, MEMORY: 1 << 30})
    assert empty.admit(instance("vm", 7)).admitted
    occupied = empty.admit(DAEMON).node
    assert len(occupied.available) == 7
    rejected = occupied.admit(instance("vm", 7))
    assert (rejected.outcome, rejected.reason, rejected.message) == (
        Outcome.REJECTED,
        "OutOfcpu",
        "Node didn't have enough resource: cpu, requested: 7000, used: 20, capacity: 7000",
    )
    assert occupied.admit(instance("vm", 6)).admitted


def test_the_managers_come_first_so_a_pod_rejected_by_the_filter_holds_cpus_until_the_next_admission() -> None:
    rejected = node({CPU: 7000, MEMORY: 1 << 30}).admit(DAEMON).node.admit(instance("vm", 7))
    assert str(rejected.cpus["vm"]) == "1-7"
    assert rejected.node.stale_cpus == {"vm"}
    assert rejected.node.active.keys() == {"daemon"}
    assert str(rejected.node.admit(instance("next", 6)).cpus["vm"]) == "1-6"
    # What both would reject has the managers' reason.
    both = node({CPU: 1000, MEMORY: 1 << 30}).admit(instance("vm", 8))
    assert both.message == (
        "Allocate failed due to not enough cpus available to satisfy request: requested=8, available=7, which is"
        " unexpected"
    )


def test_a_critical_pod_is_rejected_with_the_preemption_handlers_words() -> None:
    """Seen with a kubelet 1.36.2: a static pod that asks for all CPUs that are left, beside a DaemonSet's static pod."""
    daemon = attrs.evolve(DAEMON, static=True)
    rejected = node({CPU: 7000, MEMORY: 1 << 30}).admit(daemon).node.admit(instance("vm", 7, static=True))
    assert rejected.reason == "UnexpectedAdmissionError"
    assert rejected.message == (
        "Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods"
        " to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: 20), ]"
    )


def test_a_critical_pod_takes_the_place_of_others() -> None:
    occupied = node({CPU: 7000, MEMORY: 1 << 30}).admit(DAEMON).node
    admission = occupied.admit(instance("vm", 7, static=True))
    assert admission.admitted
    assert [each.pod_uid for each in admission.preempted] == ["daemon"]
    assert admission.node.active.keys() == {"vm"}
    assert admission.node.stale_cpus == {"daemon"}


@pytest.mark.parametrize(
    ("minor", "gate", "cpus", "reason"),
    [
        (36, True, "", ""),
        (36, False, "", "PodLevelResourcesNotSupported"),
        (35, True, "", ""),
        # The pod is rejected after the managers have assigned CPUs by its container's request.
        (34, False, "1-2", "PodLevelResourcesNotSupported"),
        # 1.33 takes no notice of them but for requests and QoS class.
        (33, True, "1-2", ""),
        (33, False, "1-2", ""),
    ],
)
def test_pod_level_resources_in_each_version(minor: int, cpus: str, reason: str, *, gate: bool) -> None:
    whole_pod = instance("vm", 2, pod_level_resources=True)
    admission = node({CPU: 7000, MEMORY: 1 << 30}, minor=minor, gate=gate).admit(whole_pod)
    assert (str(admission.cpus.get("vm", "")), admission.reason) == (cpus, reason)
    assert admission.message == ("PodLevelResources feature gate is disabled" if reason else "")


AMOUNTS = st.integers(0, 6)
CONTAINERS = st.lists(st.tuples(st.sampled_from(ContainerKind), AMOUNTS, AMOUNTS, AMOUNTS), min_size=1, max_size=4)
OVERHEADS = st.dictionaries(st.sampled_from([CPU, MEMORY, HUGE]), st.integers(0, 2), max_size=2)
PODS_OF_A_DAY = st.lists(
    st.tuples(CONTAINERS, OVERHEADS, st.dictionaries(st.sampled_from([CPU, MEMORY, HUGE]), AMOUNTS, max_size=3)),
    min_size=1,
    max_size=8,
)
NODES = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 8))


def used_over_time(containers: Sequence[tuple[ContainerKind, int, int, int]], place: int) -> int:
    """Return the most that a pod uses of one resource, by living through its start."""
    together, most = 0, 0
    for kind, *amounts in [each for each in containers if each[0] is not ContainerKind.APP]:
        if kind is SIDECAR:
            together += amounts[place]
            most = max(most, together)
        else:
            most = max(most, together + amounts[place])
    together += sum(amounts[place] for kind, *amounts in containers if kind is ContainerKind.APP)
    return max(most, together)


@given(PODS_OF_A_DAY, NODES)
@settings(max_examples=400)
def test_random_pods_are_admitted_as_by_an_account_of_each_resource(
    pods: list[tuple[list[tuple[ContainerKind, int, int, int]], dict[str, int], dict[str, int]]],
    capacities: tuple[int, int, int, int],
) -> None:
    *amounts, limit = capacities
    accounts = dict(zip((CPU, MEMORY, HUGE), amounts, strict=True))
    simulated = node(accounts, limit)
    admitted = 0
    for number, (containers, overhead, level) in enumerate(pods):
        # Fractions of CPUs, so that no manager has a say.
        ordered = sorted(containers, key=lambda each: each[0] is ContainerKind.APP)
        pod = Pod(
            str(number),
            tuple(
                Container(f"{place}", cpu, {MEMORY: memory, HUGE: huge}, kind)
                for place, (kind, cpu, memory, huge) in enumerate(ordered)
            ),
            QosClass.BURSTABLE,
            pod_level_resources=bool(level),
            pod_level_requests=level,
            overhead=overhead,
        )
        wanted = {
            resource: level.get(resource, used_over_time(ordered, place)) + overhead.get(resource, 0)
            for place, resource in enumerate(accounts)
        }
        short = [resource for resource, amount in wanted.items() if amount and amount > accounts[resource]]
        expected = ["OutOfpods"] * (admitted >= limit) + [f"OutOf{resource}" for resource in short]
        answer = simulated.admit(pod)
        assert [each.reason for each in answer.insufficient] == expected
        assert (answer.reason, answer.admitted) == (expected[0] if expected else "", not expected)
        simulated = answer.node
        if not expected:
            admitted += 1
            accounts = {resource: amount - wanted[resource] for resource, amount in accounts.items()}


def test_without_allocatable_nothing_is_compared() -> None:
    small = node({CPU: 1000, MEMORY: 1 << 30})
    assert not small.admit(instance("vm", 2)).admitted
    assert attrs.evolve(small, allocatable=None).admit(instance("vm", 2)).admitted
