"""A running instance and its controller against other pods, shells, broken state files and broken messages."""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runner.cpuset import CpuSet
from tests.node.instances import (
    FLOAT,
    SOCKETS,
    TREE,
    Instance,
    NodeFixture,
    controller_of,
    kubelet_of,
    names,
    uid_of,
    until,
    untouched,
)
from tests.node.standin_kubelet import Container, Pod, Running, replace
from tests.support.frames import STATUS, frames

pytestmark = pytest.mark.usefixtures("rom", "undisturbed")
IDENTITY, CPUSET, INVALID_PARAMS = -32001, -32002, -32602
"""Error codes of JSON-RPC responses."""


@pytest.fixture(scope="module")
def node_fixture(tmp_path_factory: pytest.TempPathFactory, numa: dict[int, CpuSet]) -> Iterator[NodeFixture]:
    """Return a node that all of these tests share, with the one instance on it."""
    directory = tmp_path_factory.mktemp("node")
    with kubelet_of(directory, numa) as kubelet, controller_of(kubelet, directory) as controller:
        yield NodeFixture(kubelet, controller, directory)


@pytest.fixture(scope="module")
def instance(node_fixture: NodeFixture) -> Instance:
    """Return the instance that no test here may disturb."""
    instance = node_fixture.start(1, "2-3")
    instance.up()
    return instance


@pytest.fixture
def undisturbed(node_fixture: NodeFixture, instance: Instance) -> Iterator[None]:
    """Check that the instance runs on unchanged, nothing is written to its cgroup, and the tree is as it should be."""
    marks, descriptors = instance.marks(), node_fixture.controller.descriptors()
    try:
        with untouched(instance.group):
            yield
        assert instance.marks() == marks
        node_fixture.settle()
        instance.is_placed()
        assert names(TREE) == ["float", instance.group.path.name]
        # There may have been more when they were counted: a client whose end the controller had not seen yet.
        until(lambda: node_fixture.controller.descriptors() <= descriptors, f"{descriptors} descriptors again")
    finally:
        print(f"--- the instance\n{instance.running.output}\n--- controller\n{node_fixture.controller.log.read_text()}")


# -- the peer ---------------------------------------------------------------------------------------------------------

ASK = """
import contextlib, json, os, socket, sys
def ask(connection, method, params):
    request = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
    with contextlib.suppress(BrokenPipeError):  # refused before it has asked
        connection.sendall(json.dumps(request).encode() + b"\\n")
    data, fds, _, _ = socket.recv_fds(connection, 65536, 8)
    while not data.endswith(b"\\n"):
        data += connection.recv(65536) or sys.exit("hung up")
    print(json.dumps({**json.loads(data), "descriptors": len(fds)}), flush=True)
def connected():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    return connection
if sys.argv[2] == "of a dead process":
    # the connection of a child that has ended since
    ours, theirs = socket.socketpair()
    if not (child := os.fork()):
        connection = connected()
        socket.send_fds(theirs, [b"x"], [connection.fileno()])
        os._exit(0)
    os.waitpid(child, 0)
    _, [number], _, _ = socket.recv_fds(ours, 1, 1)
    ask(socket.socket(fileno=number), *json.loads(sys.argv[3]))
else:
    print("asking", flush=True)
    for call in json.loads(sys.argv[2]):
        ask(connected(), *call)
"""

Call = tuple[str, dict[str, str]]
B = uid_of(2)
B_CPUS = CpuSet.parse("5,13")
STRANGE = [
    *("../x", "a/b", "", "x" * 256, "a\0b", f"{uid_of(1)}\n", uid_of(0xABC).upper(), "cgroup.procs", ".", "float"),
    *(
        "\uff11" + uid_of(1)[1:],
        "\u0430" + uid_of(1)[1:],
        uid_of(1) + "\u200b",
        " " + uid_of(1),
        "instance-" + uid_of(1),
    ),
]
"""Names of no pod: they lead out of their directory, have capitals, or look like another's."""


def register(uid: str, cpus: CpuSet) -> Call:
    return "registerCgroup", {"uuid": uid, "cpuset": str(cpus)}


def deregister(uid: str) -> Call:
    return "deregisterCgroup", {"uuid": uid}


def pod_that_asks(node_fixture: NodeFixture, *arguments: str) -> Running:
    """Start pod B, whose process 1 asks the controller."""
    command = (sys.executable, "-c", ASK, f"{SOCKETS}/controller.sock", *arguments)
    main = Container(
        command, cpus=B_CPUS, mounts=((node_fixture.controller.directory, SOCKETS, "ro"),), cgroupfs="none"
    )
    return node_fixture.kubelet.run(Pod(B, (main,)))["main"]


def answers(node_fixture: NodeFixture, *arguments: str) -> list[dict[str, Any]]:
    """Return the responses that pod B got, and end it."""
    main = pod_that_asks(node_fixture, *arguments)
    status = main.wait()
    node_fixture.kubelet.stop(B)
    node_fixture.kubelet.reconcile()
    assert status == 0, main.output
    return [json.loads(line) for line in main.lines if line.startswith("{")]


@pytest.mark.gate
def test_a_pod_that_claims_to_be_another_is_refused(node_fixture: NodeFixture, instance: Instance) -> None:
    calls = [
        *(register(instance.uid, instance.cpus), register(instance.uid, B_CPUS), deregister(instance.uid)),
        *(call for name in STRANGE for call in (register(name, instance.cpus), deregister(name))),
        register(B, instance.cpus),
    ]
    received = answers(node_fixture, json.dumps(calls))
    assert [each["error"]["code"] for each in received[:3]] == [IDENTITY] * 3
    assert all(each["error"]["message"].endswith(f"belongs to '{B}'") for each in received[:3])
    assert len(received) == len(calls)
    assert {each["error"]["code"] for each in received[3:-1]} <= {IDENTITY, INVALID_PARAMS}
    assert received[-1]["error"]["code"] == CPUSET
    assert [each["descriptors"] for each in received] == [0] * len(calls)


@pytest.mark.gate
def test_a_connection_of_a_dead_process_is_refused(node_fixture: NodeFixture, instance: Instance) -> None:
    """Its pid may be reused by any process."""
    [received] = answers(node_fixture, "of a dead process", json.dumps(deregister(instance.uid)))
    assert received["error"]["code"] == IDENTITY


@pytest.mark.gate
def test_a_shell_in_the_pod_may_not_end_its_instance(instance: Instance) -> None:
    calls = [deregister(instance.uid), register(instance.uid, instance.cpus)]
    output = instance.running.execute(sys.executable, "-c", ASK, f"{SOCKETS}/controller.sock", json.dumps(calls))
    received = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [each["error"]["code"] for each in received] == [IDENTITY] * 2
    assert all("only process 1 may act for an instance" in each["error"]["message"] for each in received)


@pytest.mark.parametrize("host_pid", [True, False])
def test_a_pod_that_shares_its_processes_runs_no_instance(node_fixture: NodeFixture, host_pid: bool) -> None:  # noqa: FBT001
    """The runner refuses, and with ``--not-pid1`` the controller does."""
    reason = "its pod must not set shareProcessNamespace" if not host_pid else "an instance's pod must not set hostPID"
    for arguments, status, sentence in (((), 30, "PID 1"), (("--not-pid1",), 31, reason)):
        other = node_fixture.start(3, "6-7", arguments=arguments, host_pid=host_pid, share_processes=not host_pid)
        assert other.running.wait() == status, other.running.output
        assert sentence in other.running.output
        node_fixture.kubelet.stop(other.uid)
        node_fixture.kubelet.reconcile()


# -- the kubelet's file ----------------------------------------------------------------------------------------------


def status(node_fixture: NodeFixture) -> dict[str, Any]:
    """Return the controller's status, which it gives to a process of the node."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(node_fixture.controller.socket))
        connection.sendall(STATUS)
        with connection.makefile() as lines:
            found = json.loads(lines.readline())["result"]
    assert isinstance(found, dict)
    return found


def test_broken_state_files_freeze_decisions_and_nothing_else(node_fixture: NodeFixture) -> None:
    kubelet = node_fixture.kubelet
    good = json.loads(kubelet.cpu_state.read_text())
    text = json.dumps(good)
    without = str(kubelet.default - CpuSet([6]))
    entries = {**good["entries"], B: {"main": "2,5"}}
    faults = {
        "it cannot be read": None,
        "it is empty": "",
        "it is not JSON: Expecting property name": "{",
        "it is not JSON: Unterminated string": text[: text.index("static") + 3],
        "neither in the shared pool nor any pod's": json.dumps({**good, "defaultCpuSet": without}),
        "also in the shared pool or another pod's": json.dumps({**good, "defaultCpuSet": without, "entries": entries}),
        "do not exist": json.dumps({**good, "defaultCpuSet": f"{kubelet.default},999"}),
        "policyName: must be 'static' or 'none', found 'dynamic'": json.dumps({**good, "policyName": "dynamic"}),
    }
    with untouched(FLOAT):
        for reason, content in faults.items():
            if content is None:
                kubelet.cpu_state.unlink()
            else:
                replace(kubelet.cpu_state, content)
            until(lambda: reason in (status(node_fixture)["frozen"] or ""), reason)  # noqa: B023 - called at once
    kubelet.write_cpu_state()
    until(lambda: status(node_fixture)["frozen"] is None, "the controller to go on")
    # Then float follows again: a pod is admitted, in the newest format with a wrong part for older kubelets.
    kubelet.admit(Pod(B, (Container(("true",), cpus=B_CPUS),)))
    newest = {**json.loads(kubelet.cpu_state.read_text()), "checksum": 1}
    replace(kubelet.cpu_state, json.dumps({**good, "data": json.dumps(newest), "dataChecksum": 7}))
    node_fixture.settle()
    assert FLOAT.cpus().isdisjoint(B_CPUS)
    kubelet.reconcile()
    node_fixture.settle()


def test_a_registration_waits_for_a_broken_file_to_be_corrected(node_fixture: NodeFixture) -> None:
    replace(node_fixture.kubelet.cpu_state, "{")
    until(lambda: status(node_fixture)["frozen"], "the controller to freeze")
    kubelet = node_fixture.kubelet
    kubelet.default -= B_CPUS
    kubelet.entries[B] = {"main": B_CPUS}
    main = Container(
        (sys.executable, "-c", ASK, f"{SOCKETS}/controller.sock", json.dumps([register(B, B_CPUS), deregister(B)])),
        cpus=B_CPUS,
        mounts=((node_fixture.controller.directory, SOCKETS, "ro"),),
        cgroupfs="none",
    )
    asking = kubelet.start(Pod(B, (main,)))["main"]
    asking.wait_for("asking")
    assert not TREE.path.joinpath(f"instance-{B}").exists()
    kubelet.write_cpu_state()
    assert asking.wait() == 0
    received = [json.loads(line) for line in asking.lines if line.startswith("{")]
    assert received[0]["result"]["cpuset"] == str(B_CPUS)
    assert received[0]["descriptors"] == 4
    assert received[1]["result"] == {"removed": True}
    kubelet.stop(B)
    kubelet.memory[B] = {}
    kubelet.reconcile()


def test_no_policy_and_a_thousand_states(node_fixture: NodeFixture, instance: Instance) -> None:
    """Without a policy all but the instance's CPUs are float's; of a thousand states the last one counts."""
    kubelet = node_fixture.kubelet
    everything = CpuSet(cpu for cpus in kubelet.numa.values() for cpu in cpus)
    kubelet.admit(Pod(B, (Container(("true",), cpus=B_CPUS),)))
    node_fixture.settle()
    replace(kubelet.cpu_state, '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}')
    until(lambda: FLOAT.cpus() == everything - instance.cpus, "float to be everything else")
    texts = []
    for _ in range(2):
        kubelet.write_cpu_state()
        texts.append(kubelet.cpu_state.read_text())
        kubelet.reconcile()
    for number in range(1000):
        replace(kubelet.cpu_state, texts[number % 2])
    node_fixture.settle()


# -- the socket ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(node_fixture: NodeFixture) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(node_fixture.controller.socket))
        yield connection


def test_ten_thousand_broken_messages(node_fixture: NodeFixture) -> None:
    """Each answer is a response, none an internal error."""
    seed, wanted = time.time_ns(), 10_000
    print(f"seed {seed}")
    source = frames(seed)
    with connected(node_fixture) as connection, connection.makefile("rb") as answered:
        for _ in range(wanted // 100):
            # The answer to a last line marks the end of the answers to each hundred.
            connection.sendall(
                b"".join(next(source) for _ in range(100)) + b'{"jsonrpc":"2.0","method":"","id":"end"}\n'
            )
            ended = False
            while not ended:
                answer = json.loads(answered.readline())
                for response in answer if isinstance(answer, list) else [answer]:
                    assert ("result" in response) != ("error" in response)
                    assert "error" not in response or response["error"]["code"] != -32603
                ended = not isinstance(answer, list) and answer["id"] == "end"
    assert status(node_fixture)["faults"] == []


def read_to_the_end(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(65536):
            data += more
    return data


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "a batch of 10,000": lambda: iter([b"[" + b",".join([STATUS.rstrip()] * 10_000) + b"]\n"]),
    "a hundred thousand brackets": lambda: iter([b"[" * 100_000 + b"\n"]),
    "10 MiB without a line": lambda: (b"x" * 65536 for _ in range(160)),
    "no UTF-8": lambda: iter([b'{"jsonrpc":"2.0","method":"\xff\xfe","id":1}\n']),
    "no numbers": lambda: iter([b'{"jsonrpc":"2.0","method":"getStatus","id":NaN}\n[1e400]\n']),
    "a key twice": lambda: iter([b'{"jsonrpc":"2.0","method":"getStatus","method":"x","id":1}\n']),
    "odd shapes": lambda: iter([b'[]\n[1]\n{"jsonrpc":"2.0","method":"getStatus","params":"x","id":{}}\n']),
}


def test_broken_clients_disturb_no_other_client(node_fixture: NodeFixture) -> None:
    descriptors = node_fixture.controller.descriptors()
    for name, flood in FLOODS.items():
        with connected(node_fixture) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for part in flood():
                    connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
            assert b'"result"' not in read_to_the_end(connection), name
    with contextlib.ExitStack() as stack:
        unread = stack.enter_context(connected(node_fixture))
        unread.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # until both directions are full
                unread.send(STATUS * 100)
        for _ in range(64):  # more than one peer may have, each with an incomplete request
            with contextlib.suppress(BrokenPipeError):
                stack.enter_context(connected(node_fixture)).send(STATUS[:10])
        another = subprocess.run(
            [sys.executable, "-c", ASK, str(node_fixture.controller.socket), '[["getStatus", {}]]'],
            stdout=subprocess.PIPE,
            check=True,
        )
        assert b'"result"' in another.stdout
    until(lambda: "protocol" in status_or_nothing(node_fixture), "its answer to this process")
    for _ in range(50):  # more than one peer may have waiting: the controller closes some of them unanswered
        with connected(node_fixture) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(STATUS * 3)
    until(lambda: "protocol" in status_or_nothing(node_fixture), "its answer to this process")
    until(lambda: node_fixture.controller.descriptors() <= descriptors, "the last of them to be closed")
    read_end, write_end = os.pipe()
    for count in (1, 253):
        with connected(node_fixture) as connection:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write_end] * count))]
            connection.sendmsg([STATUS], rights)
            assert b'"result"' in connection.recv(65536)
    os.close(write_end)
    assert select.select([read_end], [], [], 30)[0]
    assert os.read(read_end, 1) == b"", "no process has kept the descriptors that were sent"
    os.close(read_end)


def status_or_nothing(node_fixture: NodeFixture) -> dict[str, Any]:
    """Return the status, or nothing while the controller refuses connections of this process."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        return status(node_fixture)
    return {}
