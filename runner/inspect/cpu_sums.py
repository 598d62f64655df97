"""The time of other tasks on CPUs by the kernel's sums: the time of all tasks, without the vCPU and bound kernel threads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import frozen
from runner.facts.roots import Roots
from runner.inspect.cpu_time import CpuAccount, TaskTime
from runner.inspect.observe import read_processes
from runner.kernel.procfs import Procfs
from runner.placement.threads import ObservedThread


@frozen
class _Sums:
    """The sums at one moment."""

    at: int
    """Nanoseconds of ``CLOCK_MONOTONIC``."""
    cpus: Mapping[int, int]
    idle: Mapping[int, float]
    threads: Mapping[int, int]
    """Thread → nanoseconds that it has run; threads that have ended are left out."""


@attrs.define
class CpuSums:
    """Sums up a window that has begun."""

    _procfs: Procfs
    _cpus: CpuSet
    _vcpus: Mapping[int, ObservedThread]
    """CPU → the vCPU thread that is pinned to it."""
    _kernel: Mapping[int, tuple[ObservedThread, ...]]
    """CPU → the visible kernel threads that are bound to it."""
    _before: _Sums

    @classmethod
    def begin(cls, roots: Roots, cpus: CpuSet, vcpus: Mapping[int, ObservedThread]) -> CpuSums:
        """Begin a window. Raises :class:`HostError` when the kernel has no sums."""
        others = read_processes(roots).others((), cpus)
        bound = [
            each for each in others if each.kernel and len(each.thread.cpus) == 1 and each.thread.cgroup in {"", "/"}
        ]
        kernel = {cpu: tuple(each for each in bound if cpu in each.thread.cpus) for cpu in cpus}
        procfs = Procfs(roots.proc)
        before = _read(procfs, (*vcpus.values(), *bound))
        missing = cpus - CpuSet(before.cpus)
        if missing:
            raise HostError(
                f"cannot sum up the time of the CPUs '{missing}': /proc/schedstat has none",
                remedy="it needs a kernel with CONFIG_SCHEDSTATS",
            )
        return cls(procfs, cpus, vcpus, kernel, before)

    def end(self) -> tuple[int, dict[int, CpuAccount]]:
        """Return the length of the window in nanoseconds, and CPU → its account."""
        bound = [each for kernel in self._kernel.values() for each in kernel]
        after = _read(self._procfs, (*self._vcpus.values(), *bound))
        return after.at - self._before.at, {cpu: self._account(cpu, after) for cpu in self._cpus}

    def _account(self, cpu: int, after: _Sums) -> CpuAccount:
        before, vcpu = self._before, self._vcpus.get(cpu)
        idle = round((after.idle.get(cpu, 0) - before.idle.get(cpu, 0)) * 1e9)
        of_vcpu = 0 if vcpu is None else self._ran(vcpu, after)
        kernel = tuple(
            TaskTime(each.thread.name, each.thread.pid, each.thread.tid, each.thread.cgroup, True, ran)
            for each in self._kernel[cpu]
            if (ran := self._ran(each, after))
        )
        known = of_vcpu + sum(each.nanoseconds for each in kernel)
        # The kernel adds a task's time when the task leaves the CPU; a part of it may be older than the window.
        busy = min(after.cpus.get(cpu, 0) - before.cpus[cpu], after.at - before.at - idle)
        return CpuAccount(
            cpu=cpu,
            vcpu=None if vcpu is None else vcpu.vcpu,
            vcpu_nanoseconds=of_vcpu,
            idle_nanoseconds=idle,
            kernel=kernel,
            others=None,
            other_nanoseconds=max(busy - known, 0),
        )

    def _ran(self, each: ObservedThread, after: _Sums) -> int:
        tid = each.thread.tid
        return (
            after.threads[tid] - self._before.threads[tid]
            if tid in after.threads and tid in self._before.threads
            else 0
        )


def _read(procfs: Procfs, threads: Iterable[ObservedThread]) -> _Sums:
    # CPUs first: time that a vCPU runs between the readings then reduces the others' time instead of being counted there.
    cpus, idle, at = procfs.cpu_run_times(), procfs.idle(), time.monotonic_ns()
    ran = {each.thread.tid: procfs.run_time(each.thread.pid, each.thread.tid) for each in threads}
    return _Sums(at, cpus, idle, {tid: nanoseconds for tid, nanoseconds in ran.items() if nanoseconds is not None})
