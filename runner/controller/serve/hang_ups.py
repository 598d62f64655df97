"""Closing the connections of clients whose descriptors, if they have sent some, delay the close.

A close of received descriptors may take as long as the client likes (:mod:`runner.kernel.fd_passing`), and the controller would answer
no one else meanwhile. Linux 6.16 and later refuse such descriptors. On older kernels threads close the connection. A signal interrupts
a close that can be interrupted; the freeing of memory cannot, but that memory was charged to the client's pod.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable

import attrs
import trio

from runner.kernel.fd_passing import holds_fds

_MOST = 16
"""The most threads that close connections; further connections wait for a thread."""
_MOST_WAITING = 1024
"""The most connections that wait; the event loop closes further ones, and is interrupted as well."""
_INTERRUPTED_AFTER = 0.001
"""Seconds after which a close(2) that has not returned is interrupted, again and again."""


def _nothing(*_: object) -> None:
    pass


@attrs.define(eq=False)
class HangUps:
    """Closes connections; made by the main thread. Its threads end when there is nothing to be closed."""

    _lock: threading.Lock = attrs.field(factory=threading.Lock)
    _waiting: deque[int] = attrs.field(factory=deque)
    """The descriptors of connections that a thread is to close."""
    _threads: int = 0
    _closing: set[int] = attrs.field(factory=set)
    """The threads that close one at the moment."""
    _interrupting: bool = False

    def __attrs_post_init__(self) -> None:
        signal.signal(signal.SIGURG, _nothing)  # a signal that is ignored interrupts nothing

    def hang_up(self, connection: trio.socket.SocketType) -> None:
        """Close *connection*."""
        if not holds_fds(connection):
            connection.close()
            return
        trio.lowlevel.notify_closing(connection)
        fd = connection.detach()
        with self._lock:
            if waits := len(self._waiting) < _MOST_WAITING:
                self._waiting.append(fd)
                if self._threads < _MOST:
                    self._threads += _started(self._close_all)
        if not waits:
            self._close(fd)

    def _close_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                fd = self._waiting.popleft()
            self._close(fd)

    def _close(self, fd: int) -> None:
        me = threading.get_ident()
        with self._lock:
            self._closing.add(me)
            self._interrupting = self._interrupting or _started(self._interrupt)
        os.close(fd)
        with self._lock:
            self._closing.discard(me)

    def _interrupt(self) -> None:
        while True:
            time.sleep(_INTERRUPTED_AFTER)  # noqa: TID251  # it is no task, and no event ends the wait
            with self._lock:
                if not self._closing:
                    self._interrupting = False
                    return
                for each in self._closing:
                    signal.pthread_kill(each, signal.SIGURG)


def _started(work: Callable[[], None]) -> bool:
    """Start a thread that does *work*; return ``False`` where none can be had, so that the next one is to be tried."""
    try:
        trio.lowlevel.start_thread_soon(work, _nothing)
    except RuntimeError:
        return False
    return True
