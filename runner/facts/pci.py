"""PCI devices of the host that a guest is to have, as sysfs and ``/dev`` describe them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

import attrs


@attrs.frozen
class DeviceNode:
    """A file in ``/dev`` through which a device is used."""

    path: PurePosixPath
    error: str | None = None
    """Why it cannot be opened for reading and writing, in the kernel's words."""
    busy: bool = False
    """Another process has it open, and the kernel admits one opener at a time."""
    everyone: bool = False
    """Whether its mode admits any user."""


@attrs.frozen
class GroupMember:
    """Another device of an IOMMU group."""

    address: str
    driver: str | None
    """``None`` also for a driver that leaves the device alone: VFIO's own and ``pci-stub``."""
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
    """A PCI Express link, current and maximal: transfers per second in the kernel's words (``16.0 GT/s PCIe``), and lanes."""

    speed: str
    width: int
    best_speed: str
    best_width: int


@attrs.frozen
class PciFact:
    """A PCI device."""

    address: str
    sysfs: PurePosixPath
    """Its directory."""
    name: str
    """``vendor:device``, as ``lspci -n`` prints it."""
    driver: str | None
    vfio: bool
    """Whether that driver is one of VFIO's: ``vfio-pci``, or one for this kind of device."""
    numa_node: int
    """-1 where the firmware does not say."""
    group: str | None
    """Its IOMMU group; ``None`` where no IOMMU is in use."""
    members: tuple[GroupMember, ...]
    """The other devices of its group."""
    bars: tuple[Bar, ...]
    silent: bool
    """Its configuration space reads as nothing but ones: the device does not answer on the bus."""
    link: PciLink | None
    """``None`` for what is no PCI Express device."""
    resets: str
    """The ways the kernel can reset it, such as ``flr bus``."""
    group_node: DeviceNode | None
    """The node of its IOMMU group; ``None`` where no driver of VFIO's has it."""
    device_node: DeviceNode | None
    """Its node for iommufd; ``None`` where the kernel makes none."""


@attrs.frozen
class VfioFacts:
    """Everything that a plan with PCI devices needs to know; read only when the spec has devices."""

    devices: Mapping[str, PciFact] = attrs.field(factory=dict)
    """The requested devices that exist, by address."""
    environment: Mapping[str, str] = attrs.field(factory=dict)
    """The environment, in which device plugins name the devices that they have allocated."""
    container: DeviceNode = DeviceNode(PurePosixPath("/dev/vfio/vfio"), "not looked for")
    iommufd: DeviceNode = DeviceNode(PurePosixPath("/dev/iommu"), "not looked for")
    qemu_version: str = ""
    address_bits: int = 0
    """Width of a physical address on this machine; 0 where the kernel does not say."""
