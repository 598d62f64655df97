"""What the tests of images, monitoring and installation need of Debian, made once and kept as the emulated node is."""

from __future__ import annotations

from pathlib import Path

from tests.emulated_node.cache import Artefact

RECIPES = Path(__file__).with_name("recipes")
RELEASES = ("bookworm", "trixie")
"""Debian 12 and 13, on which the program is installed."""
_TOOLS = {"mmdebstrap": "mmdebstrap", "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring"}


def prometheus() -> Artefact:
    """Return the recipe of Prometheus and promtool, a tar archive of the two programs."""
    return Artefact("prometheus", str(RECIPES / "prometheus.sh"), {}, _TOOLS)


def clean_debian(release: str) -> Artefact:
    """Return the recipe of a root file system of *release* with Python and nothing of ours, a tar archive."""
    return Artefact(f"clean-{release}", str(RECIPES / "clean.sh"), {"release": release.encode()}, _TOOLS)


def podman() -> Artefact:
    """Return the recipe of the podman that knows quadlets, an erofs image."""
    return Artefact("podman", str(RECIPES / "podman.sh"), {}, {**_TOOLS, "mkfs.erofs": "erofs-utils"})
