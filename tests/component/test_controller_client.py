"""The runner as a client of the controller's socket, with the real controller and with fakes that misbehave."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio
import trio.testing

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.controller.serve.methods import Method
from runner.instance.parts.cgroups.controller import RegisteredCgroups, check_domain
from runner.instance.parts.cgroups.entered import InForce
from runner.kernel.cgroup import Cgroup
from runner.kernel.cgroup_fds import CgroupFds
from runner.kernel.files import Descriptor
from runner.kernel.host_settings import latency_path
from runner.placement.backends import ControllerPlacement, CpuTuning
from runner.placement.threads import CgroupPaths
from runner.protocol.controller_client import PROTOCOL, Registration, deregister, register, tune
from runner.protocol.jsonrpc_client import CONNECTED_WITHIN, CallRefusedError, ServerAbsentError, ServerBusyError
from tests.support.fake_node import ENTRIES, A, B, Node, Parts, controlled, scope_path

CPUS = CpuSet.parse(ENTRIES[A]["instance"])


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


async def test_registers_gets_the_control_files_and_deregisters(node: Node) -> None:
    before = descriptors()
    async with controlled(node):
        node.become(A)
        held = ExitStack()
        registration = await register(PurePosixPath(node.socket), A, CPUS, node.scope(A), held)
        assert str(registration.instance) == str(node.instance(A).path)
        assert str(registration.float_cgroup) == str(node.pod(A).path)
        assert registration.below_tree(registration.float_cgroup) == f"instance-{A}/float"
        assert registration.cpus == CPUS
        fds = registration.cgroup_fds
        for descriptor, group, file in (
            (fds.float_procs, node.pod(A), "cgroup.procs"),
            (fds.instance_threads, node.instance(A), "cgroup.threads"),
            (fds.pod_procs, node.scope(A), "cgroup.procs"),
            (fds.float_threads, node.pod(A), "cgroup.threads"),
        ):
            assert Path(f"/proc/self/fd/{descriptor.number}").readlink() == group.path / file
            assert not os.get_inheritable(descriptor.number)
        held.close()
        await deregister(PurePosixPath(node.socket), A)
        assert not node.instance(A).exists()
        await deregister(PurePosixPath(node.socket), A)
    assert descriptors() == before


def open_files() -> set[Path]:
    found = set[Path]()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the directory's own
            found.add(each.readlink())
    return found


async def test_each_file_to_write_is_one_open_file_however_often_it_is_sent(node: Node) -> None:
    """Then the kernel lets one of its writers at a time wait for the lock of all cgroups. A dup shares its offset."""
    async with controlled(node):
        node.become(A)
        with ExitStack() as held:
            first, second = [
                (await register(PurePosixPath(node.socket), A, CPUS, node.scope(A), held)).cgroup_fds for _ in range(2)
            ]
            for one, again in zip(first.descriptors(), second.descriptors(), strict=True):
                os.lseek(one.number, 1, os.SEEK_SET)
                written = one is not first.memory_events
                assert os.lseek(again.number, 0, os.SEEK_CUR) == written, (
                    "poll(2) of one must not hide a change from the other"
                )
        await deregister(PurePosixPath(node.socket), A)
        assert node.scope(A).path / "cgroup.procs" not in open_files(), "it is closed with the instance"
        with ExitStack() as held:
            fds = (await register(PurePosixPath(node.socket), A, CPUS, node.scope(A), held)).cgroup_fds
            assert Path(f"/proc/self/fd/{fds.float_procs.number}").readlink() == node.pod(A).path / "cgroup.procs"


async def test_a_refusal_is_reported_with_its_code(node: Node) -> None:
    async with controlled(node):
        node.become(A)
        with pytest.raises(CallRefusedError, match="cannot act for instance") as refused:
            await register(PurePosixPath(node.socket), B, CPUS, node.scope(A), ExitStack())
        assert refused.value.code == -32001
        with pytest.raises(CallRefusedError, match="it is not registered; register it first") as refused:
            await tune(PurePosixPath(node.socket), A, {"latency": "low"})
        assert refused.value.message.endswith("it is not registered")
        assert (refused.value.remedy, refused.value.data["remedy"]) == ("register it first",) * 2


def registered(path: Path, tuning: CpuTuning) -> RegisteredCgroups:
    """Return the cgroups of instance A, registered at *path*; its descriptors are not used."""
    return RegisteredCgroups(
        CgroupPaths(scope_path(A), "float", f"instance-{A}"),
        None,
        CgroupFds(*(Descriptor(-1) for _ in range(4))),
        InForce(ControllerPlacement(CPUS, tuple(CPUS), PurePosixPath(path), A, tuning=tuning)),
        sealing=lambda: nullcontext(""),
    )


async def test_what_a_spec_asks_for_besides_the_cpus_is_set(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.host.add_machine(20)
    caplog.set_level("INFO")
    async with controlled(node):
        node.become(A)
        await registered(node.socket, CpuTuning("low", cache_ways=2)).settle()
        assert (node.host.root / latency_path(0)).read_text() == "2\n"
        assert (node.host.root / latency_path(2)).read_text() == "0\n"
    assert "CPUs tuned latency=low cache_ways=2" in caplog.messages
    [warning] = [each for each in caplog.messages if each.startswith("the CPUs are not tuned as asked")]
    assert "resctrl is not mounted" in warning


async def test_a_spec_that_asks_for_nothing_sends_nothing(node: Node) -> None:
    async with controlled(node) as controller:
        node.become(A)
        await registered(node.socket, CpuTuning()).settle()
        assert controller.loop.counters.requests == {"registerCgroup": 1}


async def test_an_older_controller_cannot_tune(tmp_path: Path) -> None:
    path = tmp_path / "controller.sock"
    async with answering(path, sends('{"error": {"code": -32601, "message": "Method not found"}}')):
        with pytest.raises(HostError, match="the controller is older than tuning; update it"):
            await tune(PurePosixPath(path), A, {"latency": "low"})
    async with answering(tmp_path / "other.sock", sends(result(missing=7))):
        with pytest.raises(HostError, match="it answered 'tuneInstance' with"):
            await tune(PurePosixPath(tmp_path / "other.sock"), A, {"latency": "low"})


@pytest.mark.parametrize("how", ["missing", "stale", "directory missing"])
async def test_no_controller_at_the_socket(tmp_path: Path, how: str) -> None:
    path = tmp_path / ("sockets" if "directory" in how else "") / "controller.sock"
    if how == "stale":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    with pytest.raises(ServerAbsentError, match="cannot reach the controller"):
        await register(PurePosixPath(path), A, CPUS, Cgroup(tmp_path), ExitStack())


@asynccontextmanager
async def answering(path: Path, *answers: Callable[[trio.socket.SocketType], object]) -> AsyncIterator[None]:
    """Serve a fake controller that answers each client by the next of *answers*."""
    with socket.socket(
        socket.AF_UNIX
    ) as bound:  # trio binds in a worker thread, which snapshots of other tests would count
        bound.bind(str(path))
        bound.listen()
        bound.setblocking(False)
        listener = trio.socket.from_stdlib_socket(bound)

        async def serve(task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            for answer in answers:
                connection, _ = await listener.accept()
                with connection:
                    await connection.recv(65536)
                    answer(connection)
                    await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            yield
            nursery.cancel_scope.cancel()


def sends(text: str, fds: int = 0) -> Callable[[trio.socket.SocketType], object]:
    def answer(connection: trio.socket.SocketType) -> None:
        with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as blocking:
            blocking.setblocking(True)
            rights = array.array("i", [0] * fds)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
            blocking.sendmsg([text.encode() + b"\n"], ancillary)

    return answer


def result(**answer: object) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "result": answer})


@pytest.mark.parametrize(
    ("text", "fds", "complaint"),
    [
        ("", 0, "it answered 'registerCgroup' with b''"),
        ("{", 3, "it answered 'registerCgroup' with b'{'"),
        ("[]", 0, "it answered 'registerCgroup' with b'[]'"),
        ('{"error": 7}', 0, "it answered"),
        (result(), 3, "its answer has no 'cgroup_path'"),
        (result(cgroup_path=7), 3, "its answer has no 'cgroup_path'"),
        (result(cgroup_path="/a", cpuset="x"), 3, "it grants CPUs 'x'"),
        (result(cgroup_path="/a"), 1, "it sends 1 descriptors instead of 5"),
        (result(cgroup_path="/a"), 16, "it sends 16 descriptors instead of 5"),
        (result(cgroup_path="/nowhere/instance-1"), 0, "there is no such cgroup"),
        (result(cgroup_path="/nowhere/instance-1"), 2, "there is no such cgroup"),
        ("x" * 70000, 3, "its answer is longer than 65536 bytes"),
    ],
)
async def test_a_malformed_answer_is_an_error(tmp_path: Path, text: str, fds: int, complaint: str) -> None:
    path = tmp_path / "controller.sock"
    before = descriptors()
    async with answering(path, sends(text, fds)):
        with pytest.raises(HostError) as caught, ExitStack() as held:
            await register(PurePosixPath(path), A, CPUS, Cgroup(tmp_path), held)
        assert complaint in explain(caught.value)
    assert descriptors() == before


async def test_a_controller_that_does_not_know_the_runners_protocol_is_asked_without_it(node: Node) -> None:
    node.become(A)

    def older(methods: Mapping[str, Method]) -> Mapping[str, Method]:
        return {**methods, "registerCgroup": attrs.evolve(methods["registerCgroup"], optional=frozenset())}

    async with controlled(node, parts=Parts(methods=older)) as controller:
        with ExitStack() as held:
            found = await register(PurePosixPath(node.socket), A, CPUS, Cgroup(node.path), held)
            assert found.cpus == CPUS
        assert controller.loop.counters.requests == {"registerCgroup": 1}, "the other one had invalid parameters"


async def test_a_busy_controller_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "controller.sock"
    busy = json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32005, "message": "cannot take more"}})
    async with answering(path, sends(busy)):
        with pytest.raises(ServerAbsentError, match="cannot take more"):
            await register(PurePosixPath(path), A, CPUS, Cgroup(tmp_path), ExitStack())


async def test_a_full_accept_queue_is_tried_again(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    path = tmp_path / "controller.sock"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as waiting:
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(path))
        begun = trio.current_time()
        with pytest.raises(ServerBusyError, match="cannot reach"):
            await deregister(PurePosixPath(path), A)
        assert trio.current_time() - begun >= CONNECTED_WITHIN

        async def accept() -> None:
            await trio.testing.wait_all_tasks_blocked()
            taken = list[socket.socket]()
            while len(taken) < 2:  # the first one is not ours
                await trio.lowlevel.wait_readable(listener)
                taken.append(waiting.enter_context(listener.accept()[0]))
            taken[-1].sendall(b'{"jsonrpc":"2.0","id":1,"result":{"removed":true}}\n')

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await deregister(PurePosixPath(path), A)


async def test_a_controller_that_dies_before_it_answers_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "controller.sock"
    async with answering(path, lambda _: None):
        with pytest.raises(ServerAbsentError, match="cannot reach"):
            await register(PurePosixPath(path), A, CPUS, Cgroup(tmp_path), ExitStack())


async def test_a_float_elsewhere_than_the_instance_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "controller.sock"
    async with answering(path, sends(result(cgroup_path="/a/instance-1", float_path="/b/float"))):
        with pytest.raises(HostError, match="which have no parent in common"):
            await register(PurePosixPath(path), A, CPUS, Cgroup(tmp_path), ExitStack())


async def test_a_controller_of_an_earlier_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """It has one float for all, and no domain for each instance."""
    path = tmp_path / "controller.sock"
    answer = result(cgroup_path=f"/stelia/instance-{A}", float_path="/stelia/float", protocol=2)
    async with answering(path, sends(answer)):
        with pytest.raises(HostError, match="update the controller of this node first"):
            await register(PurePosixPath(path), A, CPUS, Cgroup(tmp_path), ExitStack())


@pytest.mark.parametrize("named", [f"/stelia/instance-{B}", "/stelia", f"/stelia/instance-{A}/x"])
def test_a_float_in_another_domain_than_the_pods_is_refused(named: str) -> None:
    fds = CgroupFds(*(Descriptor(-1) for _ in range(4)))
    for protocol in (PROTOCOL, None):
        answer = Registration(PurePosixPath(named, "vcpus"), PurePosixPath(named, "float"), CPUS, fds, protocol)
        if protocol is None:
            check_domain(answer, A)  # by the article's words float is where it is said to be
        else:
            with pytest.raises(HostError, match=f"is not 'instance-{A}/float'"):
                check_domain(answer, A)


async def test_the_articles_controller_answers_with_a_path_alone(node: Node, tmp_path: Path) -> None:
    """Then float is a sibling of the path, and the cgroups are entered by their paths."""
    async with controlled(node):
        node.become(A)
        for group in (node.domain(A), node.pod(A), node.instance(A)):
            group.create()
        path = tmp_path / "old.sock"
        held = ExitStack()
        async with answering(path, sends(result(cgroup_path=str(node.instance(A).path)))):
            registration = await register(PurePosixPath(path), A, CPUS, node.mount.at(scope_path(A)), held)
        assert str(registration.float_cgroup) == str(node.pod(A).path)
        assert registration.cpus == CPUS
        number = registration.cgroup_fds.float_procs.number
        assert Path(f"/proc/self/fd/{number}").readlink() == node.pod(A).path / "cgroup.procs"
        held.close()
