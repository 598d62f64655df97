"""What the controller tells Prometheus and the kubelet's probes.

========== ============================================================================
/metrics   text exposition format 0.0.4
/healthz   200 while the controller works; says so if its decisions are frozen
/readyz    503 while its decisions are frozen, and after a pass that failed
========== ============================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from runner.controller.reconcile import Observed
from runner.kubelet.pod_cgroups import FLOAT
from runner.protocol.http import Exposition, Page, labels, not_found, ok, unavailable


@attrs.define
class ControllerCounters:
    """What has happened since the start; counters only ever grow."""

    passes: Counter[str] = attrs.field(factory=Counter)
    """Reconcile passes by outcome: ``clean``, ``changed``, ``faulty``, ``frozen``."""
    pass_seconds: float = 0.0
    repairs: int = 0
    """Cpusets of ours that were found other than this program had left them."""
    removed: int = 0
    """Stale instances removed."""
    requests: Counter[str] = attrs.field(factory=Counter)
    """Requests by method."""
    refusals: Counter[str] = attrs.field(factory=Counter)
    """Refused requests by reason."""


def format_metrics(tally: ControllerCounters, observed: Observed | None, frozen: str) -> str:
    """Return everything in the text exposition format; *observed* is the tree after the last pass."""
    instances = observed.instances() if observed else {}
    floating = observed.groups.get(FLOAT) if observed else None
    said = Exposition("instance_cgroup_controller")
    said.add("instances", "gauge", "Instances in the tree.", {"": len(instances)})
    said.add("instance_cpus", "gauge", "CPUs that instances hold.", {"": sum(len(g.cpus) for g in instances.values())})
    said.add("float_cpus", "gauge", "CPUs that float runs on.", {"": len(floating.effective) if floating else 0})
    said.add("frozen", "gauge", "1 while the kubelet's state cannot be used.", {"": bool(frozen)})
    said.add("reconcile_passes_total", "counter", "Passes by outcome.", _labelled("outcome", tally.passes))
    said.add("reconcile_seconds_total", "counter", "Time spent in passes.", {"": tally.pass_seconds})
    said.add("drift_repaired_total", "counter", "Cpusets found changed by others and put right.", {"": tally.repairs})
    said.add("stale_removed_total", "counter", "Stale instances removed.", {"": tally.removed})
    said.add("requests_total", "counter", "Requests by method.", _labelled("method", tally.requests))
    said.add("refusals_total", "counter", "Refused requests by reason.", _labelled("reason", tally.refusals))
    return said.text()


def _labelled(label: str, counter: Mapping[str, int]) -> dict[str, float]:
    return {labels(**{label: value}): count for value, count in sorted(counter.items())}


def page(target: str, tally: ControllerCounters, observed: Observed | None, frozen: str, reason: str) -> Page:
    """Return what *target* shows; *reason* is what was wrong with the last pass, empty if nothing was."""
    if target == "/metrics":
        return Page(ok().status, format_metrics(tally, observed, frozen))
    if target == "/healthz":
        return ok(f"frozen: {frozen}" if frozen else "ok")
    if target == "/readyz":
        if frozen or reason:
            return unavailable(f"frozen: {frozen}" if frozen else f"the last pass failed: {reason}")
        return ok()
    return not_found(("/metrics", "/healthz", "/readyz"))
