"""What others do to a running instance and to its controller: other pods, shells, broken state files, broken messages."""

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
    World,
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
"""Codes of refusals."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, numa: dict[int, CpuSet]) -> Iterator[World]:
    """Return a node that all of these tests share, as they do with the one instance in it."""
    directory = tmp_path_factory.mktemp("node")
    with kubelet_of(directory, numa) as kubelet, controller_of(kubelet, directory) as controller:
        yield World(kubelet, controller, directory)


@pytest.fixture(scope="module")
def instance(world: World) -> Instance:
    """Return the instance that nothing here may disturb."""
    instance = world.start(1, "2-3")
    instance.up()
    return instance


@pytest.fixture
def undisturbed(world: World, instance: Instance) -> Iterator[None]:
    """Check that the instance runs on as it was, with nothing written to its group, and the tree is what it should be."""
    marks, descriptors = instance.marks(), world.controller.descriptors()
    try:
        with untouched(instance.group):
            yield
        assert instance.marks() == marks
        world.settle()
        instance.is_placed()
        assert names(TREE) == ["float", instance.group.path.name]
        until(lambda: world.controller.descriptors() == descriptors, f"{descriptors} descriptors again")
    finally:
        print(f"--- the instance\n{instance.running.output}\n--- controller\n{world.controller.log.read_text()}")


# -- who speaks ------------------------------------------------------------------------------------------------------

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
if sys.argv[2] == "of the dead":
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
"""Names that are nobody's: beyond their group, in capitals, looking like another's."""


def register(uid: str, cpus: CpuSet) -> Call:
    return "registerCgroup", {"uuid": uid, "cpuset": str(cpus)}


def deregister(uid: str) -> Call:
    return "deregisterCgroup", {"uuid": uid}


def pod_that_asks(world: World, *arguments: str) -> Running:
    """Start pod B, whose process 1 asks the controller."""
    command = (sys.executable, "-c", ASK, f"{SOCKETS}/controller.sock", *arguments)
    main = Container(command, cpus=B_CPUS, mounts=((world.controller.directory, SOCKETS, "ro"),), cgroupfs="none")
    return world.kubelet.run(Pod(B, (main,)))["main"]


def answers(world: World, *arguments: str) -> list[dict[str, Any]]:
    """Return what pod B was answered, and end it."""
    main = pod_that_asks(world, *arguments)
    status = main.wait()
    world.kubelet.stop(B)
    world.kubelet.reconcile()
    assert status == 0, main.output
    return [json.loads(line) for line in main.lines if line.startswith("{")]


def test_a_pod_that_says_it_is_another_is_refused(world: World, instance: Instance) -> None:
    calls = [
        *(register(instance.uid, instance.cpus), register(instance.uid, B_CPUS), deregister(instance.uid)),
        *(call for name in STRANGE for call in (register(name, instance.cpus), deregister(name))),
        register(B, instance.cpus),
    ]
    told = answers(world, json.dumps(calls))
    assert [each["error"]["code"] for each in told[:3]] == [IDENTITY] * 3
    assert all(each["error"]["message"].endswith(f"belongs to '{B}'") for each in told[:3])
    assert len(told) == len(calls)
    assert {each["error"]["code"] for each in told[3:-1]} <= {IDENTITY, INVALID_PARAMS}
    assert told[-1]["error"]["code"] == CPUSET
    assert [each["descriptors"] for each in told] == [0] * len(calls)


def test_a_connection_of_the_dead_speaks_for_nobody(world: World, instance: Instance) -> None:
    """A number that is free again may be anybody's next."""
    [told] = answers(world, "of the dead", json.dumps(deregister(instance.uid)))
    assert told["error"]["code"] == IDENTITY


def test_a_shell_in_the_pod_may_not_end_its_instance(instance: Instance) -> None:
    calls = [deregister(instance.uid), register(instance.uid, instance.cpus)]
    output = instance.running.execute(sys.executable, "-c", ASK, f"{SOCKETS}/controller.sock", json.dumps(calls))
    told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [each["error"]["code"] for each in told] == [IDENTITY] * 2
    assert all("only process 1 may act for an instance" in each["error"]["message"] for each in told)


@pytest.mark.parametrize("host_pid", [True, False])
def test_a_pod_that_shares_its_processes_runs_no_instance(world: World, host_pid: bool) -> None:  # noqa: FBT001
    """Not by itself, and the controller refuses one that was told not to mind."""
    reason = "its pod must not set shareProcessNamespace" if not host_pid else "an instance's pod must not set hostPID"
    for arguments, status, sentence in (((), 30, "PID 1"), (("--not-pid1",), 31, reason)):
        other = world.start(3, "6-7", arguments=arguments, host_pid=host_pid, share_processes=not host_pid)
        assert other.running.wait() == status, other.running.output
        assert sentence in other.running.output
        world.kubelet.stop(other.uid)
        world.kubelet.reconcile()


# -- the kubelet's file ----------------------------------------------------------------------------------------------


def status(world: World) -> dict[str, Any]:
    """Return what the controller says of itself, to a process of the node."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(world.controller.socket))
        connection.sendall(STATUS)
        with connection.makefile() as lines:
            found = json.loads(lines.readline())["result"]
    assert isinstance(found, dict)
    return found


def test_broken_state_files_freeze_decisions_and_nothing_else(world: World) -> None:
    kubelet = world.kubelet
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
            until(lambda: reason in (status(world)["frozen"] or ""), reason)  # noqa: B023 - called at once
    kubelet.write_cpu_state()
    until(lambda: status(world)["frozen"] is None, "the thaw")
    # once it is right, float follows: a pod comes, in the newest shape with a false part for older kubelets
    kubelet.admit(Pod(B, (Container(("true",), cpus=B_CPUS),)))
    newest = {**json.loads(kubelet.cpu_state.read_text()), "checksum": 1}
    replace(kubelet.cpu_state, json.dumps({**good, "data": json.dumps(newest), "dataChecksum": 7}))
    world.settle()
    assert FLOAT.cpus().isdisjoint(B_CPUS)
    kubelet.reconcile()
    world.settle()


def test_a_registration_waits_for_a_file_that_is_being_put_right(world: World) -> None:
    replace(world.kubelet.cpu_state, "{")
    until(lambda: status(world)["frozen"], "the freeze")
    kubelet = world.kubelet
    kubelet.default -= B_CPUS
    kubelet.entries[B] = {"main": B_CPUS}
    main = Container(
        (sys.executable, "-c", ASK, f"{SOCKETS}/controller.sock", json.dumps([register(B, B_CPUS), deregister(B)])),
        cpus=B_CPUS,
        mounts=((world.controller.directory, SOCKETS, "ro"),),
        cgroupfs="none",
    )
    asking = kubelet.start(Pod(B, (main,)))["main"]
    asking.wait_for("asking")
    assert not TREE.path.joinpath(f"instance-{B}").exists()
    kubelet.write_cpu_state()
    assert asking.wait() == 0
    told = [json.loads(line) for line in asking.lines if line.startswith("{")]
    assert told[0]["result"]["cpuset"] == str(B_CPUS)
    assert told[0]["descriptors"] == 4
    assert told[1]["result"] == {"removed": True}
    kubelet.stop(B)
    kubelet.memory[B] = {}
    kubelet.reconcile()


def test_no_policy_and_a_thousand_states(world: World, instance: Instance) -> None:
    """Without a policy all but the instance's CPUs are float's; of a thousand states the last one counts."""
    kubelet = world.kubelet
    everything = CpuSet(cpu for cpus in kubelet.numa.values() for cpu in cpus)
    kubelet.admit(Pod(B, (Container(("true",), cpus=B_CPUS),)))
    world.settle()
    replace(kubelet.cpu_state, '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}')
    until(lambda: FLOAT.cpus() == everything - instance.cpus, "float to be everything else")
    texts = []
    for _ in range(2):
        kubelet.write_cpu_state()
        texts.append(kubelet.cpu_state.read_text())
        kubelet.reconcile()
    for number in range(1000):
        replace(kubelet.cpu_state, texts[number % 2])
    world.settle()


# -- the socket ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(world: World) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(world.controller.socket))
        yield connection


def test_ten_thousand_broken_messages(world: World) -> None:
    """Each answer is a response, none an internal error."""
    seed, wanted = time.time_ns(), 10_000
    print(f"seed {seed}")
    source = frames(seed)
    with connected(world) as connection, connection.makefile("rb") as answered:
        for _ in range(wanted // 100):
            # a line after each hundred tells where the answers to them end
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
    assert status(world)["faults"] == []


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


def test_broken_clients_disturb_nobody(world: World) -> None:
    for name, flood in FLOODS.items():
        with connected(world) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for part in flood():
                    connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
            assert b'"result"' not in read_to_the_end(connection), name
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(connected(world))
        deaf.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # until both directions are full
                deaf.send(STATUS * 100)
        for _ in range(64):  # more than one peer may have; they say half a word
            with contextlib.suppress(BrokenPipeError):
                stack.enter_context(connected(world)).send(STATUS[:10])
        another = subprocess.run(
            [sys.executable, "-c", ASK, str(world.controller.socket), '[["getStatus", {}]]'],
            stdout=subprocess.PIPE,
            check=True,
        )
        assert b'"result"' in another.stdout
    until(lambda: "protocol" in status_or_nothing(world), "its answer to this process")
    for _ in range(50):
        with connected(world) as connection:
            connection.sendall(STATUS * 3)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    read_end, write_end = os.pipe()
    for count in (1, 253):
        with connected(world) as connection:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write_end] * count))]
            connection.sendmsg([STATUS], rights)
            assert b'"result"' in connection.recv(65536)
    os.close(write_end)
    assert select.select([read_end], [], [], 30)[0]
    assert os.read(read_end, 1) == b"", "nobody has kept what was sent along"
    os.close(read_end)


def status_or_nothing(world: World) -> dict[str, Any]:
    """Return the status, or nothing while the controller has had enough of this process."""
    with contextlib.suppress(KeyError, OSError, ValueError):
        return status(world)
    return {}
