"""The file of the controller's Unix socket; :class:`~runner.protocol.unix_server.UnixServer` serves it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from runner.base.errors import HostError, doing
from runner.kernel.files import closing
from runner.kernel.sockets import Manners
from runner.kernel.sockets import listening as listening_in

_BACKLOG = 4096
"""Connections that may wait to be accepted, the default of ``net.core.somaxconn``. Beyond it every client, even of a pod with no other
connection, gets EAGAIN at once, while the controller reads the tree or another pod connects endlessly. A full queue is emptied in 0.25 s.
"""


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Hold a non-blocking socket that accepts connections at *path* from the moment the block begins.

    Any process may connect: what it may do is decided by its identity. Raises :class:`HostError`.
    """
    manners = Manners(f"in {path.parent}", "another controller answers there", "end it first", 0o666, _BACKLOG)
    with doing(f"listen at {path}", remedy="its directory must exist and be writable"):
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with (
        closing(directory),
        listening_in(
            directory, path.name, lambda _: contextlib.suppress(OSError, HostError), manners=manners
        ) as listener,
    ):
        yield listener
