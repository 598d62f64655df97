"""Firmware places the memory regions of GPUs as planned: this machine's QEMU with emulated devices that are as large."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest

from runner.facts.pci import Bar
from runner.kernel import files
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.machine import FilePlan, MachinePlan
from runner.plan.passthrough_plan import DevicePlan, PassthroughPlan
from tests.machine.test_shapes import ROM, QmpConnection, planned
from tests.support.fake_pci import bar_window, recorded_pci, vfio_facts
from tests.support.plans import EPYC, KERNEL, plan_of
from tests.support.program_runs import until

GIB = 1 << 30
BARS = 64 * GIB
"""Bytes of each device; emulated CPUs address 1 TiB."""
SMALL_BARS = 8 * GIB
"""Bytes of each of twenty devices."""
OVMF = [
    path for path in map(Path, ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_CODE.fd")) if path.exists()
]


def with_gpus(machine: MachinePlan, firmware: Path | None) -> MachinePlan:
    """Return *machine* with two devices on each of its two NUMA nodes."""
    devices = tuple(
        DevicePlan(
            f"0000:0{n}:00.0",
            PurePosixPath("/"),
            "",
            "",
            "legacy",
            None,
            None,
            None,
            f"pcie.{n // 2 + 1}",
            0,
            0,
            0,
            (),
            True,
        )
        for n in range(4)
    )
    window = bar_window([[Bar(BARS, high=True)]] * len(devices))
    code = machine.firmware if firmware is None else FilePlan(PurePosixPath(firmware), copied=False)
    return attrs.evolve(machine, passthrough=PassthroughPlan(devices, window=window), firmware=code)


def standing_in(argv: list[str], size: int) -> Iterator[str]:
    """Yield *argv* with QEMU's ``ivshmem-plain`` with a region of *size* bytes for each passed-through device.

    It has no I/O region, for which firmware would need 4 KiB of I/O addresses behind each port.
    """
    number = 0
    for word in argv:
        device, _, rest = word.partition(",")
        if device != "vfio-pci":
            yield word
            continue
        place = [item for item in rest.split(",") if item.startswith(("id=", "bus=", "addr=", "multifunction="))]
        yield ",".join(("ivshmem-plain", f"memdev=region{number}", *place))
        yield from ("-object", f"memory-backend-ram,id=region{number},size={size},reserve=off")
        number += 1


def regions(bus: Any, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield bus, address and size of every region of *size* bytes that firmware has placed."""
    for device in bus["devices"]:
        for region in device["regions"]:
            if region["type"] == "memory" and region["size"] == size and 0 < region["address"] < 1 << 62:
                yield device["bus"], region["address"], region["size"]
        yield from regions(device["pci_bridge"], size) if "devices" in device.get("pci_bridge", {}) else ()


def placed(monitor: QmpConnection, size: int, number: int) -> list[tuple[int, int, int]]:
    """Return all :func:`regions` when there are this *number* of them, and nothing before."""
    found = sorted(region for bus in monitor.execute("query-pci") for region in regions(bus, size))
    return found if len(found) == number else []


@contextlib.contextmanager
def running(machine: MachinePlan, firmware: Path | None, size: int) -> Iterator[QmpConnection]:
    """Run *machine* with regions of *size* bytes; yield its monitor."""
    with contextlib.ExitStack() as held:
        ours, qmp, console, _ = (
            held.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair
        )
        image = held.enter_context(files.opened(PurePosixPath(firmware or ROM)))
        ram = tuple(held.enter_context(files.memory("ram", each.memory)) for each in machine.topology.numa_nodes)
        descriptors = QemuFds(qmp.fileno(), console.fileno(), ram, {"firmware": image})
        argv = [*standing_in(qemu_argv(machine, descriptors, paused=False), size)]
        qemu = held.enter_context(subprocess.Popen(argv, pass_fds=descriptors.numbers(), stderr=subprocess.DEVNULL))
        held.callback(qemu.kill)
        qmp.close()
        monitor = QmpConnection(ours, held)
        yield monitor
        monitor.execute("quit")


@pytest.mark.parametrize("firmware", [None, *OVMF[:1]], ids=["SeaBIOS", "OVMF"][: 1 + len(OVMF[:1])])
def test_firmware_places_every_region_on_its_numa_nodes_bridge(firmware: Path | None) -> None:
    machine = with_gpus(planned("epyc-7543-2s-nps1", "1,65,33,97"), firmware)
    with running(machine, firmware, BARS) as monitor:
        found = until(lambda: placed(monitor, BARS, 4), "firmware to place the regions", 120)
    assert [bus // 96 for bus, _, _ in found] == [0, 0, 1, 1], "buses 64 to 159 are NUMA node 0's, 160 to 255 node 1's"
    assert all(address >= 4 * GIB and address % BARS == 0 for _, address, _ in found)
    assert max(address for _, address, _ in found) + BARS <= 1 << 40


def seen(bus: Any) -> Iterator[tuple[str, str]]:
    """Yield the identifier and the PCI address of each device on *bus* and below."""
    for device in bus["devices"]:
        yield device["qdev_id"], f"0000:{device['bus']:02x}:{device['slot']:02x}.{device['function']}"
        yield from seen(device["pci_bridge"]) if "devices" in device.get("pci_bridge", {}) else ()


@pytest.mark.parametrize("firmware", [None, *OVMF[:1]], ids=["SeaBIOS", "OVMF"][: 1 + len(OVMF[:1])])
@pytest.mark.parametrize("recorded", ["hgx-h200", "l40s-box", "workstation"])
def test_firmware_numbers_buses_and_places_regions_as_planned(
    tmp_path: Path, recorded: str, firmware: Path | None
) -> None:
    """The topology file for NCCL names devices by these addresses before the guest has run."""
    small = [
        {**record, "bars": [[0, SMALL_BARS, "0x14220c"]]} if record["driver"] == "vfio-pci" else record
        for record in recorded_pci(recorded)
    ]
    facts = attrs.evolve(EPYC, vfio=vfio_facts(tmp_path, small), qemu_version="7.2.22")
    on_both = '[cpu]\ncount = 4\ncpus = "1,65,33,97"\n' if recorded != "workstation" else ""
    passthrough = plan_of(f'{KERNEL}{on_both}[[device]]\nvariable = "ALL"\n', facts).machine.passthrough
    machine = planned("epyc-7543-2s-nps1", "1,65,33,97" if on_both else "1,65")
    code = machine.firmware if firmware is None else FilePlan(PurePosixPath(firmware), copied=False)
    machine = attrs.evolve(machine, passthrough=attrs.evolve(passthrough, iommufd=None), firmware=code)
    assert machine.slots > 0, "ports for disks are there as well"
    expected = {f"device{index}": device.guest_address for index, device in enumerate(passthrough.devices)}
    expected |= {port.name: port.address for port in passthrough.ports if port.kind == "upstream"}
    with running(machine, firmware, SMALL_BARS) as monitor:
        found = until(
            lambda: placed(monitor, SMALL_BARS, len(passthrough.devices)), "firmware to place the regions", 120
        )
        addresses = dict(each for bus in monitor.execute("query-pci") for each in seen(bus))
    assert {name: addresses[name] for name in expected} == expected
    assert all(address >= 4 * GIB for _, address, _ in found)
