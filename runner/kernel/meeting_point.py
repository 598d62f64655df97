"""Unix sockets by which two programs of another user meet, which take paths of sockets and may write nowhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import PurePath

from runner.errors import HostError
from runner.kernel.files import closing
from runner.values import frozen

LISTENING = "listening.sock"
"""The socket that is there already."""


@frozen
class MeetingPoint:
    """A *directory* (a descriptor) for sockets, and a socket in it, :data:`LISTENING`, that already listens."""

    directory: int
    listener: socket.socket


@contextmanager
def meeting_point(above: PurePath) -> Iterator[MeetingPoint]:
    """Hold a directory below *above*, which only this process's user may enter; it is removed with the sockets in it.

    Another user that has got its descriptor may connect to sockets in it, and make others, by ``/proc/self/fd/N/…``.
    """
    directory = f"{above}/meeting-{os.urandom(8).hex()}"
    with ExitStack() as held:
        try:
            os.mkdir(directory, 0o700)  # noqa: PTH102 - a pure path
            held.callback(_remove, directory)
            number = held.enter_context(closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)))
            listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            path = f"/proc/self/fd/{number}/{LISTENING}"
            listener.bind(path)
            os.chmod(path, 0o666)  # noqa: PTH101, S103 - see above
            os.fchmod(number, 0o733)
            listener.listen(1)
        except OSError as error:
            raise HostError(f"cannot make a socket in {str(above)!r}") from error
        yield MeetingPoint(number, listener)


def _remove(directory: str) -> None:
    for name in os.listdir(directory):  # noqa: PTH208 - a pure path
        os.unlink(f"{directory}/{name}")  # noqa: PTH108
    os.rmdir(directory)  # noqa: PTH106
