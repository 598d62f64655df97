"""PCI devices passed through to guests, by both VFIO backends, in pods that have the devices' nodes and nothing more."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import Status
from runner.facts.host import PODS_USERS
from runner.plan.host_checks import VFIO_MEMLOCK_OVERHEAD
from tests.emulated_node.cpio import archive
from tests.emulated_node.spares import word_on
from tests.machine.test_devices import seen
from tests.node.cgroups import until
from tests.node.devices.conftest import Spare, bound, claim_file
from tests.node.instances import LINUX_CMDLINE, Instance, NodeFixture, pool, spec_text, start_instance, uid_of
from tests.node.standin_kubelet import PROJECT, Mount
from tests.support.lstopo import LSTOPO, SHOW, pairs, ways, with_libraries

MIB = 1 << 20
RAM = 192 * MIB
"""Of the Linux guest."""
VFIO_BACKENDS = ("legacy", "iommufd")
BOOTS_WITHIN = 400
"""Seconds: with KVM on an emulated machine it takes 20 of them; emulated once more, several times that."""

ENDS_WITHIN = 150
"""Seconds for the same guest to power itself down."""

RESETS_WITHIN = 100
"""Seconds: the kernel waits for a device that it has reset for 60 of them (``PCIE_RESET_READY_POLL_MS``)."""

MASKED, LEFT = 0x0C, 0x05
"""An NVMe controller's register of masked interrupts (INTMS), which a reset clears, and what a guest leaves in it."""

SHOWS = f"{shlex.join(SHOW)} 2>/dev/null | gzip | base64"
"""The command that has the guest show its topology, in few characters: each of them leaves a guest's guest."""


def nodes_of(backend: str, *spares: Spare) -> tuple[str, ...]:
    """Return the device nodes that a device plugin for this VFIO backend gives."""
    return (
        {"legacy": "/dev/vfio/vfio", "iommufd": "/dev/iommu"}[backend],
        *(str(spare.nodes[backend]) for spare in spares),
    )


def kvm() -> tuple[str, ...]:
    """Return KVM's node, if this machine has it: an emulated one has, because TCG emulates AMD's SVM."""
    return ("/dev/kvm",) if Path("/dev/kvm").exists() else ()


@pytest.fixture
def cpus(numa: dict[int, CpuSet]) -> dict[int, CpuSet]:
    """Return CPUs for two instances by number, each with one of every NUMA node, so that its guest has both."""
    in_order = [sorted(each) for _, each in sorted(numa.items())]
    return {number: CpuSet(each[-number] for each in in_order) for number in (1, 2)}


@contextlib.contextmanager
def started(
    node_fixture: NodeFixture,
    number: int,
    cpus: CpuSet,
    spec: str,
    nodes: Iterable[str],
    environment: Mapping[str, str] | None = None,
    *,
    hugepages: Mapping[str, int] | None = None,
    more_mounts: Sequence[Mount] = (),
    host_users: bool = True,
) -> Iterator[Instance]:
    """Hold an instance with these device nodes in its pod and the device plugins' variables in its environment.

    It ends with the block, because a device in use cannot be bound to another driver.
    """
    defaults = {"POD_UID": uid_of(number), "PYTHONPATH": os.pathsep.join(["/project", *filter(None, sys.path)])}
    instance = start_instance(
        node_fixture.kubelet,
        number,
        cpus,
        spec=spec.replace("[cpu]\n", '[cpu]\nplacement = "controller"\n'),
        directory=node_fixture.directory,
        sockets=node_fixture.controller.directory,
        devices=tuple(nodes),
        environment={**defaults, **(environment or {})},
        memory=640 * MIB,
        hugepages=hugepages or {},
        more_mounts=more_mounts,
        host_users=host_users,
    )
    try:
        yield instance
    finally:
        print(instance.running.output)
        if instance.uid in node_fixture.kubelet.running:
            node_fixture.kubelet.stop(instance.uid, grace=0)
        node_fixture.kubelet.reconcile()


@pytest.mark.usefixtures("rom")
@pytest.mark.parametrize("backend", [pytest.param("legacy", marks=pytest.mark.node_only), "iommufd"])
def test_a_device_goes_to_qemu_and_comes_back(
    backend: str, node_fixture: NodeFixture, disks: dict[int, Spare], cpus: dict[int, CpuSet]
) -> None:
    """With iommufd in a user namespace of the pod, whose root owns the nodes that crun makes for it."""
    disk = disks[1]
    more = f'[[device]]\naddress = "{disk.address}"\n'
    start = partial(started, host_users=backend == "legacy")
    assert disk.may_lose_power
    with bound(disk), start(node_fixture, 1, cpus[1], spec_text(cpus[1], more), nodes_of(backend, disk)) as instance:
        instance.up()
        instance.is_placed()
        until(lambda: not disk.may_lose_power, "the controller to see to it while an instance has it")
        with disk.registers() as registers:
            registers[MASKED] = LEFT
            assert registers[MASKED] == LEFT
        [qemu] = instance.processes()["qemu"]
        status = Path(f"/proc/{qemu}/status").read_text()
        root = node_fixture.kubelet.pods[instance.uid].first_id
        [user] = map(int, re.findall(r"^Uid:\t([0-9]+)\t", status, re.MULTILINE))
        assert user == root + 65534 if root else user in PODS_USERS, (
            "QEMU is nobody of its namespace, or a user of its pod"
        )
        held = {str(fd.readlink()) for fd in Path(f"/proc/{qemu}/fd").iterdir()}
        assert str(disk.nodes[backend]) in held
        owner = Path(f"/proc/{instance.running.pid}/root{disk.nodes[backend]}").stat().st_uid
        assert owner == root, "QEMU owned it only while it opened it"
        with pytest.raises(OSError, match="busy"):
            os.close(os.open(disk.nodes["legacy"], os.O_RDWR))
        both = {*nodes_of("legacy", disk), *nodes_of("iommufd", disk)}
        with started(node_fixture, 2, cpus[2], spec_text(cpus[2], more), both) as second:
            assert second.running.wait() == 30
            assert f"{disk.address} is in use: another process has {disk.nodes['legacy']} open" in second.running.output
        # With iommufd the device is only found to be in use when QEMU opens it.
        with started(node_fixture, 2, cpus[2], spec_text(cpus[2], more), nodes_of("iommufd", disk)) as second:
            assert second.running.wait() == 31
            assert "another process has the device or one of its IOMMU group" in second.running.output
        assert instance.stop() == 0
        assert "faults=0" in instance.running.output
        os.close(os.open(disk.nodes["legacy"], os.O_RDWR))
        with disk.registers() as registers:
            assert registers[MASKED] == 0, "it was reset: the next guest does not find what this one has left in it"
        until(lambda: disk.may_lose_power, "the controller to put the setting back")
    assert disk.sector(0) == word_on(1)


@pytest.mark.usefixtures("rom")
@pytest.mark.timeout(6 * RESETS_WITHIN)
@pytest.mark.node_only
def test_a_device_without_power_is_a_fault_and_refused_until_it_was_switched_off_and_on(
    node_fixture: NodeFixture, disks: dict[int, Spare], cpus: dict[int, CpuSet]
) -> None:
    """The kernel waits a minute for a device that it has reset, also when QEMU closes it."""
    disk = disks[1]
    spec = spec_text(cpus[1], f'[[device]]\naddress = "{disk.address}"\n')
    silent = "does not answer: its configuration space reads as nothing but ones"
    with bound(disk):
        (disk.path / "reset_method").write_text("flr\n")  # else the kernel waits a minute for each
        start = partial(started, node_fixture, 1, cpus[1], spec, nodes_of("iommufd", disk))
        try:
            with start() as instance:
                instance.up()
                disk.switch_power(on=False)
                assert node_fixture.kubelet.stop(instance.uid, 3 * RESETS_WITHIN) == {"main": Status.DIRTY}
                output = instance.running.output
                assert f"could not get the device {disk.address} back: it is wedged: it {silent}" in output
            with start() as instance:
                assert instance.running.wait() == Status.REFUSED
                assert f"{disk.address} (1b36:0010) cannot be used: it {silent}" in instance.running.output
        finally:
            disk.switch_power(on=True)
            disk.plug_in_anew()
        disk.bind("vfio-pci")
        with start() as instance:
            instance.up()
            assert instance.stop() == 0
    assert disk.sector(0) == word_on(1)


@pytest.mark.usefixtures("rom")
def test_the_example_of_a_gpu_instance(
    node_fixture: NodeFixture, disks: dict[int, Spare], numa: dict[int, CpuSet], reserve: Callable[[int, int], None]
) -> None:
    """Start the example with less of everything: a small disk instead of the GPU, a ROM instead of OVMF, no pod network."""
    disk = disks[0]
    cpus = CpuSet(cpu for cpu in numa[0] if cpu != 0)
    spec = tomllib.loads((PROJECT / "examples/instances/gpu.toml").read_text())
    place = node_fixture.directory / uid_of(1)
    place.mkdir()
    (place / "disk").write_bytes(bytes(512))
    spec["cpu"] |= {"count": len(cpus), "accel": "tcg"}
    assert (spec["memory"].pop("size"), spec["memory"]) == ("80GiB", {"hugepages": "2MiB"})
    spec["memory"]["size"] = f"{RAM // MIB}MiB"
    spec["boot"] = {"firmware": "/guest/rom"}
    spec["disk"] = [{"path": "/guest/disk", "read_only": True}]
    spec["network"] = [{"mode": "private"}]
    given = {"PCI_RESOURCE_NVIDIA_COM_GH100": f"{disk.address},"}
    reserve(RAM // (2 * MIB), 0)
    with bound(disk):
        nodes = (*nodes_of("iommufd", disk), "/dev/net/tun")
        with started(node_fixture, 1, cpus, json.dumps(spec), nodes, given, hugepages={"2MB": RAM}) as instance:
            instance.up()
            instance.is_placed()
            [qemu] = instance.processes()["qemu"]
            status = Path(f"/proc/{qemu}/status").read_text()
            [user] = map(int, re.findall(r"^Uid:\t([0-9]+)\t", status, re.MULTILINE))
            assert user in PODS_USERS, "each pod's QEMU is a user of its own"
            pinned = re.search(r"^VmPin:\s+(\d+) kB", status, re.MULTILINE)
            assert pinned is not None
            assert int(pinned[1]) << 10 > RAM - MIB, "all of it but holes below 1 MiB is pinned for the device"
            assert int(instance.running.scope.read("hugetlb.2MB.current")) == RAM
            assert pool(0, "free_hugepages").read_text() == "0\n"
            assert instance.stop() == 0
    assert pool(0, "free_hugepages").read_text() == f"{RAM // (2 * MIB)}\n"
    assert disk.sector(0) == word_on(0)


def linux_spec(
    cpus: CpuSet,
    *more: str,
    says: str = "devices=1",
    accel: Literal["auto", "kvm"] = "auto",
    model: str = "Skylake-Server",
) -> str:
    """Return a spec whose guest is a Linux that *says*, by its kernel's command line, which devices it sees."""
    return "\n".join(
        (
            f'[cpu]\ncount = {len(cpus)}\naccel = "{accel}"\nmodel = "{model}"\n[memory]\nsize = "{RAM // MIB}MiB"',
            f'[boot]\nkernel = "/guest/guest-kernel"\ninitrd = "/guest/guest-initrd"\ncmdline = "{LINUX_CMDLINE} {says}"',
            f"[shutdown]\ngrace = {ENDS_WITHIN}",
            *more,
        )
    )


@pytest.mark.timeout(BOOTS_WITHIN + 2 * ENDS_WITHIN)
def test_a_guest_uses_its_devices_on_the_numa_node_they_are_on(
    node_fixture: NodeFixture,
    disks: dict[int, Spare],
    nics: dict[int, Spare],
    cpus: dict[int, CpuSet],
    linux_guest: tuple[Path, Path],
) -> None:
    """One guest has a disk by each backend, on different NUMA nodes, and a NIC of a claim: its boot takes long."""
    place = node_fixture.directory / uid_of(1)
    place.mkdir()
    for file in linux_guest:
        shutil.copy(file, place)
    by_backend, nic = dict(zip(VFIO_BACKENDS, (disks[1], disks[0]), strict=True)), nics[0]
    devices = (
        '[[device]]\nresource = "example.com/NVMe-disk"\ncount = 1\niommu = "legacy"\n'
        f'[[device]]\naddress = "{by_backend["iommufd"].address}"\niommu = "iommufd"\n'
        '[[device]]\nclaim = "nics"\n'
    )
    address = by_backend["legacy"].address
    environment = {"PCI_RESOURCE_EXAMPLE_COM_NVME-DISK": f"{address},{address},"}
    with bound(*by_backend.values(), nic), contextlib.ExitStack() as running:
        nodes = [node for backend, disk in by_backend.items() for node in nodes_of(backend, disk)]
        nodes += [str(nic.nodes["legacy"]), *kvm()]
        spec = linux_spec(cpus[1], devices)
        mounts = [claim_file(place, "nics", nic)]
        instance = running.enter_context(
            started(node_fixture, 1, cpus[1], spec, nodes, environment, more_mounts=mounts)
        )
        up = instance.running.wait_for("LINUX-GUEST-UP", BOOTS_WITHIN)
        output = instance.running.output
        for numa_node in disks:
            assert f"NVME-DISK numa_node={numa_node} holds {word_on(numa_node).decode()}" in output
            assert f"PCI-DEVICE 0x1b36:0x0010 numa_node={numa_node}" in output
        assert "PCI-DEVICE 0x8086:0x10d3 numa_node=0" in output
        assert "numa_nodes=0-1 addresses=10.0.2.15/24," in up, (
            "the NIC has an address from the DHCP server of its network"
        )
        [qemu] = instance.processes()["qemu"]
        status = Path(f"/proc/{qemu}/status").read_text()
        for counted in ("VmLck", "VmPin"):  # with legacy the kernel counts locked memory, with iommufd pinned memory
            [size] = re.findall(rf"^{counted}:\s+(\d+) kB", status, re.MULTILINE)
            assert 0 <= (int(size) << 10) - RAM <= VFIO_MEMLOCK_OVERHEAD, "RAM and a little firmware"
        assert int(instance.running.scope.read("memory.current")) > RAM, "the pod is charged for the locked memory"
        assert node_fixture.kubelet.stop(instance.uid, ENDS_WITHIN) == {"main": 0}
        assert "faults=0" in instance.running.output
    for numa_node, disk in disks.items():
        assert disk.sector(0) == word_on(numa_node)
        assert disk.sector(8) == b"written by the guest"
    assert nic.driver == "e1000e"


@pytest.mark.timeout(BOOTS_WITHIN + 2 * ENDS_WITHIN)
@pytest.mark.node_only
def test_lstopo_shows_each_pair_of_devices_in_the_guest_as_on_the_node(
    node_fixture: NodeFixture,
    six: list[Spare],
    disks: dict[int, Spare],
    cpus: dict[int, CpuSet],
    linux_guest: tuple[Path, Path],
) -> None:
    """Six devices of two root complexes of one NUMA node, two of them behind a switch, and the other NUMA node's disk."""
    place, devices = node_fixture.directory / uid_of(1), [*six, disks[1]]
    place.mkdir()
    for file in linux_guest:
        shutil.copy(file, place)
    with (place / linux_guest[1].name).open("ab") as initrd:
        initrd.write(bytes(-initrd.tell() % 4) + archive([*with_libraries(LSTOPO)]))
    on_node = ways(subprocess.run(SHOW, check=True, stdout=subprocess.PIPE, text=True).stdout)
    tables = "".join(f'[[device]]\naddress = "{each.address}"\niommu = "legacy"\n' for each in devices)
    with bound(*devices):
        nodes = dict.fromkeys((*nodes_of("legacy", *devices), *kvm()))
        with started(node_fixture, 1, cpus[1], linux_spec(cpus[1], tables, says="loglevel=0"), nodes) as instance:
            instance.running.wait_for("LINUX-GUEST-UP", BOOTS_WITHIN)
            instance.type(SHOWS)
            instance.running.wait_for("LINUX-GUEST-DONE", BOOTS_WITHIN)
            shown = instance.running.output.partition("LINUX-GUEST-UP")[2].partition("LINUX-GUEST-DONE")[0]
            encoded = re.findall(r"^[0-9A-Za-z+/=]+\r?$", shown, re.MULTILINE)  # the log is between them
            in_guest = ways(gzip.decompress(base64.b64decode("".join(encoded))).decode())
            found = guest_addresses(instance)
            assert node_fixture.kubelet.stop(instance.uid, ENDS_WITHIN) == {"main": 0}
    expected = dict(pairs(on_node, {each.address: each.address for each in devices}))
    assert dict(pairs(in_guest, {each.address: found[each.address] for each in devices})) == expected
    assert Counter(expected.values()) == {"bridge": 2, "root complex": 5, "Package": 8, "Machine": 6}


def guest_addresses(instance: Instance) -> dict[str, str]:
    """Return the addresses that firmware has given to the passed devices, by those on the node."""
    [qemu] = instance.processes()["qemu"]
    options = Path(f"/proc/{qemu}/cmdline").read_text()
    on_node = dict(re.findall(r"vfio-pci,id=(\w+),[^\0]*host=([0-9a-f:.]+)", options))
    buses = json.loads(instance.running.execute(sys.executable, "-m", "runner", "ctl", "qmp", "query-pci"))
    return {on_node[name]: address for bus in buses for name, address in seen(bus) if name in on_node}
