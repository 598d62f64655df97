from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.facts.hardware import Cpu, Hardware, NumaNode
from runner.placement.guest_topology import GuestTopology, divided, flat, guest_topology, unbound
from runner.placement.pins import PinPolicy, choose_cpus, place

HOSTS = Path(__file__).parents[2] / "data/hosts"
MIB, GIB = 1 << 20, 1 << 30
PAGE = 2 * MIB


def host(name: str) -> Hardware:
    return Hardware.from_json((HOSTS / f"{name}.json").read_text())


EVERY_HOST = [pytest.param(host(path.stem), id=path.stem) for path in sorted(HOSTS.glob("*.json"))]
EPYC = host("epyc-7543-2s-nps1")


def seen(
    hardware: Hardware, cpus: str, *, memory: int = GIB, mems: str = "0-1023", policy: PinPolicy | None = None
) -> GuestTopology:
    exclusive = CpuSet.parse(cpus)
    placement = place(len(exclusive), exclusive, hardware, policy=policy)
    return guest_topology(placement.pins, hardware, memory, page_size=PAGE, memory_nodes=CpuSet.parse(mems))


def smp(topology: GuestTopology) -> tuple[int, int, int, int]:
    return topology.sockets, topology.dies, topology.cores, topology.threads


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_divided_exactly_and_in_proportion_on_every_small_host() -> None:
    for number in range(1, 5):
        for weights in itertools.product(range(1, 6), repeat=number):
            for pages in range(number, 24):
                for rest in (0, MIB):
                    memory = pages * PAGE + rest
                    parts = divided(memory, weights, PAGE)
                    assert sum(parts) == memory
                    assert all(part >= PAGE for part in parts)
                    assert all(part % PAGE == 0 for part in parts[:-1])
                    shares = [Fraction(pages * weight, sum(weights)) for weight in weights]
                    if min(shares) >= 1:
                        whole = [*parts[:-1], parts[-1] - rest]
                        assert all(abs(part // PAGE - share) < 1 for part, share in zip(whole, shares, strict=True)), (
                            weights,
                            pages,
                            parts,
                        )


def test_a_small_share_is_still_a_page_and_too_few_pages_are_refused() -> None:
    assert divided(4 * PAGE, [100, 1, 1], PAGE) == (2 * PAGE, PAGE, PAGE)
    with pytest.raises(RefusedError) as caught:
        divided(2 * PAGE, [1, 1, 1], PAGE)
    assert str(caught.value) == (
        "cannot divide 4194304 bytes of memory among 3 NUMA nodes in pages of 2097152 bytes; give the guest more memory"
    )


def test_memory_comes_from_where_the_vcpus_are() -> None:
    topology = seen(EPYC, "29-32,93-96", memory=8 * GIB)
    first, second = topology.numa_nodes
    assert (first.vcpus, first.memory, first.host, first.bound) == (CpuSet(range(6)), 6 * GIB, 0, (0,))
    assert (second.vcpus, second.memory, second.host, second.bound) == (CpuSet([6, 7]), 2 * GIB, 1, (1,))
    assert (first.distances, second.distances) == ((10, 32), (32, 10))


def test_one_numa_node_of_several_is_bound_and_the_only_one_is_not() -> None:
    (only,) = seen(EPYC, "1-20,65-84").numa_nodes
    assert only.bound == (0,)
    assert only.distances == (10,)
    (only,) = seen(host("vm-8"), "1-4").numa_nodes
    assert only.bound == ()
    (only,) = unbound(seen(EPYC, "1-20,65-84")).numa_nodes
    assert only.bound == ()


def test_numa_nodes_that_the_pod_may_not_use_are_not_bound_to() -> None:
    (only,) = seen(EPYC, "1-20,65-84", mems="1").numa_nodes
    assert only.bound == (1,), "QEMU leaves the pod's cgroup, and with it the cpuset.mems that binds its memory"
    first, second = seen(host("epyc-7543-2s-nps2"), "1,65,17,81", mems="0,2-3").numa_nodes
    assert (first.host, first.bound) == (0, (0,))
    assert (second.host, second.bound) == (1, (0,)), "the other half of its socket is nearest"
    assert second.distances == (12, 10), "vCPUs on 1 reach the memory of 0 at 12"
    assert first.distances == (10, 11), "guest node 1's memory is local to node 0, which a SLIT cannot express"


def without_memory(hardware: Hardware, *empty: int) -> Hardware:
    numa_nodes = (attrs.evolve(each, memory=0) if each.id in empty else each for each in hardware.numa_nodes)
    return attrs.evolve(hardware, numa_nodes=tuple(numa_nodes))


def test_a_numa_node_without_memory_takes_the_nearest_there_is() -> None:
    # NUMA nodes 8-15 of this host have memory and no CPUs: they are nearer to nothing than a socket's other nodes.
    hardware = without_memory(host("epyc-9754-2s-nps4-cxl"), 1)
    topology = seen(hardware, "32-33,288-289")
    (only,) = topology.numa_nodes
    assert (only.host, only.bound) == (1, (0,))


def test_memory_that_does_not_fit_is_taken_from_the_other_numa_nodes() -> None:
    nodes = tuple(NumaNode(each, GIB, tuple(10 if each == other else 20 for other in range(3))) for each in range(3))
    hardware = Hardware(tuple(Cpu(cpu, cpu, 0, 0, cpu // 4) for cpu in range(12)), nodes)
    (only,) = seen(hardware, "0-3", memory=GIB + PAGE).numa_nodes
    assert only.bound == (0, 1)
    first, second = seen(hardware, "0-2,4", memory=2 * GIB).numa_nodes
    assert (first.memory, first.bound) == (3 * GIB // 2, (0, 1))
    assert (second.memory, second.bound) == (GIB // 2, (1,)), "its own memory comes before its neighbour's overflow"
    (only,) = seen(hardware, "0-3", memory=9 * GIB).numa_nodes
    assert only.bound == (), "all of them, and not enough: the check of the memory limit reports it"


# --- sockets, dies, cores, threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cpus", "shape"),
    [
        ("epyc-7543-2s-nps1", "1-20,65-84", (1, 1, 20, 2)),  # L3 caches give 3, 4, 4, 4, 4 and 1 cores: no equal dies
        ("epyc-7543-2s-nps1", "4-19,68-83", (1, 4, 4, 2)),  # one die for each L3 cache
        ("epyc-7543-2s-nps1", "0-127", (2, 8, 4, 2)),
        ("epyc-7543-2s-nps1", "4-7,36-39", (2, 1, 4, 1)),
        ("epyc-7543-2s-nps1", "1-6,32-33,65-70,96-97", (1, 4, 2, 2)),  # 6 and 2 cores
        ("epyc-7543-2s-nps1", "1-7", (1, 1, 7, 1)),
        ("epyc-7543-2s-nps1", "1-4,32-34", (1, 7, 1, 1)),  # 4 and 3 CPUs have only 1 in common
        ("epyc-7543-2s-nps4", "0-127", (2, 8, 4, 2)),
        ("xeon-8468-2s-snc4", "0-95", (2, 4, 12, 1)),
        ("xeon-8468-2s-snc4", "0-191", (2, 4, 12, 2)),
        ("xeon-8280l-8s", "0-447", (8, 1, 28, 2)),
        ("power9-2s", "8-15", (1, 2, 1, 4)),  # two cores with an L3 cache each
        ("core-i9-13900k", "2-15,16-21", (1, 1, 20, 1)),
        ("ryzen-7840u-nosmt", "2,4,6", (1, 1, 3, 1)),
        ("vm-8", "7", (1, 1, 1, 1)),
    ],
)
def test_the_shape_of_the_guest(name: str, cpus: str, shape: tuple[int, int, int, int]) -> None:
    assert smp(seen(host(name), cpus)) == shape


def test_linear_pins_across_numa_nodes_give_each_run_a_die() -> None:
    topology = seen(EPYC, "0-1,32-33,64-65,96-97", policy=PinPolicy.LINEAR)
    assert smp(topology) == (1, 4, 2, 1)
    assert [str(each.vcpus) for each in topology.numa_nodes] == ["0-1,4-5", "2-3,6-7"]


def test_a_flat_guest_keeps_its_memory_near() -> None:
    topology = flat(seen(host("xeon-8280l-8s"), "0-55", memory=3 * GIB))
    assert smp(topology) == (1, 1, 56, 1)
    (only,) = topology.numa_nodes
    assert (only.vcpus, only.memory, only.bound) == (CpuSet(range(56)), 3 * GIB, (0, 1))


@pytest.mark.parametrize("hardware", EVERY_HOST)
@given(data=st.data())
@settings(max_examples=40)
def test_a_guest_never_sees_cpus_as_neighbours_that_are_not(hardware: Hardware, data: st.DataObject) -> None:
    online = list(hardware.online)
    if data.draw(st.booleans(), "chosen by us"):
        exclusive = choose_cpus(hardware, hardware.online, data.draw(st.integers(1, len(online))))
    else:
        exclusive = CpuSet(data.draw(st.sets(st.sampled_from(online), min_size=1, max_size=40)))
    placement = place(len(exclusive), exclusive, hardware, policy=data.draw(st.sampled_from([None, *PinPolicy])))
    mems = CpuSet(data.draw(st.sets(st.sampled_from([node.id for node in hardware.numa_nodes]), min_size=1)))
    memory = data.draw(st.integers(64, 4096)) * MIB
    topology = guest_topology(placement.pins, hardware, memory, page_size=PAGE, memory_nodes=mems)
    assert topology.vcpus == len(placement.pins)
    assert sum(each.memory for each in topology.numa_nodes) == memory
    cpus = [hardware.by_cpu[cpu] for cpu in placement.pins]
    core, die = topology.threads, topology.threads * topology.cores
    for start in range(0, len(cpus), core):
        assert len({cpu.core for cpu in cpus[start : start + core]}) == 1
    for start in range(0, len(cpus), die):
        assert len({cpu.numa_node for cpu in cpus[start : start + die]}) == 1
    if topology.sockets > 1:
        socket = die * topology.dies
        for start in range(0, len(cpus), socket):
            assert len({cpu.socket for cpu in cpus[start : start + socket]}) == 1
    assert sorted(vcpu for each in topology.numa_nodes for vcpu in each.vcpus) == list(range(len(cpus)))
    for number, each in enumerate(topology.numa_nodes):
        assert {cpus[vcpu].numa_node for vcpu in each.vcpus} == {each.host}
        assert set(each.bound) <= set(mems)
        assert each.distances[number] == 10
        assert all(11 <= each.distances[other] <= 254 for other in range(len(each.distances)) if other != number)
        assert not each.bound or each.bound[0] == min(mems, key=lambda node: (hardware.distance(each.host, node), node))
