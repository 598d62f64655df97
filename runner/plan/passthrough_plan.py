"""The plan's values for PCI devices that the guest gets as its own; decided in :mod:`runner.plan.passthrough`."""

from __future__ import annotations

from pathlib import PurePosixPath

import attrs


@attrs.frozen
class DevicePlan:
    """One PCI device of the host."""

    address: str
    sysfs: PurePosixPath
    name: str
    driver: str
    """The driver it is bound to, and must be bound to again when the guest has gone."""
    way: str
    """``legacy`` or ``iommufd``."""
    group_node: PurePosixPath | None
    """What the group way opens; where iommufd is used, what tells whether the device is free, if it is here."""
    device_node: PurePosixPath | None
    """What is handed to QEMU; of ``iommufd`` only."""
    lent_to: int | None
    """The user who owns the group's node while QEMU opens it, by its path, which is the only way QEMU knows."""
    bus: str
    """The guest's bus that its root port is on."""
    host_numa_node: int
    guest_numa_node: int | None
    """``None`` where the guest is not told."""
    memory: int
    """Bytes of all of its regions."""
    properties: tuple[tuple[str, object], ...]
    rom: bool


@attrs.frozen
class PassthroughPlan:
    """All of them, and what they take together."""

    devices: tuple[DevicePlan, ...] = ()
    iommufd: PurePosixPath | None = None
    """The node of the IOMMU file descriptor, if one is used."""
    window: int | None = None
    """Bytes of guest addresses above its RAM for the devices' regions; ``None``: QEMU's 32 GiB will do."""
