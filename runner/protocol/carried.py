"""What a runner carries over to the program that renews it, of this room: the conversation with QEMU, and JSON lines.

See :mod:`runner.kernel.carried`.
"""

from __future__ import annotations

from runner.base.values import frozen
from runner.kernel.carried import CarriedFd


@frozen
class CarriedMonitor:
    """A conversation with QEMU between two commands."""

    socket: CarriedFd
    greeting: str
    """QEMU's, as JSON."""
    next_number: int
    """Of the next command: the replies to those that no task waits for any more have other numbers."""
    unfinished: bytes = b""
    """What was read and is not a whole line yet."""
    skipping: bool = False
    unanswered: tuple[str, ...] = ()
    events: tuple[tuple[str, str], ...] = ()
    """Events that no task has received yet: name, and data as JSON."""
