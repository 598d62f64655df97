"""The CPUs and NUMA nodes of one host as frozen values, which ``kernel/hardware_reader.py`` reads.

A :class:`Hardware` can be recorded (:meth:`Hardware.to_json`) on one machine and used for a plan on another. The kubelet
gets the same facts from cadvisor's ``MachineInfo``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

import attrs

from runner.base.cpuset import MAX_CPU, CpuSet
from runner.base.errors import Problem, SpecError
from runner.base.values import frozen

if TYPE_CHECKING:
    from runner.base.document_value import Value

FORMAT = 1
"""Version of the recorded form, incremented when an older reader would misunderstand it."""

KINDS = ("performance", "efficiency")
"""The values of :attr:`Cpu.kind` on a host with unequal cores."""


@frozen
class Cpu:
    """One online logical CPU, and the units of hardware that it belongs to."""

    cpu: int
    core: int
    """The lowest online CPU of the core: unique on the host, unlike the kernel's ``core_id``, which is unique only within a socket (the
    kubelet's ``getUniqueCoreID`` does the same)."""
    socket: int
    """The kernel's ``physical_package_id``."""
    die: int
    """The lowest online CPU of the die."""
    numa_node: int
    l3: int | None = None
    """The kernel's id of the L3 cache, by which the kubelet sorts; without an id the lowest CPU that shares the cache;
    ``None`` without an L3 cache."""
    max_khz: int | None = None
    """The highest frequency in kHz; ``None`` where the kernel does not report it."""
    capacity: int | None = None
    """The relative performance, 1024 for the fastest core; ``None`` where the kernel does not report it."""
    kind: str | None = None
    """One of :data:`KINDS`; ``None`` on a host with equal cores."""
    core_id: int | None = None
    """The kernel's ``core_id``, from which cadvisor derives cores; ``None`` if it was not read or the kernel has none."""


@frozen
class HugepagePool:
    """The hugepages of one size on one NUMA node; *size* in bytes, *total* and *free* in pages."""

    size: int
    total: int
    free: int


def is_page_size(size: int) -> bool:
    """Tell whether huge pages can have *size* bytes: a power of two from 1024."""
    return size >= 1024 and size.bit_count() == 1  # noqa: PLR2004 - a KiB


def hugetlb_name(page_size: int) -> str:
    """Return the name of huge pages of *page_size* bytes in cgroup files, such as ``2MB`` (``mm/hugetlb_cgroup.c``, ``mem_fmt``)."""
    return next(
        f"{page_size >> shift}{unit}" for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")) if page_size >> shift
    )


def hugepages_resource(page_size: int) -> str:
    """Return the resource name of huge pages of *page_size* bytes in Kubernetes, such as ``hugepages-2Mi``."""
    return next(
        f"hugepages-{page_size >> shift}{unit}"
        for shift, unit in ((30, "Gi"), (20, "Mi"), (10, "Ki"))
        if page_size >> shift
    )


def huge_limit_variable(page_size: int) -> str:
    """Return the environment variable with the container's limit of huge pages, such as ``LIMITS_HUGEPAGES_2MI``.

    The pod sets it from the Downward API (``resourceFieldRef: limits.hugepages-2Mi``), in bytes.
    """
    return f"LIMITS_{hugepages_resource(page_size).upper().replace('-', '_')}"


@frozen
class NumaNode:
    """One NUMA node; it may have no CPUs (CXL memory) or no memory.

    *memory* is ``MemTotal`` in bytes, hugepages included. *distances* holds one number for each NUMA node of the
    host in ascending order of their ids (10 is local), as the kernel's ``distance`` file does.
    """

    id: int
    memory: int
    distances: tuple[int, ...]
    hugepages: tuple[HugepagePool, ...] = ()


@attrs.frozen(slots=False)  # cached_property lives in __dict__
class Hardware:
    """A host: its online CPUs and its NUMA nodes, each in ascending order, and the CPUs that are offline."""

    cpus: tuple[Cpu, ...]
    numa_nodes: tuple[NumaNode, ...]
    offline: CpuSet = attrs.field(factory=CpuSet)
    memory: int | None = None
    """``MemTotal`` of ``/proc/meminfo`` in bytes, from which cadvisor derives the node's capacity; ``None`` if it was not read."""
    numa: bool = True
    """Whether the kernel knows NUMA; without it there is one NUMA node 0 with everything."""

    @property
    def total_memory(self) -> int:
        """Bytes of memory of the host: *memory*, or the sum of its NUMA nodes."""
        return sum(node.memory for node in self.numa_nodes) if self.memory is None else self.memory

    @cached_property
    def by_cpu(self) -> Mapping[int, Cpu]:
        """CPU number → the CPU."""
        return MappingProxyType({cpu.cpu: cpu for cpu in self.cpus})

    @cached_property
    def online(self) -> CpuSet:
        """Every online CPU."""
        return CpuSet(self.by_cpu)

    @cached_property
    def cores(self) -> Mapping[int, CpuSet]:
        """Core → its siblings."""
        return self._grouped(lambda cpu: cpu.core)

    @cached_property
    def sockets(self) -> Mapping[int, CpuSet]:
        """Socket → its CPUs."""
        return self._grouped(lambda cpu: cpu.socket)

    @cached_property
    def cpus_of_numa_node(self) -> Mapping[int, CpuSet]:
        """NUMA node → its CPUs; empty for a memory-only one."""
        memory_only = {node.id: CpuSet() for node in self.numa_nodes}
        return MappingProxyType(memory_only | dict(self._grouped(lambda cpu: cpu.numa_node)))

    def siblings(self, cpu: int) -> CpuSet:
        """Return the online CPUs of the core that *cpu* belongs to, including *cpu*."""
        return self.cores[self.by_cpu[cpu].core]

    def distance(self, here: int, there: int) -> int:
        """Return the distance from NUMA node *here* to NUMA node *there* (10 is local); ``KeyError`` for an unknown one."""
        return self._distances[here][there]

    @cached_property
    def _distances(self) -> dict[int, dict[int, int]]:
        ids = [node.id for node in self.numa_nodes]
        return {node.id: dict(zip(ids, node.distances, strict=True)) for node in self.numa_nodes}

    def _grouped(self, key: Callable[[Cpu], int]) -> Mapping[int, CpuSet]:
        groups: dict[int, list[int]] = {}
        for cpu in self.cpus:
            groups.setdefault(key(cpu), []).append(cpu.cpu)
        return MappingProxyType({name: CpuSet(groups[name]) for name in sorted(groups)})

    def to_json(self) -> str:
        """Return the host as JSON text, which :meth:`from_json` reads; the same host gives the same text."""
        document = {
            "format": FORMAT,
            "offline": str(self.offline),
            **({} if self.memory is None else {"memory": self.memory}),
            **({} if self.numa else {"numa": False}),
            "cpus": [_without_none(cpu) for cpu in self.cpus],
            "numa_nodes": [attrs.asdict(node) for node in self.numa_nodes],
        }
        # One CPU or NUMA node on each line, because people read a recorded host and compare it with diff.
        lines = []
        for key, value in document.items():
            if isinstance(value, list):
                items = ",\n  ".join(json.dumps(item) for item in value)
                lines.append(f' "{key}": [\n  {items}\n ]')
            else:
                lines.append(f' "{key}": {json.dumps(value)}')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, source: str = "host record") -> Self:
        """Parse the JSON of a recorded host; *source* is its name in errors.

        Raises :class:`SpecError` for the first malformed value, with its path (``cpus[3].core``), or for all contradictions.
        """
        from runner.base.document_value import Value  # here, because only `plan --host` reads a record

        try:
            record = Value(json.loads(text), source)
        except (ValueError, RecursionError) as error:
            raise SpecError(source, [Problem("", f"is not JSON: {error}")]) from None
        record.refuse_unknown({"format", "offline", "memory", "numa", "cpus", "numa_nodes"})
        if record.get("format").value != FORMAT:
            record.get("format").fail(f"must be {FORMAT}, found {record.get('format').value!r}")
        offline, numa = record.get("offline"), record.get("numa")
        hardware = cls(
            tuple(sorted(map(_cpu, record.get("cpus").elements()), key=lambda cpu: cpu.cpu)),
            tuple(sorted(map(_numa_node, record.get("numa_nodes").elements()), key=lambda node: node.id)),
            offline.cpu_set() if offline else CpuSet(),
            _optional_number(record.get("memory")),
            numa.flag() if numa else True,
        )
        if problems := [*hardware.problems()]:
            raise SpecError(source, problems)
        return hardware

    def problems(self) -> Iterable[Problem]:
        """Yield contradictions: a repeated number, an unknown NUMA node, a core on two sockets, dies or NUMA nodes."""
        if not self.cpus:
            yield Problem("cpus", "must hold at least one online CPU")
        yield from _repeated("cpus", "CPU", [cpu.cpu for cpu in self.cpus])
        yield from _repeated("numa_nodes", "NUMA node", [node.id for node in self.numa_nodes])
        for number in self.online & self.offline:
            yield Problem("offline", f"CPU {number} cannot be both online and offline")
        ids = {node.id for node in self.numa_nodes}
        places: dict[int, Cpu] = {}
        for index, cpu in enumerate(self.cpus):
            if cpu.numa_node not in ids:
                yield Problem(f"cpus[{index}].numa_node", f"there is no NUMA node {cpu.numa_node}")
            first = places.setdefault(cpu.core, cpu)
            if first is cpu and cpu.cpu != cpu.core:
                yield Problem(f"cpus[{index}].core", f"must be the lowest CPU of the core, {cpu.cpu}, found {cpu.core}")
            if (first.socket, first.die, first.numa_node) != (cpu.socket, cpu.die, cpu.numa_node):
                yield Problem(
                    f"cpus[{index}].core",
                    f"core {cpu.core} is on another socket, die or NUMA node than its CPU {first.cpu}",
                )
        for index, node in enumerate(self.numa_nodes):
            if len(node.distances) != len(self.numa_nodes):
                found = f"{len(node.distances)} for {len(self.numa_nodes)} NUMA nodes"
                yield Problem(
                    f"numa_nodes[{index}].distances", f"must hold one distance for each NUMA node, found {found}"
                )


@frozen
class OnlineCpus:
    """The CPUs and memory nodes of the host now; hotplug changes both while the host runs."""

    present: CpuSet
    """CPUs that exist; a cpuset may contain offline ones."""
    online: CpuSet
    """CPUs that the scheduler uses."""
    memory_nodes: CpuSet
    """NUMA nodes that have memory."""


def _without_none(cpu: Cpu) -> dict[str, int | str]:
    return {key: value for key, value in attrs.asdict(cpu).items() if value is not None}


def _repeated(path: str, what: str, numbers: list[int]) -> Iterable[Problem]:
    seen: set[int] = set()
    for index, number in enumerate(numbers):
        if number in seen:
            yield Problem(f"{path}[{index}]", f"{what} {number} is repeated")
        seen.add(number)


_LARGEST = (1 << 63) - 1
"""The largest number in a record: the kernel's counts of bytes and kHz are far below."""


def _names(kind: type[attrs.AttrsInstance]) -> list[str]:
    return [field.name for field in attrs.fields(kind)]


def _optional_number(value: Value) -> int | None:
    return value.number(_LARGEST) if value else None


def _cpu(value: Value) -> Cpu:
    value.refuse_unknown(_names(Cpu))
    kind = value.get("kind")
    if kind and kind.value not in KINDS:
        kind.fail(f"must be one of {', '.join(KINDS)}, found {kind.value!r}")
    cpu, core, socket, die, numa_node = (
        value.get(name).number(MAX_CPU) for name in ("cpu", "core", "socket", "die", "numa_node")
    )
    l3, max_khz, capacity, core_id = (
        _optional_number(value.get(name)) for name in ("l3", "max_khz", "capacity", "core_id")
    )
    return Cpu(cpu, core, socket, die, numa_node, l3, max_khz, capacity, kind.value, core_id)


def _numa_node(value: Value) -> NumaNode:
    value.refuse_unknown(_names(NumaNode))
    pools = map(_pool, value.get("hugepages").elements() if value.get("hugepages") else ())
    return NumaNode(
        value.get("id").number(MAX_CPU),
        value.get("memory").number(_LARGEST),
        tuple(distance.number(_LARGEST) for distance in value.get("distances").elements()),
        tuple(sorted(pools, key=lambda pool: pool.size)),
    )


def _pool(value: Value) -> HugepagePool:
    names = _names(HugepagePool)
    value.refuse_unknown(names)
    pool = HugepagePool(*(value.get(name).number(_LARGEST) for name in names))
    if not is_page_size(pool.size):
        value.get("size").fail(f"must be a power of two from 1024, found {pool.size}")
    return pool
