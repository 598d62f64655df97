"""The processes that keep a right of the controller's: what they obey, and what happens when one of them or the controller ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.controller.privileged_process import EndedError
from runner.controller.serve import namespaces
from runner.controller.serve.namespaces import NamespaceReader
from runner.controller.tune import tuner_process
from runner.controller.tune.host_tuner import HostTuner
from runner.controller.tune.tuner_messages import MOST_DEVICES, Tuned, TunedInstance, Tuning, parse_instances
from runner.controller.tune.tuner_process import TunerProcess
from runner.kernel.peers import PeerError, Peers, boot_time
from runner.kernel.privileges import CAP_SYS_ADMIN, CAP_SYS_PTRACE
from runner.kernel.procfs import Procfs
from tests.component.controller.test_main import PORT, asked_http, command, until_logged
from tests.support.fake_node import B, Node, Parts, connected, controlled, in_a_thread, register_beforehand
from tests.support.program_runs import until

PROC = Path("/proc")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node.new(tmp_path)
    node.host.add_machine(20)
    node.host.add_interrupt(24, "eth0", "0-19")
    (node.proc / "1/root").symlink_to(node.host.root)
    return node


@pytest.fixture
def reader() -> Iterator[NamespaceReader]:
    """Return a namespace reader in a thread, which may read what this process may."""
    with in_a_thread(partial(namespaces.obey, PROC)) as connection:
        yield NamespaceReader(connection)


@pytest.mark.parametrize(
    "line", [b"", b"-1", b"+1", b"self", b"1/../2", b" 1", b"1\r", b"0x1", b"41943041", b"\xb2", b"1" * 4096]
)
def test_the_namespace_reader_takes_numbers_of_processes_alone(line: bytes) -> None:
    assert namespaces.obey(PROC, line) == b"%d 0 0" % errno.EINVAL


def test_a_peer_is_identified_by_the_namespace_reader(reader: NamespaceReader) -> None:
    alone, asking = Peers(PROC), Peers(PROC, look_up=reader.look_up)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        now = boot_time()
        assert asking.identify(ours, now) == alone.identify(ours, now)
        own = asking.own_namespace()
        assert asking.container(ours, own) == alone.container(ours, own) == os.getpid()
    assert asking.namespace(os.getpid()) == own
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert asking.namespace(process.pid) is None


ALONE = """
import os
from pathlib import Path
from runner.controller.privileged_start import KEPT_CAPABILITIES
from runner.controller.serve.namespaces import start_namespace_reader
from runner.kernel.privileges import keep_capabilities
reader, other = start_namespace_reader(Path("/proc")), os.getppid()
keep_capabilities(KEPT_CAPABILITIES)
assert reader.look_up(other).inode == os.stat("/proc/self/ns/pid").st_ino
for file in ("ns/pid", "root/proc", "mem"):
    try:
        os.close(os.open(f"/proc/{other}/{file}", os.O_RDONLY))
    except PermissionError:
        print(file)
"""


@pytest.mark.skipif(not {CAP_SYS_PTRACE, CAP_SYS_ADMIN} <= Procfs().capabilities(), reason="needs root's capabilities")
def test_what_it_asks_the_reader_the_controller_may_not_see_itself() -> None:
    shown = subprocess.run([sys.executable, "-c", ALONE], check=True, stdout=subprocess.PIPE, text=True, timeout=30)
    assert shown.stdout.split() == ["ns/pid", "root/proc", "mem"]


def test_without_the_namespace_reader_no_peer_is_taken_for_another(reader: NamespaceReader) -> None:
    peers = Peers(PROC, look_up=reader.look_up)
    reader.connection.shutdown(socket.SHUT_RDWR)
    assert reader.lost
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peers.container(ours, peers.own_namespace()) == 0
        with pytest.raises(
            EndedError, match="the controller's namespace reader has ended; restart the controller"
        ) as end:
            peers.identify(ours, boot_time())
    assert not isinstance(end.value, PeerError), "which would be told to the peer as a fault of its own"


INSTANCE = {"cpus": "14-17", "tuning": {"latency": "low"}}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        *(
            json.dumps(each).encode()
            for each in (
                {"../x": INSTANCE},
                {B: {**INSTANCE, "path": "proc/irq/24/smp_affinity_list"}},
                {B: {**INSTANCE, "cpus": 14}},
                {B: {**INSTANCE, "cpus": "14-x"}},
                {B: {**INSTANCE, "tuning": {"latency": "lowest"}}},
                {B: {**INSTANCE, "tuning": {"devices": ["../../../../tmp/x"]}}},
            )
        ),
    ],
)
async def test_the_host_tuner_takes_instances_alone(node: Node, line: bytes) -> None:
    async with controlled(node) as controller:
        answer = Tuned.parse(tuner_process.obey(controller.host_tuner, line))
        [reason] = answer.reasons
        assert reason.startswith("the machine's settings stay as they are: ")
        assert (node.host.root / "proc/irq/24/smp_affinity_list").read_text() == "0-19\n"


def test_more_instances_than_a_line_has_room_for_do_not_end_the_host_tuner() -> None:
    addresses = tuple(f"000000:00:{number >> 3:02x}.{number & 7}" for number in range(MOST_DEVICES))
    wanted = TunedInstance(CpuSet.parse("4-7"), Tuning(devices=addresses))

    def obey(line: bytes) -> bytes:
        return Tuned((f"{len(parse_instances(line))} instances",)).to_json()

    with in_a_thread(obey) as connection:
        process = TunerProcess(connection)
        for number in (400, 4000, 1):
            tuned = process.tune({f"00000000-0000-4000-8000-{each:012}": wanted for each in range(number)})
            assert [reason.partition(":")[0] for reason in tuned.reasons] == (
                ["the machine's settings stay as they are"] if number == 4000 else [f"{number} instances"]
            )
        assert not process.lost


async def test_a_bug_of_the_host_tuner_does_not_end_it(node: Node) -> None:
    faulty = threading.Event()

    class FaultyTuner(HostTuner):
        def tune(self, instances: Mapping[str, TunedInstance]) -> Tuned:
            if faulty.is_set():
                raise KeyError("bug")
            return super().tune(instances)

    async with (
        controlled(node, parts=Parts(host_tuner=FaultyTuner)) as controller,
        connected(node.socket) as client,
    ):
        faulty.set()
        await controller.tuning.tune()
        assert [*controller.tuning.reasons] == ["the machine's settings stay as they are: KeyError('bug')"]
        faulty.clear()
        node.become(B)
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        await controller.tuning.tune()
        assert [*controller.tuning.reasons] == []
        assert (node.host.root / "proc/irq/24/smp_affinity_list").read_text() == "0-13,18-19\n"


async def test_without_the_host_tuner_instances_come_and_go(node: Node) -> None:
    node.become(B)
    async with controlled(node) as controller, connected(node.socket) as client:
        controller.tuning.process.connection.shutdown(socket.SHUT_RDWR)
        await client.result("registerCgroup", uuid=B, cpuset="14-17")
        await controller.tuning.tune()
        ended = "the controller's host tuner has ended; restart the controller"
        cause = ended.replace("; ", ": Broken pipe; ")
        assert [*controller.tuning.reasons] == [f"the machine's settings stay as they are: {cause}"]
        assert controller.loop.counters.disturbances == {"all": 1}
        tuned = await client.result("tuneInstance", uuid=B, tuning={"latency": "low"})
        assert isinstance(tuned, dict)
        assert tuned["missing"] == [*controller.tuning.reasons]
        status = await client.result("getStatus")
        assert isinstance(status, dict)
        [fault] = status["faults"]
        assert f"{fault}; {status['remedies'][fault]}" == ended
        for page in ("/healthz", "/readyz"):
            response = await controller.endpoints().respond(page)
            assert (response.status, response.text) == (503, f"{ended}\n")
        assert await client.result("deregisterCgroup", uuid=B) == {"removed": True}


@pytest.fixture
def process(node: Node) -> Iterator[subprocess.Popen[str]]:
    """Run a controller over an instance that another one has registered."""
    register_beforehand(node)
    argv = command(node, "--insecure-trust-peer", "--metrics", f"127.0.0.1:{PORT}")
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()) as process:
        until_logged(process, "ready")
        # The fake /proc has no capability for a cgroup writer.
        until(lambda: len(children(process)) == 2, "the cgroup writer to end")
        yield process
        process.kill()


def children(process: subprocess.Popen[str]) -> list[int]:
    """Return the namespace reader and the host tuner, in this order."""
    return list(filter(alive, map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def mask(node: Node) -> CpuSet:
    written, *_ = (
        (node.host.root / "proc/irq/24/smp_affinity_list").read_text().splitlines()
    )  # an ordinary file keeps the rest
    return CpuSet.parse(written)


def test_the_controller_outlives_its_host_tuner(node: Node, process: subprocess.Popen[str]) -> None:
    until(lambda: mask(node) == CpuSet.parse("0-13,18-19"), "the host tuner to keep interrupts off the pod's CPUs")
    os.kill(children(process)[1], signal.SIGKILL)

    async def ask() -> None:
        with trio.fail_after(120):
            while b"host tuner has ended" not in await asked_http("/healthz"):
                await trio.sleep(0.02)
            async with connected(node.socket) as client:
                status = await client.result("getStatus")
        assert isinstance(status, dict)
        assert status["instances"] == 1

    trio.run(ask)
    process.terminate()
    assert process.wait() == 0
    assert mask(node) == CpuSet.parse("0-13,18-19"), "as when all is killed"


def test_without_its_namespace_reader_the_controller_ends(process: subprocess.Popen[str]) -> None:
    os.kill(children(process)[0], signal.SIGKILL)
    assert "the controller's namespace reader has ended" in until_logged(process, "namespace reader")
    assert process.wait() == 31


@pytest.mark.parametrize(
    ("number", "stopped"), [(signal.SIGTERM, False), (signal.SIGKILL, False), (signal.SIGKILL, True)]
)
def test_they_end_with_the_controller(process: subprocess.Popen[str], number: signal.Signals, *, stopped: bool) -> None:
    """Whatever they do: two tuners at once would each record what the other has written."""
    found = children(process)
    assert len(found) == 2
    for pid in found:
        os.kill(pid, signal.SIGTERM)  # as a whole process group or container gets it: the controller ends them
        if stopped:
            os.kill(pid, signal.SIGSTOP)
    assert process.poll() is None
    assert children(process) == found
    process.send_signal(number)
    process.wait()
    until(lambda: not any(map(alive, found)), "both to end")


def test_what_was_changed_before_all_were_killed_comes_back(node: Node, process: subprocess.Popen[str]) -> None:
    until(lambda: mask(node) == CpuSet.parse("0-13,18-19"), "the host tuner to keep interrupts off the pod's CPUs")
    process.kill()
    process.wait()
    node.instance(B).populate(False)
    node.instance(B).remove()
    with subprocess.Popen(command(node), stderr=subprocess.PIPE, text=True) as successor:
        try:
            until(lambda: mask(node) == CpuSet(range(20)), "the interrupts to be back")
        finally:
            successor.terminate()
