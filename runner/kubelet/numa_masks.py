"""Sets of NUMA nodes, and sets of those sets, as integers.

A *mask* is a set of NUMA nodes: bit *i* stands for NUMA node *i*, as in the kubelet's ``bitmask`` package.

A *family* is a set of masks over *n* NUMA nodes, as one integer of 2^n bits: bit *m* stands for the mask *m*. For 16
NUMA nodes it takes 8 KiB, where the kubelet keeps up to 65,535 hints, and the intersection of two families is one ``&``.
In the masks of a family, bit *i* stands for the *i*-th NUMA node of the host (its *place*), which differs from its number
if the numbers have gaps; :class:`Places` translates between the two.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence

import attrs

from runner.base.errors import RefusedError
from runner.base.values import frozen

MAX_PLACES = 20
"""Largest number of NUMA nodes of a family. The kubelet, which enumerates all combinations, does not finish even with fewer."""


def mask_of(numa_nodes: Iterable[int]) -> int:
    """Return the mask of *numa_nodes*."""
    mask = 0
    for numa_node in numa_nodes:
        mask |= 1 << numa_node
    return mask


def numa_nodes_of(mask: int) -> tuple[int, ...]:
    """Return the NUMA nodes of *mask*, ascending."""
    return tuple(numa_node for numa_node in range(mask.bit_length()) if mask >> numa_node & 1)


def _checked(numa_nodes: tuple[int, ...]) -> tuple[int, ...]:
    if len(numa_nodes) > MAX_PLACES:
        raise RefusedError(
            f"cannot enumerate the masks of {len(numa_nodes)} NUMA nodes: there are 2^{len(numa_nodes)} of them,"
            " and the kubelet could not either",
            remedy="use Topology Manager policy 'none' and Memory Manager policy 'None'",
        )
    return numa_nodes


@frozen
class Places:
    """The NUMA nodes of a family, ascending; the place of a NUMA node is its index.

    Raises :class:`RefusedError` for more than :data:`MAX_PLACES`.
    """

    numa_nodes: tuple[int, ...] = attrs.field(converter=_checked)

    def __len__(self) -> int:
        return len(self.numa_nodes)

    @property
    def gapless(self) -> bool:
        """Return whether places and numbers are the same."""
        return not self.numa_nodes or self.numa_nodes[-1] == len(self.numa_nodes) - 1

    def number(self, places: int) -> int:
        """Translate a mask of places into one of NUMA nodes."""
        return places if self.gapless else mask_of(self.numa_nodes[place] for place in numa_nodes_of(places))

    def place(self, mask: int) -> int:
        """Translate a mask of NUMA nodes into one of places, without NUMA nodes that have no place."""
        if self.gapless:
            return mask & (1 << len(self)) - 1
        return mask_of(place for place, numa_node in enumerate(self.numa_nodes) if mask >> numa_node & 1)

    def translated(self, family: int, to: Places) -> int:
        """Translate a *family* over these places into one over *to*, without NUMA nodes that are not in *to*."""
        if self.gapless and to.gapless and len(self) <= len(to):
            return family
        return family_of(to.place(self.number(mask)) for mask in members(family))


def family_of(masks: Iterable[int]) -> int:
    """Return the family of *masks*."""
    masks = set(masks)
    digits = bytearray(b"0") * (max(masks, default=0) + 1)
    for mask in masks:
        digits[mask] = ord("1")
    digits.reverse()
    return int(digits, 2)


def members(family: int) -> list[int]:
    """Return the masks of *family*, ascending."""
    return [mask for mask, digit in enumerate(f"{family:b}"[::-1]) if digit == "1"]


@functools.lru_cache(maxsize=64)
def everything(places: int) -> int:
    """Return the family of all masks, the empty one included."""
    return (1 << (1 << places)) - 1


@functools.lru_cache(maxsize=1024)
def of_size(places: int, size: int) -> int:
    """Return the family of all masks with *size* members."""
    if not 0 <= size <= places:
        return 0
    if places == 0:
        return 1
    return of_size(places - 1, size) | of_size(places - 1, size - 1) << (1 << places - 1)


@functools.lru_cache(maxsize=1024)
def having(places: int, place: int) -> int:
    """Return the family of all masks that contain *place*."""
    half = 1 << place
    family = ((1 << half) - 1) << half
    for doubled in range(place + 1, places):
        family |= family << (1 << doubled)
    return family


def containing(places: int, mask: int) -> int:
    """Return the family of all masks that contain *mask*."""
    family = everything(places)
    for place in numa_nodes_of(mask):
        family &= having(places, place)
    return family


def within(places: int, mask: int) -> int:
    """Return the family of all subsets of *mask*."""
    family = everything(places)
    for place in range(places):
        if not mask >> place & 1:
            family &= ~having(places, place)
    return family


def reaching(values: Sequence[int], needed: int) -> int:
    """Return the family of all masks whose *values* (one for each place, none negative) add up to at least *needed*.

    Partial results are kept, so that it takes n^2 steps instead of 2^n on a host with equal NUMA nodes.
    """
    known: dict[tuple[int, int], int] = {}
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)

    def of_first(places: int, needed: int) -> int:
        if needed <= 0:
            return everything(places)
        if sums[places] < needed:
            return 0
        key = places, needed
        if key not in known:
            last = places - 1
            known[key] = of_first(last, needed) | of_first(last, needed - values[last]) << (1 << last)
        return known[key]

    return of_first(len(values), needed)


def touching(places: int, groups: Iterable[int], count: int) -> int:
    """Return the family of all masks that have members in exactly *count* of *groups* (masks)."""
    by_count = [everything(places)] + [0] * count
    for group in groups:
        touched = everything(places) & ~within(places, ~group)
        for number in range(count, -1, -1):
            one_less = by_count[number - 1] & touched if number else 0
            by_count[number] = by_count[number] & ~touched | one_less
    return by_count[count]


def narrowest(places: int, family: int) -> int:
    """Return the masks of *family* with the fewest NUMA nodes, without the empty mask; 0 if there are no others."""
    for size in range(1, places + 1):
        part = family & of_size(places, size)
        if part:
            return part
    return 0


def lowest(family: int) -> int:
    """Return the numerically lowest mask of *family*, which is not empty."""
    return (family & -family).bit_length() - 1


# --- every AND of two families ----------------------------------------------------------------------------------------

_FIELD = 8
"""Bytes of the field that holds the count of one mask."""
_FEW = 8
"""With at most this many pairs for each of the 2^n masks, it is faster to try all pairs than to count."""


def ands(places: int, one: int, other: int) -> int:
    """Return the family of all ``a & b`` with *a* of *one* and *b* of *other*.

    Large families are not combined pair by pair (up to 4^n pairs). Instead count, for each mask, the members of either
    family that contain it. The product of both counts is the number of pairs whose AND contains the mask. Subtracting
    the pairs of all larger masks leaves the number of pairs whose AND is the mask. Each step adds all counts at once as
    two big integers.
    """
    if one.bit_count() * other.bit_count() <= _FEW << places:
        others = members(other)
        return family_of({a & b for a in members(one) for b in others})
    contained = (_numbers(_summed(_counters(family, places), places), places) for family in (one, other))
    pairs = struct.pack(f"<{1 << places}Q", *(a * b for a, b in zip(*contained, strict=True)))
    exact = _numbers(_parted(int.from_bytes(pairs, "little"), places), places)
    digits = bytes(map(bool, exact)).translate(_TO_DIGITS)
    return int(digits[::-1], 2)


_TO_DIGITS = bytes.maketrans(b"\x00\x01", b"01")
_FROM_DIGITS = bytes.maketrans(b"01", b"\x00\x01")


def _counters(family: int, places: int) -> int:
    """Return an integer with one field of :data:`_FIELD` bytes for each mask: 1 if it is in *family*, else 0."""
    digits = f"{family:0{1 << places}b}"[::-1].encode()
    fields = bytearray(_FIELD << places)
    fields[::_FIELD] = digits.translate(_FROM_DIGITS)
    return int.from_bytes(fields, "little")


def _numbers(fields: int, places: int) -> tuple[int, ...]:
    return struct.unpack(f"<{1 << places}Q", fields.to_bytes(_FIELD << places, "little"))


@functools.lru_cache(maxsize=MAX_PLACES + 1)
def _fields_having(places: int) -> tuple[int, ...]:
    """Return for each place the bits of the fields of all masks that contain it."""
    field = (1 << 8 * _FIELD) - 1
    return tuple(_counters(having(places, place), places) * field for place in range(places))


# Counts stay below 2^40 and never become negative, so no field carries into the next one.


def _summed(counts: int, places: int) -> int:
    """Replace each mask's number by the sum over all masks that contain it."""
    for place, fields in enumerate(_fields_having(places)):
        counts += (counts & fields) >> (8 * _FIELD << place)
    return counts


def _parted(sums: int, places: int) -> int:
    """Undo :func:`_summed`."""
    for place, fields in enumerate(_fields_having(places)):
        sums -= (sums & fields) >> (8 * _FIELD << place)
    return sums
