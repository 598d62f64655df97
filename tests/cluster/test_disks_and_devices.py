"""Instances that boot a disk of the node's: a Debian with UEFI, a server that one logs in to, and a device that is passed to it."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import Given
from tests.cluster.control_plane import ADDRESS
from tests.cluster.instances import IN_ORDER, RUNNER, SOON
from tests.cluster.joined_node import SHAPE, VM_DISK, JoinedNode
from tests.cluster.kubectl import Kubectl, until
from tests.cluster.manifests import patched
from tests.cluster.stand_in_gpus import RESOURCE

pytestmark = pytest.mark.timeout(2400)
BOOTS_WITHIN = 1200
"""Seconds for Debian, the guest of an emulated machine, to boot and to start its services."""
FILLED_WITHIN = 600
PORT = 8000
NO_UEFI = """\
Debian's QEMU ends when a UEFI guest of the KVM that it emulates writes CR8 while an interrupt waits (11.1.3: `cpu_interrupt:
assertion failed: (bql_locked())`): --emulator FILE names a QEMU without this fault"""


@pytest.fixture(scope="module")
def image_url(given: Given, network: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the disk's content by HTTP, and return where."""
    served = tmp_path_factory.mktemp("served")
    (served / "disk.raw").symlink_to(given["server-disk"])
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    with http.server.ThreadingHTTPServer((network, PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{ADDRESS}:{PORT}/disk.raw"
        server.shutdown()


@pytest.fixture(scope="module")
def disk(given: Given, kubectl: Kubectl, node: JoinedNode, cluster: Path, image_url: str) -> Iterator[None]:
    """Make the claim with a volume of the node, and fill it, as the README says.

    The job takes our image instead of Debian's, and the content from here instead of the internet; its claim, its device and how
    it writes are those of the example.
    """
    if given["emulator"] is None and node("systemd-detect-virt").strip() == "qemu":
        pytest.skip(NO_UEFI)
    device = node("sh", "-c", f"dirname $(grep -lx {VM_DISK} /sys/block/vd*/serial)").strip().rpartition("/")[2]
    storage = cluster / "disks/local/storage.yaml"
    storage.write_text(storage.read_text().replace("/dev/disk/by-id/your-disk", f"/dev/{device}"))
    [image] = [
        each
        for each in yaml.safe_load((cluster / "images/kustomization.yaml").read_text())["images"]
        if each["name"] == "gpu-instance"
    ]
    job = yaml.safe_load((cluster / "disks/fill.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    container["image"] = f"{image['newName']}:{image['newTag']}"
    fetch = "import shutil, sys, urllib.request as r; shutil.copyfileobj(r.urlopen(sys.argv[1]), sys.stdout.buffer)"
    [script] = container["args"]
    script, downloads = re.subn(
        r"apt-get update.*curl >/dev/null\n",
        lambda _: f"curl() {{ python3 -c '{fetch}' \"$2\"; }}\n",
        script,
        flags=re.DOTALL,
    )
    assert downloads == 1
    with Path(str(given["server-disk"])).open("rb") as image:
        container["env"] = [
            {"name": "IMAGE", "value": image_url},
            {"name": "SHA512", "value": hashlib.file_digest(image, "sha512").hexdigest()},
        ]
    container["args"] = [script]
    kubectl("apply", "-k", str(cluster / "disks/local"))
    try:
        kubectl("create", "-n", "instances", "-f", "-", given=json.dumps(job))
        kubectl(
            "wait",
            "-n",
            "instances",
            "--for=condition=complete",
            "job/fill-disk",
            f"--timeout={FILLED_WITHIN}s",
            timeout=FILLED_WITHIN + SOON,
        )
        kubectl("delete", "job", "-n", "instances", "fill-disk")
        yield
    finally:
        kubectl("delete", "job", "-n", "instances", "fill-disk", "--ignore-not-found")
        kubectl("delete", "-k", str(cluster / "disks/local"))


@pytest.mark.usefixtures("disk")
def test_an_instance_boots_the_disk_of_its_node(kubectl: Kubectl, start: Any) -> None:
    it = start("overlays/disk", "instance-disk")
    it.up()
    it.holds()
    it.logged("login:", BOOTS_WITHIN)
    assert it.end()["exitCode"] in IN_ORDER
    assert kubectl.json("get", "pvc", "-n", "instances", "vm-disk")["status"]["phase"] == "Bound", "the claim stays"


@pytest.mark.usefixtures("disk")
def test_a_server_that_one_logs_in_to(cluster: Path, start: Any, tmp_path: Path) -> None:
    """With the user's public key in the overlay; the guest has the pod's address."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "user@example.com", "-f", key], check=True)
    shutil.copy(f"{key}.pub", cluster / "overlays/server/authorized_keys")
    it = start("overlays/server", "instance-server")
    it.up()
    address = it.pod["status"]["podIP"]
    known = (f"-oUserKnownHostsFile={tmp_path}/known", "-oStrictHostKeyChecking=no")
    login = ("ssh", "-i", str(key), *known, "-oBatchMode=yes", "-oConnectTimeout=10", f"debian@{address}")

    def logged_in() -> str:
        assert "running" in it.status["state"], it.log()
        try:
            done = subprocess.run(
                [*login, "hostname; nproc; cat /var/lib/cloud/data/instance-id"],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
        except subprocess.TimeoutExpired:  # sshd accepts connections before it can start a session
            return ""
        return done.stdout

    shown = until(logged_in, "an SSH login", BOOTS_WITHIN)
    assert shown.split() == ["web-1", "4", "7d6f2c7e-54bb-4d0c-9d6a-4c1f0d1c8b52"]
    it.holds()
    assert it.end()["exitCode"] in IN_ORDER


@pytest.fixture
def gpus(kubectl: Kubectl, node: JoinedNode) -> Iterator[None]:
    """Run the device plugin that stands in for NVIDIA's, as a unit of the node's systemd."""
    unit = "stand-in-gpus.service"
    options = ("--property=WorkingDirectory=/project", "--setenv=PYTHONPATH=/project", f"--unit={unit}")
    node("systemd-run", *options, "python3", "-m", "tests.cluster.stand_in_gpus")
    try:
        until(
            lambda: kubectl.json("get", "node", node.name)["status"]["allocatable"].get(RESOURCE) == "2",
            "the GPUs to be handed out",
            SOON,
        )
        yield
    finally:
        print(node.execute("journalctl", "--no-pager", f"--unit={unit}").stdout[-3000:])
        node("systemctl", "stop", unit)


@pytest.mark.usefixtures("disk", "gpus")
def test_an_instance_with_a_device_and_huge_pages(cluster: Path, start: Any) -> None:
    """CPUs, huge pages and device are of one NUMA node; the guest's kernel finds the device, an NVMe disk here.

    The example's pod is too large for this node, so its limits are smaller here.
    """
    limits = {"cpu": "4", "hugepages-2Mi": "512Mi", "memory": "512Mi"}
    it = start(
        patched(
            cluster,
            "overlays/gpu",
            "instance-gpu",
            {"containers": [{"name": "instance", "resources": {"limits": limits}}]},
        ),
        "instance-gpu",
    )
    it.up()
    it.holds()
    address = it.execute("printenv", "PCI_RESOURCE_NVIDIA_COM_GH100").strip()
    numa_node = int(it.node.read(f"/sys/bus/pci/devices/{address}/numa_node"))
    assert it.cpus <= SHAPE.numa_cpus(numa_node)
    memory = it.node.read(f"/sys/devices/system/node/node{numa_node}/hugepages/hugepages-2048kB/free_hugepages")
    total = it.node.read(f"/sys/devices/system/node/node{numa_node}/hugepages/hugepages-2048kB/nr_hugepages")
    assert int(total) - int(memory) == 256, "the guest's memory"
    assert json.loads(it.execute(RUNNER, "ctl", "--json", "status"))["accelerator"] == "kvm"
    it.logged("nvme nvme0: pci function", BOOTS_WITHIN)
    it.logged("login:", BOOTS_WITHIN)
    assert it.end()["exitCode"] in IN_ORDER
