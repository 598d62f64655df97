"""Metrics in Prometheus' text exposition format, written by prometheus_client.

PID 1 imports this module at the first request for its metrics.
"""

from __future__ import annotations

import http
from collections.abc import Iterable, Sequence

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runner.protocol.http import HttpResponse


class _Collected(Collector):
    """Metrics that were read at once; the library's registry is for programs that count as they go."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics


Samples = Iterable[tuple[Sequence[object], float]]
"""The values of a metric's labels, in the order of their names, and its value there."""


def gauge(name: str, text: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    """Return a gauge with its help *text* and *labels*."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def counter(name: str, text: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    """Return a counter with its help *text* and *labels*; *name* ends in ``_total``."""
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for label_values, value in samples:
        family.add_metric([str(each) for each in label_values], value)
    return family


def metrics_response(metrics: Iterable[Metric]) -> HttpResponse:
    """Return *metrics* in the text exposition format 0.0.4."""
    text = generate_latest(_Collected(metrics)).decode()
    return HttpResponse(http.HTTPStatus.OK, text, CONTENT_TYPE_PLAIN_0_0_4)
