"""The remedies of errors in opening and writing files, by ``errno``, whatever the file is for."""

from __future__ import annotations

import errno

_REMEDIES = {
    errno.EROFS: "mount its file system for writing",
    errno.ETXTBSY: "it runs as a program, or is swap space of this machine: end that first",
    errno.ELOOP: "its symbolic links lead in a circle: name the file itself",
    errno.EFBIG: "raise the limit of file sizes (`ulimit -f`), or use a file system that takes files of this size",
    errno.ENOSPC: "make room on its volume",
    errno.EDQUOT: "raise the quota of its volume",
    errno.EIO: "the storage below it fails: `dmesg` says which",
    errno.ENXIO: "the device is not there any more",
    errno.ENODEV: "the device is not there any more",
    errno.ENOMEDIUM: "the device has no medium",
    errno.ESTALE: "the file server has lost it: mount the volume again",
    errno.ENOLCK: "its file system takes no locks now: use one that does, or mount it with its lock service (NFS)",
    errno.EBUSY: "another program has it for itself, such as a mount or a device mapper",
    errno.EMFILE: "raise this process's limit of open files (RLIMIT_NOFILE)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENAMETOOLONG: "shorten the path",
}
"""Errors for a missing permission are not included, because their remedies depend on the use of the file."""


def remedy_of(number: int) -> str:
    """Return the remedy of the ``errno`` *number*; empty if none fits every file."""
    return _REMEDIES.get(number, "")
