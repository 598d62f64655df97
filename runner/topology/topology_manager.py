"""The kubelet's Topology Manager: hints, and how they are merged into the NUMA nodes of one container or pod.

Modelled on ``pkg/kubelet/cm/topologymanager`` of Kubernetes 1.33 to 1.36.3. The kubelet tries every permutation of the
hints of every resource (255^4 of them for four resources on eight NUMA nodes). Its comparison of hints is a total
preorder, so the winner can be named without trying them: see :func:`TopologyManager.merge`.

A *mask* is an ``int`` with bit *i* set for NUMA node *i*, as in the kubelet's ``bitmask`` package; ``None`` stands for
"no preference" (``NUMANodeAffinity: nil``).
"""

from __future__ import annotations

import enum
import functools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self

import attrs

from runner.errors import RefusedError

MAX_NUMA_NODE = 63
"""Highest NUMA node a mask of the kubelet can hold."""
DEFAULT_MAX_NUMA_NODES = 8
"""``defaultMaxAllowableNUMANodes``: with more NUMA nodes the kubelet starts only with policy ``none`` or the option."""
MAX_ENUMERATED = 20
"""NUMA nodes up to which all masks are enumerated here; the kubelet itself is at its end long before."""


class KubeletConfigError(RefusedError):
    """The kubelet would not start with this configuration; the text is the kubelet's own."""


class KubeletHangsError(Exception):
    """The kubelet would never finish this admission, and admit no other pod either."""


class KubeletCrashesError(Exception):
    """The kubelet would panic."""


def parse_bool(option: str, value: str) -> bool:
    """Read the value of a policy option as Go's ``strconv.ParseBool`` does."""
    if value in {"1", "t", "T", "TRUE", "true", "True"}:
        return True
    if value in {"0", "f", "F", "FALSE", "false", "False"}:
        return False
    raise KubeletConfigError(f'bad value for option "{option}": strconv.ParseBool: parsing "{value}": invalid syntax')


# --- masks ------------------------------------------------------------------------------------------------------------


def mask_of(numa_nodes: Iterable[int]) -> int:
    """Return the mask of *numa_nodes*."""
    mask = 0
    for numa_node in numa_nodes:
        mask |= 1 << numa_node
    return mask


def numa_nodes_of(mask: int) -> tuple[int, ...]:
    """Return the NUMA nodes of *mask*, ascending."""
    return tuple(numa_node for numa_node in range(mask.bit_length()) if mask >> numa_node & 1)


def all_masks(numa_nodes: Sequence[int]) -> list[int]:
    """Return every mask over *numa_nodes*, the empty one first; index bit *i* stands for ``numa_nodes[i]``."""
    return over_masks([1 << numa_node for numa_node in numa_nodes], int.__or__)


def over_masks(values: Sequence[int], combine: Callable[[int, int], int] = int.__add__) -> list[int]:
    """Combine *values* over every mask, in the order of :func:`all_masks`: ``[0, a, b, a+b, …]`` for ``[a, b]``.

    One addition a mask instead of one a member, which is what makes 16 NUMA nodes (65,535 masks) affordable.
    """
    if len(values) > MAX_ENUMERATED:
        raise RefusedError(
            f"cannot enumerate the masks of {len(values)} NUMA nodes: there are 2^{len(values)} of them,"
            " and the kubelet could not either; use Topology Manager policy 'none'"
        )
    combined = [0]
    for value in values:
        combined += [combine(so_far, value) for so_far in combined]
    return combined


# --- hints ------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Hint:
    """NUMA nodes that would do (``TopologyHint``), and whether one could not do better on an empty host."""

    mask: int | None
    preferred: bool

    @property
    def numa_nodes(self) -> tuple[int, ...] | None:
        """The NUMA nodes, ascending; ``None`` for no preference."""
        return None if self.mask is None else numa_nodes_of(self.mask)

    def __str__(self) -> str:
        where = "any NUMA node" if self.mask is None else "{" + ",".join(map(str, numa_nodes_of(self.mask))) + "}"
        return f"{where} preferred" if self.preferred else where


@attrs.frozen(slots=False)  # cached_property lives in __dict__
class HintList:
    """All hints for one resource, as two sets of masks; iteration gives :class:`Hint` in the kubelet's order.

    Sets, because on 16 NUMA nodes a list has up to 65,535 hints and the merge asks only what is in it.
    """

    preferred: frozenset[int | None] = frozenset()
    other: frozenset[int | None] = frozenset()

    @classmethod
    def of(cls, hints: Iterable[Hint]) -> Self:
        """Collect *hints*."""
        hints = list(hints)
        return cls(
            frozenset(hint.mask for hint in hints if hint.preferred),
            frozenset(hint.mask for hint in hints if not hint.preferred),
        )

    def __len__(self) -> int:
        return len(self.preferred) + len(self.other)

    def __iter__(self) -> Iterator[Hint]:
        """Give the hints by number of NUMA nodes, then lexicographically, as ``IterateBitMasks`` makes them."""

        def key(hint: Hint) -> tuple[int, tuple[int, ...], bool]:
            numa_nodes = hint.numa_nodes or ()
            return len(numa_nodes), numa_nodes, hint.preferred

        hints = [Hint(mask, preferred=True) for mask in self.preferred]
        return iter(sorted(hints + [Hint(mask, preferred=False) for mask in self.other], key=key))

    @functools.cached_property
    def narrowest(self) -> int | None:
        """Number of NUMA nodes of the narrowest hint; ``None`` if there is none with a preference."""
        counts = [mask.bit_count() for masks in (self.preferred, self.other) for mask in masks if mask is not None]
        return min(counts, default=None)


ANYWHERE = HintList(preferred=frozenset({None}))
"""What a provider without an opinion is taken for."""
NOWHERE = HintList(other=frozenset({None}))
"""What a resource whose list of hints is empty is taken for."""

ProviderHints = Mapping[str, HintList | None] | None
"""What a hint provider answers: hints by resource; ``None`` and the empty mapping both mean "no preference"."""


def factors_of(providers: Iterable[ProviderHints]) -> list[HintList]:
    """Return one list of hints for each resource of each provider (``filterProvidersHints``)."""
    factors: list[HintList] = []
    for hints in providers:
        if not hints:
            factors.append(ANYWHERE)
            continue
        for listed in hints.values():
            if listed is None:
                factors.append(ANYWHERE)
            else:
                factors.append(listed if len(listed) else NOWHERE)
    return factors


# --- the manager ------------------------------------------------------------------------------------------------------


class Policy(enum.Enum):
    """``topologyManagerPolicy``."""

    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"


class Scope(enum.Enum):
    """``topologyManagerScope``."""

    CONTAINER = "container"
    POD = "pod"


@attrs.frozen
class Merged:
    """What a merge decided: *hint* becomes the affinity; *permutations* is how many the kubelet would have tried."""

    hint: Hint
    admitted: bool
    permutations: int


@attrs.frozen
class TopologyManager:
    """``topologymanager.Manager`` as configured on one host.

    *numa_nodes* are all of the host, memory-only ones included. *distances* are rows as the kernel lists them, by
    NUMA node, and are only looked at with *prefer_closest*.
    """

    numa_nodes: tuple[int, ...]
    policy: Policy = Policy.NONE
    scope: Scope = Scope.CONTAINER
    prefer_closest: bool = False
    distances: Mapping[int, Sequence[int]] = attrs.field(factory=dict)

    @property
    def default(self) -> int:
        """The mask of all NUMA nodes."""
        return mask_of(self.numa_nodes)

    def merge(self, providers: Iterable[ProviderHints]) -> Merged:
        """Merge the hints of all *providers* (``Policy.Merge``); not for policy ``none``, which asks nobody.

        The kubelet ANDs one hint of each resource for every permutation and keeps the best result. A result is
        preferred only if all hints are preferred and equal, so preferred results are found by intersecting the lists.
        Else the best of all ANDs that can be reached is wanted, and there are at most 2^n of those.
        """
        factors = factors_of(providers)
        permutations = math.prod(map(len, factors))
        single = self.policy is Policy.SINGLE_NUMA_NODE
        if single:
            factors = [_single_numa_node(factor) for factor in factors]
        hint = self._best(factors)
        if single and hint.mask == self.default:
            hint = Hint(None, hint.preferred)
        admitted = hint.preferred or self.policy is Policy.BEST_EFFORT
        return Merged(hint, admitted, permutations)

    def _best(self, factors: Sequence[HintList]) -> Hint:
        nothing = Hint(self.default, preferred=False)
        if not all(map(len, factors)):
            return nothing
        winners = self._preferred(factors)
        if winners:
            return Hint(self._narrowest(winners), preferred=True)
        reachable = self._reachable(factors) - {0}
        if not reachable:
            return nothing
        # A result may be narrower than what any single resource can do with; the kubelet looks for one as wide as
        # the most demanding resource needs (`BestNonPreferredAffinityCount`), then below it, then above it.
        wanted = max((factor.narrowest for factor in factors if factor.narrowest is not None), default=0)
        counts = {mask.bit_count() for mask in reachable}
        below = [count for count in counts if count <= wanted]
        chosen = max(below) if below else min(counts)
        return Hint(self._narrowest({mask for mask in reachable if mask.bit_count() == chosen}), preferred=False)

    def _preferred(self, factors: Sequence[HintList]) -> set[int]:
        """Return the non-empty results of permutations of equal preferred hints."""
        choosy = [factor.preferred for factor in factors if None not in factor.preferred]
        masks: set[int | None]
        if choosy:
            masks = set(choosy[0]).intersection(*choosy[1:])
        else:
            masks = {mask for factor in factors for mask in factor.preferred} | {None}
        return {self.default if mask is None else mask & self.default for mask in masks} - {0}

    def _reachable(self, factors: Iterable[HintList]) -> set[int]:
        """Return every AND of one mask of each factor."""
        reachable = {self.default}
        bits = len(self.numa_nodes)
        for factor in factors:
            masks = {
                self.default if mask is None else mask & self.default
                for listed in (factor.preferred, factor.other)
                for mask in listed
            }
            if bits > MAX_ENUMERATED or len(reachable) * len(masks) <= 8 << bits:
                reachable = {one & other for one in reachable for other in masks}
            else:
                reachable = self._all_ands(reachable, masks)
        return reachable

    def _all_ands(self, ones: set[int], others: set[int]) -> set[int]:
        """Return every AND of one of *ones* and one of *others* without trying the pairs: n·2^n steps, not 4^n.

        For each mask, count in how many of either set it is contained; the product counts the pairs whose AND contains
        it, and taking from it the pairs of each bigger mask leaves those whose AND it is.
        """
        place = {mask: index for index, mask in enumerate(all_masks(self.numa_nodes))}
        bits = len(self.numa_nodes)
        contained = [
            _fields(_contained_in(_indicator((place[mask] for mask in masks), bits), bits), bits)
            for masks in (ones, others)
        ]
        pairs = [one * other for one, other in zip(*contained, strict=True)]
        exact = _fields(_exactly(_packed(pairs), bits), bits)
        return {mask for mask, count in zip(place, exact, strict=True) if count}

    def _narrowest(self, masks: Iterable[int]) -> int:
        """Return the narrowest of *masks* (``IsNarrowerThan``), the closest of these with ``prefer-closest``."""
        fewest: list[int] = []
        count = MAX_NUMA_NODE + 2
        for mask in masks:
            bits = mask.bit_count()
            if bits < count:
                count, fewest = bits, [mask]
            elif bits == count:
                fewest.append(mask)
        if self.prefer_closest and len(fewest) > 1:
            return min(fewest, key=lambda mask: (self._spread(mask), mask))
        return min(fewest)

    def _spread(self, mask: int) -> int:
        """Return the sum of the distances of all pairs (``CalculateAverageFor`` times the square of their number).

        Compared only between masks of equally many NUMA nodes, where the sum says the same as the average.
        """
        numa_nodes = numa_nodes_of(mask)
        try:
            return sum(self.distances[here][there] for here in numa_nodes for there in numa_nodes)
        except (IndexError, KeyError) as error:
            raise KubeletCrashesError(
                "this kubelet would panic: prefer-closest-numa-nodes looks up distances by the number of the NUMA node,"
                f" and NUMA nodes {','.join(map(str, self.numa_nodes))} are not numbered without gaps"
            ) from error


def _single_numa_node(factor: HintList) -> HintList:
    """Keep preferred hints of one NUMA node or none in particular (``filterSingleNumaHints``)."""
    return HintList(preferred=frozenset(mask for mask in factor.preferred if mask is None or mask.bit_count() == 1))


# Whole functions over masks, packed into one big integer with a 64-bit field for each mask: an addition of two such
# integers adds 2^n pairs of numbers at once. Counts stay below 2^40 and no field ever becomes negative, so that no
# carry leaves its field.

FIELD_BITS = 64
FIELD_BYTES = FIELD_BITS // 8


def _indicator(indexes: Iterable[int], bits: int) -> int:
    fields = bytearray(FIELD_BYTES << bits)
    for index in indexes:
        fields[index * FIELD_BYTES] = 1
    return int.from_bytes(fields, "little")


def _packed(values: Iterable[int]) -> int:
    values = list(values)
    return int.from_bytes(struct.pack(f"<{len(values)}Q", *values), "little")


def _fields(packed: int, bits: int) -> tuple[int, ...]:
    return struct.unpack(f"<{1 << bits}Q", packed.to_bytes(FIELD_BYTES << bits, "little"))


@functools.lru_cache(maxsize=MAX_ENUMERATED)
def _with_bit(bits: int) -> tuple[int, ...]:
    """Return for each bit the field mask that keeps the masks that have it."""
    selections = []
    for bit in range(bits):
        half = FIELD_BITS << bit
        block = ((1 << half) - 1) << half
        for doubled in range(bit + 1, bits):
            block |= block << (FIELD_BITS << doubled)
        selections.append(block)
    return tuple(selections)


def _contained_in(counts: int, bits: int) -> int:
    """Turn numbers by mask into, for each mask, the sum over all masks that contain it."""
    for bit, selection in enumerate(_with_bit(bits)):
        counts += (counts & selection) >> (FIELD_BITS << bit)
    return counts


def _exactly(sums: int, bits: int) -> int:
    """Undo :func:`_contained_in`."""
    for bit, selection in enumerate(_with_bit(bits)):
        sums -= (sums & selection) >> (FIELD_BITS << bit)
    return sums
