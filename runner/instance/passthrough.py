"""PCI devices of the host: looked at before the start, handed to QEMU, and seen to be back when it has gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path, PurePosixPath

import attrs
import trio

from runner.errors import HostError
from runner.facts.pci import Bar, DeviceNode, GroupMember, PciFact, PciLink, VfioFacts
from runner.instance.supervisor import Supervisor
from runner.kernel import files, pci, vfio
from runner.kernel.procfs import Procfs
from runner.plan.passthrough import asked_devices
from runner.plan.passthrough_plan import DevicePlan, PassthroughPlan
from runner.spec.instance import InstanceSpec

LOOKED_AT_EVERY = 0.1
"""Seconds between two looks: nothing tells when an IOMMU group becomes free."""


def look_at_devices(
    spec: InstanceSpec, environment: Mapping[str, str], procfs: Procfs, qemu_version: str, root: Path = Path("/")
) -> VfioFacts:
    """Return what passing the devices of *spec* takes; device plugins have said in *environment* what they gave."""
    nodes = PurePosixPath(root / "dev")
    asked, _ = asked_devices(spec.device, environment)
    found = (look_at_device(each.address, root) for each in asked)
    return VfioFacts(
        devices={fact.address: fact for fact in found if fact is not None},
        environment=environment,
        container=_node(nodes / "vfio/vfio"),
        iommufd=_node(nodes / "iommu"),
        qemu_version=qemu_version,
        address_bits=procfs.address_bits(),
    )


def look_at_device(address: str, root: Path = Path("/")) -> PciFact | None:
    """Return what is to be known of the device at *address*, or ``None`` if there is none."""
    device = pci.read_device(address, root / "sys")
    if device is None:
        return None
    nodes = PurePosixPath(root / "dev/vfio")
    character = device.character_device
    return PciFact(
        address=address,
        sysfs=PurePosixPath(device.sysfs),
        name=device.name,
        driver=device.driver,
        vfio=device.vfio,
        numa_node=device.numa_node,
        group=device.group,
        members=tuple(GroupMember(each.address, each.driver, each.bridge) for each in device.members),
        bars=tuple(Bar(each.size, each.high) for each in device.bars),
        silent=device.silent,
        link=None if device.link is None else PciLink(**attrs.asdict(device.link)),
        resets=device.resets,
        group_node=_node(nodes / device.group) if device.vfio and device.group else None,
        device_node=_node(nodes / "devices" / character) if character else None,
    )


def _node(path: PurePosixPath) -> DeviceNode:
    found = vfio.look_at_node(path)
    return DeviceNode(path, found.error, found.busy, found.everyone)


@contextmanager
def handed_over(passing: PassthroughPlan) -> Iterator[dict[str, int]]:
    """Hold the descriptors that QEMU is to inherit, by PCI address, and ``iommufd``."""
    with ExitStack() as held:
        numbers = {
            device.address: held.enter_context(files.opened(device.device_node, write=True))
            for device in passing.devices
            if device.device_node is not None
        }
        if passing.iommufd is not None:
            numbers["iommufd"] = held.enter_context(files.opened(passing.iommufd, write=True))
        yield numbers


@contextmanager
def groups_lent(supervisor: Supervisor, passing: PassthroughPlan) -> Iterator[None]:
    """Let QEMU's user own the nodes of groups for as long as the block runs; QEMU opens them once, before it greets."""
    owners = {device.group_node: device.lent_to for device in passing.devices}
    with ExitStack() as lent:
        for node, uid in owners.items():
            if node is not None and uid is not None:
                lent.callback(_take_back, supervisor, node, vfio.give(node, uid))
        yield


def _take_back(supervisor: Supervisor, node: PurePosixPath, owner: int) -> None:
    with supervisor.faults.recorded(f"take {node} back from QEMU's user"):
        vfio.give(node, owner)


@asynccontextmanager
async def devices_passed(supervisor: Supervisor, passing: PassthroughPlan, patience: float) -> AsyncIterator[None]:
    """Hold nothing, but see at the end that every device is as it was: it answers, with its driver, and nobody has it.

    All of them together get *patience* seconds for it.
    """
    try:
        yield
    finally:
        with trio.CancelScope(shield=True):
            deadline = trio.current_time() + patience
            for device in passing.devices:
                with supervisor.faults.recorded(f"get the device {device.address} back"):
                    await _back(device, deadline)


async def _back(device: DevicePlan, deadline: float) -> None:
    while (reason := _missing(device)) is not None:
        if trio.current_time() >= deadline:
            raise HostError(reason)
        await trio.sleep(LOOKED_AT_EVERY)


def _missing(device: DevicePlan) -> str | None:
    sysfs = Path(device.sysfs)
    if not sysfs.exists():
        return "it has gone from the bus"
    driver = pci.driver_of(sysfs)
    if driver != device.driver:
        return f"it is bound to {repr(driver) if driver else 'no driver'} now, not to {device.driver!r}"
    if pci.is_silent(sysfs):
        return "it does not answer: its configuration space reads as nothing but ones"
    if device.group_node is not None:
        node = vfio.look_at_node(device.group_node)
        if node.error is not None:
            return f"{node.path}: {node.error}"
    return None
