"""PCI devices read from the sysfs of a recorded host."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from runner.base.errors import HostError
from runner.facts.pci import Acs, Bar, DeviceNode, GroupMember, PciLink
from runner.facts.roots import Roots
from runner.kernel.pci import driver_of, read_pci_facts, why_wedged
from tests.support.fake_pci import Record, fake_pci_tree, recorded_pci

GIB, MIB = 1 << 30, 1 << 20
HGX = recorded_pci("hgx-h100")
GPU = "0000:1b:00.0"


def changed(address: str, **values: object) -> list[Record]:
    return [{**record, **values} if record["address"] == address else record for record in HGX]


def test_every_attribute_of_a_gpu_is_read(tmp_path: Path) -> None:
    found = read_pci_facts([GPU], Roots.below(fake_pci_tree(tmp_path, HGX)))[GPU]
    assert (found.name, found.driver, found.vfio, found.numa_node, found.group) == (
        "10de:2330",
        "vfio-pci",
        True,
        0,
        "30",
    )
    assert found.bars == (Bar(16 * MIB, True), Bar(128 * GIB, True), Bar(32 * MIB, True))
    assert found.members == (GroupMember("0000:1a:00.0", "pcieport", True),)
    assert found.link == PciLink("32.0 GT/s PCIe", 16, "32.0 GT/s PCIe", 16)
    assert (found.resets, found.silent) == ("flr bus", False)
    assert found.group_node == DeviceNode(PurePosixPath(tmp_path / "dev/vfio/30"))
    assert found.device_node is not None
    assert driver_of(str(found.sysfs)) == "vfio-pci"


def test_absent_files_read_as_none(tmp_path: Path) -> None:
    roots = Roots.below(fake_pci_tree(tmp_path, changed(GPU, group=None, driver="", link=[], numa_node=-1)))
    assert read_pci_facts(["0000:ff:00.0"], roots) == {}
    found = read_pci_facts([GPU], roots)[GPU]
    assert (found.group, found.driver, found.vfio, found.link, found.numa_node) == (None, None, False, None, -1)
    assert (found.group_node, found.device_node) == (None, None)


def test_low_memory_and_port_regions_are_distinguished(tmp_path: Path) -> None:
    bars = [[0, 4096, "0x040200"], [2, 32, "0x040101"], [4, GIB, "0x140204"]]
    found = read_pci_facts([GPU], Roots.below(fake_pci_tree(tmp_path, changed(GPU, bars=bars))))[GPU]
    assert found.bars == (Bar(4096, False), Bar(GIB, False)), "ports are no memory; without prefetch it stays low"


def test_a_device_that_reads_as_all_ones_does_not_respond(tmp_path: Path) -> None:
    sys = fake_pci_tree(tmp_path, changed(GPU, silent=True)) / "sys"
    path = sys / "bus/pci/devices" / GPU
    assert why_wedged(str(path)) == "it does not answer: its configuration space reads as nothing but ones"
    (path / "config").write_bytes(b"\xff" * 4 + bytes(60))
    assert why_wedged(str(path)) is None
    (path / "config").unlink()
    with pytest.raises(HostError, match="cannot read the configuration space of 0000:1b"):
        why_wedged(str(path))


def test_drivers_that_do_not_use_the_device_are_omitted(tmp_path: Path) -> None:
    others = [
        {**HGX[0], "address": f"0000:f{number}:00.0", "group": "30", "driver": driver}
        for number, driver in enumerate(("snd_hda_intel", "vfio-pci", "pci-stub", ""))
    ]
    found = read_pci_facts([GPU], Roots.below(fake_pci_tree(tmp_path, [*HGX, *others])))[GPU]
    assert [(each.address, each.driver) for each in found.members if not each.bridge] == [
        ("0000:f0:00.0", "snd_hda_intel"),
        ("0000:f1:00.0", None),
        ("0000:f2:00.0", None),
        ("0000:f3:00.0", None),
    ]


def test_the_way_to_a_device_is_read(tmp_path: Path) -> None:
    found = read_pci_facts(["0000:18:00.0"], Roots.below(fake_pci_tree(tmp_path, recorded_pci("hgx-h200"))))[
        "0000:18:00.0"
    ]
    assert (found.root, found.device_class, found.ats, found.d3cold) == ("pci0000:15", 0x030200, False, True)
    assert [(each.address, each.name, each.kind, each.acs) for each in found.bridges] == [
        ("0000:15:01.0", "8086:352a", "root port", Acs(redirects=True, direct_translated=False)),
        ("0000:16:00.0", "1000:c030", "upstream port", None),
        ("0000:17:00.0", "1000:c030", "downstream port", Acs(redirects=True, direct_translated=False)),
    ]
    assert found.bridges[0].link == PciLink("32.0 GT/s PCIe", 16, "32.0 GT/s PCIe", 16)
    assert found.nvswitches == tuple(f"0000:0{number}:00.0" for number in range(5, 9))


def test_sizes_of_a_resizable_region_and_the_physical_function_are_read(tmp_path: Path) -> None:
    virtual = {**recorded_pci("workstation")[-1], "address": "0000:c1:00.2", "physfn": "0000:c1:00.0"}
    roots = Roots.below(fake_pci_tree(tmp_path, [*recorded_pci("workstation"), virtual]))
    gpu, function = read_pci_facts(["0000:41:00.0", "0000:c1:00.2"], roots).values()
    assert [bar.largest for bar in gpu.bars] == [0, 32 * GIB, 0]
    assert (gpu.physical_function, function.physical_function) == ("", "0000:c1:00.0")
    assert (gpu.ats, function.d3cold) == (None, False)


def test_a_link_is_lost_only_where_a_device_has_one_of_its_own(tmp_path: Path) -> None:
    nic = recorded_pci("workstation")[-2]
    none = [0, "8.0 GT/s PCIe", 16]
    records = [
        {**nic, "address": "0000:c1:00.0", "link": ["Unknown", *none]},
        {**nic, "address": "0000:c1:00.2", "link": ["Unknown", *none], "physfn": "0000:c1:00.0"},
        {**nic, "address": "0000:c1:00.3", "link": ["Unknown", 0, "Unknown", 0]},
        {**nic, "address": "0000:c1:00.4", "link": []},
        {**nic, "address": "0000:c1:00.5", "link": ["Unknown", 0, "Unknown", 255]},
    ]
    devices = fake_pci_tree(tmp_path, [{**record, "parent": None} for record in records]) / "sys/bus/pci/devices"
    down = ["its PCI Express link is down", None, None, None, None]
    assert [why_wedged(f"{devices}/{record['address']}") for record in records] == down
    facts = read_pci_facts([record["address"] for record in records], Roots.below(tmp_path))
    assert [fact.wedged for fact in facts.values()] == down
