"""A device that was given by iommufd goes along to another QEMU, with KVM and ``IOMMU_IOAS_CHANGE_PROCESS`` (Linux 6.14).

`tests/node/run --qemu --devices --kernel newest --cpus 4` runs it; not part of `all`, which boots another kernel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.emulated_node.spares import word_on
from tests.node.cgroups import until
from tests.node.devices.conftest import Spare, bound
from tests.node.devices.test_passthrough import BOOTS_WITHIN, ENDS_WITHIN, MIB, linux_spec, nodes_of, started
from tests.node.instances import Instance, NodeFixture, uid_of
from tests.node.standin_kubelet import Mount
from tests.support.soak import times

UPDATES = times(3)


LOGGED = r"[0-9:]{8}\.[0-9]{3} (?:info|warning|error) .*\n"


def ctl(instance: Instance, *words: str) -> Any:
    return json.loads(instance.running.execute(sys.executable, "-m", "runner", "ctl", "--json", *words))


def ticks(instance: Instance) -> list[int]:
    """Return the numbers that the guest has printed, each after its disk had confirmed that it is written."""
    console = re.sub(LOGGED, "", instance.running.output, flags=re.MULTILINE)  # in the middle of what it prints
    return [int(number) for number in re.findall(r"LINUX-GUEST-WROTE ([0-9]+)\r?$", console, re.MULTILINE)]


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
    device = f'[[device]]\naddress = "{disk.address}"\niommu = "iommufd"\n[hotplug]\nqemu = true\n'
    spec = linux_spec(cpus, device, says="writes=1", accel="kvm", model="qemu64")
    path = {"PATH": f"/opt/qemu:{os.environ['PATH']}"}
    with bound(disk):
        nodes, mounts = (*nodes_of("iommufd", disk), "/dev/kvm"), [_mounted(newest)]
        with started(node_fixture, 1, cpus, spec, nodes, path, more_mounts=mounts) as instance:
            until(lambda: len(ticks(instance)) > 2, "the guest to write", BOOTS_WITHIN)
            assert ctl(instance, "qemu-update", "--check", "--no-way-back")["refused"] == []
            pinned = []
            for generation in range(1, UPDATES + 1):
                print("pause in ms:", ctl(instance, "qemu-update", "--no-way-back")["pause_ms"])
                instance.is_placed()
                assert instance.receipt()["qemu_generation"] == generation
                [qemu] = instance.processes()["qemu"]
                status = Path(f"/proc/{qemu}/status").read_text()
                pinned += [int(size) << 10 for size in re.findall(r"^VmPin:\s+(\d+) kB", status, re.MULTILINE)]
                writes_on(instance)
            written = ticks(instance)
            assert written == list(range(len(written))), "no number is missing"
            assert all(size > 192 * MIB - MIB for size in pinned), "the memory of the present QEMU is counted"
            assert node_fixture.kubelet.stop(instance.uid, ENDS_WITHIN) == {"main": 0}
            assert "faults=0" in instance.running.output
    assert disk.sector(0) == word_on(0)
    assert int(disk.sector(8)) - written[-1] >= 0, "what the guest has read back is there"
