"""The plan of PCI devices that are passed through; :mod:`runner.plan.passthrough` makes it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

import attrs

VfioBackend = Literal["legacy", "iommufd"]
ROOT_BUS = "pcie.0"
"""The guest's bus that everything is on which is on no NUMA node's bridge."""


@attrs.frozen
class DevicePlan:
    """One PCI device of the host."""

    address: str
    sysfs: PurePosixPath
    name: str
    driver: str
    """The driver it is bound to, and must be bound to again when the guest has ended."""
    vfio_backend: VfioBackend
    group_node: PurePosixPath | None
    """The node of its IOMMU group, which QEMU opens with ``legacy``. With ``iommufd`` it shows whether the device is free,
    and is ``None`` where it is not here."""
    device_node: PurePosixPath | None
    """The node whose descriptor QEMU inherits; ``None`` with ``legacy``."""
    lent_to: int | None
    """The user id that owns the group's node while QEMU opens it: QEMU takes only its path."""
    bus: str
    """The guest's bus that its root port is on."""
    host_numa_node: int
    """-1 where the firmware does not say it."""
    guest_numa_node: int | None
    """``None`` where the guest has no NUMA node for it."""
    memory: int
    """Bytes of all of its regions."""
    properties: tuple[tuple[str, object], ...]
    rom: bool


@attrs.frozen
class PassthroughPlan:
    """All PCI devices that are passed through, and what they share."""

    devices: tuple[DevicePlan, ...] = ()
    iommufd: PurePosixPath | None = None
    """``/dev/iommu``, if a device uses it."""
    window: int | None = None
    """Bytes of guest addresses above its RAM for the devices' regions; ``None``: QEMU's 32 GiB are enough."""
