"""Namespaces of the test process, so that the same tests can run in two checkouts at once."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
CAP_SYS_ADMIN = 21
"""The capability that mounts need (capabilities(7))."""


def unshare(kinds: int) -> None:
    """Move this process into namespaces of its own; what mounts it has from now on, only it and its children see."""
    if os.geteuid() != 0:
        pytest.exit("these tests make namespaces: run them as root", returncode=1)
    if ctypes.CDLL(None, use_errno=True).unshare(kinds) != 0:
        pytest.exit(f"cannot make namespaces: {os.strerror(ctypes.get_errno())}", returncode=1)


def own_names_of_networks() -> None:
    """Give this process a directory of its own for ip-netns(8), whose names are otherwise those of the whole machine."""
    unshare(CLONE_NEWNS)
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    Path("/run/netns").mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "networks", "/run/netns"], check=True)
