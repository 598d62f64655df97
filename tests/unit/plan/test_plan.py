from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.facts.disk import FileFact, ImageFact
from runner.facts.hardware import Cpu, Hardware, NumaNode
from runner.facts.host import PODS_USERS, HostFacts, Kvm, PodQos, Virtiofsd, parse_cpu_models
from runner.facts.memory_limits import MemoryLimits
from runner.facts.network import Route
from runner.placement.backends import AffinityPlacement, ControllerPlacement, CpuTuning
from runner.plan.argv.by_hand import pasteable
from runner.plan.argv.networks import dnsmasq_argv
from runner.plan.argv.qemu import qemu_argv
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.argv.virtiofsd import virtiofsd_argv
from runner.plan.argv.wires import WireNumbers
from runner.plan.identity import Identity
from runner.plan.instance import share_grace
from runner.plan.machine import EMULATED_CPU, VcpuHotplugPlan
from runner.plan.memory import VCPU
from runner.plan.network_plan import BridgedPlan, PasstPlan
from runner.plan.network_planner import derived_mac
from runner.plan.render import plan_json, plan_lines
from tests.support.json_schemas import fitting
from tests.support.plans import EPYC, FACTS, GIB, KERNEL, POD, plan_of, problems, recorded

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


@pytest.mark.parametrize(
    ("text", "facts", "expected"),
    [
        ('[boot]\nkernel = "/none"\n', {}, "boot.kernel: '/none' does not exist"),
        (
            '[boot]\nkernel = "/closed/kernel"\n',
            {},
            "boot.kernel: '/closed/kernel' cannot be examined (Permission denied)",
        ),
        ('[boot]\nkernel = "/srv"\n', {}, "boot.kernel: '/srv' is a directory, not a file"),
        ('[boot]\nkernel = "/boot/unreadable"\n', {}, "boot.kernel: cannot read '/boot/unreadable': Permission denied"),
        (
            '[boot]\nkernel = "/text"\n',
            {},
            "boot.kernel: '/text' is no kernel that QEMU can start: it is no bzImage (no 'HdrS' at byte 0x202), ELF or multiboot",
        ),
        (
            '[boot]\nkernel = "/${HOME}/k"\n',
            {},
            "boot.kernel: '/${HOME}/k' does not exist; add [environment] allow = [\"HOME\"], without which ${HOME} has no",
        ),
        (
            KERNEL + '[cpu]\nmodel = "EPIC,-svm"\n',
            {"cpu_models": frozenset({"EPYC", "Haswell"})},
            "cpu.model: /usr/bin/qemu-system-x86_64 has no CPU model 'EPIC'; did you mean 'EPYC'? `qemu-system-x86_64 -cpu help`",
        ),
        (
            KERNEL + '[console]\nlog = "/none/log"\n',
            {"console_log_error": "there is no directory '/none'"},
            "console.log: cannot write '/none/log': there is no directory '/none'; name a file that this process may write",
        ),
        (
            KERNEL + '[instance]\nuser = "nobdy"\n',
            {"kvm": Kvm(None, group_id=0, mode=0o600)},
            "instance.user: user 'nobdy' does not exist here; name one from /etc/passwd",
        ),
        (
            KERNEL + '[[share]]\ntag = "t"\npath = "/none"\n',
            {},
            "share[0].path: '/none' does not exist; make the directory, or mount it into the container",
        ),
        (
            '[[disk]]\npath = "/secret"\n',
            {},
            "disk[0].path: cannot open '/secret': Permission denied; let the user of this process read it and write it",
        ),
        (
            '[[disk]]\npath = "/dev/secret"\n',
            {},
            "disk[0].path: cannot open '/dev/secret': Operation not permitted; let this process use the device: volumeDevices",
        ),
        ('[[disk]]\npath = "/none"\n', {}, "disk[0].path: '/none' does not exist"),
        (
            '[[disk]]\npath = "/dev/null"\n',
            {},
            "disk[0].path: '/dev/null' is a character device, not a file or block device",
        ),
        ('[[disk]]\npath = "/d,isk.qcow2"\n', {}, "disk[0].format: is \"raw\", but '/d,isk.qcow2' holds a qcow2 image"),
        (
            '[[disk]]\npath = "/disk"\nformat = "qcow2"\n',
            {},
            "disk[0].format: is \"qcow2\", but '/disk' holds a raw image",
        ),
        (
            '[[disk]]\npath = "/backed.qcow2"\nformat = "qcow2"\n',
            {},
            "disk[0].path: '/backed.qcow2' takes data from '/etc/shadow', which is not followed unless",
        ),
        ('[[disk]]\npath = "/locked"\n', {}, "disk[0].path: '/locked' is in use by another process"),
        (
            '[[disk]]\npath = "/top"\nformat = "qcow2"\nbacking = ["/srv", "/images/golden"]\n',
            {},
            "disk[0].path: '/top' takes data from '/images/middle', which is not in '/srv', '/images/golden'; flatten it",
        ),
        (
            '[[disk]]\npath = "/top"\nformat = "qcow2"\nbacking = ["/imag"]\n',
            {},
            "disk[0].path: '/top' takes data from '/images/middle', which is not in '/imag'; flatten it",
        ),
        (
            '[[disk]]\npath = "/images/round"\nformat = "qcow2"\nbacking = ["/images"]\n',
            {},
            "disk[0].path: '/images/round' takes data from '/images/round', and so on without end",
        ),
        (
            '[[disk]]\npath = "/images/no-backing-format"\nformat = "qcow2"\nbacking = ["/images"]\n',
            {},
            "disk[0].path: '/images/no-backing-format' takes data from '/images/golden/base' and gives no format for it; set it with",
        ),
        (
            '[[disk]]\npath = "/images/lost"\nformat = "qcow2"\nbacking = ["/images"]\n',
            {},
            "disk[0].path: '/images/lost' takes data from '/images/gone': '/images/gone' does not exist; flatten it with `qemu-img convert",
        ),
        ('[[disk]]\npath = "/encrypted"\nformat = "qcow2"\n', {}, "disk[0].path: '/encrypted' is encrypted"),
        (
            '[[disk]]\npath = "/disk"\ncache = "none"\n',
            {},
            "disk[0].cache: '/disk' cannot be used past the page cache (O_DIRECT): its file system does not support it;",
        ),
        (
            '[[disk]]\npath = "/raw"\naio = "io_uring"\n',
            {"io_uring_error": "Operation not permitted"},
            "disk[0].aio: cannot use io_uring: Operation not permitted; leave it out",
        ),
        ('[[disk]]\npath = "/short"\n', {}, "disk[0].path: '/short' has 700 bytes"),
        (
            '[[disk]]\npath = "/readonly"\n',
            {},
            "disk[0].path: cannot open '/readonly': Read-only file system; set read_only = true",
        ),
        (
            KERNEL + '[[share]]\ntag="a"\npath="/disk"\n',
            {},
            "share[0].path: '/disk' is a block device, not a directory",
        ),
        (KERNEL + '[[share]]\ntag="a"\npath="/none"\n', {}, "share[0].path: '/none' does not exist"),
        (
            KERNEL + '[[share]]\ntag="a"\npath="/srv"\n',
            {"virtiofsd": None},
            "share[0]: cannot use virtiofsd: not found; install",
        ),
        (
            KERNEL + '[[share]]\ntag="a"\npath="/srv"\n[console]\nlog = "/srv/logs/console"\n',
            {},
            "console.log: '/srv/logs/console' lies in the share 'a', by this name or by a hard link, where the guest may change it, or ",
        ),
        (
            KERNEL + '[[share]]\ntag="a"\npath="/srv"\n',
            {"state_directory": PurePosixPath("/srv/vm/state")},
            "--state-dir: '/srv/vm/state' lies in the share 'a', by this name or by a hard link, where the guest may change it, or ",
        ),
        (
            KERNEL + '[[share]]\ntag="a"\npath="/srv"\n',
            {"in_shares": {PurePosixPath("/boot/vmlinuz"): PurePosixPath("/srv")}},
            "boot.kernel: '/boot/vmlinuz' lies in the share 'a', by this name or by a hard link, where the guest may change it, or ",
        ),
        (
            KERNEL + '[[share]]\ntag="a"\npath="/srv"\n[descriptors]\nsocket = "/srv/fds.sock"\n',
            {},
            "descriptors.socket: '/srv/fds.sock' lies in the share 'a', by this name or by a hard link, where the guest may change it, or ",
        ),
        (
            KERNEL + '[[share]]\ntag="a"\npath="/srv"\n[cpu]\ncontroller = "/srv/c.sock"\n',
            {},
            "cpu.controller: '/srv/c.sock' lies in the share 'a', by this name or by a hard link, where the guest may change it, or ",
        ),
        (
            KERNEL + '[[share]]\ntag="a"\npath="/srv"\n[[share]]\ntag="b"\npath="/srv/sub/b"\nread_only=true\n',
            {
                "files": {**FACTS.files, PurePosixPath("/srv/sub/b"): FileFact("directory")},
                "in_shares": {PurePosixPath("/srv/sub/b"): PurePosixPath("/srv")},
            },
            "share[1].path: '/srv/sub/b' leads through the share 'a', where the guest may put a link to any other directory in its place",
        ),
        (
            KERNEL + '[[disk]]\npath = "/raw"\n',
            {"links": {PurePosixPath("/raw"): frozenset({0, 65534})}},
            "disk[0].path: '/raw' leads through a symbolic link of a user as which QEMU runs, here or in another pod: one",
        ),
        (
            KERNEL + '[[disk]]\npath = "/raw"\n',
            {"links": {PurePosixPath("/raw"): frozenset({PODS_USERS[1]})}},
            "disk[0].path: '/raw' leads through a symbolic link of a user as which QEMU runs, here or in another pod: one",
        ),
        (
            KERNEL + '[[share]]\ntag="a"\npath="/srv"\nread_only=true\n',
            {"virtiofsd": Virtiofsd(PurePosixPath("/v"), rust=False, version=(7, 2, 22))},
            "share[0].read_only: virtiofsd 7.2.22 cannot share read-only",
        ),
        (KERNEL + "[[network]]\n", {"dnsmasq": None}, "network[0]: cannot find the program 'dnsmasq' in PATH; install"),
        (KERNEL + "[[network]]\n", {"tun": False}, "network[0]: cannot use /dev/net/tun: it is missing"),
        (KERNEL, {"qemu": None}, "cannot find the program 'qemu-system-x86_64' in PATH"),
        (
            KERNEL + '[memory]\nsize = "16GiB"\n',
            {},
            "memory.size: 16GiB and 180MiB of overhead (QEMU, page tables, this program) do not fit into the 16384MiB",
        ),
        (
            KERNEL + "[cpu]\ncount = 9\n",
            {},
            "cpu.count: asks for 9 vCPUs, but this process may use 8 CPUs ('0-7'); one CPU for each vCPU",
        ),
        (
            KERNEL + '[cpu]\ncount = 2\ncpus = "7-8"\n',
            {},
            "cpu.cpus: '8' of '7-8' may not be used by this process, which has '0-7'",
        ),
        (
            KERNEL,
            {"kvm": Kvm(None, 104, 0o660, "Device or resource busy")},
            "cpu.accel: /dev/kvm answers, but makes no virtual machine: Device or resource busy; see `dmesg",
        ),
        (
            KERNEL + '[cpu]\naccel = "kvm"\n',
            {"kvm": Kvm("no such device")},
            "cpu.accel: no KVM (no such device)",
        ),
        (KERNEL + '[instance]\nuser = "bob"\n', {}, "instance.user: user 'bob' does not exist here"),
        (
            KERNEL + '[[network]]\nmode = "bridge"\ninterface = "eth7"\n',
            {},
            "network[0].interface: there is no network interface 'eth7'",
        ),
        (
            KERNEL + '[[network]]\nmode = "bridge"\n',
            {"interfaces": {"eth0": attrs.evolve(POD, addresses=())}},
            "network[0].interface: 'eth0' must have exactly one IPv4 address for the guest to take over, found none",
        ),
        (
            KERNEL + '[[network]]\nmode = "bridge"\nmtu = 1500\n',
            {},
            "network[0].mtu: 1500 is more than the 1450 of 'eth0'",
        ),
    ],
)
def test_a_spec_that_does_not_fit_is_refused_with_its_path(text: str, facts: dict[str, object], expected: str) -> None:
    found = problems(text, attrs.evolve(FACTS, **facts))  # type: ignore[arg-type]
    assert [problem[: len(expected)] for problem in found] == [expected]


def test_everything_that_does_not_fit_is_reported_at_once() -> None:
    text = '[cpu]\ncount = 9\n[memory]\nsize = "1TiB"\n[boot]\nkernel = "/none"\n[[disk]]\npath = "/none"\n'
    assert [problem.split(":")[0] for problem in problems(text)] == [
        "cpu.count",
        "memory.size",
        "disk[0].path",
        "boot.kernel",
    ]


@given(st.frozensets(st.integers(0, 63), min_size=1, max_size=16), st.integers(1, 16))
def test_every_vcpu_has_a_cpu_of_its_own_or_there_is_no_plan(allowed: frozenset[int], count: int) -> None:
    facts = attrs.evolve(EPYC, allowed_cpus=CpuSet(allowed))
    text = f"{KERNEL}[cpu]\ncount = {count}\n"
    if count > len(allowed):
        assert problems(text, facts)[0].startswith(
            f"cpu.count: asks for {count} vCPUs, but this process may use {len(allowed)} CPUs"
        )
        return
    placement = plan_of(text, facts).placement
    assert len(placement.pins) == len(set(placement.pins)) == count
    assert CpuSet(placement.pins) == placement.cpus <= CpuSet(allowed)
    assert placement.shared == (count == len(allowed))
    assert not isinstance(placement, ControllerPlacement)
    if placement.shared:
        assert placement.float_cpus == CpuSet(allowed)
    else:
        assert placement.float_cpus == CpuSet(allowed) - placement.cpus


def test_sharing_is_warned_of() -> None:
    assert any(
        "all CPUs this process may use" in remark for remark in map(str, plan_of(KERNEL + "[cpu]\ncount = 8\n").remarks)
    )
    assert not any("all CPUs" in remark for remark in map(str, plan_of(KERNEL + "[cpu]\ncount = 7\n").remarks))


def test_requested_cpus_are_used() -> None:
    placement = plan_of(KERNEL + '[cpu]\ncount = 2\ncpus = "2,5"\n').placement
    assert isinstance(placement, AffinityPlacement)
    assert (placement.pins, str(placement.float_cpus)) == ((2, 5), "0-1,3-4,6-7")


def test_cpus_are_chosen_like_a_kubelet_would() -> None:
    placement = plan_of(KERNEL + "[cpu]\ncount = 8\n", EPYC).placement
    assert placement.pins == (4, 68, 5, 69, 6, 70, 7, 71), "whole cores of one L3 cache, and not CPU 0's"
    in_a_pod = attrs.evolve(EPYC, allowed_cpus=CpuSet.parse("1-20,65-84"))
    assert plan_of(KERNEL + "[cpu]\ncount = 40\n", in_a_pod).placement.pins[:4] == (1, 65, 2, 66)
    linear = KERNEL + '[cpu]\ncount = 40\npinning = "linear"\n'
    assert plan_of(linear, in_a_pod).placement.pins == (*range(1, 21), *range(65, 85)), "the i-th on the i-th"


def test_half_cores_and_distant_cpus_are_remarks() -> None:
    plan = plan_of(KERNEL + '[cpu]\ncount = 2\ncpus = "31-32"\n', EPYC)
    assert plan.placement.pins == (31, 32)
    assert any("CPUs 31-32 are half cores" in remark for remark in map(str, plan.remarks))
    assert any("the vCPUs lie on 2 NUMA nodes (1 on 0, 1 on 1)" in remark for remark in map(str, plan.remarks))
    assert not any("cores" in remark for remark in map(str, plan_of(KERNEL + "[cpu]\ncount = 2\n", EPYC).remarks))


def test_cpus_unknown_to_sysfs_are_refused() -> None:
    strange = attrs.evolve(FACTS, allowed_cpus=CpuSet(range(12)))
    assert problems(KERNEL + '[cpu]\ncount = 1\ncpus = "9"\n', strange) == [
        "cpu.cpus: cannot place vCPUs on CPUs 9: the host has no such online CPUs"
    ]
    assert problems(KERNEL + "[cpu]\ncount = 10\n", strange) == [
        "cpu.count: cannot choose 10 CPUs: only 8 may be used (0-7); ask for fewer vCPUs"
    ]


@pytest.mark.parametrize(
    ("text", "facts", "threads", "model"),
    [
        ("", {}, 2, "host,topoext=on"),
        ("", {"cpu_vendor": "GenuineIntel"}, 2, "host"),
        ('pinning = "linear"\n', {}, 1, "host"),
        ('model = "EPYC"\n', {}, 2, "EPYC"),
        ('accel = "tcg"\n', {}, 1, EMULATED_CPU),
        ('accel = "tcg"\nmodel = "Skylake-Server"\n', {}, 2, "Skylake-Server"),
    ],
)
def test_the_guest_sees_siblings_where_the_cpu_model_can_express_them(
    text: str, facts: dict[str, Any], threads: int, model: str
) -> None:
    machine = plan_of(f"{KERNEL}[cpu]\ncount = 4\n{text}", attrs.evolve(EPYC, **facts)).machine
    assert (machine.topology.threads, machine.cpu_model) == (threads, model)


def test_memory_of_another_numa_node_is_a_remark() -> None:
    large = KERNEL + '[cpu]\ncount = 8\n[memory]\nsize = "600GiB"\n'
    plan = plan_of(large, attrs.evolve(EPYC, memory=700 * GIB))
    assert plan.machine.topology.numa_nodes[0].bound == (), "from both: there is no other"
    only_there = attrs.evolve(EPYC, hardware=recorded("epyc-7543-2s-nps2"), memory_nodes=CpuSet([1, 2]))
    plan = plan_of(KERNEL + "[cpu]\ncount = 8\n", only_there)
    assert (
        "512MiB of memory for the vCPUs on the host's NUMA node 0 come from 1: it has not that much, or none that this pod may use"
        in map(str, plan.remarks)
    )
    unbound = plan_of(KERNEL + "[cpu]\ncount = 8\n[memory]\nbind = false\n", only_there)
    assert unbound.machine.topology.numa_nodes[0].bound == ()
    assert not any("come from" in remark for remark in map(str, unbound.remarks))


def test_memory_that_cannot_be_divided_is_refused() -> None:
    nodes = tuple(NumaNode(each, GIB, tuple(10 if each == other else 20 for other in range(20))) for each in range(20))
    hardware = Hardware(tuple(Cpu(cpu, cpu, cpu, cpu, cpu) for cpu in range(20)), nodes)
    many = attrs.evolve(FACTS, allowed_cpus=CpuSet(range(20)), hardware=hardware, memory_nodes=CpuSet(range(20)))
    text = KERNEL + '[cpu]\ncount = 20\n[memory]\nsize = "32MiB"\n'
    (problem,) = problems(text, many)
    assert problem.startswith("memory.size: cannot divide 33554432 bytes of memory among 20 NUMA nodes")
    assert problem.endswith('; give the guest more memory, or set cpu.topology = "flat"')
    topology = plan_of(text.replace("count", 'topology = "flat"\ncount'), many).machine.topology
    assert [each.memory for each in topology.numa_nodes] == [32 << 20]


NODE = attrs.evolve(
    EPYC,
    allowed_cpus=CpuSet.parse("2-3,10-11"),
    container_uid="3ceda12c-3ee9-40fa-9f42-61428fe654a6",
    controller_error=None,
    delegation_error=None,
)


@pytest.mark.parametrize(
    ("asked", "controller", "delegation", "backend"),
    [
        ("auto", None, None, "controller"),
        ("auto", "no", None, "delegated"),
        ("auto", "no", "no", "affinity"),
        ("controller", None, "no", "controller"),
        ("delegated", None, None, "delegated"),
        ("affinity", None, None, "affinity"),
    ],
)
def test_the_best_placement_that_works_or_the_one_asked_for(
    asked: str, controller: str | None, delegation: str | None, backend: str
) -> None:
    facts = attrs.evolve(NODE, controller_error=controller, delegation_error=delegation)
    count = 4 if backend == "controller" else 3
    plan = plan_of(f'{KERNEL}[cpu]\nplacement = "{asked}"\ncount = {count}\n', facts)
    assert plan.placement.backend == backend
    second_best = [str(remark) for remark in plan.remarks if "second best" in str(remark)]
    assert bool(second_best) == (backend == "affinity")
    if asked == "auto" and second_best:
        assert len(second_best[0]) < 200, "a laptop has it at each start"
        assert "examples/cpus.md, 'Whose CPUs'" in second_best[0]


@pytest.mark.parametrize("asked", ["controller", "delegated"])
def test_a_requested_placement_is_not_weakened(asked: str) -> None:
    facts = attrs.evolve(NODE, controller_error="because", controller_remedy="mount it", delegation_error="because")
    assert problems(f'{KERNEL}[cpu]\nplacement = "{asked}"\ncount = 4\n', facts) == [
        f"cpu.placement: {asked!r} cannot be used: because{'; mount it' * (asked == 'controller')}"
    ]
    facts = attrs.evolve(facts, delegation_error="no", pod=PodQos("guaranteed", "it says so"))
    [remark] = [each for each in plan_of(KERNEL, facts).remarks if "second best" in str(each)]
    assert str(remark).endswith("; no 'controller': because; mount it; no 'delegated': no")


@pytest.mark.parametrize(
    ("text", "invariant_tsc", "model"),
    [
        ("", False, "host,kvm-hint-dedicated=on"),
        ("", True, "host,invtsc=on,kvm-hint-dedicated=on"),
        ('model = "EPYC"\n', True, "EPYC,kvm-hint-dedicated=on"),
        ('model = "EPYC,kvm-hint-dedicated=off"\n', False, "EPYC,kvm-hint-dedicated=off"),
        ('accel = "tcg"\n', True, EMULATED_CPU),
        ('accel = "tcg"\nmodel = "qemu64"\n', False, "qemu64"),
        ('placement = "delegated"\n', True, "host,invtsc=on"),
    ],
)
def test_a_guest_with_cpus_of_its_own_learns_it(text: str, model: str, *, invariant_tsc: bool) -> None:
    facts = attrs.evolve(NODE, invariant_tsc=invariant_tsc)
    count = 2 if "delegated" in text else 4
    assert plan_of(f"{KERNEL}[cpu]\ncount = {count}\n{text}", facts).machine.cpu_model == model


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", []),
        ('idle = "guest"\n', ["cpu-pm=on"]),
        ('idle = "guest"\n[memory]\nlock = true\n', ["mem-lock=on", "cpu-pm=on"]),
        ('idle = "guest"\naccel = "tcg"\n', []),
    ],
)
def test_the_guest_idles_its_cpus_where_it_is_asked_to(text: str, options: list[str]) -> None:
    plan = plan_of(f"{KERNEL}[cpu]\n{text}", EPYC)
    argv = [line for line in pasteable(plan, None).splitlines() if "-overcommit" in line]
    assert [line.split()[1] for line in argv] == options
    remark = 'cpu.idle = "guest" has no effect without KVM; leave it out'
    assert (remark in map(str, plan.remarks)) is ("tcg" in text)


def test_with_the_controller_every_cpu_of_the_container_is_a_vcpus() -> None:
    plan = plan_of(f'{KERNEL}[cpu]\nplacement = "controller"\ncount = 4\n[memory]\nsize = "1GiB"\n', NODE)
    placement = plan.placement
    assert isinstance(placement, ControllerPlacement)
    assert (placement.pins, placement.shared) == ((2, 3, 10, 11), False)
    assert placement.pod_uid == "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
    assert str(placement.socket) == "/run/instance-cgroup-controller/controller.sock"
    # The pod is charged for the guest's memory only if all of it is touched while QEMU is in the pod's cgroup.
    assert plan.machine.ram.preallocate
    assert plan.start_timeout == 64
    assert not plan_of(KERNEL, FACTS).machine.ram.preallocate
    assert any("the node's shared CPUs" in line for line in plan_lines(plan))
    [problem] = problems(f'{KERNEL}[cpu]\nplacement = "controller"\ncount = 3\n', NODE)
    assert problem.startswith("cpu.count: asks for 3 vCPUs, but the container has 4 CPUs ('2-3,10-11')")
    assert problem.endswith("; give the container as many CPUs as vCPUs, whole ones with requests equal to limits")
    [problem] = problems(f'{KERNEL}[cpu]\nplacement = "controller"\ncount = 5\n', NODE)
    assert problem.startswith("cpu.count: asks for 5 vCPUs, but this process may use 4 CPUs ('2-3,10-11')")


def test_cpus_that_the_kernel_must_keep_free_need_the_controller() -> None:
    demand = f'{KERNEL}[cpu]\nexclusive = "enforced"\ncount = 4\n'
    placement = plan_of(f'{demand}placement = "controller"\n', NODE).placement
    assert isinstance(placement, ControllerPlacement)
    assert placement.enforced
    for backend in ("delegated", "affinity"):
        [problem] = problems(f'{demand}placement = "{backend}"\n', NODE)
        assert problem.startswith(f"cpu.exclusive: \"enforced\" cannot be had with placement '{backend}'; only the")


@pytest.mark.parametrize(
    ("spec", "swept"),
    [
        ('placement = "controller"\ncount = 4', True),
        ('placement = "controller"\ncount = 4\nsweep = false', False),
        ('placement = "delegated"\ncount = 3', True),
        ('placement = "delegated"\ncount = 4', False),
        ('placement = "affinity"\ncount = 3', False),
    ],
)
def test_misplaced_threads_are_moved_where_there_is_a_float_cgroup(spec: str, swept: bool) -> None:  # noqa: FBT001
    assert plan_of(f"{KERNEL}[cpu]\n{spec}\n", NODE).placement.sweep is swept


@pytest.mark.parametrize(
    ("kvm", "accel", "user", "groups"),
    [
        (Kvm(None, group_id=104, mode=0o660), "kvm", "nobody", (104,)),
        (Kvm(None, group_id=0, mode=0o666), "kvm", "nobody", ()),
        (Kvm(None, group_id=0, mode=0o600), "kvm", "root", ()),
        (Kvm("not found"), "tcg", "nobody", ()),
    ],
)
def test_qemu_runs_unprivileged_where_it_can(kvm: Kvm, accel: str, user: str, groups: tuple[int, ...]) -> None:
    machine = plan_of(KERNEL, attrs.evolve(FACTS, kvm=kvm)).machine
    assert (machine.accel, machine.user.name, machine.user.groups) == (accel, user, groups)


@pytest.mark.parametrize(
    ("kvm", "remark"),
    [
        (Kvm(None, 104, 0o660), ""),
        (
            Kvm(None, 104, 0o660, guest="QEMU was killed"),
            "KVM runs no guest here (QEMU was killed): the guest is emulated",
        ),
        (Kvm(None, 104, 0o660, "Device busy"), "KVM runs no guest here (Device busy): the guest is emulated"),
        (Kvm("not found"), "no KVM (not found): the guest is emulated"),
    ],
)
def test_a_kvm_that_is_to_be_tried_is_used_if_it_runs_a_guest(kvm: Kvm, remark: str) -> None:
    plan = plan_of(KERNEL + '[cpu]\naccel = "tried"\n', attrs.evolve(FACTS, kvm=kvm))
    assert plan.machine.accel == ("tcg" if remark else "kvm")
    assert any(str(each).startswith(remark) for each in plan.remarks) or not remark


def test_a_pod_without_cpus_of_its_own_is_refused_unless_that_was_asked_for() -> None:
    shared = attrs.evolve(FACTS, pod=PodQos("burstable", "its oom_score_adj is 900"))
    [problem] = problems(KERNEL, shared)
    assert problem.startswith("cpu.placement: the pod is Burstable (its oom_score_adj is 900), so it shares its CPUs")
    assert "requests equal to limits" in problem
    for less in ("affinity", "delegated"):
        plan = plan_of(KERNEL + f'[cpu]\nplacement = "{less}"\n', attrs.evolve(shared, delegation_error=None))
        assert any(remark.startswith("the pod is Burstable") for remark in map(str, plan.remarks))


def test_vcpus_that_would_be_throttled_are_refused_in_a_pod_and_a_remark_elsewhere() -> None:
    text = KERNEL + "[cpu]\ncount = 2\n"
    assert any("cpu.max" in remark for remark in map(str, plan_of(text, attrs.evolve(FACTS, cpu_time=1.5)).remarks))
    pod = attrs.evolve(FACTS, allowed_cpus=CpuSet(range(1, 8)), pod=PodQos("guaranteed"))
    [problem] = problems(text, attrs.evolve(pod, cpu_time=1.5))
    assert problem.startswith("cpu.placement: cpu.max gives 2 vCPUs the time of 1.5 CPUs")
    assert not any("cpu.max" in remark for remark in map(str, plan_of(text, attrs.evolve(FACTS, cpu_time=2.0)).remarks))


def test_vcpus_placed_by_the_controller_are_not_under_the_pods_cpu_max() -> None:
    facts = attrs.evolve(
        FACTS,
        allowed_cpus=CpuSet([1, 2]),
        cpu_time=1.5,
        pod=PodQos("guaranteed"),
        container_uid="a",
        controller_error=None,
    )
    plan = plan_of(KERNEL + "[cpu]\ncount = 2\n", facts)
    assert plan.placement.backend == "controller"


@pytest.mark.parametrize("masked", ["2", "3-5"])
def test_a_cpu_mask_that_the_runtime_left_is_lifted_where_there_are_cgroups(masked: str) -> None:
    facts = attrs.evolve(
        FACTS,
        allowed_cpus=CpuSet.parse("2-5"),
        masked_cpus=CpuSet.parse(masked),
        pod=PodQos("guaranteed"),
        container_uid="a",
        controller_error=None,
    )
    plan = plan_of(KERNEL + "[cpu]\ncount = 4\n", facts)
    assert plan.placement.cpus == CpuSet.parse("2-5")
    [remark] = [each for each in map(str, plan.remarks) if "CPU mask" in each]
    assert (
        f"started with the CPU mask '{facts.allowed_cpus - facts.masked_cpus}' of its cpuset '2-5', and lifts it"
        in remark
    )


def test_a_cpu_mask_without_cgroups_is_kept_and_named_in_the_refusal() -> None:
    facts = attrs.evolve(FACTS, allowed_cpus=CpuSet.parse("2-3"), masked_cpus=CpuSet([3]))
    text = KERNEL + '[cpu]\nplacement = "affinity"\n'
    assert plan_of(text + "count = 1\n", facts).placement.cpus == CpuSet([2])
    [refused] = problems(text + "count = 2\n", facts)
    assert refused == (
        "cpu.count: asks for 2 vCPUs, but this process may use 1 CPUs ('2'): this process was started with the CPU mask '2', its "
        "cpuset has '2-3'; see CPUAffinity= in the systemd unit or system.conf of what started it, and taskset"
    )
    [refused] = problems(text + 'count = 1\ncpus = "3"\n', facts)
    assert "started with the CPU mask '2'" in refused


def test_native_aio_that_the_machine_has_no_requests_for_is_remarked() -> None:
    """Each thread of QEMU that serves such a disk takes 1024 of the machine's: two iothreads, and the main thread for the others."""
    disks = "".join(
        f'[[disk]]\npath = "/raw{number}"\naio = "native"\niothread = {each}\n'
        for number, each in enumerate(("true", "true", "false", "false"))
    )
    images = {
        PurePosixPath(f"/raw{number}"): FileFact("file", GIB, image=ImageFact("raw", GIB), direct=True)
        for number in range(4)
    }
    facts = attrs.evolve(FACTS, files={**FACTS.files, **images})
    for free, short in ((3072, None), (3000, 72), (None, None)):
        plan = plan_of(KERNEL + disks, attrs.evolve(facts, aio_free=free))
        remarks = [each for each in map(str, plan.remarks) if "aio" in each]
        assert len(remarks) == (short is not None)
        if short is not None:
            assert 'aio "native" takes 3072 requests of the kernel\'s, and the machine has 3000 left' in remarks[0]
            assert f"raise fs.aio-max-nr on the node by {short} at least" in remarks[0]


def test_running_as_root_is_always_a_remark() -> None:
    plan = plan_of(KERNEL, attrs.evolve(FACTS, users={}))
    assert plan.machine.user.name == "root"
    assert any("QEMU runs as root, because none of the users" in remark for remark in map(str, plan.remarks))
    locked = attrs.evolve(FACTS, kvm=Kvm(None, group_id=0, mode=0o600))
    assert any("QEMU runs as root, because /dev/kvm" in remark for remark in map(str, plan_of(KERNEL, locked).remarks))
    assert problems(KERNEL + '[instance]\nuser = "nobody"\n', locked) == [
        "instance.user: 'nobody' cannot use /dev/kvm (mode 600); chmod it to 660 with a group"
    ]


def test_the_qemu_of_each_pod_is_a_user_of_its_own() -> None:
    """Where the machine's users are those of all pods: the kernel counts descriptors in flight, locked memory and more by user."""

    def user_of(pod_uid: str | None, spec: str = KERNEL, *, user_namespace: bool = False) -> int:
        facts = attrs.evolve(FACTS, pod_uid=pod_uid, user_namespace=user_namespace)
        return plan_of(spec, facts).machine.user.user_id

    one, other = "00000001-0000-4000-8000-000000000001", "00000001-0000-4000-8000-000000000002"
    assert user_of(one) == user_of(one) != user_of(other)
    assert user_of(one) in PODS_USERS
    assert user_of(None) == user_of(one, user_namespace=True) == 65534
    assert user_of(one, KERNEL + '[instance]\nuser = "nobody"\n') == 65534


@pytest.mark.parametrize("model", ["EPYC,-svm", "host"])
def test_a_cpu_model_that_qemu_lists_is_accepted(model: str) -> None:
    facts = attrs.evolve(FACTS, cpu_models=frozenset({"EPYC", "host"}))
    assert plan_of(f'{KERNEL}[cpu]\nmodel = "{model}"\n', facts).machine.cpu_model == model


def test_the_names_of_cpu_models_are_read_from_every_qemus_list() -> None:
    old = "Available CPUs:\nx86 EPYC                  (alias of EPYC-v4)\nx86 EPYC-v1\n\nRecognized CPUID flags:\n  3dnow abm\n"
    new = "Available CPUs:\n  EPYC                  (alias of EPYC-v4)\n  EPYC-v1\n\nRecognized CPUID flags:\n  3dnow abm\n"
    assert parse_cpu_models(old) == parse_cpu_models(new) == {"EPYC", "EPYC-v1"}
    assert parse_cpu_models("") == set()


def test_a_kernel_qemu_may_not_read_is_copied() -> None:
    text = '[boot]\nkernel = "/boot/private"\ninitrd = "/boot/initrd"\n'
    machine = plan_of(text).machine
    assert machine.kernel is not None
    assert machine.initrd is not None
    assert (machine.kernel.copied, machine.initrd.copied) == (True, False)


def test_a_bridged_guest_gets_the_pods_address() -> None:
    network = plan_of(KERNEL + '[[network]]\nmode = "bridge"\n').networks[0]
    assert isinstance(network, BridgedPlan)
    assert (network.mac, network.mtu, str(network.guest)) == (POD.mac, 1450, "10.244.1.5/32")
    assert network.routes == POD.routes
    argv = dnsmasq_argv(plan_of(KERNEL + '[[network]]\nmode = "bridge"\n').dhcp[0])
    assert "--dhcp-option=option:classless-static-route,169.254.1.1/32,0.0.0.0,0.0.0.0/0,169.254.1.1" in argv
    assert "--shared-network=vmbr0,10.244.1.5" in argv


def test_a_gateway_no_route_leads_to_gets_one() -> None:
    lonely = attrs.evolve(POD, routes=(Route(IPv4Network("0.0.0.0/0"), IPv4Address("169.254.1.1"), onlink=True),))
    plan = plan_of(KERNEL + '[[network]]\nmode = "bridge"\n', attrs.evolve(FACTS, interfaces={"eth0": lonely}))
    assert "--dhcp-option=option:classless-static-route,169.254.1.1/32,0.0.0.0,0.0.0.0/0,169.254.1.1" in dnsmasq_argv(
        plan.dhcp[0]
    )


def test_a_plain_pod_network_needs_no_route_list() -> None:
    plain = attrs.evolve(
        POD,
        addresses=(IPv4Interface("10.0.0.5/24"),),
        routes=(Route(IPv4Network("0.0.0.0/0"), IPv4Address("10.0.0.1")),),
    )
    plan = plan_of(KERNEL + '[[network]]\nmode = "bridge"\n', attrs.evolve(FACTS, interfaces={"eth0": plain}))
    argv = dnsmasq_argv(plan.dhcp[0])
    assert "--dhcp-option=option:router,10.0.0.1" in argv
    assert not any("classless" in argument for argument in argv)


def test_mac_addresses_are_stable_and_unique() -> None:
    a, b = Identity("a"), Identity("b")
    assert derived_mac(a, 0) == derived_mac(a, 0)
    assert len({derived_mac(each, index) for each in (a, b) for index in range(3)}) == 6
    assert derived_mac(a, 0).startswith("52:54:00:")


@given(st.floats(1, 3600))
def test_the_grace_period_is_divided_whole(grace: float) -> None:
    plan = share_grace(grace, 10)
    assert plan.power_down + plan.forced == pytest.approx(grace)
    assert min(plan.power_down, plan.quit, plan.terminate) > 0
    assert plan.power_down >= 0.9 * grace - 1e-9


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


TUNED = 'latency = "low"\ncache_ways = 2\nmemory_bandwidth = 40\n'


def test_only_the_controller_can_tune_the_cpus() -> None:
    spec = f'{KERNEL}[cpu]\nplacement = "affinity"\n{TUNED}'
    remarks = [remark.found for remark in plan_of(spec).remarks]
    assert any("have no effect with placement 'affinity'" in each for each in remarks)
    assert not any("have no effect" in remark.found for remark in plan_of(spec.replace(TUNED, "")).remarks)
    plan = plan_of(f'{KERNEL}[cpu]\nplacement = "controller"\ncount = 4\n{TUNED}[memory]\nsize = "1GiB"\n', NODE)
    assert isinstance(plan.placement, ControllerPlacement)
    assert plan.placement.tuning == CpuTuning("low", 2, 40)
    assert not any("have no effect" in remark.found for remark in plan.remarks)


def test_the_remedy_of_a_problem_and_of_a_remark_is_a_field() -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(KERNEL + "[cpu]\ncount = 9\n")
    [problem] = caught.value.problems
    assert problem.statement == "cpu.count: asks for 9 vCPUs, but this process may use 8 CPUs ('0-7')"
    assert problem.remedy == "one CPU for each vCPU"
    assert str(problem) == f"{problem.statement}; {problem.remedy}"
    [remark] = [each for each in plan_of(KERNEL + "[cpu]\ncount = 8\n").remarks if "belong" in each.found]
    assert str(remark).endswith("this program share them; give it more CPUs than vCPUs")
    assert remark.remedy == "give it more CPUs than vCPUs"


def test_script_to_paste_names_paths_and_no_descriptor() -> None:
    text = pasteable(plan_of(MACHINES["everything"]), None)
    assert "/proc/self/fd" not in text
    assert "fd=" not in text
    assert "-kernel /boot/private" in text
    assert '"filename": "/d,isk.qcow2"' in text
    assert "ifname=vmtap1,script=no" in text
    assert "--socket-path=/run/instance-runner/share0.sock" in text


# -- vCPUs that are plugged while the guest runs -----------------------------------------------------------------------


def test_a_machine_has_the_cores_that_may_be_plugged_later() -> None:
    plan = plan_of(KERNEL + '[cpu]\ncount = 2\ntopology = "flat"\n[hotplug]\ncpus = 6\n')
    argv = qemu_argv(plan.machine, QemuFds(1, 2, (3,), {"kernel": 4}))
    assert argv[argv.index("-smp") + 1] == "cpus=2,maxcpus=6,sockets=1,cores=6,threads=1"
    assert "takes up to 6 vCPUs while it runs" in "\n".join(plan_lines(plan))
    without = plan_of(KERNEL + '[cpu]\ncount = 2\ntopology = "flat"\n')
    argv = qemu_argv(without.machine, QemuFds(1, 2, (3,), {"kernel": 4}))
    assert argv[argv.index("-smp") + 1] == "cpus=2,sockets=1,cores=2,threads=1"
    assert plan.machine.ram.overhead - without.machine.ram.overhead == 4 * VCPU


def test_memory_that_is_locked_is_counted_for_all_vcpus_that_there_may_be() -> None:
    text = KERNEL + '[cpu]\ntopology = "flat"\n[memory]\nlock = true\n'
    facts = attrs.evolve(FACTS, limits=MemoryLimits(lockable=None, may_lock=True))
    locked, more = plan_of(text, facts), plan_of(text + "[hotplug]\ncpus = 4\n", facts)
    assert more.machine.lockable > locked.machine.lockable


@pytest.mark.parametrize(
    ("cpu", "most", "facts", "problem"),
    [
        ('count = 4\ntopology = "flat"', 3, FACTS, "is 3, and the guest starts with 4 vCPUs; set it to 4 at least"),
        (
            "count = 4",
            8,
            EPYC,
            "needs a guest with one socket of cores with one thread each, and this one sees 2 threads",
        ),
        (
            'cpus = "1,33"\ncount = 2',
            8,
            EPYC,
            "needs a guest with one socket of cores with one thread each, and this one sees 2 s",
        ),
    ],
)
def test_what_later_vcpus_would_falsify_is_refused(cpu: str, most: int, facts: HostFacts, problem: str) -> None:
    facts = attrs.evolve(facts, kvm=Kvm(None))
    found = problems(KERNEL + f"[cpu]\n{cpu}\n[hotplug]\ncpus = {most}\n", facts)
    assert [each[: len(problem) + 14] for each in found] == [f"hotplug.cpus: {problem}"]


def test_a_guest_that_is_shown_a_cache_gets_no_cpu_of_another() -> None:
    text = KERNEL + '[cpu]\ncount = 2\ncpus = "1-2"\n'
    facts = attrs.evolve(EPYC, kvm=Kvm(None))
    hotplug = plan_of(text + "[hotplug]\ncpus = 4\n", facts).machine.vcpu_hotplug
    assert hotplug == VcpuHotplugPlan(4, alike=True)
    flat = text.replace("count", 'topology = "flat"\ncount') + "[hotplug]\ncpus = 4\n"
    assert plan_of(flat, facts).machine.vcpu_hotplug == VcpuHotplugPlan(4, alike=False)


def test_a_pod_that_was_resized_can_be_started_again_with_fewer_vcpus_than_cpus() -> None:
    facts = attrs.evolve(FACTS, controller_error=None, container_uid="uid", allowed_cpus=CpuSet(range(4)))
    text = KERNEL + '[cpu]\ncount = 2\nplacement = "controller"\ntopology = "flat"\n'
    assert [each.split(":")[0] for each in problems(text, facts)] == ["cpu.count"]
    placement = plan_of(text + "[hotplug]\ncpus = 4\n", facts).placement
    assert isinstance(placement, ControllerPlacement)
    assert placement.cpus == CpuSet(range(4))
    assert len(placement.pins) == 2
