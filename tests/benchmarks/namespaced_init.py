"""Processes as PID 1 of fresh namespaces, observed from outside."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

UNSHARED = ("unshare", "--fork", "--kill-child", "--pid", "--mount", "--net", "--mount-proc", "--")
STAMP = 'echo "mark exec $EPOCHREALTIME" >&2; exec "$@"'
"""PID 1 starts as this shell, so that the time counts from the exec of the program, without the making of namespaces."""

LOG_LINE = re.compile(r"(\d\d):(\d\d):(\d\d\.\d\d\d) \w+ +(.*)")
DAY = 86400
TIMEOUT = 30.0


class BenchmarkError(Exception):
    """Something could not be measured."""


@dataclass(frozen=True)
class Line:
    """A line of output, and when it arrived."""

    moment: float
    text: str


class NamespacedInit:
    """A PID 1 and everything below it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._rest: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._rest[pipe.fileno()] = b""
            self._selector.register(pipe.fileno(), selectors.EVENT_READ)
        self.lines: list[Line] = []
        self.born = float(self.until("mark exec ").text.split()[-1])
        self.pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        """The pid of PID 1 in our PID namespace."""
        self._pidfd = os.pidfd_open(self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._process.wait()
        os.close(self._pidfd)
        self._selector.close()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def until(self, text: str, timeout: float = TIMEOUT) -> Line:
        """Return the first line with *text* in it, as soon as it arrives."""

        def found() -> Line | None:
            return next((line for line in self.lines if text in line.text), None)

        self._read_until(lambda: found() is not None, timeout, f"never printed {text!r}")
        line = found()
        assert line is not None
        return line

    def read_for(self, seconds: float) -> None:
        """Read the output for some *seconds*, so that no writer has to wait."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._read_ready(left)

    def terminate(self) -> float:
        """Send SIGTERM and return the time."""
        moment = time.time()
        signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        return moment

    def stop(self) -> None:
        """Send SIGSTOP."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGSTOP)

    def exited(self, timeout: float = TIMEOUT) -> float:
        """Wait until PID 1, and so everything below it, has ended, and return the time."""
        self._selector.register(self._pidfd, selectors.EVENT_READ)
        end = time.monotonic() + timeout
        while self._pidfd not in self._read_ready(end - time.monotonic()):
            if time.monotonic() > end:
                raise BenchmarkError(f"did not end within {timeout:g} s:\n{self.transcript()}")
        moment = time.time()
        self._selector.unregister(self._pidfd)
        while self._read_ready(0):
            pass
        self._process.wait()
        return moment

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def transcript(self) -> str:
        return "\n".join(f"    {line.text}" for line in self.lines)

    def marks(self, known: Sequence[tuple[str, str]]) -> dict[str, float]:
        """Return mark → its time: of ``mark NAME TIME`` lines, and of *known* (name, pattern of a log line).

        Marks that are not found are left out; of several the first counts.
        """
        moments: dict[str, float] = {"exec": self.born}
        for line in self.lines:
            if match := re.fullmatch(r"mark (\S+) ([0-9.]+)", line.text):
                moments.setdefault(match[1], float(match[2]))
            elif match := LOG_LINE.match(line.text):
                for name, text in known:
                    if re.search(text, match[4]):
                        moments.setdefault(name, self._moment(match))
        return moments

    def _moment(self, match: re.Match[str]) -> float:
        midnight = self.born // DAY * DAY
        moment = midnight + int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3])
        return moment if moment > self.born - DAY / 2 else moment + DAY

    def _read_until(self, happened: Callable[[], bool], timeout: float, otherwise: str) -> None:
        end = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > end or not self._selector.get_map():
                raise BenchmarkError(f"{otherwise}:\n{self.transcript()}")
            self._read_ready(end - time.monotonic())

    def _read_ready(self, timeout: float) -> set[int]:
        """Read the available output, and return the descriptors that were ready."""
        ready = {key.fd for key, _ in self._selector.select(max(0, timeout))}
        moment = time.time()
        for fd in ready & self._rest.keys():
            data = os.read(fd, 1 << 16)
            if not data:
                self._selector.unregister(fd)
            *lines, self._rest[fd] = (self._rest[fd] + data).split(b"\n")
            self.lines += [Line(moment, line.decode(errors="replace").rstrip("\r")) for line in lines]
        return ready


@contextmanager
def namespaced_init(*argv: str | Path, pass_fds: Sequence[int] = ()) -> Iterator[NamespacedInit]:
    """Hold *argv* as PID 1 of fresh PID, mount and network namespaces; every process in them is killed at the end.

    It is also killed when this process ends.
    """
    process = subprocess.Popen(
        ("setpriv", "--pdeathsig", "KILL", "--", *UNSHARED, "bash", "-c", STAMP, "exec", *argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
        start_new_session=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
    )
    try:
        with NamespacedInit(process) as held:
            yield held
    finally:
        process.kill()
        process.wait()


def memory_of(pid: int) -> dict[str, float]:
    """Return ``Rss`` and ``Pss`` of *pid* in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return {name: int(amount) / 1024 for name, amount in re.findall(r"^(Rss|Pss):\s+(\d+) kB", text, re.MULTILINE)}


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def switches_of(pid: int) -> int:
    """Return how often the threads of *pid* have been given a CPU."""
    text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status"))
    return sum(int(count) for count in re.findall(r"ctxt_switches:\s+(\d+)", text))


def cpu_of(pid: int) -> float:
    """Return the CPU time of *pid* in seconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def below(pid: int) -> Iterator[int]:
    """Yield *pid* and every descendant."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            yield from below(int(child))


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
