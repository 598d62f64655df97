"""A cluster for the tests: its control plane, and the emulated node that joins it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.control_plane import ADDRESS, ControlPlane, control_plane
from tests.cluster.instances import CONTROLLER, POD_SECONDS, SOON, deployed, instances_left
from tests.cluster.joined_node import POD_NETWORK, TAP, JoinedNode, joined_node
from tests.cluster.kubectl import Kubectl, until
from tests.cluster.manifests import copied

Given = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    if "RUNNER_CLUSTER" not in os.environ:
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="a cluster is missing: tests/cluster/run --bin DIR makes one"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure when it happens: the rest takes half an hour."""
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)


@pytest.fixture(scope="session")
def given() -> Given:
    """Return the files that tests/cluster/run has found, made or built."""
    found: Given = json.loads(os.environ["RUNNER_CLUSTER"])
    return found


@pytest.fixture(scope="session")
def network() -> str:
    """Make this network namespace's interfaces, a tap for the node among them, and return our address."""
    for command in (
        "link set lo up",
        f"tuntap add dev {TAP} mode tap",
        f"address add {ADDRESS}/24 dev {TAP}",
        f"link set {TAP} up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return ADDRESS


@pytest.fixture(scope="session")
def control(given: Given, network: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    print(f"the API server is at {network}")
    place = tmp_path_factory.mktemp("control-plane")
    binaries, client, etcd = (Path(given[name]) for name in ("binaries", "kubectl", "etcd"))
    with control_plane(binaries, client, etcd, place) as control:
        print(f"the control plane was ready after {control.ready_after:.1f} s")
        yield control


@pytest.fixture(scope="session")
def kubectl(control: ControlPlane) -> Kubectl:
    return control.kubectl


@pytest.fixture(scope="session")
def node(given: Given, control: ControlPlane) -> Iterator[JoinedNode]:
    """Return the emulated node with containerd and kubelet; it is Ready in the API."""
    if "disks" not in given:
        pytest.skip("the node is missing: tests/cluster/run --only without-node was asked for")
    begun = time.monotonic()
    with joined_node(given, control) as node:
        subprocess.run(["ip", "route", "add", POD_NETWORK, "via", node.address], check=True)
        print(f"the node was Ready after {time.monotonic() - begun:.1f} s")
        yield node


@pytest.fixture(scope="session")
def cluster(kubectl: Kubectl, node: JoinedNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Apply the cluster's part of a copy of the examples, and return the copy; controller and device plugin are ready."""
    examples = copied(tmp_path_factory.mktemp("examples"))
    kubectl("apply", "-k", str(examples / "cluster"))
    for namespace, name in (("instance-runner", CONTROLLER), ("kube-system", "instance-device-plugin")):
        kubectl("rollout", "status", "-n", namespace, f"daemonset/{name}", f"--timeout={POD_SECONDS}s")

    def handed_out() -> bool:
        return int(kubectl.json("get", "node", node.name)["status"]["allocatable"].get("squat.ai/vm", 0)) > 0

    until(handed_out, "the device plugin to hand out its devices", SOON)
    yield examples
    print("--- the kubelet", (node.results / "kubelet.log").read_text(errors="replace")[-5000:], sep="\n")


@pytest.fixture
def start(kubectl: Kubectl, node: JoinedNode, cluster: Path) -> Iterator[Any]:
    """Return a function that applies a directory of the examples; nothing of it is left after the test."""
    with ExitStack() as stack:
        yield lambda directory, name: stack.enter_context(deployed(kubectl, node, cluster / directory, name))
    until(lambda: not instances_left(node), "no instance's cgroup to be left", SOON)


@pytest.fixture(autouse=True)
def durations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print how long each test has taken, for the record in README.md."""
    begun = time.monotonic()
    yield
    print(f"{request.node.name}: {time.monotonic() - begun:.0f} s")
