"""Real devices that cannot be passed through, and the message for each: of ``plan``, of ``check``, and in a pod without their nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.emulated_node.spares import word_on
from tests.node.devices.conftest import Spare, bound
from tests.node.devices.test_passthrough import started
from tests.node.instances import NodeFixture, spec_text
from tests.node.test_runner import RUNNER

pytestmark = pytest.mark.usefixtures("rom")
WITHOUT_RIGHTS_TO_LOCK = (
    "setpriv",
    "--bounding-set=-sys_resource,-ipc_lock",
    "--inh-caps=-all",
    "prlimit",
    "--memlock=65536:65536",
)


def spec_of(directory: Path, rom: Path, *spares: Spare, more: str = "") -> Path:
    path = directory / "spec.toml"
    devices = "".join(f'[[device]]\naddress = "{spare.address}"\n{more}' for spare in spares)
    path.write_text(f'[cpu]\naccel = "tcg"\n[memory]\nsize = "64MiB"\n[boot]\nfirmware = "{rom}"\n{devices}')
    return path


def planned(spec: Path, around: Sequence[str] = ()) -> str:
    done = subprocess.run([*around, *RUNNER, "plan", spec], check=False, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stderr


def test_a_device_of_another_driver(disks: dict[int, Spare], rom: Path, tmp_path: Path) -> None:
    disk = disks[0]
    spec = spec_of(tmp_path, rom, disk)
    expected = f"{disk.address} (1b36:0010) is bound to 'nvme', not to vfio-pci"
    assert f"{expected}; bind it: driverctl set-override {disk.address} vfio-pci" in planned(spec)
    checked = subprocess.run([*RUNNER, "check", "--json", spec], check=False, capture_output=True, text=True)
    assert checked.returncode == 3
    found = json.loads(checked.stdout)["judgements"]
    assert [each["level"] for each in found if expected in each["found"]] == ["error"]


def test_a_device_without_power(disks: dict[int, Spare], rom: Path, tmp_path: Path) -> None:
    """No QEMU has opened it: the kernel waits a minute for a device that one closes."""
    disk = disks[1]
    with bound(disk):
        disk.switch_power(on=False)
        try:
            found = planned(spec_of(tmp_path, rom, disk))
        finally:
            disk.switch_power(on=True)
            disk.plug_in_anew()
    silent = "does not answer: its configuration space reads as nothing but ones"
    assert f"{disk.address} (1b36:0010) cannot be used: it {silent}" in found
    assert disk.sector(0) == word_on(1)


def test_half_of_an_iommu_group(pair: tuple[Spare, Spare], rom: Path, tmp_path: Path) -> None:
    one, other = pair
    spec = spec_of(tmp_path, rom, one)
    with bound(one):
        message = planned(spec)
        assert (
            f"{one.address} shares its IOMMU group {one.group} with {other.address}, which is bound to 'e1000e'"
            in message
        )
    with bound(one, other):
        assert f"device {one.address} (8086:10d3) by iommufd" in planned(spec), "iommufd does not need the other device"
        both = planned(spec_of(tmp_path, rom, one, other))
        assert f"device {other.address} (8086:10d3) by iommufd" in both
        by_group = planned(spec_of(tmp_path, rom, one, more='iommu = "legacy"\n'))
        assert f"device {one.address} (8086:10d3) by legacy, on NUMA node {one.numa_node}" in by_group


def test_memory_that_may_not_be_locked(disks: dict[int, Spare], rom: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, rom, disks[0])
    with bound(disks[0]):
        assert "device: 128 MiB may have to be locked, and RLIMIT_MEMLOCK is 64 KiB" in planned(
            spec, WITHOUT_RIGHTS_TO_LOCK
        )
        assert f"device {disks[0].address}" in planned(spec, WITHOUT_RIGHTS_TO_LOCK[3:]), (
            "with SYS_RESOURCE the limit is raised"
        )


def test_a_pod_without_the_nodes(node_fixture: NodeFixture, disks: dict[int, Spare], numa: dict[int, CpuSet]) -> None:
    disk = disks[0]
    cpus = CpuSet([max(numa[0])])
    with (
        bound(disk),
        started(node_fixture, 1, cpus, spec_text(cpus, f'[[device]]\naddress = "{disk.address}"\n'), ()) as instance,
    ):
        assert instance.running.wait() == 30
        assert (
            "not by 'iommufd': /dev/iommu: No such file or directory; give the container the node"
            in instance.running.output
        )
        assert "not by 'legacy': /dev/vfio/vfio: No such file or directory" in instance.running.output
