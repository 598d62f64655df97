"""The manifests on a real machine of a real cluster, by kubectl as a user types it; the names of images are the only change."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.cluster.instances import (
    CONTROLLER,
    GUEST_SECONDS,
    IN_ORDER,
    POD_SECONDS,
    RUNNER,
    SOON,
    STATE,
    Deployed,
    digest_of,
    exclusive_cpus,
    inspected,
    instances_left,
    planned,
    program_of,
)
from tests.cluster.joined_node import JoinedNode
from tests.cluster.kubectl import Kubectl, Object, until
from tests.cluster.manifests import Patch, of_kind, patched
from tests.cluster.node_side import HUGE_PAGES, KUBELET_DIRECTORY, NEXT, RESERVED

pytestmark = pytest.mark.timeout(1800)
MEMORY_STATE = KUBELET_DIRECTORY / "memory_manager_state"


def test_controller_and_device_plugin_become_ready(kubectl: Kubectl, node: JoinedNode, cluster: Path) -> None:
    """``rollout status`` has waited for both; each node hands out as many instances' devices as it may have pods."""
    assert cluster.is_dir()
    allocatable = kubectl.json("get", "node", node.name)["status"]["allocatable"]
    assert (allocatable["squat.ai/vm"], allocatable["cpu"]) == ("110", "10")
    columns = "custom-columns=NAME:.metadata.name,VM:.status.allocatable.squat\\.ai/vm"
    assert kubectl("get", "nodes", "-o", columns).splitlines()[1].split() == [node.name, "110"]
    log = kubectl("logs", "-n", "instance-runner", f"daemonset/{CONTROLLER}")
    assert "ready socket=" in log
    assert kubectl.items("events", "-A", "--field-selector=type=Warning,involvedObject.kind=DaemonSet") == []
    pool = CpuSet.parse(json.loads(node.read(str(STATE)))["defaultCpuSet"])
    assert len(pool) > 1
    assert node("ls", "-d", "/sys/fs/cgroup/stelia").strip()


def test_an_instance_as_it_stands(kubectl: Kubectl, node: JoinedNode, cluster: Path, start: Any) -> None:
    """From ``apply -k`` to ``delete -k``: predicted, placed, looked at by every command of the README, and ended in order."""
    objects = of_kind("Pod", kubectl("kustomize", str(cluster / "instance")))
    [expected] = planned(node, kubectl, objects)
    assert expected["outcome"] == "admitted"
    it = start("instance", "instance")
    it.up()
    with attached(it) as seen:
        it.logged("guest: done after", GUEST_SECONDS)
        until(lambda: "guest: done after" in seen.read_text(), "the same words where kubectl is attached", SOON)
    assert it.cpus == CpuSet.parse(expected["containers"][0]["cpus"])
    assert not it.cpus & CpuSet.parse(RESERVED)
    it.holds()
    assert "guarantee enforced" in it.log()
    assert it.pod["status"]["qosClass"] == "Guaranteed"
    assert json.loads(it.execute(RUNNER, "ctl", "--json", "status"))["accelerator"] == "kvm"
    assert "every thread is in its place" in it.execute(RUNNER, "ctl", "status")
    assert "guest: done after" in it.execute(RUNNER, "logs")
    typed_at_the_console(it)
    terminated = it.end()
    assert (terminated["exitCode"], terminated["reason"]) == (0, "Completed")
    assert json.loads(terminated["message"])["outcome"] == "stopped"
    until(lambda: not exclusive_cpus(node), "the kubelet to have its CPUs back", SOON)


@contextmanager
def attached(it: Deployed) -> Iterator[Path]:
    """Hold ``kubectl attach``, and yield the file that has what it prints."""
    file = it.node.results / "attached"
    argv = it.kubectl.argv("attach", "-n", "instances", it.name)
    with file.open("wb") as output, subprocess.Popen(argv, stdout=output, stdin=subprocess.DEVNULL) as process:
        try:
            yield file
        finally:
            process.terminate()


def typed_at_the_console(it: Deployed) -> None:
    """Type at the guest's console on a terminal, whose echo is the guest's, and leave it by the detach key."""
    argv = it.kubectl.argv("exec", "-it", "-n", "instances")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*argv, it.name, "--", RUNNER, "console"], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = bytearray()

        def comes(words: bytes) -> None:
            end = time.monotonic() + SOON
            while words not in seen:
                assert time.monotonic() < end, bytes(seen)
                if select.select([ours], [], [], 1)[0]:
                    seen.extend(os.read(ours, 4096))

        comes(b"detaches")
        os.write(ours, b"a word of the user's\r")
        comes(b"a word of the user's")
        os.write(ours, b"\x1d")
        assert process.wait(SOON) == 0, bytes(seen)
    os.close(ours)


def test_the_node_is_worked_on_under_a_running_instance(kubectl: Kubectl, node: JoinedNode, start: Any) -> None:
    """The controller is rolled to another image and back, its pod deleted, kubelet and containerd are restarted."""
    it = start("instance", "instance")
    it.up()
    cpus = it.cpus
    daemon = ("-n", "instance-runner", f"daemonset/{CONTROLLER}")

    def ready() -> None:
        kubectl("rollout", "status", *daemon, f"--timeout={POD_SECONDS}s")
        it.holds()
        assert it.cpus == cpus

    kubectl("set", "image", *daemon, f"controller={CONTROLLER}:{NEXT}")
    ready()
    kubectl("rollout", "undo", *daemon)
    ready()
    kubectl("delete", "pod", "-n", "instance-runner", f"-l=app.kubernetes.io/name={CONTROLLER}")
    ready()
    for unit in ("kubelet.service", "instance-runner-containerd.service"):
        node.restart_unit(unit)
        until(lambda: node.ready, "the node to be Ready", POD_SECONDS)
        time.sleep(10)
        until(lambda: node.ready, "the node to be Ready", POD_SECONDS)
        ready()
    assert it.end()["exitCode"] in IN_ORDER


def test_a_new_runner_under_its_guest(kubectl: Kubectl, node: JoinedNode, start: Any, tmp_path: Path) -> None:
    """By the commands of the documents; the program is that of the pod's image."""
    it = start("instance", "instance")
    it.up()
    program_of(it, tmp_path)
    program, digest = subprocess.check_output(["tar", "-C", tmp_path, "-c", "."]), digest_of(tmp_path)
    place = "/run/instance-runner/0.2.0"
    argv = kubectl.argv("exec", "-i", "-n", "instances", it.name, "--")
    argv += ["sh", "-c", 'mkdir -p "$0" && tar -x --no-same-owner -C "$0"', place]
    subprocess.run(argv, check=True, input=program, stdout=subprocess.DEVNULL, timeout=POD_SECONDS)
    refused = kubectl.run("exec", "-n", "instances", it.name, "--", RUNNER, "ctl", "qemu-update", "--check")
    assert refused.returncode == 30
    assert "the machine was not started for it" in refused.stdout + refused.stderr
    shown = it.execute(RUNNER, "ctl", "upgrade", "--from", place, "--digest", f"sha256:{digest}")
    assert re.fullmatch(rf"generation +1\nprogram +sha256:{digest}\n", shown)
    it.logged("the runner is renewed generation=1", SOON)
    it.holds()
    assert json.loads(it.execute(RUNNER, "ctl", "--json", "status"))["runner"]["generation"] == 1
    of_node = ("-l", "app.kubernetes.io/name=instance", "--field-selector", f"spec.nodeName={node.name}")
    assert kubectl("get", "pods", "-n", "instances", *of_node, "-o", "name").split() == [f"pod/{it.name}"]
    assert it.pod["status"]["phase"] == "Running", "what was copied into it is not too much for its volume"
    assert it.end()["exitCode"] in IN_ORDER


def test_a_kubelet_that_cannot_resize_it_changes_nothing(kubectl: Kubectl, start: Any) -> None:
    """Exclusive CPUs cannot be resized by 1.36 without its gate, as the README says, and the pod's status says so."""
    it = start("instance", "instance")
    it.up()
    cpus = it.cpus
    resources = {"requests": {"cpu": "5"}, "limits": {"cpu": "5"}}
    patch = {"spec": {"containers": [{"name": "instance", "resources": resources}]}}
    kubectl("patch", "pod", "-n", "instances", it.name, "--subresource", "resize", "--patch", json.dumps(patch))

    def condition() -> Object:
        conditions = it.pod["status"]["conditions"]
        return next((each for each in conditions if each["type"] == "PodResizePending"), {})

    found = until(condition, "the kubelet to refuse it", POD_SECONDS)
    assert found["reason"] == "Infeasible"
    assert 'Resize is infeasible for Guaranteed Pods alongside CPU Manager policy "static"' in found["message"]
    assert it.cpus == cpus
    assert re.search("^unused CPUs +none$", it.execute(RUNNER, "ctl", "cpus"), re.MULTILINE)
    it.holds()
    kinds, label = "pod,job,pdb,configmap,secret", ("-n", "instances", "-l", "app.kubernetes.io/instance=instance")
    kubectl("delete", kinds, *label, "--timeout=120s")
    assert kubectl.items(kinds, *label) == []


def test_a_drain_waits_for_the_instance(kubectl: Kubectl, node: JoinedNode, start: Any) -> None:
    it = start("instance", "instance")
    it.up()
    until(
        lambda: kubectl.json("get", "pdb", "-n", "instances", "instance")["status"]["currentHealthy"] == 1,
        "the budget to count it",
        SOON,
    )
    drain = ("drain", node.name, "--ignore-daemonsets", "--delete-emptydir-data", "--force")
    try:
        held = kubectl.run(*drain, "--timeout=12s")
        assert held.returncode != 0
        assert "Cannot evict pod as it would violate the pod's disruption budget" in held.stderr
        it.holds()
        argv = kubectl.argv(*drain, "--timeout=240s")
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as waiting:
            time.sleep(6)
            assert waiting.poll() is None
            assert it.end()["exitCode"] in IN_ORDER
            output, _ = waiting.communicate(timeout=POD_SECONDS)
            assert waiting.returncode == 0, output
    finally:
        kubectl("uncordon", node.name)


def test_the_kubelets_probes_reach_the_runner(start: Any) -> None:
    it = start("overlays/probes", "instance-probes")
    until(
        lambda: any(each["type"] == "Ready" and each["status"] == "True" for each in it.pod["status"]["conditions"]),
        "the pod to be Ready",
        POD_SECONDS + GUEST_SECONDS,
    )
    events = [json.loads(line) for line in it.log().splitlines()]
    assert {"threads_placed", "guest_runs"} & {each.get("event") for each in events}
    assert it.end()["exitCode"] in IN_ORDER


def test_an_instance_in_a_user_namespace(node: JoinedNode, cluster: Path, start: Any) -> None:
    """As the README says: root of the pod is no user of the node, and the devices are for everyone."""
    devices = ("/dev/kvm", "/dev/net/tun", "/dev/vhost-net")
    modes = {device: node("stat", "-c", "%a", device).strip() for device in devices}
    node("chmod", "666", *devices)
    try:
        it = start(patched(cluster, "instance", "instance", {"hostUsers": False}), "instance")
        it.up()
        it.holds()
        [inside, outside, count] = map(int, it.execute("cat", "/proc/self/uid_map").split())
        assert (inside, outside > 0, count) == (0, True, 65536)
        assert "guarantee enforced" in it.log()
        assert json.loads(it.execute(RUNNER, "ctl", "--json", "status"))["accelerator"] == "kvm"
        assert it.end()["exitCode"] in IN_ORDER
    finally:
        for device, mode in modes.items():
            node("chmod", mode, device)


def test_an_instance_without_controller_and_device_plugin(start: Any) -> None:
    it = start("overlays/privileged", "instance-privileged")
    it.up()
    assert len(it.cpus) == 6
    assert it.end()["exitCode"] in IN_ORDER


def test_a_job_completes_when_its_guest_shuts_itself_down(kubectl: Kubectl, cluster: Path) -> None:
    kubectl("apply", "-k", str(cluster / "job"))
    try:
        kubectl(
            "wait",
            "-n",
            "instances",
            "--for=condition=complete",
            "job/batch",
            f"--timeout={POD_SECONDS + GUEST_SECONDS}s",
            timeout=900,
        )
        [pod] = kubectl.items("pods", "-n", "instances", "-l=job-name=batch")
        [status] = pod["status"]["containerStatuses"]
        assert status["state"]["terminated"]["exitCode"] == 0
    finally:
        kubectl("delete", "-k", str(cluster / "job"), "--timeout=120s")


def test_a_job_fails_when_its_guest_is_lost(kubectl: Kubectl, node: JoinedNode, cluster: Path) -> None:
    """Its QEMU is killed; ``backoffLimit: 0`` makes that the end of the job."""
    kubectl("apply", "-k", str(cluster / "job"))
    try:
        [pod] = until(lambda: kubectl.items("pods", "-n", "instances", "-l=job-name=batch"), "the job's pod", SOON)
        name = pod["metadata"]["name"]
        it = Deployed(kubectl, node, cluster / "job", name)
        until(lambda: "running" in it.status.get("state", {}), f"{name} to run", POD_SECONDS)
        it.logged("the guest runs", POD_SECONDS)
        node("pkill", "-KILL", "qemu-system")
        kubectl("wait", "-n", "instances", "--for=condition=failed", "job/batch", f"--timeout={POD_SECONDS}s")
        terminated = it.status["state"]["terminated"]
        assert (terminated["exitCode"], json.loads(terminated["message"])["outcome"]) == (20, "machine_died")
    finally:
        kubectl("delete", "-k", str(cluster / "job"), "--timeout=120s")


def test_what_is_too_much_for_the_pod_is_killed_and_the_guest_runs_on(start: Any) -> None:
    """A process of ``kubectl exec`` takes more memory than the pod has left.

    The kubelet has the kernel kill all of the container's cgroup together (``memory.oom.group``), so the anchors too: nothing can
    go back at the end, which is dirty then.
    """
    it = start("instance", "instance")
    it.up()
    eater = "x = []\nwhile True: x.append(bytearray(8 << 20))"
    done = it.kubectl.run("exec", "-n", "instances", it.name, "--", "python3", "-c", eater)
    assert done.returncode == 137, done.stderr
    it.holds()
    assert it.end()["exitCode"] in {*IN_ORDER, 40}


def test_a_kubelet_that_evicts_it_leaves_nothing(kubectl: Kubectl, node: JoinedNode, start: Any) -> None:
    """Its emptyDir grows over its limit: the kubelet asks no budget."""
    it = start("instance", "instance")
    it.up()
    it.execute("dd", "if=/dev/zero", "of=/run/instance-runner/big", "bs=1M", "count=80")
    until(lambda: it.pod["status"].get("reason") == "Evicted", "the eviction", POD_SECONDS)
    assert "exceeds the limit" in it.pod["status"]["message"]
    until(lambda: not instances_left(node), "its cgroup to be gone", POD_SECONDS)
    assert it.pod["status"]["phase"] == "Failed"
    assert "Evicted" in dict(kubectl.events("instance"))


def test_an_instance_waits_for_a_controller_that_is_missing(kubectl: Kubectl, start: Any) -> None:
    """It ends with its own status, and the kubelet starts it again until the controller is back."""
    daemon = ("-n", "instance-runner", f"daemonset/{CONTROLLER}")

    def select(selector: Object) -> None:
        patch = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
        kubectl("patch", *daemon, f"--patch={json.dumps(patch)}")

    select({"nowhere": "yes"})
    try:
        until(lambda: not kubectl.items("pods", "-n", "instance-runner"), "no controller", SOON)
        it = start("instance", "instance")
        until(lambda: it.status.get("restartCount", 0) >= 1, "it to give up once", POD_SECONDS)
        last = it.status["lastState"]["terminated"]
        assert last["exitCode"] in {30, 31}, last
        assert "controller" in json.loads(last["message"])["detail"]
    finally:
        select({"nowhere": None})
        kubectl("rollout", "status", *daemon, f"--timeout={POD_SECONDS}s")
    it.up()
    assert it.status["restartCount"] >= 1
    assert it.end()["exitCode"] in IN_ORDER


PAUSE_POD: Object = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"namespace": "instances"},
    "spec": {
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [{"name": "pause", "image": "localhost/pause:1"}],
    },
}


def pause(name: str, cpus: int, memory: str = "16Mi") -> Object:
    """Return a Guaranteed pod that only waits."""
    found: Object = json.loads(json.dumps(PAUSE_POD))
    found["metadata"]["name"] = name
    found["spec"]["containers"][0]["resources"] = {"limits": {"cpu": str(cpus), "memory": memory}}
    return found


def test_ten_pods_that_arrive_at_once_are_all_predicted(kubectl: Kubectl, node: JoinedNode, cluster: Path) -> None:
    """They ask for the same, so that the order in which the kubelet takes them does not change what is given away."""
    assert cluster.is_dir()
    pods = [pause(f"ten-{number}", 1) for number in range(10)]
    expected = [CpuSet.parse(each["containers"][0]["cpus"]) for each in planned(node, kubectl, pods)]
    kubectl.apply(*pods)
    try:
        found = until(lambda: exclusive_cpus(node) if len(exclusive_cpus(node)) == 10 else {}, "ten pods", POD_SECONDS)
        assert sorted(map(str, found.values())) == sorted(map(str, expected))
        until(
            lambda: all(each["status"]["phase"] == "Running" for each in kubectl.items("pods", "-n", "instances")),
            "all to run",
            POD_SECONDS,
        )
    finally:
        kubectl("delete", "pods", "-n", "instances", *(each["metadata"]["name"] for each in pods), "--timeout=120s")


STRICT: Patch = {"topologyManagerPolicy": "single-numa-node", "topologyManagerScope": "pod"}
WHOLE_CORES: Patch = {"cpuManagerPolicyOptions": {"full-pcpus-only": "true"}}
REJECTIONS: dict[str, tuple[Patch, list[Object], Object]] = {
    "TopologyAffinityError": (STRICT, [], pause("too-much", 8)),
    "SMTAlignmentError": (WHOLE_CORES, [], pause("too-much", 3)),
    # more memory than a NUMA node has, where another pod has bound its memory to one of them
    "UnexpectedAdmissionError": ({}, [pause("before", 1)], pause("too-much", 1, "4Gi")),
}
"""Reason → the kubelet's policies, pods that come before, and the pod that is rejected."""


@pytest.mark.parametrize("reason", REJECTIONS)
def test_a_pod_is_rejected_with_the_words_that_plan_has_said(
    reason: str, kubectl: Kubectl, node: JoinedNode, cluster: Path
) -> None:
    policies, before, too_much = REJECTIONS[reason]
    assert cluster.is_dir()
    with reconfigured(node, policies):
        try:
            for pod in before:
                kubectl.apply(pod)
            until(lambda: len(exclusive_cpus(node)) == len(before), "their CPUs", POD_SECONDS)
            [expected] = planned(node, kubectl, [too_much])
            assert (expected["outcome"], expected["reason"]) == ("rejected", reason)
            kubectl.apply(too_much)
            until(lambda: (kubectl.pod("too-much") or {})["status"]["phase"] == "Failed", "its rejection", POD_SECONDS)
            found = kubectl.pod("too-much")
            assert found is not None
            assert found["status"]["reason"] == reason
            assert expected["message"] in found["status"]["message"]
            assert reason in dict(kubectl.events("too-much"))
        finally:
            names = [each["metadata"]["name"] for each in (*before, too_much)]
            kubectl("delete", "pods", "-n", "instances", *names, "--ignore-not-found", "--timeout=120s")


SHARING: Object = {
    "resources": {"requests": {"cpu": "5", "memory": "2400Mi"}, "limits": {"cpu": "5", "memory": "2400Mi"}},
    "initContainers": [{"name": "sidecar", "image": "localhost/pause:1", "restartPolicy": "Always"}],
}
"""A pod with resources of its own, and a sidecar without any: a CPU and memory more than the instance's container has."""
MANAGED: Patch = {"featureGates": {"PodLevelResourceManagers": True}}
SCOPES: dict[str, Patch] = {
    "pod": MANAGED,
    # the static Memory Manager rejects such pods in this scope as soon as memory of one NUMA node is booked
    "container": {**MANAGED, "topologyManagerScope": "container", "memoryManagerPolicy": "None", "reservedMemory": []},
}


@pytest.mark.parametrize("scope", SCOPES)
def test_an_instance_beside_a_sidecar_in_a_pod_with_resources_of_its_own(
    scope: str, kubectl: Kubectl, node: JoinedNode, cluster: Path, start: Any
) -> None:
    """The sidecar shares what the pod has left, or is in the node's shared pool: predicted, registered and placed."""
    place = patched(cluster, "instance", "instance", SHARING)
    with reconfigured(node, SCOPES[scope]):
        [expected] = planned(node, kubectl, of_kind("Pod", kubectl("kustomize", str(cluster / place))))
        assert expected["outcome"] == "admitted"
        parts = {each["name"]: each for each in expected["containers"]}
        it = start(place, "instance")
        it.up()
        given = json.loads(node.read(str(STATE)))["entries"][it.pod["metadata"]["uid"]]
        assert CpuSet.parse(given["instance"]) == CpuSet.parse(parts["instance"]["cpus"])
        assert len(CpuSet.parse(given["instance"])) == 4
        assert given.get("sidecar", "") == parts["sidecar"]["pod_cpus"]
        assert bool(parts["sidecar"]["pod_cpus"]) == (scope == "pod")
        it.holds()
        assert "guarantee enforced" in it.log()
        assert it.end()["exitCode"] in IN_ORDER


@contextmanager
def reconfigured(node: JoinedNode, policies: Patch) -> Iterator[None]:
    """Hold the kubelet with other policies: its state files are removed, as its own documentation says."""
    file = KUBELET_DIRECTORY / "config.yaml"
    original = node.read(str(file))

    def restart(text: str) -> None:
        with stopped_kubelet(node, STATE, MEMORY_STATE):
            (node.results / "config.yaml").write_text(text)
            node("cp", "/results/config.yaml", str(file))

    restart(json.dumps(json.loads(original) | policies))
    try:
        yield
    finally:
        restart(original)


@contextmanager
def stopped_kubelet(node: JoinedNode, *forgotten: Path) -> Iterator[None]:
    """Hold the kubelet stopped; afterwards it starts without the files *forgotten*, and the node is Ready."""
    node("systemctl", "stop", "kubelet.service")
    yield
    node("rm", "-f", *map(str, forgotten))
    node("systemctl", "start", "kubelet.service")
    for file in forgotten:
        until(lambda: node.execute("test", "-e", str(file)).returncode == 0, "the kubelet's state", POD_SECONDS)  # noqa: B023
    until(lambda: node.ready, "the node to be Ready", POD_SECONDS)


def test_a_node_gets_another_number_of_huge_pages(kubectl: Kubectl, node: JoinedNode, cluster: Path) -> None:
    """As the README says: the kubelet starts with it only where its Memory Manager's state was removed."""
    assert cluster.is_dir()
    file = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages"
    log = node.results / "kubelet.log"
    fewer = HUGE_PAGES - 4

    def reserve(pages: int) -> None:
        node("sh", "-c", f"echo {pages} >{file}")
        assert int(node.read(file)) == pages

    def counted(pages: int) -> bool:
        allocatable = kubectl.json("get", "node", node.name)["status"]["allocatable"]
        return bool(allocatable["hugepages-2Mi"] == f"{2 * pages}Mi")

    assert counted(2 * HUGE_PAGES)
    kubectl("drain", node.name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
    reserve(fewer)
    try:
        before = log.stat().st_size
        node("systemctl", "restart", "kubelet.service")
        until(
            lambda: (
                "[memorymanager] the expected machine state is different from the real one"
                in log.read_bytes()[before:].decode(errors="replace")
            ),
            "the kubelet's refusal",
            POD_SECONDS,
        )
        with stopped_kubelet(node, MEMORY_STATE):
            pass
        until(lambda: counted(HUGE_PAGES + fewer), "the huge pages to be counted", POD_SECONDS)
    finally:
        with stopped_kubelet(node, MEMORY_STATE):
            reserve(HUGE_PAGES)
        kubectl("uncordon", node.name)
    until(lambda: counted(2 * HUGE_PAGES), "the huge pages to be counted", POD_SECONDS)


def test_a_node_that_was_switched_off_starts_its_instance_again(kubectl: Kubectl, node: JoinedNode, start: Any) -> None:
    """Nobody deletes it meanwhile; controller, device plugin and instance come back by themselves."""
    it = start("instance", "instance")
    it.up()
    uid = it.pod["metadata"]["uid"]
    node.restart()
    kubectl("rollout", "status", "-n", "instance-runner", f"daemonset/{CONTROLLER}", f"--timeout={POD_SECONDS}s")
    until(
        lambda: it.status.get("restartCount", 0) >= 1 and "running" in it.status["state"],
        "it to run again",
        POD_SECONDS,
    )
    it.logged("the guest runs", POD_SECONDS)
    assert it.pod["metadata"]["uid"] == uid
    shown = inspected(node)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert it.end()["exitCode"] in IN_ORDER
