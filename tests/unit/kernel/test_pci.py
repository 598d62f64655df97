"""What sysfs says of PCI devices, read from a recorded host."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.errors import HostError
from runner.kernel.pci import Link, Neighbour, Region, driver_of, is_silent, read_device
from tests.support.fake_pci import Record, paper_pci, recorded_pci

GIB, MIB = 1 << 30, 1 << 20
HGX = recorded_pci("hgx-h100")
GPU = "0000:1b:00.0"


def changed(address: str, **values: object) -> list[Record]:
    return [{**record, **values} if record["address"] == address else record for record in HGX]


def test_a_gpu_is_read_as_it_is(tmp_path: Path) -> None:
    found = read_device(GPU, paper_pci(tmp_path, HGX) / "sys")
    assert found is not None
    assert (found.name, found.driver, found.vfio, found.numa_node, found.group) == (
        "10de:2330",
        "vfio-pci",
        True,
        0,
        "30",
    )
    assert found.bars == (Region(16 * MIB, True), Region(128 * GIB, True), Region(32 * MIB, True))
    assert found.members == (Neighbour("0000:1a:00.0", "pcieport", True),)
    assert found.link == Link("32.0 GT/s PCIe", 16, "32.0 GT/s PCIe", 16)
    assert (found.resets, found.silent) == ("flr bus", False)
    assert found.character_device is not None
    assert driver_of(found.sysfs) == "vfio-pci"


def test_what_is_not_there_reads_as_nothing(tmp_path: Path) -> None:
    sys = paper_pci(tmp_path, changed(GPU, group=None, driver="", link=[], numa_node=-1)) / "sys"
    assert read_device("0000:ff:00.0", sys) is None
    found = read_device(GPU, sys)
    assert found is not None
    assert (found.group, found.driver, found.vfio, found.link, found.numa_node) == (None, None, False, None, -1)
    assert found.character_device is None


def test_low_memory_and_port_regions_are_told_apart(tmp_path: Path) -> None:
    bars = [[0, 4096, "0x040200"], [2, 32, "0x040101"], [4, GIB, "0x140204"]]
    found = read_device(GPU, paper_pci(tmp_path, changed(GPU, bars=bars)) / "sys")
    assert found is not None
    assert found.bars == (Region(4096, False), Region(GIB, False)), "ports are no memory; without prefetch it stays low"


def test_silence_is_all_ones_and_not_only_a_virtual_functions_name(tmp_path: Path) -> None:
    sys = paper_pci(tmp_path, changed(GPU, silent=True)) / "sys"
    path = sys / "bus/pci/devices" / GPU
    assert is_silent(path)
    (path / "config").write_bytes(b"\xff" * 4 + bytes(60))
    assert not is_silent(path)
    (path / "config").unlink()
    with pytest.raises(HostError, match="cannot read the configuration space of 0000:1b"):
        is_silent(path)


def test_neighbours_that_leave_the_device_alone_have_no_driver_to_speak_of(tmp_path: Path) -> None:
    others = [
        {**HGX[0], "address": f"0000:f{number}:00.0", "group": "30", "driver": driver}
        for number, driver in enumerate(("snd_hda_intel", "vfio-pci", "pci-stub", ""))
    ]
    found = read_device(GPU, paper_pci(tmp_path, [*HGX, *others]) / "sys")
    assert found is not None
    assert [(each.address, each.driver) for each in found.members if not each.bridge] == [
        ("0000:f0:00.0", "snd_hda_intel"),
        ("0000:f1:00.0", None),
        ("0000:f2:00.0", None),
        ("0000:f3:00.0", None),
    ]
