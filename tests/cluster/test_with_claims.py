"""Instances whose CPUs the DRA driver for CPUs gives, on a node whose kubelet gives none: by the files of the examples' README."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs
import pytest
import yaml

from runner.base.cpuset import CpuSet
from tests.cluster import cpu_driver
from tests.cluster.conftest import Given
from tests.cluster.instances import (
    CONTROLLER,
    POD_SECONDS,
    RUNNER,
    SOON,
    STATE,
    Deployed,
    inspected,
    instances_left,
)
from tests.cluster.joined_node import SHAPE, JoinedNode
from tests.cluster.kubectl import Kubectl, Object, until
from tests.cluster.manifests import files_of
from tests.cluster.node_side import RESERVED

pytestmark = pytest.mark.timeout(1800)
TREE = "/sys/fs/cgroup/stelia"
EVERY_CPU = CpuSet(range(SHAPE.cpus))
NUMA_NODES = {f"cpudevnuma{number:03}": SHAPE.numa_cpus(number) for number in range(SHAPE.numa_nodes)}
"""The driver's devices, and the CPUs of each."""
DAEMON = ("-n", "instance-runner", f"daemonset/{CONTROLLER}")
DRIVER = ("-n", cpu_driver.NAMESPACE, f"daemonset/{cpu_driver.NAME}")


@pytest.fixture(scope="module")
def examples(given: Given, cluster: Path, kubectl: Kubectl) -> Path:
    """Return the copy of the examples; in ``claims`` beside them are the README's files, and in ``second`` another instance."""
    if cpu_driver.PROGRAM not in given["disks"]:
        pytest.skip(f"the driver is missing: tests/cluster/run --only with-claims takes {cpu_driver.PROGRAM} of DIR")
    for directory in ("claims", "second"):
        (cluster / directory).mkdir()
        for name, text in files_of("CPUs by resource claims").items():
            (cluster / directory / name).write_text(text)
    with_the_rom(cluster / "instance", Path(given["rom"]))
    kubectl("apply", "-f", str(cluster / "claims/cpus.yaml"))
    file = cluster / "second/kustomization.yaml"
    label = {"includeSelectors": True, "pairs": {"app.kubernetes.io/instance": "instance-second"}}
    own = {"namespace": "instances", "nameSuffix": "-second", "labels": [label]}
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | own))
    return cluster


def with_the_rom(instance: Path, rom: Path) -> None:
    """Give the instance another guest, which prints a line and waits for its end: its CPUs are what is looked at here.

    Its real mode is not for the KVM of an emulated machine, so it is emulated itself.
    """
    shutil.copy(rom, instance / "rom")
    replace(instance / "kustomization.yaml", r"- spec\.toml$", "- spec.toml\n      - rom")
    replace(instance / "spec.toml", r"\[boot\].*?(?=\n\n)", '[boot]\nfirmware = "/etc/instance/rom"')
    replace(instance / "spec.toml", r"^\[cpu\]$", '[cpu]\naccel = "tcg"')
    replace(instance / "spec.toml", r'size = "2GiB"', 'size = "64MiB"')
    replace(instance / "pod.yaml", "memory: 2336Mi", "memory: 416Mi")


def replace(file: Path, pattern: str, text: str) -> None:
    """Replace what is there once."""
    changed, times = re.subn(pattern, text, file.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert times == 1, (file, pattern)
    file.write_text(changed)


@pytest.fixture(scope="module")
def driver(kubectl: Kubectl, node: JoinedNode, examples: Path) -> Path:
    """Install the driver, and tell it and the controller which CPUs are the system's."""
    kubectl.apply(*cpu_driver.objects(RESERVED))
    kubectl("rollout", "status", *DRIVER, f"--timeout={POD_SECONDS}s")
    until(lambda: kubectl.items("resourceslices"), "the driver's CPUs in the API", SOON)
    [container] = kubectl.json("get", *DAEMON)["spec"]["template"]["spec"]["containers"]
    arguments = [*container["args"], f"--reserved-cpus={RESERVED}"]
    patch = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": arguments}]
    kubectl("patch", *DAEMON, "--type=json", f"--patch={json.dumps(patch)}")
    kubectl("rollout", "status", *DAEMON, f"--timeout={POD_SECONDS}s")
    float_gets(node, EVERY_CPU - CpuSet.parse(RESERVED))
    return examples


@attrs.define
class Claiming(Deployed):
    """An instance that has its CPUs by a claim."""

    @property
    def claim(self) -> Object:
        """Return its claim, which was made from the template."""
        [status] = self.pod["status"]["resourceClaimStatuses"]
        return self.kubectl.json("get", "resourceclaim", "-n", "instances", status["resourceClaimName"])

    @property
    def cpus(self) -> CpuSet:
        """Return the CPUs of its claim, as the driver has written them."""
        return cpu_driver.claimed(self.node)[self.claim["metadata"]["uid"]]

    def is_placed(self, cpus: CpuSet) -> None:
        """Assert that its claim, its container and its cgroup have *cpus*, which are of the NUMA node that the scheduler chose."""
        assert self.cpus == cpus
        [result] = self.claim["status"]["allocation"]["devices"]["results"]
        assert (result["driver"], result["consumedCapacity"]) == ("dra.cpu", {"dra.cpu/cpu": "4"})
        assert len(cpus) == 4
        assert cpus <= NUMA_NODES[result["device"]]
        assert CpuSet.parse(self.execute("cat", "/sys/fs/cgroup/cpuset.cpus")) == cpus
        group = f"{TREE}/instance-{self.pod['metadata']['uid']}"
        assert CpuSet.parse(self.node.read(f"{group}/vcpus/cpuset.cpus.effective")) == cpus
        assert self.node.read(f"{group}/cpuset.cpus.partition").strip() == "isolated"


@pytest.fixture
def instances(kubectl: Kubectl, node: JoinedNode, examples: Path) -> Iterator[dict[str, Claiming]]:
    """Return the two instances, which are not there yet; nothing of them is left after the test."""
    found = {
        "instance": Claiming(kubectl, node, examples / "claims", "instance"),
        "instance-second": Claiming(kubectl, node, examples / "second", "instance-second"),
    }
    with ExitStack() as stack:
        for it in found.values():
            stack.callback(kubectl, "delete", "-k", str(it.place), "--ignore-not-found", "--timeout=120s", timeout=200)
        yield found
        for name, it in found.items():
            if kubectl.pod(name) is not None:
                print(f"--- {name}", it.log()[-3000:], sep="\n")
    until(lambda: not instances_left(node), "no instance's cgroup to be left", SOON)


def float_cpus(node: JoinedNode) -> CpuSet:
    """Return the CPUs of the first instance's float: all have the same."""
    return CpuSet.parse(node("sh", "-c", f"cat {TREE}/instance-*/float/cpuset.cpus | head -n 1").strip())


def float_gets(node: JoinedNode, cpus: CpuSet) -> None:
    until(lambda: float_cpus(node) == cpus, f"float on {cpus}", SOON)


def refusal(it: Deployed) -> tuple[int, str]:
    """Return exit code and reason of an instance that ended instead of starting its guest."""

    def ended() -> Object | None:
        states = (it.status.get(name, {}) for name in ("state", "lastState"))
        return next((each["terminated"] for each in states if "terminated" in each), None)

    terminated = until(ended, f"the end of {it.name}", POD_SECONDS)
    return terminated["exitCode"], json.loads(terminated["message"])["detail"]


def restart(kubectl: Kubectl, selector: Sequence[str], daemon: Sequence[str]) -> None:
    """Delete the pod of a DaemonSet, and wait until it has another one."""
    kubectl("delete", "pod", *selector, timeout=POD_SECONDS)
    kubectl("rollout", "status", *daemon, f"--timeout={POD_SECONDS}s")


def test_without_the_driver_an_instance_is_refused(node: JoinedNode, examples: Path, kubectl: Kubectl) -> None:
    """The kubelet gives no pod CPUs of its own, and without ``--reserved-cpus`` float has all of them."""
    assert json.loads(node.read(str(STATE)))["policyName"] == "none"
    assert float_cpus(node) == EVERY_CPU
    kubectl("apply", "-k", str(examples / "instance"))
    try:
        code, reason = refusal(Deployed(kubectl, node, examples / "instance", "instance"))
        assert code == 30
        assert "name a claim for CPUs in resources.claims of the container" in reason
    finally:
        kubectl("delete", "-k", str(examples / "instance"), "--timeout=120s", timeout=200)


@pytest.mark.usefixtures("driver")
def test_the_driver_offers_each_numa_nodes_cpus(kubectl: Kubectl) -> None:
    [found] = kubectl.items("resourceslices")
    offered = {each["name"]: int(each["capacity"]["dra.cpu/cpu"]["value"]) for each in found["spec"]["devices"]}
    assert offered == {name: len(cpus - CpuSet.parse(RESERVED)) for name, cpus in NUMA_NODES.items()}


@pytest.mark.usefixtures("driver")
def test_two_instances_have_the_cpus_of_their_claims(
    kubectl: Kubectl, node: JoinedNode, instances: dict[str, Claiming]
) -> None:
    """Under them controller and driver are deleted and come back, kubelet and containerd are restarted; then one ends."""
    for it in instances.values():
        kubectl("apply", "-k", str(it.place))
    for it in instances.values():
        it.up()
        assert "guarantee enforced" in it.log()
        assert it.pod["status"]["qosClass"] == "Guaranteed"
    first, second = instances.values()
    cpus = {it.name: it.cpus for it in instances.values()}
    free = EVERY_CPU - CpuSet.parse(RESERVED)
    assert not cpus[first.name] & cpus[second.name]

    def hold() -> None:
        left = free - cpus[first.name] - cpus[second.name]
        float_gets(node, left)
        for it in instances.values():
            it.is_placed(cpus[it.name])
            assert it.status["restartCount"] == 0
        shown = inspected(node)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert all(it.pod["metadata"]["uid"] in shown.stdout for it in instances.values())
        assert f"float has '{left}', the kubelet's shared pool" in shown.stdout
        for number in range(SHAPE.numa_nodes):  # one instance on each
            assert f"it is bound to '{number}', its CPUs are on '{number}'" in shown.stdout

    hold()
    for it in instances.values():
        assert "every thread is in its place" in it.execute(RUNNER, "ctl", "status")
    restart(kubectl, ("-n", "instance-runner", f"-l=app.kubernetes.io/name={CONTROLLER}"), DAEMON)
    hold()
    restart(kubectl, ("-n", cpu_driver.NAMESPACE, f"-l=app.kubernetes.io/name={cpu_driver.NAME}"), DRIVER)
    hold()
    for unit in ("kubelet.service", "instance-runner-containerd.service"):
        node.restart_unit(unit)
        until(lambda: node.ready, "the node to be Ready", POD_SECONDS)
        kubectl("rollout", "status", *DRIVER, f"--timeout={POD_SECONDS}s")
        hold()
    name = first.claim["metadata"]["name"]
    assert first.end()["exitCode"] == 0
    assert kubectl.run("get", "resourceclaim", "-n", "instances", name).returncode != 0, "the claim goes with its pod"
    float_gets(node, free - cpus[second.name])
    assert inspected(node).returncode == 0
    second.is_placed(cpus[second.name])
    assert second.end()["exitCode"] == 0
    float_gets(node, free)
    assert cpu_driver.claimed(node) == {}


@pytest.mark.usefixtures("driver")
def test_a_container_that_is_started_again_has_the_same_cpus(node: JoinedNode, instances: dict[str, Claiming]) -> None:
    it = instances["instance"]
    it.kubectl("apply", "-k", str(it.place))
    it.up()
    cpus = it.cpus
    node("pkill", "-KILL", "qemu-system")
    until(lambda: it.status["restartCount"] == 1 and "running" in it.status["state"], "it to run again", POD_SECONDS)
    it.up()
    it.is_placed(cpus)
    float_gets(node, EVERY_CPU - CpuSet.parse(RESERVED) - cpus)
    assert it.end()["exitCode"] == 0


@pytest.mark.usefixtures("driver")
def test_a_pod_without_a_claim_is_refused(kubectl: Kubectl, node: JoinedNode, examples: Path) -> None:
    kubectl("apply", "-k", str(examples / "instance"))
    try:
        code, reason = refusal(Deployed(kubectl, node, examples / "instance", "instance"))
        assert (code, "name a claim for" in reason) == (30, True), reason
    finally:
        kubectl("delete", "-k", str(examples / "instance"), "--timeout=120s", timeout=200)
