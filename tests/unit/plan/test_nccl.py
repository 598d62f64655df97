"""The topology file for NCCL, of recorded hosts: paths as on the host, addresses and CPUs of the guest, and its delivery."""

from __future__ import annotations

import hashlib
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
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.cloud_init import SeedPlan
from runner.plan.instance import InstancePlan
from runner.plan.nccl import FW_CFG, PATH, nccl_topology, vendor_data
from runner.plan.passthrough_plan import DevicePlan
from tests.support.fake_pci import recorded_pci, vfio_facts
from tests.support.plans import EPYC, KERNEL, plan_of

HERE = Path(__file__).parents[2] / "data" / "nccl"
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


HOSTS = ["hgx-h200", "hgx-b200", "mi300x", "l40s-box", "workstation"]
COLUMNS = ["host", "guest", "numa"]
"""What NCCL computes on the host, of our file, and of our file with ``topology = "numa"``."""


def planned_column(root: Path, name: str, column: str) -> tuple[InstancePlan, dict[str, PciFact]]:
    """Return the plan of all devices of the recorded host *name* for this *column*, and their facts."""
    more = 'topology = "numa"\n' if column == "numa" else ""
    return planned(root, name, more, "" if name == "workstation" else ON_BOTH)


def nccl_devices(plan: InstancePlan) -> list[DevicePlan]:
    """Return the devices that NCCL uses."""
    used = {each.get("busid") for each in parsed(nccl_topology(plan.machine)).iter("pci")}
    return [each for each in plan.machine.passthrough.devices if each.guest_address in used]


def digest(topology: str) -> str:
    return hashlib.sha256(topology.encode()).hexdigest()


def recorded_paths(name: str) -> dict[frozenset[str], list[tuple[str, float]]]:
    """Return what NCCL's own code has computed for each pair of the recorded host *name*, by column: type and GB/s."""
    lines = (HERE / f"{name}.paths").read_text().splitlines()
    found = {}
    for one, other, *values in (line.split() for line in lines if not line.startswith("#")):
        found[frozenset((one, other))] = list(zip(values[::2], map(float, values[1::2]), strict=True))
    return found


@pytest.mark.parametrize("name", HOSTS)
def test_the_recorded_paths_are_those_of_the_files_that_are_written(tmp_path: Path, name: str) -> None:
    """tests/data/nccl/record.py makes the record of another file anew."""
    _, *expected = [line for line in (HERE / f"{name}.paths").read_text().splitlines() if line.startswith("#")]
    found = {}
    for column in COLUMNS[1:]:
        plan, _ = planned_column(tmp_path / column, name, column)
        found[f"# {column} {digest(nccl_topology(plan.machine))}"] = {each.address for each in nccl_devices(plan)}
    assert list(found) == expected
    for addresses in found.values():
        assert {frozenset(pair) for pair in combinations(addresses, 2)} == recorded_paths(name).keys()


TYPES = {
    "hgx-h200": {"PIX": 8, "PHB": 48, "SYS": 64},
    "hgx-b200": {"PIX": 8, "PHB": 48, "SYS": 64},
    "mi300x": {"PIX": 8, "PHB": 48, "SYS": 64},
    "l40s-box": {"PIX": 12, "PXB": 18, "SYS": 36},
    "workstation": {"PHB": 6},
}


@pytest.mark.parametrize("name", HOSTS)
def test_nccls_own_code_computes_the_hosts_paths_for_all_pairs(tmp_path: Path, name: str) -> None:
    _, facts = planned_column(tmp_path, name, "guest")
    narrow = {fact.address for fact in facts.values() if fact.link and fact.link.width < fact.link.best_width}
    types = Counter[str]()
    for pair, (on_host, in_guest, _) in recorded_paths(name).items():
        # NCCL takes the best width from sysfs, and on a host with NVIDIA's driver the one that a GPU has now.
        assert in_guest == on_host or (pair & narrow and in_guest[0] == on_host[0]), pair
        types[in_guest[0]] += 1
    assert types == TYPES[name]


@pytest.mark.parametrize("name", HOSTS[:-1])
def test_without_the_hosts_tree_the_pairs_are_lost(name: str) -> None:
    kinds = [(on_host[0], near[0]) for on_host, _, near in recorded_paths(name).values()]
    lost = {(one, other) for one, other in kinds if one != other}
    assert lost == ({("PIX", "PHB"), ("PXB", "PHB")} if name == "l40s-box" else {("PIX", "PHB")})


@pytest.mark.parametrize("name", ["hgx-h200", "mi300x"])
def test_the_file_is_golden(tmp_path: Path, name: str) -> None:
    """NCCL reads version 1 only, and RCCL version 2."""
    topology = nccl_topology(planned(tmp_path, name)[0].machine)
    assert topology == (HERE / f"{name}.xml").read_text()


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
    assert not any(FW_CFG in str(remark) for remark in plan.remarks)
    assert not any(FW_CFG in word for word in argv(plan))
    without, _ = planned(tmp_path / "without", "hgx-h200")
    assert any(f"copy {FW_CFG} (qemu_fw_cfg)" in str(remark) for remark in without.remarks)
    [word] = [word for word in argv(without) if FW_CFG in word]
    assert word == f"name={FW_CFG},string={nccl_topology(without.machine).replace(',', ',,')}"
    assert len(word) < 1 << 17, "Linux takes no longer argument (MAX_ARG_STRLEN)"


def argv(plan: InstancePlan) -> list[str]:
    files = {"kernel": 20} | ({} if plan.machine.seed is None else {"seed": 21})
    devices = {device.address: 30 for device in plan.machine.passthrough.devices} | {"iommufd": 31}
    return list(qemu_argv(plan.machine, QemuFds(10, 11, (12, 13), files, devices=devices)))


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
