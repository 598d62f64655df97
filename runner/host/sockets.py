"""Unix sockets that exist before the process that serves them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from runner.errors import HostError

Socket = socket.socket


@contextmanager
def connected_pair(purpose: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Hold both ends of a stream; whoever passes an end on closes it here afterwards."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise HostError(f"cannot make a socket pair for {purpose}") from error
    with ours, theirs:
        yield ours, theirs


@contextmanager
def listening_pair(purpose: str, directory: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Hold a listening socket and the one connection that waits in its queue.

    virtiofsd serves the first connection it accepts. The socket is therefore bound in *directory* (a descriptor of a
    directory only we may enter) and unlinked before anybody else learns of it; an abstract address could be raced for
    by any process of the network namespace.
    """
    with ExitStack() as held:
        try:
            listener, client = (held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(2))
            _introduce(listener, client, directory)
        except OSError as error:
            raise HostError(f"cannot make a listening socket for {purpose}") from error
        yield listener, client


@contextmanager
def listening_in(directory: int, name: str, purpose: str) -> Iterator[socket.socket]:
    """Hold a socket that accepts connections as *name* in *directory* (a descriptor); nobody but our user may connect.

    One that a predecessor has left behind is replaced; it is gone with the block.
    """
    path, new = (f"/proc/self/fd/{directory}/{each}" for each in (name, f"{name}.new"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)  # noqa: PTH108 - a path through a descriptor
            listener.bind(new)
            try:
                os.chmod(new, 0o600)  # noqa: PTH101 - the same
                listener.listen(8)
                os.rename(new, path)  # noqa: PTH104
            except OSError:
                os.unlink(new)  # noqa: PTH108
                raise
        except OSError as error:
            raise HostError(f"cannot make a listening socket for {purpose}") from error
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108


def _introduce(listener: socket.socket, client: socket.socket, directory: int) -> None:
    # Through the descriptor, because sun_path holds 107 bytes and the directory's own path may be longer.
    path = f"/proc/self/fd/{directory}/{os.urandom(8).hex()}.sock"
    listener.bind(path)
    try:
        listener.listen(1)
        client.connect(path)
    finally:
        os.unlink(path)  # noqa: PTH108 - a path through a descriptor
