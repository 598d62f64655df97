"""PCI devices as sysfs shows them, from any root (``Documentation/ABI/testing/sysfs-bus-pci``, ``sysfs-kernel-iommu_groups``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from runner.errors import HostError

_BRIDGE = 0x0604
"""The class of bridges to other buses: VFIO does not mind them in a group. An NVSwitch is another kind of bridge."""
_STANDARD_HEADER = 64
"""Bytes of configuration space that everybody may read."""
_REGIONS = 6
"""Lines of ``resource`` that are the device's own base address registers."""
_MEM, _PREFETCH, _MEM_64 = 0x200, 0x2000, 0x100000
"""``IORESOURCE_*`` (``include/linux/ioport.h``)."""


@attrs.frozen
class Neighbour:
    """Another device of an IOMMU group."""

    address: str
    driver: str | None
    bridge: bool


@attrs.frozen
class Region:
    """A base address register: its *size* in bytes, and whether it may lie *high*, above 4 GiB behind a bridge."""

    size: int
    high: bool


@attrs.frozen
class Link:
    """A PCI Express link: speeds in the kernel's words (``16.0 GT/s PCIe``), widths in lanes."""

    speed: str
    width: int
    best_speed: str
    best_width: int


@attrs.frozen
class Device:
    """A PCI device; *numa_node* is -1 where the firmware does not say, *group* ``None`` where no IOMMU is in use."""

    address: str
    sysfs: Path
    name: str
    driver: str | None
    vfio: bool
    numa_node: int
    group: str | None
    members: tuple[Neighbour, ...]
    bars: tuple[Region, ...]
    silent: bool
    link: Link | None
    resets: str
    character_device: str | None
    """``vfio3``: its node below ``/dev/vfio/devices``."""


def read_device(address: str, sys: Path = Path("/sys")) -> Device | None:
    """Return the device at *address*, ``None`` if there is none.

    Raises :exc:`~runner.errors.HostError` if it is there and cannot be read.
    """
    path = sys / "bus/pci/devices" / address
    if not path.exists():
        return None
    driver = _name_of(path / "driver")
    group = _name_of(path / "iommu_group")
    node = next(iter(_names(path / "vfio-dev")), None)
    return Device(
        address=address,
        sysfs=path,
        name=f"{_hex(path / 'vendor'):04x}:{_hex(path / 'device'):04x}",
        driver=driver,
        vfio=driver == "vfio-pci" or node is not None,
        numa_node=int(_line(path / "numa_node") or -1),
        group=group,
        members=tuple(_members(sys, group, address)) if group is not None else (),
        bars=tuple(_regions(path / "resource")),
        silent=is_silent(path),
        link=_link(path),
        resets=_line(path / "reset_method"),
        character_device=node,
    )


def is_silent(path: Path) -> bool:
    """Tell whether the device with the directory *path* does not answer: what nobody drives reads as ones.

    Not only its first word: a virtual function's vendor and device are all ones by the SR-IOV specification (3.4.1.1).
    """
    try:
        with (path / "config").open("rb", buffering=0) as config:
            header = config.read(_STANDARD_HEADER)
    except OSError as error:
        raise HostError(f"cannot read the configuration space of {path.name}") from error
    return header == b"\xff" * len(header)


def driver_of(path: Path) -> str | None:
    """Return the driver that the device with the directory *path* is bound to."""
    return _name_of(path / "driver")


def _members(sys: Path, group: str, address: str) -> Iterator[Neighbour]:
    for name in _names(sys / "kernel/iommu_groups" / group / "devices"):
        if name != address:
            path = sys / "bus/pci/devices" / name
            driver = driver_of(path)
            # VFIO's own and pci-stub leave the device alone (drivers/vfio, vfio_dev_driver_allowed).
            harmless = driver in {"vfio-pci", "pci-stub"} or bool(_names(path / "vfio-dev"))
            yield Neighbour(name, None if harmless else driver, _hex(path / "class") >> 8 == _BRIDGE)


def _regions(path: Path) -> Iterator[Region]:
    for line in _line(path).splitlines()[:_REGIONS]:
        first, last, flags = (int(word, 16) for word in line.split())
        if flags & _MEM and last > first:
            yield Region(last - first + 1, bool(flags & _MEM_64 and flags & _PREFETCH))


def _link(path: Path) -> Link | None:
    widths = [_line(path / f"{which}_link_width") for which in ("current", "max")]
    if not all(width.isdecimal() for width in widths):
        return None  # it is no PCI Express device
    speeds = (_line(path / f"{which}_link_speed") for which in ("current", "max"))
    speed, best_speed = speeds
    return Link(speed, int(widths[0]), best_speed, int(widths[1]))


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # not every kernel and device has every file
        return ""


def _hex(path: Path) -> int:
    text = _line(path)
    return int(text, 16) if text else 0


def _name_of(link: Path) -> str | None:
    return link.resolve().name if link.exists() else None


def _names(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []
