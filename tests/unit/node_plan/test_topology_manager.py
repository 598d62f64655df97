from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.node_plan.quirks import KubeletCrashesError
from runner.node_plan.topology_manager import ANYWHERE, NOWHERE, Hint, HintList, Policy, TopologyManager, factors_of

pytestmark = pytest.mark.kubelet_model

# --- the kubelet's merge, permutation by permutation (`HintMerger.Merge`) ---------------------------------------------


def narrower(one: Hint, other: Hint) -> bool:
    assert one.mask is not None
    assert other.mask is not None
    return (one.mask.bit_count(), one.mask) < (other.mask.bit_count(), other.mask)


def average(manager: TopologyManager, hint: Hint) -> float:
    numa_nodes = hint.numa_nodes or ()
    return sum(float(manager.distances[here][there]) for here in numa_nodes for there in numa_nodes) / (
        len(numa_nodes) ** 2
    )


def better(manager: TopologyManager, current: Hint, candidate: Hint) -> Hint:
    assert current.mask is not None
    assert candidate.mask is not None
    if manager.prefer_closest and current.mask.bit_count() == candidate.mask.bit_count():
        mine, theirs = average(manager, current), average(manager, candidate)
        if mine != theirs:
            return candidate if theirs < mine else current
    return candidate if narrower(candidate, current) else current


def compared(manager: TopologyManager, wanted: int, current: Hint | None, candidate: Hint) -> Hint | None:  # noqa: PLR0911
    assert candidate.mask is not None
    if candidate.mask == 0:
        return current
    if current is None:
        return candidate
    assert current.mask is not None
    if current.preferred != candidate.preferred:
        return candidate if candidate.preferred else current
    if current.preferred:
        return better(manager, current, candidate)
    mine, theirs = current.mask.bit_count(), candidate.mask.bit_count()
    if mine > wanted:
        return better(manager, current, candidate)
    if mine == wanted:
        return better(manager, current, candidate) if theirs == wanted else current
    if theirs > wanted:
        return current
    if theirs != mine:
        return candidate if theirs > mine else current
    return better(manager, current, candidate)


def enumerated(manager: TopologyManager, factors: Sequence[HintList]) -> Hint:
    """Merge as the kubelet does: the reference for the exact merge."""
    lists = [list(factor) for factor in factors]
    if manager.policy is Policy.SINGLE_NUMA_NODE:
        lists = [
            [hint for hint in hints if hint.preferred and (hint.mask is None or hint.mask.bit_count() == 1)]
            for hints in lists
        ]
    narrowest = [[hint.mask.bit_count() for hint in hints if hint.mask is not None] for hints in lists]
    wanted = max((min(counts) for counts in narrowest if counts), default=0)
    best: Hint | None = None
    for permutation in itertools.product(*lists):
        mask = manager.default
        masks = [hint.mask for hint in permutation if hint.mask is not None]
        for each in masks:
            mask &= each
        preferred = all(hint.preferred for hint in permutation) and len(set(masks)) <= 1
        best = compared(manager, wanted, best, Hint(mask, preferred))
    if best is None:
        best = Hint(manager.default, preferred=False)
    if manager.policy is Policy.SINGLE_NUMA_NODE and best.mask == manager.default:
        best = Hint(None, best.preferred)
    return best


NUMA_NODES = (0, 1, 3, 4)
MASKS = [mask for mask in range(1, 32) if not mask & 0b100]
HINT_LISTS = st.builds(
    HintList.of, st.lists(st.builds(Hint, st.none() | st.sampled_from(MASKS), st.booleans()), max_size=9)
)
DISTANCES = st.fixed_dictionaries(
    {here: st.lists(st.sampled_from([10, 12, 21, 32]), min_size=5, max_size=5) for here in NUMA_NODES}
)


@given(
    st.lists(st.one_of(st.none(), HINT_LISTS), min_size=1, max_size=4),
    st.sampled_from([Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE]),
    st.none() | DISTANCES,
)
@settings(max_examples=400)
def test_the_exact_merge_equals_the_enumeration(
    resources: list[HintList | None], policy: Policy, distances: dict[int, list[int]] | None
) -> None:
    manager = TopologyManager(NUMA_NODES, policy, prefer_closest=distances is not None, distances=distances or {})
    providers = [{"resource": hints} for hints in resources]
    merged = manager.merge(providers)
    assert merged.hint == enumerated(manager, factors_of(providers))
    assert merged.admitted == (policy is Policy.BEST_EFFORT or merged.hint.preferred)


def test_a_provider_without_hints_takes_part_in_the_merge() -> None:
    hints = HintList.of([Hint(1, preferred=True)])
    assert factors_of([None, {}, {"a": None, "b": HintList(), "c": hints}]) == [
        ANYWHERE,
        ANYWHERE,
        ANYWHERE,
        NOWHERE,
        hints,
    ]


def test_hints_are_listed_in_the_kubelet_s_order() -> None:
    hints = HintList.of(Hint(mask, mask in {1, 8}) for mask in (0b111, 0b1001, 8, 0b0110, 1))
    assert [str(hint) for hint in hints] == ["{0} preferred", "{3} preferred", "{0,3}", "{1,2}", "{0,1,2}"]
    assert str(Hint(None, preferred=True)) == "any NUMA node preferred"


def test_distances_are_looked_up_by_number_as_the_kubelet_does() -> None:
    # POWER9's NUMA nodes are 0 and 8, and each row has two distances: the kubelet reads beyond its end.
    hints = {"cpu": HintList.of([Hint(1, preferred=True), Hint(256, preferred=True)])}
    manager = TopologyManager((0, 8), Policy.BEST_EFFORT, prefer_closest=True, distances={0: (10, 40), 8: (40, 10)})
    with pytest.raises(KubeletCrashesError, match=r"NUMA nodes 0,8 are not numbered without gaps"):
        manager.merge([hints])
    assert attrs.evolve(manager, prefer_closest=False).merge([hints]).hint == Hint(1, preferred=True)


def test_distances_of_results_that_lose_later_are_read_too() -> None:
    """{0} and {8} are compared before {0,8}, the only preferred result, is reached."""
    rows = {0: (10, 40), 8: (40, 10)}
    manager = TopologyManager((0, 8), Policy.BEST_EFFORT, prefer_closest=True, distances=rows)
    one, other, both = (Hint(mask, preferred=mask == 257) for mask in (1, 256, 257))
    with pytest.raises(KubeletCrashesError):
        manager.merge([{"cpu": HintList.of([one, other, both])}])
    assert manager.merge([{"cpu": HintList.of([other, both])}]).hint == both
    # A mask is not compared with itself.
    assert manager.merge([{"cpu": HintList.of([other])}, {"memory": HintList.of([other, both])}]).hint == other


def test_a_host_of_many_numa_nodes_of_which_few_have_anything() -> None:
    """34 NUMA nodes, two of them with CPUs: all others are in the default mask only."""
    manager = TopologyManager(tuple(range(34)), Policy.RESTRICTED)
    cpus = HintList.of([Hint(1, preferred=True), Hint(2, preferred=True), Hint(3, preferred=False)])
    assert manager.merge([None, {"cpu": cpus}]).hint == Hint(1, preferred=True)
    assert manager.merge([None, {"cpu": HintList.of([Hint(3, preferred=False)])}]).hint == Hint(3, preferred=False)
    assert manager.merge([None, {"cpu": None}]).hint == Hint((1 << 34) - 1, preferred=True)
    assert manager.merge([{"cpu": HintList()}]).hint == Hint((1 << 34) - 1, preferred=False)
