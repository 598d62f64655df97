"""The topology file for NCCL, of recorded hosts: paths as on the host, addresses and CPUs of the guest, and its delivery."""

from __future__ import annotations

import subprocess
from collections import Counter
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import attrs
import pytest

from runner.facts.host import HostFacts
from runner.facts.pci import PciFact
from runner.instance.parts.seed import seed_image
from runner.plan.cloud_init import SeedPlan
from runner.plan.instance import InstancePlan
from runner.plan.nccl import PATH, nccl_topology, vendor_data
from tests.support.fake_pci import recorded_pci, vfio_facts
from tests.unit.plan.test_plan import EPYC, KERNEL, plan_of

GOLDEN = Path(__file__).parents[2] / "data" / "nccl"
ON_BOTH = '[cpu]\ncount = 8\ncpus = "1-2,65-66,33-34,97-98"\n[memory]\nsize = "64GiB"\n'
ALL = '[[device]]\nvariable = "ALL"\n'


def host(root: Path, name: str) -> HostFacts:
    return attrs.evolve(EPYC, vfio=vfio_facts(root, recorded_pci(name)))


def planned(root: Path, name: str, more: str = "", cpus: str = ON_BOTH) -> tuple[InstancePlan, dict[str, PciFact]]:
    facts = host(root, name)
    assert facts.vfio is not None
    return plan_of(f"{KERNEL}{cpus}{ALL}{more}", facts), dict(facts.vfio.devices)


def parsed(topology: str) -> ET.Element:
    return ET.fromstring(topology)  # noqa: S314 - our own text


def ways(topology: str) -> dict[str, list[str]]:
    """Return the elements above each device in the file, from above: NUMA node and switches."""
    found: dict[str, list[str]] = {}

    def walk(element: ET.Element, above: list[str]) -> None:
        for each in element:
            name = each.get("busid") or f"NUMA node {each.get('numaid')}"
            if len(each) == 0:
                found[name] = above
            walk(each, [*above, name])

    walk(parsed(topology), [])
    return found


def path_type(one: list[str], other: list[str]) -> str:
    """Return NCCL's type of the path between two devices with these elements above them (``src/graph/paths.cc``)."""
    if one[0] != other[0]:
        return "SYS"
    common = sum(first == second for first, second in zip(one, other, strict=False))
    if common == 1:
        return "PHB"
    return "PIX" if len(one) + len(other) == 2 * common else "PXB"


def host_way(fact: PciFact) -> list[str]:
    """Return the elements above a device in the file that NCCL makes on the host: it skips every second bridge."""
    return [
        f"NUMA node {fact.numa_node}",
        *(bridge.address for bridge in fact.bridges if bridge.kind == "upstream port"),
    ]


EXPECTED = {
    "hgx-h200": {"PIX": 8, "PHB": 48, "SYS": 64},
    "mi300x": {"PIX": 8, "PHB": 48, "SYS": 64},
    "l40s-box": {"PIX": 12, "PXB": 18, "SYS": 36},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_nccl_computes_the_hosts_path_types_for_all_pairs(tmp_path: Path, name: str) -> None:
    plan, facts = planned(tmp_path, name)
    found = ways(nccl_topology(plan.machine))
    devices = [each for each in plan.machine.passthrough.devices if each.guest_address in found]
    types = Counter[str]()
    for one, other in combinations(devices, 2):
        guest = path_type(found[one.guest_address], found[other.guest_address])
        assert guest == path_type(host_way(facts[one.address]), host_way(facts[other.address])), (
            one.address,
            other.address,
        )
        types[guest] += 1
    assert types == EXPECTED[name]


def test_without_the_hosts_tree_the_pairs_are_lost(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, "hgx-h200", 'topology = "numa"\n')
    found = ways(nccl_topology(plan.machine))
    assert {path_type(one, other) for one, other in combinations(found.values(), 2)} == {"PHB", "SYS"}


@pytest.mark.parametrize("name", ["hgx-h200", "mi300x"])
def test_the_file_is_golden(tmp_path: Path, name: str) -> None:
    """NCCL reads version 1 only, and RCCL version 2."""
    topology = nccl_topology(planned(tmp_path, name)[0].machine)
    assert topology == (GOLDEN / f"{name}.xml").read_text()


def test_a_guest_of_one_numa_node_calls_it_0(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, "workstation", cpus="")
    [cpu] = parsed(nccl_topology(plan.machine))
    assert (cpu.get("numaid"), cpu.get("affinity")) == ("0", "00000001")
    assert [(each.get("busid"), each.get("class"), each.get("link_width")) for each in cpu] == [
        ("0000:41:00.0", "0x030000", "16"),
        ("0000:42:00.0", "0x030000", "8"),
        ("0000:a1:00.0", "0x020000", "8"),
        ("0000:a1:00.1", "0x020000", "8"),
    ]


def test_nothing_is_written_where_nccl_has_nothing_to_choose(tmp_path: Path) -> None:
    alone = plan_of(f'{KERNEL}[[device]]\naddress = "0000:41:00.0"\n', host(tmp_path, "workstation"))
    assert nccl_topology(alone.machine) == ""


def test_cloud_init_puts_the_file_where_nccl_finds_it(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, "hgx-h200", "[cloud_init]\n")
    seed = plan.machine.seed
    assert isinstance(seed, SeedPlan)
    assert seed.vendor_data is not None
    assert seed.vendor_data.content == vendor_data(nccl_topology(plan.machine))
    assert b"#cloud-boothook" in seed_image(seed)
    assert not any("plan --nccl" in str(remark) for remark in plan.remarks)
    without, _ = planned(tmp_path / "without", "hgx-h200")
    assert any("plan --nccl" in str(remark) for remark in without.remarks)


@pytest.mark.parametrize("configured", ["", "NCCL_DEBUG=INFO\n", "NCCL_TOPO_FILE=/mine.xml\n"])
def test_the_script_keeps_what_the_guest_has_configured_and_can_run_again(tmp_path: Path, configured: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text(configured)
    topology = '<system version="1">\n</system>\n'
    script = vendor_data(topology).decode().replace("/etc/", f"{tmp_path}/etc/")
    for _ in range(2):
        subprocess.run(["sh", "-c", script], check=True)
    assert (tmp_path / PATH.removeprefix("/")).read_text() == topology
    line = "" if "TOPO_FILE" in configured else f"NCCL_TOPO_FILE={tmp_path}{PATH}\n"
    assert (tmp_path / "etc/nccl.conf").read_text() == configured + line
