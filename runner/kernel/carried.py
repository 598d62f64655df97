"""What a runner carries over to the program that renews it, of this room: descriptors, children, outputs.

Imported when a runner is renewed, and not before. A renewed runner understands what its predecessor carries field by field:
a field may be added with a default, and is neither renamed nor given another meaning.
"""

from __future__ import annotations

from runner.base.values import frozen


@frozen
class CarriedFd:
    """An open descriptor, which keeps its number through exec."""

    number: int


@frozen
class CarriedProcess:
    """A child, which stays the child of this process through exec."""

    role: str
    pid: int
    started: int
    """When it was started, in clock ticks since the boot (``starttime`` of proc_pid_stat(5)): a pid alone may be another's."""
    output: CarriedFd | None
    level: int
    """The level at which its output is logged."""
    unfinished: bytes = b""
    """What was read of its output and is not logged yet."""
    last_lines: tuple[str, ...] = ()
    ended: int | None = None
    """Its status, if that was read already; its output is closed then."""


@frozen
class CarriedLogFile:
    """A log file; *file* is ``None`` where it could not be opened again. *missing* bytes were not written, because of *error*."""

    file: CarriedFd | None
    error: str | None = None
    missing: int = 0


@frozen
class CarriedOutput:
    """What is to be written to a reader that is slow, and the number of bytes dropped since."""

    backlog: bytes = b""
    dropped: int = 0


@frozen
class CarriedInheritedFd:
    """A descriptor that another program has opened for the instance; closed if *descriptor* is ``None``."""

    name: str
    descriptor: CarriedFd | None
    declared: str | None
