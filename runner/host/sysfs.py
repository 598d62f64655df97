"""The door to ``/sys/devices/system``: a host's CPUs, caches, NUMA nodes and hugepages, from any root path.

The files are described in the kernel's ``Documentation/admin-guide/cputopology.rst`` and
``Documentation/ABI/{testing,stable}/sysfs-devices-{system-cpu,node}``.
"""

from __future__ import annotations

import re
from pathlib import Path

from runner.cpuset import CpuSet
from runner.errors import HostError
from runner.topology.hardware import Cpu, Hardware, HugepagePool, NumaNode

KIB = 1024
LOCAL_DISTANCE = 10
"""ACPI's distance from a NUMA node to itself."""
L3 = 3


def read_hardware(root: Path = Path("/")) -> Hardware:
    """Read the host whose ``sys`` and ``proc`` lie below *root*.

    Offline CPUs are listed but not described, for the kernel hides their topology. A kernel without NUMA is one NUMA
    node 0 that holds everything, as cadvisor sees it.
    Raises :class:`HostError` if a file that every kernel has is missing or is not what it should be.
    """
    system = root / "sys/devices/system"
    online = _cpu_set(system / "cpu/online")
    numa_nodes = _numa_nodes(system / "node", root)
    numa_node_of = {cpu: node.id for node, cpus in numa_nodes for cpu in cpus}
    kinds = dict.fromkeys(_optional_cpu_set(root / "sys/devices/cpu_core/cpus"), "performance") | dict.fromkeys(
        _optional_cpu_set(root / "sys/devices/cpu_atom/cpus"), "efficiency"
    )
    fallback = numa_nodes[0][0].id
    cpus = [_cpu(system / f"cpu/cpu{cpu}", cpu, numa_node_of.get(cpu, fallback), kinds.get(cpu)) for cpu in online]
    offline = _cpu_set(system / "cpu/present") - online
    return Hardware(tuple(cpus), tuple(node for node, _ in numa_nodes), offline)


def _cpu(path: Path, cpu: int, numa_node: int, kind: str | None) -> Cpu:
    topology = path / "topology"
    # `core_cpus_list` and `package_cpus_list` came with 5.3; the older name of the first is still there.
    siblings = _optional_cpu_set(topology / "core_cpus_list") or _optional_cpu_set(topology / "thread_siblings_list")
    die = _optional_cpu_set(topology / "die_cpus_list") or _optional_cpu_set(topology / "core_siblings_list")
    return Cpu(
        cpu=cpu,
        core=min(siblings, default=cpu),
        # Virtual machines and some ARM firmware say -1: the host does not know, so it is one socket.
        socket=max(0, _optional_number(topology / "physical_package_id") or 0),
        die=min(die, default=0),
        numa_node=numa_node,
        l3=_l3(path / "cache"),
        max_khz=_optional_number(path / "cpufreq/cpuinfo_max_freq"),
        capacity=_optional_number(path / "cpu_capacity"),
        kind=kind,
    )


def _l3(cache: Path) -> int | None:
    for index in sorted(cache.glob("index[0-9]*")):
        if _optional_number(index / "level") == L3:
            number = _optional_number(index / "id")
            return number if number is not None else min(_cpu_set(index / "shared_cpu_list"))
    return None


def _numa_nodes(path: Path, root: Path) -> list[tuple[NumaNode, CpuSet]]:
    online = _optional_cpu_set(path / "online")
    if not online:
        memory = _meminfo(root / "proc/meminfo", r"MemTotal:\s+(\d+) kB")
        pools = _hugepages(root / "sys/kernel/mm/hugepages")
        return [(NumaNode(0, memory, (LOCAL_DISTANCE,), pools), CpuSet())]
    found = []
    for number in online:
        node = path / f"node{number}"
        distances = tuple(_numbers(node / "distance"))
        if len(distances) != len(online):
            raise HostError(
                f"cannot use {str(node / 'distance')!r}: {len(distances)} distances for {len(online)} NUMA nodes"
            )
        memory = _meminfo(node / "meminfo", rf"Node {number} MemTotal:\s+(\d+) kB")
        found.append((NumaNode(number, memory, distances, _hugepages(node / "hugepages")), _cpu_set(node / "cpulist")))
    return found


def _hugepages(path: Path) -> tuple[HugepagePool, ...]:
    pools = []
    for pool in path.glob("hugepages-*kB"):
        size = int(pool.name.removeprefix("hugepages-").removesuffix("kB")) * KIB
        pools.append(HugepagePool(size, _number(pool / "nr_hugepages"), _number(pool / "free_hugepages")))
    return tuple(sorted(pools, key=lambda pool: pool.size))


def _meminfo(path: Path, pattern: str) -> int:
    match = re.search(rf"^{pattern}$", _text(path), re.MULTILINE)
    if match is None:
        raise HostError(f"cannot use {str(path)!r}: it holds no MemTotal")
    return int(match[1]) * KIB


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(f"cannot read {str(path)!r}") from error


def _numbers(path: Path) -> list[int]:
    text = _text(path)
    try:
        return [int(word) for word in text.split()]
    except ValueError:
        raise HostError(f"cannot use {str(path)!r}: {text!r} is not a row of numbers") from None


def _number(path: Path) -> int:
    text = _text(path)
    try:
        return int(text)
    except ValueError:
        raise HostError(f"cannot use {str(path)!r}: {text!r} is not a number") from None


def _optional_number(path: Path) -> int | None:
    return _number(path) if path.exists() else None


def _cpu_set(path: Path) -> CpuSet:
    text = _text(path)
    try:
        return CpuSet.parse(text)
    except ValueError as error:
        raise HostError(f"cannot use {str(path)!r}") from error


def _optional_cpu_set(path: Path) -> CpuSet:
    return _cpu_set(path) if path.exists() else CpuSet()
