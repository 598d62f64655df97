"""The cgroups of a placement that this process has entered: moving processes and threads between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import attrs

from runner.base.values import frozen
from runner.kernel.cgroup import flat_keyed, read_members, write_control
from runner.kernel.cgroup_fds import CgroupFds
from runner.kernel.child_processes import Processes
from runner.kernel.files import all_closed
from runner.kernel.limits import no_kills
from runner.kernel.scheduler import unpin
from runner.placement.backends import ControllerPlacement, DelegatedPlacement, Placement
from runner.placement.threads import CgroupPaths

P = TypeVar("P", ControllerPlacement, DelegatedPlacement)


@attrs.define
class InForce(Generic[P]):
    """The placement in force; all parts of a back end share this object, because the placement changes while the guest runs."""

    placement: P


@frozen
class EnteredCgroups(Generic[P]):
    """Cgroups that threads are moved between by *cgroup_fds*."""

    cgroups: CgroupPaths
    memory_cgroup_fd: int | None
    cgroup_fds: CgroupFds
    in_force: InForce[P]
    confined: set[int] = attrs.field(factory=set)
    """The tids of the vCPU threads."""

    @property
    def placement(self) -> P:
        return self.in_force.placement

    @property
    def pod_cgroup_fd(self) -> int:
        return self.cgroup_fds.pod_procs.number

    def admit(self, pid: int) -> None:
        write_control(self.cgroup_fds.float_procs.number, str(pid), f"{self.cgroups.float_cgroup}/cgroup.procs")

    def confine(self, tid: int) -> None:
        write_control(self.cgroup_fds.instance_threads.number, str(tid), f"{self.cgroups.instance}/cgroup.threads")
        self.confined.add(tid)

    def members(self) -> Sequence[frozenset[int]]:
        groups = (
            (self.cgroup_fds.float_threads, self.cgroups.float_cgroup),
            (self.cgroup_fds.instance_threads, self.cgroups.instance),
        )
        return [read_members(fd.number, f"{path}/cgroup.threads") for fd, path in groups]

    @property
    def loses_cpus(self) -> bool:
        return True

    def forget(self, tid: int) -> None:
        self.confined.discard(tid)

    def adopt(self, placement: Placement) -> None:
        assert isinstance(placement, type(self.placement))  # noqa: S101 - a change of ours keeps the back end
        self.in_force.placement = placement

    def release(self, tid: int) -> None:
        write_control(self.cgroup_fds.float_threads.number, str(tid), f"{self.cgroups.float_cgroup}/cgroup.threads")
        self.confined.discard(tid)
        unpin(tid)  # it inherited the CPU of the vCPU that started it, and float's CPUs change

    @contextmanager
    def kills_explained(self, processes: Processes) -> Iterator[None]:
        """While the block runs, explain the death of a child also by the kernel's out-of-memory kills in their domain.

        The kernel kills this process last there, because only it can report the reason.
        """
        events, elsewhere = self.cgroup_fds.memory_events, processes.out_of_memory
        if events is not None:
            processes.out_of_memory, processes.oom_score = OomKills(events.number, elsewhere).kills, OOM_SCORE
        try:
            yield
        finally:
            processes.out_of_memory, processes.oom_score = elsewhere, 0

    def return_to_pod(self, pid: int) -> None:
        """Move the process *pid* back to the pod's cgroup."""
        write_control(self.cgroup_fds.pod_procs.number, str(pid), f"{self.cgroups.pod}/cgroup.procs")


OOM_SCORE = 150
"""Thousandths of the domain's ``memory.max`` (``oom_badness``): of the 320 MiB that it has at least, more than the 40 of this
process. On the whole node it makes QEMU no likelier than any Burstable pod unless its guest has 85 % of the machine's memory."""


OUT_OF_MEMORY = "out of memory in float; raise limits.memory, or give the guest less"


@attrs.define
class OomKills:
    """The kernel's kills in a domain, by its ``memory.events``, open as *fd*; *elsewhere* returns the kills in other cgroups.

    The domain's directory is not visible to this process.
    """

    fd: int
    elsewhere: Callable[[], str] = no_kills
    _known: int = 0

    def __attrs_post_init__(self) -> None:
        self._known = self._count()

    def kills(self) -> str:
        """Return which memory was short for the kernel's kills since the last call; empty if there were none."""
        before, self._known = self._known, self._count()
        return self.elsewhere() or (OUT_OF_MEMORY if self._known > before else "")

    def _count(self) -> int:
        try:
            return flat_keyed(os.pread(self.fd, 4096, 0).decode()).get("oom_kill", 0)
        except OSError:  # the domain was removed
            return self._known


@contextmanager
def adopted_fds(found: CgroupFds) -> Iterator[CgroupFds]:
    """Hold the descriptors of the cgroups that the previous program has entered."""
    with all_closed(found.descriptors()):
        yield found
