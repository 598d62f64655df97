"""Child processes: started and reaped here, and nowhere else.

An init process must reap every orphan of its PID namespace, and yet pass the status of its own children to the tasks that wait for them. A
``waitpid(-1)`` concurrent with a wait for one child steals that status (it then reads as 0). So exactly one function waits,
:meth:`Processes._reap_some`, and starting a child and entering it in the table of owned ones happen without an await in between: it cannot
run in between.

``trio.run_process`` is not used because it forks from a worker thread: its status is lost to the waiter, and
``PR_SET_PDEATHSIG`` means the death of the *thread* that forked.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import signal
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import attrs
import trio

from runner.base.errors import HostError, doing
from runner.base.events import InstanceEvent
from runner.base.values import Fd, define, frozen
from runner.kernel.leases import read_at_once
from runner.kernel.limits import OutOfMemory, limit_in_words, limit_of_signal, limited, no_kills
from runner.kernel.line_reader import LINES_PER_STEP, LineFramer
from runner.kernel.signals import received

log = logging.getLogger(__name__)

REAPED_AT_ONCE = 256
"""Zombies reaped before other tasks get their turn: a storm of orphans must not delay a SIGTERM."""

KILLED_WITHIN = 5.0
"""Seconds a killed process may take to end; one in uninterruptible sleep takes longer, and is reported."""

ASKED_EVERY = 1.0
"""Seconds after which a release that waits for a child asks the kernel itself: the signal that reports its end may be lost."""

LOOKED_EVERY = 0.1
"""Seconds between two looks whether a child has ended, where no event loop runs."""

PIPE_SIZE = 1 << 16
"""Bytes a pipe holds (pipe(7))."""
LONGEST_LINE = 4 << 10
"""Bytes of a line of a child's output; a longer one is several. The last lines become part of error messages and are searched for known
limits, and a QEMU under the guest's control may print anything."""

LINES_PER_SECOND = 1000
"""Lines of one child's output that are logged in a second; the others are counted, and the count is logged."""

_PR_SET_CHILD_SUBREAPER = 36

LAST_LINES = 20
"""Lines of a child's output that are kept for the message that reports its end."""

_ENTER = 'echo 0 >&0 && exec "$@" </dev/null'
"""Enter the cgroup whose ``cgroup.procs`` is open as standard input, then become the program.

Python has no binding of ``CLONE_INTO_CGROUP``. The write goes through the inherited descriptor, because opening the file
again would need rights that the child's user may not have."""


def stop_bound(within: float) -> float:
    """Return the seconds within which :meth:`Processes.stop` returns, for the shielded scope around it."""
    return within + KILLED_WITHIN + 1


@frozen
class Command:
    """A program to start: *fds* keep their numbers in the child; without *user_id* it runs as this process's user."""

    role: str
    argv: tuple[str, ...]
    fds: tuple[int, ...] = ()
    user_id: int | None = None
    group_id: int | None = None
    groups: tuple[int, ...] = ()
    entering: int | None = None
    """A descriptor of the ``cgroup.procs`` of the cgroup to start it in, by a shell that execs it; ``None``: this process's cgroup."""
    level: int = logging.INFO
    """The level at which its output is logged."""
    up: str = ""
    """The line that it prints once it serves; empty if it prints none."""
    on_line: Callable[[str], None] | None = None
    """Called with each line of its output that is logged."""

    def of_user(self, user_id: int, group_id: int, groups: tuple[int, ...]) -> Command:
        """Return the command for this user, without capabilities (capabilities(7)); for root, the command unchanged."""
        return self if user_id == 0 else attrs.evolve(self, user_id=user_id, group_id=group_id, groups=groups)


class ProcessRecord(NamedTuple):
    """A child, which stays the child of this process through exec."""

    role: str
    pid: int
    output: Fd
    """Negative once it has ended."""
    level: int
    """The level at which its output is logged."""
    unfinished: bytes = b""
    """Output that was read and is not logged yet."""
    last_lines: tuple[str, ...] = ()
    ended: int | None = None
    """Its exit status, if it was read already."""


class Process:
    """A child of this process, from its start until its status has been read."""

    def __init__(
        self, role: str, pid: int, output: int, level: int, popen: subprocess.Popen[bytes] | None = None, up: str = ""
    ) -> None:
        self.role = role
        self.pid = pid
        self.user_id = 0
        self.out_of_memory = ""
        """The memory that was short, if the kernel has killed the process for lack of it."""
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.returncode: int | None = None
        """Exit status, or the negative number of the signal that ended it; ``None`` while it lives."""
        self._popen = popen
        self._output = output
        self._level = level
        self._lines = LineFramer(LONGEST_LINE, split=True)
        self._allowed = 0
        """Number of lines that may still be logged before *_allowed_until*."""
        self._allowed_until = -math.inf
        self._dropped = 0
        self._ended = trio.Event()
        self.on_line: Callable[[str], None] | None = None
        """Called with each line of its output (:attr:`Command.on_line`)."""
        self._up = up
        self._up_or_ended = trio.Event()

    def __repr__(self) -> str:
        return f"<{self.role} pid={self.pid} returncode={self.returncode}>"

    async def wait(self) -> int:
        """Wait for its end and return its status."""
        await self._ended.wait()
        assert self.returncode is not None  # noqa: S101 - set before the event
        return self.returncode

    async def serves(self) -> bool:
        """Wait until it has printed the line :attr:`Command.up`, or has ended; return whether it lives."""
        await self._up_or_ended.wait()
        return self.returncode is None

    def send_signal(self, number: int) -> None:
        """Send it a signal if it still lives; its pid cannot be reused before it is reaped here."""
        if self.returncode is not None:
            return
        try:
            os.kill(self.pid, number)
        except PermissionError as error:  # it runs as another user, and CAP_KILL is missing
            raise HostError(f"cannot send {signal_name(number)} to {self.role} (pid {self.pid})") from error

    def record(self) -> ProcessRecord:
        """Return the state that the next program needs to continue with it."""
        lines = tuple(self.last_lines)
        if self.returncode is not None:
            return ProcessRecord(self.role, self.pid, -1, self._level, b"", lines, self.returncode)
        return ProcessRecord(self.role, self.pid, self._output, self._level, self._lines.held, lines)

    def how_it_ended(self) -> str:
        """Return ``exited with status 1`` or ``was killed by SIGKILL``, with the last line of its output if there is one."""
        if self.returncode is None:
            return "is running"
        if self.out_of_memory:
            return f"was killed by the kernel: {self.out_of_memory}"
        killed = self.returncode < 0
        ended = f"was killed by {signal_name(-self.returncode)}" if killed else f"exited with status {self.returncode}"
        return f"{ended}, saying {self.last_lines[-1]!r}" if self.last_lines else ended

    def why_it_ended(self) -> str:
        """Return :meth:`how_it_ended`, and the limit that was the cause, if one is known."""
        return "; ".join(filter(None, (self.how_it_ended(), self.limit())))

    def limit(self) -> str:
        """Return the limit of the machine, the container or its user that ended it, and the remedy; empty if none is known."""
        by_signal = limit_of_signal(signal_name(-(self.returncode or 0)))
        return by_signal or next(
            filter(None, (limit_in_words(each, self.user_id) for each in reversed(self.last_lines))), ""
        )

    def continue_from(self, record: ProcessRecord) -> None:
        """Continue with the output and the exit status that the previous program has read."""
        self._lines.feed(record.unfinished)
        self.last_lines.extend(record.last_lines)
        self.returncode = record.ended
        if record.ended is not None:
            self._ended.set()

    async def _log_output(self) -> None:
        """Log its output until it ends; may be cancelled at any moment.

        A step logs at most :data:`LINES_PER_STEP` lines. It keeps reading while it drops lines, because a child with a full pipe stops
        working: QEMU writes to it from its main loop.
        """
        with contextlib.suppress(trio.ClosedResourceError):
            # Checked every time: the end of the process closes the output, and another file may have the descriptor's number now.
            while self.returncode is None:
                if self._lines.has_line:
                    await trio.lowlevel.checkpoint()
                elif not await self._receive_output():
                    break
                if self.returncode is None:
                    self._log_step()

    async def _receive_output(self) -> bool:
        """Wait for output and read some of it; return ``False`` when there will be no more."""
        with trio.move_on_at(self._allowed_until if self._dropped else math.inf):  # then the count is due
            try:
                await trio.lowlevel.wait_readable(self._output)
            except OSError as error:  # continue later, because the child may wait for room in its pipe
                log.warning(InstanceEvent.CHILD_OUTPUT_DELAYED, self.role, error.strerror)
                await trio.sleep(ASKED_EVERY)
        return self.returncode is None and self._read_output()

    def _read_output(self) -> bool:
        try:
            data = os.read(self._output, PIPE_SIZE)
        except BlockingIOError:
            return True
        except OSError as error:
            log.warning(InstanceEvent.CHILD_OUTPUT_FAILED, self.role, error.strerror)
            return False
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
            dropped, last = self._lines.drop_lines(keep=LAST_LINES)
            self._dropped += dropped
            self.last_lines.extend(filter(None, map(_text, last)))

    def _log_line(self, line: bytes) -> None:
        if text := _text(line):
            log.log(self._level, InstanceEvent.CHILD_OUTPUT, self.role, text)
            if self.on_line is not None:
                self.on_line(text)
            if self._up and self._up in text:
                self._up_or_ended.set()  # so no output can give the reason of its end
            else:
                self.last_lines.append(text)

    def _log_dropped(self) -> None:
        if self._dropped:
            log.log(self._level, InstanceEvent.CHILD_OUTPUT_DROPPED, self.role, self._dropped)
            self._dropped = 0

    def _end(self, returncode: int) -> None:
        """Take the exit status, log the last output and close the pipe, which a grandchild may keep open for ever."""
        self.returncode = returncode
        if self._popen is not None:
            self._popen.returncode = returncode
        self._read_output()  # at most the content of a full pipe; more would come from a grandchild, which may never end
        number, last = self._lines.drop_lines(keep=LINES_PER_STEP)
        self._dropped += number - len(last)
        self._log_dropped()
        for line in (*last, self._lines.take_rest()):
            self._log_line(line)
        trio.lowlevel.notify_closing(self._output)
        os.close(self._output)
        self._ended.set()
        self._up_or_ended.set()


def alive_after(children: Iterable[Process], within: float) -> list[Process]:
    """Wait up to *within* seconds for the end of all *children*, without an event loop, and return those that still live."""
    deadline = time.monotonic() + within
    while alive := list(filter(_lives, children)):
        if time.monotonic() >= deadline:
            break
        time.sleep(LOOKED_EVERY)
    return alive


def _lives(child: Process) -> bool:
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _state(pid: int) -> str:
    """Return the state letter of process *pid* (proc_pid_stat(5)): ``D`` waits in the kernel; ``Z``, a zombie, may have such threads."""
    try:
        return read_at_once(f"/proc/{pid}/stat").rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "unknown"


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()


Observing = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs a task, in a way that an error of the task does not end the program."""


async def _alone(task: Callable[[], Awaitable[None]]) -> None:
    await task()


@define
class Processes:
    """The children of this process; made by :func:`open_processes`."""

    _nursery: trio.Nursery
    _prefix: tuple[str, ...]
    _environment: Mapping[str, str]
    _observing: Observing
    _owned: dict[int, Process] = attrs.field(factory=dict)
    orphans: int = 0
    """Number of reaped orphans, children of other processes."""
    begun: int = 0
    """Number of children that were started."""
    out_of_memory: Callable[[], str] = no_kills
    """Returns the memory that was short for the kernel's kills since the last call; called for each child killed by SIGKILL."""
    oom_score: int = 0
    """The addition to the children's ``oom_score_adj`` (:func:`more_likely_to_be_killed`)."""

    def __iter__(self) -> Iterator[Process]:
        """Iterate over the living children, in the order of their starts."""
        return iter(tuple(self._owned.values()))

    def spawn(self, command: Command) -> Process:
        """Start *command* and own it; the caller stops it.

        The child begins with an empty signal mask, also where this process blocks signals at this moment, default
        dispositions, a session of its own, ``/`` as working directory, and of the parent's descriptors only *fds*.

        Raises :exc:`~runner.base.errors.HostError` when it cannot be started.
        """
        if log.isEnabledFor(logging.DEBUG):
            import shlex  # here, because the log seldom has it

            log.debug(InstanceEvent.CHILD_STARTING, command.role, shlex.join(command.argv))
        wrapper = () if command.entering is None else ("/bin/sh", "-c", _ENTER, command.role)
        try:
            with (
                _pipe() as (output, theirs),
                _default_signals(),
                more_likely_to_be_killed(self.oom_score),
            ):
                popen = subprocess.Popen(
                    (*wrapper, *self._prefix, *command.argv),
                    stdin=subprocess.DEVNULL if command.entering is None else command.entering,
                    stdout=theirs,
                    stderr=theirs,
                    pass_fds=command.fds,
                    user=command.user_id,
                    group=command.group_id,
                    extra_groups=None if command.user_id is None else command.groups,
                    start_new_session=True,
                    cwd="/",
                    env=self._environment,
                )
                process = self._owned[popen.pid] = Process(
                    command.role, popen.pid, output, command.level, popen, command.up
                )
        except OSError as error:
            sentence = f"cannot start {command.role} ({command.argv[0]!r})"
            raise limited(
                sentence, error, "process", os.geteuid() if command.user_id is None else command.user_id
            ) from error
        self.begun += 1
        process.user_id, process.on_line = command.user_id or 0, command.on_line
        self._nursery.start_soon(self._observing, process._log_output)  # noqa: SLF001 - a process and its table are one thing
        return process

    def adopt(self, record: ProcessRecord) -> Process:
        """Own a child that this process started before it became this program; the caller stops it.

        Raises :exc:`~runner.base.errors.HostError` unless it is still a child of this process, alive or a zombie. It is the same one: its
        pid is not reused before it is reaped here. Its files in /proc are not read: opening them waits for a lease of the child itself.
        """
        process = Process(record.role, record.pid, record.output, record.level)
        process.continue_from(record)
        if process.returncode is not None:
            return process
        with doing(f"take over {record.role} (pid {record.pid})"):
            os.waitid(os.P_PID, record.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            process.user_id = os.stat(f"/proc/{record.pid}").st_uid  # noqa: PTH116 - PID 1 needs no more of pathlib
        self._owned[record.pid] = process
        self._nursery.start_soon(self._observing, process._log_output)  # noqa: SLF001 - a process and its table are one thing
        return process

    @asynccontextmanager
    async def daemon(self, command: Command, within: float) -> AsyncIterator[Process]:
        """Hold a running child; at the end send SIGTERM, wait *within* seconds, and send SIGKILL.

        Example::

            async with processes.daemon(Command("dnsmasq", argv), 5) as dnsmasq:
                await dnsmasq.wait()
        """
        process = self.spawn(command)
        try:
            yield process
        finally:
            with trio.move_on_after(stop_bound(within), shield=True):
                await self.stop(process, within)

    async def stop(self, process: Process, within: float) -> None:
        """End *process*: SIGTERM, *within* seconds, SIGKILL; return when its status was read.

        It limits its own duration, because it is a release (see :func:`stop_bound`). Raises :exc:`~runner.base.errors.HostError` when even
        SIGKILL does not end it.
        """
        if process.returncode is None:
            with contextlib.suppress(HostError):  # SIGKILL is tried in any case, and its failure is reported
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)  # a stopped process sees no SIGTERM
            await self._wait(process, within)
        await self.kill(process)

    async def kill(self, process: Process) -> None:
        """Send SIGKILL to *process* if it still lives; see :meth:`stop`."""
        if process.returncode is not None:
            return
        process.send_signal(signal.SIGKILL)
        await self._wait(process, KILLED_WITHIN)
        if process.returncode is None:
            raise HostError(
                f"cannot end {process.role} (pid {process.pid}): it survives SIGKILL, so it hangs in the kernel "
                f"(state {_state(process.pid)})"
            )

    async def _wait(self, process: Process, within: float) -> None:
        """Wait *within* seconds for the end of *process*, checking every :data:`ASKED_EVERY` seconds."""
        deadline = trio.current_time() + within
        while True:
            with trio.move_on_at(min(deadline, trio.current_time() + ASKED_EVERY)):
                await process.wait()
            while process.returncode is None and self._reap_some():
                await trio.lowlevel.checkpoint()
            if process.returncode is not None or trio.current_time() >= deadline:
                return

    async def _reap(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async def reap() -> None:
            while True:
                while self._reap_some():
                    await trio.lowlevel.checkpoint()
                await anext(signals)

        with scope:
            await self._observing(reap)

    def _reap_some(self) -> bool:
        """Reap up to :data:`REAPED_AT_ONCE` zombies; return whether there may be more."""
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
                returncode = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
                if returncode == -signal.SIGKILL:
                    process.out_of_memory = self.out_of_memory()
                process._end(returncode)  # noqa: SLF001
        return True


@asynccontextmanager
async def open_processes(prefix: tuple[str, ...] = (), observing: Observing = _alone) -> AsyncIterator[Processes]:
    """Reap for as long as the block runs; *prefix* is put before every argv, and *observing* runs each task that reads outputs.

    Children are to be stopped inside the block: those that still live at its end are left alone.
    """
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}
    # Releases wait for statuses, so the waiter must outlive a cancellation from outside and ends only with the block. It is
    # not started with nursery.start(), whose own cancellation would wait for a shielded task without end.
    reaping = trio.CancelScope(shield=True)
    with received(signal.SIGCHLD) as signals:
        async with trio.open_nursery() as nursery:
            processes = Processes(nursery, prefix, environment, observing, out_of_memory=OutOfMemory().kills)
            nursery.start_soon(processes._reap, signals, reaping)  # noqa: SLF001 - made in this function
            try:
                yield processes
            finally:
                reaping.cancel()
                nursery.cancel_scope.cancel()


@contextmanager
def more_likely_to_be_killed(more: int) -> Iterator[None]:
    """Raise the ``oom_score_adj`` of children forked in the block by *more* above this process's, to at most 1000.

    A process may raise its own value, and lower it again to the value that a privileged process, such as a container runtime, has set
    (``__set_oom_adj`` of ``fs/proc/base.c``). If raising it fails, the children have this process's value.
    """
    with contextlib.ExitStack() as stack:
        if more:
            with contextlib.suppress(OSError, ValueError):
                fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                own = int(os.read(fd, 16))
                os.pwrite(fd, str(min(own + more, 1000)).encode(), 0)
                stack.callback(os.pwrite, fd, str(own).encode(), 0)
        yield


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


@contextmanager
def _default_signals() -> Iterator[None]:
    """Unblock all signals and reset ignored ones for a child started in the block, which would inherit both for good.

    A child with SIGTERM blocked could not be stopped by it. :class:`subprocess.Popen` returns once the child has executed.
    """
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_name(number: int) -> str:
    """Return ``SIGTERM`` for 15; real-time signals by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def raise_limits() -> None:
    """Raise the soft limits of open files, file size and processes to the hard limits, for this process and its children (getrlimit(2)).

    Soft limits are for programs that use select(2), and for shells.
    """
    for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_AS):
        _, hard = resource.getrlimit(each)
        with contextlib.suppress(ValueError):  # EPERM: fs.nr_open was made lower than the hard limit since
            resource.setrlimit(each, (hard, hard))


def become_subreaper() -> None:
    """Let orphans below this process become its children even though it is not PID 1 (``PR_SET_CHILD_SUBREAPER``, prctl(2))."""
    import ctypes  # here, because PID 1 needs neither this nor the milliseconds it costs

    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise HostError(f"cannot become a subreaper: {os.strerror(ctypes.get_errno())}")


def dying_with_us() -> tuple[str, ...]:
    """Return the prefix of an argv whose process is killed when this one ends (``PR_SET_PDEATHSIG``).

    PID 1 does not need it: the kernel ends a PID namespace with its init. The signal is sent when the *thread* that
    forked ends, which is the only one here.
    """
    return ("setpriv", "--pdeathsig", "KILL", "--")
