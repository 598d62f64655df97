"""hwloc's lstopo on both sides: what two passed devices have in common on the host, they have in common in the guest.

On the host it reads the sysfs of a recorded one; in the guest it runs itself, on a guest of this machine's QEMU with
emulated devices in the place of the host's.
"""

from __future__ import annotations

import base64
import contextlib
import re
import shlex
import shutil
import socket
import subprocess
from collections import Counter
from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.kernel import files
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.machine import FilePlan, MachinePlan
from runner.plan.nccl import FW_CFG, nccl_topology
from tests.emulated_node.cpio import Entry, archive
from tests.machine.test_devices import standing_in
from tests.machine.test_shapes import planned
from tests.support.fake_pci import Record, fake_pci_tree, recorded_pci, vfio_facts
from tests.support.lstopo import LSTOPO, SHOW, pairs, ways, with_libraries
from tests.support.plans import EPYC, KERNEL, plan_of
from tests.support.program_runs import GuestFiles

pytestmark = pytest.mark.timeout(1200)
"""An emulated guest with twenty devices boots in half a minute, and on a busy machine in ten."""

CPUS, ON_BOTH = "1,65,33,97", '[cpu]\ncount = 4\ncpus = "1,65,33,97"\n'
SHOWS_TOPOLOGY = shlex.join(SHOW)
SHOWS_FILE = f"""/bin/busybox insmod /modules/qemu_fw_cfg.ko
/bin/busybox base64 /sys/firmware/qemu_fw_cfg/by_name/{FW_CFG}/raw
echo END"""
INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
exec </dev/ttyS0 >/dev/ttyS0 2>&1
echo BEGIN
{}
/bin/busybox poweroff -f
"""


def six_devices() -> list[Record]:
    """Return a host with two root complexes on one NUMA node, a switch and six devices, the last on another NUMA node."""
    made = {"driver": "pcieport", "group": None, "bars": [], "reset_method": "", "link": ["8.0 GT/s PCIe", 4] * 2}
    records = [
        {
            **made,
            "address": f"0000:{address}",
            "parent": parent,
            "class": "0x060400",
            "vendor": "0x8086",
            "device": "0x352a",
            "kind": kind,
        }
        for address, parent, kind in (
            ("20:01.0", "pci0000:20", "root port"),
            ("21:00.0", "0000:20:01.0", "upstream port"),
            ("22:00.0", "0000:21:00.0", "downstream port"),
            ("22:01.0", "0000:21:00.0", "downstream port"),
            *(
                (f"{bus}:0{slot}.0", f"pci0000:{bus}", "root port")
                for bus, slot in ((20, 2), (40, 1), (40, 2), (80, 1))
            ),
        )
    ]
    ports = ("22:00.0", "22:01.0", "20:02.0", "40:01.0", "40:02.0", "80:01.0")
    for bus, port, (kind, vendor) in zip(
        (23, 24, 25, 41, 42, 81), ports, [("0x010802", "0x144d"), ("0x020000", "0x15b3")] * 3, strict=True
    ):
        device = {"class": kind, "vendor": vendor, "device": "0x1000", "driver": "vfio-pci", "group": str(bus)}
        records.append({**made, **device, "address": f"0000:{bus}:00.0", "parent": f"0000:{port}"})
    return [{**each, "numa_node": int(str(each["address"]) >= "0000:80")} for each in records]


def with_numbers(root: Path, records: list[Record]) -> None:
    """Add to the fake sysfs what hwloc reads of it: bus numbers, the CPUs that are near, and the machine they are of."""
    parents = {record["address"]: record["parent"] for record in records}
    below: dict[str, set[int]] = {}
    for address in parents:
        above = parents.get(address)
        while above is not None:
            below.setdefault(above, set()).add(int(address[5:7], 16))
            above = parents.get(above)
    for record in records:
        device = root / "sys/bus/pci/devices" / record["address"]
        (device / "local_cpus").write_text(f"{CpuSet([2, 3] if record['numa_node'] else [0, 1]).mask()}\n")
        space = bytearray(64)
        space[0x0A:0x0C] = int(record["class"], 16).to_bytes(3, "little")[1:]
        if buses := below.get(record["address"]):
            space[0x0E] = 1
            space[0x18:0x1B] = bytes((int(record["address"][5:7], 16), min(buses), max(buses)))
        (device / "config").write_bytes(space)
    system = root / "sys/devices/system"
    contents = {"cpu/online": "0-3", "node/online": "0-1"}
    for cpu in range(4):
        topology = {"core_id": cpu % 2, "physical_package_id": cpu // 2, "core_cpus": CpuSet([cpu]).mask()}
        topology |= {
            "package_cpus": CpuSet([2, 3] if cpu > 1 else [0, 1]).mask(),
            "thread_siblings": CpuSet([cpu]).mask(),
        }
        contents |= {f"cpu/cpu{cpu}/topology/{name}": str(value) for name, value in topology.items()}
    for node in range(2):
        contents[f"node/node{node}/cpumap"] = CpuSet([2 * node, 2 * node + 1]).mask()
        contents[f"node/node{node}/distance"] = "10 20" if node == 0 else "20 10"
        contents[f"node/node{node}/meminfo"] = f"Node {node} MemTotal:       1048576 kB"
    for name, content in contents.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(f"{content}\n")


def on_host(root: Path, records: list[Record]) -> str:
    """Return what lstopo shows of the recorded host."""
    fake_pci_tree(root, [{**each, "bars": []} for each in records])
    with_numbers(root, records)
    # Links in sysfs are relative, and hwloc reads none of them below another root.
    for link in (root / "sys/bus/pci/devices").iterdir():
        target = link.resolve()
        link.unlink()
        shutil.copytree(target, link, symlinks=True)
    environment = {"HWLOC_FSROOT": str(root), "HWLOC_THISSYSTEM": "0", "HWLOC_COMPONENTS": "linux,stop"}
    return subprocess.run(SHOW, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def initramfs(command: str) -> bytes:
    """Return an archive with busybox and lstopo, whose init runs *command*."""
    return archive(
        [
            *with_libraries(LSTOPO, "/bin/busybox"),
            *(Entry.directory(name) for name in ("dev", "proc", "sys")),
            Entry.file("init", INIT.format(command).encode(), 0o755),
        ]
    )


def in_guest(root: Path, guest: GuestFiles, records: list[Record], command: str) -> tuple[str, MachinePlan]:
    """Return what *command* prints in a guest with the host's devices, and the machine that it is."""
    facts = attrs.evolve(EPYC, vfio=vfio_facts(root, records), qemu_version="7.2.22")
    passthrough = plan_of(f'{KERNEL}{ON_BOTH}[[device]]\nvariable = "ALL"\n', facts).machine.passthrough
    modules = guest.initrd.read_bytes()
    padding = bytes(-len(modules) % 4)  # Documentation/driver-api/early-userspace/buffer-format.rst
    (root / "initrd").write_bytes(modules + padding + initramfs(command))
    machine = planned("epyc-7543-2s-nps1", CPUS)
    machine = attrs.evolve(
        machine,
        passthrough=attrs.evolve(passthrough, iommufd=None, window=None),
        firmware=None,
        kernel=FilePlan(PurePosixPath(guest.kernel), copied=False),
        initrd=FilePlan(PurePosixPath(root / "initrd"), copied=False),
        # Its warnings would stand in the midst of what is shown; the check of the timer fails on a busy machine.
        cmdline="console=ttyS0 loglevel=0 no_timer_check",
    )
    with contextlib.ExitStack() as held:
        ends = [held.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair]
        ram = tuple(held.enter_context(files.memory("ram", each.memory)) for each in machine.topology.numa_nodes)
        opened = {
            name: held.enter_context(files.opened(PurePosixPath(path)))
            for name, path in (("kernel", guest.kernel), ("initrd", root / "initrd"))
        }
        descriptors = QemuFds(ends[1].fileno(), ends[2].fileno(), ram, opened)
        argv = [*standing_in(qemu_argv(machine, descriptors, paused=False), 1 << 20)]
        qemu = held.enter_context(subprocess.Popen(argv, pass_fds=descriptors.numbers(), stderr=subprocess.DEVNULL))
        held.callback(qemu.kill)
        ends[1].close()
        ends[2].close()
        output = b"".join(iter(lambda: ends[3].recv(1 << 16), b"")).decode(errors="replace").replace("\r", "")
    _, begun, shown = output.partition("BEGIN\n")
    assert begun, output
    return shown, machine


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (six_devices(), {"bridge": 1, "root complex": 3, "Package": 6, "Machine": 5}),
        # Each GPU with its NIC, and the NVSwitches with each other.
        (recorded_pci("hgx-h200"), {"bridge": 8 + 6, "Package": 80, "Machine": 96}),
    ],
    ids=["six devices", "a board with eight H200"],
)
def test_lstopo_shows_each_pair_of_devices_as_on_the_host(
    tmp_path: Path, guest: GuestFiles, records: list[Record], expected: dict[str, int]
) -> None:
    of_host = ways(on_host(tmp_path / "host", records))
    output, machine = in_guest(tmp_path / "guest", guest, records, SHOWS_TOPOLOGY)
    shown = re.search(r"<\?xml.*</topology>", output, re.DOTALL)
    assert shown is not None, output
    addresses = {device.address: device.guest_address for device in machine.passthrough.devices}
    on_both_sides = dict(pairs(of_host, {each: each for each in addresses}))
    assert dict(pairs(ways(shown[0]), addresses)) == on_both_sides
    assert Counter(on_both_sides.values()) == expected


def test_a_guest_without_cloud_init_reads_nccls_file_as_it_was_written(tmp_path: Path, guest: GuestFiles) -> None:
    """By Linux's own driver, at the path that the plan's remark names."""
    output, machine = in_guest(tmp_path, guest, recorded_pci("hgx-h200"), SHOWS_FILE)
    encoded, ended, _ = output.partition("END")
    assert ended, output
    assert encoded == base64.encodebytes(nccl_topology(machine).encode()).decode()
