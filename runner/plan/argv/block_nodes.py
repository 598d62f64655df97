"""A disk as QEMU's block nodes and device, the same on the command line and over QMP (``qapi/block-core.json``).

A node comes after the nodes that it refers to. QEMU follows no path in an image's header: the backing file of an image is
given as a node, or as ``null`` if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from runner.plan.disks import DiskPlan, Layer

Options = dict[str, object]
FileName = Callable[[str], str]
"""Returns the path by which QEMU opens the file of that name, such as ``disk0`` or ``disk0-base1``."""


def block_nodes(disk: DiskPlan, file_name: FileName) -> Iterator[Options]:
    """Yield the block nodes of *disk*, its own last."""
    below: str | None = None
    for name, layer in reversed(list(disk.below())):
        yield _file(name, layer, file_name(name), {"read-only": True})
        yield _image(name, layer.format, below, {"read-only": True})
        below = name
    room: Options = {"discard": "unmap" if disk.discard else "ignore"}
    if disk.detect_zeroes != "off":
        room["detect-zeroes"] = disk.detect_zeroes
    if disk.overlay is None:
        cache: Options = {"cache": {"direct": True}} if disk.direct else {}
        use: Options = {"read-only": disk.read_only, "discard": room["discard"]}
        yield _file(disk.name, disk.layers[0], file_name(disk.name), {**use, **cache, "aio": disk.aio})
        yield _image(disk.name, disk.layers[0].format, below, {"read-only": disk.read_only, **room})
        return
    written: Options = {"read-only": False, "discard": room["discard"]}
    scratch = Layer(disk.path, "qcow2")
    # Data that is lost when the instance ends need not be flushed.
    yield _file(disk.name, scratch, file_name(disk.name), {**written, "cache": {"no-flush": True}, "aio": disk.aio})
    limit: Options = {"driver": "raw", "node-name": f"{disk.name}-limit", "file": f"{disk.name}-file"}
    yield {**limit, "size": disk.overlay.limit, **written, "auto-read-only": False}
    yield {**_image(disk.name, "qcow2", below, {"read-only": False, **room}), "file": f"{disk.name}-limit"}


def _file(name: str, layer: Layer, filename: str, more: Options) -> Options:
    driver = "host_device" if layer.block else "file"
    locking: Options = {"locking": "off"} if layer.lockless else {}
    # auto-read-only would reopen the file, which an inherited descriptor cannot be.
    node: Options = {"driver": driver, "node-name": f"{name}-file", "filename": filename, "auto-read-only": False}
    return {**node, **locking, **more}


def _image(name: str, format_: str, below: str | None, more: Options) -> Options:
    backing: Options = {"backing": below} if format_ == "qcow2" else {}
    return {"driver": format_, "node-name": name, "file": f"{name}-file", **backing, "auto-read-only": False, **more}


def disk_device(disk: DiskPlan, *, bus: str | None = None, boot_index: int | None = None) -> Options:
    """Return the virtio device of *disk*.

    An error of the file is an error of the guest's request, for writes too: by default QEMU stops the guest when there
    is no space left, and nothing would continue it.
    """
    device: Options = {"driver": "virtio-blk-pci", "id": disk.name, "drive": disk.name}
    if bus is not None:
        device["bus"] = bus
    if boot_index is not None:
        device["bootindex"] = boot_index
    if disk.serial is not None:
        device["serial"] = disk.serial
    if disk.iothread:
        device["iothread"] = disk.name
    logical, physical = disk.sectors
    if (logical, physical) != (512, 512):
        device |= {"logical_block_size": logical, "physical_block_size": physical}
    if not disk.discard:
        device["discard"] = False
    if not disk.write_cache:
        device["write-cache"] = "off"
    return {**device, "werror": "report", "rerror": "report"}


def slot(number: int) -> str:
    """Return the id of the root port for the *number*-th disk that is attached later."""
    return f"slot{number}"
