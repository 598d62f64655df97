"""Controllers forked from a process that has imported the program: an emulated CPU takes seconds to import it for each of them.

They begin where ``runner.controller.main`` does. That the program starts on its own show the tests of the image, of
containerd, and of systemd.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

PROJECT = Path(__file__).resolve().parents[2]
SERVER = """
import json, os, signal, socket, sys
from runner.controller.main import main
requests = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    data, fds, _, _ = socket.recv_fds(requests, 1 << 16, 2)
    if not data:
        sys.exit()
    if os.fork():
        for fd in fds:
            os.close(fd)
        continue
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before, arguments = json.loads(data)
    log, status = fds
    child = os.fork()
    if not child:
        os.dup2(log, 2)
        os.close(log)
        os.close(status)
        sys.argv = ["instance-cgroup-controller", *arguments]
        exec(before)
        sys.exit(main(arguments))
    os.close(log)
    os.write(status, b"%d " % child)
    os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)
"""
"""Its first child waits for the controller, which is its child, and reports pid and status."""


@functools.cache
def server() -> socket.socket:
    """Start the process that forks controllers, once; it ends with this one. Return its end of the connection."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, "-c", SERVER, str(its.fileno())]
    process = subprocess.Popen(argv, cwd=PROJECT, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
    its.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


COMMAND = (sys.executable, "-c", "import sys; from runner.controller.main import main; sys.exit(main())")
"""Starts a controller on its own; its options follow."""


class ForkedController:
    """A controller that was forked; its end of :class:`subprocess.Popen` as far as tests use it."""

    def __init__(self, arguments: Sequence[str], log: IO[bytes], *, before: str = "") -> None:
        """Start one with *arguments*; the code *before* runs in it first. What it says on standard error goes to *log*."""
        self._status, status = os.pipe()
        self.returncode: int | None = None
        socket.send_fds(server(), [json.dumps([before, list(arguments)]).encode()], [log.fileno(), status])
        os.close(status)
        self._said = b""
        while b" " not in self._said:
            more = os.read(self._status, 64)
            assert more, "the process that forks controllers has ended"
            self._said += more
        self.pid = int(self._said.split()[0])
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._pidfd = -1  # it has ended, and its status is on its way

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait()

    def poll(self) -> int | None:
        """Return its status if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its status, negative for a signal, when it has ended. Raises :class:`subprocess.TimeoutExpired`."""
        while self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("instance-cgroup-controller", timeout or 0)
            more = os.read(self._status, 64)
            self._said += more
            if not more:
                os.close(self._status)
                if self._pidfd >= 0:
                    os.close(self._pidfd)
                    self._pidfd = -1
                self.returncode = int(self._said.split()[1])
        return self.returncode

    def kill(self) -> None:
        """SIGKILL it if it has not ended."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM it if it has not ended."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal if it has not ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


Process = ForkedController | subprocess.Popen[bytes]
"""A controller that runs."""


def started(arguments: Sequence[str], log: IO[bytes], *, prefix: Sequence[str] = (), before: str = "") -> Process:
    """Start a controller: a forked one, in which the code *before* runs first, or one on its own by the command *prefix*."""
    if not prefix:
        return ForkedController(arguments, log, before=before)
    assert not before, "only a forked controller runs other code first"
    return subprocess.Popen([*prefix, *COMMAND, *arguments], cwd=PROJECT, stdin=subprocess.DEVNULL, stderr=log)
