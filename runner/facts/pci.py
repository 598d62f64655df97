"""PCI devices of the host that are to be passed through to a guest, as sysfs and ``/dev`` describe them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Literal

import attrs

from runner.base.values import frozen

DISPLAY, ACCELERATOR, NETWORK = 0x03, 0x12, 0x02
"""PCI base classes."""
ADDRESS = r"[0-9a-f]{4,6}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
"""Pattern of a device's address in sysfs."""
BRIDGE = 0x0604
"""The class with subclass of bridges to other PCI buses; an NVSwitch is another kind of bridge."""


def is_gpu(device_class: int) -> bool:
    """Tell whether a device of *device_class* (with subclass and programming interface) is a GPU or another accelerator."""
    return device_class >> 16 in {DISPLAY, ACCELERATOR}


def is_network(device_class: int) -> bool:
    """Tell whether a device of *device_class* (with subclass and programming interface) is a NIC."""
    return device_class >> 16 == NETWORK


@frozen
class DeviceNode:
    """A device node in ``/dev``."""

    path: PurePosixPath
    error: str | None = None
    """The reason why it cannot be opened for reading and writing (``strerror``); ``None`` if it can."""
    busy: bool = False
    """Whether another process has it open; the kernel lets one process at a time open it."""
    everyone: bool = False
    """Whether its mode lets any user read and write it."""


@frozen
class GroupMember:
    """Another device of an IOMMU group."""

    address: str
    driver: str | None
    """The driver it is bound to; ``None`` without one, and for VFIO's drivers and ``pci-stub``, which do not use the device."""
    bridge: bool
    """Whether it is a PCI bridge."""


@frozen
class Bar:
    """A region of a device's memory that the guest sees (base address register)."""

    size: int
    """Bytes."""
    high: bool
    """Whether it may be mapped above 4 GiB behind a bridge: it is 64-bit and prefetchable."""
    largest: int = 0
    """Largest size in bytes that the device can give it (resizable BAR); 0 if the kernel does not show it."""


@frozen
class PciLink:
    """The current and the highest speed and width of a PCI Express link."""

    speed: str
    """Transfers per second as sysfs shows them, such as ``16.0 GT/s PCIe``."""
    width: int
    """Lanes; 0 if the link is down."""
    best_speed: str
    best_width: int


def wedged_reason(*, silent: bool, link: PciLink | None) -> str | None:
    """Return the reason why a device is unusable, from whether it is *silent* and from its own *link*; ``None`` if it is usable."""
    if silent:
        return "it does not answer: its configuration space reads as nothing but ones"
    if link is not None and link.width == 0 < link.best_width:
        return "its PCI Express link is down"
    return None


BridgeKind = Literal["root port", "upstream port", "downstream port", "bridge"]
"""A PCI Express root port, a port of a switch, or a bridge to conventional PCI."""


@frozen
class Acs:
    """The way in which a bridge treats requests from one device below it to another (Access Control Services)."""

    redirects: bool
    """Whether it sends them to the root complex (P2P request or completion redirect)."""
    direct_translated: bool
    """Whether requests with translated addresses (ATS) take the direct path nevertheless."""


@frozen
class PciBridge:
    """A PCI bridge between the root complex and a device."""

    address: str
    name: str = ""
    """``vendor:device``."""
    subsystem: str = ""
    """``vendor:device`` of the subsystem."""
    kind: BridgeKind | None = None
    """``None`` if this process may not read it: the configuration space beyond 64 bytes needs CAP_SYS_ADMIN."""
    link: PciLink | None = None
    """The link above an upstream port, and the one below the other kinds."""
    acs: Acs | None = None
    """``None`` if this process may not read it, and for a bridge without ACS."""


@frozen
class PciFact:
    """A PCI device."""

    address: str
    """Domain, bus, device and function, such as ``0000:41:00.0``."""
    sysfs: PurePosixPath
    """Its directory in sysfs."""
    name: str
    """``vendor:device``, as ``lspci -n`` prints it."""
    driver: str | None
    """The driver it is bound to."""
    vfio: bool
    """Whether that driver is ``vfio-pci`` or a VFIO driver for this kind of device."""
    numa_node: int
    """The host's NUMA node; -1 where the firmware does not report it."""
    group: str | None
    """The number of its IOMMU group; ``None`` where no IOMMU is in use."""
    members: tuple[GroupMember, ...]
    """The other devices of its group."""
    bars: tuple[Bar, ...]
    silent: bool
    """Whether its configuration space reads as all ones: the device does not answer on the bus."""
    link: PciLink | None
    """``None`` if it has none: a device of the root complex, a virtual function, or no PCI Express device."""
    resets: str
    """The reset methods of the kernel (sysfs ``reset_method``), such as ``flr bus``; empty if there are none."""
    group_node: DeviceNode | None
    """``/dev/vfio/GROUP``; ``None`` if no VFIO driver is bound to the device."""
    device_node: DeviceNode | None
    """``/dev/vfio/devices/vfioN`` for iommufd; ``None`` where the kernel does not create it."""
    device_class: int = 0
    """Its class with subclass and programming interface, such as 0x030200."""
    root: str = ""
    """The host bridge of its root complex, such as ``pci0000:15``; empty if sysfs does not show the path to it."""
    bridges: tuple[PciBridge, ...] = ()
    """The bridges between the host bridge and the device, topmost first."""
    physical_function: str = ""
    """The address of the physical function whose virtual function it is."""
    ats: bool | None = None
    """Whether it has the capability for address translation services; ``None`` if this process may not read that."""
    d3cold: bool = False
    """Whether the kernel may cut its power while nothing uses it (sysfs ``d3cold_allowed``)."""
    nvswitches: tuple[str, ...] = ()
    """The addresses of the NVSwitches of this host, if it is a GPU of their maker."""

    @property
    def slot(self) -> str:
        """Its address without the function: functions of one device have the same."""
        return self.address.rpartition(".")[0]

    @property
    def wedged(self) -> str | None:
        """Return the reason why it is unusable; ``None`` if it is usable."""
        return wedged_reason(silent=self.silent, link=None if self.physical_function else self.link)

    def begins_switch(self, index: int) -> bool:
        """Tell whether the bridge at *index* of its path is an upstream port, where a switch begins.

        If a bridge's kind cannot be read, its position determines it: a root port is first, and each switch has two ports on the path.
        """
        kind = self.bridges[index].kind
        return index % 2 == 1 if kind is None else kind == "upstream port"


@frozen
class ClaimedDevice:
    """A device of a resource claim, as its driver describes it to the container (KEP-5304, ``api/metadata``)."""

    driver: str
    name: str
    """Its name in the driver's pool of devices on this node."""
    attributes: tuple[str, ...]
    """The names of its attributes."""
    address: str | None
    """Its PCI address from the attribute ``resource.kubernetes.io/pciBusID``; ``None`` without one."""
    numa_node: int | None
    """The host's NUMA node by the attribute ``resource.kubernetes.io/numaNode`` (KEP-6072); ``None`` without one."""
    pcie_root: str | None = None
    """The host bridge of its root complex by the attribute ``resource.kubernetes.io/pcieRoot``; ``None`` without one."""


@frozen
class ClaimFile:
    """A driver's file about the devices of one request of a resource claim."""

    path: PurePosixPath
    request: str
    """The name of the request in the claim, without that of the alternative that was chosen (``firstAvailable``)."""
    devices: tuple[ClaimedDevice, ...] = ()
    error: str | None = None
    """The reason why it was not read, or an error in its content."""


@frozen
class VfioFacts:
    """Everything that a plan with PCI devices needs; read only if the spec has devices."""

    devices: Mapping[str, PciFact] = attrs.field(factory=dict)
    """The existing ones of the devices given to the container for a ``[[device]]`` of the spec, by address."""
    environment: Mapping[str, str] = attrs.field(factory=dict)
    """This process's environment, in which device plugins list the addresses of allocated devices."""
    claims: Mapping[str, tuple[ClaimFile, ...]] = attrs.field(factory=dict)
    """The files about the devices of each resource claim in the spec; none if the container has no such files."""
    container: DeviceNode = DeviceNode(PurePosixPath("/dev/vfio/vfio"), "not looked for")
    iommufd: DeviceNode = DeviceNode(PurePosixPath("/dev/iommu"), "not looked for")
