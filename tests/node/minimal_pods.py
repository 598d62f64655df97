"""A controller on a real kernel, and minimal pods: a cgroup where the kubelet would make one, and an init process in it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runner.base.cpuset import CpuSet
from runner.kernel.cgroup import Cgroup, CgroupError
from tests.node import forked_controllers
from tests.node.cgroups import SECONDS, until

MOUNT = Cgroup(Path("/sys/fs/cgroup"))
A, B, C = (
    "3ceda12c-3ee9-40fa-9f42-61428fe654a6",
    "416de7c2-21de-472d-817c-fa9d4306cb7d",
    "b41f38d8-2c21-4168-af77-6d0cc5482dcb",
)
ID = "5baab67f1daf9297c60974e50ad9f94f288077161a7c41376478e79aae671e07"


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


POD = """
import ctypes, fcntl, json, mmap, os, signal, socket, struct, subprocess, sys, threading, time
fds, leases, sockets = [], [], []
signal.signal(signal.SIGIO, signal.SIG_IGN)  # with which the kernel asks to give a lease back
MADV_POPULATE_WRITE, CLONE_NEWNS, MS_REC, MS_PRIVATE = 23, 0x20000, 1 << 14, 1 << 18
def forbid(*calls):  # by a seccomp profile: EPERM for these numbers of system calls (seccomp(2))
    code = [(0x20, 0, 0, 0)]
    code += [(0x15, len(calls) - index, 0, number) for index, number in enumerate(calls)]
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    argument = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(program)))
    library = ctypes.CDLL(None)
    assert library.prctl(38, 1, 0, 0, 0) == library.prctl(22, 2, argument) == 0
def take(kind, held):
    if kind == "tmpfs":
        with open(f"/mnt/{len(held)}", "wb") as file:
            file.write(bytes(1 << 20))
    elif kind == "names":  # of empty files, with their inodes
        for number in range(1000):
            open(f"/mnt/{len(held)}-{number}-{'x' * 200}", "wb").close()
    elif kind == "memfd":
        held = held or [os.memfd_create("hoard")]
        os.write(held[0], bytes(1 << 20))
    elif kind == "flight":  # sent, and closed: no process has it open
        fd, (ours, theirs) = os.memfd_create("hoard"), socket.socketpair()
        os.write(fd, bytes(1 << 20))
        socket.send_fds(ours, [b"x"], [fd])
        os.close(fd)
        held = [*held, ours, theirs]
    elif kind == "pipes":
        reading, writing = os.pipe()
        fcntl.fcntl(writing, 1031, 1 << 20)  # F_SETPIPE_SZ
        os.write(writing, bytes(1 << 20))
        held = [*held, reading, writing]
    return [*held, bytearray(b"x" * (1 << 20)) if kind == "anonymous" else held[0] if held else 0]
def hoard(kind, mebibytes, processes):
    if kind in ("tmpfs", "names"):
        library = ctypes.CDLL(None)
        assert library.unshare(CLONE_NEWNS) == library.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        assert library.mount(b"none", b"/mnt", b"tmpfs", 0, b"size=4g") == 0
    for _ in range(processes - 1):
        if os.fork() == 0:
            break
    held = []
    for _ in range(mebibytes):
        held = take(kind, held)
    signal.pause()
    os._exit(0)
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
                    more = connection.recv(65536)
                    if not more:
                        raise ConnectionResetError(104, "the controller has ended")
                    data += more
            result = [json.loads(data), len(new)]
        elif do == "write":
            result = os.write(fds[arguments[0]], b"%d\\n" % arguments[1])
        elif do == "anchor":
            result = subprocess.Popen(["sleep", "infinity"]).pid
        elif do == "thread":
            thread = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
            thread.start()
            result = thread.native_id
        elif do == "self":
            result = os.getpid()
        elif do == "listen":
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(arguments[0])
            listener.listen()
        elif do == "give":
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(arguments[0])
                socket.send_fds(connection, [b"x"], fds)
        elif do == "take":
            fds += socket.recv_fds(listener.accept()[0], 1, 8)[1]
        elif do == "read":
            result = os.pread(fds[arguments[0]], 1 << 16, 0).decode().split()
        elif do == "forget":
            for fd in fds:
                os.close(fd)
            fds = []
        elif do == "socket":
            sockets.append(socket.socket())
        elif do == "close":
            sockets.clear()
        elif do == "leave":  # memory that is taken here, in a memfd that another process has afterwards
            path, mebibytes = arguments
            child = os.fork()
            if child == 0:
                open("/proc/self/oom_score_adj", "w").write("1000")
                taken = os.memfd_create("left")
                for _ in range(mebibytes):
                    os.write(taken, bytes(1 << 20))
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(path)
                    socket.send_fds(connection, [b"x"], [taken])
                os._exit(0)
            result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        elif do == "cache":  # read a file: its pages are charged to the cgroup that reads them first
            path, mebibytes = arguments
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, mebibytes << 20, os.POSIX_FADV_DONTNEED)
            result = sum(len(os.pread(file, 1 << 20, at << 20)) for at in range(mebibytes)) >> 20
            os.close(file)
        elif do == "splice":  # into pipes: the kernel cannot take these pages back
            path, mebibytes = arguments
            file, result = os.open(path, os.O_RDONLY), 0
            for _ in range(mebibytes):
                reading, writing = os.pipe()
                fcntl.fcntl(writing, 1031, 1 << 20)  # F_SETPIPE_SZ
                fds += [reading, writing]
                left = 1 << 20
                while left and (moved := os.splice(file, writing, left)):
                    left -= moved
                result += (1 << 20) - left
            os.close(file)
        elif do == "push":
            def push(fd, tid):
                while True:
                    try:
                        os.write(fd, b"%d\\n" % tid)
                    except OSError:
                        return
            threading.Thread(target=push, args=(fds[arguments[0]], arguments[1]), daemon=True).start()
        elif do == "fork":
            result = 0
            for _ in range(arguments[0]):
                if os.fork() == 0:
                    signal.pause()
                result += 1
        elif do == "touch":
            code = f"b'x' * ({arguments[0]} << 20)"
            result = subprocess.run([sys.executable, "-I", "-S", "-c", code]).returncode
        elif do == "guest":
            guest = os.memfd_create("guest")
            os.truncate(guest, arguments[0] << 20)
            ram = mmap.mmap(guest, arguments[0] << 20)
            ram.madvise(MADV_POPULATE_WRITE)
        elif do == "hoard":
            result = os.fork()
            if result == 0:
                hoard(*arguments)
        elif do == "lease":
            leases.append(os.open(arguments[0], os.O_RDONLY))
            result = fcntl.fcntl(leases[-1], fcntl.F_SETLEASE, getattr(fcntl, arguments[1]))
        elif do == "forbid":
            forbid(*arguments)
        elif do == "run":
            argv, *passed = arguments
            ran = subprocess.run(argv, stdout=-1, stderr=-2, text=True, pass_fds=[fds[number] for number in passed])
            result = [ran.returncode, ran.stdout]
        elif do == "fd":
            result = fds[arguments[0]]
        elif do == "linger":  # send a socket of which the last close takes ten minutes: its peer takes nothing
            path, urgent = arguments
            with socket.create_server(("127.0.0.1", 0)) as listener:
                peer = socket.create_connection(listener.getsockname())
                taken = listener.accept()[0]
            fds.append(peer.detach())
            taken.setblocking(False)
            try:
                while True:
                    taken.send(bytes(1 << 16))
            except BlockingIOError:
                pass
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            try:
                result = socket.send_fds(connection, [b"x"], [taken.fileno()], socket.MSG_OOB if urgent else 0)
            except PermissionError:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
                raise
            taken.close()
            fds.append(connection.detach())
        elif do == "migrate":  # all its pages from one NUMA node to another, if it may use that: migrate_pages(2) on x86-64
            source, target = (ctypes.byref(ctypes.c_ulong(1 << node)) for node in arguments)
            result = ctypes.CDLL(None).syscall(256, os.getpid(), 64, source, target)
        elif do == "pin":
            result = os.sched_setaffinity(arguments[0], arguments[1])
    except OSError as error:
        result = error.strerror if result is None else result
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
        ready, _, _ = select.select([self.process.stdout], [], [], 2 * SECONDS)
        assert ready, f"waited {2 * SECONDS} s for {command[0]}"
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


def cgroup_of(pid: int, tid: int | None = None) -> str:
    """Return the cgroup of a process, or of one of its threads."""
    text = Path(f"/proc/{pid}/task/{tid or pid}/cgroup").read_text()
    return next(line[3:] for line in text.splitlines() if line.startswith("0::"))


def allowed(pid: int, tid: int) -> str:
    text = Path(f"/proc/{pid}/task/{tid}/status").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith("Cpus_allowed_list:"))


BYSTANDER = "bystander"


def ask(path: Path, method: str) -> Any:
    """Call the controller at *path* as a process of the node, and return the result."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(json.dumps({"jsonrpc": "2.0", "method": method, "id": 1}).encode() + b"\n")
        with connection.makefile() as lines:
            return json.loads(lines.readline())["result"]


class Bystander:
    """A process in the float of a pod that is none of the kubelet's, in the tree *root*: it follows the shared pool."""

    def __init__(self, root: Path, frozen: Callable[[], object]) -> None:
        """Start it, and wait until its float has CPUs, or the controller's decisions are *frozen*."""
        self.float_cgroup = Cgroup(root).child(f"instance-{BYSTANDER}").child("float")
        self.process = subprocess.Popen(["sleep", "infinity"])
        until(self._is_in_float)
        until(lambda: self.float_cgroup.cpus() or frozen())

    def _is_in_float(self) -> bool:
        """Make the float, and move the process into it, unless the controller has removed it before, as nothing was in it."""
        try:
            self.float_cgroup.parent.create()
            self.float_cgroup.parent.enable(["cpuset"])
            self.float_cgroup.create()
            self.float_cgroup.make_threaded()
            self.float_cgroup.admit(self.process.pid)
        except CgroupError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            return False
        return True

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


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
        self.bystander: Bystander | None = None

    @property
    def float_cgroup(self) -> Cgroup:
        """Return the float of a pod that has nothing else (:class:`Bystander`)."""
        return self.pod_float(BYSTANDER)

    def domain(self, uid: str) -> Cgroup:
        return self.root.child(f"instance-{uid}")

    def pod_float(self, uid: str) -> Cgroup:
        return self.domain(uid).child("float")

    def instance(self, uid: str) -> Cgroup:
        """Return the cgroup of the vCPUs of pod *uid*."""
        return self.domain(uid).child("vcpus")

    def counters(self, uid: str) -> dict[str, int]:
        """Return ``memory.events`` of the domain of pod *uid*."""
        events = (line.split() for line in self.domain(uid).read("memory.events").splitlines())
        return {name: int(count) for name, count in events}

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
    def controller(
        self, *more: str, prefix: tuple[str, ...] = (), before: str = "", bystander: bool = True
    ) -> Iterator[forked_controllers.Process]:
        """Run the controller, by the command *prefix* or after the code *before*; it answers when the block begins."""
        places = ("--root", str(self.root.path), "--socket", str(self.socket), "--kubelet-dir", str(self.kubelet))
        state = ("--state-dir", str(self.socket.parent / "state"))
        with (
            self.log.open("ab") as log,
            forked_controllers.started((*places, *state, *more), log, prefix=prefix, before=before) as process,
        ):
            try:
                until(lambda: self.answers() or process.poll() is not None)
                assert process.poll() is None, self.log.read_text()
                if bystander:
                    self.watch_float()
                yield process
            finally:
                process.kill()

    def watch_float(self) -> None:
        """Have a bystander, unless there is one; the controller must have made its tree."""
        if self.bystander is None:
            self.bystander = Bystander(self.root.path, lambda: self.ask("getStatus")["frozen"])

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            return True
        return False

    def ask(self, method: str) -> Any:
        return ask(self.socket, method)

    def end(self) -> None:
        for pod in self.pods:
            pod.end()
        if self.bystander is not None:
            self.bystander.end()
        if self.root.exists():
            until(lambda: all(each.remove() for each in reversed(self.root.below(1000))))
            until(self.root.remove)
        with contextlib.suppress(FileNotFoundError):
            (MOUNT.path / "kubepods.slice").rmdir()


@contextlib.contextmanager
def machine_of(directory: Path) -> Iterator[Machine]:
    """Hold a machine with two pods in the kubelet's state; at the end print the controller's log and remove everything."""
    MOUNT.enable(["cpuset", "memory", "pids"])
    machine = Machine(directory)
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
