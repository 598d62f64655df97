"""Opening files of cgroupfs, procfs and sysfs without waiting for a process that holds a lease on them.

A process whose user owns a regular file may take a lease on it, without any capability and by a descriptor that it may only
read (fcntl(2), ``F_SETLEASE``). Then an open(2) of another process waits until the holder agrees, or for
``fs.lease-break-time``, which is 45 s; and the holder may take the next lease at once. All regular files of these file systems
can be leased, because their file operations do not refuse it (``fs/locks.c``, ``generic_setlease``); of cgroup files none
can on 7.3, where a file system has to provide for leases. All of cgroup v2 is one file system, whichever container has
mounted it; each mount of procfs is one of its own (since Linux 5.8), and so is the sysfs of each network namespace.

With ``O_NONBLOCK`` open(2) fails at once. And no conflicting lease can be had on a file that another process has open: no
write lease while it is open in any way, no read lease while it is open for writing (``check_conflicting_open``); an open(2)
that waits counts already (``do_dentry_open``), so it waits once.
"""

from __future__ import annotations

import errno
import os

LEASED = "a process holds a lease on it (fcntl(2), F_SETLEASE)"
END_LEASE = "end that process, or set fs.leases-enable to 0 on the node"


class LeasedFileError(BlockingIOError):
    """A process holds a lease on the file, so that opening it would wait for that process."""

    remedy = END_LEASE


def open_at_once(path: os.PathLike[str] | str, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """Open *path* and return the descriptor, which the caller closes.

    Raises ``OSError``: :exc:`LeasedFileError` where another process holds a lease.
    """
    try:
        return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except BlockingIOError:
        raise LeasedFileError(errno.EAGAIN, LEASED) from None


def read_at_once(path: os.PathLike[str] | str, *, dir_fd: int | None = None, most: int | None = None) -> bytes:
    """Return the content of *path*, at *most* so many bytes of it. Raises ``OSError`` as :func:`open_at_once` does."""
    # By system calls: of a thread's files, Python's own objects take longer than the kernel.
    fd = open_at_once(path, dir_fd=dir_fd)
    content = b""
    try:
        while (most is None or len(content) < most) and (piece := os.read(fd, 1 << 16)):
            content += piece
    finally:
        os.close(fd)
    return content[:most]
