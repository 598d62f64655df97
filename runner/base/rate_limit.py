"""The one rate limit of log messages whose causes are not in this program's hand: guests, pods, and other programs."""

from __future__ import annotations

import logging
from typing import Protocol

import attrs
import trio

from runner.base.events import Event, SharedEvent
from runner.base.values import define, frozen

log = logging.getLogger(__name__)

REPORTED_EVERY = 60.0
"""Seconds between two log messages of one kind about one peer: a guest can cause thousands a second."""

MOST_PEERS = 64
"""Peers that are distinguished at a time; the others are one peer, so that no number of peers fills the log or the memory."""

_OTHERS = "others"


class LogMethod(Protocol):
    """A method of a logger, such as ``log.warning``."""

    def __call__(self, msg: object, /, *args: object) -> None:
        """Log *msg* with *args*."""


@define
class _Reported:
    at: float
    left_out: int = 0


@frozen
class LogRateLimit:
    """Lets one message of each kind and peer pass in :data:`REPORTED_EVERY` seconds, and counts those between.

    A *kind* is a constant of this program and a *peer* what causes the message: never its text, which the peer may vary.

    Example::

        limit.log(log.info, InstanceEvent.GUEST_RESET, reason)
    """

    _reported: dict[tuple[str, object], _Reported] = attrs.field(factory=dict)

    def log(self, write: LogMethod, event: Event, *args: object, kind: str = "", peer: object = "") -> None:
        """Log *event* with *args* by *write*, unless it is to be left out; by default its name is its *kind*."""
        if (more := self.due(kind or event.key, peer)) is not None:
            at = event.place_of_more()
            write(event, *args[:at], more, *args[at:])

    def due(self, kind: str, peer: object = "") -> str | None:
        """Return ``None`` if the message is to be left out, otherwise a note on the messages left out before it, usually empty."""
        now = trio.current_time()
        key = kind, peer
        if key not in self._reported and len(self._reported) >= MOST_PEERS:
            self._forget(now)
            if len(self._reported) >= MOST_PEERS:
                key = kind, _OTHERS
        last = self._reported.get(key)
        if last is not None and now - last.at < REPORTED_EVERY:
            last.left_out += 1
            return None
        self._reported[key] = _Reported(now)
        return f" ({last.left_out} more since the last report)" if last is not None and last.left_out else ""

    def log_left_out(self) -> None:
        """Log, at the end of the program, the number of messages left out since the last report of each kind and peer."""
        for (kind, peer), last in self._reported.items():
            if last.left_out:
                log.info(SharedEvent.MESSAGES_LEFT_OUT, kind, peer, last.left_out)
                last.left_out = 0

    def _forget(self, now: float) -> None:
        """Forget the peers whose next message would pass; the messages left out for them are counted for the peer "others"."""
        passed = [key for key, last in self._reported.items() if now - last.at >= REPORTED_EVERY and key[1] != _OTHERS]
        for kind, peer in passed:
            left_out = self._reported.pop((kind, peer)).left_out
            if left_out:
                self._reported.setdefault((kind, _OTHERS), _Reported(now - REPORTED_EVERY)).left_out += left_out
