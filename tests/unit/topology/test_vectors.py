"""Answers of the real kubelet code (1.36.2) to cases of ours: every one of them must be ours too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from runner.cpuset import CpuSet
from runner.topology.cpu_manager import (
    AllocationError,
    CpuManager,
    CpuPolicyOptions,
    CpuTopology,
    Quirk,
    take_distributed,
    take_packed,
)
from runner.topology.topology_manager import Hint, HintList, Policy, TopologyManager, mask_of

Document = dict[str, Any]
Vectors = Callable[[str], Iterator[tuple[Document, Document]]]
Topologies = Callable[[Iterable[Document]], CpuTopology]

ALL_QUIRKS = frozenset(Quirk)


def taken(topology: CpuTopology, case: Document, quirks: frozenset[Quirk]) -> Document:
    available = CpuSet.parse(case["available"])
    spread = case["strategy"] == "spread"
    try:
        if case.get("distributed"):
            group = case["cpuGroupSize"]
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
def test_without_the_quirk_some_cases_differ(quirk: Quirk, vectors: Vectors, cpu_topology: Topologies) -> None:
    differing = [
        case
        for case, result in vectors("take")
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
            CpuPolicyOptions.parse(case["cpuPolicyOptions"]),
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
