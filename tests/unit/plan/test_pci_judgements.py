"""Judgements about devices and their way to the root complex, from the trees of recorded hosts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest

from runner.placement.backends import ControllerPlacement, CpuTuning
from tests.support.fake_pci import Record, recorded_pci, vfio_facts
from tests.support.plans import EPYC, KERNEL, NODE, plan_of

ON_BOTH = '[cpu]\ncount = 8\ncpus = "1-2,65-66,33-34,97-98"\n[memory]\nsize = "64GiB"\n'
GPU, NIC = "0000:18:00.0", "0000:19:00.0"
GPU_PORT, NIC_PORT = "0000:17:00.0", "0000:17:01.0"
UPLINK = "0000:16:00.0"


def changed(records: list[Record], changes: Mapping[str, Mapping[str, object]]) -> list[Record]:
    return [{**record, **changes.get(record["address"], {})} for record in records]


def remarks(root: Path, records: list[Record], *addresses: str) -> list[str]:
    """Return the remarks on a plan with the devices at *addresses*."""
    facts = vfio_facts(root, records)
    if addresses:
        facts = attrs.evolve(facts, environment={"ALL": ",".join(addresses)})
    plan = plan_of(f'{KERNEL}{ON_BOTH}[[device]]\nvariable = "ALL"\n', attrs.evolve(EPYC, vfio=facts))
    return list(map(str, plan.remarks))


def about(found: list[str], words: str) -> list[str]:
    return [each for each in found if words in each]


HGX = recorded_pci("hgx-h200")


def test_idle_gpus_are_one_remark(tmp_path: Path) -> None:
    [remark] = about(remarks(tmp_path, HGX), "an idle GPU lowers its speed")
    assert remark.startswith(
        "the PCI Express links of 0000:18:00.0, 0000:2a:00.0, 0000:3a:00.0, 0000:5d:00.0 and 4 more are below their best now "
        "(2.5 GT/s PCIe); an idle GPU"
    )


def test_redirected_peer_to_peer_traffic_is_one_remark_with_its_ports(tmp_path: Path) -> None:
    found = remarks(tmp_path, HGX, GPU, NIC)
    [redirected] = about(found, "(ACS)")
    assert redirected.startswith(
        "traffic between devices behind a switch (GPUDirect) goes up to the root complex and back, since"
    )
    assert f"redirect it (ACS): {GPU_PORT}, {NIC_PORT}; let translated requests pass" in redirected
    [untranslated] = about(found, "no ATS")
    assert untranslated.startswith(f"the requests of {NIC} are translated by the IOMMU alone")


@pytest.mark.parametrize(
    ("changes", "redirecting"),
    [
        ({GPU_PORT: {"acs": 0}, NIC_PORT: {"acs": 0}}, ""),
        ({GPU_PORT: {"acs": 0}}, NIC_PORT),
        ({GPU_PORT: {"acs": 0}, NIC_PORT: {"acs": 0x5D}, NIC: {"ats": True}}, ""),
        ({GPU_PORT: {"acs": 0}, NIC_PORT: {"acs": 0x5D}, NIC: {"ats": False}}, NIC_PORT),
        ({GPU_PORT: {"acs": None}, NIC_PORT: {"acs": None}}, ""),
    ],
)
def test_translated_requests_take_the_direct_way(
    tmp_path: Path, changes: Mapping[str, Mapping[str, object]], redirecting: str
) -> None:
    found = about(remarks(tmp_path, changed(HGX, changes), GPU, NIC), "(ACS)")
    assert [each.partition("(ACS): ")[2].partition(";")[0] for each in found] == ([redirecting] if redirecting else [])


@pytest.mark.parametrize(("groups", "found"), [(("50", "51"), True), (("50", "50"), False)])
def test_groups_say_what_ports_do_where_their_registers_cannot_be_read(
    tmp_path: Path, groups: tuple[str, str], *, found: bool
) -> None:
    records = [{key: value for key, value in each.items() if key not in {"kind", "acs", "ats"}} for each in HGX]
    records = changed(records, {GPU: {"group": groups[0]}, NIC: {"group": groups[1]}})
    assert bool(about(remarks(tmp_path, records, GPU, NIC), f"(ACS): {GPU_PORT}, {NIC_PORT}")) == found


def test_devices_of_different_root_complexes_have_no_ports_in_common(tmp_path: Path) -> None:
    assert about(remarks(tmp_path, HGX, GPU, "0000:2b:00.0"), "(ACS)") == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {NIC: {"link": ["32.0 GT/s PCIe", 8, "32.0 GT/s PCIe", 16]}},
            f"{NIC} (15b3:1021): its PCI Express link is 32.0 GT/s PCIe x8, its best is 32.0 GT/s PCIe x16; look",
        ),
        (
            {NIC: {"link": ["16.0 GT/s PCIe", 16, "32.0 GT/s PCIe", 16]}},
            f"{NIC} (15b3:1021): its PCI Express link is 16.0 GT/s PCIe x16, its best is 32.0 GT/s PCIe x16; seat it anew",
        ),
        (
            {GPU_PORT: {"link": ["8.0 GT/s PCIe", 16, "8.0 GT/s PCIe", 16]}},
            f"{GPU} (10de:2335): its PCI Express link is 8.0 GT/s PCIe at most, its best is 32.0 GT/s PCIe x16: the port above it",
        ),
        (
            {UPLINK: {"link": ["32.0 GT/s PCIe", 8, "32.0 GT/s PCIe", 16]}},
            (
                f"all devices behind the switch {UPLINK} share a link of 32.0 GT/s PCIe x8, where both of its ends can do "
                "32.0 GT/s PCIe x16; look at"
            ),
        ),
    ],
)
def test_a_link_below_what_both_ends_can_do_is_remarked(
    tmp_path: Path, changes: Mapping[str, Mapping[str, object]], expected: str
) -> None:
    usual = set(remarks(tmp_path / "usual", HGX, GPU, NIC))
    [remark] = [each for each in remarks(tmp_path / "changed", changed(HGX, changes), GPU, NIC) if each not in usual]
    assert remark.startswith(expected)


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (
            (GPU, "0000:2a:00.0"),
            "none of the board's NVSwitches are passed (0000:05:00.0, 0000:06:00.0, 0000:07:00.0, 0000:08:00.0 missing)",
        ),
        (
            (GPU, "0000:05:00.0", "0000:06:00.0", "0000:07:00.0"),
            "not all of the board's NVSwitches are passed (0000:08:00.0 missing)",
        ),
        ((), ""),
        ((NIC,), ""),
    ],
)
def test_gpus_without_the_boards_nvswitches_have_no_nvlink(
    tmp_path: Path, addresses: tuple[str, ...], expected: str
) -> None:
    found = about(remarks(tmp_path, HGX, *addresses), "NVSwitches")
    assert len(found) == bool(expected)
    assert expected in "".join(found)


def test_devices_of_a_group_that_stay_behind_are_named(tmp_path: Path) -> None:
    [remark] = about(remarks(tmp_path, HGX, "0000:05:00.0", "0000:06:00.0"), "IOMMU group")
    assert remark.startswith("nothing else can use 0000:07:00.0, 0000:08:00.0 meanwhile")


def test_a_small_region_of_a_gpu_and_its_companion_without_a_reset(tmp_path: Path) -> None:
    found = remarks(tmp_path, recorded_pci("workstation"), "0000:41:00.0", "0000:41:00.1")
    [small] = about(found, "resizable BAR")
    assert small.startswith(
        "0000:41:00.0 (10de:2684): the CPU and other devices reach 256MiB of its memory at a time, where its region can have 32GiB"
    )
    assert about(found, "cannot be reset") == [], "the reset of the slot is the audio function's as well"
    alone = remarks(tmp_path / "alone", recorded_pci("workstation"), "0000:41:00.1")
    assert len(about(alone, "cannot be reset by itself")) == 1


def test_power_that_may_be_cut_is_one_remark_about_gpus(tmp_path: Path) -> None:
    [remark] = about(remarks(tmp_path, HGX), "D3cold")
    assert remark.startswith(
        "the kernel may cut the power of 0000:18:00.0, 0000:2a:00.0, 0000:3a:00.0, 0000:5d:00.0 and 4 more while"
    )
    assert remark.endswith(
        '; use placement "controller", which keeps it powered, or write 0 to its d3cold_allowed in sysfs'
    )
    kept = changed(HGX, {GPU: {"d3cold_allowed": 0}})
    assert about(remarks(tmp_path / "kept", kept, GPU), "D3cold") == []


def test_with_the_controller_the_devices_keep_their_power(tmp_path: Path) -> None:
    """It is asked for all of them: another instance may have had one until now."""
    records = changed(HGX, {GPU: {"d3cold_allowed": 0}})
    facts = attrs.evolve(
        NODE, vfio=vfio_facts(tmp_path, records, environment={"ALL": f"{GPU},{NIC}"}), qemu_version="10.0.2"
    )
    cpu = '[cpu]\nplacement = "controller"\ncount = 4\nlatency = "low"\n[memory]\nsize = "1GiB"\n'
    plan = plan_of(f'{KERNEL}{cpu}[[device]]\nvariable = "ALL"\n', facts)
    assert isinstance(plan.placement, ControllerPlacement)
    assert plan.placement.tuning == CpuTuning("low", devices=(GPU, NIC))
    assert about(list(map(str, plan.remarks)), "D3cold") == []
