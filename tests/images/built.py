"""Our images, built without a registry: buildah on a Debian made by mmdebstrap, layers kept between runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from zlib import crc32

import attrs

from tests.emulated_node import artefacts
from tests.emulated_node.cache import KEPT_SECONDS, EmulatedNodeError, directory, fetch, follow, locked, say

PROJECT = Path(__file__).resolve().parents[2]


@attrs.frozen
class Image:
    """An image that is built: the directory of its Containerfile, and the build arguments that differ from its defaults."""

    directory: str
    arguments: Mapping[str, str] = attrs.field(factory=dict[str, str])


IMAGES = {
    "gpu-instance": Image("gpu-instance"),
    "controller": Image("controller"),
    "gpu-instance-backports": Image("gpu-instance", {"QEMU_SUITE": "trixie-backports"}),
}
DEPLOYED = ("gpu-instance", "controller")
"""The images that the manifests name. The others are only built, looked into and started with their demo guest."""
TOOLS = {"podman": "podman", "buildah": "buildah", "runc": "runc", "mkfs.erofs": "erofs-utils"}
LABELS = {
    "SOURCE": "https://example.org/instance-runner",
    "REVISION": "0123456789abcdef0123456789abcdef01234567",
    "CREATED": "2026-01-02T03:04:05Z",
}
"""What a build of ours says of itself: always the same, so that the layers of a commit are those of the one before."""
UNPACKED_SECONDS = 24 * 3600
"""Seconds that an image's root file system is kept: every change of the code makes another."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def storage() -> list[str]:
    """Return the options for podman and buildah that name a store of our own in the cache."""
    root = directory() / "images"
    # The mounts of a store are recorded in /run, which a reboot empties.
    return ["--root", str(root), "--runroot", f"/run/instance-runner-images-{crc32(bytes(root)):08x}"]


def podman(*arguments: str) -> str:
    """Call podman and return its output."""
    done = subprocess.run(["podman", *storage(), *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise EmulatedNodeError(f"podman {arguments[0]} failed with status {done.returncode}")
    return done.stdout.strip()


def build(names: Iterable[str]) -> dict[str, str]:
    """Build the images *names*, keys of :data:`IMAGES`, and return their ids by name."""
    missing = sorted(package for program, package in TOOLS.items() if shutil.which(program) is None)
    if missing:
        raise EmulatedNodeError(f"cannot build the images: something is missing; apt-get install {' '.join(missing)}")
    tar = fetch(artefacts.image_base())
    base = f"localhost/base:{tar.name.removeprefix('base-')}"
    with locked(directory() / "images.lock", "images"):
        if base not in podman("images", "--format", "{{.Repository}}:{{.Tag}}").split():
            podman("import", "--quiet", str(tar), base)
        return {name: built(name, IMAGES[name], base) for name in names}


def built(name: str, image: Image, base: str) -> str:
    """Build one image from its Containerfile and return its id."""
    started = time.monotonic()
    identity = directory() / f"{name}.id"
    identity.unlink(missing_ok=True)
    # The certificates that this machine trusts; where a proxy intercepts TLS they are not Debian's.
    bundle = os.environ.get("SSL_CERT_FILE", CERTIFICATES)
    secret = ["--secret", f"id=ca,src={bundle}"] if Path(bundle).is_file() else []
    arguments = [f"--build-arg={key}={value}" for key, value in {"BASE": base, **LABELS, **image.arguments}.items()]
    argv = [
        *(
            "buildah",
            *storage(),
            "build",
            "--format",
            "docker",
            "--isolation",
            "chroot",
            "--network",
            "host",
            "--layers",
            *secret,
        ),
        *(*arguments, "--file", f"images/{image.directory}/Containerfile", "--iidfile", str(identity), "."),
    ]
    log = directory() / f"{name}.log"
    say(f"building the image {name} (log: {log})")
    status, last = follow(name, argv, log, PROJECT, os.environ)
    if status != 0:
        raise EmulatedNodeError(f"buildah failed with status {status}:\n{last}")
    built_id = identity.read_text().strip().removeprefix("sha256:")
    size = int(podman("image", "inspect", "--format", "{{.Size}}", built_id)) / 1e6
    say(f"{name}: {size:.0f} MB in {time.monotonic() - started:.0f} s")
    return built_id


def root_file_system(name: str, image: str) -> Path:
    """Return an erofs file with the files of *image*, for a node that has no image store."""
    kept = directory()
    path = kept / f"{name}-{image[:16]}.erofs"
    with locked(kept / "images.lock", "images"):
        if path.exists():
            os.utime(path)
        else:
            mounted = podman("image", "mount", image)
            try:
                part = path.with_suffix(".part")
                subprocess.run(["mkfs.erofs", "--quiet", str(part), mounted], check=True)
                part.rename(path)
            finally:
                podman("image", "unmount", image)
        for other in kept.glob(f"{name}-*.erofs"):
            if other != path and time.time() - other.stat().st_mtime > UNPACKED_SECONDS:
                other.unlink()
    return path


def forget_old() -> None:
    """Remove layers that no build of the last weeks has used."""
    podman("image", "prune", "--all", "--force", "--filter", f"until={KEPT_SECONDS // 3600}h")
