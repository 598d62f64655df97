"""The namespace reader: a process that keeps CAP_SYS_PTRACE only to read the PID namespaces of processes.

The namespace identifies a peer (:mod:`runner.kernel.peers`). The kernel shows a process's namespace only to processes that may trace it,
and a process that may trace all others has full control of the node: the controller itself must not have that capability. Without the
reader it cannot identify any peer, and ends.
"""

from __future__ import annotations

import errno
from pathlib import Path

import trio

from runner.base.values import frozen
from runner.controller.privileged_process import PrivilegedProcess
from runner.kernel.peers import PidNamespace, read_pid_namespace
from runner.kernel.privileges import CAP_SYS_PTRACE


@frozen
class NamespaceReader(PrivilegedProcess):
    """The controller's end of the reader's connection."""

    title = "namespace reader"
    comm = "namespace-read"
    keeps = (CAP_SYS_PTRACE,)

    def look_up(self, pid: int) -> PidNamespace:
        """Return the PID namespace of process *pid*.

        Raises ``OSError`` as the kernel does, and :class:`~runner.controller.privileged_process.EndedError`.
        """
        number, inode, parent = map(int, self.ask(b"%d" % pid).split())
        if number:
            raise OSError(number, "the namespace of the process cannot be read")
        return PidNamespace(inode, parent)

    async def until_its_end(self) -> None:
        """Wait until the process ends, and then raise :class:`~runner.controller.privileged_process.EndedError`."""
        await trio.lowlevel.wait_readable(self.connection)  # answers are read in the step of their request
        raise self.ended_error()


def start_namespace_reader(procfs: Path) -> NamespaceReader:
    """Fork the reader for the processes in *procfs*. Raises :class:`~runner.base.errors.HostError`."""
    return NamespaceReader.start(procfs, lambda line: obey(procfs, line))


def obey(procfs: Path, line: bytes) -> bytes:
    """Return the error number, 0 if there is none, and the inodes of the namespace and of its parent.

    *line* is the number of a process in decimal digits; anything else is refused with ``EINVAL``.
    """
    if not line.isdigit() or len(line) > len("4194304"):  # PID_MAX_LIMIT, include/linux/threads.h
        return b"%d 0 0" % errno.EINVAL
    try:
        found = read_pid_namespace(procfs, int(line))
    except OSError as error:
        return b"%d 0 0" % (error.errno or errno.EIO)
    return b"0 %d %d" % (found.inode, found.parent)
