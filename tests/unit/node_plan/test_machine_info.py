from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.kernel.hardware_reader import read_hardware, read_kubelet_hardware
from runner.node_plan.admission import Kubelet, KubeletConfiguration
from runner.node_plan.allocatable import node_allocatable
from runner.node_plan.cpu_assignment import CpuTopology
from runner.node_plan.machine_info import machine_info
from runner.node_plan.quirks import KubeletConfigError
from tests.unit.kernel.test_sysfs import write, write_sysfs

RECORDS = sorted((Path(__file__).parents[2] / "data/hosts").glob("*.json"))
GIB = 1 << 30


def host(*cpus: Cpu, numa_nodes: int = 1, numa: bool = True) -> Hardware:
    distances = (10,) * numa_nodes
    return Hardware(cpus, tuple(NumaNode(each, GIB, distances) for each in range(numa_nodes)), numa=numa)


def cores(hardware: Hardware) -> list[str]:
    return [str(siblings) for siblings in machine_info(hardware).cores.values()]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_what_cadvisor_has_described_stays_as_it_is(record: Path) -> None:
    seen = machine_info(Hardware.from_json(record.read_text()))
    assert machine_info(seen) == seen


def test_an_l3_cache_as_large_as_its_numa_node_is_no_uncore_cache() -> None:
    """Two NUMA nodes of one L3 cache each on one socket: the kubelet takes the socket instead."""
    one_each = host(*(Cpu(cpu, cpu, 0, 0, cpu // 2, l3=7 + cpu // 2) for cpu in range(4)), numa_nodes=2)
    assert CpuTopology.of(machine_info(one_each)).uncores == {0: {0, 1, 2, 3}}
    two_each = host(*(Cpu(cpu, cpu, 0, 0, cpu // 4, l3=cpu // 2) for cpu in range(8)), numa_nodes=2)
    assert len(CpuTopology.of(machine_info(two_each)).uncores) == 4
    over_both = host(*(Cpu(cpu, cpu, 0, 0, cpu // 2, l3=0) for cpu in range(4)), numa_nodes=2)
    assert [cpu.l3 for cpu in machine_info(over_both).cpus] == [0] * 4


def test_the_kubelet_decides_with_what_cadvisor_describes() -> None:
    one_each = host(*(Cpu(cpu, cpu, 0, 0, cpu // 2, l3=7 + cpu // 2) for cpu in range(4)), numa_nodes=2)
    configuration = KubeletConfiguration(cpu_manager_policy="static", reserved_cpus=CpuSet((0,)))
    manager = Kubelet.configured(one_each, configuration).cpu_manager
    assert manager
    assert set(manager.topology.uncores) == {0}


def test_cores_are_those_of_core_id() -> None:
    # AMD family 15h: two threads of a module are siblings to the kernel, each with a core_id of its own.
    modules = host(*(Cpu(cpu, cpu // 2 * 2, 0, 0, 0, core_id=cpu) for cpu in range(4)))
    assert cores(modules) == ["0", "1", "2", "3"]
    # Ids that repeat within a package make one core of two, unless NUMA nodes keep them apart.
    repeated = [Cpu(cpu, cpu, 0, 0, cpu // 2, core_id=cpu % 2) for cpu in range(4)]
    assert cores(host(*repeated, numa_nodes=2)) == ["0", "1", "2", "3"]
    assert cores(host(*(attrs.evolve(cpu, numa_node=0) for cpu in repeated))) == ["0,2", "1,3"]
    # A record without them has the siblings.
    assert cores(host(*(Cpu(cpu, cpu // 2 * 2, 0, 0, 0) for cpu in range(4)))) == ["0-1", "2-3"]


def test_a_kernel_without_numa_has_a_numa_node_for_each_package() -> None:
    pools = (HugepagePool(2 << 20, 3, 3),)
    flat = Hardware(tuple(Cpu(cpu, cpu, cpu // 2 * 3, cpu, 0) for cpu in range(4)), (NumaNode(0, GIB, (10,), pools),))
    seen = machine_info(attrs.evolve(flat, numa=False))
    assert seen.cpus_of_numa_node == {0: CpuSet((0, 1)), 3: CpuSet((2, 3))}
    assert [(node.memory, node.distances, node.hugepages) for node in seen.numa_nodes] == [(0, (), ())] * 2
    assert seen.total_memory == GIB
    assert machine_info(flat).cpus_of_numa_node == {0: CpuSet.parse("0-3")}
    closest = KubeletConfiguration(
        topology_manager_policy="best-effort", topology_manager_policy_options={"prefer-closest-numa-nodes": "true"}
    )
    with pytest.raises(KubeletConfigError, match=r"^error getting NUMA distances from cadvisor$"):
        Kubelet.configured(attrs.evolve(flat, numa=False), closest)


def test_memory_is_what_the_kernel_has_in_all() -> None:
    """A container's /proc/meminfo, and some machines', is not the sum of the NUMA nodes."""
    hardware = host(Cpu(0, 0, 0, 0, 0))
    smaller = attrs.evolve(hardware, memory=GIB // 2)
    assert node_allocatable(hardware, KubeletConfiguration()).resources["memory"] == GIB
    assert node_allocatable(smaller, KubeletConfiguration()).resources["memory"] == GIB // 2


def test_what_only_the_kubelet_needs_is_read_and_recorded(tmp_path: Path) -> None:
    hardware = host(Cpu(0, 0, 0, 0, 0), Cpu(1, 0, 0, 0, 0))
    write_sysfs(tmp_path, hardware)
    for cpu in (0, 1):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/core_id", cpu - 1)
    write(tmp_path / "proc/meminfo", "MemTotal:        2048 kB")
    read = read_kubelet_hardware(tmp_path)
    assert ([cpu.core_id for cpu in read.cpus], read.memory, read.numa) == ([None, 0], 2 << 20, True)
    assert Hardware.from_json(read.to_json()) == read
    assert read_hardware(tmp_path) == hardware
    (tmp_path / "sys/devices/system/node/online").unlink()
    flat = read_kubelet_hardware(tmp_path)
    assert not flat.numa
    assert Hardware.from_json(flat.to_json()) == flat
