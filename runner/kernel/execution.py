"""Replacing this process's program (execve(2)) while it keeps its pid, its children and the named descriptors.

Imported when a runner is renewed, and not before.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn

from runner.base.errors import HostError, doing
from runner.kernel.files import closing
from runner.kernel.limits import limited

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@contextmanager
def memory(name: str) -> Iterator[int]:
    """Hold a descriptor of an empty file in memory (memfd_create(2))."""
    try:
        fd = os.memfd_create(f"instance-runner-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise limited(f"cannot make memory for the {name}", error) from error
    with closing(fd):
        yield fd


@contextmanager
def sealed_memory(name: str, content: bytes) -> Iterator[int]:
    """Hold a descriptor of *content* that no process can change any more ("file sealing" of memfd_create(2))."""
    with memory(name) as fd:
        with doing(f"write the {name}"):
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
            seal(fd)
        yield fd


def seal(fd: int) -> None:
    """Let no process change the file in memory *fd* any more. Raises ``OSError``."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def identity(number: int) -> list[int]:
    """Return device, inode and type of descriptor *number*, which identify its file. Raises ``OSError``."""
    status = os.fstat(number)
    return [status.st_dev, status.st_ino, status.st_mode & 0o170000]


def claim_inherited(expected: Mapping[str, list[int]]) -> None:
    """Check that the inherited descriptors match *expected*, identities by number, and set close-on-exec on them.

    Raises :exc:`~runner.base.errors.HostError` for one that is not open, or of another file.
    """
    for number, file in expected.items():
        with doing(f"take over descriptor {number}"):
            if identity(int(number)) != file:
                raise HostError(f"cannot take over descriptor {number}: it is of another file")
            os.set_inheritable(int(number), False)


def execute(argv: Sequence[str], environment: Mapping[str, str], descriptors: Iterable[int]) -> NoReturn:
    """Become the program *argv*, which inherits *descriptors*, and those that are inheritable already.

    Raises :exc:`~runner.base.errors.HostError`, in which case nothing has changed.
    """
    numbers = list(descriptors)
    try:
        for number in numbers:
            os.set_inheritable(number, True)
        os.execve(argv[0], list(argv), environment)
    except OSError as error:
        for number in numbers:
            os.set_inheritable(number, False)
        raise HostError(f"cannot execute {argv[0]!r}") from error
