"""Requests to a running instance, each answered within a bound, whatever has become of its PID 1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

import trio

from runner.base.errors import HostError
from runner.kernel.sockets import CONTROL_SOCKET
from runner.protocol.controller_client import ask

ANSWERED_WITHIN = 30.0
"""Seconds for an answer of the instance, which itself waits 5 s for QEMU's."""

CHANGED_WITHIN = 900.0
"""Seconds for a change, which may wait for the guest; each has a shorter bound of its own in the instance."""

_CHANGES = {"upgrade", "qemu.update", "cpu.set", "disk.attach", "disk.detach", "disk.grow"}


async def ask_instance(state_directory: PurePosixPath, method: str, params: Mapping[str, object]) -> object:
    """Return the answer of the instance whose *state_directory* this is.

    Raises :exc:`~runner.base.errors.RunnerError` when no instance listens there, it refuses the request, or does not answer.
    """
    changes = method in _CHANGES
    within = CHANGED_WITHIN if changes else ANSWERED_WITHIN
    with trio.move_on_after(within):
        return await ask("the instance", state_directory / CONTROL_SOCKET, method, params)
    raise unanswered(within, "; the change may still be made: see `ctl status`" if changes else "")


def unanswered(within: float, then: str = "") -> HostError:
    """Return the error of a request that the instance has not answered *within* so many seconds."""
    return HostError(
        f"cannot get an answer of the instance within {within:.0f} s: its PID 1 is stopped, or gets no CPU time{then}"
    )
