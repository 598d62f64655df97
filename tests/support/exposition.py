"""A page of metrics, read by prometheus_client's own parser."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def families(page: str, prefix: str) -> dict[str, Metric]:
    """Return the metrics of *page* by their names without *prefix*, with which all of them begin."""
    found = {metric.name: metric for metric in text_string_to_metric_families(page)}
    assert all(name.startswith(prefix) for name in found)
    return {name.removeprefix(prefix): metric for name, metric in found.items()}


def figures(page: str, prefix: str = "instance_runner_") -> dict[str, float]:
    """Return the values of *page* by name and labels, such as ``child_restarts_total{role="anchor"}``; labels are sorted."""
    found = {}
    for metric in families(page, prefix).values():
        for sample in metric.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix(prefix) + (f"{{{labels}}}" if labels else "")] = sample.value
    return found
