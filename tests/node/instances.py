"""Real instances in real pods of the node: the program in a container, the node's controller, and where their threads are."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from runner.kernel import inotify
from tests.node import forked_controllers
from tests.node.cgroups import ROOT, SECONDS, Cgroup, cgroup_of, mask_of, until
from tests.node.minimal_pods import BYSTANDER, Bystander, ask
from tests.node.standin_kubelet import (
    MIB,
    PROJECT,
    Container,
    Kubelet,
    Mount,
    Pod,
    Running,
    Runtime,
    capabilities,
)

ARRANGED = pytest.mark.parametrize("controller_options", [("--partitions", "off")], ids=["arranged"])
"""For a test of what others can do on the vCPUs' CPUs where the kernel does not keep them off."""
ROM = Path(os.environ.get("RUNNER_NODE_ROM", ""))
TREE = Cgroup(ROOT / "stelia")
FLOAT = Cgroup(TREE.path / f"instance-{BYSTANDER}" / "float")
"""The float of a pod that has nothing else (:class:`~tests.node.minimal_pods.Bystander`)."""
SOCKETS = "/run/instance-cgroup-controller"
ENTRY = ("env", "--block-signal=TERM,INT,HUP", sys.executable, "-m", "runner", "run")
PROJECT_MANIFEST = PROJECT / "examples/kubernetes/controller/daemonset.yaml"
DEVICES = tuple(path for path in ("/dev/net/tun", "/dev/vhost-net") if Path(path).exists())
CAPABILITIES = capabilities("NET_ADMIN SYS_NICE")
"""What an instance's container needs besides containerd's default ones."""
LINUX_CMDLINE = "console=ttyS0 quiet lapic=notscdeadline"
"""For the Linux guest: KVM of a node that is emulated gives no interrupt for a deadline by the TSC, and no sleep in it would end."""
TYPE = """
import socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect("/run/instance-runner/console.sock")
line.sendall(b'{"write": true}\\n')
line.recv(1 << 16)
line.sendall(sys.argv[1].encode() + b"\\n")
line.settimeout(60)
line.recv(1 << 16)
"""
"""Types its argument at the console of the instance in whose container it runs, and waits for an answer."""


@dataclass(frozen=True)
class Thread:
    """A thread of the node, as the node's kernel reports it."""

    pid: int
    tid: int
    name: str
    cgroup: str
    cpus: CpuSet
    running_on: int


def threads_of(pid: int) -> Iterator[Thread]:
    """Yield the threads of a process; those that end meanwhile are left out."""
    tasks: list[Path] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            groups = (task / "cgroup").read_text().splitlines()
            yield Thread(
                pid,
                int(task.name),
                fields["Name"].strip(),
                next(line[3:] for line in groups if line.startswith("0::")),
                CpuSet.parse(fields["Cpus_allowed_list"].strip()),
                int((task / "stat").read_text().rpartition(")")[2].split()[36]),  # proc_pid_stat(5): field 39
            )


def members_of(init: int) -> list[int]:
    """Return the processes of the PID namespace of *init*, which is one of them."""
    namespace = os.stat(f"/proc/{init}/ns/pid").st_ino  # noqa: PTH116 - a magic link
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(path / "ns" / "pid").st_ino == namespace:  # noqa: PTH116
                found.append(int(path.name))
    return sorted(found)


def names(group: Cgroup) -> list[str]:
    """Return the names of a group's children."""
    return [child.path.name for child in group.children()]


class Controller:
    """The node's controller, as the DaemonSet would run it."""

    def __init__(self, kubelet: Kubelet, directory: Path, *more: str) -> None:
        self.directory = directory
        self.socket = directory / "controller.sock"
        self.log = directory.parent / "controller.log"
        self.arguments = (
            *("--root", str(TREE.path), "--socket", str(self.socket), "--kubelet-dir", str(kubelet.directory)),
            *("--state-dir", str(directory.parent / "controller-state")),
            # Three times the default here: what is emulated needs more than the share of such small pods is in 1 GiB.
            *("--memory-max", "3G", *more),
        )
        self.prefix: tuple[str, ...] = ()
        self.before = ""
        self.process: forked_controllers.Process | None = None
        self.bystander: Bystander | None = None

    def start(self) -> None:
        """Start it, by the command *prefix* or after the code *before*, and wait until it answers."""
        self.directory.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self.process = forked_controllers.started(self.arguments, log, prefix=self.prefix, before=self.before)
        # With a prefix it imports for up to a minute where the node has to compile what it imports, and others load the machine.
        until(self.answers, "the controller to answer", 4 * SECONDS)
        if self.bystander is None:
            self.put_bystander()

    def put_bystander(self) -> None:
        """Have a float of a pod that has nothing else."""
        self.bystander = Bystander(TREE.path, lambda: ask(self.socket, "getStatus")["frozen"])

    def answers(self) -> bool:
        """Return whether the socket accepts connections; fail when the process has ended."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        return self.listens()

    def listens(self) -> bool:
        """Return whether a process accepts connections on the socket, be it this one or another."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            return True
        return False

    def descriptors(self) -> int:
        """Return how many descriptors it has open."""
        assert self.process is not None
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def kill(self) -> None:
        """SIGKILL it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(SECONDS)
            self.process = None

    def end(self) -> None:
        """Kill it and remove its tree, which must be empty of threads."""
        self.kill()
        if self.bystander is not None:
            self.bystander.end()
        until(lambda: not TREE.path.exists() or gone(TREE), "the tree to be empty")


def gone(tree: Cgroup) -> bool:
    """Try to remove an empty tree."""
    with contextlib.suppress(OSError):
        for child in tree.children():
            for pod in child.children():
                pod.path.rmdir()
            child.path.rmdir()
        tree.path.rmdir()
    return not tree.path.exists()


@dataclass(frozen=True)
class Instance:
    """An instance of the node."""

    kubelet: Kubelet
    uid: str
    cpus: CpuSet
    running: Running

    @property
    def scope(self) -> str:
        """Return the cgroup of its container; in a unit of systemd's, crun makes one inside."""
        inner = self.running.scope.path / "container"
        return str(Cgroup(inner) if inner.exists() else self.running.scope)

    @property
    def domain(self) -> Cgroup:
        return Cgroup(TREE.path / f"instance-{self.uid}")

    @property
    def group(self) -> Cgroup:
        """Return the cgroup of its vCPUs."""
        return Cgroup(self.domain.path / "vcpus")

    @property
    def float_group(self) -> Cgroup:
        return Cgroup(self.domain.path / "float")

    def up(self) -> None:
        """Wait until its guest has reported that it is up."""
        self.running.wait_for("ROM-GUEST-UP", 6 * SECONDS)

    def processes(self) -> dict[str, list[int]]:
        """Return role → the node's pids."""
        found: dict[str, list[int]] = {}
        for pid in members_of(self.running.pid):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                role = "runner" if pid == self.running.pid else {"sleep": "anchor", "qemu-system-x86": "qemu"}.get(name)
                found.setdefault(role or name, []).append(pid)
        return found

    def threads(self) -> list[Thread]:
        return [thread for pid in members_of(self.running.pid) for thread in threads_of(pid)]

    def vcpus(self) -> list[Thread]:
        [qemu] = self.processes()["qemu"]
        return [thread for thread in threads_of(qemu) if thread.name.startswith("CPU ")]

    def receipt(self) -> dict[str, Any]:
        """Return the receipt as it is read in the container."""
        found = json.loads(self.running.execute("cat", "/run/instance-runner/receipt.json"))
        assert isinstance(found, dict)
        return found

    def is_placed(self) -> None:
        """Check the article's process layout, as the node's ``/proc`` shows it."""
        anchors = self.processes()["anchor"]
        assert len(anchors) == 2
        self.vcpus_hold()
        vcpus = self.vcpus()
        assert {thread.cgroup for anchor in anchors for thread in threads_of(anchor)} == {self.scope}
        mine = {thread.tid for thread in vcpus}
        others = [each for each in self.threads() if each.tid not in mine and each.pid not in anchors]
        assert {each.cgroup for each in others} == {str(self.float_group)}
        assert {each.cpus for each in others} == {self.kubelet.default}

    def vcpus_hold(self) -> None:
        """Check that each vCPU thread is alone on its CPU, in the instance's cgroup."""
        vcpus = self.vcpus()
        assert sorted(str(thread.cpus) for thread in vcpus) == sorted(str(cpu) for cpu in self.cpus)
        assert {thread.cgroup for thread in vcpus} == {str(self.group)}

    def type(self, line: str) -> None:
        """Type *line* at the guest's console, and wait until the guest shows something."""
        self.running.execute(sys.executable, "-c", TYPE, line)

    def stop(self) -> int:
        """End its pod as the kubelet does and return its status."""
        return self.kubelet.stop(self.uid)["main"]

    def marks(self) -> dict[int, tuple[str, CpuSet]]:
        """Return what must not change while it runs: each vCPU thread's cgroup and mask."""
        return marks_of(thread.tid for thread in self.vcpus())


def marks_of(tids: Iterable[int]) -> dict[int, tuple[str, CpuSet]]:
    """Return each of these threads' cgroup and mask."""
    return {tid: (cgroup_of(tid), mask_of(tid)) for tid in tids}


def pool(node: int, file: str) -> Path:
    """Return a file of the huge pages of 2 MiB of a NUMA node."""
    return Path(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/{file}")


def uid_of(number: int) -> str:
    """Return the UID of the *number*-th pod."""
    return f"{number:08x}-0000-4000-8000-{number:012x}"


def spec_text(cpus: CpuSet, *more: str, memory: int = 64) -> str:
    """Return a spec whose guest is the ROM."""
    return "\n".join(
        (
            f'[cpu]\ncount = {len(cpus)}\naccel = "tcg"',
            f'[memory]\nsize = "{memory}MiB"\n[boot]\nfirmware = "/guest/rom"\n[shutdown]\ngrace = 20\n',
            *more,
        )
    )


def start_instance(
    kubelet: Kubelet,
    number: int,
    cpus: CpuSet,
    *,
    spec: str,
    directory: Path,
    mems: CpuSet | None = None,
    sockets: Path | None = None,
    runtime: Runtime = "crun",
    arguments: Sequence[str] = (),
    environment_uid: str | None = None,
    host_pid: bool = False,
    share_processes: bool = False,
    host_users: bool = True,
    more_mounts: Sequence[Mount] = (),
    more_environment: Mapping[str, str] | None = None,
    **container: Any,
) -> Instance:
    """Start a pod with an instance in it.

    *sockets* is the directory of the controller's socket; *environment_uid* is the pod UID in the environment, when it is
    not the pod's own.
    """
    uid = uid_of(number)
    place = directory / uid
    place.mkdir(exist_ok=True)  # the pod may have been started before
    (place / "rom").write_bytes(ROM.read_bytes())
    (place / "spec.toml").write_text(spec)
    mounts: list[Mount] = [(place, "/guest", "ro"), *more_mounts]
    if sockets is not None:
        mounts.append((sockets, SOCKETS, "ro"))
    defaults: dict[str, Any] = {
        "devices": DEVICES,
        "capabilities": CAPABILITIES,
        "environment": {
            "POD_UID": environment_uid or uid,
            "PYTHONPATH": os.pathsep.join(["/project", *filter(None, sys.path)]),
            **(more_environment or {}),
        },
        "memory": 384 * MIB,
        "cgroupfs": "none",
    }
    main = Container(
        (*ENTRY, *arguments, "/guest/spec.toml"),
        cpus=cpus,
        mems=mems or CpuSet(),
        mounts=tuple(mounts),
        **{**defaults, **container},
    )
    pod = Pod(uid, (main,), runtime=runtime, host_pid=host_pid, share_processes=share_processes, host_users=host_users)
    return Instance(kubelet, uid, cpus, kubelet.run(pod)["main"])


@dataclass(frozen=True)
class NodeFixture:
    """A Kubernetes node: its kubelet and its controller."""

    kubelet: Kubelet
    controller: Controller
    directory: Path

    def start(self, number: int, cpus: str, *more: str, keys: str = "", **options: Any) -> Instance:
        """Start an instance with placement ``controller`` and no privilege; *keys* are added to ``[cpu]``."""
        wanted = CpuSet.parse(cpus)
        spec = spec_text(wanted, "[[network]]", *more).replace("[cpu]\n", f'[cpu]\nplacement = "controller"\n{keys}')
        return start_instance(
            self.kubelet,
            number,
            wanted,
            spec=spec,
            directory=self.directory,
            sockets=self.controller.directory,
            **options,
        )

    def settle(self) -> None:
        """Wait until float's CPUs are the kubelet's shared pool."""
        until(lambda: FLOAT.cpus() == self.kubelet.default, f"float to be {self.kubelet.default}")


@contextlib.contextmanager
def untouched(*groups: Cgroup) -> Iterator[None]:
    """Check that while the block runs no file of *groups* is written to, and none is created or deleted in them."""
    with inotify.watching() as queue:
        for group in groups:
            queue.watch(group.path, inotify.MODIFY | inotify.CREATE | inotify.DELETE)
        yield
        assert [event.name for event in queue.pending()] == [], "something has been written to"


@contextlib.contextmanager
def kubelet_of(directory: Path, numa: Mapping[int, CpuSet]) -> Iterator[Kubelet]:
    """Hold a stand-in kubelet of this machine that reserves CPU 0; its pods end with the block.

    Where systemd is PID 1, cgroups are its units, as with the kubelet's ``cgroupDriver: systemd``.
    """
    if (ROOT / "kubepods.slice").exists():
        pytest.skip("a machine without a kubelet is missing: kubepods.slice is there already")
    systemd = Path("/run/systemd/system").exists()
    with Kubelet(directory / "kubelet", numa, reserved=CpuSet([0]), systemd=systemd) as kubelet:
        yield kubelet


@contextlib.contextmanager
def controller_of(kubelet: Kubelet, directory: Path, *more: str) -> Iterator[Controller]:
    """Hold the node's controller, which answers; its log is shown when the test fails, its tree is removed at the end."""
    controller = Controller(kubelet, directory / "sockets", *more)
    try:
        controller.start()
        yield controller
    finally:
        for uid, containers in list(kubelet.running.items()):
            print(*(f"--- {name} of {uid}\n{container.output}" for name, container in containers.items()), sep="\n")
            kubelet.stop(uid, grace=0)
        print(f"--- controller\n{controller.log.read_text()}")
        controller.end()
