"""A real kubelet without a cluster runs the manifests as static pods, and chooses their CPUs.

``tests/images/run --kubelet PATH`` gives the node its program as a disk.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import ROOT, SECONDS, Cgroup, until
from tests.node.containerd.daemon import Containerd, run_unit
from tests.node.containerd.kubelet.configuration import example_on_a_small_machine
from tests.node.containerd.pods import Contained, inspect
from tests.node.images.manifested import Cluster, Manifests, Object, disk
from tests.node.instances import FLOAT, TREE, Instance, members_of
from tests.node.standin_kubelet import Mount

pytestmark = [pytest.mark.usefixtures("reserved"), pytest.mark.timeout(1200)]
UNIT = "instance-runner-kubelet.service"
EXITED = 2
MEMORY_MANAGER_SINCE, ENDPOINT_IN_FILE_SINCE = 22, 27
"""Minor versions."""


@dataclass(frozen=True)
class RealKubelet:
    """The kubelet's program, its files in their usual places, and containerd."""

    program: Path
    containerd: Containerd
    directory: Path = Path("/var/lib/kubelet")
    followed: list[Contained] = field(default_factory=list)
    """The containers whose logs are read; no other part of the test waits for their readers."""

    @property
    def minor(self) -> int:
        """Return the second number of its version."""
        shown = subprocess.run([self.program, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout
        return int(shown.split(".")[1])

    @property
    def manifests(self) -> Path:
        """Return the directory of the static pods."""
        return self.directory / "manifests"

    def configuration(self) -> Object:
        """Return the example's configuration, with what this small machine has to reserve."""
        out = example_on_a_small_machine("0,4") | {
            "fileCheckFrequency": "1s",
            "staticPodPath": str(self.manifests),
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
        }
        if self.minor < MEMORY_MANAGER_SINCE:
            del out["memoryManagerPolicy"], out["reservedMemory"]
        if self.minor >= ENDPOINT_IN_FILE_SINCE:
            out["containerRuntimeEndpoint"] = self.endpoint
        return out

    @property
    def endpoint(self) -> str:
        return f"unix://{self.containerd.cri.socket}"

    def start(self) -> None:
        """Start it, without a cluster."""
        self.manifests.mkdir()
        (self.directory / "config.json").write_text(json.dumps(self.configuration()))
        options = ["--config", str(self.directory / "config.json"), "--root-dir", str(self.directory), "--v=2"]
        if self.minor < ENDPOINT_IN_FILE_SINCE:
            options += ["--container-runtime=remote", f"--container-runtime-endpoint={self.endpoint}"]
        run_unit(UNIT, self.log, ("KillMode=process", "Delegate=yes"), str(self.program), *options)

    @property
    def log(self) -> Path:
        return self.directory / "log"

    @property
    def state(self) -> dict[str, Any]:
        """Return the CPU Manager's checkpoint."""
        found: dict[str, Any] = json.loads((self.directory / "cpu_manager_state").read_text())
        return found

    @property
    def default(self) -> CpuSet:
        """Return the shared pool."""
        return CpuSet.parse(self.state["defaultCpuSet"])

    def container(self, name: str) -> Contained:
        """Return a pod's container by its name, when it runs."""
        [found] = until(lambda: self.containers(name), f"the container {name}", 4 * SECONDS)
        uid = found["labels"]["io.kubernetes.pod.uid"]
        guaranteed = name == "instance"
        slice_ = (
            f"kubepods-pod{uid.replace('-', '_')}.slice"
            if guaranteed
            else f"kubepods-burstable.slice/kubepods-burstable-pod{uid.replace('-', '_')}.slice"
        )
        scope = Cgroup(ROOT / "kubepods.slice" / slice_ / f"cri-containerd-{found['id']}.scope")
        assert scope.path.is_dir()
        status = self.containerd.cri("ContainerStatus", container_id=found["id"])["status"]
        self.followed.append(Contained(self.containerd.cri, found["id"], scope, Path(status["log_path"])))
        return self.followed[-1]

    def close_logs(self) -> None:
        """End the reading of all logs, also of containers that a failed test has left."""
        with ExitStack() as cleanup:
            for each in self.followed:
                cleanup.callback(each.close)

    def show_logs(self) -> None:
        """Print the last part of the kubelet's log, and of containerd's."""
        print(f"--- kubelet\n{self.log.read_text()[-30000:]}")
        print(f"--- containerd\n{self.containerd.cri.log.read_text()[-10000:]}")

    def containers(self, name: str) -> list[dict[str, Any]]:
        """Return the running containers of this name."""
        selector = {"io.kubernetes.container.name": name}
        state = {"state": 1}
        found: list[dict[str, Any]] = self.containerd.cri(
            "ListContainers", filter={"label_selector": selector, "state": state}
        ).get("containers", [])
        return found


@pytest.fixture
def kubelet(containerd: Containerd) -> Iterator[RealKubelet]:
    directory = Path("/var/lib/kubelet")
    device = disk("kubelet")
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "kubelet", str(directory)], check=True)
    program = directory / "kubelet"
    program.write_bytes(device.read_bytes())
    program.chmod(0o755)
    kubelet = RealKubelet(program, containerd)
    with ExitStack() as cleanup:  # in the order of the lines from the last: each runs, even if one before it fails
        cleanup.callback(TREE.remove)
        cleanup.callback(kubelet.close_logs)
        cleanup.callback(Cgroup(ROOT / "kubepods.slice").remove)
        cleanup.callback(kubelet.show_logs)
        cleanup.callback(subprocess.run, ["systemctl", "stop", UNIT], check=True)
        kubelet.start()
        yield kubelet


def static(pod: Object, name: str, volumes: Path, data: Object, mounts: tuple[Mount, ...] = ()) -> Object:
    """Return *pod* as a static one, which cannot refer to objects of a cluster.

    A directory takes the place of a ConfigMap. There is no device plugin, so there is no tap and the guest has no network.
    """
    pod = copy.deepcopy(pod)
    pod |= {"apiVersion": "v1", "kind": "Pod", "metadata": {**pod["metadata"], "name": name, "namespace": "static"}}
    [container] = pod["spec"]["containers"]
    container["resources"]["limits"].pop("squat.ai/vm", None)
    for volume in pod["spec"]["volumes"]:
        if "configMap" in volume:
            del volume["configMap"]
            place = volumes / volume["name"]
            place.mkdir(parents=True)
            for file, text in data.items():
                (place / file).write_text(text)
            volume["hostPath"] = {"path": str(place), "type": "Directory"}
    for number, (source, path, mode) in enumerate(mounts):
        pod["spec"]["volumes"].append({"name": f"more{number}", "hostPath": {"path": str(source)}})
        container["volumeMounts"].append({"name": f"more{number}", "mountPath": path, "readOnly": mode == "ro"})
    return pod


def test_the_articles_layout_of_a_real_kubelet(
    manifests: Manifests, kubelet: RealKubelet, guest: tuple[Mount, ...], tmp_path: Path
) -> None:
    cluster = Cluster(manifests, {}, tmp_path / "volumes", {}).with_the_rom("instance")
    data = cluster.manifests.of("instance", "ConfigMap")["data"]
    text, networks = re.subn(r"\[\[network\]\].*?\n\n", "", data["spec.toml"], flags=re.DOTALL)
    assert networks == 1
    daemon = static(
        cluster.manifests.of("controller", "DaemonSet")["spec"]["template"], "controller", cluster.scratch, {}
    )
    pod = static(cluster.manifests.of("instance", "Pod"), "instance", cluster.scratch, {"spec.toml": text}, guest)
    state = kubelet.directory / "cpu_manager_state"
    everything = until(lambda: kubelet.default if state.exists() else None, "a state", 240)
    kubelet.manifests.joinpath("controller.json").write_text(json.dumps(daemon))
    controller = kubelet.container("controller")
    controller.wait_for("ready socket=", 2 * SECONDS)

    kubelet.manifests.joinpath("instance.json").write_text(json.dumps(pod))
    running = kubelet.container("instance")
    [(uid, entries)] = kubelet.state["entries"].items()
    cpus = CpuSet.parse(entries["instance"])
    assert len(cpus) == 4
    assert not cpus & CpuSet.parse("0,4")
    instance = Instance(kubelet, uid, cpus, running)  # type: ignore[arg-type]  # not the stand-in kubelet
    instance.up()
    until(lambda: FLOAT.cpus() == kubelet.default == everything - cpus, "float without the instance's CPUs")
    instance.is_placed()
    assert running.scope.cpus("cpuset.cpus") == cpus
    looked = inspect(kubelet.directory)
    assert looked.returncode == 0, looked.stdout + looked.stderr
    print(looked.stdout)

    # The kubelet is restarted, and nothing changes.
    marks, members = instance.marks(), members_of(running.pid)
    subprocess.run(["systemctl", "restart", UNIT], check=True)
    until(lambda: kubelet.log.read_text().count("Starting kubelet main sync loop") == 2, "the kubelet to be back")
    assert (instance.marks(), members_of(running.pid)) == (marks, members)

    kubelet.manifests.joinpath("instance.json").unlink()
    running.wait_for("ended outcome=stopped status=0 faults=0", 2 * SECONDS)
    until(lambda: not instance.group.path.exists(), "the instance's cgroup to be gone")
    until(lambda: kubelet.default == FLOAT.cpus() == everything, "its CPUs to be in the shared pool")
    kubelet.manifests.joinpath("controller.json").unlink()
    until(lambda: not kubelet.containers("controller"), "the controller's end", 2 * SECONDS)
