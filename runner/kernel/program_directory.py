"""Programs that operators name while the guest runs: who may change them, and their digests.

The digest of a directory, which holds a program of this project for a renewal, is ``sha256:`` and the output of this command in it, for
names without a line end or a backslash::

    find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum

That of a file, such as a QEMU, is what ``sha256sum`` prints.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Final

import trio

from runner.base.errors import RefusedError
from runner.kernel.files import closing

PREFIX: Final = "sha256:"
MOST_BYTES: Final = 64 << 20
"""Bytes of all files of a program: those of the image have 30 MB."""
_READ = 1 << 20
"""Bytes that are read at once."""


async def check_file(path: PurePosixPath, digest: str | None) -> None:
    """Raise :exc:`~runner.base.errors.RefusedError` unless only root may change the file *path*, and it has this *digest*.

    With ``None`` any content is accepted. Other tasks run meanwhile: a QEMU of 100 MB takes 0.1 s or longer.
    """
    check_owners(path)
    if digest is None:
        return
    content = hashlib.sha256()
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as file:
            while piece := os.read(file, _READ):
                content.update(piece)
                await trio.lowlevel.checkpoint()
    except OSError as error:
        raise RefusedError(f"cannot read {str(path)!r}") from error
    require_digest(PREFIX + content.hexdigest(), digest, path)


def require_digest(found: str, digest: str, path: PurePosixPath) -> None:
    """Raise :exc:`~runner.base.errors.RefusedError` unless *found*, the digest of *path*, equals *digest*."""
    if found != digest:
        raise RefusedError(f"cannot use {str(path)!r}: its digest is {found}, not {digest}")


def check_owners(path: PurePosixPath) -> None:
    """Raise :exc:`~runner.base.errors.RefusedError` if any user but root may change the file or directory at *path*.

    Every directory above it is checked, too, because a user who may write a directory can replace the files in it; with the sticky bit,
    only their owner can (unlink(2)).
    """
    for above in reversed(path.parents):
        _check_owner(str(above), sticky=True)
    _check_owner(str(path))


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """Return the digest of a directory that has these *files*; see :func:`files_of`."""
    lines = hashlib.sha256()
    for name, content in files:
        lines.update(os.fsencode(f"{hashlib.sha256(content).hexdigest()}  ./{name}\n"))
    return PREFIX + lines.hexdigest()


def files_of(directory: PurePosixPath) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file in *directory*, in the order of its digest.

    Raises :exc:`~runner.base.errors.RefusedError`, also for symbolic links and special files: a digest says nothing of them.
    """
    left = MOST_BYTES
    try:
        for path in sorted(_files(str(directory)), key=os.fsencode):
            with open(path, "rb") as file:  # noqa: PTH123 - a text, of which there may be thousands
                content = file.read(left + 1)
            left -= len(content)
            if left < 0:
                raise RefusedError(f"cannot use {str(directory)!r}: it has more than {MOST_BYTES >> 20} MiB")
            yield os.path.relpath(path, directory), content
    except OSError as error:
        raise RefusedError(f"cannot read {str(error.filename or directory)!r}") from error


def _files(directory: str) -> Iterator[str]:
    with os.scandir(directory) as entries:
        for entry in entries:
            _check_owner(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            else:
                yield entry.path


def _check_owner(path: str, *, sticky: bool = False) -> None:
    try:
        status = os.lstat(path)
    except OSError as error:
        raise RefusedError(f"cannot use {path!r}") from error
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        raise RefusedError(f"cannot use {path!r}: it is neither a file nor a directory, and a program has no others")
    if "\n" in path or "\\" in path:
        raise RefusedError(
            f"cannot use {path!r}: its name has a line end or a backslash, which sha256sum writes otherwise"
        )
    kept = sticky and bool(status.st_mode & stat.S_ISVTX)
    if status.st_uid != 0 or (status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not kept):
        raise RefusedError(f"cannot use {path!r}: others than root may change it", remedy="give it to root, mode go-w")
