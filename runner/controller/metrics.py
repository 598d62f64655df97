"""The controller's metrics, and its probes for the kubelet.

========== ============================================================================
/metrics   text exposition format 0.0.4
/healthz   200 while the controller works; the text says whether its decisions are frozen
/readyz    503 while its decisions are frozen, and after a pass that failed
========== ============================================================================

Without the device filter :func:`runner.controller.main.respond_about` answers for the latter two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs
from prometheus_client.metrics_core import Metric

from runner.controller.reconcile import Observed
from runner.kubelet.pod_cgroups import FLOAT
from runner.protocol.exposition import Samples, counter, gauge, metrics_response
from runner.protocol.http import HttpResponse, not_found, ok, unavailable


@attrs.define
class ControllerCounters:
    """What has happened since the start; each only grows."""

    passes: Counter[str] = attrs.field(factory=lambda: Counter(clean=0, changed=0, faulty=0, frozen=0))
    """Reconcile passes by outcome, each from the start: Prometheus sees no increase in a series that begins with 1."""
    pass_seconds: float = 0.0
    repairs: int = 0
    """Cpusets of this program's cgroups that had been changed by others."""
    removed: int = 0
    """Stale instances removed."""
    requests: Counter[str] = attrs.field(factory=Counter)
    """Requests by method."""
    refusals: Counter[str] = attrs.field(factory=Counter)
    """Refused requests by reason."""


def controller_metrics(counters: ControllerCounters, observed: Observed | None, frozen: str) -> Iterator[Metric]:
    """Yield every metric; *observed* is the tree after the last pass."""
    instances = observed.instances() if observed else {}
    floating = observed.groups.get(FLOAT) if observed else None
    cpus = sum(len(group.cpus) for group in instances.values())
    yield _gauge("instances", "Instances in the tree.", len(instances))
    yield _gauge("instance_cpus", "CPUs that instances hold.", cpus)
    yield _gauge("float_cpus", "CPUs that float runs on.", len(floating.effective) if floating else 0)
    yield _gauge("frozen", "1 while the kubelet's state cannot be used.", bool(frozen))
    yield _counter("reconcile_passes_total", "Passes by outcome.", counters.passes, "outcome")
    yield _counter("reconcile_seconds_total", "Time spent in passes.", counters.pass_seconds)
    yield _counter("drift_repaired_total", "Cpusets found changed by others and put right.", counters.repairs)
    yield _counter("stale_removed_total", "Stale instances removed.", counters.removed)
    yield _counter("requests_total", "Requests by method.", counters.requests, "method")
    yield _counter("refusals_total", "Refused requests by reason.", counters.refusals, "reason")


def _gauge(name: str, text: str, value: float) -> Metric:
    return gauge(f"instance_cgroup_controller_{name}", text, [((), value)])


def _counter(name: str, text: str, value: float | Counter[str], *labels: str) -> Metric:
    samples: Samples = (
        [((each,), count) for each, count in sorted(value.items())] if isinstance(value, Counter) else [((), value)]
    )
    return counter(f"instance_cgroup_controller_{name}", text, samples, labels)


def respond(
    target: str, counters: ControllerCounters, observed: Observed | None, frozen: str, reason: str
) -> HttpResponse:
    """Return the response for the path *target*; *reason* is why the last pass failed, empty if it did not."""
    if target == "/metrics":
        return metrics_response(controller_metrics(counters, observed, frozen))
    if target == "/healthz":
        return ok(f"frozen: {frozen}" if frozen else "ok")
    if target == "/readyz":
        if frozen or reason:
            return unavailable(f"frozen: {frozen}" if frozen else f"the last pass failed: {reason}")
        return ok()
    return not_found(("/metrics", "/healthz", "/readyz"))
