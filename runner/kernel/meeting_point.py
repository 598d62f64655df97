"""Unix sockets by which two programs of another user meet, which take paths of sockets and may write nowhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import PurePath

from runner.base.errors import HostError
from runner.base.values import frozen
from runner.kernel.files import closing, remove_tree

PREFIX = "meeting-"
"""The beginning of the directory's name; 16 hexadecimal digits follow."""
LISTENING = "listening.sock"
"""The socket that is there already."""


@frozen
class MeetingPoint:
    """A *directory* (a descriptor) for sockets, and a socket in it, :data:`LISTENING`, that already listens."""

    directory: int
    listener: socket.socket


@contextmanager
def meeting_point(above: PurePath, recorded: Callable[[str], AbstractContextManager[None]]) -> Iterator[MeetingPoint]:
    """Hold a directory below *above*, which only this process's user may enter.

    Another user that has got its descriptor may connect to sockets in it, and make others, by ``/proc/self/fd/N/…``; also
    directories and files, with which it is removed in a block of *recorded*, which takes the error if that fails.
    """
    directory = f"{above}/{PREFIX}{os.urandom(8).hex()}"
    with ExitStack() as held:
        try:
            os.mkdir(directory, 0o700)  # noqa: PTH102 - a pure path
            held.callback(_remove, above, PurePath(directory).name, recorded)
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


def _remove(above: PurePath, name: str, recorded: Callable[[str], AbstractContextManager[None]]) -> None:
    with (
        recorded("remove the directory in which two QEMUs met"),
        closing(os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as at,
    ):
        remove_tree(name, at)
