"""Probes and metrics of an instance by HTTP; imported only where the command line asks for them.

========== =================================================================================================
/healthz   200 for as long as this program answers; the body says whether the guest starts, runs or stops
/readyz    200 while the guest is ready (:mod:`runner.instance.watch.readiness`) and every thread is in its place
/metrics   text exposition format 0.0.4
========== =================================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio

from runner.base.errors import HostError, explain
from runner.base.events import InstanceEvent
from runner.instance.supervisor import Supervisor
from runner.kernel.sockets import Socket
from runner.placement.threads import Receipt, sentences
from runner.plan.instance import InstancePlan
from runner.plan.networks import BridgedPlan
from runner.protocol.http import (
    HttpResponse,
    adopted_http_listeners,
    not_found,
    ok,
    open_http_listeners,
    serve_http,
    unavailable,
)

if TYPE_CHECKING:
    from runner.instance.renewal.carried import CarriedProbes  # only a runner that is renewed carries any
    from runner.instance.watch.foreign_time import ForeignTime

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
    _foreign: ForeignTime | None = None
    """``None`` until the vCPUs are pinned, and where all threads share their CPUs."""

    def placed(self, receipt: Receipt) -> None:
        """Begin to count what runs on the vCPUs' CPUs, none of which runs yet."""
        from runner.instance.watch.foreign_time import ForeignTime  # here, because not everything that runs is probed

        if not self.plan.placement.shared:
            with suppress(HostError):  # no reason to give up a start
                begun = self._foreign
                self._foreign = (
                    ForeignTime.begin(self.supervisor.procfs, receipt) if begun is None else begun.succeeded_by(receipt)
                )

    def carried(self, listeners: Sequence[Socket]) -> CarriedProbes:
        """Return what the program that renews this one must know of them."""
        from runner.instance.renewal.carried import CarriedProbes
        from runner.kernel.carried import CarriedFd

        numbers = tuple(CarriedFd(each.fileno()) for each in listeners)
        return CarriedProbes(numbers, None if self._foreign is None else self._foreign.carried)

    def take_over(self, carried: CarriedProbes) -> None:
        """Continue what the runner before exec has counted."""
        from runner.instance.watch.foreign_time import ForeignTime

        if carried.foreign is not None:
            self._foreign = ForeignTime.adopt(self.supervisor.procfs, carried.foreign)

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
        self.supervisor.guest_state.ask_qemu()  # the answer is for the next probe: this one must not wait
        receipt, unready = self._now(), self.supervisor.guest_state.unready
        if receipt is None or unready:
            return unavailable(unready)
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
        from runner.instance.watch.metrics import (
            instance_metrics,  # here, because not everything that is probed is scraped
        )
        from runner.protocol.exposition import metrics_response

        return metrics_response(instance_metrics(self.supervisor, self.plan, self._now(), self._foreign))


@asynccontextmanager
async def probes_served(supervisor: Supervisor, plan: InstancePlan, address: tuple[str, int]) -> AsyncIterator[None]:
    """Answer at *address* for as long as the block runs; see :func:`~runner.protocol.http.parse_address`."""
    with supervisor.carry_over.taking("probes") as carried:
        probes, listeners = Probes(supervisor, plan), list[Socket]()
        if carried is not None:
            listeners = adopted_http_listeners([each.number for each in carried.listeners])
            probes.take_over(carried)
    if carried is None:
        listeners = open_http_listeners(*address)
        _log_addresses(plan, listeners)
    supervisor.carry_over.offer("probes", lambda: probes.carried(listeners))
    supervisor.guest_state.placed = probes.placed
    try:
        async with supervisor.background_task(partial(serve_http, listeners, probes.show)):
            yield
    finally:
        for each in listeners:
            each.close()


def _log_addresses(plan: InstancePlan, listeners: Sequence[Socket]) -> None:
    log.info(InstanceEvent.PROBES_SERVED, listeners[0].getsockname()[1])
    taken = [each.pod.name for each in plan.networks if isinstance(each, BridgedPlan) and each.pod is not None]
    if taken:
        log.warning(InstanceEvent.PROBES_UNREACHABLE, ", ".join(taken))
