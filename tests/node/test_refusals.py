"""A running instance and its controller against other pods, shells, and broken state files."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import until
from tests.node.instances import SOCKETS, TREE, Instance, NodeFixture, names, uid_of, untouched
from tests.node.minimal_pods import BYSTANDER
from tests.node.standin_kubelet import Container, Pod, Running, replace
from tests.support.frames import STATUS

pytestmark = [pytest.mark.many_cpus, pytest.mark.usefixtures("rom", "undisturbed")]
IDENTITY, CPUSET, INVALID_PARAMS = -32001, -32002, -32602
"""Error codes of JSON-RPC responses."""


@pytest.fixture(scope="module")
def node_fixture(shared_node: NodeFixture) -> NodeFixture:
    """Return the node that all of these tests share, with the one instance on it."""
    return shared_node


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
        assert set(names(TREE)) == {f"instance-{BYSTANDER}", instance.domain.path.name}
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


@pytest.mark.parametrize("host_pid", [True, pytest.param(False, marks=pytest.mark.node_only)])
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
    assert received[0]["descriptors"] == 5
    assert received[1]["result"] == {"removed": True}
    kubelet.stop(B)
    kubelet.memory[B] = {}
    kubelet.reconcile()
