"""Limits of a process's memory, and the memory charged to its cgroup."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from runner.base.values import frozen


@frozen
class HugeFact:
    """The limits of this process for huge pages of one size; :class:`~runner.facts.hardware.HugepagePool` counts free ones."""

    limit: int | None = None
    """Bytes: the smallest of ``hugetlb.<size>.max`` and ``.rsvd.max`` of its visible cgroups, and of the container's limit from the
    Downward API; ``None`` without any."""
    promised: int = 0
    """Free pages that are reserved for other processes, which have mapped but not yet touched them (``resv_hugepages``)."""


@frozen
class MemoryCharge:
    """The memory charged to a cgroup, in bytes."""

    memory: int
    """``memory.current``."""
    hugetlb: int
    """The sum of ``hugetlb.*.current``."""


@frozen
class MemoryLimits:
    """The limits of this process's memory."""

    memory: int | None = None
    """Bytes: the smallest ``memory.max`` of its cgroups, or ``memory.limit_in_bytes``; ``None`` without a limit."""
    huge: Mapping[int, HugeFact] = attrs.field(factory=dict)
    """By page size in bytes, for every size of the host; read only for a spec with huge pages."""
    lockable: int | None = None
    """Bytes that a child may lock without CAP_IPC_LOCK after its ``RLIMIT_MEMLOCK`` is raised as far as possible; ``None``
    without a limit. Read only for a spec whose instance locks memory."""
    may_lock: bool = False
    """Whether this process has CAP_IPC_LOCK, which QEMU inherits if it runs as root."""
    file_size: int | None = None
    """Largest size in bytes of a file that this process writes (``RLIMIT_FSIZE``, hard); ``None`` without a limit."""
