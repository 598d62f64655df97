"""The plan of the disks: the files of each, and the way in which QEMU opens them.

The same decisions are made for a disk the machine starts with and for one that is attached while it runs.

Why ``aio = "auto"`` never means io_uring: its kernel workers (``iou-wrk-…``) may run on the whole cpuset of the process
that made the ring (``io_uring/io-wq.c``: ``io_wq_create``), whatever the masks of QEMU's threads are, and the seccomp
profiles of Docker and containerd forbid it. ``io_submit(2)`` makes no thread, but waits where a write must allocate
space first, so it is chosen for block devices and files without holes; worker threads serve all others.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, get_args

from runner.base.errors import in_shell
from runner.base.values import frozen
from runner.facts.disk import MISSING, DiskFacts, FileFact, ImageFact, LateDiskFacts
from runner.facts.file_errors import remedy_of
from runner.facts.file_formats import FORMATS, SUFFIXES, unusable
from runner.facts.host import HostFacts
from runner.plan.problems import Problems, Reason
from runner.spec.instance import DetectZeroes, DiskFormat, DiskSpec
from runner.spec.rules import format_size

if TYPE_CHECKING:
    from runner.facts.disk_content import DiskContent

LONGEST_CHAIN = 16
"""Files in one chain of backing files."""

_FORMATS = get_args(DiskFormat)
_EXTENT = re.compile(r"-(flat|f[0-9]+)\.vmdk$")
"""The names of raw files that belong to a VMDK image's description."""

Aio = Literal["native", "io_uring", "threads"]


@frozen
class Layer:
    """A file or block device that holds data of a disk."""

    path: PurePosixPath
    format: DiskFormat
    block: bool = False
    """A block device."""
    lockless: bool = False
    """QEMU neither locks it nor heeds its locks: any reader of a base image could keep all others from starting with it."""


@frozen
class Overlay:
    """The unnamed file that holds the writes to an ephemeral disk."""

    size: int
    """Bytes the guest sees."""
    limit: int
    """Bytes the file may have; a write beyond them is an I/O error in the guest."""


AIO_REQUESTS = 1024
"""Requests of native AIO that QEMU reserves for each of its threads that has a disk with it (``MAX_EVENTS``, ``block/linux-aio.c``).
All programs of the machine share ``fs.aio-max-nr``, 65536 by default (io_setup(2))."""


@frozen
class DiskPlan:
    """One virtio disk."""

    name: str
    """``disk0``, …: the name of its device and of its topmost block node."""
    layers: tuple[Layer, ...]
    """The file named in the spec, then its backing files from the top to the bottom."""
    overlay: Overlay | None
    """Above all layers."""
    read_only: bool
    serial: str | None
    direct: bool
    """Whether the topmost layer, which is written to, bypasses the page cache; backing files, which others may use too, do not."""
    write_cache: bool
    """Whether the disk reports a volatile write cache: a write is on stable storage only after a flush."""
    aio: Aio
    discard: bool
    detect_zeroes: DetectZeroes
    iothread: bool
    sectors: tuple[int, int]
    """Bytes of a logical and of a physical block."""

    @property
    def path(self) -> PurePosixPath:
        """The file or block device named in the spec."""
        return self.layers[0].path

    @property
    def written(self) -> bool:
        """Return whether the guest writes to the file or block device named in the spec."""
        return self.overlay is None and not self.read_only

    def below(self) -> Iterator[tuple[str, Layer]]:
        """Yield name and layer of each read-only file, from the top to the bottom."""
        layers = self.layers if self.overlay is not None else self.layers[1:]
        yield from ((f"{self.name}-base{number}", layer) for number, layer in enumerate(layers, 1))


def within(path: PurePosixPath, directories: Iterable[PurePosixPath]) -> bool:
    """Tell whether *path*, a real path, lies in one of *directories*."""
    return any(directory in path.parents for directory in directories)


def plan_disks(disks: Sequence[DiskSpec], facts: HostFacts, problems: Problems) -> tuple[DiskPlan, ...]:
    """Plan the disks that the machine starts with."""
    plans = tuple(
        plan_disk(f"disk{index}", disk, _facts_of(disk, facts), f"disk[{index}]", problems)
        for index, disk in enumerate(disks)
    )
    below = {layer.path: disk.name for disk in plans for layer in disk.layers[1:]}
    for index, disk in enumerate(plans):
        if disk.written and disk.path in below:
            reason = f"{str(disk.path)!r} is a backing file of {below[disk.path]}, and the guest would write to it"
            problems.refuse(f"disk[{index}].path", reason, "set read_only = true, or name a copy")
    remark_little_space(plans, facts.free_space, problems)
    _remark_aio(plans, facts.aio_free, problems)
    return plans


def _remark_aio(disks: Iterable[DiskPlan], free: int | None, problems: Problems) -> None:
    """Remark that too few requests of native AIO are free; each iothread, and QEMU's main thread, reserves its own."""
    threads = {disk.name if disk.iothread else "" for disk in disks if disk.aio == "native"}
    needed = len(threads) * AIO_REQUESTS
    if free is not None and needed > free:
        problems.remark(
            "disk",
            f'QEMU may not start: aio "native" takes {needed} requests of the kernel\'s, and the machine has {free} left for all '
            "programs",
            f'raise fs.aio-max-nr on the node by {needed - free} at least, or set aio = "threads"',
        )


def _facts_of(disk: DiskSpec, facts: HostFacts) -> DiskFacts:
    """Return the facts about *disk*; for a descriptor that is not inherited yet, those stated in the spec."""
    if disk.fd is None or facts.descriptors is not None:
        return facts
    return LateDiskFacts({disk.file: FileFact("file")}, facts.io_uring_error, facts.free_space)


def plan_disk(name: str, disk: DiskSpec, facts: DiskFacts, where: str, problems: Problems) -> DiskPlan:
    """Plan *disk*; the paths of its problems begin with *where*."""
    fact = facts.files.get(disk.file, MISSING)
    problems_before = len(problems.found)
    layers = tuple(_layers(disk, fact, facts.files, where, problems))
    direct, aio = _access(disk, fact, facts.io_uring_error, where, problems)
    if len(problems.found) == problems_before:
        _judge_content(disk, layers, facts.files, where, problems)
    if len(problems.found) == problems_before and layers:  # last: a packed or foreign file needs another remedy
        _judge_length(layers[0], facts.files, where, problems)
    size = 0 if fact.image is None else fact.image.size
    overlay = None
    if disk.ephemeral:
        # With data written twice, and metadata, the file may become a little larger than the disk itself.
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


def remark_little_space(disks: Iterable[DiskPlan], free: int | None, problems: Problems) -> None:
    """Remark that ephemeral *disks* may grow to more than the *free* bytes of the state directory's volume."""
    limits = {disk.name: disk.overlay.limit for disk in disks if disk.overlay is not None}
    if free is None or sum(limits.values()) <= free:
        return
    problems.remark(
        "disk",
        f"the guest gets write errors, and the state directory is full, once it has written {format_size(free)} to "
        f"{' and '.join(limits)}, which may take {format_size(sum(limits.values()))}",
        "set ephemeral_size, or have --state-dir on a larger volume",
    )


def remark_lockless(where: str, path: PurePosixPath, image: ImageFact, problems: Problems) -> None:
    """Remark at *where* that the file system of *image*, at *path*, has no locks, without which QEMU runs unprotected."""
    if image.lock_error is not None:
        problems.remark(
            where,
            f"nothing keeps another QEMU from using {str(path)!r} at the same time, which destroys it: its file system takes no "
            f"locks ({image.lock_error})",
            "see that no other instance has it, or keep it on a file system with locks",
        )


def content_of(layers: Iterable[Layer], files: Mapping[PurePosixPath, FileFact]) -> tuple[Layer, DiskContent] | None:
    """Return the beginning of a disk as the guest sees it, and the layer that holds it; ``None`` if unknown."""
    for layer in layers:
        image = files.get(layer.path, MISSING).image
        if image is None or image.content is not None:
            return None if image is None or image.content is None else (layer, image.content)
    return None


def _judge_content(
    disk: DiskSpec,
    layers: Sequence[Layer],
    files: Mapping[PurePosixPath, FileFact],
    where: str,
    problems: Problems,
) -> None:
    """Judge the content that the guest would find on the disk."""
    for layer in layers:
        if (image := files.get(layer.path, MISSING).image) is not None:
            remark_lockless(where, layer.path, image, problems)
        if files.get(layer.path, MISSING).held:
            problems.remark(
                where,
                f"the guest and the machine destroy what the other writes to {str(layer.path)!r}: the machine uses it, as a mount, "
                "as swap space, or in a device mapper or RAID",
                "end that use, or name the device that is made of it",
            )
    found = content_of(layers, files)
    if found is None:
        return
    layer, content = found
    name, format_ = repr(str(layer.path)), content.format
    if format_ is not None and format_.kind in {"image", "packed", "text"}:
        holds, remedy = unusable(format_, str(layer.path) if layer.format == "raw" else "RAW")
        statement = f"{name} {holds}"
        if layer.format != "raw":
            unwrapped = f"`qemu-img convert -f {layer.format} -O raw {in_shell(layer.path)} RAW`"
            statement = f"{name}, a {layer.format} image, {holds} as its disk"
            remedy = f"take it out: {unwrapped}, then {remedy}"
        if format_.kind == "packed" and disk.read_only:
            problems.remark(where, f"the guest finds no disk but a file in {where}: {statement}", remedy)
            return
        also = ", or set read_only = true if the guest shall read it as it is" if format_.kind == "packed" else ""
        problems.refuse(f"{where}.path", f"{statement}, which the guest would see as it is", remedy + also)
        return
    promised = SUFFIXES.get(disk.file.suffix[1:].lower())
    if promised is not None and layers[0].format == "raw" and not _EXTENT.search(disk.file.name):
        problems.remark(
            where,
            f"the guest finds a damaged or an empty disk in {where}: {str(disk.file)!r} does not begin as the {promised} file that its "
            "name promises",
            "see whether it was made or copied as a whole, and name a raw image .raw or .img",
        )
    _judge_partitions(content, name, files[disk.file], where, problems)


def _judge_partitions(content: DiskContent, name: str, fact: FileFact, where: str, problems: Problems) -> None:
    """Remark partitions that the guest would not find, or not whole, on the disk of *fact*; *name* is the file with the table."""
    size = 0 if fact.image is None else fact.image.size
    if content.end > size:
        problems.remark(
            where,
            f"the guest finds a damaged disk in {where}: the partitions in {name} end at {format_size(content.end)}, and it has "
            f"{format_size(size)}",
            "see whether it was copied as a whole",
        )
    if content.sector is not None and content.sector != fact.sectors[0]:
        problems.remark(
            where,
            f"the guest finds no partitions in {where}: the partition table in {name} is for sectors of {content.sector} bytes, and "
            f"the guest sees {fact.sectors[0]}",
            "copy it to a disk with such sectors, or make another partition table",
        )


def _judge_length(layer: Layer, files: Mapping[PurePosixPath, FileFact], where: str, problems: Problems) -> None:
    """Refuse a raw disk whose length is no multiple of the sector size."""
    fact, path = files.get(layer.path, MISSING), layer.path
    if layer.format == "raw" and fact.image is not None and (fact.size == 0 or fact.size % 512):
        problems.refuse(
            f"{where}.path",
            f"{str(path)!r} has {fact.size} bytes, a disk has a multiple of 512 and at least one sector",
            f"`truncate -s {'%512' if fact.size else '10G'} {in_shell(path)}` makes it {'longer' if fact.size else 'a disk of 10 GiB'}",
        )


def _access(
    disk: DiskSpec, fact: FileFact, io_uring_error: str | None, where: str, problems: Problems
) -> tuple[bool, Aio]:
    """Decide whether to bypass the page cache, and QEMU's method of reading and writing."""
    if disk.ephemeral:
        return False, "threads"
    found = fact.image is not None
    direct = disk.cache == "none" or (disk.cache == "auto" and (fact.direct or disk.aio == "native"))
    key = "cache" if disk.cache == "none" else "aio"
    if direct and found and not fact.direct:
        problems.refuse(
            f"{where}.{key}",
            f"{str(disk.file)!r} cannot be used past the page cache (O_DIRECT): its file system does not support it",
            'leave it out, or set cache = "writeback"',
        )
    # QEMU refuses it: "Cannot get 'write' permission without 'resize': Image size is not a multiple of request alignment".
    ends_within = disk.format == "raw" and disk.writes and fact.kind == "file" and fact.size % fact.alignment
    if direct and ends_within:
        name, remedy = repr(str(disk.file)), f"`truncate -s %{fact.alignment} {in_shell(disk.file)}` makes it longer"
        reason = f"its {fact.size} bytes are no multiple of the {fact.alignment} of its disk's sectors"
        if disk.cache == "none" or disk.aio == "native":
            problems.refuse(f"{where}.{key}", f"{name} cannot be written past the page cache: {reason}", remedy)
        else:
            problems.remark(where, f"what the guest writes to {name} takes room in the page cache: {reason}", remedy)
            direct = False
    if disk.aio == "io_uring" and io_uring_error is not None:
        problems.refuse(f"{where}.aio", f"cannot use io_uring: {io_uring_error}", "leave it out")
    if disk.aio != "auto":
        return direct, disk.aio
    allocated = fact.kind == "block" or (disk.format == "raw" and not fact.sparse)
    return direct, "native" if direct and (allocated or disk.read_only) else "threads"


def _layers(
    disk: DiskSpec, fact: FileFact, files: Mapping[PurePosixPath, FileFact], where: str, problems: Problems
) -> Iterator[Layer]:
    """Yield the layers of *disk* down to the first unusable one."""
    path, format_, at = disk.file, disk.format, f"{where}.path"
    seen: list[PurePosixPath] = []
    while True:
        yield Layer(path, format_, fact.kind == "block", fact.mounted_read_only)
        error = next(_errors(path, format_, fact, writes=disk.writes and not seen), None)
        if error is not None:
            message, remedy = error
            exchanged = fact.image is not None and fact.image.format in _FORMATS and fact.image.format != format_
            if seen:
                message = f"{str(seen[-1])!r} takes data from {str(path)!r}: {message}"
                remedy = "; ".join(filter(None, (remedy, _flatten(seen[-1]))))
            problems.refuse(f"{where}.format" if exchanged and not seen else at, message, remedy)
            return
        seen.append(path)
        image = fact.image
        if image is None or (image.backing is None and image.backing_elsewhere is None):
            return
        if (error := next(_backing_errors(path, image, disk.backing, seen), None)) is not None:
            problems.refuse(at, *error)
            return
        path = image.backing or path
        format_ = "raw" if image.backing_format == "raw" else "qcow2"
        fact = files.get(path, MISSING)


def _backing_errors(
    path: PurePosixPath, image: ImageFact, allowed: Sequence[PurePosixPath], seen: Sequence[PurePosixPath]
) -> Iterator[Reason]:
    """Yield the errors of the backing file that *image*, at *path*, names."""
    backing, format_ = image.backing, image.backing_format
    needs = f"{str(path)!r} takes data from {(image.backing_elsewhere or str(backing))!r}"
    if backing is None:
        yield Reason(f"{needs}, which is no file here", f"{_flatten(path)} where QEMU reaches that")
        return
    if not within(backing, allowed):
        listed = ", ".join(map(repr, map(str, allowed)))
        rule = f"which is not in {listed}" if listed else "which is not followed unless backing names its directory"
        yield Reason(f"{needs}, {rule}", f"{_flatten(path)}, or name the directory in backing")
    if backing in seen:
        yield Reason(f"{needs}, and so on without end")
    if len(seen) > LONGEST_CHAIN:
        yield Reason(f"{needs}: more than {LONGEST_CHAIN} in a row", _flatten(seen[0]))
    if format_ not in _FORMATS:
        given = "no format" if format_ is None else f"the format {format_!r}"
        yield Reason(f"{needs} and gives {given} for it", "set it with `qemu-img rebase -u -F raw` (or qcow2)")


def _flatten(path: PurePosixPath) -> str:
    return f"flatten it with `qemu-img convert -O qcow2 {in_shell(path)} NEW`"


def _errors(path: PurePosixPath, format_: DiskFormat, fact: FileFact, *, writes: bool) -> Iterator[Reason]:
    """Yield the errors of one layer."""
    name, image = repr(str(path)), fact.image
    if fact.kind == "missing":
        yield Reason(f"{name} does not exist")
    if fact.kind not in {"file", "block"}:
        yield Reason(f"{name} {fact.words}, not a file or block device")
    if fact.error is not None:
        yield Reason(f"cannot open {name}: {fact.error}", _open_remedy(fact, writes=writes))
    if image is None:
        return
    if image.format not in _FORMATS:
        holds, remedy = unusable(next(each for each in FORMATS if each.name == image.format), str(path))
        yield Reason(f"{name} {holds}, which is neither raw nor qcow2", remedy)
    if image.format != format_:
        yield Reason(f'is "{format_}", but {name} holds a {image.format} image', _format_remedy(image.format, fact))
    if image.error is not None:
        yield Reason(f"{name} {image.error}")
    if image.locked and not fact.mounted_read_only:
        yield Reason(f"{name} is in use by another process (QEMU's image lock)", "stop it first")


def _format_remedy(found: str, fact: FileFact) -> str:
    """Return the remedy for a file whose format is the other one of the two possible for a disk."""
    if found == "raw":
        return 'set format = "raw" if it is a raw disk' if fact.size else "it is empty: make it with `qemu-img create`"
    return 'set format = "qcow2" if it was made as one; a guest, too, can write such a beginning to its raw disk'


def _open_remedy(fact: FileFact, *, writes: bool) -> str:
    """Return the remedy for a file or block device that cannot be opened."""
    cause = remedy_of(fact.error_number)
    if writes and fact.read_error is None and fact.error_number in {0, errno.EROFS, errno.EACCES, errno.EPERM}:
        return "set read_only = true if the guest shall not write" + (f", or {cause}" if cause else "")
    if cause:
        return cause
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
