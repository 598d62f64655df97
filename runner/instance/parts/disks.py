"""The files of a disk, opened here and inherited by QEMU as descriptors; and QEMU's events about disks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath

import trio

from runner.base.events import InstanceEvent
from runner.base.rate_limit import LogRateLimit
from runner.kernel import files
from runner.plan.disks import DiskPlan
from runner.protocol.qmp import QmpEvent

log = logging.getLogger(__name__)


@contextmanager
def opened(disk: DiskPlan, directory: PurePosixPath) -> Iterator[dict[str, int]]:
    """Hold descriptors of every file of *disk*, by the names of its block nodes; an overlay is made in *directory*."""
    with ExitStack() as held:
        if disk.overlay is None:
            top = files.opened(disk.path, write=disk.written, direct=disk.direct)
        else:
            from runner.kernel.disk_images import overlay

            top = overlay(directory, disk.overlay.size, disk.overlay.limit)
        numbers = {disk.name: held.enter_context(top)}
        for name, layer in disk.below():
            # A path in the spec is its author's choice; one in an image's header must still lead where it was found.
            reopened = files.opened if layer.path == disk.path else files.opened_in_place
            numbers[name] = held.enter_context(reopened(layer.path))
        yield numbers


class DiskEvents:
    """QEMU's events about disks: what was unplugged, and errors, which are logged."""

    def __init__(self, log_limit: LogRateLimit) -> None:
        self._unplugged: dict[str, trio.Event] = {}
        self._log_limit = log_limit

    def handle(self, event: QmpEvent) -> None:
        """Handle *event*, which may be about something else."""
        if event.name == "DEVICE_DELETED":
            # Only of what was attached: QEMU may be the guest's, and name devices without end.
            if (known := self._unplugged.get(str(event.data.get("device")))) is not None:
                known.set()
        elif event.name == "BLOCK_IO_ERROR":
            self._report(event.data.get("node-name"), event.data.get("operation"), event.data.get("reason"))

        elif event.name == "BLOCK_IMAGE_CORRUPTED":
            disk = event.data.get("node-name") or event.data.get("device")
            if (more := self._log_limit.due("disk corrupted", str(disk))) is not None:
                log.error(InstanceEvent.DISK_CORRUPTED, disk, event.data.get("msg"), more)

    def unplugged(self, device: str) -> trio.Event:
        """Return an event that is set when the guest has released *device*."""
        return self._unplugged.setdefault(device, trio.Event())

    @property
    def all_unplugged(self) -> tuple[str, ...]:
        """The devices that the guest has released."""
        return tuple(device for device, event in self._unplugged.items() if event.is_set())

    def watch(self, device: str) -> None:
        """Watch for the release of a *device* that is attached now, whatever an earlier one of this name has done."""
        self._unplugged[device] = trio.Event()

    def _report(self, disk: object, operation: object, reason: object) -> None:
        kind = "disk write" if operation == "write" else "disk read"
        if (more := self._log_limit.due(kind, str(disk))) is not None:
            log.error(InstanceEvent.DISK_FAILED, disk, operation, reason, more)
