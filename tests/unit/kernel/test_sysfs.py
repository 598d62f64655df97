from __future__ import annotations

from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.kernel.hardware_reader import read_hardware, read_online_cpus
from tests.support.fake_cgroupfs import fake_sysfs

RECORDS = sorted((Path(__file__).parents[2] / "data/hosts").glob("*.json"))


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def sharing(hardware: Hardware, cpu: Cpu, attribute: str) -> CpuSet:
    return CpuSet(
        other.cpu
        for other in hardware.cpus
        if getattr(other, attribute) == getattr(cpu, attribute) and other.socket == cpu.socket
    )


def write_cpu(path: Path, cpu: Cpu, hardware: Hardware) -> None:
    write(path / "topology/core_cpus_list", hardware.siblings(cpu.cpu))
    write(path / "topology/die_cpus_list", sharing(hardware, cpu, "die"))
    write(path / "topology/physical_package_id", cpu.socket)
    if cpu.l3 is not None:
        write(path / "cache/index3/level", 3)
        write(path / "cache/index3/id", cpu.l3)
        write(path / "cache/index3/shared_cpu_list", sharing(hardware, cpu, "l3"))
    if cpu.max_khz is not None:
        write(path / "cpufreq/cpuinfo_max_freq", cpu.max_khz)
    if cpu.capacity is not None:
        write(path / "cpu_capacity", cpu.capacity)


def write_hugepages(path: Path, pools: tuple[HugepagePool, ...]) -> None:
    for pool in pools:
        write(path / f"hugepages-{pool.size // 1024}kB/nr_hugepages", pool.total)
        write(path / f"hugepages-{pool.size // 1024}kB/free_hugepages", pool.free)


def write_numa_node(path: Path, node: NumaNode, cpus: CpuSet) -> None:
    write(path / "cpulist", cpus)
    write(path / "distance", " ".join(map(str, node.distances)))
    kib = node.memory // 1024
    write(
        path / "meminfo",
        f"Node {node.id} MemTotal:       {kib} kB\nNode {node.id} MemFree:        {kib // 2} kB",
    )
    write_hugepages(path / "hugepages", node.hugepages)


def write_sysfs(root: Path, hardware: Hardware) -> None:
    """Write the files that the kernel of *hardware* would show below *root*."""
    system = root / "sys/devices/system"
    write(system / "cpu/online", hardware.online)
    write(system / "cpu/offline", hardware.offline)
    write(system / "cpu/present", hardware.online | hardware.offline)
    for cpu in hardware.cpus:
        write_cpu(system / f"cpu/cpu{cpu.cpu}", cpu, hardware)
    for cpu_number in hardware.offline:
        write(system / f"cpu/cpu{cpu_number}/online", 0)
    for kind, device in (("performance", "cpu_core"), ("efficiency", "cpu_atom")):
        alike = CpuSet(cpu.cpu for cpu in hardware.cpus if cpu.kind == kind)
        if len(alike):
            write(root / f"sys/devices/{device}/cpus", alike)
    write(system / "node/online", CpuSet(node.id for node in hardware.numa_nodes))
    for node in hardware.numa_nodes:
        write_numa_node(system / f"node/node{node.id}", node, hardware.cpus_of_numa_node[node.id])


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_host_is_read_as_it_was_recorded(record: Path, tmp_path: Path) -> None:
    hardware = Hardware.from_json(record.read_text())
    write_sysfs(tmp_path, hardware)
    assert read_hardware(tmp_path) == hardware


SPARSE = Hardware(
    tuple(Cpu(cpu, cpu, 0, 1, 2 if cpu < 6 else 5) for cpu in (1, 4, 6, 9)),
    (
        NumaNode(0, 1 << 30, (10, 20, 20)),
        NumaNode(2, 2 << 30, (20, 10, 20), (HugepagePool(65536, 4, 1), HugepagePool(2 << 20, 0, 0))),
        NumaNode(5, 0, (20, 20, 10)),
    ),
    CpuSet((0, 5)),
)
"""Gaps in every numbering, no L3, a NUMA node without CPUs, one without memory."""


def test_numbers_may_have_gaps(tmp_path: Path) -> None:
    write_sysfs(tmp_path, SPARSE)
    assert read_hardware(tmp_path) == SPARSE


def test_a_kernel_without_numa_is_one_numa_node(tmp_path: Path) -> None:
    write(tmp_path / "sys/devices/system/cpu/online", "0-1")
    write(tmp_path / "sys/devices/system/cpu/present", "0-1")
    write(tmp_path / "proc/meminfo", "MemTotal:        2048 kB\nMemFree:         1024 kB")
    write_hugepages(tmp_path / "sys/kernel/mm/hugepages", (HugepagePool(2 << 20, 3, 2),))
    assert read_hardware(tmp_path) == Hardware(
        (Cpu(0, 0, 0, 0, 0), Cpu(1, 1, 0, 0, 0)), (NumaNode(0, 2 << 20, (10,), (HugepagePool(2 << 20, 3, 2),)),)
    )


def test_values_that_firmware_does_not_know_have_a_default(tmp_path: Path) -> None:
    write_sysfs(tmp_path, SPARSE)
    cpu = tmp_path / "sys/devices/system/cpu/cpu4"
    write(cpu.with_name("cpu1") / "topology/physical_package_id", -1)
    write(cpu / "cache/index3/level", 3)
    write(cpu / "cache/index3/shared_cpu_list", "4,6")
    write(cpu / "cache/index0/level", 1)
    write(cpu / "cache/index0/id", 77)
    # A kernel before 5.3 has the older name only.
    (cpu / "topology/core_cpus_list").rename(cpu / "topology/thread_siblings_list")
    read = read_hardware(tmp_path).by_cpu[4]
    assert (read.socket, read.l3, read.core) == (0, 4, 4)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("cpu/online", "0-", "cannot use FILE: '0-' in '0-' is neither a CPU number nor a range like '2-5'"),
        (
            "cpu/cpu1/topology/physical_package_id",
            "x",
            "cannot use FILE: 'x' is not a number",
        ),
        ("node/node2/distance", "10 20", "cannot use FILE: 2 distances for 3 NUMA nodes"),
        ("node/node2/meminfo", "", "cannot use FILE: it holds no MemTotal"),
        ("node/node2/cpulist", None, "cannot read FILE: No such file or directory"),
        ("cpu/cpu1/topology/core_cpus_list", "4", "cannot use FILE: it holds '4' without CPU 1 itself"),
        ("cpu/cpu1/topology/die_cpus_list", "", "cannot use FILE: it holds '' without CPU 1 itself"),
    ],
)
def test_a_strange_file_is_named(tmp_path: Path, file: str, content: str | None, sentence: str) -> None:
    write_sysfs(tmp_path, SPARSE)
    path = tmp_path / "sys/devices/system" / file
    if content is None:
        path.unlink()
    else:
        write(path, content)
    with pytest.raises(HostError) as caught:
        read_hardware(tmp_path)
    assert explain(caught.value).replace(repr(str(path)), "FILE") == sentence


def test_this_machine_can_be_read() -> None:
    hardware = read_hardware()
    assert list(hardware.problems()) == []
    assert Hardware.from_json(hardware.to_json()) == hardware


def test_the_present_cpus_and_memory_nodes_are_read(tmp_path: Path) -> None:
    sys = fake_sysfs(tmp_path / "sys", cpus="0-7", online="0-3,5-7", mems="0-1")
    found = read_online_cpus(sys)
    assert (str(found.present), str(found.online), str(found.memory_nodes)) == ("0-7", "0-3,5-7", "0-1")
    (sys / "devices/system/node/has_memory").unlink()
    assert read_online_cpus(sys).memory_nodes == CpuSet([0])
    with pytest.raises(HostError, match="cannot read the machine"):
        read_online_cpus(tmp_path)


@pytest.mark.parametrize("shared", ["", "6", "\n"])
def test_a_cache_that_its_own_cpu_does_not_share_is_refused(tmp_path: Path, shared: str) -> None:
    write_sysfs(tmp_path, SPARSE)
    cache = tmp_path / "sys/devices/system/cpu/cpu4/cache/index3"
    write(cache / "level", 3)
    write(cache / "shared_cpu_list", shared)
    with pytest.raises(HostError, match="without CPU 4 itself"):
        read_hardware(tmp_path)


@pytest.mark.parametrize("name", ["hugepages-0kB", "hugepages-xkB", "hugepages-3kB"])
def test_a_pool_of_huge_pages_without_a_size_is_refused(tmp_path: Path, name: str) -> None:
    write_sysfs(tmp_path, SPARSE)
    write(tmp_path / f"sys/devices/system/node/node2/hugepages/{name}/nr_hugepages", 1)
    with pytest.raises(HostError, match="its name holds no size of a page"):
        read_hardware(tmp_path)
