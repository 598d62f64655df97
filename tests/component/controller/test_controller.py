"""Registration, following the kubelet, refusals: a whole controller with a fake cgroupfs and a real socket."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.rate_limit import LogRateLimit
from runner.controller.metrics import ControllerCounters
from runner.controller.privileged_start import DeviceFilter
from runner.controller.serve.timeouts import Timeouts
from runner.controller.tree.faults import Fault
from runner.controller.tree.loop import Intervals
from runner.controller.tree.model import Group, Observed, Write
from runner.controller.tree.pass_log import PassLog
from runner.controller.tree.pods import MemberProcess, PodCgroups
from runner.controller.tree.tree import Tree
from runner.kernel.cgroup import Cgroup, CgroupError
from runner.kernel.kubelet_files import Frozen
from runner.kubelet.pod_cgroups import vcpus_group
from tests.support.fake_node import (
    ANCHORS,
    ENTRIES,
    HOST_NAMESPACE,
    QUICK,
    SHARED,
    A,
    B,
    C,
    Node,
    Parts,
    connected,
    controlled,
    scope_path,
)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


def opened(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


async def test_the_articles_exchange(node: Node) -> None:
    """The published request gets the published answer, with more members than the path."""
    node.put_state("2-3,8-19", {"0": {"x": "0-1"}, "123": {"instance": "4-7"}})
    printed = b"""{
"jsonrpc": "2.0",
"method": "registerCgroup",
"params": {
"uuid": "123",
"cpuset": "4-7"
},
"id": 123
}
"""
    async with controlled(node, trusting=True), connected(node.socket) as client:
        await client.send(printed)
        assert json.loads(await client.line()) == {
            "jsonrpc": "2.0",
            "result": {
                "cgroup_path": str(node.root.path / "instance-123" / "vcpus"),
                "float_path": str(node.root.path / "instance-123" / "float"),
                "cpuset": "4-7",
                "protocol": 3,
                "memory": 320 << 20,
            },
            "id": 123,
        }


async def test_builds_the_tree(node: Node) -> None:
    async with controlled(node):
        assert node.root.kind() == "domain"
        assert node.root.enabled() == {"cpu", "cpuset", "hugetlb", "memory", "pids"}
        assert node.float_cgroup.parent.enabled() == {"cpu", "cpuset", "pids"}
        assert (str(node.root.cpus()), str(node.root.mems())) == ("0-19", "0-1")
        assert node.float_cgroup.kind() == "threaded"
        assert (str(node.float_cgroup.cpus()), str(node.float_cgroup.mems())) == (SHARED, "0-1")


async def test_registers_once_and_again_with_the_same_answer(node: Node) -> None:
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        first = await client.result("registerCgroup", uuid=B, cpuset="14-17")
        before = node.snapshot()
        assert await client.result("registerCgroup", uuid=B, cpuset="14-15,16-17") == first
        assert node.snapshot() == before
        group = node.instance(B)
        assert (group.kind(), str(group.cpus()), str(group.mems())) == ("threaded", "14-17", "0-1")
        assert str(node.float_cgroup.cpus()) == SHARED
        await client.send(
            json.dumps({"jsonrpc": "2.0", "method": "registerCgroup", "params": [B, "14-17"], "id": "x"}).encode()
            + b"\n"
        )
        assert json.loads(await client.line())["result"] == first


async def test_a_domain_has_the_memory_nodes_of_its_pods_own_cgroup(node: Node) -> None:
    node.scope(A).write("cpuset.mems", "1")
    async with controlled(node):
        for uid, cpus, mems in ((A, "0-1,12-13", "1"), (B, "14-17", "")):  # B may use all
            node.become(uid)
            async with connected(node.socket) as client:
                await client.result("registerCgroup", uuid=uid, cpuset=cpus)
            assert str(node.domain(uid).mems()) == mems


async def test_the_answer_carries_five_descriptors_in_order(node: Node) -> None:
    node.become(B)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names only
    async with controlled(node), connected(node.socket) as client:
        request = {"jsonrpc": "2.0", "method": "registerCgroup", "params": {"uuid": B, "cpuset": "14-17"}, "id": 1}
        await client.send(json.dumps(request).encode() + b"\n")
        data, fds = await client.receive_fds()
        assert json.loads(data)["result"]["cpuset"] == "14-17"
        try:
            assert list(map(opened, fds)) == [
                str(node.pod(B).path / "cgroup.procs"),
                str(node.instance(B).path / "cgroup.threads"),
                str(node.scope(B).path / "cgroup.procs"),
                str(node.pod(B).path / "cgroup.threads"),
                str(node.domain(B).path / "memory.events"),
            ]
            for fd in (fds[0], fds[2]):
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.read(fd, 1)  # for writing only
            for fd in (fds[1], fds[3]):
                assert os.pread(fd, 100, 0).split() == []  # it lists the group's threads
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fds[4], b"1")
            assert b"oom_kill 0" in os.pread(fds[4], 100, 0)
        finally:
            for fd in fds:
                os.close(fd)
        # A batch has its answers, but no descriptors.
        await client.send(json.dumps([request]).encode() + b"\n")
        data, fds = await client.receive_fds()
        assert json.loads(data)[0]["result"]["cpuset"] == "14-17"
        assert fds == []
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  # names only


async def test_the_kernels_threads_in_the_pods_group_go_to_float(node: Node) -> None:
    """QEMU starts there, and so do the kernel's threads for it, which its runner cannot see."""
    async with controlled(node), connected(node.socket) as client:
        node.become(A)
        node.put_process(900, scope_path(A), inner=900, namespace=HOST_NAMESPACE)
        flags = " ".join(["1"] * 5 + [str(0x00208040)] + ["1"] * 12)
        (node.proc / "900" / "stat").write_text(f"900 (vhost-1) 2) S {flags} 1 0\n")
        node.put_process(901, scope_path(A), inner=5, namespace=f"pid-{A}")
        (node.scope(A).path / "cgroup.procs").write_text(f"{ANCHORS[A]}\n900\n901\n")
        await client.result("registerCgroup", uuid=A, cpuset=ENTRIES[A]["instance"])
        assert (node.pod(A).path / "cgroup.procs").read_text() == "900\n"


async def test_deregisters_from_float_with_the_anchor_as_witness(node: Node) -> None:
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.become(B, cgroup="/stelia/float")
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")  # a runner may ask again
        assert await client.result("deregisterCgroup", uuid=B) == {"removed": True}
        assert not node.instance(B).exists()
        assert await client.result("deregisterCgroup", uuid=B) == {"removed": False}


async def test_a_sidecar_does_not_deregister(node: Node) -> None:
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.scope(B).write("cpuset.cpus", SHARED)  # as the scope of another container of the pod has it
        assert (await client.refusal("deregisterCgroup", uuid=B))["reason"] == "identity"
        assert node.instance(B).exists()


async def test_deregistering_is_refused_while_a_thread_stays(node: Node) -> None:
    node.become(B)
    async with controlled(node, timeouts=QUICK), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).populate(True)
        refused = await client.refusal("deregisterCgroup", uuid=B)
        assert refused["reason"] == "host"
        assert "are still in" in str(refused["message"])


async def test_deregistering_waits_for_the_last_thread(node: Node) -> None:
    node.become(B)
    async with controlled(node, timeouts=Timeouts(emptying=20)), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).populate(True)
        results: list[object] = []

        async def deregister() -> None:
            results.append(await client.result("deregisterCgroup", uuid=B))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(deregister)
            await trio.sleep(0.1)
            assert not results
            node.instance(B).populate(False)
    assert results == [{"removed": True}]


@pytest.mark.parametrize("uuid", [A, "123", "unknown"])
async def test_a_client_cannot_act_for_another_pod(node: Node, uuid: str) -> None:
    node.become(A)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=A, cpuset="0-1,12-13")
        before = node.snapshot()
        node.become(B)
        for cgroup in (None, "/stelia/float"):
            node.become(B, cgroup=cgroup)
            for method, params in (("registerCgroup", {"cpuset": "0-1,12-13"}), ("deregisterCgroup", {})):
                assert (await client.refusal(method, uuid=uuid, **params))["reason"] == "identity"
        assert node.snapshot() == before


async def test_only_the_init_of_a_private_pid_namespace_is_accepted(node: Node) -> None:
    async with controlled(node) as controller, connected(node.socket) as client:
        for inner, namespace, word in ((7, None, "shareProcessNamespace"), (1, HOST_NAMESPACE, "hostPID")):
            node.become(B, inner=inner, namespace=namespace)
            for method, params in (("registerCgroup", {"cpuset": "14-17"}), ("deregisterCgroup", {})):
                assert word in str((await client.refusal(method, uuid=B, **params))["message"])
        assert controller.loop.counters.refusals["identity"] == 4
        assert not node.instance(B).exists()


async def test_a_client_in_float_is_refused_without_its_anchor(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client:
        node.become(B, cgroup="/stelia/float")
        (node.scope(B).path / "cgroup.procs").write_text("")
        assert "anchor" in str((await client.refusal("deregisterCgroup", uuid=B))["message"])
        (node.scope(B).path / "cgroup.procs").write_text(f"{ANCHORS[B]}\n")
        # Its number is another process's since: of another container, or of the client's own in another cgroup.
        for cgroup, namespace in ((scope_path(B), "pid-other"), (scope_path(A), f"pid-{B}")):
            node.put_process(ANCHORS[B], cgroup, inner=2, namespace=namespace)
            assert "anchor" in str((await client.refusal("deregisterCgroup", uuid=B))["message"])


async def test_a_stale_scope_is_waited_for(node: Node) -> None:
    node.become(B)
    node.scope(B).write("cpuset.cpus", "2-11")
    async with (
        controlled(node, timeouts=Timeouts(agreement=20)),
        connected(node.socket) as client,
        trio.open_nursery() as nursery,
    ):

        async def correct() -> None:
            await trio.sleep(0.1)
            node.scope(B).write("cpuset.cpus", "14-17")

        nursery.start_soon(correct)
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")


async def test_a_late_entry_is_waited_for(node: Node) -> None:
    node.become(B)
    node.put_state("2-11,14-17", {A: ENTRIES[A], C: ENTRIES[C]})
    async with (
        controlled(node, timeouts=Timeouts(agreement=20)),
        connected(node.socket) as client,
        trio.open_nursery() as nursery,
    ):

        async def allocate() -> None:
            await trio.sleep(0.05)
            node.put_state("2-11", {A: ENTRIES[A], C: ENTRIES[C]})  # in neither set
            await trio.sleep(0.05)
            node.put_state(SHARED, ENTRIES)

        nursery.start_soon(allocate)
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert str(node.float_cgroup.cpus()) == SHARED


async def test_lasting_disagreement_is_refused_with_both_values(node: Node) -> None:
    node.become(B)
    node.scope(B).write("cpuset.cpus", "14-15")
    async with controlled(node, timeouts=QUICK), connected(node.socket) as client:
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert refused["code"] == -32002
        assert (refused["requested"], refused["kubelet"], refused["scope"]) == ("14-17", "14-17", "14-15")
    node.scope(B).write("cpuset.cpus", "14-17")
    async with controlled(node, timeouts=Timeouts(agreement=3600)), connected(node.socket) as client:
        # The kubelet's state and the pod's cgroup agree against the request: no waiting.
        assert (await client.refusal("registerCgroup", uuid=B, cpuset="14-16"))["reason"] == "cpuset"
        assert not node.instance(B).exists()


@pytest.mark.parametrize(
    ("uuid", "cpuset"),
    [
        (B, ""),
        (B, "1.3"),
        (B, "5-3"),
        (B, "99999"),
        ("../x", "14-17"),
        ("", "14-17"),
        ("a" * 256, "14-17"),
        (f"{B}\n", "14-17"),
        (f"{B}\0", "14-17"),
        (B.upper(), "14-17"),
        ("cgroup.procs", "14-17"),
        ("а", "14-17"),  # noqa: RUF001  # a Cyrillic look-alike
    ],
)
async def test_malformed_parameters_touch_nothing(node: Node, uuid: str, cpuset: str) -> None:
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        before = node.snapshot()
        assert (await client.refusal("registerCgroup", uuid=uuid, cpuset=cpuset))["code"] == -32602
        assert node.snapshot() == before


async def test_parameters_are_counted_and_named(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client:
        for params in ({}, {"uuid": B}, {"uuid": B, "cpuset": "1", "colour": "red"}):
            assert (await client.refusal("registerCgroup", **params))["code"] == -32602
        assert (await client.refusal("getStatus", verbose="1"))["code"] == -32602
        assert (await client.refusal("rpc.discover"))["code"] == -32601


# -- following the kubelet -------------------------------------------------------------------------------------------


async def test_float_follows_every_change_of_the_shared_pool(node: Node) -> None:
    async with controlled(node) as controller:
        for shared, entries in (
            ("2-11,18-19", {A: ENTRIES[A], B: ENTRIES[B]}),
            ("2-5,18-19", {A: ENTRIES[A], B: ENTRIES[B], "not-an-instance": {"web": "6-11"}}),
            (SHARED, ENTRIES),
        ):
            node.put_state(shared, entries)
            await controller.until(lambda shared=shared: str(node.float_cgroup.cpus()) == shared)  # type: ignore[misc]


async def test_drift_is_corrected(node: Node) -> None:
    node.become(B)
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        for group, right in ((node.instance(B), "14-17"), (node.float_cgroup, SHARED)):
            group.write("cpuset.cpus", "0-19")
            await controller.until(lambda group=group, right=right: str(group.cpus()) == right)  # type: ignore[misc]
        assert controller.loop.counters.repairs == 2
        node.float_cgroup.write("cpuset.mems", "0")
        await controller.until(lambda: str(node.float_cgroup.mems()) == "0-1")
        with pytest.raises(CgroupError):  # EBUSY: those below have it
            node.root.write("cgroup.subtree_control", "-cpuset")
        node.domain(B).write("cgroup.subtree_control", "-cpuset")
        await controller.until(lambda: "cpuset" in node.domain(B).enabled() and str(node.instance(B).cpus()) == "14-17")


async def test_a_removed_root_is_created_again(node: Node) -> None:
    node.become(B)
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.float_cgroup.populate(False)
        for group in (
            node.instance(B),
            node.pod(B),
            node.domain(B),
            node.float_cgroup,
            node.float_cgroup.parent,
            node.root,
        ):
            assert group.remove()
        await controller.until(lambda: node.root.exists() and "cpuset" in node.root.enabled())
        # An instance is made by its registration only.
        assert not node.domain(B).exists()
        with pytest.raises(CgroupError):  # EBUSY: the root has it
            node.mount.write("cgroup.subtree_control", "-cpuset")


async def test_an_instance_is_removed_when_its_pod_and_its_threads_have_ended(node: Node) -> None:
    node.become(B)
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).populate(True)
        node.put_state("2-11,14-17", {A: ENTRIES[A], C: ENTRIES[C]})
        await controller.until(lambda: str(node.float_cgroup.cpus()) == SHARED and not controller.loop.frozen_because)
        await controller.loop.next_pass()  # by the change of cgroup.events
        assert str(node.instance(B).cpus()) == "14-17"  # its last threads still run there, alone
        node.instance(B).populate(False)
        await controller.until(lambda: not node.instance(B).exists())
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "2-11,14-17")
        assert controller.loop.counters.removed == 1


async def test_cpus_are_not_given_to_two_instances(node: Node) -> None:
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).populate(True)
        moved = {A: {"instance": "14-17"}, C: ENTRIES[C]}
        node.put_state("0-13", moved)
        node.scope(A).write("cpuset.cpus", "14-17")
        node.become(A)
        refused = await client.refusal("registerCgroup", uuid=A, cpuset="14-17")
        assert (refused["reason"], refused["holder"]) == ("conflict", B)
        node.instance(B).populate(False)
        assert await client.result("registerCgroup", uuid=A, cpuset="14-17")
        assert not node.instance(B).exists()


async def test_another_container_of_the_pod_does_not_take_over_its_instance(node: Node) -> None:
    node.become(B)
    async with controlled(node, timeouts=QUICK) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).populate(True)
        node.put_state("4-11", {**ENTRIES, B: {"instance": "14-17", "second": "2-3"}})
        await controller.eventually(lambda: str(node.float_cgroup.cpus()) == "4-11")
        node.scope(B).write("cpuset.cpus", "2-3")
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="2-3")
        assert (refused["reason"], refused["holder"]) == ("conflict", B)
        assert str(node.instance(B).cpus()) == "14-17"


async def test_foreign_groups_are_never_touched(node: Node) -> None:
    names = ["other", "instance-UPPER", "instance-a\nb", "instance-", "floats", "instance-a.b"]
    for name in names:
        node.root.child(name).create()
        node.root.child(name).write("cpuset.cpus", "0-19")
    async with controlled(node) as controller, connected(node.socket) as client:
        node.put_state("2-13", {B: ENTRIES[B], C: ENTRIES[C], "x": {"y": "0-1"}})
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "2-13")
        assert set(node.root.children()) == {*names, "instance-bystander"}
        assert all((node.root.path / name / "cpuset.cpus").read_text() == "0-19\n" for name in names)
        assert await client.instances() == []


async def test_half_built_domains_are_removed_and_half_built_groups_finished(node: Node) -> None:
    for uid in (A, B):
        node.domain(uid).create()
    node.domain(B).write("cgroup.subtree_control", "+cpuset")
    for group in (node.pod(B), node.instance(B)):
        group.create()
    async with controlled(node):
        assert not node.domain(A).exists()
        assert node.pod(B).kind() == node.instance(B).kind() == "threaded"
        assert (str(node.pod(B).cpus()), str(node.instance(B).cpus())) == (SHARED, "14-17")


async def test_a_tree_of_the_articles_shape_is_removed_when_it_is_empty_and_not_before(node: Node) -> None:
    node.become(B)
    node.float_cgroup.populate(False)
    for group in (node.float_cgroup, node.float_cgroup.parent):
        assert group.remove()
    old = [node.root.child("float"), node.root.child("float").child(A), node.domain(A)]
    for group in old:
        group.create()
        group.write("cgroup.type", "threaded")
    old[1].put_threads([900])
    old[0].populate(True)
    async with controlled(node) as controller, connected(node.socket) as client:
        assert f"threaded groups are in use in {node.root.path} (float); drain the node" in controller.loop.error
        assert (await controller.endpoints().respond("/readyz")).status == 503
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert "drain the node" in str(refused["message"])
        assert not node.domain(B).exists()
        old[1].put_threads([])
        old[0].populate(False)
        await controller.until(lambda: controller.loop.error == "")
        assert not any(group.exists() for group in old)
        assert node.root.kind() == "domain"
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")


async def test_domain_controllers_in_a_domain_are_switched_off(node: Node) -> None:
    node.become(B)
    node.root.write("cgroup.subtree_control", "+memory")
    node.domain(B).create()
    node.domain(B).write("cgroup.subtree_control", "+memory")
    node.pod(B).create()
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert node.domain(B).enabled() == {"cpu", "cpuset", "pids"}


# -- frozen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b"", b"{", b'{"policyName":"static","defaultCpuSet":"2-10"}', None])
async def test_on_an_unusable_state_decisions_freeze_and_thaw(node: Node, torn: bytes | None) -> None:
    node.become(B)
    state = node.kubelet / "cpu_manager_state"
    good = state.read_bytes()
    async with controlled(node, timeouts=QUICK) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).populate(True)
        before = node.snapshot()
        if torn is None:
            state.unlink()
        else:
            state.write_bytes(torn)
        await controller.until(lambda: bool(controller.loop.frozen_because))
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert refused["reason"] == "frozen"
        assert str(state) in str(refused["message"])
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert str(state) in status["frozen"]
        assert node.snapshot() == before
        state.write_bytes(good)
        await controller.until(lambda: not controller.loop.frozen_because)
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert controller.loop.counters.passes["frozen"]


async def test_a_state_that_was_read_once_is_not_acted_upon(node: Node) -> None:
    async with controlled(node) as controller:
        settled = controller.loop.confirmed_state()
        assert settled == controller.loop.state
        node.put_state("2-11,16-17", {**ENTRIES, B: {"instance": "14-15"}})
        unsettled = controller.loop.confirmed_state()  # before any pass could read the file again
        assert isinstance(unsettled, Frozen)
        assert "is changing" in unsettled.reason
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "2-11,16-17")
        assert controller.loop.confirmed_state() == controller.loop.state != settled


async def test_a_kubelet_that_comes_later_is_noticed(node: Node) -> None:
    (node.kubelet / "cpu_manager_state").unlink()
    async with controlled(node) as controller:
        assert controller.loop.frozen_because
        assert str(node.float_cgroup.cpus()) == ""  # nothing is known, so nothing is decided
        node.put_state(SHARED, ENTRIES)
        await controller.until(lambda: not controller.loop.frozen_because)
        assert str(node.float_cgroup.cpus()) == SHARED


async def test_a_kubelet_directory_that_is_created_late_or_replaced_is_followed(node: Node) -> None:
    aside = node.path / "aside"
    node.kubelet.rename(aside)
    intervals = Intervals(pause=0.005, readings=10, polled=0.1, least=0.01, repaired=0.01)
    async with controlled(node, intervals=intervals) as controller:
        assert controller.loop.frozen_because
        aside.rename(node.kubelet)
        await controller.until(lambda: not controller.loop.frozen_because)
        node.kubelet.rename(aside)
        await controller.until(lambda: bool(controller.loop.frozen_because))
        node.kubelet.mkdir()
        await controller.loop.next_pass()
        node.put_state("2-13", {B: ENTRIES[B], C: ENTRIES[C], "x": {"y": "0-1"}})
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "2-13")


async def test_policy_none(node: Node) -> None:
    node.become(B)
    node.put_state("", {}, policy="none")
    async with controlled(node) as controller, connected(node.socket) as client:
        assert str(node.float_cgroup.cpus()) == "0-19"
        assert "cpuManagerPolicy" in str((await client.refusal("registerCgroup", uuid=B, cpuset="14-17"))["message"])
        node.put_state(SHARED, ENTRIES)
        await controller.until(lambda: str(node.float_cgroup.cpus()) == SHARED)
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")


async def test_strictly_reserved_cpus_may_be_in_no_set(node: Node) -> None:
    node.put_state("4-11", {**ENTRIES})
    async with controlled(node) as controller:
        assert "--reserved-cpus" in controller.loop.frozen_because
        assert f"cannot talk to the server at '{node.pod_resources}'" in controller.loop.frozen_because
    async with controlled(node, reserved="2-3") as controller:
        assert not controller.loop.frozen_because
        assert str(node.float_cgroup.cpus()) == "4-11"


async def test_an_offline_cpu_cannot_be_registered(node: Node) -> None:
    node.become(B)
    (node.path / "sys/devices/system/cpu/online").write_text("0-16,18-19\n")
    async with controlled(node, timeouts=QUICK), connected(node.socket) as client:
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert refused["reason"] == "cpuset"
        assert "'17' are not online" in str(refused["message"])


async def test_a_cpuset_the_kernel_does_not_grant_is_no_registration(node: Node) -> None:
    """The root lacks a CPU: the kernel accepts the instance's cpuset and runs something else."""
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        (node.root.path / "cpuset.cpus.effective").write_text("0-15,17-19\n")
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert refused["reason"] == "host"
        assert "14-15,17" in str(refused["message"])
        assert not node.instance(B).exists()


async def test_without_the_device_filter_nothing_is_registered(node: Node) -> None:
    """Never attached, or attached to a root that was removed and made anew."""
    node.become(B)
    for device_filter, reason in (
        (DeviceFilter(node.root.path, error=HostError("cannot attach it", remedy="load it")), "cannot attach it"),
        (DeviceFilter(node.root.path, attached_to=1), "was removed, and its device filter with it"),
    ):
        async with controlled(node, device_filter=device_filter) as controller, connected(node.socket) as client:
            refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
            assert refused["reason"] == "host"
            assert reason in str(refused["message"])
            assert not node.instance(B).exists()
            status = await client.result("getStatus")
            assert isinstance(status, dict)
            [fault] = status["faults"]
            assert reason in fault
            assert status["remedies"] == {fault: refused["remedy"]}
            assert refused["remedy"] == ("restart the controller" if device_filter.lost else "load it")
            show = controller.endpoints(device_filter).respond
            ready = await show("/readyz")
            assert (ready.status, reason in ready.text) == (503, True)
            # A controller that could attach it at its next start is started again by the kubelet.
            assert ((await show("/healthz")).status == 503) is device_filter.lost
            assert (await show("/metrics")).status == 200
    kept = DeviceFilter(node.root.path, attached_to=node.root.path.stat().st_ino)
    async with controlled(node, device_filter=kept) as controller, connected(node.socket) as client:
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert (await controller.endpoints(kept).respond("/readyz")).status == 200


# -- starting again ---------------------------------------------------------------------------------------------------


async def test_a_restart_changes_nothing(node: Node) -> None:
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).populate(True)
    before = node.snapshot()
    async with controlled(node) as controller, connected(node.socket) as client:
        assert node.snapshot() == before
        assert set(+controller.loop.counters.passes) == {"clean"}, "of those that were made"
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
    assert node.snapshot() == before


async def test_a_restart_after_the_pod_is_gone_cleans_up(node: Node) -> None:
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
    node.put_state("2-11,14-17", {A: ENTRIES[A], C: ENTRIES[C]})
    async with controlled(node):
        assert node.root.children() == ("instance-bystander",)
        assert str(node.float_cgroup.cpus()) == "2-11,14-17"


# -- no kubelet, no identity -----------------------------------------------------------------------------------------


async def test_without_a_kubelet_the_first_request_gets_the_cpus(node: Node) -> None:
    async with (
        controlled(node, own_cpus="4-15", trusting=True, timeouts=QUICK) as controller,
        connected(node.socket) as client,
    ):
        assert str(node.float_cgroup.cpus()) == "0-19"
        await client.result("registerCgroup", uuid="one", cpuset="4-7")
        assert str(node.float_cgroup.cpus()) == "0-3,8-19"
        node.instance("one").populate(True)
        refused = await client.refusal("registerCgroup", uuid="two", cpuset="7-8")
        assert (refused["reason"], refused["holder"]) == ("conflict", "one")
        node.instance("one").populate(False)
        await client.result("registerCgroup", uuid="two", cpuset="7-8")  # an empty instance is removed for it
        assert str(node.float_cgroup.cpus()) == "0-6,9-19"
        await controller.until(lambda: node.root.children() == ("instance-bystander", "instance-two"))
        assert (await client.refusal("registerCgroup", uuid="three", cpuset="0-1"))["reason"] == "cpuset"
        assert await client.result("deregisterCgroup", uuid="two") == {"removed": True}
        assert str(node.float_cgroup.cpus()) == "0-19"


async def test_one_cpu_is_always_left_to_float(node: Node) -> None:
    async with controlled(node, own_cpus="0-19", trusting=True), connected(node.socket) as client:
        assert (await client.refusal("registerCgroup", uuid="all", cpuset="0-19"))["reason"] == "cpuset"
        await client.result("registerCgroup", uuid="most", cpuset="0-18")
        refused = await client.refusal("registerCgroup", uuid="rest", cpuset="19")
        assert refused["reason"] == "cpuset"
        assert str(node.float_cgroup.cpus()) == "19"


async def test_trusting_is_in_the_status(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with controlled(node, trusting=True), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert status["trusting"] is True
    assert f"instance registered uuid={B} cpus=14-17" in [record.getMessage() for record in caplog.records]


async def test_a_container_sees_its_own_instance_only(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client:
        for uid, cpuset in ((A, "0-1,12-13"), (B, "14-17")):
            node.become(uid)
            await client.result("registerCgroup", uuid=uid, cpuset=cpuset)
        own = await client.instances()
        assert own == [
            {
                "uuid": B,
                "cgroup_path": str(node.instance(B).path),
                "float_path": str(node.pod(B).path),
                "memory": 320 << 20,
                "oom_kills": 0,
                "cpuset": "14-17",
                "effective": "14-17",
                "populated": False,
                "guarantee": "arranged",
                "reason": "",
                "awaited_by": [],
                "without_seccomp": False,
                "reported": None,
            }
        ]
        node.put_process(os.getpid(), "/", inner=1, namespace=HOST_NAMESPACE)
        assert [item["uuid"] for item in await client.instances()] == [A, B]


async def test_the_state_replaced_a_thousand_times_a_second(node: Node) -> None:
    """The last state is not lost, no state of a millisecond is acted upon, and the loop does not spin."""
    async with controlled(node) as controller:
        before = controller.loop.counters.passes.total()
        started = trio.current_time()
        for number in range(500):
            shared = "2-11" if number % 2 else "2-10"
            entries = ENTRIES if number % 2 else {**ENTRIES, "x": {"y": "11"}}
            node.put_state(shared, entries)
            await trio.sleep(0.001)
        node.put_state("2-4", {**ENTRIES, "last": {"y": "5-11"}})
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "2-4")
        passes = controller.loop.counters.passes.total() - before
        # A pass takes two readings, 5 ms apart (the intervals of these tests).
        assert passes <= (trio.current_time() - started) / 0.005


async def test_a_stranger_is_refused_before_its_list_is_parsed(node: Node) -> None:
    node.become(A)
    async with controlled(node), connected(node.socket) as client:
        for wrong in ("x", "0-8191," * 2_000):
            assert (await client.refusal("registerCgroup", uuid=B, cpuset=wrong))["reason"] == "identity"


async def test_a_pod_can_neither_flood_the_log_nor_keep_another_out_of_it(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with controlled(node), connected(node.socket) as client:
        for pod in (A, B):
            node.become(pod)
            for _ in range(50):
                await client.refusal("registerCgroup", uuid=C, cpuset="18-19")
        for _ in range(5):  # after each there is a rest
            await client.result("registerCgroup", uuid=B, cpuset="14-17")
            await client.result("deregisterCgroup", uuid=B)
    lines = [record.getMessage() for record in caplog.records]
    for words in ("request refused", "instance registered", "instance deregistered"):
        assert sum(line.startswith(words) for line in lines) == (2 if words == "request refused" else 1), words
    left = [record.args[2] for record in caplog.records if "left out of this log" in str(record.msg) and record.args]  # type: ignore[index] # a tuple
    assert Counter(left) == {4: 2, 49: 2}


async def test_what_a_pod_changes_again_and_again_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """As one that may make user namespaces does with the CPUs of its groups, and one whose seal the kernel refuses each second."""
    group, written = vcpus_group(A), Write(vcpus_group(A), "cpuset.cpus", "1")
    pass_log = PassLog(Tree(Cgroup("/nowhere")), ControllerCounters(), LogRateLimit(), kubelet=True)
    pass_log.last_cpus = {group: CpuSet([1])}
    found = Group(CpuSet([2]), CpuSet(), CpuSet(), threaded=True, populated=True)
    observed = Observed(frozenset(), frozenset(), exists=True, groups={group: found})
    caplog.set_level(logging.INFO)
    for _ in range(50):
        await trio.lowlevel.checkpoint()  # as between two passes
        pass_log.add_actions([written], observed, ())
        pass_log.add_faults((Fault(group, "refused", group_usable=True),))
        pass_log.add_faults(())
    assert [record.getMessage().split(" group")[0] for record in caplog.records] == [
        "cpuset changed by others",
        "cpuset written",
        "limit missing",
    ]
    assert pass_log.counters.repairs == 50


@pytest.mark.parametrize("backwards", [False, True])
async def test_a_debugger_in_its_pid_namespace_is_not_taken_for_the_instance(node: Node, *, backwards: bool) -> None:
    """``kubectl debug --target``: a container beside the instance's; a hash of the names decides which is listed first."""
    node.become(B)

    class OrderedPods(PodCgroups):
        def processes(self, pod_uid: str) -> Iterator[MemberProcess]:
            yield from list(super().processes(pod_uid))[:: -1 if backwards else 1]

    async with controlled(node, parts=Parts(pods=OrderedPods)), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        put_debugger(node, 4242)
        # PID 1 is in float since.
        node.put_process(os.getpid(), f"/stelia/float/{B}", inner=1, namespace=f"pid-{B}")
        (node.proc / "self").unlink()
        (node.proc / "self").symlink_to("1")
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert await client.result("unsealCgroup", uuid=B) == {"unsealed": False}
        assert await client.result("deregisterCgroup", uuid=B) == {"removed": True}


def put_debugger(node: Node, pid: int) -> None:
    """Make a container of B's pod whose process *pid* is in the PID namespace of B's instance, and its cgroup the younger."""
    own = node.scope(B)
    # A file system of this machine may number directories in another order than cgroupfs.
    scopes = (own.parent.child(f"cri-containerd-{number:064x}.scope") for number in itertools.count())
    for scope in scopes:
        scope.create()
        if scope.path.stat().st_ino > own.path.stat().st_ino:
            break
    else:
        raise AssertionError("directories have numbers")
    scope.write("cpuset.cpus", SHARED)
    path = scope_path(B).replace(own.name, scope.name)
    node.put_process(pid, path, inner=77, namespace=f"pid-{B}", name="sh")
    (scope.path / "cgroup.procs").write_text(f"{pid}\n")
