"""The limits of this process's memory."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class HugeFact:
    """What this process may have of the huge pages of one size, beside what is free on each NUMA node."""

    limit: int | None = None
    """Bytes: the least ``hugetlb.<size>.max`` and ``.rsvd.max`` of its cgroups; ``None`` without a limit."""
    promised: int = 0
    """Pages that are free and yet others' (``resv_hugepages``): mapped, and not touched yet."""


@attrs.frozen
class MemoryCharge:
    """The memory that a cgroup is charged for, in bytes (``memory.current``, the sum of ``hugetlb.*.current``)."""

    memory: int
    hugetlb: int


@attrs.frozen
class MemoryLimits:
    """What bounds the memory of this process."""

    memory: int | None = None
    """Bytes: the least ``memory.max`` of its cgroups; ``None`` without a limit."""
    huge: Mapping[int, HugeFact] = attrs.field(factory=dict)
    """By page size in bytes, every size that the host knows."""
    lockable: int | None = None
    """Bytes that a process we start may lock without CAP_IPC_LOCK, once we have raised its limit as far as we may; ``None``
    without a limit. Looked at only when something is to be locked."""
    may_lock: bool = False
    """This process has CAP_IPC_LOCK, and so has QEMU if it runs as root."""
