"""The memory that is still charged to the cgroups of ended instances: reclaiming it, and lowering the limits to what is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import attrs
import trio
import trio.to_thread

from runner.controller.tree.limits import LEFT_BEHIND
from runner.controller.tree.model import Observed
from runner.controller.tree.pods import PodCgroups
from runner.controller.tree.tree import Tree


@attrs.define(eq=False)
class LeftMemory:
    """The memory of domains without groups in *tree*, and the limits of those whose pods, of *pods*, are gone.

    Small amounts are left, because the kernel may interrupt each CPU for a reclaim (``lru_add_drain_all``).
    """

    tree: Tree
    pods: PodCgroups
    apart: float
    """Seconds from one attempt for a domain to the next; five times the duration of the attempt, if that is longer."""
    _next: dict[str, float] = attrs.field(factory=dict)
    """Pod UID → time of the next attempt for its domain, on trio's clock."""

    def reclaimed(self) -> frozenset[str]:
        """Return the UIDs of the pods for whose domains an attempt was made: the memory that is left cannot be reclaimed."""
        return frozenset(self._next)

    async def reclaim(self, observed: Observed, reclaimed: Callable[[], None]) -> None:
        """Reclaim the memory of each domain of *observed* whose time has come, as far as the kernel can; call *reclaimed* after each.

        It runs in a thread, because pods determine how much memory there is and how much can be reclaimed, also while ``memory.max`` is
        written.
        """
        left = [*observed.left_over(LEFT_BEHIND)]
        self._next = {pod_uid: at for pod_uid, at in self._next.items() if pod_uid in left}
        for pod_uid in left:
            if self._next.get(pod_uid, -math.inf) <= (began := trio.current_time()):
                reclaim = partial(self.tree.domain(pod_uid).reclaim, lower=self.pods.gone(pod_uid))
                await trio.to_thread.run_sync(reclaim, abandon_on_cancel=True)
                now = trio.current_time()
                self._next[pod_uid] = now + max(self.apart, 5 * (now - began))
                reclaimed()
