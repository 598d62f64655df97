from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.cpuset import LONGEST_LIST, MAX_CPU, CpuSet, disjoint_ranges

cpu_sets = st.frozensets(st.integers(0, 300), max_size=40)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", []),
        ("\n", []),
        ("0", [0]),
        ("3-3", [3]),
        ("1-3,7\n", [1, 2, 3, 7]),
        ("5,1,1-2", [1, 2, 5]),
        ("0,21-64,85-127", [0, *range(21, 65), *range(85, 128)]),
    ],
)
def test_parses_what_the_kernel_writes(text: str, cpus: list[int]) -> None:
    assert list(CpuSet.parse(text)) == cpus


@pytest.mark.parametrize(
    "text",
    ["1.3", "5-3", "0-", "-1", "1, 2", "99999", "8192", "a", "1,,2", ",", "1-2-3", "0x1", "1:2", "\t1", "¹", "٣", "+1"],
)
def test_refuses_everything_else(text: str) -> None:
    with pytest.raises(ValueError, match=r"CPU|range"):
        CpuSet.parse(text)


def test_refuses_numbers_no_machine_has() -> None:
    CpuSet([MAX_CPU])
    for cpu in (-1, MAX_CPU + 1):
        with pytest.raises(ValueError, match="CPU numbers"):
            CpuSet([cpu])


@given(cpu_sets)
def test_parse_and_str_are_inverses(cpus: frozenset[int]) -> None:
    assert CpuSet.parse(str(CpuSet(cpus))) == CpuSet(cpus)


@given(cpu_sets, cpu_sets)
def test_algebra_is_that_of_sets(left: frozenset[int], right: frozenset[int]) -> None:
    a, b = CpuSet(left), CpuSet(right)
    assert set(a | b) == set(CpuSet.union([a, b])) == left | right
    assert set(a & b) == left & right
    assert set(a - b) == left - right
    assert set(a ^ b) == left ^ right
    assert (a <= b) == (left <= right)
    assert (a >= b) == (left >= right)
    assert a.isdisjoint(b) == left.isdisjoint(right)
    assert (a == b) == (left == right)
    assert list(a) == sorted(left)
    assert len(a) == len(left)
    assert len({a, CpuSet(sorted(left))}) == 1


@pytest.mark.parametrize("item", ["0-8191", "{}-8191", "0-{}"])
def test_a_number_comes_once_however_often_it_is_repeated(item: str) -> None:
    text = ",".join(item.format(number) for number in range(2_000))
    assert sum(map(len, disjoint_ranges(text))) == len(CpuSet.parse(text)) <= MAX_CPU + 1


def test_a_list_has_room_for_every_set_and_for_no_more() -> None:
    longest = CpuSet(range(1, MAX_CPU + 1, 2))
    assert LONGEST_LIST - 100 < len(str(longest)) <= LONGEST_LIST
    assert CpuSet.parse(str(longest)) == longest
    with pytest.raises(ValueError, match="list of CPUs may have"):
        CpuSet.parse("0-8191," * 9_000 + "0")


@pytest.mark.parametrize(
    ("mask", "cpus"), [("f", "0-3"), ("3,ffffffff", "0-33"), ("00000000,0000000c", "2-3"), ("0", ""), ("ff\n", "0-7")]
)
def test_masks_are_read_and_written(mask: str, cpus: str) -> None:
    parsed = CpuSet.parse_mask(mask)
    assert str(parsed) == cpus
    assert CpuSet.parse_mask(parsed.mask()) == parsed
    assert all(len(word) == 8 for word in parsed.mask().split(","))


@pytest.mark.parametrize("text", ["", "x", "1,,2", "123456789", "0-3,5"])
def test_masks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no mask"):
        CpuSet.parse_mask(text)
