"""What was found of PCI devices that a guest is to have: plain values, made by ``instance/passthrough.py``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

import attrs


@attrs.frozen
class DeviceNode:
    """A file in ``/dev`` that a device is reached by."""

    path: PurePosixPath
    error: str | None = None
    """Why it cannot be opened for reading and writing, in the kernel's words."""
    busy: bool = False
    """Somebody else has it open, and it lets in one at a time."""
    everyone: bool = False
    """Whether its mode lets any user in."""


@attrs.frozen
class GroupMember:
    """Another device of an IOMMU group."""

    address: str
    driver: str | None
    bridge: bool


@attrs.frozen
class Bar:
    """A region of a device's memory that the guest sees (base address register)."""

    size: int
    """Bytes."""
    high: bool
    """It may lie above 4 GiB behind a bridge: it is 64 bits wide and prefetchable."""


@attrs.frozen
class PciLink:
    """A PCI Express link, now and at its best: transfers a second in the kernel's words, and lanes."""

    speed: str
    width: int
    best_speed: str
    best_width: int


@attrs.frozen
class PciFact:
    """A PCI device as it was found."""

    address: str
    sysfs: PurePosixPath
    name: str
    """``vendor:device``, as ``lspci -n`` says it."""
    driver: str | None
    vfio: bool
    """Whether that driver is one of VFIO's: ``vfio-pci``, or one for this kind of device."""
    numa_node: int
    """-1 where the firmware does not say."""
    group: str | None
    """Its IOMMU group; ``None`` where no IOMMU is in use."""
    members: tuple[GroupMember, ...]
    """The others of its group."""
    bars: tuple[Bar, ...]
    silent: bool
    """Its configuration space reads as nothing but ones: nobody answers on the bus."""
    link: PciLink | None
    resets: str
    """The ways the kernel can reset it, such as ``flr bus``."""
    group_node: DeviceNode | None
    device_node: DeviceNode | None
    """Its node for iommufd; ``None`` where the kernel makes none."""


@attrs.frozen
class VfioFacts:
    """What passing devices takes; looked at only when the spec has some."""

    devices: Mapping[str, PciFact] = attrs.field(factory=dict)
    """The devices asked about that exist, by address."""
    environment: Mapping[str, str] = attrs.field(factory=dict)
    """The environment, in which device plugins say what they have given us."""
    container: DeviceNode = DeviceNode(PurePosixPath("/dev/vfio/vfio"), "not looked for")
    iommufd: DeviceNode = DeviceNode(PurePosixPath("/dev/iommu"), "not looked for")
    qemu_version: str = ""
    address_bits: int = 0
    """Of a physical address on this machine; 0 where the kernel does not say."""
