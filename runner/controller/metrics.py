"""The controller's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import attrs
from prometheus_client.metrics_core import Metric

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.base.version import VERSION
from runner.controller.serve.handover import Handover
from runner.controller.tree.model import ISOLATED, Observed
from runner.controller.tune.disturbances import UNSET_KINDS
from runner.kernel.small_files import read_image_digest
from runner.kernel.waiting import shortages
from runner.protocol.exposition import counter, gauge
from runner.protocol.instance_metrics import Samples


@attrs.define
class ControllerCounters:
    """Counters since the start; all except :attr:`disturbances` only grow."""

    passes: Counter[str] = attrs.field(factory=lambda: Counter(clean=0, changed=0, faulty=0, frozen=0))
    """Reconcile passes by outcome, each present from the start: Prometheus sees no increase in a series that begins with 1."""
    pass_seconds: float = 0.0
    repairs: int = 0
    """Cpusets and partitions of this program's cgroups, and mount options, that had been changed by others."""
    removed: int = 0
    """Stale instances removed."""
    requests: Counter[str] = attrs.field(factory=Counter)
    """Requests by method."""
    refusals: Counter[str] = attrs.field(factory=Counter)
    """Refused requests by reason."""
    oom_kills: int = 0
    """Processes that the kernel has ended because the domain of their instance was out of memory."""
    task_failures: Counter[str] = attrs.field(factory=Counter)
    """Failures of tasks that were begun again, by task."""
    disturbances: Counter[str] = attrs.field(factory=Counter)
    """Settings of the machine that could not be changed for the instances' CPUs in the last pass, by kind."""


@frozen
class LoopStatus:
    """The state that the metrics show: the tree after the last pass, and findings about it."""

    counters: ControllerCounters
    observed: Observed | None = None
    handovers: Collection[Handover] = ()
    without_seccomp: Collection[str] = ()
    """The pods that may write the files of their groups."""
    frozen: bool = False
    """Whether decisions are frozen."""
    float_cpus: CpuSet = attrs.field(factory=CpuSet)
    """The CPUs of every float."""
    report_ages: Mapping[str, float] = attrs.field(factory=dict)
    """Seconds since the latest report of each instance that has sent one."""


def controller_metrics(status: LoopStatus) -> Iterator[Metric]:
    """Yield every metric."""
    counters, observed = status.counters, status.observed
    instances = observed.instances() if observed else {}
    cpus = sum(len(group.cpus) for group in instances.values())
    yield gauge(
        "instance_cgroup_controller_build_info",
        "The controller's version, and the digest of its program, where it is known.",
        [((VERSION, read_image_digest()), 1)],
        ("version", "digest"),
    )
    yield _gauge("instances", "Instances in the tree.", len(instances))
    yield _gauge("instance_cpus", "CPUs that instances hold.", cpus)
    sealed = sum(group.partition == ISOLATED for group in instances.values())
    yield _gauge("instances_enforced", "Instances whose CPUs the kernel keeps all others off.", sealed)
    yield gauge(
        "instance_cgroup_controller_instance_enforced",
        "1 while the kernel keeps all others off the instance's CPUs, by the uid of its pod.",
        [((pod_uid,), group.partition == ISOLATED) for pod_uid, group in sorted(instances.items())],
        ("pod_uid",),
    )
    yield gauge(
        "instance_cgroup_controller_instance_report_age_seconds",
        "How long ago the instance has reported; absent for one that has not.",
        [((pod_uid,), age) for pod_uid, age in sorted(status.report_ages.items())],
        ("pod_uid",),
    )
    yield _gauge("float_cpus", "CPUs that float runs on.", len(status.float_cpus))
    changing = {cpu for each in status.handovers for cpu in each.cpus}
    yield _gauge("handover_cpus", "CPUs of pods on which another pod's instance still runs.", len(changing))
    yield _gauge("pods_without_seccomp", "Pods that may write the files of their groups.", len(status.without_seccomp))
    yield _gauge("frozen", "1 while the kubelet's state cannot be used.", status.frozen)
    yield gauge(
        "instance_cgroup_controller_disturbances",
        "Settings of the machine that disturb instances' CPUs and could not be changed, by kind.",
        [((kind,), counters.disturbances[kind]) for kind in UNSET_KINDS],
        ("kind",),
    )
    yield _counter("reconcile_passes_total", "Passes by outcome.", counters.passes, "outcome")
    yield _counter("reconcile_seconds_total", "Time spent in passes.", counters.pass_seconds)
    yield _counter(
        "drift_repaired_total",
        "Cpusets, partitions and mount options found changed by others and put right.",
        counters.repairs,
    )
    yield _counter("stale_removed_total", "Stale instances removed.", counters.removed)
    yield _counter("requests_total", "Requests by method.", counters.requests, "method")
    yield _counter(
        "oom_kills_total", "Processes that the kernel has ended, out of memory in float.", counters.oom_kills
    )
    yield _counter("task_failures_total", "Tasks that failed and were begun again.", counters.task_failures, "task")
    yield _counter(
        "shortages_total", "Calls that were made again as the kernel was short of something.", shortages.count
    )
    yield _counter("refusals_total", "Refused requests by reason.", counters.refusals, "reason")


def _gauge(name: str, text: str, value: float) -> Metric:
    return gauge(f"instance_cgroup_controller_{name}", text, [((), value)])


def _counter(name: str, text: str, value: float | Counter[str], *labels: str) -> Metric:
    samples: Samples = (
        [((each,), count) for each, count in sorted(value.items())] if isinstance(value, Counter) else [((), value)]
    )
    return counter(f"instance_cgroup_controller_{name}", text, samples, labels)
