"""The numbers that a spec may derive from the host: vCPUs (``cpu.count = "all"``) and RAM (``memory.size = "limits"``).

Only these functions read ``cpu.count`` and ``memory.size``; others take the numbers. The RAM is resolved after the vCPUs
are placed, because it is divided among their NUMA nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Hardware, huge_limit_variable, hugepages_resource, hugetlb_name
from runner.facts.host import HostFacts
from runner.facts.memory_limits import HugeFact, MemoryLimits
from runner.placement.backends import Backend
from runner.placement.pins import all_cpus
from runner.plan.memory import PAGE_SIZE, in_mib
from runner.plan.problems import Problems
from runner.spec.instance import LEAST_MEMORY, CpuSpec, InstanceSpec, MemorySpec
from runner.spec.rules import format_size


def usable_cpus(backend: Backend, facts: HostFacts) -> CpuSet:
    """Return the CPUs that an instance placed by *backend* may use.

    The mask with which this process was started is removed if cgroups separate threads. If only masks do, it is respected as an operator's
    setting, such as ``CPUAffinity=`` of the instance's own unit.
    """
    return facts.allowed_cpus - facts.masked_cpus if backend == "affinity" else facts.allowed_cpus


def resolve_vcpus(cpu: CpuSpec, backend: Backend, facts: HostFacts) -> int:
    """Return the number of vCPUs."""
    if cpu.count == "all":
        return all_cpus(facts.hardware, usable_cpus(backend, facts), spare=backend != "controller")
    return cpu.count


def resolve_memory(
    spec: InstanceSpec, pins: Collection[int], overhead: Callable[[int], int], facts: HostFacts, problems: Problems
) -> int:
    """Return the bytes of RAM of a guest whose vCPUs are on the CPUs *pins*, empty if none could be chosen.

    *overhead* returns the bytes needed in addition to that many bytes of RAM.
    """
    if spec.memory.size != "limits":
        return spec.memory.size
    numa_nodes = _numa_nodes(pins, facts.hardware) if spec.cpu.topology == "host" else 1
    return _size_by_limits(spec.memory, overhead, facts.limits, numa_nodes, problems)


def _numa_nodes(pins: Collection[int], hardware: Hardware) -> int:
    return len({hardware.by_cpu[cpu].numa_node for cpu in pins}) or 1


def _size_by_limits(
    memory: MemorySpec, overhead: Callable[[int], int], limits: MemoryLimits, numa_nodes: int, problems: Problems
) -> int:
    """Return the bytes that *limits* leave; after a problem, the smallest possible size, so that no further problem follows."""
    page = memory.page_size
    if page is None:
        limit, name, resource = limits.memory, "memory.max", "limits.memory"
        source = ""
        # The overhead grows with the RAM, so the overhead for the whole limit is an upper bound.
        taken = 0 if limit is None else overhead(limit)
    else:
        limit = limits.huge.get(page, HugeFact()).limit
        name, taken = f"hugetlb.{hugetlb_name(page)}.max", 0
        resource = f"limits.{hugepages_resource(page)}"
        source = f" and {huge_limit_variable(page)} from it (Downward API, resourceFieldRef: {resource})"
    if limit is None:
        problems.refuse(
            "memory.size",
            f'"limits" means what {name} of this cgroup and those above leaves, and there is no limit',
            f"set {resource} in the pod{source}, or say how much",
        )
        return LEAST_MEMORY
    unit = (page or PAGE_SIZE) * numa_nodes
    size = max(0, limit - taken) // unit * unit
    if size < LEAST_MEMORY:
        needed = f", of which {format_size(taken)} are overhead" if taken else ""
        problems.refuse(
            "memory.size",
            f"{name} is {in_mib(limit)}{needed}: what is left is less than the {format_size(LEAST_MEMORY)} that a guest "
            "has at least",
            f"raise {resource}",
        )
    return max(size, LEAST_MEMORY)
