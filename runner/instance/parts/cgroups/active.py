"""The placement of a running instance: one protocol for the three back ends that :mod:`runner.placement.backends` describes."""

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
        """The ``cgroup.procs`` of the cgroup charged for QEMU's memory, which QEMU enters; ``None`` if it is started there."""

    @property
    def pod_cgroup_fd(self) -> int | None:
        """The ``cgroup.procs`` of the pod's cgroup, with all of its CPUs, for children to enter; ``None`` if they are started there."""

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
        """Hold this process in a cgroup with the pod's own device filter, if float's filter differs; no await in the block.

        It is needed to open devices that the pod was given. A move takes 20 to 30 ms (measured). Raises
        :exc:`~runner.base.errors.PlacementError` at the end if there is no way back to float.
        """

    def container_cpus(self) -> CpuSet:
        """Return the container's current CPUs. Raises :exc:`~runner.base.errors.HostError` if they cannot be read."""

    @property
    def loses_cpus(self) -> bool:
        """Return whether :meth:`container_cpus` may change while the guest runs."""

    async def change(self, placement: Placement) -> None:
        """Change the cgroups, and all threads but the vCPUs', to *placement*; the caller pins the vCPUs.

        A CPU that a vCPU gets is taken from all other threads before this returns. Raises :exc:`~runner.base.errors.RunnerError`, in which
        case :attr:`placement` is unchanged.
        """

    async def follow(self, placement: Placement) -> None:
        """Do the same as :meth:`change` for CPUs that a controller has already given or taken."""

    def adopt(self, placement: Placement) -> None:
        """Set *placement* as the one in force without changing anything else."""

    def sealed(self) -> AbstractAsyncContextManager[str]:
        """Hold the vCPUs' CPUs as an isolated partition, and return the reason if that failed, empty if it worked.

        The threads must be in their cgroups, and the guest's memory allocated, because the pod's cgroup loses these CPUs. Raises
        :exc:`~runner.base.errors.HostError` if the controller requires a partition.
        """

    async def settle(self) -> None:
        """Ask the controller to move QEMU's kernel threads out of the pod's cgroup, which this process cannot do.

        May be cancelled at any moment and take any time: the guest need not wait for it.
        """
