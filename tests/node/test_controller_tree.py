"""The controller on a real kernel: its tree, its peers identified by the kernel, its death under running instances.

Runs on any machine with root, cgroup v2 with cpuset and four CPUs. It makes minimal pods of its own: a cgroup where the
kubelet would make one, and a process that is the init of its own PID namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.cpuset import CpuSet
from runner.kernel import inotify
from runner.kernel.cgroup import Cgroup, CgroupError

MOUNT = Cgroup(Path("/sys/fs/cgroup"))
PROJECT = Path(__file__).resolve().parents[2]
A, B = "3ceda12c-3ee9-40fa-9f42-61428fe654a6", "416de7c2-21de-472d-817c-fa9d4306cb7d"
ID = "5baab67f1daf9297c60974e50ad9f94f288077161a7c41376478e79aae671e07"
TIMEOUT = 60.0
"""Seconds for anything that must happen; emulated CPUs are slow."""


def missing() -> str:
    """Return what this machine lacks."""
    if os.geteuid() != 0:
        return "root privilege is missing"
    if not (MOUNT.path / "cgroup.controllers").exists() or "cpuset" not in MOUNT.controllers():
        return "cgroup v2 with cpuset is missing"
    if len(MOUNT.effective_cpus()) < 4:
        return "four CPUs are missing"
    if (MOUNT.path / "kubepods.slice").exists():
        return "a machine without a kubelet is missing: kubepods.slice is there already"
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")

POD = """
import json, os, socket, subprocess, sys, threading, time
fds, threads = [], []
for line in sys.stdin:
    do, *arguments = json.loads(line)
    result = None
    try:
        if do == "call":
            path, method, params = arguments
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                request = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
                connection.sendall(json.dumps(request).encode() + b"\\n")
                data, new, _, _ = socket.recv_fds(connection, 65536, 8)
                fds += new
                while not data.endswith(b"\\n"):
                    data += connection.recv(65536)
            result = [json.loads(data), len(new)]
        elif do == "write":
            result = os.write(fds[arguments[0]], b"%d\\n" % arguments[1])
        elif do == "anchor":
            result = subprocess.Popen(["sleep", "infinity"]).pid
        elif do == "thread":
            thread = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
            thread.start()
            result = thread.native_id
        elif do == "pin":
            result = os.sched_setaffinity(arguments[0], arguments[1])
    except OSError as error:
        result = error.strerror
    print(json.dumps(result), flush=True)
"""


class Pod:
    """One pod with one container, whose first process executes the commands it receives."""

    def __init__(self, uid: str, cpus: CpuSet, *, prefix: tuple[str, ...] = ("unshare", "--pid", "--fork")) -> None:
        self.uid = uid
        slice_ = MOUNT.child("kubepods.slice").child(f"kubepods-pod{uid.replace('-', '_')}.slice")
        self.scope = slice_.child(f"cri-containerd-{ID}.scope")
        for group in (slice_.parent, slice_, self.scope):
            group.create()
            if group != self.scope:
                group.enable(["cpuset", "memory", "pids"])
        self.scope.set_cpus(cpus)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", POD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.execute("nothing")  # it runs
        self.pid = next(iter(children(self.process.pid)), self.process.pid)
        self.scope.admit(self.pid)

    def execute(self, *command: object) -> object:
        """Have the pod's process execute a command and return its result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, "the pod's process has ended"
        result: object = json.loads(line)
        return result

    def call(self, path: Path, method: str, **params: str) -> tuple[dict[str, object], int]:
        """Call the controller and return the response and how many descriptors came with it."""
        received = self.execute("call", str(path), method, params)
        assert isinstance(received, list), received
        return received[0], received[1]

    def end(self) -> None:
        """Kill everything in it and remove its cgroups."""
        self.scope.write("cgroup.kill", "1")
        for pid in (self.pid, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        until(lambda: self.scope.remove() and self.scope.parent.remove())


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition: Callable[[], object]) -> None:
    """Wait until *condition* holds."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"waited {TIMEOUT} s"
        time.sleep(0.01)


def cgroup_of(pid: int, tid: int | None = None) -> str:
    """Return the cgroup of a process, or of one of its threads."""
    text = Path(f"/proc/{pid}/task/{tid or pid}/cgroup").read_text()
    return next(line[3:] for line in text.splitlines() if line.startswith("0::"))


def allowed(pid: int, tid: int) -> str:
    text = Path(f"/proc/{pid}/task/{tid}/status").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith("Cpus_allowed_list:"))


class Machine:
    """The controller and its environment: a kubelet's directory, the tree's root, and pods."""

    def __init__(self, directory: Path) -> None:
        self.kubelet = directory / "kubelet"
        self.kubelet.mkdir()
        self.socket = directory / "controller.sock"
        self.root = MOUNT.child(f"test-controller-{os.getpid()}")
        self.all = MOUNT.effective_cpus()
        self.mems = MOUNT.effective_mems()
        first, second, third, *_ = sorted(self.all, reverse=True)
        self.a, self.b = CpuSet([first, second]), CpuSet([third])
        self.shared = self.all - self.a - self.b
        self.log = directory / "controller.log"
        self.pods: list[Pod] = []

    @property
    def float_cgroup(self) -> Cgroup:
        return self.root.child("float")

    def instance(self, uid: str) -> Cgroup:
        return self.root.child(f"instance-{uid}")

    def put_state(self, entries: dict[str, CpuSet]) -> CpuSet:
        """Write the kubelet's state with *entries* and return the shared pool."""
        shared = self.all
        for cpus in entries.values():
            shared -= cpus
        document = {
            "policyName": "static",
            "defaultCpuSet": str(shared),
            "entries": {uid: {"instance": str(cpus)} for uid, cpus in entries.items()},
            "checksum": 0,
        }
        (self.kubelet / "new").write_text(json.dumps(document))
        (self.kubelet / "new").rename(self.kubelet / "cpu_manager_state")
        return shared

    def pod(self, uid: str, cpus: CpuSet, **more: tuple[str, ...]) -> Pod:
        self.pods.append(Pod(uid, cpus, **more))
        return self.pods[-1]

    @contextlib.contextmanager
    def controller(self, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the controller; it answers when the block begins."""
        command = "import sys; from runner.controller.main import main; sys.exit(main())"
        with (
            self.log.open("ab") as log,
            subprocess.Popen(
                [
                    *(sys.executable, "-c", command, "--root", str(self.root.path), "--socket", str(self.socket)),
                    *("--kubelet-dir", str(self.kubelet), *more),
                ],
                cwd=PROJECT,
                stderr=log,
            ) as process,
        ):
            try:
                until(lambda: self.answers() or process.poll() is not None)
                assert process.poll() is None, self.log.read_text()
                yield process
            finally:
                process.kill()

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            return True
        return False

    def end(self) -> None:
        for pod in self.pods:
            pod.end()
        if self.root.exists():
            until(lambda: all(self.root.child(name).remove() for name in self.root.children()))
            until(self.root.remove)
        with contextlib.suppress(FileNotFoundError):
            (MOUNT.path / "kubepods.slice").rmdir()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    MOUNT.enable(["cpuset", "memory", "pids"])
    machine = Machine(tmp_path)
    machine.put_state({A: machine.a, B: machine.b})
    try:
        yield machine
    finally:
        if machine.log.exists():
            print(machine.log.read_text())
        machine.end()


def result(answer: tuple[dict[str, object], int]) -> dict[str, object]:
    found = answer[0].get("result")
    assert isinstance(found, dict), answer
    return found


def reason(answer: tuple[dict[str, object], int]) -> object:
    error = answer[0].get("error")
    assert isinstance(error, dict), answer
    return error["data"]["reason"]


def test_the_tree_is_built_and_follows_the_kubelet(machine: Machine) -> None:
    with machine.controller() as process:
        assert machine.root.kind() == "domain threaded"
        assert machine.root.enabled() == {"cpuset"}
        assert machine.float_cgroup.kind() == "threaded"
        assert machine.float_cgroup.effective_cpus() == machine.shared
        assert machine.float_cgroup.effective_mems() == machine.mems
        foreign = machine.root.child("foreign")
        foreign.create()
        assert foreign.kind() == "domain invalid"
        shared = machine.put_state({B: machine.b})
        until(lambda: machine.float_cgroup.effective_cpus() == shared)
        assert foreign.kind() == "domain invalid"
        process.terminate()
        assert process.wait(TIMEOUT) == 0
    assert machine.float_cgroup.effective_cpus() == shared


def test_half_built_trees_are_finished(machine: Machine) -> None:
    machine.root.create()
    machine.root.enable(["cpuset", "memory"])
    assert machine.root.enabled() == {"cpuset", "memory"}
    machine.float_cgroup.create()
    with machine.controller():
        assert machine.root.enabled() == {"cpuset"}
        assert (machine.float_cgroup.kind(), machine.float_cgroup.effective_cpus()) == ("threaded", machine.shared)
    machine.instance(A).create()
    assert machine.instance(A).kind() == "domain invalid"
    with machine.controller():
        assert (machine.instance(A).kind(), machine.instance(A).effective_cpus()) == ("threaded", machine.a)


def test_an_instance_needs_nothing_but_its_descriptors(machine: Machine) -> None:
    """Register in the pod, enter float, confine and pin a thread, come back, deregister: no cgroupfs needed."""
    pod = machine.pod(A, machine.a, prefix=("unshare", "--pid", "--fork", "setpriv", "--reuid=1000", "--clear-groups"))
    machine.socket.parent.chmod(0o755)
    for parent in machine.socket.parents[:-1]:
        parent.chmod(parent.stat().st_mode | 0o011)
    with machine.controller():
        pod.execute("anchor")
        answer = pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a))
        assert result(answer) == {
            "cgroup_path": str(machine.instance(A).path),
            "float_path": str(machine.float_cgroup.path),
            "cpuset": str(machine.a),
            "protocol": 1,
        }
        assert answer[1] == 4
        assert machine.instance(A).effective_cpus() == machine.a
        assert pod.execute("write", 0, 0) == 2
        assert cgroup_of(pod.pid) == f"/{machine.root.name}/float"
        assert len(pod.scope.processes()) == 1  # the anchor keeps it
        inner = pod.execute("thread")
        assert isinstance(inner, int)
        assert pod.execute("write", 1, inner) == len(str(inner)) + 1
        tid = next(iter(machine.instance(A).threads()))
        assert cgroup_of(pod.pid, tid) == f"/{machine.root.name}/instance-{A}"
        assert allowed(pod.pid, tid) == str(machine.a)
        cpu = min(machine.a)
        assert pod.execute("pin", inner, [cpu]) is None
        assert allowed(pod.pid, tid) == str(cpu)
        assert allowed(pod.pid, pod.pid) == str(machine.shared)
        # From float it is identified by its anchor, and a populated cgroup is not removed.
        assert result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        assert reason(pod.call(machine.socket, "deregisterCgroup", uuid=A)) == "host"
        # Writing one process to the pod's cgroup moves all of its threads.
        assert pod.execute("write", 2, 0) == 2
        assert cgroup_of(pod.pid, tid) == f"/{pod.scope.path.relative_to(MOUNT.path)}"
        assert result(pod.call(machine.socket, "deregisterCgroup", uuid=A)) == {"removed": True}
        assert result(pod.call(machine.socket, "deregisterCgroup", uuid=A)) == {"removed": False}
        assert not machine.instance(A).exists()


def test_a_pod_cannot_act_for_another_pod(machine: Machine) -> None:
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller():
        for pod in (a, b):
            pod.execute("anchor")
        result(a.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        result(b.call(machine.socket, "registerCgroup", uuid=B, cpuset=str(machine.b)))
        for in_float in (False, True):
            if in_float:
                b.execute("write", 0, 0)
                assert cgroup_of(b.pid).endswith("/float")
            for uuid in (A, "123"):
                assert reason(b.call(machine.socket, "registerCgroup", uuid=uuid, cpuset=str(machine.a))) == "identity"
                assert reason(b.call(machine.socket, "deregisterCgroup", uuid=uuid)) == "identity"
        assert machine.instance(A).effective_cpus() == machine.a


def test_a_shell_and_a_pod_in_the_hosts_namespace_are_refused(machine: Machine) -> None:
    host = machine.pod(B, machine.b, prefix=())
    pod = machine.pod(A, machine.a)
    with machine.controller():
        for uuid, peer in ((B, host),):
            assert reason(peer.call(machine.socket, "registerCgroup", uuid=uuid, cpuset=str(machine.b))) == "identity"
        result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        request = {"jsonrpc": "2.0", "method": "deregisterCgroup", "params": {"uuid": A}, "id": 1}
        code = (
            "import os, socket, sys\n"
            f"open({str(pod.scope.path / 'cgroup.procs')!r}, 'w').write('0')\n"
            f"s = socket.socket(socket.AF_UNIX); s.connect({str(machine.socket)!r})\n"
            f"s.sendall({json.dumps(request)!r}.encode() + b'\\n'); print(s.recv(65536).decode())"
        )
        shell = subprocess.run(
            ["nsenter", f"--target={pod.pid}", "--pid", sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "shareProcessNamespace" in json.loads(shell.stdout)["error"]["message"]
        assert machine.instance(A).exists()


def test_the_controller_is_killed_under_a_running_instance(machine: Machine) -> None:
    pod = machine.pod(A, machine.a)
    with machine.controller() as process:
        pod.execute("anchor")
        result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        pod.execute("write", 0, 0)
        pod.execute("write", 1, pod.execute("thread"))
        process.kill()
    with inotify.watching() as queue:
        for group in (machine.root, machine.float_cgroup, machine.instance(A)):
            queue.watch(group.path, inotify.MODIFY | inotify.CREATE | inotify.DELETE)
        for _ in range(3):
            with machine.controller() as process:
                process.kill()
        with machine.controller():
            assert result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        with pytest.raises(BlockingIOError):
            os.read(queue._fd, 65536)  # no file of the tree was written to
    assert machine.float_cgroup.effective_cpus() == machine.shared
    assert machine.instance(A).effective_cpus() == machine.a
    assert machine.instance(A).populated()


def test_the_instance_of_a_killed_runner_is_removed_with_its_pod(machine: Machine) -> None:
    pod = machine.pod(A, machine.a)
    with machine.controller():
        pod.execute("anchor")
        result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        pod.execute("write", 0, 0)
        pod.execute("write", 1, pod.execute("thread"))
        shared = machine.put_state({B: machine.b})  # the pod's entry is gone, its threads are not
        time.sleep(0.5)
        assert machine.instance(A).populated()
        assert machine.instance(A).effective_cpus() == machine.a
        assert machine.float_cgroup.effective_cpus() == shared - machine.a
        os.kill(pod.pid, signal.SIGKILL)
        until(lambda: not machine.instance(A).exists())
        until(lambda: machine.float_cgroup.effective_cpus() == shared)


def test_drift_is_corrected(machine: Machine) -> None:
    pod = machine.pod(A, machine.a)
    with machine.controller():
        result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        machine.instance(A).set_cpus(machine.all)
        until(lambda: machine.instance(A).effective_cpus() == machine.a)
        machine.float_cgroup.set_cpus(machine.a)
        until(lambda: machine.float_cgroup.effective_cpus() == machine.shared)
        machine.root.set_cpus(machine.shared)
        until(lambda: machine.instance(A).effective_cpus() == machine.a)
        machine.root.write("cgroup.subtree_control", "-cpuset")

        def whole() -> bool:
            with contextlib.suppress(CgroupError):
                return machine.instance(A).cpus() == machine.a and machine.float_cgroup.cpus() == machine.shared
            return False

        until(whole)
        assert machine.instance(A).effective_cpus() == machine.a
