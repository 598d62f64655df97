"""Spare PCI devices of the emulated node, behind an IOMMU, instead of a real node's GPUs and their NICs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

DISK_SIZE = 1 << 20
FIRST_BUS, BUSES = 0x40, 0x20
"""PCI buses of the first host bridge, and how many each has."""


def iommu() -> tuple[str, ...]:
    """Return the options for Intel's IOMMU, which must precede its devices."""
    return ("-device", "intel-iommu,intremap=on,caching-mode=on,device-iotlb=on")


def word_on(numa_node: int) -> bytes:
    """Return the first bytes of a NUMA node's spare disk."""
    return f"SPARE-DISK-OF-NUMA-NODE-{numa_node}".encode()


def spare_devices(run: Path, numa_nodes: int) -> Iterator[str]:
    """Yield the options for each NUMA node's devices, below a host bridge of its own; *run* holds the disks' files.

    These are an NVMe disk, a NIC (e1000e) on a network with a DHCP server, and two NICs in one IOMMU group: functions of
    one device without ACS. The first NUMA node has another host bridge, with a switch, and behind that a disk and a NIC.
    """
    for numa_node in range(numa_nodes):
        bridge = f"near{numa_node}"
        bus = FIRST_BUS + numa_node * BUSES
        yield from ("-device", f"pxb-pcie,id={bridge},bus=pcie.0,bus_nr={bus},numa_node={numa_node}")
        for slot, name in enumerate(("disk", "nic", "pair")):
            port = f"id={name}{numa_node},bus={bridge},chassis={numa_node + 1},slot={slot},addr={slot}"
            yield from ("-device", f"pcie-root-port,{port}")
        yield from _disk(run, f"spare{numa_node}", f"disk{numa_node}", word_on(numa_node))
        yield from ("-netdev", f"user,id=spare{numa_node},restrict=on")
        yield from ("-device", f"e1000e,netdev=spare{numa_node},bus=nic{numa_node},romfile=")
        for function in (1, 0):
            yield from ("-device", f"e1000e,bus=pair{numa_node},addr=0.{function},multifunction=on,romfile=")
    yield from ("-device", f"pxb-pcie,id=also-near0,bus=pcie.0,bus_nr={FIRST_BUS + BUSES // 2},numa_node=0")
    yield from ("-device", f"pcie-root-port,id=above-switch,bus=also-near0,chassis={numa_nodes + 1}")
    yield from ("-device", "x3130-upstream,id=switch,bus=above-switch")
    for slot, name in enumerate(("switched-disk", "switched-nic")):
        port = f"id={name},bus=switch,chassis={numa_nodes + 2},slot={slot},addr={slot}"
        yield from ("-device", f"xio3130-downstream,{port}")
    yield from _disk(run, "switched", "switched-disk", b"SPARE-DISK-BEHIND-A-SWITCH")
    yield from ("-device", "e1000e,bus=switched-nic,romfile=")


def _disk(run: Path, name: str, bus: str, word: bytes) -> Iterator[str]:
    """Yield the options for an NVMe disk that begins with *word*."""
    file = run / f"{name}.img"
    file.write_bytes(word.ljust(DISK_SIZE, b"\0"))
    yield from ("-drive", f"if=none,id={name},file={file},format=raw")
    yield from ("-device", f"nvme,drive={name},serial={name},bus={bus}")
