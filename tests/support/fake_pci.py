"""Fake PCI devices: the sysfs and the device nodes of a recorded host, as ordinary files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import attrs

from runner.facts.roots import Roots
from runner.kernel.pci import read_pci_device
from runner.plan.instance import InstancePlan
from runner.plan.passthrough_plan import DevicePlan, PassthroughPlan, VfioBackend

RECORDS = Path(__file__).parents[1] / "data" / "pci"
Record = dict[str, Any]


def recorded_pci(name: str) -> list[Record]:
    """Return the recorded sysfs attributes of a host's devices; regions are ``[number, size, flags]``."""
    records: list[Record] = json.loads((RECORDS / f"{name}.json").read_text())
    return records


def fake_pci_tree(root: Path, records: Sequence[Record]) -> Path:
    """Write *records* below *root*, with the nodes that VFIO creates for the devices bound to it, and return *root*."""
    devices, nodes = root / "sys/bus/pci/devices", root / "dev"
    (nodes / "vfio/devices").mkdir(parents=True)
    for node in ("iommu", "vfio/vfio"):
        (nodes / node).touch()
    for number, record in enumerate(records):
        path = devices / record["address"]
        path.mkdir(parents=True)
        for file in ("vendor", "device", "class", "numa_node", "reset_method"):
            (path / file).write_text(f"{record[file]}\n")
        (path / "resource").write_text(_resource({bar[0]: bar for bar in record["bars"]}))
        (path / "config").write_bytes(bytes.fromhex("ff" if record.get("silent") else "de") * 64)
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


def with_devices(plan: InstancePlan, root: Path, *backends: VfioBackend) -> InstancePlan:
    """Return *plan* with a fake device for each of *backends*; QEMU runs as the user with the number 65534."""
    records = [record for record in recorded_pci("hgx-h100") if record["driver"] == "vfio-pci"][: len(backends)]
    fake_pci_tree(root, records)
    devices = []
    for record, backend in zip(records, backends, strict=True):
        fact = read_pci_device(record["address"], Roots.below(root))
        assert fact is not None
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
    shutdown = attrs.evolve(plan.shutdown, devices_back=2.0)
    return attrs.evolve(plan, machine=attrs.evolve(plan.machine, passthrough=passthrough), shutdown=shutdown)


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
