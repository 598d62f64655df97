"""The limits of what runs in the controller's tree, which no pod's own limits hold for (pure).

A process that has moved to float is no longer in its pod's cgroup. What it takes from then on is limited here: memory
for all pods together, because a threaded cgroup cannot have a limit of its own ("Threads" of cgroup-v2.rst), processes
for all together and for each pod. Huge pages nothing there may take: those of a guest are taken, and charged, in its
pod's own cgroup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runner.base.values import frozen

MIB = 1 << 20
LEAST_MEMORY = 1 << 30
"""Bytes for the processes of some instances on a small machine, of which it may take half."""
INSTANCE_MEMORY = 320 << 20
"""Bytes of an instance besides the guest's memory: PID 1, QEMU and some daemons, 138 to 266 MiB as ``plan`` counts them."""
MOST_PROCESSES = 1 << 22
"""``PID_MAX_LIMIT`` of ``include/linux/threads.h``: a larger ``pids.max`` is refused (``pids_max_write``)."""
CPU_WEIGHTS = range(1, 10_001)
"""The values of ``cpu.weight`` ("CPU Interface Files")."""

NO_LIMIT = "max"
SWAP_MAX = "memory.swap.max"
"""A file that a kernel without swap does not have ("Memory Interface Files")."""
NO_GROUPS = {"cgroup.max.descendants": "0"}
"""Below the group nothing can be made. A pod that may make user namespaces mounts the hierarchy from its group on, and makes
groups there ("Delegation"); with one below it, a group cannot be removed."""
NO_PROCESSES = "0"
"""As ``pids.max``: nothing in the cgroup can fork. What is moved there is not refused ("PID")."""

_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@frozen
class Limits:
    """The limits of the tree, as written to the kernel; ``None`` stands for no limit."""

    memory_max: int | None = None
    """Bytes of everything in the tree; beyond, the kernel kills a process in the tree."""
    memory_high: int | None = None
    """Bytes from which on the kernel reclaims, and slows down the processes that ask for more."""
    pids_max: int | None = None
    """Processes and threads in the tree."""
    pod_pids_max: int | None = 2048
    """Processes and threads of one pod in float, and as many in its instance's cgroup."""
    pod_memory_min: int | None = None
    """Bytes; a pod that holds less of the tree's memory is not ended when it is short. ``None``: none is, whatever it holds."""
    pod_cpu_weight: int = 100
    """The share of a pod in float's CPU time."""
    huge_page_sizes: tuple[str, ...] = ()
    """The sizes of huge pages that the kernel has, as in the names of control files, such as ``2MB``."""
    swap: bool = False
    """Whether the kernel has swap (CONFIG_SWAP), of which the tree gets none."""

    def of_root(self) -> Mapping[str, str]:
        """Return file → value for the root of the tree. ``memory.high`` comes first: what it reclaims need not be killed.

        No swap, as the kubelet gives none to Guaranteed pods: a pod that pages its memory out would hold what no guard sees.
        """
        return {
            "memory.high": _written(self.memory_high),
            "memory.max": _written(self.memory_max),
            **({SWAP_MAX: "0"} if self.swap else {}),
            "pids.max": _written(self.pids_max),
            **dict.fromkeys(self._of_huge_pages(), "0"),
        }

    def _of_huge_pages(self) -> Iterator[str]:
        """Yield the files that limit pages in use and reservations: what is reserved need not be free ("HugeTLB Reservation")."""
        for size in self.huge_page_sizes:
            yield f"hugetlb.{size}.max"
            yield f"hugetlb.{size}.rsvd.max"

    @property
    def controllers(self) -> tuple[str, ...]:
        """The controllers that the parent of the tree must give its root, so that these limits can be written."""
        return ("cpu", *(("hugetlb",) if self.huge_page_sizes else ()), "memory", "pids")

    def of_instance(self, *, gone: bool) -> Mapping[str, str]:
        """Return file → value for an instance's cgroup; what is left in that of a pod that has *gone* must not fork."""
        return {**NO_GROUPS, "pids.max": NO_PROCESSES if gone else _written(self.pod_pids_max)}

    def of_pod(self, *, gone: bool) -> Mapping[str, str]:
        """Return file → value for a pod's cgroup in float; what is left in that of a pod that has *gone* gets the least share."""
        return {**self.of_instance(gone=gone), "cpu.weight": str(CPU_WEIGHTS[0] if gone else self.pod_cpu_weight)}


def default_memory(ram: int, pods: int | None) -> int:
    """Return the default ``memory.max`` in bytes of a machine with *ram* bytes whose kubelet limits all *pods* to so much.

    What the kubelet has reserved for the system is not promised to any pod. Beyond, a machine without a reservation gives
    an eighth, and a small one 1 GiB or half.
    """
    reserved = 0 if pods is None else max(ram - pods, 0)
    return max(reserved, ram // 8, min(LEAST_MEMORY, ram // 2)) // MIB * MIB


def default_memory_high(memory_max: int | None) -> int | None:
    """Return the default ``memory.high``: a quarter below *memory_max*, which is the time that the memory guard has.

    The kernel makes a thread wait in proportion to the square of the excess, and then take 64 pages ("memory.high",
    ``calculate_high_delay`` of ``mm/memcontrol.c``). Thousands of threads of a pod pass a sixteenth in a tenth of a second.
    """
    return None if memory_max is None else memory_max // 4 * 3 // MIB * MIB


def default_pod_memory(memory_high: int | None) -> int | None:
    """Return the default of what a pod may hold in any case: a sixteenth of *memory_high*, at least what an instance needs.

    Half of it is the most, for a tree that has no room for an instance.
    """
    return None if memory_high is None else min(max(memory_high // 16, INSTANCE_MEMORY), memory_high // 2) // MIB * MIB


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
