"""CPU masks of threads (``sched_setaffinity(2)``)."""

from __future__ import annotations

import os

from runner.cpuset import CpuSet
from runner.errors import PlacementError


def read_mask(tid: int = 0) -> CpuSet:
    """Return the CPUs thread *tid* may use, within its cpuset; 0 is the calling thread."""
    return CpuSet(os.sched_getaffinity(tid))


def pin(tid: int, cpus: CpuSet) -> None:
    """Let thread *tid* use *cpus* and no other, and read it back.

    A mask that lies partly outside the thread's cpuset is clipped without a word (``kernel/sched/syscalls.c``,
    ``__sched_setaffinity``), so what was written is compared with what is.
    Raises :exc:`~runner.errors.PlacementError` when the kernel refuses, clips, or the thread is gone.
    """
    try:
        os.sched_setaffinity(tid, cpus)
        found = read_mask(tid)
    except OSError as error:
        raise PlacementError(f"cannot pin thread {tid} to CPUs '{cpus}'") from error
    if found != cpus:
        raise PlacementError(f"cannot pin thread {tid} to CPUs '{cpus}': the kernel gave it '{found}'")
