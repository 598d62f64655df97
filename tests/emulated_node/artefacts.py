"""The recipes of the three artefacts that take time to make, and the archives that are composed for every boot."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.emulated_node.cache import RECIPES, Artefact, EmulatedNodeError
from tests.emulated_node.cpio import Entry, archive
from tests.emulated_node.madt import madt
from tests.emulated_node.shape import Shape

PROJECT = Path(__file__).resolve().parents[2]
NOT_IN_THE_NODE = ("flake8", "flake8-async", "hypothesis", "kubernetes-validate", "mypy", "ruff")
"""Development tools that no test in the node imports; pytest imports Hypothesis wherever it is, a quarter of pytest's start."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of Debian's: the suites that have its source, and the lines of ``kernel.config`` that it spells otherwise."""

    suites: str
    instead: Mapping[str, str] = field(default_factory=dict)


KERNELS = {
    "6.1": Kernel("bookworm bookworm-updates", {"# CONFIG_BASE_SMALL is not set": "CONFIG_BASE_FULL=y"}),
    "6.12": Kernel("trixie trixie-updates"),
    "newest": Kernel(
        "trixie-backports",
        {
            "CONFIG_PREEMPT_VOLUNTARY=y": "CONFIG_PREEMPT_LAZY=y",
            "CONFIG_PROC_PID_CPUSET=y": "CONFIG_CPUSETS_V1=y\nCONFIG_PROC_PID_CPUSET=y",
        },
    ),
}
"""Kernels that the node can be booted with; 6.1 knows no remote cpuset partitions (they came with 6.7)."""
KERNEL = "6.12"


def kernel(version: str = KERNEL) -> Artefact:
    """Return the recipe of the node's kernel, a bzImage; *version* is a key of KERNELS."""
    chosen = KERNELS[version]
    lines = (RECIPES / "kernel.config").read_text().splitlines()
    config = "".join(f"{chosen.instead.get(line, line)}\n" for line in lines)
    return Artefact(
        "kernel",
        "kernel.sh",
        {"kernel.config": config.encode(), "suites": chosen.suites.encode()},
        tools={
            "apt-get": "apt",
            "bc": "bc",
            "bison": "bison",
            "flex": "flex",
            "gcc": "gcc libc6-dev",
            "/usr/include/gelf.h": "libelf-dev",
            "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
            "make": "make",
            "xz": "xz-utils",
            "zstd": "zstd",
        },
    )


def root() -> Artefact:
    """Return the recipe of the node's root file system, an erofs image."""
    uv = shutil.which("uv")
    if uv is None:
        raise EmulatedNodeError(
            "cannot read uv.lock: uv is not on PATH; start the node by tests/node/run, which installs it"
        )
    pruned = [option for package in NOT_IN_THE_NODE for option in ("--prune", package)]
    requirements = subprocess.run(
        [uv, "export", "-q", "--frozen", "--no-emit-project", "--no-header", "--no-annotate", *pruned],
        cwd=PROJECT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    return Artefact(
        "root",
        "root.sh",
        {"requirements.txt": requirements},
        tools={"mmdebstrap": "mmdebstrap", "mkfs.erofs": "erofs-utils"},
    )


def image_base() -> Artefact:
    """Return the recipe of the base of our images, which are built without a registry: a root file system as a tar archive.

    The week is part of the recipe, so that updates of the release arrive, and everything based on it is built again.
    """
    tools = {"mmdebstrap": "mmdebstrap", "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring"}
    return Artefact("base", "base.sh", {"week": time.strftime("%G-%V").encode()}, tools)


def kustomize() -> Artefact:
    """Return the recipe of kustomize, which builds Kubernetes manifests as ``kubectl apply -k`` does."""
    return Artefact("kustomize", "kustomize.sh", {}, tools={"mmdebstrap": "mmdebstrap"})


def rom() -> Artefact:
    """Return the recipe of the ROM guest, an image for QEMU's ``-bios``."""
    return Artefact(
        "rom", "rom.sh", {"rom.S": (RECIPES / "rom.S").read_bytes()}, tools={"as": "binutils", "ld": "binutils"}
    )


def initrd(shape: Shape) -> bytes:
    """Return the initramfs of the node: the replacement of the CPU table, then busybox and the first ``init``.

    The table must come first and uncompressed (``Documentation/admin-guide/acpi/initrd_table_override.rst``).
    """
    tables = archive(
        [
            Entry.directory("kernel"),
            Entry.directory("kernel/firmware"),
            Entry.directory("kernel/firmware/acpi"),
            Entry.file("kernel/firmware/acpi/apic.aml", madt(shape)),
        ]
    )
    mount_points = [Entry.directory(name) for name in ("lower", "upper", "root")]
    return tables + busybox_root("initramfs-init", mount_points)


def guest_kernel(kernel: Path) -> bytes:
    """Return the ELF file that *kernel*, a bzImage, unpacks itself to: QEMU starts it directly, through its PVH note.

    To unpack it takes an emulated guest in an emulated node a quarter of its boot (``payload_offset``,
    ``Documentation/arch/x86/boot.rst``; the last four bytes of the payload are its unpacked size).
    """
    zstd = shutil.which("zstd")
    if zstd is None:
        raise EmulatedNodeError("cannot unpack the Linux guest's kernel: zstd is missing; apt-get install zstd")
    image = kernel.read_bytes()
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<2I", image, 0x248)
    start = 512 * (setup_sectors + 1) + offset
    packed = image[start : start + length - 4]
    return subprocess.run([zstd, "-dcq"], input=packed, check=True, stdout=subprocess.PIPE).stdout


def guest_initrd() -> bytes:
    """Return the initramfs of the Linux guest, which boots the node's kernel."""
    return busybox_root("guest-init", [])


def busybox_root(init: str, entries: list[Entry]) -> bytes:
    """Return an initramfs with busybox, *init* from this folder, and *entries*."""
    busybox = shutil.which("busybox")
    if busybox is None or b"/ld-linux" in Path(busybox).read_bytes()[:4096]:
        raise EmulatedNodeError("cannot make the initial root: no static busybox; apt-get install busybox-static")
    return archive(
        [
            *(Entry.directory(name) for name in ("bin", "dev", "proc", "sys")),
            Entry.device("dev/console", 5, 1),
            Entry.file("bin/busybox", Path(busybox).read_bytes(), mode=0o755),
            Entry.file("init", Path(__file__).with_name(init).read_bytes(), mode=0o755),
            *entries,
        ]
    )


def cloud_image() -> Artefact:
    """Return the recipe of a small cloud image for UEFI with a real cloud-init, qcow2."""
    tools = {
        "mmdebstrap": "mmdebstrap",
        "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
        "mkfs.ext4": "e2fsprogs",
        "mkfs.vfat": "dosfstools",
        "mcopy": "mtools",
        "qemu-img": "qemu-utils",
        "sfdisk": "fdisk",
    }
    return Artefact("cloud-image", "cloud-image.sh", {}, tools)
