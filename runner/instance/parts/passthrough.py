"""PCI devices of the host: opened for QEMU, and checked to be as they were when QEMU has gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path, PurePosixPath

import trio

from runner.base.errors import HostError
from runner.instance.supervisor import Faults
from runner.kernel import files, pci, vfio
from runner.plan.passthrough_plan import DevicePlan, PassthroughPlan

CHECKED_EVERY = 0.1
"""Seconds between two checks: the kernel reports no event when an IOMMU group becomes free."""


@contextmanager
def opened_device_nodes(passthrough: PassthroughPlan) -> Iterator[dict[str, int]]:
    """Hold the descriptors that QEMU is to inherit, by PCI address, and ``iommufd``."""
    with ExitStack() as held:
        numbers = {
            device.address: held.enter_context(files.opened(device.device_node, write=True))
            for device in passthrough.devices
            if device.device_node is not None
        }
        if passthrough.iommufd is not None:
            numbers["iommufd"] = held.enter_context(files.opened(passthrough.iommufd, write=True))
        yield numbers


@contextmanager
def group_nodes_owned_by_qemu(faults: Faults, passthrough: PassthroughPlan) -> Iterator[None]:
    """Let QEMU's user own the nodes of IOMMU groups while the block runs; QEMU opens them once, before its greeting.

    Raises :exc:`~runner.base.errors.HostError` without CAP_CHOWN; the nodes that were given are taken back.
    """
    owners = {device.group_node: device.lent_to for device in passthrough.devices}
    with ExitStack() as held:
        for node, user_id in owners.items():
            if node is not None and user_id is not None:
                held.callback(_take_back, faults, node, vfio.change_owner(node, user_id))
        yield


def _take_back(faults: Faults, node: PurePosixPath, owner: int) -> None:
    with faults.recorded(f"take {node} back from QEMU's user"):
        vfio.change_owner(node, owner)


@asynccontextmanager
async def devices_returned(
    faults: Faults,
    passthrough: PassthroughPlan,
    within: float,
    in_pod_cgroup: Callable[[], AbstractContextManager[None]],
) -> AsyncIterator[None]:
    """Check at the end that every device is as it was: it answers, has its driver, and no process has it open.

    All devices together get *within* seconds. One that has not come back by then is a recorded fault. Nodes are opened
    *in_pod_cgroup*, whose device filter lets them be.
    """
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            deadline = trio.current_time() + within
            for device in passthrough.devices:
                with faults.recorded(f"get the device {device.address} back"):
                    await _returned(device, deadline, in_pod_cgroup)


async def _returned(
    device: DevicePlan, deadline: float, in_pod_cgroup: Callable[[], AbstractContextManager[None]]
) -> None:
    while (reason := _why_not_returned(device, in_pod_cgroup)) is not None:
        if trio.current_time() >= deadline:
            raise HostError(reason)
        await trio.sleep(CHECKED_EVERY)


def _why_not_returned(device: DevicePlan, in_pod_cgroup: Callable[[], AbstractContextManager[None]]) -> str | None:
    sysfs = Path(device.sysfs)
    if not sysfs.exists():
        return "it has gone from the bus"
    driver = pci.driver_of(sysfs)
    if driver != device.driver:
        return f"it is bound to {repr(driver) if driver else 'no driver'} now, not to {device.driver!r}"
    if pci.is_silent(sysfs):
        return "it does not answer: its configuration space reads as nothing but ones"
    if pci.has_lost_link(sysfs):
        return "its PCI Express link is down after the reset; switch the machine off and on"
    if device.group_node is not None:
        with in_pod_cgroup():
            node = vfio.probe_node(device.group_node)
        if node.error is not None:
            return f"{node.path}: {node.error}"
    return None
