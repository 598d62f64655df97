"""The CPU that each vCPU is pinned to, and the choice of CPUs where no kubelet has assigned them.

Two vCPUs are never pinned to one CPU: :class:`Pinning` checks this when it is created.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.base.judgement import Judgement, Level
from runner.base.values import frozen
from runner.facts.hardware import Hardware


class PinPolicy(enum.Enum):
    """The order in which vCPUs are assigned to CPUs."""

    PACKED_SIBLINGS = "packed-siblings"
    """vCPUs that are threads of one guest core are pinned to siblings of one host core."""
    LINEAR = "linear"
    """vCPU *i* is pinned to the *i*-th CPU in ascending order."""


def _one_cpu_each(_pinning: Pinning, _attribute: object, pins: tuple[int, ...]) -> None:
    repeated = [cpu for cpu, count in Counter(pins).items() if count > 1]
    if repeated:
        raise ValueError(f"two vCPUs on CPU {min(repeated)}")
    if not pins:
        raise ValueError("a placement of no vCPUs")


@frozen
class Pinning:
    """The CPU of each vCPU; ``ValueError`` for two vCPUs on one CPU."""

    pins: tuple[int, ...] = attrs.field(validator=_one_cpu_each)
    """The CPU of each vCPU, by vCPU index."""
    policy: PinPolicy
    threads: int
    """Threads of a guest core: vCPUs ``threads*k … threads*k+threads-1`` are pinned to one whole host core; 1 if that is not
    so for all vCPUs."""
    findings: tuple[Judgement, ...] = ()
    """Properties that cost performance."""

    @property
    def cpus(self) -> CpuSet:
        """The CPUs that have a vCPU."""
        return CpuSet(self.pins)


def place(
    vcpus: int,
    exclusive: CpuSet,
    hardware: Hardware,
    *,
    policy: PinPolicy | None = None,
    others: CpuSet | None = None,
) -> Pinning:
    """Pin *vcpus* vCPUs to the *exclusive* CPUs of *hardware*.

    Without a *policy*, it is ``packed-siblings`` if *exclusive* consists of whole cores, else ``linear``. *others* are the
    exclusive CPUs of other pods, so that findings distinguish them from the shared pool.
    Raises :class:`RefusedError` if there are fewer CPUs than vCPUs, or one of them is not an online CPU of the host.
    """
    if vcpus < 1:
        raise RefusedError(f"cannot place {vcpus} vCPUs: an instance has at least one")
    unknown = exclusive - hardware.online
    if len(unknown):
        raise RefusedError(f"cannot place vCPUs on CPUs {unknown}: the host has no such online CPUs")
    if vcpus > len(exclusive):
        raise RefusedError(
            f"cannot place {vcpus} vCPUs: there are {len(exclusive)} exclusive CPUs ({exclusive})",
            remedy="ask for as many CPUs as vCPUs",
        )
    if policy is None:
        policy = PinPolicy.PACKED_SIBLINGS if not _half_cores(exclusive, hardware) else PinPolicy.LINEAR
    order = list(exclusive) if policy is PinPolicy.LINEAR else _by_siblings(exclusive, hardware)
    pins = tuple(order[:vcpus])
    return Pinning(pins, policy, threads_per_core(pins, hardware), tuple(_findings(pins, exclusive, hardware, others)))


def _half_cores(cpus: CpuSet, hardware: Hardware) -> list[int]:
    """Return the cores of which *cpus* contains some CPUs but not all."""
    cores = sorted({hardware.by_cpu[cpu].core for cpu in cpus})
    return [core for core in cores if not hardware.cores[core] <= cpus]


def _by_siblings(cpus: CpuSet, hardware: Hardware) -> list[int]:
    """Order *cpus* by NUMA node, then L3 cache, then core, so that neighbouring vCPUs are on neighbouring CPUs.

    Within a NUMA node the cores with the most CPUs come first, because a guest core is a whole host core.
    """
    size = Counter(hardware.by_cpu[cpu].core for cpu in cpus)

    def key(number: int) -> tuple[int, int, int, int, int]:
        cpu = hardware.by_cpu[number]
        return cpu.numa_node, -size[cpu.core], -1 if cpu.l3 is None else cpu.l3, cpu.core, number

    return sorted(cpus, key=key)


def threads_per_core(pins: Sequence[int], hardware: Hardware) -> int:
    """Return the number of consecutive vCPUs that are pinned to one whole core; 1 if it differs between cores."""
    first = hardware.siblings(pins[0])
    threads = len(first)
    if len(pins) % threads:
        return 1
    for start in range(0, len(pins), threads):
        guest_core = CpuSet(pins[start : start + threads])
        if guest_core != hardware.siblings(pins[start]):
            return 1
    return threads


def _finding(kind: str, found: str, remedy: str = "") -> Judgement:
    return Judgement(kind, Level.WARNING, found, "", remedy)


def _findings(pins: Sequence[int], exclusive: CpuSet, hardware: Hardware, others: CpuSet | None) -> Iterable[Judgement]:
    cpus = CpuSet(pins)
    missing = CpuSet.union(hardware.cores[core] for core in _half_cores(exclusive, hardware)) - exclusive
    taken = missing & (others or CpuSet())
    if len(taken):
        own = CpuSet.union(hardware.siblings(other) for other in taken) & exclusive
        yield _finding(
            "sibling-of-another",
            f"CPUs {own} share their cores with CPUs {taken}, which are exclusive to another pod: each slows the other",
            "ask for whole cores, and set the kubelet's option full-pcpus-only",
        )
    shared = missing - taken
    if len(shared):
        own = CpuSet.union(hardware.siblings(other) for other in shared) & exclusive
        yield _finding(
            "half-core",
            f"CPUs {own} are half cores: any other pod may run on their siblings {shared}",
            "ask for whole cores, and set the kubelet's option full-pcpus-only",
        )
    numa_nodes = Counter(hardware.by_cpu[cpu].numa_node for cpu in cpus)
    if len(numa_nodes) > 1:
        where = ", ".join(f"{numa_nodes[each]} on {each}" for each in sorted(numa_nodes))
        yield _finding(
            "across-numa-nodes",
            f"the vCPUs lie on {len(numa_nodes)} NUMA nodes ({where}): memory is remote for some of them",
            "ask for less, or set the kubelet's Topology Manager policy to single-numa-node or restricted",
        )
    kinds = Counter(hardware.by_cpu[cpu].kind for cpu in cpus)
    if len(kinds) > 1:
        where = " and ".join(f"{kinds[each]} {each or 'other'}" for each in sorted(kinds, key=str))
        yield _finding(
            "unequal-cores",
            f"the vCPUs lie on unequal cores ({where}), and the guest cannot distinguish them",
        )
    unused = exclusive - cpus
    if len(unused):
        yield _finding(
            "unused-cpus",
            f"CPUs {unused} are exclusive and have no vCPU",
            "give the guest more vCPUs",
        )


# --- choosing CPUs without a kubelet ----------------------------------------------------------------------------------


def choose_cpus(hardware: Hardware, allowed: CpuSet, count: int) -> CpuSet:
    """Choose *count* of the *allowed* CPUs for the vCPUs of one instance, without a kubelet.

    Criteria, the most important first:

    1. The core of CPU 0 is left to interrupts, timekeeping and daemons, if there are enough CPUs without it.
    2. On a host with unequal cores all are of one kind, the fast kind if possible.
    3. The CPUs are on as few NUMA nodes as possible.
    4. As few cores as possible are used in part.
    5. The NUMA nodes are near each other; of equally near ones, those with the fewest usable CPUs are used.
    6. Few L3 caches are used.

    From several NUMA nodes whole cores are taken in turn. Raises :class:`RefusedError` if fewer than *count* are allowed
    and online.
    """
    usable = allowed & hardware.online
    if count < 1:
        raise RefusedError(f"cannot choose {count} CPUs: an instance has at least one")
    if count > len(usable):
        raise RefusedError(
            f"cannot choose {count} CPUs: only {len(usable)} may be used ({usable})",
            remedy="ask for fewer vCPUs",
        )
    without_first = usable - hardware.siblings(0) if 0 in hardware.online else usable
    pool = without_first if len(without_first) >= count else usable
    for kind in ("performance", "efficiency"):
        alike = CpuSet(cpu for cpu in pool if hardware.by_cpu[cpu].kind == kind)
        if len(alike) >= count:
            pool = alike
            break
    units = _units_by_numa_node(hardware, pool)
    return _evenly([units[each] for each in _best_numa_nodes(hardware, units, count)], count)


def all_cpus(hardware: Hardware, usable: CpuSet, *, spare: bool) -> int:
    """Return how many of the *usable* CPUs can have a vCPU: all, or with *spare* all but one core for all other threads.

    A whole core is spared because work on one sibling slows a vCPU on the other. Of a single core, one CPU is spared.
    """
    if not spare or len(usable) == 1:
        return len(usable)
    core = min((hardware.siblings(cpu) & usable for cpu in usable), key=len)
    return len(usable) - (len(core) if len(core) < len(usable) else 1)


@frozen
class _Units:
    """The usable CPUs of one NUMA node by core; cores whose L3 cache has the most usable cores come first."""

    whole: tuple[CpuSet, ...]
    """The cores of which all CPUs are usable."""
    broken: tuple[CpuSet, ...]
    """The usable CPUs of every other core."""

    @property
    def size(self) -> int:
        return sum(map(len, self.whole + self.broken))


def _units_by_numa_node(hardware: Hardware, pool: CpuSet) -> dict[int, _Units]:
    units = {}
    for numa_node, cpus in hardware.cpus_of_numa_node.items():
        by_core = {core: hardware.cores[core] & pool for core in {hardware.by_cpu[cpu].core for cpu in cpus & pool}}
        in_l3 = Counter(hardware.by_cpu[core].l3 for core in by_core)

        def key(core: int, in_l3: Mapping[int | None, int] = in_l3) -> tuple[int, int, int]:
            l3 = hardware.by_cpu[core].l3
            return -in_l3[l3], l3 or 0, core

        order = sorted(by_core, key=key)
        whole = tuple(by_core[core] for core in order if by_core[core] == hardware.cores[core])
        broken = tuple(by_core[core] for core in order if by_core[core] != hardware.cores[core])
        if whole or broken:
            units[numa_node] = _Units(whole, broken)
    return units


def _best_numa_nodes(hardware: Hardware, units: Mapping[int, _Units], count: int) -> tuple[int, ...]:
    """Return the smallest set of NUMA nodes that has *count* CPUs.

    Of several such sets, choose the one with the fewest cores used in part, then with the smallest sum of distances,
    then with the fewest CPUs.
    """
    size = {numa_node: each.size for numa_node, each in units.items()}
    whole = {numa_node: Counter(map(len, each.whole)) for numa_node, each in units.items()}

    def key(numa_nodes: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        distance = sum(hardware.distance(here, there) for here in numa_nodes for there in numa_nodes)
        cores = sum((whole[each] for each in numa_nodes), Counter[int]())
        halves = [len(unit) for each in numa_nodes for unit in units[each].broken]
        return _broken_cores(cores, halves, count), distance, sum(size[each] for each in numa_nodes), numa_nodes

    for number in range(1, len(size) + 1):
        enough = [
            chosen
            for chosen in itertools.combinations(sorted(size), number)
            if sum(size[each] for each in chosen) >= count
        ]
        if enough:
            return min(enough, key=key)
    raise AssertionError("the caller made sure that there are enough")


def _broken_cores(whole: Mapping[int, int], halves: Iterable[int], count: int) -> int:
    """Return how many cores are only partly used when :func:`_evenly` takes *count* CPUs.

    *whole* is the number of whole cores by their size in CPUs, *halves* the number of usable CPUs of each other core.
    """
    spare = False
    for size in sorted(whole, reverse=True):
        taken = min(whole[size], count // size)
        count -= taken * size
        spare = spare or taken < whole[size]
    if count and spare:
        return 1
    broken = 0
    for half in sorted(halves, reverse=True):
        if count <= 0:
            break
        count -= half
        broken += 1
    return broken


def _evenly(numa_nodes: Sequence[_Units], count: int) -> CpuSet:
    """Take *count* CPUs: whole cores, the biggest first, each from the NUMA node with the fewest taken CPUs; then parts of cores."""
    left = [list(each.whole) for each in numa_nodes]
    halves = [unit for each in numa_nodes for unit in each.broken]
    given = [0] * len(left)
    chosen = CpuSet()
    while missing := count - len(chosen):
        fitting = [
            (-len(unit), given[index], index, place)
            for index, each in enumerate(left)
            for place, unit in enumerate(each)
            if len(unit) <= missing
        ]
        if not fitting:
            break
        _, _, index, place = min(fitting)
        unit = left[index].pop(place)
        given[index] += len(unit)
        chosen |= unit
    while missing := count - len(chosen):
        enough = [unit for unit in halves if len(unit) >= missing] or [unit for each in left for unit in each]
        unit = min(enough, key=len) if enough else max(halves, key=len)
        halves = [other for other in halves if other != unit]
        chosen |= CpuSet(list(unit)[-missing:])  # not the first ones: CPU 0 serves most interrupts
    return chosen
