"""Children of a command on a terminal, in a process that is not an init (see :mod:`runner.kernel.child_processes` for one that is).

They are waited for by pidfd, each by itself, and may share the terminal.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import trio

from runner.kernel.waiting import readable


class TerminalProcess:
    """A child with this process's standard streams, or in a session of its own with its output in a pipe."""

    def __init__(self, argv: list[str], *, output: int | None = None) -> None:
        """Start *argv*, with no signal blocked or ignored; *output* is the descriptor of a pipe."""
        apart: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = []
        if output is not None:
            apart.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
            apart += [(os.POSIX_SPAWN_DUP2, output, number) for number in (1, 2)]
        setsid = output is not None
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
        self.pid = os.posix_spawnp(
            argv[0], argv, os.environ, file_actions=apart, setsid=setsid, setsigmask=(), setsigdef=ignored
        )
        self.ended = trio.Event()
        self.status = 0
        """Its exit status, or 128 plus the number of the signal that killed it, as in a shell."""

    async def wait(self) -> None:
        """Wait for its end and take its status; to be called once."""
        fd = os.pidfd_open(self.pid)
        try:
            await readable(fd)
            ended = os.waitid(os.P_PIDFD, fd, os.WEXITED)  # noqa: ASYNC222 - it has ended: the pidfd is readable
        finally:
            os.close(fd)
        if ended is not None:
            self.status = ended.si_status + (0 if ended.si_code == os.CLD_EXITED else 128)
        self.ended.set()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal if it still lives; its pid cannot be reused before :meth:`wait` has taken its status."""
        if not self.ended.is_set():
            os.kill(self.pid, number)

    def init(self, proc: Path) -> int | None:
        """Return the pid of the child that is PID 1 of another PID namespace, as the procfs *proc* has it; ``None`` without one."""
        ours = (proc / "self" / "ns" / "pid").readlink()
        try:
            for child in (proc / str(self.pid) / "task" / str(self.pid) / "children").read_text().split():
                if (proc / child / "ns" / "pid").readlink() != ours:
                    return int(child)
        except OSError:  # it has ended meanwhile, or its child has
            pass
        return None
