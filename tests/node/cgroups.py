"""The cgroup v2 file system for the tests of the node: what is read is returned, and errors by their names.

It does not use the project's own code for cgroups, so that a test of the kernel's behaviour cannot share its bugs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from runner.base.cpuset import CpuSet

ROOT = Path("/sys/fs/cgroup")
KERNEL = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
PARTITIONED = KERNEL >= (6, 7)
"""Whether the kernel has remote partitions, by its version: a kernel that should have them and has not fails the tests."""
MASKS_KEPT = KERNEL >= (6, 2)
"""Whether a thread's own mask outlives a change of its cpuset (``user_cpus_ptr``); ``check`` warns of kernels without."""
LEASABLE = KERNEL < (7, 0)
"""Whether the files of cgroups can be leased: since 7.0 a file system has to provide for it (``->setlease``)."""
CLEARABLE = KERNEL >= (7, 0)
"""Whether the cpuset of a populated cgroup can be cleared; it inherits its parent's then."""
IN_DELETE = 0x200
T = TypeVar("T")
SECONDS = 180 * max(1, (os.cpu_count() or 1) // 16)
"""How long to wait for what must happen; emulated CPUs are slow, the more of them the slower, and others run beside the node."""


def until(condition: Callable[[], T | None], what: str = "what is to happen", seconds: float = SECONDS) -> T:
    """Wait until *condition* returns something true and return that; look less and less often, as each look takes CPU time."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    return result


class Cgroup:
    """One directory of the hierarchy."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        """Return the path as ``/proc/<pid>/cgroup`` shows it."""
        return f"/{self.path.relative_to(ROOT)}"

    def read(self, file: str) -> str:
        return (self.path / file).read_text().strip()

    def words(self, file: str) -> set[str]:
        return set(self.read(file).split())

    def cpus(self, file: str = "cpuset.cpus.effective") -> CpuSet:
        return CpuSet.parse(self.read(file))

    def write(self, file: str, value: object) -> None:
        """Write in one system call, never creating a file; an empty value still makes the call."""
        fd = os.open(self.path / file, os.O_WRONLY)
        try:
            os.write(fd, f"{value}\n".encode())
        finally:
            os.close(fd)

    def refusal(self, file: str, value: object) -> str:
        """Return the name of the error that writing gives, or ``""``."""
        return refusal_of(lambda: self.write(file, value))

    def child(self, name: str, *, threaded: bool = False, **files: object) -> Cgroup:
        """Make a child; *files* are written in their order, ``cpuset_cpus="1"`` meaning ``cpuset.cpus``."""
        child = Cgroup(self.path / name)
        child.path.mkdir()
        if threaded:
            child.write("cgroup.type", "threaded")
        for file, value in files.items():
            child.write(file.replace("_", ".", 1), value)
        return child

    def delegate(self, *controllers: str) -> None:
        """Enable controllers for the children; without names, every available one."""
        for controller in controllers or sorted(self.words("cgroup.controllers")):
            self.write("cgroup.subtree_control", f"+{controller}")

    def entering(self) -> tuple[str, ...]:
        """Return the beginning of a command that goes into the cgroup and becomes the rest of it."""
        return ("sh", "-c", 'echo 0 >"$0" && exec "$@"', str(self.path / "cgroup.procs"))

    def children(self) -> list[Cgroup]:
        return [Cgroup(path) for path in sorted(self.path.iterdir()) if path.is_dir()]

    def populated(self) -> bool:
        return "populated 1" in self.read("cgroup.events")

    def wait_empty(self) -> None:
        """Wait until no process is left: the kernel signals a change of ``cgroup.events`` as POLLPRI."""
        with (self.path / "cgroup.events").open() as events:
            poll = select.poll()
            poll.register(events, select.POLLPRI)
            end = time.monotonic() + SECONDS
            while "populated 1" in events.read():
                assert poll.poll(max(0, end - time.monotonic()) * 1000), f"{self} is still populated"
                events.seek(0)

    def wait_gone(self) -> None:
        """Wait until another process has removed it. The parent is watched: kernfs does not report the deletion itself."""
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_CLOEXEC)
        try:
            watching = libc.inotify_add_watch(fd, bytes(self.path.parent), IN_DELETE) >= 0
            end = time.monotonic() + SECONDS
            while watching and self.path.exists():
                ready, _, _ = select.select([fd], [], [], max(0, end - time.monotonic()))
                assert ready, f"{self} is still there"
                os.read(fd, 4096)
        finally:
            os.close(fd)

    def remove(self) -> None:
        """Kill what is below and remove it, children first."""
        if not self.path.exists():
            return
        threaded = self.read("cgroup.type") in {"threaded", "domain invalid"}
        if not threaded:
            self.write("cgroup.kill", 1)
            self.wait_empty()
        for child in self.children():
            child.remove()
        self.path.rmdir()


def refusal_of(act: Callable[[], object]) -> str:
    """Return the name of the ``OSError`` that calling *act* raises, or ``""``."""
    try:
        act()
    except OSError as error:
        # Linux has one number for both names, and the kernel's documentation uses this one
        return "EOPNOTSUPP" if error.errno == errno.EOPNOTSUPP else errno.errorcode[error.errno or 0]
    return ""


THREADS = """
import sys, threading
gate = threading.Event()
for _ in range(int(sys.argv[1])):
    threading.Thread(target=gate.wait).start()
print("ready", flush=True)
gate.wait()
"""


class Task:
    """A process that sleeps, with some threads besides its leader."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    @property
    def tids(self) -> list[int]:
        """Return its threads, the leader first."""
        return sorted(int(path.name) for path in Path(f"/proc/{self.pid}/task").iterdir())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def task(cgroup: Cgroup | None = None, threads: int = 0) -> Iterator[Task]:
    """Start a task in *cgroup*: like a pod's process, it enters the cgroup before it executes its program."""
    argv = [sys.executable, "-I", "-S", "-c", THREADS, str(threads)]
    if cgroup is not None:
        argv = ["sh", "-c", 'echo 0 >"$0" && exec "$@"', str(cgroup.path / "cgroup.procs"), *argv]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Task(process)
        finally:
            process.kill()


def cgroup_of(tid: int | str) -> str:
    """Return a thread's cgroup, relative to the cgroup namespace of this process."""
    return Path(f"/proc/{tid}/cgroup").read_text().strip().removeprefix("0::")


def mask_of(tid: int) -> CpuSet:
    """Return the CPUs a thread may run on."""
    return CpuSet(os.sched_getaffinity(tid))


def pages_by_numa_node(pid: int) -> dict[int, int]:
    """Return NUMA node → pages of the mapping of the memory file."""
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if "/memfd:guest" in line:
            counts = (word.split("=") for word in line.split() if word[0] == "N" and word[1].isdigit())
            return {int(numa_node[1:]): int(pages) for numa_node, pages in counts}
    return {}
