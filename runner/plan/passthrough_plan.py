"""The plan of PCI devices that are passed through; :mod:`runner.plan.passthrough_planner` makes it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

import attrs

from runner.base.values import frozen

VfioBackend = Literal["legacy", "iommufd"]
PortKind = Literal["root", "upstream", "downstream"]
ROOT_BUS = "pcie.0"
"""The guest's bus for all devices that are behind no other host bridge."""
FIRST_BRIDGE, LAST_BUS = 64, 256
"""PCI bus numbers: the first begins the range of the other host bridges, below it are the root bus's."""
WIDTHS = (1, 2, 4, 8, 12, 16, 32)
"""The values of a root port's ``x-width``."""


@frozen
class LinkSpeed:
    """The speed and width of a PCI Express link."""

    speed: str
    """Transfers per second as sysfs shows them, such as ``16.0 GT/s PCIe``."""
    width: int
    """Lanes."""


@frozen
class PciHostBridge:
    """A host bridge of the guest beside that of its root bus (``pxb-pcie``), for a root complex of the host."""

    name: str
    bus_number: int
    numa_node: int | None
    """The guest's NUMA node; ``None`` where the guest sees none."""
    root: str
    """The host's own host bridge, such as ``pci0000:15``; empty where sysfs does not show it."""


@frozen
class PciPort:
    """A root port of the guest or a port of a switch; only an upstream port has more than one port or device behind it."""

    name: str
    kind: PortKind
    bus: str
    """The host bridge or port that it is connected to."""
    slot: int | None
    """Its device number on that bus; ``None``: QEMU chooses one on the root bus."""
    chassis: int
    """0 for an upstream port, which has none."""
    speed: str = ""
    """QEMU's ``x-speed``; empty where nothing is known, and for the ports of a switch, which have none."""
    link: LinkSpeed | None = None
    """The corresponding link on the host."""
    host: str = ""
    """The corresponding port of the host; empty for one that exists only in the guest."""
    host_name: str = ""
    """``vendor:device`` of the host's port, and those of its subsystem, separated by a blank."""
    address: str = ""
    """Its PCI address in the guest, from the firmware's numbering of buses."""


@frozen
class DevicePlan:
    """One PCI device of the host."""

    address: str
    sysfs: PurePosixPath
    name: str
    driver: str
    """The driver it is bound to before the start and must be bound to after the end."""
    vfio_backend: VfioBackend
    group_node: PurePosixPath | None
    """The device node of its IOMMU group, which QEMU opens with ``legacy``. With ``iommufd`` it only shows whether the device
    is free, and is ``None`` if the container does not have it."""
    device_node: PurePosixPath | None
    """The node whose descriptor QEMU inherits; ``None`` with ``legacy``."""
    lent_to: int | None
    """The user id that owns *group_node* while QEMU opens it (QEMU takes no descriptor for it); ``None``: no change."""
    bus: str
    """The bus of the guest that its root port is on."""
    host_numa_node: int
    """-1 where the firmware does not report it."""
    guest_numa_node: int | None
    """The guest's NUMA node of its bus; ``None`` if it is on the root bus."""
    memory: int
    """Bytes of all of its regions."""
    properties: tuple[tuple[str, object], ...]
    rom: bool
    port: str = attrs.field(default="")
    """The guest's port that it is behind; empty for a root port of its own on *bus* (in states of earlier versions)."""
    function: int = attrs.field(default=0)
    multifunction: bool = attrs.field(default=False)
    """Whether further functions are behind the same port."""
    device_class: int = attrs.field(default=0)
    link: LinkSpeed | None = attrs.field(default=None)
    """Its link on the host."""
    guest_address: str = attrs.field(default="")
    """Its PCI address in the guest, from the firmware's numbering of buses."""


@frozen
class PassthroughPlan:
    """All PCI devices that are passed through, and their shared resources."""

    devices: tuple[DevicePlan, ...] = ()
    iommufd: PurePosixPath | None = None
    """``/dev/iommu``; ``None`` if no device uses it."""
    window: int | None = None
    """Bytes of guest addresses above its RAM for the devices' regions; ``None`` if QEMU's 32 GiB are enough."""
    bridges: tuple[PciHostBridge, ...] | None = None
    """``None``: one for each NUMA node of a guest that has several."""
    ports: tuple[PciPort, ...] = ()
    """From above. Empty: each device has a root port of its own on its bus."""


def x_width(link: LinkSpeed) -> int:
    """Return a root port's ``x-width`` for *link*."""
    return max(width for width in WIDTHS if width <= max(link.width, 1))
