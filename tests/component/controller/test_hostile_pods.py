"""What a pod leaves in float and in an instance's cgroup, and what its requests may cost, over a fake cgroupfs."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from runner.base.cpuset import CpuSet
from runner.controller.command_line import LimitOptions
from runner.controller.serve.callers import BETWEEN_CHECKPOINTS, MOST_PROCESSES
from runner.controller.serve.registrations import MOST_REMOVED, REST
from runner.controller.serve.timeouts import Timeouts
from runner.controller.tree.faults import Fault
from runner.controller.tree.held_files import FILES, HeldFiles
from runner.controller.tree.loop import Intervals, ReconcileLoop
from runner.controller.tree.model import Evict, Observed, Requested
from runner.controller.tree.tree import MOVED_AT_ONCE, REMOVED_AT_ONCE, Tree
from runner.kernel.cgroup import Cgroup, CgroupError
from runner.kernel.kubelet_files import Frozen
from runner.kernel.procfs import Procfs
from runner.protocol.controller_client import PROTOCOL
from tests.support.fake_cgroupfs import FakeCgroup
from tests.support.fake_node import (
    ANCHORS,
    ENTRIES,
    HOST_NAMESPACE,
    QUICK,
    RAM,
    SHARED,
    A,
    B,
    C,
    Client,
    Controller,
    Node,
    Parts,
    connected,
    controlled,
    scope_path,
)
from tests.support.leases import attempting_leases, leasing

WITHOUT_B = {A: ENTRIES[A], C: ENTRIES[C]}
OFTEN = Intervals(pause=0.005, readings=10, eviction=0.02, polled=0.02, least=0.01, repaired=0.01)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


def limits(node: Node) -> dict[str, str]:
    return {file: node.root.read(file) for file in ("cpu.weight", "memory.max", "pids.max")}


async def test_a_pod_has_limits_of_its_own_in_float(node: Node) -> None:
    node.become(B)
    options = LimitOptions(pod_pids_max=40)
    async with controlled(node, limit_options=options) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        domain = node.domain(B)
        assert (domain.kind(), domain.read("pids.max"), domain.read("cpu.weight")) == ("domain threaded", "40", "100")
        assert (domain.read("memory.max"), domain.read("memory.swap.max")) == (str(320 << 20), "0")
        assert domain.read("hugetlb.2MB.max") == domain.read("hugetlb.2MB.rsvd.max") == "0"
        assert str(domain.cpus()) == "", "it has the root's"
        for group, file in ((domain, "pids.max"), (domain, "cpu.weight"), (node.instance(B), "cpu.weight")):
            before = group.read(file)
            await trio.testing.wait_all_tasks_blocked(0.05)
            group.write(file, "77")
            await controller.until(lambda group=group, file=file, before=before: group.read(file) == before)  # type: ignore[misc]
        assert await client.result("deregisterCgroup", uuid=B) == {"removed": True}
        await controller.until(lambda: not domain.exists())


def put_ended(node: Node, pid: int, tid: int, path: str, *, parent: int = 1, tracer: int = 0) -> None:
    """Add thread *tid* of process *pid*, which has ended in the cgroup *path*, and for which *tracer*, or else *parent*, does not wait."""
    node.put_process(tid, path, inner=2, namespace="pid", leader=pid)
    task = node.proc / str(pid) / "task" / str(tid)
    task.mkdir(parents=True)
    (task / "stat").write_text(f"{tid} (a) b) Z {parent} {' '.join(['1'] * 17)} 1 0\n")
    with (node.proc / str(tid) / "status").open("a") as status:
        status.write(f"TracerPid:\t{tracer}\n")


async def test_a_pod_that_leaves_ended_processes_in_anothers_float_is_ended(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The other has passed its descriptors on, and its domain may be gone: the kernel counts the processes in the root alone."""
    options = LimitOptions(pod_pids_max=40, pids_max=200)
    often = Intervals(pause=0.005, readings=10, least=0.01, reclaimed=0.02)
    path = f"/{node.domain(B).path.relative_to(node.mount.path)}/float (deleted)"
    async with controlled(node, limit_options=options, intervals=often, counted_every=0.02) as controller:
        for parent, pod, number in ((6998, A, 38), (6999, B, 40)):
            node.put_process(parent, scope_path(pod), inner=2, namespace=f"pid-{pod}")
            for pid in range(parent * 100, parent * 100 + number):
                put_ended(node, pid, pid, path, parent=parent)
        node.put_process(7100, scope_path(C), inner=2, namespace=f"pid-{C}")
        for tid in (7101, 7102, 7103):
            put_ended(node, 7100, tid, path, tracer=6998)
        kills = [Path(pod, "cgroup.kill") for uid in (A, B) for pod in controller.loop._pods.existing(uid)]
        for number in (99, 100):
            assert [kill.read_text() for kill in kills] == ["", ""]
            (node.root.path / "pids.current").write_text(f"{number}\n")
            await trio.sleep(3 * controller.loop._intervals.processes)
        await controller.until(lambda: bool(kills[0].read_text()))
        assert kills[1].read_text() == "", "it has no more than it may"
        assert f"pod with too many processes in float ended uuid={A} processes=41" in caplog.messages


async def test_a_pod_with_too_many_processes_is_ended_before_others_have_too_few(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """It has moved them to float, which the kernel does not refuse."""
    options = LimitOptions(pod_pids_max=40, pids_max=200)
    async with (
        controlled(node, limit_options=options, counted_every=0.02) as controller,
        connected(node.socket) as client,
    ):
        for pod in (A, B):
            node.become(pod)
            await client.result("registerCgroup", uuid=pod, cpuset=ENTRIES[pod]["instance"])
            node.instance(pod).put_threads([1])
        for number in (99, 100):
            assert node.instance(B).threads(), "there is room for others"
            for group, tasks in ((node.domain(A), 40), (node.domain(B), number - 40), (node.root, number)):
                (group.path / "pids.current").write_text(f"{tasks}\n")
            await trio.sleep(3 * controller.loop._intervals.processes)
        await controller.until(lambda: not node.instance(B).threads())
        assert node.instance(A).threads(), "it has no more than it may"
        assert f"pod with too many processes in float ended uuid={B} processes=60" in caplog.messages


def test_what_still_runs_of_a_pod_that_is_gone_is_not_ended_for_too_many_processes(tmp_path: Path) -> None:
    """Without a kubelet its guest may still run."""
    for path, used, most in ((".", 200, 400), ("instance-a", 150, 40), ("instance-b", 50, 0)):
        (tmp_path / path).mkdir(exist_ok=True)
        (tmp_path / path / "pids.current").write_text(f"{used}\n")
        (tmp_path / path / "pids.max").write_text(f"{most}\n")
    assert [*Tree(Cgroup(tmp_path)).crowded()] == [("a", 150)]


def without_seccomp(controller: Controller) -> frozenset[str]:
    """Return the pods that may write their groups, as the metrics count them."""
    return controller.seccomp.without(controller.loop.recently_observed().floats())


@pytest.mark.parametrize(
    ("seccomp", "uid_map", "sysctl", "exposed"),
    [
        (0, "0 0 4294967295", "user/max_user_namespaces 15000", True),
        (0, "0 0 4294967295", "kernel/unprivileged_userns_clone 1", True),
        (0, "0 0 4294967295", "kernel/unprivileged_userns_clone 0", False),
        (0, "0 0 4294967295", "user/max_user_namespaces 0", False),
        (0, "0 65536 65536", "user/max_user_namespaces 15000", False),
        (2, "0 0 4294967295", "user/max_user_namespaces 15000", False),
    ],
)
async def test_a_pod_that_may_write_its_groups_is_named(
    node: Node,
    caplog: pytest.LogCaptureFixture,
    seccomp: int,
    uid_map: str,
    sysctl: str,
    exposed: bool,  # noqa: FBT001
) -> None:
    node.become(B)
    node.expose(os.getpid(), seccomp=seccomp, uid_map=uid_map)
    setting, value = sysctl.split()
    (node.proc / "sys" / setting).parent.mkdir(exist_ok=True)
    (node.proc / "sys" / setting).write_text(f"{value}\n")
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert ("instance without seccomp" in caplog.text) is exposed
        node.pod(B).put_threads([os.getpid()])
        instances, status = await client.instances(), await client.result("getStatus")
        assert isinstance(status, dict)
        assert (instances[0]["without_seccomp"], status["without_seccomp"]) == (exposed, [B] if exposed else [])
        assert without_seccomp(controller) == ({B} if exposed else set())


async def test_what_a_pod_may_do_is_not_read_for_each_request(node: Node) -> None:
    """A status may have 700 KB; one that cannot be read because of a lease is no good sign."""
    node.become(B)
    node.expose(os.getpid())
    read = list[int | str]()

    class WatchedProcfs(Procfs):
        def may_make_root(self, pid: int | str = "self") -> bool:
            read.append(pid)
            return super().may_make_root(pid)

    parts = Parts(procfs=WatchedProcfs)
    async with controlled(node, parts=parts) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        read.clear()
        assert without_seccomp(controller) == set(), "it has no process there yet"
        node.pod(B).put_threads([os.getpid()])
        for _ in range(10):
            status = await client.result("getStatus")
            assert isinstance(status, dict)
            assert status["without_seccomp"] == [B]
        assert read == [os.getpid()]
        controller.seccomp.cached_for = 0
        node.expose(os.getpid(), seccomp=2)
        assert without_seccomp(controller) == set()
        controller.loop.held_files.close()  # as if the pod had been faster
        with leasing(node.pod(B).path / "cgroup.threads"):
            assert without_seccomp(controller) == {B}


def counting_observations(looks: list[None]) -> Parts:
    """Return the parts of a controller that adds to *looks* each time it reads the tree."""

    class WatchedTree(Tree):
        def observe(self) -> Observed:
            looks.append(None)
            return super().observe()

    return Parts(tree=WatchedTree)


async def test_the_tree_is_not_read_for_each_question(node: Node) -> None:
    """Any process may ask, and each look at the tree takes the longer the more instances there are."""
    looks, intervals = list[None](), attrs.evolve(OFTEN, recent=math.inf)
    async with (
        controlled(node, intervals=intervals, parts=counting_observations(looks)) as controller,
        connected(node.socket) as client,
    ):
        await trio.testing.wait_all_tasks_blocked(0.05)
        looks.clear()
        for method in ("getStatus", "listInstances") * 3:
            await client.result(method)
        node.become(B)
        assert await client.result("unsealCgroup", uuid=B) == {"unsealed": False}
        assert not looks
        controller.loop._intervals = attrs.evolve(OFTEN, recent=0)
        await client.result("getStatus")
        assert len(looks) == 1


async def test_a_registration_reads_the_tree_before_and_after_it(node: Node) -> None:
    looks = list[None]()
    node.become(B)
    async with (
        controlled(node, intervals=Intervals(least=60), parts=counting_observations(looks)),
        connected(node.socket) as client,
    ):
        await trio.testing.wait_all_tasks_blocked(0.05)
        looks.clear()
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert len(looks) == 2
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert len(looks) == 3, "nothing was to be done"


async def test_a_pod_that_registers_without_end_leaves_others_their_turn(node: Node) -> None:
    node.become(B)
    passes = list[float]()

    class SlowLoop(ReconcileLoop):
        def pass_over(self, requests: Mapping[str, Requested], observed: Observed | None = None) -> tuple[Fault, ...]:
            if requests:
                passes.append(time.monotonic())
                time.sleep(0.02)
            return super().pass_over(requests, observed)

    async def register() -> None:
        async with connected(node.socket) as client:
            await client.result("registerCgroup", uuid=B, cpuset="14-17")

    async with controlled(node, parts=Parts(loop=SlowLoop)), trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(register)
    assert len(passes) == 4
    assert min(after - before for before, after in pairwise(passes)) > 0.02 * REST


async def test_what_a_process_may_do_is_not_read_for_each_registration(node: Node) -> None:
    """The first process of any container may ask for one, and have a status of 700 KB."""
    node.become(B)
    read = list[int | str]()

    class WatchedProcfs(Procfs):
        def may_make_root(self, pid: int | str = "self") -> bool:
            read.append(pid)
            return False

    async with controlled(node, parts=Parts(procfs=WatchedProcfs)), connected(node.socket) as client:
        for _ in range(10):
            await client.result("registerCgroup", uuid=B, cpuset="14-17")
    assert read == [os.getpid()]


async def test_a_pod_that_may_write_its_groups_is_refused_on_demand(node: Node) -> None:
    node.become(B)
    node.expose(os.getpid())
    async with controlled(node, require_seccomp=True) as controller, connected(node.socket) as client:
        controller.seccomp.cached_for = 0
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert refused["reason"] == "host"
        assert "set seccompProfile: RuntimeDefault" in str(refused["message"])
        assert not node.instance(B).exists()
        node.expose(os.getpid(), seccomp=2)
        await client.result("registerCgroup", uuid=B, cpuset="14-17")


async def test_no_process_can_lease_what_a_registered_pod_reaches(node: Node) -> None:
    node.become(B)
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        files = [group.path / file for group in (node.pod(B), node.instance(B)) for file in FILES]
        files.append(node.domain(B).path / "memory.events")
        with attempting_leases(*filter(Path.exists, files)) as results:
            assert {*results} == {"refused"}
        assert await client.result("deregisterCgroup", uuid=B) == {"removed": True}
        await controller.until(lambda: not any(B in path for path in controller.loop.held_files._held))


def test_files_are_held_for_writing_whatever_their_mode_is(tmp_path: Path) -> None:
    """A pod may change the mode of its own, and lease for reading what is open for reading alone."""
    held, modes = HeldFiles(), {"cpuset.cpus": 0o444, "cgroup.procs": 0o200, "cpu.weight": 0o644, "cgroup.type": 0}
    with ExitStack() as files:
        files.callback(held.close)
        for name, mode in modes.items():
            (tmp_path / name).touch(mode)
        held.hold([f"{tmp_path}/{name}" for name in modes])
        assert held.error == ""
        for name in modes:
            reader = files.enter_context((tmp_path / name).open())
            with pytest.raises(BlockingIOError):
                fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_RDLCK)


@pytest.mark.parametrize("file", ["cpuset.cpus", "cgroup.procs"])
async def test_a_pod_that_leases_its_own_files_is_refused_and_keeps_nobody_waiting(node: Node, file: str) -> None:
    node.become(B)
    with leasing(node.scope(B).path / file):
        async with controlled(node) as controller, connected(node.socket) as client:
            refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
            assert refused["reason"] == "host"
            assert f"{file}: a process holds a lease on it (fcntl(2), F_SETLEASE); end that process" in str(refused)
            node.become(C)
            async with connected(node.socket) as other:
                await other.result("registerCgroup", uuid=C, cpuset="18-19")
            assert controller.loop.error == ""


async def test_a_container_cannot_lease_the_file_that_ends_it(node: Node) -> None:
    """Without a kubelet this file is of the container's own cgroup. A lease from before the registration is outwaited."""
    container = "5baab67f1daf9297c60974e50ad9f94f288077161a7c41376478e79aae671e07"
    scope = Cgroup(node.mount.path / f"system.slice/docker-{container}.scope")
    scope.path.mkdir(parents=True)
    kill = scope.path / "cgroup.kill"
    kill.write_text("")
    async with controlled(node, own_cpus="4-15", trusting=True) as controller, connected(node.socket) as client:
        with ExitStack() as lease:
            lease.enter_context(leasing(kill))
            await client.result("registerCgroup", uuid=container, cpuset="4-7")
            assert controller.loop.held_files.leased == {str(kill)}
        await controller.until(lambda: not controller.loop.held_files.leased)
        with attempting_leases(kill) as results:
            assert results == ["refused"]


async def test_removed_groups_that_the_kernel_keeps_are_limited(node: Node) -> None:
    node.become(B)
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        stat = node.domain(B).path / "cgroup.stat"
        for number in (MOST_REMOVED, MOST_REMOVED + 1):
            stat.write_text(f"nr_descendants 2\nnr_dying_descendants {number}\n")
            await client.result("registerCgroup", uuid=B, cpuset="14-17")  # it makes none
            node.instance(B).remove()
            if number <= MOST_REMOVED:
                await client.result("registerCgroup", uuid=B, cpuset="14-17")
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert refused["reason"] == "host"
        assert f"{MOST_REMOVED + 1} removed cgroups of it" in str(refused["message"])
        assert not node.instance(B).exists()
        assert not controller.loop.error


async def test_a_lease_from_before_the_start_is_outwaited_and_none_can_be_had_again(node: Node) -> None:
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).put_threads([900])
    events = node.instance(B).path / "cgroup.events"
    with ExitStack() as lease:
        lease.enter_context(leasing(events))
        async with controlled(node) as controller, connected(node.socket) as client:
            assert "a process holds a lease on it" in controller.loop.error
            refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
            assert f"{events}: a process holds a lease on it" in str(refused["message"])
            lease.close()
            await controller.until(lambda: controller.loop.error == "")
            with attempting_leases(events) as results:
                assert results == ["refused"]


async def test_the_pods_group_stays_until_it_is_empty(node: Node) -> None:
    node.become(B)
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.pod(B).put_threads([900])
        assert await client.result("deregisterCgroup", uuid=B) == {"removed": True}
        assert node.pod(B).exists()
        await trio.testing.wait_all_tasks_blocked(0.05)  # no pass is made any more, until something is reported
        node.pod(B).put_threads([])
        await controller.until(lambda: not node.pod(B).exists())


async def test_all_together_are_limited_by_the_size_of_the_node(node: Node) -> None:
    async with controlled(node):
        assert limits(node) == {"cpu.weight": "100", "memory.max": str(RAM // 8), "pids.max": "250000"}
        assert {node.root.read(f"{name}.max") for name in ("hugetlb.2MB", "hugetlb.2MB.rsvd", "memory.swap")} == {"0"}
    pods = node.mount.child("kubepods.slice")
    pods.write("memory.max", str(RAM // 4 * 3))  # the kubelet reserves a quarter
    pods.write("cpu.weight", "790")
    async with controlled(node):
        assert limits(node) == {"cpu.weight": "790", "memory.max": str(RAM // 4), "pids.max": "250000"}
    options = LimitOptions(memory_max=None, cpu_weight=40, pids_max=None)
    async with controlled(node, limit_options=options):
        assert limits(node) == {"cpu.weight": "40", "memory.max": "max", "pids.max": "max"}


async def test_memory_in_use_is_not_killed_by_a_new_limit(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    async with controlled(node, limit_options=LimitOptions(memory_max=None)):
        assert limits(node)["memory.max"] == "max"
    current = node.root.path / "memory.current"
    current.write_text(f"{9 << 30}\n")
    async with controlled(node, limit_options=LimitOptions(memory_max=8 << 30)) as controller:
        assert limits(node)["memory.max"] == "max"
        assert (
            "memory.max to 8589934592: more than that is in use, or given to instances; end instances, or give --memory-max"
            in caplog.text
        )
        assert controller.loop.error == "", "the node is ready"
        warnings = len(caplog.records)
        current.write_text(f"{7 << 30}\n")
        await controller.eventually(lambda: limits(node)["memory.max"] == str(8 << 30))
        assert [record for record in caplog.records[warnings:] if record.levelno >= logging.WARNING] == []


async def test_an_instance_gets_what_its_pods_own_limit_leaves_when_the_guests_memory_is_charged(node: Node) -> None:
    node.become(B)
    for group, most, used in ((node.scope(B).parent, 6 << 30, 5 << 30), (node.scope(B), 5 << 30, 9 << 29)):
        group.parent.write("cgroup.subtree_control", "+memory")
        group.write("memory.max", str(most))
        (group.path / "memory.current").write_text(f"{used}\n")
    (node.scope(B).path / "memory.stat").write_text(f"active_file {64 << 20}\ninactive_file {64 << 20}\n")
    async with controlled(node, limit_options=LimitOptions(memory_max=16 << 30)), connected(node.socket) as client:
        asked = {"uuid": B, "cpuset": "14-17", "protocol": PROTOCOL, "overhead": 200 << 20}
        first = await client.result("registerCgroup", **asked)
        assert isinstance(first, dict)
        assert first["memory"] == 320 << 20 == int(node.domain(B).read("memory.max"))
        more = await client.result("registerCgroup", **asked, charged=True)
        assert isinstance(more, dict)
        left = (1 << 29) + (128 << 20)  # of the container's, which has less left than its pod; page cache is no reason
        assert more["memory"] == left
        (node.scope(B).path / "memory.current").write_text(f"{5 << 30}\n")
        for charged in (False, True):
            again = await client.result("registerCgroup", **asked, charged=charged)
            assert isinstance(again, dict)
            assert again["memory"] == left, "nothing is taken from what runs"


async def test_what_an_idle_pod_leaves_is_not_all_its_own(node: Node) -> None:
    """The share of a pod that has a quarter of the machine's memory is a quarter of what all instances can have."""
    for uid, most in ((A, RAM // 2), (B, RAM // 4)):
        for group in (node.scope(uid).parent, node.scope(uid)):
            group.parent.write("cgroup.subtree_control", "+memory")
            group.write("memory.max", str(most))
    async with controlled(node, limit_options=LimitOptions(memory_max=2 << 30)), connected(node.socket) as client:
        for uid, share in ((B, 512 << 20), (A, 1 << 30)):
            node.become(uid)
            asked = {"uuid": uid, "cpuset": ENTRIES[uid]["instance"], "protocol": PROTOCOL, "overhead": 300 << 20}
            await client.result("registerCgroup", **asked)
            more = await client.result("registerCgroup", **asked, charged=True)
            assert isinstance(more, dict)
            assert more["memory"] == share == int(node.domain(uid).read("memory.max"))


@pytest.mark.parametrize("charged", [False, True])
@pytest.mark.parametrize(
    ("memory", "qos", "overhead", "expected"),
    [
        (1 << 30, "", 300 << 20, 320 << 20),
        (1 << 30, "", 400 << 20, 400 << 20),  # no more than the share of its CPUs, four of twenty
        (1 << 30, "", 409 << 20, 409 << 20),
        (1 << 30, "", 410 << 20, None),
        (1 << 30, "", 1 << 60, None),
        (RAM // 2, "", 900 << 20, 1 << 30),  # its share by memory
        (RAM // 2, "", 2 << 30, None),
        (None, "", 400 << 20, 400 << 20),
        (None, "", 1 << 60, None),
        (RAM * 10, "burstable", 900 << 20, None),  # no promise: all pods together may have any limits
        (RAM * 10, "burstable", 300 << 20, 320 << 20),
    ],
)
async def test_what_an_instance_names_gets_it_no_more_than_its_pods_share(
    node: Node, memory: int | None, qos: str, overhead: int, expected: int | None, *, charged: bool
) -> None:
    """What a client needs is compared with what it may have; else one pod could name all, and no other be registered."""
    node.become(B)
    scope = node.scope(B)
    if qos:
        scope = node.move_pod(B, qos)
    for group in (scope.parent, scope):
        group.parent.write("cgroup.subtree_control", "+memory")
        group.write("memory.max", str(memory or "max"))
    async with controlled(node, limit_options=LimitOptions(memory_max=2 << 30)), connected(node.socket) as client:
        asked = {"uuid": B, "cpuset": "14-17", "protocol": PROTOCOL, "overhead": overhead}
        if expected is None:
            refused = await client.refusal("registerCgroup", **asked, charged=charged)
            assert f"it needs {overhead >> 20} MiB besides the guest's memory, and it may have" in str(
                refused["message"]
            )
            assert not node.domain(B).exists()
        else:
            await client.result("registerCgroup", **asked)
            await client.result("registerCgroup", **asked, charged=charged)
            has = int(node.domain(B).read("memory.max"))
            assert has == (expected if charged else max(overhead, 320 << 20))


async def test_memory_that_others_hold_stays_charged_to_the_pod_that_took_it(node: Node) -> None:
    """Each registration has a domain of its own, and memory outlives it: in a memfd that was passed on, in tmpfs, in flight."""
    node.become(B)
    options = LimitOptions(memory_max=930 << 20, pod_memory=320 << 20)
    often = attrs.evolve(OFTEN, reclaimed=0.02)
    async with (
        controlled(node, limit_options=options, intervals=often, timeouts=QUICK) as controller,
        connected(node.socket) as client,
    ):
        for _ in range(3):
            await client.result("registerCgroup", uuid=B, cpuset="14-17")
            node.domain(B).put_charge(300 << 20)
            assert await client.result("deregisterCgroup", uuid=B) == {"removed": True}
            assert node.domain(B).children() == ()
        assert int(node.domain(B).read("memory.max")) == 320 << 20, "the pod may register again"
        node.become(A)
        refused = await client.refusal("registerCgroup", uuid=A, cpuset=ENTRIES[A]["instance"], overhead=315 << 20)
        assert "290 of the 930 MiB of --memory-max are left" in str(refused["message"]), "the bystander has 320"
        node.put_state("2-11,14-17", WITHOUT_B)
        node.end_pod(B)
        await controller.eventually(lambda: bool(controller.loop.faults))
        assert node.domain(B).exists()
        [fault] = controller.loop.faults
        assert f"cannot remove {node.domain(B).path}: 300 MiB are charged to it" in fault.reason
        assert fault.remedy.startswith("end that program")
        assert controller.loop.error == "", "the node is ready"
        # Nothing more, of buffers of sockets that were made in it.
        await controller.until(lambda: int(node.domain(B).read("memory.max")) == 300 << 20)
        node.domain(B).put_charge(15 << 20)
        await controller.until(lambda: not node.domain(B).exists())


async def test_all_instances_together_get_no_more_than_the_tree_has(node: Node) -> None:
    options = LimitOptions(memory_max=900 << 20, pod_memory=320 << 20)
    async with controlled(node, limit_options=options, timeouts=QUICK), connected(node.socket) as client:
        node.become(A)
        await client.result("registerCgroup", uuid=A, cpuset=ENTRIES[A]["instance"], overhead=100 << 20)
        node.become(B)
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17", overhead=300 << 20)
        assert "it needs 300 MiB besides the guest's memory, and 260 of the 900 MiB of --memory-max are left" in str(
            refused
        )
        assert not node.domain(B).exists()
        cut = await client.result("registerCgroup", uuid=B, cpuset="14-17", overhead=200 << 20, protocol=PROTOCOL)
        assert isinstance(cut, dict)
        assert cut["memory"] == 260 << 20
        together = [int(group.read("memory.max")) for group in map(node.root.child, node.root.children())]
        assert sum(together) == 900 << 20


async def test_what_the_kernel_ends_for_want_of_memory_is_told(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.become(B)
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        events = node.domain(B).path / "memory.events"
        events.write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n")
        await controller.eventually(lambda: controller.loop.counters.oom_kills == 2)
        assert f"out of memory in float uuid={B} processes=2 most={320 << 20}" in caplog.messages
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert status["oom_kills"] == {B: 2}
        assert "oom_kills_total 2.0" in (await controller.endpoints().respond("/metrics")).text
        node.become(A)
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert status["oom_kills"] == {}
    async with controlled(node) as controller:
        assert controller.loop.counters.oom_kills == 0, "it was told"


async def test_the_metrics_are_made_ten_times_a_second_however_many_ask(node: Node) -> None:
    async with controlled(node) as controller:
        endpoints, asked_at, made = controller.endpoints(), time.monotonic(), list[object]()
        while len(made) < 4:
            page = await endpoints.respond("/metrics")
            made += [] if made and made[-1] is page else [page]
        assert time.monotonic() - asked_at >= 0.3


async def test_a_float_that_cannot_be_shrunk_keeps_its_cpus_from_others_and_blocks_no_one_else(node: Node) -> None:
    def refuse(group: FakeCgroup, file: str, value: str) -> None:
        if (group.path, file) == (node.float_cgroup.path, "cpuset.cpus"):
            raise CgroupError(f"cannot write {value!r} to {group.path / file}", errno.ENOMEM)

    node.put_state("2-11,14-17", {A: ENTRIES[A], C: ENTRIES[C]})
    async with controlled(node) as controller, connected(node.socket) as client:
        assert str(node.float_cgroup.cpus()) == "2-11,14-17"
        node.mount.behaviour.before_write = refuse
        node.put_state(SHARED, ENTRIES)
        await controller.eventually(lambda: bool(controller.loop.faults))
        node.become(B)
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert "the float of pod 'bystander' could not be shrunk, and runs on them still" in str(refused)
        assert not node.instance(B).exists()
        node.become(C)
        assert await client.result("registerCgroup", uuid=C, cpuset="18-19")
        assert {fault.pod_uid for fault in controller.loop.faults} == {"bystander"}


async def test_what_the_kernel_does_not_offer_is_reported_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.become(B)
    (node.mount.path / "cgroup.controllers").write_text("cpuset\n")
    async with controlled(node) as controller, connected(node.socket) as client:
        for _ in range(3):
            await client.result("registerCgroup", uuid=B, cpuset="14-17")
            controller.loop.request_pass()
            await controller.loop.next_pass()
        assert controller.loop.error == ""
        for name in ("cpu", "hugetlb", "memory", "pids"):
            assert caplog.text.count(f"by the {name} controller") == 1
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert len(status["faults"]) == 4


async def test_a_limit_that_the_kernel_refuses_stops_nothing(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.become(B)
    options = LimitOptions(pod_pids_max=1 << 23, pids_max=1 << 23)
    async with controlled(node, limit_options=options) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert str(node.instance(B).cpus()) == "14-17"
        assert node.domain(B).read("cpu.weight") == "100"
        controller.loop.request_pass()
        await controller.loop.next_pass()
        assert controller.loop.error == ""
        for group in (node.root, node.domain(B)):
            assert caplog.text.count(f"to {group.path / 'pids.max'}") == 1


# -- an instance whose pod has gone -----------------------------------------------------------------------------------


async def registered_and_given_away(node: Node) -> None:
    """Register B, whose groups then hold threads, also of a process of pod C."""
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
    node.instance(B).put_threads([801, 802])
    (node.domain(B).path / "cgroup.procs").write_text("801\n")
    node.put_process(801, "/stelia/float/x", inner=7, namespace="pid-c", name="evil\rname\x1b")
    node.put_process(802, "/stelia/float/x", inner=7, namespace="pid-c", leader=801)
    node.put_process(703, scope_path(C), inner=1, namespace="pid-c")
    node.set_parent(801, 703)


async def test_strangers_leave_the_cpus_of_a_pod_that_has_gone(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    await registered_and_given_away(node)
    async with controlled(node) as controller:
        node.put_state("2-11,14-17", WITHOUT_B)
        await controller.eventually(
            lambda: not isinstance(state := controller.loop.state, Frozen) and B not in state.assigned()
        )
        assert node.instance(B).threads() == {801, 802}, "its pod still exists: its guest is being powered down"
        assert node.domain(B).read("pids.max") == "2048"
        await trio.testing.wait_all_tasks_blocked(0.05)  # no pass is made any more, until something is reported
        node.end_pod(B)
        await controller.until(lambda: not node.domain(B).exists())  # woken by the removal
        await controller.until(lambda: str(node.float_cgroup.cpus()) == "2-11,14-17")
        [warning] = [record.getMessage() for record in caplog.records if "without a pod" in record.getMessage()]
        assert f"uuid={B} rest=ended processes=1 one=801 'evil\\rname\\x1b' of pod {C}" in warning
        assert "\r" not in warning


async def test_a_third_pod_registers_on_the_cpus_that_strangers_held(node: Node) -> None:
    await registered_and_given_away(node)
    node.put_state("2-11", {A: {"instance": "14-17"}, C: ENTRIES[C], "x": {"y": "0-1,12-13"}})
    node.scope(A).write("cpuset.cpus", "14-17")
    node.become(A)
    timeouts = Timeouts(agreement=0.4)
    async with controlled(node, timeouts=timeouts) as controller, connected(node.socket) as client:
        assert (await client.refusal("registerCgroup", uuid=A, cpuset="14-17"))["holder"] == B
        node.end_pod(B)
        controller.loop._pass_requested = trio.Event()  # no pass is made: the registration itself finds it
        assert await client.result("registerCgroup", uuid=A, cpuset="14-17")
        assert not node.instance(B).exists()


async def test_what_cannot_be_ended_at_once_has_floats_cpus_meanwhile(node: Node) -> None:
    """A process that hangs in the kernel, or others that enter as fast as they are ended."""
    await registered_and_given_away(node)
    node.put_state("2-11,14-17", WITHOUT_B)
    node.end_pod(B)
    node.mount.behaviour.uninterruptible = True
    async with controlled(node, intervals=OFTEN) as controller:
        assert str(node.float_cgroup.cpus()) == str(node.instance(B).cpus()) == "2-11,14-17", "their CPUs are free"
        assert node.domain(B).read("pids.max") == "0", "they cannot fork"
        assert node.instance(B).threads() == {801, 802}
        node.mount.behaviour.uninterruptible = False
        await controller.until(lambda: not node.domain(B).exists())


async def test_without_a_kubelet_threads_are_moved_some_at_a_time(node: Node) -> None:
    """There the cgroup of a container is lost with its last anchor, and the guest may run."""
    await registered_and_given_away(node)
    node.instance(B).put_threads(range(1000, 1000 + MOVED_AT_ONCE + 5))
    tree = Tree(node.root)
    assert tree.apply([Evict(B)], CpuSet(range(20))) == ((Evict(B),), ())
    assert len(node.instance(B).threads()) == 5
    assert len(node.pod(B).threads()) == MOVED_AT_ONCE


async def test_threads_that_cannot_be_named_or_end_meanwhile(node: Node) -> None:
    await registered_and_given_away(node)
    node.instance(B).put_threads([0, 801, 802])
    moved = []

    def end(_group: FakeCgroup, file: str, value: str) -> None:
        if file == "cgroup.threads":
            moved.append(value)
            if value == "801":
                node.instance(B).remove_thread(801)

    node.mount.behaviour.before_write = end
    assert Tree(node.root).apply([Evict(B)], CpuSet(range(20))) == ((Evict(B),), ())
    assert moved[:2] == ["801", "802"]
    assert "0" not in moved, "0 would be this program"
    assert node.instance(B).threads() == {0}
    assert node.pod(B).threads() == {802}


@pytest.mark.parametrize("threads", [[], [801, 802]])
async def test_groups_that_a_pod_has_made_keep_no_cpus(node: Node, threads: list[int]) -> None:
    """With a group below it, one without any member cannot be removed."""
    node.become(B)
    async with controlled(node) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        for group in (node.instance(B), node.pod(B)):
            group.write("cgroup.max.descendants", "max")  # as a pod can that mounts the hierarchy
            with pytest.raises(CgroupError, match=r"max\.descendants"):
                group.child("x").create()
            node.domain(B).write("cgroup.max.descendants", "max")  # as it cannot
            below = group.child("x").child("y")
            for each in (below.parent, below):
                each.create()
                each.write("cgroup.type", "threaded")
            await controller.until(lambda group=group: group.read("cgroup.max.descendants") == "0")  # type: ignore[misc]
        below = node.instance(B).child("x").child("y")
        below.put_threads(threads)
        node.instance(B).populate(bool(threads))
        node.become(C)
        node.put_state("2-11", {A: ENTRIES[A], C: {"instance": "14-17"}, "x": {"y": "18-19"}})
        node.scope(C).write("cpuset.cpus", "14-17")
        node.end_pod(B)
    async with controlled(node, intervals=OFTEN) as controller, connected(node.socket) as client:
        assert await client.result("registerCgroup", uuid=C, cpuset="14-17")
        await controller.until(lambda: not node.instance(B).exists())
        assert controller.loop.error == ""
        await controller.until(lambda: not node.domain(B).exists())


async def test_more_groups_than_one_pass_removes(node: Node) -> None:
    """The CPUs are float's from the first pass on."""
    node.become(B)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
    for group in (node.domain(B), node.instance(B)):
        group.write("cgroup.max.descendants", "max")
    for number in range(REMOVED_AT_ONCE + 5):
        node.instance(B).child(f"x{number}").create()
    node.put_state("2-11,14-17", WITHOUT_B)
    node.end_pod(B)
    async with controlled(node, intervals=OFTEN) as controller:
        assert len(node.instance(B).children()) == 5
        assert str(node.float_cgroup.cpus()) == str(node.instance(B).cpus()) == "2-11,14-17"
        assert controller.loop.error == ""
        await controller.until(lambda: not node.instance(B).exists())


@pytest.mark.parametrize("kubepods", [True, False])
async def test_a_name_that_is_no_pods_or_an_unknown_cgroup_root_is_left_alone(node: Node, *, kubepods: bool) -> None:
    name = B if not kubepods else "no-pod"
    async with controlled(node, trusting=True), connected(node.socket) as client:
        node.put_state(SHARED, {A: ENTRIES[A], name: ENTRIES[B], C: ENTRIES[C]})
        await client.result("registerCgroup", uuid=name, cpuset="14-17")
    node.instance(name).put_threads([801])
    node.put_state("2-11,14-17", WITHOUT_B)
    if not kubepods:
        (node.mount.path / "kubepods.slice").rename(node.mount.path / "elsewhere.slice")
    async with controlled(node):
        assert node.instance(name).threads() == {801}
        assert str(node.float_cgroup.cpus()) == SHARED


# -- the cost of a request --------------------------------------------------------------------------------------------


def put_processes(node: Node, uid: str, count: int) -> None:
    """Put *count* processes of other PID namespaces into the pod *uid*, before its anchor."""
    node.put_process(5000, scope_path(uid), inner=5, namespace="pid-other")
    numbers = [*itertools.repeat("5000", count), str(ANCHORS[uid])]
    (node.scope(uid).path / "cgroup.procs").write_text("\n".join(numbers) + "\n")


async def turns_of_others(controller: Controller, clients: Sequence[Client]) -> int:
    """Register B by each of *clients* at the same time; return how often another task has its turn until all is done."""
    turns = 0

    async def request(client: Client) -> None:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(request, client)
        while controller.server.in_flight < len(clients):
            await trio.lowlevel.checkpoint()
        while controller.server.in_flight:
            turns += 1
            await trio.lowlevel.checkpoint()
    return turns


async def test_requests_of_a_pod_with_many_processes_let_others_have_their_turn(node: Node) -> None:
    """They look for the anchor, then for the kernel's threads; of one container, one request at a time."""
    node.become(B, cgroup="/stelia/float/x")
    steps = MOST_PROCESSES // 2 // BETWEEN_CHECKPOINTS
    async with controlled(node) as controller, connected(node.socket) as one, connected(node.socket) as other:
        put_processes(node, B, MOST_PROCESSES // 2)
        assert 2 * steps <= await turns_of_others(controller, [one]) < 3 * steps
        assert 4 * steps <= await turns_of_others(controller, [one, other])


async def test_only_so_many_processes_are_looked_at(node: Node) -> None:
    node.become(B, cgroup="/stelia/float/x")
    async with controlled(node), connected(node.socket) as client:
        put_processes(node, B, MOST_PROCESSES - 1)
        assert await client.result("registerCgroup", uuid=B, cpuset="14-17")
        put_processes(node, B, MOST_PROCESSES)
        assert "keep the anchor running" in str((await client.refusal("deregisterCgroup", uuid=B))["message"])


async def test_no_process_is_looked_at_for_a_peer_that_may_not_act(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client:
        for inner, namespace in ((7, None), (1, HOST_NAMESPACE)):
            node.become(B, cgroup="/stelia/float/x", inner=inner, namespace=namespace)
            (node.scope(B).path / "cgroup.procs").write_text("unreadable\n")
            assert (await client.refusal("registerCgroup", uuid=B, cpuset="14-17"))["reason"] == "identity"


class NumbersGivenAgain(FakeCgroup):
    """A cgroup of a hierarchy in which thread 1001 of B ends when 1000 is moved; its number goes to a thread of A's."""

    def confine(self, tid: int) -> None:
        super().confine(tid)
        root = self.parent.parent
        if tid == 1000 and root.child(f"instance-{B}").child("vcpus").remove_thread(1001):
            root.child(f"instance-{A}").child("vcpus").put_threads([1001])


async def test_a_number_that_is_given_again_while_threads_are_moved_is_not_written(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client:
        for pod in (A, B):
            node.become(pod)
            await client.result("registerCgroup", uuid=pod, cpuset=ENTRIES[pod]["instance"])
    node.instance(B).put_threads(range(1000, 1005))
    tree = Tree(NumbersGivenAgain(node.root.path))
    assert tree.apply([Evict(B)], CpuSet(range(20))) == ((Evict(B),), ())
    assert node.instance(A).threads() == {1001}
    assert node.instance(B).threads() == set()
    assert node.pod(B).threads() == {1000, 1002, 1003, 1004}


async def test_a_pod_that_writes_its_cpus_again_and_again_does_not_keep_the_controller_busy(node: Node) -> None:
    intervals = Intervals(pause=0.001, readings=10, least=0.001, repaired=0.2)
    async with controlled(node, intervals=intervals) as controller, connected(node.socket) as client:
        node.become(B)
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        before, started = controller.loop.counters.repairs, trio.current_time()
        for _ in range(300):
            node.instance(B).write("cpuset.cpus", "2-3")
            await trio.sleep(0.002)
        repairs = controller.loop.counters.repairs - before
        assert 1 <= repairs <= (trio.current_time() - started) / intervals.repaired + 1


async def test_a_pod_that_fills_and_empties_its_cgroup_does_not_keep_the_controller_busy(node: Node) -> None:
    intervals = Intervals(pause=0.001, readings=10)
    async with controlled(node, intervals=intervals) as controller, connected(node.socket) as client:
        node.become(B)
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        before, started = controller.loop.counters.passes.total(), trio.current_time()
        for number in range(300):
            node.instance(B).populate(bool(number % 2))
            await trio.sleep(0.002)
        passes = controller.loop.counters.passes.total() - before
        assert passes <= (trio.current_time() - started) / intervals.least + 1
        # The pass of a registration is its own, and does not wait for those.
        node.instance(B).populate(False)
        pending = controller.loop.counters.passes.total()
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert controller.loop.counters.passes.total() - pending >= 1


async def test_a_container_sees_no_faults_of_other_pods(node: Node) -> None:
    async with controlled(node) as controller, connected(node.socket) as client:
        node.become(B)
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        (node.instance(B).path / "cpuset.cpus.effective").write_text("0\n")
        await controller.eventually(lambda: bool(controller.loop.faults))
        for pod, seen in ((A, 0), (B, 1)):
            node.become(pod)
            status = await client.result("getStatus")
            assert isinstance(status, dict)
            assert [f"instance-{B}" in fault for fault in status["faults"]] == [True] * seen
        node.put_process(os.getpid(), "/", inner=1, namespace=HOST_NAMESPACE)
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert [f"instance-{B}" in fault for fault in status["faults"]] == [True]
