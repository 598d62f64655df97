"""PCI devices in sysfs (``Documentation/ABI/testing/sysfs-bus-pci``, ``sysfs-kernel-iommu_groups``) and their VFIO nodes.

Capabilities are read from the configuration space (``include/uapi/linux/pci_regs.h``), of which a process without
CAP_SYS_ADMIN reads the first 64 bytes only (``pci_read_config``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

from runner.base.errors import HostError
from runner.facts.pci import (
    BRIDGE,
    Acs,
    Bar,
    BridgeKind,
    GroupMember,
    PciBridge,
    PciFact,
    PciLink,
    is_gpu,
    wedged_reason,
)
from runner.facts.roots import Roots
from runner.kernel.vfio import probe_node

_NVIDIA, _NVSWITCH_CLASS = 0x10DE, 0x068000
_STANDARD_HEADER = 64
"""Bytes of configuration space that every user may read."""
_BARS = 6
"""Lines of ``resource`` that are the device's own base address registers."""
_MEM, _PREFETCH, _MEM_64 = 0x200, 0x2000, 0x100000
"""``IORESOURCE_*`` (``include/linux/ioport.h``)."""

_MIB = 1 << 20
_CONFIGURATION_SPACE, _FIRST_EXTENDED = 4096, 256
_STATUS, _HAS_CAPABILITIES, _CAPABILITIES = 0x06, 0x10, 0x34
_EXPRESS, _ACS, _ATS = 0x10, 0x0D, 0x0F
"""Identifiers of capabilities; the first one is in the list of the first 256 bytes."""
_KINDS: dict[int, BridgeKind] = {4: "root port", 5: "upstream port", 6: "downstream port", 7: "bridge"}
_REDIRECTS, _DIRECT_TRANSLATED = 0x0C, 0x40
"""Bits of the control register of ACS: request and completion redirect, and direct translated P2P."""
_NO_LINK = 0xFF
"""The best width of a PCI Express device that has no link, in the root complex or a virtual function (``pcie_get_width_cap``)."""
_ADDRESS = re.compile(r"[0-9a-f]{4,6}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)


def read_pci_facts(addresses: Iterable[str], roots: Roots) -> dict[str, PciFact]:
    """Return the devices at *addresses*, by address; those that are not there are left out.

    Raises :exc:`~runner.base.errors.HostError` if one is there and cannot be read.
    """
    reader = _Reader(roots)
    return {fact.address: fact for fact in map(reader.device, addresses) if fact is not None}


class _Reader:
    """Reads what several devices share once: the bridges above them, and the host's NVSwitches."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._devices = roots.sys / "bus/pci/devices"
        self._bridges: dict[Path, PciBridge] = {}

    def device(self, address: str) -> PciFact | None:
        """Return the device at *address*, ``None`` if there is none."""
        path = self._devices / address
        if not path.exists():
            return None
        nodes = PurePosixPath(self._roots.dev) / "vfio"
        driver = _target_name(path / "driver")
        group = _target_name(path / "iommu_group")
        character_device = next(iter(_names(path / "vfio-dev")), None)  # such as "vfio3"
        has_vfio_driver = driver == "vfio-pci" or character_device is not None
        vendor, device_class = _hex(path / "vendor"), _hex(path / "class")
        root, bridges = self._way(path)
        return PciFact(
            address=address,
            sysfs=PurePosixPath(path),
            name=f"{vendor:04x}:{_hex(path / 'device'):04x}",
            driver=driver,
            vfio=has_vfio_driver,
            numa_node=int(_line(path / "numa_node") or -1),
            group=group,
            members=tuple(_members(self._roots.sys, group, address)) if group is not None else (),
            bars=tuple(_bars(path)),
            silent=is_silent(path),
            link=_link(path),
            resets=reset_methods(path),
            group_node=probe_node(nodes / group) if has_vfio_driver and group else None,
            device_node=probe_node(nodes / "devices" / character_device) if character_device else None,
            device_class=device_class,
            root=root,
            bridges=bridges,
            physical_function=_target_name(path / "physfn") or "",
            ats=_has_ats(_configuration(path)),
            d3cold=_line(path / "d3cold_allowed") == "1",
            nvswitches=self._nvswitches if vendor == _NVIDIA and is_gpu(device_class) else (),
        )

    def _way(self, path: Path) -> tuple[str, tuple[PciBridge, ...]]:
        """Return the host bridge above the device with the directory *path*, and the bridges between, from above."""
        bridges: list[PciBridge] = []
        for above in path.resolve().parents:
            if _ADDRESS.fullmatch(above.name) is None:
                return (above.name if above.name.startswith("pci") else "", tuple(reversed(bridges)))
            if above not in self._bridges:
                self._bridges[above] = _bridge(above)
            bridges.append(self._bridges[above])
        return "", ()

    @cached_property
    def _nvswitches(self) -> tuple[str, ...]:
        """The addresses of the NVSwitches among all devices of the host."""
        return tuple(
            name
            for name in _names(self._devices)
            if _hex(self._devices / name / "class") == _NVSWITCH_CLASS
            and _hex(self._devices / name / "vendor") == _NVIDIA
        )


def _bridge(path: Path) -> PciBridge:
    configuration = _configuration(path)
    express = _find(configuration, _EXPRESS)
    kind = None if express is None else _KINDS.get(_word(configuration, express + 2) >> 4 & 0xF)
    acs = _find_extended(configuration, _ACS)
    subsystem = _hex(path / "subsystem_vendor")
    control = 0 if acs is None else _word(configuration, acs + 6)
    return PciBridge(
        address=path.name,
        name=f"{_hex(path / 'vendor'):04x}:{_hex(path / 'device'):04x}",
        subsystem=f"{subsystem:04x}:{_hex(path / 'subsystem_device'):04x}" if subsystem else "",
        kind=kind,
        link=_link(path),
        acs=None if acs is None else Acs(bool(control & _REDIRECTS), bool(control & _DIRECT_TRANSLATED)),
    )


def _configuration(path: Path) -> bytes:
    """Return as much of the configuration space as this process may read; nothing where it may read none."""
    try:
        with (path / "config").open("rb", buffering=0) as config:
            return config.read(_CONFIGURATION_SPACE)
    except OSError:
        return b""


def _find(configuration: bytes, identifier: int) -> int | None:
    """Return where the capability *identifier* of the first 256 bytes is; ``None`` if it cannot be seen."""
    if len(configuration) < _FIRST_EXTENDED or not _word(configuration, _STATUS) & _HAS_CAPABILITIES:
        return None
    at, seen = configuration[_CAPABILITIES] & 0xFC, set[int]()
    while at >= _STANDARD_HEADER and at not in seen:
        if configuration[at] == identifier:
            return at
        seen.add(at)
        at = configuration[at + 1] & 0xFC
    return None


def _find_extended(configuration: bytes, identifier: int) -> int | None:
    """Return where the extended capability *identifier* is; ``None`` if there is none or it cannot be seen."""
    at, seen = _FIRST_EXTENDED, set[int]()
    while len(configuration) == _CONFIGURATION_SPACE and at >= _FIRST_EXTENDED and at not in seen:
        header = int.from_bytes(configuration[at : at + 4], "little")
        if header & 0xFFFF == identifier:
            return at
        seen.add(at)
        at = header >> 20 & 0xFFC
    return None


def _has_ats(configuration: bytes) -> bool | None:
    if len(configuration) < _CONFIGURATION_SPACE:
        return None
    return _find_extended(configuration, _ATS) is not None


def _word(configuration: bytes, at: int) -> int:
    return int.from_bytes(configuration[at : at + 2], "little")


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


def why_wedged(path: Path) -> str | None:
    """Return by what the device with the directory *path* is seen to be out of order; ``None`` if it is not."""
    link = _link(path)
    return wedged_reason(silent=is_silent(path), link=None if (path / "physfn").exists() else link)


def reset_methods(path: Path) -> str:
    """Return the kernel's reset methods for the device with the directory *path*, such as ``flr bus``; empty if it has none."""
    return _line(path / "reset_method")


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
            yield GroupMember(name, None if is_harmless else driver, _hex(path / "class") >> 8 == BRIDGE)


def _bars(path: Path) -> Iterator[Bar]:
    for number, line in enumerate(_line(path / "resource").splitlines()[:_BARS]):
        first, last, flags = (int(word, 16) for word in line.split())
        if flags & _MEM and last > first:
            sizes = _hex(path / f"resource{number}_resize")  # bit n: 2^n MiB
            largest = _MIB << sizes.bit_length() - 1 if sizes else 0
            yield Bar(last - first + 1, bool(flags & _MEM_64 and flags & _PREFETCH), largest)


def _link(path: Path) -> PciLink | None:
    width, best_width = (_line(path / f"{which}_link_width") for which in ("current", "max"))
    if not width.isdecimal() or not best_width.isdecimal() or int(best_width) == _NO_LINK:
        return None
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
