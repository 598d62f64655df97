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
from runner.plan.argv.qemu import QemuFds, qemu_argv
from runner.plan.machine import FilePlan, MachinePlan
from runner.plan.passthrough import bar_window
from runner.plan.passthrough_plan import DevicePlan, PassthroughPlan
from tests.machine.test_shapes import ROM, QmpConnection, planned
from tests.support.program_runs import until

GIB = 1 << 30
BARS = 64 * GIB
"""Bytes of each device; emulated CPUs address 1 TiB."""
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


def standing_in(argv: list[str]) -> Iterator[str]:
    """Yield *argv* with QEMU's ``pci-testdev`` in the place of each passed-through device."""
    for word in argv:
        device, _, rest = word.partition(",")
        place = [item for item in rest.split(",") if item.startswith(("id=", "bus="))]
        yield ",".join(("pci-testdev", f"membar={BARS}", *place)) if device == "vfio-pci" else word


def regions(bus: Any) -> Iterator[tuple[int, int, int]]:
    """Yield bus, address and size of every high region that firmware has placed."""
    for device in bus["devices"]:
        for region in device["regions"]:
            if region["type"] == "memory" and region["size"] == BARS and 0 < region["address"] < 1 << 62:
                yield device["bus"], region["address"], region["size"]
        yield from regions(device["pci_bridge"]) if "devices" in device.get("pci_bridge", {}) else ()


@pytest.mark.parametrize("firmware", [None, *OVMF[:1]], ids=["SeaBIOS", "OVMF"][: 1 + len(OVMF[:1])])
def test_firmware_places_every_region_on_its_numa_nodes_bridge(firmware: Path | None) -> None:
    machine = with_gpus(planned("epyc-7543-2s-nps1", "1,65,33,97"), firmware)
    with contextlib.ExitStack() as held:
        ours, qmp, console, _ = (
            held.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair
        )
        image = held.enter_context(files.opened(PurePosixPath(firmware or ROM)))
        ram = tuple(held.enter_context(files.memory("ram", each.memory)) for each in machine.topology.numa_nodes)
        descriptors = QemuFds(qmp.fileno(), console.fileno(), ram, {"firmware": image})
        argv = [*standing_in(qemu_argv(machine, descriptors, paused=False))]
        qemu = held.enter_context(subprocess.Popen(argv, pass_fds=descriptors.numbers(), stderr=subprocess.DEVNULL))
        held.callback(qemu.kill)
        qmp.close()
        monitor = QmpConnection(ours, held)

        def placed() -> list[tuple[int, int, int]]:
            found = [region for bus in monitor.execute("query-pci") for region in regions(bus)]
            return found if len(found) == len(machine.passthrough.devices) else []

        found = sorted(until(placed, "firmware to place the regions", 120))
        monitor.execute("quit")
    assert [bus // 96 for bus, _, _ in found] == [0, 0, 1, 1], "buses 64 to 159 are NUMA node 0's, 160 to 255 node 1's"
    assert all(address >= 4 * GIB and address % BARS == 0 for _, address, _ in found)
    assert max(address for _, address, _ in found) + BARS <= 1 << 40
