"""The time of every task on a vCPU's CPU within a window, and its judgement.

Interrupts are no tasks: their time counts as the time of the task that they interrupt, or as idle time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, assert_never

import attrs

from runner.base.cpuset import CpuSet
from runner.base.judgement import Judgement, Level
from runner.base.subject import Subject, worst
from runner.base.values import frozen
from runner.inspect.observation import ObservedGuarantee, Viewpoint
from runner.inspect.rules import NO_VCPU_THREAD
from runner.placement.backends import Backend

IDLE = 0
"""The number of the idle task of every CPU."""
_NOT_KNOWN = -1
TRACE = Subject("trace", "while another task runs on a vCPU's CPU the guest stands still")
RECORDED = (
    "record every switch, as root of the node: kubectl debug node/NODE -it --profile=sysadmin --image=instance-cgroup-controller -- "
    "instance-runner inspect --trace 10"
)
"""The remedy if there are only sums: neither an instance's container nor the controller's may use tracefs."""
TOLERANCE = 1000
"""The reciprocal of the share of the window below which a sum proves nothing.

The kernel counts a CPU's time and a thread's by two clocks, and idle time in ticks of 10 ms.
"""


@attrs.define
class CpuTimes:
    """The time of each task on one CPU, counted from its switches. Times are nanoseconds of ``CLOCK_MONOTONIC``."""

    begin: int
    end: int | None = None
    """The end of the window, once known; later switches are ignored."""
    nanoseconds: Counter[int] = attrs.field(factory=Counter)
    """Thread, or :data:`IDLE` → its time."""
    names: dict[int, str] = attrs.field(factory=dict)
    """Thread → its last seen name."""
    first_seen: dict[int, int] = attrs.field(factory=dict)
    """Thread → the time at which it first left the CPU."""
    unknown: int = 0
    """Time in which the running task is unknown, because events were lost."""
    _running: int | None = attrs.field(default=None, init=False)
    """The thread that runs now; ``None`` before the first switch."""
    _since: int = attrs.field(init=False)

    @_since.default
    def _begin(self) -> int:
        return self.begin

    def switch(self, time: int, previous: int, name: str, following: int, following_name: str) -> None:
        """Count the time until *time*, when thread *previous* left the CPU to thread *following*.

        *previous* may differ from the last *following*: a thread that executes a program gets the number of its process.
        """
        time = max(time, self.begin) if self.end is None else min(max(time, self.begin), self.end)
        if self._running == _NOT_KNOWN:
            self.unknown += time - self._since
        else:
            self.nanoseconds[previous] += time - self._since
            self.first_seen.setdefault(previous, time)
        self.names[previous], self.names[following] = name, following_name
        self._running, self._since = following, time

    def lose(self) -> None:
        """Count the time since the last switch as unknown: events after it were lost."""
        self._running = _NOT_KNOWN

    def finish(self, end: int, runs: int) -> None:
        """Count the time until *end*, the end of the window; on a CPU without a switch, thread *runs* had all of it."""
        running = runs if self._running is None else self._running
        if running == _NOT_KNOWN:
            self.unknown += end - self._since
        else:
            self.nanoseconds[running] += end - self._since
            self.first_seen.setdefault(running, end)
        self._since = end

    @property
    def has_switched(self) -> bool:
        """Return whether any switch was recorded."""
        return self._running is not None


@frozen
class TaskTime:
    """The time of a task on one CPU."""

    name: str
    pid: int
    """Its process."""
    tid: int
    cgroup: str
    """Its cgroup when it first ran there; empty if unknown, because the task had ended."""
    kernel: bool
    """Whether it is a kernel thread."""
    nanoseconds: int


@frozen
class CpuAccount:
    """The time of one CPU within a window: the sum of the times of its vCPU, idle, the kernel, other tasks, and unknown."""

    cpu: int
    vcpu: int | None
    """The index of the vCPU whose thread is pinned to it; ``None`` if there is none."""
    vcpu_nanoseconds: int
    idle_nanoseconds: int
    kernel: tuple[TaskTime, ...]
    """The visible kernel threads that are bound to this CPU."""
    others: tuple[TaskTime, ...] | None
    """Every other task that ran there; ``None`` if only their sum is known."""
    other_nanoseconds: int
    unknown_nanoseconds: int = 0
    lost_events: int = 0


@frozen
class InstanceTrace:
    """The accounts of an instance's CPUs."""

    name: str
    backend: Backend
    guarantee: ObservedGuarantee
    cpus: CpuSet
    accounts: tuple[CpuAccount, ...]
    ended: bool
    """Whether a vCPU thread ended within the window."""
    pod: str = ""
    """Namespace and name of its pod; empty if unknown."""
    pod_uid: str = ""
    """Its pod's UID; empty if unknown."""


Source = Literal["sched_switch", "schedstat"]
"""The source of the times: every switch by tracefs, or the kernel's sums in ``/proc/schedstat``."""


@frozen
class TraceReport:
    """The tasks that ran on the CPUs of instances within a window."""

    seen_from: Viewpoint
    nanoseconds: int
    """The length of the window."""
    source: Source
    fallback: str
    """The reason why times are only sums; empty if every switch was recorded."""
    instances: tuple[InstanceTrace, ...]

    def judgements(self, instance: InstanceTrace) -> tuple[Judgement, ...]:
        """Judge that only its vCPUs, and kernel threads bound to one CPU, ran on the CPUs of *instance*."""
        errors = (TRACE.error(each, self._remedy) for each in self._violations(instance))
        recorded = RECORDED if self.source == "schedstat" else ""
        found = (*errors, *(TRACE.unknown(each, recorded) for each in self._doubts(instance)))
        kernel = sum(task.nanoseconds for account in instance.accounts for task in account.kernel)
        only = (
            f"0 ns of any other task on the CPUs '{instance.cpus}'; {kernel} ns of kernel threads bound to one of them"
        )
        return found or (TRACE.ok(only),)

    @property
    def verdict(self) -> Level:
        """The worst level of all."""
        return worst(judgement for each in self.instances for judgement in self.judgements(each))

    @property
    def _remedy(self) -> str:
        if self.source == "schedstat":
            return RECORDED
        return "`inspect` without --trace says whether it may run there still, and how to keep it off"

    def _violations(self, instance: InstanceTrace) -> Iterator[str]:
        match self.source:
            case "sched_switch":
                return _others(instance)
            case "schedstat":
                return _sums(instance, self.nanoseconds // TOLERANCE)
            case _ as never:
                assert_never(never)

    def _doubts(self, instance: InstanceTrace) -> Iterator[str]:
        if self.source == "schedstat":
            total = sum(account.other_nanoseconds for account in instance.accounts)
            yield f"{total} ns of other tasks, by sums that name none and prove nothing below 1/{TOLERANCE} of the time"
        for account in instance.accounts:
            if account.lost_events or account.unknown_nanoseconds:
                yield (
                    f"{account.lost_events} events of CPU {account.cpu} were lost: what ran there for "
                    f"{account.unknown_nanoseconds} ns is not known"
                )
        if any(account.vcpu is None for account in instance.accounts):
            yield NO_VCPU_THREAD
        elif instance.ended:
            yield "the instance ended meanwhile"


def _others(instance: InstanceTrace) -> Iterator[str]:
    tasks = [(account.cpu, task) for account in instance.accounts for task in account.others or ()]
    for cpu, task in sorted(tasks, key=lambda each: -each[1].nanoseconds):
        where = f"in the cgroup '{task.cgroup}'" if task.cgroup else "in a cgroup that is not known"
        yield f"{task.name!r} (thread {task.tid} of process {task.pid}) {where} ran {task.nanoseconds} ns on CPU {cpu}"


def _sums(instance: InstanceTrace, tolerance: int) -> Iterator[str]:
    for account in instance.accounts:
        if account.other_nanoseconds > tolerance:
            yield f"other tasks ran {account.other_nanoseconds} ns on CPU {account.cpu}"
