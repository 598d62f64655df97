"""The limits of the processes in the controller's tree, to which no pod's own limits apply (pure).

A process that has moved to float is no longer in its pod's cgroup. From then on, its memory, processes and CPU time are charged to the
domain of its instance, and limited there. The sum of all is limited at the root. Huge pages are not allowed in the tree: a guest's are
allocated, and charged, in its pod's own cgroup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runner.base.values import frozen

MIB = 1 << 20
LEAST_MEMORY = 1 << 30
"""Bytes for the processes of some instances on a small machine, of which it may take half."""
INSTANCE_MEMORY = 320 << 20
"""Bytes of an instance besides the guest's memory: PID 1, QEMU and some daemons, 146 to 274 MiB as ``plan`` counts them."""
LEAST_INSTANCE_MEMORY = 64 << 20
"""Bytes required for a registration that does not name its overhead: PID 1 has 40 MiB."""
LEFT_BEHIND = 16 << 20
"""Charged bytes up to which the domain of a pod that is gone is removed: kernel memory that is freed later, such as cached file names."""
MOST_PROCESSES = 1 << 22
"""``PID_MAX_LIMIT`` of ``include/linux/threads.h``: a larger ``pids.max`` is refused (``pids_max_write``)."""
CPU_WEIGHTS = range(1, 10_001)
"""The values of ``cpu.weight`` ("CPU Interface Files")."""
DEFAULT_WEIGHT = 100
"""The kernel's default, which every instance has: they share the tree's CPU time equally."""

NO_LIMIT = "max"
MEMORY_MAX, SWAP_MAX = "memory.max", "memory.swap.max"
"""The latter is a file that a kernel without swap does not have ("Memory Interface Files")."""
MEMORY_NODES = "cpuset.mems"
NO_GROUPS = {"cgroup.max.descendants": "0"}
"""No groups can be made below the group. A pod that may make user namespaces could mount the hierarchy from its group on, and make groups
there ("Delegation"); a group with children cannot be removed."""
NO_PROCESSES = "0"
"""The ``pids.max`` with which nothing in the cgroup can fork. A process that is moved there is not refused ("PID")."""

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@frozen
class Limits:
    """The limits of the tree, as written to the kernel; ``None`` stands for no limit."""

    memory_max: int | None = None
    """Bytes of everything in the tree, which the limits of the instances do not exceed together."""
    cpu_weight: int = DEFAULT_WEIGHT
    """The tree's share of CPU time, relative to all other pods."""
    pids_max: int | None = None
    """Processes and threads in the tree."""
    instance_memory: int = INSTANCE_MEMORY
    """Bytes that an instance gets when it is registered."""
    ram: int | None = None
    """Bytes of the machine's memory; ``None`` if unknown."""
    instance_pids_max: int | None = 2048
    """Processes and threads of one instance."""
    huge_page_sizes: tuple[str, ...] = ()
    """The kernel's sizes of huge pages, as in the names of control files, such as ``2MB``."""
    swap: bool = False
    """Whether the kernel has swap (CONFIG_SWAP), of which the tree gets none."""

    def of_root(self) -> Mapping[str, str]:
        """Return file → value for the root of the tree, without ``memory.high``, which would throttle vCPUs."""
        return {
            **self._of_memory(self.memory_max),
            "pids.max": _written(self.pids_max),
            "cpu.weight": str(self.cpu_weight),
        }

    def of_domain(self, memory_max: int | None, *, gone: bool) -> Mapping[str, str]:
        """Return file → value for an instance's domain; the remains of a pod that is *gone* cannot fork, and get the least share.

        ``memory.oom.group`` stays 0: otherwise the kernel would end PID 1 together with the largest process, and nothing would report it.
        """
        return {
            **self._of_memory(memory_max),
            "pids.max": NO_PROCESSES if gone else _written(self.instance_pids_max),
            "cpu.weight": str(CPU_WEIGHTS[0] if gone else DEFAULT_WEIGHT),
            "cgroup.max.descendants": "2",
        }

    def _of_memory(self, memory_max: int | None) -> Mapping[str, str]:
        """Return the limits of memory: no swap, as the kubelet gives none to Guaranteed pods."""
        return {
            MEMORY_MAX: _written(memory_max),
            "memory.high": NO_LIMIT,
            **({SWAP_MAX: "0"} if self.swap else {}),
            **dict.fromkeys(self._of_huge_pages(), "0"),
        }

    def _of_huge_pages(self) -> Iterator[str]:
        """Yield the files that limit pages in use and reservations: reserved pages need not be free ("HugeTLB Reservation")."""
        for size in self.huge_page_sizes:
            yield f"hugetlb.{size}.max"
            yield f"hugetlb.{size}.rsvd.max"

    @property
    def controllers(self) -> tuple[str, ...]:
        """The controllers that the root and its instances need for these limits."""
        return ("cpu", *(("hugetlb",) if self.huge_page_sizes else ()), "memory", "pids")


FLOAT_LIMITS: Mapping[str, str] = {**NO_GROUPS}
"""File → value for an instance's float."""
VCPUS_LIMITS: Mapping[str, str] = {**NO_GROUPS, "cpu.weight": str(CPU_WEIGHTS[0])}
"""The same for the cgroup of its vCPUs. The kernel divides a cgroup's share among its children on all CPUs together
(``calc_group_shares`` of ``kernel/sched/fair.c``); the vCPUs have their CPUs to themselves, and leave the share to float."""


def memory_for(wanted: int, limits: Limits, others: int) -> int:
    """Return how many of the *wanted* bytes an instance can have if all *others* together have theirs."""
    return wanted if limits.memory_max is None else max(min(wanted, limits.memory_max - others), 0) // MIB * MIB


def share_of(part: int, whole: int | None, limits: Limits) -> int | None:
    """Return the part of ``memory.max`` for a pod that has *part* of the machine's *whole*; ``None`` if nothing is limited.

    All pods together have at most the machine's memory, and its exclusive CPUs, so an instance within its share takes nothing that the next
    one needs.
    """
    if limits.memory_max is None or whole is None:
        return None
    return limits.memory_max * part // whole


def default_memory(ram: int, pods: int | None) -> int:
    """Return the default ``memory.max`` in bytes of a machine with *ram* bytes whose kubelet limits all *pods* to that many.

    It is the memory that the kubelet reserves for the system, and promises to no pod; at least an eighth of *ram*, and at least 1 GiB, or
    half of *ram* if that is less.
    """
    reserved = 0 if pods is None else max(ram - pods, 0)
    return max(reserved, ram // 8, min(LEAST_MEMORY, ram // 2)) // MIB * MIB


def default_pod_memory(memory_max: int | None) -> int:
    """Return the bytes that an instance gets at first: its usual need, on a small machine a quarter of *memory_max*."""
    return INSTANCE_MEMORY if memory_max is None else min(INSTANCE_MEMORY, memory_max // 4) // MIB * MIB


def default_processes(*most: str) -> int | None:
    """Return the default ``pids.max``: half of the smallest of *most*, ``kernel.pid_max`` and ``kernel.threads-max``.

    The other half is for the rest of the machine. ``None`` where the kernel names no number.
    """
    numbers = [int(text) for text in most if text.isdecimal()]
    return min(numbers) // 2 if numbers else None


def parse_memory(text: str) -> int | None:
    """Return the bytes of *text*, such as ``512M`` or ``8G``, or ``None`` for ``max``. Raises :exc:`ValueError`."""
    if text == NO_LIMIT:
        return None
    number, unit = text[:-1], _SUFFIXES.get(text[-1:])
    if unit is None or not (number.isascii() and number.isdecimal()) or int(number) * unit < MIB:
        raise ValueError("wanted: 'max', or at least 1M with the suffix K, M, G or T (powers of 1024), such as 8G")
    return int(number) * unit // MIB * MIB


def parse_processes(text: str) -> int | None:
    """Return the number in *text*, or ``None`` for ``max``. Raises :exc:`ValueError`."""
    if text == NO_LIMIT:
        return None
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MOST_PROCESSES:
        raise ValueError(f"wanted: 'max', or a number from 1 to {MOST_PROCESSES}")
    return int(text)


def parse_weight(text: str) -> int:
    """Return the ``cpu.weight`` in *text*. Raises :exc:`ValueError`."""
    if not (text.isascii() and text.isdecimal()) or int(text) not in CPU_WEIGHTS:
        raise ValueError(f"wanted: a number from {CPU_WEIGHTS[0]} to {CPU_WEIGHTS[-1]}")
    return int(text)


def _written(limit: int | None) -> str:
    return NO_LIMIT if limit is None else str(limit)
