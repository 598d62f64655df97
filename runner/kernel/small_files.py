"""Small files of the kernel and of the system, as text."""

from __future__ import annotations

import sys
from pathlib import PurePath, PurePosixPath


def read_text(path: PurePath) -> str:
    """Return the content of a file, empty when it cannot be read."""
    try:
        with open(path, errors="replace") as file:  # noqa: PTH123 - it may be a pure path
            return file.read()
    except OSError:
        return ""


def read_image_digest() -> str:
    """Return the digest of this image's program, which its build has written beside the packages; empty if there is none.

    It equals the digest that ``ctl upgrade`` takes of the same files (:mod:`runner.kernel.program_directory`). The path is derived from the
    interpreter's, because ``sys.prefix`` differs after a renewal (``-S``).
    """
    return read_text(PurePosixPath(sys.executable).parents[1] / "digest").strip()


def read_os_release() -> str:
    """Return the text of os-release(5), empty where there is none."""
    return read_text(PurePosixPath("/etc/os-release")) or read_text(PurePosixPath("/usr/lib/os-release"))
