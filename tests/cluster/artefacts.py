"""What the cluster's tests need of Debian, made once and kept as the emulated node is."""

from __future__ import annotations

from pathlib import Path

from tests.emulated_node.cache import Artefact

RECIPES = Path(__file__).with_name("recipes")
_TOOLS = {"mmdebstrap": "mmdebstrap", "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring"}


def etcd() -> Artefact:
    """Return the recipe of etcd, a program for this machine."""
    return Artefact("etcd", str(RECIPES / "etcd.sh"), {}, _TOOLS)


def containerd() -> Artefact:
    """Return the recipe of containerd 2, runc and CNI plugins for the node, an erofs image."""
    return Artefact("containerd", str(RECIPES / "containerd.sh"), {}, {**_TOOLS, "mkfs.erofs": "erofs-utils"})


def server_disk() -> Artefact:
    """Return the recipe of a disk with Debian, cloud-init and an SSH server, which UEFI boots."""
    tools = {"mkfs.vfat": "dosfstools", "mcopy": "mtools", "mkfs.ext4": "e2fsprogs", "sfdisk": "fdisk"}
    return Artefact("server-disk", str(RECIPES / "server-disk.sh"), {}, {**_TOOLS, **tools})
