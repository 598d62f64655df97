"""Which pod holds the memory that is charged to the tree's root, and which of its processes to end for it (pure).

The memory of everything in float is charged to the root, because a threaded group has no memory controller ("Threads" of
cgroup-v2.rst). At ``memory.max`` the kernel ends the process with the largest resident set (``mm/oom_kill.c``,
``oom_badness``), and a guest's memory counts there as QEMU's, although its own pod is charged for it: the victim would be
an honest guest. So the controller chooses earlier, at ``memory.high``, and by what a pod holds *of the root*: all that
its processes hold, wherever they are, less what the pod's own cgroup is charged for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs

from runner.base.values import frozen


@frozen
class MemoryByKind:
    """Bytes of memory that no reclaim takes back without swap, by what holds it."""

    anonymous: int = 0
    """Private memory of processes."""
    shared: int = 0
    """tmpfs, memfds, System V segments and shared anonymous mappings (``shmem``)."""
    kernel: int = 0
    """Page tables and kernel stacks."""

    @property
    def total(self) -> int:
        """The sum."""
        return self.anonymous + self.shared + self.kernel

    def plus(self, other: MemoryByKind) -> MemoryByKind:
        """Return the sum with *other*, kind by kind."""
        return self._combined(int.__add__, other)

    def beyond(self, other: MemoryByKind) -> MemoryByKind:
        """Return what is more than in *other*, kind by kind."""
        return self._combined(lambda mine, its: max(mine - its, 0), other)

    def at_least(self, other: MemoryByKind) -> MemoryByKind:
        """Return the larger of this and *other*, kind by kind."""
        return self._combined(max, other)

    def at_most(self, other: MemoryByKind) -> MemoryByKind:
        """Return the smaller of this and *other*, kind by kind."""
        return self._combined(min, other)

    def _combined(self, operation: Callable[[int, int], int], other: MemoryByKind) -> MemoryByKind:
        return MemoryByKind(*map(operation, attrs.astuple(self), attrs.astuple(other)))


@frozen
class PodMemory:
    """What the processes of a pod hold."""

    pod_uid: str
    found: MemoryByKind
    """Held by all of its processes, each piece of shared memory once."""
    charged: MemoryByKind
    """What the pod's own cgroup is charged for."""
    processes: Mapping[int, MemoryByKind]
    """Process → what it holds, for those in the pod's groups in the tree."""
    elsewhere: bool = False
    """Whether it has processes in its own cgroup, which may hold what the others took."""
    hidden: bool = False
    """Whether it has more processes there, or more long lists of groups, than are looked at, or keeps others from seeing them:
    it may hold anything."""

    def of_root(self, root: MemoryByKind) -> MemoryByKind:
        """Return what the pod holds of the memory that the *root* is charged for.

        Private memory that processes share since a fork is counted once for each of them, so *root* is the upper bound.
        """
        if self.hidden:
            return root
        return self.found.beyond(self.charged).at_most(root)


def charged_memory(stat: Mapping[str, int]) -> MemoryByKind:
    """Return what a cgroup is charged for by its ``memory.stat`` ("Memory Interface Files")."""
    kernel = stat.get("pagetables", 0) + stat.get("kernel_stack", 0)
    return MemoryByKind(stat.get("anon", 0), stat.get("shmem", 0), kernel)


def unreclaimable(used: int, stat: Mapping[str, int]) -> int:
    """Return those of the *used* bytes of a cgroup that ``memory.high`` cannot make the kernel take back, by *stat*."""
    reclaimable = ("active_file", "inactive_file", "slab_reclaimable")
    return max(used - sum(stat.get(name, 0) for name in reclaimable), 0)


def choose_pod(pods: Iterable[PodMemory], root: MemoryByKind, least: int) -> PodMemory | None:
    """Return the pod with processes that holds most of the memory of *root*, if that is *least* bytes or more.

    One that hides its processes comes first.
    """
    able = [pod for pod in pods if (pod.processes or pod.elsewhere) and pod.of_root(root).total >= least]
    return max(able, key=lambda pod: (pod.hidden, pod.of_root(root).total, pod.pod_uid), default=None)


def is_decided(pods: Iterable[PodMemory], root: MemoryByKind) -> bool:
    """Tell whether the first choice among *pods*, measured without shared memory, stays, whoever holds all of the *root*'s."""
    first, second, *_ = *sorted((pod.of_root(root).total for pod in pods), reverse=True), 0, 0
    return first >= second + root.shared


def choose_processes(pod: PodMemory, root: MemoryByKind, excess: int) -> tuple[int, ...]:
    """Return the processes of *pod* to end, so that *excess* bytes of *root* become free: those that hold most come first.

    Which of its processes holds what is charged to the pod itself cannot be seen. One that holds about as much comes
    last: that is QEMU, which holds the guest's memory.
    """
    most, own = pod.of_root(root), pod.charged.total
    shares = {pid: held.at_most(most).total for pid, held in pod.processes.items()}
    chosen = []
    totals = {pid: held.total for pid, held in pod.processes.items()}
    likely_own = {pid: abs(total - own) < abs(total - most.total) for pid, total in totals.items()}
    for pid in sorted(shares, key=lambda pid: (likely_own[pid], -shares[pid], -pid)):
        if excess <= 0:
            break
        chosen.append(pid)
        excess -= shares[pid]
    return tuple(chosen)
