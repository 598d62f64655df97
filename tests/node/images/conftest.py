"""Our images as disks of the node, and the manifests that run them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.images.manifested import Cluster, Manifests, mount_image
from tests.node.standin_kubelet import Kubelet


@pytest.fixture(scope="session")
def images(manifests: Manifests, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Mount the images' root file systems and return them by the name a manifest uses."""
    places = {name: tmp_path_factory.mktemp(name) for name in manifests.configurations}
    for name, place in places.items():
        mount_image(name, place)
    yield places
    for place in places.values():
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture
def cluster(manifests: Manifests, images: dict[str, Path], kubelet: Kubelet, tmp_path: Path) -> Cluster:
    return Cluster(
        manifests,
        images,
        kubelet.scratch / "volumes",  # a file system that is not an overlay
        {
            "/var/lib/kubelet": kubelet.directory,
            "/run/instance-cgroup-controller": tmp_path / "sockets",
            "/var/lib/instance-cgroup-controller": tmp_path / "state",
        },
    )
