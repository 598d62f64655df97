"""The slots of the guest's root bus: who takes one, and that there are enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runner.errors import Problem

if TYPE_CHECKING:
    from runner.plan.instance import MachinePlan

ROOT_BUS = "pcie.0"
SLOTS = 30
"""Of 32; q35 itself sits in the first and the last one."""
OWN = 2
"""pvpanic and the source of random numbers, which every guest has."""


def too_few_slots(machine: MachinePlan) -> Iterator[Problem]:
    """Yield why not everything of *machine* that :mod:`runner.plan.argv.qemu` puts on the root bus has a slot there."""
    guest, numa_nodes = machine.guest, len(machine.topology.numa_nodes)
    takers = {
        "disks": len(machine.disks),
        "networks": len(machine.networks),
        "shares": len(machine.shares),
        "devices": sum(device.bus == ROOT_BUS for device in machine.passing.devices),
        "for disks attached later (hotplug.disks)": machine.slots,
        "bridges of NUMA nodes": numa_nodes if numa_nodes > 1 else 0,
        "for agent, vsock, watchdog, screen and cloud-init": sum(
            (guest.agent, guest.vsock is not None, guest.watchdog is not None, machine.vnc, machine.seed is not None)
        ),
        "that every guest has": OWN,
    }
    wanted = sum(takers.values())
    if wanted <= SLOTS:
        return
    said = ", ".join(f"{number} {who}" for who, number in takers.items() if number)
    left = machine.slots - (wanted - SLOTS)
    remedy = (
        f"lower hotplug.disks to {left}" if left >= 0 else "give one instance fewer of them, and lower hotplug.disks"
    )
    yield Problem(
        "hotplug.disks" if left >= 0 else "",
        f"the guest's root bus has {SLOTS} slots, and {wanted} are wanted: {said}; {remedy}",
    )
