"""The argument lists of QEMU and its helpers, and how a plan is shown."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.facts.host import Virtiofsd
from runner.plan.argv.by_hand import pasteable
from runner.plan.argv.networks import dnsmasq_argv
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.argv.virtiofsd import virtiofsd_argv
from runner.plan.argv.wires import WireNumbers
from runner.plan.network_plan import PasstPlan
from runner.plan.render import plan_json, plan_lines
from tests.support.json_schemas import fitting
from tests.support.plans import EPYC, FACTS, KERNEL, plan_of

GOLDEN = Path(__file__).parents[2] / "data" / "argv"


MACHINES = {
    "kernel": KERNEL + "cmdline = \"console=ttyS0, a='b c'\"\n",
    "everything": """
[instance]
name = "web-1"
uuid = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
[cpu]
count = 3
accel = "tcg"
[memory]
size = "1GiB"
[boot]
kernel = "/boot/private"
initrd = "/boot/initrd"
[[disk]]
path = "/disk"
serial = "root"
[[disk]]
path = "/d,isk.qcow2"
format = "qcow2"
read_only = true
[[network]]
[[network]]
mode = "bridge"
[[share]]
tag = "home"
path = "/srv"
[shutdown]
on_reboot = "exit"
""",
    "disks": """
[[disk]]
path = "/4kn"
iothread = true
[[disk]]
path = "/top"
format = "qcow2"
backing = ["/images"]
detect_zeroes = "unmap"
[[disk]]
path = "/images/golden/base"
ephemeral = true
ephemeral_size = "256MiB"
[[disk]]
path = "/raw"
cache = "writethrough"
discard = false
[hotplug]
disks = 0
""",
    "networks": KERNEL
    + """
[cpu]
count = 2
[[network]]
address = "192.168.77.9"
ipv6 = true
queues = 1
[[network]]
mode = "macvtap"
mtu = 1400
[[network]]
mode = "passt"
[[network]]
mode = "descriptor"
fd = "a,b"
vhost_fd = "c,d"
[[network]]
mode = "bridge"
interface = "net1"
ipv6 = true
""",
    "uefi": '[boot]\nfirmware = "/OVMF.fd"\nfirmware_vars = "/vars.fd"\n[[disk]]\npath = "/disk"\n',
    "server": """
[boot]
firmware = "uefi-secure"
firmware_vars = "/srv/new.fd"
[[disk]]
path = "/disk"
[[network]]
[guest]
clock = "localtime"
vsock = "auto"
watchdog = "exit"
[display]
vnc = true
[cloud_init]
""",
    "no-agent": KERNEL + "[guest]\nagent = false\n",
}


ON_TWO_NUMA_NODES = {
    "one-numa-node": KERNEL + '[cpu]\ncount = 8\n[memory]\nsize = "4GiB"\n',
    "two-numa-nodes": KERNEL + '[cpu]\ncount = 12\ncpus = "4-7,36-37,68-71,100-101"\n[memory]\nsize = "4GiB"\n',
    "flat": KERNEL
    + '[cpu]\ncount = 4\ncpus = "30-33"\ntopology = "flat"\npinning = "linear"\n[memory]\nsize = "64MiB"\nbind = false\n',
}
"""Machines on a host of two NUMA nodes."""


def lines(argv: list[str]) -> str:
    """Format an argument list for a diff: one option with its value a line."""
    result = argv[0]
    for word in argv[1:]:
        result += ("\n" if word.startswith("-") else " ") + word
    return result + "\n"


@pytest.mark.parametrize("name", [*MACHINES, *ON_TWO_NUMA_NODES])
def test_argv_is_golden(name: str) -> None:
    plan = plan_of(MACHINES[name]) if name in MACHINES else plan_of(ON_TWO_NUMA_NODES[name], EPYC)
    machine = plan.machine
    names = {
        "kernel": machine.kernel,
        "initrd": machine.initrd,
        "firmware": machine.firmware,
        "firmware-vars": machine.firmware_vars,
        "seed": machine.seed,
    }
    numbers = [each for each, found in names.items() if found]
    for disk in machine.disks:
        numbers += [disk.name, *(below for below, _ in disk.below())]
    descriptors = QemuFds(
        qmp=10,
        console=11,
        ram=tuple(12 + index for index in range(len(machine.topology.numa_nodes))),
        files={each: 20 + index for index, each in enumerate(numbers)},
        wires=tuple(
            WireNumbers(stream=30 + 4 * index)
            if isinstance(network, PasstPlan)
            else WireNumbers(
                tuple(30 + 4 * index + queue for queue in range(network.queues)),
                tuple(50 + 4 * index + queue for queue in range(network.queues)),
            )
            for index, network in enumerate(plan.networks)
        ),
        shares=tuple(80 + index for index in range(len(plan.shares))),
        guest_agent_channel=70,
        vhost_vsock=(71, 1234),
    )
    text = lines(qemu_argv(machine, descriptors))
    text += "".join(lines(dnsmasq_argv(dhcp)) for dhcp in plan.dhcp)
    text += "".join(lines(virtiofsd_argv(share, "--fd=60")) for share in plan.shares)
    assert text == (GOLDEN / f"{name}.txt").read_text()


def test_virtiofsd_in_c_has_the_same_options_in_its_own_syntax() -> None:
    share = plan_of(KERNEL + '[[share]]\ntag = "a"\npath = "/srv"\n').shares[0]
    in_c = attrs.evolve(
        share,
        program=Virtiofsd(PurePosixPath("/usr/lib/qemu/virtiofsd"), rust=False, version=(7, 2)),
        path=PurePosixPath("/a,b"),
    )
    assert virtiofsd_argv(in_c, "--fd=7") == [
        "/usr/lib/qemu/virtiofsd",
        "--fd=7",
        "-f",
        "-o",
        r"source=/a\,b,sandbox=chroot,cache=auto,announce_submounts,log_level=warn",
        "--rlimit-nofile=0",
    ]


@pytest.mark.parametrize(("version", "added"), [((1, 4), []), ((1, 5), ["--modcaps=-mknod"])])
def test_virtiofsd_does_without_mknod_where_it_can(version: tuple[int, ...], added: list[str]) -> None:
    share = plan_of(KERNEL + '[[share]]\ntag = "a"\npath = "/srv"\n').shares[0]
    program = attrs.evolve(share.program, version=version)
    argv = virtiofsd_argv(attrs.evolve(share, program=program), "--fd=7")
    assert [word for word in argv if "modcaps" in word] == added


@pytest.mark.parametrize(
    ("hotplug", "version", "rust", "updatable"),
    [
        ("[hotplug]\nqemu = true\n", (1, 12), True, True),
        ("[hotplug]\nqemu = true\n", (1, 11, 1), True, False),
        ("[hotplug]\nqemu = true\n", (7, 2, 22), False, False),
        ("", (1, 13, 2), True, False),
    ],
)
def test_a_virtiofsd_that_can_is_started_to_hand_its_state_over(
    hotplug: str, version: tuple[int, ...], *, rust: bool, updatable: bool
) -> None:
    facts = attrs.evolve(FACTS, virtiofsd=Virtiofsd(PurePosixPath("/virtiofsd"), rust=rust, version=version))
    [share] = plan_of(KERNEL + '[[share]]\ntag = "a"\npath = "/srv"\n' + hotplug, facts).shares
    assert share.updatable == updatable
    assert ("--migration-verify-handles" in virtiofsd_argv(share, "--fd=7")) == updatable


def test_all_descriptors_are_passed_on() -> None:
    descriptors = QemuFds(1, 2, (3, 8), {"kernel": 4, "disk0": 5}, (WireNumbers((6,)),), (7,), 9, (10, 99))
    assert sorted(descriptors.numbers()) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert "vhost" not in descriptors.netdev(0)


def test_a_plan_is_printed_as_text_and_json() -> None:
    plan = plan_of(MACHINES["everything"])
    text = "\n".join(plan_lines(plan))
    for word in (
        "3 vCPUs, 1GiB, tcg",
        "0→1, 1→2, 2→3",
        "guest sees 1 socket of 1 L3 cache of 3 cores of 1 thread",
        "NUMA node 0: vCPUs 0-2, 1GiB from any NUMA node of the host",
        "/srv as 'home'",
        "in the place of eth0",
        "cpu.placement  placement 'affinity' is second best",
    ):
        assert word in text
    as_json = fitting("plan", plan_json(plan))
    assert as_json["placement"] == {
        "backend": "affinity",
        "cpus": "1-3",
        "pins": [1, 2, 3],
        "float_cpus": "0,4-7",
        "shared": False,
    }
    assert as_json["networks"][1]["pod"]["name"] == "eth0"
    assert as_json["shares"][0]["tag"] == "home"
    assert not {"networks", "shares"} & as_json["machine"].keys(), "the document has each of them once"
    assert as_json["version"] == 2
    assert as_json["start_timeout"] == plan.start_timeout
    assert as_json["machine"]["ram"]["overhead"] == plan.machine.ram.overhead
    assert "remarks" not in as_json
    [second_best] = [each for each in as_json["judgements"] if "second best" in each["found"]]
    assert second_best.keys() == {"subject", "level", "found", "why", "remedy"}
    assert (second_best["subject"], second_best["level"]) == ("cpu.placement", "warning")


def test_script_to_paste_names_paths_and_no_descriptor() -> None:
    text = pasteable(plan_of(MACHINES["everything"]), None)
    assert "/proc/self/fd" not in text
    assert "fd=" not in text
    assert "-kernel /boot/private" in text
    assert '"filename": "/d,isk.qcow2"' in text
    assert "ifname=vmtap1,script=no" in text
    assert "--socket-path=/run/instance-runner/share0.sock" in text
