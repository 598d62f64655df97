from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

from runner.cpuset import CpuSet
from runner.facts.host import PodQos
from runner.instance.discover import read_pod
from runner.kernel.files import cpu_limits
from runner.kernel.procfs import Procfs
from runner.plan.host_checks import qos_of_oom_score_adj, shared_cpus, too_little_time, too_old

SLICE = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod3ceda12c_3ee9_40fa_9f42_61428fe654a6.slice"
IN_KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
ALL, SOME = CpuSet(range(8)), CpuSet([2, 3])


@pytest.mark.parametrize(
    ("value", "qos"), [(-997, "guaranteed"), (1000, "besteffort"), (2, "burstable"), (999, "burstable"), (0, "")]
)
def test_the_kubelets_oom_score_adj_gives_the_qos_class(value: int, qos: str) -> None:
    assert qos_of_oom_score_adj(value) == qos


@pytest.mark.parametrize(
    ("pod", "allowed", "found"),
    [
        (None, ALL, None),
        (PodQos("guaranteed"), SOME, None),
        (PodQos(), SOME, None),
        (PodQos("guaranteed"), ALL, "the pod may use every CPU of the node ('0-7'), so none is its own"),
        (PodQos("burstable", "a word"), SOME, "the pod is Burstable (a word), so it shares its CPUs with other pods"),
        (PodQos("besteffort", "a word"), SOME, "the pod is BestEffort (a word), so it shares its CPUs with other pods"),
    ],
)
def test_a_pods_cpus_are_exclusive_or_shared(pod: PodQos | None, allowed: CpuSet, found: str | None) -> None:
    assert shared_cpus(pod, allowed, ALL) == found


def test_ownership_is_unknown_where_the_set_of_all_cpus_is_unknown() -> None:
    assert shared_cpus(PodQos("guaranteed"), ALL, CpuSet()) is None


@pytest.mark.parametrize(("time", "enough"), [(None, True), (2.0, True), (1.5, False)])
def test_two_vcpus_take_the_time_of_two_cpus(time: float | None, *, enough: bool) -> None:
    assert (too_little_time(time, 2) is None) == enough


@pytest.mark.parametrize(
    ("version", "old"),
    [("7.2.0", False), ("7.1.99", True), ("10.0.2", False), ("6.2.0", True), ("v8", True), ("", True), ("7.2", False)],
)
def test_the_oldest_qemu(version: str, *, old: bool) -> None:
    assert (too_old(version) is not None) == old


@pytest.mark.parametrize(
    ("cgroup", "score", "environment", "pod"),
    [
        ("/", 0, {}, None),
        ("/", 200, {}, None),
        ("/", 0, IN_KUBERNETES, PodQos("", "its oom_score_adj is 0")),
        ("/", -997, IN_KUBERNETES, PodQos("guaranteed", "its oom_score_adj is -997")),
        (f"/{SLICE}/crio-4a.scope", -997, {}, PodQos("burstable", f"its cgroup is /{SLICE}/crio-4a.scope")),
        ("/kubepods-of-mine", 0, {}, None),
    ],
)
def test_a_pod_is_recognised_by_its_cgroup_or_its_environment(
    tmp_path: Path, cgroup: str, score: int, environment: Mapping[str, str], pod: PodQos | None
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"1:cpu:/other\n0::{cgroup}\n")
    (tmp_path / "self" / "oom_score_adj").write_text(f"{score}\n")
    assert read_pod(Procfs(tmp_path), environment) == pod


def test_cpu_time_is_limited_by_every_group_above(tmp_path: Path) -> None:
    for path, text in ((".", "max 100000\n"), ("a", "150000 100000\n"), ("a/b", "400000 200000\n"), ("a/b/c", None)):
        (tmp_path / path).mkdir(exist_ok=True)
        if text is not None:
            (tmp_path / path / "cpu.max").write_text(text)
    assert list(cpu_limits(PurePosixPath(tmp_path), "/a/b/c")) == [2.0, 1.5]
