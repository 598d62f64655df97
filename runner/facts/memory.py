"""The limits and charges of memory."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class HugeFact:
    """The limits of this process for huge pages of one size; what is free on each NUMA node is in the hardware's facts."""

    limit: int | None = None
    """Bytes: the least ``hugetlb.<size>.max`` and ``.rsvd.max`` of its cgroups; ``None`` without a limit."""
    promised: int = 0
    """Pages that are free but reserved for other processes (``resv_hugepages``): mapped, and not touched yet."""


@attrs.frozen
class MemoryCharge:
    """The memory that a cgroup is charged for, in bytes (``memory.current``, the sum of ``hugetlb.*.current``)."""

    memory: int
    hugetlb: int


@attrs.frozen
class MemoryLimits:
    """The limits of this process's memory."""

    memory: int | None = None
    """Bytes: the least ``memory.max`` of its cgroups; ``None`` without a limit."""
    huge: Mapping[int, HugeFact] = attrs.field(factory=dict)
    """By page size in bytes, for every size of the host; read only for a spec with huge pages."""
    lockable: int | None = None
    """Bytes that a child may lock without CAP_IPC_LOCK, with its limit raised as far as possible; ``None`` without a limit.
    Read only when something is to be locked."""
    may_lock: bool = False
    """Whether this process has CAP_IPC_LOCK, and so QEMU if it runs as root."""
