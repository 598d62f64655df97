"""Processes and threads, as the kernel shows them at one moment (``Documentation/filesystems/proc.rst``)."""

from __future__ import annotations

import attrs

from runner.cpuset import CpuSet


@attrs.frozen
class ThreadStatus:
    """One thread, as the kernel sees it at one moment."""

    pid: int
    tid: int
    name: str
    cgroup: str
    """Its cgroup v2 path in the reader's cgroup namespace; empty where there is no cgroup v2."""
    cpus: CpuSet
    """``Cpus_allowed_list``: its own mask within its cpuset."""
    mems: CpuSet
    """``Mems_allowed_list``: NUMA nodes."""
    running_on: int
    """The CPU it ran on last."""


@attrs.frozen
class ProcessStatus:
    """One process, as the kernel sees it at one moment."""

    pid: int
    inner_pid: int
    """Its number in its own PID namespace: 1 is that namespace's init."""
    parent: int
    """0 when the parent is in another PID namespace."""
    name: str
    kernel: bool
    """It is a kernel thread."""
