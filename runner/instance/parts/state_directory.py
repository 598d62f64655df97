"""The files of the state directory: those that show others a running guest, and leftovers of a killed runner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from pathlib import PurePosixPath

from runner.base.errors import doing
from runner.kernel.files import closing, discard
from runner.kernel.meeting_point import discard_meeting_point

READY = "ready"
"""Exists while the guest is ready."""

RECEIPT = "receipt.json"
"""The place of every thread, while the guest runs."""


PUBLISHED_AGAIN = 1.0
"""Seconds until the next attempt to write one of them after a failure: a full volume may have room again."""


def discard_signs(path: PurePosixPath) -> None:
    """Remove the signs of a running guest that a killed runner has left in the state directory *path*, if it is ours.

    Does nothing where others than this process's user may write, or while another process has claimed the directory.
    """
    with contextlib.suppress(OSError), closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in (READY, RECEIPT):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)


_LEFT_DIRECTORY, _LEFT_FILE = r"meeting-[0-9a-f]{16}", r"([0-9a-f]{16}\.sock|overlay\.[0-9a-f]{16})"
"""Temporary entries of :mod:`runner.kernel.meeting_point`, :func:`runner.kernel.sockets.listening_pair` and
:func:`runner.kernel.disk_images.overlay`."""


def discard_leftovers(fd: int, path: PurePosixPath) -> None:
    """Remove the leftovers of a killed runner from the state directory *path*, which is claimed and open as *fd*.

    Raises :exc:`~runner.base.errors.HostError`.
    """
    for name in (READY, RECEIPT):
        discard(path / name)
    with doing(f"list the state directory {str(path)!r}"):
        names = os.listdir(fd)
    for name in names:
        if re.fullmatch(_LEFT_DIRECTORY, name, re.ASCII):
            discard_meeting_point(name, fd)
        elif re.fullmatch(_LEFT_FILE, name, re.ASCII):
            discard(path / name)
