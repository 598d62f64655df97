"""Files, block devices and disk images that a spec names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Literal, Protocol, assert_never

import attrs

FileKind = Literal["file", "directory", "block", "character", "other", "missing"]


@attrs.frozen
class ImageFact:
    """A disk image, as its first bytes describe it."""

    format: str
    """``raw`` or ``qcow2``."""
    size: int = 0
    """Bytes the guest sees."""
    backing: PurePosixPath | None = None
    """The backing file: the path, without symbolic links, of what the header names relative to the image's directory."""
    backing_format: str | None = None
    """The format of the backing file, as the header gives it; old images do not."""
    locked: bool = False
    """Whether another QEMU holds a conflicting image lock (``block/file-posix.c``: byte ranges 100 and 200)."""
    error: str | None = None
    """Why it cannot be used at all, as a verb phrase: encryption, damage, an external data file."""


@attrs.frozen
class FileFact:
    """A path that the spec names."""

    kind: FileKind
    size: int = 0
    """Bytes; of a block device, its capacity."""
    error: str | None = None
    """Why it cannot be opened as asked (reading, or reading and writing), in the kernel's words."""
    everyone_reads: bool = True
    """Whether its mode lets any user read it."""
    image: ImageFact | None = None
    """The disk image in it; like all below, only of files that are probed as disks."""
    direct: bool = False
    """Whether a read that bypasses the page cache (``O_DIRECT``) succeeded."""
    sparse: bool = False
    """A file with holes: a write may need new space on the disk."""
    sectors: tuple[int, int] = (512, 512)
    """Bytes of a logical and of a physical block, as the kernel reports them for a block device."""

    @property
    def words(self) -> str:
        """The kind as a verb phrase."""
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


@attrs.frozen
class DocumentFact:
    """The content of a small file that the spec names."""

    content: bytes = attrs.field(default=b"", repr=False)
    error: str | None = None
    """Why it was not read."""


class DiskFacts(Protocol):
    """The facts that a disk's plan needs."""

    @property
    def files(self) -> Mapping[PurePosixPath, FileFact]:
        """The files of disks and their backing files, by path."""

    @property
    def io_uring_error(self) -> str | None:
        """Why ``io_uring`` cannot be used."""


@attrs.frozen
class LateDiskFacts:
    """The facts about a disk that is attached while the guest runs."""

    files: Mapping[PurePosixPath, FileFact]
    io_uring_error: str | None
