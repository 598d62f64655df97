"""Directories that a guest may write to, and whether a path leads through one of them.

The guest may replace any file in such a directory, also by a link, between two accesses of this program. So no path that this program uses
may lead into one: not through a link, nor through another mount of that directory or of one below it. Nor may the path's file have a hard
link there, through which the guest could write to it.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import PurePosixPath

from runner.base.values import frozen
from runner.facts.roots import Roots
from runner.kernel.mounts import read_mounts

_MOST_LINKS = 40
"""Links on one path that the kernel follows (``MAXSYMLINKS``, ``include/linux/namei.h``)."""


_MOST_ENTRIES = 100_000
"""Entries of a directory, and of those below, in which a hard link is looked for: 0.1 s on a local file system."""


@frozen
class _MountedDirectory:
    """A directory, wherever it is mounted: the *device* of its file system, and its *path* from the root of that."""

    device: str
    path: PurePosixPath

    def is_below(self, other: _MountedDirectory) -> bool:
        return self.device == other.device and self.path.is_relative_to(other.path)


@frozen
class _Shared:
    """A shared directory: its *path* as given, its *real* path, and the *places* in it: itself, and the mounts below."""

    path: PurePosixPath
    real: PurePosixPath
    places: tuple[_MountedDirectory, ...]


@frozen
class SharedDirectories:
    """The directories *shared*, and the directory visible at each mount point of this process."""

    shared: tuple[_Shared, ...]
    mounts: dict[PurePosixPath, _MountedDirectory]

    def holding(self, path: PurePosixPath) -> PurePosixPath | None:
        """Return the first of the directories through which *path*, which need not exist, leads; ``None`` if there is none.

        A directory also counts if it has a hard link to the same file, or too many entries to rule one out.
        """
        for directory, _ in _lookups(path):
            if (shared := self._having(directory)) is not None:
                return shared
        try:
            status = os.stat(path)  # noqa: PTH116 - a pure path
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_nlink == 1:
            return None
        return next((shared.path for shared in self.shared if may_have(os.fspath(shared.path), status)), None)

    def leading_to(self, path: PurePosixPath) -> PurePosixPath | None:
        """Return the first of the directories in which a component of *path* is looked up, so that its guest could redirect the path.

        ``None`` if there is none. A mount point in one of them is allowed as the target: the kernel lets no process rename a mount point of
        its own mount namespace (rename(2), ``EBUSY``).
        """
        for directory, name in _lookups(path):
            if name in {"", ".."} or directory / name in self.mounts:
                continue
            if (shared := self._having(directory)) is not None:
                return shared
        return None

    def lies_below(self, path: PurePosixPath) -> bool:
        """Tell whether one of the directories lies below *path*."""
        real = PurePosixPath(os.path.realpath(path))
        return any(each.real.is_relative_to(real) for each in self.shared)

    def _having(self, directory: PurePosixPath) -> PurePosixPath | None:
        """Return the first of the directories that equals or contains the real path *directory*, here or at another mount of it."""
        place = _place(directory, self.mounts)
        for shared in self.shared:
            if directory.is_relative_to(shared.real) or any(map(place.is_below, shared.places)):
                return shared.path
        return None


def shared_directories(paths: Iterable[PurePosixPath], roots: Roots) -> SharedDirectories:
    """Return the directories *paths*, with the mounts that this process has now. Raises :exc:`~runner.base.errors.HostError`."""
    given = tuple(paths)
    found = read_mounts(roots.proc) if given else []
    mounts = [(each.point, _MountedDirectory(each.device, each.root)) for each in found]
    visible = dict(mounts)  # of several mounts at one point the last hides the others
    return SharedDirectories(tuple(_shared(path, mounts, visible) for path in given), visible)


def _shared(
    path: PurePosixPath,
    mounts: list[tuple[PurePosixPath, _MountedDirectory]],
    visible: dict[PurePosixPath, _MountedDirectory],
) -> _Shared:
    real = PurePosixPath(os.path.realpath(path))
    # also a hidden one: it is there again when the mount over it goes
    below = [place for point, place in mounts if point.is_relative_to(real)]
    return _Shared(path, real, (_place(real, visible), *below))


def _place(directory: PurePosixPath, mounts: dict[PurePosixPath, _MountedDirectory]) -> _MountedDirectory:
    """Return the place of the real path *directory*."""
    for point in (directory, *directory.parents):
        if (mounted := mounts.get(point)) is not None:
            return _MountedDirectory(mounted.device, mounted.path / directory.relative_to(point))
    return _MountedDirectory("", directory)


def may_have(directory: str, file: os.stat_result, most: int = _MOST_ENTRIES) -> bool:
    """Tell whether *file* may have a name in *directory* or below; with more than *most* entries there, assume so."""
    left, seen = [directory], 0
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if (seen := seen + 1) > most:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    elif entry.inode() == file.st_ino and os.path.samestat(entry.stat(follow_symlinks=False), file):
                        return True
        except OSError:  # the entry is gone, or its target is
            continue
    return False


@frozen
class Followed:
    """The file that a path leads to."""

    place: PurePosixPath
    """The path without links; from a component that is missing, or may not be looked up, on as given."""
    link_owners: frozenset[int]
    """The users of the symbolic links on the way."""


def followed(path: PurePosixPath) -> Followed:
    """Follow the absolute *path*.

    The owner and the target of a link are read through one descriptor, and each name is looked up in the directory reached before, so that
    every link followed has its owner in the result.
    """
    left, owners, links = list(path.parts[1:]), set[int](), 0
    with ExitStack() as stack:

        def reach(name: str, directory: int | None = None) -> int:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            stack.callback(os.close, fd)
            return fd

        current = root = reach("/")
        with suppress(OSError):  # it has gone
            while left:
                found = reach(left[0], current)
                at = os.fstat(found)
                if stat.S_ISLNK(at.st_mode):
                    if (links := links + 1) > _MOST_LINKS:
                        break
                    owners.add(at.st_uid)
                    to = PurePosixPath(os.readlink("", dir_fd=found))
                    left[0:1] = to.parts[to.is_absolute() :]
                    current = root if to.is_absolute() else current
                else:
                    del left[0]
                    current = found
        return Followed(place_of(current).joinpath(*left), frozenset(owners))


def place_of(fd: int) -> PurePosixPath:
    """Return the current path, without links, of the open file *fd*."""
    return PurePosixPath(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115 - a magic link


def _lookups(path: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield, for each component of the absolute *path*, the real directory in which it is looked up, and its name.

    The last item is the target of *path*, with an empty name.
    """
    current, links = PurePosixPath("/"), 0
    left = deque(path.parts[1:])  # it is absolute
    while left:
        name = left.popleft()
        yield current, name
        if name == "..":
            current = current.parent
            continue
        try:
            target = os.readlink(current / name)  # noqa: PTH115 - a pure path
        except OSError:  # not a link, or does not exist
            target = None
        if target is None or links >= _MOST_LINKS:
            current /= name
            continue
        links += 1
        to = PurePosixPath(target)
        if to.is_absolute():
            current = PurePosixPath("/")
        left.extendleft(reversed([part for part in to.parts if part != "/"]))
    yield current, ""
