"""The files of a disk, opened here and handed over as descriptors; and what QEMU tells of disks without being asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath

import trio

from runner.kernel import files
from runner.plan.disks import DiskPlan
from runner.protocol.qmp import QmpEvent

log = logging.getLogger(__name__)

TOLD_EVERY = 60.0
"""Seconds between two words about errors of the same kind on the same disk: a guest can make thousands a second."""


@contextmanager
def opened(disk: DiskPlan, directory: PurePosixPath) -> Iterator[dict[str, int]]:
    """Hold descriptors of all that *disk* needs, by the names its block nodes call them; *directory* takes an overlay."""
    with ExitStack() as held:
        if disk.overlay is None:
            top = files.opened(disk.path, write=disk.written, direct=disk.direct)
        else:
            from runner.kernel.disk_images import overlay

            top = overlay(directory, disk.overlay.size, disk.overlay.limit)
        numbers = {disk.name: held.enter_context(top)}
        for name, layer in disk.below():
            # What the spec names is its author's business; what a header names lies where it was found.
            reopened = files.opened if layer.path == disk.path else files.opened_in_place
            numbers[name] = held.enter_context(reopened(layer.path))
        yield numbers


class DiskEvents:
    """Hears QEMU's events about disks."""

    def __init__(self) -> None:
        self._gone: dict[str, trio.Event] = {}
        self._told: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def hear(self, event: QmpEvent) -> None:
        """Take in *event*, whatever it is about."""
        if event.name == "DEVICE_DELETED" and "device" in event.data:
            self.departure(str(event.data["device"])).set()
        elif event.name == "BLOCK_IO_ERROR":
            data = event.data
            self._tell(f"the disk {data.get('node-name')} has failed to {data.get('operation')}: {data.get('reason')}")

    def departure(self, device: str) -> trio.Event:
        """Return what is set when the guest has released *device*."""
        return self._gone.setdefault(device, trio.Event())

    def arrived(self, device: str) -> None:
        """Forget that a *device* of that name has gone before."""
        self._gone.pop(device, None)

    def _tell(self, sentence: str) -> None:
        now = trio.current_time()
        if now - self._told.get(sentence, -TOLD_EVERY) < TOLD_EVERY:
            self._untold[sentence] = self._untold.get(sentence, 0) + 1
            return
        self._told[sentence] = now
        again = self._untold.pop(sentence, 0)
        log.error("%s%s; the guest was told", sentence, f" ({again} more since it was last said)" if again else "")
