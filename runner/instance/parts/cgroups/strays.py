"""Strays: processes and threads that were started on the vCPUs' CPUs while the guest runs, and are moved away."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from runner.base.errors import HostError, PlacementError, explain
from runner.base.events import InstanceEvent
from runner.base.rate_limit import LogRateLimit
from runner.instance.parts.cgroups.entered import EnteredCgroups, P
from runner.instance.supervisor import Counters
from runner.kernel.cgroup import CgroupError
from runner.kernel.child_processes import Processes
from runner.kernel.procfs import Procfs

log = logging.getLogger(__name__)

SWEPT_EVERY = 0.75
"""Seconds between two sweeps, because no event reports the start of a process; a sweep takes 0.1 ms (measured)."""


def processes_of_others(processes: Processes, procfs: Procfs) -> list[int]:
    """Return the container's processes that this program has not started, such as those of ``kubectl exec``.

    Return none unless this is PID 1: any other process also sees the processes of other containers, and cannot distinguish them.
    """
    ours = {os.getpid(), *(process.pid for process in processes)}
    return [pid for pid in procfs.processes() if pid not in ours] if os.getpid() == 1 else []


async def sweep(processes: Processes, procfs: Procfs, counters: Counters, active: EnteredCgroups[P]) -> None:
    """Move strays to float, again and again, until cancelled.

    These are processes that others start in the pod's cgroup, and threads that QEMU's vCPU threads start: a thread is
    born in the cgroup of its parent, and since Linux 6.14 the first vCPU that runs starts KVM's
    ``kvm-nx-lpage-recovery``. A process that may not run on the vCPUs' CPUs stays where it is, as every process of the pod
    does while these are sealed.
    """
    limit = LogRateLimit()
    try:
        while True:
            try:
                _sweep_once(processes, procfs, counters, active, limit)
            except HostError as error:  # an error of /proc itself: descriptors or memory are short, perhaps only now
                log.debug(InstanceEvent.SWEEP_FAILED, explain(error))
            await trio.sleep(SWEPT_EVERY)
    finally:
        limit.log_left_out()


def _sweep_once(
    processes: Processes, procfs: Procfs, counters: Counters, active: EnteredCgroups[P], limit: LogRateLimit
) -> None:
    for pid in processes_of_others(processes, procfs):
        with _tolerated(limit, f"process {pid}"):
            _sweep_process(procfs, counters, active, pid, limit)
    for pid in [process.pid for process in processes if process.role == "qemu"] if active.confined else ():
        for tid in set(procfs.thread_ids(pid)) - active.confined:
            with _tolerated(limit, f"thread {tid} of QEMU"):
                _sweep_thread(procfs, counters, active, tid, limit)


def _sweep_process(
    procfs: Procfs, counters: Counters, active: EnteredCgroups[P], pid: int, limit: LogRateLimit
) -> None:
    vcpus = active.placement.cpus
    placed = {active.cgroups.float_cgroup, active.cgroups.instance}
    threads = (each for each in procfs.threads(pid) if each.cgroup not in placed and not each.cpus.isdisjoint(vcpus))
    if (first := next(threads, None)) is not None:  # a zombie has none
        active.admit(pid)
        counters.swept += 1
        limit.log(log.info, InstanceEvent.PROCESS_MOVED_TO_FLOAT, pid, first.name)


def _sweep_thread(procfs: Procfs, counters: Counters, active: EnteredCgroups[P], tid: int, limit: LogRateLimit) -> None:
    if procfs.cgroup(tid) == active.cgroups.instance:
        name = procfs.name(tid)
        active.release(tid)
        counters.swept += 1
        limit.log(log.info, InstanceEvent.THREAD_MOVED_TO_FLOAT, tid, name)


@contextmanager
def _tolerated(limit: LogRateLimit, what: str) -> Iterator[None]:
    """Log that *what* could not be moved, unless it has ended meanwhile."""
    try:
        yield
    except (CgroupError, PlacementError) as error:
        cause = error.errno if isinstance(error, CgroupError) else getattr(error.__cause__, "errno", None)
        if cause not in {errno.ESRCH, errno.ENOENT}:
            limit.log(log.warning, InstanceEvent.STRAY_NOT_MOVED, what, explain(error), peer=what)
    except HostError:
        pass
