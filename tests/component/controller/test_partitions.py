"""The cgroup writer, and the requests to seal an instance; ``tests/node/test_partitions.py`` has the kernel's part."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio
import trio.testing

from runner.base.cpuset import CpuSet
from runner.base.judgement import Level
from runner.check.checker import ask_controller
from runner.check.checks import Place
from runner.check.node import judge_controller
from runner.controller.privileged_process import serve
from runner.controller.serve.methods import Method
from runner.controller.serve.seals import Seals
from runner.controller.tree.cgroup_writer import CgroupWriter, obey
from runner.instance.parts.cgroups.controller import BUSY_FOR, _seal
from runner.instance.timeouts import InstanceTimeouts
from runner.kernel.cgroup import CgroupError
from runner.kernel.leases import END_LEASE
from runner.placement.backends import ControllerPlacement
from runner.protocol.controller_client import register, seal, unseal
from runner.protocol.jsonrpc_client import CallRefusedError
from runner.protocol.unix_server import SocketLimits
from tests.support.fake_cgroupfs import FakeCgroup
from tests.support.fake_node import LONG, A, B, Client, Node, Parts, connected, controlled, in_a_thread
from tests.support.leases import leasing


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


@pytest.fixture
def pair() -> Iterator[tuple[CgroupWriter, socket.socket]]:
    """Return the controller's end, and the writer's."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(5)
    with ours, its:
        yield CgroupWriter(ours), its


@pytest.fixture
def writer(node: Node) -> Iterator[CgroupWriter]:
    """Return a writer that works in a thread, below the node's root."""
    with in_a_thread(lambda message: b"%d" % obey(node.root.path, message)) as connection:
        yield CgroupWriter(connection)


def test_it_writes_the_cpus_of_a_partition(tmp_path: Path) -> None:
    group = tmp_path / "instance-a/vcpus"
    group.mkdir(parents=True)
    (group / "cpuset.cpus.exclusive").write_text("4-5\n")
    assert obey(tmp_path, b"instance-a/vcpus 4-7,9") == 0
    assert (group / "cpuset.cpus.exclusive").read_text() == "4-7,9\n"
    for message in (
        *(b"instance-a/vcpus ", b"instance-a/vcpus x", b"instance-a/vcpus 4 member", b"instance-a/float 4"),
        *(b"instance-a 4", b" 4", b"instance-a/vcpus 4\n/../5"),
    ):
        assert obey(tmp_path, message) == errno.EINVAL
    assert (group / "cpuset.cpus.exclusive").read_text() == "4-7,9\n"


def test_it_writes_one_word_to_one_file_of_an_instance(tmp_path: Path) -> None:
    group = tmp_path / "instance-a/vcpus"
    group.mkdir(parents=True)
    file = group / "cpuset.cpus.partition"
    file.write_text("member\n")
    assert obey(tmp_path, b"instance-a/vcpus") == 0
    assert file.read_text() == "isolated\n"
    assert obey(tmp_path, b"instance-b/vcpus") == errno.ENOENT


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"float",
        b"instance-",
        b"instance-..",
        b"instance-a",
        b"instance-a/float",
        b"instance-a/vcpus/",
        b"instance-a/vcpus/vcpus",
        b"instance-a/../float",
        b"../x",
        b"instance-a\n",
        b"instance-\xff",
        b".",
    ],
)
def test_it_refuses_every_other_name(tmp_path: Path, message: bytes) -> None:
    for name in ("float", "instance-a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpuset.cpus.partition").write_text("member\n")
    assert obey(tmp_path, message) == errno.EINVAL
    assert {file.read_text() for file in tmp_path.glob("*/cpuset.cpus.partition")} == {"member\n"}


def test_it_waits_for_no_lease(tmp_path: Path, pair: tuple[CgroupWriter, socket.socket]) -> None:
    file = tmp_path / "instance-a/vcpus/cpuset.cpus.partition"
    file.parent.mkdir(parents=True)
    file.write_text("member\n")
    with leasing(file):
        number = obey(tmp_path, b"instance-a/vcpus")
    assert (number, file.read_text()) == (errno.EAGAIN, "member\n")
    pair[1].send(b"%d\n" % number)
    with pytest.raises(CgroupError, match="a process holds a lease on it") as refused:
        pair[0].isolate("instance-a")
    assert refused.value.remedy == END_LEASE


def test_it_follows_no_link(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for path in (root / "instance-b/vcpus", root / "instance-c", other / "vcpus"):
        path.mkdir(parents=True)
    (other / "vcpus/cpuset.cpus.partition").write_text("member\n")
    (root / "instance-a").symlink_to(other)
    (root / "instance-b/vcpus/cpuset.cpus.partition").symlink_to(other / "vcpus/cpuset.cpus.partition")
    (root / "instance-c/vcpus").symlink_to(other / "vcpus")
    for name in (b"instance-a/vcpus", b"instance-c/vcpus"):
        assert obey(root, name) in (errno.ENOTDIR, errno.ELOOP)
    assert obey(root, b"instance-b/vcpus") == errno.ELOOP
    (tmp_path / "link").symlink_to(root)
    assert obey(tmp_path / "link", b"instance-b/vcpus") in (errno.ENOTDIR, errno.ELOOP)
    assert (other / "vcpus/cpuset.cpus.partition").read_text() == "member\n"


def test_its_refusal_and_its_end_are_errors(pair: tuple[CgroupWriter, socket.socket]) -> None:
    writer, its = pair
    its.send(b"%d\n" % errno.ENOENT)
    with pytest.raises(CgroupError, match="No such file"):
        writer.isolate("instance-a")
    assert not writer.lost
    its.close()
    with pytest.raises(CgroupError, match="has ended; restart the controller"):
        writer.isolate("instance-a")
    assert writer.lost


def test_a_late_answer_is_never_taken_for_another(pair: tuple[CgroupWriter, socket.socket]) -> None:
    writer, its = pair
    writer.connection.settimeout(0.01)
    with pytest.raises(CgroupError, match="has ended"):
        writer.isolate("instance-a")
    with pytest.raises(OSError, match="Broken pipe"):
        its.send(b"0\n")
    assert writer.lost
    with pytest.raises(CgroupError, match="has ended"):
        writer.isolate("instance-b")


async def test_an_instance_is_sealed_and_unsealed(node: Node, writer: CgroupWriter) -> None:
    node.become(B)
    async with controlled(node, partition_writer=writer) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        answer = await client.result("sealCgroup", uuid=B)
        assert answer == {"guarantee": "arranged", "reason": "no thread is in its cgroup"}
        node.instance(B).put_threads({11, 12})
        assert await client.result("sealCgroup", uuid=B) == {"guarantee": "enforced"}
        assert (node.instance(B).partition(), node.instance(B).exclusive_cpus()) == ("isolated", CpuSet.parse("14-17"))
        assert node.root.exclusive_cpus() == CpuSet.parse("14-17")
        assert "'guarantee': 'enforced'" in str(await client.result("listInstances"))
        assert "'partitions': 'enforced'" in str(await client.result("getStatus"))
        assert await client.result("unsealCgroup", uuid=B) == {"unsealed": True}
        assert await client.result("unsealCgroup", uuid=B) == {"unsealed": False}
        assert (node.instance(B).partition(), node.root.exclusive_cpus()) == ("member", CpuSet())
        await client.result("sealCgroup", uuid=B)
        node.instance(B).put_threads(())
        controller.loop.request_pass()
        await controller.until(lambda: node.instance(B).partition() == "member")
        assert node.root.exclusive_cpus() == CpuSet()
        node.instance(B).put_threads({11})
        await client.result("sealCgroup", uuid=B)
        node.instance(B).put_threads(())
        assert await client.result("deregisterCgroup", uuid=B) == {"removed": True}
        assert node.root.exclusive_cpus() == CpuSet()


async def test_a_partition_ends_also_where_another_program_has_taken_its_cpus(node: Node, writer: CgroupWriter) -> None:
    node.become(B)

    def refuse(group: FakeCgroup, file: str, value: str) -> None:
        if (group.path, file) == (node.root.path, "cpuset.cpus.exclusive") and value:
            raise CgroupError(f"cannot write {value!r} to {group.path / file}", errno.EINVAL)

    async with controlled(node, partition_writer=writer) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).put_threads({11})
        await client.result("sealCgroup", uuid=B)
        node.root.write("cpuset.cpus.exclusive", "")
        node.mount.behaviour.before_write = refuse
        with pytest.raises(CgroupError, match=r"cannot write '14-17'"):
            controller.loop.tree.unseal(node.instance(B))
        assert (node.instance(B).partition(), node.instance(B).exclusive_cpus()) == ("member", CpuSet())


@pytest.mark.parametrize("enforced", [True, False])
async def test_a_runner_that_demands_partitions_waits_for_a_controller_that_is_being_replaced(
    node: Node, writer: CgroupWriter, *, enforced: bool
) -> None:
    node.become(B)
    placement = ControllerPlacement(CpuSet.parse("14-17"), (14,), PurePosixPath(node.socket), B, enforced=enforced)
    async with controlled(node, partition_writer=writer), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).put_threads({11})
    reasons: list[str] = []

    async def ask() -> None:
        reasons.append(await _seal(placement, InstanceTimeouts()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert bool(reasons) is not enforced
        async with controlled(node, partition_writer=writer) as controller:
            await controller.until(lambda: bool(reasons))
    [reason] = reasons
    assert reason == "" if enforced else reason.startswith("cannot reach the controller")


@pytest.mark.parametrize("busy", ["refuses", "hangs up", "accepts nothing"])
async def test_a_runner_asks_a_busy_controller_again(
    tmp_path: Path, busy: str, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    path = tmp_path / "socket"
    placement = ControllerPlacement(CpuSet.parse("14-17"), (14,), PurePosixPath(path), B, enforced=False)
    asked, begun = list[float](), trio.current_time()
    refusal = b'{"jsonrpc":"2.0","id":1,"error":{"code":-32005,"message":"cannot take more"}}\n'

    async def serve(listener: trio.socket.SocketType) -> None:
        while True:
            connection, _ = await listener.accept()
            with connection:
                asked.append(trio.current_time())
                if len(asked) > 3 and busy != "refuses":
                    await connection.recv(1 << 16)
                    await connection.send(b'{"jsonrpc":"2.0","id":1,"result":{"guarantee":"enforced"}}\n')
                elif busy == "refuses":
                    await connection.recv(1 << 16)
                    await connection.send(refusal)

    with trio.socket.socket(socket.AF_UNIX) as listener:
        await listener.bind(str(path))
        listener.listen(0 if busy == "accepts nothing" else 8)
        async with trio.open_nursery() as nursery:
            if busy == "accepts nothing":
                with trio.socket.socket(socket.AF_UNIX) as first:
                    await first.connect(str(path))
                    reason = await _seal(placement, InstanceTimeouts())
                    assert reason.startswith("cannot reach the controller")
                    assert trio.current_time() - begun >= BUSY_FOR
            else:
                nursery.start_soon(serve, listener)
                reason = await _seal(placement, InstanceTimeouts())
                assert reason == ("cannot take more" if busy == "refuses" else "")
                assert len(asked) > 3
            nursery.cancel_scope.cancel()


async def test_while_decisions_are_frozen_partitions_still_end(node: Node, writer: CgroupWriter) -> None:
    node.become(B)
    state = node.kubelet / "cpu_manager_state"
    good = state.read_bytes()
    async with controlled(node, partition_writer=writer) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).put_threads({11})
        await client.result("sealCgroup", uuid=B)
        state.write_bytes(b"{")
        await controller.until(lambda: bool(controller.loop.frozen_because))
        assert node.instance(B).partition() == "isolated"
        assert await client.result("unsealCgroup", uuid=B) == {"unsealed": True}
        assert (node.instance(B).partition(), node.instance(B).exclusive_cpus()) == ("member", CpuSet())

        state.write_bytes(good)
        await controller.until(lambda: not controller.loop.frozen_because)
        await client.result("sealCgroup", uuid=B)
        state.write_bytes(b"{")
        await controller.until(lambda: bool(controller.loop.frozen_because))
        node.instance(B).put_threads(())
        await controller.eventually(lambda: node.instance(B).partition() == "member")


def calling_at_seals(noted: Callable[[str], object]) -> Parts:
    """Return the parts of a controller that calls *noted* with each instance to seal, and seals nothing."""

    class WatchedSeals(Seals):
        def make(self, pod_uid: str) -> str:
            noted(pod_uid)
            return pod_uid

    return Parts(seals=WatchedSeals)


async def test_seals_of_an_instance_that_are_asked_for_together_are_as_far_apart(
    node: Node, writer: CgroupWriter, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    node.become(B)
    sealed = list[float]()
    parts = calling_at_seals(lambda _: sealed.append(trio.current_time()))
    timeouts = attrs.evolve(LONG, sealed_again=0.2)
    async with (
        controlled(node, partition_writer=writer, timeouts=timeouts, parts=parts),
        connected(node.socket) as client,
    ):
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(seal, PurePosixPath(node.socket), B)
    assert len(sealed) == 4
    assert min(after - before for before, after in pairwise(sealed)) > 0.19


async def test_seals_of_many_instances_are_apart(
    node: Node, writer: CgroupWriter, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    sealed = list[float]()
    parts = calling_at_seals(lambda _: sealed.append(trio.current_time()))
    timeouts = attrs.evolve(LONG, seals_apart=0.2)
    async with (
        controlled(node, partition_writer=writer, trusting=True, timeouts=timeouts, parts=parts),
        trio.open_nursery() as nursery,
    ):
        for number in range(4):
            node.domain(f"pod-{number}").create()
            node.instance(f"pod-{number}").create()
            node.instance(f"pod-{number}").put_threads([1000 + number])
            nursery.start_soon(seal, PurePosixPath(node.socket), f"pod-{number}")
    assert len(sealed) == 4
    assert min(after - before for before, after in pairwise(sealed)) > 0.19


async def test_what_is_not_registered_takes_no_turn(node: Node, writer: CgroupWriter) -> None:
    """Every container of the node may ask, five times at once; each request that waits keeps its connection."""
    node.become(B)
    sealed = list[str]()
    parts, timeouts = calling_at_seals(sealed.append), attrs.evolve(LONG, sealed_again=60)
    async with controlled(node, partition_writer=writer, timeouts=timeouts, parts=parts):
        for _ in range(5):
            assert await seal(PurePosixPath(node.socket), B) == "it is not registered"
    assert not sealed


async def test_instances_are_sealed_in_the_order_in_which_that_was_asked_for(
    node: Node, writer: CgroupWriter, autojump_clock: trio.testing.MockClock
) -> None:
    """And one for which that is asked several times together has one place among them."""
    del autojump_clock
    sealed = list[str]()
    parts = calling_at_seals(sealed.append)
    timeouts = attrs.evolve(LONG, sealed_again=0, seals_apart=1)
    pods, limits = [f"pod-{number}" for number in range(8)], SocketLimits(in_flight=16)
    async with (
        controlled(node, partition_writer=writer, trusting=True, limits=limits, timeouts=timeouts, parts=parts),
        trio.open_nursery() as nursery,
    ):
        for pod in ["greedy", "greedy", "greedy", *pods]:
            if not node.domain(pod).exists():
                node.domain(pod).create()
                node.instance(pod).create()
            node.instance(pod).put_threads([1000])
            nursery.start_soon(seal, PurePosixPath(node.socket), pod)
            await trio.testing.wait_all_tasks_blocked()
    assert sealed == ["greedy", "greedy", *pods, "greedy"]


async def test_what_is_sealed_takes_no_turn(node: Node, writer: CgroupWriter) -> None:
    node.become(B)
    sealed = list[str]()

    class WatchedSeals(Seals):
        def make(self, pod_uid: str) -> str:
            sealed.append(pod_uid)
            return super().make(pod_uid)

    parts, timeouts = Parts(seals=WatchedSeals), attrs.evolve(LONG, sealed_again=60, seals_apart=60)
    async with (
        controlled(node, partition_writer=writer, timeouts=timeouts, parts=parts),
        connected(node.socket) as client,
    ):
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        node.instance(B).put_threads([11])
        for _ in range(6):
            assert await seal(PurePosixPath(node.socket), B) == ""
    assert sealed == [B]


async def test_only_the_instances_own_pod_may_ask(node: Node, writer: CgroupWriter) -> None:
    node.become(B)
    async with controlled(node, partition_writer=writer), connected(node.socket) as client:
        for method in ("sealCgroup", "unsealCgroup"):
            assert (await client.refusal(method, uuid=A))["reason"] == "identity"


async def test_without_partitions_the_reason_is_the_answer_or_where_they_are_required_the_refusal(
    node: Node, writer: CgroupWriter
) -> None:
    node.become(B)
    path = PurePosixPath(node.socket)
    async with controlled(node), connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        assert await seal(path, B) == "the controller's option --partitions is off"
    writer.connection.shutdown(socket.SHUT_RDWR)
    async with controlled(node, partition_writer=writer, partitions_required=True) as controller:
        with pytest.raises(CallRefusedError, match="the controller's cgroup writer has ended"):
            await seal(path, B)
        await unseal(path, B)
        answer = await controller.endpoints().respond("/healthz")
        assert answer.status == 503
        assert "restart the controller" in answer.text


async def test_where_partitions_are_required_a_runner_that_does_not_know_them_is_refused(
    node: Node, writer: CgroupWriter
) -> None:
    node.become(B)
    async with (
        controlled(node, partition_writer=writer, partitions_required=True),
        connected(node.socket) as client,
    ):
        refused = await client.refusal("registerCgroup", uuid=B, cpuset="14-17")
        assert refused["reason"] == "host"
        assert "its client names no protocol" in str(refused["message"])
        assert not node.instance(B).exists()
        for wrong in (-1, True, "2", "two"):
            params = {"uuid": B, "cpuset": "14-17", "protocol": wrong}
            request = {"jsonrpc": "2.0", "method": "registerCgroup", "params": params, "id": 1}
            await client.send(json.dumps(request).encode() + b"\n")
            assert json.loads(await client.line())["error"]["code"] == -32602
        old = await client.refusal("registerCgroup", uuid=B, cpuset="14-17", protocol=2)
        assert "its runner is older than this controller" in str(old["message"])
        assert "update its image" in str(old["message"])
        with ExitStack() as held:
            await register(PurePosixPath(node.socket), B, CpuSet.parse("14-17"), node.scope(B), held)
        assert node.instance(B).exists()


async def test_a_controller_of_before_seals_nothing(node: Node) -> None:
    node.become(B)

    def older(methods: Mapping[str, Method]) -> Mapping[str, Method]:
        return {name: method for name, method in methods.items() if name != "sealCgroup"}

    async with controlled(node, parts=Parts(methods=older)):
        assert await seal(PurePosixPath(node.socket), B) == "the controller is older than partitions; update it"


@pytest.mark.parametrize(("lacking", "found"), [((), "True False"), (("--bounding-set=-sys_admin",), "False False")])
def test_a_writer_without_the_capability_is_none_that_could_come_back(lacking: tuple[str, ...], found: str) -> None:
    code = (
        "from pathlib import Path; from runner.controller.tree.cgroup_writer import start_cgroup_writer\n"
        "writer = start_cgroup_writer(Path('/none'), Path('/proc')); print(writer.started, writer.lost)"
    )
    argv = ("setpriv", *lacking, "--inh-caps=-all", sys.executable, "-c", code)
    shown = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=30)
    assert shown.stdout.strip() == found


HKEEPING = "isolated invalid (partition config conflicts with housekeeping setup)"
"""``cpuset.cpus.partition`` where no CPU would be left for the kernel's own work (``nohz_full=``): ``PERR_HKEEPING`` in
``perr_strings``, ``kernel/cgroup/cpuset.c``."""


@pytest.fixture
def refusing(node: Node, pair: tuple[CgroupWriter, socket.socket]) -> Iterator[list[str]]:
    """Return what the kernel makes of the word ``isolated``, the last of the list, in place of the writer."""
    states = [HKEEPING]

    def refuse(message: bytes) -> bytes:
        (node.root.path / message.decode() / "cpuset.cpus.partition").write_text(f"{states[-1]}\n")
        return b"0"

    thread = threading.Thread(target=serve, args=(pair[1], refuse))
    thread.start()
    yield states
    pair[0].connection.close()
    thread.join()


async def test_why_the_kernel_refuses_is_shown_until_it_does_not(
    node: Node,
    pair: tuple[CgroupWriter, socket.socket],
    refusing: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    node.become(B)
    path, group = PurePosixPath(node.socket), node.instance(B)
    async with controlled(node, partition_writer=pair[0]) as controller, connected(node.socket) as client:
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        group.put_threads({11})
        reason = await seal(path, B)
        assert f"the kernel says {HKEEPING!r}" in reason
        assert f"instance not sealed uuid={B} reason={reason!r}" in caplog.messages
        assert (group.partition(), group.exclusive_cpus()) == ("member", CpuSet())
        await controller.until(lambda: node.root.exclusive_cpus() == CpuSet())
    async with controlled(node, partition_writer=pair[0]) as controller, connected(node.socket) as client:
        assert await guarantees(client) == [("arranged", reason)]
        status = await ask_controller(path)
        assert isinstance(status, dict)
        [finding] = judge_controller(Place.POD, str(path), status, "auto")
        assert finding.level is Level.WARNING
        assert f"instance {B} is arranged, not enforced: {reason}" in finding.found
        metrics = (await controller.endpoints().respond("/metrics")).text
        assert "instances_enforced 0.0" in metrics
        refusing.append("isolated")
        assert await seal(path, B) == ""
        assert await guarantees(client) == [("enforced", None)]
        status = await ask_controller(path)
        assert isinstance(status, dict)
        assert status["arranged"] == []


async def guarantees(client: Client) -> list[tuple[str, str | None]]:
    """Return the guarantee of each instance, and the reason why it is no better."""
    return [(each["guarantee"], each.get("reason")) for each in await client.instances()]
