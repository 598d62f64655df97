"""Files: probed before the start, held as descriptors, and written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath

from runner.base.errors import HostError, RefusedError
from runner.facts.disk import MISSING, DocumentFact, FileFact, FileKind
from runner.facts.file_formats import HEAD, TAIL, identify
from runner.kernel.limits import limit_behind, limited

_XFS_IOC_DIOINFO = 0x800C581E
"""``libxfs/xfs_fs.h``: the alignments of direct I/O in memory and in the file, and the most bytes of it."""
_BLKSSZGET, _BLKPBSZGET, _BLKROGET = 0x1268, 0x127B, 0x125E  # include/uapi/linux/fs.h


def probe_file(path: PurePosixPath, *, write: bool = False, image: bool = False) -> FileFact:
    """Return the type of *path*, whether it opens for reading (or reading and *write*-ing), and what it holds.

    With *image* it is examined as a disk. Never raises: an error is part of the result.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - a pure path
    except OSError as error:
        missing = error.errno in {errno.ENOENT, errno.ENOTDIR}
        return MISSING if missing else FileFact("other", error=error.strerror, error_number=error.errno or 0)
    kind = _file_kind(found.st_mode)
    if kind not in {"file", "block"}:
        return FileFact(kind, mounted_read_only=kind == "directory" and _mounted_read_only(path))
    everyone_reads = bool(found.st_mode & stat.S_IROTH)
    try:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        with closing(fd):
            size = os.lseek(fd, 0, os.SEEK_END)
            ends = os.pread(fd, HEAD, 0), os.pread(fd, TAIL, max(0, size - TAIL))
            if image:
                fact = FileFact(kind, size, everyone_reads=everyone_reads)
                return _probe_image(fact, path, fd, found, ends, write=write)
            return FileFact(kind, size, everyone_reads=everyone_reads, format=identify(*ends))
    except OSError as error:
        read_error = probe_file(path).error if write else error.strerror
        return FileFact(kind, found.st_size, error.strerror, read_error, everyone_reads, error_number=error.errno or 0)


def _mounted_read_only(path: PurePosixPath) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def free_space(path: PurePosixPath) -> int | None:
    """Return how many bytes a user other than root can write below *path*, or below its first existing parent."""
    for each in (path, *path.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(each)
            return found.f_bavail * found.f_frsize
    return None


def why_not_appended(path: PurePosixPath) -> str | None:
    """Return the reason why :func:`append` would fail for *path*, or ``None``; creates nothing."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            refused = {stat.S_IFLNK: errno.ELOOP, stat.S_IFDIR: errno.EISDIR}.get(stat.S_IFMT(found.st_mode))
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
    fact: FileFact, path: PurePosixPath, fd: int, found: os.stat_result, ends: tuple[bytes, bytes], *, write: bool
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
        sparse=fact.kind == "file" and found.st_blocks * 512 < found.st_size,
        sectors=_sectors(fd) if is_block else (512, 512),
        held=is_block and _is_held(path),
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


@contextmanager
def opened(path: PurePosixPath, *, write: bool = False, direct: bool = False, following: bool = True) -> Iterator[int]:
    """Hold a descriptor of an existing file; *direct* bypasses the page cache; unless *following*, a symbolic link is refused."""
    flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
    flags |= 0 if following else os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise limited(f"cannot open {str(path)!r}", error) from error
    with closing(fd):
        yield fd


@contextmanager
def opened_in_place(path: PurePosixPath) -> Iterator[int]:
    """Hold a descriptor of the file at *path*, no component of which may have become a symbolic link."""
    with opened(path) as fd:
        if (found := os.readlink(f"/proc/self/fd/{fd}")) != str(path):  # noqa: PTH115 - a magic link
            raise HostError(f"cannot open {str(path)!r}: it lies at {found!r} now")
        yield fd


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Hold the descriptor *fd*, which the caller owns, and close it at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def reopened(fd: int) -> Iterator[int]:
    """Hold the file of *fd* opened again in the same way: its locks (``F_OFD_SETLK``) are its own.

    A descriptor of a device is copied: a cgroup's device filter may no longer allow opening it.
    """
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        number = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC) if regular else os.dup(fd)
    except OSError as error:
        raise limited(f"cannot open the file of descriptor {fd} again", error) from error
    with closing(number):
        yield number


def create_memory(name: str, size: int, page_size: int | None = None) -> int:
    """Create a file of *size* bytes of anonymous memory (``memfd_create(2)``) and return its descriptor, which the caller closes.

    Each page is allocated when it is first touched. With *page_size* it consists of huge pages of that many bytes.
    """
    huge = 0 if page_size is None else os.MFD_HUGETLB | (page_size.bit_length() - 1) << os.MFD_HUGE_SHIFT
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | huge)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise limited(f"cannot make {size} bytes of memory for {name}", error) from error
    return fd


@contextmanager
def memory(name: str, size: int) -> Iterator[int]:
    """Hold a descriptor of the file that :func:`create_memory` creates."""
    with closing(create_memory(name, size)) as fd:
        yield fd


@contextmanager
def filled_memory(name: str, content: bytes) -> Iterator[int]:
    """Hold *content* as a read-only file, which QEMU requires for a descriptor in an fdset of a read-only file."""
    with memory(name, len(content)) as fd:
        os.pwrite(fd, content, 0)
        with opened(PurePosixPath(f"/proc/self/fd/{fd}")) as reading:
            yield reading


def copy_new(source: PurePosixPath, path: PurePosixPath) -> None:
    """Make *path* a copy of *source* with mode 600, whole or not at all; an existing file is left as it is."""
    temporary = f"{path}.new"
    try:
        with open(source, "rb") as original:  # noqa: PTH123 - a pure path
            content = original.read()
        with contextlib.suppress(FileNotFoundError):  # left by a runner that was killed
            os.unlink(temporary)  # noqa: PTH108
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as copy:  # noqa: PTH123 - a descriptor
                copy.write(content)
                copy.flush()
                os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # unlike a rename it replaces nothing
        finally:
            os.unlink(temporary)  # noqa: PTH108
    except OSError as error:
        raise limited(f"cannot make {str(path)!r} from {str(source)!r}", error) from error


@contextmanager
def copied(path: PurePosixPath, *, write: bool = False) -> Iterator[int]:
    """Hold a copy of *path* in memory, for a user who may read (or *write*) the descriptor but not the file."""
    with opened(path) as source:
        size = os.fstat(source).st_size
        with memory(path.name, size) as copy:
            try:
                while size and (sent := os.sendfile(copy, source, None, size)):
                    size -= sent
            except OSError as error:
                raise limited(f"cannot copy {str(path)!r}", error) from error
            with opened(PurePosixPath(f"/proc/self/fd/{copy}"), write=write) as copied_fd:
                yield copied_fd


@contextmanager
def directory(path: PurePosixPath) -> Iterator[int]:
    """Hold a descriptor of a directory that only this process's user may write, created with its parents when missing.

    An empty directory of this user with mode 777 is closed to others first: an ``emptyDir`` of Kubernetes begins with that
    mode (``pkg/volume/emptydir``), and set-group-ID where the pod has an ``fsGroup`` (``pkg/volume/volume_linux.go``).

    Raises :exc:`~runner.base.errors.RefusedError`, before anything permanent was changed.
    """
    _refuse_replaceable(path)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)  # noqa: PTH103 - a pure path
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(f"cannot make the directory {str(path)!r}", error) from error
    with closing(fd):
        found = os.fstat(fd)
        open_to_all = stat.S_IMODE(found.st_mode) & ~stat.S_ISGID == 0o777  # noqa: PLR2004 - a mode
        if found.st_uid == os.geteuid() and open_to_all and not os.listdir(fd):  # noqa: PTH208
            os.fchmod(fd, 0o700)
            found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RefusedError(
                f"cannot use the directory {str(path)!r}: others may write there",
                remedy="name another one with --state-dir",
            )
        yield fd


def _refuse_replaceable(path: PurePosixPath) -> None:
    """Refuse a directory that other users may rename and replace, by another directory or by a link: one that is no mount point."""
    real = PurePosixPath(os.path.realpath(path))
    for each in (real, *real.parents):
        with contextlib.suppress(OSError):  # it is made
            mode = os.stat(each.parent).st_mode  # noqa: PTH116 - a pure path
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not os.path.ismount(each):
                raise RefusedError(
                    f"cannot use the directory {str(path)!r}: others may put another one in its place, as all may write in "
                    f"{str(each.parent)!r}",
                    remedy="name one with --state-dir that is a volume's own, or whose parents only root may write",
                )


def claim(fd: int, path: PurePosixPath) -> None:
    """Lock the directory *fd*, which is at *path*, for as long as it is open.

    Raises :exc:`~runner.base.errors.RefusedError` if another process has locked it, or its file system takes no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RefusedError(
            f"cannot use the directory {str(path)!r}: another runner uses it",
            remedy="give each instance a --state-dir of its own",
        ) from None
    except OSError as error:
        raise _refused(f"cannot lock the directory {str(path)!r}", error) from error


def _refused(sentence: str, error: OSError) -> RefusedError:
    return RefusedError(sentence, remedy=limit_behind(error.errno or 0, "file"))


def publish(path: PurePosixPath, content: bytes) -> None:
    """Write *content* to *path*, whole or not at all, replacing a file or link at that path."""
    temporary = f"{path}.new"
    try:
        with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
            os.unlink(temporary)  # noqa: PTH108 - a pure path
        with open(temporary, "xb") as file:  # noqa: PTH123 - as above; O_EXCL follows no link
            file.write(content)
        os.replace(temporary, path)  # noqa: PTH105
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise limited(f"cannot write {str(path)!r}", error) from error


def remove(path: PurePosixPath) -> None:
    """Remove a file that exists."""
    try:
        os.unlink(path)  # noqa: PTH108 - a pure path
    except OSError as error:
        raise HostError(f"cannot remove {str(path)!r}") from error


def discard(path: PurePosixPath) -> None:
    """Remove a file that may exist."""
    try:
        os.unlink(path)  # noqa: PTH108 - a pure path
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HostError(f"cannot remove {str(path)!r}") from error


def discard_left(path: PurePosixPath, names: Sequence[str]) -> None:
    """Remove the files *names* that a killed process has left in the directory *path*; never raises.

    Does nothing where others than this process's user may write, or while another process has claimed the directory.
    """
    with contextlib.suppress(OSError), closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)


def remove_directory_if_empty(path: PurePosixPath) -> None:
    """Remove a directory unless it holds something."""
    try:
        os.rmdir(path)  # noqa: PTH106 - a pure path
    except OSError as error:
        # EBUSY: a volume is mounted there; EROFS: the same in a read-only root file system
        if error.errno not in {errno.ENOTEMPTY, errno.EBUSY, errno.EROFS}:
            raise HostError(f"cannot remove {str(path)!r}") from error


def append(path: PurePosixPath) -> int:
    """Open *path* for appending, created when missing, and return the descriptor, which the caller closes.

    A FIFO without a reader and a symbolic link are refused.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o640)
    except OSError as error:
        raise limited(f"cannot write {str(path)!r}", error) from error


def find_program(name: str, directories: Sequence[str] = ()) -> PurePosixPath | None:
    """Return the path of the program *name*: in ``PATH``, else in one of *directories*."""
    for directory in (*os.environ.get("PATH", os.defpath).split(":"), *directories):
        path = PurePosixPath(directory) / name  # children start in /, so relative entries mean nothing
        if path.is_absolute() and os.path.isfile(path) and os.access(path, os.X_OK):  # noqa: PTH113 - a pure path
            return path
    return None


class Descriptor:
    """An owned descriptor; closing it again does nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


@contextmanager
def owned(fd: int) -> Iterator[Descriptor]:
    """Hold a descriptor that may be closed before the end, once a child has inherited its copy."""
    descriptor = Descriptor(fd)
    try:
        yield descriptor
    finally:
        descriptor.close()


@contextmanager
def all_closed(descriptors: Iterable[Descriptor]) -> Iterator[None]:
    """Close every one of *descriptors* at the end."""
    with contextlib.ExitStack() as held:
        for each in descriptors:
            held.callback(each.close)
        yield


def read_document(path: PurePosixPath, most: int) -> DocumentFact:
    """Return the content of a file of at most *most* bytes, or the reason why it was not read."""
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return DocumentFact(error="it is not a file")
            if found.st_size > most:
                return DocumentFact(error=f"it has {found.st_size} bytes, of which at most {most} are taken")
            return DocumentFact(os.read(fd, most))
    except OSError as error:
        return DocumentFact(error=error.strerror)
