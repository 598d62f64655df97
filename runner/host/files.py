"""Files that are looked at before the start and handed over as descriptors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath

import attrs

from runner.errors import HostError
from runner.topology.hardware import hugetlb_name

_QCOW2_MAGIC = b"QFI\xfb"
_QCOW2_HEADER = struct.Struct(">IIQI52xQ")
"""Magic, version, backing file's offset and length, …, incompatible features (``docs/interop/qcow2.txt``)."""
_QCOW2_DATA_FILE = 1 << 2
_F_OFD_GETLK = 36
_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of x86-64 and arm64: type, whence, start, length, pid."""
_TAKEN, _REFUSED = 100, 200
_READ, _WRITE, _RESIZE = 0, 1, 3
"""QEMU locks an image byte by byte: 100+p says "I use permission p", 200+p says "nobody else may" (``block/file-posix.c``)."""


@attrs.frozen
class Image:
    """What a disk image says of itself; *backing* names, in words, what other file it takes data from."""

    format: str
    backing: str | None
    locked: bool


@attrs.frozen
class Look:
    """What was found at a path."""

    kind: str
    size: int = 0
    trouble: str | None = None
    everyone_reads: bool = True
    image: Image | None = None


def look(path: PurePosixPath, *, write: bool = False, image: bool = False) -> Look:
    """Look at *path*: what it is, whether it opens for reading (or reading and *write*-ing), what *image* it holds.

    Never raises for what is found there: trouble is part of the answer.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - a pure path
    except OSError as error:
        missing = error.errno in {errno.ENOENT, errno.ENOTDIR}
        return Look("missing") if missing else Look("other", trouble=error.strerror)
    kind = _kind(found.st_mode)
    if kind not in {"file", "block"}:
        return Look(kind)
    everyone = bool(found.st_mode & stat.S_IROTH)
    try:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return Look(kind, found.st_size, error.strerror, everyone)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        return Look(kind, size, None, everyone, _image(fd, write=write) if image else None)
    except OSError as error:
        return Look(kind, found.st_size, error.strerror, everyone)
    finally:
        os.close(fd)


def _kind(mode: int) -> str:
    tests = {"file": stat.S_ISREG, "directory": stat.S_ISDIR, "block": stat.S_ISBLK, "character": stat.S_ISCHR}
    return next((kind for kind, test in tests.items() if test(mode)), "other")


def _image(fd: int, *, write: bool) -> Image:
    header = os.pread(fd, _QCOW2_HEADER.size, 0)
    backing = None
    qcow2 = header.startswith(_QCOW2_MAGIC)
    if qcow2:
        _, version, offset, length, features = _QCOW2_HEADER.unpack(header.ljust(_QCOW2_HEADER.size, b"\0"))
        if offset:
            name = os.pread(fd, min(length, 1023), offset).decode(errors="replace")
            backing = f"the backing file {name!r}"
        elif version > 2 and features & _QCOW2_DATA_FILE:  # noqa: PLR2004 - version 2 has no feature bits
            backing = "an external data file"
    return Image("qcow2" if qcow2 else "raw", backing, _locked(fd, write=write))


def _locked(fd: int, *, write: bool) -> bool:
    """Tell whether a QEMU that is running would keep another one from opening the image."""
    # Who has the image as a disk always refuses others writing and resizing, whether it writes itself or not.
    bytes_in_the_way = [_REFUSED + _READ, _TAKEN + _WRITE, _TAKEN + _RESIZE]
    if write:
        bytes_in_the_way += [_REFUSED + _WRITE, _REFUSED + _RESIZE]
    for byte in bytes_in_the_way:
        answer = fcntl.fcntl(fd, _F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        if _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK:
            return True
    return False


@contextmanager
def opened(path: PurePosixPath, *, write: bool = False) -> Iterator[int]:
    """Hold a descriptor of an existing file."""
    try:
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise HostError(f"cannot open {str(path)!r}") from error
    with closing(fd):
        yield fd


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Hold a descriptor that is ours already."""
    try:
        yield fd
    finally:
        os.close(fd)


def create_memory(name: str, size: int, page_size: int | None = None) -> int:
    """Make *size* bytes of anonymous memory as a file (``memfd_create(2)``), which the caller closes.

    No page of it exists before it is touched. With *page_size* it consists of huge pages of so many bytes.
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
        raise HostError(f"cannot make {size} bytes of memory for {name}") from error
    return fd


@contextmanager
def memory(name: str, size: int) -> Iterator[int]:
    """Hold what :func:`create_memory` makes."""
    with closing(create_memory(name, size)) as fd:
        yield fd


@contextmanager
def filled_memory(name: str, content: bytes) -> Iterator[int]:
    """Hold *content* as a file that can only be read: who looks for a descriptor to read by wants no other (QEMU's fdsets)."""
    with memory(name, len(content)) as fd:
        os.pwrite(fd, content, 0)
        with opened(PurePosixPath(f"/proc/self/fd/{fd}")) as reading:
            yield reading


def copy_new(source: PurePosixPath, path: PurePosixPath) -> None:
    """Make *path* a copy of *source* that only we may use, whole or not at all; one that is there stays as it is."""
    temporary = f"{path}.new"
    try:
        with open(source, "rb") as original:  # noqa: PTH123 - a pure path
            content = original.read()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
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
        raise HostError(f"cannot make {str(path)!r} from {str(source)!r}") from error


@contextmanager
def copied(path: PurePosixPath, *, write: bool = False) -> Iterator[int]:
    """Hold a copy of *path* in memory, which a user who may not read the file can read (or *write*) through the descriptor."""
    with opened(path) as source:
        size = os.fstat(source).st_size
        with memory(path.name, size) as copy:
            try:
                while size and (sent := os.sendfile(copy, source, None, size)):
                    size -= sent
            except OSError as error:
                raise HostError(f"cannot copy {str(path)!r}") from error
            with opened(PurePosixPath(f"/proc/self/fd/{copy}"), write=write) as handed_on:
                yield handed_on


@contextmanager
def directory(path: PurePosixPath) -> Iterator[int]:
    """Hold a descriptor of a directory of ours, which only we may enter; made with its parents when it is missing.

    One that is given to us alone and still empty is closed to others: an ``emptyDir`` of Kubernetes begins with mode 777
    (``pkg/volume/emptydir``).
    """
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)  # noqa: PTH103 - a pure path
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(f"cannot make the directory {str(path)!r}") from error
    with closing(fd):
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o777 and not os.listdir(fd):  # noqa: PTH208, PLR2004 - mode
            os.fchmod(fd, 0o700)
            found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HostError(
                f"cannot use the directory {str(path)!r}: others may write there; name one of our own with --state-dir"
            )
        yield fd


def publish(path: PurePosixPath, content: bytes) -> None:
    """Let *path* hold *content*, whole or not at all."""
    temporary = f"{path}.new"
    try:
        with open(temporary, "wb") as file:  # noqa: PTH123 - a pure path
            file.write(content)
        os.replace(temporary, path)  # noqa: PTH105
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise HostError(f"cannot write {str(path)!r}") from error


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


def remove_directory_if_empty(path: PurePosixPath) -> None:
    """Remove a directory unless something is kept in it."""
    try:
        os.rmdir(path)  # noqa: PTH106 - a pure path
    except OSError as error:
        # EBUSY: a volume is mounted there; EROFS: so it is, in a root file system that is read-only
        if error.errno not in {errno.ENOTEMPTY, errno.EBUSY, errno.EROFS}:
            raise HostError(f"cannot remove {str(path)!r}") from error


def append(path: PurePosixPath) -> int:
    """Open *path* for appending, made when it is missing; the caller closes it. A FIFO without a reader is refused."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
    except OSError as error:
        raise HostError(f"cannot write {str(path)!r}") from error


def memory_limits(root: PurePosixPath, cgroup: str) -> Iterator[int]:
    """Yield the memory limits in bytes (``memory.max``) of *cgroup* and of those above it, as far as they can be seen."""
    for value in _of_each(root, cgroup, "memory.max"):
        if value.isdecimal():
            yield int(value)


def huge_limits(root: PurePosixPath, cgroup: str, page_size: int) -> Iterator[int]:
    """Yield the limits in bytes of huge pages of *page_size* bytes, for pages and for promises of them, as above."""
    for kind in ("max", "rsvd.max"):
        for value in _of_each(root, cgroup, f"hugetlb.{hugetlb_name(page_size)}.{kind}"):
            if value.isdecimal():
                yield int(value)


def cpu_limits(root: PurePosixPath, cgroup: str) -> Iterator[float]:
    """Yield the limits of CPU time (``cpu.max``) of *cgroup* and of those above it, as numbers of CPUs."""
    for value in _of_each(root, cgroup, "cpu.max"):
        quota, _, period = value.partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)


def _of_each(root: PurePosixPath, cgroup: str, name: str) -> Iterator[str]:
    group = root / cgroup.lstrip("/")
    for each in (group, *group.parents):
        yield read_text(each / name).strip()
        if each == root:
            return


def find_program(name: str, directories: Sequence[str] = ()) -> PurePosixPath | None:
    """Return where the program *name* is: in ``PATH``, else in one of *directories*."""
    for directory in (*os.environ.get("PATH", os.defpath).split(":"), *directories):
        path = PurePosixPath(directory) / name  # children start in /, so relative entries mean nothing
        if path.is_absolute() and os.path.isfile(path) and os.access(path, os.X_OK):  # noqa: PTH113 - a pure path
            return path
    return None


def read_text(path: PurePosixPath) -> str:
    """Return what the file holds, or nothing when it cannot be read."""
    try:
        with open(path, errors="replace") as file:  # noqa: PTH123 - a pure path
            return file.read()
    except OSError:
        return ""


class Descriptor:
    """A descriptor somebody owns; closing it twice is closing it once."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        """Close it unless that was done."""
        if self.number >= 0:
            os.close(self.number)
            self.number = -1


@contextmanager
def owned(fd: int) -> Iterator[Descriptor]:
    """Hold a descriptor that somebody may close before the end, when its copy has been handed on."""
    descriptor = Descriptor(fd)
    try:
        yield descriptor
    finally:
        descriptor.close()


def read_document(path: PurePosixPath, most: int) -> tuple[bytes, str | None]:
    """Return what a file of at most *most* bytes holds, and why that could not be read."""
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return b"", "it is not a file"
            if found.st_size > most:
                return b"", f"it has {found.st_size} bytes, of which at most {most} are taken"
            return os.read(fd, most), None
    except OSError as error:
        return b"", error.strerror
