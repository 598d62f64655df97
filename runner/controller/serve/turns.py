"""Turns: what costs all instances of the node some time is done for one request at a time, and again only after a rest."""

from __future__ import annotations

import math
from weakref import WeakValueDictionary

import attrs
import trio

from runner.base.values import frozen


@frozen
class Turns:
    """Turns by name, such as an instance's; those of a name are taken in the order in which they were asked for.

    Example::

        async with turns.of(pod_uid):
            await turns.rested(pod_uid)
            turns.rest(1.0, pod_uid)
    """

    _locks: WeakValueDictionary[str, trio.Lock] = attrs.field(factory=WeakValueDictionary)
    _rested: dict[str, float] = attrs.field(factory=dict)
    """When the rest of each name is over, on trio's clock."""

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
