"""Metrics in Prometheus' text exposition format, written by prometheus_client.

PID 1 imports this module at the first request for its metrics.
"""

from __future__ import annotations

import http
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runner.protocol.http import HttpResponse
from runner.protocol.instance_metrics import FAMILIES, PREFIX, REPORTED, Report, Samples


class _Collected(Collector):
    """A fixed set of metrics; the library's own registry is for programs that count continuously."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics


def gauge(name: str, text: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    """Return a gauge with its help *text* and *labels*."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def counter(name: str, text: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    """Return a counter with its help *text* and *labels*; *name* ends in ``_total``."""
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def instance_metrics(samples: Iterable[tuple[str, Samples]]) -> Iterator[Metric]:
    """Yield the metrics of an instance from its *samples*, by family name."""
    for name, values in samples:
        family = FAMILIES[name]
        write = counter if family.is_counter else gauge
        yield write(PREFIX + name, family.help, values, [label.name for label in family.labels])


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for label_values, value in samples:
        family.add_metric([str(each) for each in label_values], value)
    return family


def reported_metrics(reports: Mapping[str, Report]) -> Iterator[Metric]:
    """Yield the metrics of all instances that have sent reports; *reports* are by the uid of the pod."""
    for family in FAMILIES.values():
        samples = [
            ((pod_uid, *labels), value)
            for pod_uid, report in reports.items()
            for labels, value in report.get(family.name, {}).items()
        ]
        if samples:
            write = counter if family.is_counter else gauge
            names = [REPORTED + label.name if label.text else label.name for label in family.reported_labels]
            yield write(PREFIX + family.name, family.help, samples, ["pod_uid", *names])


def text_of(metrics: Iterable[Metric]) -> str:
    """Return *metrics* in the text exposition format 0.0.4."""
    return generate_latest(_Collected(metrics)).decode()


def metrics_response(metrics: Iterable[Metric] | str) -> HttpResponse:
    """Return the response with *metrics*, or with their text."""
    text = metrics if isinstance(metrics, str) else text_of(metrics)
    return HttpResponse(http.HTTPStatus.OK, text, CONTENT_TYPE_PLAIN_0_0_4)
