"""Signals as the event loop receives them.

Python runs a signal handler between any two instructions of any task. trio's handler adds the signal to a queue, and wakes up the loop by
sending to a socket. Python itself has written to that socket before (``signal.set_wakeup_fd``), so a failure to send is harmless; raised
from the handler it would end the interrupted task, even one of the loop itself.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import trio


@contextmanager
def received(*numbers: int, note: Callable[[int], object] = lambda _: None) -> Iterator[AsyncIterator[int]]:
    """Receive the signals *numbers* for as long as the block runs; *note* is called in the handler itself, even if the loop then ends."""
    with trio.open_signal_receiver(*numbers) as signals:
        for number in numbers:
            signal.signal(number, partial(_handle, note, signal.getsignal(number)))
        yield signals  # trio restores the earlier handlers


def _handle(note: Callable[[int], object], pass_on: Any, number: int, frame: FrameType | None) -> None:
    note(number)
    with suppress(OSError):
        pass_on(number, frame)
