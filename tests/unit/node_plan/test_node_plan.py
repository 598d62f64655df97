from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.document_value import Value
from runner.base.errors import RefusedError, SpecError
from runner.facts.hardware import Hardware
from runner.kubelet.state_files import parse_cpu_state, parse_memory_state
from runner.node_plan.admission import Outcome
from runner.node_plan.allocatable import node_allocatable
from runner.node_plan.configuration import parse_kubelet_configuration
from runner.node_plan.device_manager import Devices
from runner.node_plan.manifests import parse_manifests
from runner.node_plan.node_plan import (
    NodePlan,
    States,
    WhatIf,
    fit_of,
    plan_node,
    stale_pods,
    start_node,
    unclear_pods,
)
from runner.node_plan.pod_notes import OWN_RESOURCES
from runner.node_plan.quirks import KubeletConfigError
from runner.node_plan.report.picture import owners_of
from runner.node_plan.report.text import node_json
from tests.support.json_schemas import fitting
from tests.support.node_plans import (
    EPYC,
    GPU,
    HEAD,
    STATIC,
    configuration,
    host,
    planned,
    pod,
    shown,
)

pytestmark = pytest.mark.kubelet_model


CPU_STATE = b'{"policyName":"static","defaultCpuSet":"0,3-7","entries":{"uid-1":{"vm":"1-2"}},"checksum":1}'


def test_a_small_node_in_full() -> None:
    states = States(cpu=parse_cpu_state(CPU_STATE))
    plan = planned(host("vm-8"), pod("new", 3), pod("big", 3), states=states, topologyManagerPolicy="restricted")
    assert not plan.fits
    assert (
        shown(plan)
        == """\
host        1 socket, 8 cores, 8 CPUs, 1 NUMA node, 15.7Gi memory
kubelet     1.36: CPU Manager static, Memory Manager None, Topology Manager restricted (scope container)
reserved    CPUs 0
allocatable 7 CPUs, 15.6Gi memory, 110 pods
before      uid-1/vm has 1-2
requested   2 CPUs by 1 pod of the state files; other pods are in none, and their requests count as well: --running

pod         new (Guaranteed): admitted
  gets      vm: exclusive CPUs 3-5; affinity {0} preferred
  vCPUs     packed-siblings, 1 thread a core: 0-2→3-5
  why       cpu: prefers {0}
            so {0} is the narrowest set that cpu prefers

pod         big (Guaranteed): rejected: TopologyAffinityError: Resources cannot be allocated with Topology locality
  why       cpu: fits on no set of NUMA nodes
            so cpu fits nowhere on the node as it is now, and policy restricted admits nothing else
  missing   cpu: 3 CPUs wanted; NUMA node 0 has most, 2 CPUs free, and 1 CPU more would have to be
  otherwise topologyManagerPolicy none: rejected: UnexpectedAdmissionError
            topologyManagerPolicy best-effort: rejected: UnexpectedAdmissionError
            topologyManagerPolicy single-numa-node: rejected: TopologyAffinityError

remains     shared pool 0,6-7; 2 CPUs of it can still be given, at most 2 on one NUMA node
unrequested 2 CPUs, 14.6Gi memory, 108 pods

NUMA node 0 (socket 0): 2 of 8 CPUs free, memory 15.7Gi
        0-7  #aaAAA..
# reserved 0   . shared pool
A new  3-5
a uid-1/vm (there before)  1-2"""
    )


def test_devices_are_counted_from_pod_to_pod() -> None:
    devices: Devices = {GPU: {1: 2}}
    pods = pod("one", 10, more={GPU: 1}), pod("none", 10), pod("two", 10, more={GPU: 2})
    plan = planned(EPYC, *pods, devices=devices, topologyManagerPolicy="single-numa-node")
    assert [each.explanation.admission.outcome.value for each in plan.pods] == ["admitted", "admitted", "rejected"]
    assert [str(each.cpus) for each in plan.pods] == ["32-36,96-100", "1-5,65-69", ""]
    assert "gets      vm: exclusive CPUs 32-36,96-100; nvidia.com/gpu: 1 on NUMA node 1; affinity" in shown(plan)
    assert "nvidia.com/gpu: 2 devices wanted; NUMA node 1 has most, 1 device free" in shown(plan)
    assert "memory 127.9Gi, nvidia.com/gpu 1 of 2 free" in shown(plan)


def test_unknown_devices_are_noted() -> None:
    plan = planned(EPYC, pod("one", 10, more={GPU: 1}), topologyManagerPolicy="single-numa-node")
    assert plan.fits
    assert "the devices of 'nvidia.com/gpu' on this host are not known" in plan.pods[0].notes[0]


def test_a_pod_beyond_node_allocatable_is_noted() -> None:
    plan = planned(EPYC, pod("huge", 128, "60Gi", more={"hugepages-2Mi": "300Gi"}), topologyManagerPolicy="none")
    beyond = "no scheduler binds it to this node"
    assert plan.pods[0].notes == (
        f"it asks for 128 CPUs, more than the node's allocatable 127 CPUs: {beyond}",
        f"it asks for 60Gi memory, more than the node's allocatable 39558Mi memory: {beyond}",
        f"it asks for 300Gi hugepages-2Mi, more than the node's allocatable 221696Mi hugepages-2Mi: {beyond}",
    )


def test_a_request_beyond_all_numbers_is_noted() -> None:
    [note] = planned(EPYC, pod("huge", "1e999"), topologyManagerPolicy="none").pods[0].notes
    assert note.startswith(f"it asks for 1{'0' * 999} CPUs, more than the node's allocatable 127 CPUs: ")
    resources = {"requests": {"cpu": 1}}
    containers = [
        {"name": name, "resources": {"requests": {"cpu": cpu}}} for name, cpu in (("a", "1e999"), ("b", "1m"))
    ]
    whole = {"kind": "Pod", "spec": {"containers": containers, "resources": resources}}
    with pytest.raises(SpecError, match=r"must not be below the 10{999} that its containers request together"):
        planned(EPYC, whole)


def test_no_pod_is_presented_to_a_kubelet_that_has_crashed() -> None:
    options = {"prefer-closest-numa-nodes": "true"}
    keys: dict[str, Any] = {"topologyManagerPolicy": "best-effort", "topologyManagerPolicyOptions": options}
    plan = planned(host("power9-2s"), pod("first", 8), pod("second", 2), **keys)
    assert [each.explanation.admission.outcome for each in plan.pods] == [Outcome.CRASHES]
    assert "first (Guaranteed): the kubelet crashes: this kubelet would panic: " in shown(plan, 200)
    compared = attrs.evolve(planned(host("power9-2s"), pod("first", 8), pod("second", 2)), what_if=(WhatIf("x", plan),))
    assert ["x", "crashes", "not", "asked", "0-127"] in [line.split() for line in shown(compared, 200).splitlines()]


def test_state_files_of_another_policy_or_machine_are_refused_with_the_kubelet_s_message() -> None:
    none = States(cpu=parse_cpu_state(b'{"policyName":"none","defaultCpuSet":"","checksum":1}'))
    with pytest.raises(KubeletConfigError) as caught:
        planned(EPYC, states=none)
    assert str(caught.value) == (
        'could not restore state from checkpoint: configured policy "static" differs from state checkpoint policy'
        ' "none", please drain this node and delete the CPU manager checkpoint file before restarting Kubelet'
    )
    memory = States(memory=parse_memory_state(b'{"policyName":"Static","machineState":{},"checksum":1}'))
    with pytest.raises(KubeletConfigError, match=r'\[memorymanager\] configured policy "None" differs'):
        planned(EPYC, states=memory)
    with pytest.raises(KubeletConfigError, match="doesn't match with CPUs in state"):
        planned(EPYC, states=States(cpu=parse_cpu_state(CPU_STATE)))


def test_a_pod_that_runs_already_keeps_what_it_has() -> None:
    running = pod("vm", 2)
    running["metadata"]["uid"] = "uid-1"
    plan = planned(host("vm-8"), running, states=States(cpu=parse_cpu_state(CPU_STATE)))
    assert str(plan.pods[0].cpus) == "1-2"
    assert [(owner.sign, owner.planned) for owner in owners_of(plan)] == [("A", True)]


def test_of_several_pods_those_that_run_already_are_planned_for_another_start_of_the_kubelet() -> None:
    running = pod("vm", 2)
    running["metadata"]["uid"] = "uid-1"
    plan = planned(host("vm-8"), pod("new", 2), running, states=States(cpu=parse_cpu_state(CPU_STATE)))
    noted = [[note for note in each.notes if "a kubelet that starts again" in note] for each in plan.pods]
    assert [len(each) for each in noted] == [0, 1]
    assert noted[1][0].startswith("it has been admitted before, by the state files")


def test_ended_pods_are_removed_as_by_the_kubelet() -> None:
    """The Memory Manager keeps ended pods until the next admission; the CPU Manager removes them by itself."""
    full = planned(EPYC, pod("one", 40, "12Gi"), pod("two", 40, "12Gi"), **STATIC).after
    manager = full.kubelet.cpu_manager
    assert manager
    cpus = manager.without(manager.without(full.cpus, "one"), "two")
    files = States(cpu=cpus, memory=full.memory)
    assert stale_pods(files) == (frozenset(), frozenset({"one", "two"}))
    plan = planned(EPYC, pod("new", 40, "12Gi"), states=files, **STATIC)
    assert [each.explanation.admission.admitted for each in plan.pods] == [True]
    assert plan.after.memory.assignments.keys() == {"new"}
    (note,) = plan.notes
    assert note.startswith(
        "one, two are in memory_manager_state and without CPUs in cpu_manager_state: ended, or still"
    )
    # One file alone does not show which pods have ended.
    assert stale_pods(States(memory=full.memory)) == stale_pods(States(cpu=cpus)) == (frozenset(), frozenset())
    held = planned(EPYC, pod("new", 40, "12Gi"), states=States(memory=full.memory), **STATIC)
    assert [each.explanation.admission.admitted for each in held.pods] == [False]
    # A pod that is planned is active: it keeps what it has.
    again = planned(EPYC, pod("one", 40, "12Gi"), states=files, **STATIC)
    assert again.before.stale_memory == {"two"}


def half_a_cpu(hardware: Hardware, memory: str) -> States:
    """Return the state files of a node on which pod ``half`` runs with half a CPU."""
    after = planned(hardware, pod("half", "500m", memory), **STATIC).after
    return States(after.cpus, after.memory)


def test_a_pod_without_exclusive_cpus_is_planned_as_ended_and_as_running() -> None:
    states = half_a_cpu(EPYC, "12Gi")
    assert unclear_pods(states).keys() == {"half"}
    small = planned(EPYC, pod("new", 4, "2Gi"), states=states, **STATIC)
    assert (small.unclear, small.if_live, small.fits) == (frozenset({"half"}), None, True)
    (note,) = small.notes
    assert "and once more as still running, with the same answers; --running tells which" in note
    assert "if live" not in shown(small)
    large = planned(EPYC, pod("new", 4, "30Gi"), states=states, **STATIC)
    assert large.if_live
    assert large.pods[0].explanation.admission.admitted
    assert not large.if_live.pods[0].explanation.admission.admitted
    assert not large.fits
    assert "which changes an answer, see 'if live'" in large.notes[0]
    output = " ".join(shown(large).split())
    assert (
        "if live half running without exclusive CPUs: new: rejected: UnexpectedAdmissionError: Allocate failed"
        in output
    )
    document: Any = fitting("node", node_json(attrs.evolve(large, what_if=(WhatIf("other", large),))))
    assert document["unclear_pods"] == ["half"]
    assert (
        document["if_live"]["pods"][0]["outcome"]
        == document["what_if"][0]["if_live"]["pods"][0]["outcome"]
        == "rejected"
    )
    assert node_json(small)["if_live"] is None
    compared = shown(attrs.evolve(large, what_if=(WhatIf("other", large),)), 200)
    assert re.search(r"^other, if live +UnexpectedAdmissionError", compared, re.MULTILINE)


def test_the_list_of_running_pods_tells_which_have_ended() -> None:
    states = half_a_cpu(EPYC, "12Gi")
    gone = planned(EPYC, pod("new", 4, "30Gi"), states=states, running=[], **STATIC)
    assert (gone.fits, gone.unclear, gone.if_live) == (True, frozenset(), None)
    (note,) = gone.notes
    assert note.startswith(
        "half is in memory_manager_state and not among the running pods: the kubelet takes the memory"
    )
    there = planned(EPYC, pod("new", 4, "30Gi"), states=states, running=[pod("half", "500m", "12Gi")], **STATIC)
    assert (there.fits, there.unclear, there.notes) == (False, frozenset(), ())
    assert "requested   0.5 CPUs, 12Gi memory by 1 pod\n" in shown(there)
    rejected = planned(host("vm-8"), running=[], states=States(cpu=parse_cpu_state(CPU_STATE)))
    (note,) = rejected.notes
    assert note.startswith(
        "uid-1 is in cpu_manager_state and not among the running pods: the kubelet takes the CPUs back"
    )


def test_requests_of_running_pods_count_and_those_of_no_others_are_known() -> None:
    daemon = {"kind": "Pod", "metadata": {"name": "d"}, "spec": {"containers": [{"name": "d"}]}}
    daemon["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "20m"}}  # type: ignore[index]  # nested dicts
    unknown = planned(host("vm-8"), pod("new", 7))
    assert unknown.fits
    assert "requested   nothing is known of other pods, whose requests count as well: --running\n" in shown(unknown)
    plan = planned(host("vm-8"), pod("new", 7), running=[daemon])
    assert not plan.fits
    output = " ".join(shown(plan).split())
    assert (
        "new (Guaranteed): rejected: OutOfcpu: Node didn't have enough resource: cpu, requested: 7000, used: 20,"
        " capacity: 7000" in output
    )
    assert (
        "missing 7 CPUs requested; the node has 7 CPUs for pods, others request 0.02 CPUs, 0.02 CPUs too much" in output
    )
    assert "otherwise" not in output
    assert "unrequested 6.98 CPUs, 15.6Gi memory, 109 pods" in output
    document: Any = fitting("node", node_json(plan))
    assert document["known_pods"] == "all"
    assert document["pods"][0]["insufficient"] == [{"resource": "cpu", "requested": 7000, "used": 20, "capacity": 7000}]
    assert (document["before"]["allocatable"]["cpu"], document["before"]["unrequested"]["cpu"]) == (7000, 6980)
    assert "requested   nothing by any pod\n" in shown(planned(host("vm-8"), running=[]))
    daemon["spec"]["containers"][0]["resources"] = {"requests": {"memory": "50Mi"}}  # type: ignore[index]  # nested dicts
    assert "requested   50Mi memory by 1 pod\n" in shown(planned(host("vm-8"), running=[daemon]))
    full = planned(host("vm-8"), pod("new", 1), running=[daemon], maxPods=1)
    assert "missing the node takes 1 pod, and has 1" in " ".join(shown(full).split())


def test_node_allocatable() -> None:
    """``nodestatus.MachineInfo``: huge pages are taken from memory, whether they are used or not."""
    reserved = {"cpu": "1500m", "memory": "1Gi"}
    found = node_allocatable(
        EPYC, configuration(EPYC, systemReserved=reserved, evictionHard={"memory.available": "1Gi"})
    )
    huge = 216_5 * (1 << 30) // 10
    memory = sum(each.memory for each in EPYC.numa_nodes)
    assert found.resources == {
        "cpu": 126_500,
        "memory": memory - huge - (2 << 30),
        "hugepages-2Mi": huge,
        "hugepages-1Gi": 0,
    }
    assert [
        node_allocatable(EPYC, configuration(EPYC, **keys)).pods
        for keys in ({}, {"maxPods": 250}, {"podsPerCore": 1}, {"maxPods": 250, "podsPerCore": 1}, {"maxPods": 0})
    ] == [110, 250, 110, 128, 110]
    assert (
        node_allocatable(EPYC, configuration(EPYC, systemReserved={"cpu": "1", "memory": "300Gi"})).resources["memory"]
        == 0
    )


def test_notes_about_critical_pods_and_unknown_storage() -> None:
    critical = pod("new", 7)
    critical["spec"]["priorityClassName"] = "system-node-critical"
    critical["spec"]["containers"][0]["resources"]["requests"] = {"ephemeral-storage": "1Gi"}
    plan = planned(host("vm-8"), pod("first", "1500m"), critical)
    assert plan.fits
    assert plan.pods[1].notes == (
        "it is critical, and the kubelet ends first for it",
        "the node's ephemeral storage is not known here: it is taken as enough",
    )
    assert node_json(plan)["pods"][1]["preempted"] == ["first"]
    assert plan.notes == (
        "the pods that the kubelet ends for a critical one can be others, which are not known here: --running",
    )
    assert planned(host("vm-8"), pod("first", "1500m"), critical, running=[]).notes == ()


def test_pod_level_resources_leave_an_instance_without_cpus() -> None:
    whole = pod("whole", 4)
    whole["spec"]["resources"] = {"limits": {"cpu": 4, "memory": "1Gi"}}
    plan = planned(host("vm-8"), whole)
    assert plan.pods[0].manifest.pod.guaranteed
    assert plan.pods[0].explanation.admission.admitted
    assert not plan.pods[0].cpus
    assert plan.pods[0].notes[-1].endswith(OWN_RESOURCES)
    assert fit_of(4, None, plan).error == f"no container gets exclusive CPUs; {OWN_RESOURCES}"
    off = planned(host("vm-8"), whole, featureGates={"PodLevelResources": False})
    assert off.pods[0].explanation.admission.reason == "PodLevelResourcesNotSupported"
    assert off.pods[0].notes[-1].startswith("an API server with this gate off, too, removes spec.resources")


# --- an instance's document -------------------------------------------------------------------------------------------


def test_an_instance_fits_the_container_with_the_most_cpus() -> None:
    plan = planned(EPYC, pod("small", 4), pod("large", 40), pod("shared", "500m"))
    fit = fit_of(40, None, plan)
    assert (fit.pod, fit.container, fit.error) == ("large", "vm", "")
    assert fit.placement
    assert fit.placement.cpus == plan.pods[1].cpus
    fewer = fit_of(38, None, plan).placement
    assert fewer
    assert [finding.subject for finding in fewer.findings] == ["unused-cpus"]
    insisting = fit_of(2, CpuSet((3, 4)), plan).placement
    assert insisting
    assert insisting.cpus == CpuSet((3, 4))


def test_an_instance_that_does_not_fit() -> None:
    plan = planned(EPYC, pod("p", 4))
    assert fit_of(5, None, plan).error == "it gets 4 CPUs; ask for 5 in the pod, or for fewer vCPUs"
    assert fit_of(1, CpuSet((127,)), plan).error == (
        "cpu.cpus names 127, which the kubelet does not give; leave cpu.cpus out"
    )
    assert fit_of(1, None, planned(EPYC)).error == "no container gets exclusive CPUs"
    assert not attrs.evolve(plan, fit=fit_of(5, None, plan)).fits
    assert attrs.evolve(plan, fit=fit_of(4, None, plan)).fits


# --- what the kubelet does wrong --------------------------------------------------------------------------------------


ONE_OFFLINE = attrs.evolve(EPYC, cpus=tuple(cpu for cpu in EPYC.cpus if cpu.cpu != 127), offline=CpuSet.parse("127"))
"""A host with a core of one CPU: the average is 127 // 64 = 1, so a core with one free CPU of two counts as free."""


def faults(plan: NodePlan) -> list[str]:
    assert [fault for each in node_json(plan)["pods"] for fault in each["faults"]] == [
        fault for each in plan.pods for fault in each.faults
    ]
    return [fault for each in plan.pods for fault in each.faults]


def test_a_reserved_cpu_that_is_given_away_is_a_fault() -> None:
    plan = planned(ONE_OFFLINE, pod("first", 2), reservedSystemCPUs="0")
    (given,) = [each.cpus for each in plan.pods]
    assert given == CpuSet.parse("0,64")
    reserved, restart = faults(plan)
    assert reserved.startswith("reserved CPUs 0 are given to it: this kubelet takes a core or socket of another size")
    assert restart == (
        'after it the next start of this kubelet fails: not all reserved cpus: "0" are present in defaultCpuSet: "1-63,65-126"'
    )
    assert plan.pods[0].explanation.admission.admitted
    assert not plan.fits
    assert "  fault     reserved CPUs 0 are given to it" in shown(plan)


def test_a_cpu_that_two_pods_have_is_a_fault() -> None:
    plan = planned(ONE_OFFLINE, pod("half", 2), pod("whole", 2), reservedSystemCPUs="0,64")
    half, whole = (each.cpus for each in plan.pods)
    assert (str(half), str(whole)) == ("1,63", "1,65")
    (fault,) = faults(plan)
    assert fault == (
        "CPUs 1 are exclusive to it and to half at once: this kubelet takes a core or socket of another size than the"
        " average for free (kubernetes#140495)"
    )


def test_a_shared_pool_without_cpus_is_a_fault() -> None:
    options: dict[str, Any] = {"cpuManagerPolicyOptions": {"strict-cpu-reservation": "true"}}
    plan = planned(EPYC, pod("all", 127), reservedSystemCPUs="0", **options)
    empty, restart = faults(plan)
    assert empty.startswith(
        "it takes the last CPUs of the shared pool (defaultCpuSet): containers without exclusive CPUs"
    )
    assert restart == "after it the next start of this kubelet fails: default cpuset cannot be empty"
    assert not faults(planned(EPYC, pod("most", 126), reservedSystemCPUs="0", **options))


def test_minutes_of_merging_are_a_fault() -> None:
    host_of_8 = host("xeon-8280l-8s")
    keys: dict[str, Any] = {**STATIC, "topologyManagerPolicy": "best-effort"}
    devices: Devices = {name: dict.fromkeys(range(8), 1) for name in ("example.com/gpu", "example.com/nic")}
    wanted = dict.fromkeys(devices, 1)
    (fault,) = faults(planned(host_of_8, pod("vm", 4, more=wanted), devices=devices, **keys))
    assert fault.startswith(
        "the kubelet merges 4228250625 combinations of hints for it, some 5 minutes in which it admits no other pod"
    )
    assert not faults(planned(host_of_8, pod("vm", 4), devices=devices, **keys))
    single = {**keys, "topologyManagerPolicy": "single-numa-node"}
    assert not faults(planned(host_of_8, pod("vm", 4, more=wanted), devices=devices, **single))


def test_a_state_that_a_restart_would_refuse_is_a_note() -> None:
    """The kubelet that wrote it runs on; the same state with a changed configuration is that of a restart."""
    plan = planned(ONE_OFFLINE, pod("first", 2), reservedSystemCPUs="0")
    after = plan.after.cpus
    states = States(cpu=after)
    again = planned(ONE_OFFLINE, pod("second", 2), states=states, running=[pod("first", 2)], reservedSystemCPUs="0")
    assert again.pods[0].explanation.admission.admitted
    (note,) = [each for each in again.notes if "next start" in each]
    assert note.startswith(
        'the next start of this kubelet fails with these state files: not all reserved cpus: "0" are present in'
    )


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({"terminationGracePeriodSeconds": 60}, "20 s, not the 60 s"),
        ({}, "20 s, not the 30 s"),
        ({"terminationGracePeriodSeconds": 20}, ""),
        ({"terminationGracePeriodSeconds": 60, "priorityClassName": "system-node-critical"}, "10 s, not the 60 s"),
    ],
)
def test_a_shutdown_of_the_node_that_is_shorter_than_the_grace_is_noted(spec: dict[str, Any], seconds: str) -> None:
    asked = pod("vm", 2)
    asked["spec"] |= spec
    keys: dict[str, Any] = {"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": "10s"}
    notes = [note for note in planned(EPYC, asked, **keys).pods[0].notes if "shuts down" in note]
    assert [seconds in note for note in notes] == ([True] if seconds else [])
    assert not [note for note in planned(EPYC, asked).pods[0].notes if "shuts down" in note]


@pytest.mark.parametrize(
    ("key", "consequence"),
    [
        ("shareProcessNamespace", "refused when it registers"),
        ("hostPID", "refused when it registers"),
        ("hostNetwork", "mode 'bridge' does not start"),
    ],
)
def test_namespaces_that_an_instance_cannot_share_are_noted(key: str, consequence: str) -> None:
    asked, shared = pod("vm", 2), pod("shared", "500m")
    asked["spec"][key] = shared["spec"][key] = True
    vm, other = planned(EPYC, asked, shared).pods
    assert [note for note in vm.notes if note.startswith(f"spec.{key} is true: ") and consequence in note]
    assert not [note for note in other.notes if key in note]


# --- 1.37, from its source --------------------------------------------------------------------------------------------


def planned_for(minor: int, *pods: dict[str, Any], hardware: Hardware = EPYC, **keys: Any) -> NodePlan:
    document = Value(HEAD | keys, "k.yaml")
    configured, notes = parse_kubelet_configuration(document, hardware, minor)
    manifests, _ = parse_manifests([Value(each, "p.yaml") for each in pods], pod_level_resources=True)
    before = start_node(hardware, configured, {GPU: {0: 1, 1: 1}}, States())
    return attrs.evolve(plan_node(hardware, configured, before, manifests), notes=notes)


def test_the_newest_version_is_planned_from_its_source_and_says_so() -> None:
    """Both GPUs are on other NUMA nodes: 1.36 takes all CPUs of one, 1.37 those of both."""
    keys: dict[str, Any] = {
        "topologyManagerPolicy": "best-effort",
        "cpuManagerPolicyOptions": {"distribute-cpus-across-numa": "true"},
    }
    older, newer = (planned_for(minor, pod("vm", 8, more={GPU: 2}), **keys) for minor in (36, 37))
    spread = [[len(plan.pods[0].cpus & cpus) for cpus in EPYC.cpus_of_numa_node.values()] for plan in (older, newer)]
    assert sorted(spread[0]) == [0, 8]
    assert spread[1] == [4, 4]
    assert "1.37, from source and not run: CPU Manager static" in shown(newer)
    assert [note for note in newer.notes if "no kubelet of this version was asked" in note]
    assert not [note for note in older.notes if "no kubelet" in note]


def test_the_newest_version_takes_no_core_with_a_reserved_cpu_whole() -> None:
    for minor, cpus in ((36, "0,64"), (37, "1,65")):
        plan = planned_for(minor, pod("first", 2), hardware=ONE_OFFLINE, reservedSystemCPUs="0")
        assert str(plan.pods[0].cpus) == cpus, minor
        assert plan.fits == (minor == 37)


@pytest.mark.parametrize(
    "options",
    [("distribute-cpus-across-cores",), ("distribute-cpus-across-numa", "align-by-socket")],
)
def test_options_whose_change_is_not_modelled_are_refused(options: Sequence[str]) -> None:
    keys: dict[str, Any] = {
        "cpuManagerPolicyOptions": dict.fromkeys(options, "true"),
        "featureGates": {"CPUManagerPolicyAlphaOptions": True},
    }
    planned_for(36, pod("vm", 2), **keys)
    with pytest.raises(RefusedError, match=r"cannot predict kubelet 1\.37 with distribute-cpus-across-"):
        planned_for(37, pod("vm", 2), **keys)
