"""The ACPI table that lists the CPUs, in the order of real multi-socket hosts.

Linux numbers CPUs in the order of the MADT. QEMU lists siblings side by side (0 and 1 share a core); firmware of
dual-socket servers lists the first threads of all cores, then the second ones. Affinity code must be right for both, so
the node has the numbering of those servers.

ACPI specification 6.5, 5.2.12 (MADT); the entries besides the CPUs are those of QEMU's ``acpi_build_madt``
(``hw/i386/acpi-common.c``).
"""

from __future__ import annotations

import struct

from tests.emulated_node.shape import THREADS, Shape

LOCAL_APIC, IO_APIC = 0xFEE00000, 0xFEC00000
ACTIVE_HIGH_LEVEL = 0x000D
OEM_REVISION = 2
"""The kernel accepts a replacement only of the same OEM with a higher revision; QEMU's is 1."""


def madt(shape: Shape) -> bytes:
    """Return the table for *shape*: thread 0 of every core, then thread 1."""
    numbered = list(enumerate(shape.apic_ids))  # a CPU's `_UID` in QEMU's DSDT is its index there
    numbered.sort(key=lambda pair: (pair[1] % THREADS, pair[1]))
    body = struct.pack("<II", LOCAL_APIC, 1)  # flag: there are 8259s too
    for uid, apic_id in numbered:
        body += struct.pack("<BBBBI", 0, 8, uid, apic_id, 1)
    body += struct.pack("<BBBBII", 1, 12, 0, 0, IO_APIC, 0)
    body += struct.pack("<BBBBIH", 2, 10, 0, 0, 2, 0)  # the timer is wired to pin 2
    for irq in (5, 9, 10, 11):
        body += struct.pack("<BBBBIH", 2, 10, 0, irq, irq, ACTIVE_HIGH_LEVEL)
    body += struct.pack("<BBBHB", 4, 6, 0xFF, 0, 1)  # LINT1 of every CPU is the NMI

    def table(checksum: int) -> bytes:
        head = struct.pack("<4sIBB", b"APIC", 36 + len(body), 3, checksum)
        return head + struct.pack("<6s8sI4sI", b"BOCHS ", b"BXPC    ", OEM_REVISION, b"BXPC", 1) + body

    return table(-sum(table(0)) & 0xFF)
