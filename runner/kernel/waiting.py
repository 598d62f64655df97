"""Waiting for descriptors, even while the kernel, this user or this process lacks the resources for it.

trio registers a descriptor with epoll(7) at the first wait for it. The kernel counts all watches of a user together
(``fs.epoll.max_user_watches``; epoll_ctl(2) then fails with ENOSPC), for root across all containers without a user namespace of their own,
so any such container can use them up. No event reports that watches are available again, so the call is repeated: it is made before the
wait, and needs no watch if it succeeds at once.

A descriptor stays registered after its first wait: QEMU's monitor, the guest's console, signals and timers are registered from the start
on.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import trio

from runner.base.events import SharedEvent
from runner.base.values import define

log = logging.getLogger(__name__)

T = TypeVar("T")

SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC})
"""The error numbers for a lack of descriptors, watches or memory of the kernel, this user or this process."""
AGAIN_AFTER = 0.05
"""Seconds until the next attempt."""
LOGGED_EVERY = 60.0
"""Seconds between two lines of the log."""


@define
class Shortages:
    """The number of calls that have failed for lack of a resource."""

    count: int = 0
    _logged_at: float = -math.inf

    def note(self, error: OSError) -> None:
        """Count *error*, and log it unless one was logged a moment ago."""
        self.count += 1
        if time.monotonic() - self._logged_at >= LOGGED_EVERY:
            self._logged_at = time.monotonic()
            log.warning(SharedEvent.KERNEL_SHORT, self.count, error.strerror)


shortages = Shortages()
"""The shortages of this process."""


async def persistently(act: Callable[[], Awaitable[T]]) -> T:
    """Return the result of *act*; while it fails for lack of a resource, try again.

    For calls that have done nothing when they fail: one accept, receive, send or wait. Raises any other ``OSError`` of *act*.

    Example::

        data = await persistently(partial(connection.recv, 4096))
    """
    while True:
        try:
            return await act()
        except OSError as error:
            if error.errno not in SHORT:
                raise
            shortages.note(error)
        await trio.sleep(AGAIN_AFTER)


async def receive(line: socket.socket, size: int) -> bytes:
    """Receive up to *size* bytes from the non-blocking *line*, none at its end, and return them in the same step of the event loop.

    trio's own ``recv`` may read them one step earlier, and a renewal in between would lose them. Raises ``OSError``, also where descriptors
    came, which stay in the queue: to close them could take days (:mod:`runner.kernel.fd_passing`).
    """

    async def attempt() -> bytes:
        # Else the kernel drops urgent data, and closes its descriptors.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        await trio.lowlevel.checkpoint()
        while True:
            with suppress(BlockingIOError):
                data, _, flags, _ = line.recvmsg(size, 0, socket.MSG_PEEK)
                if flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EPROTO, "the peer has sent descriptors")
                return line.recv(len(data)) if data else b""
            await trio.lowlevel.wait_readable(line)

    return await persistently(attempt)


async def readable(fd: int | socket.socket) -> None:
    """Wait until *fd* can be read. Raises as ``trio.lowlevel.wait_readable`` does, except for a lack of resources."""
    await persistently(partial(trio.lowlevel.wait_readable, fd))


async def writable(fd: int | socket.socket) -> None:
    """Wait until *fd* can be written. Raises as ``trio.lowlevel.wait_writable`` does, except for a lack of resources."""
    await persistently(partial(trio.lowlevel.wait_writable, fd))
