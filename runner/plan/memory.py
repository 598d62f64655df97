"""The guest's memory: of which pages it is, what is needed beside it, and why it cannot be had.

Numbers with "measured" are from QEMU 7.2 and 10.0 with q35 and no display; ``tests/machine/test_memory.py`` holds them
against QEMU.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from runner.cpuset import CpuSet
from runner.errors import Problem
from runner.facts.hardware import Hardware, hugetlb_name
from runner.facts.memory import HugeFact, MemoryLimits
from runner.placement.guest_topology import GuestTopology
from runner.plan.host_checks import MEMLOCK, locked_threads, too_little_lockable
from runner.spec.instance import LEAST_MEMORY, InstanceSpec, MemorySpec
from runner.spec.rules import MIB, format_size

PAGE_SIZE = 2 << 20
"""Bytes; NUMA nodes of the guest begin at a multiple of it, so that its RAM can be huge pages from end to end."""

RUNNER = 32 * MIB
"""This program and its anchors: 30 MiB resident at most (measured)."""
QEMU = 64 * MIB
"""QEMU without vCPUs and devices: 45 MiB resident (measured), 21 of them its program, which other QEMUs may share."""
VCPU = 4 * MIB
"""A vCPU: 1.4 MiB (measured, emulated); the kernel's part under KVM is below 1 MiB. KubeVirt takes 8 MiB."""
DEVICE = 2 * MIB
"""A disk or a network interface with its queues: 0.8 MiB (measured). Disks that are attached later count, too."""
ALL_DEVICES = 16
"""So many of a resource are reckoned where the spec takes all that were given: as many as a machine mostly has."""
SCREEN = 24 * MIB
"""A screen: 16 MiB of video memory (QEMU's ``VGA``), and what its VNC server keeps of what a viewer has seen."""
SERVANT = 8 * MIB
"""A dnsmasq (3 MiB) or a virtiofsd (5 MiB and its cache of names; measured)."""
TRANSLATED = 128 * MIB
"""What QEMU may fill with translated code where it emulates the CPU; it is told to (``-accel tcg,tb-size=``)."""
PAGE_TABLES = 512
"""Page tables take a word of 8 bytes for each page: in pages of 4 KiB this part of it. KubeVirt reckons so, too."""
LOCKED, LOCKED_THREAD = 48 * MIB, 8 * MIB
"""What locking adds, for QEMU and for each thread: stacks, heaps and libraries whole (measured: 21 and 8 MiB)."""


@attrs.frozen
class RamPlan:
    """Where the guest's RAM comes from, beside what :class:`~runner.placement.guest_topology.GuestTopology` says of its nodes."""

    page_size: int | None
    """Of huge pages, in bytes; ``None``: as the kernel thinks best."""
    preallocate: bool
    """Every page of it is touched before QEMU leaves the pod's cgroup, which is charged for it then and for ever."""
    locked: bool
    """QEMU locks all of its memory."""
    shared: bool
    """It can be mapped by others, such as virtiofsd; else it is QEMU's alone."""
    beside: int
    """Bytes that are needed beside it, at most; see :func:`memory_overhead`."""
    preallocator: tuple[str, ...]
    """How the program that touches the pages begins. QEMU finds them there; what is not shared it touches itself."""


def memory_overhead(spec: InstanceSpec, accel: str, copied: int = 0) -> int:
    """Return how many bytes the instance needs at most beside the guest's RAM: QEMU, page tables, us and our servants.

    Files of *copied* bytes are copied into memory for QEMU, whose user may not read them.
    An upper bound that grows with what is asked for, as in KubeVirt's ``GetMemoryOverhead``. What a virtiofsd keeps for
    a guest that opens very many files is not in it.
    """
    memory = spec.memory
    passed = sum(device.count or (ALL_DEVICES if device.resource else 1) for device in spec.device)
    tables = 0 if memory.page_size else memory.size // PAGE_TABLES
    parts = [
        RUNNER,
        copied,
        QEMU + spec.cpu.count * VCPU,
        (len(spec.disk) + spec.hotplug.disks + len(spec.network) + len(spec.share) + passed) * DEVICE,
        sum((spec.guest.vsock is not None, spec.cloud_init is not None)) * DEVICE,
        SCREEN if spec.display.vnc else 0,
        (len(spec.network) + len(spec.share)) * SERVANT,
        TRANSLATED if accel == "tcg" else 0,
        LOCKED + locked_threads(spec) * LOCKED_THREAD if memory.lock else 0,
        tables * (2 + len(spec.share)),  # of QEMU and of KVM; virtiofsd maps it, too
    ]
    # Whole MiB, as everything is said in them.
    return -(-sum(parts) // MIB) * MIB


def size_by_limits(spec: InstanceSpec, accel: str, limits: MemoryLimits, numa_nodes: int, copied: int) -> int | Problem:
    """Return how much RAM the limits leave a guest of *numa_nodes* NUMA nodes, or why that cannot be said."""
    page = spec.memory.page_size
    if page is None:
        limit, name, resource = limits.memory, "memory.max", "limits.memory"
        # What is needed beside it grows with it, so this leaves a little more than that.
        beside = 0 if limit is None else memory_overhead(with_size(spec, limit), accel, copied)
    else:
        limit = limits.huge.get(page, HugeFact()).limit
        name, beside = f"hugetlb.{hugetlb_name(page)}.max", 0
        resource = f"limits.hugepages-{format_size(page).removesuffix('B')}"
    if limit is None:
        return Problem(
            "memory.size",
            f'"limits" means what {name} of this cgroup leaves, and there is no limit; set {resource} in the pod, '
            "or say how much",
        )
    unit = (page or PAGE_SIZE) * numa_nodes
    size = max(0, limit - beside) // unit * unit
    if size < LEAST_MEMORY:
        taken = f", of which {format_size(beside)} are needed beside the guest" if beside else ""
        return Problem(
            "memory.size",
            f"{name} is {_shown(limit)}{taken}: what is left is less than the {format_size(LEAST_MEMORY)} that a guest "
            f"has at least; raise {resource}",
        )
    return size


def with_size(spec: InstanceSpec, size: int) -> InstanceSpec:
    """Return *spec* with *size* bytes of RAM."""
    return attrs.evolve(spec, memory=attrs.evolve(spec.memory, size=size))


def contradictions(spec: InstanceSpec, *, controller: bool) -> Iterator[Problem]:
    """Yield what cannot be true together."""
    memory = spec.memory
    if memory.prealloc is False:
        for reason, so in (
            (controller, 'with placement "controller" the pod is charged only for what is touched while QEMU is in it'),
            (memory.hugepages is not None, "huge pages are touched before the guest runs, while an error is still one"),
            (memory.lock, "what is locked is there"),
            (spec.device != (), "VFIO locks all of it for [[device]]"),
        ):
            if reason:
                yield Problem("memory.prealloc", f"must not be false: {so}; leave it out")
                return
    if not memory.shared and spec.share:
        yield Problem("memory.shared", "must be true: virtiofsd maps the guest's RAM for [[share]]; leave it out")
    if not memory.shared and memory.hugepages is not None:
        yield Problem(
            "memory.shared", "must be true with memory.hugepages, which are files to the kernel; leave it out"
        )


def too_little_memory(spec: InstanceSpec, beside: int, available: int, limits: MemoryLimits) -> Iterator[Problem]:
    """Yield what *available* bytes of memory and the cgroups' *limits* cannot hold."""
    size, page = spec.memory.size, spec.memory.page_size
    if page is None:
        if size + beside > available:
            yield Problem(
                "memory.size",
                f"{format_size(size)} and the {format_size(beside)} needed beside it (QEMU, page tables, this program) do "
                f"not fit into the {_shown(available)} this pod may use; at most "
                f"{_shown(max(0, available - beside))} do, or raise limits.memory",
            )
        return
    limit = limits.huge.get(page, HugeFact()).limit
    if limit is not None and size > limit:
        name = format_size(page).removesuffix("B")
        yield Problem(
            "memory.size",
            f"{format_size(size)} in pages of {format_size(page)} do not fit into the {_shown(limit)} of them this pod may "
            f"use (hugetlb.{hugetlb_name(page)}.max); raise limits.hugepages-{name} in the pod",
        )
    if beside > available:
        yield Problem(
            "memory.hugepages",
            f"the {format_size(beside)} needed beside the guest's huge pages (QEMU, this program) do not fit into the "
            f"{_shown(available)} of memory this pod may use; raise limits.memory",
        )


def too_few_pages(
    memory: MemorySpec, topology: GuestTopology | None, hardware: Hardware, nodes: CpuSet, limits: MemoryLimits
) -> Iterator[Problem]:
    """Yield why *memory* cannot consist of the huge pages it asks for.

    They are to be free on the NUMA nodes that *topology* binds it to, else on any of the *nodes* that this process may
    take memory from. Without a topology only their size is looked at.
    """
    page = memory.page_size
    if page is None:
        return
    shown = format_size(page)
    known = sorted(limits.huge)
    if page not in known:
        others = " and ".join(map(format_size, known)) or "none at all"
        yield Problem("memory.hugepages", f"this host has no huge pages of {shown}; it knows {others}")
        return
    if memory.size % page:
        yield Problem(
            "memory.size",
            f"{format_size(memory.size)} is not a multiple of the huge pages' {shown}; "
            f"{format_size(memory.size // page * page + page)} is",
        )
        return
    if topology is None:
        return
    pools = {node.id: pool for node in hardware.numa_nodes for pool in node.hugepages if pool.size == page}
    pools = {node: pool for node, pool in pools.items() if node in nodes}
    wanted: dict[tuple[int, ...], int] = {}
    for each in topology.numa_nodes:
        sources = tuple(sorted(each.bound)) or tuple(pools)
        wanted[sources] = wanted.get(sources, 0) + each.memory // page
    short = False
    for sources, pages in wanted.items():
        free = sum(pools[node].free for node in sources if node in pools)
        if pages > free:
            short = True
            yield Problem("memory.hugepages", _shortage(sources, pages, page, free, pools[sources[0]].total))
    # Sets may overlap, and promises are of no NUMA node in particular.
    free = sum(pool.free for pool in pools.values())
    promised = limits.huge[page].promised
    if not short and sum(wanted.values()) > free - promised:
        others = f", of which {promised} are promised to others that have not touched them yet" if promised else ""
        yield Problem(
            "memory.hugepages",
            f"{sum(wanted.values())} pages of {shown} are wanted on all NUMA nodes together, where {free} are free{others}; "
            "reserve more on the node (nr_hugepages)",
        )


def _shortage(sources: tuple[int, ...], pages: int, page: int, free: int, total: int) -> str:
    where = f"NUMA node {' and '.join(map(str, sources))}"
    file = f"/sys/devices/system/node/node{sources[0]}/hugepages/hugepages-{page >> 10}kB/nr_hugepages"
    return (
        f"{pages} pages of {format_size(page)} ({format_size(pages * page)}) are to come from {where}, where {free} "
        f"({_shown(free * page)}) are free; on the node: echo {total + pages - free} > {file}, or give the guest less"
    )


def not_lockable(spec: InstanceSpec, needed: int, limits: MemoryLimits, *, root: bool) -> Iterator[Problem]:
    """Yield why QEMU, which is *root* or not, cannot lock *needed* bytes."""
    reason = too_little_lockable(None if root and limits.may_lock else limits.lockable, needed)
    if reason is not None:
        who = ["QEMU's memory with all of its addresses (memory.lock)"] if spec.memory.lock else []
        who += ["the guest's RAM for VFIO ([[device]])"] if spec.device else []
        where = "memory.lock" if spec.memory.lock else "device"
        yield Problem(where, f"{reason}: {' and '.join(who)}; {MEMLOCK}")


def _shown(size: int) -> str:
    return f"{size >> 20}MiB"
