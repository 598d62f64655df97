"""The mounts of this process's mount namespace (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from runner.base.errors import doing
from runner.base.values import frozen
from runner.kernel.leases import read_at_once


@frozen
class Mount:
    """A mount."""

    device: str
    """The file system: its number (``MAJOR:MINOR``)."""
    root: PurePosixPath
    """The directory of the file system that is mounted; of some kinds it is no path (``net:[4026532000]``)."""
    point: PurePosixPath
    kind: str
    options: tuple[str, ...]
    """The options of the file system, which all its mounts share, as the kernel shows them."""


def read_mounts(proc: Path) -> list[Mount]:
    """Return the mounts, of several at one point the visible one last. Raises :exc:`~runner.base.errors.HostError`."""
    with doing("read the mounts of this process"):
        text = os.fsdecode(read_at_once(proc / "self/mountinfo"))
    # A name has any bytes: of all white space, the kernel escapes only " ", "\t" and "\n" (show_mountinfo, fs/proc_namespace.c).
    return [_parse(line) for line in text.split("\n") if line]


def _parse(line: str) -> Mount:
    # "ID PARENT DEVICE ROOT POINT OPTIONS [TAG…] - KIND SOURCE OPTIONS": the options of the mount, and those of the file system.
    mount, _, file_system = line.partition(" - ")
    _, _, device, root, point, *_ = mount.split(" ")
    kind, _, options = file_system.split(" ", 2)
    return Mount(device, _unescaped(root), _unescaped(point), kind, tuple(options.split(",")))


def _unescaped(text: str) -> PurePosixPath:
    return PurePosixPath(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text))
