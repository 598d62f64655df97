"""Descriptors of control files of cgroups: a process that holds one may write to it, whatever its own rights are."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import attrs

from runner.base.values import frozen
from runner.kernel.cgroup import Cgroup
from runner.kernel.files import Descriptor, owned

WRITTEN = frozenset({"cgroup.procs", "cgroup.threads"})
"""The control files that are open for writing where they are sent."""


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


def open_cgroup_fds(float_cgroup: Cgroup, instance: Cgroup, pod: Cgroup, held: ExitStack) -> CgroupFds:
    """Open the control files by the cgroups' paths; *held* closes them. Raises ``CgroupError``."""
    procs, threads = "cgroup.procs", "cgroup.threads"
    files = ((float_cgroup, procs), (instance, threads), (pod, procs), (float_cgroup, threads))
    return CgroupFds(*(held.enter_context(owned(group.open(file))) for group, file in files))


@frozen
class ControlFiles:
    """Control files to send to others, of which each that can be written is opened once and kept open.

    A write to ``cgroup.procs`` holds the lock of all cgroups of the machine while it moves the process, some 15 us for each of its threads.
    The kernel admits the writers of one open file one at a time (``of->mutex`` in ``kernfs_fop_write_iter``), so whoever writes to it from
    a thousand threads still waits for the lock only once. A file that its receiver opens again, by ``/proc/self/fd``, moves nothing
    where the hierarchy is mounted with ``nsdelegate``: it has the receiver's cgroup namespace, which does not contain float.

    A file that can only be read is opened each time: for poll(2), an open file remembers which change its reader has seen.
    """

    _kept: dict[Path, Descriptor] = attrs.field(factory=dict)

    def open(self, group: Cgroup, file: str, held: ExitStack) -> int:
        """Return a descriptor of control file *file* of *group*; *held* closes it unless it is kept. Raises ``CgroupError``."""
        opened = held.enter_context(owned(group.open(file))).number
        if file not in WRITTEN:
            return opened
        path = group.path / file
        kept = self._kept.get(path)
        if kept is None or not os.path.sameopenfile(kept.number, opened):  # the latter: the group was made again
            for each in [each for each in self._kept if each == path or not each.exists()]:
                self._kept.pop(each).close()
            kept = self._kept[path] = Descriptor(os.dup(opened))
        return kept.number

    def close(self) -> None:
        """Close the kept descriptors."""
        while self._kept:
            self._kept.popitem()[1].close()
