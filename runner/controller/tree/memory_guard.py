"""The memory guard: ends what takes too much of float's memory before the kernel ends the largest process, maybe another pod's.

From ``memory.high`` of the root on, the kernel slows down the processes that ask for more ("memory.high" of cgroup-v2.rst),
and reports it by ``memory.events``. That is the time in which the guard finds the pod that holds most, and ends it:

1. the processes that hold most, as many as it takes, so that a large program of ``kubectl exec`` does not take the
   machine with it;
2. if the same pod must be chosen again within :data:`REPEATED`, all of it, also in its own cgroup: another process may
   hold what the first one took, and a process may be replaced as fast as it is ended.

Page cache, which the kernel takes back by itself, is no reason. What is shared is only looked for when the root is
charged for enough of it, in a worker thread, because a pod may have very many processes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Literal

import attrs
import trio

from runner.base.errors import HostError, explain
from runner.base.rate_limit import LogRateLimit
from runner.base.values import frozen
from runner.controller.metrics import ControllerCounters, MemoryEnd
from runner.controller.serve.pods import PodCgroups
from runner.controller.tree.float_memory import (
    MemoryByKind,
    PodMemory,
    charged_memory,
    choose_pod,
    choose_processes,
    is_decided,
    unreclaimable,
)
from runner.controller.tree.tree import Tree
from runner.kernel import inotify
from runner.kernel.cgroup import Cgroup, CgroupError, LeasedError
from runner.kernel.pidfds import has_ended, kill_process
from runner.kernel.procfs import LongStatuses
from runner.kernel.shared_memory import Inode, SharedMemory, TmpfsMount, shared_memory
from runner.kubelet.pod_cgroups import INSTANCE_NAME, instance_group

log = logging.getLogger(__name__)

REPEATED = 60.0
"""Seconds within which a pod that is chosen again is ended as a whole."""
AWAITED = 256
"""Processes whose end is waited for, of those that are killed at a time; for each there is an open descriptor."""
ENDED_WITHIN = 10.0
"""Seconds to wait for them to end: a large process gives its memory back page by page."""
SETTLED_WITHIN = 0.25
"""Seconds before another pod is chosen: what the last one held in a mount namespace becomes free after its processes."""
READ_WITHIN = 30.0
"""Seconds for the search for shared memory; after it the guard goes by private memory alone."""
SEARCHED_WITHIN = 20.0
"""Seconds after which the search ends by itself, with what it has found."""
POD_SEARCHED_WITHIN = 5.0
"""Seconds of it for one pod, so that one that takes long hides no other. 0.02 ms for a descriptor, 0.002 ms for a mapping."""
BETWEEN_CHECKPOINTS = 64
"""Processes that are ended, 0.05 ms each, before requests have their turn."""

MOST_OWN_PROCESSES = 4096
"""Processes in a pod's own cgroup that are looked at; a pod that has more is ended first, and as a whole."""
MOST_DESCRIPTORS = 1 << 15
"""Open files of a pod that are looked at, 0.02 ms each, and files of which the size is kept, 250 bytes each."""
MOST_NAMESPACES = 64
"""Mount namespaces of a pod that are looked at."""
MOST_MOUNTINFO = 1 << 20
"""Bytes of the lists of a pod's mount namespaces; no mount is looked at in the one with which they are more, and in later ones."""
MOST_LONG_STATUSES = 16
"""Statuses of a pod's processes that are long (:class:`~runner.kernel.procfs.LongStatuses`); a pod that has more is ended
first, and as a whole."""
MAPPED = 1 << 24
"""Bytes of mapped shared memory from which on the mappings of a process are read."""
KERNEL_STACK = 1 << 14
"""Bytes for each thread (``THREAD_SIZE`` of x86-64)."""


@frozen
class GuardIntervals:
    """How often to look at the memory."""

    resync: float = 30.0
    """Whatever is reported or not."""
    high: float = 0.25
    """While it is above ``memory.high``."""
    pause: float = 0.05
    """After each look: under page cache alone, the kernel reports up to 100 events a second."""
    unwatched: float = 1.0
    """While the kernel cannot report anything."""
    unattributed: float = 1.0
    """After one at which no pod held enough: all of them together need more than there is."""


@attrs.define(eq=False)
class MemoryGuard:
    """Ends the processes of pods that hold *least* bytes or more of the memory of *tree*'s root, while it is short."""

    tree: Tree
    pods: PodCgroups
    least: int
    registered: set[str]
    """The pods that were registered, of which those that have gone are taken out; they need not be in the tree any more."""
    counters: ControllerCounters
    log_limit: LogRateLimit
    intervals: GuardIntervals = attrs.field(factory=GuardIntervals)
    _ended_at: dict[str, float] = attrs.field(factory=dict)
    """Pod UID → when processes of it were ended, for the last :data:`REPEATED` seconds."""
    _readers: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(2))
    """For the threads that search for shared memory, one of which may hang."""

    async def run(self) -> None:
        """Look at the memory whenever the kernel reports an event; never return."""
        with inotify.watching() as queue:
            while True:
                quiet = self.intervals.resync
                try:
                    queue.watch(self.tree.root.path / "memory.events", inotify.MODIFY)
                except HostError:  # at a limit of the user's, or the root is not there yet, or is made anew
                    quiet = self.intervals.unwatched
                found = await self.check()
                await trio.sleep(self.intervals.unattributed if found == "unattributed" else self.intervals.pause)
                with trio.move_on_after(quiet if found == "enough" else self.intervals.high):
                    await queue.receive()

    async def check(self) -> Literal["enough", "ended", "unattributed"]:
        """End the processes of a pod if the memory is above ``memory.high``, and return what was found and done."""
        await trio.lowlevel.checkpoint()
        try:
            excess, root = self._excess()
            if excess <= 0:
                return "enough"
            self.registered.difference_update([each for each in self.registered if not self.pods.existing(each)])
            pods = await self._measured(root)
            pod = choose_pod(pods, root, self.least)
            if pod is None:
                self._report_unattributed(excess, root, pods)
                return "unattributed"
            if not self._settling(pod.pod_uid):
                await self._end(pod, root, excess)
        except HostError as error:
            if (more := self.log_limit.due("memory guard")) is not None:
                log.error("memory guard failed%s reason=%r", more, explain(error))  # noqa: TRY400  # the sentence is enough
            return "unattributed"
        return "ended"

    def _settling(self, pod_uid: str) -> bool:
        now = trio.current_time()
        return any(now - at < SETTLED_WITHIN for other, at in self._ended_at.items() if other != pod_uid)

    def _excess(self) -> tuple[int, MemoryByKind]:
        """Return by how many bytes the root is above ``memory.high``, page cache not counted, and what it is charged for."""
        high = self.tree.root.read_if_there("memory.high")
        if high is None or not high.isdecimal():
            return 0, MemoryByKind()
        used, stat = int(self.tree.root.read("memory.current")), self.tree.root.memory_stat()
        return unreclaimable(used, stat) - int(high), charged_memory(stat)

    def _report_unattributed(self, excess: int, root: MemoryByKind, pods: Iterable[PodMemory]) -> None:
        if (more := self.log_limit.due("memory unattributed")) is not None:
            held = sorted(((pod.of_root(root).total, pod.pod_uid) for pod in pods), reverse=True)[:3]
            log.warning(
                "memory short, and no pod holds enough to be ended%s root=%s excess=%d least=%d most=%s",
                more,
                self.tree.root.path,
                excess,
                self.least,
                ", ".join(f"{pod_uid} {size}" for size, pod_uid in held) or "none",
            )

    # -- what the pods hold ------------------------------------------------------------------------------------------

    async def _measured(self, root: MemoryByKind) -> tuple[PodMemory, ...]:
        private = await trio.to_thread.run_sync(partial(self.measure, shared=False), abandon_on_cancel=True)
        if root.shared >= self.least and not is_decided(private, root):
            # Where all threads hang, another request for one would wait as long, and the guard with it.
            with trio.move_on_after(READ_WITHIN if self._readers.available_tokens else 0):
                return await trio.to_thread.run_sync(
                    partial(self.measure, shared=True), abandon_on_cancel=True, limiter=self._readers
                )
            if (more := self.log_limit.due("memory unread")) is not None:
                log.warning("shared memory not attributed%s reason='the search took more than %d s'", more, READ_WITHIN)
        return private

    def measure(self, *, shared: bool) -> tuple[PodMemory, ...]:
        """Return what each pod in the tree holds; *shared* memory is searched for only on demand, and else none.

        To be called in a worker thread. Raises :class:`HostError`.
        """
        reader = shared_memory(self.pods.procfs.root) if shared else None
        host = {} if reader is None else {mount.device: mount.point for mount in reader.mounts(1, None)[0]}
        until = time.monotonic() + SEARCHED_WITHIN
        return tuple(self._pod(pod_uid, pids, reader, host, until) for pod_uid, pids in self._processes().items())

    def _processes(self) -> Mapping[str, list[int]]:
        """Return pod UID → the processes whose first thread is in one of the pod's groups."""
        named = (pod_uid for pod_uid in self.tree.floating.children() if INSTANCE_NAME.fullmatch(pod_uid))
        pod_uids = sorted({*named, *self.registered})
        groups = {group: pod_uid for pod_uid in pod_uids for group in self._groups(pod_uid)}
        owners = {tid: pod_uid for group, pod_uid in groups.items() for tid in _threads(group)}
        paths = {self._path(group): pod_uid for group, pod_uid in groups.items()}
        found: dict[str, list[int]] = {pod_uid: [] for pod_uid in pod_uids}
        for pid in self.tree.root.processes() - {0}:
            # The first thread of a process may have ended before the others: then no group lists it.
            pod_uid = owners.get(pid) or paths.get(self._cgroup(pid))
            if pod_uid is not None:
                found[pod_uid].append(pid)
        return found

    def _groups(self, pod_uid: str) -> tuple[Cgroup, Cgroup]:
        return self.tree.pod(pod_uid), self.tree.group(instance_group(pod_uid))

    def _path(self, group: Cgroup) -> str:
        return f"/{group.path.relative_to(self.pods.mount.path)}"

    def _cgroup(self, pid: int) -> str:
        try:
            return self.pods.procfs.cgroup(pid)
        except HostError:
            return ""

    def _pod(
        self, pod_uid: str, pids: list[int], reader: SharedMemory | None, host: Mapping[int, str], until: float
    ) -> PodMemory:
        try:
            own = [process.pid for process in islice(self.pods.processes(pod_uid), MOST_OWN_PROCESSES + 1)]
            hidden = len(own) > MOST_OWN_PROCESSES or self.pods.has_more_groups(pod_uid)
            charged = self._charged(pod_uid)
        except LeasedError:
            own, hidden, charged = [], True, MemoryByKind()
        until = min(until, time.monotonic() + POD_SEARCHED_WITHIN)
        search = None if reader is None else _SharedSearch(reader, pod_uid, host, until)
        statuses = LongStatuses(MOST_LONG_STATUSES + 1)
        held = {pid: self._held(pid, statuses, search) for pid in (*pids, *own)}
        hidden = hidden or not statuses.left
        with contextlib.suppress(LeasedError):
            # Once more: a guest takes its memory at gigabytes a second, and a search takes seconds.
            charged = charged.at_least(self._charged(pod_uid))
        found = MemoryByKind(
            sum(each.anonymous for each in held.values()),
            0 if search is None else search.total(),
            sum(each.kernel for each in held.values()),
        )
        return PodMemory(pod_uid, found, charged, {pid: held[pid] for pid in pids}, bool(own) or hidden, hidden)

    def _charged(self, pod_uid: str) -> MemoryByKind:
        """Return what the pod's own cgroup is charged for: nothing where it has ended, or the kernel limits no memory.

        Raises :class:`CgroupError` if it cannot be read: without it, the guest's memory would count as taken from the root.
        """
        charged = MemoryByKind()
        for path in self.pods.existing(pod_uid):
            try:
                charged = charged.plus(charged_memory(Cgroup(path).memory_stat()))
            except CgroupError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise
        return charged

    def _held(self, pid: int, statuses: LongStatuses, search: _SharedSearch | None) -> MemoryByKind:
        memory = self.pods.procfs.memory(pid, statuses)
        if memory is None:
            return MemoryByKind()
        threads = self.pods.procfs.thread_ids(pid) if search is not None else ()
        shared = 0 if search is None else search.of_process(pid, threads, memory.shared)
        return MemoryByKind(memory.anonymous, shared, memory.tables + memory.threads * KERNEL_STACK)

    # -- ending ------------------------------------------------------------------------------------------------------

    async def _end(self, pod: PodMemory, root: MemoryByKind, excess: int) -> None:
        now = trio.current_time()
        self._ended_at = {pod_uid: at for pod_uid, at in self._ended_at.items() if now - at < REPEATED}
        whole = pod.hidden or pod.pod_uid in self._ended_at or not pod.processes
        held = pod.of_root(root)
        groups = [self._path(group) for group in self._groups(pod.pod_uid)]
        if whole:
            own = [self._path(group) for group in self._not_killed(pod.pod_uid)]
            survivors = await trio.to_thread.run_sync(self._processes_below, own) if own else []
            ended = await self._kill({*pod.processes, *survivors}, (*groups, *own), excess)
        else:
            ended = await self._kill(choose_processes(pod, root, excess), groups, excess)
        self._ended_at[pod.pod_uid] = trio.current_time()
        self.counters.memory_ended += ended
        self.counters.memory_ends.append(MemoryEnd(pod.pod_uid, held.total, ended))
        what = "the pod that holds most is ended" if whole else "processes of the pod that holds most are ended"
        if (more := self.log_limit.due(what, pod.pod_uid)) is not None:
            log.error(
                "memory short, %s%s uuid=%s processes=%d private=%d shared=%d kernel=%d excess=%d",
                what,
                more,
                pod.pod_uid,
                ended,
                held.anonymous,
                held.shared,
                held.kernel,
                excess,
            )

    def _not_killed(self, pod_uid: str) -> Iterator[Cgroup]:
        """Kill what is in the pod's own cgroups; yield those where the kernel cannot (before 5.14), or a lease forbids it."""
        for group in map(Cgroup, self.pods.existing(pod_uid)):
            try:
                group.write("cgroup.kill", "1")
            except CgroupError:
                if group.exists():
                    yield group

    def _processes_below(self, groups: Collection[str]) -> list[int]:
        """Return the processes in *groups* and below, as procfs says, whose files pods cannot reach."""
        return [pid for pid in self.pods.procfs.processes() if self._is_below(pid, groups)]

    def _is_below(self, pid: int, groups: Collection[str]) -> bool:
        path = self._cgroup(pid)
        return any(path == group or path.startswith(f"{group}/") for group in groups)

    async def _kill(self, pids: Iterable[int], groups: Collection[str], excess: int) -> int:
        """Kill those of *pids* that are in *groups* or below, wait for their end, and return how many they were."""
        killed = 0
        with contextlib.ExitStack() as stack:
            fds = list[int]()
            for number, pid in enumerate(pids, start=1):
                fd = kill_process(pid, partial(self._is_below, pid, groups))
                if fd is not None:
                    killed += 1
                    if len(fds) < AWAITED:
                        stack.callback(os.close, fd)
                        fds.append(fd)
                    else:
                        os.close(fd)
                if number % BETWEEN_CHECKPOINTS == 0:
                    await trio.lowlevel.checkpoint()
            await self._wait_for_end(fds, excess)
        return killed

    async def _wait_for_end(self, fds: Iterable[int], excess: int) -> None:
        """Wait for the end of the processes of *fds*, but not while more is taken than the *excess* that they were killed for.

        A tracer holds a killed process for as long as it likes, with all of its memory (PTRACE_O_TRACEEXIT of ptrace(2)), and
        another process of the pod would have all that time.
        """
        with trio.move_on_after(ENDED_WITHIN):
            for fd in fds:
                while not has_ended(fd):
                    if self._excess()[0] > excess + self.least:
                        return
                    with trio.move_on_after(self.intervals.high):
                        await trio.lowlevel.wait_readable(fd)


@frozen
class _OwnMounts:
    """Each tmpfs of a pod's own in a mount namespace: their mount ids, and their devices."""

    ids: frozenset[int] = frozenset()
    devices: frozenset[int] = frozenset()


@attrs.define(eq=False)
class _SharedSearch:
    """The search for the shared memory that one pod holds, each piece of it once."""

    reader: SharedMemory
    pod_uid: str
    host: Mapping[int, str]
    """Device → mount point of each tmpfs that the node has mounted."""
    until: float
    """The end of the search, on the clock of ``time.monotonic``; after it nothing more is found."""
    _files: dict[Inode, int] = attrs.field(factory=dict)
    _used: dict[int, int] = attrs.field(factory=dict)
    """Device → bytes of each tmpfs of the pod's own that is counted as a whole."""
    _mounts: dict[int, _OwnMounts] = attrs.field(factory=dict)
    """By mount namespace."""
    _left: int = MOST_DESCRIPTORS
    _mountinfo: int = MOST_MOUNTINFO
    """Bytes of lists of mounts that may still be read."""

    def total(self) -> int:
        """Return the bytes of all that was found."""
        files = sum(size for (device, _), size in self._files.items() if device not in self._used)
        return files + sum(self._used.values())

    def of_process(self, pid: int, tids: Iterable[int], mapped: int) -> int:
        """Return the bytes that process *pid* holds by its descriptors and mappings; it has *mapped* so many."""
        mounts = self._namespace(pid)
        files: dict[Inode, int] = {}
        for tid in self._with_descriptors(pid, tids):
            found, looked = self.reader.descriptors(tid, mounts.ids, self._left)
            self._left -= looked
            files |= found
        if mapped >= MAPPED and not self._ended():
            for inode, length in self.reader.mappings(pid, mounts.devices, MOST_DESCRIPTORS).items():
                files.setdefault(inode, self._files.get(inode, min(length, mapped)))
        for inode, size in files.items():
            if inode in self._files or len(self._files) < 2 * MOST_DESCRIPTORS:
                self._files[inode] = max(size, self._files.get(inode, 0))
        return sum(files.values())

    def _ended(self) -> bool:
        return time.monotonic() >= self.until

    def _with_descriptors(self, pid: int, tids: Iterable[int]) -> Iterator[int]:
        if not self._ended():
            yield pid
        for tid in tids:
            if self._ended():
                return
            if tid != pid and not self.reader.shares_descriptors(pid, tid):
                yield tid

    def _namespace(self, pid: int) -> _OwnMounts:
        """Return each tmpfs of the pod's own in the mount namespace of *pid*, and count what is in it."""
        number = self.reader.namespace(pid)
        if number not in self._mounts and len(self._mounts) < MOST_NAMESPACES and not self._ended():
            mounts, size = self.reader.mounts(pid, self._mountinfo)
            self._mountinfo = max(self._mountinfo - size, 0)
            own = [mount for mount in mounts if self._is_own(mount)]
            self._mounts[number] = _OwnMounts(
                frozenset(mount.mount_id for mount in own), frozenset(mount.device for mount in own)
            )
            for mount in own:
                if mount.whole and mount.reachable and mount.device not in self._used:
                    self._used[mount.device] = self.reader.used(pid, mount)
        return self._mounts.get(number, _OwnMounts())

    def _is_own(self, mount: TmpfsMount) -> bool:
        """Tell whether *mount* is none of the node's: not mounted there, or in the directory of the pod or of its sandbox."""
        point = self.host.get(mount.device)
        if point is None or self.pod_uid in point:
            return True
        return point.endswith("/shm") and point != "/dev/shm"  # noqa: S108 - containerd and CRI-O: …/ID/shm


def _threads(group: Cgroup) -> frozenset[int]:
    try:
        return group.threads()
    except CgroupError:  # it has been removed
        return frozenset()
