from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from runner.cpuset import CpuSet
from runner.errors import SpecError
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.kubelet.admission import Kubelet, KubeletConfiguration
from runner.kubelet.pod import Container, Pod
from runner.kubelet.quirks import KubeletConfigError
from runner.kubelet.state_files import parse_cpu_manager_state, parse_memory_manager_state

Document = dict[str, Any]
GIB = 1 << 30


def test_the_files_that_the_kubelet_wrote(vectors: Callable[[str], Iterator[tuple[Document, Document]]]) -> None:
    """What each simulated node of the real kubelet left on disk says the same as its answer about its state."""
    for case, result in vectors("sim"):
        for step in result["steps"]:
            files = step.get("files", {})
            if "cpu_manager_state" in files:
                checkpoint = parse_cpu_manager_state(files["cpu_manager_state"])
                assert checkpoint.policy == "static"
                assert str(checkpoint.state.shared_pool) == step["defaultCpuSet"]
                assert {
                    uid: {name: str(cpus) for name, cpus in containers.items()}
                    for uid, containers in checkpoint.state.assignments.items()
                } == step["cpuAssignments"]
            if "memory_manager_state" in files:
                memory = parse_memory_manager_state(files["memory_manager_state"])
                assert memory.policy == case["memoryPolicy"]
                assert {str(node): list(each.cells) for node, each in memory.state.numa_nodes.items()} == {
                    node: each["cells"] for node, each in step["machineState"].items()
                }
                assert {
                    uid: {name: sum(block.size for block in blocks) for name, blocks in containers.items()}
                    for uid, containers in memory.state.assignments.items()
                } == {
                    uid: {name: sum(block["size"] for block in blocks) for name, blocks in containers.items()}
                    for uid, containers in step["memoryAssignments"].items()
                }


def kubelet(**changes: Any) -> Kubelet:
    hardware = Hardware(
        tuple(Cpu(cpu, cpu, cpu // 4, cpu // 4 * 4, cpu // 4) for cpu in range(8)),
        tuple(NumaNode(node, 8 * GIB, (10, 20), (HugepagePool(GIB, 2, 2),)) for node in range(2)),
    )
    configuration = KubeletConfiguration(
        cpu_manager_policy="static",
        reserved_cpus=CpuSet((0,)),
        memory_manager_policy="Static",
        reserved_memory={0: {"memory": GIB}},
        topology_manager_policy="restricted",
    )
    return Kubelet.configured(hardware, attrs.evolve(configuration, **changes))


POD = Pod("uid-1", (Container("vm", 3000, {"memory": 7 * GIB, "hugepages-1Gi": 3 * GIB}),))

CPU_STATE = '{"policyName":"static","defaultCpuSet":"0,4-7","entries":{"uid-1":{"vm":"1-3"}},"checksum":1}'


def table(*amounts: int) -> dict[str, int]:
    return dict(zip(("total", "systemReserved", "allocatable", "reserved", "free"), amounts, strict=True))


def numa_memory(hugepages: dict[str, int], memory: dict[str, int]) -> Document:
    return {
        "numberOfAssignments": 2,
        "memoryMap": {"hugepages-1Gi": hugepages, "memory": memory},
        "cells": [0, 1],
    }


MEMORY_STATE = json.dumps(
    {
        "policyName": "Static",
        "machineState": {
            "0": numa_memory(table(2 * GIB, 0, 2 * GIB, 2 * GIB, 0), table(8 * GIB, GIB, 5 * GIB, 5 * GIB, 0)),
            "1": numa_memory(table(2 * GIB, 0, 2 * GIB, GIB, GIB), table(8 * GIB, 0, 6 * GIB, 2 * GIB, 4 * GIB)),
        },
        "entries": {
            "uid-1": {
                "vm": [
                    {"numaAffinity": [0, 1], "type": "memory", "size": 7 * GIB},
                    {"numaAffinity": [0, 1], "type": "hugepages-1Gi", "size": 3 * GIB},
                ]
            }
        },
        "checksum": 2,
    }
)


def test_a_node_goes_on_where_its_state_files_stand() -> None:
    running = kubelet(topology_manager_policy="best-effort")
    restored = running.restored(
        parse_cpu_manager_state(CPU_STATE).state, parse_memory_manager_state(MEMORY_STATE).state
    )
    admitted = running.empty_node.admit(POD)
    assert admitted.admitted
    assert (restored.cpus.shared_pool, restored.cpus.assignments) == (
        admitted.node.cpus.shared_pool,
        admitted.node.cpus.assignments,
    )
    assert restored.memory.numa_nodes == admitted.node.memory.numa_nodes
    assert restored.memory.assignments == admitted.node.memory.assignments
    assert restored.without("uid-1").memory.numa_nodes == running.empty_node.memory.numa_nodes
    # A pod that has its share is admitted again with the same, as after a restart of the kubelet.
    assert restored.admit(POD).cpus == admitted.cpus


def test_states_of_another_machine_are_refused_in_the_kubelet_s_words() -> None:
    cpus, memory = parse_cpu_manager_state(CPU_STATE).state, parse_memory_manager_state(MEMORY_STATE).state
    with pytest.raises(KubeletConfigError, match="doesn't match with CPUs in state"):
        kubelet().restored(attrs.evolve(cpus, assignments={}), memory)
    more_reserved = kubelet(reserved_memory={0: {"memory": 2 * GIB}})
    with pytest.raises(KubeletConfigError, match="the expected machine state is different from the real one"):
        more_reserved.restored(cpus, memory)
    elsewhere = parse_memory_manager_state(MEMORY_STATE.replace("[0, 1]", "[0, 7]")).state
    with pytest.raises(KubeletConfigError, match="the memory assignment uses the NUMA that does not exist"):
        kubelet().restored(cpus, elsewhere)


def test_policy_none_writes_empty_states() -> None:
    checkpoint = parse_cpu_manager_state('{"policyName":"none","defaultCpuSet":"","checksum":1353318690}')
    assert checkpoint.policy == "none"
    assert checkpoint.state.assignments == {}
    assert parse_memory_manager_state('{"policyName":"None","machineState":{},"checksum":1}').state.numa_nodes == {}
    assert parse_memory_manager_state('{"policyName":"None","machineState":null,"checksum":1}').policy == "None"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cpu_manager_state: is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "cpu_manager_state: must be an object, found []"),
        ("{}", "cpu_manager_state: policyName: must be a string, found None"),
        ('{"policyName":"static"}', "cpu_manager_state: defaultCpuSet: must be a string, found None"),
        (
            '{"policyName":"static","defaultCpuSet":"0-","entries":{}}',
            "cpu_manager_state: defaultCpuSet: '0-' in '0-' is neither a CPU number nor a range like '2-5'",
        ),
        (
            '{"policyName":"static","defaultCpuSet":"0","entries":{"u":{"c":[1]}}}',
            "cpu_manager_state: entries.u.c: must be a string, found [1]",
        ),
        (
            '{"policyName":"static","defaultCpuSet":"0","entries":{"u":"1-2"}}',
            "cpu_manager_state: entries.u: must be an object, found '1-2'",
        ),
        (
            '{"policyName":"static","defaultCpuSet":"0","podEntries":{"u":{}}}',
            (
                "cpu_manager_state: podEntries.u: CPUs are assigned to whole pods (PodLevelResourceManagers),"
                " which is not known here"
            ),
        ),
    ],
)
def test_what_is_no_cpu_state(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_cpu_manager_state(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"machineState":{"x":{}}}', "machineState.x: 'x' is no NUMA node"),
        ('{"machineState":{"0":{}}}', "machineState.0.numberOfAssignments: must be a whole number, found None"),
        (
            '{"machineState":{"0":{"numberOfAssignments":0,"memoryMap":{"memory":{"total":-1}},"cells":[0]}}}',
            "machineState.0.memoryMap.memory.total: must be a whole number, found -1",
        ),
        (
            '{"entries":{"u":{"c":[{"numaAffinity":"0"}]}}}',
            "entries.u.c[0].numaAffinity: must be a list, found '0'",
        ),
    ],
)
def test_what_is_no_memory_state(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_memory_manager_state(text)
    assert str(caught.value) == f"memory_manager_state: {message}"
