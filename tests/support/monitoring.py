"""What examples/monitoring has: the rules, the queries of the dashboard, and the names of metrics in both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from runner.controller.metrics import ControllerCounters, LoopStatus, controller_metrics
from runner.protocol.exposition import metrics_response
from runner.protocol.instance_metrics import FAMILIES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
OURS = ("instance_runner_", "instance_cgroup_controller_")
THEIRS = {
    "kube_pod_container_status_last_terminated_exitcode": {"container", "namespace", "pod", "uid"},
    "kube_pod_container_status_restarts_total": {"container", "namespace", "pod", "uid"},
}
"""Metrics of kube-state-metrics and their labels (its docs/metrics/workload/pod-metrics.md)."""

GRAFANA = {"$__rate_interval": "10s", "$__range": "5m", "$node": ".*", "$instance": ".*"}
"""What Grafana puts in the place of its variables."""


def exported_by_an_instance() -> set[str]:
    """Return the names of an instance's metrics without ``instance_runner_``."""
    return set(FAMILIES)


def exported_by_a_controller() -> set[str]:
    """Return the names of a controller's metrics without ``instance_cgroup_controller_``."""
    text = metrics_response(controller_metrics(LoopStatus(ControllerCounters()))).text
    return set(re.findall(r"^# TYPE instance_cgroup_controller_(\w+)", text, re.MULTILINE))


def exported() -> set[str]:
    """Return the whole names of all of our metrics."""
    ours = zip(OURS, (exported_by_an_instance(), exported_by_a_controller()), strict=True)
    return {prefix + name for prefix, names in ours for name in names}


def documents(name: str) -> list[dict[str, Any]]:
    """Return the objects in a file of the example."""
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def rules() -> dict[str, Any]:
    """Return the rules, in the form of a file of Prometheus'."""
    [found] = documents("rules.yaml")
    return dict(found["spec"])


def alerts() -> dict[str, str]:
    """Return the expression of each alert, by its name."""
    return {rule["alert"]: rule["expr"] for group in rules()["groups"] for rule in group["rules"]}


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return dict(json.loads((EXAMPLES / "dashboard.json").read_text()))


def queries() -> Iterator[tuple[str, str]]:
    """Yield the title of each panel with each of its queries."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def filled_in(query: str) -> str:
    """Return a *query* of the dashboard as Grafana asks it: for all nodes and instances."""
    return re.sub(r"\$\w+", lambda found: GRAFANA[found[0]], query)


def selected(expression: str) -> set[str]:
    """Return the names of metrics in a PromQL *expression*: the words that are neither label, function nor keyword."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', " ", expression)
    bare = re.sub(r"\b(?:on|by|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    return {word for word in re.findall(r"\b[a-z_]+\b(?!\s*\()", bare) if word not in {"and", "or", "unless", "bool"}}
