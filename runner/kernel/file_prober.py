"""Facts of a file, a directory or a block device, read by its path."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
from pathlib import PurePosixPath

from runner.facts.disk import MISSING, DocumentFact, FileFact, FileKind
from runner.facts.file_formats import HEAD, TAIL, identify
from runner.kernel.files import closing

_XFS_IOC_DIOINFO = 0x800C581E
"""``libxfs/xfs_fs.h``: the alignments of direct I/O in memory and in the file, and the most bytes of it."""
_BLKSSZGET, _BLKPBSZGET, _BLKROGET = 0x1268, 0x127B, 0x125E  # include/uapi/linux/fs.h


def probe_file(path: PurePosixPath, *, write: bool = False, image: bool = False) -> FileFact:
    """Return the type of *path*, whether it opens for reading (or reading and *write*-ing), and what it holds.

    With *image* it is examined as a disk. Never raises: an error is part of the result.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - a pure path
    except OSError as error:
        missing = error.errno in {errno.ENOENT, errno.ENOTDIR}
        return MISSING if missing else FileFact("other", error=error.strerror, error_number=error.errno or 0)
    kind = _file_kind(status.st_mode)
    if kind not in {"file", "block"}:
        return FileFact(kind, mounted_read_only=kind == "directory" and _mounted_read_only(path))
    everyone_reads = bool(status.st_mode & stat.S_IROTH)
    try:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        with closing(fd):
            size = os.lseek(fd, 0, os.SEEK_END)
            ends = os.pread(fd, HEAD, 0), os.pread(fd, TAIL, max(0, size - TAIL))
            if image:
                fact = FileFact(kind, size, everyone_reads=everyone_reads)
                return _probe_image(fact, path, fd, status, ends, write=write)
            return FileFact(kind, size, everyone_reads=everyone_reads, format=identify(*ends))
    except OSError as error:
        read_error = probe_file(path).error if write else error.strerror
        return FileFact(kind, status.st_size, error.strerror, read_error, everyone_reads, error_number=error.errno or 0)


def _mounted_read_only(path: PurePosixPath) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def free_space(path: PurePosixPath) -> int | None:
    """Return how many bytes a user other than root can write below *path*, or below its first existing parent."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            status = os.statvfs(each)
            return status.f_bavail * status.f_frsize
    return None


def why_not_appended(path: PurePosixPath) -> str | None:
    """Return the reason why :func:`append` would fail for *path*, or ``None``; creates nothing."""
    try:
        status = os.lstat(path)
        if stat.S_ISBLK(status.st_mode):
            return "it is a block device, whose content would be overwritten"
        if not stat.S_ISREG(status.st_mode):
            refused = {stat.S_IFLNK: errno.ELOOP, stat.S_IFDIR: errno.EISDIR}.get(stat.S_IFMT(status.st_mode))
            return None if refused is None else os.strerror(refused)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW))
    except FileNotFoundError:
        if not os.path.isdir(path.parent):  # noqa: PTH112
            return f"there is no directory {str(path.parent)!r}"
        may_create = os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True)
        return None if may_create else f"this process may not create a file in {str(path.parent)!r}"
    except OSError as error:
        return error.strerror
    return None


def _probe_image(
    fact: FileFact, path: PurePosixPath, fd: int, status: os.stat_result, ends: tuple[bytes, bytes], *, write: bool
) -> FileFact:
    from runner.kernel.disk_images import read_image  # here, because it takes 2 ms and only disks need it

    alignment, is_block = _direct_alignment(path), fact.kind == "block"
    return FileFact(
        fact.kind,
        fact.size,
        everyone_reads=fact.everyone_reads,
        image=read_image(path, fd, fact.size, ends, write=write),
        direct=alignment is not None,
        alignment=alignment or 512,
        sparse=fact.kind == "file" and status.st_blocks * 512 < status.st_size,
        sectors=_sectors(fd) if is_block else (512, 512),
        held=is_block and _is_held(path),
        mounted_read_only=not is_block and _mounted_read_only(path),  # a device on such a mount can be written
        error="the device is read-only" if write and is_block and _is_read_only(fd) else None,
    )


def _file_kind(mode: int) -> FileKind:
    match stat.S_IFMT(mode):
        case stat.S_IFREG:
            return "file"
        case stat.S_IFDIR:
            return "directory"
        case stat.S_IFBLK:
            return "block"
        case stat.S_IFCHR:
            return "character"
    return "other"


def _direct_alignment(path: PurePosixPath) -> int | None:
    """Return the alignment in bytes of QEMU's reads with ``O_DIRECT``; ``None`` if such reads do not work.

    QEMU finds it in the same way (``block/file-posix.c``, ``raw_probe_alignment``): XFS reports it. Elsewhere it is the size of the
    shortest read that succeeds; a read of one byte succeeds only where the file begins with a hole, and then QEMU assumes the largest
    alignment. It is 4096 on a disk with sectors of that size. tmpfs before Linux 6.6, and some others, have no ``O_DIRECT``.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with closing(fd), mmap.mmap(-1, mmap.PAGESIZE) as aligned, memoryview(aligned) as whole:
        with contextlib.suppress(OSError):
            return int(struct.unpack("III", fcntl.ioctl(fd, _XFS_IOC_DIOINFO, bytes(12)))[1])
        for length in (1, 512, 1024, 2048, 4096):
            with contextlib.suppress(OSError), whole[:length] as part:
                os.preadv(fd, [part], 0)
                return length if length > 1 else 4096
    return None


def _is_read_only(device: int) -> bool:
    """Tell whether a block device is read-only; the kernel opens it for writing all the same (``blkdev_write_iter``)."""
    return bool(struct.unpack("i", fcntl.ioctl(device, _BLKROGET, bytes(4)))[0])


def _is_held(device: PurePosixPath) -> bool:
    """Tell whether the kernel itself uses the block device exclusively (open(2), ``O_EXCL``)."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def _sectors(fd: int) -> tuple[int, int]:
    logical, physical = (
        struct.unpack("I", fcntl.ioctl(fd, request, bytes(4)))[0] for request in (_BLKSSZGET, _BLKPBSZGET)
    )
    return logical, physical


def read_document(path: PurePosixPath, most: int) -> DocumentFact:
    """Return the content of a file of at most *most* bytes, or the reason why it was not read."""
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return DocumentFact(error="it is not a file")
            if status.st_size > most:
                return DocumentFact(error=f"it has {status.st_size} bytes, of which at most {most} are taken")
            return DocumentFact(os.read(fd, most))
    except OSError as error:
        return DocumentFact(error=error.strerror)
