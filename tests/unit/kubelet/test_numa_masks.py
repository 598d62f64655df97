from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.errors import RefusedError
from runner.kubelet.numa_masks import (
    Places,
    ands,
    containing,
    everything,
    family_of,
    having,
    lowest,
    mask_of,
    members,
    narrowest,
    numa_nodes_of,
    of_size,
    reaching,
    touching,
    within,
)

pytestmark = pytest.mark.kubelet_model

PLACES = st.integers(0, 6)


@given(st.sets(st.integers(0, 63)))
def test_masks_and_numa_nodes_are_inverses(numa_nodes: set[int]) -> None:
    assert numa_nodes_of(mask_of(numa_nodes)) == tuple(sorted(numa_nodes))


@given(st.sets(st.integers(0, 300)))
def test_families_and_members_are_inverses(masks: set[int]) -> None:
    assert members(family_of(masks)) == sorted(masks)


@pytest.mark.parametrize("places", range(6))
def test_families_hold_the_masks_of_their_definition(places: int) -> None:
    masks = range(1 << places)
    assert members(everything(places)) == list(masks)
    for size in range(places + 2):
        assert members(of_size(places, size)) == [mask for mask in masks if mask.bit_count() == size]
    for place in range(places):
        assert members(having(places, place)) == [mask for mask in masks if mask >> place & 1]
    for of in masks:
        assert members(containing(places, of)) == [mask for mask in masks if mask & of == of]
        assert members(within(places, of)) == [mask for mask in masks if mask & ~of == 0]


@given(st.lists(st.integers(0, 9), max_size=7), st.integers(-1, 40))
def test_masks_that_reach_a_sum(values: list[int], needed: int) -> None:
    assert members(reaching(values, needed)) == [
        mask
        for mask in range(1 << len(values))
        if sum(value for place, value in enumerate(values) if mask >> place & 1) >= needed
    ]


@given(st.lists(st.integers(0, 31), max_size=4), st.integers(0, 5))
def test_masks_that_touch_so_many_groups(groups: list[int], count: int) -> None:
    assert members(touching(5, groups, count)) == [
        mask for mask in range(32) if sum(mask & group != 0 for group in groups) == count
    ]


@given(st.integers(0, everything(5)))
def test_the_narrowest_and_the_lowest(family: int) -> None:
    masks = [mask for mask in members(family) if mask]
    fewest = min(map(int.bit_count, masks), default=0)
    assert members(narrowest(5, family)) == [mask for mask in masks if mask.bit_count() == fewest]
    if masks:
        assert lowest(family & ~1) == min(masks)


@given(st.data())
@settings(max_examples=80)
def test_all_ands_equal_those_of_all_pairs(data: st.DataObject) -> None:
    places = data.draw(st.integers(0, 7))
    one, other = (data.draw(st.integers(0, everything(places))) for _ in range(2))
    assert ands(places, one, other) == family_of({a & b for a in members(one) for b in members(other)})


def test_all_ands_of_full_families() -> None:
    # The most pairs that there can be: a counter that overflowed into its neighbour would show.
    assert ands(12, everything(12), everything(12)) == everything(12)


def test_places_of_sparse_numa_nodes() -> None:
    places = Places((0, 2, 5))
    assert not places.gapless
    assert [places.number(mask) for mask in range(4)] == [0, 1, 4, 5]
    assert places.place(mask_of([2, 3, 5])) == 0b110
    family = family_of([0b011, 0b100])
    assert members(places.translated(family, Places((0, 1, 2, 3, 4, 5)))) == [0b101, 0b100000]
    assert members(places.translated(family, Places((5,)))) == [0, 1]
    assert Places((0, 1)).translated(family_of([3]), Places((0, 1, 2))) == family_of([3])


def test_more_numa_nodes_than_masks_can_be_enumerated_of_are_refused() -> None:
    with pytest.raises(RefusedError, match="cannot enumerate the masks of 21 NUMA nodes: there are 2\\^21"):
        Places(tuple(range(21)))
