"""Each rule of inspect where it holds, where it does not, and where that is unknown."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.judgement import Judgement, Level
from runner.facts.memory_limits import MemoryCharge
from runner.facts.threads import ThreadStatus
from runner.inspect.observation import (
    GuestMemory,
    InstanceObservation,
    KubeletObservation,
    Observation,
    ObservedGuarantee,
    PodCharge,
    Unknown,
)
from runner.inspect.rules import (
    InspectionReport,
    as_the_kubelet_says,
    cpus_exclusive,
    judge,
    memory_charged,
    memory_local,
    vcpus_alone,
)
from runner.placement.children import Role
from runner.placement.threads import CgroupPaths, ObservedThread, ThreadRules

MIB = 1 << 20
UID = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
POD, FLOAT, MINE = "/kubepods.slice/pod.slice/main.scope", "/stelia/float", f"/stelia/instance-{UID}"


def seen(
    role: str,
    tid: int,
    cpus: str,
    cgroup: str = FLOAT,
    vcpu: int | None = None,
    *,
    pid: int | None = None,
    name: str | None = None,
    kernel: bool = False,
) -> ObservedThread:
    status = ThreadStatus(
        pid or tid, tid, name or role, cgroup, CpuSet.parse(cpus), CpuSet([0]), min(CpuSet.parse(cpus))
    )
    return ObservedThread(Role(role), vcpu, status, kernel)


VCPU_0 = seen("vcpu", 11, "2", MINE, 0, pid=10, name="CPU 0/KVM")
VCPU_1 = seen("vcpu", 12, "3", MINE, 1, pid=10, name="CPU 1/KVM")
RULES = ThreadRules(CpuSet.parse("2-3"), (None, None), shared=False, cgroups=CgroupPaths("", FLOAT, MINE, ends=True))
GOOD = InstanceObservation(
    name=UID,
    backend="controller",
    guarantee=ObservedGuarantee("arranged"),
    rules=RULES,
    numa_node_of={0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1},
    threads=(
        seen("runner", 1, "0-1,4-5"),
        seen("anchor", 2, "2-3", POD, name="sleep"),
        seen("emulator", 10, "0-1,4-5", name="qemu-system-x86"),
        VCPU_0,
        VCPU_1,
    ),
    others=(
        seen("other", 20, "2", "/", name="kworker/2:0", kernel=True),
        seen("other", 21, "0-5", "/", name="kthreadd", kernel=True),
        seen("sandbox", 22, "0-5", "/kubepods.slice/pod.slice/pause.scope", name="pause"),
    ),
    hidden="",
    memory=GuestMemory({0: 64 * MIB}, {0: 128 * MIB}),
    charge=PodCharge(POD, MemoryCharge(64 * MIB, 128 * MIB)),
)
KUBELET = KubeletObservation(
    floats=(CpuSet.parse("0-1,4"),),
    shared_pool=CpuSet.parse("0-1,4-5"),
    online=CpuSet.parse("0-4"),
    instances={UID: CpuSet.parse("2-3")},
    given={UID: CpuSet.parse("2-3")},
)


def without(*threads: ObservedThread) -> tuple[ObservedThread, ...]:
    return tuple(each for each in GOOD.threads if each not in threads)


def found(level: Level, judgements: Iterable[Judgement]) -> str:
    """Return what *judgements*, which all have this *level*, have found."""
    judged = list(judgements)
    assert {each.level for each in judged} == {level}, judged
    assert len({each.subject for each in judged}) == 1
    assert all(each.why and (each.remedy or level is not Level.ERROR) for each in judged)
    return "; ".join(each.found for each in judged)


violations = partial(found, Level.ERROR)
unknown = partial(found, Level.UNKNOWN)
holds = partial(found, Level.OK)


def everything(report: InspectionReport) -> list[Judgement]:
    return [*(judgement for each in report.instances for judgement in each.judgements), *report.kubelet]


def test_a_good_instance_passes_every_rule() -> None:
    report = judge(Observation("node", (GOOD,), KUBELET))
    assert [(each.subject, each.level) for each in everything(report)] == [
        (rule, Level.OK) for rule in ("vcpus", "exclusive", "local", "charged", "kubelet")
    ]
    assert report.verdict is Level.OK


def test_an_isolated_partition_takes_the_cpus_from_the_anchors_and_from_the_rest_of_the_node() -> None:
    """Their effective CPUs are then others than their ``cpuset.cpus``; float's and the instance's stay as they were."""
    elsewhere = CpuSet.parse("0-1,4-5")
    threads = tuple(
        attrs.evolve(each, thread=attrs.evolve(each.thread, cpus=elsewhere)) if each.role is Role.ANCHOR else each
        for each in GOOD.threads
    )
    sealed = attrs.evolve(GOOD, guarantee=ObservedGuarantee("enforced"), threads=threads, others=GOOD.others[:1])
    report = judge(Observation("node", (sealed,), KUBELET))
    assert report.verdict is Level.OK
    exclusive = report.instances[0].judgements[1]
    assert exclusive.found.partition(" and ")[0] == "only sleepers (anchors: 0, pod sandboxes: 0)"


def test_an_unknown_is_no_violation_and_one_violation_outweighs_it() -> None:
    hidden = attrs.evolve(GOOD, hidden="hidden", memory=Unknown("hidden"), charge=Unknown("hidden"))
    report = judge(Observation("container", (hidden,), Unknown("hidden")))
    assert [each.level for each in everything(report)] == [Level.OK, *[Level.UNKNOWN] * 4]
    assert report.verdict is Level.UNKNOWN
    remote = attrs.evolve(hidden, memory=GuestMemory({1: 1}, {}))
    assert judge(Observation("container", (remote,), Unknown("hidden"))).verdict is Level.ERROR


@pytest.mark.parametrize(
    ("threads", "sentence"),
    [
        pytest.param(
            (*without(VCPU_1), seen("vcpu", 12, "2", MINE, 1)), "2 vCPU threads share CPU 2", id="two on one CPU"
        ),
        pytest.param(
            (*without(VCPU_1), seen("vcpu", 12, "2-3", MINE, 1)),
            "vcpu 1 (thread 12, 'vcpu') may run on '2-3' instead of one CPU of '2-3'",
            id="not pinned",
        ),
        pytest.param(
            (*without(VCPU_1), seen("vcpu", 12, "4", MINE, 1)), "may run on '4' instead of one CPU", id="elsewhere"
        ),
        pytest.param(
            (*without(VCPU_1), seen("vcpu", 12, "3", FLOAT, 1)),
            f"is in the cgroup '{FLOAT}' instead of '{MINE}'",
            id="not confined",
        ),
        pytest.param(without(VCPU_0), "vCPU 0 has no thread", id="the first is missing"),
    ],
)
def test_vcpus_that_are_not_alone(threads: tuple[ObservedThread, ...], sentence: str) -> None:
    assert sentence in violations(vcpus_alone(attrs.evolve(GOOD, threads=threads)))


def ruled(rules: ThreadRules, *threads: ObservedThread) -> InstanceObservation:
    return attrs.evolve(GOOD, rules=rules, threads=threads)


def test_every_vcpu_of_the_rules_has_a_thread() -> None:
    three = attrs.evolve(RULES, pins=(None,) * 3)
    assert violations(vcpus_alone(ruled(three, *GOOD.threads))) == "vCPU 2 has no thread"
    gone = ruled(RULES, *without(VCPU_0, VCPU_1))
    assert violations(vcpus_alone(gone)) == "vCPU 0 has no thread; vCPU 1 has no thread"
    assert "starts, or has ended" in unknown(vcpus_alone(attrs.evolve(gone, rules=attrs.evolve(RULES, pins=()))))


def test_the_cgroup_counts_only_where_there_is_one_and_by_its_end() -> None:
    namespaced = [seen("vcpu", 11 + n, str(2 + n), f"/../..{MINE}", n) for n in range(2)]
    assert holds(vcpus_alone(ruled(RULES, *namespaced)))
    affinity = [seen("vcpu", 11 + n, str(2 + n), POD, n) for n in range(2)]
    assert holds(vcpus_alone(ruled(attrs.evolve(RULES, cgroups=None), *affinity)))


def test_a_known_pin_counts() -> None:
    swapped = ruled(attrs.evolve(RULES, pins=(3, 2)), VCPU_0, VCPU_1)
    assert violations(vcpus_alone(swapped)) == (
        "vcpu 0 (thread 11, 'CPU 0/KVM') may run on '2' instead of '3'; "
        "vcpu 1 (thread 12, 'CPU 1/KVM') may run on '3' instead of '2'"
    )


def test_a_thread_of_the_instance_outside_of_its_cgroup() -> None:
    outside = seen("emulator", 13, "0", POD, pid=10, name="worker")
    verdict = violations(cpus_exclusive(ruled(RULES, *GOOD.threads, outside)))
    assert verdict == f"emulator (thread 13, 'worker') is in the cgroup '{POD}' instead of '{FLOAT}'"
    assert holds(vcpus_alone(ruled(RULES, *GOOD.threads, outside)))


def test_threads_that_run_there_without_competing_are_counted() -> None:
    assert holds(cpus_exclusive(GOOD)) == (
        "only sleepers (anchors: 1, pod sandboxes: 1) and kernel threads (bound to one CPU: 1, others, in no "
        "cgroup: 1) may run there besides the vCPUs"
    )


def test_a_kernel_thread_in_a_pods_cgroup_is_an_intruder() -> None:
    """``vhost-`` before Linux 6.4 is such a thread: it does the network I/O of one instance."""
    vhost = seen("other", 30, "2", POD, name="vhost-10", kernel=True)
    assert "'vhost-10'" in violations(cpus_exclusive(attrs.evolve(GOOD, others=(vhost,))))


def test_a_missing_vcpu_thread_is_a_violation() -> None:
    assert violations(vcpus_alone(ruled(RULES, VCPU_0))) == "vCPU 1 has no thread"


def test_an_intruder_is_named_by_process_with_the_cpus_it_may_use() -> None:
    others = (
        seen("other", 30, "0-2", "/system.slice/stress.service", pid=30, name="stress"),
        seen("other", 31, "3", "/system.slice/stress.service", pid=30, name="stress"),
    )
    assert violations(cpus_exclusive(attrs.evolve(GOOD, others=others))) == (
        "other (thread 30, 'stress') and 1 more of process 30 in the cgroup '/system.slice/stress.service' may "
        "run on '2-3', which belong to vCPUs"
    )


def test_the_instances_own_threads_intrude_too() -> None:
    threads = (*GOOD.threads, seen("dnsmasq", 9, "0-5"))
    assert "dnsmasq (thread 9" in violations(cpus_exclusive(attrs.evolve(GOOD, threads=threads)))


def test_another_instances_vcpu_is_an_intruder() -> None:
    others = (seen("other", 40, "3", "/stelia/instance-b", name="CPU 0/KVM"),)
    assert "'CPU 0/KVM'" in violations(cpus_exclusive(attrs.evolve(GOOD, others=others)))


def test_one_intruder_is_a_violation_even_if_some_threads_are_hidden() -> None:
    hidden = attrs.evolve(GOOD, hidden="others are hidden")
    assert unknown(cpus_exclusive(hidden)) == "others are hidden"
    shell = (*GOOD.threads, seen("other", 50, "2-3", POD, name="sh"))
    assert "'sh'" in violations(cpus_exclusive(attrs.evolve(hidden, threads=shell)))


def test_without_threads_exclusivity_is_unknown() -> None:
    assert "starts, or has ended" in unknown(cpus_exclusive(attrs.evolve(GOOD, threads=(), others=())))


def test_memory_on_another_numa_node() -> None:
    for memory in (GuestMemory({0: MIB, 1: MIB}, {}), GuestMemory({}, {0: MIB, 1: MIB})):
        verdict = violations(memory_local(attrs.evolve(GOOD, memory=memory)))
        assert verdict == "1 MiB on NUMA node 0, 1 MiB on NUMA node 1 of the guest's RAM is mapped; its CPUs are on '0'"
    both = attrs.evolve(
        GOOD, rules=attrs.evolve(RULES, cpus=CpuSet.parse("3-4")), memory=GuestMemory({0: MIB, 1: MIB}, {})
    )
    assert holds(memory_local(both))


def test_memory_is_judged_by_its_binding() -> None:
    """The CPUs' NUMA node may have no memory that the pod may use."""
    elsewhere = GuestMemory({1: MIB}, {}, CpuSet([1]))
    assert holds(memory_local(attrs.evolve(GOOD, memory=elsewhere))) == (
        "1 MiB on NUMA node 1 of the guest's RAM is mapped; it is bound to '1', its CPUs are on '0'"
    )
    mixed = GuestMemory({0: MIB, 1: MIB}, {}, CpuSet([0, 1]), remote_bytes=4096)
    assert "bound to '0-1'" in violations(memory_local(attrs.evolve(GOOD, memory=mixed)))


def test_memory_that_cannot_be_seen() -> None:
    assert unknown(memory_local(attrs.evolve(GOOD, memory=Unknown("no right")))) == "no right"
    assert unknown(memory_charged(attrs.evolve(GOOD, memory=Unknown("no right")))) == "no right"
    assert unknown(memory_charged(attrs.evolve(GOOD, charge=Unknown("no cgroup")))) == "no cgroup"
    assert "cannot be seen" in unknown(memory_local(attrs.evolve(GOOD, numa_node_of={})))


@pytest.mark.parametrize(
    ("memory", "huge", "sentence"),
    [
        (63, 128, "only 63 MiB of memory: at least 1 MiB was first touched in another cgroup"),
        (640, 28, "only 28 MiB of huge pages: at least 100 MiB was"),
    ],
)
def test_memory_charged_elsewhere(memory: int, huge: int, sentence: str) -> None:
    charge = PodCharge(POD, MemoryCharge(memory * MIB, huge * MIB))
    assert sentence in violations(memory_charged(attrs.evolve(GOOD, charge=charge)))


def test_float_is_the_shared_pool_as_far_as_it_is_online() -> None:
    assert holds(as_the_kubelet_says(KUBELET))
    other = attrs.evolve(KUBELET, floats=(CpuSet.parse("0-4"),))
    assert violations(as_the_kubelet_says(other)) == "float has '0-4', but the kubelet's shared pool is '0-1,4'"


def test_float_avoids_an_instance_that_outlives_its_pod_unless_no_other_cpu_is_left() -> None:
    gone = attrs.evolve(KUBELET, shared_pool=CpuSet.parse("0-5"), given={})
    assert violations(as_the_kubelet_says(gone)) == (f"instance {UID} has '2-3', but the kubelet gives its pod ''")
    all_held = attrs.evolve(gone, instances={UID: CpuSet.parse("0-5")}, floats=(CpuSet.parse("0-4"),))
    assert "float" not in violations(as_the_kubelet_says(all_held))


def test_an_instance_with_more_than_its_pods() -> None:
    too_many = attrs.evolve(KUBELET, given={UID: CpuSet.parse("2")})
    assert "has '2-3', but the kubelet gives its pod '2'" in violations(as_the_kubelet_says(too_many))


def test_policy_none_gives_no_exclusive_cpus() -> None:
    assert holds(as_the_kubelet_says(attrs.evolve(KUBELET, given=None)))


def test_under_resource_claims_float_may_lack_what_the_driver_reserves_and_have_nothing_of_a_claim() -> None:
    claimed = attrs.evolve(KUBELET, by_claims=True, floats=(CpuSet.parse("1,4"),))
    assert holds(as_the_kubelet_says(claimed))
    assert "float has '1-2'" in violations(as_the_kubelet_says(attrs.evolve(claimed, floats=(CpuSet.parse("1-2"),))))
    assert "has '2-3', but" in violations(as_the_kubelet_says(attrs.evolve(claimed, given={UID: CpuSet.parse("2")})))


def test_an_empty_shared_pool_leaves_float_unknown() -> None:
    assert "reserved CPUs" in unknown(as_the_kubelet_says(attrs.evolve(KUBELET, shared_pool=CpuSet())))
    assert unknown(as_the_kubelet_says(Unknown("no file"))) == "no file"
