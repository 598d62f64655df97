"""The headers of disk images, and the empty image that an ephemeral disk writes to.

The qcow2 format is described in QEMU's ``docs/interop/qcow2.txt``. A QEMU that uses an image holds locks on single bytes
of it (``block/file-posix.c``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from runner.errors import HostError
from runner.facts.disk import ImageFact

_MAGIC = b"QFI\xfb"
_HEADER = struct.Struct(">4sIQIIQI36xQ")
"""Magic, version, backing file's offset and length, cluster bits, size, encryption, …, incompatible features."""
_NEW = struct.Struct(">4sIQIIQIIQQIIQQQQII8x")
"""The whole header of version 3, with the compression type."""
_DATA_FILE, _CORRUPT = 1 << 2, 1 << 1
_KNOWN_FEATURES = 0b11111
"""Dirty, corrupt, external data file, compression type, extended L2 entries: those that QEMU 7.2 knows."""
_BACKING_FORMAT = 0xE2792ACA
_LONGEST_NAME = 1023
_LARGEST_CLUSTER_BITS = 21
_LARGEST = 1 << 56
"""Bytes; offsets of clusters have 56 bits (``docs/interop/qcow2.txt``, "Standard Cluster Descriptor")."""
_CLUSTER = 1 << 16

_F_OFD_GETLK = 36
_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of x86-64 and arm64: type, whence, start, length, pid."""
_USED, _DENIED = 100, 200
_READ, _WRITE, _RESIZE = 0, 1, 3
"""QEMU locks an image byte by byte: 100+p means "I use permission p", 200+p "no other may" (``block/file-posix.c``)."""


def read_image(path: PurePosixPath, fd: int, size: int, *, write: bool) -> ImageFact:
    """Return what the first bytes of the image *fd* say, which is at *path* and has *size* bytes.

    *write* says whether it is to be written, because QEMU's locks differ for readers and writers.
    """
    locked = _is_locked(fd, write=write)
    header = os.pread(fd, _HEADER.size, 0)
    if not header.startswith(_MAGIC):
        return ImageFact("raw", size, locked=locked)
    _, version, offset, length, bits, size, encrypted, features = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    if version == 2:  # noqa: PLR2004 - version 2 has no feature bits
        features = 0
    backing, malformed_name = None, False
    if offset:  # the name lies in the first cluster, or QEMU refuses it (block/qcow2.c, qcow2_do_open)
        malformed_name = length > _LONGEST_NAME or offset + length > 1 << min(bits, _LARGEST_CLUSTER_BITS)
        name = b"" if malformed_name else os.pread(fd, length, offset)
        malformed_name = malformed_name or b"\0" in name
        backing = None if malformed_name else _real_path(path, name.decode(errors="replace"))
    reasons = {
        f"is qcow2 of version {version}, which is not known": version not in {2, 3},
        "is encrypted": encrypted,
        "takes data from an external data file": features & _DATA_FILE,
        "is marked as corrupt (repair it with `qemu-img check -r all`)": features & _CORRUPT,
        "uses features of qcow2 that are not known here": features & ~_KNOWN_FEATURES,
        "is broken: it names a backing file as no image can": malformed_name,
        f"is broken: its header gives a size of {size} bytes": size > _LARGEST,
    }
    reason = next((reason for reason, found in reasons.items() if found), None)
    return ImageFact("qcow2", size, backing, _backing_format(fd, version, offset), locked, reason)


def _real_path(image: PurePosixPath, name: str) -> PurePosixPath:
    """Return the path, without symbolic links, of what *image* calls *name*: relative to the image's directory."""
    return PurePosixPath(os.path.realpath(image.parent / name))


def _backing_format(fd: int, version: int, end: int) -> str | None:
    """Return the backing file's format from the header extensions, which lie between the header and that file's name."""
    start = struct.unpack(">I", os.pread(fd, 4, 100).ljust(4, b"\0"))[0] if version > 2 else 72  # noqa: PLR2004
    if not start <= end <= _CLUSTER:
        return None
    extensions = os.pread(fd, end - start, start)
    while len(extensions) >= 8:  # noqa: PLR2004 - type and length
        kind, length = struct.unpack_from(">II", extensions)
        if kind == _BACKING_FORMAT:
            return extensions[8 : 8 + length].decode(errors="replace")
        extensions = extensions[8 + -(-length // 8) * 8 :]
    return None


def _is_locked(fd: int, *, write: bool) -> bool:
    """Tell whether the locks of a running QEMU would keep another one from opening the image."""
    # A QEMU with the image as a disk always denies others writing and resizing, whether it writes itself or not.
    conflicting = [_DENIED + _READ, _USED + _WRITE, _USED + _RESIZE]
    if write:
        conflicting += [_DENIED + _WRITE, _DENIED + _RESIZE]
    for byte in conflicting:
        lock = fcntl.fcntl(fd, _F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        if _FLOCK.unpack(lock)[0] != fcntl.F_UNLCK:
            return True
    return False


def empty_qcow2(size: int) -> dict[int, bytes]:
    """Return an empty qcow2 image of *size* bytes for the guest, as offset → bytes; the rest of the file is zeroes.

    It names no backing file: QEMU gets that by its command line, so no name in an image can lead it elsewhere.
    """
    level_1 = max(1, -(-size // (_CLUSTER * _CLUSTER // 8)))
    clusters = 3 + -(-level_1 * 8 // _CLUSTER)
    header = _NEW.pack(
        *(_MAGIC, 3, 0, 0, 16, size, 0),
        *(level_1, 3 * _CLUSTER, _CLUSTER, 1, 0, 0),
        *(0, 0, 0, 4, _NEW.size),
    )
    counts = b"\0\1" * clusters  # of references to each cluster, 16 bits each
    return {0: header, _CLUSTER: struct.pack(">Q", 2 * _CLUSTER), 2 * _CLUSTER: counts}


@contextmanager
def overlay(directory: PurePosixPath, size: int, limit: int) -> Iterator[int]:
    """Hold an empty qcow2 image of *size* bytes in an unnamed file of *directory*, which has *limit* bytes, nearly all holes.

    The kernel removes it with its last descriptor, however the processes that hold it end.
    """
    try:
        fd = _unnamed_file(directory)
    except OSError as error:
        raise HostError(f"cannot make a file for an ephemeral disk in {str(directory)!r}") from error
    try:
        try:
            for offset, content in empty_qcow2(size).items():
                os.pwrite(fd, content, offset)
            os.ftruncate(fd, limit)
        except OSError as error:
            raise HostError(f"cannot write an ephemeral disk in {str(directory)!r}") from error
        yield fd
    finally:
        os.close(fd)


def _unnamed_file(directory: PurePosixPath) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # open(2): "O_TMPFILE … support must be provided by the underlying filesystem"; overlayfs has it since Linux 6.1.
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR}:
            raise
    path = directory / f"overlay.{os.urandom(8).hex()}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - a pure path
    return fd
