"""QEMU's events: for each event of its schema the handler or the reason why there is none; and the handler of events about disks.

A test compares them with the schema of the QEMU at hand.

An event of a newer QEMU that is not here is logged, so that what it reports is not dropped in silence.
"""

from __future__ import annotations

import logging

import trio

from runner.base.events import InstanceEvent
from runner.base.rate_limit import LogRateLimit
from runner.protocol.qmp import QmpEvent

log = logging.getLogger(__name__)

HANDLED: dict[str, str] = {
    "BLOCK_IMAGE_CORRUPTED": "logged; a fatal one makes the disk unusable for the guest",
    "BLOCK_IO_ERROR": "logged; the guest gets the error",
    "DEVICE_DELETED": "the guest has released a disk or a vCPU",
    "GUEST_CRASHLOADED": "not ready until the reset that follows the dump",
    "GUEST_PANICKED": "the end of the guest",
    "MEMORY_FAILURE": "logged",
    "MIGRATION": "progress of an update of QEMU",
    "RESET": "the guest begins anew: its sign is waited for again",
    "RESUME": "the guest runs again",
    "SHUTDOWN": "the end of the guest",
    "STOP": "QEMU is asked why",
    "SUSPEND": "not ready until it wakes up",
    "VSERPORT_CHANGE": "the guest agent has come or gone",
    "WAKEUP": "the guest runs again",
    "WATCHDOG": "the end of the guest, or logged",
}
"""Event → its meaning for the instance."""

_NO_DEVICE = "the machine has no such device"
_NO_JOB = "no job runs: neither backup nor mirror, and operators may begin none"
_NO_MIGRATION = "QEMU is updated on the same host by other means"
_OWN = "consequence of a command of this program, whose reply says more"
_OTHER_MACHINES = "of machines for other architectures"

IGNORED: dict[str, str] = {
    "ACPI_DEVICE_OST": "the guest's remark about a vCPU or a memory module that comes or goes; its result is waited for",
    "BALLOON_CHANGE": _NO_DEVICE,
    "BLOCK_EXPORT_DELETED": "nothing is exported",
    "BLOCK_JOB_CANCELLED": _NO_JOB,
    "BLOCK_JOB_COMPLETED": _NO_JOB,
    "BLOCK_JOB_ERROR": _NO_JOB,
    "BLOCK_JOB_PENDING": _NO_JOB,
    "BLOCK_JOB_READY": _NO_JOB,
    "BLOCK_WRITE_THRESHOLD": "no threshold is set",
    "COLO_EXIT": _NO_MIGRATION,
    "CPU_POLARIZATION_CHANGE": _OTHER_MACHINES,
    "DEVICE_TRAY_MOVED": "the CD drive of cloud-init's documents may be opened",
    "DEVICE_UNPLUG_GUEST_ERROR": "the guest keeps a vCPU; its release is waited for, and its absence reported",
    "DUMP_COMPLETED": "no dump is made",
    "FAILOVER_NEGOTIATED": _NO_DEVICE,
    "GUEST_PVSHUTDOWN": "the guest says that it begins to shut down; SHUTDOWN follows",
    "HV_BALLOON_STATUS_REPORT": _NO_DEVICE,
    "JOB_STATUS_CHANGE": _NO_JOB,
    "MEMORY_DEVICE_SIZE_CHANGE": _NO_DEVICE,
    "MEM_UNPLUG_ERROR": _NO_DEVICE,
    "MIGRATION_PASS": _NO_MIGRATION,
    "NETDEV_STREAM_CONNECTED": _NO_DEVICE,
    "NETDEV_STREAM_DISCONNECTED": _NO_DEVICE,
    "NETDEV_VHOST_USER_CONNECTED": _OWN,
    "NETDEV_VHOST_USER_DISCONNECTED": "passt has ended, which its own end reports",
    "NIC_RX_FILTER_CHANGED": "networks do not filter by what the guest's NIC takes",
    "POWERDOWN": _OWN,
    "PR_MANAGER_STATUS_CHANGED": _NO_DEVICE,
    "QUORUM_FAILURE": "no disk is a quorum",
    "QUORUM_REPORT_BAD": "no disk is a quorum",
    "RDMA_GID_STATUS_CHANGED": _NO_DEVICE,
    "RTC_CHANGE": "the guest has set its clock, which is the guest's",
    "SEV_MEASUREMENT": "guests with encrypted memory are not made",
    "SPICE_CONNECTED": _NO_DEVICE,
    "SPICE_DISCONNECTED": _NO_DEVICE,
    "SPICE_INITIALIZED": _NO_DEVICE,
    "SPICE_MIGRATE_COMPLETED": _NO_DEVICE,
    "SUSPEND_DISK": "a guest that hibernates ends with SHUTDOWN",
    "UNPLUG_PRIMARY": _NO_DEVICE,
    "VFIO_MIGRATION": _NO_MIGRATION,
    "VFU_CLIENT_HANGUP": _NO_DEVICE,
    "VNC_CONNECTED": "this program hands clients over itself",
    "VNC_DISCONNECTED": "this program hands clients over itself",
    "VNC_INITIALIZED": "this program hands clients over itself",
}
"""Event → the reason why it is ignored."""


class DiskEvents:
    """QEMU's events about disks: released devices, and errors, which are logged."""

    def __init__(self, log_limit: LogRateLimit) -> None:
        self._unplugged: dict[str, trio.Event] = {}
        self._log_limit = log_limit

    def handle(self, event: QmpEvent) -> None:
        """Handle *event*, if it is about a disk."""
        if event.name == "DEVICE_DELETED":
            # Only for attached devices: QEMU may be under the guest's control, and name devices without end.
            if (known := self._unplugged.get(str(event.data.get("device")))) is not None:
                known.set()
        elif event.name == "BLOCK_IO_ERROR":
            self._report(event.data.get("node-name"), event.data.get("operation"), event.data.get("reason"))

        elif event.name == "BLOCK_IMAGE_CORRUPTED":
            disk = event.data.get("node-name") or event.data.get("device")
            self._log_limit.log(log.error, InstanceEvent.DISK_CORRUPTED, disk, event.data.get("msg"), peer=str(disk))

    def unplugged(self, device: str) -> trio.Event:
        """Return an event that is set when the guest has released *device*."""
        return self._unplugged.setdefault(device, trio.Event())

    @property
    def all_unplugged(self) -> tuple[str, ...]:
        """The devices that the guest has released."""
        return tuple(device for device, event in self._unplugged.items() if event.is_set())

    def watch(self, device: str) -> None:
        """Watch for the release of *device*, which is attached now, regardless of an earlier device of this name."""
        self._unplugged[device] = trio.Event()

    def _report(self, disk: object, operation: object, reason: object) -> None:
        kind = "disk write" if operation == "write" else "disk read"
        self._log_limit.log(log.error, InstanceEvent.DISK_FAILED, disk, operation, reason, kind=kind, peer=str(disk))
