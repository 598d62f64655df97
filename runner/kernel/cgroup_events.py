"""Waiting for the last process of a cgroup to end, by an open descriptor of its ``cgroup.events``.

A process that has such a descriptor needs neither a mount of the hierarchy nor any right.
"""

from __future__ import annotations

import contextlib
import os
import select

import trio

from runner.kernel.waiting import persistently


async def emptied(fd: int) -> None:
    """Wait until the group whose ``cgroup.events`` is open as *fd* has no live member, or is gone.

    The file is ready for ``EPOLLPRI`` when it has changed since it was read ("[Un]populated Notification" of
    cgroup-v2.rst; ``kernfs_generic_poll``). The end of a group that is removed within 10 ms of another change may never be
    reported (``CGROUP_FILE_NOTIFY_MIN_INTV``), so the caller looks again after some time.
    """

    async def wait() -> None:
        with select.epoll() as queue:
            with contextlib.suppress(PermissionError):  # a file that is no cgroup's; it reports nothing
                queue.register(fd, select.EPOLLPRI)
            await trio.lowlevel.checkpoint()
            while _populated(fd):
                await trio.lowlevel.wait_readable(queue.fileno())

    await persistently(wait)


def _populated(fd: int) -> bool:
    try:
        return b"populated 1" in os.pread(fd, 4096, 0)
    except OSError:  # ENODEV: it was removed
        return False
