"""Recording the tasks on the CPUs of instances: every switch, or the kernel's sums if switches cannot be recorded."""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import time
from collections.abc import Iterator, Mapping

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, escaped, explain
from runner.facts.roots import Roots
from runner.inspect.cpu_sums import CpuSums
from runner.inspect.cpu_time import IDLE, CpuAccount, CpuTimes, InstanceTrace, TaskTime, TraceReport
from runner.inspect.observation import InstanceObservation, Observation
from runner.inspect.observe import read_processes
from runner.inspect.task_table import TaskTable, known_tasks
from runner.kernel.hardware_reader import read_online_cpus
from runner.kernel.procfs import Procfs
from runner.kernel.ring_buffer import has_missed_events, records
from runner.kernel.scheduler import pin, read_mask
from runner.kernel.tracefs import TraceInstance, remove_stale_instances, trace_instance, tracefs_reached
from runner.placement.threads import ObservedThread

READ_AGAIN = 0.1
"""Seconds between readings of the buffers: a task that has ended meanwhile is known only from the record."""
_SWITCHES_KIB = 4096
"""Buffer of a recorded CPU in KiB, enough for 61,000 switches."""
_TASKS_KIB = 64
"""Buffer of each CPU of the machine for births and moves of tasks, in KiB."""
_SWITCH = ("sched/sched_switch",)
_TASKS = ("sched/sched_process_fork", "cgroup/cgroup_attach_task")


@trio.lowlevel.enable_ki_protection
async def trace(roots: Roots, observation: Observation, seconds: float) -> TraceReport:
    """Record the tasks on the CPUs of the instances of *observation* for *seconds*; this process avoids these CPUs meanwhile.

    Ctrl-C takes effect only while it waits, so that nothing of it is left in the kernel. Raises :class:`HostError` when neither switches
    nor sums are available.
    """
    instances = observation.instances
    cpus = CpuSet.union(each.cpus for each in instances)
    if not cpus:
        return TraceReport(observation.seen_from, 0, "sched_switch", "", ())
    vcpus = {
        min(each.thread.cpus): each for instance in instances for each in instance.vcpu_threads if _is_pinned(each)
    }
    with _kept_off(cpus):
        try:
            _require_sight(instances)
            with switch_recorder(roots, cpus) as recorder:
                await _read_for(recorder, seconds)
                window = recorder.finish()
                accounts = recorder.accounts(vcpus)
            return TraceReport(observation.seen_from, window, "sched_switch", "", _traces(roots, instances, accounts))
        except HostError as error:
            sums = CpuSums.begin(roots, cpus, vcpus)
            await trio.sleep(seconds)
            window, accounts = sums.end()
            traces = _traces(roots, instances, accounts)
            return TraceReport(observation.seen_from, window, "schedstat", explain(error), traces)


def _require_sight(instances: tuple[InstanceObservation, ...]) -> None:
    """Raise :class:`HostError` unless task numbers here equal those that the kernel records."""
    if hidden := next((each.hidden for each in instances if each.hidden), ""):
        raise HostError(hidden)


def _is_pinned(vcpu: ObservedThread) -> bool:
    return len(vcpu.thread.cpus) == 1


@contextlib.contextmanager
def _kept_off(cpus: CpuSet) -> Iterator[None]:
    """Keep this thread off *cpus*, if it may use others."""
    before = read_mask()
    if not before - cpus:
        yield
        return
    pin(0, before - cpus)
    try:
        yield
    finally:
        pin(0, before)


async def _read_for(recorder: SwitchRecorder, seconds: float) -> None:
    end = trio.current_time() + seconds
    while (left := end - trio.current_time()) > 0:
        await trio.sleep(min(left, READ_AGAIN))
        recorder.read()


def _traces(
    roots: Roots, instances: tuple[InstanceObservation, ...], accounts: Mapping[int, CpuAccount]
) -> tuple[InstanceTrace, ...]:
    procfs = Procfs(roots.proc)
    return tuple(
        InstanceTrace(
            each.name,
            each.backend,
            each.guarantee,
            each.cpus,
            tuple(accounts[cpu] for cpu in each.cpus),
            any(procfs.name_and_last_cpu(vcpu.thread.pid, vcpu.thread.tid) is None for vcpu in each.vcpu_threads),
            each.pod,
            each.pod_uid,
        )
        for each in instances
    )


@contextlib.contextmanager
def switch_recorder(roots: Roots, cpus: CpuSet) -> Iterator[SwitchRecorder]:
    """Record the switches of tasks on *cpus* from now on, until :meth:`SwitchRecorder.finish`.

    Births and moves between cgroups are recorded on all CPUs, because a task that has ended has no entry in /proc. Raises
    :class:`HostError` when tracefs is not available.
    """
    online, pid = read_online_cpus(roots.sys).online, os.getpid()
    with tracefs_reached(roots.sys) as tracefs:
        remove_stale_instances(tracefs, roots.proc)
        with (
            trace_instance(tracefs, _SWITCH, cpus, _SWITCHES_KIB, pid=pid) as switches,
            trace_instance(tracefs, _TASKS, online, _TASKS_KIB, pid=pid) as tasks,
        ):
            tasks.start()
            # A task born meanwhile at least has a record of its birth.
            known = known_tasks(read_processes(roots))
            switches.start()
            begin = time.monotonic_ns()
            times = {cpu: CpuTimes(begin) for cpu in cpus}
            yield SwitchRecorder(Procfs(roots.proc), switches, TaskTable(Procfs(roots.proc), tasks, known), times)


@attrs.define
class SwitchRecorder:
    """Counts the time of every task on the recorded CPUs; made by :func:`switch_recorder`."""

    _procfs: Procfs
    _switches: TraceInstance
    _table: TaskTable
    _times: Mapping[int, CpuTimes]
    _layout: struct.Struct = attrs.field(init=False)

    @_layout.default
    def _switch_layout(self) -> struct.Struct:
        [switch] = self._switches.formats
        return switch.record(prev_comm="16s", prev_pid="i", next_comm="16s", next_pid="i")

    def read(self) -> None:
        """Count the switches recorded since the last call, and look up tasks that were not seen before."""
        self._table.read()
        unpack = self._layout.unpack_from
        for cpu, times in self._times.items():
            for page in self._switches.pages(cpu):
                if has_missed_events(page):
                    times.lose()
                for at, offset in records(page):
                    _, name, previous, following_name, following = unpack(page, offset)
                    times.switch(at, previous, _text(name), following, _text(following_name))
            self._table.look_up(times.names)

    def finish(self) -> int:
        """End the recording, count the rest, and return the length of the window in nanoseconds."""
        end = time.monotonic_ns()
        self._switches.stop()
        for times in self._times.values():
            times.end = end
        self.read()
        unswitched = CpuSet(cpu for cpu, times in self._times.items() if not times.has_switched)
        running = self._procfs.runnable(unswitched) if unswitched else {}
        for cpu, times in self._times.items():
            # On a CPU without a switch one task ran all the time. Other runnable tasks only waited for it, which the kernel allows only for
            # a real-time task, and QEMU has none.
            runs = max((tid for _, tid in running.get(cpu, [])), key=_is_real_time, default=IDLE)
            times.finish(end, runs)
            self._table.look_up([runs])
        return end - next(iter(self._times.values())).begin if self._times else 0

    def accounts(self, vcpus: Mapping[int, ObservedThread]) -> dict[int, CpuAccount]:
        """Return CPU → its account of the window; *vcpus* are the vCPU threads by the CPU that each is pinned to."""
        return {cpu: self._account(cpu, times, vcpus.get(cpu)) for cpu, times in self._times.items()}

    def _account(self, cpu: int, times: CpuTimes, vcpu: ObservedThread | None) -> CpuAccount:
        of_vcpu = None if vcpu is None else vcpu.thread.tid
        kernel: list[TaskTime] = []
        others: list[TaskTime] = []
        for tid, nanoseconds in times.nanoseconds.most_common():
            if tid not in (IDLE, of_vcpu) and nanoseconds:
                task = self._table.task(tid, times.names.get(tid, ""), times.first_seen[tid])
                time_of_it = TaskTime(task.name, task.pid, tid, task.cgroup, task.kernel, nanoseconds)
                (kernel if task.kernel and task.bound and task.cgroup in {"", "/"} else others).append(time_of_it)
        return CpuAccount(
            cpu=cpu,
            vcpu=None if vcpu is None else vcpu.vcpu,
            vcpu_nanoseconds=0 if of_vcpu is None else times.nanoseconds[of_vcpu],
            idle_nanoseconds=times.nanoseconds[IDLE],
            kernel=tuple(kernel),
            others=tuple(others),
            other_nanoseconds=sum(each.nanoseconds for each in others),
            unknown_nanoseconds=times.unknown,
            lost_events=self._switches.lost_events(cpu),
        )


def _is_real_time(tid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.sched_getscheduler(tid) in {os.SCHED_FIFO, os.SCHED_RR}
    return False


@functools.lru_cache(1024)
def _text(name: bytes) -> str:
    return escaped(name.partition(b"\0")[0].decode(errors="backslashreplace"))
