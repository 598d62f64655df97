"""Every check in every level it has; a finding below ok names its remedy."""

from __future__ import annotations

import errno
from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.check import cpu_owners, device_rights, kernel_settings, programs
from runner.check.cpu_owners import CpuNeighbour, Init
from runner.check.finding import Check, CheckReport, Finding, Level, Place, place_of
from runner.check.programs import Program
from runner.check.report import report_json, report_lines
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.facts.host import Kvm, PodQos, Virtiofsd
from runner.kernel.kubelet_files import Frozen
from runner.kernel.settings import Interrupt, PciDevice, QuietCpus, Swap
from runner.kubelet.state import CpuState

OK, UNKNOWN, WARNING, FATAL = Level
NODE, POD, CONTAINER, MACHINE = Place
HOSTS = Path(__file__).parents[2] / "data" / "hosts"
EPYC = Hardware.from_json((HOSTS / "epyc-7543-2s-nps1.json").read_text())
HYBRID = Hardware.from_json((HOSTS / "core-i9-13900k.json").read_text())
ALL, SOME = CpuSet(range(8)), CpuSet([2, 3])
GUARANTEED = PodQos("guaranteed", "its oom_score_adj is -997")
BURSTABLE = PodQos("burstable", "its oom_score_adj is 900")
ERROR_NO_MEMORY = OSError(errno.ENOMEM, "Cannot allocate memory")
STATIC = CpuState("static", CpuSet([0, 1]), {"a": {"main": SOME}})
STATUS: dict[str, object] = {
    "protocol": 3,
    "float_cpuset": "0-1",
    "kubelet": True,
    "policy": "static",
    "frozen": None,
    "faults": [],
    "trusting": False,
}


def own(pod: PodQos | None, allowed: CpuSet, *, less: bool = False) -> Finding:
    return cpu_owners.judge_own_cpus(pod, allowed, ALL, asks_for_less=less)


def time(place: Place, limit: float | None, throttled: int = 0, *, less: bool = False) -> Finding:
    return cpu_owners.judge_cpu_time(place, limit, 4, throttled, asks_for_less=less)


def cores(numbers: str, others: str = "", hardware: Hardware = EPYC) -> list[Finding]:
    return list(cpu_owners.judge_cores(CpuSet.parse(numbers), hardware, CpuSet.parse(others), "the vCPUs"))


def init(
    *, ours: bool, blocks: bool = False, handles: bool = False, everything: bool = False, name: str = "bash"
) -> list[Finding]:
    return list(cpu_owners.judge_init(POD, Init(ours, name, blocks, handles), in_initial_pid_namespace=everything))


def hugepages(near: str, *free: int, asked: int | None = None) -> Finding:
    nodes = tuple(NumaNode(i, 1 << 30, (10,) * len(free), (HugepagePool(2 << 20, 4, n),)) for i, n in enumerate(free))
    hardware = Hardware(tuple(Cpu(i, i, 0, 0, i) for i in range(len(free))), nodes)
    return kernel_settings.judge_hugepages(hardware, CpuSet.parse(near), asked)


def controller(answer: object, place: Place = POD, placement: str = "auto") -> Finding:
    assert answer is None or isinstance(answer, str | dict)
    return programs.judge_controller(place, "/run/c/controller.sock", answer, placement)


def program(check: Check, path: str | None, output: str = "", reason: str | None = None) -> Finding:
    found = Program(None if path is None else PurePosixPath(path), output, reason)
    return programs.judge_program(check, "name", found, "ID=debian")


V1 = {"cpuset": "/sys/fs/cgroup/cpuset"}
MOUNT = "/sys/fs/cgroup"
CASES: list[tuple[Finding, Level, str]] = [
    (kernel_settings.judge_cgroups(POD, MOUNT, ["cpu", "cpuset"], {}), OK, "offers cpuset"),
    (kernel_settings.judge_cgroups(POD, None, [], {}), UNKNOWN, "no cgroup hierarchy can be seen"),
    (kernel_settings.judge_cgroups(MACHINE, f"{MOUNT}/unified", [], V1), WARNING, "cgroup v1's (hybrid: /sys/fs/cgroup/cpuset)"),
    (kernel_settings.judge_cgroups(NODE, f"{MOUNT}/unified", ["cpuset"], V1), FATAL, "hybrid"),
    (kernel_settings.judge_cgroups(NODE, None, [], {"cpu": "/x", "memory": "/y"}), FATAL, "only v1 (cpu, memory)"),
    (kernel_settings.judge_cgroups(NODE, MOUNT, ["cpu"], {}), FATAL, "does not offer cpuset (it offers: cpu)"),
    (kernel_settings.judge_kernel("6.12.48+deb13-amd64"), OK, "6.12.48"),
    (kernel_settings.judge_kernel("6.7.0"), OK, "6.7.0"),
    (kernel_settings.judge_kernel("6.4.99"), WARNING, "before 6.5 the controller identifies its clients by bare PID"),
    (kernel_settings.judge_kernel("5.15.0-91-generic"), WARNING, "before 6.2 a change of a cpuset may reset the masks"),
    (kernel_settings.judge_kernel(""), UNKNOWN, "no version"),
    (kernel_settings.judge_clock("tsc"), OK, "tsc"),
    (kernel_settings.judge_clock("hpet"), WARNING, "hpet"),
    (kernel_settings.judge_clock(""), UNKNOWN, "does not say"),
    (kernel_settings.judge_aio(65536), OK, "for 64 more threads of QEMU"),
    (kernel_settings.judge_aio(2048), WARNING, "leaves 2048 requests, for 2 more threads"),
    (kernel_settings.judge_aio(None), UNKNOWN, "does not say"),
    (kernel_settings.judge_swap([], ""), OK, "off"),
    (kernel_settings.judge_swap([Swap("/dev/vdb", 1 << 30)], "0"), OK, "not for this container"),
    (kernel_settings.judge_swap([Swap("/dev/vdb", 1 << 30)], ""), WARNING, "/dev/vdb (1024 MiB)"),
    (kernel_settings.judge_swap([Swap("/dev/vdb", 1 << 30)], "max"), WARNING, "swap is on"),
    (kernel_settings.judge_transparent_hugepages("advise"), OK, "advise"),
    (kernel_settings.judge_transparent_hugepages("never"), WARNING, "never"),
    (kernel_settings.judge_transparent_hugepages(""), UNKNOWN, "does not say"),
    (kernel_settings.judge_hugepages(HYBRID, SOME, None), OK, "none are reserved"),
    (hugepages("0", 3, 0), OK, "2 MiB: 3 of 4 free on NUMA node 0, 0 of 4 free on NUMA node 1"),
    (hugepages("1", 3, 0), WARNING, "none of 2 MiB is free on NUMA node 1"),
    (hugepages("1", 3, 0, asked=2 << 20), WARNING, "none of 2 MiB is free on NUMA node 1"),
    (hugepages("", 3, 0, asked=2 << 20), OK, "2 MiB: 3 of 4 free on NUMA node 0, 0 of 4 free on NUMA node 1"),
    (hugepages("0", 3, 0, asked=1 << 30), WARNING, "none of 1 GiB is free on NUMA node 0"),
    (kernel_settings.judge_numa_balancing("1", 1), OK, "one NUMA node"),
    (kernel_settings.judge_numa_balancing("0", 2), OK, "off"),
    (kernel_settings.judge_numa_balancing("", 2), OK, "off"),
    (kernel_settings.judge_numa_balancing("1", 2), WARNING, "numa_balancing is 1"),
    (kernel_settings.judge_isolated(CpuSet(), QuietCpus(), None), OK, "could keep off: the timer tick (nohz_full=)"),
    (kernel_settings.judge_isolated(CpuSet(), QuietCpus(SOME, "all", "2"), None), OK, "RCU callbacks (rcu_nocbs=all), "),
    (kernel_settings.judge_isolated(CpuSet(), QuietCpus(SOME), SOME), WARNING, "the shared pool, '2-3', are in nohz_full="),
    (kernel_settings.judge_isolated(SOME, QuietCpus(SOME), CpuSet([0, 1])), OK, "kept off at boot: the timer tick (nohz_full=2-3), "),
    (kernel_settings.judge_isolated(SOME, QuietCpus(), CpuSet([0, 1, 2])), WARNING, "CPUs '2' of the shared pool"),
    (kernel_settings.judge_isolated(SOME, QuietCpus(), None), UNKNOWN, "the shared pool is not known here"),
    (kernel_settings.judge_isolated(None, QuietCpus(), None), UNKNOWN, "does not say"),
    (kernel_settings.judge_pci([PciDevice("0000:01:00.0", 0x03, -1)], 1), OK, "one NUMA node"),
    (kernel_settings.judge_pci([PciDevice("0000:00:00.0", 0x06, -1), PciDevice("0000:01:00.0", 0x03, 1)], 2), OK, "every device"),
    (kernel_settings.judge_pci([PciDevice("0000:01:00.0", 0x03, -1)], 2), WARNING, "-1 for 0000:01:00.0 (display)"),
    (kernel_settings.judge_pci([PciDevice(f"0000:0{i}:00.0", 0x02, -1) for i in range(9)], 2), WARNING, "and 1 more"),
    (own(GUARANTEED, SOME), OK, "the pod is Guaranteed (its oom_score_adj is -997) and may use CPUs '2-3' of '0-7'"),
    (own(BURSTABLE, SOME), FATAL, "the pod is Burstable"),
    (own(attrs.evolve(BURSTABLE, claimed=SOME), SOME), OK, "a resource claim gives the container CPUs '2-3' of '0-7'"),
    (own(BURSTABLE, SOME, less=True), WARNING, "the pod is Burstable"),
    (own(GUARANTEED, ALL), FATAL, "every CPU of the node"),
    (own(PodQos("", "its oom_score_adj is 0"), SOME), UNKNOWN, "QoS class cannot be seen (its oom_score_adj is 0)"),
    (own(None, ALL), WARNING, "every CPU of the machine"),
    (own(None, SOME), UNKNOWN, "nothing here says whether they were given to others too"),
    (time(POD, None), OK, "no cpu.max"),
    (time(POD, 4.0), OK, "the time of 4 CPUs to 4"),
    (time(POD, 3.5), FATAL, "gives 4 vCPUs the time of 3.5 CPUs"),
    (time(POD, 3.5, less=True), WARNING, "3.5 CPUs"),
    (time(CONTAINER, 3.5), WARNING, "3.5 CPUs"),
    (time(POD, 4.0, throttled=9), WARNING, "9 times"),
    (cores("1,65,2,66")[0], OK, "the vCPUs: CPUs '1-2,65-66' are whole cores of one NUMA node"),
    (cores("1,65,2")[0], WARNING, "the vCPUs: CPUs 2 are half cores"),
    (cores("1,65,2", "66")[0], WARNING, "which are exclusive to another pod"),
    (cores("1,65,33,97")[0], WARNING, "lie on 2 NUMA nodes"),
    (cores("0-1,16", "", HYBRID)[0], WARNING, "unequal cores"),
    (cpu_owners.judge_interrupts([], SOME, ALL), UNKNOWN, "shows none"),
    (next(programs.judge_disturbances(None)), UNKNOWN, "no controller says"),
    (next(programs.judge_disturbances({"protocol": 1})), UNKNOWN, "no controller says"),
    (next(programs.judge_disturbances({"disturbances": []})), OK, "could change every setting"),
    (next(programs.judge_disturbances({"disturbances": ["cannot move interrupts 26 (q3)"]})), WARNING, "cannot move interrupts 26"),
    (cpu_owners.judge_interrupts([Interrupt(9, "acpi", CpuSet([0]))], SOME, ALL), OK, "none is delivered to CPUs '2-3'"),
    (cpu_owners.judge_interrupts([Interrupt(9, "acpi", CpuSet([3, 4]))], SOME, ALL), WARNING, "1 may be delivered to CPUs '2-3': 9 (acpi)"),
    (cpu_owners.judge_interrupts([Interrupt(i, "nvme", SOME) for i in range(9)], SOME, ALL), WARNING, "and 3 more"),
    (cpu_owners.judge_neighbours([CpuNeighbour("system.slice", CpuSet([0]))], SOME, CpuSet([0, 1])), OK, "nothing but pods"),
    (cpu_owners.judge_neighbours([CpuNeighbour("system.slice", ALL)], SOME, CpuSet([0, 1])), WARNING, "system.slice may run"),
    (init(ours=True, blocks=True)[0], OK, "this is PID 1"),
    (init(ours=True, blocks=True)[1], OK, "was blocked before Python started"),
    (init(ours=True)[1], WARNING, "was not blocked"),
    (init(ours=False)[0], UNKNOWN, "its PID 1 is 'bash'"),
    (init(ours=False)[1], UNKNOWN, "does not handle SIGTERM"),
    (init(ours=False, handles=True)[1], UNKNOWN, "how it was started can no longer be seen"),
    (init(ours=False, blocks=True)[1], OK, "blocks SIGTERM"),
    (init(ours=False, name="instance-runner")[0], OK, "its PID 1 is 'instance-runner'"),
    (init(ours=False, name="pause")[0], FATAL, "shared with the pod's other containers"),
    (init(ours=False, everything=True)[0], FATAL, "the machine's own"),
    (device_rights.judge_kvm(Kvm(None, 104, 0o660)), OK, "makes virtual machines"),
    (device_rights.judge_kvm(Kvm("/dev/kvm: No such file or directory")), WARNING, "emulated in software"),
    (device_rights.judge_kvm(Kvm("/dev/kvm: Permission denied")), WARNING, "emulated in software"),
    (device_rights.judge_kvm(Kvm(None, 104, 0o660, "Device or resource busy")), FATAL, "makes no virtual machine: Device or"),
    (device_rights.judge_kvm(Kvm(None, 0, 0o660)), WARNING, "lets no group in"),
    (programs.judge_trial_guest("kvm", None, 0.21), OK, "ran under KVM to its end in 0.2 s"),
    (programs.judge_trial_guest("kvm", "QEMU was killed", 1), FATAL, "KVM runs no guest here: QEMU was killed"),
    (programs.judge_trial_guest("tcg", "QEMU was killed", 1), FATAL, "QEMU emulates no guest here: QEMU was killed"),
    (device_rights.judge_device(device_rights.TUN, POD, "/dev/net/tun", None), OK, "may be used"),
    (device_rights.judge_device(device_rights.TUN, POD, "/dev/net/tun", "Permission denied"), WARNING, "Permission denied"),
    (device_rights.judge_device(device_rights.VHOST_NET, NODE, "/dev/vhost-net", "No such file"), WARNING, "No such file"),
    (device_rights.judge_memlock(1 << 16, 0), OK, "nothing is locked"),
    (device_rights.judge_memlock(1 << 16, None), UNKNOWN, "what the plan was refused for"),
    (device_rights.judge_memlock(None, 1 << 30), OK, "no limit"),
    (device_rights.judge_memlock(2 << 30, 1 << 30), OK, "2048 MiB"),
    (device_rights.judge_memlock(1 << 16, 1 << 30), WARNING, "1024 MiB may have to be locked, and RLIMIT_MEMLOCK is 64 KiB"),
    (device_rights.judge_mbind(None, 2), OK, "works"),
    (device_rights.judge_seccomp(may_make_root=False), OK, "in the way"),
    (device_rights.judge_seccomp(may_make_root=True), WARNING, "no seccomp profile"),
    (device_rights.judge_mbind(OSError(errno.EPERM, "Operation not permitted"), 1), OK, "one NUMA node"),
    (device_rights.judge_mbind(OSError(errno.EPERM, "Operation not permitted"), 2), WARNING, "seccomp"),
    (device_rights.judge_mbind(ERROR_NO_MEMORY, 2), UNKNOWN, "Cannot allocate memory"),
    (program(programs.QEMU, "/q", "QEMU emulator version 10.0.2 (Debian)"), OK, "/q 10.0.2"),
    (program(programs.QEMU, "/q", "", "QEMU 6.2.0 is older than 7.2"), FATAL, "older"),
    (program(programs.QEMU, None), FATAL, "cannot find the program 'name'"),
    (program(programs.DNSMASQ, None), WARNING, "cannot find"),
    (program(programs.DNSMASQ, "/d", "", "it was built without DHCP"), WARNING, "/d: it was built without DHCP"),
    (program(programs.SLEEP, "/bin/sleep"), OK, "/bin/sleep"),
    (program(programs.SLEEP, None), FATAL, "cannot find"),
    (programs.judge_virtiofsd(Virtiofsd(PurePosixPath("/v"), rust=True, version=(1, 13)), "", "ID=debian"), OK, "/v 1.13 (in Rust)"),
    (programs.judge_virtiofsd(Virtiofsd(PurePosixPath("/v"), rust=False, version=(7, 2)), "", "ID=debian"), OK, "cannot share read-only"),
    (programs.judge_virtiofsd(None, "not found", "ID=debian"), WARNING, "not found"),
    (programs.judge_cpu_manager("/s", STATIC, ""), OK, "static; shared pool '0-1', exclusive '2-3'"),
    (programs.judge_cpu_manager("/s", CpuState("static", CpuSet([0])), ""), WARNING, "the shared pool is '0'"),
    (programs.judge_cpu_manager("/s", CpuState("none", CpuSet()), ""), FATAL, "policy is 'none'"),
    (
        programs.judge_cpu_manager("/s", CpuState("none", CpuSet([0, 1]), {"a": {"vm": CpuSet([2])}}), ""),
        OK,
        "policy 'none', and a DRA driver gives CPUs by resource claims: shared pool '0-1', exclusive '2'",
    ),
    (programs.judge_cpu_manager("/s", CpuState("none", CpuSet([0])), "", has_driver=True), OK, "exclusive ''"),
    (controller({**STATUS, "kubelet": True, "policy": "none"}), FATAL, "gives no exclusive CPUs"),
    (controller({**STATUS, "kubelet": True, "policy": "none", "claims": True}), OK, "float has CPUs '0-1'"),
    (programs.judge_cpu_manager("/s", Frozen("cannot use /s: it is empty"), ""), FATAL, "it is empty"),
    (programs.judge_cpu_manager("/s", Frozen(""), "Permission denied"), UNKNOWN, "Permission denied"),
    (programs.judge_memory_manager("Static", {0: 1 << 30, 1: 0}, ""), OK, "1024 MiB on NUMA node 0, 0 MiB on NUMA node 1"),
    (programs.judge_memory_manager("None", {}, ""), WARNING, "'None'"),
    (programs.judge_memory_manager("", {}, "Permission denied"), UNKNOWN, "Permission denied"),
    (programs.judge_topology_manager(), UNKNOWN, "only in the kubelet's configuration"),
    (controller(STATUS), OK, "float has CPUs '0-1'"),
    (controller(None), WARNING, "there is no /run/c, where its socket would be"),
    (controller(None, NODE), WARNING, "there is no /run/c"),
    (controller(None, MACHINE), WARNING, "there is no /run/c"),
    (controller("Connection refused"), FATAL, "Connection refused"),
    (controller("Connection refused", NODE), FATAL, "Connection refused"),
    (controller("Connection refused", POD, "affinity"), WARNING, "Connection refused"),
    (controller("Connection refused", CONTAINER), WARNING, "Connection refused"),
    (controller("Connection refused", CONTAINER, "controller"), FATAL, "Connection refused"),
    (controller({**STATUS, "protocol": 2}), FATAL, "protocol 2"),
    (controller({**STATUS, "frozen": "the file is empty"}), FATAL, "the file is empty"),
    (controller({**STATUS, "policy": "none"}), FATAL, "no exclusive CPUs"),
    (controller({**STATUS, "faults": ["one", "two"]}), WARNING, "2 faults: one"),
    (controller({**STATUS, "trusting": True}), WARNING, "trusts any process"),
    (controller({**STATUS, "partitions": "they are off"}), OK, "guarantee arranged (they are off)"),
    (controller({**STATUS, "partitions": "enforced", "arranged": []}), OK, "guarantee enforced"),
    (
        controller({**STATUS, "partitions": "enforced", "arranged": [{"uuid": "a", "reason": "the kernel refuses"}]}),
        WARNING,
        "the guarantee of 1 instances is arranged, not enforced: a: the kernel refuses",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("finding", "level", "word"), CASES)
def test_a_check_in_each_of_its_levels(finding: Finding, level: Level, word: str) -> None:
    assert (finding.level, word in finding.found) == (level, True), finding
    assert finding.matters
    assert finding.remedy or level in {OK, UNKNOWN}, "a finding below ok has a remedy"
    assert not (finding.remedy and level is OK)


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (
            device_rights.judge_kvm(Kvm("/dev/kvm: Permission denied")),
            "let every user open it, on the node, by a rule of udev",
        ),
        (device_rights.judge_kvm(Kvm("/dev/kvm: No such file or directory")), "give the container the device"),
        (
            device_rights.judge_device(device_rights.TUN, POD, "/dev/net/tun", "Permission denied"),
            "let every user open it",
        ),
        (
            device_rights.judge_device(device_rights.TUN, POD, "/dev/net/tun", "No such file"),
            "give the container the device",
        ),
    ],
)
def test_the_remedy_for_a_node_that_its_mode_forbids_is_its_mode(finding: Finding, expected: str) -> None:
    """In a user namespace root is not the owner of the machine's device nodes."""
    assert finding.remedy.startswith(expected)


def test_every_check_was_judged() -> None:
    checks = {
        found.name
        for module in (kernel_settings, cpu_owners, device_rights, programs)
        for found in vars(module).values()
        if isinstance(found, Check)
    }
    assert checks == {finding.check for finding, _, _ in CASES}


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("QEMU emulator version 7.2.22 (Debian 1:7.2) Copyright", None),
        ("QEMU emulator version 6.2.0", "QEMU 6.2.0 is older than 7.2"),
        ("something else", "it prints 'something else' when asked for its version"),
    ],
)
def test_a_qemu_is_judged_by_its_output(output: str, reason: str | None) -> None:
    assert programs.qemu_error(output) == reason


def test_a_dnsmasq_without_dhcp_is_unusable() -> None:
    assert programs.dnsmasq_error("Dnsmasq version 2.90 Compile time options: IPv6 no-DHCP TFTP") is not None
    assert programs.dnsmasq_error("Dnsmasq version 2.90 Compile time options: IPv6 DHCP no-DHCPv6 TFTP") is None


@pytest.mark.parametrize(
    ("in_initial_pid_namespace", "has_kubelet", "in_pod", "place"),
    [
        (True, True, False, NODE),
        (True, True, True, NODE),  # the controller's pod
        (True, False, True, POD),  # hostPID, which judge_init refuses
        (False, True, True, POD),
        (False, False, False, CONTAINER),
        (True, False, False, MACHINE),
    ],
)
def test_the_environment_is_judged(
    *, in_initial_pid_namespace: bool, has_kubelet: bool, in_pod: bool, place: Place
) -> None:
    assert place_of(in_initial_pid_namespace=in_initial_pid_namespace, has_kubelet=has_kubelet, in_pod=in_pod) is place


REPORT = CheckReport(
    POD,
    (
        own(BURSTABLE, SOME),
        kernel_settings.judge_clock("tsc"),
        kernel_settings.judge_clock("hpet"),
        kernel_settings.judge_clock(""),
    ),
)


def test_the_text_report_ends_with_the_worst() -> None:
    lines = list(report_lines(REPORT, colour=False))
    assert lines[:2] == [
        "ok       clocksource  the clock is tsc",
        "unknown  clocksource  the kernel does not say which clock it uses",
    ]
    assert lines[-4].startswith("fatal    own-cpus     the pod is Burstable")
    assert lines[-3].split(maxsplit=1)[0] == "why"
    assert lines[-2].split(maxsplit=1)[0] == "fix"
    assert lines[-1] == "pod: 1 fatal, 1 warning, 1 unknown, 1 ok"
    assert "\x1b" not in "".join(lines)
    assert "\x1b[1;31mfatal  \x1b[0m" in "".join(report_lines(REPORT, colour=True))


def test_json_has_every_finding_in_order() -> None:
    plain = report_json(REPORT)
    assert {key: plain[key] for key in ("version", "place", "verdict")} == {
        "version": 1,
        "place": "pod",
        "verdict": "fatal",
    }
    assert [finding["level"] for finding in plain["findings"]] == ["fatal", "ok", "warning", "unknown"]
    assert set(plain["findings"][0]) == {"check", "level", "found", "matters", "remedy"}
    assert CheckReport(POD, ()).verdict is OK


def test_the_remedy_for_missing_huge_pages_names_the_state_file_that_a_kubelet_would_not_start_with() -> None:
    assert "memory_manager_state" in hugepages("1", 3, 0).remedy
