"""The partition writer: a process that keeps CAP_SYS_ADMIN to make instances' cgroups isolated partitions, and nothing else.

Of all that a partition takes, two writes need that capability: ``isolated`` to ``cpuset.cpus.partition`` of a cgroup whose
parent is no partition (``remote_partition_enable``, ``kernel/cgroup/cpuset.c``), and more CPUs to ``cpuset.cpus.exclusive`` of one
that is a partition already (``remote_cpus_update``). The kernel asks for the capability of the process that writes, so no
descriptor can be handed over. The controller itself names the CPUs, takes some away, ends partitions, and decides.

The writer is forked before the controller gives its rights away and before it reads anything that others write. It obeys
only the other end of a socket pair, opens what it writes below the controller's root without following links, and ends when
the controller ends. Without the writer the controller goes on: no instance gets a partition until the next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.cgroup import CgroupError, write_control
from runner.kernel.leases import LEASED
from runner.kernel.privileges import CAP_SYS_ADMIN, keep_capabilities
from runner.kernel.procfs import Procfs
from runner.kubelet.pod_cgroups import group_uid, vcpus_group

ANSWERS_WITHIN = 30.0
"""Seconds; the kernel rebuilds its scheduling domains meanwhile, 0.1 s on an emulated machine (measured)."""
_READY = b"ready"
_ENDED = "cannot make partitions: the partition writer has ended; restart the controller"
_LONGEST = 1 << 15
"""Bytes of a message: the path of an instance's cgroup and a list of CPUs, or the number of an error."""


@frozen
class PartitionWriter:
    """The controller's end of the writer's connection."""

    connection: socket.socket
    started: bool = True
    """Whether it had the capability; without it, it never comes back."""

    @property
    def lost(self) -> bool:
        """Return whether the writer has ended: it says nothing unless it is asked, so that only the end can be read."""
        return self.started and self._ended()

    @property
    def missing(self) -> str:
        """Return why it makes no partition; empty if it can."""
        if not self.started:
            return "the controller's partition writer has no CAP_SYS_ADMIN; give its container the capability"
        return "the controller's partition writer has ended; restart the controller" if self._ended() else ""

    def _ended(self) -> bool:
        return self.connection.fileno() < 0 or bool(select.select([self.connection], [], [], 0)[0])

    def isolate(self, name: str) -> None:
        """Write ``isolated`` to ``cpuset.cpus.partition`` of the vCPUs' cgroup *name*, as in ``instance-a/vcpus``.

        The kernel accepts that also where it makes no partition: read it back. Raises :class:`CgroupError` if the write is
        refused or the writer has ended.
        """
        self._ask(name, "cannot write 'isolated' to {name}/cpuset.cpus.partition")

    def extend(self, name: str, cpus: CpuSet) -> None:
        """Write *cpus*, which are all and some more, to ``cpuset.cpus.exclusive`` of the isolated partition *name*.

        Where the kernel does not add them it ends the partition: read it back. Raises as :meth:`isolate` does.
        """
        self._ask(f"{name} {cpus}", f"cannot write '{cpus}' to {{name}}/cpuset.cpus.exclusive")

    def _ask(self, message: str, failure: str) -> None:
        try:
            self.connection.send(message.encode())
            answer = self.connection.recv(_LONGEST)
        except OSError as error:
            self.connection.close()  # an answer that is late would be taken for that to the next request
            raise CgroupError(_ENDED, errno.EPIPE) from error
        if not answer:
            raise CgroupError(_ENDED, errno.EPIPE)
        if number := int(answer):
            reason = LEASED if number == errno.EAGAIN else os.strerror(number)
            raise CgroupError(f"{failure.format(name=message.partition(' ')[0])}: {reason}", number)


def start_partition_writer(root: Path, procfs: Path) -> PartitionWriter:
    """Fork the writer for the cgroups of vCPUs below *root*; no thread may have been started yet.

    Raises :class:`HostError`.
    """
    try:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()  # noqa: TID251  # before trio runs, which starts all other children
    except OSError as error:
        raise HostError("cannot start the partition writer") from error
    if pid == 0:
        ours.close()
        _serve(its, root, procfs)
    its.close()
    ours.settimeout(ANSWERS_WITHIN)
    with contextlib.suppress(OSError):
        return PartitionWriter(ours, started=ours.recv(_LONGEST) == _READY)
    return PartitionWriter(ours, started=False)


def _serve(connection: socket.socket, root: Path, procfs: Path) -> None:
    """Obey until the controller ends; this process ends with it."""
    try:
        with contextlib.suppress(OSError):
            (procfs / "self" / "comm").write_text("partition-write")  # 15 characters, as the kernel cuts it
        # They are sent to the controller's process group or container as well, and the end of the controller ends this one.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        keep_capabilities((CAP_SYS_ADMIN,))
        if CAP_SYS_ADMIN not in Procfs(procfs).capabilities():
            return
        connection.send(_READY)
        while message := connection.recv(_LONGEST):
            connection.send(str(obey(root, message)).encode())
    finally:
        os._exit(0)


def obey(root: Path, message: bytes) -> int:
    """Do what *message* asks for; return 0 or the number of the error.

    It is the path of an instance's cgroup of vCPUs, which is to be an isolated partition; with CPUs behind it, these are to be
    the partition's. Anything else is refused with ``EINVAL``, and a file that is leased with ``EAGAIN``
    (:mod:`runner.kernel.leases`).
    """
    name, space, text = message.decode("ascii", "replace").partition(" ")
    try:
        cpus = CpuSet.parse(text)
    except ValueError:
        return errno.EINVAL
    pod_uid = group_uid(name)
    if pod_uid is None or name != vcpus_group(pod_uid) or bool(space) != bool(cpus):
        return errno.EINVAL
    file, value = ("cpuset.cpus.exclusive", str(cpus)) if cpus else ("cpuset.cpus.partition", "isolated")
    try:
        with contextlib.ExitStack() as held:
            at: int | None = None
            for part, flags in (
                (str(root), os.O_PATH | os.O_DIRECTORY),
                *((part, os.O_PATH | os.O_DIRECTORY) for part in name.split("/")),
                (file, os.O_WRONLY | os.O_NONBLOCK),
            ):
                at = os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                held.callback(os.close, at)
            assert at is not None  # noqa: S101 - three were opened
            write_control(at, value, f"{name}/{file}")
    except (CgroupError, OSError) as error:
        return error.errno or errno.EIO
    return 0
