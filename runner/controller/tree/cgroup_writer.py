"""The cgroup writer: a process that keeps CAP_SYS_ADMIN only for the three changes of cgroups that need it.

Two are writes for a partition: ``isolated`` to ``cpuset.cpus.partition`` of a cgroup whose parent is no partition
(``remote_partition_enable``, ``kernel/cgroup/cpuset.c``), and more CPUs to ``cpuset.cpus.exclusive`` of one that is a partition already
(``remote_cpus_update``). The kernel checks the capabilities of the process that writes, so passing a descriptor would not help. The
controller itself names the CPUs, takes some away, ends partitions, and decides. The third adds mount options that another program has taken
away (:mod:`runner.controller.tree.mount_options`).

The writer opens what it writes below the controller's root without following links. Without the writer the controller continues, but until
the next start no instance gets a partition, and the mount keeps its options.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.controller.privileged_process import EndedError, PrivilegedProcess
from runner.kernel.cgroup import CgroupError, write_control
from runner.kernel.cgroup_mounts import NSDELEGATE, read_cgroup_mounts, set_options
from runner.kernel.leases import END_LEASE, LEASED
from runner.kernel.privileges import CAP_SYS_ADMIN
from runner.kubelet.pod_cgroups import group_uid, vcpus_group

MOUNT_OPTIONS = frozenset({NSDELEGATE, "memory_recursiveprot"})
"""The options that are added again: those with which systemd mounts cgroup v2."""


@frozen
class CgroupWriter(PrivilegedProcess):
    """The controller's end of the writer's connection."""

    title = "cgroup writer"
    comm = "cgroup-writer"
    keeps = (CAP_SYS_ADMIN,)
    needs_them = True

    @property
    def missing(self) -> str:
        """Return the reason why it can write nothing; empty if it can."""
        if not self.started:
            return "the controller's cgroup writer has no CAP_SYS_ADMIN; give its container the capability"
        return super().missing

    def isolate(self, name: str) -> None:
        """Write ``isolated`` to ``cpuset.cpus.partition`` of the vCPUs' cgroup *name*, as in ``instance-a/vcpus``.

        The kernel accepts the write even if it makes no partition, so the caller reads it back. Raises :class:`CgroupError` if the write is
        refused or the writer has ended.
        """
        self._ask(name, "cannot write 'isolated' to {name}/cpuset.cpus.partition")

    def extend(self, name: str, cpus: CpuSet) -> None:
        """Write *cpus*, the present CPUs and more, to ``cpuset.cpus.exclusive`` of the isolated partition *name*.

        If the kernel cannot add them it ends the partition, so the caller reads it back. Raises as :meth:`isolate` does.
        """
        self._ask(f"{name} {cpus}", f"cannot write '{cpus}' to {{name}}/cpuset.cpus.exclusive")

    def add_options(self, options: Iterable[str]) -> None:
        """Add *options*, of :data:`MOUNT_OPTIONS` and ``nsdelegate`` among them, to those of the mount.

        In another cgroup namespace than the first the kernel changes nothing and reports no error, so the caller reads them back. Raises as
        :meth:`isolate` does.
        """
        self._ask(",".join(sorted(options)), "cannot mount cgroup v2 with {name}")

    def _ask(self, message: str, failure: str) -> None:
        try:
            number = int(self.ask(message.encode()))
        except EndedError as error:
            raise CgroupError(f"cannot write to cgroups: {error}", errno.EPIPE) from None
        if number:
            reason, remedy = (LEASED, END_LEASE) if number == errno.EAGAIN else (os.strerror(number), "")
            sentence = f"{failure.format(name=message.partition(' ')[0])}: {reason}"
            raise CgroupError(sentence, number, remedy=remedy)


def start_cgroup_writer(root: Path, procfs: Path) -> CgroupWriter:
    """Fork the writer for the cgroups of vCPUs below *root*, and the mount in *procfs*. Raises :class:`HostError`."""
    return CgroupWriter.start(procfs, lambda message: b"%d" % obey(root, message, procfs))


def obey(root: Path, message: bytes, procfs: Path = Path("/proc")) -> int:
    """Carry out *message*; return 0 or the error number.

    It is the path of an instance's cgroup of vCPUs, to make it an isolated partition; if CPUs follow, the partition gets these CPUs; or it
    is the mount options to add. Anything else is refused with ``EINVAL``, and a file that is leased with ``EAGAIN``
    (:mod:`runner.kernel.leases`).
    """
    name, space, text = message.decode("ascii", "replace").partition(" ")
    if NSDELEGATE in (options := frozenset(name.split(","))) and options <= MOUNT_OPTIONS and not space:
        return _add_options(procfs, options)
    try:
        cpus = CpuSet.parse(text)
    except ValueError:
        return errno.EINVAL
    pod_uid = group_uid(name)
    if pod_uid is None or name != vcpus_group(pod_uid) or bool(space) != bool(cpus):
        return errno.EINVAL
    file, value = ("cpuset.cpus.exclusive", str(cpus)) if cpus else ("cpuset.cpus.partition", "isolated")
    try:
        with contextlib.ExitStack() as stack:
            at: int | None = None
            for part, flags in (
                (str(root), os.O_PATH | os.O_DIRECTORY),
                *((part, os.O_PATH | os.O_DIRECTORY) for part in name.split("/")),
                (file, os.O_WRONLY | os.O_NONBLOCK),
            ):
                at = os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                stack.callback(os.close, at)
            assert at is not None  # noqa: S101 - three were opened
            write_control(at, value, f"{name}/{file}")
    except (CgroupError, OSError) as error:
        return error.errno or errno.EIO
    return 0


def _add_options(procfs: Path, options: frozenset[str]) -> int:
    mounts = read_cgroup_mounts(procfs)
    try:
        set_options(mounts.unified or "", tuple(sorted(options.union(mounts.options))))
    except OSError as error:
        return error.errno or errno.EIO
    return 0
