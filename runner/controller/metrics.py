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
from collections.abc import Mapping

import attrs

from runner.controller.reconcile import Observed
from runner.kubelet.pod_cgroups import FLOAT
from runner.protocol.http import Exposition, HttpResponse, labels, not_found, ok, unavailable


@attrs.define
class ControllerCounters:
    """What has happened since the start; each only grows."""

    passes: Counter[str] = attrs.field(factory=Counter)
    """Reconcile passes by outcome: ``clean``, ``changed``, ``faulty``, ``frozen``."""
    pass_seconds: float = 0.0
    repairs: int = 0
    """Cpusets of this program's cgroups that had been changed by others."""
    removed: int = 0
    """Stale instances removed."""
    requests: Counter[str] = attrs.field(factory=Counter)
    """Requests by method."""
    refusals: Counter[str] = attrs.field(factory=Counter)
    """Refused requests by reason."""


def format_metrics(counters: ControllerCounters, observed: Observed | None, frozen: str) -> str:
    """Return everything in the text exposition format; *observed* is the tree after the last pass."""
    instances = observed.instances() if observed else {}
    floating = observed.groups.get(FLOAT) if observed else None
    metrics = Exposition("instance_cgroup_controller")
    metrics.add("instances", "gauge", "Instances in the tree.", {"": len(instances)})
    metrics.add(
        "instance_cpus", "gauge", "CPUs that instances hold.", {"": sum(len(g.cpus) for g in instances.values())}
    )
    metrics.add("float_cpus", "gauge", "CPUs that float runs on.", {"": len(floating.effective) if floating else 0})
    metrics.add("frozen", "gauge", "1 while the kubelet's state cannot be used.", {"": bool(frozen)})
    metrics.add("reconcile_passes_total", "counter", "Passes by outcome.", _labelled("outcome", counters.passes))
    metrics.add("reconcile_seconds_total", "counter", "Time spent in passes.", {"": counters.pass_seconds})
    metrics.add(
        "drift_repaired_total", "counter", "Cpusets found changed by others and put right.", {"": counters.repairs}
    )
    metrics.add("stale_removed_total", "counter", "Stale instances removed.", {"": counters.removed})
    metrics.add("requests_total", "counter", "Requests by method.", _labelled("method", counters.requests))
    metrics.add("refusals_total", "counter", "Refused requests by reason.", _labelled("reason", counters.refusals))
    return metrics.text()


def _labelled(label: str, counter: Mapping[str, int]) -> dict[str, float]:
    return {labels(**{label: value}): count for value, count in sorted(counter.items())}


def respond(
    target: str, counters: ControllerCounters, observed: Observed | None, frozen: str, reason: str
) -> HttpResponse:
    """Return the response for the path *target*; *reason* is why the last pass failed, empty if it did not."""
    if target == "/metrics":
        return HttpResponse(ok().status, format_metrics(counters, observed, frozen))
    if target == "/healthz":
        return ok(f"frozen: {frozen}" if frozen else "ok")
    if target == "/readyz":
        if frozen or reason:
            return unavailable(f"frozen: {frozen}" if frozen else f"the last pass failed: {reason}")
        return ok()
    return not_found(("/metrics", "/healthz", "/readyz"))
