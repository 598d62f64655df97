"""Spare PCI devices of the node, bound to vfio-pci for a test and to their own drivers after it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.node.cgroups import until
from tests.node.standin_kubelet import Mount

BUS = Path("/sys/bus/pci")
DISK, NIC = "0x010802", "0x020000"


@dataclass(frozen=True)
class Spare:
    """A PCI device of the node."""

    address: str

    @property
    def path(self) -> Path:
        return BUS / "devices" / self.address

    @property
    def numa_node(self) -> int:
        return int((self.path / "numa_node").read_text())

    @property
    def group(self) -> str:
        return (self.path / "iommu_group").resolve().name

    @property
    def nodes(self) -> dict[str, Path]:
        """Return the device node that QEMU opens, by VFIO backend."""
        [cdev] = (self.path / "vfio-dev").iterdir()
        return {"legacy": Path("/dev/vfio") / self.group, "iommufd": Path("/dev/vfio/devices") / cdev.name}

    @property
    def driver(self) -> str:
        link = self.path / "driver"
        return link.resolve().name if link.exists() else ""

    @property
    def may_lose_power(self) -> bool:
        return (self.path / "d3cold_allowed").read_text() == "1\n"

    @contextlib.contextmanager
    def registers(self) -> Iterator[mmap.mmap]:
        """Map its first region, as its driver would, whether or not VFIO lets its guest do so at the moment."""
        (self.path / "power/control").write_text("on\n")
        subprocess.run(["setpci", "-s", self.address, "COMMAND=2:2"], check=True)
        with (self.path / "resource0").open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as found:
            yield found
        (self.path / "power/control").write_text("auto\n")

    def switch_power(self, *, on: bool) -> None:
        """Have the port above switch its slot's power (PCI Express Base, 7.5.3.10): a device without any reads as ones.

        Its power indicator stays on: QEMU takes the device away where both are off.
        """
        port = self.path.resolve().parent.name
        subprocess.run(["setpci", "-s", port, f"CAP_EXP+18.w={100 if on else 500}:700"], check=True)

    def plug_in_anew(self) -> None:
        """Have the kernel find it once more, as after it was switched off and on."""
        (self.path / "remove").write_text("1\n")
        (BUS / "rescan").write_text("1\n")
        assert self.path.exists()

    def bind(self, driver: str) -> None:
        """Bind it to *driver*, or to its own driver if that is empty."""
        (self.path / "driver_override").write_text(f"{driver}\n")
        if self.driver:
            (self.path / "driver/unbind").write_text(self.address)
        (BUS / "drivers_probe").write_text(self.address)
        assert self.driver == driver or not driver

    def sector(self, number: int) -> bytes:
        """Return a sector of this device, an NVMe disk that its own driver has."""
        [name] = until(lambda: [path.name for path in self.path.glob("nvme/nvme*/nvme*n1")], "the disk")
        with (Path("/dev") / name).open("rb") as disk:
            return os.pread(disk.fileno(), 512, 512 * number).rstrip(b"\0\n")


@contextlib.contextmanager
def bound(*spares: Spare, driver: str = "vfio-pci") -> Iterator[None]:
    """Bind them to *driver* until the block ends, and then to their own drivers."""
    for spare in spares:
        spare.bind(driver)
    try:
        yield
    finally:
        for spare in spares:
            spare.bind("")


def claim_file(directory: Path, claim: str, spare: Spare) -> Mount:
    """Return the mount of the file by which a DRA driver describes the device of *claim*, made from a template."""
    attributes = {
        "resource.kubernetes.io/pciBusID": {"string": spare.address},
        "resource.kubernetes.io/numaNode": {"int": spare.numa_node},
    }
    device = {"driver": "nic.example.com", "pool": "node", "name": "nic-0", "attributes": attributes}
    described = {
        "apiVersion": "metadata.resource.k8s.io/v1beta1",
        "kind": "DeviceMetadata",
        "podClaimName": claim,
        "requests": [{"name": "nic", "devices": [device]}],
    }
    file = directory / f"{claim}.json"
    file.write_text(json.dumps(described))
    claims = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates"
    return file, f"{claims}/{claim}/nic/nic.example.com-metadata.json", "ro"


def _of_class(kind: str) -> list[Spare]:
    return [
        Spare(path.parent.name)
        for path in sorted((BUS / "devices").glob("*/class"))
        if path.read_text().strip() == kind
    ]


@pytest.fixture(scope="session")
def disks() -> dict[int, Spare]:
    """Return the spare NVMe disk of each NUMA node, the first if it has several."""
    if not list(Path("/sys/class/iommu").glob("*")):
        pytest.skip("an IOMMU and spare devices are missing: tests/node/run --devices brings a node that has them")
    return {spare.numa_node: spare for spare in reversed(_of_class(DISK))}


@pytest.fixture(scope="session")
def six(disks: dict[int, Spare]) -> list[Spare]:
    """Return all devices of the first NUMA node: two root complexes have them, and two of them are behind a switch."""
    found = [spare for spare in (*_of_class(DISK), *_of_class(NIC)) if spare.numa_node == 0]
    assert len(found) == 6
    assert disks[0] in found
    return found


@pytest.fixture(scope="session")
def nics(disks: dict[int, Spare]) -> dict[int, Spare]:
    """Return the spare NIC of each NUMA node that has an IOMMU group of its own, the first if there are several."""
    alone = {
        spare.numa_node: spare
        for spare in reversed(_of_class(NIC))
        if len(list((spare.path / "iommu_group/devices").iterdir())) == 1
    }
    assert alone.keys() == disks.keys()
    return alone


@pytest.fixture(scope="session")
def pair(nics: dict[int, Spare]) -> tuple[Spare, Spare]:
    """Return two NICs that share an IOMMU group."""
    [first, second] = [spare for spare in _of_class(NIC) if spare not in nics.values()][:2]
    assert first.group == second.group
    return first, second
