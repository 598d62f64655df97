"""Fake PCI devices: the sysfs and the device nodes of a recorded host, as ordinary files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import attrs

from runner.facts.pci import Bar, DeviceNode, VfioFacts
from runner.facts.roots import Roots
from runner.kernel.pci import read_pci_facts
from runner.plan.instance import InstancePlan
from runner.plan.passthrough_plan import ROOT_BUS, DevicePlan, PassthroughPlan, PciPort, VfioBackend
from runner.plan.passthrough_planner import tree_window

RECORDS = Path(__file__).parents[1] / "data" / "pci"
Record = dict[str, Any]


def recorded_pci(name: str) -> list[Record]:
    """Return the recorded sysfs attributes of a host's devices; regions are ``[number, size, flags]``.

    Optional are: ``parent``, the address of the bridge above it or its host bridge (``pci0000:15``); ``kind`` of a bridge;
    ``acs``, the control register of its capability; ``ats``; ``d3cold_allowed``; ``physfn``; ``resize``, the sizes of
    regions (bit n: 2^n MiB) by their number; ``subsystem``, its vendor and device.
    """
    records: list[Record] = json.loads((RECORDS / f"{name}.json").read_text())
    return records


def fake_pci_tree(root: Path, records: Sequence[Record]) -> Path:
    """Write *records* below *root*, with the nodes that VFIO creates for the devices bound to it, and return *root*."""
    devices, nodes = root / "sys/bus/pci/devices", root / "dev"
    (nodes / "vfio/devices").mkdir(parents=True)
    for node in ("iommu", "vfio/vfio"):
        (nodes / node).touch()
    devices.mkdir(parents=True)
    parents = {record["address"]: record.get("parent") for record in records}
    for number, record in enumerate(records):
        path = devices / record["address"]
        _link(path, root / "sys/devices" / _way(record["address"], parents)) if record.get("parent") else path.mkdir()
        for file in ("vendor", "device", "class", "numa_node", "reset_method"):
            (path / file).write_text(f"{record[file]}\n")
        (path / "resource").write_text(_resource({bar[0]: bar for bar in record["bars"]}))
        _write_optional(path, record)
        if record["link"]:
            names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
            for file, value in zip(names, record["link"], strict=True):
                (path / file).write_text(f"{value}\n")
        if record["driver"]:
            _link(path / "driver", root / "sys/bus/pci/drivers" / record["driver"])
        if record["group"]:
            group = root / "sys/kernel/iommu_groups" / record["group"]
            _link(path / "iommu_group", group)
            _link(group / "devices" / record["address"], path)
        if record["driver"] == "vfio-pci":
            (path / f"vfio-dev/vfio{number}").mkdir(parents=True)
            (nodes / f"vfio/devices/vfio{number}").touch()
            (nodes / "vfio" / record["group"]).touch()
    return root


def vfio_facts(root: Path, records: Sequence[Record], **values: Any) -> VfioFacts:
    """Return the facts of a host with *records* below *root*, on which all of VFIO can be used; *values* replace some."""
    fake_pci_tree(root, records)
    facts = VfioFacts(
        devices=read_pci_facts((record["address"] for record in records), Roots.below(root)),
        environment={"ALL": ",".join(record["address"] for record in records if record["driver"] == "vfio-pci")},
        container=DeviceNode(PurePosixPath("/dev/vfio/vfio"), None, everyone=True),
        iommufd=DeviceNode(PurePosixPath("/dev/iommu")),
    )
    return attrs.evolve(facts, **values)


def with_devices(plan: InstancePlan, root: Path, *backends: VfioBackend, devices_back: float = 2.0) -> InstancePlan:
    """Return *plan* with a fake device for each of *backends*; QEMU runs as the user with the number 65534.

    At the end the devices are waited for, at most *devices_back* seconds.
    """
    records = [record for record in recorded_pci("hgx-h100") if record["driver"] == "vfio-pci"][: len(backends)]
    fake_pci_tree(root, records)
    facts = read_pci_facts((record["address"] for record in records), Roots.below(root))
    devices = []
    for fact, backend in zip(facts.values(), backends, strict=True):
        assert fact.group_node is not None
        assert fact.device_node is not None
        devices.append(
            DevicePlan(
                address=fact.address,
                sysfs=fact.sysfs,
                name=fact.name,
                driver="vfio-pci",
                vfio_backend=backend,
                group_node=fact.group_node.path,
                device_node=fact.device_node.path if backend == "iommufd" else None,
                lent_to=65534 if backend == "legacy" else None,
                bus="pcie.0",
                host_numa_node=fact.numa_node,
                guest_numa_node=None,
                memory=0,
                properties=(),
                rom=False,
            )
        )
    iommufd = PurePosixPath(root / "dev/iommu") if "iommufd" in backends else None
    passthrough = PassthroughPlan(tuple(devices), iommufd)
    shutdown = attrs.evolve(plan.shutdown, devices_back=devices_back)
    return attrs.evolve(plan, machine=attrs.evolve(plan.machine, passthrough=passthrough), shutdown=shutdown)


def _write_optional(path: Path, record: Record) -> None:
    (path / "config").write_bytes(_configuration(record))
    if "d3cold_allowed" in record:
        (path / "d3cold_allowed").write_text(f"{record['d3cold_allowed']}\n")
    if "subsystem" in record:
        for which, number in zip(("vendor", "device"), record["subsystem"], strict=True):
            (path / f"subsystem_{which}").write_text(f"{number}\n")
    if record.get("physfn"):
        _link(path / "physfn", path.parent / record["physfn"])
    for region, sizes in record.get("resize", {}).items():
        (path / f"resource{region}_resize").write_text(f"{sizes:016x}\n")


def _way(address: str, parents: Mapping[str, str | None]) -> str:
    above = parents.get(address)
    return f"{_way(above, parents)}/{address}" if above else address


def _configuration(record: Record) -> bytes:
    """Return the configuration space as far as a process without rights sees it, or all of it if capabilities are recorded."""
    if record.get("silent"):
        return b"\xff" * 64
    if not record.keys() & {"kind", "acs", "ats"}:
        return b"\xde" * 64
    space = bytearray(4096)
    space[0x06], space[0x34] = 0x10, 0x40
    space[0x40:0x44] = bytes((0x01, 0x60, 0, 0))  # power management
    kind = {"root port": 4, "upstream port": 5, "downstream port": 6, "bridge": 7}.get(record.get("kind", ""), 0)
    space[0x60:0x64] = bytes((0x10, 0, kind << 4 | 2, 0))
    extended = [(0x0D, record["acs"])] if record.get("acs") is not None else []
    extended += [(0x0F, 0)] if record.get("ats") else []
    at = 0x100
    for index, (identifier, control) in enumerate([(0x01, 0), *extended]):
        following = at + 0x40 if index < len(extended) else 0
        space[at : at + 4] = (following << 20 | 1 << 16 | identifier).to_bytes(4, "little")
        space[at + 6 : at + 8] = int(control).to_bytes(2, "little")
        at += 0x40
    return bytes(space)


def _resource(bars: Mapping[int, Sequence[Any]]) -> str:
    lines = []
    for number in range(13):
        _, size, flags = bars.get(number, (number, 0, "0x0"))
        start = 0x380000000000 if size else 0
        lines.append(f"0x{start:016x} 0x{start + max(size - 1, 0):016x} 0x{int(flags, 16):016x}\n")
    return "".join(lines)


def _link(path: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def bar_window(devices: Iterable[Iterable[Bar]]) -> int:
    """Return the size of the address window for *devices*, each behind a root port of its own."""
    bars = {f"port{index}": tuple(each) for index, each in enumerate(devices)}
    return tree_window([PciPort(name, "root", ROOT_BUS, None, 0) for name in bars], bars)
