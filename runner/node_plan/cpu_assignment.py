"""The kubelet's choice of CPUs among the free ones, packed or distributed, including its known bugs.

Modelled on ``pkg/kubelet/cm/cpumanager/cpu_assignment.go`` and ``topology/topology.go`` of Kubernetes 1.33 to 1.36.3.
Docstrings name the Go function that is modelled.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Self

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import define, frozen
from runner.facts.hardware import Hardware
from runner.node_plan.quirks import AllocationError, KubeletHangsError, Quirk


@frozen
class CpuFacts:
    """One CPU as the CPU Manager knows it (``topology.CPUInfo``)."""

    cpu: int
    core: int
    socket: int
    numa_node: int
    uncore: int


@attrs.frozen(slots=False)  # cached_property lives in __dict__
class CpuTopology:
    """The CPU Manager's view of the host (``topology.CPUTopology``).

    The averages are integer divisions, as in the kubelet; on a host with unequal cores no core may have the average size.
    """

    cpus: tuple[CpuFacts, ...]

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """Build the topology as ``topology.Discover`` does: the uncore cache of a CPU without L3 cache is its socket's."""
        return cls(
            tuple(
                CpuFacts(cpu.cpu, cpu.core, cpu.socket, cpu.numa_node, cpu.socket if cpu.l3 is None else cpu.l3)
                for cpu in hardware.cpus
            )
        )

    @cached_property
    def all(self) -> frozenset[int]:
        """Every CPU."""
        return frozenset(fact.cpu for fact in self.cpus)

    @cached_property
    def core_of(self) -> Mapping[int, int]:
        """CPU → core."""
        return {fact.cpu: fact.core for fact in self.cpus}

    @cached_property
    def socket_of(self) -> Mapping[int, int]:
        """CPU → socket."""
        return {fact.cpu: fact.socket for fact in self.cpus}

    @cached_property
    def numa_node_of(self) -> Mapping[int, int]:
        """CPU → NUMA node."""
        return {fact.cpu: fact.numa_node for fact in self.cpus}

    @cached_property
    def uncore_of(self) -> Mapping[int, int]:
        """CPU → uncore (L3) cache."""
        return {fact.cpu: fact.uncore for fact in self.cpus}

    @cached_property
    def cores(self) -> Mapping[int, frozenset[int]]:
        """Core → its CPUs."""
        return _inverted(self.core_of)

    @cached_property
    def sockets(self) -> Mapping[int, frozenset[int]]:
        """Socket → its CPUs."""
        return _inverted(self.socket_of)

    @cached_property
    def numa_nodes(self) -> Mapping[int, frozenset[int]]:
        """NUMA node → its CPUs; NUMA nodes without CPUs are not among them."""
        return _inverted(self.numa_node_of)

    @cached_property
    def uncores(self) -> Mapping[int, frozenset[int]]:
        """Uncore cache → its CPUs."""
        return _inverted(self.uncore_of)

    @property
    def cpus_per_core(self) -> int:
        """CPUs per core on average."""
        return len(self.cpus) // len(self.cores)

    @property
    def cpus_per_socket(self) -> int:
        """CPUs per socket on average."""
        return len(self.cpus) // len(self.sockets)

    @property
    def cpus_per_uncore(self) -> int:
        """CPUs per uncore cache on average."""
        return len(self.cpus) // len(self.uncores)


def _inverted(place_of: Mapping[int, int]) -> Mapping[int, frozenset[int]]:
    groups: dict[int, set[int]] = {}
    for cpu, place in place_of.items():
        groups.setdefault(place, set()).add(cpu)
    return MappingProxyType({place: frozenset(groups[place]) for place in sorted(groups)})


# --- packed assignment ------------------------------------------------------------------------------------------------


def take_packed(
    topology: CpuTopology,
    available: CpuSet,
    count: int,
    *,
    spread: bool = False,
    prefer_uncore: bool = False,
    quirks: frozenset[Quirk] = frozenset(Quirk),
) -> CpuSet:
    """Take *count* of the *available* CPUs, whole NUMA nodes, sockets and cores first (``takeByTopologyNUMAPacked``).

    *spread* takes single CPUs socket by socket and ignores cores (``distribute-cpus-across-cores``); *prefer_uncore* uses
    as few L3 caches as possible (``prefer-align-cpus-by-uncorecache``).
    Raises :class:`AllocationError` in the kubelet's words if there are not enough.
    """
    if count < 1:
        return CpuSet()
    search = _Packing(topology, frozenset(available) & topology.all, count, quirks)
    if count > len(search.free):
        raise _not_enough(count, available)
    steps: list[Callable[[], None]] = [search.take_whole_outer, search.take_whole_inner]
    if prefer_uncore:
        steps.append(search.take_uncores)
    if not spread:
        steps.append(search.take_whole_cores)
    steps.append(search.take_spread_cpus if spread else search.take_packed_cpus)
    for step in steps:
        step()
        if search.needed == 0:
            return CpuSet(search.taken)
    raise AllocationError("failed to allocate cpus")


def _not_enough(count: int, available: CpuSet) -> AllocationError:
    return AllocationError(
        f"not enough cpus available to satisfy request: requested={count}, available={len(available)}"
    )


class _Packing:
    """The kubelet's ``cpuAccumulator``: free CPUs, taken CPUs, and the number that is still needed."""

    def __init__(self, topology: CpuTopology, free: frozenset[int], count: int, quirks: frozenset[Quirk]) -> None:
        self.topology = topology
        self.free = set(free)
        self.taken: set[int] = set()
        self.needed = count
        self.quirks = quirks
        # The bigger unit is taken first; if each socket is one NUMA node, the NUMA node counts as the bigger.
        self.numa_nodes_outside = len(topology.sockets) >= len(topology.numa_nodes)

    # Orders: units with the fewest free CPUs first, so that partly taken units are used up before others; ties by number.
    # Units without free CPUs are left out.

    @staticmethod
    def _ordered(cpus: Iterable[int], place_of: Mapping[int, int]) -> list[int]:
        free = Counter(place_of[cpu] for cpu in cpus)
        return sorted(free, key=lambda place: (free[place], place))

    def _ordered_within(self, outer: Sequence[int], outer_of: Mapping[int, int], of: Mapping[int, int]) -> list[int]:
        inside: dict[int, list[int]] = {}
        for cpu in self.free:
            inside.setdefault(outer_of[cpu], []).append(cpu)
        return [place for each in outer for place in self._ordered(inside.get(each, ()), of)]

    def numa_nodes(self) -> list[int]:
        topology = self.topology
        if self.numa_nodes_outside:
            return self._ordered(self.free, topology.numa_node_of)
        return self._ordered_within(self.sockets(), topology.socket_of, topology.numa_node_of)

    def sockets(self) -> list[int]:
        topology = self.topology
        if self.numa_nodes_outside:
            return self._ordered_within(self.numa_nodes(), topology.numa_node_of, topology.socket_of)
        return self._ordered(self.free, topology.socket_of)

    def cores(self) -> list[int]:
        topology = self.topology
        if self.numa_nodes_outside:
            return self._ordered_within(self.sockets(), topology.socket_of, topology.core_of)
        return self._ordered_within(self.numa_nodes(), topology.numa_node_of, topology.core_of)

    def uncores(self) -> list[int]:
        return self._ordered_within(self.numa_nodes(), self.topology.numa_node_of, self.topology.uncore_of)

    # Steps.

    def take(self, cpus: Iterable[int]) -> None:
        cpus = set(cpus)
        self.taken |= cpus
        self.free -= cpus
        self.needed -= len(cpus)

    def _take_whole(
        self, order: list[int], units: Mapping[int, frozenset[int]], average: int = 0, quirk: Quirk | None = None
    ) -> None:
        """Take every unit of *order* that is completely free and has no more CPUs than are needed.

        A unit counts as completely free if its number of free CPUs is its own size, with *quirk* if it is *average*.
        """
        whole = []
        for unit in order:
            size = average if quirk in self.quirks else len(units[unit])
            if len(units[unit] & self.free) == size:
                whole.append(unit)
        for unit in whole:
            if self.needed >= len(units[unit]):
                self.take(units[unit])
            if self.needed == 0:
                return

    def take_whole_numa_nodes(self) -> None:
        self._take_whole(self.numa_nodes(), self.topology.numa_nodes)

    def take_whole_sockets(self) -> None:
        average = self.topology.cpus_per_socket
        self._take_whole(self.sockets(), self.topology.sockets, average, Quirk.WHOLE_UNITS_UNCHECKED)

    def take_whole_outer(self) -> None:
        if self.numa_nodes_outside:
            self.take_whole_numa_nodes()
        else:
            self.take_whole_sockets()

    def take_whole_inner(self) -> None:
        if self.numa_nodes_outside:
            self.take_whole_sockets()
        else:
            self.take_whole_numa_nodes()

    def take_whole_cores(self) -> None:
        average = self.topology.cpus_per_core
        self._take_whole(self.cores(), self.topology.cores, average, Quirk.WHOLE_CORES_UNCHECKED)

    def take_uncores(self) -> None:
        """Take whole L3 caches while they fit, then a part of one that satisfies the request exactly (``takeUncoreCache``)."""
        for uncore in self.uncores():
            if self.needed >= self.topology.cpus_per_uncore:
                self._take_whole(self.uncores(), self.topology.uncores)
                if self.needed == 0:
                    return
            self._take_part_of_uncore(uncore)
            if self.needed == 0:
                return

    def _take_part_of_uncore(self, uncore: int) -> None:
        per_core = self.topology.cpus_per_core
        free = self.topology.uncores[uncore] & self.free
        cores = sorted({self.topology.core_of[cpu] for cpu in free})[: -(-self.needed // per_core)]
        chosen = sorted(cpu for core in cores for cpu in self.topology.cores[core] & self.free)
        if self.needed % 2 and per_core > 1 and len(chosen) > self.needed:
            chosen.pop()
        if len(chosen) == self.needed:
            self.take(chosen)

    def take_packed_cpus(self) -> None:
        order = [cpu for core in self.cores() for cpu in sorted(self.topology.cores[core] & self.free)]
        self.take(order[: self.needed])

    def take_spread_cpus(self) -> None:
        order = [cpu for socket in self.sockets() for cpu in sorted(self.topology.sockets[socket] & self.free)]
        self.take(order[: self.needed])


# --- distributed assignment -------------------------------------------------------------------------------------------


@attrs.define
class _Slice:
    """A Go slice, as ``append`` sees it: a length, and an array that other slices may share."""

    array: list[int]
    length: int

    def append(self, value: int, *, shared: bool) -> _Slice:
        """Append as Go does: into the array if it has room, which changes all slices that share it, else into one twice as big.

        Without *shared* every append creates a new array, as the kubelet intends.
        """
        if shared and self.length < len(self.array):
            self.array[self.length] = value
            return _Slice(self.array, self.length + 1)
        room = [0] * (len(self.array) if shared else 1)
        return _Slice([*self.array[: self.length], value, *room[1:]], self.length + 1)

    def values(self) -> list[int]:
        return self.array[: self.length]


def _combinations(items: Sequence[int], size: int, *, shared: bool) -> Iterator[_Slice]:
    """Yield every combination of *size* of *items* in lexicographic order (``iterateCombinations``).

    The kubelet builds them by ``append`` in a recursion, so with *shared* a combination may change after it was yielded.
    """

    def extend(prefix: _Slice, missing: int, start: int) -> Iterator[_Slice]:
        if missing == 0:
            yield prefix
            return
        for index in range(start, len(items) - missing + 1):
            yield from extend(prefix.append(items[index], shared=shared), missing - 1, index + 1)

    for index in range(len(items) - size + 1):
        yield from extend(_Slice([items[index]], 1), size - 1, index + 1)


def _rounded(value: float) -> float:
    return math.floor(value * 1000 + 0.5) / 1000


@functools.lru_cache(maxsize=4096)
def _imbalance(values: tuple[int, ...]) -> float:
    """Return the kubelet's ``standardDeviation``: of the population, mean and result rounded to three decimals."""
    mean = _rounded(sum(values) / len(values))
    return _rounded(math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)))


@attrs.define
class _Choice:
    """The best distribution found so far for one number of NUMA nodes."""

    balance: float = math.inf
    """The imbalance of free CPUs that it leaves (:func:`_imbalance`)."""
    numa_nodes: _Slice | None = None
    remainder: Sequence[int] = ()
    """The NUMA nodes from which the remaining CPUs are taken."""


def take_distributed(  # noqa: PLR0913 - the kubelet's, and the bugs
    topology: CpuTopology,
    available: CpuSet,
    count: int,
    *,
    group: int = 1,
    spread: bool = False,
    fewest: int = 0,
    quirks: frozenset[Quirk] = frozenset(Quirk),
) -> CpuSet:
    """Take *count* CPUs evenly from as few NUMA nodes as possible (``takeByTopologyNUMADistributed``).

    They are *fewest* or more, unless fewer have free CPUs.

    CPUs are taken in groups of *group* (a core's CPUs with ``full-pcpus-only``); a *count* that is no multiple of it is
    packed. Raises :class:`AllocationError` in the kubelet's words, :class:`KubeletHangsError` if the kubelet would loop.
    """
    if count % group:
        return take_packed(topology, available, count, spread=spread, quirks=quirks)
    if count < 1:
        return CpuSet()
    free = frozenset(available) & topology.all
    if count > len(free):
        raise _not_enough(count, available)
    search = _Distribution(topology, free, count, group, spread, quirks)
    per_numa_node = ceil_div(ceil_div(len(topology.cpus), group), len(topology.numa_nodes))
    groups = ceil_div(count, group)
    least = ceil_div(groups, per_numa_node)
    if fewest <= len(search.have):
        least = max(least, fewest)
    for size in range(least, min(groups, len(search.have)) + 1):
        choice = search.best(size, count // size // group * group)
        if choice.numa_nodes is not None:
            return search.collect(choice, count // size // group * group)
    return take_packed(topology, available, count, spread=spread, quirks=quirks)


def ceil_div(value: int, by: int) -> int:
    """Return *value* divided by *by*, rounded up."""
    return -(-value // by)


@define
class _Distribution:
    """One search of :func:`take_distributed`."""

    topology: CpuTopology
    free: frozenset[int]
    count: int
    group: int
    spread: bool
    quirks: frozenset[Quirk]
    remainders: dict[tuple[int, tuple[int, ...], int], tuple[float, Sequence[int]]] = attrs.field(factory=dict)
    have: dict[int, int] = attrs.field(init=False)
    """NUMA node → its free CPUs, in the kubelet's order."""

    @have.default
    def _free_by_numa_node(self) -> dict[int, int]:
        order = _Packing(self.topology, self.free, self.count, self.quirks).numa_nodes()
        return {numa_node: len(self.topology.numa_nodes[numa_node] & self.free) for numa_node in order}

    def best(self, size: int, share: int) -> _Choice:
        """Choose *size* NUMA nodes, each of which gives *share* CPUs, and those of them that give the remaining CPUs.

        The best choice leaves the free CPUs most evenly spread over all NUMA nodes.
        """
        have, count, group = self.have, self.count, self.group
        best = _Choice()
        rest = count - share * size
        for combination in _combinations(list(have), size, shared=Quirk.COMBINATIONS_OVERWRITTEN in self.quirks):
            if best.balance == 0:
                break
            members = combination.values()
            if any(have[each] < share for each in members):
                continue
            # The kubelet also compares the sum of CPUs; the sum in whole groups is never larger, so this check is enough.
            if sum(have[each] // group * group for each in members) < count:
                continue
            after = have | {each: have[each] - share for each in members}
            if rest:
                local = self._best_remainder([each for each in members if after[each] >= group], after, rest)
            else:
                local = _Choice(self._imbalance(after))
            if local.balance < best.balance:
                best = local
                best.numa_nodes = combination
        return best

    def _best_remainder(self, members: Sequence[int], after: Mapping[int, int], rest: int) -> _Choice:
        # The result depends on the members' counts, and on the other counts only through the sum of squares. On a host
        # with equal NUMA nodes most combinations have the same key; with 16 of them the cache saves seconds.
        key = rest, tuple(after[each] for each in members), sum(count * count for count in after.values())
        if key not in self.remainders:
            self.remainders[key] = self._search_remainder(members, after, rest)
        balance, places = self.remainders[key]
        return _Choice(balance, remainder=[members[place] for place in places])

    def _search_remainder(
        self, members: Sequence[int], after: Mapping[int, int], rest: int
    ) -> tuple[float, Sequence[int]]:
        best, best_subset = math.inf, _Slice([], 0)
        counted = 1 if Quirk.LIVELOCK in self.quirks else self.group
        for size in range(len(members), 0, -1):
            for subset in _combinations(
                range(len(members)), size, shared=Quirk.COMBINATIONS_OVERWRITTEN in self.quirks
            ):
                takers = [members[place] for place in subset.values()]
                if sum(after[each] // counted * counted for each in takers) < rest:
                    continue
                balance = self._imbalance(self._left_after(takers, after, rest))
                if balance < best:
                    best, best_subset = balance, subset
        return best, best_subset.values()

    def _left_after(self, takers: Sequence[int], after: Mapping[int, int], rest: int) -> dict[int, int]:
        left = dict(after)
        for numa_node in self._rounds(takers, left, rest):
            left[numa_node] -= self.group
        return left

    def _rounds(self, takers: Sequence[int], left: Mapping[int, int], rest: int) -> Iterator[int]:
        """Yield the NUMA node of each next group, in turn, until *rest* CPUs are taken; the caller updates *left*."""
        while rest > 0:
            before = rest
            for numa_node in takers:
                if rest > 0 and left[numa_node] >= self.group:
                    yield numa_node
                    rest -= self.group
            if rest == before:
                raise KubeletHangsError(
                    f"this kubelet would hang: {rest} of {self.count} CPUs are left to take in groups of {self.group},"
                    f" and NUMA nodes {','.join(map(str, takers))} have no whole group left ({Quirk.LIVELOCK.value})"
                )

    def _imbalance(self, free: Mapping[int, int]) -> float:
        return _imbalance(tuple(sorted(free.values())))

    def collect(self, choice: _Choice, share: int) -> CpuSet:
        """Take CPUs by *choice*, packed within each NUMA node."""
        gathered = _Packing(self.topology, self.free, self.count, self.quirks)
        left = dict(self.have)

        def take(numa_node: int, count: int) -> None:
            here = CpuSet(gathered.free & self.topology.numa_nodes[numa_node])
            # The kubelet ignores the error too, and compares the sum at the end.
            with contextlib.suppress(AllocationError):
                gathered.take(take_packed(self.topology, here, count, spread=self.spread, quirks=self.quirks))
            left[numa_node] = len(gathered.free & self.topology.numa_nodes[numa_node])

        members = choice.numa_nodes.values() if choice.numa_nodes else []
        for numa_node in members:
            take(numa_node, share)
        for numa_node in self._rounds(choice.remainder, left, self.count - share * len(members)):
            take(numa_node, self.group)
        if gathered.needed:
            amount = "not enough" if gathered.needed > 0 else "too many"
            raise AllocationError(f"accounting error, {amount} CPUs allocated, remaining: {gathered.needed}")
        return CpuSet(gathered.taken)
