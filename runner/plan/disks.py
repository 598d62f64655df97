"""The plan of the disks: the files of each, and how QEMU opens them.

The same decisions are made for a disk the machine starts with and for one that is attached while it runs.

Why ``aio = "auto"`` never means io_uring: its kernel workers (``iou-wrk-…``) may run on the whole cpuset of the process
that made the ring (``io_uring/io-wq.c``: ``io_wq_create``), whatever the masks of QEMU's threads are, and the seccomp
profiles of Docker and containerd forbid it. ``io_submit(2)`` makes no thread, but waits where a write must allocate
space first, so it is chosen for block devices and files without holes; worker threads serve all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal

from runner.facts.disk import MISSING, DiskFacts, FileFact, LateDiskFacts
from runner.facts.host import HostFacts
from runner.plan.problems import Problems
from runner.spec.instance import DetectZeroes, DiskFormat, DiskSpec
from runner.spec.rules import format_size
from runner.values import frozen

LONGEST_CHAIN = 16
"""Files in one chain of backing files."""

Aio = Literal["native", "io_uring", "threads"]


@frozen
class Layer:
    """A file or block device that holds data of a disk."""

    path: PurePosixPath
    format: DiskFormat
    block: bool = False
    """A block device."""


@frozen
class Overlay:
    """The unnamed file that holds the writes to an ephemeral disk."""

    size: int
    """Bytes the guest sees."""
    limit: int
    """Bytes the file may have; a write beyond them is an I/O error in the guest."""


@frozen
class DiskPlan:
    """One virtio disk."""

    name: str
    """``disk0``, …: the name of its device and of its topmost block node."""
    layers: tuple[Layer, ...]
    """The file that the spec names, then its backing files from the top to the bottom."""
    overlay: Overlay | None
    """Above all layers."""
    read_only: bool
    serial: str | None
    direct: bool
    """The topmost layer, which is written to, bypasses the page cache; backing files, which others may use too, do not."""
    write_cache: bool
    """The disk reports a volatile write cache: a write is on stable storage only after a flush."""
    aio: Aio
    discard: bool
    detect_zeroes: DetectZeroes
    iothread: bool
    sectors: tuple[int, int]
    """Bytes of a logical and of a physical block."""

    @property
    def path(self) -> PurePosixPath:
        """The file or block device that the spec names."""
        return self.layers[0].path

    @property
    def written(self) -> bool:
        """Whether the guest writes to the file or block device that the spec names."""
        return self.overlay is None and not self.read_only

    def below(self) -> Iterator[tuple[str, Layer]]:
        """Yield name and layer of each file that is only read, from the top to the bottom."""
        layers = self.layers if self.overlay is not None else self.layers[1:]
        yield from ((f"{self.name}-base{number}", layer) for number, layer in enumerate(layers, 1))


def within(path: PurePosixPath, directories: Iterable[PurePosixPath]) -> bool:
    """Tell whether *path*, a real path, lies in one of *directories*."""
    return any(directory in path.parents for directory in directories)


def plan_disks(disks: Sequence[DiskSpec], facts: HostFacts, problems: Problems) -> tuple[DiskPlan, ...]:
    """Decide about the disks that the machine starts with."""
    return tuple(
        plan_disk(f"disk{index}", disk, _facts_of(disk, facts), f"disk[{index}]", problems)
        for index, disk in enumerate(disks)
    )


def _facts_of(disk: DiskSpec, facts: HostFacts) -> DiskFacts:
    """Return the facts about *disk*; for a descriptor that is not inherited yet the spec is believed."""
    if disk.fd is None or facts.descriptors is not None:
        return facts
    return LateDiskFacts({disk.file: FileFact("file")}, facts.io_uring_error)


def plan_disk(name: str, disk: DiskSpec, facts: DiskFacts, where: str, problems: Problems) -> DiskPlan:
    """Decide about *disk*; the paths of its problems begin with *where*."""
    fact = facts.files.get(disk.file, MISSING)
    direct, aio = _access(disk, fact, facts.io_uring_error, where, problems)
    layers = tuple(_layers(disk, fact, facts.files, where, problems))
    size = 0 if fact.image is None else fact.image.size
    overlay = None
    if disk.ephemeral:
        # Data that was written twice, and metadata, may take a little more than the disk itself.
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


def _access(
    disk: DiskSpec, fact: FileFact, io_uring_error: str | None, where: str, problems: Problems
) -> tuple[bool, Aio]:
    """Decide whether the page cache is bypassed, and how QEMU reads and writes."""
    if disk.ephemeral:
        return False, "threads"
    found = fact.image is not None
    direct = disk.cache == "none" or (disk.cache == "auto" and (fact.direct or disk.aio == "native"))
    if direct and found and not fact.direct:
        key = "cache" if disk.cache == "none" else "aio"
        problems.refuse(
            f"{where}.{key}",
            f"{str(disk.file)!r} cannot be used past the page cache (O_DIRECT): its file system does not support it",
            'leave it out, or set cache = "writeback"',
        )
    if disk.aio == "io_uring" and io_uring_error is not None:
        problems.refuse(f"{where}.aio", f"cannot use io_uring: {io_uring_error}", "leave it out")
    if disk.aio != "auto":
        return direct, disk.aio
    allocated = fact.kind == "block" or (disk.format == "raw" and not fact.sparse)
    return direct, "native" if direct and (allocated or disk.read_only) else "threads"


def _layers(
    disk: DiskSpec, fact: FileFact, files: Mapping[PurePosixPath, FileFact], where: str, problems: Problems
) -> Iterator[Layer]:
    """Yield the layers of *disk* down to the first that cannot be used."""
    path, format_, at = disk.file, disk.format, f"{where}.path"
    seen: list[PurePosixPath] = []
    while True:
        yield Layer(path, format_, fact.kind == "block")
        error = next(_errors(repr(str(path)), format_, fact, writes=disk.writes), None)
        if error is not None:
            wrong_format = fact.image is not None and fact.image.format != format_
            problems.refuse(f"{where}.format" if wrong_format and not seen else at, *error)
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
            problems.refuse(
                at, f"{needs}, {rule}", "flatten it with `qemu-img convert`, or name the directory in backing"
            )
            return
        if backing in seen or len(seen) > LONGEST_CHAIN:
            end = ", and so on without end" if backing in seen else f": more than {LONGEST_CHAIN} in a row"
            problems.refuse(at, needs + end)
            return
        match fact.image.backing_format:
            case "raw":
                format_ = "raw"
            case "qcow2":
                format_ = "qcow2"
            case other:
                given = "no format" if other is None else f"the format {other!r}"
                remedy = "set it with `qemu-img rebase -u -F raw` (or qcow2)"
                problems.refuse(at, f"{needs} and gives {given} for it", remedy)
                return
        path, fact = backing, files.get(backing, MISSING)


def _errors(name: str, format_: DiskFormat, fact: FileFact, *, writes: bool) -> Iterator[tuple[str, str]]:
    """Yield the errors of one layer, each with its remedy, empty if there is none; *name* is its quoted path."""
    image = fact.image
    if fact.kind == "missing":
        yield f"{name} does not exist", ""
    if fact.kind not in {"file", "block"}:
        yield f"{name} {fact.words}, not a file or block device", ""
    if fact.error is not None:
        yield f"cannot open {name}: {fact.error}", _open_remedy(fact, writes=writes)
    if image is None:
        return
    if image.format != format_:
        yield f'is "{format_}", but {name} holds a {image.format} image', ""
    if image.error is not None:
        yield f"{name} {image.error}", ""
    if image.locked:
        yield f"{name} is in use by another process (QEMU's image lock)", "stop it first"
    if image.format == "raw" and (fact.size == 0 or fact.size % 512):
        yield f"{name} has {fact.size} bytes, a disk has a multiple of 512 and at least one sector", ""


def _open_remedy(fact: FileFact, *, writes: bool) -> str:
    """Return the remedy for a file or block device that cannot be opened."""
    if writes and fact.read_error is None:
        return "set read_only = true if the guest shall not write"
    if fact.kind == "block":
        return "let this process use the device: volumeDevices in the pod, docker run --device"
    return "let the user of this process read it" + " and write it" * writes


def disk_words(disk: DiskPlan) -> str:
    """Return a description of *disk* for an operator."""
    mode = "read-only" if disk.read_only else "writable"
    if disk.overlay is not None:
        mode = f"ephemeral (at most {format_size(disk.overlay.limit)} written)"
    cache = "none" if disk.direct else "writeback" if disk.write_cache else "writethrough"
    parts = [str(disk.path), disk.layers[0].format, mode, f"cache {cache}", f"aio {disk.aio}"]
    if disk.iothread:
        parts.append("an iothread of its own")
    parts += [f"over {layer.path}" for layer in disk.layers[1:]]
    return ", ".join(parts)
