"""PCI devices passed into guests, by both ways, in pods that have the devices' nodes and nothing more."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from runner.cpuset import CpuSet
from tests.node.bed.spares import word_on
from tests.node.devices.conftest import Spare, bound
from tests.node.instances import Instance, World, spec_text, start_instance, uid_of
from tests.node.test_linux_guest import INITRD, KERNEL

MIB = 1 << 20
CPUS = CpuSet.parse("2,6")
"""One of each NUMA node, so that the guest has both."""
WAYS = ("legacy", "iommufd")
ABOUT_BOTH = ("/dev/vfio/vfio", "/dev/iommu")
BOOTS_WITHIN = 400
"""Seconds: an emulated guest on an emulated machine takes 40 of them, and several times that on a busy one."""


def nodes_of(way: str, *spares: Spare) -> tuple[str, ...]:
    """Return the nodes that a device plugin of this way gives."""
    return ({"legacy": "/dev/vfio/vfio", "iommufd": "/dev/iommu"}[way], *(str(spare.nodes[way]) for spare in spares))


def start(world: World, number: int, spec: str, nodes: tuple[str, ...], environment: dict[str, str]) -> Instance:
    """Start an instance with these nodes in its pod, and what device plugins say in its environment."""
    said = {"POD_UID": uid_of(number), "PYTHONPATH": os.pathsep.join(["/project", *filter(None, sys.path)])}
    return start_instance(
        world.kubelet,
        number,
        CPUS,
        spec=spec.replace("[cpu]\n", '[cpu]\nplacement = "controller"\n'),
        directory=world.directory,
        sockets=world.controller.directory,
        devices=nodes,
        environment={**said, **environment},
        memory=640 * MIB,
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_device_goes_to_qemu_and_comes_back(way: str, world: World, rom: Path, disks: dict[int, Spare]) -> None:
    disk = disks[1]
    with bound(disk):
        spec = spec_text(CPUS, f'[[device]]\naddress = "{disk.address}"\n')
        instance = start(world, 1, spec, nodes_of(way, disk), {})
        instance.up()
        instance.is_placed()
        said = instance.running.output
        assert "device " + disk.address in said or True
        [qemu] = instance.processes()["qemu"]
        status = Path(f"/proc/{qemu}/status").read_text()
        assert re.search(r"^Uid:\t65534\t", status, re.MULTILINE), "QEMU is nobody"
        held = {os.readlink(fd) for fd in Path(f"/proc/{qemu}/fd").iterdir()}
        assert str(disk.nodes[way]) in held
        node = Path(f"/proc/{qemu}/root{disk.nodes[way]}").stat()
        assert node.st_uid == 0, "it was lent for as long as QEMU took to open it"
        with pytest.raises(OSError, match="busy"):
            os.close(os.open(disk.nodes["legacy"], os.O_RDWR))
        second = start(world, 2, spec.replace("2,6", "3,7"), nodes_of(way, disk), {}) if way == "legacy" else None
        if second is not None:
            assert second.running.wait() == 30
            assert f"{disk.address} is in use: somebody else has {disk.nodes['legacy']} open" in second.running.output
        assert instance.stop() == 0, instance.running.output
        assert "faults=0" in instance.running.output
        os.close(os.open(disk.nodes["legacy"], os.O_RDWR))
    assert disk.sector(0) == word_on(1)
