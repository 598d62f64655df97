"""The guest's PCI tree beside the host's, for recorded hosts: every pair of devices has the host's relation in the guest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.facts.host import HostFacts
from runner.facts.pci import ClaimedDevice, ClaimFile, PciFact
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.passthrough_plan import DevicePlan, PassthroughPlan
from runner.plan.render import plan_lines
from tests.support.fake_pci import Record, recorded_pci, vfio_facts
from tests.support.plans import EPYC, KERNEL, plan_of, problems
from tests.unit.plan.test_argv import GOLDEN, lines

ON_BOTH = '[cpu]\ncount = 8\ncpus = "1-2,65-66,33-34,97-98"\n[memory]\nsize = "64GiB"\n'
ALL = '[[device]]\nvariable = "ALL"\n'
TREES = ["hgx-h200", "hgx-b200", "l40s-box", "mi300x", "workstation"]


def host(root: Path, records: list[Record], qemu_version: str = "10.0.2", **values: object) -> HostFacts:
    return attrs.evolve(EPYC, vfio=vfio_facts(root, records, **values), qemu_version=qemu_version)


def facts_of(facts: HostFacts) -> dict[str, PciFact]:
    assert facts.vfio is not None
    return dict(facts.vfio.devices)


def passthrough_of(facts: HostFacts, more: str = "", cpus: str = ON_BOTH) -> PassthroughPlan:
    return plan_of(f"{KERNEL}{cpus}{ALL}{more}", facts).machine.passthrough


def ports_above(passthrough: PassthroughPlan, device: DevicePlan) -> list[str]:
    """Return the host bridge and the ports above *device* in the guest, from above."""
    ports = {port.name: port for port in passthrough.ports}
    way = [device.port]
    while way[0] in ports:
        way.insert(0, ports[way[0]].bus)
    return way


def relation(ways: Sequence[Sequence[str]], switches: set[str]) -> tuple[str, tuple[int, ...]]:
    """Return what the two *ways* to devices have in common, and how many of *switches* are on each after that."""
    first, second = ways
    common = [one for one, other in zip(first, second, strict=False) if one == other]
    if first == second:
        return "port", ()
    if set(common) & switches:
        return "switch", tuple(sum(port in switches for port in way[len(common) :]) for way in ways)
    return ("root complex" if common else "nothing"), ()


@pytest.mark.parametrize("name", TREES)
def test_every_pair_has_the_relation_of_the_host(tmp_path: Path, name: str) -> None:
    facts = host(tmp_path, recorded_pci(name))
    passthrough = passthrough_of(facts)
    of_guest = {port.name for port in passthrough.ports if port.kind == "upstream"}
    pairs = list(combinations(passthrough.devices, 2))
    assert len(pairs) > 10
    seen = set()
    for one, other in pairs:
        ways = [facts_of(facts)[each.address] for each in (one, other)]
        of_host = {bridge.address for way in ways for bridge in way.bridges if bridge.kind == "upstream port"}
        expected = relation([[way.root, *(bridge.address for bridge in way.bridges)] for way in ways], of_host)
        found = relation([ports_above(passthrough, each) for each in (one, other)], of_guest)
        assert found == expected, (one.address, other.address)
        assert (one.guest_numa_node == other.guest_numa_node) == (one.host_numa_node == other.host_numa_node)
        seen.add(found)
    assert len(seen) > 1, "not all of them are alike"


@pytest.mark.parametrize("name", ["hgx-h200", "l40s-box"])
def test_where_a_process_may_not_read_the_kinds_of_bridges_the_tree_is_the_same(tmp_path: Path, name: str) -> None:
    unread = [
        {key: value for key, value in record.items() if key not in {"kind", "acs", "ats"}}
        for record in recorded_pci(name)
    ]
    known, unknown = host(tmp_path / "a", recorded_pci(name)), host(tmp_path / "b", unread)
    assert {bridge.kind for fact in facts_of(unknown).values() for bridge in fact.bridges} == {None}
    assert passthrough_of(unknown).ports == passthrough_of(known).ports


def test_the_argv_of_a_whole_board_is_golden(tmp_path: Path) -> None:
    facts = host(tmp_path, recorded_pci("hgx-h200"), qemu_version="7.2.22")
    plan = plan_of(f"{KERNEL}{ON_BOTH}{ALL}", facts)
    text = lines(qemu_argv(plan.machine, QemuFds(10, 11, (12, 13), {"kernel": 20}, guest_agent_channel=41)))
    assert text == (GOLDEN / "hgx-h200.txt").read_text()
    shown = "\n".join(plan_lines(plan)).replace("               ", "")
    assert (
        "  host bridge of bus 57 on NUMA node 0 = pci0000:15\n"
        "    0000:58:00.0 switch = 0000:16:00.0 (1000:c030), 32.0 GT/s x16\n"
        "      0000:5a:00.0 = 0000:18:00.0 (10de:2335), 32.0 GT/s x16\n"
        "      0000:5b:00.0 = 0000:19:00.0 (15b3:1021), 32.0 GT/s x16\n"
    ) in shown


@pytest.mark.parametrize(("version", "speed"), [("7.2.22", "16"), ("10.0.2", "32"), ("", "16")])
def test_root_ports_have_the_hosts_speed_as_far_as_qemu_knows_it(tmp_path: Path, version: str, speed: str) -> None:
    passthrough = passthrough_of(host(tmp_path, recorded_pci("mi300x"), qemu_version=version))
    assert {port.speed for port in passthrough.ports if port.kind == "root"} == {speed}


def test_a_narrow_link_is_shown_as_it_is_and_an_idle_one_at_its_best(tmp_path: Path) -> None:
    passthrough = passthrough_of(host(tmp_path, recorded_pci("workstation")), cpus="")
    links = {device.address: device.link for device in passthrough.devices}
    assert {address: (link.speed, link.width) for address, link in links.items() if link} == {
        "0000:41:00.0": ("16.0 GT/s PCIe", 16),
        "0000:41:00.1": ("16.0 GT/s PCIe", 16),
        "0000:42:00.0": ("16.0 GT/s PCIe", 8),
        "0000:42:00.1": ("16.0 GT/s PCIe", 8),
        "0000:c1:00.0": ("16.0 GT/s PCIe", 8),
        "0000:c1:00.1": ("16.0 GT/s PCIe", 8),
    }


def functions(passthrough: PassthroughPlan) -> list[tuple[str, str, int, bool]]:
    return [(each.address, each.port, each.function, each.multifunction) for each in passthrough.devices]


def test_functions_of_one_device_are_in_one_slot(tmp_path: Path) -> None:
    facts = host(tmp_path, recorded_pci("workstation"))
    assert functions(passthrough_of(facts, cpus=""))[:3] == [
        ("0000:41:00.0", "port0", 0, True),
        ("0000:41:00.1", "port0", 1, True),
        ("0000:42:00.0", "port1", 0, True),
    ]
    machine = plan_of(f'{KERNEL}{ALL}iommu = "legacy"\n', facts).machine
    argv = qemu_argv(machine, QemuFds(10, 11, (12,), {"kernel": 20}))
    made = [word.partition(",host=")[0] for word in argv if word.startswith("vfio-pci")]
    assert made.index("vfio-pci,id=device1,bus=port0,addr=0x0.0x1,multifunction=on") < made.index(
        "vfio-pci,id=device0,bus=port0,addr=0x0.0x0,multifunction=on"
    )
    alone = plan_of(f'{KERNEL}[[device]]\naddress = "0000:41:00.1"\n', facts).machine.passthrough
    assert functions(alone) == [("0000:41:00.1", "port0", 0, False)], "a guest looks for a function 0 first"


TWO = '[[device]]\nvariable = "ALL"\ncount = {}\n'


@pytest.mark.parametrize(
    ("listed", "count", "expected"),
    [
        ("41:00.0 41:00.1 42:00.0 42:00.1", 2, "41:00.0 41:00.1 42:00.0 42:00.1"),
        ("41:00.0 41:00.1 42:00.0 42:00.1", 1, "41:00.0 41:00.1"),
        ("41:00.1 42:00.0 41:00.0", 1, "41:00.1 41:00.0"),
        ("c1:00.0 c1:00.1", 1, "c1:00.0"),
        ("c1:00.0 c1:00.1", 2, "c1:00.0 c1:00.1"),
    ],
)
def test_a_companion_comes_with_its_device(tmp_path: Path, listed: str, count: int, expected: str) -> None:
    """Some plugins list every function of an IOMMU group; two ports of a NIC are two devices, in one group or not."""
    records = [{**each, "group": "40"} if each["group"] == "41" else each for each in recorded_pci("workstation")]
    environment = {"ALL": ",".join(f"0000:{each}" for each in listed.split())}
    facts = host(tmp_path, records, environment=environment)
    found = plan_of(f"{KERNEL}{TWO.format(count)}", facts).machine.passthrough.devices
    assert [each.address.removeprefix("0000:") for each in found] == expected.split()
    if count == 2:
        left = "asks for 3, but 2 are left of the"
        [problem] = problems(f"{KERNEL}{TWO.format(3)}", facts)
        assert left in problem


def virtual_functions(number: int) -> list[Record]:
    """Return the workstation's records with virtual functions of its NIC, each in a group of its own."""
    records = recorded_pci("workstation")
    nic = records[-2]
    made = (divmod(index + 2, 8) for index in range(number))
    return records + [
        {
            **nic,
            "address": f"0000:c1:{slot:02x}.{function}",
            "group": str(100 + slot * 8 + function),
            "physfn": nic["address"],
        }
        for slot, function in made
    ]


def test_virtual_functions_of_one_port_are_devices_behind_one_switch(tmp_path: Path) -> None:
    records = virtual_functions(8)
    wanted = [each["address"] for each in records[-8:]]
    facts = host(tmp_path, records, environment={"ALL": ",".join(wanted)})
    passthrough = passthrough_of(facts, cpus="")
    [switch] = [port for port in passthrough.ports if port.kind == "upstream"]
    assert switch.host == "0000:c0:03.1", "the root port that they share is shown as a switch"
    downstream = {port.name for port in passthrough.ports if port.bus == switch.name}
    assert {device.port for device in passthrough.devices} == downstream
    assert len(downstream) == len(wanted)


def test_what_has_no_room_is_refused(tmp_path: Path) -> None:
    records = virtual_functions(40)
    facts = host(tmp_path, records, environment={"ALL": ",".join(each["address"] for each in records[-40:])})
    [problem] = problems(f"{KERNEL}{ALL}", facts)
    assert problem == (
        "device: 40 devices would be on the guest's bus 'switch0', which takes 32; pass fewer to one instance, or give it CPUs "
        "of every NUMA node that its devices are on"
    )


def test_other_topologies(tmp_path: Path) -> None:
    facts = host(tmp_path, recorded_pci("hgx-h200"))
    near = passthrough_of(facts, 'topology = "numa"\n')
    assert [(each.bus_number, each.numa_node, each.root) for each in near.bridges or ()] == [(64, 0, ""), (162, 1, "")]
    assert {port.kind for port in near.ports} == {"root"}
    assert len(near.ports) == 20
    flat = passthrough_of(facts, 'topology = "flat"\n[hotplug]\ndisks = 2\n')
    assert flat.bridges == ()
    assert {port.bus for port in flat.ports} == {"pcie.0"}


def test_a_claim_says_the_root_complex_where_sysfs_does_not(tmp_path: Path) -> None:
    flat = [{**each, "parent": None} for each in recorded_pci("mi300x") if each["driver"] == "vfio-pci"]
    devices = tuple(
        ClaimedDevice("d", f"gpu-{n}", (), each["address"], None, f"pci0000:{int(each['address'][5:7], 16) & 0xE0:02x}")
        for n, each in enumerate(flat)
    )
    claims = {"gpus": (ClaimFile(PurePosixPath(tmp_path), "gpu", devices),)}
    facts = host(tmp_path, flat, claims=claims)
    bridges = plan_of(f'{KERNEL}{ON_BOTH}[[device]]\nclaim = "gpus"\n', facts).machine.passthrough.bridges
    assert [each.root for each in bridges or ()] == [f"pci0000:{number:02x}" for number in range(0, 0x100, 0x20)]


def test_a_way_that_is_hidden_is_remarked(tmp_path: Path) -> None:
    hidden = [{**each, "parent": None} for each in recorded_pci("hgx-h200")]
    remarks = [str(each) for each in plan_of(f"{KERNEL}{ON_BOTH}{ALL}", host(tmp_path, hidden)).remarks]
    [remark] = [each for each in remarks if "sysfs does not" in each]
    assert remark == (
        "the guest cannot see which NIC is next to which GPU, and NCCL may leave GPUDirect RDMA off: sysfs does not show the "
        "bridges above 0000:05:00.0, 0000:06:00.0, 0000:07:00.0, 0000:08:00.0 and 16 more; let the container see the host's /sys/devices"
    )


def carried() -> Iterator[DevicePlan]:
    for number in (1, 2):
        place = ("legacy", None, None, None, f"pcie.{number}", 0, 0, 0, (), False)
        yield DevicePlan(f"0000:0{number}:00.0", PurePosixPath("/"), "", "", *place)  # type: ignore[arg-type]


def test_a_plan_of_an_older_runner_gives_the_machine_that_it_gave(tmp_path: Path) -> None:
    machine = plan_of(f"{KERNEL}{ON_BOTH}{ALL}", host(tmp_path, recorded_pci("mi300x"))).machine
    machine = attrs.evolve(machine, passthrough=PassthroughPlan(tuple(carried())))
    argv = qemu_argv(machine, QemuFds(10, 11, (12, 13), {"kernel": 20}))
    assert [word for word in argv if word.startswith(("pxb", "pcie-root-port,id=port", "vfio"))] == [
        "pxb-pcie,id=pcie.1,bus=pcie.0,bus_nr=64,numa_node=0",
        "pxb-pcie,id=pcie.2,bus=pcie.0,bus_nr=160,numa_node=1",
        "pcie-root-port,id=port0,bus=pcie.1,chassis=1,hotplug=off",
        "pcie-root-port,id=port1,bus=pcie.2,chassis=2,hotplug=off",
        "vfio-pci,id=device0,bus=port0,host=0000:01:00.0,rombar=0",
        "vfio-pci,id=device1,bus=port1,host=0000:02:00.0,rombar=0",
    ]
    assert "-fw_cfg" not in argv
