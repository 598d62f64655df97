"""Shared memory that processes hold: memfds, System V segments, shared anonymous mappings, and files in tmpfs.

All of it is tmpfs to the kernel (``mm/shmem.c``), the former three in a mount of the kernel's own. Nothing here asks a file
system of another kind, which a process may serve itself (FUSE) and never answer: a file is looked at only if its mount is
known to be a tmpfs. Links of /proc lead to files directly, without a walk of a path that the process could change.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from runner.base.errors import HostError
from runner.base.values import frozen

Inode = tuple[int, int]
"""A file: the number of its file system (``st_dev``), and its number there."""

_KCMP, _KCMP_FILES = 312, 2
"""``arch/x86/entry/syscalls/syscall_64.tbl`` and ``include/uapi/linux/kcmp.h``; the C library has no function for it."""
_BLOCK = 512
"""Bytes in a block of ``st_blocks`` (inode(7))."""
_ESCAPE = re.compile(r"\\([0-7]{3})")
_WALKABLE = frozenset(
    {
        "btrfs",
        "devtmpfs",
        "ext4",
        "f2fs",
        "overlay",
        "proc",
        "ramfs",
        "rootfs",
        "squashfs",
        "sysfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
"""File systems through which a path is followed: the kernel answers for them, and no process or other machine."""


@frozen
class TmpfsMount:
    """A tmpfs that is mounted in the mount namespace of a process."""

    mount_id: int
    device: int
    point: str
    whole: bool
    """Whether its root is mounted there, and not a directory in it."""
    reachable: bool
    """Whether the way to it leads through file systems of the kernel's own only."""


@frozen
class SharedMemory:
    """The shared memory of the processes in the procfs *root*; made by :func:`shared_memory`.

    Every method but :func:`shared_memory` leaves out what has ended or may not be seen.
    """

    root: Path
    mount_id: int
    """The kernel's own tmpfs."""
    device: int

    def shares_descriptors(self, pid: int, tid: int) -> bool:
        """Tell whether thread *tid* has the descriptors of process *pid*; a thread may have its own (clone(2), CLONE_FILES).

        Where the kernel has no kcmp(2) for it, the answer is ``False``.
        """
        library = ctypes.CDLL(None)
        return bool(library.syscall(_KCMP, pid, tid, _KCMP_FILES, 0, 0) == 0)

    def namespace(self, pid: int) -> int:
        """Return the number of the mount namespace of process *pid*, 0 if it has ended."""
        try:
            return os.stat(f"{self.root}/{pid}/ns/mnt").st_ino  # noqa: PTH116 - hundreds of them
        except OSError:
            return 0

    def mounts(self, pid: int, most: int | None) -> tuple[tuple[TmpfsMount, ...], int]:
        """Return each tmpfs that is mounted in the namespace of *pid* (proc_pid_mountinfo(5)), and how many bytes were read.

        None where the list of its mounts has more than *most* bytes: a process that may mount can make it 400 MB long.
        """
        try:
            with (self.root / str(pid) / "mountinfo").open("rb") as file:
                content = file.read(-1 if most is None else most + 1)
        except OSError:
            return (), 0
        if most is not None and len(content) > most:
            return (), len(content)
        rows = [_mount(line) for line in os.fsdecode(content).split("\n") if " - " in line]  # "\r" is no line end in it
        walls = frozenset(point for kind, point, *_ in rows if kind not in _WALKABLE)
        found = tuple(
            TmpfsMount(number, device, point, root == "/", not _leads_through(point, walls))
            for kind, point, number, device, root in rows
            if kind == "tmpfs"
        )
        return found, len(content)

    def used(self, pid: int, mount: TmpfsMount) -> int:
        """Return the bytes in the tmpfs that *pid* has mounted as *mount*, 0 where that cannot be seen."""
        try:
            fd = os.open(f"{self.root}/{pid}/root{mount.point}", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, ValueError):
            return 0
        try:
            if os.fstat(fd).st_dev != mount.device:  # another one is mounted over it, or a link leads elsewhere
                return 0
            status = os.statvfs(fd)
            return (status.f_blocks - status.f_bfree) * status.f_frsize
        except OSError:
            return 0
        finally:
            os.close(fd)

    def descriptors(self, tid: int, mounts: frozenset[int], most: int) -> tuple[Mapping[Inode, int], int]:
        """Return the files in tmpfs that thread *tid* has open → bytes of memory they have, and how many were looked at.

        That is the kernel's own tmpfs, and those of *mounts*, by number. Of its descriptors *most* are looked at.
        """
        found: dict[Inode, int] = {}
        looked = 0
        with contextlib.suppress(OSError), os.scandir(f"{self.root}/{tid}/fd") as links:
            for link in islice(links, most):
                looked += 1
                file = self._file(link.path, mounts)
                if file is not None:
                    found[file[0]] = file[1]
        return found, looked

    def _file(self, link: str, mounts: frozenset[int]) -> tuple[Inode, int] | None:
        try:
            fd = os.open(link, os.O_PATH | os.O_CLOEXEC)  # which asks nothing of the file's file system
        except OSError:
            return None
        try:
            mount_id = _mount_id((self.root / "self" / "fdinfo" / str(fd)).read_bytes())
            if mount_id != self.mount_id and mount_id not in mounts:
                return None
            status = os.fstat(fd)
        except OSError:
            return None
        else:
            return (status.st_dev, status.st_ino), status.st_blocks * _BLOCK
        finally:
            os.close(fd)

    def mappings(self, pid: int, devices: frozenset[int], most: int) -> Mapping[Inode, int]:
        """Return the files in the kernel's own tmpfs, and in those of *devices*, that *pid* has mapped → bytes of address space.

        They are the first *most*. The kernel takes the lock of the process's memory for it, which another one may hold for long.
        """
        found: dict[Inode, int] = {}
        try:
            with (self.root / str(pid) / "maps").open("rb") as lines:
                for line in lines:
                    addresses, _, _, device, number, *_ = line.split(maxsplit=5)
                    major, _, minor = device.partition(b":")
                    inode = os.makedev(int(major, 16), int(minor, 16)), int(number)
                    if len(found) == most and inode not in found:
                        continue
                    if inode[1] and (inode[0] == self.device or inode[0] in devices):
                        first, _, last = addresses.partition(b"-")
                        found[inode] = found.get(inode, 0) + int(last, 16) - int(first, 16)
        except (OSError, ValueError):
            return found
        return found


def shared_memory(root: Path) -> SharedMemory:
    """Return a reader of the shared memory of the processes in the procfs *root*. Raises :class:`HostError`."""
    try:
        fd = os.memfd_create("mount", os.MFD_CLOEXEC)
        try:
            return SharedMemory(root, _mount_id((root / "self" / "fdinfo" / str(fd)).read_bytes()), os.fstat(fd).st_dev)
        finally:
            os.close(fd)
    except OSError as error:
        raise HostError("cannot find the kernel's own tmpfs") from error


def _mount_id(fdinfo: bytes) -> int:
    # proc_pid_fdinfo(5): "mnt_id:\t15"
    _, _, rest = fdinfo.partition(b"mnt_id:")
    return int(rest.split(None, 1)[0]) if rest else -1


def _mount(line: str) -> tuple[str, str, int, int, str]:
    """Return file system, mount point, mount id, device and root of a line of mountinfo."""
    left, _, right = line.partition(" - ")
    number, _, device, root, point, *_ = left.split(" ")
    major, _, minor = device.partition(":")
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), point)
    return right.partition(" ")[0], plain, int(number), os.makedev(int(major), int(minor)), root


def _leads_through(point: str, walls: frozenset[str]) -> bool:
    # By the parts of one path, not by the walls, of which there may be thousands.
    ends = [at for at, character in enumerate(point) if character == "/" and at] + [len(point)]
    return "/" in walls or any(point[:end] in walls for end in ends)
