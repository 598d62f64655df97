"""The command line of ``plan --node``, as an operator types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.__main__ import main
from runner.facts.hardware import Hardware
from runner.kubelet.pod import Container, Pod
from runner.kubelet.state import MemoryState
from runner.node_plan.memory_manager import MemoryManager
from runner.node_plan.topology_manager import Hint

pytestmark = pytest.mark.kubelet_model

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "runner")
KUBELET = "examples/kubernetes/kubelet-configuration.yaml"
NODE = ("--node", KUBELET, "--host", "examples/plan/dual-epyc.json")
POD = ("--pod", "examples/plan/pod.yaml")
CPU_STATE = {"policyName": "static", "defaultCpuSet": "0,21-64,85-127", "entries": {"uid": {"vm": "1-20,65-84"}}}
SPEC = '[cpu]\ncount = {count}\n[[disk]]\npath = "/dev/vm"\n'


def plan(*arguments: str, status: int = 0, text: str | None = None) -> str:
    """Run the command in the root of the checkout, and return its output."""
    ended = subprocess.run(
        [*PROGRAM, "plan", *arguments], check=False, capture_output=True, text=True, cwd=ROOT, input=text
    )
    assert (ended.returncode, ended.stderr if status in {0, 3} else "") == (status, ""), ended.stderr
    return ended.stdout if status in {0, 3} else ended.stderr.removeprefix("instance-runner: ")


def test_the_article_s_host_gives_the_article_s_cpus() -> None:
    document = json.loads(plan(*NODE, *POD, "--json"))
    assert document["host"]["numa_nodes"] == {"0": "0-31,64-95", "1": "32-63,96-127"}
    (pod,) = document["pods"]
    (container,) = pod["containers"]
    assert (pod["outcome"], pod["qos"], container["cpus"]) == ("admitted", "Guaranteed", "1-20,65-84")
    assert {(each["resource"], each["bytes"] >> 30, *each["numa_nodes"]) for each in container["memory"]} == {
        ("memory", 4, 0),
        ("hugepages-2Mi", 80, 0),
    }
    assert container["affinity"] == {"numa_nodes": [0], "preferred": True}
    assert document["after"]["shared_pool"] == "0,21-64,85-127"
    # The article pins vCPU i to the i-th CPU; with whole cores, guest siblings are host siblings instead.
    assert container["placement"]["pins"][:4] == [1, 65, 2, 66]


def test_the_readme_shows_the_printed_report_and_the_example_the_drawing(tmp_path: Path) -> None:
    readme = (ROOT / "examples/plan/README.md").read_text().replace("\\\n    ", "")
    (shown,) = re.findall(r"```console\n\$ instance-runner plan (--node .*)\n((?:.*\n)*?)```", readme)
    svg = tmp_path / "node.svg"
    assert plan(*shown[0].split(), "--svg", str(svg)) == shown[1]
    assert svg.read_text() == (ROOT / "examples/plan/node.svg").read_text()


def test_the_same_files_give_the_same_report() -> None:
    arguments = (*NODE, *POD, "--what-if", "cpuManagerPolicyOptions.distribute-cpus-across-numa=true", "--json")
    assert plan(*arguments) == plan(*arguments)


def test_a_rejected_pod_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "cpu_manager_state").write_text(json.dumps(CPU_STATE))
    state = ("--state", str(tmp_path))
    output = plan(*NODE, *state, *POD, *POD, "--what-if", "topologyManagerPolicy=restricted", status=0)
    assert "uid/vm has 1-20,65-84" in output
    assert "no memory_manager_state was given" in output
    rejected = plan(*NODE, *state, *POD, *POD, "--json", "--what-if", "topologyManagerPolicy=restricted")
    (other,) = json.loads(rejected)["what_if"]
    assert [(pod["name"], pod["outcome"], pod["reason"]) for pod in other["pods"]] == [
        ("instance", "admitted", ""),
        ("instance#2", "rejected", "TopologyAffinityError"),
    ]
    strict = tmp_path / "kubelet.yaml"
    strict.write_text((ROOT / KUBELET).read_text().replace("best-effort", "restricted"))
    node = ("--node", str(strict), *NODE[2:])
    output = " ".join(plan(*node, *state, *POD, *POD, status=3).split())
    assert "rejected: TopologyAffinityError: Resources cannot be allocated with Topology locality" in output
    assert "cpu: 40 CPUs wanted; NUMA node 1 has most, 24 CPUs free, and 16 CPUs more would have to be" in output


def test_state_files_are_distinguished_by_their_content(tmp_path: Path) -> None:
    hardware = Hardware.from_json((ROOT / NODE[3]).read_text())
    manager = MemoryManager.configured(hardware, {0: {"memory": 2 << 30}, 1: {"memory": 2 << 30}})
    pod = Pod("uid", (Container("vm", memory={"hugepages-2Mi": 80 << 30}),))
    booked = manager.allocate(manager.initial, pod, pod.containers[0], Hint(0b10, preferred=True))
    (tmp_path / "cpus").write_text(json.dumps(CPU_STATE))
    (tmp_path / "memory").write_text(json.dumps(memory_state(booked)))
    cpus, memory = ("--state", str(tmp_path / "cpus")), ("--state", str(tmp_path / "memory"))
    # CPUs are taken on NUMA node 0, hugepages on 1: no NUMA node has enough of both.
    asked = json.loads(plan(*NODE, *memory, *cpus, *POD, "--json"))["pods"][0]["merges"][0]["asked"]
    assert [each["says"] for each in asked if each["resource"] in {"cpu", "hugepages-2Mi"}] == [
        "cpu: prefers {1}",
        "hugepages-2Mi: prefers {0}",
    ]
    output = json.loads(plan(*NODE, *memory, *POD, "--json"))
    assert output["pods"][0]["containers"][0]["cpus"] == "1-20,65-84"
    assert output["before"]["memory_free"]["1"]["hugepages-2Mi"] == 28 << 30
    assert not any("memory_manager_state" in note for note in output["notes"])


def test_memory_of_an_ended_pod_is_free_for_the_next_one(tmp_path: Path) -> None:
    """The files are as a kubelet leaves them when a pod has ended and none has come since."""
    hardware = Hardware.from_json((ROOT / NODE[3]).read_text())
    manager = MemoryManager.configured(hardware, {0: {"memory": 2 << 30}, 1: {"memory": 2 << 30}})
    memory = manager.initial
    for numa_node, uid in enumerate(("ended", "ended-too")):
        pod = Pod(uid, (Container("vm", memory={"hugepages-2Mi": 80 << 30}),))
        memory = manager.allocate(memory, pod, pod.containers[0], Hint(1 << numa_node, preferred=True))
    (tmp_path / "memory_manager_state").write_text(json.dumps(memory_state(memory)))
    outcome = json.loads(plan(*NODE, "--state", str(tmp_path), *POD, "--json", status=3))["pods"][0]["outcome"]
    assert outcome == "rejected"  # one file alone does not show that they have ended
    (tmp_path / "cpu_manager_state").write_text('{"policyName":"static","defaultCpuSet":"0-127","checksum":0}')
    found = json.loads(plan(*NODE, "--state", str(tmp_path), *POD, "--json", status=3))
    assert (found["pods"][0]["outcome"], found["pods"][0]["containers"][0]["cpus"]) == ("admitted", "1-20,65-84")
    assert any(note.startswith("ended, ended-too are in memory_manager_state") for note in found["notes"])
    # Both files do not show it either: they may run without exclusive CPUs, and then the answer is another one.
    assert found["if_live"]["pods"][0]["outcome"] == "rejected"
    (tmp_path / "running.json").write_text(json.dumps({"kind": "List", "items": [daemon(cpu="20m")]}))
    running = ("--running", str(tmp_path / "running.json"))
    found = json.loads(plan(*NODE, "--state", str(tmp_path), *running, *POD, "--json"))
    assert (found["pods"][0]["outcome"], found["unclear_pods"], found["if_live"]) == ("admitted", [], None)


def daemon(node_name: str = "n1", **requests: str) -> dict[str, object]:
    """Return a pod as ``kubectl get pods -o yaml`` lists it."""
    container = {"name": "main", "resources": {"requests": requests}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "daemon-x7k2p", "uid": f"uid-{node_name}"},
        "spec": {"nodeName": node_name, "containers": [container]},
        "status": {"phase": "Running"},
    }


def test_requests_of_running_pods_count(tmp_path: Path) -> None:
    ended = daemon(cpu="126") | {"metadata": {"name": "job", "uid": "job"}, "status": {"phase": "Succeeded"}}
    big = json.loads(json.dumps(daemon(cpu="20m")))
    (tmp_path / "running.json").write_text(json.dumps({"kind": "List", "items": [big, ended]}))
    pod = tmp_path / "pod.yaml"
    pod.write_text((ROOT / POD[1]).read_text().replace('cpu: "40"', 'cpu: "126"'))
    running = ("--running", str(tmp_path / "running.json"))
    assert "exclusive CPUs 1-63,65-127" in plan(*NODE, "--pod", str(pod))
    output = " ".join(plan(*NODE, *running, "--pod", str(pod), status=3).split())
    assert "requested 0.02 CPUs by 1 pod" in output
    assert (
        "rejected: OutOfcpu: Node didn't have enough resource: cpu, requested: 126000, used: 20, capacity: 126000"
        in output
    )
    big["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1"}
    (tmp_path / "running.json").write_text(json.dumps({"kind": "List", "items": [big]}))
    assert "running pods hold 1 of 'nvidia.com/gpu', of unknown NUMA nodes" in plan(*NODE, *running, *POD)
    (tmp_path / "running.json").write_text(json.dumps({"kind": "List", "items": [big, daemon("n2")]}))
    refused = plan(*NODE, *running, *POD, status=2)
    assert refused.startswith(
        "cannot use --running: its pods are on several nodes (n1, n2); list those of one: kubectl"
    )


def test_a_gate_of_another_configuration_decides_about_pod_level_resources(tmp_path: Path) -> None:
    pod = tmp_path / "pod.yaml"
    resources = "  resources: {limits: {cpu: 40, memory: 4Gi, hugepages-2Mi: 80Gi}}\n  containers:\n    - name: vm\n"
    pod.write_text("kind: Pod\nmetadata: {name: instance}\nspec:\n" + resources)
    off = ("--what-if", "featureGates.PodLevelResources=false")
    document = json.loads(plan(*NODE, "--pod", str(pod), *off, "--json"))
    (now,), (then,) = document["pods"], document["what_if"][0]["pods"]
    assert (now["qos"], now["outcome"], now["containers"][0]["cpus"]) == ("Guaranteed", "admitted", "")
    assert (then["qos"], then["reason"]) == ("BestEffort", "PodLevelResourcesNotSupported")


def memory_state(state: MemoryState) -> dict[str, object]:
    """Write *state* as the kubelet does."""
    return {
        "policyName": "Static",
        "machineState": {
            str(numa_node): {
                "numberOfAssignments": memory.assignments,
                "cells": list(memory.cells),
                "memoryMap": {
                    resource: {
                        "total": table.total,
                        "systemReserved": table.system_reserved,
                        "allocatable": table.allocatable,
                        "reserved": table.reserved,
                        "free": table.free,
                    }
                    for resource, table in memory.tables.items()
                },
            }
            for numa_node, memory in state.numa_nodes.items()
        },
        "entries": {
            uid: {
                name: [
                    {"numaAffinity": list(block.numa_nodes), "type": block.resource, "size": block.size}
                    for block in blocks
                ]
                for name, blocks in containers.items()
            }
            for uid, containers in state.assignments.items()
        },
        "checksum": 1,
    }


@pytest.mark.parametrize(("count", "status", "words"), [(40, 0, "40 vCPUs fit in"), (41, 3, "41 vCPUs do not fit in")])
def test_an_instance_s_spec_is_checked_against_the_pod(tmp_path: Path, count: int, status: int, words: str) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.format(count=count))
    assert f"instance    {words} container 'gpu-instance'" in plan(str(spec), *NODE, *POD, status=status)
    assert words in plan("-", *NODE, *POD, status=status, text=SPEC.format(count=count))


def test_the_pod_s_variables_need_not_be_set_to_plan_for_it() -> None:
    text = '[environment]\nallow = ["NAME_OF_POD", "PATH"]\n[instance]\nname = "${NAME_OF_POD}"\n' + SPEC.format(
        count=40
    )
    document = json.loads(plan(*NODE, *POD, "--json", "-", text=text))
    assert document["notes"][-1] == "standard input: NAME_OF_POD are not set here, and taken as 'unset'"
    undeclared = plan(*NODE, *POD, "-", status=30, text=text.replace('"NAME_OF_POD", ', ""))
    assert "${NAME_OF_POD} is not declared" in undeclared
    needed = text.replace("[instance]", '[instance]\nuuid = "${NAME_OF_POD}"')
    assert "it needs the values of NAME_OF_POD; set these variables" in plan(*NODE, *POD, "-", status=2, text=needed)


MANIFEST = (ROOT / "examples/plan/pod.yaml").read_text()


def notes_for(*arguments: str, text: str | None = None) -> list[str]:
    notes: list[str] = json.loads(plan(*NODE, "--json", *arguments, text=text))["notes"]
    return [note for note in notes if not note.startswith("reservedSystemCPUs")]


def test_manifests_come_from_standard_input() -> None:
    assert plan(*NODE, "--pod", "-", text=MANIFEST) == plan(*NODE, *POD)


def test_the_manifests_of_a_directory_are_planned_by_name(tmp_path: Path) -> None:
    for name, pod in (("b.yaml", "second"), ("a.yml", "first"), ("spec.toml", "")):
        (tmp_path / name).write_text(MANIFEST.replace("name: instance\n", f"name: {pod}\n"))
    pods = json.loads(plan(*NODE, "--json", "--pod", str(tmp_path), status=0))["pods"]
    assert [pod["name"] for pod in pods] == ["first", "second"]
    assert notes_for("--pod", str(tmp_path)) == []
    (tmp_path / "kustomization.yaml").write_text("resources: [a.yml]\n")
    [note] = notes_for("--pod", str(tmp_path))
    assert note == (
        f"{tmp_path}: its kustomization was not applied; that is done by"
        f" `kubectl kustomize {tmp_path} | instance-runner plan --node … --pod -`"
    )


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        (
            "image: ",
            "imagePullPolicy: Always #",
            "spec.containers[0] has no image, so that the API server refuses this pod; a patch",
        ),
        (
            "limits:",
            "limit:",
            "spec.containers[0].resources.limit is an unknown key, which is ignored here and refused by kubectl; did you mean 'limits'?",
        ),
        (
            "resources:",
            "resource:",
            "spec.containers[0].resource is an unknown key, which is ignored here and refused by kubectl; did",
        ),
        (
            'cpu: "40"',
            'cpus: "40"',
            "spec.containers[0].resources.limits.cpus is no resource, and the API server refuses it; did you",
        ),
    ],
)
def test_a_mistake_that_would_change_the_plan_is_a_note(old: str, new: str, note: str) -> None:
    assert old in MANIFEST
    listed = "apiVersion: v1\nkind: List\nitems:\n- " + MANIFEST.replace(old, new).replace("\n", "\n  ")
    for text in (MANIFEST.replace(old, new), listed):
        [found] = notes_for("--pod", "-", text=text)
        assert found.removeprefix("standard input: ").removeprefix("items[0].").startswith(note)


def test_a_recorded_host_is_this_host(tmp_path: Path) -> None:
    record, kubelet = tmp_path / "host.json", tmp_path / "kubelet.yaml"
    kubelet.write_text(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\ncpuManagerPolicy: static\n"
        "systemReserved: {cpu: '1'}\n"
    )
    output = plan("--record", str(record))
    assert output.startswith(f"{record}: ")
    assert plan("--record", "-") == record.read_text()
    # Hugepages may be taken between two readings; a plan does not show how many are free.
    assert plan("--node", str(kubelet), "--host", str(record)) == plan("--node", str(kubelet))


def test_no_file_of_a_node_is_read_without_an_end() -> None:
    for option, words in (
        ("--host", "cannot read the host record '/dev/zero': it has more than 3145728 bytes"),
        ("--pod", "/dev/zero: cannot parse the document: 3145729 bytes are more than 3145728"),
    ):
        command = (*PROGRAM, "plan", "--node", KUBELET, option, "/dev/zero")
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert words in done.stderr


def test_a_host_is_read_from_wherever_its_files_are(tmp_path: Path) -> None:
    output = plan("--record", "-", "--sys", str(tmp_path), status=4)
    assert output == f"cannot read '{tmp_path}/sys/devices/system/cpu/online': No such file or directory\n"


def test_a_terminal_has_colours_unless_they_are_not_wanted() -> None:
    coloured, plain = (on_a_terminal({"NO_COLOR": value} if value else {}) for value in ("", "1"))
    assert "\x1b[1;32mA" in coloured
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def on_a_terminal(environment: dict[str, str]) -> str:
    kept = {key: value for key, value in os.environ.items() if key not in {"NO_COLOR", "COLUMNS"}}
    ours, theirs = os.openpty()
    with subprocess.Popen([*PROGRAM, "plan", *NODE, *POD], stdout=theirs, cwd=ROOT, env=kept | environment):
        os.close(theirs)
        output = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # EIO: the last descriptor of the other side is closed
                break
            output += part
    os.close(ours)
    return output.decode()


TWICE = "cannot read standard input twice: name a file for the SPEC, for --pod or for --running"


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (
            (),
            2,
            "cannot read the spec '/etc/instance/spec.toml': No such file or directory; name a SPEC, or mount one there",
        ),
        (("a", "b"), 2, "cannot plan several instances at once: name one SPEC, or check them by --document-only"),
        (("--document-only",), 2, "cannot check nothing: name SPECs with --document-only"),
        (
            ("--document-only", "a", "--nccl"),
            2,
            "cannot use other options with --document-only: it takes SPECs and --json",
        ),
        ((*NODE, "-", "--pod", "-"), 2, TWICE),
        ((*NODE, "--pod", "-", "--running", "-"), 2, TWICE),
        (("--document-only", "-", "-"), 2, "cannot read standard input twice: name a file for a SPEC"),
        (POD, 2, "cannot use --pod alone: name the kubelet's configuration with --node"),
        (
            ("spec.toml", "--what-if", "a=b", "--svg", "x", "--kubelet", "1.36", "--sys", "/x"),
            2,
            "cannot use --what-if, --svg, --kubelet, --sys alone: name the kubelet's configuration with --node",
        ),
        (
            ("--record", "x", "--json", "--sys", "/x"),
            2,
            "cannot plan while recording: --record takes nothing but --sys beside it",
        ),
        (
            ("spec.toml", "--json", "--show-argv"),
            2,
            "cannot give more than one of --json, --show-argv and --nccl; leave the others out",
        ),
        ((*NODE, "--pod", "/none"), 2, "cannot read the manifest '/none': No such file or directory"),
        ((*NODE, "--pod", KUBELET), 2, f"cannot plan: no pod is in '{KUBELET}'"),
        ((*NODE, "--state", "/none"), 2, "cannot read the state file '/none': No such file or directory"),
        (
            (*NODE, "--state", "examples"),
            2,
            "cannot use 'examples': it holds neither cpu_manager_state nor memory_manager_state",
        ),
        ((*NODE, "--svg", "/none/x"), 2, "cannot write '/none/x': No such file or directory"),
        (
            (*NODE, "--device", "gpu"),
            2,
            "cannot use --device 'gpu': it takes RESOURCE=COUNT@NUMA_NODE, such as nvidia.com/gpu=4@0",
        ),
        ((*NODE, "--device", "a/b=1@7"), 2, "cannot use --device 'a/b=1@7': the host has no NUMA node 7"),
        ((*NODE, "--kubelet", "1"), 2, "cannot use --kubelet '1': it takes a version, from 1.33 to 1.37"),
        (
            (*NODE, "--kubelet", "v1.32.4"),
            30,
            "cannot predict kubelet 1.32: decisions are known from 1.33 to 1.37; give the version of the kubelet on that node",
        ),
        (
            (*NODE, "--what-if", "x"),
            2,
            "cannot use --what-if 'x': it takes KEY=VALUE, such as topologyManagerPolicy=restricted",
        ),
        (
            ("--node", "examples/plan/pod.yaml"),
            2,
            (
                "cannot use 'examples/plan/pod.yaml': it must hold one KubeletConfiguration, found 'Pod'; the one of a running"
                " node is printed by: kubectl get --raw /api/v1/nodes/NODE/proxy/configz"
            ),
        ),
        (
            (*NODE[:2], "--host", KUBELET),
            30,
            f"{KUBELET}: is not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            (*NODE[:2], "--host", "tests/data/hosts/vm-8.json"),
            30,
            "cannot plan: this kubelet would not start: reserved-cpus: 0,64 is not a subset of online-cpus: 0-7",
        ),
    ],
)
def test_wrong_command_lines_are_refused(
    arguments: tuple[str, ...],
    status: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", *arguments]) == status
    printed = capsys.readouterr()
    assert printed.err == f"instance-runner: {sentence}\n"
    assert (printed.out == "") is ("--json" not in arguments)
