"""The plan of the guest's memory: its pages, the overhead of the instance, and the reasons why the host has too little.

Measured numbers are from QEMU 7.2 and 10.0 with q35 and no display; ``tests/machine/test_memory.py`` compares them with
QEMU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from runner.base.values import frozen
from runner.facts.hardware import huge_limit_variable, hugepages_resource, hugetlb_name
from runner.facts.host import HostFacts, User
from runner.facts.memory_limits import HugeFact, MemoryLimits
from runner.placement.guest_topology import GuestTopology
from runner.plan.host_checks import KEPT_MEMORY_STATE, MEMLOCK, locked_threads, too_little_lockable
from runner.plan.problems import Problems
from runner.spec.instance import LEAST_MEMORY, InstanceSpec, MemorySpec
from runner.spec.rules import MIB, format_size

PAGE_SIZE = 2 << 20
"""Bytes; NUMA nodes of the guest begin at a multiple of it, so that its RAM can be huge pages from end to end."""

RUNNER = 40 * MIB
"""This program and its anchors: 32 MiB resident, and 6 of the program with which it was renewed (measured)."""
QEMU = 64 * MIB
"""QEMU without vCPUs and devices: 45 MiB resident (measured), 21 of them its program, which QEMUs may share."""
VCPU = 4 * MIB
"""A vCPU: 1.4 MiB (measured, emulated); the kernel's part under KVM is below 1 MiB. KubeVirt takes 8 MiB."""
DEVICE = 2 * MIB
"""A disk or a network interface with its queues: 0.8 MiB (measured). Disks that are attached later count, too."""
ALL_DEVICES = 16
"""Number of devices assumed if the spec takes all devices of a resource; most machines have no more."""
SCREEN = 24 * MIB
"""A screen: 16 MiB of video memory (QEMU's ``VGA``), and the VNC server's copies of the screen for its viewers."""
BIOS_SCREEN = 8 * MIB
"""The video memory of a guest that a BIOS boots without a screen (:data:`runner.plan.argv.qemu.UNSEEN_VGA`)."""
DAEMON = 8 * MIB
"""A dnsmasq (3 MiB) or a virtiofsd (5 MiB and its cache of names; measured)."""
PASST = 32 * MIB
"""A passt: 14 to 21 MiB before any packet (measured, versions of 2023 to 2026); its buffers grow with the traffic."""
FORWARDED_PORT = 4608
"""Bytes of kernel memory for a port on which passt listens: 4136 to 4261 for TCP, 2960 for UDP (measured in a cgroup, Linux 6.18)."""
TRANSLATED = 128 * MIB
"""The buffer for translated code where QEMU emulates the CPU (``-accel tcg,tb-size=``)."""
PAGE_TABLES = 512
"""Page tables take 8 bytes for each page: with pages of 4 KiB, one part in 512 of the RAM. KubeVirt uses the same."""
LOCKED, LOCKED_THREAD = 48 * MIB, 8 * MIB
"""Additional bytes with locked memory, for QEMU and for each thread: whole stacks, heaps, libraries (measured: 21, 8 MiB)."""


@frozen
class RamPlan:
    """The source of the guest's RAM; :class:`~runner.placement.guest_topology.GuestTopology` has its NUMA nodes."""

    page_size: int | None
    """Bytes of a huge page; ``None`` for ordinary pages."""
    preallocate: bool
    """Whether every page is touched before QEMU leaves the pod's cgroup, which stays charged for the pages."""
    locked: bool
    """Whether QEMU locks all of its memory."""
    shared: bool
    """Whether other processes, such as virtiofsd, can map it."""
    overhead: int
    """Upper bound of the bytes needed besides the RAM; see :func:`memory_overhead`."""
    preallocator: tuple[str, ...]
    """The first words of the argv of the program that touches shared pages; QEMU itself touches pages that are not shared."""


def memory_overhead(spec: InstanceSpec, vcpus: int, size: int, accel: Literal["kvm", "tcg"], copied: int = 0) -> int:
    """Return the overhead in bytes of an instance with *size* bytes of RAM: QEMU, page tables, this program, its daemons.

    Files of *copied* bytes are copied into memory for QEMU, whose user may not read them. It is an upper bound that grows with the spec, as
    KubeVirt's ``GetMemoryOverhead``. The memory of a virtiofsd for a guest that opens very many files is not counted.
    """
    memory = spec.memory
    passed = sum(device.count or (ALL_DEVICES if device.resource else 1) for device in spec.device)
    tables = 0 if memory.page_size else size // PAGE_TABLES
    parts = [
        RUNNER,
        copied,
        QEMU + vcpus * VCPU,
        (len(spec.disk) + spec.hotplug.disks + len(spec.network) + len(spec.share) + passed) * DEVICE,
        sum((spec.guest.vsock is not None, spec.cloud_init is not None)) * DEVICE,
        SCREEN if spec.display.vnc else BIOS_SCREEN if spec.boot.by_bios else 0,
        (len(spec.network) + len(spec.share)) * DAEMON,
        sum(PASST - DAEMON + each.listened_at * FORWARDED_PORT for each in spec.network if each.mode == "passt"),
        TRANSLATED if accel == "tcg" else 0,
        LOCKED + locked_threads(spec, vcpus) * LOCKED_THREAD if memory.lock else 0,
        tables * (2 + len(spec.share)),  # for QEMU and KVM; each virtiofsd maps the RAM, too
    ]
    # Whole MiB, because messages give all sizes in MiB.
    return -(-sum(parts) // MIB) * MIB


def plan_ram(
    spec: InstanceSpec,
    size: int,
    overhead: Callable[[int], int],
    facts: HostFacts,
    problems: Problems,
    *,
    controller: bool,
) -> RamPlan:
    """Plan *size* bytes of RAM; *overhead* returns the overhead for a size, *controller* is true for the back end ``controller``."""
    memory = spec.memory
    refuse_contradictions(spec, problems, controller=controller)
    _refuse_too_little_memory(memory.page_size, size, overhead, facts, problems)
    # Preallocate, because the pod is charged only for pages that are touched while QEMU is in its cgroup; missing huge pages must fail the
    # start; and mlockall(2) and VFIO touch all pages at once, which must be on their NUMA nodes by then.
    needed = controller or memory.hugepages is not None or memory.lock or bool(spec.device)
    return RamPlan(
        page_size=memory.page_size,
        preallocate=memory.prealloc or needed,
        locked=memory.lock,
        shared=memory.shared,
        overhead=overhead(size),
        preallocator=facts.preallocator,
    )


def refuse_contradictions(spec: InstanceSpec, problems: Problems, *, controller: bool) -> None:
    """Refuse keys of ``[memory]`` that contradict others; *controller* is true for the back end ``controller``."""
    memory = spec.memory
    if memory.prealloc is False:
        for applies, reason in (
            (controller, 'with placement "controller" the pod is charged only for what is touched while QEMU is in it'),
            (memory.hugepages is not None, "huge pages are touched before the guest runs, while an error is still one"),
            (memory.lock, "what is locked is there"),
            (spec.device != (), "VFIO locks all of it for [[device]]"),
        ):
            if applies:
                problems.refuse("memory.prealloc", f"must not be false: {reason}", "leave it out")
                return
    for applies, reason in (
        (spec.share != (), "must be true: virtiofsd maps the guest's RAM for [[share]]"),
        (spec.hotplug.qemu, "must be true with hotplug.qemu: the next QEMU maps the same RAM"),
        (memory.hugepages is not None, "must be true with memory.hugepages, which are files to the kernel"),
    ):
        if applies and not memory.shared:
            problems.refuse("memory.shared", reason, "leave it out")


def _refuse_too_little_memory(
    page: int | None, size: int, overhead: Callable[[int], int], facts: HostFacts, problems: Problems
) -> None:
    """Refuse *size* bytes of RAM in pages of *page* bytes (``None``: ordinary ones) that do not fit with the *overhead* for that size."""
    available = facts.memory
    if page is None:
        if size + overhead(size) > available:
            # The overhead grows with the RAM, so the overhead for all available memory is an upper bound.
            fits = available - overhead(min(size, available))
            problems.refuse(
                "memory.size",
                f"{format_size(size)} and {format_size(overhead(size))} of overhead (QEMU, page tables, this program) do "
                f"not fit into the {in_mib(available)} this pod may use",
                f"at most {in_mib(fits)} do, or raise limits.memory" if fits >= LEAST_MEMORY else "raise limits.memory",
            )
        return
    limit = facts.limits.huge.get(page, HugeFact()).limit
    if limit is not None and size > limit:
        problems.refuse(
            "memory.size",
            f"{format_size(size)} in pages of {format_size(page)} do not fit into the {in_mib(limit)} of them this pod may "
            f"use (hugetlb.{hugetlb_name(page)}.max, {huge_limit_variable(page)})",
            f"raise limits.{hugepages_resource(page)} in the pod",
        )
    if overhead(size) > available:
        problems.refuse(
            "memory.hugepages",
            f"{format_size(overhead(size))} of overhead in ordinary pages (QEMU, this program) do not fit into the "
            f"{in_mib(available)} of memory this pod may use",
            "raise limits.memory",
        )


def refuse_too_few_pages(
    memory: MemorySpec, size: int, topology: GuestTopology | None, facts: HostFacts, problems: Problems
) -> None:
    """Refuse *size* bytes of RAM for which there are too few of the huge pages that *memory* requests.

    They must be free on the NUMA nodes that *topology* binds the RAM to, or, if unbound, on any that this process may use.
    Without a topology only the size is checked.
    """
    page, limits = memory.page_size, facts.limits
    if page is None:
        return
    shown = format_size(page)
    known = sorted(limits.huge)
    if page not in known:
        others = " and ".join(map(format_size, known)) or "none at all"
        problems.refuse("memory.hugepages", f"this host has no huge pages of {shown}", f"it knows {others}")
        return
    refuse_parts_of_pages(page, size, problems)
    if size % page or topology is None:
        return
    pools = {
        node.id: pool
        for node in facts.hardware.numa_nodes
        for pool in node.hugepages
        if pool.size == page and node.id in facts.memory_nodes
    }
    wanted: dict[tuple[int, ...], int] = {}
    for each in topology.numa_nodes:
        sources = tuple(sorted(each.bound)) or tuple(pools)
        wanted[sources] = wanted.get(sources, 0) + each.memory // page
    short = False
    for sources, pages in wanted.items():
        free = sum(pools[node].free for node in sources if node in pools)
        if pages > free:
            short = True
            _refuse_shortage(sources, pages, page, free, pools[sources[0]].total, problems)
    # Sets may overlap, and reserved pages belong to no NUMA node in particular.
    free = sum(pool.free for pool in pools.values())
    promised = limits.huge[page].promised
    if not short and sum(wanted.values()) > free - promised:
        others = f", of which {promised} are promised to others that have not touched them yet" if promised else ""
        problems.refuse(
            "memory.hugepages",
            f"{sum(wanted.values())} pages of {shown} are wanted on all NUMA nodes together, where {free} are free{others}",
            f"reserve more on the node ({KEPT_MEMORY_STATE})",
        )


def refuse_parts_of_pages(page: int, size: int, problems: Problems) -> None:
    """Refuse *size* bytes of RAM that cannot consist of huge pages of *page* bytes."""
    if size % page:
        problems.refuse(
            "memory.size",
            f"{format_size(size)} is not a multiple of the huge pages' {format_size(page)}",
            f"{format_size(size // page * page + page)} is",
        )


def _refuse_shortage(
    sources: tuple[int, ...], pages: int, page: int, free: int, total: int, problems: Problems
) -> None:
    """Refuse *pages* huge pages of *page* bytes from the NUMA nodes *sources*, where *free* are free; the first one has *total*."""
    where = f"NUMA node {' and '.join(map(str, sources))}"
    file = f"/sys/devices/system/node/node{sources[0]}/hugepages/hugepages-{page >> 10}kB/nr_hugepages"
    problems.refuse(
        "memory.hugepages",
        f"{pages} pages of {format_size(page)} ({format_size(pages * page)}) are to come from {where}, where {free} "
        f"({in_mib(free * page)}) are free",
        f"on the node: echo {total + pages - free} > {file} ({KEPT_MEMORY_STATE})",
    )


def refuse_unlockable(spec: InstanceSpec, needed: int, user: User, limits: MemoryLimits, problems: Problems) -> None:
    """Refuse the keys that make QEMU lock *needed* bytes if its *user* cannot."""
    reason = too_little_lockable(None if user.user_id == 0 and limits.may_lock else limits.lockable, needed)
    if reason is not None:
        what = ["QEMU's memory with all of its addresses (memory.lock)"] if spec.memory.lock else []
        what += ["the guest's RAM for VFIO ([[device]])"] if spec.device else []
        where = "memory.lock" if spec.memory.lock else "device"
        problems.refuse(where, f"{reason}: {' and '.join(what)}", MEMLOCK)


def refuse_too_large_files(topology: GuestTopology, limits: MemoryLimits, problems: Problems) -> None:
    """Refuse shared RAM of a NUMA node of *topology*, a single file to the kernel, that exceeds the limit of a file."""
    largest = max(each.memory for each in topology.numa_nodes)
    if limits.file_size is not None and largest > limits.file_size:
        problems.refuse(
            "memory.size",
            f"{format_size(largest)} of RAM are one file to the kernel, and a file of this process may have "
            f"{in_mib(limits.file_size)} (RLIMIT_FSIZE)",
            "start the container without that limit (`--ulimit fsize`, LimitFSIZE=)",
        )


def in_mib(size: int) -> str:
    """Return *size* bytes in whole MiB, rounded down."""
    return f"{size >> 20}MiB"
