"""Descriptors of control files of cgroups: a process that holds one may write to it, whatever its own rights are."""

from __future__ import annotations

from contextlib import ExitStack

from runner.base.values import frozen
from runner.kernel.cgroup import Cgroup
from runner.kernel.files import Descriptor, owned


@frozen
class CgroupFds:
    """Descriptors of four control files, open for writing, by which processes and threads change their cgroup.

    Their order is that of the controller's message. ``cgroup.threads`` is open for reading as well.
    """

    float_procs: Descriptor
    """``cgroup.procs`` of float."""
    instance_threads: Descriptor
    """``cgroup.threads`` of the vCPUs' cgroup."""
    pod_procs: Descriptor
    """``cgroup.procs`` of the pod's own cgroup."""
    float_threads: Descriptor
    """``cgroup.threads`` of the same cgroup as :attr:`float_procs`."""
    memory_events: Descriptor | None = None
    """``memory.events`` of the domain that contains both cgroups, open for reading; ``None`` if none was sent."""

    def descriptors(self) -> tuple[Descriptor, ...]:
        """Return all descriptors."""
        always = (self.float_procs, self.instance_threads, self.pod_procs, self.float_threads)
        return always if self.memory_events is None else (*always, self.memory_events)


def open_cgroup_fds(float_cgroup: Cgroup, instance: Cgroup, pod: Cgroup, stack: ExitStack) -> CgroupFds:
    """Open the control files by the cgroups' paths; *stack* closes them. Raises ``CgroupError``."""
    procs, threads = "cgroup.procs", "cgroup.threads"
    files = ((float_cgroup, procs), (instance, threads), (pod, procs), (float_cgroup, threads))
    return CgroupFds(*(stack.enter_context(owned(group.open(file))) for group, file in files))
