"""Pods with resources of their own (``spec.resources``) under the kubelet's gate ``PodLevelResourceManagers``.

The files in ``tests/data/kubelet_state`` were written by the kubelet's own static policy (1.36), on a node with 16 CPUs of which
0-1 are reserved. Pod A asks for 8 CPUs: an init container (*fetch*) and two sidecars, *logs* on shared CPUs and *proxy* on one of
its own; the instance with 4 CPUs, and *metrics* on shared ones. Pod B asks for 3: the instance with 2, and *web*.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.kubelet.state_files import parse_cpu_state
from tests.support.fake_node import A, B, Node, connected, controlled

FILES = Path(__file__).parents[2] / "data/kubelet_state"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node.new(tmp_path)
    for file in ("online", "possible", "present"):
        if (path := tmp_path / "sys/devices/system/cpu" / file).exists():
            path.write_text("0-15\n")
    return node


def put(node: Node, name: str) -> None:
    """Replace the kubelet's file as the kubelet does."""
    shutil.copy(FILES / name, node.kubelet / "new")
    (node.kubelet / "new").rename(node.kubelet / "cpu_manager_state")


def test_the_kubelet_names_the_cpus_of_each_container_and_of_the_pod() -> None:
    state = parse_cpu_state((FILES / "cpu_v3_pod_scope").read_bytes())
    assert {name: str(cpus) for name, cpus in state.assignments[A].items()} == {
        "fetch": "2-9",  # it has ended when the others run
        "instance": "3-6",
        "logs": "7-9",
        "metrics": "7-9",
        "proxy": "2",
    }
    assert (str(state.assigned_to(A)), str(state.assigned_to(B))) == ("2-9", "10-12")
    alone = parse_cpu_state((FILES / "cpu_v3_container_scope").read_bytes())
    assert {name: str(cpus) for name, cpus in alone.assignments[A].items()} == {"instance": "3-6", "proxy": "2"}
    assert alone.pod_assignments == {}


@pytest.mark.parametrize(
    ("name", "shared", "given"),
    [
        # With the Topology Manager's scope pod, sidecars share what the pod has besides; none of it is float's.
        ("cpu_v3_pod_scope", "0-1,13-15", "'2' or '2-9' or '3-6' or '7-9'"),
        # With the scope container, they run on the node's shared CPUs, as float does.
        ("cpu_v3_container_scope", "0-1,9-15", "'2' or '3-6'"),
    ],
)
async def test_an_instance_beside_sidecars_gets_its_containers_cpus(
    node: Node, name: str, shared: str, given: str
) -> None:
    put(node, name)
    node.become(A)
    node.scope(A).write("cpuset.cpus", "3-6")
    async with controlled(node) as controller, connected(node.socket) as client:
        assert not controller.loop.frozen_because
        assert str(node.float_cgroup.cpus()) == shared
        for cpus in ("2-9", "3-9", "7-9", "2", "0-1"):
            message = str((await client.refusal("registerCgroup", uuid=A, cpuset=cpus))["message"])
            assert f"the kubelet's state has {given}, the container's cpuset.cpus '3-6'" in message
        assert await client.result("registerCgroup", uuid=A, cpuset="3-6")
        assert str(node.instance(A).cpus()) == "3-6"
        assert str(node.float_cgroup.cpus()) == shared


async def test_a_sidecar_on_the_pods_shared_cpus_cannot_end_the_instance(node: Node) -> None:
    put(node, "cpu_v3_pod_scope")
    node.become(A)
    node.scope(A).write("cpuset.cpus", "3-6")
    async with controlled(node), connected(node.socket) as client:
        assert await client.result("registerCgroup", uuid=A, cpuset="3-6")
        node.instance(A).populate(True)
        node.scope(A).write("cpuset.cpus", "7-9")
        refused = await client.refusal("deregisterCgroup", uuid=A)
        assert (refused["reason"], "another container's" in str(refused["message"])) == ("identity", True)


async def test_float_gets_nothing_of_a_pod_whose_containers_are_being_forgotten(node: Node) -> None:
    """The kubelet forgets them one by one, and gives the pod's CPUs back with the last (``RemoveContainer``)."""
    put(node, "cpu_v3_pod_scope")
    node.become(A)
    node.scope(A).write("cpuset.cpus", "3-6")
    async with controlled(node) as controller, connected(node.socket) as client:
        assert await client.result("registerCgroup", uuid=A, cpuset="3-6")
        node.instance(A).populate(True)
        put(node, "cpu_v3_pod_scope_ending")
        await controller.until(lambda: controller.loop.state == ending)
        assert str(node.float_cgroup.cpus()) == "0-1,13-15"
        assert CpuSet.parse("3-6") <= node.instance(A).cpus() <= CpuSet.parse("2-9"), "its vCPUs keep their CPUs"


ending = parse_cpu_state((FILES / "cpu_v3_pod_scope_ending").read_bytes())
