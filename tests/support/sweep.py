"""Cancel a run at each of its steps in turn, and fail each of its operations in turn."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import trio


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope just before task step number *n*, counted from the time it was installed."""

    def __init__(self, scope: trio.CancelScope, n: int) -> None:
        self.scope = scope
        self.n = n
        self.steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        self.steps += 1
        if self.steps == self.n:
            self.scope.cancel()


class FaultInjector:
    """Makes the n-th system operation of this process fail, by an audit hook (PEP 578)."""

    OPERATIONS = frozenset(
        {
            "open",
            "os.listdir",
            "os.scandir",
            "os.mkdir",
            "os.rename",
            "os.replace",
            "subprocess.Popen",
            "socket.bind",
        }
        | {"socket.connect", "socket.sendto", "fcntl.ioctl", "os.sendfile", "os.truncate"}
    )

    def __init__(self) -> None:
        self.armed = False
        self.n = 0
        self.count = 0
        self.number = errno.EMFILE
        self.only = self.OPERATIONS
        sys.addaudithook(self.hook)

    def hook(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if self.armed and event in self.only:
            self.count += 1
            if self.count == self.n:
                raise OSError(self.number, os.strerror(self.number))

    def begin(self, n: int, number: int = errno.EMFILE, only: frozenset[str] = OPERATIONS) -> None:
        self.n, self.count, self.number, self.only, self.armed = n, 0, number, only, True

    def end(self) -> None:
        self.armed = False


FAULT_INJECTOR = FaultInjector()
