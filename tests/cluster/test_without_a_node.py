"""The manifests as the API server, the scheduler and the node lifecycle controller take them; no machine is needed for that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.control_plane import SILENT_SECONDS, UNREACHABLE_SECONDS, ControlPlane, FakeNode
from tests.cluster.kubectl import Kubectl, Object, until
from tests.cluster.manifests import copied, of_kind
from tests.images.manifests import DIRECTORIES, INSTANCES

SOON, GONE_WITHIN = 30, 120
"""Seconds for what the control plane does at once, and for all of a namespace to be deleted."""
GPU_NODE = {
    "cpu": "128",
    "memory": "512Gi",
    "pods": "110",
    "hugepages-2Mi": "160Gi",
    "ephemeral-storage": "500Gi",
    "squat.ai/vm": "110",
    "nvidia.com/GH100": "8",
}


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("examples"), volume_on="gpu-1")


@pytest.fixture(scope="module")
def cluster(kubectl: Kubectl, examples: Path) -> Iterator[Path]:
    """Apply the cluster's part, once."""
    assert warnings(kubectl, "apply", "-k", str(examples / "cluster")) == []
    yield examples
    kubectl("delete", "-k", str(examples / "cluster"), "--wait=false")
    namespaces = ("instance-runner", "instances")
    for namespace in namespaces:  # no kubelet ends these pods, and the next tests make the same namespaces
        kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0")
    until(lambda: not kubectl("get", "namespaces", *namespaces, "--ignore-not-found"), "the end of both", GONE_WITHIN)


@pytest.fixture
def gpu_node(kubectl: Kubectl) -> Iterator[FakeNode]:
    with FakeNode(kubectl, "gpu-1", GPU_NODE) as node:
        yield node


def warnings(kubectl: Kubectl, *arguments: str) -> list[str]:
    """Run a command that succeeds, and return the warnings that a user sees."""
    done = kubectl.run(*arguments)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line]


def created(kubectl: Kubectl, place: Path) -> list[str]:
    """Return the names of the pods of a kustomization, which are there."""
    objects = kubectl.json("get", "-k", str(place))["items"]
    jobs = [each["metadata"]["name"] for each in objects if each["kind"] == "Job"]
    pods = [each["metadata"]["name"] for each in objects if each["kind"] == "Pod"]
    for job in jobs:
        found = until(lambda: kubectl.items("pods", "-n", "instances", f"-l=job-name={job}"), "the job's pod", SOON)  # noqa: B023
        pods += [each["metadata"]["name"] for each in found]
    return pods


def bound_to(kubectl: Kubectl, pod: str) -> str | None:
    found = kubectl.pod(pod)
    node: str | None = found["spec"].get("nodeName") if found else None
    return node


def end(kubectl: Kubectl, place: Path, pods: list[str]) -> None:
    """Delete a kustomization, and by force the pods that no kubelet ends."""
    kubectl("delete", "-k", str(place), "--wait=false", "--ignore-not-found")
    for pod in pods:
        kubectl("delete", "pod", "-n", "instances", pod, "--force", "--grace-period=0", "--ignore-not-found")
    assert kubectl.items("pdb", "-n", "instances") == []


def test_the_control_plane_is_there(control: ControlPlane) -> None:
    for process in control.processes:
        process.alive()
    assert control.kubectl("get", "--raw", "/readyz") == "ok"


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_kustomization_is_taken_without_a_warning(name: str, kubectl: Kubectl, cluster: Path) -> None:
    """The API server validates, defaults and admits every object, and then throws it away."""
    assert warnings(kubectl, "apply", "--dry-run=server", "-k", str(cluster / name)) == []


@pytest.mark.parametrize("name", INSTANCES)
def test_the_scheduler_binds_it(name: str, kubectl: Kubectl, cluster: Path, gpu_node: FakeNode) -> None:
    """The disk of those that have one is the local volume, of the node that its README tells to name."""
    disk = name in {"overlays/disk", "overlays/server", "overlays/gpu"}
    if disk:
        kubectl("apply", "-k", str(cluster / "disks/local"))
    kubectl("apply", "-k", str(cluster / name))
    pods = created(kubectl, cluster / name)
    assert len(pods) == 1
    try:
        until(lambda: bound_to(kubectl, pods[0]) == gpu_node.name, f"{pods[0]} to be bound", SOON)
        found = kubectl.pod(pods[0])
        assert found is not None
        assert found["status"]["qosClass"] == "Guaranteed"
    finally:
        end(kubectl, cluster / name, pods)
        if disk:
            kubectl("delete", "-k", str(cluster / "disks/local"))


def test_without_its_resource_it_stays_pending_and_says_why(kubectl: Kubectl, cluster: Path) -> None:
    with FakeNode(kubectl, "plain", {**GPU_NODE, "squat.ai/vm": "0"}):
        kubectl("apply", "-k", str(cluster / "instance"))
        try:
            message = until(lambda: dict(kubectl.events("instance")).get("FailedScheduling"), "an event", SOON)
            assert "Insufficient squat.ai/vm" in message
        finally:
            end(kubectl, cluster / "instance", ["instance"])


def test_namespaces_admit_the_pods_and_a_restricted_one_names_what_it_forbids(kubectl: Kubectl, cluster: Path) -> None:
    """Pod Security: in a namespace without the label of ours they are refused where the cluster's default is stricter."""
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "strict", "labels": labels}})
    pod: Object = of_kind("Pod", kubectl("kustomize", str(cluster / "instance")))[0]
    pod["metadata"]["namespace"] = "strict"
    try:
        done = kubectl.run("create", "--dry-run=server", "-f", "-", given=json.dumps(pod))
        assert done.returncode != 0
        assert 'violates PodSecurity "baseline:latest"' in done.stderr
        assert "non-default capabilities" in done.stderr
        assert "hostPath volumes" in done.stderr
    finally:
        kubectl("delete", "namespace", "strict", "--wait=false")


def test_a_drain_waits_for_each_instance_and_goes_on_when_it_was_deleted(
    kubectl: Kubectl, cluster: Path, gpu_node: FakeNode
) -> None:
    kubectl("apply", "-k", str(cluster / "instance"))
    until(lambda: bound_to(kubectl, "instance") == gpu_node.name, "the instance to be bound", SOON)
    gpu_node.run("instance")
    until(
        lambda: kubectl.json("get", "pdb", "-n", "instances", "instance")["status"]["currentHealthy"] == 1,
        "the budget to count it",
        SOON,
    )
    drain = ("drain", gpu_node.name, "--ignore-daemonsets", "--delete-emptydir-data", "--force")
    try:
        for options, reason in (
            ((), "cannot delete DaemonSet-managed Pods"),
            (("--ignore-daemonsets",), "cannot delete Pods with local storage"),
            (("--ignore-daemonsets", "--delete-emptydir-data"), "cannot delete Pods that declare no controller"),
        ):
            bare = kubectl.run("drain", gpu_node.name, *options, "--timeout=5s")
            assert bare.returncode != 0
            assert reason in bare.stderr
        held = kubectl.run(*drain, "--timeout=8s")
        assert held.returncode != 0
        assert "Cannot evict pod as it would violate the pod's disruption budget" in held.stderr
        assert kubectl.pod("instance") is not None
        end(kubectl, cluster / "instance", ["instance"])
        free = kubectl.run(*drain, "--timeout=30s")
        assert free.returncode == 0, free.stderr
    finally:
        kubectl("delete", "-k", str(cluster / "instance"), "--ignore-not-found", "--wait=false")


def test_a_node_that_does_not_answer_keeps_its_instances_and_no_others(kubectl: Kubectl, cluster: Path) -> None:
    """Others are deleted after the cluster's default, which is short here; instances stay until they are removed by hand.

    A second node answers, and takes no pods: where none answers, the node lifecycle controller deletes nothing (*full
    disruption*: ``ComputeZoneState`` of ``node_lifecycle_controller.go``).
    """
    container = {"name": "other", "image": "other"}
    other: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "other", "namespace": "instances"},
        "spec": {"containers": [container]},
    }
    with FakeNode(kubectl, "answers", {**GPU_NODE, "pods": "0"}), FakeNode(kubectl, "lost", GPU_NODE) as node:
        kubectl("apply", "-k", str(cluster / "instance"))
        kubectl.apply(other)
        for pod in ("instance", "other"):
            until(lambda: bound_to(kubectl, pod) == node.name, f"{pod} to be bound", SOON)  # noqa: B023
            node.run(pod)
        node.fall_silent()
        limit = SILENT_SECONDS + UNREACHABLE_SECONDS + SOON

        def deleted(pod: str) -> bool:
            found = kubectl.pod(pod)
            return found is None or "deletionTimestamp" in found["metadata"]

        try:
            until(lambda: deleted("other"), "the other pod to be deleted", limit)
            taints = {each["key"] for each in kubectl.json("get", "node", node.name)["spec"]["taints"]}
            assert "node.kubernetes.io/unreachable" in taints
            assert not deleted("instance")
            kubectl("taint", "nodes", node.name, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
            until(lambda: kubectl.pod("instance") is None, "the instance to be removed from a node that is off", limit)
        finally:
            end(kubectl, cluster / "instance", ["instance", "other"])


def test_deleting_an_instance_leaves_the_others_and_every_claim(
    kubectl: Kubectl, cluster: Path, gpu_node: FakeNode
) -> None:
    kubectl("apply", "-k", str(cluster / "disks/local"))
    pods = []
    for name in ("instance", "overlays/disk", "overlays/probes"):
        kubectl("apply", "-k", str(cluster / name))
        pods += created(kubectl, cluster / name)
    try:
        for pod in pods:
            until(lambda: bound_to(kubectl, pod) == gpu_node.name, f"{pod} to be bound", SOON)  # noqa: B023
        kubectl("delete", "-k", str(cluster / "overlays/disk"), "--wait=false")
        kubectl(
            "delete", "pod", "-n", "instances", "instance-disk", "--force", "--grace-period=0", "--ignore-not-found"
        )
        kubectl.gone("instance-disk", SOON)
        assert {each["metadata"]["name"] for each in kubectl.items("pods", "-n", "instances")} == {
            "instance",
            "instance-probes",
        }
        assert {each["metadata"]["name"] for each in kubectl.items("pdb", "-n", "instances")} == {
            "instance",
            "instance-probes",
        }
        claim = kubectl.json("get", "pvc", "-n", "instances", "vm-disk")
        assert claim["status"]["phase"] == "Bound"
    finally:
        for name in ("instance", "overlays/probes"):
            kubectl("delete", "-k", str(cluster / name), "--wait=false")
        for pod in pods:
            kubectl("delete", "pod", "-n", "instances", pod, "--force", "--grace-period=0", "--ignore-not-found")
        kubectl("delete", "-k", str(cluster / "disks/local"))
