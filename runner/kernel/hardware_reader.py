"""The reader of ``/sys/devices/system``: a host's CPUs, caches, NUMA nodes and huge pages, from any root path.

The files are described in the kernel's ``Documentation/admin-guide/cputopology.rst`` and
``Documentation/ABI/{testing,stable}/sysfs-devices-{system-cpu,node}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode, OnlineCpus, is_page_size
from runner.kernel.leases import read_at_once

KIB = 1024
LOCAL_DISTANCE = 10
"""ACPI's distance from a NUMA node to itself."""
L3 = 3
_MEM_TOTAL = r"MemTotal:\s+(\d{1,18}) kB"


def read_hardware(root: Path = Path("/")) -> Hardware:
    """Read the host whose ``sys`` and ``proc`` lie below *root*.

    Offline CPUs are listed but not described, for the kernel hides their topology. A kernel without NUMA is one NUMA node 0 that holds
    everything. Raises :class:`HostError` if a file that every kernel has is missing or malformed.
    """
    system = root / "sys/devices/system"
    online = _cpu_set(system / "cpu/online")
    numa_nodes = _numa_nodes(system / "node", root)
    numa_node_of = {cpu: node.id for node, cpus in numa_nodes for cpu in cpus}
    kinds = dict.fromkeys(_optional_cpu_set(root / "sys/devices/cpu_core/cpus"), "performance") | dict.fromkeys(
        _optional_cpu_set(root / "sys/devices/cpu_atom/cpus"), "efficiency"
    )
    cpus = _cpus(system / "cpu", online, numa_node_of, numa_nodes[0][0].id, kinds)
    offline = _cpu_set(system / "cpu/present") - online
    return Hardware(tuple(cpus), tuple(node for node, _ in numa_nodes), offline)


def read_kubelet_hardware(root: Path = Path("/")) -> Hardware:
    """Read the host as :func:`read_hardware` does, and the facts that only the kubelet's decisions need.

    They need one file of each CPU, and so are not read at the start of an instance.
    """
    hardware = read_hardware(root)
    system = root / "sys/devices/system"
    meminfo = root / "proc/meminfo"
    return attrs.evolve(
        hardware,
        cpus=tuple(
            attrs.evolve(cpu, core_id=_core_id(system / f"cpu/cpu{cpu.cpu}/topology/core_id")) for cpu in hardware.cpus
        ),
        memory=_meminfo(meminfo, _MEM_TOTAL) if meminfo.exists() else None,
        numa=bool(_optional_cpu_set(system / "node/online")),
    )


def _core_id(path: Path) -> int | None:
    """Return the ``core_id``, which is -1 where the firmware does not tell."""
    number = _optional_number(path)
    return None if number is None or number < 0 else number


def read_online(sys: Path) -> CpuSet:
    """Return the CPUs that are online, from sysfs mounted at *sys*. Raises :class:`HostError`."""
    return _cpu_set(sys / "devices/system/cpu/online")


def read_online_cpus(sys: Path) -> OnlineCpus:
    """Read the CPUs and memory nodes from sysfs mounted at *sys*.

    A kernel without NUMA has one memory node, 0. Raises :class:`HostError`.
    """
    nodes = sys / "devices/system/node/has_memory"
    try:
        return OnlineCpus(
            present=_cpu_set(sys / "devices/system/cpu/present"),
            online=read_online(sys),
            memory_nodes=_cpu_set(nodes) if nodes.exists() else CpuSet([0]),
        )
    except HostError as error:
        raise HostError(f"cannot read the machine's CPUs and memory nodes from {sys}") from error


def _cpus(
    path: Path, online: CpuSet, numa_node_of: Mapping[int, int], fallback: int, kinds: Mapping[int, str]
) -> Iterator[Cpu]:
    """Yield the *online* CPUs. Shared facts are read once: reading a file of each CPU costs PID 1 a third of a millisecond."""
    cores: dict[int, Cpu] = {}
    dies: dict[int, tuple[int, int]] = {}
    caches: dict[int, int | None] = {}
    for cpu in online:
        if cpu not in cores:
            each = path / f"cpu{cpu}"
            # `core_cpus_list` and `die_cpus_list` came with 5.3; the older names are still there.
            siblings = _sharing(cpu, each, "topology/core_cpus_list", "topology/thread_siblings_list") or [cpu]
            if cpu not in dies:
                sharing = _sharing(cpu, each, "topology/die_cpus_list", "topology/core_siblings_list")
                # Virtual machines and some ARM firmware say -1: the host does not know, so it is one socket.
                socket = max(0, _optional_number(each / "topology/physical_package_id") or 0)
                dies |= dict.fromkeys(sharing or [cpu], (min(sharing, default=0), socket))
            if cpu not in caches:
                caches |= _l3(each, cpu)
            die, socket = dies[cpu]
            core = Cpu(
                cpu=cpu,
                core=min(siblings),
                socket=socket,
                die=die,
                numa_node=numa_node_of.get(cpu, fallback),
                l3=caches[cpu],
                max_khz=_optional_number(each / "cpufreq/cpuinfo_max_freq"),
                capacity=_optional_number(each / "cpu_capacity"),
                kind=kinds.get(cpu),
            )
            cores |= {sibling: attrs.evolve(core, cpu=sibling) for sibling in siblings}
        yield cores[cpu]


def _l3(path: Path, cpu: int) -> dict[int, int | None]:
    """Return the L3 cache of *cpu* for each CPU that shares it."""
    for index in sorted(path.glob("cache/index[0-9]*")):
        if _optional_number(index / "level") == L3:
            sharing = _sharing(cpu, index, "shared_cpu_list")
            name = _optional_number(index / "id")
            return dict.fromkeys(sharing, min(sharing) if name is None else name)
    return {cpu: None}


def _numa_nodes(path: Path, root: Path) -> list[tuple[NumaNode, CpuSet]]:
    online = _optional_cpu_set(path / "online")
    if not online:
        memory = _meminfo(root / "proc/meminfo", _MEM_TOTAL)
        pools = _hugepages(root / "sys/kernel/mm/hugepages")
        return [(NumaNode(0, memory, (LOCAL_DISTANCE,), pools), CpuSet())]
    nodes = []
    for number in online:
        node = path / f"node{number}"
        distances = tuple(_numbers(node / "distance"))
        if len(distances) != len(online):
            raise HostError(
                f"cannot use {str(node / 'distance')!r}: {len(distances)} distances for {len(online)} NUMA nodes"
            )
        memory = _meminfo(node / "meminfo", rf"Node {number} {_MEM_TOTAL}")
        nodes.append((NumaNode(number, memory, distances, _hugepages(node / "hugepages")), _cpu_set(node / "cpulist")))
    return nodes


def _hugepages(path: Path) -> tuple[HugepagePool, ...]:
    pools = []
    for pool in path.glob("hugepages-*kB"):
        kilobytes = pool.name.removeprefix("hugepages-").removesuffix("kB")
        if not re.fullmatch("[1-9][0-9]{0,17}", kilobytes, re.ASCII) or not is_page_size(int(kilobytes) * KIB):
            raise HostError(f"cannot use {str(pool)!r}: its name holds no size of a page")
        size = int(kilobytes) * KIB
        pools.append(HugepagePool(size, _number(pool / "nr_hugepages"), _number(pool / "free_hugepages")))
    return tuple(sorted(pools, key=lambda pool: pool.size))


def read_promised_pages(root: Path = Path("/")) -> dict[int, int]:
    """Return, by size, the huge pages of the host of *root* that are free but reserved for existing mappings."""
    pools = root / "sys/kernel/mm/hugepages"
    return {pool.size: _number(pools / f"hugepages-{pool.size >> 10}kB/resv_hugepages") for pool in _hugepages(pools)}


def _meminfo(path: Path, pattern: str) -> int:
    match = re.search(rf"^{pattern}$", _text(path), re.MULTILINE)
    if match is None:
        raise HostError(f"cannot use {str(path)!r}: it holds no MemTotal")
    return int(match[1]) * KIB


def _text(path: Path) -> str:
    try:
        return read_at_once(path).decode("ascii").strip()
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


def _sharing(cpu: int, path: Path, *names: str) -> CpuSet:
    """Return the CPUs that share a resource with *cpu*, from the first existing file of *names*; the empty set without one."""
    file = next((path / name for name in names if (path / name).exists()), None)
    if file is None:
        return CpuSet()
    cpus = _cpu_set(file)
    if cpu not in cpus:
        raise HostError(f"cannot use {str(file)!r}: it holds {str(cpus)!r} without CPU {cpu} itself")
    return cpus


def _optional_cpu_set(path: Path) -> CpuSet:
    return _cpu_set(path) if path.exists() else CpuSet()
