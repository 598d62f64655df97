"""Files: held as descriptors, and written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath

from runner.base.errors import HostError, RefusedError, doing
from runner.kernel.limits import limit_behind, limited


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
        if (target := os.readlink(f"/proc/self/fd/{fd}")) != str(path):  # noqa: PTH115 - a magic link
            raise HostError(f"cannot open {str(path)!r}: it lies at {target!r} now")
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
    except RecursionError:  # makedirs calls itself for each parent
        remedy = "name another one with --state-dir"
        raise RefusedError(f"cannot make the directory {str(path)!r}: it is too deep", remedy=remedy) from None
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
    with doing(f"remove {str(path)!r}"):
        os.unlink(path)  # noqa: PTH108 - a pure path


def discard(path: PurePosixPath) -> None:
    """Remove a file that may exist."""
    try:
        os.unlink(path)  # noqa: PTH108 - a pure path
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HostError(f"cannot remove {str(path)!r}") from error


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
    with contextlib.ExitStack() as stack:
        for each in descriptors:
            stack.callback(each.close)
        yield
