"""PCI devices in sysfs (``Documentation/ABI/testing/sysfs-bus-pci``, ``sysfs-kernel-iommu_groups``) and their VFIO nodes.

Capabilities are read from the configuration space (``include/uapi/linux/pci_regs.h``), of which a process without
CAP_SYS_ADMIN reads the first 64 bytes only (``pci_read_config``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import PurePosixPath

from runner.base.errors import doing
from runner.facts.pci import (
    ADDRESS,
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


def read_pci_facts(addresses: Iterable[str], roots: Roots) -> dict[str, PciFact]:
    """Return the devices at *addresses*, by address; missing ones are left out.

    Raises :exc:`~runner.base.errors.HostError` if one is there and cannot be read.
    """
    reader = _Reader(roots)
    return {fact.address: fact for fact in map(reader.device, addresses) if fact is not None}


class _Reader:
    """Reads once the facts that several devices share: the bridges above them, and the host's NVSwitches.

    Paths are strings here and below: twenty devices need two thousand paths, and one of pathlib takes 15 µs.
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._devices = str(roots.sys / "bus/pci/devices")
        self._bridges: dict[str, PciBridge] = {}

    def device(self, address: str) -> PciFact | None:
        """Return the device at *address*, ``None`` if there is none."""
        path = f"{self._devices}/{address}"
        if not os.path.exists(path):  # noqa: PTH110 - see above, and so below
            return None
        nodes = PurePosixPath(self._roots.dev) / "vfio"
        driver = _target_name(f"{path}/driver")
        group = _target_name(f"{path}/iommu_group")
        character_device = next(iter(_names(f"{path}/vfio-dev")), None)  # such as "vfio3"
        has_vfio_driver = driver == "vfio-pci" or character_device is not None
        vendor, device_class = _hex(f"{path}/vendor"), _hex(f"{path}/class")
        root, bridges = self._way(path)
        configuration = _configuration(path)
        return PciFact(
            address=address,
            sysfs=PurePosixPath(path),
            name=f"{vendor:04x}:{_hex(f'{path}/device'):04x}",
            driver=driver,
            vfio=has_vfio_driver,
            numa_node=int(_line(f"{path}/numa_node") or -1),
            group=group,
            members=tuple(_members(str(self._roots.sys), group, address)) if group is not None else (),
            bars=tuple(_bars(path)),
            silent=_is_ones(configuration),
            link=_link(path),
            resets=reset_methods(path),
            group_node=probe_node(nodes / group) if has_vfio_driver and group else None,
            device_node=probe_node(nodes / "devices" / character_device) if character_device else None,
            device_class=device_class,
            root=root,
            bridges=bridges,
            physical_function=_target_name(f"{path}/physfn") or "",
            ats=_has_ats(configuration),
            d3cold=_line(f"{path}/d3cold_allowed") == "1",
            nvswitches=self._nvswitches if vendor == _NVIDIA and is_gpu(device_class) else (),
        )

    def _way(self, path: str) -> tuple[str, tuple[PciBridge, ...]]:
        """Return the host bridge above the device with the directory *path*, and the bridges between them, topmost first."""
        bridges: list[PciBridge] = []
        above = os.path.realpath(path)
        while (above := os.path.dirname(above)) != "/":  # noqa: PTH120
            name = os.path.basename(above)  # noqa: PTH119
            if re.fullmatch(ADDRESS, name, re.ASCII) is None:
                return (name if name.startswith("pci") else "", tuple(reversed(bridges)))
            if above not in self._bridges:
                self._bridges[above] = _bridge(above, name)
            bridges.append(self._bridges[above])
        return "", ()

    @cached_property
    def _nvswitches(self) -> tuple[str, ...]:
        """The addresses of the NVSwitches among all devices of the host."""
        return tuple(
            name
            for name in _names(self._devices)
            if _hex(f"{self._devices}/{name}/class") == _NVSWITCH_CLASS
            and _hex(f"{self._devices}/{name}/vendor") == _NVIDIA
        )


def _bridge(path: str, address: str) -> PciBridge:
    configuration = _read(f"{path}/config")
    express = _find(configuration, _EXPRESS)
    kind = None if express is None else _KINDS.get(_word(configuration, express + 2) >> 4 & 0xF)
    acs = _find_extended(configuration, _ACS)
    subsystem = _hex(f"{path}/subsystem_vendor")
    control = 0 if acs is None else _word(configuration, acs + 6)
    return PciBridge(
        address=address,
        name=f"{_hex(f'{path}/vendor'):04x}:{_hex(f'{path}/device'):04x}",
        subsystem=f"{subsystem:04x}:{_hex(f'{path}/subsystem_device'):04x}" if subsystem else "",
        kind=kind,
        link=_link(path),
        acs=None if acs is None else Acs(bool(control & _REDIRECTS), bool(control & _DIRECT_TRANSLATED)),
    )


def _find(configuration: bytes, identifier: int) -> int | None:
    """Return the offset of the capability *identifier* in the first 256 bytes; ``None`` if it is absent or not readable."""
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
    """Return the offset of the extended capability *identifier*; ``None`` if it is absent or not readable."""
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


def _configuration(path: str) -> bytes:
    """Return as much of the configuration space as this process may read. Raises :exc:`~runner.base.errors.HostError`."""
    with (
        doing(f"read the configuration space of {path.rpartition('/')[2]}"),
        open(f"{path}/config", "rb", buffering=0) as config,  # noqa: PTH123
    ):
        return config.read(_CONFIGURATION_SPACE)


def _is_ones(configuration: bytes) -> bool:
    """Tell whether the configuration space reads as ones, because the device does not answer.

    The first word alone is not enough: a virtual function's vendor and device are all ones by the SR-IOV specification (3.4.1.1).
    """
    header = configuration[:_STANDARD_HEADER]
    return header == b"\xff" * len(header)


def why_wedged(path: str) -> str | None:
    """Return the visible sign that the device with the directory *path* is out of order; ``None`` if there is no such sign.

    Raises :exc:`~runner.base.errors.HostError` if it cannot be read.
    """
    silent, is_function = _is_ones(_configuration(path)), os.path.exists(f"{path}/physfn")  # noqa: PTH110
    return wedged_reason(silent=silent, link=None if is_function else _link(path))


def reset_methods(path: str) -> str:
    """Return the kernel's reset methods for the device with the directory *path*, such as ``flr bus``; empty if it has none."""
    return _line(f"{path}/reset_method")


def driver_of(path: str) -> str | None:
    """Return the driver that the device with the directory *path* is bound to."""
    return _target_name(f"{path}/driver")


def _members(sys: str, group: str, address: str) -> Iterator[GroupMember]:
    for name in _names(f"{sys}/kernel/iommu_groups/{group}/devices"):
        if name != address:
            path = f"{sys}/bus/pci/devices/{name}"
            driver = driver_of(path)
            # VFIO's own and pci-stub leave the device alone (drivers/vfio, vfio_dev_driver_allowed).
            is_harmless = driver in {"vfio-pci", "pci-stub"} or bool(_names(f"{path}/vfio-dev"))
            yield GroupMember(name, None if is_harmless else driver, _hex(f"{path}/class") >> 8 == BRIDGE)


def _bars(path: str) -> Iterator[Bar]:
    for number, line in enumerate(_line(f"{path}/resource").splitlines()[:_BARS]):
        first, last, flags = (int(word, 16) for word in line.split())
        if flags & _MEM and last > first:
            sizes = _hex(f"{path}/resource{number}_resize")  # bit n: 2^n MiB
            largest = _MIB << sizes.bit_length() - 1 if sizes else 0
            yield Bar(last - first + 1, bool(flags & _MEM_64 and flags & _PREFETCH), largest)


def _link(path: str) -> PciLink | None:
    width, best_width = (_line(f"{path}/{which}_link_width") for which in ("current", "max"))
    if not width.isdecimal() or not best_width.isdecimal() or int(best_width) == _NO_LINK:
        return None
    speed, best_speed = (_line(f"{path}/{which}_link_speed") for which in ("current", "max"))
    return PciLink(speed, int(width), best_speed, int(best_width))


def _read(path: str) -> bytes:
    """Return the content of the file *path*, or nothing if it cannot be read: not every kernel and device has every file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, _CONFIGURATION_SPACE)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _line(path: str) -> str:
    return _read(path).decode("ascii", "replace").strip()


def _hex(path: str) -> int:
    text = _line(path)
    return int(text, 16) if text else 0


def _target_name(link: str) -> str | None:
    try:
        return os.readlink(link).rpartition("/")[2]  # noqa: PTH115
    except OSError:
        return None


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208
    except OSError:
        return []
