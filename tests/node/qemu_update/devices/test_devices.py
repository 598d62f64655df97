"""A device that was given by iommufd goes along to another QEMU, on a kernel that knows ``IOMMU_IOAS_CHANGE_PROCESS`` (6.14)."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.cpuset import CpuSet
from tests.emulated_node.spares import word_on
from tests.node.devices.conftest import Spare, bound
from tests.node.devices.test_passthrough import BOOTS_WITHIN, ENDS_WITHIN, MIB, linux_spec, nodes_of, started
from tests.node.instances import Instance, NodeFixture, uid_of, until
from tests.node.standin_kubelet import Mount

UPDATES = int(os.environ.get("RUNNER_QEMU_UPDATES", "3"))


def ctl(instance: Instance, *words: str) -> Any:
    return json.loads(instance.running.execute(sys.executable, "-m", "runner", "ctl", "--json", *words))


def ticks(instance: Instance) -> list[int]:
    """Return the numbers that the guest has printed, each after its disk had confirmed that it is written."""
    return [
        int(number) for number in re.findall(r"LINUX-GUEST-WROTE ([0-9]+)\r?$", instance.running.output, re.MULTILINE)
    ]


def writes_on(instance: Instance) -> None:
    """Wait until two more writes are confirmed: the first may have been so before."""
    seen = len(ticks(instance))
    until(lambda: len(ticks(instance)) > seen + 1, "the guest to write on", ENDS_WITHIN)


def _mounted(newest: Path) -> Mount:
    return (newest, "/opt/qemu", "ro")


@pytest.mark.timeout(BOOTS_WITHIN + 2 * ENDS_WITHIN + 120 * UPDATES)
def test_a_disk_goes_along(
    node_fixture: NodeFixture, newest: Path, disks: dict[int, Spare], linux_guest: tuple[Path, Path]
) -> None:
    """Each write needs the device's DMA and its interrupt."""
    place, disk, cpus = node_fixture.directory / uid_of(1), disks[0], CpuSet([1])
    place.mkdir()
    for file in linux_guest:
        shutil.copy(file, place)
    (place / "other").write_text('#!/bin/sh\nexec /opt/qemu/qemu-system-x86_64 "$@" -cpu qemu64\n')
    (place / "other").chmod(0o755)
    device = f'[[device]]\naddress = "{disk.address}"\niommu = "iommufd"\n[hotplug]\nqemu = true\n'
    spec = linux_spec(cpus, device, says="writes=1")
    path = {"PATH": f"/opt/qemu:{os.environ['PATH']}"}
    with bound(disk):
        nodes, mounts = nodes_of("iommufd", disk), [_mounted(newest)]
        with started(node_fixture, 1, cpus, spec, nodes, path, more_mounts=mounts) as instance:
            until(lambda: len(ticks(instance)) > 2, "the guest to write", BOOTS_WITHIN)
            assert ctl(instance, "qemu-update", "--check")["refused"] == []
            with pytest.raises(AssertionError, match=r"shows the guest another CPU.*the one before continues"):
                ctl(instance, "qemu-update", "--qemu", "/guest/other")  # fails after the device's state has gone over
            writes_on(instance)
            pinned = []
            for generation in range(1, UPDATES + 1):
                print("pause in ms:", ctl(instance, "qemu-update")["pause_ms"])
                instance.is_placed()
                assert instance.receipt()["qemu_generation"] == generation
                [qemu] = instance.processes()["qemu"]
                status = Path(f"/proc/{qemu}/status").read_text()
                pinned += [int(size) << 10 for size in re.findall(r"^VmPin:\s+(\d+) kB", status, re.MULTILINE)]
                writes_on(instance)
            assert all(size > 192 * MIB - MIB for size in pinned), "the memory of the present QEMU is counted"
            assert node_fixture.kubelet.stop(instance.uid, ENDS_WITHIN) == {"main": 0}
            assert "faults=0" in instance.running.output
    written = ticks(instance)
    assert written == list(range(len(written)))
    assert disk.sector(0) == word_on(0)
    assert int(disk.sector(8)) - written[-1] in {0, 1}
