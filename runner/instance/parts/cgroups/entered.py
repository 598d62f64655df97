"""The cgroups of a placement that this process has entered: moving processes and threads between them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

from runner.base.values import frozen
from runner.kernel.cgroup import CgroupError, read_members, write_control
from runner.kernel.files import owned
from runner.kernel.scheduler import unpin
from runner.placement.backends import ControllerPlacement, DelegatedPlacement, Placement
from runner.placement.threads import CgroupPaths
from runner.protocol.controller_client import CgroupFds

if TYPE_CHECKING:
    from runner.instance.renewal.carried import CarriedCgroups  # only a runner that is renewed carries any


P = TypeVar("P", ControllerPlacement, DelegatedPlacement)


@attrs.define
class InForce(Generic[P]):
    """The placement that is in force now; all parts of a back end share one, because it changes while the guest runs."""

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
        try:
            return [read_members(fd.number, f"{path}/cgroup.threads") for fd, path in groups]
        except CgroupError as error:
            if error.errno == errno.EBADF:  # an older controller opened them for writing alone
                return ()
            raise

    @property
    def loses_cpus(self) -> bool:
        return True

    def remember(self, tid: int) -> None:
        self.confined.add(tid)

    def forget(self, tid: int) -> None:
        self.confined.discard(tid)

    def adopt(self, placement: Placement) -> None:
        assert isinstance(placement, type(self.placement))  # noqa: S101 - a change of ours keeps the back end
        self.in_force.placement = placement

    def release(self, tid: int) -> None:
        write_control(self.cgroup_fds.float_threads.number, str(tid), f"{self.cgroups.float_cgroup}/cgroup.threads")
        self.confined.discard(tid)
        unpin(tid)  # it has the one CPU of the vCPU that started it, and float's CPUs change

    def carried(self) -> CarriedCgroups:
        """Return what the program that renews this one must know of them."""
        from runner.instance.renewal.carried import CarriedCgroups
        from runner.kernel.carried import CarriedFd

        fds = self.cgroup_fds
        return CarriedCgroups(
            self.cgroups,
            CarriedFd(fds.float_procs.number),
            CarriedFd(fds.instance_threads.number),
            CarriedFd(fds.pod_procs.number),
            CarriedFd(fds.float_threads.number),
            frozenset(self.confined),
        )

    def return_to_pod(self, pid: int) -> None:
        """Move the process *pid* back to the pod's cgroup."""
        write_control(self.cgroup_fds.pod_procs.number, str(pid), f"{self.cgroups.pod}/cgroup.procs")


def adopted_cgroups(carried: CarriedCgroups, in_force: InForce[P], held: ExitStack) -> EnteredCgroups[P]:
    """Return the cgroups that the runner before exec has entered; *held* closes their descriptors."""
    fds = (carried.float_procs, carried.instance_threads, carried.pod_procs, carried.float_threads)
    cgroup_fds = CgroupFds(*(held.enter_context(owned(each.number)) for each in fds))
    return EnteredCgroups(carried.cgroups, None, cgroup_fds, in_force, set(carried.confined))
