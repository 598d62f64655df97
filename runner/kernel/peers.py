"""The identity of the process at the other end of a Unix socket, from the kernel and never from the message.

``SO_PEERPIDFD`` (Linux 6.5, unix(7)) returns a descriptor of the very process that connected, so its number cannot have been given to
another one meanwhile. Before that, ``SO_PEERCRED`` gives a bare number: ``/proc/<pid>`` is opened first and everything is read through that
descriptor (reading through it fails with ESRCH once the process is gone, even if the number was reused), and a process that started after
the connection was accepted is not the one that made it. What remains uncovered on older kernels is a number recycled between ``connect``
and ``accept``.

"The peer" is the process that called ``connect``. If it passes its end to another process, that process acts in its name for as long as the
peer lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import trio

from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.leases import read_at_once
from runner.kernel.procfs import start_time
from runner.kernel.waiting import SHORT

SO_PEERPIDFD = 77
"""``include/uapi/asm-generic/socket.h``; Python 3.11 has no name for it."""

INIT_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the machine's first PID namespace: ``PROC_PID_INIT_INO`` of ``include/linux/proc_ns.h``."""

_NS_GET_PARENT = 0xB702
"""``include/uapi/linux/nsfs.h``, ioctl_nsfs(2)."""
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class PeerError(HostError):
    """The peer has ended, or its PID namespace is not visible."""


@frozen
class Peer:
    """A process as the kernel describes it at one moment of its life."""

    pid: int
    """Its number here."""
    inner_pid: int
    """Its number in the PID namespace directly below the reader's, which is its container's: 1 is the container's init, and
    the init of a namespace that was made inside the container has another one. *pid* in the reader's own namespace."""
    pid_namespace: int
    """The inode of its PID namespace."""
    nested: bool
    """Whether that namespace was made inside of a container, which may make any number of them."""
    user_id: int
    """Its user when it connected."""
    cgroup: str
    """Its path in the cgroup v2 hierarchy, as seen from the reader's cgroup namespace."""


@frozen
class PidNamespace:
    """A PID namespace, by its inode and that of its parent namespace; the latter is 0 if it is not visible."""

    inode: int
    parent: int = 0


def read_pid_namespace(proc: Path, pid: int) -> PidNamespace:
    """Return the namespace of process *pid* in *proc*.

    The reader must be allowed to trace the process (ptrace(2), ``PTRACE_MODE_READ_FSCREDS``). Raises ``OSError``.
    """
    namespace = os.open(f"{proc}/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        inode = os.fstat(namespace).st_ino
        with contextlib.suppress(OSError):  # EPERM: the parent is not visible
            parent = fcntl.ioctl(namespace, _NS_GET_PARENT)
            try:
                return PidNamespace(inode, os.fstat(parent).st_ino)
            finally:
                os.close(parent)
        return PidNamespace(inode)
    finally:
        os.close(namespace)


def boot_time() -> float:
    """Return the time in seconds since the boot, on the clock of processes' start times."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@frozen
class Peers:
    """The processes of the procfs *proc*, which must be mounted for the reader's own PID namespace."""

    proc: Path
    option: int = SO_PEERPIDFD
    look_up: Callable[[int], PidNamespace] = attrs.field()
    """Returns the namespace of a process. Raises as :func:`read_pid_namespace` does, and :class:`HostError` if it cannot look."""

    @look_up.default
    def _by_itself(self) -> Callable[[int], PidNamespace]:
        return partial(read_pid_namespace, self.proc)

    def identify(self, connection: socket.socket | trio.socket.SocketType, accepted_at: float) -> Peer:
        """Return the process that connected *connection*; *accepted_at* is :func:`boot_time` of its acceptance.

        Raises :class:`PeerError` if it has ended, or lives in a PID namespace that is not visible from here, and ``OSError`` if
        this process has no descriptor or memory left to look (:data:`~runner.kernel.waiting.SHORT`).
        """
        pid, user_id = credentials(connection)
        if pid == 0:
            raise PeerError(
                "cannot identify the peer: its PID namespace is not visible from this one",
                remedy="give this program hostPID",
            )
        with self._held(connection, pid) as pidfd, self._directory(pid) as directory:
            try:
                started = start_time(_read(directory, "stat"))
                numbers = self._numbers(pidfd, directory)
                peer = Peer(
                    pid=pid,
                    inner_pid=numbers[:2][-1],
                    pid_namespace=self.look_up(pid).inode,  # of this very process: it still lives afterwards
                    nested=bool(numbers[2:]),
                    user_id=user_id,
                    cgroup=_unified(_read(directory, "cgroup")),
                )
                if _has_ended(pidfd) or start_time(_read(directory, "stat")) != started:
                    raise ProcessLookupError
            except OSError as error:
                raise _unless_short(error, f"cannot identify the peer: process {pid} has ended") from error
            except (ValueError, IndexError) as error:
                raise PeerError(
                    f"cannot identify the peer: the content of {self.proc}/{pid} is not understood"
                ) from error
        if started > accepted_at:
            raise PeerError(f"cannot identify the peer: process {pid} is younger than the connection")
        return peer

    def container(self, connection: socket.socket | trio.socket.SocketType, own_namespace: int) -> int:
        """Return the inode of the PID namespace of the process that connected *connection*.

        For a namespace made inside a container, return *own_namespace*; for the reader's own namespace, the number of the process; 0 if the
        process has ended or is not visible. That takes up to a third of the time of :meth:`identify` and proves nothing: the number may be
        another process's by now.
        """
        pid = credentials(connection)[0]
        try:
            process = self.look_up(pid)
        except (OSError, HostError):
            return 0
        if process.inode == own_namespace:
            return pid
        return process.inode if process.parent in (0, own_namespace) else own_namespace

    def namespace(self, pid: int) -> int | None:
        """Return the inode of the PID namespace of process *pid*, or ``None`` if it has ended."""
        try:
            return self.look_up(pid).inode
        except OSError:
            return None

    def own_namespace(self) -> int:
        """Return the inode of the reader's own PID namespace."""
        return (self.proc / "self" / "ns" / "pid").stat().st_ino

    def _numbers(self, pidfd: int | None, directory: int) -> list[int]:
        """Return the numbers of the peer, from the reader's PID namespace to the innermost (``NSpid``).

        ``fdinfo`` has them where there is a pidfd (``pidfd_show_fdinfo``). ``status`` lists the supplementary groups as well,
        and a peer that has 65,536 makes the kernel write 700 KB, 20 ms for each connection (measured).
        """
        content = ""
        if pidfd is not None:
            with contextlib.suppress(FileNotFoundError):  # *proc* is no procfs of the machine's
                content = _read(None, f"{self.proc}/self/fdinfo/{pidfd}")
        return [int(number) for number in _after("NSpid:", content or _read(directory, "status")).split()]

    @contextlib.contextmanager
    def _held(self, connection: socket.socket | trio.socket.SocketType, pid: int) -> Iterator[int | None]:
        """Hold the peer's pidfd where the kernel gives one; yield it, or ``None``.

        Before Linux 6.5 it is the pidfd of the process that has the number now. Whatever is read by that number while the process lives is
        about that process, and :meth:`identify` refuses a process that is younger than the connection.
        """
        pidfd = None
        try:
            try:
                pidfd = connection.getsockopt(socket.SOL_SOCKET, self.option)
            except OSError as error:
                if error.errno != errno.ENOPROTOOPT:
                    raise
                pidfd = _opened_pidfd(pid)
        except OSError as error:  # EINVAL or ESRCH, by version: the process was reaped
            raise _unless_short(error, f"cannot hold the peer, process {pid}") from error
        try:
            yield pidfd
        finally:
            if pidfd is not None:
                os.close(pidfd)

    @contextlib.contextmanager
    def _directory(self, pid: int) -> Iterator[int]:
        try:
            directory = os.open(self.proc / str(pid), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unless_short(error, f"cannot identify the peer: process {pid} has ended") from error
        try:
            yield directory
        finally:
            os.close(directory)


def _unless_short(error: OSError, sentence: str) -> PeerError:
    """Return the error with *sentence*, unless *error* is a shortage of this process's own resources, which is raised."""
    if error.errno in SHORT:
        raise error
    return PeerError(sentence)


def credentials(connection: socket.socket | trio.socket.SocketType) -> tuple[int, int]:
    """Return the PID, 0 if it is not visible, and the user of the process that connected."""
    pid, user_id, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, user_id


def _opened_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):  # a seccomp profile does not know the call
            return None
        raise


def _has_ended(pidfd: int | None) -> bool:
    # poll(2) on a pidfd: readable as soon as the process has ended, reaped or not.
    poll = select.poll()
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _read(directory: int | None, file: str) -> str:
    # Not as text: a process name may hold "\r", which would begin a line.
    return read_at_once(file, dir_fd=directory).decode(errors="surrogateescape")


def _unified(cgroup: str) -> str:
    # cgroups(7): the version 2 hierarchy is the line "0::PATH"; " (deleted)" follows the path of a removed group.
    return _after("0::", cgroup)


def _after(key: str, text: str) -> str:
    for line in text.split("\n"):  # the kernel escapes no other line end in a name
        if line.startswith(key):
            return line.removeprefix(key)
    raise ValueError(f"no line begins with {key!r}")
