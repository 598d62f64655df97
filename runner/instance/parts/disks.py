"""The files of disks, opened here and inherited by QEMU as descriptors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath

from runner.kernel import files
from runner.kernel.disk_images import overlay
from runner.plan.disks import DiskPlan


@contextmanager
def opened_disks(disks: Iterable[DiskPlan], directory: PurePosixPath) -> Iterator[dict[str, int]]:
    """Hold descriptors of every file of *disks*, by the names of their block nodes."""
    with ExitStack() as stack:
        numbers: dict[str, int] = {}
        for disk in disks:
            numbers |= stack.enter_context(opened(disk, directory))
        yield numbers


@contextmanager
def opened(disk: DiskPlan, directory: PurePosixPath) -> Iterator[dict[str, int]]:
    """Hold descriptors of every file of *disk*, by the names of its block nodes; an overlay is made in *directory*."""
    with ExitStack() as stack:
        if disk.overlay is None:
            top = files.opened(disk.path, write=disk.written, direct=disk.direct)
        else:
            top = overlay(directory, disk.overlay.size, disk.overlay.limit)
        numbers = {disk.name: stack.enter_context(top)}
        for name, layer in disk.below():
            # The spec's author chooses the paths in it; a path from an image's header must still lead to the file that was examined.
            reopened = files.opened if layer.path == disk.path else files.opened_in_place
            numbers[name] = stack.enter_context(reopened(layer.path))
        yield numbers
