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
from typing import NamedTuple

from runner.facts.disk import ImageFact
from runner.facts.disk_content import parse_content
from runner.facts.file_formats import HEAD, identify
from runner.kernel.limits import limited

_MAGIC = b"QFI\xfb"
_HEADER = struct.Struct(">4sIQIIQI36xQ")
"""Magic, version, backing file's offset and length, cluster bits, size, encryption, …, incompatible features."""
_NEW = struct.Struct(">4sIQIIQIIQQIIQQQQII8x")
"""The whole header of version 3, with the compression type."""
_DATA_FILE, _CORRUPT = 1 << 2, 1 << 1
_COMPRESSION_TYPE, _EXTENDED_L2 = 1 << 3, 1 << 4
_KNOWN_FEATURES = 0b11111
"""Dirty, corrupt, external data file, compression type, extended L2 entries: those that QEMU 7.2 knows."""
_BACKING_FORMAT = 0xE2792ACA
_LONGEST_NAME = 1023
_SMALLEST_CLUSTER_BITS, _LARGEST_CLUSTER_BITS = 9, 21
_OFFSET, _COMPRESSED = 0x00FFFFFFFFFFFE00, 1 << 62
"""In an entry of a level 1 or level 2 table: the bits of an offset in the file, and the mark of a compressed cluster."""
_ALL = (1 << 32) - 1
"""All subclusters of a cluster."""
_FILE_PROTOCOLS = {"file", "host_device"}
_LARGEST = 1 << 56
"""Bytes; offsets of clusters have 56 bits (``docs/interop/qcow2.txt``, "Standard Cluster Descriptor")."""
_CLUSTER = 1 << 16

_F_OFD_GETLK = 36
_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of x86-64 and arm64: type, whence, start, length, pid."""
_USED, _DENIED = 100, 200
_READ, _WRITE, _RESIZE = 0, 1, 3
"""QEMU locks an image byte by byte: 100+p means "I use permission p", 200+p "no other may" (``block/file-posix.c``)."""


def read_image(path: PurePosixPath, fd: int, size: int, ends: tuple[bytes, bytes], *, write: bool) -> ImageFact:
    """Return the facts in the image *fd*, which is at *path* and has *size* bytes; *ends* are its first and last bytes.

    *write* says whether it is to be written, because QEMU's locks differ for readers and writers.
    """
    locked, lock_error = _is_locked(fd, write=write)
    head, tail = ends
    found = identify(head, tail)
    if found is None or found.kind != "image":
        return ImageFact("raw", size, locked=locked, lock_error=lock_error, content=parse_content(head, tail))
    if found.name != "qcow2":
        return ImageFact(found.name, size, locked=locked, lock_error=lock_error)
    header = head[: _HEADER.size]
    _, version, offset, length, bits, size, encrypted, features = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    if version == 2:  # noqa: PLR2004 - version 2 has no feature bits
        features = 0
    name, malformed_name = None, False
    if offset:  # the name lies in the first cluster, or QEMU refuses it (block/qcow2.c, qcow2_do_open)
        malformed_name = length > _LONGEST_NAME or offset + length > 1 << min(bits, _LARGEST_CLUSTER_BITS)
        encoded = b"" if malformed_name else os.pread(fd, length, offset)
        malformed_name = malformed_name or b"\0" in encoded
        name = None if malformed_name else encoded.decode(errors="replace")
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
    backing = _backing(path, name, _backing_format(fd, version, offset)) if name else _Backing()
    seen = None if reason else _guest_head(fd, head, bits, features, has_backing=bool(name))
    return ImageFact(
        "qcow2",
        size,
        backing.path,
        backing.format,
        locked,
        reason,
        backing_elsewhere=backing.elsewhere,
        lock_error=lock_error,
        content=None if seen is None else parse_content(seen, b""),
    )


class _Backing(NamedTuple):
    """The backing file that an image names: either a file here, or something else."""

    path: PurePosixPath | None = None
    format: str | None = None
    elsewhere: str | None = None


def _backing(image: PurePosixPath, name: str, format_: str | None) -> _Backing:
    """Parse the *name* of a backing file in the header of *image* as QEMU does, and *format_*, which the header gives for it.

    A colon before the first slash ends the name of a protocol (``block.c``: ``path_has_protocol``). Two protocols are
    files, also as options in JSON (``parse_json_filename``). QEMU takes relative names behind a protocol as relative to its own
    directory, which is / here; the image's is the only one that can be meant.
    """
    protocol, colon, rest = name.partition(":")
    if not colon or "/" in protocol:
        return _Backing(_real_path(image, name), format_)
    if protocol in _FILE_PROTOCOLS:
        return _Backing(_real_path(image, rest), format_)
    if protocol == "json" and (found := _file_of_json(rest)) is not None:
        return _Backing(_real_path(image, found[0]), format_ or found[1])
    return _Backing(elsewhere=name)


def _file_of_json(text: str) -> tuple[str, str] | None:
    """Return file name and format of a block node in JSON; ``None`` if it is more than an image in a file."""
    import json  # here, because few images have such names

    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(options, dict):
        return None
    flat: dict[str, object] = {}
    for key, value in options.items():
        flat |= {f"{key}.{below}": each for below, each in value.items()} if isinstance(value, dict) else {key: value}
    match flat.pop("driver", None), flat.pop("file.driver", "file"), flat.pop("file.filename", None):
        case ("raw" | "qcow2") as driver, "file" | "host_device", str(name) if name.isprintable() and not flat:
            return name, driver
    return None


def _real_path(image: PurePosixPath, name: str) -> PurePosixPath:
    """Return the real path of the file that *image* calls *name*, relative to the image's directory."""
    return PurePosixPath(os.path.realpath(image.parent / name))


def _guest_head(fd: int, head: bytes, bits: int, features: int, *, has_backing: bool) -> bytes | None:
    """Return the first bytes of the disk in a qcow2 image that begins with *head*, at most :data:`HEAD` of them.

    ``None`` if they lie in a backing file, or are stored in a way that is not read here (``docs/interop/qcow2.txt``, "Cluster
    mapping").
    """
    if not _SMALLEST_CLUSTER_BITS <= bits <= _LARGEST_CLUSTER_BITS:
        return None
    entry_size = 16 if features & _EXTENDED_L2 else 8
    zlib_used = not features & _COMPRESSION_TYPE or head[104:105] in {b"", b"\0"}
    level_2 = _number(os.pread(fd, 8, _number(head[40:48]) & _OFFSET)) & _OFFSET
    found = b""
    for index in range(-(-HEAD >> bits)):
        entry = os.pread(fd, entry_size, level_2 + index * entry_size) if level_2 else b""
        cluster = _cluster_head(fd, entry.ljust(entry_size, b"\0"), bits, zlib_used=zlib_used, has_backing=has_backing)
        if cluster is None:
            break
        found += cluster.ljust(min(HEAD, 1 << bits), b"\0")
    return found[:HEAD] or None


def _cluster_head(fd: int, entry: bytes, bits: int, *, zlib_used: bool, has_backing: bool) -> bytes | None:
    """Return the first bytes of the cluster that *entry* of a level 2 table describes.

    ``None`` if some of them lie in a backing file, or are compressed by something else than zlib.
    """
    descriptor, length = _number(entry[:8]), min(HEAD, 1 << bits)
    if descriptor & _COMPRESSED:
        return _unpacked(fd, descriptor, bits, length) if zlib_used else None
    allocated, zero = (_ALL if descriptor & _OFFSET else 0), (_ALL if descriptor & 1 else 0)
    if len(entry) > 8:  # noqa: PLR2004 - the bits of subclusters, 32 that are allocated and 32 that read as zeroes
        zero, allocated = _number(entry[8:12]), _number(entry[12:])
    size = (1 << bits) // 32
    data = os.pread(fd, length, descriptor & _OFFSET) if allocated else b""
    found = b""
    for index in range(-(-length // size)):
        part = 1 << index
        if has_backing and not (allocated | zero) & part:
            return None
        held = allocated & ~zero & part
        found += (data[index * size :][:size] if held else b"").ljust(size, b"\0")
    return found


def _unpacked(fd: int, descriptor: int, bits: int, length: int) -> bytes | None:
    import zlib  # here, because few images are compressed

    shift = 62 - (bits - 8)
    at = descriptor & ((1 << shift) - 1)
    sectors = ((descriptor & ~(3 << 62)) >> shift) + 1
    try:
        packed = os.pread(fd, sectors * 512 - at % 512, at)
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, length)
    except zlib.error:
        return None


def _number(value: bytes) -> int:
    return int.from_bytes(value, "big")


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


def _is_locked(fd: int, *, write: bool) -> tuple[bool, str | None]:
    """Tell whether a running QEMU's locks would keep another one from opening the image; if locks cannot exist here, also the reason.

    Some file systems have no locks of byte ranges: NFS version 3 without lockd, some of FUSE. QEMU asks in the same way
    and then does without (``block/file-posix.c``: ``qemu_has_file_lock``).
    """
    # A QEMU with the image as a disk always denies others writing and resizing, whether it writes itself or not.
    conflicting = [_DENIED + _READ, _USED + _WRITE, _USED + _RESIZE]
    if write:
        conflicting += [_DENIED + _WRITE, _DENIED + _RESIZE]
    for byte in conflicting:
        try:
            lock = fcntl.fcntl(fd, _F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            return False, error.strerror
        if _FLOCK.unpack(lock)[0] != fcntl.F_UNLCK:
            return True, None
    return False, None


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
        fd = _unnamed_image(directory)
    except OSError as error:
        raise limited(f"cannot make a file for an ephemeral disk in {str(directory)!r}", error) from error
    try:
        try:
            for offset, content in empty_qcow2(size).items():
                os.pwrite(fd, content, offset)
            os.ftruncate(fd, limit)
        except OSError as error:
            raise limited(f"cannot write an ephemeral disk in {str(directory)!r}", error) from error
        yield fd
    finally:
        os.close(fd)


def _unnamed_image(directory: PurePosixPath) -> int:
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
