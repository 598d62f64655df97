"""The time limit of every request to a running instance: its PID 1 may be stopped, or get no CPU time."""

from __future__ import annotations

from runner.base.errors import HostError

ANSWERED_WITHIN = 30.0
"""Seconds for an answer of the instance, which itself waits 5 s for QEMU's answer."""


def unanswered(within: float, remedy: str = "") -> HostError:
    """Return the error for a request that the instance has not answered *within* that many seconds."""
    return HostError(
        f"cannot get an answer of the instance within {within:.0f} s: its PID 1 is stopped, or gets no CPU time",
        remedy=remedy,
    )
