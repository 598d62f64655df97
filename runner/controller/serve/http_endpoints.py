"""The HTTP endpoints of the controller: its metrics, and the probes of the kubelet.

========== ============================================================================
/metrics   text exposition format 0.0.4
/healthz   200 while the controller works; the text says whether its decisions are frozen
/readyz    503 while its decisions are frozen, after a pass that failed, without the
           device filter, and after the end of a process that keeps a right
========== ============================================================================

A lost device filter or process is restored by a restart of this program, which the kubelet does when ``/healthz`` fails. An endpoint whose
data cannot be read from the host answers 503.
"""

from __future__ import annotations

import attrs
import trio

from runner.base.errors import HostError, explain
from runner.controller.metrics import LoopStatus, controller_metrics
from runner.controller.privileged_process import PrivilegedProcess
from runner.controller.privileged_start import DeviceFilter
from runner.controller.serve.handover import handovers
from runner.controller.serve.reports import Reports
from runner.controller.serve.seccomp import SeccompCheck
from runner.controller.tree.loop import ReconcileLoop
from runner.protocol.exposition import metrics_response, reported_metrics, text_of
from runner.protocol.http import HttpResponse, LatestResponse, not_found, ok, unavailable

_METRICS_FOR = 0.1
"""Seconds for which the metrics are cached, however many clients ask."""


@attrs.define(eq=False)
class HttpEndpoints:
    """The endpoints about the present state of *loop*, *device_filter* and *processes*, and what the instances report."""

    loop: ReconcileLoop
    device_filter: DeviceFilter
    processes: tuple[PrivilegedProcess, ...]
    reports: Reports
    seccomp: SeccompCheck
    _metrics: LatestResponse = attrs.field(init=False)

    @_metrics.default
    def _made_for_all(self) -> LatestResponse:
        return LatestResponse(self._make_metrics, _METRICS_FOR)

    async def respond(self, target: str) -> HttpResponse:
        """Return the response for the path *target*; the metrics may be :data:`_METRICS_FOR` old."""
        await trio.lowlevel.checkpoint()
        try:
            match target:
                case "/metrics":
                    return await self._metrics.get()
                case "/healthz":
                    return self._health()
                case "/readyz":
                    return self._readiness()
        except HostError as error:
            return unavailable(explain(error))
        return not_found(("/metrics", "/healthz", "/readyz"))

    async def _make_metrics(self) -> HttpResponse:
        """Make all metrics, in steps between which the requests of instances have their turn."""
        registered = self.loop.recently_observed().instances().keys()
        await self.reports.fetch(registered)
        observed = self.loop.recently_observed()
        status = LoopStatus(
            self.loop.counters,
            observed,
            tuple(handovers(self.loop.state, observed)),
            self.seccomp.without(observed.floats()),
            bool(self.loop.frozen_because),
            self.loop.float_cpus(),
            self.reports.ages(registered),
        )
        texts = []
        for each in (*controller_metrics(status), *reported_metrics(self.reports.latest(registered))):
            texts.append(text_of([each]))
            await trio.lowlevel.checkpoint()
        return metrics_response("".join(texts))

    def _health(self) -> HttpResponse:
        if lost := self._lost():
            return unavailable(lost)
        return ok(f"frozen: {frozen}" if (frozen := self.loop.frozen_because) else "ok")

    def _lost(self) -> str:
        """Return the lost parts that only a restart of this program restores; empty if there are none."""
        lost = [each.missing for each in self.processes if each.lost]
        if self.device_filter.lost and self.device_filter.missing:
            lost.append(explain(self.device_filter.missing))
        return lost[0] if lost else ""

    def _readiness(self) -> HttpResponse:
        if missing := self.device_filter.missing:
            return unavailable(explain(missing))
        if lost := self._lost():
            return unavailable(lost)
        if frozen := self.loop.frozen_because:
            return unavailable(f"frozen: {frozen}")
        return unavailable(f"the last pass failed: {self.loop.error}") if self.loop.error else ok()
