"""Answers of the real kubelet code (1.36.2) to recorded cases: ours must equal every one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from runner.cpuset import CpuSet
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.kubelet.admission import NO_AFFINITY, Admission, Kubelet, KubeletConfiguration, SimulatedNode
from runner.kubelet.cpu_assignment import CpuTopology, take_distributed, take_packed
from runner.kubelet.cpu_manager import CpuManager, CpuPolicyOptions
from runner.kubelet.numa_masks import mask_of, numa_nodes_of
from runner.kubelet.pod import Container, ContainerKind, Pod, parse_quantity
from runner.kubelet.quirks import AllocationError, Quirk
from runner.kubelet.state import Block
from runner.kubelet.topology_manager import Hint, HintList, Policy, TopologyManager

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
    return Kubelet.configured(
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
        ),
        quirks=quirks,
    )


def container(name: str, requests: Document, kind: ContainerKind) -> Container:
    """Build a container without devices; fractions are rounded up as ``MilliValue`` and ``Value`` do."""
    amounts = {resource: parse_quantity(amount) for resource, amount in requests.items()}
    memory = {name: math.ceil(amount) for name, amount in amounts.items() if name.startswith(("memory", "hugepages-"))}
    return Container(name, math.ceil(amounts.get("cpu", 0) * 1000), memory, kind)


def pod(step: Document) -> Pod:
    """Build the pod of a step; init containers come first, whatever the order they are listed in."""
    containers = [
        container(each["name"], each["requests"], ContainerKind.INIT if each.get("init") else ContainerKind.APP)
        for each in step["containers"]
    ]
    return Pod(step["pod"], tuple(sorted(containers, key=lambda each: each.kind is ContainerKind.APP)))


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
