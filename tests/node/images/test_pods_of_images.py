"""The images on a node with cgroup v2, as the manifests in examples/kubernetes run them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.cpuset import CpuSet
from tests.node.cgroups import ROOT, SECONDS, Cgroup
from tests.node.images.manifested import Cluster
from tests.node.standin_kubelet import Kubelet, Running, Runtime

BOTH = pytest.mark.parametrize("runtime", ["crun", "runc"])
CONTROLLER, INSTANCE = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
TREE = Cgroup(ROOT / "stelia")
LEFT_TO_THE_CONTROLLER = f"{1 << 1 | 1 << 19:016x}"
"""CAP_DAC_OVERRIDE and CAP_SYS_PTRACE, as /proc shows them."""


@pytest.fixture
def tree() -> Iterator[Cgroup]:
    """Return the controller's tree, which goes with the test."""
    yield TREE
    TREE.remove()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def get(container: Running, path: str) -> tuple[int, str]:
    """Ask the controller's HTTP server as the kubelet's probe does: at the pod's address."""
    code = (
        "import sys, urllib.request, urllib.error\n"
        "try: found = urllib.request.urlopen('http://127.0.0.1:9440' + sys.argv[1], timeout=5)\n"
        "except urllib.error.HTTPError as error: found = error\n"
        "print(found.status); print(found.read().decode())"
    )
    argv = ["nsenter", f"--target={container.pid}", "--net", "python3", "-c", code, path]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    status, _, text = done.stdout.partition("\n")
    return int(status), text


@BOTH
def test_the_daemon_set_has_the_rights_it_needs_and_no_more(
    cluster: Cluster, kubelet: Kubelet, tree: Cgroup, runtime: Runtime
) -> None:
    pod = cluster.pod("controller", "DaemonSet", CONTROLLER, CpuSet(), runtime=runtime)
    controller = kubelet.run(pod)["controller"]
    controller.wait_for("ready socket=")
    status = status_of(controller.pid)
    assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd")} == {LEFT_TO_THE_CONTROLLER}
    assert (status["NoNewPrivs"], status["CapInh"]) == ("1", f"{0:016x}")
    assert Cgroup(tree.path / "float").cpus() == kubelet.default
    assert get(controller, "/healthz")[0] == 200
    assert get(controller, "/readyz")[0] == 200
    assert "instance_cgroup_controller_instances 0" in get(controller, "/metrics")[1]
    assert kubelet.stop(CONTROLLER, grace=5) == {"controller": 0}, controller.output
