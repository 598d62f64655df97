"""The file of the controller's Unix socket; :class:`~runner.protocol.unix_server.UnixServer` serves it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from runner.base.errors import HostError

_BACKLOG = 4096
"""Connections that wait to be accepted, which is the default of ``net.core.somaxconn``: beyond, a client gets EAGAIN at once,
also one of a pod that has no other, while the controller looks at the tree or another pod connects without end. Emptied in
0.1 s."""


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Hold a non-blocking socket that accepts connections at *path* from the moment the block begins.

    Any process may connect: what it may do is decided by its identity. A socket left behind by a dead controller is
    replaced in one step; one at which a process answers, or a file of another kind, is not touched. Raises
    :class:`HostError`.
    """
    _check_free(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        try:
            temporary.unlink(missing_ok=True)
            listener.bind(str(temporary))
            temporary.chmod(0o666)
            inode = temporary.stat().st_ino
            listener.listen(_BACKLOG)
            temporary.rename(path)
        except OSError as error:
            raise HostError(f"cannot listen at {path}; its directory must exist and be writable") from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:  # not one that a successor has put there meanwhile
                    path.unlink()


def _check_free(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise HostError(f"cannot listen at {path}: something that is no socket is there; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener that is too busy to queue us is alive as well (EAGAIN)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass
        except OSError as error:
            raise HostError(f"cannot listen at {path}") from error
    raise HostError(f"cannot listen at {path}: another controller answers there; end it first")
