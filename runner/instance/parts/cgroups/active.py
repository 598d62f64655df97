"""Placements in force: one protocol, for three back ends, which :mod:`runner.placement.backends` describes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from runner.base.cpuset import CpuSet
from runner.placement.backends import Placement
from runner.placement.threads import CgroupPaths


class ActivePlacement(Protocol):
    """A placement in force: this process and what it forks run on float's CPUs.

    Example::

        async with entered_cgroups(supervisor, plan.placement, anchors) as active:
            active.admit(qemu.pid)
            for vcpu in vcpus:
                active.confine(vcpu.tid)
    """

    @property
    def placement(self) -> Placement:
        """The CPUs that the instance has now; the plan's until they change while the guest runs."""

    @property
    def cgroups(self) -> CgroupPaths | None:
        """The paths of its cgroups, if it has any."""

    @property
    def memory_cgroup_fd(self) -> int | None:
        """The ``cgroup.procs`` by which QEMU enters the cgroup that its memory is charged to; ``None``: it is born there."""

    @property
    def pod_cgroup_fd(self) -> int | None:
        """The ``cgroup.procs`` by which a child enters the pod's cgroup, with all of its CPUs; ``None``: it is born there."""

    def admit(self, pid: int) -> None:
        """Move the process *pid* with all its threads into float."""

    def confine(self, tid: int) -> None:
        """Move the thread *tid* alone into the instance's cgroup."""

    def members(self) -> Sequence[frozenset[int]]:
        """Return the threads of float and those of the instance's cgroup, as the kernel lists them.

        Empty if the placement has no cgroups, or the controller is too old for its descriptors to be read.
        """

    def release(self, tid: int) -> None:
        """Move the thread *tid* alone back to float, with float's CPUs as its mask."""

    def forget(self, tid: int) -> None:
        """Forget the vCPU thread *tid*, which has ended."""

    def in_pod_cgroup(self) -> AbstractContextManager[None]:
        """Hold this process in a cgroup with the pod's own device filter, if float has another one; no await in the block.

        For the devices that the pod was given. A move takes 20 to 30 ms (measured). Raises
        :exc:`~runner.base.errors.PlacementError` at the end if there is no way back to float.
        """

    def container_cpus(self) -> CpuSet:
        """Return the CPUs that the container has now. Raises :exc:`~runner.base.errors.HostError` where they cannot be read."""

    @property
    def loses_cpus(self) -> bool:
        """Return whether :meth:`container_cpus` may change while the guest runs."""

    async def change(self, placement: Placement) -> None:
        """Change the cgroups, and all threads but the vCPUs', to what *placement* says; pins are the caller's.

        A CPU that a vCPU gets is taken from all other threads before this returns. Raises :exc:`~runner.base.errors.RunnerError`;
        :attr:`placement` is the one before then.
        """

    async def follow(self, placement: Placement) -> None:
        """Do what :meth:`change` does for CPUs that the container has already, and that a controller has given or taken."""

    def adopt(self, placement: Placement) -> None:
        """Take *placement* for the one in force without a change of anything."""

    def sealed(self) -> AbstractAsyncContextManager[str]:
        """Hold the vCPUs' CPUs as an isolated partition, and return why that was not to be had, empty if it was.

        The threads are to be in their cgroups, and the guest's memory taken: the pod's cgroup loses these CPUs.
        Raises :exc:`~runner.base.errors.HostError` where the controller refuses an instance without.
        """

    async def settle(self) -> None:
        """Ask the controller to move QEMU's kernel threads out of the pod's cgroup, which this process cannot do.

        May be cancelled at any moment and take any time: the guest need not wait for it.
        """
