"""A first guest: ``run`` as PID 1 of fresh namespaces, as a container runtime would start it, and ``console`` on this terminal.

Whatever it makes ends with its namespaces: the state directory, the spec and the share are in a tmpfs of its mount namespace,
and the kernel kills its processes when this one ends, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import termios
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from runner.base.errors import RefusedError, Status
from runner.base.tasks import first_of
from runner.cli.outcomes import KILLED, explain_status
from runner.facts.packages import install
from runner.facts.roots import Roots
from runner.kernel.files import read_os_release
from runner.kernel.privileges import CAP_SYS_ADMIN
from runner.kernel.processes import dying_with_us
from runner.kernel.procfs import Procfs
from runner.kernel.terminal_processes import TerminalProcess

ASK_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end the guest; a terminal that is closed sends the last one."""

PROGRAMS = ("setpriv", "unshare", "nsenter")
"""Of the package util-linux."""

NAMESPACES = ("unshare", "--mount", "--net")

PREPARE = (
    'mount -t tmpfs -o mode=755 instance-runner-try /run && mkdir -m 1777 /run/share && printf %s "$0" >/run/spec.json && '
    'exec "$@"'
)
"""A shell's script that runs before there is a PID 1: its first word is the spec, the others are the command that it becomes.

A shell unblocks all signals when it has waited for a child (dash's ``waitproc()``), and the kernel drops a signal for a PID 1
that neither blocks nor handles it.
"""

PID_1 = (
    *("env", "--block-signal=TERM,INT,HUP"),
    *("unshare", "--fork", "--kill-child", "--pid", "--mount-proc"),
)
"""Has the command behind it be PID 1, with signals that are blocked from its first instruction on."""

RUNS = b" the guest runs"
"""The end of the line of the log by which ``run`` reports that the guest has begun to run."""

HELD_LINES = 200
"""Lines of the log that are held back while the guest has the terminal; earlier ones are dropped."""

NO_NAMESPACES = 125
"""The status where ``unshare`` failed; that of docker and podman where they failed themselves."""

PREPARED_AGAIN = 0.01
"""Seconds until it is looked again whether there is a PID 1; its preparation takes some ten milliseconds."""

CONSOLE_ENDS_WITHIN = 5.0
"""Seconds that ``console`` may take to end after the instance has."""


def run_first_guest(guest: Path) -> int:
    """Boot the guest in the directory *guest*, attach this terminal to its shell, and return the exit status of ``run``.

    Raises :exc:`~runner.base.errors.RefusedError` before anything is touched.
    """
    _refuse_what_cannot_work(guest)
    program = os.path.abspath(sys.argv[0])  # noqa: PTH100 - a link stays what it is
    return trio.run(_run, program, guest)


def _refuse_what_cannot_work(guest: Path) -> None:
    if os.geteuid() != 0 or CAP_SYS_ADMIN not in Procfs().capabilities():
        raise RefusedError(
            "cannot make namespaces: this takes root and the capability SYS_ADMIN",
            remedy="use sudo, or `docker run -it --privileged`",
        )
    for name in PROGRAMS:
        if shutil.which(name) is None:
            raise RefusedError(f"cannot find the program {name!r} in PATH", remedy=install(name, read_os_release()))
    for name in ("vmlinuz", "initrd"):
        if not (guest / name).is_file():
            raise RefusedError(
                f"cannot boot the demo guest: there is no {str(guest / name)!r}",
                remedy="examples/quickstart/run makes it, or examples/quickstart/make-guest DIR for --guest DIR",
            )


def first_spec(guest: Path, size: os.terminal_size | None) -> Mapping[str, object]:
    """Return the spec of the instance; *size* is that of its terminal, ``None`` if it has none, and of zeros if it is unknown."""
    cmdline = "console=ttyS0 quiet no_timer_check guest.then=shell"
    if size is not None and all(size):
        cmdline += f" guest.rows={size.lines} guest.columns={size.columns}"
    return {
        "instance": {"name": "try"},
        "cpu": {"count": 1, "accel": "tried"},
        "memory": {"size": "256MiB"},
        "boot": {"kernel": str(guest / "vmlinuz"), "initrd": str(guest / "initrd"), "cmdline": cmdline},
        "network": [{"mode": "private"}],
        "share": [{"tag": "share", "path": "/run/share"}],
        "console": {"stdout": False},
        "shutdown": {"grace": 8, "poweroff_status": 0},
    }


@attrs.define
class InstanceLog:
    """The log of ``run``: passed on to standard error, but held back while the guest has the terminal."""

    guest_runs: trio.Event = attrs.field(factory=trio.Event)
    last: bytes = b""
    """Its last line."""
    _held: deque[bytes] | None = None

    async def follow(self, fd: int) -> None:
        """Take in the log from the pipe *fd* until its end."""
        rest = b""
        try:
            while True:
                await trio.lowlevel.wait_readable(fd)
                data = os.read(fd, 1 << 16)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take_in(line)
                if not data:
                    break
        finally:
            os.close(fd)
        if rest:
            self._take_in(rest)

    def hold(self) -> None:
        """Hold the lines to come back."""
        self._held = deque(maxlen=HELD_LINES)

    def release(self) -> None:
        """Show the lines that were held back, and those to come."""
        held, self._held = self._held or (), None
        for line in held:
            _show(line)

    def _take_in(self, line: bytes) -> None:
        if self._held is None:
            _show(line)
        else:
            self._held.append(line)
        if line:
            self.last = line
        if RUNS in line:
            self.guest_runs.set()


def _show(line: bytes) -> None:
    with contextlib.suppress(OSError):  # the terminal was closed; the guest is ended all the same
        os.write(2, line + b"\n")


def _notify(message: str) -> None:
    _show(f"[{message}]".encode())


async def _run(program: str, guest: Path) -> int:
    size = os.get_terminal_size(0) if os.isatty(0) else None
    spec = json.dumps(first_spec(guest, size))
    prepared = ("sh", "-c", PREPARE, spec, *PID_1, program, "run", "/run/spec.json")
    with trio.open_signal_receiver(*ASK_TO_STOP) as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_STOP)  # the image's entry point has blocked them
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            instance = TerminalProcess([*dying_with_us(), *NAMESPACES, *prepared], output=writing)
        finally:
            os.close(writing)
        asked, log = trio.Event(), InstanceLog()
        async with trio.open_nursery() as nursery, trio.open_nursery() as observers:
            nursery.start_soon(instance.wait)
            nursery.start_soon(log.follow, reading)
            observers.start_soon(_obey, signals, asked)
            await first_of(log.guest_runs.wait, instance.ended.wait, asked.wait)
            if log.guest_runs.is_set() and not instance.ended.is_set() and not asked.is_set():
                await _attached(program, instance, log, asked)
            await _stopped(instance)
            observers.cancel_scope.cancel()
    status = _status_of_run(instance.status, log)
    if status == Status.STOPPED:
        _notify("the guest has ended, and nothing of it is left")
    for line in explain_status(status):
        _show(line.encode())
    return status


def _status_of_run(status: int, log: InstanceLog) -> int:
    """Return the status of ``run`` where *status* is that of ``unshare``, which waits for it and speaks last in *log*.

    ``unshare`` ends with 1 where it cannot make the namespaces, which is no fault of ours, and in util-linux 2.38 (Debian 12)
    where its child is killed by SIGKILL: it would die by the same signal, and first fails to reset that one's disposition.
    """
    if status != os.EX_OK and log.last.startswith(b"unshare: "):
        return KILLED if log.guest_runs.is_set() else NO_NAMESPACES
    return status


async def _obey(signals: AsyncIterator[int], asked: trio.Event) -> None:
    async for _ in signals:
        asked.set()


async def _attached(program: str, instance: TerminalProcess, log: InstanceLog, asked: trio.Event) -> None:
    """Have this terminal be the guest's console until it is detached, the guest has ended, or an end is *asked* for."""
    pid1 = instance.init(Roots().proc)
    if pid1 is None:  # it has ended since
        return
    with contextlib.suppress(ProcessLookupError):  # the same
        os.sched_setaffinity(0, os.sched_getaffinity(pid1))  # this terminal stays off the vCPU's CPU, too
    enter = ("nsenter", "-t", str(pid1), "-p", "-m")
    look = _look(program, enter)
    _notify("to leave: Ctrl-], or `poweroff` in the guest's shell; both end the guest and everything around it")
    _notify(f"to look, as root in another terminal: {look} ctl status; {look} inspect")
    log.hold()
    with _restored(0):
        console = TerminalProcess([*enter, program, "console"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(console.wait)
            await first_of(console.ended.wait, instance.ended.wait, asked.wait)
            if not console.ended.is_set():  # it ends with the instance
                await _stopped(instance)
                with trio.move_on_after(CONSOLE_ENDS_WITHIN):
                    await console.ended.wait()
            console.send_signal(signal.SIGKILL)
    log.release()


@contextlib.contextmanager
def _restored(terminal: int) -> Iterator[None]:
    """Restore the settings of *terminal* afterwards: ``console`` may be killed, with the PID namespace that it is in."""
    if not os.isatty(terminal):
        yield
        return
    before = termios.tcgetattr(terminal)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # it was closed
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _look(program: str, enter: Sequence[str]) -> str:
    """Return the beginning of the commands that look at the instance, as they are typed in another terminal."""
    found = shutil.which(Path(program).name)
    short = found is not None and Path(found).samefile(program)
    outside = ("docker", "exec", os.uname().nodename) if os.getpid() == 1 else ()
    return " ".join((*outside, *enter, Path(program).name if short else program))


async def _stopped(instance: TerminalProcess) -> None:
    """End the instance as Kubernetes does, and wait for its end, which its own grace bounds.

    Before there is a PID 1 that could be asked, it is waited for: ``unshare`` may be starting it at this moment, and one that
    is killed between fork(2) and prctl(2) leaves its child behind.
    """
    while not instance.ended.is_set():
        if (pid1 := instance.init(Roots().proc)) is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid1, signal.SIGTERM)
            await instance.ended.wait()
        with trio.move_on_after(PREPARED_AGAIN):
            await instance.ended.wait()
