"""The images as containerd runs them for a kubelet: in its cgroups, with its network, ended by its stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import SECONDS, Cgroup, cgroup_of, mask_of, until
from tests.node.containerd.daemon import Containerd
from tests.node.containerd.pods import Contained, KubeletOfContainerd, inspect
from tests.node.images.manifested import Cluster
from tests.node.instances import TREE, Instance, members_of
from tests.node.standin_kubelet import Mount

CONTROLLER, INSTANCE = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
EXCLUSIVE = CpuSet.parse("2-3,6-7")


pytestmark = [pytest.mark.usefixtures("reserved"), pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def tree() -> Iterator[Cgroup]:
    """Return the controller's tree, which is removed after the pods of the test."""
    yield TREE
    TREE.remove()


def interface(namespace: str) -> dict[str, Any]:
    """Return the IPv4 addresses of the pod's interface and the bridge it is a port of, as ``ip`` shows them there."""
    argv = ["nsenter", f"--net={namespace}", "ip", "-json", "address", "show", "dev", "eth0"]
    shown: list[dict[str, Any]] = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    [found] = shown
    addresses = [each["local"] for each in found["addr_info"] if each["family"] == "inet"]
    return {"master": found.get("master"), "addresses": addresses}


def test_the_articles_layout_in_containerds_cgroups_until_its_stop(
    cluster: Cluster, kubelet: KubeletOfContainerd, containerd: Containerd, guest: tuple[Mount, ...]
) -> None:
    controller = kubelet.run(cluster.pod("controller", "DaemonSet", CONTROLLER, CpuSet(), runtime="runc"))["controller"]
    controller.wait_for("ready socket=")
    assert cgroup_of(controller.pid) == str(controller.scope)
    url = f"http://{kubelet.address(CONTROLLER)}:9440/readyz"
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        assert answer.status == 200

    pod = cluster.with_the_rom("instance").pod("instance", "Pod", INSTANCE, EXCLUSIVE, runtime="runc", mounts=guest)
    running = kubelet.run(pod)["instance"]
    assert isinstance(running, Contained)
    assert running.status()["labels"]["io.kubernetes.pod.uid"] == INSTANCE
    instance = Instance(kubelet, INSTANCE, EXCLUSIVE, running)
    instance.up()
    assert instance.receipt()["backend"] == "controller"
    until(lambda: instance.float_group.cpus() == kubelet.default, "float without the instance's CPUs")
    instance.is_placed()
    assert running.scope.cpus("cpuset.cpus") == EXCLUSIVE
    assert running.scope.cpus().isdisjoint(EXCLUSIVE), "the kernel keeps the pod's own processes off"
    assert controller.scope.cpus() == kubelet.default

    # The guest has the address that CNI gave the pod: its interface is a port of the bridge and has none.
    address, namespace = kubelet.address(INSTANCE), kubelet.namespace(INSTANCE)
    taken = interface(namespace)
    assert (taken["addresses"], bool(taken["master"])) == ([], True)

    # A process that an exec leaves behind stays in the pod's cgroup, off the exclusive CPUs.
    running.execute("sh", "-c", "tail -f /dev/null >/dev/null 2>&1 &")
    [stray] = instance.processes()["tail"]
    assert cgroup_of(stray) == instance.scope
    assert mask_of(stray).isdisjoint(EXCLUSIVE)
    os.kill(stray, signal.SIGKILL)
    until(lambda: "tail" not in instance.processes(), "the stray to be gone")
    instance.is_placed()

    # An upgrade of containerd changes nothing.
    marks, members = instance.marks(), members_of(running.pid)
    containerd.restart()
    assert instance.marks() == marks
    assert members_of(running.pid) == members
    assert running.execute("cat", "/proc/1/comm")

    looked = inspect(kubelet.directory)
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert f"instance {INSTANCE}: CPUs '{EXCLUSIVE}'" in looked.stdout
    assert f"cri-containerd-{running.id}.scope" in looked.stdout

    running.stop(grace=60)
    assert running.wait() == 0, running.output
    assert running.status()["reason"] == "Completed"
    ended = json.loads(kubelet.termination_log(INSTANCE, "instance").read_text())
    assert (ended["outcome"], ended["status"], ended["faults"]) == ("stopped", 0, [])
    assert not instance.group.path.exists()
    given_back = interface(namespace)
    assert (given_back["addresses"], given_back["master"]) == ([address], None)
    assert kubelet.stop(INSTANCE) == {"instance": 0}
    assert kubelet.stop(CONTROLLER, grace=5) == {"controller": 0}, controller.output
