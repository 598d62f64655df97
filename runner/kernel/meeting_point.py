"""Unix sockets through which two programs of another user connect: they need socket paths, and may write to no directory."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import PurePath

from runner.base.errors import doing
from runner.base.values import frozen
from runner.kernel.files import closing
from runner.kernel.limits import limited

PREFIX = "meeting-"
"""The beginning of the directory's name; 16 hexadecimal digits follow."""
CPR_SOCKET, MAIN_SOCKET = "cpr.sock", "main.sock"
"""The sockets in it."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC  # not O_PATH: QEMU ends on a descriptor that takes no F_SETFL


@frozen
class MeetingPoint:
    """A directory (its descriptor) with two listening sockets."""

    directory: int
    cpr: socket.socket
    main: socket.socket


@contextmanager
def meeting_point(above: PurePath, recorded: Callable[[str], AbstractContextManager[None]]) -> Iterator[MeetingPoint]:
    """Hold a directory with two sockets below *above*, which only this process's user may enter.

    Another user that has received the directory's descriptor may connect to the sockets, by ``/proc/self/fd/N/NAME``, and change nothing.
    At the end they are removed in a block of *recorded*, which takes the error if that fails.
    """
    name = f"{PREFIX}{os.urandom(8).hex()}"
    with ExitStack() as stack:
        try:
            at = stack.enter_context(closing(os.open(above, _DIRECTORY)))
            os.mkdir(name, 0o700, dir_fd=at)
            stack.callback(_remove, name, at, recorded)
            directory = stack.enter_context(closing(os.open(name, _DIRECTORY, dir_fd=at)))
            cpr, main = (stack.enter_context(_listening(directory, each)) for each in (CPR_SOCKET, MAIN_SOCKET))
            os.fchmod(directory, 0o711)
        except OSError as error:
            raise limited(f"cannot make sockets in {str(above)!r}", error) from error
        yield MeetingPoint(directory, cpr, main)


@contextmanager
def _listening(directory: int, name: str) -> Iterator[socket.socket]:
    from runner.kernel.sockets import listen_at  # this module is used before trio is imported

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listen_at(listener, f"/proc/self/fd/{directory}/{name}", 1, 0o666)  # for another program's user: see above
        yield listener


def _remove(name: str, at: int, recorded: Callable[[str], AbstractContextManager[None]]) -> None:
    with recorded("remove the directory in which two QEMUs met"):
        discard_meeting_point(name, at)


def discard_meeting_point(name: str, at: int) -> None:
    """Remove the directory *name* of sockets in the directory *at* (a descriptor).

    Raises :exc:`~runner.base.errors.HostError`.
    """
    with doing(f"remove {name!r}"):
        with closing(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=at)) as directory:
            for each in (CPR_SOCKET, MAIN_SOCKET):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each, dir_fd=directory)
        os.rmdir(name, dir_fd=at)
