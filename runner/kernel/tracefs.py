"""The kernel's own record of events, through tracefs (``Documentation/trace/ftrace.rst``, "Instances").

A record has an instance of its own, with its own buffers: it neither sees nor disturbs what others trace. An instance
outlives its maker, so its name holds the maker's number, and the next record removes what a killed one has left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, doing
from runner.base.values import frozen
from runner.kernel.mount_api import CMD_CREATE, configure, mount_detached, open_file_system
from runner.kernel.ring_buffer import EventFormat, parse_format, parse_page_size

_OWN_NAME = re.compile(r"instance-runner-([0-9]+)-[0-9]+", re.ASCII)
_COUNTED = re.compile(r"^(?:overrun|commit overrun|dropped events): ([0-9]+)$", re.ASCII | re.MULTILINE)
_SMALL_BUFFER = 8
"""KiB of buffer for a CPU that is not recorded: two pages, the least there is."""


@contextlib.contextmanager
def tracefs_reached(sys: Path) -> Iterator[Path]:
    """Hold a path to tracefs: its mount point below *sys*, or a new mount that only this process can reach.

    The new mount has no mount point, and ends with its descriptor. Raises :class:`HostError` when tracefs is not available.
    """
    mounted = sys / "kernel/tracing"
    try:
        usable = (mounted / "instances").is_dir()
    except PermissionError as error:
        raise HostError(f"cannot use {mounted}") from error
    if usable:
        yield mounted
        return
    fd = _mount_detached()
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _mount_detached() -> int:
    with doing("mount tracefs"):
        context = open_file_system("tracefs")
        try:
            configure(context, CMD_CREATE)
            return mount_detached(context)
        finally:
            os.close(context)


def remove_stale_instances(tracefs: Path, proc: Path) -> None:
    """Remove the trace instances of processes of this program that have ended."""
    with contextlib.suppress(OSError):  # an instance that cannot be removed costs only memory
        for path in (tracefs / "instances").iterdir():
            if (match := _OWN_NAME.fullmatch(path.name)) and not (proc / match[1]).exists():
                with contextlib.suppress(OSError):
                    path.rmdir()


@frozen
class TraceInstance:
    """A trace instance with the events that it records; made by :func:`trace_instance`."""

    path: Path
    formats: tuple[EventFormat, ...]
    """The formats of its events, in the order they were named."""
    cpus: tuple[int, ...]
    _buffers: dict[int, int]
    """CPU → the descriptor of its buffer."""
    _page_size: int

    def start(self) -> None:
        """Begin to record. Raises :class:`HostError`."""
        _write(self.path / "tracing_on", "1")

    def stop(self) -> None:
        """End the recording; recorded events can still be read. Raises :class:`HostError`."""
        _write(self.path / "tracing_on", "0")

    def pages(self, cpu: int) -> Iterator[bytes]:
        """Yield the recorded pages of *cpu* that were not read yet.

        Reading never waits: a waiting reader would be woken by an interrupt on the recorded CPU itself.
        """
        try:
            while page := os.read(self._buffers[cpu], self._page_size):
                yield page
        except BlockingIOError:
            return
        except OSError as error:
            raise HostError(f"cannot read the trace of CPU {cpu}") from error

    def lost_events(self, cpu: int) -> int:
        """Return the number of events of *cpu* lost because its buffer was full. Raises :class:`HostError`."""
        return sum(map(int, _COUNTED.findall(_read(self.path / f"per_cpu/cpu{cpu}/stats"))))


@contextlib.contextmanager
def trace_instance(
    tracefs: Path, events: tuple[str, ...], cpus: CpuSet, buffer_kib: int, *, pid: int
) -> Iterator[TraceInstance]:
    """Hold an instance of process *pid*, this one, that records *events* (such as ``sched/sched_switch``) on *cpus*.

    Each CPU has a buffer of *buffer_kib*, which is overwritten when it is full. Recording begins with :meth:`TraceInstance.start`. Times
    are those of ``CLOCK_MONOTONIC``. Raises :class:`HostError` when the kernel has no such event or refuses.
    """
    with _made(tracefs / "instances", pid) as path, contextlib.ExitStack() as stack:
        _write(path / "tracing_on", "0")
        # First of all CPUs: the first event would give each of the machine's CPUs a buffer of the default size.
        _write(path / "buffer_size_kb", str(_SMALL_BUFFER))
        _write(path / "trace_clock", "mono")
        _write(path / "tracing_cpumask", cpus.mask())
        for cpu in cpus:
            _write(path / f"per_cpu/cpu{cpu}/buffer_size_kb", str(buffer_kib))
        formats = tuple(parse_format(_read(path / "events" / event / "format")) for event in events)
        page_size = parse_page_size(_read(tracefs / "events/header_page"))
        buffers = {cpu: stack.enter_context(_buffer(path / f"per_cpu/cpu{cpu}/trace_pipe_raw")) for cpu in cpus}
        for event in events:
            _write(path / "events" / event / "enable", "1")
        yield TraceInstance(path, formats, tuple(cpus), buffers, page_size)


@contextlib.contextmanager
def _made(instances: Path, pid: int) -> Iterator[Path]:
    names = (instances / f"instance-runner-{pid}-{number}" for number in itertools.count())
    path = next(each for each in names if not each.exists())
    try:
        with doing(f"create the trace instance {path.name}"):
            path.mkdir()
        yield path
    finally:
        with contextlib.suppress(OSError):  # it was not created, or the next record removes it
            path.rmdir()


@contextlib.contextmanager
def _buffer(path: Path) -> Iterator[int]:
    with doing(f"open {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _read(path: Path) -> str:
    with doing(f"read {path}"):
        return path.read_text()


def _write(path: Path, value: str) -> None:
    with doing(f"write {value!r} to {path}"), path.open("r+b", buffering=0) as file:
        file.write(value.encode())
