"""Disks: from what is asked for and what was found at its paths to the files QEMU gets and how it uses them.

The same decisions are made for a disk the machine starts with and for one that is attached while it runs.

Why ``aio = "auto"`` never means io_uring: its kernel workers (``iou-wrk-…``) may run on the whole cpuset of whoever made
the ring (``io_uring/io-wq.c``: ``io_wq_create``), whatever the masks of QEMU's threads are, and the seccomp profiles of
Docker and containerd forbid it. ``io_submit(2)`` makes no thread at all, but waits where a write must find room on the
disk first, which is why it is chosen for block devices and files without holes; worker threads do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath

import attrs

from runner.facts.disk import MISSING, DiskFacts, FileFact
from runner.spec.instance import DiskSpec
from runner.spec.rules import format_size

LONGEST_CHAIN = 16
"""Files one image may take data from, in a row."""

Refuse = Callable[[str, str], None]
"""Takes the path of a key, and what is wrong with its value."""


@attrs.frozen
class Layer:
    """A file or block device that holds data of a disk."""

    path: PurePosixPath
    format: str
    block: bool = False
    """A block device."""


@attrs.frozen
class Overlay:
    """The file without a name that an ephemeral disk is written to."""

    size: int
    """Bytes the guest sees."""
    limit: int
    """Bytes the file may have; a write beyond is an error in the guest."""


@attrs.frozen
class DiskPlan:
    """One virtio disk."""

    name: str
    """``disk0``, …: of its device and of its topmost block node."""
    layers: tuple[Layer, ...]
    """What was named, and below it, one by one, what its data comes from."""
    overlay: Overlay | None
    """Lies above all of it."""
    read_only: bool
    serial: str | None
    direct: bool
    """What is written to, and that alone, is used past the page cache; what lies below may be others' too, and stays in it."""
    write_cache: bool
    """The guest is told that a write may not be on stable storage before a flush."""
    aio: str
    """``native``, ``io_uring`` or ``threads``."""
    discard: bool
    detect_zeroes: str
    iothread: bool
    sectors: tuple[int, int]
    """Bytes of a logical and of a physical block."""

    @property
    def path(self) -> PurePosixPath:
        """What the spec names."""
        return self.layers[0].path

    @property
    def written(self) -> bool:
        """Whether the guest writes to what the spec names."""
        return self.overlay is None and not self.read_only

    def below(self) -> Iterator[tuple[str, Layer]]:
        """Yield name and layer of all that is only read, from the top to the bottom."""
        layers = self.layers if self.overlay is not None else self.layers[1:]
        yield from ((f"{self.name}-base{number}", layer) for number, layer in enumerate(layers, 1))


def within(path: PurePosixPath, directories: Iterable[PurePosixPath]) -> bool:
    """Tell whether *path*, a real path, lies in one of *directories*."""
    return any(directory in path.parents for directory in directories)


def plan_disk(name: str, disk: DiskSpec, facts: DiskFacts, where: str, refuse: Refuse) -> DiskPlan:
    """Decide about *disk*; what cannot be done is told to *refuse*, with paths that begin with *where*."""
    fact = facts.files.get(disk.path, MISSING)
    direct, aio = _ways(disk, fact, facts.io_uring_error, where, refuse)
    layers = tuple(_layers(disk, fact, facts.files, where, refuse))
    size = 0 if fact.image is None else fact.image.size
    overlay = None
    if disk.ephemeral:
        # Data that has been written twice, and its metadata, may take a little more than the disk itself.
        overlay = Overlay(size, disk.ephemeral_size or size + size // 1024 + (64 << 20))
    return DiskPlan(
        name=name,
        layers=layers,
        overlay=overlay,
        read_only=disk.read_only,
        serial=disk.serial,
        direct=direct,
        write_cache=disk.cache != "writethrough",
        aio=aio,
        discard=disk.discard,
        detect_zeroes=disk.detect_zeroes,
        iothread=disk.iothread,
        sectors=fact.sectors,
    )


def _ways(disk: DiskSpec, fact: FileFact, io_uring_error: str | None, where: str, refuse: Refuse) -> tuple[bool, str]:
    """Decide whether the page cache is passed by, and how QEMU reads and writes."""
    if disk.ephemeral:
        return False, "threads"
    found = fact.image is not None
    direct = disk.cache == "none" or (disk.cache == "auto" and (fact.direct or disk.aio == "native"))
    if direct and found and not fact.direct:
        key = "cache" if disk.cache == "none" else "aio"
        refuse(
            f"{where}.{key}",
            f"{str(disk.path)!r} cannot be used past the page cache (O_DIRECT): its file system has no such thing; "
            'leave it out, or say cache = "writeback"',
        )
    if disk.aio == "io_uring" and io_uring_error is not None:
        refuse(f"{where}.aio", f"cannot use io_uring: {io_uring_error}; leave it out")
    if disk.aio != "auto":
        return direct, disk.aio
    allocated = fact.kind == "block" or (disk.format == "raw" and not fact.sparse)
    return direct, "native" if direct and (allocated or disk.read_only) else "threads"


def _layers(
    disk: DiskSpec, fact: FileFact, files: Mapping[PurePosixPath, FileFact], where: str, refuse: Refuse
) -> Iterator[Layer]:
    """Yield the layers of *disk* as far as there is nothing wrong with them."""
    path, format_, at = disk.path, disk.format, f"{where}.path"
    seen: list[PurePosixPath] = []
    while True:
        yield Layer(path, format_, fact.kind == "block")
        reason = _error(path, format_, fact, remedy="; set read_only = true if the guest shall not write" * disk.writes)
        if reason is not None:
            wrong_format = fact.image is not None and fact.image.format != format_
            refuse(f"{where}.format" if wrong_format and not seen else at, reason)
            return
        seen.append(path)
        backing = None if fact.image is None else fact.image.backing
        if backing is None or fact.image is None:
            return
        needs = f"{str(path)!r} takes data from {str(backing)!r}"
        if not within(backing, disk.backing):
            allowed = ", ".join(map(repr, map(str, disk.backing)))
            rule = (
                f"which is not in {allowed}" if allowed else "which is not followed unless backing names its directory"
            )
            refuse(at, f"{needs}, {rule}; flatten it with `qemu-img convert`, or name the directory in backing")
            return
        if backing in seen or len(seen) > LONGEST_CHAIN:
            refuse(
                at,
                f"{needs}, and so on without end"
                if backing in seen
                else f"{needs}: more than {LONGEST_CHAIN} in a row",
            )
            return
        if fact.image.backing_format not in {"raw", "qcow2"}:
            said = "no format" if fact.image.backing_format is None else f"the format {fact.image.backing_format!r}"
            refuse(at, f"{needs} and gives {said} for it; say it with `qemu-img rebase -u -F raw` (or qcow2)")
            return
        path, format_, fact = backing, fact.image.backing_format, files.get(backing, MISSING)


def _error(path: PurePosixPath, format_: str, fact: FileFact, *, remedy: str) -> str | None:
    """Return the first thing that is wrong with one layer."""
    return next(_errors(repr(str(path)), format_, fact, remedy), None)


def _errors(name: str, format_: str, fact: FileFact, remedy: str) -> Iterator[str]:
    image = fact.image
    if fact.kind == "missing":
        yield f"{name} does not exist"
    if fact.kind not in {"file", "block"}:
        yield f"{name} {fact.words}, not a file or block device"
    if fact.error is not None:
        yield f"cannot open {name}: {fact.error}{remedy}"
    if image is None:
        return
    if image.format != format_:
        yield f'is "{format_}", but {name} holds a {image.format} image'
    if image.error is not None:
        yield f"{name} {image.error}"
    if image.locked:
        yield f"{name} is in use by another process (QEMU's image lock); stop it first"
    if image.format == "raw" and (fact.size == 0 or fact.size % 512):
        yield f"{name} has {fact.size} bytes, a disk has a multiple of 512 and at least one sector"


def disk_words(disk: DiskPlan) -> str:
    """Return *disk* in words, for an operator."""
    mode = "read-only" if disk.read_only else "writable"
    if disk.overlay is not None:
        mode = f"ephemeral (at most {format_size(disk.overlay.limit)} written)"
    cache = "none" if disk.direct else "writeback" if disk.write_cache else "writethrough"
    parts = [str(disk.path), disk.layers[0].format, mode, f"cache {cache}", f"aio {disk.aio}"]
    if disk.iothread:
        parts.append("an iothread of its own")
    parts += [f"over {layer.path}" for layer in disk.layers[1:]]
    return ", ".join(parts)
