"""The plan of PCI devices that are passed through; :mod:`runner.plan.passthrough` makes it."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from runner.values import frozen

VfioBackend = Literal["legacy", "iommufd"]
ROOT_BUS = "pcie.0"
"""The guest's bus for all devices that are not on the bridge of a NUMA node."""


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
    """The guest's bus that its root port is on."""
    host_numa_node: int
    """-1 where the firmware does not report it."""
    guest_numa_node: int | None
    """The guest's NUMA node of its bus; ``None`` if it is on the root bus."""
    memory: int
    """Bytes of all of its regions."""
    properties: tuple[tuple[str, object], ...]
    rom: bool


@frozen
class PassthroughPlan:
    """All PCI devices that are passed through, and what they share."""

    devices: tuple[DevicePlan, ...] = ()
    iommufd: PurePosixPath | None = None
    """``/dev/iommu``; ``None`` if no device uses it."""
    window: int | None = None
    """Bytes of guest addresses above its RAM for the devices' regions; ``None`` if QEMU's 32 GiB are enough."""
