"""The limits that QEMU checks at its start, by version and accelerator: one table, so that a plan refuses first.

Sources are QEMU's ``hw/i386``; ``tests/machine/test_qemu_limits.py`` starts this machine's QEMU at each limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from runner.facts.host import HostFacts, Version, parse_version
from runner.placement.guest_topology import GuestTopology
from runner.plan.problems import Problems
from runner.spec.rules import format_size

if TYPE_CHECKING:
    from pathlib import PurePosixPath

    from runner.spec.instance import InstanceSpec

FLASH_SECTOR, MOST_FLASH = 4096, 8 << 20
"""Bytes of a firmware: it is a multiple of the first, and with its variables not more than the second (``pc_sysfw.c``)."""

MOST_VCPUS: tuple[tuple[Version, int], ...] = (((9, 0), 4096), ((8, 1), 1024), ((0,), 288))
"""The most vCPUs of machine q35, by the first version of QEMU with that limit (``pc_q35.c``: ``max_cpus``)."""
LAST_XAPIC_ID = 254
"""The last APIC ID without x2APIC; an interrupt for a vCPU beyond it needs interrupt remapping."""
X2APIC_EMULATED_SINCE: Version = (9, 0)
"""The first QEMU that emulates x2APIC without KVM (``hw/intc/apic.c``)."""
REPLACED_SINCE: Version = (10, 1)
"""The first QEMU that can be replaced under its guest (``ctl qemu-update``); 11.1 was tried."""
ASKED_FROM = 100
"""vCPUs from which APIC IDs may be greater than :data:`LAST_XAPIC_ID`, as each level of the topology has whole bits: from 125."""

GIB = 1 << 30
LOW_RAM, HOLE = 2 * GIB, 32 * GIB
"""Bytes of RAM below 4 GiB in a guest with more, and of the window for 64-bit devices above its RAM (``q35.c``), which OVMF's
aperture is as well."""
SPLIT_FROM, ACPI_DATA = 0xB0000000, 160 << 10
"""Bytes of RAM from which on no more than :data:`LOW_RAM` of it are below 4 GiB (``pc_q35.c``), and of its end there, where no initial
RAM disk may be (``pc_machine_class_init``: ``acpi_data_size``)."""
ALWAYS_FITS = 28 * GIB
"""Bytes of RAM that any CPU with addresses above 4 GiB has room for: the least, PSE-36, has 36 bits."""


def last_apic_id(topology: GuestTopology, cores: int) -> int:
    """Return the greatest APIC ID in a guest of *topology* with *cores* in each die (``include/hw/i386/topology.h``)."""
    apic_id = topology.sockets - 1
    for number in (topology.dies, cores, topology.threads):
        apic_id = apic_id << (number - 1).bit_length() | (number - 1)
    return apic_id


def needs_remapping(topology: GuestTopology, most: int | None) -> bool:
    """Tell whether vCPUs of *topology*, or of *most* cores to which it can grow, have APIC IDs beyond what an xAPIC has."""
    return last_apic_id(topology, most or topology.cores) > LAST_XAPIC_ID


def refuse_too_many_vcpus(
    spec: InstanceSpec, topology: GuestTopology, accel: Literal["kvm", "tcg"], facts: HostFacts, problems: Problems
) -> None:
    """Refuse more vCPUs than this QEMU's machine, its accelerator or the kernel's KVM supports."""
    growing = spec.hotplug.cpus or 0
    wanted, key = max((topology.vcpus, "cpu.count"), (growing, "hotplug.cpus"))
    version, limits = parse_version(facts.qemu_version), [(wanted, "", "")]
    if version:
        most = next(number for since, number in MOST_VCPUS if version >= since)
        limits.append((most, f"QEMU {facts.qemu_version} has machines of at most {most} vCPUs, not {wanted}", ""))
    if accel == "kvm" and facts.kvm.most_vcpus:
        most = facts.kvm.most_vcpus
        limits.append((most, f"KVM of this kernel has at most {most} vCPUs for a guest, not {wanted}", ""))
    last = last_apic_id(topology, growing or topology.cores)
    if accel == "tcg" and () < version < X2APIC_EMULATED_SINCE and last > LAST_XAPIC_ID:
        reason = (
            f"QEMU {facts.qemu_version} emulates no x2APIC, without which the last APIC ID is {LAST_XAPIC_ID}; {wanted} vCPUs in this "
            f"topology have IDs up to {last}"
        )
        flat = "" if growing or wanted == last + 1 else ', or set cpu.topology = "flat"'
        limits.append((min(LAST_XAPIC_ID + 1, wanted - 1), reason, flat))
    most, reason, otherwise = min(limits)
    if reason:
        problems.refuse(key, reason, f"lower it to {most}{otherwise}")


def refuse_too_large_initrd(path: PurePosixPath, size: int, memory: int, problems: Problems) -> None:
    """Refuse an initial RAM disk of *size* bytes for which *memory* bytes of RAM have no room below 4 GiB (``x86_load_linux``)."""
    low = memory if memory < SPLIT_FROM else LOW_RAM
    most = low - ACPI_DATA - 2
    if size > most:
        problems.refuse(
            "boot.initrd",
            f"{str(path)!r} has {size} bytes, and QEMU has room for {most} in {format_size(low)} of RAM below 4GiB",
            "raise memory.size, or compress it" if low == memory else "compress it, or put what it holds on a disk",
        )
