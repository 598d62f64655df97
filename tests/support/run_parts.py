"""``tests/run``: run the parts of a tier (:mod:`tests.parts`), some at once, and show each minute which of them still run."""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from runner.kernel.procfs import Procfs
from tests.parts import LANES, PARTS, TIERS, Part
from tests.support.namespaces import CAP_SYS_ADMIN, CLONE_NEWNS, unshare

PROJECT = Path(__file__).parents[2]
ENDS_WITHIN = 60.0
"""Seconds within which a part that is interrupted has undone what it did; then it is killed."""

PER_CENT, PASSED = r"\[ *[0-9]+%\]", r"[0-9]+ passed[^=\n]*?(?= in |\n|$)"
"""How far pytest is, and its summary, in its output."""


@dataclass(frozen=True)
class Running:
    """A part whose process, and all that it starts, is a process group of its own; *log* has its output."""

    part: Part
    process: subprocess.Popen[bytes]
    log: Path
    begun: float

    def signal(self, number: int) -> None:
        """Send a signal to the group, whose id is not reused before the process is waited for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def last(self, pattern: str) -> str:
        """Return the last match of *pattern* in the output, or an empty string."""
        return next(iter(re.findall(pattern, self.log.read_text(errors="replace"))[-1:]), "")


class Parts:
    """Runs parts: at most *at_once*, and of each lane as many as *lanes* allows, beginning with the first ones."""

    def __init__(
        self,
        parts: Sequence[Part],
        directory: Path,
        *,
        at_once: int,
        lanes: Mapping[str, int] = LANES,
        every: float = 60.0,
    ) -> None:
        self._waiting, self._directory = list(parts), directory
        self._at_once, self._lanes, self._every = at_once, lanes, every
        self._running: dict[int, Running] = {}
        self._begun = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self.failed: list[str] = []

    def run(self) -> bool:
        """Run all parts, and return whether they were let end; SIGINT and SIGTERM end them all."""
        woken, wakes = socket.socketpair()
        wakes.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        fd_before = signal.set_wakeup_fd(wakes.fileno())
        try:
            with woken, wakes, self._selector:
                self._selector.register(woken, selectors.EVENT_READ)
                return self._run_until(woken)
        finally:
            signal.set_wakeup_fd(fd_before)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_until(self, asked: socket.socket) -> bool:
        """Start parts and wait for their ends; return ``False`` where *asked* was readable, and all have been ended."""
        shown, kill_at = time.monotonic(), math.inf
        while self._waiting or self._running:
            self._start()
            wakes_at = min(shown + self._every, kill_at)
            ready = {key.fd for key, _ in self._selector.select(wakes_at - time.monotonic())}
            if asked.fileno() in ready:
                asked.recv(64)
                # whoever asks again does not want to wait
                kill_at = time.monotonic() + (ENDS_WITHIN if kill_at == math.inf else 0)
                self._waiting.clear()
                self._signal(signal.SIGINT)
            for pidfd in ready & self._running.keys():
                self._ended(pidfd)
            if time.monotonic() >= kill_at:
                self._signal(signal.SIGKILL)
            if time.monotonic() >= shown + self._every:
                shown = time.monotonic()
                for running in self._running.values():
                    self._say(f"{running.part.name}: {running.last(PER_CENT) or 'runs'}")
        return kill_at == math.inf

    def _start(self) -> None:
        """Start the first parts for which there is room."""
        for part in list(self._waiting):
            beside = sum(running.part.lane == part.lane for running in self._running.values())
            if len(self._running) < self._at_once and beside < self._lanes[part.lane]:
                self._waiting.remove(part)
                log = self._directory / f"{len(self._waiting)}.log"
                with log.open("wb") as output:
                    process = started(part.command, output, self._directory)
                pidfd = os.pidfd_open(process.pid)
                self._selector.register(pidfd, selectors.EVENT_READ)
                self._running[pidfd] = Running(part, process, log, time.monotonic())

    def _signal(self, number: int) -> None:
        """Send a signal to the parts that run."""
        for running in self._running.values():
            running.signal(number)

    def _ended(self, pidfd: int) -> None:
        """Show how a part ended: one line when it is right, and all of its output when it is not."""
        running = self._running.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        running.signal(signal.SIGKILL)  # what it has left behind
        _, status, used = os.wait4(running.process.pid, 0)
        running.process.returncode = os.waitstatus_to_exitcode(status)
        seconds = f"{time.monotonic() - running.begun:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU time"
        if running.process.returncode == 0:
            passed = running.last(PASSED)
            self._say(f"{running.part.name}: ok, {seconds}{f': {passed}' if passed else ''}")
        else:
            self.failed.append(running.part.name)
            print(running.log.read_text(errors="replace"))
            self._say(f"{running.part.name}: FAILED with status {running.process.returncode}, {seconds}")

    def _say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._begun), 60)
        print(f"{minutes:3}:{seconds:02} {text}", flush=True)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """Hold a directory for temporary files, in memory where this process may mount.

    The tests make some 100,000 small files, for which a file system on a disk takes several times the CPU time of a tmpfs. The mount
    is in a namespace of this process and its children, so that it ends with them however they end.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        if CAP_SYS_ADMIN in Procfs().capabilities():
            unshare(CLONE_NEWNS)
            subprocess.run(["mount", "--make-rslave", "/"], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "tests", directory], check=True)
        yield Path(directory)


def started(command: str, output: IO[bytes], directory: Path) -> subprocess.Popen[bytes]:
    """Start a command of bash in a process group of its own, with *directory* for the temporary files of its tests."""
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=PROJECT,
        env={**os.environ, "PYTEST_DEBUG_TEMPROOT": str(directory)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


def chosen(tier: str, arguments: Sequence[str]) -> list[Part]:
    """Return the parts of a tier; with *arguments* for pytest, its lint and types, and pytest with these instead of the others."""
    parts = [part for part in PARTS if tier in part.tiers.split()]
    if not arguments:
        return parts
    if tier in {"soak", "kubelet", "node"}:
        return [replace(part, command=f"{part.command} {shlex.join(arguments)}") for part in parts]
    given = Part("the tests chosen", tier, f"pytest {shlex.join(arguments)}")
    return [given, *(part for part in parts if "pytest" not in part.command and part.lane == "here")]


def main() -> int:
    """Run the tier and return the exit status."""
    tier, *arguments = sys.argv[1:] if sys.argv[1:2] and sys.argv[1] in TIERS else ("newcomer", *sys.argv[1:])
    with temporary_directory() as directory:
        parts = Parts(chosen(tier, arguments), directory, at_once=TIERS[tier])
        if not parts.run():
            return 128 + signal.SIGINT
    if parts.failed:
        print("failed:", *parts.failed, sep="\n  ")
        return 1
    print("everything passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
