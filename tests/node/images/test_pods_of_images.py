"""The images on a node with cgroup v2, as the manifests in examples/kubernetes run them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import SECONDS, Cgroup
from tests.node.images.manifested import Cluster
from tests.node.instances import TREE, Instance
from tests.node.standin_kubelet import Kubelet, Mount, Running, Runtime

pytestmark = pytest.mark.many_cpus
BOTH = pytest.mark.parametrize("runtime", ["crun", pytest.param("runc", marks=pytest.mark.node_only)])
CONTROLLER, INSTANCE = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
LEFT_TO_THE_CONTROLLER = f"{1 << 1 | 1 << 23 | 1 << 24:016x}"
"""CAP_DAC_OVERRIDE, CAP_SYS_NICE and CAP_SYS_RESOURCE, as /proc shows them."""


@pytest.fixture(autouse=True)
def tree() -> Iterator[Cgroup]:
    """Return the controller's tree, which is removed after the pods of the test."""
    yield TREE
    TREE.remove()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def get(container: Running, path: str, port: int = 9440) -> tuple[int, str]:
    """Get *path* from the HTTP server of a pod, as the kubelet's probe does; return status and text."""
    code = (
        "import sys, urllib.request, urllib.error\n"
        f"try: found = urllib.request.urlopen('http://127.0.0.1:{port}' + sys.argv[1], timeout=5)\n"
        "except urllib.error.HTTPError as error: found = error\n"
        "print(found.status); print(found.read().decode())"
    )
    argv = ["nsenter", f"--target={container.pid}", "--net", "python3", "-c", code, path]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    status, _, text = done.stdout.partition("\n")
    return int(status), text


@BOTH
def test_the_daemon_set_has_the_rights_it_needs_and_no_more(
    tree: Cgroup, cluster: Cluster, kubelet: Kubelet, runtime: Runtime
) -> None:
    pod = cluster.pod("controller", "DaemonSet", CONTROLLER, CpuSet(), runtime=runtime)
    controller = kubelet.run(pod)["controller"]
    controller.wait_for("ready socket=")
    status = status_of(controller.pid)
    assert {status[name] for name in ("CapEff", "CapPrm")} == {LEFT_TO_THE_CONTROLLER}
    assert (status["NoNewPrivs"], status["CapInh"]) == ("1", f"{0:016x}")
    assert {"cpuset", "memory"} <= tree.words("cgroup.subtree_control")
    assert get(controller, "/healthz")[0] == 200
    assert get(controller, "/readyz")[0] == 200
    assert "instance_cgroup_controller_instances 0.0" in get(controller, "/metrics")[1]
    assert kubelet.stop(CONTROLLER, grace=5) == {"controller": 0}, controller.output


@pytest.mark.parametrize("directory", [pytest.param("job", marks=pytest.mark.node_only), "overlays/probes"])
@BOTH
def test_other_instances_with_the_daemon_set(
    cluster: Cluster, kubelet: Kubelet, guest: tuple[Mount, ...], runtime: Runtime, directory: str
) -> None:
    an_instance_with_the_daemon_set(cluster, kubelet, guest, runtime, directory)


@pytest.mark.gate
def test_an_instance_with_the_daemon_set(cluster: Cluster, kubelet: Kubelet, guest: tuple[Mount, ...]) -> None:
    an_instance_with_the_daemon_set(cluster, kubelet, guest, "crun", "instance")


def an_instance_with_the_daemon_set(
    cluster: Cluster, kubelet: Kubelet, guest: tuple[Mount, ...], runtime: Runtime, directory: str
) -> None:
    kind, cpus = {"job": ("Job", "9-10")}.get(directory, ("Pod", "2-3,10-11"))
    exclusive = CpuSet.parse(cpus)
    cluster = cluster.with_the_rom(directory)
    daemon = cluster.pod("controller", "DaemonSet", CONTROLLER, CpuSet(), runtime=runtime)
    [container] = daemon.containers
    # two emulated vCPUs need more than their part of a machine as small as this
    container = replace(container, command=(*container.command, "--pod-memory=320M"))
    controller = kubelet.run(replace(daemon, containers=(container,)))["controller"]
    controller.wait_for("ready socket=")
    pod = cluster.pod(directory, kind, INSTANCE, exclusive, runtime=runtime, mounts=guest)
    instance = Instance(kubelet, INSTANCE, exclusive, kubelet.run(pod)["instance"])
    instance.up()
    assert instance.receipt()["backend"] == "controller"
    instance.is_placed()
    inspected = json.loads(controller.execute("instance-runner", "inspect", "--json"))
    [found] = inspected["instances"]
    assert (inspected["seen_from"], found["pod_uid"]) == ("node", INSTANCE)
    assert inspected["verdict"] != "error", inspected
    threads = {each["cgroup"] for each in found["threads"] if each["role"] != "anchor"}
    assert threads == {f"/{TREE.path.name}/instance-{INSTANCE}/{group}" for group in ("float", "vcpus")}
    if directory == "overlays/probes":
        assert get(instance.running, "/readyz", 9441)[0] == 200
        assert "instance_runner_placement_holds" in get(instance.running, "/metrics", 9441)[1]
    assert kubelet.stop(INSTANCE) == {"instance": 0}, instance.running.output
    assert re.search(r"outcome\W+stopped\W.*faults\W+0\b", instance.running.output), "as text and as JSON"
    assert not instance.group.path.exists()
    assert kubelet.stop(CONTROLLER, grace=5) == {"controller": 0}, controller.output


@BOTH
@pytest.mark.parametrize("namespace", ["host", "private"])
def test_a_privileged_instance_divides_its_own_cgroup(
    cluster: Cluster,
    kubelet: Kubelet,
    guest: tuple[Mount, ...],
    runtime: Runtime,
    namespace: Literal["host", "private"],
) -> None:
    """As containerd starts a privileged container, and as Docker does (in a cgroup namespace of its own)."""
    cluster = cluster.with_the_rom("overlays/privileged")
    exclusive = CpuSet.parse("2-4,10-12")
    pod = cluster.pod("overlays/privileged", "Pod", INSTANCE, exclusive, runtime=runtime, mounts=guest)
    [container] = pod.containers
    pod = replace(pod, containers=(replace(container, cgroup_namespace=namespace),))
    instance = Instance(kubelet, INSTANCE, exclusive, kubelet.run(pod)["instance"])
    instance.up()
    receipt = instance.receipt()
    assert receipt["backend"] == "delegated"
    pins = {thread.cpus for thread in instance.vcpus()}
    assert {len(cpus) for cpus in pins} == {1}
    taken = CpuSet(cpu for cpus in pins for cpu in cpus)
    assert len(taken) == 4
    assert taken <= exclusive
    vcpus = {thread.tid for thread in instance.vcpus()}
    anchors = instance.processes()["anchor"]
    others = [each for each in instance.threads() if each.tid not in vcpus and each.pid not in anchors]
    assert {each.cpus for each in others} == {exclusive - taken}
    assert {each.cgroup for each in others} == {f"{instance.scope}/float"}
    assert kubelet.stop(INSTANCE) == {"instance": 0}, instance.running.output
    assert "ended outcome=stopped status=0 faults=0" in instance.running.output
