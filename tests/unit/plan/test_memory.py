"""The guest's memory: the plan, refusals with their numbers, and the estimated overhead."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.facts.disk import FileFact
from runner.facts.file_formats import identify
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.facts.host import HostFacts, Kvm, User, Virtiofsd
from runner.facts.memory_limits import HugeFact, MemoryLimits
from runner.plan.argv.by_hand import Paths
from runner.plan.argv.preallocator import preallocator_argv
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.instance import InstancePlan, plan_instance
from runner.plan.machine import Accel
from runner.plan.memory import memory_overhead, refuse_too_few_pages
from runner.plan.problems import Problems
from runner.plan.render import plan_lines
from runner.spec.instance import parse_instance
from tests.support.fake_kernel import FAKE_KERNEL

MIB, GIB = 1 << 20, 1 << 30
KERNEL = '[boot]\nkernel = "/k"\n'


def hardware(free: tuple[int, int] = (1024, 1024), big: tuple[int, int] = (4, 4)) -> Hardware:
    """Return two NUMA nodes of 4 cores with 2 threads (n and n + 8) and 16 GiB; *free* and *big* pages of 2048 and 8."""
    cpus = tuple(Cpu(cpu, cpu % 8, cpu % 8 // 4, cpu % 8 // 4, cpu % 8 // 4, cpu % 8 // 4) for cpu in range(16))
    nodes = tuple(
        NumaNode(
            node,
            16 * GIB,
            (10, 20) if node == 0 else (20, 10),
            (HugepagePool(2 * MIB, 2048, free[node]), HugepagePool(GIB, 8, big[node])),
        )
        for node in (0, 1)
    )
    return Hardware(cpus, nodes)


FACTS = HostFacts(
    allowed_cpus=CpuSet.parse("2-5,10-13"),
    hardware=hardware(),
    memory_nodes=CpuSet([0, 1]),
    memory=8 * GIB,
    state_directory=PurePosixPath("/s"),
    limits=MemoryLimits(memory=8 * GIB, huge={2 * MIB: HugeFact(), GIB: HugeFact()}),
    preallocator=("python3", "-IS", "preallocate.py"),
    qemu=PurePosixPath("/q"),
    sleep=PurePosixPath("/sleep"),
    dnsmasq=PurePosixPath("/d"),
    virtiofsd=Virtiofsd(PurePosixPath("/v"), rust=True, version=(1, 13)),
    files={
        PurePosixPath("/k"): FileFact("file", 1, format=identify(FAKE_KERNEL)),
        PurePosixPath("/srv"): FileFact("directory"),
    },
    users={"nobody": User("nobody", 65534, 65534), "root": User("root", 0, 0)},
    kvm=Kvm(None, group_id=104, mode=0o660),
    container_uid="3ceda12c-3ee9-40fa-9f42-61428fe654a6",
    controller_error=None,
)
ALL_CPUS = '[cpu]\ncount = "all"\nplacement = "controller"\n'
ALONE = attrs.evolve(FACTS, controller_error="no")


def plan_of(text: str, facts: HostFacts = FACTS) -> InstancePlan:
    return plan_instance("spec.toml", parse_instance("spec.toml", (KERNEL + text).encode()), facts)


def problems(text: str, facts: HostFacts = FACTS) -> list[str]:
    with pytest.raises(SpecError) as caught:
        plan_of(text, facts)
    return [str(problem) for problem in caught.value.problems]


def test_huge_pages_are_divided_bound_and_allocated_near_their_vcpus() -> None:
    plan = plan_of(ALL_CPUS + '[memory]\nsize = "5GiB"\nhugepages = "1GiB"\n')
    nodes = plan.machine.topology.numa_nodes
    assert [(each.memory, each.bound) for each in nodes] == [(3 * GIB, (0,)), (2 * GIB, (1,))]
    argv = preallocator_argv(plan.machine, plan.placement, (12, 13))
    assert argv[3:] == ["1", f"12:{3 * GIB}:{GIB}:0:2-3,10-11:4", f"13:{2 * GIB}:{GIB}:1:4-5,12-13:4"]
    words = qemu_argv(plan.machine, QemuFds(10, 11, (12, 13), {"kernel": 20}))
    assert (
        "memory-backend-file,id=ram1,size=2048M,mem-path=/proc/self/fd/13,share=on,host-nodes=1,policy=bind,prealloc=on,"
        "prealloc-threads=4"
    ) in words
    by_hand = qemu_argv(plan.machine, Paths(plan))
    assert (
        "memory-backend-memfd,id=ram1,size=2048M,share=on,hugetlb=on,hugetlbsize=1024M,host-nodes=1,policy=bind,"
        "prealloc=on,prealloc-threads=4" in by_hand
    )
    assert any(
        "memory in huge pages of 1GiB, all taken before the guest runs; at most" in line for line in plan_lines(plan)
    )
    assert plan.start_timeout == 60 + 20


@pytest.mark.parametrize(
    ("keys", "facts", "expected"),
    [
        ("", ALONE, False),
        ("prealloc = true", ALONE, True),
        ("", FACTS, True),
        ('hugepages = "2MiB"', ALONE, True),
        ("lock = true", ALONE, True),
    ],
)
def test_memory_is_preallocated_where_required(keys: str, facts: HostFacts, expected: bool) -> None:  # noqa: FBT001
    cpu = '[cpu]\ncount = "all"\n'
    assert plan_of(f"{cpu}[memory]\n{keys}\n", facts).machine.ram.preallocate is expected
    if expected and keys != "prealloc = true":
        [problem] = problems(f"{cpu}[memory]\n{keys}\nprealloc = false\n", facts)
        assert problem.startswith("memory.prealloc: must not be false: ")


def test_qemu_allocates_private_memory_itself() -> None:
    machine = plan_of("[cpu]\ncount = 2\n[memory]\nshared = false\nprealloc = true\nlock = true\n", ALONE).machine
    words = qemu_argv(machine, QemuFds(10, 11, (), {"kernel": 20}))
    assert (
        "memory-backend-ram,id=ram,size=512M,share=off,host-nodes=0,policy=bind,prealloc=on,prealloc-threads=2" in words
    )
    assert words[words.index("-overcommit") + 1] == "mem-lock=on"


@pytest.mark.parametrize(
    ("text", "change", "problem"),
    [
        (
            ALL_CPUS + '[memory]\nsize = "4GiB"\nhugepages = "2MiB"\n',
            {"hardware": hardware((1024, 1000))},
            (
                "memory.hugepages: 1024 pages of 2MiB (2GiB) are to come from NUMA node 1, where 1000 (2000MiB) are free; on "
                "the node: echo 2072 > /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages (with the static "
                "Memory Manager drain the node, stop the kubelet, and remove its old memory_manager_state)"
            ),
        ),
        (
            ALL_CPUS + '[memory]\nsize = "4GiB"\nhugepages = "2MiB"\n',
            {"limits": MemoryLimits(huge={2 * MIB: HugeFact(promised=1)})},
            "memory.hugepages: 2048 pages of 2MiB are wanted on all NUMA nodes together, where 2048 are free, of which 1 are p",
        ),
        (
            ALL_CPUS + '[memory]\nsize = "4GiB"\nhugepages = "1GiB"\n',
            {"limits": MemoryLimits(huge={2 * MIB: HugeFact()})},
            "memory.hugepages: this host has no huge pages of 1GiB; it knows 2MiB",
        ),
        (
            ALL_CPUS + '[memory]\nsize = "4GiB"\nhugepages = "1GiB"\n',
            {"limits": MemoryLimits()},
            "memory.hugepages: this host has no huge pages of 1GiB; it knows none at all",
        ),
        (
            ALL_CPUS + '[memory]\nsize = "2047MiB"\nhugepages = "2MiB"\n',
            {},
            "memory.size: 2047MiB is not a multiple of the huge pages' 2MiB; 2GiB is",
        ),
        (
            ALL_CPUS + '[memory]\nsize = "1GiB"\nhugepages = "1GiB"\n',
            {},
            "memory.size: cannot divide 1073741824 bytes of memory among 2 NUMA nodes in pages of 1073741824 bytes",
        ),
        (
            ALL_CPUS + '[memory]\nsize = "2GiB"\nhugepages = "2MiB"\n',
            {"limits": MemoryLimits(huge={2 * MIB: HugeFact(limit=GIB)})},
            (
                "memory.size: 2GiB in pages of 2MiB do not fit into the 1024MiB of them this pod may use (hugetlb.2MB.max, "
                "LIMITS_HUGEPAGES_2MI); raise limits.hugepages-2Mi in the pod"
            ),
        ),
        (
            ALL_CPUS + '[memory]\nsize = "2GiB"\nhugepages = "2MiB"\n',
            {"memory": 64 * MIB},
            "memory.hugepages: 144MiB of overhead in ordinary pages (QEMU, this program) do not fit into the 64MiB",
        ),
        (
            ALL_CPUS + '[memory]\nsize = "8GiB"\n',
            {},
            (
                "memory.size: 8GiB and 176MiB of overhead (QEMU, page tables, this program) do not fit into the 8192MiB "
                "this pod may use; at most 8016MiB do, or raise limits.memory"
            ),
        ),
        (
            ALL_CPUS + '[memory]\nsize = "900TiB"\n',
            {},
            (
                "memory.size: 900TiB and 3686544MiB of overhead (QEMU, page tables, this program) do not fit into the 8192MiB "
                "this pod may use; at most 8016MiB do, or raise limits.memory"
            ),
        ),
        (
            ALL_CPUS + '[memory]\nsize = "1GiB"\n',
            {"memory": 148 * MIB},
            (
                "memory.size: 1GiB and 148MiB of overhead (QEMU, page tables, this program) do not fit into the 148MiB "
                "this pod may use; raise limits.memory"
            ),
        ),
        (
            ALL_CPUS + '[memory]\nsize = "1GiB"\nlock = true\n',
            {"limits": MemoryLimits(lockable=8 * MIB)},
            (
                "memory.lock: 2496 MiB may have to be locked, and RLIMIT_MEMLOCK is 8192 KiB: QEMU's memory with all of its "
                "addresses (memory.lock); give it `LimitMEMLOCK=infinity`"
            ),
        ),
        (
            ALL_CPUS + '[memory]\nshared = false\n[[share]]\ntag = "a"\npath = "/srv"\n',
            {},
            "memory.shared: must be true: virtiofsd maps the guest's RAM for [[share]]; leave it out",
        ),
        (
            ALL_CPUS + '[memory]\nshared = false\nhugepages = "2MiB"\n',
            {},
            "memory.shared: must be true with memory.hugepages, which are files to the kernel; leave it out",
        ),
        (
            ALL_CPUS + '[memory]\nsize = "limits"\n',
            {"limits": MemoryLimits()},
            'memory.size: "limits" means what memory.max of this cgroup and those above leaves, and there is no limit; set limits.memory',
        ),
        (
            ALL_CPUS + '[memory]\nsize = "limits"\nhugepages = "2MiB"\n',
            {},
            (
                'memory.size: "limits" means what hugetlb.2MB.max of this cgroup and those above leaves, and there is no '
                "limit; set limits.hugepages-2Mi in the pod and LIMITS_HUGEPAGES_2MI from it (Downward API, "
                "resourceFieldRef: limits.hugepages-2Mi), or say how much"
            ),
        ),
        (
            ALL_CPUS + '[memory]\nsize = "limits"\n',
            {"limits": MemoryLimits(memory=128 * MIB)},
            (
                "memory.size: memory.max is 128MiB, of which 145MiB are overhead: what is left is less than the "
                "32MiB that a guest has at least; raise limits.memory"
            ),
        ),
    ],
)
def test_refusals_give_the_numbers_and_the_remedy(text: str, change: dict[str, Any], problem: str) -> None:
    [found] = problems(text, attrs.evolve(FACTS, **change))
    assert found.startswith(problem)


def test_a_numa_node_that_may_not_be_used_gives_no_pages() -> None:
    """All huge pages come from the other NUMA node, if it has enough."""
    facts = attrs.evolve(FACTS, memory_nodes=CpuSet([1]))
    text = ALL_CPUS + '[memory]\nsize = "2GiB"\nhugepages = "2MiB"\n'
    assert {each.bound for each in plan_of(text, facts).machine.topology.numa_nodes} == {(1,)}
    [found] = problems(text, attrs.evolve(facts, hardware=hardware((2048, 1023))))
    assert found.startswith("memory.hugepages: 1024 pages of 2MiB (2GiB) are to come from NUMA node 1, where 1023")
    unbound = text + "bind = false\n"
    assert plan_of(unbound, attrs.evolve(FACTS, hardware=hardware((1024, 0)))).machine.ram.page_size == 2 * MIB
    [found] = problems(unbound, attrs.evolve(facts, hardware=hardware((1024, 0))))
    assert "come from NUMA node 1, where 0 " in found


def test_ram_that_is_a_larger_file_than_this_process_may_make_is_refused() -> None:
    text = '[memory]\nsize = "256MiB"\n[cpu]\ncount = 2\n'
    facts = attrs.evolve(ALONE, limits=MemoryLimits(file_size=64 * MIB))
    [found] = problems(text, facts)
    assert found == (
        "memory.size: 256MiB of RAM are one file to the kernel, and a file of this process may have 64MiB (RLIMIT_FSIZE); start the "
        "container without that limit (`--ulimit fsize`, LimitFSIZE=)"
    )
    plan_of(text, attrs.evolve(ALONE, limits=MemoryLimits(file_size=256 * MIB)))
    plan_of(text.replace('256MiB"', '256MiB"\nshared = false'), facts)


def test_a_process_with_cap_ipc_lock_is_not_limited() -> None:
    text = '[instance]\nuser = "{}"\n[memory]\nlock = true\n[cpu]\ncount = 2\n'
    facts = attrs.evolve(ALONE, limits=MemoryLimits(lockable=8 * MIB, may_lock=True))
    assert plan_of(text.format("root"), facts).machine.ram.locked
    assert problems(text.format("nobody"), facts)[0].startswith("memory.lock: ")
    enough = attrs.evolve(ALONE, limits=MemoryLimits(lockable=2 * GIB))
    assert plan_of(text.format("nobody"), enough).machine.ram.locked


@pytest.mark.parametrize(
    ("placement", "allowed", "count"),
    [
        ("controller", "2-5,10-13", 8),
        ("affinity", "2-5,10-13", 6),
        ("affinity", "2-5,10", 4),  # 3, 4 and 5 are halves of cores: one is enough
        ("affinity", "2,10", 1),
        ("affinity", "2", 1),
        ("controller", "2", 1),
    ],
)
def test_all_cpus_are_vcpus_but_for_a_core_where_everything_else_needs_one(
    placement: str, allowed: str, count: int
) -> None:
    facts = attrs.evolve(FACTS, allowed_cpus=CpuSet.parse(allowed))
    plan = plan_of(f'[cpu]\ncount = "all"\nplacement = "{placement}"\n', facts)
    assert (plan.machine.vcpus, len(plan.placement.pins)) == (count, count)
    assert plan.placement.shared is (placement == "affinity" and allowed == "2")
    if allowed == "2-5,10-13" and placement == "affinity":
        rest = CpuSet.parse(allowed) - plan.placement.cpus
        assert rest == facts.hardware.siblings(min(rest)), "a whole core"
    assert f": {count} vCPU" in next(iter(plan_lines(plan)))


def test_the_limits_are_used_up_and_not_exceeded() -> None:
    limits = MemoryLimits(memory=4 * GIB + 3 * MIB, huge={2 * MIB: HugeFact(limit=3 * GIB + 2 * MIB), GIB: HugeFact()})
    facts = attrs.evolve(FACTS, limits=limits, memory=4 * GIB + 3 * MIB)
    plan = plan_of(ALL_CPUS + '[memory]\nsize = "limits"\n', facts)
    left = 4 * GIB + 3 * MIB - plan.machine.memory - plan.machine.ram.overhead
    assert 0 <= left < 6 * MIB, "less than a page for each NUMA node, and its page tables"
    assert plan.machine.memory % (4 * MIB) == 0
    assert "3936MiB" in next(iter(plan_lines(plan)))
    huge = plan_of(ALL_CPUS + '[memory]\nsize = "limits"\nhugepages = "2MiB"\n', facts)
    assert huge.machine.memory == 3 * GIB, "both NUMA nodes have as much"


def test_memory_overhead_grows_with_every_part() -> None:
    def overhead(text: str, accel: Accel = "kvm") -> int:
        spec = parse_instance("s", (KERNEL + text).encode())
        assert spec.cpu.count != "all"
        assert spec.memory.size != "limits"
        return memory_overhead(spec, spec.cpu.count, spec.memory.size, accel) // MIB

    assert overhead('[memory]\nsize = "1GiB"\n') == 120
    assert overhead('[memory]\nsize = "1GiB"\nhugepages = "2MiB"\n') == 116
    assert overhead('[memory]\nsize = "1GiB"\nhugepages = "2MiB"\n', "tcg") == 244
    assert overhead('[memory]\nsize = "81GiB"\n') == 120 + 320
    assert overhead('[cpu]\ncount = 11\n[memory]\nsize = "1GiB"\n') == 160
    assert overhead('[memory]\nsize = "1GiB"\nlock = true\n') == 208, "four workers"
    assert overhead('[memory]\nsize = "1GiB"\n[[network]]\n') == 130
    passt = '[memory]\nsize = "1GiB"\n[[network]]\nmode = "passt"\nports = {}\n'
    assert [overhead(passt.format(each)) for each in ("[]", '["1001-2000"]', '"all"')] == [154, 159, 370]
    assert overhead('[memory]\nsize = "1GiB"\n[[share]]\ntag = "a"\npath = "/a"\n') == 132
    none = '[memory]\nsize = "1GiB"\n[hotplug]\ndisks = {}\n'
    assert overhead(none.format(0)) == 112
    assert overhead(none.format(16)) == 144
    device = '[memory]\nsize = "1GiB"\n[[device]]\n'
    assert overhead(device + 'address = "0000:01:00.0"\n') == 122
    assert overhead(device + 'resource = "a/b"\ncount = 8\n') == 136
    assert overhead(device + 'resource = "a/b"\n') == 152


def test_files_copied_into_memory_count_as_overhead() -> None:
    def overhead(user: str, *, everyone: bool) -> int:
        files = {
            **ALONE.files,
            PurePosixPath("/k"): FileFact("file", 300 * MIB, everyone_reads=everyone, format=identify(FAKE_KERNEL)),
        }
        plan = plan_of(f'[instance]\nuser = "{user}"\n[memory]\nsize = "1GiB"\n', attrs.evolve(ALONE, files=files))
        return plan.machine.ram.overhead // MIB

    assert overhead("nobody", everyone=True) == overhead("root", everyone=False)
    assert overhead("nobody", everyone=False) == overhead("nobody", everyone=True) + 300


def test_huge_pages_that_two_guest_numa_nodes_need_are_reported_with_the_sum() -> None:
    topology = plan_of(ALL_CPUS + '[memory]\nsize = "4GiB"\nhugepages = "2MiB"\n', FACTS).machine.topology
    one, two = topology.numa_nodes
    one = attrs.evolve(one, bound=(0, 1), memory=3000 * MIB)
    two = attrs.evolve(two, bound=(1,), memory=2000 * MIB)
    memory = parse_instance("s", f'{KERNEL}[memory]\nsize = "5000MiB"\nhugepages = "2MiB"\n'.encode()).memory
    both = attrs.evolve(topology, numa_nodes=(one, two))
    problems = Problems()
    refuse_too_few_pages(memory, 5000 * MIB, both, FACTS, problems)
    [found] = problems.found
    assert str(found) == (
        "memory.hugepages: 2500 pages of 2MiB are wanted on all NUMA nodes together, where 2048 are free; reserve more on "
        "the node (with the static Memory Manager drain the node, stop the kubelet, and remove its old memory_manager_state)"
    )
