"""Probes and metrics of an instance by HTTP; imported only where the command line asks for them.

========== =================================================================================================
/healthz   200 for as long as this program answers; the body says whether the guest starts, runs or stops
/readyz    200 while the guest runs and is not silent, no stop was requested, and every thread is in its place
/metrics   text exposition format 0.0.4
========== =================================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import attrs
import trio

from runner.errors import HostError, explain
from runner.instance.supervisor import Supervisor
from runner.placement.threads import Receipt, sentences
from runner.plan.instance import InstancePlan
from runner.plan.networks import BridgedPlan
from runner.protocol.http import HttpResponse, not_found, ok, open_http_listeners, serve_http, unavailable

log = logging.getLogger(__name__)

READ_AGAIN = 1.0
"""Seconds for which one reading of all threads answers every request: it is three files for each of them."""


@attrs.define
class Probes:
    """Answers requests."""

    supervisor: Supervisor
    plan: InstancePlan
    _receipt: Receipt | None = None
    _read_at: float = 0.0

    def show(self, target: str) -> HttpResponse:
        """Return the response to a request for *target*."""
        try:
            if target == "/metrics":
                return self._metrics()
            if target == "/healthz":
                return ok(self.supervisor.guest_state.phase)
            if target == "/readyz":
                return self._ready()
        except HostError as error:
            return unavailable(explain(error))
        return not_found(("/metrics", "/healthz", "/readyz"))

    def _ready(self) -> HttpResponse:
        receipt = self._now()
        if receipt is None:
            return unavailable(self.supervisor.guest_state.phase)
        if (silence := self.supervisor.guest_state.signs_of_life.silence) is not None:
            return unavailable(f"the guest is silent: {silence}")
        violations = receipt.violations()
        return unavailable("\n".join(sentences(violations))) if violations else ok()

    def _now(self) -> Receipt | None:
        """Return where every thread is, read at most :data:`READ_AGAIN` seconds ago; ``None`` unless the guest runs."""
        read, now = self.supervisor.guest_state.read, trio.current_time()
        if read is None:
            return None
        if self._receipt is None or now - self._read_at > READ_AGAIN:
            self._receipt, self._read_at = read(), now
        return self._receipt

    def _metrics(self) -> HttpResponse:
        from runner.instance.metrics import instance_metrics  # here, because not everything that is probed is scraped
        from runner.protocol.exposition import metrics_response

        return metrics_response(instance_metrics(self.supervisor, self.plan, self._now()))


@asynccontextmanager
async def probes_served(supervisor: Supervisor, plan: InstancePlan, address: tuple[str, int]) -> AsyncIterator[None]:
    """Answer at *address* for as long as the block runs; see :func:`~runner.protocol.http.parse_address`."""
    listeners = await open_http_listeners(*address)
    log.info("probes and metrics are served port=%d", listeners[0].socket.getsockname()[1])
    taken = [each.pod.name for each in plan.networks if isinstance(each, BridgedPlan) and each.pod is not None]
    if taken:
        log.warning(
            "the guest has the address of %s: connections to it reach the guest, and not --http", ", ".join(taken)
        )
    async with supervisor.background_task(partial(serve_http, listeners, Probes(supervisor, plan).show)):
        yield
