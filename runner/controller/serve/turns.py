"""Turns: work that costs all instances of the node some time is done for one request at a time, with rests in between."""

from __future__ import annotations

import math
from weakref import WeakValueDictionary

import attrs
import trio

from runner.base.values import frozen


@frozen
class Turns:
    """Turns by name, such as an instance's; tasks waiting for the same name take turns in the order of their requests.

    Example::

        async with turns.of(pod_uid):
            await turns.rested(pod_uid)
            turns.rest(1.0, pod_uid)
    """

    _locks: WeakValueDictionary[str, trio.Lock] = attrs.field(factory=WeakValueDictionary)
    _rested: dict[str, float] = attrs.field(factory=dict)
    """Name → end of its rest, on trio's clock."""

    def of(self, name: str = "") -> trio.Lock:
        """Return the turn of *name*, which one task at a time holds."""
        return self._locks.setdefault(name, trio.Lock())

    async def rested(self, name: str = "") -> None:
        """Wait until the rest of *name* is over; the caller holds its turn."""
        await trio.sleep_until(self._rested.get(name, -math.inf))

    def rest(self, seconds: float, name: str = "") -> None:
        """Let *name* rest for *seconds* from now."""
        now = trio.current_time()
        for each in [each for each, over in self._rested.items() if over <= now]:
            del self._rested[each]
        self._rested[name] = now + seconds
