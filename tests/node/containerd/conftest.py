"""A containerd with our images, and its pods as the manifests describe them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import ROOT
from tests.node.containerd.daemon import PAUSE, Containerd, Image, pause_program
from tests.node.containerd.pods import POD_IP, KubeletOfContainerd
from tests.node.images.manifested import Cluster, Manifests, mount_image


@pytest.fixture(scope="session")
def manifests() -> Manifests:
    if "RUNNER_NODE_MANIFESTS" not in os.environ:
        pytest.skip("built images are missing: tests/images/run builds them and gives them to the node")
    return Manifests.read()


@pytest.fixture(scope="session")
def containerd(manifests: Manifests, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    if not Path("/run/systemd/system").exists():
        pytest.skip("systemd is missing as PID 1: tests/images/run boots such a node")
    images = manifests.images()
    directory = tmp_path_factory.mktemp("containerd")
    subprocess.run(["mount", "-t", "tmpfs", "containerd", str(directory)], check=True)
    containerd = Containerd(directory)
    try:
        containerd.start()
        containerd.take(
            {
                PAUSE: Image({"Entrypoint": ["/pause"]}, {"pause": pause_program()}),
                **{each: Image(manifests.configurations[name], {name: b""}) for each, name in images.items()},
            }
        )
        for name in images.values():
            # A mount takes the place of the unpacked layer, as with snapshotters that pull lazily. Unpacking 300 MB would
            # take minutes here.
            mount_image(name, containerd.unpacked(name))
        yield containerd
    finally:
        containerd.stop()
        subprocess.run(["umount", "--lazy", str(directory)], check=True)  # and what is mounted below


@pytest.fixture
def kubelet(tmp_path: Path, numa: dict[int, CpuSet], containerd: Containerd) -> Iterator[KubeletOfContainerd]:
    if (ROOT / "kubepods.slice").exists():
        pytest.skip("a machine without a kubelet is missing: kubepods.slice is there already")
    with KubeletOfContainerd(tmp_path / "kubelet", numa, reserved=CpuSet([0]), cri=containerd.cri) as kubelet:
        try:
            yield kubelet
        finally:
            for uid, containers in kubelet.running.items():
                print(*(f"--- {name} of {uid}\n{each.output}" for name, each in containers.items()), sep="\n")
            print(f"--- containerd\n{containerd.cri.log.read_text()[-20000:]}")


@pytest.fixture
def cluster(manifests: Manifests, kubelet: KubeletOfContainerd, tmp_path: Path) -> Cluster:
    return Cluster(
        manifests,
        {},
        kubelet.scratch / "volumes",
        {
            "/var/lib/kubelet": kubelet.directory,
            "/run/instance-cgroup-controller": tmp_path / "sockets",
            "/var/lib/instance-cgroup-controller": tmp_path / "state",
        },
        pod_ip=POD_IP,
        networked=True,
    )


@pytest.fixture
def reserved() -> Iterator[CpuSet]:
    """Keep the node's own services on some CPUs, as an operator does, and return these CPUs."""
    cpus = CpuSet.parse("0-1,4-5")

    def allow(text: str) -> None:
        for unit in ("init.scope", "system.slice"):
            subprocess.run(["systemctl", "set-property", "--runtime", unit, f"AllowedCPUs={text}"], check=True)

    allow(str(cpus))
    yield cpus
    allow("")
