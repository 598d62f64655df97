"""Processes and threads, as the kernel shows them at one moment (``Documentation/filesystems/proc.rst``)."""

from __future__ import annotations

from runner.base.cpuset import CpuSet
from runner.base.values import frozen


@frozen
class ThreadStatus:
    """One thread, as ``/proc/PID/task/TID`` showed it at one moment."""

    pid: int
    tid: int
    name: str
    cgroup: str
    """Its cgroup v2 path in the reader's cgroup namespace; empty where there is no cgroup v2."""
    cpus: CpuSet
    """``Cpus_allowed_list``: the CPUs of its own mask that are in its cpuset."""
    mems: CpuSet
    """``Mems_allowed_list``: the NUMA nodes that it may take memory from."""
    running_on: int
    """The CPU on which it last ran."""

    @property
    def has_run_there(self) -> bool:
        """Return whether it last ran on a CPU that it may use: a thread that has slept since it was moved shows its former CPU."""
        return self.running_on in self.cpus


@frozen
class ProcessStatus:
    """One process, as ``/proc/PID`` showed it at one moment."""

    pid: int
    inner_pid: int
    """Its PID in its own PID namespace; 1 is that namespace's init."""
    parent: int
    """The PID of its parent; 0 if the parent is in another PID namespace."""
    name: str
    kernel: bool
    """Whether it is a kernel thread."""
