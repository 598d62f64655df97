"""Child processes: started here, reaped here, and nowhere else.

An init process must reap every orphan of its PID namespace, and yet hand the status of its own children to whoever waits
for them. ``waitpid(-1)`` beside a child somebody waits for steals that status (it then reads as 0). So there is exactly one
waiter, :meth:`Processes._reap`, and starting a child and entering it in the table of owned ones happen without an await
in between: the waiter cannot run there.

``trio.run_process`` is not used because it forks from a worker thread: its status is lost to the waiter, and
``PR_SET_PDEATHSIG`` means the death of the *thread* that forked.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import attrs
import trio

from runner.errors import HostError
from runner.kernel.lines import LINES_PER_STEP, LineFramer

log = logging.getLogger(__name__)

REAPED_AT_ONCE = 256
"""Zombies taken between two looks at everything else: a storm of orphans must not keep a SIGTERM waiting."""

KILLED_WITHIN = 5.0
"""Seconds a killed process may take to go; a process in uninterruptible sleep takes longer, and is reported."""

PIPE_SIZE = 1 << 16
"""Bytes a pipe holds (pipe(7)), and of a line of a child's output."""

LINES_PER_SECOND = 1000
"""Lines of one child's output that are logged in a second; the others are counted, and the count is logged."""

_PR_SET_CHILD_SUBREAPER = 36

LAST_WORDS = 20
"""Lines of a child's output kept for the sentence that reports its death."""

_ENTER = 'echo 0 >&0 && exec "$@" </dev/null'
"""Enter the cgroup whose ``cgroup.procs`` is open as standard input, then become the program.

Python has no door to ``CLONE_INTO_CGROUP``. The write goes through the inherited descriptor, because opening the file
again would ask for the rights of whoever the child runs as."""


def stop_bound(patience: float) -> float:
    """Return the seconds within which :meth:`Processes.stop` has ended: for the shielded scope around it."""
    return patience + KILLED_WITHIN + 1


@attrs.frozen
class Command:
    """What is to be started: *fds* keep their numbers in the child; without *uid* it runs as we do."""

    role: str
    argv: tuple[str, ...]
    fds: tuple[int, ...] = ()
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] = ()
    entering: int | None = None
    """A descriptor of the ``cgroup.procs`` it is born into, by way of a shell that becomes it; ``None``: where we are."""
    level: int = logging.INFO
    """At which its output is logged."""


class Process:
    """A child of ours that was started, from its birth until its status was read."""

    def __init__(self, command: Command, popen: subprocess.Popen[bytes], output: int) -> None:
        self.role = command.role
        self.pid = popen.pid
        self.last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self.returncode: int | None = None
        """Exit status, or the negative number of the signal that ended it; ``None`` while it lives."""
        self._popen = popen
        self._output = output
        self._level = command.level
        self._lines = LineFramer(PIPE_SIZE, split=True)
        self._allowed = 0
        """Lines that may still be logged before *_allowed_until*."""
        self._allowed_until = -math.inf
        self._dropped = 0
        self._ended = trio.Event()

    def __repr__(self) -> str:
        return f"<{self.role} pid={self.pid} returncode={self.returncode}>"

    async def wait(self) -> int:
        """Return its status, as soon as there is one."""
        await self._ended.wait()
        assert self.returncode is not None  # noqa: S101 - set before the event
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it if it still lives; its pid cannot be somebody else's before we have reaped it."""
        if self.returncode is not None:
            return
        try:
            os.kill(self.pid, number)
        except PermissionError as error:  # it runs as somebody else, and we lack CAP_KILL
            raise HostError(f"cannot send {signal_name(number)} to {self.role} (pid {self.pid})") from error

    def how_it_ended(self) -> str:
        """Return ``exited with status 1`` or ``was killed by SIGKILL``, and its last line if it said anything."""
        if self.returncode is None:
            return "is running"
        killed = self.returncode < 0
        ended = f"was killed by {signal_name(-self.returncode)}" if killed else f"exited with status {self.returncode}"
        return f"{ended}, saying {self.last_words[-1]!r}" if self.last_words else ended

    async def _log_output(self) -> None:
        """Log its output until it ends; may be cancelled at any moment.

        A step logs at most :data:`LINES_PER_STEP` lines. It reads on while it drops lines, because a child that waits for
        room in its pipe would stop its work: QEMU writes there from its main loop.
        """
        with contextlib.suppress(trio.ClosedResourceError):
            # Asked every time, because its end closes the output, whose number may be another file's by now.
            while self.returncode is None:
                if self._lines.has_line:
                    await trio.lowlevel.checkpoint()
                elif not await self._receive_output():
                    break
                if self.returncode is None:
                    self._log_step()

    async def _receive_output(self) -> bool:
        """Wait for output and read some; return ``False`` when there will be none."""
        with trio.move_on_at(self._allowed_until if self._dropped else math.inf):  # then the count is to be logged
            await trio.lowlevel.wait_readable(self._output)
        return self.returncode is None and self._read_output()

    def _read_output(self) -> bool:
        try:
            data = os.read(self._output, PIPE_SIZE)
        except BlockingIOError:
            return True
        self._lines.feed(data)
        return bool(data)

    def _log_step(self) -> None:
        now = trio.current_time()
        if now >= self._allowed_until:
            self._log_dropped()
            self._allowed, self._allowed_until = LINES_PER_SECOND, now + 1
        for line in self._lines.step(min(LINES_PER_STEP, self._allowed)):
            self._allowed -= 1
            self._log_line(line)
        if not self._allowed:
            dropped, last = self._lines.drop_lines(keep=LAST_WORDS)
            self._dropped += dropped
            self.last_words.extend(filter(None, map(_words, last)))

    def _log_line(self, line: bytes) -> None:
        if words := _words(line):
            self.last_words.append(words)
            log.log(self._level, "%s: %s", self.role, words)

    def _log_dropped(self) -> None:
        if self._dropped:
            log.log(self._level, "%s: %d lines of its output were dropped", self.role, self._dropped)
            self._dropped = 0

    def _end(self, returncode: int) -> None:
        """Take its status, log the last of its output and close the pipe, which a grandchild may hold open for ever."""
        self.returncode = self._popen.returncode = returncode
        self._read_output()  # as much as a pipe holds; more would be a grandchild's, which may never end
        number, last = self._lines.drop_lines(keep=LINES_PER_STEP)
        self._dropped += number - len(last)
        self._log_dropped()
        for line in (*last, self._lines.take_rest()):
            self._log_line(line)
        trio.lowlevel.notify_closing(self._output)
        os.close(self._output)
        self._ended.set()


def _words(line: bytes) -> str:
    return line.decode(errors="replace").strip()


@attrs.define
class Processes:
    """The children of this process; made by :func:`open_processes`."""

    _nursery: trio.Nursery
    _prefix: tuple[str, ...]
    _environment: Mapping[str, str]
    _owned: dict[int, Process] = attrs.field(factory=dict)
    orphans: int = 0
    """How many processes that others left behind were reaped."""

    def __iter__(self) -> Iterator[Process]:
        """Iterate over the children that live, in the order of their births."""
        return iter(tuple(self._owned.values()))

    def spawn(self, command: Command) -> Process:
        """Start *command* and own it: whoever calls this stops it.

        The child begins with an empty signal mask (ours is empty while children are started), default dispositions, a
        session of its own, ``/`` as working directory, and of our descriptors only *fds*.

        Raises :exc:`~runner.errors.HostError` when it cannot be started.
        """
        log.debug("start role=%s argv=%s", command.role, shlex.join(command.argv))
        wrapper = () if command.entering is None else ("/bin/sh", "-c", _ENTER, command.role)
        try:
            with _pipe() as (output, theirs):
                popen = subprocess.Popen(
                    (*wrapper, *self._prefix, *command.argv),
                    stdin=subprocess.DEVNULL if command.entering is None else command.entering,
                    stdout=theirs,
                    stderr=theirs,
                    pass_fds=command.fds,
                    user=command.uid,
                    group=command.gid,
                    extra_groups=None if command.uid is None else command.groups,
                    start_new_session=True,
                    cwd="/",
                    env=self._environment,
                )
                process = self._owned[popen.pid] = Process(command, popen, output)
        except OSError as error:
            raise HostError(f"cannot start {command.role} ({command.argv[0]!r})") from error
        self._nursery.start_soon(process._log_output)  # noqa: SLF001 - a process and its table are one thing
        return process

    @asynccontextmanager
    async def daemon(self, command: Command, patience: float) -> AsyncIterator[Process]:
        """Hold a running child; at the end SIGTERM, *patience* seconds, SIGKILL."""
        process = self.spawn(command)
        try:
            yield process
        finally:
            with trio.move_on_after(stop_bound(patience), shield=True):
                await self.stop(process, patience)

    async def stop(self, process: Process, patience: float) -> None:
        """End *process*: SIGTERM, *patience* seconds, SIGKILL; returns when its status was read.

        Bounds itself, because it is a release (see :func:`stop_bound`).
        Raises :exc:`~runner.errors.HostError` when it does not even die of SIGKILL.
        """
        if process.returncode is None:
            with contextlib.suppress(HostError):  # SIGKILL is tried in any case, and says what is wrong
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)  # a stopped process sees no SIGTERM
            with trio.move_on_after(patience):
                await process.wait()
        await self.kill(process)

    async def kill(self, process: Process) -> None:
        """SIGKILL *process* if it still lives; see :meth:`stop`."""
        if process.returncode is not None:
            return
        process.send_signal(signal.SIGKILL)
        with trio.move_on_after(KILLED_WITHIN):
            await process.wait()
        if process.returncode is None:
            raise HostError(
                f"cannot end {process.role} (pid {process.pid}): it survives SIGKILL, so it hangs in the kernel"
            )

    async def _reap(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        with scope:
            while True:
                while self._reap_some():
                    await trio.lowlevel.checkpoint()
                await anext(signals)

    def _reap_some(self) -> bool:
        """Take up to :data:`REAPED_AT_ONCE` zombies; tell whether there may be more."""
        for _ in range(REAPED_AT_ONCE):
            try:
                status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return False
            if status is None:
                return False
            process = self._owned.pop(status.si_pid, None)
            if process is None:
                self.orphans += 1
            else:
                process._end(status.si_status if status.si_code == os.CLD_EXITED else -status.si_status)  # noqa: SLF001
        return True


@asynccontextmanager
async def open_processes(prefix: tuple[str, ...] = ()) -> AsyncIterator[Processes]:
    """Reap for as long as the block runs; *prefix* goes before every argv.

    Children are to be stopped inside the block: what still lives at its end is left alone.
    """
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}
    # Releases wait for statuses, so the waiter must outlive a cancellation from outside: it ends with the block alone. It
    # is not started with nursery.start(), whose own cancellation would wait for a shielded task without end.
    reaping = trio.CancelScope(shield=True)
    with trio.open_signal_receiver(signal.SIGCHLD) as signals:
        async with trio.open_nursery() as nursery:
            processes = Processes(nursery, prefix, environment)
            nursery.start_soon(processes._reap, signals, reaping)  # noqa: SLF001 - made here, for here
            try:
                yield processes
            finally:
                reaping.cancel()
                nursery.cancel_scope.cancel()


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Open a pipe: the reading end, which the caller keeps if the block succeeds, and the writing end, closed after it."""
    ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.set_blocking(theirs, True)
        yield ours, theirs
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def signal_name(number: int) -> str:
    """Return ``SIGTERM`` for 15; real-time signals by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def become_subreaper() -> None:
    """Let orphans below this process become its children although it is not PID 1 (``PR_SET_CHILD_SUBREAPER``, prctl(2))."""
    import ctypes  # here, because PID 1 needs neither this nor the milliseconds it costs

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise HostError(f"cannot become a subreaper: {os.strerror(ctypes.get_errno())}")


def dying_with_us() -> tuple[str, ...]:
    """Return what to put before an argv so that the child is killed when we are (``PR_SET_PDEATHSIG``).

    PID 1 does not need it: the kernel ends a PID namespace with its init. The signal is sent when the *thread* that
    forked ends, which is our only one.
    """
    return ("setpriv", "--pdeathsig", "KILL", "--")
