"""The kubelet's Topology Manager: it merges the hints of all resources into the NUMA nodes of one container or pod.

Modelled on ``pkg/kubelet/cm/topologymanager`` of Kubernetes 1.33 to 1.36.3. The kubelet tries every combination of one
hint of each resource (255^4 for four resources on eight NUMA nodes). Its comparison of hints is a total preorder, so
:meth:`TopologyManager.merge` can find the same result without trying them.

Masks and families are those of :mod:`runner.kubelet.numa_masks`; the mask ``None`` stands for "no preference"
(``NUMANodeAffinity: nil``).
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import attrs

from runner.base.values import frozen
from runner.kubelet.numa_masks import (
    Places,
    ands,
    family_of,
    lowest,
    mask_of,
    members,
    narrowest,
    numa_nodes_of,
    of_size,
)
from runner.node_plan.quirks import KubeletCrashesError

MAX_COMPARED = 200_000
"""Number of combinations that are gone through for what the kubelet reads of distances."""
DEFAULT_MAX_NUMA_NODES = 8
"""``defaultMaxAllowableNUMANodes``: with more NUMA nodes the kubelet starts only with policy ``none`` or the option."""


# --- hints ------------------------------------------------------------------------------------------------------------


@frozen
class Hint:
    """A set of NUMA nodes that can satisfy a request (``TopologyHint``)."""

    mask: int | None
    """``None`` for no preference."""
    preferred: bool
    """Whether an empty host would need as many NUMA nodes."""

    @property
    def numa_nodes(self) -> tuple[int, ...] | None:
        """The NUMA nodes, ascending; ``None`` for no preference."""
        return None if self.mask is None else numa_nodes_of(self.mask)

    def __str__(self) -> str:
        where = "any NUMA node" if self.mask is None else "{" + ",".join(map(str, numa_nodes_of(self.mask))) + "}"
        return f"{where} preferred" if self.preferred else where


@frozen
class HintList:
    """All hints for one resource. Iteration yields each as a :class:`Hint`, in the order of the kubelet's list."""

    places: Places = Places(())
    masks: int = 0
    """The family of the masks of all hints, over *places*."""
    preferred: int = 0
    """The family of the masks of preferred hints, a subset of *masks*."""
    nil: frozenset[bool] = frozenset()
    """For each hint without a mask, whether it is preferred."""

    @classmethod
    def of(cls, hints: Iterable[Hint]) -> Self:
        """Collect *hints*; a mask that occurs both as preferred and as not preferred is preferred."""
        hints = list(hints)
        masks = {hint.mask for hint in hints if hint.mask is not None}
        places = Places(numa_nodes_of(functools.reduce(int.__or__, masks, 0)))
        return cls(
            places,
            family_of(map(places.place, masks)),
            family_of(places.place(hint.mask) for hint in hints if hint.preferred and hint.mask is not None),
            frozenset(hint.preferred for hint in hints if hint.mask is None),
        )

    def __len__(self) -> int:
        return self.masks.bit_count() + len(self.nil)

    def __iter__(self) -> Iterator[Hint]:
        """Yield the hints by number of NUMA nodes, then lexicographically (``IterateBitMasks``)."""
        yield from (Hint(None, preferred) for preferred in sorted(self.nil))
        for size in range(len(self.places) + 1):
            for places in sorted(members(self.masks & of_size(len(self.places), size)), key=numa_nodes_of):
                yield Hint(self.places.number(places), bool(self.preferred >> places & 1))

    @property
    def best(self) -> HintList:
        """The preferred hints among these."""
        return HintList(self.places, self.preferred, self.preferred, self.nil & {True})

    def over(self, places: Places) -> HintList:
        """Return the same hints over other *places*, without NUMA nodes that are not in them."""
        masks = self.places.translated(self.masks, places)
        return HintList(places, masks, self.places.translated(self.preferred, places), self.nil)


ANYWHERE = HintList(nil=frozenset({True}))
"""The hints of a provider without a preference."""
NOWHERE = HintList(nil=frozenset({False}))
"""The hints of a resource whose list is empty: no NUMA nodes fit."""

ProviderHints = Mapping[str, HintList | None] | None
"""Resource → hints of one provider; ``None``, for one resource or all, and the empty mapping mean "no preference"."""


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


@frozen
class Merged:
    """The result of a merge."""

    hint: Hint
    """The merged hint, which becomes the affinity of the container or pod."""
    admitted: bool
    """Whether the policy admits it."""
    permutations: int
    """The number of combinations that the kubelet tries."""


@frozen
class TopologyManager:
    """``topologymanager.Manager`` as configured on one host."""

    numa_nodes: tuple[int, ...]
    """All NUMA nodes of the host, including those without CPUs."""
    policy: Policy = Policy.NONE
    scope: Scope = Scope.CONTAINER
    prefer_closest: bool = False
    """The policy option ``prefer-closest-numa-nodes``."""
    distances: Mapping[int, Sequence[int]] = attrs.field(factory=dict)
    """NUMA node → the row of the kernel's ``distance`` file; used only with *prefer_closest*."""

    @property
    def default(self) -> int:
        """The mask of all NUMA nodes."""
        return mask_of(self.numa_nodes)

    def merge(self, providers: Iterable[ProviderHints]) -> Merged:
        """Merge the hints of all *providers* (``Policy.Merge``); policy ``none`` does not merge.

        The kubelet ANDs one hint of each resource for every combination and keeps the best result. A result is preferred
        only if all hints are preferred and equal, so intersecting the lists finds all preferred results. If there are
        none, the best of all possible ANDs is chosen, of which there are at most 2^n for n NUMA nodes.
        """
        factors = factors_of(providers)
        permutations = math.prod(map(len, factors))
        single = self.policy is Policy.SINGLE_NUMA_NODE
        factors = [_single_numa_node(factor) if single else factor for factor in factors]
        if self.prefer_closest and any(max(self.numa_nodes) >= len(row) for row in self.distances.values()):
            self._check_distances(factors)
        hint = self._best(factors)
        if single and hint.mask == self.default:
            hint = Hint(None, hint.preferred)
        admitted = hint.preferred or self.policy is Policy.BEST_EFFORT
        return Merged(hint, admitted, permutations)

    def _check_distances(self, factors: Sequence[HintList]) -> None:
        """Go through the combinations as the kubelet does, as far as it reads distances on a host whose ids have gaps.

        It also compares results that lose later. Raises :class:`KubeletCrashesError`. Combinations
        beyond :data:`MAX_COMPARED` are not gone through: the winner's distances are read in any case.
        """
        demand = max((_narrowest_count(factor) for factor in factors if factor.masks), default=0)
        best: Hint | None = None
        for hints in itertools.islice(itertools.product(*factors), MAX_COMPARED):
            masks = {hint.mask for hint in hints} - {None}
            mask = functools.reduce(int.__and__, (each for each in masks if each is not None), self.default)
            hint = Hint(mask, preferred=len(masks) <= 1 and all(each.preferred for each in hints))
            if mask:
                best = hint if best is None else self._better(best, hint, demand)

    def _better(self, best: Hint, hint: Hint, demand: int) -> Hint:
        """Return the better one of two hints with a mask each (``HintMerger.compare``); *demand* as in :meth:`_best`."""
        if best.preferred != hint.preferred:
            return best if best.preferred else hint
        old, new = (each.mask or 0 for each in (best, hint))
        sizes = old.bit_count(), new.bit_count()
        if not hint.preferred and sizes[0] <= demand and sizes[0] != sizes[1]:
            nearer = sizes[0] < sizes[1] <= demand
            return hint if nearer else best
        if sizes[0] != sizes[1]:
            return hint if sizes[1] < sizes[0] else best
        if old == new:
            return best
        distances = self._spread(old), self._spread(new)
        return hint if (distances[1], new) < (distances[0], old) else best

    def _best(self, factors: Sequence[HintList]) -> Hint:
        nothing = Hint(self.default, preferred=False)
        if not all(map(len, factors)):
            return nothing
        # The size of the narrowest mask of each resource (`BestNonPreferredAffinityCount`), unknown NUMA nodes included.
        demands = [_narrowest_count(factor) for factor in factors if factor.masks]
        # NUMA nodes that no hint names are in the default mask only, all of them together: one place stands for them.
        named = {each for factor in factors if factor.masks for each in factor.places.numa_nodes}
        others = tuple(each for each in self.numa_nodes if each not in named)
        places = Places(tuple(each for each in self.numa_nodes if each in named or each in others[:1]))

        def number(mask: int) -> int:
            numa_nodes = places.number(mask)
            return numa_nodes | mask_of(others) if numa_nodes & mask_of(others) else numa_nodes

        factors = [factor.over(places) for factor in factors]
        winners = _agreed(factors, places)
        if winners:
            return Hint(number(self._narrowest(winners, places)), preferred=True)
        reachable = _reachable(factors, places)
        # An AND may be narrower than any resource needs. The kubelet prefers as many NUMA nodes as the most demanding
        # resource needs, then fewer, then more.
        needed = max(demands, default=0)
        for size in (*range(needed, 0, -1), *range(needed + 1, len(places) + 1)):
            found = reachable & of_size(len(places), size)
            if found:
                return Hint(number(self._narrowest(found, places)), preferred=False)
        return nothing

    def _narrowest(self, family: int, places: Places) -> int:
        """Return the narrowest mask of *family* (``IsNarrowerThan``); of several, with *prefer_closest*, the closest."""
        fewest = narrowest(len(places), family)
        if self.prefer_closest and fewest.bit_count() > 1:
            return min(members(fewest), key=lambda mask: (self._spread(places.number(mask)), mask))
        return lowest(fewest)

    def _spread(self, mask: int) -> int:
        """Return the sum of the distances of all pairs (``CalculateAverageFor`` times the square of their number).

        Compared only between masks of equally many NUMA nodes, where sums compare like averages.
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
    """Keep preferred hints of one NUMA node or without a mask (``filterSingleNumaHints``)."""
    kept = factor.preferred & of_size(len(factor.places), 1)
    return HintList(factor.places, kept, kept, factor.nil & {True})


def _narrowest_count(factor: HintList) -> int:
    return lowest(narrowest(len(factor.places), factor.masks)).bit_count()


def _agreed(factors: Iterable[HintList], places: Places) -> int:
    """Return the family of the results of all combinations of equal preferred hints, without the empty mask."""
    all_of_them = (1 << len(places)) - 1
    selective = [factor.preferred for factor in factors if True not in factor.nil]
    if selective:
        return functools.reduce(int.__and__, selective) & ~1
    # Every factor accepts any NUMA node: the result is the default mask, or one that a factor prefers.
    return functools.reduce(int.__or__, (factor.preferred for factor in factors), 1 << all_of_them) & ~1


def _reachable(factors: Iterable[HintList], places: Places) -> int:
    """Return the family of all ANDs of one mask of each factor."""
    default = 1 << (1 << len(places)) - 1
    families = (factor.masks | (default if factor.nil else 0) for factor in factors)
    return functools.reduce(functools.partial(ands, len(places)), families, default)
