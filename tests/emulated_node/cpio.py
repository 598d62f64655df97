"""Archives in the kernel's initramfs format (``Documentation/driver-api/early-userspace/buffer-format.rst``).

``cpio`` archives only files that exist, and making device nodes needs privilege.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Entry:
    """One name in the archive."""

    name: str
    mode: int
    content: bytes = b""
    major: int = 0
    minor: int = 0

    @classmethod
    def file(cls, name: str, content: bytes, mode: int = 0o644) -> Self:
        """Return a regular file."""
        return cls(name, stat.S_IFREG | mode, content)

    @classmethod
    def directory(cls, name: str) -> Self:
        """Return a directory; parents are not implied."""
        return cls(name, stat.S_IFDIR | 0o755)

    @classmethod
    def device(cls, name: str, major: int, minor: int) -> Self:
        """Return a character device."""
        return cls(name, stat.S_IFCHR | 0o600, b"", major, minor)


def archive(entries: Iterable[Entry]) -> bytes:
    """Return *entries* in the "newc" format, trailer included, padded to 512 bytes."""
    data = bytearray()
    for number, entry in enumerate([*entries, Entry("TRAILER!!!", 0)], start=1):
        name = entry.name.encode() + b"\0"
        # ino, mode, uid, gid, nlink, mtime, filesize, major, minor, rmajor, rminor, namesize, check
        fields = (number, entry.mode, 0, 0, 1, 0, len(entry.content), 0, 0, entry.major, entry.minor, len(name), 0)
        data += b"070701" + b"".join(b"%08x" % value for value in fields) + name
        data += b"\0" * (-len(data) % 4)
        data += entry.content
        data += b"\0" * (-len(data) % 4)
    return bytes(data + b"\0" * (-len(data) % 512))
