"""Whatever the files of ``plan --node`` hold, the answer is a plan or an error in words, never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.base.document_value import Value
from runner.base.errors import RunnerError
from runner.facts.hardware import Hardware
from runner.kubelet.state_files import parse_cpu_state, parse_memory_state
from runner.node_plan.configuration import configuration_among, parse_kubelet_configuration
from runner.node_plan.manifests import parse_manifests
from runner.node_plan.node_plan import States, plan_node, start_node, unclear_pods
from runner.node_plan.report.svg import picture_svg
from runner.node_plan.report.text import node_json, node_lines
from tests.support.json_schemas import fitting

GIB = 1 << 30
POOL = {"size": 2 << 20, "total": 512, "free": 512}
HOST: dict[str, Any] = {
    "format": 1,
    "offline": "9",
    "memory": 16 * GIB,
    "numa": True,
    "cpus": [
        {
            "cpu": cpu,
            "core": cpu % 4,
            "socket": cpu % 4 // 2,
            "die": cpu % 4 // 2 * 2,
            "numa_node": cpu % 4 // 2,
            "l3": 0,
        }
        for cpu in range(8)
    ],
    "numa_nodes": [{"id": each, "memory": 8 * GIB, "distances": [10, 20], "hugepages": [POOL]} for each in (0, 1)],
}
CONFIGURATION: dict[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "cpuManagerPolicy": "static",
    "cpuManagerPolicyOptions": {"full-pcpus-only": "true", "distribute-cpus-across-numa": "true"},
    "reservedSystemCPUs": "0,4",
    "kubeReserved": {"cpu": "1", "memory": "1Gi"},
    "evictionHard": {"memory.available": "200Mi"},
    "memoryManagerPolicy": "Static",
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1224Mi"}}],
    "topologyManagerPolicy": "best-effort",
    "topologyManagerScope": "pod",
    "topologyManagerPolicyOptions": {"prefer-closest-numa-nodes": "true", "max-allowable-numa-nodes": "8"},
    "featureGates": {"PodLevelResources": True},
    "shutdownGracePeriod": "30s",
    "maxPods": 100,
    "podsPerCore": 0,
}
POD: dict[str, Any] = {
    "kind": "Pod",
    "metadata": {"name": "vm", "uid": "uid-1"},
    "spec": {
        "initContainers": [{"name": "first", "restartPolicy": "Always", "resources": {"limits": {"cpu": "1"}}}],
        "containers": [
            {
                "name": "vm",
                "resources": {"limits": {"cpu": "2", "memory": "1Gi", "hugepages-2Mi": "2Mi", "example.com/gpu": 1}},
            }
        ],
        "resources": {"limits": {"cpu": "4", "memory": "2Gi"}},
        "terminationGracePeriodSeconds": 60,
        "priority": 0,
        "hostPID": True,
    },
}
CPU_STATE: dict[str, Any] = {"policyName": "static", "defaultCpuSet": "0,3-7", "entries": {"uid-0": {"vm": "1-2"}}}
TABLE = {"total": 8 * GIB, "systemReserved": GIB, "allocatable": 6 * GIB, "reserved": 0, "free": 6 * GIB}
MEMORY_STATE: dict[str, Any] = {
    "policyName": "Static",
    "machineState": {
        each: {
            "numberOfAssignments": 1,
            "memoryMap": {"memory": TABLE, "hugepages-2Mi": TABLE},
            "cells": [0, 1],
        }
        for each in ("0", "1")
    },
    "entries": {"uid-0": {"vm": [{"numaAffinity": [0, 1], "type": "memory", "size": GIB}]}},
}
DOCUMENTS = (HOST, CONFIGURATION, POD, CPU_STATE, MEMORY_STATE)

Path = tuple[str | int, ...]


def paths(value: Any, here: Path = ()) -> Iterator[Path]:
    """Yield the path of each value in a document."""
    yield here
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in members:
        yield from paths(inner, (*here, key))


PLACES = [(number, path) for number, document in enumerate(DOCUMENTS) for path in paths(document)]
NUMBERS = st.sampled_from([-1, 0, 1, 3, 7, 8, 63, 64, 1023, 8191, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308])
TEXTS = st.sampled_from(
    [
        "",
        "0",
        "-1",
        "0-7",
        "4-1",
        "1,1",
        "static",
        "none",
        "1Gi",
        "9" * 400,
        "1e999",
        "1n",
        "100%",
        "-3%",
        "true",
        "²",
        "a/b",
    ]
)
VALUES = st.none() | st.booleans() | NUMBERS | TEXTS | st.sampled_from([[], {}, [[]], {"": {}}, [{}], ["0"], [0, 0]])
CHANGES = st.lists(st.tuples(st.sampled_from(PLACES), VALUES | st.just(...)), min_size=1, max_size=3)
"""Where a document is changed, and to what; ``...`` for a value that is taken out."""


def changed(changes: list[tuple[tuple[int, Path], Any]]) -> list[Any]:
    """Return :data:`DOCUMENTS` with *changes*; one at a place that an earlier one took away does nothing."""
    documents: list[Any] = copy.deepcopy(list(DOCUMENTS))
    for (number, path), value in changes:
        holder: Any = documents
        try:
            for key in (number, *path)[:-1]:
                holder = holder[key]
            if value is ... and path:
                del holder[path[-1]]
            elif value is not ...:
                holder[path[-1] if path else number] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue
    return documents


@example([((0, ("numa_nodes", 0, "hugepages", 0, "size")), 1)], False, 36)
@example([((0, ("numa_nodes", 1, "memory")), 10**400)], False, 33)
@example([((2, ("spec", "containers", 0, "resources", "limits", "cpu")), "9" * 400)], False, 36)
@given(CHANGES, st.booleans(), st.sampled_from([33, 34, 36]))
@settings(max_examples=1500)
def test_any_input_is_planned_or_refused_in_words(
    changes: list[tuple[tuple[int, Path], Any]],
    with_states: bool,  # noqa: FBT001
    minor: int,
) -> None:
    host, configuration, pod, cpu_state, memory_state = changed(changes)
    try:
        hardware = Hardware.from_json(json.dumps(host))
        document = configuration_among([Value(configuration, "k.yaml")])
        configured, _ = parse_kubelet_configuration(document, hardware, minor)
        manifests, _ = parse_manifests([Value(pod, "p.yaml")] * 2, pod_level_resources=configured.pod_level_resources)
        states = States()
        if with_states:
            states = States(
                parse_cpu_state(json.dumps(cpu_state).encode()), parse_memory_state(json.dumps(memory_state).encode())
            )
        before = start_node(hardware, configured, {"example.com/gpu": {0: 1, None: 1}}, states)
        plan = plan_node(hardware, configured, before, manifests, unclear=unclear_pods(states))
        "\n".join(node_lines(plan, width=80, colour=False)).encode()
        fitting("node", node_json(plan))
        picture_svg(plan)
    except RunnerError as error:
        str(error).encode()


def test_the_unchanged_input_is_planned() -> None:
    hardware = Hardware.from_json(json.dumps(HOST))
    configured, _ = parse_kubelet_configuration(Value(CONFIGURATION, "k.yaml"), hardware, 36)
    manifests, _ = parse_manifests([Value(POD, "p.yaml")], pod_level_resources=True)
    plan = plan_node(hardware, configured, start_node(hardware, configured, {}, States()), manifests)
    assert len(plan.pods) == 1
