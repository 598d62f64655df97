"""The time that other tasks have run on the vCPUs' CPUs; imported where metrics are served."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from runner.base.values import frozen
from runner.kernel.procfs import Procfs
from runner.placement.threads import Receipt


@frozen
class PinnedThread:
    """The thread of a vCPU."""

    pid: int
    tid: int
    cpu: int


@attrs.define
class ForeignTime:
    """The time of other tasks on each vCPU's CPU since its thread was pinned: the CPU's task time less the thread's.

    The kernel adds a task's time to its CPU's when the task leaves, so while a vCPU runs without a pause the difference shrinks. Nothing
    else runs there meanwhile, so the highest difference so far is reported. For the same reason the first reading must be made while the
    vCPUs sleep, before the guest runs. With ``CONFIG_IRQ_TIME_ACCOUNTING`` a thread's time excludes interrupts, so interrupts during the
    vCPU's time count here.
    """

    _threads: Mapping[int, PinnedThread]
    """By the index of the vCPU."""
    _before: Mapping[int, int]
    """vCPU → the difference in nanoseconds at the beginning."""
    _highest: dict[int, int] = attrs.field(factory=dict)

    @classmethod
    def begin(cls, procfs: Procfs, receipt: Receipt) -> ForeignTime:
        """Begin to count for the vCPUs of *receipt*, while none of them runs yet; count none if the kernel has no such sums."""
        threads = _pinned(receipt)
        return cls(threads, _differences(procfs, threads))

    def succeeded_by(self, procfs: Procfs, receipt: Receipt) -> ForeignTime:
        """Continue to count for the vCPUs of *receipt*, of which some have other threads or CPUs now.

        A thread that stayed on its CPU may be running; the others are not, or were moved just now.
        """
        self.read(procfs)
        threads = _pinned(receipt)
        before = {
            vcpu: self._before[vcpu]
            if vcpu in self._before and self._threads.get(vcpu) == threads[vcpu]
            else each - self._highest.get(vcpu, 0)
            for vcpu, each in _differences(procfs, threads).items()
        }
        return ForeignTime(threads, before, dict(self._highest))

    def read(self, procfs: Procfs) -> Mapping[int, float]:
        """Return vCPU → seconds of other tasks on its CPU."""
        for vcpu, difference in _differences(procfs, self._threads).items():
            if vcpu in self._before:
                self._highest[vcpu] = max(self._highest.get(vcpu, 0), difference - self._before[vcpu])
        return {vcpu: nanoseconds / 1e9 for vcpu, nanoseconds in self._highest.items()}


def _pinned(receipt: Receipt) -> dict[int, PinnedThread]:
    return {
        each.vcpu: PinnedThread(each.thread.pid, each.thread.tid, min(each.thread.cpus))
        for each in receipt.threads
        if each.vcpu is not None
    }


def _differences(procfs: Procfs, threads: Mapping[int, PinnedThread]) -> dict[int, int]:
    cpus = procfs.cpu_run_times()  # first: time that a vCPU runs between the readings only lessens the difference
    return {
        vcpu: cpus[thread.cpu] - ran
        for vcpu, thread in threads.items()
        if thread.cpu in cpus and (ran := procfs.run_time(thread.pid, thread.tid)) is not None
    }
