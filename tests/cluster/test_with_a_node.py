"""The manifests on a real machine of a real cluster, by kubectl as a user types it; the names of images are the only change."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from runner.cpuset import CpuSet
from tests.cluster.joined_node import JoinedNode
from tests.cluster.kubectl import Kubectl, Object, until
from tests.cluster.manifests import EXAMPLES, Patch, copied, of_kind
from tests.cluster.node_side import KUBELET_DIRECTORY, NEXT, RESERVED

pytestmark = pytest.mark.timeout(1800)
SOON, GUEST_SECONDS, POD_SECONDS = 60, 600, 240
"""Seconds: for an object; for the demo guest, an emulated machine's guest, to boot; for a pod to start."""
IN_ORDER = {0, 13}
"""Exit codes of an instance that was ended in order; 13 where its guest had not booted yet, and did not power itself down."""
RUNNER, CONTROLLER = "instance-runner", "instance-cgroup-controller"
STATE = KUBELET_DIRECTORY / "cpu_manager_state"


@attrs.define
class Deployed:
    """One instance, applied from a kustomization."""

    kubectl: Kubectl
    node: JoinedNode
    place: Path
    name: str

    @property
    def pod(self) -> Object:
        found = self.kubectl.pod(self.name)
        assert found is not None, f"there is no pod {self.name}"
        return found

    @property
    def status(self) -> Object:
        """Return the status of its only container; empty before there is one."""
        statuses = self.pod["status"].get("containerStatuses", [])
        found: Object = statuses[0] if statuses else {}
        return found

    def log(self) -> str:
        return self.kubectl("logs", "-n", "instances", self.name)

    def logged(self, words: str, seconds: float) -> None:
        """Wait until *words* are in its log; fail as soon as it has ended without."""

        def found() -> bool:
            assert "terminated" not in self.status.get("state", {}) or words in self.log(), self.log()
            return words in self.log()

        until(found, f"{words!r} in the log of {self.name}", seconds)

    def up(self) -> None:
        """Wait until its guest runs; to boot it takes minutes, because it is a guest of an emulated machine."""
        until(lambda: "running" in self.status.get("state", {}), f"{self.name} to run", POD_SECONDS)
        self.logged("the guest runs", POD_SECONDS)

    @property
    def cpus(self) -> CpuSet:
        """Return the exclusive CPUs that the kubelet has given it; none if its state does not name it."""
        return exclusive_cpus(self.node).get(self.pod["metadata"]["uid"], CpuSet())

    def execute(self, *argv: str) -> str:
        return self.kubectl("exec", "-n", "instances", self.name, "--", *argv)

    def holds(self) -> None:
        """Assert that it was never restarted, and that every thread is where it belongs (``inspect``, on the node)."""
        assert self.status["restartCount"] == 0
        shown = inspected(self.node)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert self.pod["metadata"]["uid"] in shown.stdout

    def end(self, seconds: float = 120) -> Object:
        """Delete its kustomization, and return how its container terminated: the last status that was to be seen."""
        seen: list[Object] = []
        argv = [str(self.kubectl.program), f"--kubeconfig={self.kubectl.configuration}"]
        watch = ["get", "pod", "-n", "instances", self.name, "--watch", "--output-watch-events", "-o", "json"]
        with subprocess.Popen([*argv, *watch], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=lambda text: seen.extend(documents(text)), args=(process.stdout,))
            reader.start()
            self.kubectl("delete", "-k", str(self.place), f"--timeout={seconds}s", timeout=seconds + SOON)
            self.kubectl.gone(self.name, SOON)
            time.sleep(1)
            process.terminate()
            reader.join()
        states = [
            status["state"]["terminated"]
            for event in seen
            for status in event["object"]["status"].get("containerStatuses", [])
            if "terminated" in status["state"]
        ]
        assert states, "no state of the container's end was published"
        last: Object = states[-1]
        return last


def documents(text: Any) -> Iterator[Object]:
    """Yield the JSON documents of a stream, one after another."""
    decoder, kept = json.JSONDecoder(), ""
    for line in text:
        kept += line
        try:
            found, end = decoder.raw_decode(kept.lstrip())
        except ValueError:
            continue
        kept = kept.lstrip()[end:]
        yield found


def exclusive_cpus(node: JoinedNode) -> dict[str, CpuSet]:
    """Return pod UID → the CPUs that the kubelet's CPU Manager has given its containers."""
    entries = json.loads(node.read(str(STATE))).get("entries", {})
    return {uid: CpuSet.parse(",".join(containers.values())) for uid, containers in entries.items()}


def inspected(node: JoinedNode) -> subprocess.CompletedProcess[str]:
    return node.execute("python3", "-m", "runner", "inspect", timeout=300)


def planned(node: JoinedNode, kubectl: Kubectl, objects: list[Object]) -> list[Object]:
    """Return what ``plan --node``, on the node, says of pods that come now, one after the other."""
    running = kubectl.json("get", "pods", "-A", f"--field-selector=spec.nodeName={node.name}")
    (node.results / "running.json").write_text(json.dumps(running))
    (node.results / "pods.json").write_text("\n---\n".join(map(json.dumps, objects)))
    argv = ["python3", "-m", "runner", "plan", "--json", "--node", str(KUBELET_DIRECTORY / "config.yaml")]
    argv += ["--state", str(KUBELET_DIRECTORY), "--running", "/results/running.json", "--pod", "/results/pods.json"]
    shown = node.execute(*argv, timeout=300)
    assert shown.returncode in {0, 3}, shown.stderr
    found: list[Object] = json.loads(shown.stdout)["pods"]
    return found


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def cluster(kubectl: Kubectl, node: JoinedNode, examples: Path) -> Iterator[Path]:
    """Apply the cluster's part, once; controller and device plugin are ready."""
    kubectl("apply", "-k", str(examples / "cluster"))
    for namespace, name in (("instance-runner", CONTROLLER), ("kube-system", "instance-device-plugin")):
        kubectl("rollout", "status", "-n", namespace, f"daemonset/{name}", f"--timeout={POD_SECONDS}s")

    def handed_out() -> bool:
        return int(kubectl.json("get", "node", node.name)["status"]["allocatable"].get("squat.ai/vm", 0)) > 0

    until(handed_out, "the device plugin to hand out its devices", SOON)
    yield examples
    print("--- the kubelet", (node.results / "kubelet.log").read_text(errors="replace")[-5000:], sep="\n")


@contextmanager
def deployed(kubectl: Kubectl, node: JoinedNode, place: Path, name: str) -> Iterator[Deployed]:
    """Hold an instance from a kustomization; it is deleted with the block if it is still there."""
    kubectl("apply", "-k", str(place))
    it = Deployed(kubectl, node, place, name)
    try:
        yield it
    except BaseException:
        if kubectl.pod(name) is not None:
            print(
                f"--- {name}", kubectl.run("logs", "-n", "instances", name).stdout[-6000:], it.pod["status"], sep="\n"
            )
            print(*kubectl.events(name), sep="\n")
        raise
    finally:
        kubectl("delete", "-k", str(place), "--ignore-not-found", "--timeout=120s", timeout=200)


@pytest.fixture
def start(kubectl: Kubectl, node: JoinedNode, cluster: Path) -> Iterator[Any]:
    """Return a function that applies a directory of the examples; nothing of it is left after the test."""
    with ExitStack() as stack:
        yield lambda directory, name: stack.enter_context(deployed(kubectl, node, cluster / directory, name))
    until(lambda: not instances_left(node), "no instance's cgroup to be left", SOON)


def instances_left(node: JoinedNode) -> list[str]:
    return [each for each in node("ls", "/sys/fs/cgroup/stelia").split() if each.startswith("instance-")]


def test_controller_and_device_plugin_become_ready(kubectl: Kubectl, node: JoinedNode, cluster: Path) -> None:
    """``rollout status`` has waited for both; each node hands out as many instances' devices as it may have pods."""
    assert cluster.is_dir()
    allocatable = kubectl.json("get", "node", node.name)["status"]["allocatable"]
    assert (allocatable["squat.ai/vm"], allocatable["cpu"]) == ("110", "10")
    log = kubectl("logs", "-n", "instance-runner", f"daemonset/{CONTROLLER}")
    assert "ready socket=" in log
    assert kubectl.items("events", "-A", "--field-selector=type=Warning,involvedObject.kind=DaemonSet") == []
    pool = CpuSet.parse(json.loads(node.read(str(STATE)))["defaultCpuSet"])
    assert CpuSet.parse(node.read("/sys/fs/cgroup/stelia/float/cpuset.cpus")) == pool


def test_an_instance_as_it_stands(kubectl: Kubectl, node: JoinedNode, cluster: Path, start: Any) -> None:
    """From ``apply -k`` to ``delete -k``: predicted, placed, looked at by every command of the README, and ended in order."""
    objects = of_kind("Pod", kubectl("kustomize", str(cluster / "instance")))
    [expected] = planned(node, kubectl, objects)
    assert expected["outcome"] == "admitted"
    it = start("instance", "instance")
    it.up()
    it.logged("guest: done after", GUEST_SECONDS)
    assert it.cpus == CpuSet.parse(expected["containers"][0]["cpus"])
    assert not it.cpus & CpuSet.parse(RESERVED)
    it.holds()
    assert "guarantee enforced" in it.log()
    assert it.pod["status"]["qosClass"] == "Guaranteed"
    assert json.loads(it.execute(RUNNER, "ctl", "--json", "status"))["accelerator"] == "kvm"
    assert "every thread is in its place" in it.execute(RUNNER, "ctl", "status")
    assert "guest: done after" in it.execute(RUNNER, "logs")
    terminated = it.end()
    assert (terminated["exitCode"], terminated["reason"]) == (0, "Completed")
    assert json.loads(terminated["message"])["outcome"] == "stopped"
    until(lambda: not exclusive_cpus(node), "the kubelet to have its CPUs back", SOON)


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
        node("systemctl", "restart", unit)
        until(lambda: node.ready, "the node to be Ready", POD_SECONDS)
        time.sleep(10)
        until(lambda: node.ready, "the node to be Ready", POD_SECONDS)
        ready()
    assert it.end()["exitCode"] in IN_ORDER


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
        argv = [str(kubectl.program), f"--kubeconfig={kubectl.configuration}", *drain, "--timeout=240s"]
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


def pause(name: str, cpus: int) -> Object:
    """Return a Guaranteed pod that only waits."""
    found: Object = json.loads(json.dumps(PAUSE_POD))
    found["metadata"]["name"] = name
    found["spec"]["containers"][0]["resources"] = {"limits": {"cpu": str(cpus), "memory": "16Mi"}}
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


@pytest.mark.parametrize(
    ("policies", "before", "cpus", "reason"),
    [(STRICT, [4], 6, "TopologyAffinityError"), (WHOLE_CORES, [], 3, "SMTAlignmentError")],
    ids=["TopologyAffinityError", "SMTAlignmentError"],
)
def test_a_pod_is_rejected_with_the_words_that_plan_has_said(  # noqa: PLR0917
    policies: Patch,
    before: list[int],
    cpus: int,
    reason: str,
    kubectl: Kubectl,
    node: JoinedNode,
    cluster: Path,
) -> None:
    assert cluster.is_dir()
    with reconfigured(node, policies):
        pods = [pause(f"before-{number}", count) for number, count in enumerate(before)]
        for pod in pods:
            kubectl.apply(pod)
            until(lambda: len(exclusive_cpus(node)) == len(pods), "its CPUs", POD_SECONDS)
        too_much = pause("too-much", cpus)
        [expected] = planned(node, kubectl, [too_much])
        assert (expected["outcome"], expected["reason"]) == ("rejected", reason)
        kubectl.apply(too_much)
        try:
            until(lambda: (kubectl.pod("too-much") or {})["status"]["phase"] == "Failed", "its rejection", POD_SECONDS)
            found = kubectl.pod("too-much")
            assert found is not None
            assert found["status"]["reason"] == reason
            assert expected["message"] in found["status"]["message"]
            assert reason in dict(kubectl.events("too-much"))
        finally:
            names = [each["metadata"]["name"] for each in (*pods, too_much)]
            kubectl("delete", "pods", "-n", "instances", *names, "--timeout=120s")


@contextmanager
def reconfigured(node: JoinedNode, policies: Patch) -> Iterator[None]:
    """Hold the kubelet with other policies: its state files are removed, as its own documentation says."""
    file = KUBELET_DIRECTORY / "config.yaml"
    original = node.read(str(file))

    def restart(text: str) -> None:
        node("systemctl", "stop", "kubelet.service")
        (node.results / "config.yaml").write_text(text)
        node("cp", "/results/config.yaml", str(file))
        node("rm", "-f", str(STATE), str(KUBELET_DIRECTORY / "memory_manager_state"))
        node("systemctl", "start", "kubelet.service")
        until(lambda: node.execute("test", "-e", str(STATE)).returncode == 0, "the kubelet's state", POD_SECONDS)
        until(lambda: node.ready, "the node to be Ready", POD_SECONDS)

    restart(json.dumps(json.loads(original) | policies))
    try:
        yield
    finally:
        restart(original)


def test_an_instance_with_a_disk_of_its_node(kubectl: Kubectl, node: JoinedNode, cluster: Path, start: Any) -> None:
    """A local volume, a loop device here; the firmware looks at the disk, on which nothing is."""
    node("truncate", "-s", "64M", "/var/lib/vm-disk")
    device = node("losetup", "--find", "--show", "/var/lib/vm-disk").strip()
    storage = cluster / "disks/local/storage.yaml"
    storage.write_text(storage.read_text().replace("/dev/disk/by-id/your-disk", device))
    kubectl("apply", "-k", str(cluster / "disks/local"))
    try:
        it = start("overlays/disk", "instance-disk")
        it.up()
        it.holds()
        assert kubectl.json("get", "pvc", "-n", "instances", "vm-disk")["status"]["phase"] == "Bound"
        assert it.end()["exitCode"] in IN_ORDER
        assert kubectl.json("get", "pvc", "-n", "instances", "vm-disk")["status"]["phase"] == "Bound", "the claim stays"
    finally:
        kubectl("delete", "pod", "-n", "instances", "instance-disk", "--ignore-not-found", "--timeout=120s")
        kubectl("delete", "-k", str(cluster / "disks/local"))
        node("losetup", "--detach", device)


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


def test_every_example_has_been_looked_at() -> None:
    """What is not run on the node above is named here with its reason."""
    run = {
        "instance",
        "job",
        "overlays/privileged",
        "overlays/probes",
        "cluster",
        "namespace",
        "controller",
        "device-plugin",
    }
    without_a_node = {"overlays/gpu", "overlays/server"}
    found = {
        str(file.parent.relative_to(EXAMPLES))
        for file in EXAMPLES.rglob("kustomization.yaml")
        if not re.search("kind: Component", file.read_text())
    }
    assert found == run | without_a_node
