"""CPU masks of threads (``sched_setaffinity(2)``)."""

from __future__ import annotations

import os

from runner.cpuset import CpuSet
from runner.errors import PlacementError


def read_mask(tid: int = 0) -> CpuSet:
    """Return the CPUs thread *tid* may use, within its cpuset; 0 is the calling thread."""
    return CpuSet(os.sched_getaffinity(tid))


def pin(tid: int, cpus: CpuSet) -> None:
    """Pin thread *tid* to *cpus*, and read the mask back.

    The kernel silently clips a mask that lies partly outside the thread's cpuset (``kernel/sched/syscalls.c``,
    ``__sched_setaffinity``).
    Raises :exc:`~runner.errors.PlacementError` when the kernel refuses, clips, or the thread is gone.
    """
    try:
        os.sched_setaffinity(tid, cpus)
        found = os.sched_getaffinity(tid)
    except OSError as error:
        raise PlacementError(f"cannot pin thread {tid} to CPUs '{cpus}'") from error
    if found != set(cpus):
        raise PlacementError(f"cannot pin thread {tid} to CPUs '{cpus}': the kernel gave it '{CpuSet(found)}'")
