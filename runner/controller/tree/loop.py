"""The loop that keeps the tree as the kubelet's state requires: read, decide, apply.

There is no state to lose: the desired tree follows from the kubelet's files, the observed one is in the kernel. A
controller that starts again reads both and continues. A pass has no ``await`` in it, so passes never overlap.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.base.events import ControllerEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.tasks import Announcements
from runner.base.values import frozen
from runner.controller.metrics import ControllerCounters
from runner.controller.restarted_task import restarted
from runner.controller.tree.cgroup_writer import CgroupWriter
from runner.controller.tree.cpu_source import CpuSource
from runner.controller.tree.crowded_pods import end_crowded_pods
from runner.controller.tree.faults import Fault, standing_faults
from runner.controller.tree.held_files import HeldFiles
from runner.controller.tree.left_memory import LeftMemory
from runner.controller.tree.limits import Limits
from runner.controller.tree.model import Action, Desired, Evict, Kill, Observed, Requested, granted
from runner.controller.tree.mount_options import MountOptions
from runner.controller.tree.pass_log import PassLog
from runner.controller.tree.pods import PodCgroups
from runner.controller.tree.reconcile import (
    desire,
    desire_without_kubelet,
    evictions,
    float_cpus,
    reconcile,
    stale,
    unseals,
)
from runner.controller.tree.tree import Tree
from runner.controller.tree.watches import Watches
from runner.facts.hardware import OnlineCpus
from runner.kernel import inotify
from runner.kernel.cgroup import CgroupError
from runner.kernel.hardware_reader import read_online_cpus
from runner.kernel.kubelet_files import Frozen, attempt
from runner.kubelet.state import CpuState
from runner.kubelet.state_files import KubeletFiles, parse_memory_state

log = logging.getLogger(__name__)

_TAKEN_SINCE = "user.instance-runner.cpus-taken-since"
"""The extended attribute of an instance's domain with the time, in seconds since the boot, at which its CPUs were first seen to be another
pod's."""
_STRANGERS_NAMED = 8
"""Processes that the log names when the remains of a pod are ended."""


@frozen
class Intervals:
    """The intervals of the loop, in seconds."""

    pause: float = 0.01
    """Between two readings of a state file that must be equal."""
    readings: int = 100
    """Number of readings without two equal ones after which decisions are frozen."""
    resync: float = 30.0
    """Longest time between two passes, with or without reports of changes."""
    eviction: float = 0.25
    """The same while an instance whose pod is gone is not empty yet."""
    polled: float = 5.0
    """The same while decisions are frozen, memory is charged to a domain without groups, or the kubelet has not named the container of some
    CPUs: in these cases no report announces the change."""
    least: float = 0.1
    """Shortest time from one pass to the next, whatever is reported: a pod can empty and fill its cgroup endlessly."""
    repaired: float = 1.0
    """The same after a pass that has repaired changes of others: each seal costs all CPUs of the node a moment."""
    reclaimed: float = 5.0
    """From one attempt to reclaim memory of a left-over domain to the next; five times the duration of the attempt, if that is longer."""
    processes: float = 0.1
    """From one reading of the number of processes to the next: a pod can make and move some ten thousand in this time."""
    mount: float = 1.0
    """From one reading of the mount's options to the next: the kernel reports no change of them."""
    handover: float = 600.0
    """Longest time for which an instance keeps CPUs that the kubelet has given to another pod, as long as its own pod has a cgroup: ten
    times the grace period of our example pod."""
    recent: float = 0.1
    """Age up to which an observation answers questions: each reads 20 files of each instance, and any process may ask."""


@attrs.define(eq=False)
class ReconcileLoop:
    """The observed tree, the desired tree, and the pass from one to the other.

    *source* reads the CPU assignments; it is ``None`` on a machine without a kubelet.
    """

    tree: Tree
    source: CpuSource | None
    limits: Limits
    _sys: Path
    _intervals: Intervals
    _pods: PodCgroups
    _cgroup_writer: CgroupWriter | None = None
    """The process that adds mount options; ``None`` without one."""
    counters: ControllerCounters = attrs.field(factory=ControllerCounters)
    log_limit: LogRateLimit = attrs.field(factory=LogRateLimit)
    """For messages that a pod can cause endlessly: requests, refused or not, and passes."""
    held_files: HeldFiles = attrs.field(factory=HeldFiles)
    state: CpuState | Frozen = attrs.field(factory=lambda: Frozen("the kubelet's state has not been read yet"))
    """The last settled state of the kubelet's file; stays :class:`Frozen` without a kubelet."""
    observed: Observed | None = None
    """The tree as last observed, by a pass at the latest; ``None`` until the first has."""
    error: str = ""
    """The errors of the last pass of :meth:`running`, empty if there were none; with an error the node is not ready."""
    _pass_requested: trio.Event = attrs.field(factory=trio.Event)
    _passed: Announcements = attrs.field(factory=Announcements)
    _followed: list[Path] = attrs.field(factory=list)
    """The files of :meth:`following`."""
    _evicting: frozenset[str] = frozenset()
    """The instances whose pods are gone and that were not empty after the last pass."""
    _changed: bool = True
    """Whether the tree was changed since its files were held: only the loop's own actions add groups and files."""
    _observed_at: float = -math.inf
    """The time of the last :meth:`observe`, on the clock of ``time.monotonic``."""
    _pass_log: PassLog = attrs.field(init=False)
    _mount_options: MountOptions = attrs.field(init=False)
    _left_memory: LeftMemory = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._pass_log = PassLog(self.tree, self.counters, self.log_limit, self.source is not None)
        self._mount_options = MountOptions(self._pods.procfs, self._cgroup_writer, self.counters, self.log_limit)
        self._left_memory = LeftMemory(self.tree, self._pods, self._intervals.reclaimed)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Return the faults of the last pass, group by group."""
        return self._pass_log.faults

    def machine(self) -> OnlineCpus:
        """Read the machine's CPUs and memory nodes."""
        return read_online_cpus(self._sys)

    @property
    def frozen_because(self) -> str:
        """Return the reason why decisions are frozen, empty if they are not."""
        return self.state.reason if self.source is not None and isinstance(self.state, Frozen) else ""

    def confirmed_state(self) -> CpuState | Frozen:
        """Return the state on which a decision may be based now: the settled one, if the file still holds it."""
        if self.source is None or isinstance(self.state, Frozen):
            return self.state
        now = self.source.current(self.state)
        if isinstance(now, Frozen):
            self.request_pass()
        return now

    def desired(self, machine: OnlineCpus) -> Desired | Frozen:
        """Return the desired tree."""
        if self.source is None:
            desired = desire_without_kubelet(machine, self.limits)
        elif isinstance(self.state, Frozen):
            return self.state
        else:
            desired = desire(self.state, machine, self.limits)
        return attrs.evolve(desired, partitions=self.tree.partition_writer is not None)

    def observe(self) -> Observed:
        """Read the tree, and keep the result as :attr:`observed`."""
        observed = self.tree.observe()
        known = () if isinstance(self.state, Frozen) else self.state.assigned()
        candidates = ({*observed.domains} - {*known}).union(filter(observed.is_left_over, observed.domains))
        self._pass_log.add_oom_kills(observed)
        gone = frozenset(filter(self._pods.gone, candidates))
        overdue = frozenset(self._overdue(observed))
        self.observed = attrs.evolve(observed, gone=gone, overdue=overdue, reclaimed=self._left_memory.reclaimed())
        self._observed_at = time.monotonic()
        return self.observed

    def _overdue(self, observed: Observed) -> Iterator[str]:
        """Yield the pods that hold CPUs which the kubelet has given to others more than :attr:`Intervals.handover` ago.

        That time is an attribute of their domains, so that it does not begin again when this program does.
        """
        if isinstance(self.state, Frozen):
            return
        named, now = self.state.assigned(), time.clock_gettime(time.CLOCK_BOOTTIME)
        given = CpuSet.union(named.values())
        for pod_uid, group in observed.instances().items():
            domain = self.tree.domain(pod_uid)
            since = domain.attribute(_TAKEN_SINCE)
            moved = bool(since) and observed.shares_float(pod_uid)
            taken = pod_uid not in named and (moved or not given.isdisjoint(group.cpus))
            if taken and since:
                if now - float(since) > self._intervals.handover:
                    yield pod_uid
            elif taken or since:
                with contextlib.suppress(CgroupError):  # removed meanwhile
                    domain.set_attribute(_TAKEN_SINCE, str(now) if taken else "")

    def recently_observed(self) -> Observed:
        """Return the tree as observed at most :attr:`Intervals.recent` seconds ago: for reports, and for the result of a pass just made."""
        fresh = time.monotonic() - self._observed_at < self._intervals.recent
        return self.observed if fresh and self.observed is not None else self.observe()

    def evict(self) -> Observed:
        """Remove the instances that have ended, and empty those whose pods are gone, as far as that works at once.

        Return the tree after it.
        """
        desired, observed = self.desired(self.machine()), self.observe()
        if isinstance(desired, Frozen) or not (evictions(desired, observed, {}) or stale(desired, observed, {})):
            return observed
        self.pass_over({})
        return self.observe()

    def float_cpus(self) -> CpuSet:
        """Return the CPUs of every float, even if there is none yet; no CPUs while decisions are frozen."""
        desired = self.desired(self.machine())
        if isinstance(desired, Frozen) or self.observed is None:
            return CpuSet()
        return float_cpus(desired, self.observed) & self.machine().online

    def pass_over(self, requests: Mapping[str, Requested], observed: Observed | None = None) -> tuple[Fault, ...]:
        """Bring the tree to the desired one, with the instances of *requests*, by pod UID, as requested; return the faults.

        *observed* is the tree if it was observed in this step of the event loop. While decisions are frozen, only requested unseals are
        carried out. Raises :class:`HostError` if there is no cgroup v2 to work with.
        """
        try:
            return self._pass(requests, observed)
        finally:
            if self._changed or self.held_files.leased or self.held_files.error:
                self._hold()  # before any pod gets a descriptor of a new group

    def _hold(self) -> None:
        self._changed = False
        with contextlib.suppress(CgroupError):  # the pass has reported it
            pod_uids = () if self.observed is None else self.observed.domains
            self.held_files.hold((*self.tree.reachable(), *self._pods.reachable(pod_uids)))
        if leased := self.held_files.leased:
            self.log_limit.log(log.error, ControllerEvent.CGROUP_FILES_LEASED, len(leased), min(leased))
        if self.held_files.error:
            self.log_limit.log(log.warning, ControllerEvent.CGROUP_FILES_NOT_HELD, self.held_files.error)

    def _pass(self, requests: Mapping[str, Requested], observed: Observed | None) -> tuple[Fault, ...]:
        started = time.perf_counter()
        machine = self.machine()
        desired = self.desired(machine)
        if isinstance(desired, Frozen):
            observed = observed or self.observe()
            faults: tuple[Fault, ...] = ()
            if actions := unseals(observed, requests):
                faults = self._apply(actions, observed, requests, machine)
                self.observe()
                self._pass_log.add_faults(faults)
            self._pass_log.count("frozen", time.perf_counter() - started)
            return faults
        observed, faults = self._without_strangers(desired, machine, requests, observed or self.observe())
        actions = reconcile(desired, observed, requests)
        faults += self._apply(actions, observed, requests, machine)
        failed = {fault.group for fault in faults if not fault.group_usable}
        after = self.observe() if actions else observed
        self._pass_log.last_cpus = {name: group.cpus for name, group in after.groups.items()}
        faults += tuple(standing_faults(self.tree.root.path, desired, after, machine.online, failed))
        faults += (self._mount_options.fault,) if self._mount_options.fault is not None else ()
        self._pass_log.add_faults(faults)
        self._evicting = _evicted(evictions(desired, after, requests))
        outcome = "faulty" if any(not fault.group_usable for fault in faults) else "changed" if actions else "clean"
        self._pass_log.count(outcome, time.perf_counter() - started)
        return faults

    def _apply(
        self, actions: tuple[Action, ...], observed: Observed, requests: Mapping[str, Requested], machine: OnlineCpus
    ) -> tuple[Fault, ...]:
        """Apply *actions*, log those that succeeded, and return the faults."""
        self._changed |= bool(actions)
        done, faults = self.tree.apply(actions, machine.online)
        self._pass_log.add_actions(done, observed, granted(requests))
        return faults

    def _without_strangers(
        self, desired: Desired, machine: OnlineCpus, requests: Mapping[str, Requested], observed: Observed
    ) -> tuple[Observed, tuple[Fault, ...]]:
        """End the remains, in *observed*, of pods that are gone; return the tree afterwards, and the faults."""
        actions = evictions(desired, observed, requests)
        if not actions:
            return observed, ()
        for pod_uid in _evicted(actions) - self._evicting:
            processes = sorted(self.tree.domain(pod_uid).processes())
            log.warning(
                ControllerEvent.PODLESS_INSTANCE_EMPTIED,
                pod_uid,
                "ended" if desired.kills and pod_uid in observed.gone else "moved",
                len(processes),
                "; ".join(self._pods.describe(processes[:_STRANGERS_NAMED])),
            )
        _, faults = self.tree.apply(actions, machine.online)
        return self.observe(), faults

    def request_pass(self) -> None:
        """Request a pass soon."""
        self._pass_requested.set()

    async def next_pass(self) -> None:
        """Wait until the next pass is done."""
        await self._passed.next.wait()

    @contextlib.contextmanager
    def following(self, files: Iterable[Path]) -> Iterator[None]:
        """Also make a pass after each change of *files*, and one at once, which begins to watch them.

        A file stays watched until it is removed, which does no harm.
        """
        files = tuple(files)
        self._followed += files
        self.request_pass()
        try:
            yield
        finally:
            for file in files:
                self._followed.remove(file)

    async def settle(self, source: CpuSource) -> None:
        """Read the kubelet's state until it is settled or has to be frozen."""
        before = self.state
        self.state = await source.settle(pause=self._intervals.pause, readings=self._intervals.readings)
        if self.state == before:
            return
        if isinstance(self.state, Frozen):
            log.error(ControllerEvent.DECISIONS_FROZEN, self.state.reason)
        else:
            log.info(
                ControllerEvent.KUBELET_STATE_READ,
                self.state.policy,
                self.state.shared_pool,
                len(self.state.assigned()),
            )
            self._compare_memory_nodes(source.files)

    def _compare_memory_nodes(self, files: KubeletFiles) -> None:
        """Warn of NUMA nodes that only the kubelet knows. An unusable file is no error, because sysfs has the nodes too."""
        memory = attempt(files.memory_state, parse_memory_state)
        if not isinstance(memory, Frozen):
            strange = CpuSet(memory.numa_nodes) - self.machine().memory_nodes
            if strange:
                log.warning(ControllerEvent.KUBELET_MEMORY_STATE_STRANGE, strange)

    async def _follow(self, watches: Watches) -> None:
        """Make a pass after each change, and at the latest after :meth:`_interval`; never return."""
        while True:
            requested = self._pass_requested = trio.Event()  # events from here on require another pass
            repairs = self.counters.repairs
            await self._once(watches)
            least = self._intervals.least if self.counters.repairs == repairs else self._intervals.repaired
            earliest = trio.current_time() + least
            with trio.move_on_after(self._interval()):
                await requested.wait()
            await trio.sleep_until(earliest)

    def _interval(self) -> float:
        """Return the seconds after which a pass is made, with or without reports of changes."""
        observed = self.observed
        awaited = observed is not None and any(map(observed.is_left_over, observed.domains))
        if self.frozen_because or awaited or (self.source is not None and self.source.awaits_containers):
            return self._intervals.polled
        return self._intervals.eviction if self._evicting else self._intervals.resync

    async def _reclaim(self) -> None:
        """Reclaim the memory left in domains without groups, after each pass; never return."""
        while True:
            if self.observed is not None:
                await self._left_memory.reclaim(self.observed, self.request_pass)
            await self.next_pass()

    async def _once(self, watches: Watches) -> None:
        """Read, decide, apply; then wake the tasks in :meth:`next_pass`. A failure is logged, and the next pass tries again."""
        await trio.lowlevel.checkpoint()
        watches.watch_source()
        try:
            if self.source is not None:
                await self.settle(self.source)
            faults = self.pass_over({})
            self.error = "; ".join(str(fault) for fault in faults if not fault.group_usable)
        except HostError as error:
            self.error = explain(error)
            self.log_limit.log(log.error, ControllerEvent.PASS_FAILED, self.error)
            self.counters.passes["faulty"] += 1
        watches.watch_tree(self.observed, self._followed)
        self._passed.announce()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the tree as long as the block runs; when it begins, the first pass is done. The tree is left in place at the end."""
        with inotify.watching() as queue:
            watches = Watches(queue, self.tree, self.source, self._pods, self.log_limit, self.request_pass)
            crowded = partial(
                end_crowded_pods,
                self.tree,
                self._pods,
                self.limits.instance_pids_max,
                self.log_limit,
                every=self._intervals.processes,
                apart=self._intervals.reclaimed,
            )
            async with trio.open_nursery() as nursery:
                await self._once(watches)
                for name, task in (
                    ("events", watches.listen),
                    ("reconcile", partial(self._follow, watches)),
                    ("leases", partial(self.held_files.outwait_leases, self.request_pass)),
                    ("reclaim", self._reclaim),
                    ("processes", crowded),
                    ("mount", partial(self._mount_options.keep, self._intervals.mount, self.request_pass)),
                ):
                    nursery.start_soon(restarted, name, task, self.counters)
                try:
                    yield
                finally:
                    nursery.cancel_scope.cancel()
                    self.log_limit.log_left_out()
                    self.held_files.close()


def _evicted(actions: Iterable[Action]) -> frozenset[str]:
    return frozenset(action.pod_uid for action in actions if isinstance(action, Evict | Kill))
