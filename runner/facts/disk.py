"""Files, block devices and disk images that a spec names, as they were found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Literal, Protocol

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
    """Another process holds QEMU's image lock for writing (``block/file-posix.c``: byte ranges 100 and 200)."""
    error: str | None = None
    """Why it cannot be used at all, in words: encryption, damage, an external data file."""


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
    """Of a disk only, like the rest."""
    direct: bool = False
    """It can be read past the page cache (``O_DIRECT``): tried."""
    sparse: bool = False
    """A file with holes: writing to it may have to find room on the disk."""
    sectors: tuple[int, int] = (512, 512)
    """Bytes of a logical and of a physical block; of a block device the kernel's word."""

    @property
    def words(self) -> str:
        """What it is, as the end of a sentence."""
        if self.kind == "other" and self.error is not None:
            return f"cannot be looked at ({self.error})"
        return {
            "file": "is a file",
            "directory": "is a directory",
            "block": "is a block device",
            "character": "is a character device",
        }.get(self.kind, "is something special")


MISSING = FileFact("missing")


@attrs.frozen
class DocumentFact:
    """A small file that the spec names, whole."""

    content: bytes = attrs.field(default=b"", repr=False)
    error: str | None = None
    """Why it was not read."""


class DiskFacts(Protocol):
    """What a disk's plan needs to know."""

    @property
    def files(self) -> Mapping[PurePosixPath, FileFact]:
        """What was found at the paths of disks, and at those of the files their data comes from."""

    @property
    def io_uring_error(self) -> str | None:
        """Why ``io_uring`` cannot be used."""


@attrs.frozen
class LateDiskFacts:
    """What was read about a disk that is attached while the machine runs."""

    files: Mapping[PurePosixPath, FileFact]
    io_uring_error: str | None
