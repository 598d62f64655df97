"""A process that keeps a capability which the controller gives up, and uses it for one purpose at the controller's request.

The controller reads data from pods, this process does not. It is forked before any such data is read, and serves only the other end of a
socket pair: one line after another, each validated as untrusted input. It ends at once with the controller, as a thread of the controller
would.

It is never restarted, because the controller no longer has the capability. The controller continues without it, except without the one that
identifies peers (:mod:`runner.controller.serve.namespaces`); ``/healthz`` and ``/readyz`` fail, and the kubelet starts the controller
again.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NoReturn, Self

from runner.base.errors import HostError, doing
from runner.base.values import frozen
from runner.kernel.privileges import end_with_parent, keep_capabilities
from runner.kernel.procfs import Procfs

ANSWERS_WITHIN = 30.0
"""Seconds. For a partition the kernel rebuilds its scheduling domains, which takes 0.1 s on an emulated machine, and the settings
of 2000 interrupts take 0.5 s (measured)."""
_READY = b"ready\n"
_LONGEST = 1 << 23
"""Bytes of the longest accepted line: 300 for an instance, 5600 for one that names as many devices as it may."""


_OURS: list[socket.socket] = []
"""The controller's ends of all connections: a process that is forked later closes those made before."""


class EndedError(HostError):
    """The process has ended. A timeout counts as its end: a late answer would be taken for that to the next line."""


@frozen
class PrivilegedProcess:
    """The controller's end of the connection to the process."""

    title: ClassVar[str]
    comm: ClassVar[str]
    """Its name in ``/proc``, at most 15 characters."""
    keeps: ClassVar[tuple[int, ...]]
    """The capabilities that it keeps."""
    needs_them: ClassVar[bool] = False
    """Whether it is useless without them."""
    connection: socket.socket
    started: bool = True
    """Whether it had the capabilities it needs; if not, it never becomes available."""

    @classmethod
    def start(cls, procfs: Path, obey: Callable[[bytes], bytes]) -> Self:
        """Fork a process that answers each line by *obey*; no thread may have been started yet. Raises :class:`HostError`."""
        gc.freeze()  # exempt existing objects from garbage collection in both processes, which would copy pages
        with doing(f"start the {cls.title}"):
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            parent, pid = os.getpid(), os.fork()  # noqa: TID251  # before trio runs, which starts all other children
        if pid == 0:
            for each in (*_OURS, ours):
                each.close()
            cls._serve(its, parent, procfs, obey)
        its.close()
        _OURS.append(ours)
        ours.settimeout(ANSWERS_WITHIN)
        with contextlib.suppress(OSError):
            if ours.recv(len(_READY)) == _READY:
                return cls(ours)
        with contextlib.suppress(OSError):  # a late message would be taken for its answer to the first line
            ours.shutdown(socket.SHUT_RDWR)
        return cls(ours, started=False)

    @classmethod
    def _serve(cls, connection: socket.socket, parent: int, procfs: Path, obey: Callable[[bytes], bytes]) -> NoReturn:
        try:
            end_with_parent(parent)
            with contextlib.suppress(OSError):
                (procfs / "self" / "comm").write_text(cls.comm)
            # Signals to the controller's process group or container also reach this process, which has to end only with the controller.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            keep_capabilities(cls.keeps)
            if not cls.needs_them or Procfs(procfs).capabilities().issuperset(cls.keeps):
                connection.sendall(_READY)
                serve(connection, obey)
        finally:  # silently: the log may be a pipe without a reader, and the controller reports the missing process
            os._exit(0)

    @property
    def lost(self) -> bool:
        """Return whether the process has ended since it started."""
        return self.started and self._ended()

    @property
    def missing(self) -> str:
        """Return the reason why the process is not available; empty if it is."""
        return str(self.ended_error()) if self._ended() else ""

    def _ended(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, 0)  # only for the hang-up: an answer may be for another thread
        return bool(poll.poll(0))

    def ask(self, line: bytes) -> bytes:
        """Send *line* and wait for the answer to it. Raises :class:`EndedError`, and :class:`HostError` for a line that is too long."""
        if len(line) >= _LONGEST:
            raise HostError(f"a line for the {self.title} has {len(line)} bytes, more than {_LONGEST - 1}")
        answer = bytearray()
        try:
            self.connection.sendall(line + b"\n")
            while not answer.endswith(b"\n"):
                if not (data := self.connection.recv(1 << 16)):
                    break
                answer += data
        except OSError as error:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            raise self.ended_error() from error
        if not answer.endswith(b"\n"):
            raise self.ended_error()
        return bytes(answer[:-1])

    def ended_error(self) -> EndedError:
        """Return the error for the end of the process."""
        return EndedError(f"the controller's {self.title} has ended", remedy="restart the controller")


def serve(connection: socket.socket, obey: Callable[[bytes], bytes]) -> None:
    """Answer each line received by *connection* until the peer closes it, or sends a line that is too long."""
    with connection.makefile("rb") as lines:
        while (line := lines.readline(_LONGEST)).endswith(b"\n"):
            connection.sendall(obey(line[:-1]) + b"\n")
