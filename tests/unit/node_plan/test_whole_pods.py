"""Pods whose resources belong to the pod as a whole (gate ``PodLevelResourceManagers``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from runner.kubelet.state_files import parse_cpu_state, parse_memory_state
from runner.node_plan.admission import Outcome
from runner.node_plan.general_filter import total_requests
from runner.node_plan.node_plan import (
    NodePlan,
    States,
    fit_of,
    stale_pods,
)
from runner.node_plan.pod_notes import OWN_CONTAINER
from runner.node_plan.report.node_json import ContainerDocument
from runner.node_plan.report.picture import owners_of
from runner.node_plan.report.svg import picture_svg
from runner.node_plan.report.text import node_json
from tests.support.node_plans import (
    EPYC,
    GPU,
    NOTHING,
    ROOT,
    STATIC,
    host,
    planned,
    pod,
    shown,
)

pytestmark = pytest.mark.kubelet_model


MANAGED: dict[str, Any] = STATIC | {
    "topologyManagerPolicy": "restricted",
    "topologyManagerScope": "pod",
    "featureGates": {"PodLevelResourceManagers": True},
    "reservedSystemCPUs": "0,64",
}


SIDECAR = {"restartPolicy": "Always"}


def own(cpus: object, memory: str = "1Gi", **more: str) -> dict[str, Any]:
    return {"resources": {"limits": {"cpu": cpus, "memory": memory, **more}}}


def whole(cpus: object = 8, memory: str = "8Gi", more: Mapping[str, Any] = NOTHING, **apps: Any) -> dict[str, Any]:
    """Return the manifest of a pod with an init container, two sidecars (*more* of them), an instance, and other *apps*."""
    resources = {"cpu": cpus, "memory": memory}
    first = {"fetch": {}, "proxy": {**own(1), **SIDECAR}, "logs": SIDECAR, **more}
    spec = {
        "resources": {"limits": resources, "requests": resources},
        "initContainers": [{"name": name, **each} for name, each in first.items()],
        "containers": [{"name": name, **each} for name, each in ({"vm": own(4, "4Gi")} | apps).items()],
    }
    return {"kind": "Pod", "metadata": {"name": "whole"}, "spec": spec}


def test_a_pod_with_sidecars_on_its_own_shared_cpus() -> None:
    plan = planned(EPYC, whole(metrics={}), **MANAGED)
    assert plan.fits
    text = shown(plan)
    [sample] = re.findall(
        r"^```\n(  whole .*?)^```", (ROOT / "examples/plan/README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert set(sample.splitlines()) <= set(text.splitlines())
    assert (
        """
pod         whole (Guaranteed): admitted
  whole     exclusive CPUs 1-4,65-68; 8Gi memory on NUMA node 0
  gets      fetch (init): the pod's CPUs 1-4,65-68; the pod's 8Gi memory on NUMA node 0; affinity {0} preferred
  gets      proxy (sidecar): exclusive CPUs 1; 1Gi memory on NUMA node 0; affinity {0} preferred
  gets      logs (sidecar): the pod's shared CPUs 4,65,68; the pod's 3Gi memory on NUMA node 0; affinity {0} preferred
  gets      vm: exclusive CPUs 2-3,66-67; 4Gi memory on NUMA node 0; affinity {0} preferred
  vCPUs     packed-siblings, 2 threads a core: 0,2→2-3, 1,3→66-67
  gets      metrics: the pod's shared CPUs 4,65,68; the pod's 3Gi memory on NUMA node 0; affinity {0} preferred
"""
        in text
    )
    assert "       0-31  #DBB C... " in text
    assert "      64-95  #CBB C... " in text
    assert text.endswith(
        """
A whole/fetch (init)  1-4,65-68
B whole/vm  2-3,66-67
C whole/logs (sidecar), metrics  4,65,68
D whole/proxy (sidecar)  1"""
    )
    assert node_json(plan)["pods"][0]["pod_cpus"] == "1-4,65-68"
    assert node_json(plan)["pods"][0]["pod_memory"] == [{"resource": "memory", "bytes": 8 << 30, "numa_nodes": [0]}]
    shared = {each["name"]: (each["cpus"], each["pod_cpus"], each["shares_memory"]) for each in containers_of(plan)}
    assert shared == {
        "fetch": ("", "1-4,65-68", True),
        "proxy": ("1", "", False),
        "logs": ("", "4,65,68", True),
        "vm": ("2-3,66-67", "", False),
        "metrics": ("", "4,65,68", True),
    }
    assert plan.pods[0].cpus == CpuSet.parse("1-4,65-68")
    fit = fit_of(4, None, plan)
    assert (fit.container, fit.placement and fit.placement.pins) == ("vm", (2, 66, 3, 67))
    assert fit_of("all", None, plan).vcpus == 4
    assert "cpu.cpus names 4" in fit_of(2, CpuSet.parse("3-4"), plan).error


def containers_of(plan: NodePlan) -> list[ContainerDocument]:
    return node_json(plan)["pods"][0]["containers"]


def test_the_drawing_shows_each_part_of_a_pods_memory_once() -> None:
    picture = picture_svg(planned(EPYC, whole(metrics={}), **MANAGED))
    titles = re.findall(r"<title>(whole[^<]*Gi)</title>", picture)
    assert titles == ["whole/proxy (sidecar): 1.0Gi", "whole/logs (sidecar), metrics: 3.0Gi", "whole/vm: 4.0Gi"]
    assert "<title>CPU 65, core 1: whole/logs (sidecar), metrics</title>" in picture


def test_scope_container_has_sidecars_in_the_nodes_shared_pool() -> None:
    keys = MANAGED | {"topologyManagerScope": "container"}
    plan = planned(EPYC, whole(metrics={}), **keys | {"memoryManagerPolicy": "None"})
    assert {each.container.name: str(each.cpus) for each in plan.pods[0].containers if each.cpus} == {
        "proxy": "1",
        "vm": "2-3,66-67",
    }
    assert not any(each.pod_cpus or each.shares_memory for each in plan.pods[0].containers)
    assert (plan.pods[0].notes, str(plan.pods[0].cpus)) == ((), "1-3,66-67")
    assert "  gets      metrics: the shared pool\n" in shown(plan)
    rejected = planned(EPYC, whole(), **keys)
    assert rejected.pods[0].notes[-1].startswith("container 'logs' has no memory of its own, since it lacks requests")


def test_what_a_restart_of_the_kubelet_does_to_a_pod_as_a_whole() -> None:
    (rejects,) = planned(EPYC, whole(), **MANAGED).pods[0].notes
    assert rejects.startswith(
        "if this kubelet is restarted, it admits the pod again and rejects it (TopologyAffinityError)"
    )
    alone = whole(4, "4Gi")
    alone["spec"]["initContainers"] = []
    (moves,) = planned(EPYC, alone, **MANAGED).pods[0].notes
    assert "gives it other CPUs (3-4,67-68)" in moves


@pytest.mark.parametrize(
    ("manifest", "keys", "note"),
    [
        (whole("8500m", "8Gi"), {}, "its pod-level request (spec.resources) is 8.5 CPUs, which is not a whole number"),
        (whole(5), {}, "pod rejected, sum of exclusive container cpu requests equals pod budget"),
        (whole(8, "5Gi"), {}, "pod rejected, sum of exclusive container memory requests equals pod budget"),
        (whole(vm=own(4, "4Gi", **{GPU: "1"})), {}, "its devices are assigned when its containers start"),
        (whole(more={"logs": {**own(1), **SIDECAR}}), {}, "CPUs 4,68 are the pod's and no container's"),
    ],
)
def test_notes_about_pods_as_a_whole(manifest: dict[str, Any], keys: dict[str, Any], note: str) -> None:
    plan = planned(EPYC, manifest, **MANAGED | keys)
    assert any(each.startswith(note) for each in plan.pods[0].notes), plan.pods[0].notes


def test_other_policies_for_a_rejected_pod_name_exclusive_cpus_alone() -> None:
    wide = whole(80, "8Gi", vm=own(70, "4Gi"))
    plan = planned(EPYC, wide, **MANAGED | {"topologyManagerPolicy": "single-numa-node"})
    (admits,) = [each for each in plan.pods[0].explanation.alternatives if each.outcome is Outcome.ADMITTED]
    assert admits.policy.value == "best-effort"
    assert {name: len(cpus) for name, cpus in admits.cpus.items()} == {"proxy": 1, "vm": 70}


def test_an_instance_whose_container_has_no_cpus_of_its_own_does_not_fit() -> None:
    shared = whole(vm={})
    shared["spec"]["initContainers"] = []
    plan = planned(EPYC, shared, **MANAGED)
    assert plan.fits
    assert str(plan.pods[0].cpus) == "1-4,65-68"
    assert fit_of(4, None, plan).error == f"no container gets exclusive CPUs; {OWN_CONTAINER}"


def test_running_pods_as_a_whole_are_taken_from_the_state_files() -> None:
    first = planned(EPYC, whole(metrics={}), **MANAGED).after
    assert first.kubelet.memory_manager
    files = States(first.cpus, first.memory)
    plan = planned(EPYC, pod("new", 4), states=files, **MANAGED)
    assert plan.fits
    assert plan.notes == ()
    assert str(plan.pods[0].cpus) == "5-6,69-70"
    assert total_requests(plan.before.active.values()) == {"cpu": 8000, "memory": 8 << 30, "ephemeral-storage": 0}
    assert [(owner.sign, owner.name, str(owner.cpus)) for owner in owners_of(plan)] == [
        ("A", "new", "5-6,69-70"),
        ("a", "whole/fetch", "1-4,65-68"),
        ("b", "whole/vm", "2-3,66-67"),
        ("c", "whole/logs, metrics", "4,65,68"),
        ("d", "whole/proxy", "1"),
    ]
    ended = planned(EPYC, pod("new", 4), states=files, running=[], **MANAGED)
    assert str(ended.pods[0].cpus) == "1-2,65-66"
    off = planned(EPYC, pod("new", 4), states=files, **MANAGED | {"featureGates": {}})
    assert "the kubelet does not start with this file" in off.notes[0]


def test_a_pod_that_was_rejected_after_its_cpus_gives_them_back() -> None:
    full = planned(EPYC, pod("one", 100), **STATIC).after
    assert full.kubelet.memory_manager
    files = States(cpu=full.cpus, memory=full.kubelet.memory_manager.without(full.memory, "one"))
    plan = planned(EPYC, pod("new", 100), states=files, **STATIC)
    assert [each.explanation.admission.admitted for each in plan.pods] == [True]
    assert [note.partition(":")[0] for note in plan.notes] == [
        "one is in cpu_manager_state and without memory in memory_manager_state"
    ]
    assert [owner.name for owner in owners_of(plan)] == ["new"]


def test_the_real_kubelets_files_show_which_pods_are_active(
    vectors: Callable[[str], Iterator[tuple[dict[str, Any], dict[str, Any]]]],
) -> None:
    seen = Counter[str]()
    for case, result in vectors("sim"):
        active = dict[str, dict[str, Any]]()
        for step, answer in zip(case["steps"], result["steps"], strict=True):
            if step["op"] == "admit" and answer["admit"]:
                active[step["pod"]] = step
            elif step["op"] == "remove_pod":
                active.pop(step["pod"], None)
            files = {name: text.encode() for name, text in answer.get("files", {}).items()}
            if len(files) == 2:
                states = States(
                    parse_cpu_state(files["cpu_manager_state"]), parse_memory_state(files["memory_manager_state"])
                )
                stale_cpus, stale_memory = stale_pods(states)
                assert not stale_cpus & active.keys()
                seen["rejected"] += len(stale_cpus)
                seen["ended"] += len(stale_memory - active.keys())
                for uid in stale_memory & active.keys():
                    assert not any(each["requests"]["cpu"].isdigit() for each in active[uid]["containers"])
                    seen["active without exclusive CPUs"] += 1
    assert all(seen[each] for each in ("rejected", "ended", "active without exclusive CPUs"))


@pytest.mark.parametrize(
    ("cpus", "shown_before", "note"),
    [
        (
            b'{"policyName":"static","defaultCpuSet":"0,3-7","entries":{"u":{"a":"1"}},"podEntries":{"u":{"cpuSet":"1-2"}}}',
            "u/a has 1; u has 1-2",
            "u is in cpu_manager_state with CPUs of the pod as a whole, which only",
        ),
        (
            b'{"policyName":"static","defaultCpuSet":"0,3-7","entries":{"5baab67f1daf":"1-2"}}',
            "unknown pods have 1-2",
            "cpu_manager_state (version 1) does not say whose pod's the CPUs 1-2 are",
        ),
    ],
)
def test_cpus_of_whole_pods_and_of_unknown_pods_are_taken(cpus: bytes, shown_before: str, note: str) -> None:
    states = States(cpu=parse_cpu_state(cpus))
    plan = planned(host("vm-8"), pod("new", 5), pod("more", 1), states=states)
    assert [each.explanation.admission.admitted for each in plan.pods] == [True, False]
    assert str(plan.pods[0].cpus) == "3-7"
    assert [each[: len(note)] for each in plan.notes] == [note]
    assert f" {shown_before}\n" in shown(plan)
