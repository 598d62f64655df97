from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.facts.host import Kvm, PodQos
from runner.host.facts_reader import read_huge_limit
from runner.host.own_pod import read_pod
from runner.kernel.character_devices import why_no_machine
from runner.kernel.limits import cpu_limits
from runner.kernel.procfs import Procfs
from runner.plan.host_checks import kvm_remedy, qos_of_oom_score_adj, shared_cpus, too_little_time, too_old

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
        (
            PodQos("guaranteed"),
            ALL,
            "the pod is Guaranteed, but may use every CPU of the node ('0-7'), so none is its own",
        ),
        (PodQos(), ALL, "the pod may use every CPU of the node ('0-7'), so none is its own"),
        (PodQos("burstable", "a word"), SOME, "the pod is Burstable (a word), so it shares its CPUs with other pods"),
        (PodQos("burstable", "", SOME), SOME, None),
        (PodQos("besteffort", "", CpuSet([1, 2, 3])), SOME, None),
        (
            PodQos("burstable", "a word", CpuSet([2])),
            SOME,
            "the pod is Burstable (a word), so it shares its CPUs with other pods",
        ),
        (PodQos("", "", SOME), ALL, "the pod may use every CPU of the node ('0-7'), so none is its own"),
        (PodQos("besteffort", "a word"), SOME, "the pod is BestEffort (a word), so it shares its CPUs with other pods"),
    ],
)
def test_a_pods_cpus_are_exclusive_or_shared(pod: PodQos | None, allowed: CpuSet, found: str | None) -> None:
    assert shared_cpus(pod, allowed, ALL) == found


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOENT, ""),
        (errno.EPERM, ""),
        (errno.EACCES, "let every user open it, on the node"),
        (errno.ENODEV, "load kvm_intel or kvm_amd on the node"),
    ],
)
def test_what_makes_kvm_usable_is_that_of_its_error(number: int, words: str) -> None:
    """A runtime makes the node of a device in the container, whether or not the kernel has a driver for it."""
    remedy = kvm_remedy(Kvm(f"/dev/kvm: {os.strerror(number)}"))
    assert (remedy[: len(words)], bool(remedy)) == (words, bool(words))


def test_another_hypervisor_keeps_kvm_from_making_machines() -> None:
    busy, short, other = (
        why_no_machine(OSError(number, os.strerror(number))) for number in (errno.EBUSY, errno.EMFILE, errno.EIO)
    )
    assert busy.startswith(
        "Device or resource busy: another hypervisor (VirtualBox, VMware) has the CPUs' virtualization"
    )
    assert "open: raise its limit (RLIMIT_NOFILE" in short
    assert other.startswith("Input/output error: ")


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
        (
            "/",
            500,
            {**IN_KUBERNETES, "DRA_CPUSET_1b2c": "2-3", "DRA_CPUSET_3d4e": "6", "OTHER": "7"},
            PodQos("burstable", "its oom_score_adj is 500", CpuSet([2, 3, 6])),
        ),
        ("/", 0, {**IN_KUBERNETES, "DRA_CPUSET_1b2c": "all"}, PodQos("", "its oom_score_adj is 0")),
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


MIB = 1 << 20
NO_ENVIRONMENT: Mapping[str, str] = {}


def written(root: Path, files: Mapping[str, str]) -> PurePosixPath:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return PurePosixPath(root)


@pytest.mark.parametrize(
    ("container", "pod", "variable", "limit"),
    [
        ("max", str(80 * MIB), None, 80),  # containerd's default: the pod has a limit, its container has none
        ("max", str(80 * MIB), str(60 * MIB), 60),  # the pod's limit is that of all containers together
        (str(60 * MIB), str(80 * MIB), str(80 * MIB), 60),
        ("max", "max", str(80 * MIB), 80),
        ("max", "max", "0", None),  # how the Downward API gives a limit that the container does not have
        ("max", "max", None, None),
    ],
)
def test_the_limit_of_huge_pages_is_the_containers_the_pods_or_the_downward_apis(
    tmp_path: Path, container: str, pod: str, variable: str | None, limit: int | None
) -> None:
    environment = {} if variable is None else {"LIMITS_HUGEPAGES_2MI": variable, "LIMITS_HUGEPAGES_1GI": "0"}
    files = {
        "kubepods/hugetlb.2MB.max": "max",
        "kubepods/pod/hugetlb.2MB.max": pod,
        "kubepods/pod/hugetlb.2MB.rsvd.max": "max",
        "kubepods/pod/container/hugetlb.2MB.max": container,
    }
    found = read_huge_limit(written(tmp_path, files), "/kubepods/pod/container", 2 * MIB, environment)
    assert found == (None if limit is None else limit * MIB)


def test_in_a_cgroup_namespace_only_the_downward_api_tells_the_limit_of_huge_pages(tmp_path: Path) -> None:
    root = written(tmp_path, {"hugetlb.2MB.max": "max", "memory.max": str(2 << 30)})
    assert read_huge_limit(root, "/", 2 * MIB, NO_ENVIRONMENT) is None
    assert read_huge_limit(root, "/", 2 * MIB, {"LIMITS_HUGEPAGES_2MI": str(80 << 30)}) == 80 << 30


@pytest.mark.parametrize("value", ["", "80Gi", "-1", "81920", "٤", "2097152" * 700])
def test_a_limit_of_huge_pages_that_the_downward_api_would_not_give_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read_huge_limit(PurePosixPath(tmp_path), "/", 2 * MIB, {"LIMITS_HUGEPAGES_2MI": value})
    assert str(caught.value) == (
        f"cannot use LIMITS_HUGEPAGES_2MI={value!r}: it must be bytes, a multiple of the page size 2097152; set it with"
        " resourceFieldRef: limits.hugepages-2Mi, without a divisor"
    )
