"""Debian's podman with our images, in a node whose PID 1 is systemd."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.containerd.daemon import Image, archive_of
from tests.node.images.manifested import Manifests, disk, mount_image

STORE = Path("/var/lib/containers")
SETTINGS = """
[storage]
driver = "overlay"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
[storage.options.overlay]
skip_mount_home = "true"
"""
"""Of podman's store: without the last one each podman covers it with a mount of its own, and what is mounted in it."""

NETWORKS = """
[network]
firewall_driver = "none"
"""
"""Netavark's rules need ``nft``, which the node has not; no container here is reached from outside."""


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def podman(*arguments: str | Path) -> str:
    """Call podman and return its output."""
    done = subprocess.run(["podman", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout.strip()


@pytest.fixture(scope="session")
def installed(manifests: Manifests, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install podman with our images under the names that manifests and quadlets have for them."""
    if not Path("/run/systemd/system").exists():
        pytest.skip("systemd is missing as PID 1: tests/images/run boots such a node")
    program = tmp_path_factory.mktemp("podman")
    mount("-t", "erofs", "-o", "ro", disk("podman"), program)
    # Files that the node has already are the node's: its systemd and its libraries run.
    mount("-t", "overlay", "-o", f"lowerdir=/usr:{program}/usr", "podman", "/usr")
    shutil.copytree(program / "etc/containers", "/etc/containers")
    Path("/etc/containers/storage.conf").write_text(SETTINGS)
    Path("/etc/containers/containers.conf").write_text(NETWORKS)
    STORE.mkdir()
    mount("-t", "tmpfs", "containers", STORE)  # an overlay needs another file system than an overlay for its writes
    try:
        take_images(manifests)
        yield
    finally:
        for place in (STORE, "/usr"):
            subprocess.run(["umount", "--lazy", "--recursive", place], check=True)


def take_images(manifests: Manifests) -> None:
    """Load the images as containerd's tests do: each has one layer without files, whose place a mount of the disk takes."""
    archive = STORE / "images.tar"
    for reference, name in manifests.images().items():
        image = Image(manifests.configurations[name], {name: b""})
        archive.write_bytes(archive_of({f"localhost/{reference}": image}))
        podman("load", "--quiet", "--input", archive)
        [marker] = STORE.glob(f"storage/overlay/*/diff/{name}")
        mount_image(name, marker.parent)
