"""The newest QEMU in Debian's backports, which knows ``cpr-transfer``, and virtiofsd: made once, and kept as the emulated node is."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.emulated_node.cache import Artefact

PROGRAM = "qemu-system-x86_64"
"""In the root of the image, beside ``virtiofsd``."""


def newest_qemu() -> Artefact:
    """Return the recipe of an erofs image with :data:`PROGRAM`."""
    tools = {"mmdebstrap": "mmdebstrap", "mkfs.erofs": "erofs-utils"}
    tools["/usr/share/keyrings/debian-archive-keyring.gpg"] = "debian-archive-keyring"
    return Artefact("qemu", str(Path(__file__).with_name("recipes") / "qemu.sh"), {}, tools)


@contextmanager
def mounted(image: Path) -> Iterator[Path]:
    """Hold *image*, an erofs image or a disk with one, mounted where every user may enter, and return its QEMU."""
    directory = Path(tempfile.mkdtemp(prefix="qemu-"))
    subprocess.run(["mount", "-t", "erofs", "-o", "ro", image, directory], check=True)
    try:
        yield directory / PROGRAM
    finally:
        subprocess.run(["umount", directory], check=True)
        directory.rmdir()
