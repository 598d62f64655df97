"""The CPUs and NUMA nodes of one host as frozen values, which ``kernel/hardware_reader.py`` reads.

A :class:`Hardware` can be recorded (:meth:`Hardware.to_json`) on one machine and used for a plan on another. The kubelet
gets the same facts from cadvisor's ``MachineInfo``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn, Self

import attrs

from runner.base.cpuset import MAX_CPU, CpuSet
from runner.base.errors import Problem, SpecError
from runner.base.values import frozen

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

        Raises :class:`SpecError` with every problem, each with its path (``cpus[3].core``).
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise SpecError(source, [Problem("", f"is not JSON: {error}")]) from None
        reader = _RecordReader(source)
        root = reader.mapping(document, "", {"format", "offline", "memory", "numa", "cpus", "numa_nodes"})
        if root.get("format") != FORMAT:
            reader.complain("format", f"must be {FORMAT}, found {root.get('format')!r}")
        offline = reader.cpu_set(root.get("offline", ""), "offline")
        cpus = [reader.cpu(item, path) for item, path in reader.items(root.get("cpus"), "cpus")]
        nodes = [reader.numa_node(item, path) for item, path in reader.items(root.get("numa_nodes"), "numa_nodes")]
        memory, numa = reader.optional(root.get("memory"), "memory"), root.get("numa", True)
        if not isinstance(numa, bool):
            reader.complain("numa", f"must be true or false, found {numa!r}")
        reader.finish()
        hardware = cls(
            tuple(sorted(cpus, key=lambda cpu: cpu.cpu)),
            tuple(sorted(nodes, key=lambda node: node.id)),
            offline,
            memory,
            numa,
        )
        for problem in hardware.problems():
            reader.complain(problem.path, problem.message)
        reader.finish()
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


_MISSING = -1
"""Placeholder for a wrong number; :meth:`_RecordReader.finish` raises before a :class:`Hardware` is built with it."""


LARGEST = (1 << 63) - 1
"""The largest number in a record: the kernel's counts of bytes and kHz are far below."""


class _RecordReader:
    """Converts JSON values to the classes of this module, and collects problems on the way."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[Problem] = []

    def complain(self, path: str, message: str) -> None:
        self.found.append(Problem(path, message))

    def finish(self) -> None:
        if self.found:
            self.fail()

    def fail(self) -> NoReturn:
        raise SpecError(self.source, self.found)

    def mapping(self, value: Any, path: str, keys: Iterable[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.complain(path, f"must be an object, found {value!r}")
            self.fail()
        for key in sorted(set(value) - set(keys)):
            self.complain(f"{path}.{key}" if path else key, "is not known")
        return value

    def items(self, value: Any, path: str) -> list[tuple[Any, str]]:
        if not isinstance(value, list):
            self.complain(path, "must be a list" if value is None else f"must be a list, found {value!r}")
            return []
        return [(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def number(self, value: Any, path: str, highest: int = LARGEST) -> int:
        if type(value) is not int or not 0 <= value <= highest:
            limit = f" up to {highest}" if highest != LARGEST or (type(value) is int and value > 0) else ""
            found = "nothing" if value is None else repr(value)[:40]
            self.complain(path, f"must be a whole number from 0{limit}, found {found}")
            return _MISSING
        return value

    def optional(self, value: Any, path: str) -> int | None:
        return None if value is None else self.number(value, path)

    def cpu_set(self, value: Any, path: str) -> CpuSet:
        try:
            return CpuSet.parse(value)
        except (ValueError, AttributeError):
            self.complain(path, f"must be a CPU list like '0,2-3', found {value!r}")
            return CpuSet()

    def cpu(self, value: Any, path: str) -> Cpu:
        names = [field.name for field in attrs.fields(Cpu)]
        item = self.mapping(value, path, names)
        kind = item.get("kind")
        if kind is not None and kind not in KINDS:
            self.complain(f"{path}.kind", f"must be one of {', '.join(KINDS)}, found {kind!r}")
        return Cpu(
            cpu=self.number(item.get("cpu"), f"{path}.cpu", MAX_CPU),
            core=self.number(item.get("core"), f"{path}.core", MAX_CPU),
            socket=self.number(item.get("socket"), f"{path}.socket", MAX_CPU),
            die=self.number(item.get("die"), f"{path}.die", MAX_CPU),
            numa_node=self.number(item.get("numa_node"), f"{path}.numa_node", MAX_CPU),
            l3=self.optional(item.get("l3"), f"{path}.l3"),
            max_khz=self.optional(item.get("max_khz"), f"{path}.max_khz"),
            capacity=self.optional(item.get("capacity"), f"{path}.capacity"),
            kind=kind,
            core_id=self.optional(item.get("core_id"), f"{path}.core_id"),
        )

    def numa_node(self, value: Any, path: str) -> NumaNode:
        item = self.mapping(value, path, [field.name for field in attrs.fields(NumaNode)])
        pools = []
        for pool, where in self.items(item.get("hugepages", []), f"{path}.hugepages"):
            names = [field.name for field in attrs.fields(HugepagePool)]
            entry = self.mapping(pool, where, names)
            found = HugepagePool(*(self.number(entry.get(name), f"{where}.{name}") for name in names))
            if found.size != _MISSING and not is_page_size(found.size):
                self.complain(f"{where}.size", f"must be a power of two from 1024, found {found.size}")
            pools.append(found)
        return NumaNode(
            id=self.number(item.get("id"), f"{path}.id", MAX_CPU),
            memory=self.number(item.get("memory"), f"{path}.memory"),
            distances=tuple(
                self.number(distance, where)
                for distance, where in self.items(item.get("distances"), f"{path}.distances")
            ),
            hugepages=tuple(sorted(pools, key=lambda pool: pool.size)),
        )
