"""Sets of NUMA nodes, and sets of those sets, as integers.

A *mask* is a set of NUMA nodes: bit *i* stands for NUMA node *i*, as in the kubelet's ``bitmask`` package.

A *family* is a set of masks over *n* NUMA nodes in one integer of 2^n bits: bit *m* stands for the mask *m*. On 16 NUMA
nodes that is 8 KiB for what the kubelet keeps as up to 65,535 hints, and intersecting two of them is one ``&``. Here,
and only here, masks count NUMA nodes by place (0 … n-1) instead of by number; :class:`Places` translates.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Sequence

import attrs

from runner.errors import RefusedError

MAX_PLACES = 20
"""Largest number of NUMA nodes of a family. The kubelet, which enumerates all masks, would not finish with fewer."""


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
            " and the kubelet could not either; use Topology Manager policy 'none' and Memory Manager policy 'None'"
        )
    return numa_nodes


@attrs.frozen
class Places:
    """The NUMA nodes that a family is about, ascending; the place of one is its index.

    Raises :class:`RefusedError` for more than :data:`MAX_PLACES`.
    """

    numa_nodes: tuple[int, ...] = attrs.field(converter=_checked)

    def __len__(self) -> int:
        return len(self.numa_nodes)

    @property
    def gapless(self) -> bool:
        """Whether places and numbers are the same."""
        return not self.numa_nodes or self.numa_nodes[-1] == len(self.numa_nodes) - 1

    def number(self, places: int) -> int:
        """Translate a mask of places into one of NUMA nodes."""
        return places if self.gapless else mask_of(self.numa_nodes[place] for place in numa_nodes_of(places))

    def place(self, mask: int) -> int:
        """Translate a mask of NUMA nodes into one of places; those that have none are left out."""
        if self.gapless:
            return mask & (1 << len(self)) - 1
        return mask_of(place for place, numa_node in enumerate(self.numa_nodes) if mask >> numa_node & 1)

    def translated(self, family: int, to: Places) -> int:
        """Translate a *family* over these places into one over *to*; NUMA nodes that are not in *to* are left out."""
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
    """Return the family of all masks that *place* is in."""
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
    """Return the family of all masks that *mask* contains."""
    family = everything(places)
    for place in range(places):
        if not mask >> place & 1:
            family &= ~having(places, place)
    return family


def reaching(values: Sequence[int], needed: int) -> int:
    """Return the family of all masks whose *values* (one for each place, none negative) add up to *needed*.

    Halves with the same values and the same need are computed once: on a host whose NUMA nodes are alike this takes n^2
    steps instead of 2^n.
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
    """Return the part of *family* with the fewest members, the empty mask left out; 0 if nothing else is in it."""
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
"""Up to so many pairs for each mask that there is, trying the pairs is quicker than counting."""


def ands(places: int, one: int, other: int) -> int:
    """Return the family of all ``a & b`` with *a* of *one* and *b* of *other*.

    The pairs, up to 4^n, are not tried: for each mask, count the masks of either family that contain it. The product
    is the number of pairs whose AND contains the mask; less the pairs for each bigger mask, it is the number of pairs
    whose AND is the mask. All additions of one step are one addition of two big integers.
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
    """Spread *family* out: one field for each mask, 1 where it is a member."""
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


# Counts stay below 2^40 and no field ever becomes negative, so that nothing is carried into the next field.


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
