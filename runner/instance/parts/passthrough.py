"""PCI devices of the host: opened for QEMU, and checked to be in their former state after QEMU has ended."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path, PurePosixPath

import trio

from runner.base.errors import HostError, explain
from runner.base.values import frozen
from runner.instance.supervisor import Faults, Supervisor
from runner.kernel import files, pci, vfio
from runner.kernel.child_processes import Command, Process
from runner.plan.instance import InstancePlan
from runner.plan.passthrough_plan import DevicePlan, PassthroughPlan

CHECKED_EVERY = 0.1
"""Seconds between two checks: the kernel reports no event when an IOMMU group becomes free."""


@contextmanager
def opened_device_nodes(passthrough: PassthroughPlan) -> Iterator[dict[str, int]]:
    """Hold the descriptors that QEMU is to inherit, by PCI address, and ``iommufd``."""
    with ExitStack() as stack:
        numbers = {
            device.address: stack.enter_context(files.opened(device.device_node, write=True))
            for device in passthrough.devices
            if device.device_node is not None
        }
        if passthrough.iommufd is not None:
            numbers["iommufd"] = stack.enter_context(files.opened(passthrough.iommufd, write=True))
        yield numbers


@contextmanager
def group_nodes_owned_by_qemu(faults: Faults, passthrough: PassthroughPlan) -> Iterator[None]:
    """Let QEMU's user own the nodes of IOMMU groups while the block runs; QEMU opens them once, before its greeting.

    Raises :exc:`~runner.base.errors.HostError` without CAP_CHOWN; nodes whose owner was changed get their former owner back.
    """
    owners = {device.group_node: device.lent_to for device in passthrough.devices}
    with ExitStack() as stack:
        for node, user_id in owners.items():
            if node is not None and user_id is not None:
                stack.callback(_take_back, faults, node, vfio.change_owner(node, user_id))
        yield


def _take_back(faults: Faults, node: PurePosixPath, owner: int) -> None:
    with faults.recorded(f"take {node} back from QEMU's user"):
        vfio.change_owner(node, owner)


@asynccontextmanager
async def devices_returned(
    supervisor: Supervisor, plan: InstancePlan, in_pod_cgroup: Callable[[], AbstractContextManager[None]]
) -> AsyncIterator[None]:
    """Check at the end that every device is as before: it answers, has its driver, and no process has it open.

    All devices share one part of the grace period. A device that is not as before by then is recorded as a fault. Nodes are opened
    *in_pod_cgroup*, whose device filter allows it.
    """
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            deadline = trio.current_time() + plan.shutdown.devices_back
            await _take_back_devices(supervisor, plan.machine.passthrough.devices, deadline, in_pod_cgroup)


@frozen
class _Left:
    """The reason why a device is not as before, and whether it is the device's own state."""

    reason: str
    wedged: bool = False


async def _take_back_devices(
    supervisor: Supervisor,
    devices: Iterable[DevicePlan],
    deadline: float,
    in_pod_cgroup: Callable[[], AbstractContextManager[None]],
) -> None:
    """Wait until all *devices* are as before; those that are wedged are reset once meanwhile.

    VFIO resets a device when its last user closes it (``vfio_pci_core_disable``), and does not report a failure.
    """
    resets: dict[str, Process] = {}
    left = {device.address: _Left("") for device in devices}
    while left:
        left = {device.address: why for device in devices if (why := _why_left(device, in_pod_cgroup)) is not None}
        if not left or trio.current_time() >= deadline:
            break
        for device in devices:
            wedged = device.address in left and left[device.address].wedged
            if wedged and device.address not in resets and pci.reset_methods(str(device.sysfs)):
                with suppress(HostError):  # no process can be started now
                    resets[device.address] = supervisor.processes.spawn(_reset_command(Path(device.sysfs)))
        await trio.sleep(CHECKED_EVERY)
    for device in devices:
        with supervisor.faults.recorded(f"get the device {device.address} back"):
            if (reset := resets.get(device.address)) is not None:
                await supervisor.processes.stop(reset, 0)
            if (why := left.get(device.address)) is not None and not why.wedged:
                raise HostError(why.reason)
            if why is not None:
                raise HostError(
                    f"it is wedged: {why.reason}, {_after_reset(Path(device.sysfs), reset)}",
                    remedy="switch the machine off and on: until then it is refused to every instance",
                )


def _reset_command(sysfs: Path) -> Command:
    """Return the command that resets the device by the first of its methods that works.

    Another process writes to sysfs, because the kernel waits up to a minute for a device that does not answer after the reset.
    """
    script = 'echo 1 >"$1"'
    return Command("device-reset", ("/bin/sh", "-c", script, "sh", str(sysfs / "reset")), level=logging.DEBUG)


def _after_reset(sysfs: Path, reset: Process | None) -> str:
    methods = pci.reset_methods(str(sysfs))
    if not methods:
        return "and has no reset of its own"
    if reset is None:
        return "and no process could be started to reset it"
    if reset.returncode == 0:
        return f"also after its reset ({methods})"
    return f"and its reset ({methods}) did not work: {' '.join(reset.last_lines) or 'it took too long'}"


def _why_left(device: DevicePlan, in_pod_cgroup: Callable[[], AbstractContextManager[None]]) -> _Left | None:
    try:
        reason = _why_not_released(device, in_pod_cgroup)
        if reason is not None:
            return _Left(reason)
        wedged = pci.why_wedged(str(device.sysfs))
    except HostError as error:
        return _Left(explain(error))
    return None if wedged is None else _Left(wedged, wedged=True)


def _why_not_released(device: DevicePlan, in_pod_cgroup: Callable[[], AbstractContextManager[None]]) -> str | None:
    sysfs = Path(device.sysfs)
    if not sysfs.exists():
        return "it has gone from the bus"
    driver = pci.driver_of(str(sysfs))
    if driver != device.driver:
        return f"it is bound to {repr(driver) if driver else 'no driver'} now, not to {device.driver!r}"
    if device.group_node is not None:
        with in_pod_cgroup():
            node = vfio.probe_node(device.group_node)
        if node.error is not None:
            return f"{node.path}: {node.error}"
    return None
