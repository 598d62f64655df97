"""The vCPUs' CPUs: which they are, who places the threads there, what the guest sees of them, and vCPUs that are plugged later."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Cpu, Hardware, NumaNode
from runner.facts.host import HostFacts, Kvm, PodQos, parse_cpu_models
from runner.facts.memory_limits import MemoryLimits
from runner.placement.backends import AffinityPlacement, ControllerPlacement, CpuTuning
from runner.plan.argv.by_hand import pasteable
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.machine import EMULATED_CPU, VcpuHotplugPlan
from runner.plan.memory import VCPU
from runner.plan.render import plan_lines
from tests.support.plans import EPYC, FACTS, GIB, KERNEL, NODE, plan_of, problems, recorded


@given(st.frozensets(st.integers(0, 63), min_size=1, max_size=16), st.integers(1, 16))
def test_every_vcpu_has_a_cpu_of_its_own_or_there_is_no_plan(allowed: frozenset[int], count: int) -> None:
    facts = attrs.evolve(EPYC, allowed_cpus=CpuSet(allowed))
    text = f"{KERNEL}[cpu]\ncount = {count}\n"
    if count > len(allowed):
        assert problems(text, facts)[0].startswith(
            f"cpu.count: asks for {count} vCPUs, but this process may use {len(allowed)} CPUs"
        )
        return
    placement = plan_of(text, facts).placement
    assert len(placement.pins) == len(set(placement.pins)) == count
    assert CpuSet(placement.pins) == placement.cpus <= CpuSet(allowed)
    assert placement.shared == (count == len(allowed))
    assert not isinstance(placement, ControllerPlacement)
    if placement.shared:
        assert placement.float_cpus == CpuSet(allowed)
    else:
        assert placement.float_cpus == CpuSet(allowed) - placement.cpus


def test_sharing_is_warned_of() -> None:
    assert any(
        "all CPUs this process may use" in remark for remark in map(str, plan_of(KERNEL + "[cpu]\ncount = 8\n").remarks)
    )
    assert not any("all CPUs" in remark for remark in map(str, plan_of(KERNEL + "[cpu]\ncount = 7\n").remarks))


def test_requested_cpus_are_used() -> None:
    placement = plan_of(KERNEL + '[cpu]\ncount = 2\ncpus = "2,5"\n').placement
    assert isinstance(placement, AffinityPlacement)
    assert (placement.pins, str(placement.float_cpus)) == ((2, 5), "0-1,3-4,6-7")


def test_cpus_are_chosen_like_a_kubelet_would() -> None:
    placement = plan_of(KERNEL + "[cpu]\ncount = 8\n", EPYC).placement
    assert placement.pins == (4, 68, 5, 69, 6, 70, 7, 71), "whole cores of one L3 cache, and not CPU 0's"
    in_a_pod = attrs.evolve(EPYC, allowed_cpus=CpuSet.parse("1-20,65-84"))
    assert plan_of(KERNEL + "[cpu]\ncount = 40\n", in_a_pod).placement.pins[:4] == (1, 65, 2, 66)
    linear = KERNEL + '[cpu]\ncount = 40\npinning = "linear"\n'
    assert plan_of(linear, in_a_pod).placement.pins == (*range(1, 21), *range(65, 85)), "the i-th on the i-th"


def test_half_cores_and_distant_cpus_are_remarks() -> None:
    plan = plan_of(KERNEL + '[cpu]\ncount = 2\ncpus = "31-32"\n', EPYC)
    assert plan.placement.pins == (31, 32)
    assert any("CPUs 31-32 are half cores" in remark for remark in map(str, plan.remarks))
    assert any("the vCPUs lie on 2 NUMA nodes (1 on 0, 1 on 1)" in remark for remark in map(str, plan.remarks))
    assert not any("cores" in remark for remark in map(str, plan_of(KERNEL + "[cpu]\ncount = 2\n", EPYC).remarks))


def test_cpus_unknown_to_sysfs_are_refused() -> None:
    strange = attrs.evolve(FACTS, allowed_cpus=CpuSet(range(12)))
    assert problems(KERNEL + '[cpu]\ncount = 1\ncpus = "9"\n', strange) == [
        "cpu.cpus: cannot place vCPUs on CPUs 9: the host has no such online CPUs"
    ]
    assert problems(KERNEL + "[cpu]\ncount = 10\n", strange) == [
        "cpu.count: cannot choose 10 CPUs: only 8 may be used (0-7); ask for fewer vCPUs"
    ]


@pytest.mark.parametrize(
    ("text", "facts", "threads", "model"),
    [
        ("", {}, 2, "host,topoext=on"),
        ("", {"cpu_vendor": "GenuineIntel"}, 2, "host"),
        ('pinning = "linear"\n', {}, 1, "host"),
        ('model = "EPYC"\n', {}, 2, "EPYC"),
        ('accel = "tcg"\n', {}, 1, EMULATED_CPU),
        ('accel = "tcg"\nmodel = "Skylake-Server"\n', {}, 2, "Skylake-Server"),
    ],
)
def test_the_guest_sees_siblings_where_the_cpu_model_can_express_them(
    text: str, facts: dict[str, Any], threads: int, model: str
) -> None:
    machine = plan_of(f"{KERNEL}[cpu]\ncount = 4\n{text}", attrs.evolve(EPYC, **facts)).machine
    assert (machine.topology.threads, machine.cpu_model) == (threads, model)


def test_memory_of_another_numa_node_is_a_remark() -> None:
    large = KERNEL + '[cpu]\ncount = 8\n[memory]\nsize = "600GiB"\n'
    plan = plan_of(large, attrs.evolve(EPYC, memory=700 * GIB))
    assert plan.machine.topology.numa_nodes[0].bound == (), "from both: there is no other"
    only_there = attrs.evolve(EPYC, hardware=recorded("epyc-7543-2s-nps2"), memory_nodes=CpuSet([1, 2]))
    plan = plan_of(KERNEL + "[cpu]\ncount = 8\n", only_there)
    assert (
        "512MiB of memory for the vCPUs on the host's NUMA node 0 come from 1: it has not that much, or none that this pod may use"
        in map(str, plan.remarks)
    )
    unbound = plan_of(KERNEL + "[cpu]\ncount = 8\n[memory]\nbind = false\n", only_there)
    assert unbound.machine.topology.numa_nodes[0].bound == ()
    assert not any("come from" in remark for remark in map(str, unbound.remarks))


def test_memory_that_cannot_be_divided_is_refused() -> None:
    nodes = tuple(NumaNode(each, GIB, tuple(10 if each == other else 20 for other in range(20))) for each in range(20))
    hardware = Hardware(tuple(Cpu(cpu, cpu, cpu, cpu, cpu) for cpu in range(20)), nodes)
    many = attrs.evolve(FACTS, allowed_cpus=CpuSet(range(20)), hardware=hardware, memory_nodes=CpuSet(range(20)))
    text = KERNEL + '[cpu]\ncount = 20\n[memory]\nsize = "32MiB"\n'
    (problem,) = problems(text, many)
    assert problem.startswith("memory.size: cannot divide 33554432 bytes of memory among 20 NUMA nodes")
    assert problem.endswith('; give the guest more memory, or set cpu.topology = "flat"')
    topology = plan_of(text.replace("count", 'topology = "flat"\ncount'), many).machine.topology
    assert [each.memory for each in topology.numa_nodes] == [32 << 20]


@pytest.mark.parametrize(
    ("asked", "controller", "delegation", "backend"),
    [
        ("auto", None, None, "controller"),
        ("auto", "no", None, "delegated"),
        ("auto", "no", "no", "affinity"),
        ("controller", None, "no", "controller"),
        ("delegated", None, None, "delegated"),
        ("affinity", None, None, "affinity"),
    ],
)
def test_the_best_placement_that_works_or_the_one_asked_for(
    asked: str, controller: str | None, delegation: str | None, backend: str
) -> None:
    facts = attrs.evolve(NODE, controller_error=controller, delegation_error=delegation)
    count = 4 if backend == "controller" else 3
    plan = plan_of(f'{KERNEL}[cpu]\nplacement = "{asked}"\ncount = {count}\n', facts)
    assert plan.placement.backend == backend
    second_best = [str(remark) for remark in plan.remarks if "second best" in str(remark)]
    assert bool(second_best) == (backend == "affinity")
    if asked == "auto" and second_best:
        assert len(second_best[0]) < 200, "a laptop has it at each start"
        assert "examples/cpus.md, 'Whose CPUs'" in second_best[0]


@pytest.mark.parametrize("asked", ["controller", "delegated"])
def test_a_requested_placement_is_not_weakened(asked: str) -> None:
    facts = attrs.evolve(NODE, controller_error="because", controller_remedy="mount it", delegation_error="because")
    assert problems(f'{KERNEL}[cpu]\nplacement = "{asked}"\ncount = 4\n', facts) == [
        f"cpu.placement: {asked!r} cannot be used: because{'; mount it' * (asked == 'controller')}"
    ]
    facts = attrs.evolve(facts, delegation_error="no", pod=PodQos("guaranteed", "it says so"))
    [remark] = [each for each in plan_of(KERNEL, facts).remarks if "second best" in str(each)]
    assert str(remark).endswith("; no 'controller': because; mount it; no 'delegated': no")


@pytest.mark.parametrize(
    ("text", "invariant_tsc", "model"),
    [
        ("", False, "host,kvm-hint-dedicated=on"),
        ("", True, "host,invtsc=on,kvm-hint-dedicated=on"),
        ('model = "EPYC"\n', True, "EPYC,kvm-hint-dedicated=on"),
        ('model = "EPYC,kvm-hint-dedicated=off"\n', False, "EPYC,kvm-hint-dedicated=off"),
        ('accel = "tcg"\n', True, EMULATED_CPU),
        ('accel = "tcg"\nmodel = "qemu64"\n', False, "qemu64"),
        ('placement = "delegated"\n', True, "host,invtsc=on"),
    ],
)
def test_a_guest_with_cpus_of_its_own_learns_it(text: str, model: str, *, invariant_tsc: bool) -> None:
    facts = attrs.evolve(NODE, invariant_tsc=invariant_tsc)
    count = 2 if "delegated" in text else 4
    assert plan_of(f"{KERNEL}[cpu]\ncount = {count}\n{text}", facts).machine.cpu_model == model


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", []),
        ('idle = "guest"\n', ["cpu-pm=on"]),
        ('idle = "guest"\n[memory]\nlock = true\n', ["mem-lock=on", "cpu-pm=on"]),
        ('idle = "guest"\naccel = "tcg"\n', []),
    ],
)
def test_the_guest_idles_its_cpus_where_it_is_asked_to(text: str, options: list[str]) -> None:
    plan = plan_of(f"{KERNEL}[cpu]\n{text}", EPYC)
    argv = [line for line in pasteable(plan, None).splitlines() if "-overcommit" in line]
    assert [line.split()[1] for line in argv] == options
    remark = 'cpu.idle = "guest" has no effect without KVM; leave it out'
    assert (remark in map(str, plan.remarks)) is ("tcg" in text)


def test_with_the_controller_every_cpu_of_the_container_is_a_vcpus() -> None:
    plan = plan_of(f'{KERNEL}[cpu]\nplacement = "controller"\ncount = 4\n[memory]\nsize = "1GiB"\n', NODE)
    placement = plan.placement
    assert isinstance(placement, ControllerPlacement)
    assert (placement.pins, placement.shared) == ((2, 3, 10, 11), False)
    assert placement.pod_uid == "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
    assert str(placement.socket) == "/run/instance-cgroup-controller/controller.sock"
    # The pod is charged for the guest's memory only if all of it is touched while QEMU is in the pod's cgroup.
    assert plan.machine.ram.preallocate
    assert plan.start_timeout == 64
    assert not plan_of(KERNEL, FACTS).machine.ram.preallocate
    assert any("the node's shared CPUs" in line for line in plan_lines(plan))
    [problem] = problems(f'{KERNEL}[cpu]\nplacement = "controller"\ncount = 3\n', NODE)
    assert problem.startswith("cpu.count: asks for 3 vCPUs, but the container has 4 CPUs ('2-3,10-11')")
    assert problem.endswith("; give the container as many CPUs as vCPUs, whole ones with requests equal to limits")
    [problem] = problems(f'{KERNEL}[cpu]\nplacement = "controller"\ncount = 5\n', NODE)
    assert problem.startswith("cpu.count: asks for 5 vCPUs, but this process may use 4 CPUs ('2-3,10-11')")


def test_cpus_that_the_kernel_must_keep_free_need_the_controller() -> None:
    demand = f'{KERNEL}[cpu]\nexclusive = "enforced"\ncount = 4\n'
    placement = plan_of(f'{demand}placement = "controller"\n', NODE).placement
    assert isinstance(placement, ControllerPlacement)
    assert placement.enforced
    for backend in ("delegated", "affinity"):
        [problem] = problems(f'{demand}placement = "{backend}"\n', NODE)
        assert problem.startswith(f"cpu.exclusive: \"enforced\" cannot be had with placement '{backend}'; only the")


@pytest.mark.parametrize(
    ("spec", "swept"),
    [
        ('placement = "controller"\ncount = 4', True),
        ('placement = "controller"\ncount = 4\nsweep = false', False),
        ('placement = "delegated"\ncount = 3', True),
        ('placement = "delegated"\ncount = 4', False),
        ('placement = "affinity"\ncount = 3', False),
    ],
)
def test_misplaced_threads_are_moved_where_there_is_a_float_cgroup(spec: str, swept: bool) -> None:  # noqa: FBT001
    assert plan_of(f"{KERNEL}[cpu]\n{spec}\n", NODE).placement.sweep is swept


def test_a_pod_without_cpus_of_its_own_is_refused_unless_that_was_asked_for() -> None:
    shared = attrs.evolve(FACTS, pod=PodQos("burstable", "its oom_score_adj is 900"))
    [problem] = problems(KERNEL, shared)
    assert problem.startswith("cpu.placement: the pod is Burstable (its oom_score_adj is 900), so it shares its CPUs")
    assert "requests equal to limits" in problem
    for less in ("affinity", "delegated"):
        plan = plan_of(KERNEL + f'[cpu]\nplacement = "{less}"\n', attrs.evolve(shared, delegation_error=None))
        assert any(remark.startswith("the pod is Burstable") for remark in map(str, plan.remarks))


def test_vcpus_that_would_be_throttled_are_refused_in_a_pod_and_a_remark_elsewhere() -> None:
    text = KERNEL + "[cpu]\ncount = 2\n"
    assert any("cpu.max" in remark for remark in map(str, plan_of(text, attrs.evolve(FACTS, cpu_time=1.5)).remarks))
    pod = attrs.evolve(FACTS, allowed_cpus=CpuSet(range(1, 8)), pod=PodQos("guaranteed"))
    [problem] = problems(text, attrs.evolve(pod, cpu_time=1.5))
    assert problem.startswith("cpu.placement: cpu.max gives 2 vCPUs the time of 1.5 CPUs")
    assert not any("cpu.max" in remark for remark in map(str, plan_of(text, attrs.evolve(FACTS, cpu_time=2.0)).remarks))


def test_vcpus_placed_by_the_controller_are_not_under_the_pods_cpu_max() -> None:
    facts = attrs.evolve(
        FACTS,
        allowed_cpus=CpuSet([1, 2]),
        cpu_time=1.5,
        pod=PodQos("guaranteed"),
        container_uid="a",
        controller_error=None,
    )
    plan = plan_of(KERNEL + "[cpu]\ncount = 2\n", facts)
    assert plan.placement.backend == "controller"


@pytest.mark.parametrize("masked", ["2", "3-5"])
def test_a_cpu_mask_that_the_runtime_left_is_lifted_where_there_are_cgroups(masked: str) -> None:
    facts = attrs.evolve(
        FACTS,
        allowed_cpus=CpuSet.parse("2-5"),
        masked_cpus=CpuSet.parse(masked),
        pod=PodQos("guaranteed"),
        container_uid="a",
        controller_error=None,
    )
    plan = plan_of(KERNEL + "[cpu]\ncount = 4\n", facts)
    assert plan.placement.cpus == CpuSet.parse("2-5")
    [remark] = [each for each in map(str, plan.remarks) if "CPU mask" in each]
    assert (
        f"started with the CPU mask '{facts.allowed_cpus - facts.masked_cpus}' of its cpuset '2-5', and lifts it"
        in remark
    )


def test_a_cpu_mask_without_cgroups_is_kept_and_named_in_the_refusal() -> None:
    facts = attrs.evolve(FACTS, allowed_cpus=CpuSet.parse("2-3"), masked_cpus=CpuSet([3]))
    text = KERNEL + '[cpu]\nplacement = "affinity"\n'
    assert plan_of(text + "count = 1\n", facts).placement.cpus == CpuSet([2])
    [refused] = problems(text + "count = 2\n", facts)
    assert refused == (
        "cpu.count: asks for 2 vCPUs, but this process may use 1 CPUs ('2'): this process was started with the CPU mask '2', its "
        "cpuset has '2-3'; see CPUAffinity= in the systemd unit or system.conf of what started it, and taskset"
    )
    [refused] = problems(text + 'count = 1\ncpus = "3"\n', facts)
    assert "started with the CPU mask '2'" in refused


@pytest.mark.parametrize("model", ["EPYC,-svm", "host"])
def test_a_cpu_model_that_qemu_lists_is_accepted(model: str) -> None:
    facts = attrs.evolve(FACTS, cpu_models=frozenset({"EPYC", "host"}))
    assert plan_of(f'{KERNEL}[cpu]\nmodel = "{model}"\n', facts).machine.cpu_model == model


def test_the_names_of_cpu_models_are_read_from_every_qemus_list() -> None:
    old = "Available CPUs:\nx86 EPYC                  (alias of EPYC-v4)\nx86 EPYC-v1\n\nRecognized CPUID flags:\n  3dnow abm\n"
    new = "Available CPUs:\n  EPYC                  (alias of EPYC-v4)\n  EPYC-v1\n\nRecognized CPUID flags:\n  3dnow abm\n"
    assert parse_cpu_models(old) == parse_cpu_models(new) == {"EPYC", "EPYC-v1"}
    assert parse_cpu_models("") == set()


TUNED = 'latency = "low"\ncache_ways = 2\nmemory_bandwidth = 40\n'


def test_only_the_controller_can_tune_the_cpus() -> None:
    spec = f'{KERNEL}[cpu]\nplacement = "affinity"\n{TUNED}'
    remarks = [remark.found for remark in plan_of(spec).remarks]
    assert any("have no effect with placement 'affinity'" in each for each in remarks)
    assert not any("have no effect" in remark.found for remark in plan_of(spec.replace(TUNED, "")).remarks)
    plan = plan_of(f'{KERNEL}[cpu]\nplacement = "controller"\ncount = 4\n{TUNED}[memory]\nsize = "1GiB"\n', NODE)
    assert isinstance(plan.placement, ControllerPlacement)
    assert plan.placement.tuning == CpuTuning("low", 2, 40)
    assert not any("have no effect" in remark.found for remark in plan.remarks)


# -- vCPUs that are plugged while the guest runs -----------------------------------------------------------------------


def test_a_machine_has_the_cores_that_may_be_plugged_later() -> None:
    plan = plan_of(KERNEL + '[cpu]\ncount = 2\ntopology = "flat"\n[hotplug]\ncpus = 6\n')
    argv = qemu_argv(plan.machine, QemuFds(1, 2, (3,), {"kernel": 4}))
    assert argv[argv.index("-smp") + 1] == "cpus=2,maxcpus=6,sockets=1,cores=6,threads=1"
    assert "takes up to 6 vCPUs while it runs" in "\n".join(plan_lines(plan))
    without = plan_of(KERNEL + '[cpu]\ncount = 2\ntopology = "flat"\n')
    argv = qemu_argv(without.machine, QemuFds(1, 2, (3,), {"kernel": 4}))
    assert argv[argv.index("-smp") + 1] == "cpus=2,sockets=1,cores=2,threads=1"
    assert plan.machine.ram.overhead - without.machine.ram.overhead == 4 * VCPU


def test_memory_that_is_locked_is_counted_for_all_vcpus_that_there_may_be() -> None:
    text = KERNEL + '[cpu]\ntopology = "flat"\n[memory]\nlock = true\n'
    facts = attrs.evolve(FACTS, limits=MemoryLimits(lockable=None, may_lock=True))
    locked, more = plan_of(text, facts), plan_of(text + "[hotplug]\ncpus = 4\n", facts)
    assert more.machine.lockable > locked.machine.lockable


@pytest.mark.parametrize(
    ("cpu", "most", "facts", "problem"),
    [
        ('count = 4\ntopology = "flat"', 3, FACTS, "is 3, and the guest starts with 4 vCPUs; set it to 4 at least"),
        (
            "count = 4",
            8,
            EPYC,
            "needs a guest with one socket of cores with one thread each, and this one sees 2 threads",
        ),
        (
            'cpus = "1,33"\ncount = 2',
            8,
            EPYC,
            "needs a guest with one socket of cores with one thread each, and this one sees 2 s",
        ),
    ],
)
def test_what_later_vcpus_would_falsify_is_refused(cpu: str, most: int, facts: HostFacts, problem: str) -> None:
    facts = attrs.evolve(facts, kvm=Kvm(None))
    found = problems(KERNEL + f"[cpu]\n{cpu}\n[hotplug]\ncpus = {most}\n", facts)
    assert [each[: len(problem) + 14] for each in found] == [f"hotplug.cpus: {problem}"]


def test_a_guest_that_is_shown_a_cache_gets_no_cpu_of_another() -> None:
    text = KERNEL + '[cpu]\ncount = 2\ncpus = "1-2"\n'
    facts = attrs.evolve(EPYC, kvm=Kvm(None))
    hotplug = plan_of(text + "[hotplug]\ncpus = 4\n", facts).machine.vcpu_hotplug
    assert hotplug == VcpuHotplugPlan(4, alike=True)
    flat = text.replace("count", 'topology = "flat"\ncount') + "[hotplug]\ncpus = 4\n"
    assert plan_of(flat, facts).machine.vcpu_hotplug == VcpuHotplugPlan(4, alike=False)


def test_a_pod_that_was_resized_can_be_started_again_with_fewer_vcpus_than_cpus() -> None:
    facts = attrs.evolve(FACTS, controller_error=None, container_uid="uid", allowed_cpus=CpuSet(range(4)))
    text = KERNEL + '[cpu]\ncount = 2\nplacement = "controller"\ntopology = "flat"\n'
    assert [each.split(":")[0] for each in problems(text, facts)] == ["cpu.count"]
    placement = plan_of(text + "[hotplug]\ncpus = 4\n", facts).placement
    assert isinstance(placement, ControllerPlacement)
    assert placement.cpus == CpuSet(range(4))
    assert len(placement.pins) == 2
