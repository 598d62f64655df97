"""PCI devices in sysfs (``Documentation/ABI/testing/sysfs-bus-pci``, ``sysfs-kernel-iommu_groups``) and their VFIO nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from runner.errors import HostError
from runner.facts.pci import Bar, GroupMember, PciFact, PciLink
from runner.facts.roots import Roots
from runner.kernel.vfio import probe_node

_BRIDGE = 0x0604
"""The class of bridges to other buses, which VFIO accepts in a group. An NVSwitch is another kind of bridge."""
_STANDARD_HEADER = 64
"""Bytes of configuration space that every user may read."""
_BARS = 6
"""Lines of ``resource`` that are the device's own base address registers."""
_MEM, _PREFETCH, _MEM_64 = 0x200, 0x2000, 0x100000
"""``IORESOURCE_*`` (``include/linux/ioport.h``)."""


def read_pci_device(address: str, roots: Roots) -> PciFact | None:
    """Return the device at *address*, ``None`` if there is none.

    Raises :exc:`~runner.errors.HostError` if it is there and cannot be read.
    """
    path = roots.sys / "bus/pci/devices" / address
    if not path.exists():
        return None
    nodes = PurePosixPath(roots.dev) / "vfio"
    driver = _target_name(path / "driver")
    group = _target_name(path / "iommu_group")
    character_device = next(iter(_names(path / "vfio-dev")), None)  # such as "vfio3"
    has_vfio_driver = driver == "vfio-pci" or character_device is not None
    return PciFact(
        address=address,
        sysfs=PurePosixPath(path),
        name=f"{_hex(path / 'vendor'):04x}:{_hex(path / 'device'):04x}",
        driver=driver,
        vfio=has_vfio_driver,
        numa_node=int(_line(path / "numa_node") or -1),
        group=group,
        members=tuple(_members(roots.sys, group, address)) if group is not None else (),
        bars=tuple(_bars(path / "resource")),
        silent=is_silent(path),
        link=_link(path),
        resets=_line(path / "reset_method"),
        group_node=probe_node(nodes / group) if has_vfio_driver and group else None,
        device_node=probe_node(nodes / "devices" / character_device) if character_device else None,
    )


def is_silent(path: Path) -> bool:
    """Tell whether the device with the directory *path* does not answer: then its configuration space reads as ones.

    Not only the first word counts: a virtual function's vendor and device are all ones by the SR-IOV specification
    (3.4.1.1).
    """
    try:
        with (path / "config").open("rb", buffering=0) as config:
            header = config.read(_STANDARD_HEADER)
    except OSError as error:
        raise HostError(f"cannot read the configuration space of {path.name}") from error
    return header == b"\xff" * len(header)


def driver_of(path: Path) -> str | None:
    """Return the driver that the device with the directory *path* is bound to."""
    return _target_name(path / "driver")


def _members(sys: Path, group: str, address: str) -> Iterator[GroupMember]:
    for name in _names(sys / "kernel/iommu_groups" / group / "devices"):
        if name != address:
            path = sys / "bus/pci/devices" / name
            driver = driver_of(path)
            # VFIO's own and pci-stub leave the device alone (drivers/vfio, vfio_dev_driver_allowed).
            is_harmless = driver in {"vfio-pci", "pci-stub"} or bool(_names(path / "vfio-dev"))
            yield GroupMember(name, None if is_harmless else driver, _hex(path / "class") >> 8 == _BRIDGE)


def _bars(path: Path) -> Iterator[Bar]:
    for line in _line(path).splitlines()[:_BARS]:
        first, last, flags = (int(word, 16) for word in line.split())
        if flags & _MEM and last > first:
            yield Bar(last - first + 1, bool(flags & _MEM_64 and flags & _PREFETCH))


def _link(path: Path) -> PciLink | None:
    width, best_width = (_line(path / f"{which}_link_width") for which in ("current", "max"))
    if not width.isdecimal() or not best_width.isdecimal():
        return None  # it is no PCI Express device
    speed, best_speed = (_line(path / f"{which}_link_speed") for which in ("current", "max"))
    return PciLink(speed, int(width), best_speed, int(best_width))


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # not every kernel and device has every file
        return ""


def _hex(path: Path) -> int:
    text = _line(path)
    return int(text, 16) if text else 0


def _target_name(link: Path) -> str | None:
    return link.resolve().name if link.exists() else None


def _names(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []
