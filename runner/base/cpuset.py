"""Sets of CPU (or NUMA node) numbers, read and written the way the kernel does.

The text form is the kernel's list format (``Documentation/admin-guide/kernel-parameters.rst``, "cpu lists"; what
``cpuset.cpus``, ``Cpus_allowed_list`` and the kubelet's state files hold): ``0,21-64,85-127``. Strides
(``0-31:2/4``), which only boot parameters take, are not part of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Self

MAX_CPU = 8191
"""Highest number taken: ``CONFIG_NR_CPUS`` is at most 8192 on x86-64."""

LONGEST_LIST = 20_000
"""Characters of a list that is parsed: every second of 8192 CPUs takes 19,925."""

_WORD = re.compile(r"[0-9a-fA-F]{1,8}", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)


class CpuSet:
    """An immutable, ordered set of CPU numbers; ``str()`` and :meth:`parse` are inverses."""

    __slots__ = ("_cpus",)
    _cpus: frozenset[int]

    def __init__(self, cpus: Iterable[int] = ()) -> None:
        self._cpus = frozenset(cpus)
        if self._cpus and (min(self._cpus) < 0 or max(self._cpus) > MAX_CPU):
            raise ValueError(f"CPU numbers go from 0 to {MAX_CPU}, found {min(self._cpus)} to {max(self._cpus)}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the kernel's list format, e.g. ``"0,2-3"``; the empty string is the empty set.

        Surrounding white space (the kernel ends its files with a newline) is allowed, inner is not.
        Raises ``ValueError`` for anything else: descending ranges, numbers beyond :data:`MAX_CPU`, empty items, and more
        than :data:`LONGEST_LIST` characters.
        """
        return cls(itertools.chain.from_iterable(disjoint_ranges(text)))

    @classmethod
    def union(cls, sets: Iterable[Iterable[int]]) -> Self:
        """Return the CPUs of all *sets*."""
        return cls(itertools.chain.from_iterable(sets))

    @classmethod
    def parse_mask(cls, text: str) -> Self:
        """Parse the kernel's mask format (``%*pb``): hexadecimal words of 32 bits, the highest first, as ``3,ffffffff``.

        Raises ``ValueError``.
        """
        words = text.strip().split(",")
        if len(text) > LONGEST_LIST or not all(_WORD.fullmatch(word) for word in words):
            raise ValueError(f"{text[:80]!r} is no mask of CPUs like 'f' or '3,ffffffff'")
        bits = int("".join(word.zfill(8) for word in words), 16)
        return cls(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)

    def mask(self) -> str:
        """Return the mask format of :meth:`parse_mask`."""
        digits = f"{sum(1 << cpu for cpu in self._cpus):x}"
        digits = digits.zfill(-(-len(digits) // 8) * 8)
        return ",".join(digits[at : at + 8] for at in range(0, len(digits), 8))

    def __str__(self) -> str:
        ranges: list[tuple[int, int]] = []
        for cpu in self:
            if ranges and ranges[-1][1] == cpu - 1:
                ranges[-1] = (ranges[-1][0], cpu)
            else:
                ranges.append((cpu, cpu))
        return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)

    def __repr__(self) -> str:
        return f"CpuSet({str(self)!r})"

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._cpus))

    def __len__(self) -> int:
        return len(self._cpus)

    def __contains__(self, cpu: object) -> bool:
        return cpu in self._cpus

    def __eq__(self, other: object) -> bool:
        return self._cpus == other._cpus if isinstance(other, CpuSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._cpus)

    def __or__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._cpus | other._cpus)

    def __and__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._cpus & other._cpus)

    def __sub__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._cpus - other._cpus)

    def __xor__(self, other: CpuSet) -> CpuSet:
        return CpuSet(self._cpus ^ other._cpus)

    def __le__(self, other: CpuSet) -> bool:
        return self._cpus <= other._cpus

    def __ge__(self, other: CpuSet) -> bool:
        return self._cpus >= other._cpus

    def isdisjoint(self, other: CpuSet) -> bool:
        """Tell whether no CPU is in both."""
        return self._cpus.isdisjoint(other._cpus)


def disjoint_ranges(text: str) -> Iterator[range]:
    """Yield the ranges of a list in ascending order; the part of a range that an earlier one covers is left out.

    So a number comes once however often a client repeats it. Raises ``ValueError`` like :meth:`CpuSet.parse`.
    """
    text = text.strip(" \n")
    if len(text) > LONGEST_LIST:
        raise ValueError(f"a list of CPUs may have {LONGEST_LIST} characters, and this one has {len(text)}")
    end = 0
    for first, last in sorted({_parse_item(item, text) for item in text.split(",")}) if text else ():
        if last >= end:
            yield range(max(first, end), last + 1)
            end = last + 1


def _parse_item(item: str, text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(f"{item!r} in {text!r} is neither a CPU number nor a range like '2-5'")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise ValueError(f"range {item!r} in {text!r} runs backwards")
    if last > MAX_CPU:
        raise ValueError(f"{item!r} in {text!r} goes beyond CPU {MAX_CPU}")
    return first, last
