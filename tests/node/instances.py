"""Real instances in real pods of the node: the program in a container, its controller on the node, what runs where."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.cpuset import CpuSet
from tests.node.cgroups import ROOT, SECONDS, Cgroup
from tests.node.standin_kubelet import (
    MIB,
    PROJECT,
    PYCACHE,
    Container,
    Kubelet,
    Mount,
    Pod,
    Running,
    Runtime,
    capabilities,
)

ROM = Path(os.environ.get("RUNNER_NODE_ROM", ""))
TREE = Cgroup(ROOT / "stelia")
SOCKETS = "/run/instance-cgroup-controller"
ENTRY = ("env", "--block-signal=TERM,INT,HUP", sys.executable, "-m", "runner", "run")
DEVICES = tuple(path for path in ("/dev/net/tun", "/dev/vhost-net") if Path(path).exists())
CAPABILITIES = capabilities("NET_ADMIN SYS_NICE")
"""What an instance's container needs besides containerd's default ones."""


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Wait until *condition* gives something and return it."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return result


@dataclass(frozen=True)
class Thread:
    """A thread of the node as its kernel sees it."""

    pid: int
    tid: int
    name: str
    cgroup: str
    cpus: CpuSet


def threads_of(pid: int) -> Iterator[Thread]:
    """Yield the threads of a process."""
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            groups = (task / "cgroup").read_text().splitlines()
            yield Thread(
                pid,
                int(task.name),
                fields["Name"].strip(),
                next(line[3:] for line in groups if line.startswith("0::")),
                CpuSet.parse(fields["Cpus_allowed_list"].strip()),
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


class Controller:
    """The node's controller, as the DaemonSet would run it."""

    def __init__(self, kubelet: Kubelet, directory: Path, *more: str) -> None:
        self.directory = directory
        self.socket = directory / "controller.sock"
        self.log = directory.parent / "controller.log"
        self.argv = (
            *(sys.executable, "-c", "import sys; from runner.controller.main import main; sys.exit(main())"),
            *("--root", str(TREE.path), "--socket", str(self.socket), "--kubelet-dir", str(kubelet.directory), *more),
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it answers."""
        self.directory.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(PYCACHE)}
            self.process = subprocess.Popen(
                self.argv, cwd=PROJECT, stdin=subprocess.DEVNULL, stderr=log, env=environment
            )
        until(self.answers, "the controller to answer")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            return True
        return False

    def kill(self) -> None:
        """SIGKILL it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def end(self) -> None:
        """Kill it and remove its tree, which must be empty of threads."""
        self.kill()
        until(lambda: not TREE.path.exists() or gone(TREE), "the tree to be empty")


def gone(tree: Cgroup) -> bool:
    """Try to remove an empty tree."""
    with contextlib.suppress(OSError):
        for child in tree.children():
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
        return str(self.running.scope)

    @property
    def group(self) -> Cgroup:
        return Cgroup(TREE.path / f"instance-{self.uid}")

    def up(self) -> None:
        """Wait until its guest has said its word."""
        self.running.wait_for("ROM-GUEST-UP", 2 * SECONDS)

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
        """Check the article's process layout, by the node's own eyes."""
        anchors = self.processes()["anchor"]
        assert len(anchors) == 1
        vcpus = self.vcpus()
        assert sorted(str(thread.cpus) for thread in vcpus) == sorted(str(cpu) for cpu in self.cpus)
        assert {thread.cgroup for thread in vcpus} == {str(self.group)}
        assert {thread.cgroup for thread in threads_of(anchors[0])} == {self.scope}
        mine = {thread.tid for thread in vcpus}
        others = [each for each in self.threads() if each.tid not in mine and each.pid not in anchors]
        assert {each.cgroup for each in others} == {f"{TREE}/float"}
        assert {each.cpus for each in others} == {self.kubelet.default}

    def stop(self) -> int:
        """End its pod as the kubelet does and return its status."""
        return self.kubelet.stop(self.uid)["main"]


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
    **container: Any,
) -> Instance:
    """Start a pod with an instance in it.

    *sockets* is the directory of the controller's socket; *environment_uid* is who the pod says it is.
    """
    uid = uid_of(number)
    place = directory / uid
    place.mkdir()
    (place / "rom").write_bytes(ROM.read_bytes())
    (place / "spec.toml").write_text(spec)
    mounts: list[Mount] = [(place, "/guest", "ro")]
    if sockets is not None:
        mounts.append((sockets, SOCKETS, "ro"))
    defaults: dict[str, Any] = {
        "devices": DEVICES,
        "capabilities": CAPABILITIES,
        "environment": {
            "POD_UID": environment_uid or uid,
            "PYTHONPATH": os.pathsep.join(["/project", *filter(None, sys.path)]),
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
    running = kubelet.run(Pod(uid, (main,), runtime=runtime))["main"]
    return Instance(kubelet, uid, cpus, running)
