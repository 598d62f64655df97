"""A guest for ``try``: ``run`` as PID 1 of new namespaces, as a container runtime would start it, with its console on this terminal.

Everything it makes ends with its namespaces: the state directory, the generated spec and the share are in a tmpfs of its mount namespace,
and the kernel kills its processes when this one ends, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import termios
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path, PurePosixPath

import attrs
import trio

from runner.base.errors import RefusedError, SpecError, Status
from runner.base.tasks import first_of
from runner.base.values import frozen
from runner.cli.generated_specs import LOCALHOST, Login, Spec, demo_spec, disk_spec
from runner.cli.options import read_spec_file
from runner.cli.outcomes import KILLED, explain_status
from runner.facts.packages import install
from runner.facts.roots import Roots
from runner.host.facts_reader import SYSTEM_DIRECTORIES, read_disk_facts
from runner.kernel.child_processes import dying_with_us
from runner.kernel.file_prober import probe_file
from runner.kernel.files import find_program
from runner.kernel.privileges import CAP_SYS_ADMIN
from runner.kernel.procfs import Procfs
from runner.kernel.small_files import read_os_release
from runner.kernel.terminal_processes import TerminalProcess
from runner.plan.disks import plan_disk, within
from runner.plan.problems import Problems
from runner.spec.instance import InstanceSpec, opened_paths, parse_instance

ASK_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end the guest; closing the terminal sends the last one."""

PROGRAMS = ("setpriv", "unshare", "nsenter")
"""The programs of the package util-linux that are needed."""

HIDDEN = PurePosixPath("/run")
"""The guest's programs have their own directory mounted here, which contains the state directory."""
OURS = HIDDEN / "try"

PREPARE = f"""set -e
passt=$1; shift
resolver=$(readlink -f /etc/resolv.conf) || resolver=
servers=$(cat /etc/resolv.conf 2>/dev/null) || servers=
mount -t tmpfs -o mode=755 instance-runner-try {HIDDEN}
case $resolver in {HIDDEN}/*) mkdir -p "${{resolver%/*}}"; printf '%s\n' "$servers" >"$resolver" ;; esac
mkdir {OURS} {OURS}/bin
mkdir -m 1777 {OURS}/share
(umask 077; printf %s "$0" >{OURS}/spec.json)
touch {OURS}/outside
mount --bind /proc/self/ns/net {OURS}/outside
if [ -n "$passt" ]; then
  printf '#!/bin/sh
for each; do shift; [ "$each" = --no-map-gw ] || set -- "$@" "$each"; done
exec nsenter --net={OURS}/outside %s "$@"
' "$passt" >{OURS}/bin/passt
  chmod 755 {OURS}/bin/passt
fi
PATH={OURS}/bin:$PATH
exec "$@" >/dev/null
"""
"""A shell's script that runs before there is a PID 1: its words are a spec, passt, and the command that it becomes.

passt is outside of the network namespace that is made then, because its sockets are the guest's way out; resolv.conf(5), which
it reads, is often a link to :data:`HIDDEN`. The guest is that of this machine's user, so its gateway may stand for this machine.
The guest's console is no output of PID 1 but on this terminal.

A shell unblocks all signals when it has waited for a child (dash's ``waitproc()``), and the kernel drops a signal for a PID 1
that neither blocks nor handles it.
"""

PID_1 = (
    *("env", "--block-signal=TERM,INT,HUP"),
    *("unshare", "--fork", "--kill-child", "--pid", "--net", "--mount-proc"),
)
"""The prefix of a command that makes it PID 1, with signals blocked from its first instruction on."""

RUNS = b" the guest runs"
"""The end of the log line with which ``run`` reports that the guest has begun to run."""

HELD_LINES = 200
"""Lines of the log that are held back while the guest has the terminal; earlier ones are dropped."""

NO_NAMESPACES = 125
"""The status if ``unshare`` failed; docker and podman use it for their own failures."""

PREPARED_AGAIN = 0.01
"""Seconds between two checks whether PID 1 exists; its preparation takes some ten milliseconds."""

REMINDED_AFTER = 1.0
"""Seconds until a message about the wait is printed."""

CONSOLE_ENDS_WITHIN = 5.0
"""Seconds that ``console`` may take to end after the instance has."""


@frozen
class Trial:
    """A guest on trial."""

    spec: Spec | PurePosixPath
    """The spec, or the file with it."""
    grace: float
    """Seconds that the guest may take to power down."""
    notes: tuple[str, ...] = ()
    """Lines printed before it starts."""

    @property
    def text(self) -> str:
        """The generated spec as a document; empty if the spec is a file."""
        return "" if isinstance(self.spec, PurePosixPath) else json.dumps(self.spec, indent=1)


def demo(guest: Path) -> Trial:
    """Return the demo guest in the directory *guest*. Raises :exc:`~runner.base.errors.RefusedError` if it is not there."""
    for name in ("vmlinuz", "initrd"):
        if not (guest / name).is_file():
            raise RefusedError(
                f"cannot boot the demo guest: there is no {str(guest / name)!r}",
                remedy="examples/quickstart/run makes it, or examples/quickstart/make-guest DIR for --guest DIR, and `try SPEC` "
                "or `try --disk FILE` tries a guest of yours",
            )
    size = os.get_terminal_size(0) if os.isatty(0) else None
    return _made(demo_spec(guest, OURS / "share", size))


def of_disk(disk: Path, *, cpus: int | None, memory: str, ports: Sequence[str], login: bool) -> Trial:
    """Return a guest that boots *disk*, as the options of ``try`` describe it."""
    path = PurePosixPath(disk)
    passt = _passt()
    missing = install("passt", read_os_release())
    if ports and passt is None:
        raise RefusedError(
            "cannot have a port lead to the guest: cannot find the program 'passt' in PATH", remedy=missing
        )
    # Two vCPUs even if they leave no CPU to QEMU's other threads: a guest then boots in three quarters of the time.
    usual = min(2, len(os.sched_getaffinity(0)))
    spec = disk_spec(
        path,
        probe_file(path, image=True),
        cpus=cpus or usual,
        memory=memory,
        ports=None if passt is None else ports,
        login=(user := Login("try", _password())) if login else None,
    )
    notes = [f"{disk} is only read: what the guest writes is in memory, and lost at its end"]
    if passt is None:
        notes.append(f"nothing outside is reached from the guest: passt is not installed; {missing}")
    for ours, theirs in (each.split(":") for each in ports):
        ssh = f": ssh -p {ours} {user.user}@{LOCALHOST}" if login and theirs == "22" else ""
        notes.append(f"port {ours} at {LOCALHOST} leads to port {theirs} of the guest{ssh}")
    if login:
        notes.append(
            f"log in as {user.user!r} with the password {user.password!r}, once cloud-init in the guest has made it"
        )
    trial = _made(spec, *notes)
    _judge_disk(trial)
    return trial


def _judge_disk(trial: Trial) -> None:
    """Raise :exc:`~runner.base.errors.SpecError` for a disk that no guest can use."""
    [disk] = parse_instance("--disk", trial.text.encode()).disk
    problems = Problems()
    plan_disk("disk0", disk, read_disk_facts(disk, OURS), "disk", problems)
    if problems.found:
        raise SpecError("--disk", problems.found)


def _passt() -> PurePosixPath | None:
    return find_program("passt", SYSTEM_DIRECTORIES)


def _password() -> str:
    return "".join(secrets.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(8))


def _made(spec: Spec, *notes: str) -> Trial:
    checked = parse_instance("the spec that is made", json.dumps(spec).encode())
    _refuse_hidden(checked)
    return Trial(spec, checked.shutdown.grace, notes)


def run_spec(path: Path) -> int:
    """Run the guest whose spec is the file *path*.

    Raises :exc:`~runner.base.errors.RunnerError` before anything is changed.
    """
    spec = parse_instance(str(path), read_spec_file(str(path)), os.environ)
    _refuse_hidden(spec, ("the spec", PurePosixPath(path)))
    return run_trial(Trial(PurePosixPath(path), spec.shutdown.grace))


def _refuse_hidden(spec: InstanceSpec, *more: tuple[str, PurePosixPath]) -> None:
    """Refuse files that the guest's programs would not see; *more* are files that the spec does not name."""
    shares = ((f"share[{index}].path", share.path) for index, share in enumerate(spec.share))
    for where, path in (*more, *opened_paths(spec, None), *shares):
        # The controller is not for a guest that is tried.
        if within(path, [HIDDEN]) and not within(path, [OURS]) and where != "cpu.controller":
            raise RefusedError(
                f"cannot use {str(path)!r} ({where}): a guest that is tried has a {HIDDEN} of its own",
                remedy="copy it to another directory",
            )


def run_trial(trial: Trial) -> int:
    """Boot the guest of *trial*, attach this terminal to its console, and return the exit status of ``run``.

    Raises :exc:`~runner.base.errors.RefusedError` before anything is changed.
    """
    _refuse_what_cannot_work()
    program = os.path.abspath(sys.argv[0])  # noqa: PTH100 - a link stays what it is
    return trio.run(_run, program, trial)


def _refuse_what_cannot_work() -> None:
    if os.geteuid() != 0:
        raise RefusedError("cannot make namespaces: this takes root", remedy="use sudo")
    if CAP_SYS_ADMIN not in Procfs().capabilities():
        raise RefusedError(
            "cannot make namespaces: this takes the capability SYS_ADMIN",
            remedy="in a container, start it with `docker run -it --privileged`",
        )
    for name in PROGRAMS:
        if shutil.which(name) is None:
            raise RefusedError(f"cannot find the program {name!r} in PATH", remedy=install(name, read_os_release()))


@attrs.define
class InstanceLog:
    """The log of ``run``: forwarded to standard error, but held back while the guest has the terminal."""

    guest_runs: trio.Event = attrs.field(factory=trio.Event)
    last: bytes = b""
    """Its last line."""
    _held: deque[bytes] | None = None

    async def follow(self, fd: int) -> None:
        """Read the log from the pipe *fd* until its end."""
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
        """Hold back the following lines."""
        self._held = deque(maxlen=HELD_LINES)

    def release(self) -> None:
        """Show the lines held back, and stop holding them back."""
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
    with contextlib.suppress(OSError):  # the terminal was closed; the guest is still ended
        os.write(2, line + b"\n")


def _notify(message: str) -> None:
    _show(f"[{message}]".encode())


async def _run(program: str, trial: Trial) -> int:
    spec = trial.spec if isinstance(trial.spec, PurePosixPath) else OURS / "spec.json"
    prepared = ("sh", "-c", PREPARE, trial.text, str(_passt() or ""), *PID_1, program, "run", str(spec))
    with trio.open_signal_receiver(*ASK_TO_STOP) as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_STOP)  # the image's entry point has blocked them
        for note in trial.notes:
            _notify(note)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            instance = TerminalProcess([*dying_with_us(), "unshare", "--mount", *prepared], output=writing)
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
                observers.start_soon(_remind, instance, trial.grace)
            await _stopped(instance)
            observers.cancel_scope.cancel()
    status = _status_of_run(instance.status, log)
    if status == Status.STOPPED:
        _notify("the guest has ended, and nothing of it is left")
    for line in explain_status(status):
        _show(line.encode())
    return status


def _status_of_run(status: int, log: InstanceLog) -> int:
    """Return the status of ``run`` from the *status* of ``unshare``, which waits for it and writes the last line of *log*.

    ``unshare`` ends with 1 where it cannot make the namespaces, which is no fault of ours, and in util-linux 2.38 (Debian 12)
    where its child is killed by SIGKILL: it would die by the same signal, but first fails to reset the disposition of that signal.
    """
    if status != os.EX_OK and log.last.startswith(b"unshare: "):
        return KILLED if log.guest_runs.is_set() else NO_NAMESPACES
    return status


async def _obey(signals: AsyncIterator[int], asked: trio.Event) -> None:
    async for _ in signals:
        asked.set()


async def _remind(instance: TerminalProcess, grace: float) -> None:
    """Print a message about the wait, unless the instance ends soon."""
    with trio.move_on_after(REMINDED_AFTER):
        await instance.ended.wait()
    if not instance.ended.is_set():
        _notify(f"the guest is asked to power down, which may take {grace:g} s")


async def _attached(program: str, instance: TerminalProcess, log: InstanceLog, asked: trio.Event) -> None:
    """Connect this terminal with the guest's console until it is detached, the guest has ended, or its end is *asked* for."""
    pid1 = instance.init(Roots().proc)
    if pid1 is None:  # it has ended since
        return
    with contextlib.suppress(ProcessLookupError):  # the same
        os.sched_setaffinity(0, os.sched_getaffinity(pid1))  # this terminal stays off the vCPU's CPU, too
    enter = ("nsenter", "-t", str(pid1), "-p", "-m")
    look = _look(program, enter)
    _notify("to leave: Ctrl-], or `poweroff` in the guest; both end the guest and everything around it")
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
    """Restore the settings of *terminal* afterwards, because ``console`` may be killed with its PID namespace."""
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
    """Return the prefix of commands, typed in another terminal, that examine the instance."""
    path = shutil.which(Path(program).name)
    short = path is not None and Path(path).samefile(program)
    outside = ("docker", "exec", os.uname().nodename) if os.getpid() == 1 else ()
    return shlex.join((*outside, *enter, Path(program).name if short else program))


async def _stopped(instance: TerminalProcess) -> None:
    """End the instance as Kubernetes does, and wait for its end, which its own grace period limits.

    If PID 1 does not exist yet, wait for it first: ``unshare`` may be starting it at this moment, and if it is killed between fork(2) and
    prctl(2) it leaves its child behind.
    """
    while not instance.ended.is_set():
        if (pid1 := instance.init(Roots().proc)) is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid1, signal.SIGTERM)
            await instance.ended.wait()
        with trio.move_on_after(PREPARED_AGAIN):
            await instance.ended.wait()
