"""CPU masks of threads (``sched_setaffinity(2)``)."""

from __future__ import annotations

import os

from runner.base.cpuset import CpuSet
from runner.base.errors import PlacementError

MOST_CPUS = 8192
"""The most CPUs of Linux on x86-64 (``CONFIG_NR_CPUS``); it ignores the bits of a mask beyond them."""


def read_mask(tid: int = 0) -> CpuSet:
    """Return the CPUs thread *tid* may use, within its cpuset; 0 is the calling thread."""
    return CpuSet(os.sched_getaffinity(tid))


def read_cpuset() -> CpuSet:
    """Return the CPUs of the calling thread's cpuset, whatever its own mask, which is removed for a moment.

    A cgroup may be hidden from its processes; the kernel intersects each mask with the cpuset. Raises
    :exc:`~runner.base.errors.PlacementError`.
    """
    mask = read_mask()
    unpin(0)
    cpus = read_mask()
    if mask != cpus:
        pin(0, mask)
    return cpus


def unpin(tid: int) -> None:
    """Let thread *tid* run on all CPUs of its cpuset, including those added later.

    The kernel remembers the requested mask and intersects it with the cpuset (``user_cpus_ptr``, Linux 6.2). Raises
    :exc:`~runner.base.errors.PlacementError` when the thread is gone.
    """
    try:
        os.sched_setaffinity(tid, range(MOST_CPUS))
    except OSError as error:
        raise PlacementError(f"cannot let thread {tid} run on all CPUs of its cpuset") from error


def pin(tid: int, cpus: CpuSet) -> None:
    """Pin thread *tid* to *cpus*, and read the mask back.

    The kernel silently clips a mask that lies partly outside the thread's cpuset (``kernel/sched/syscalls.c``,
    ``__sched_setaffinity``).
    Raises :exc:`~runner.base.errors.PlacementError` when the kernel refuses, clips, or the thread is gone.
    """
    try:
        os.sched_setaffinity(tid, cpus)
        allowed = os.sched_getaffinity(tid)
    except OSError as error:
        raise PlacementError(f"cannot pin thread {tid} to CPUs '{cpus}'") from error
    if allowed != set(cpus):
        raise PlacementError(f"cannot pin thread {tid} to CPUs '{cpus}': the kernel gave it '{CpuSet(allowed)}'")
