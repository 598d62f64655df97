"""The loop that keeps the tree as the kubelet's state requires: read, decide, apply.

There is no state to lose: the desired tree follows from the kubelet's files, the observed one is in the kernel. A
controller that starts again reads both and continues. A pass has no ``await`` in it, so passes never overlap.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, escaped, explain
from runner.base.events import ControllerEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.values import frozen
from runner.controller.metrics import ControllerCounters, LoopStatus
from runner.controller.serve.handover import Handover, handovers
from runner.controller.serve.pods import PodCgroups
from runner.controller.tasks import restarted
from runner.controller.tree.cpu_source import CpuSource
from runner.controller.tree.held_files import HeldFiles
from runner.controller.tree.limits import Limits
from runner.controller.tree.reconcile import (
    ISOLATED,
    PARENT,
    ROOT,
    Action,
    Desired,
    Evict,
    Group,
    Kill,
    Observed,
    Remove,
    Restrict,
    Seal,
    Unseal,
    Write,
    desire,
    desire_without_kubelet,
    evictions,
    float_cpus,
    left_behind,
    reconcile,
    silent_fallbacks,
    stale,
    unseals,
    withheld,
)
from runner.controller.tree.tree import Fault, Tree
from runner.facts.hardware import OnlineCpus
from runner.kernel import inotify
from runner.kernel.cgroup import CgroupError, LeasedError
from runner.kernel.kubelet_files import Frozen, attempt
from runner.kernel.sysfs import read_online_cpus
from runner.kubelet.pod_cgroups import (
    FLOAT,
    NOT_SEALED,
    VCPUS,
    group_uid,
    instance_group,
    instance_uid,
    vcpus_group,
)
from runner.kubelet.state import CpuState
from runner.kubelet.state_files import KubeletFiles, parse_memory_state

log = logging.getLogger(__name__)

_FILES = (
    *("cgroup.events", "cgroup.max.descendants", "cgroup.subtree_control", "cgroup.type", "cpuset.cpus", "cpuset.mems"),
    *("cpuset.cpus.exclusive", "cpuset.cpus.partition"),
    *("cpu.weight", "memory.max", "pids.max"),
)
"""Control files whose change may call for a pass; not among them are the runner's writes of its threads.

They are watched one by one: a watch of the directory would report ``pids.events`` and ``memory.events`` too, which change
whenever something in the group meets its limit, as often as it likes.
"""

_DIRECTORY = (
    inotify.CLOSE_WRITE
    | inotify.MOVED_TO
    | inotify.CREATE
    | inotify.DELETE
    | inotify.DELETE_SELF
    | inotify.MOVE_SELF
    | inotify.ONLYDIR
)
_GROUP = inotify.CREATE | inotify.DELETE | inotify.ONLYDIR
_PODS = inotify.DELETE | inotify.ONLYDIR
_MOST_JUDGED = 4
"""Threads of a pod whose seccomp mode is read: those with the lowest numbers, which mostly are its PID 1's."""
_MOST_REASON = 1000
"""Characters of a reason that is read from a cgroup: a pod that may make user namespaces can write it."""
_STRANGERS_NAMED = 8
"""Processes that the log names when what is left of a pod is ended."""
OUTDATED = (
    "cannot make a domain for each instance: groups of an earlier version of this program are in use ({used}); drain the node, and "
    "start the new version when their pods have ended"
)
"""Why nothing is done while a tree of the earlier shape is in use."""


@frozen
class Intervals:
    """How often to look."""

    pause: float = 0.01
    """Between two readings of a state file that must be equal."""
    readings: int = 100
    """After so many without two equal ones, decisions are frozen."""
    resync: float = 30.0
    """A pass at least so often, whatever is or is not reported."""
    eviction: float = 0.25
    """The same while an instance whose pod has gone is not empty yet."""
    frozen: float = 5.0
    """The same while decisions are frozen, while groups of an earlier version are in use, while memory is charged to a domain of
    which nothing else is left, and while the kubelet has not said which container has some of the CPUs: neither a
    directory that is not there yet nor the kubelet's API reports anything."""
    least: float = 0.1
    """From one pass to the next, whatever is reported: a pod can empty and fill its cgroup without end."""
    repaired: float = 1.0
    """The same after one that has put right what others had changed: each seal costs all CPUs of the node a moment."""
    judged: float = 10.0
    """For so long the seccomp mode of a pod's threads is believed: a status can have 700 KB, 20 ms each, and any process may
    ask (``getStatus``), and any container's PID 1 have it read (``registerCgroup``)."""
    seen: float = 0.1
    """For so long a look at the tree answers a question: it reads 20 files for each instance, and any process may ask."""


@attrs.define(eq=False)
class ReconcileLoop:
    """The tree, what it should be, and the pass from one to the other.

    *source* is where the CPU assignments are read, or ``None`` on a machine without a kubelet.
    """

    tree: Tree
    source: CpuSource | None
    sys: Path
    intervals: Intervals
    limits: Limits
    pods: PodCgroups
    counters: ControllerCounters = attrs.field(factory=ControllerCounters)
    held: HeldFiles = attrs.field(factory=HeldFiles)
    log_limit: LogRateLimit = attrs.field(factory=LogRateLimit)
    """For what a pod can cause without end: requests, whether refused or not, and passes."""
    state: CpuState | Frozen = attrs.field(factory=lambda: Frozen("the kubelet's state has not been read yet"))
    """The last settled state of the kubelet's file; stays :class:`Frozen` without a kubelet."""
    observed: Observed | None = None
    """The tree after the last pass."""
    faults: tuple[Fault, ...] = ()
    """What went wrong in the last pass, group by group."""
    error: str = ""
    """What was wrong with the last pass that :meth:`once` made, empty if nothing was; it is why the node is not ready."""
    _disturbed: trio.Event = attrs.field(factory=trio.Event)
    _passed: trio.Event = attrs.field(factory=trio.Event)
    _watches: set[int] = attrs.field(factory=set)
    _watched: dict[Path, int] = attrs.field(factory=dict)
    """The watch of each control file."""
    _followed: list[Path] = attrs.field(factory=list)
    """The files of :meth:`following`."""
    _pod_names: frozenset[str] = frozenset()
    """The names of the pods' own cgroups, for the instances there are."""
    _oom_kills: dict[str, int] = attrs.field(factory=dict)
    """Pod UID → what :attr:`~runner.controller.tree.reconcile.Domain.oom_kills` was."""
    _evicting: frozenset[str] = frozenset()
    """The instances whose pods have gone and that were not empty after the last pass."""
    _changed: bool = True
    """Whether the tree was changed since its files were held: groups and files come with the loop's own actions alone."""
    _judged: dict[str | tuple[int, int], tuple[float, bool]] = attrs.field(factory=dict)
    """Pod UID, or process and PID namespace → when :meth:`_judge` has judged it, and what was found."""
    _observed_at: float = -math.inf
    """When :meth:`observe` was done last, on the clock of ``time.monotonic``."""
    _left: dict[str, CpuSet] = attrs.field(factory=dict)
    """The cpusets as this program last saw or wrote them: a difference was made by another program."""

    def machine(self) -> OnlineCpus:
        """Read the machine."""
        return read_online_cpus(self.sys)

    def status(self) -> LoopStatus:
        """Return what the pages show."""
        return LoopStatus(
            self.counters,
            self.observed,
            self.handovers(),
            self.without_seccomp,
            self.frozen(),
            self.error,
            self.float_cpus(),
        )

    def without_seccomp(self) -> frozenset[str]:
        """Return the pods that may write the files of their groups in the tree, as far as their first processes there show."""
        pods = {} if self.observed is None else self.observed.floats()
        return frozenset(pod_uid for pod_uid in pods if self._may_make_root(pod_uid))

    def may_make_root(self, pid: int, namespace: int) -> bool:
        """Tell whether the first process of a PID *namespace* may make root, as found in the last :attr:`Intervals.judged` seconds."""
        return self._judge((pid, namespace), lambda: [pid])

    def _may_make_root(self, pod_uid: str) -> bool:
        """Tell the same of pod *pod_uid*; one that hides its threads by a lease counts as one that may: it owns the file."""
        try:
            return self._judge(pod_uid, lambda: sorted(self.tree.float_of(pod_uid).threads())[:_MOST_JUDGED])
        except LeasedError:
            return True
        except CgroupError:  # it has been removed
            return False

    def _judge(self, who: str | tuple[int, int], threads: Callable[[], list[int]]) -> bool:
        now = time.monotonic()
        self._judged = {each: found for each, found in self._judged.items() if now - found[0] < self.intervals.judged}
        if who not in self._judged:
            if not (found := threads()):
                return False
            self._judged[who] = now, any(map(self.pods.procfs.may_make_root, found))
        return self._judged[who][1]

    def frozen(self) -> str:
        """Return why decisions are frozen, or nothing."""
        return self.state.reason if self.source is not None and isinstance(self.state, Frozen) else ""

    def current(self) -> CpuState | Frozen:
        """Return the state a decision may rest on now: the settled one, if the file still holds the same."""
        if self.source is None or isinstance(self.state, Frozen):
            return self.state
        now = self.source.current(self.state)
        if isinstance(now, Frozen):
            self.disturb()
        return now

    def desired(self, machine: OnlineCpus) -> Desired | Frozen:
        """Return what the tree should be."""
        if self.source is None:
            desired = desire_without_kubelet(machine, self.limits)
        elif isinstance(self.state, Frozen):
            return self.state
        else:
            desired = desire(self.state, machine, self.limits)
        return attrs.evolve(desired, partitions=self.tree.partition_writer is not None)

    def observe(self) -> Observed:
        """Look at the tree; also what :attr:`observed` is from now on."""
        observed = self.tree.observe()
        known = () if isinstance(self.state, Frozen) else self.state.assigned()
        candidates = ({*observed.domains} - {*known}).union(filter(observed.is_left_over, observed.domains))
        self._tell_of_memory(observed)
        self.observed = attrs.evolve(observed, gone=frozenset(filter(self.pods.gone, candidates)))
        self._observed_at = time.monotonic()
        return self.observed

    def seen(self) -> Observed:
        """Return the tree as it was :attr:`Intervals.seen` seconds ago at most: to tell of it, not to decide."""
        fresh = time.monotonic() - self._observed_at < self.intervals.seen
        return self.observed if fresh and self.observed is not None else self.observe()

    def handovers(self) -> tuple[Handover, ...]:
        """Return the CPUs that change hands, in the tree as it was observed last."""
        if self.observed is None or isinstance(self.state, Frozen):
            return ()
        return tuple(handovers(self.state, self.observed))

    def evict(self) -> Observed:
        """Remove the instances that have ended, and empty those whose pods have gone, as far as that is done at once.

        Return the tree after it.
        """
        desired, observed = self.desired(self.machine()), self.observe()
        if isinstance(desired, Frozen) or not (evictions(desired, observed, {}) or stale(desired, observed, {})):
            return observed
        self.pass_over({})
        return self.observe()

    def float_cpus(self) -> CpuSet:
        """Return the CPUs of every float, whether there is one or not; none while decisions are frozen."""
        desired = self.desired(self.machine())
        if isinstance(desired, Frozen) or self.observed is None:
            return CpuSet()
        return float_cpus(desired, self.observed) & self.machine().online

    def pass_over(
        self,
        grants: Mapping[str, CpuSet],
        seals: Mapping[str, bool] | None = None,
        memory: Mapping[str, int] | None = None,
        seen: Observed | None = None,
    ) -> tuple[Fault, ...]:
        """Bring the tree to what is desired, with an instance for each of *grants*; return what went wrong.

        *seals* are instances to be sealed or unsealed, *memory* what domains are to get
        (:func:`~runner.controller.tree.reconcile.reconcile`). *seen* is the tree if it was observed in this step of the event loop.
        While decisions are frozen, only what is to be unsealed is. Raises :class:`HostError` if there is no cgroup v2 to work with.
        """
        try:
            return self._pass(grants, seals, memory, seen)
        finally:
            if self._changed or self.held.leased or self.held.error:
                self._hold()  # before anybody gets a descriptor of a new group

    def _hold(self) -> None:
        self._changed = False
        with contextlib.suppress(CgroupError):  # the pass has said so
            self.held.hold(self.tree.reachable())
        if (leased := self.held.leased) and (more := self.log_limit.due("leased")) is not None:
            log.error(ControllerEvent.CGROUP_FILES_LEASED, more, len(leased), min(leased))
        if self.held.error and (more := self.log_limit.due("not held")) is not None:
            log.warning(ControllerEvent.CGROUP_FILES_NOT_HELD, more, self.held.error)

    def _pass(
        self,
        grants: Mapping[str, CpuSet],
        seals: Mapping[str, bool] | None,
        memory: Mapping[str, int] | None,
        seen: Observed | None,
    ) -> tuple[Fault, ...]:
        started = time.perf_counter()
        machine = self.machine()
        desired = self.desired(machine)
        if isinstance(desired, Frozen):
            observed = self.observe()
            faults: tuple[Fault, ...] = ()
            if actions := unseals(observed, seals or {}):
                faults = self._apply(actions, observed, grants, machine)
                self.observe()
                self._report(faults)
            self._count("frozen", started)
            return faults
        observed, faults = self._without_strangers(desired, machine, grants, seen or self.observe())
        actions = reconcile(desired, observed, grants, seals, memory)
        faults += self._apply(actions, observed, grants, machine)
        failed = {fault.group for fault in faults if not fault.unlimited}
        after = self.observe() if actions else observed
        self._left = {name: group.cpus for name, group in after.groups.items()}
        faults += tuple(
            Fault(name, f"cannot hold {name} to the CPUs {group.cpus}: the kernel has {group.effective} in effect")
            for name, group in silent_fallbacks(after, machine.online).items()
            if name not in failed
        )
        faults += tuple(self._missing_limits(desired, after))
        if used := after.populated_outdated():
            faults += (Fault(ROOT, OUTDATED.format(used=", ".join(used[:_STRANGERS_NAMED]))),)
        self._report(faults)
        self._evicting = _evicted(evictions(desired, after, grants))
        outcome = "faulty" if any(not fault.unlimited for fault in faults) else "changed" if actions else "clean"
        self._count(outcome, started)
        return faults

    def _apply(
        self, actions: tuple[Action, ...], observed: Observed, grants: Mapping[str, CpuSet], machine: OnlineCpus
    ) -> tuple[Fault, ...]:
        """Do *actions*, and tell of those that succeeded; return what went wrong."""
        self._changed |= bool(actions)
        faults = self.tree.apply(actions, machine.online)
        failed = {fault.group for fault in faults if not fault.unlimited}
        unlimited = {fault.group for fault in faults if fault.unlimited}
        done = [
            action
            for action in actions
            if action.group not in failed and not (isinstance(action, Restrict | Seal) and action.group in unlimited)
        ]
        self._tell(done, observed, grants)
        return faults

    def seal(self, pod_uid: str) -> str:
        """Make the group of instance *pod_uid* an isolated partition; return why it is none, empty if it is one.

        The reason stays with the group, for all that ask later (:meth:`not_sealed`).
        """
        reason = self._seal(pod_uid)
        if reason != self.not_sealed(pod_uid):
            with contextlib.suppress(CgroupError):  # it says why, and changes nothing
                self.tree.domain(pod_uid).set_attribute(NOT_SEALED, reason)
        return reason

    def not_sealed(self, pod_uid: str) -> str:
        """Return why instance *pod_uid* could not be sealed when it asked last; empty if it could, or has not asked."""
        return escaped(self.tree.domain(pod_uid).attribute(NOT_SEALED) or "")[:_MOST_REASON]

    def _seal(self, pod_uid: str) -> str:
        if reason := self.no_partitions():
            return reason
        faults = self.pass_over({}, {pod_uid: True})
        group = (self.observed or self.observe()).instances().get(pod_uid)
        if group is not None and group.partition == ISOLATED:
            return ""
        if group is None or not group.populated:
            return "no thread is in its cgroup"
        reasons = [fault.reason for fault in faults if fault.group == vcpus_group(pod_uid)]
        return "; ".join(reasons) or self.frozen() or f"the kernel says {group.partition!r}"

    def no_partitions(self) -> str:
        """Return why no instance can be sealed, empty if one can."""
        if self.tree.partition_writer is None:
            return "the controller's option --partitions is off"
        if not self.tree.partition_writer.started:
            return "the controller's partition writer has no CAP_SYS_ADMIN; give its container the capability"
        if self.tree.partition_writer.lost:
            return "the controller's partition writer has ended; restart the controller"
        if (self.observed or self.observe()).exclusive is None:
            return "the kernel has no remote partitions (cpuset.cpus.exclusive); they come with Linux 6.7"
        return ""

    def _without_strangers(
        self, desired: Desired, machine: OnlineCpus, grants: Mapping[str, CpuSet], observed: Observed
    ) -> tuple[Observed, tuple[Fault, ...]]:
        """End what is left in *observed* of the pods that have gone; return the tree after it, and what went wrong."""
        actions = evictions(desired, observed, grants)
        if not actions:
            return observed, ()
        for pod_uid in _evicted(actions) - self._evicting:
            processes = sorted(self.tree.domain(pod_uid).processes())
            log.warning(
                ControllerEvent.PODLESS_INSTANCE_EMPTIED,
                pod_uid,
                "ended" if desired.kills else "moved",
                len(processes),
                "; ".join(self.pods.describe(processes[:_STRANGERS_NAMED])),
            )
        faults = self.tree.apply(actions, machine.online)
        return self.observe(), faults

    def _tell_of_memory(self, observed: Observed) -> None:
        """Log and count the processes that the kernel has ended since the tree was observed last, as memory was short in a domain."""
        before = self._oom_kills if self.observed is not None else None
        self._oom_kills = {pod_uid: domain.oom_kills for pod_uid, domain in observed.domains.items()}
        for pod_uid, domain in observed.domains.items():
            ended = 0 if before is None else domain.oom_kills - before.get(pod_uid, 0)
            if ended > 0:
                self.counters.oom_kills += ended
                if (more := self.log_limit.due("out of memory", pod_uid)) is not None:
                    most = domain.memory_max
                    log.warning(ControllerEvent.OUT_OF_MEMORY, more, pod_uid, ended, most)

    def _missing_limits(self, desired: Desired, observed: Observed) -> Iterator[Fault]:
        for name in desired.limits.controllers:
            if name not in observed.offered:
                yield Fault(
                    PARENT,
                    f"cannot limit what is in {self.tree.root.path} by the {name} controller: "
                    f"{self.tree.root.parent.path} does not offer it",
                    unlimited=True,
                )
        for pod_uid, charged in left_behind(desired, observed).items():
            yield Fault(
                instance_group(pod_uid),
                f"cannot remove {self.tree.domain(pod_uid).path}: {charged >> 20} MiB are charged to it that another program holds since "
                "its pod has gone, in a memfd that was passed on or in tmpfs; --memory-max leaves so much less until that program ends",
                unlimited=True,
            )
        for file, value in withheld(desired, observed):
            yield Fault(
                ROOT,
                f"cannot lower {self.tree.root.path / file} to {value}: more than that is in use; end instances, or "
                f"give --{file.replace('.', '-')} a larger value",
                unlimited=True,
            )

    def _report(self, faults: tuple[Fault, ...]) -> None:
        """Log those of *faults* that are new, and keep all."""
        for fault in faults:
            if fault in self.faults:
                continue
            if fault.unlimited:  # by the kernel or this program's options, not by what a pod does
                log.warning(ControllerEvent.LIMIT_MISSING, fault.group, fault.reason)
            elif (more := self.log_limit.due("fault", fault.group)) is not None:
                log.error(ControllerEvent.GROUP_FAILED, more, fault.group, fault.reason)
        self.faults = faults

    def disturb(self) -> None:
        """Ask for a pass soon."""
        self._disturbed.set()

    async def next_pass(self) -> None:
        """Wait until the next pass is done."""
        await self._passed.wait()

    @contextlib.contextmanager
    def following(self, files: Iterable[Path]) -> Iterator[None]:
        """Make a pass after each change of *files* as well, and one at once, which begins to watch them.

        A file stays watched until it is removed, which does no harm.
        """
        files = tuple(files)
        self._followed += files
        self.disturb()
        try:
            yield
        finally:
            for file in files:
                self._followed.remove(file)

    async def settle(self, source: CpuSource) -> None:
        """Read the kubelet's state until it is settled or has to be frozen."""
        before = self.state
        self.state = await source.settle(pause=self.intervals.pause, readings=self.intervals.readings)
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
        """Warn of NUMA nodes that only the kubelet has. An unusable file is no error: sysfs names them too."""
        memory = attempt(files.memory_state, parse_memory_state)
        if not isinstance(memory, Frozen):
            strange = CpuSet(memory.numa_nodes) - self.machine().memory_nodes
            if strange:
                log.warning(ControllerEvent.KUBELET_MEMORY_STATE_STRANGE, strange)

    async def follow(self, queue: inotify.Inotify) -> None:
        """Make a pass after each change, and at the latest after the interval of :attr:`intervals`; never return."""
        while True:
            disturbed = self._disturbed = trio.Event()  # what happens from here on calls for another pass
            repairs = self.counters.repairs
            await self.once(queue)
            least = self.intervals.least if self.counters.repairs == repairs else self.intervals.repaired
            earliest = trio.current_time() + least
            with trio.move_on_after(self._interval()):
                await disturbed.wait()
            await trio.sleep_until(earliest)

    def _interval(self) -> float:
        """Return the seconds after which a pass is made, whatever is or is not reported."""
        observed = self.observed
        awaited = observed is not None and (observed.outdated or any(map(observed.is_left_over, observed.domains)))
        if self.frozen() or awaited or (self.source is not None and self.source.awaits_containers):
            return self.intervals.frozen
        return self.intervals.eviction if self._evicting else self.intervals.resync

    async def once(self, queue: inotify.Inotify) -> None:
        """Read, decide, apply; then wake the tasks in :meth:`next_pass`. A failure is logged, and the next pass tries again."""
        await trio.lowlevel.checkpoint()
        self._watch_source(queue)
        try:
            if self.source is not None:
                await self.settle(self.source)
            faults = self.pass_over({})
            self.error = "; ".join(fault.reason for fault in faults if not fault.unlimited)
        except HostError as error:
            self.error = explain(error)
            if (more := self.log_limit.due("pass failed")) is not None:
                log.error(ControllerEvent.PASS_FAILED, more, self.error)  # noqa: TRY400  # the sentence is enough
            self.counters.passes["faulty"] += 1
        self._watch_tree(queue)
        passed, self._passed = self._passed, trio.Event()
        passed.set()

    async def listen(self, queue: inotify.Inotify) -> None:
        """Call :meth:`disturb` for each report of the kernel that matters; never return."""
        while True:
            for event in await queue.receive():
                if event.mask & inotify.IGNORED:
                    self._watches.discard(event.watch)
                if self._matters(event):
                    self.disturb()

    def _matters(self, event: inotify.FileEvent) -> bool:
        if not event.name or event.mask & inotify.QUEUE_OVERFLOW:
            return True  # a watched file has changed, or a watched directory itself is gone, moved or made anew
        ours = event.name in (FLOAT, VCPUS) or instance_uid(event.name) is not None or event.name in self._pod_names
        of_source = self.source is not None and self.source.reads(event.name)
        return ours or of_source or event.name == self.tree.root.name

    def _watch_source(self, queue: inotify.Inotify) -> None:
        if self.source is not None:
            for directory in (self.source.files.directory, self.source.files.cdi):
                self._watch(queue, directory, _DIRECTORY)

    def _watch_tree(self, queue: inotify.Inotify) -> None:
        """Watch our groups, and what the pods' own cgroups are removed from, which reports the end of a pod."""
        self._watched = {path: watch for path, watch in self._watched.items() if watch in self._watches}
        self._watch_files(queue, self._followed)
        observed = self.observed
        if observed is None:
            return
        domains = map(self.tree.domain, observed.domains)
        for group in (self.tree.root.parent, self.tree.root, *domains, *map(self.tree.group, observed.groups)):
            self._watch(queue, group.path, _GROUP)
            self._watch_files(queue, map(group.path.joinpath, _FILES))
        pods = [path for pod_uid in observed.domains for path in self.pods.existing(pod_uid)]
        for parent in {path.parent for path in pods}:
            self._watch(queue, parent, _PODS)
        self._pod_names = frozenset(path.name for path in pods)

    def _watch_files(self, queue: inotify.Inotify, paths: Iterable[Path]) -> None:
        for path in paths:
            if self._watched.get(path) not in self._watches and path.exists():
                watch = self._watch(queue, path, inotify.MODIFY)
                if watch is not None:
                    self._watched[path] = watch

    def _watch(self, queue: inotify.Inotify, path: Path, mask: int) -> int | None:
        """Watch *path*; what changed there before the watch was new to us calls for another pass."""
        try:
            watch = queue.watch(path, mask)
        except HostError as error:
            missing = isinstance(error.__cause__, FileNotFoundError)  # not there yet; the next pass tries again
            if not missing and (more := self.log_limit.due("not watched")) is not None:
                log.warning(ControllerEvent.CHANGES_SEEN_LATE, more, explain(error))
            return None
        if watch not in self._watches:
            self._watches.add(watch)
            self.disturb()
        return watch

    def _tell(self, actions: list[Action], observed: Observed, grants: Mapping[str, CpuSet]) -> None:
        """Log *actions* as an operator would tell them, and count repairs and removals."""
        for action in actions:
            match action:
                case Remove(group) if group.endswith(f"/{VCPUS}"):
                    self.counters.removed += 1
                    log.info(ControllerEvent.STALE_INSTANCE_REMOVED, group_uid(group))
                case Seal(group) | Unseal(group):
                    self._tell_partition(action, observed.groups[group])
                case Restrict(group, file, value) if group in (ROOT, PARENT):
                    log.info(ControllerEvent.LIMIT_WRITTEN, self.tree.group(group).path / file, value)
                case Write(group, "cpuset.cpus", value):
                    left, found = self._left.get(group), observed.groups.get(group)
                    if left is not None and found is not None and found.cpus != left:
                        self.counters.repairs += 1
                        log.warning(ControllerEvent.CPUSET_CHANGED_BY_OTHERS, group, found.cpus)
                    # Without a kubelet each registration changes float.
                    more = "" if self.source is not None else self.log_limit.due("written", group)
                    if group_uid(group) not in grants and more is not None:
                        log.info(ControllerEvent.CPUSET_WRITTEN, more, group or self.tree.root.name, value)
                case _:
                    log.debug(ControllerEvent.ACTION_DONE, action)

    def _tell_partition(self, action: Seal | Unseal, found: Group) -> None:
        """Log that a group was sealed or unsealed, and count it as a repair if another program had ended its partition."""
        repaired = isinstance(action, Seal) and found.was_sealed and found.partition != ISOLATED
        self.counters.repairs += repaired
        what = "sealed" if isinstance(action, Seal) else "unsealed"
        if (more := self.log_limit.due(what, action.group)) is not None:
            level = logging.WARNING if repaired else logging.INFO
            pod_uid = group_uid(action.group)
            log.log(level, ControllerEvent.INSTANCE_SEAL_CHANGED, what, more, pod_uid, found.partition)

    def _count(self, outcome: str, started: float) -> None:
        self.counters.passes[outcome] += 1
        self.counters.pass_seconds += time.perf_counter() - started


def _evicted(actions: Iterable[Action]) -> frozenset[str]:
    return frozenset(action.pod_uid for action in actions if isinstance(action, Evict | Kill))


@contextlib.asynccontextmanager
async def running_loop(loop: ReconcileLoop) -> AsyncIterator[None]:
    """Keep the tree as long as the block runs; when it begins, the first pass is done. The tree stays as it is."""
    with inotify.watching() as queue:
        async with trio.open_nursery() as nursery:
            await loop.once(queue)
            for name, task in (
                ("events", partial(loop.listen, queue)),
                ("reconcile", partial(loop.follow, queue)),
                ("leases", partial(loop.held.outwait_leases, loop.disturb)),
            ):
                nursery.start_soon(restarted, name, task, loop.counters)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()
                loop.log_limit.log_left_out()
                loop.held.close()
