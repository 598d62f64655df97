"""Facts about the files, block devices and disk images that a spec names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, Protocol, assert_never

import attrs

from runner.base.values import frozen
from runner.facts.file_formats import FileFormat

if TYPE_CHECKING:  # only instances with disks have any
    from runner.facts.disk_content import DiskContent

FileKind = Literal["file", "directory", "block", "character", "other", "missing"]


@frozen
class ImageFact:
    """A disk image, as its first bytes describe it."""

    format: str
    """``raw``, ``qcow2``, or the name of another format of :mod:`runner.facts.file_formats`."""
    size: int = 0
    """Bytes of the disk that the guest sees."""
    backing: PurePosixPath | None = None
    """The absolute path of the backing file, symbolic links resolved; the header names it relative to the image's directory."""
    backing_elsewhere: str | None = attrs.field(default=None, kw_only=True)
    """The target in the header if it is not a file: an address such as ``nbd://…``, or options that only QEMU understands."""
    backing_format: str | None = None
    """The format of the backing file in the header; ``None`` in old images, which do not have it."""
    locked: bool = False
    """Whether another QEMU holds a conflicting image lock (``block/file-posix.c``: byte ranges 100 and 200)."""
    error: str | None = None
    """The reason why the image cannot be used, as a verb phrase: encryption, damage, an external data file."""
    lock_error: str | None = attrs.field(default=None, kw_only=True)
    """The reason why QEMU cannot lock it (``strerror``), and runs without locks; ``None`` if it can."""
    content: DiskContent | None = attrs.field(default=None, kw_only=True)
    """The beginning of the disk as the guest sees it; ``None`` if it is in a backing file or cannot be read here."""


@frozen
class FileFact:
    """A path that the spec names."""

    kind: FileKind
    size: int = 0
    """Bytes of a file; the capacity of a block device."""
    error: str | None = None
    """The reason why it cannot be opened for reading, or for reading and writing if the spec needs that (``strerror``)."""
    read_error: str | None = None
    """The reason why it cannot even be opened for reading (``strerror``); ``None`` if it can."""
    everyone_reads: bool = True
    """Whether its mode lets any user read it."""
    format: FileFormat | None = None
    """Its format, for files that are no disks; ``None`` if no row of the table fits."""
    image: ImageFact | None = None
    """The disk image in it. This field and those below are set only for files that the spec names as disks."""
    direct: bool = False
    """Whether a read that bypasses the page cache (``O_DIRECT``) succeeded."""
    alignment: int = attrs.field(default=512, kw_only=True)
    """Bytes of which the size of such a read must be a multiple."""
    sparse: bool = False
    """Whether the file has holes: a write into one allocates space."""
    sectors: tuple[int, int] = (512, 512)
    """Bytes of a logical and of a physical block, as the kernel reports them for a block device."""
    held: bool = attrs.field(default=False, kw_only=True)
    """Whether the machine itself uses the block device: as a mount, as swap space, or for a device mapper or a RAID."""
    error_number: int = attrs.field(default=0, kw_only=True)
    """The ``errno`` of ``error``; 0 without one."""
    mounted_read_only: bool = attrs.field(default=False, kw_only=True)
    """Whether the file system of a directory, or of a file that is a disk, is mounted read-only."""

    @property
    def words(self) -> str:
        """The kind as a verb phrase, such as ``is a directory``."""
        match self.kind:
            case "file":
                return "is a file"
            case "directory":
                return "is a directory"
            case "block":
                return "is a block device"
            case "character":
                return "is a character device"
            case "missing":
                return "does not exist"
            case "other":
                return "is a special file" if self.error is None else f"cannot be examined ({self.error})"
        assert_never(self.kind)


MISSING = FileFact("missing")


@frozen
class DocumentFact:
    """The content of a small file that the spec names."""

    content: bytes = attrs.field(default=b"", repr=False)
    error: str | None = None
    """The reason why it could not be read; ``None`` if it was read."""


class DiskFacts(Protocol):
    """The facts that the plan of a disk needs, at the start or while the guest runs."""

    @property
    def files(self) -> Mapping[PurePosixPath, FileFact]:
        """The files of disks and their backing files, by path."""

    @property
    def io_uring_error(self) -> str | None:
        """Return the reason why ``io_uring`` cannot be used; ``None`` if it can."""

    @property
    def free_space(self) -> int | None:
        """Bytes free on the state directory's volume; ``None`` if unknown."""


@frozen
class LateDiskFacts:
    """The facts about a disk that is attached while the guest runs."""

    files: Mapping[PurePosixPath, FileFact]
    io_uring_error: str | None
    free_space: int | None = None
