"""Answers of the real kubelet code (1.36.2) to recorded cases: ours must equal every one of them."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.kubelet.numa_masks import mask_of, numa_nodes_of
from runner.kubelet.pod import Container, ContainerKind, Pod, parse_quantity
from runner.kubelet.state import Block
from runner.kubelet.state_files import parse_cpu_state, parse_memory_state
from runner.node_plan.admission import NO_AFFINITY, Admission, Kubelet, KubeletConfiguration, Outcome, SimulatedNode
from runner.node_plan.configuration import configuration_among, parse_kubelet_configuration
from runner.node_plan.cpu_assignment import CpuTopology, take_distributed, take_packed
from runner.node_plan.cpu_manager import CpuManager, CpuPolicyOptions, exclusive_cpus
from runner.node_plan.device_manager import Devices
from runner.node_plan.manifests import Manifest, parse_manifests
from runner.node_plan.node_plan import States, start_node
from runner.node_plan.quirks import AllocationError, KubeletConfigError, Quirk
from runner.node_plan.topology_manager import Hint, HintList, Policy, TopologyManager
from runner.spec.yaml import parse_yaml

pytestmark = pytest.mark.kubelet_model

Document = dict[str, Any]
Vectors = Callable[[str], Iterator[tuple[Document, Document]]]
Topologies = Callable[[Iterable[Document]], CpuTopology]

ALL_QUIRKS = frozenset(Quirk)


def taken(topology: CpuTopology, case: Document, quirks: frozenset[Quirk]) -> Document:
    available = CpuSet.parse(case["available"])
    spread = case.get("strategy") == "spread"
    try:
        if case.get("distributed"):
            group = case.get("cpuGroupSize", 1)
            cpus = take_distributed(topology, available, case["n"], group=group, spread=spread, quirks=quirks)
        else:
            uncore = case.get("preferAlignByUncoreCache", False)
            cpus = take_packed(topology, available, case["n"], spread=spread, prefer_uncore=uncore, quirks=quirks)
    except AllocationError as error:
        return {"error": {"message": str(error)}}
    return {"cpus": str(cpus), "list": list(cpus)}


def test_cpus_are_those_the_kubelet_takes(vectors: Vectors, cpu_topology: Topologies) -> None:
    for case, result in vectors("take"):
        assert taken(cpu_topology(case["cpus"]), case, ALL_QUIRKS) == result, case


@pytest.mark.parametrize("quirk", [Quirk.COMBINATIONS_OVERWRITTEN])
def test_without_the_quirk_some_cases_differ(quirk: Quirk, our_vectors: Vectors, cpu_topology: Topologies) -> None:
    differing = [
        case
        for case, result in our_vectors("take")
        if case.get("distributed") and taken(cpu_topology(case["cpus"]), case, ALL_QUIRKS - {quirk}) != result
    ]
    assert differing


def hint(document: Document) -> Hint:
    mask = document["mask"]
    return Hint(None if mask is None else mask_of(mask), document["preferred"])


def documents(hints: HintList) -> list[Document]:
    return [{"mask": list(each.numa_nodes or ()), "preferred": each.preferred} for each in hints]


def test_cpu_hints_are_those_the_kubelet_gives(vectors: Vectors, cpu_topology: Topologies) -> None:
    for case, result in vectors("cpu_hints"):
        manager = CpuManager.configured(
            cpu_topology(case["cpus"]),
            CpuPolicyOptions.parse(case.get("cpuPolicyOptions", {})),
            reserved_cpus=CpuSet.parse(case["reservedCPUs"]),
            reserved_millicpus=0,
        )
        assert str(manager.reserved) == result["reserved"], case
        assert str(manager.reserved_cores) == result["reservedPhysical"], case
        available = CpuSet.parse(case["available"]) - manager.reserved
        assert documents(manager.numa_hints(available, case["n"])) == result["hints"], case


def test_hints_are_merged_as_the_kubelet_does(vectors: Vectors) -> None:
    for case, result in vectors("merge"):
        manager = TopologyManager(
            tuple(case["numaNodes"]),
            Policy(case["policy"]),
            prefer_closest="prefer-closest-numa-nodes" in case.get("topologyPolicyOptions", {}),
            distances={int(node): row for node, row in case.get("distances", {}).items()},
        )
        providers = [
            {name: None if hints is None else HintList.of(map(hint, hints)) for name, hints in (provider or {}).items()}
            for provider in case["providers"]
        ]
        merged = manager.merge(providers)
        assert merged.admitted == result["admit"], case
        assert merged.hint == hint(result["hint"]), case
        assert merged.permutations == result["permutations"], case


def hardware(case: Document, topology: CpuTopology) -> Hardware:
    return Hardware(
        tuple(
            Cpu(
                fact.cpu,
                fact.core,
                fact.socket,
                die=fact.socket,
                numa_node=fact.numa_node,
                l3=fact.uncore,
            )
            for fact in topology.cpus
        ),
        tuple(
            NumaNode(
                node["id"],
                node["memory"],
                tuple(node["distances"]),
                tuple(
                    HugepagePool(int(size) * 1024, pages, pages) for size, pages in node.get("hugepages", {}).items()
                ),
            )
            for node in case["nodes"]
        ),
    )


def kubelet(case: Document, topology: CpuTopology, quirks: frozenset[Quirk]) -> Kubelet:
    """Start the kubelet of a case, whose CPUs are as cadvisor has described them already."""
    started = Kubelet.configured(
        hardware(case, topology),
        KubeletConfiguration(
            cpu_manager_policy="static",
            cpu_manager_policy_options=case.get("cpuPolicyOptions", {}),
            reserved_cpus=CpuSet.parse(case["reservedCPUs"]),
            memory_manager_policy=case["memoryPolicy"],
            reserved_memory={
                int(numa_node): {name: int(parse_quantity(amount)) for name, amount in reserved.items()}
                for numa_node, reserved in case.get("reservedMemory", {}).items()
            },
            topology_manager_policy=case["policy"],
            topology_manager_scope=case["scope"],
            topology_manager_policy_options=case.get("topologyPolicyOptions", {}),
            pod_level_resource_managers=case.get("podLevelResourceManagers", False),
        ),
        quirks=quirks,
    )
    assert started.cpu_manager
    return attrs.evolve(started, cpu_manager=attrs.evolve(started.cpu_manager, topology=topology))


def amounts(document: Document) -> dict[str, int]:
    """Read quantities in thousandths of CPUs and bytes; fractions are rounded up as ``MilliValue`` and ``Value`` do."""
    return {
        name: math.ceil(parse_quantity(amount) * (1000 if name == "cpu" else 1)) for name, amount in document.items()
    }


def container(document: Document) -> Container:
    """Build a container without devices; its limits are its requests where *document* has none."""
    requests = amounts(document["requests"])
    limits = amounts(document["limits"]) if "limits" in document else requests
    memory = {name: amount for name, amount in requests.items() if name.startswith(("memory", "hugepages-"))}
    kind = ContainerKind.INIT if document.get("init") else ContainerKind.APP
    kind = ContainerKind.SIDECAR if document.get("sidecar") else kind
    guaranteed = all(requests.get(name) and requests[name] == limits.get(name) for name in ("cpu", "memory"))
    return Container(document["name"], requests.get("cpu", 0), memory, kind, guaranteed=guaranteed)


def pod(step: Document) -> Pod:
    """Build the pod of a step; init containers come first, whatever the order they are listed in."""
    containers = sorted(map(container, step["containers"]), key=lambda each: each.kind is ContainerKind.APP)
    level = amounts(step.get("resources", {}))
    return Pod(step["pod"], tuple(containers), pod_level_resources=bool(level), pod_level_requests=level)


def blocks(listed: Iterable[Block]) -> list[Document]:
    return by_type(
        {"numaAffinity": list(block.numa_nodes), "type": block.resource, "size": block.size} for block in listed
    )


def by_type(listed: Iterable[Document]) -> list[Document]:
    """Sort memory blocks: the kubelet has them in the random order of a Go map."""
    return sorted(listed, key=lambda block: str(block["type"]))


def provider_hints(admission: Admission) -> list[Document] | None:
    entries = []
    for step in admission.steps:
        for provider, hints in step.hints.items():
            entry: Document = {"provider": provider, "hints": None}
            if hints is not None:
                entry["hints"] = {name: documents(listed or HintList()) for name, listed in hints.items()}
            if step.container is not None:
                entry["container"] = step.container
            entries.append(entry)
    return entries or None


def answer(admission: Admission) -> Document:
    found: Document = {
        "op": "admit",
        "pod": admission.pod.pod_uid,
        "admit": admission.admitted,
        "cpus": {name: str(cpus) for name, cpus in admission.cpus.items()},
        "defaultCpuSet": str(admission.node.shared_pool),
        "providerHints": provider_hints(admission),
    }
    if admission.node.kubelet.memory_manager:
        found["memory"] = {name: blocks(listed) for name, listed in admission.memory.items()} or None
    if admission.node.kubelet.topology_manager.policy is not Policy.NONE:
        # The kubelet is asked for every container, and answers "none" for those that it did not reach.
        hints = {each.name: admission.affinity.get(each.name, NO_AFFINITY) for each in admission.pod.containers}
        found["affinity"] = {
            name: {"mask": None if hint.mask is None else list(numa_nodes_of(hint.mask)), "preferred": hint.preferred}
            for name, hint in hints.items()
        }
    if not admission.admitted:
        found |= {"reason": admission.reason, "message": admission.message}
    if admission.node.kubelet.pod_level_resource_managers:
        uid = admission.pod.pod_uid
        if uid in admission.node.cpus.pod_assignments:
            found["podCpus"] = str(admission.node.cpus.pod_assignments[uid])
        if uid in admission.node.memory.pod_assignments:
            found["podMemory"] = blocks(admission.node.memory.pod_assignments[uid])
    return found


def state(node: SimulatedNode) -> Document:
    return {
        "op": "state",
        "defaultCpuSet": str(node.shared_pool),
        "cpuAssignments": {
            uid: {name: str(cpus) for name, cpus in containers.items()}
            for uid, containers in node.cpus.assignments.items()
        },
        "memoryAssignments": {
            uid: {name: blocks(listed) for name, listed in containers.items()}
            for uid, containers in node.memory.assignments.items()
        },
        "machineState": {
            str(numa_node): {
                "numberOfAssignments": memory.assignments,
                "cells": list(memory.cells),
                "memoryMap": {
                    name: {
                        "total": table.total,
                        "systemReserved": table.system_reserved,
                        "allocatable": table.allocatable,
                        "reserved": table.reserved,
                        "free": table.free,
                    }
                    for name, table in memory.tables.items()
                },
            }
            for numa_node, memory in node.memory.numa_nodes.items()
        },
    }


def comparable(step: Document) -> Document:
    """Strip a result of the state files' text, which we do not write, and of the order that the kubelet leaves open."""
    kept = {key: value for key, value in step.items() if key != "files"}
    if kept.get("memory"):
        kept["memory"] = {name: by_type(listed) for name, listed in kept["memory"].items()}
    if "memoryAssignments" in kept:
        kept["memoryAssignments"] = {
            uid: {name: by_type(listed) for name, listed in containers.items()}
            for uid, containers in kept["memoryAssignments"].items()
        }
    return kept


def simulated(case: Document, topology: CpuTopology, quirks: frozenset[Quirk]) -> list[Document]:
    node = kubelet(case, topology, quirks).empty_node
    results = []
    for step in case["steps"]:
        if step["op"] == "admit":
            admission = node.admit(pod(step))
            node = admission.node
            results.append(answer(admission))
        elif step["op"] == "remove_pod":
            node = node.without(step["pod"])
            results.append({"op": "remove_pod", "pod": step["pod"], "defaultCpuSet": str(node.shared_pool)})
        else:
            results.append(state(node))
    return results


def test_nodes_admit_as_the_kubelet_does(vectors: Vectors, cpu_topology: Topologies) -> None:
    for case, result in vectors("sim"):
        topology = cpu_topology(case["cpus"])
        node = kubelet(case, topology, ALL_QUIRKS).empty_node
        assert str(node.available) == result["allocatableCPUs"], case
        assert simulated(case, topology, ALL_QUIRKS) == list(map(comparable, result["steps"])), case


# --- pod-level resources (gate PodLevelResourceManagers) --------------------------------------------------------------


def isolation(admission: Admission) -> Document:
    """Return whose CPUs each container runs on (``GetResourceIsolationLevel``)."""
    seen = admission.node.kubelet.seen_by_managers(admission.pod)
    held = {each.name: "container" if exclusive_cpus(seen, each) else "pod" for each in seen.containers}
    return {name: level if name in admission.cpus else "host" for name, level in held.items()}


def pod_level_state(node: SimulatedNode) -> Document:
    """Return the state of *node* with what pods have as a whole, and whether a kubelet would start with it again."""
    found = state(node) | {
        "podCpuAssignments": {uid: str(cpus) for uid, cpus in node.cpus.pod_assignments.items()},
        "podMemoryAssignments": {uid: blocks(listed) for uid, listed in node.memory.pod_assignments.items()},
    }
    if not node.kubelet.memory_manager:
        for key in ("memoryAssignments", "podMemoryAssignments", "machineState"):
            del found[key]
    return found | {"restart": restart(node)}


def restart(node: SimulatedNode) -> Document:
    """Return the errors of both managers when they start again with the state of *node*."""

    def refusal(start: Callable[[], None]) -> str | None:
        try:
            start()
        except KubeletConfigError as error:
            return str(error)
        return None

    cpu, memory = node.kubelet.cpu_manager, node.kubelet.memory_manager
    return {
        "cpu": refusal(lambda: cpu.validate(node.cpus)) if cpu else None,
        "memory": refusal(lambda: memory.validate(node.memory)) if memory else None,
    }


def same_states(node: SimulatedNode, files: Document) -> bool:
    """Tell whether the kubelet's own *files* hold the state of *node*."""
    cpus = parse_cpu_state(files["cpu_manager_state"].encode())
    same = (cpus.shared_pool, cpus.assignments, cpus.pod_assignments) == (
        node.cpus.shared_pool,
        node.cpus.assignments,
        node.cpus.pod_assignments,
    )
    if "memory_manager_state" not in files:
        return same
    memory = parse_memory_state(files["memory_manager_state"].encode())
    read = SimulatedNode(node.kubelet, cpus, memory)
    return same and comparable(pod_level_state(read)) == comparable(pod_level_state(node))


def test_pods_with_resources_of_their_own_are_admitted_as_the_kubelet_does(
    our_vectors: Vectors, cpu_topology: Topologies
) -> None:
    seen = Counter[str]()
    for case, result in our_vectors("pod_level"):
        node = kubelet(case, cpu_topology(case["cpus"]), ALL_QUIRKS).empty_node
        for step, expected in zip(case["steps"], result["steps"], strict=True):
            if step["op"] == "admit":
                admission = node.admit(pod(step))
                node = admission.node
                found = answer(admission) | {"isolation": isolation(admission)}
                seen[admission.reason or "admitted"] += "resources" in step
            elif step["op"] == "remove_pod":
                node = node.without(step["pod"])
                found = {"op": "remove_pod", "pod": step["pod"], "defaultCpuSet": str(node.shared_pool)}
            else:
                found = pod_level_state(node)
                assert same_states(node, expected["files"]), case
            wanted = comparable(expected)
            assert comparable({key: value for key, value in found.items() if key in wanted}) == wanted, case
    assert all(
        seen[each] for each in ("admitted", "TopologyAffinityError", "EmptyPodSharedPoolError", "SMTAlignmentError")
    )


# --- whole nodes with devices, in the formats of plan --node ----------------------------------------------------------


def registered(listed: Iterable[str]) -> Devices:
    """Read devices as ``--device`` takes them: ``x.y/gpu=4@0``."""
    found: dict[str, dict[int | None, int]] = {}
    for text in listed:
        resource, amount = text.split("=")
        count, _, numa_node = amount.partition("@")
        found.setdefault(resource, {})[int(numa_node) if numa_node else None] = int(count)
    return found


def started(case: Document) -> SimulatedNode:
    """Start the kubelet of a case with devices."""
    machine = Hardware.from_json(json.dumps(case["host"]))
    document = configuration_among(parse_yaml("config", case["config"].encode()))
    configuration, _ = parse_kubelet_configuration(document, machine, 36)
    return start_node(machine, configuration, registered(case["devices"]), States())


def manifests(case: Document) -> list[Manifest]:
    documents = [document for text in case["pods"] for document in parse_yaml("pod", text.encode())]
    return parse_manifests(documents, pod_level_resources=True)[0]


def with_devices(admission: Admission, manifest: Manifest) -> Document:
    found = answer(admission)
    without = {each.name: {"mask": None, "preferred": False} for each in admission.pod.containers}
    return {
        "admit": admission.admitted,
        "affinity": found.get("affinity", without),
        "cpus": found["cpus"],
        "defaultCpuSet": found["defaultCpuSet"],
        "memory": found.get("memory") or {},
        "message": admission.message,
        "qos": manifest.qos.value,
        "reason": admission.reason,
    }


def numa_nodes_of_devices(step: Document) -> Document:
    """Count the devices of a result by NUMA node: ``d1-4`` is one on NUMA node 1, ``d-4`` has none."""

    def counted(names: Iterable[str]) -> dict[int | None, int]:
        places = (re.match(r"d([0-9]+)-", name) for name in names)
        counts = Counter[int | None](int(place[1]) if place else None for place in places)
        return dict(counts)

    return {
        name: {resource: counted(names) for resource, names in resources.items()}
        for name, resources in step["devices"].items()
        if resources
    }


def admitted(case: Document) -> Iterator[tuple[Admission, Manifest]]:
    node = started(case)
    for manifest in manifests(case):
        admission = node.admit(manifest.pod)
        yield admission, manifest
        node = admission.node


def outcome(case: Document) -> Document:
    steps = []
    try:
        for admission, manifest in admitted(case):
            if admission.outcome is Outcome.CRASHES:
                return {"panic": True}
            steps.append(with_devices(admission, manifest))
    except KubeletConfigError as error:
        return {"startError": str(error), "steps": []}
    return {"steps": steps}


def test_nodes_with_devices_admit_as_the_kubelet_does(vectors: Vectors) -> None:
    seen = Counter[str]()
    for case, result in vectors("devices"):
        expected = {key: result[key] for key in ("startError", "steps", "panic") if key in result}
        if "startError" in expected:
            # The real one has the words of its callers before it.
            found = outcome(case)
            assert expected["startError"].endswith(found.pop("startError")), case
            expected.pop("startError")
        else:
            found = outcome(case)
            for step in expected.get("steps", ()):
                step["memory"] = comparable(step)["memory"] if step["memory"] else {}
        steps = [{key: value for key, value in step.items() if key != "devices"} for step in expected.get("steps", ())]
        assert found == (expected | {"steps": steps} if "steps" in expected else expected), case
        seen.update(step["reason"] or "admitted" for step in steps)
        seen.update({"panic": "panic" in result, "startError": "startError" in result})
    assert all(seen[each] for each in ("admitted", "TopologyAffinityError", "UnexpectedAdmissionError", "panic"))


BY_CHANCE = {
    217: "three of four devices on two NUMA nodes, without an affinity: the order of a Go map",
    657: "of two resources the second is missing: whether the first was assigned before is the order of a Go map",
}
"""The recorded cases in which the kubelet leaves to chance which devices a container gets, by their place in the file."""


def test_containers_get_devices_of_the_numa_nodes_that_the_kubelet_chooses(our_vectors: Vectors) -> None:
    differing = set()
    for number, (case, result) in enumerate(our_vectors("devices")):
        if "startError" in result or "panic" in result:
            continue
        for (admission, _), step in zip(admitted(case), result["steps"], strict=True):
            given = {
                name: {resource: dict(places) for resource, places in devices.items() if places}
                for name, devices in admission.devices.items()
            }
            if {name: devices for name, devices in given.items() if devices} != numa_nodes_of_devices(step):
                differing.add(number)
    assert differing == set(BY_CHANCE)


def test_the_files_that_the_kubelet_wrote(vectors: Vectors) -> None:
    """The files that the real kubelet wrote for each simulated node hold the state that it returned."""
    for case, result in vectors("sim"):
        for step in result["steps"]:
            files = step.get("files", {})
            if "cpu_manager_state" in files:
                state = parse_cpu_state(files["cpu_manager_state"].encode())
                assert state.policy == "static"
                assert str(state.shared_pool) == step["defaultCpuSet"]
                assert {
                    uid: {name: str(cpus) for name, cpus in containers.items()}
                    for uid, containers in state.assignments.items()
                } == step["cpuAssignments"]
            if "memory_manager_state" in files:
                memory = parse_memory_state(files["memory_manager_state"].encode())
                assert memory.policy == case["memoryPolicy"]
                assert {str(node): list(each.cells) for node, each in memory.numa_nodes.items()} == {
                    node: each["cells"] for node, each in step["machineState"].items()
                }
                assert {
                    uid: {name: sum(block.size for block in blocks) for name, blocks in containers.items()}
                    for uid, containers in memory.assignments.items()
                } == {
                    uid: {name: sum(block["size"] for block in blocks) for name, blocks in containers.items()}
                    for uid, containers in step["memoryAssignments"].items()
                }
