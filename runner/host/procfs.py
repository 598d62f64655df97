"""What /proc says of threads (``Documentation/filesystems/proc.rst``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from runner.cpuset import CpuSet
from runner.errors import HostError

_VANISHED = (FileNotFoundError, ProcessLookupError)


@attrs.frozen
class ThreadStatus:
    """One thread, as the kernel sees it at one moment."""

    pid: int
    tid: int
    name: str
    cgroup: str
    """Its cgroup v2 path as this process may see it; empty where there is no cgroup v2."""
    cpus: CpuSet
    """``Cpus_allowed_list``: its own mask within its cpuset."""
    mems: CpuSet
    """``Mems_allowed_list``: NUMA nodes."""
    running_on: int
    """The CPU it ran on last."""


@attrs.frozen
class Procfs:
    """A procfs mounted at *root*."""

    root: Path = Path("/proc")

    def processes(self) -> list[int]:
        """Return the processes of this procfs's PID namespace, in the order of their numbers."""
        return sorted(int(entry.name) for entry in self.root.iterdir() if entry.name.isdecimal())

    def name(self, pid: int) -> str:
        """Return the name of process *pid* (``comm``), empty when it is gone."""
        try:
            return _read(self.root / str(pid) / "comm").removesuffix("\n")
        except OSError:
            return ""

    def thread_ids(self, pid: int) -> list[int]:
        """Return the threads of *pid* in the order of their births; empty when it is gone.

        Like everything here, raises :exc:`~runner.errors.HostError` when the kernel refuses.
        """
        try:
            return sorted(int(entry.name) for entry in (self.root / str(pid) / "task").iterdir())
        except _VANISHED:
            return []
        except OSError as error:
            raise HostError(f"cannot read the threads of process {pid}") from error

    def threads(self, pid: int) -> Iterator[ThreadStatus]:
        """Yield the threads of *pid*; one that ends while we look is left out."""
        for tid in self.thread_ids(pid):
            thread = self.thread(pid, tid)
            if thread is not None:
                yield thread

    def thread(self, pid: int, tid: int) -> ThreadStatus | None:
        """Return one thread, or ``None`` when it is gone."""
        task = self.root / str(pid) / "task" / str(tid)
        try:
            status = _fields(_read(task / "status"))
            # The name in parentheses may hold anything; "processor" is field 39 of proc_pid_stat(5).
            running_on = int(_read(task / "stat").rpartition(")")[2].split()[36])
            return ThreadStatus(
                pid=pid,
                tid=tid,
                name=status["Name"],
                cgroup=_unified(_read(task / "cgroup")),
                cpus=CpuSet.parse(status["Cpus_allowed_list"]),
                mems=CpuSet.parse(status["Mems_allowed_list"]),
                running_on=running_on,
            )
        except _VANISHED:
            return None
        except OSError as error:
            raise HostError(f"cannot read thread {tid} of process {pid}") from error

    def cgroup(self, pid: int | str = "self") -> str:
        """Return the cgroup v2 path of *pid*, empty where there is no cgroup v2.

        Raises :exc:`~runner.errors.HostError` when there is no such process.
        """
        try:
            return _unified(_read(self.root / str(pid) / "cgroup"))
        except OSError as error:
            raise HostError(f"cannot read the cgroup of process {pid}") from error

    def mounted_roots(self) -> list[str]:
        """Return, for each mount this process sees, which directory of its own file system is mounted there.

        Field 4 of ``proc_pid_mountinfo(5)``. Raises :exc:`~runner.errors.HostError`.
        """
        try:
            return [line.split(" ")[3] for line in _read(self.root / "self" / "mountinfo").splitlines()]
        except OSError as error:
            raise HostError("cannot read what is mounted here") from error

    def memory_total(self) -> int:
        """Return the machine's RAM in bytes (``MemTotal``)."""
        return int(_fields(_read(self.root / "meminfo"))["MemTotal"].split()[0]) << 10


def _read(path: Path) -> str:
    # An escape keeps a thread's name from breaking the read: comm may hold any bytes.
    return path.read_text(errors="backslashreplace")


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _unified(text: str) -> str:
    return next((line.removeprefix("0::") for line in text.splitlines() if line.startswith("0::")), "")
