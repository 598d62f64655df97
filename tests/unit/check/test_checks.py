"""Every check in every level it has; a finding below ok names its remedy."""

from __future__ import annotations

import errno
from pathlib import Path, PurePosixPath

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.judgement import Judgement, Level
from runner.base.subject import judgement_lines
from runner.check import cpus, devices, kernel, node, programs
from runner.check.checker import CHECKS, CheckReport
from runner.check.checks import Check, Init, Place, place_of
from runner.check.cpus import CpuNeighbour
from runner.cli.check import report_lines
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode
from runner.facts.host import Kvm, PodQos, Virtiofsd
from runner.kernel.cgroup_mounts import CgroupMounts
from runner.kernel.host_settings import InterruptLine
from runner.kernel.kernel_facts import PciDevice, QuietCpus, Swap
from runner.kernel.kubelet_files import Frozen
from runner.kubelet.state import CpuState
from tests.support.json_schemas import fitting

OK, UNKNOWN, WARNING, ERROR = Level
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


def own(pod: PodQos | None, allowed: CpuSet, *, less: bool = False) -> Judgement:
    return cpus.judge_own_cpus(pod, allowed, ALL, asks_for_less=less)


def time(place: Place, limit: float | None, throttled: int = 0, *, less: bool = False) -> Judgement:
    return cpus.judge_cpu_time(place, limit, 4, throttled, asks_for_less=less)


def cores(numbers: str, others: str = "", hardware: Hardware = EPYC) -> list[Judgement]:
    return list(cpus.judge_cores(CpuSet.parse(numbers), hardware, CpuSet.parse(others), "the vCPUs"))


def pid_1(*, ours: bool, everything: bool = False, name: str = "bash") -> Judgement:
    init = Init(ours, name, blocks_sigterm=False, handles_sigterm=False, of_machine=everything)
    return cpus.judge_pid_namespace(POD, init)


def sigterm(*, ours: bool, blocks: bool = False, handles: bool = False) -> Judgement:
    return cpus.judge_signals(Init(ours, "bash", blocks, handles, of_machine=False))


def device(check: Check, place: Place, path: str, reason: str | None) -> Judgement:
    return devices.judge_device(check, "module", place, Path(path), reason)


def losses(release: str) -> list[Judgement]:
    return list(kernel.judge_kernel(release))


def hugepages(near: str, *free: int, asked: int | None = None) -> list[Judgement]:
    nodes = tuple(NumaNode(i, 1 << 30, (10,) * len(free), (HugepagePool(2 << 20, 4, n),)) for i, n in enumerate(free))
    hardware = Hardware(tuple(Cpu(i, i, 0, 0, i) for i in range(len(free))), nodes)
    return list(kernel.judge_hugepages(hardware, CpuSet.parse(near), asked))


def controller(answer: object, place: Place = POD, placement: str = "auto") -> Judgement:
    assert answer is None or isinstance(answer, str | dict)
    return next(node.judge_controller(place, "/run/c/controller.sock", answer, placement))


def program(check: Check, path: str | None, version: str = "", reason: str | None = None) -> Judgement:
    name = programs.QEMU if check is programs.qemu else check.name
    return programs.judge_program(
        check, name, None if path is None else PurePosixPath(path), version, reason, "install it"
    )


def dnsmasq(output: str) -> Judgement:
    return programs.judge_dnsmasq(PurePosixPath("/d"), output, None, "install it")


def interrupt(number: int, handler: str, effective: CpuSet) -> InterruptLine:
    return InterruptLine(number, handler, ALL, effective, -1)


V1 = {"cpuset": "/sys/fs/cgroup/cpuset"}
MOUNT = "/sys/fs/cgroup"
CASES: list[tuple[Judgement, Level, str]] = [
    (kernel.judge_cgroups(POD, CgroupMounts(MOUNT, {}), ["cpu", "cpuset"]), OK, "offers cpuset"),
    (kernel.judge_cgroups(POD, CgroupMounts(None, {}), []), UNKNOWN, "no cgroup hierarchy can be seen"),
    (kernel.judge_cgroups(MACHINE, CgroupMounts(f"{MOUNT}/unified", V1), []), WARNING, "cgroup v1's (hybrid: /sys/fs/cgroup/cpuset)"),
    (kernel.judge_cgroups(NODE, CgroupMounts(f"{MOUNT}/unified", V1), ["cpuset"]), ERROR, "hybrid"),
    (kernel.judge_cgroups(NODE, CgroupMounts(None, {"cpu": "/x", "memory": "/y"}), []), ERROR, "only v1 (cpu, memory)"),
    (kernel.judge_cgroups(NODE, CgroupMounts(MOUNT, {}, ("nsdelegate",)), ["cpuset"]), OK, "offers cpuset"),
    (kernel.judge_cgroups(NODE, CgroupMounts(MOUNT, {}), ["cpuset"]), WARNING, "is mounted without nsdelegate"),
    (kernel.judge_cgroups(NODE, CgroupMounts(MOUNT, {}), ["cpu"]), ERROR, "does not offer cpuset (it offers: cpu)"),
    (losses("6.12.48+deb13-amd64")[0], OK, "6.12.48"),
    (losses("6.7.0")[0], OK, "6.7.0"),
    (losses("6.4.99")[0], WARNING, "before 6.5 the controller identifies its clients by bare PID"),
    (losses("5.15.0-91-generic")[1], WARNING, "before 6.2 a change of a cpuset may reset the masks"),
    (losses("")[0], UNKNOWN, "no version"),
    (kernel.judge_clock("tsc"), OK, "tsc"),
    (kernel.judge_clock("hpet"), WARNING, "hpet"),
    (kernel.judge_clock(""), UNKNOWN, "does not say"),
    (kernel.judge_aio(65536), OK, "for 64 more threads of QEMU"),
    (kernel.judge_aio(2048), WARNING, "leaves 2048 requests, for 2 more threads"),
    (kernel.judge_aio(None), UNKNOWN, "does not say"),
    (kernel.judge_swap([], ""), OK, "off"),
    (kernel.judge_swap([Swap("/dev/vdb", 1 << 30)], "0"), OK, "not for this container"),
    (kernel.judge_swap([Swap("/dev/vdb", 1 << 30)], ""), WARNING, "/dev/vdb (1024 MiB)"),
    (kernel.judge_swap([Swap("/dev/vdb", 1 << 30)], "max"), WARNING, "swap is on"),
    (kernel.judge_transparent_hugepages("advise"), OK, "advise"),
    (kernel.judge_transparent_hugepages("never"), WARNING, "never"),
    (kernel.judge_transparent_hugepages(""), UNKNOWN, "does not say"),
    (next(kernel.judge_hugepages(HYBRID, SOME, None)), OK, "none are reserved"),
    (hugepages("0", 3, 0)[0], OK, "2MiB: 3 of 4 free on NUMA node 0, 0 of 4 free on NUMA node 1"),
    (hugepages("1", 3, 0)[0], WARNING, "none of 2MiB is free on NUMA node 1"),
    (hugepages("1", 3, 0, asked=2 << 20)[0], WARNING, "none of 2MiB is free on NUMA node 1"),
    (hugepages("", 3, 0, asked=2 << 20)[0], OK, "2MiB: 3 of 4 free on NUMA node 0, 0 of 4 free on NUMA node 1"),
    (hugepages("0", 3, 0, asked=1 << 30)[0], WARNING, "none of 1GiB is free on NUMA node 0"),
    (kernel.judge_numa_balancing("1", 1), OK, "one NUMA node"),
    (kernel.judge_numa_balancing("0", 2), OK, "off"),
    (kernel.judge_numa_balancing("", 2), OK, "off"),
    (kernel.judge_numa_balancing("1", 2), WARNING, "numa_balancing is 1"),
    (kernel.judge_isolated(CpuSet(), QuietCpus(), None), OK, "could keep off: the timer tick (nohz_full=)"),
    (kernel.judge_isolated(CpuSet(), QuietCpus(SOME, "all", "2"), None), OK, "RCU callbacks (rcu_nocbs=all), "),
    (kernel.judge_isolated(CpuSet(), QuietCpus(SOME), SOME), WARNING, "the shared pool, '2-3', are in nohz_full="),
    (kernel.judge_isolated(SOME, QuietCpus(SOME), CpuSet([0, 1])), OK, "kept off at boot: the timer tick (nohz_full=2-3), "),
    (kernel.judge_isolated(SOME, QuietCpus(), CpuSet([0, 1, 2])), WARNING, "CPUs '2' of the shared pool"),
    (kernel.judge_isolated(SOME, QuietCpus(), None), UNKNOWN, "the shared pool is not known here"),
    (kernel.judge_isolated(None, QuietCpus(), None), UNKNOWN, "does not say"),
    (kernel.judge_pci([PciDevice("0000:01:00.0", 0x03, -1)], 1), OK, "one NUMA node"),
    (kernel.judge_pci([PciDevice("0000:00:00.0", 0x06, -1), PciDevice("0000:01:00.0", 0x03, 1)], 2), OK, "every device"),
    (kernel.judge_pci([PciDevice("0000:01:00.0", 0x03, -1)], 2), WARNING, "-1 for 0000:01:00.0 (display)"),
    (kernel.judge_pci([PciDevice(f"0000:0{i}:00.0", 0x02, -1) for i in range(9)], 2), WARNING, "and 5 more"),
    (own(GUARANTEED, SOME), OK, "the pod is Guaranteed (its oom_score_adj is -997) and may use CPUs '2-3' of '0-7'"),
    (own(BURSTABLE, SOME), ERROR, "the pod is Burstable"),
    (own(attrs.evolve(BURSTABLE, claimed=SOME), SOME), OK, "a resource claim gives the container CPUs '2-3' of '0-7'"),
    (own(BURSTABLE, SOME, less=True), WARNING, "the pod is Burstable"),
    (own(GUARANTEED, ALL), ERROR, "every CPU of the node"),
    (own(PodQos("", "its oom_score_adj is 0"), SOME), UNKNOWN, "QoS class cannot be seen (its oom_score_adj is 0)"),
    (own(None, ALL), WARNING, "every CPU of the machine"),
    (own(None, SOME), UNKNOWN, "nothing here says whether they were given to others too"),
    (time(POD, None), OK, "no cpu.max"),
    (time(POD, 4.0), OK, "the time of 4 CPUs to 4"),
    (time(POD, 3.5), ERROR, "gives 4 vCPUs the time of 3.5 CPUs"),
    (time(POD, 3.5, less=True), WARNING, "3.5 CPUs"),
    (time(CONTAINER, 3.5), WARNING, "3.5 CPUs"),
    (time(POD, 4.0, throttled=9), WARNING, "9 times"),
    (cores("1,65,2,66")[0], OK, "the vCPUs: CPUs '1-2,65-66' are whole cores of one NUMA node"),
    (cores("1,65,2")[0], WARNING, "the vCPUs: CPUs 2 are half cores"),
    (cores("1,65,2", "66")[0], WARNING, "which are exclusive to another pod"),
    (cores("1,65,33,97")[0], WARNING, "lie on 2 NUMA nodes"),
    (cores("0-1,16", "", HYBRID)[0], WARNING, "unequal cores"),
    (cpus.judge_interrupts([], SOME, ALL), UNKNOWN, "shows none"),
    (next(node.judge_disturbances(None)), UNKNOWN, "no controller says"),
    (next(node.judge_disturbances({"protocol": 1})), UNKNOWN, "no controller says"),
    (next(node.judge_disturbances({"disturbances": []})), OK, "could change every setting"),
    (next(node.judge_disturbances({"disturbances": ["cannot move interrupts 26 (q3)"]})), WARNING, "cannot move interrupts 26"),
    (cpus.judge_interrupts([interrupt(9, "acpi", CpuSet([0]))], SOME, ALL), OK, "none is delivered to CPUs '2-3'"),
    (cpus.judge_interrupts([interrupt(9, "acpi", CpuSet([3, 4]))], SOME, ALL), WARNING, "1 may be delivered to CPUs '2-3': 9 (acpi)"),
    (cpus.judge_interrupts([interrupt(i, "nvme", SOME) for i in range(9)], SOME, ALL), WARNING, "and 3 more"),
    (cpus.judge_neighbours([CpuNeighbour("system.slice", CpuSet([0]))], SOME, CpuSet([0, 1])), OK, "nothing but pods"),
    (cpus.judge_neighbours([CpuNeighbour("system.slice", ALL)], SOME, CpuSet([0, 1])), WARNING, "system.slice may run"),
    (pid_1(ours=True), OK, "this is PID 1"),
    (sigterm(ours=True, blocks=True), OK, "was blocked before Python started"),
    (sigterm(ours=True), WARNING, "was not blocked"),
    (pid_1(ours=False), UNKNOWN, "its PID 1 is 'bash'"),
    (sigterm(ours=False), UNKNOWN, "does not handle SIGTERM"),
    (sigterm(ours=False, handles=True), UNKNOWN, "how it was started can no longer be seen"),
    (sigterm(ours=False, blocks=True), OK, "blocks SIGTERM"),
    (pid_1(ours=False, name="instance-runner"), OK, "its PID 1 is 'instance-runner'"),
    (pid_1(ours=False, name="pause"), ERROR, "shared with the pod's other containers"),
    (pid_1(ours=False, everything=True), ERROR, "the machine's own"),
    (devices.judge_kvm(Kvm(None, 104, 0o660)), OK, "makes virtual machines"),
    (devices.judge_kvm(Kvm("/dev/kvm: No such file or directory")), WARNING, "emulated in software"),
    (devices.judge_kvm(Kvm("/dev/kvm: Permission denied")), WARNING, "emulated in software"),
    (devices.judge_kvm(Kvm(None, 104, 0o660, "Device or resource busy")), ERROR, "makes no virtual machine: Device or"),
    (devices.judge_kvm(Kvm(None, 0, 0o660)), WARNING, "lets no group in"),
    (programs.judge_trial_guest("kvm", None, 0.21), OK, "ran under KVM to its end in 0.2 s"),
    (programs.judge_trial_guest("kvm", "QEMU was killed", 1), ERROR, "KVM runs no guest here: QEMU was killed"),
    (programs.judge_trial_guest("tcg", "QEMU was killed", 1), ERROR, "QEMU emulates no guest here: QEMU was killed"),
    (device(devices.tun, POD, "/dev/net/tun", None), OK, "may be used"),
    (device(devices.tun, POD, "/dev/net/tun", "Permission denied"), WARNING, "Permission denied"),
    (device(devices.vhost_net, NODE, "/dev/vhost-net", "No such file"), WARNING, "No such file"),
    (devices.judge_memlock(1 << 16, 0), OK, "nothing is locked"),
    (devices.judge_memlock(1 << 16, None), UNKNOWN, "what the plan was refused for"),
    (devices.judge_memlock(None, 1 << 30), OK, "no limit"),
    (devices.judge_memlock(2 << 30, 1 << 30), OK, "2048 MiB"),
    (devices.judge_memlock(1 << 16, 1 << 30), WARNING, "1024 MiB may have to be locked, and RLIMIT_MEMLOCK is 64 KiB"),
    (devices.judge_mbind(None, 2), OK, "works"),
    (devices.judge_seccomp(may_make_root=False), OK, "in the way"),
    (devices.judge_seccomp(may_make_root=True), WARNING, "no seccomp profile"),
    (devices.judge_mbind(OSError(errno.EPERM, "Operation not permitted"), 1), OK, "one NUMA node"),
    (devices.judge_mbind(OSError(errno.EPERM, "Operation not permitted"), 2), WARNING, "seccomp"),
    (devices.judge_mbind(ERROR_NO_MEMORY, 2), UNKNOWN, "Cannot allocate memory"),
    (program(programs.qemu, "/q", "10.0.2"), OK, "/q 10.0.2"),
    (program(programs.qemu, "/q", "", "QEMU 6.2.0 is older than 7.2"), ERROR, "older"),
    (program(programs.qemu, None), ERROR, "cannot find the program 'qemu-system-x86_64' in PATH"),
    (program(programs.dnsmasq, None), WARNING, "cannot find"),
    (dnsmasq("Dnsmasq version 2.90 Compile time options: IPv6 no-DHCP TFTP"), WARNING, "/d: it was built without DHCP"),
    (dnsmasq("Dnsmasq version 2.90 Compile time options: IPv6 DHCP no-DHCPv6 TFTP"), OK, "/d 2.90"),
    (program(programs.sleep, "/bin/sleep"), OK, "/bin/sleep"),
    (program(programs.sleep, None), ERROR, "cannot find"),
    (programs.judge_virtiofsd(Virtiofsd(PurePosixPath("/v"), rust=True, version=(1, 13)), "", "install it"), OK, "/v 1.13 (in Rust)"),
    (programs.judge_virtiofsd(Virtiofsd(PurePosixPath("/v"), rust=False, version=(7, 2)), "", "install it"), OK, "cannot share read-only"),
    (programs.judge_virtiofsd(None, "not found", "install it"), WARNING, "not found"),
    (node.judge_cpu_manager("/s", STATIC, ""), OK, "static; shared pool '0-1', exclusive '2-3'"),
    (node.judge_cpu_manager("/s", CpuState("static", CpuSet([0])), ""), WARNING, "the shared pool is '0'"),
    (node.judge_cpu_manager("/s", CpuState("none", CpuSet()), ""), ERROR, "policy is 'none'"),
    (
        node.judge_cpu_manager("/s", CpuState("none", CpuSet([0, 1]), {"a": {"vm": CpuSet([2])}}), ""),
        OK,
        "policy 'none', and a DRA driver gives CPUs by resource claims: shared pool '0-1', exclusive '2'",
    ),
    (node.judge_cpu_manager("/s", CpuState("none", CpuSet([0])), "", has_driver=True), OK, "exclusive ''"),
    (controller({**STATUS, "kubelet": True, "policy": "none"}), ERROR, "gives no exclusive CPUs"),
    (controller({**STATUS, "kubelet": True, "policy": "none", "claims": True}), OK, "float has CPUs '0-1'"),
    (node.judge_cpu_manager("/s", Frozen("cannot use /s: it is empty"), ""), ERROR, "it is empty"),
    (node.judge_cpu_manager("/s", Frozen(""), "Permission denied"), UNKNOWN, "Permission denied"),
    (node.judge_memory_manager("Static", {0: 1 << 30, 1: 0}, ""), OK, "1024 MiB on NUMA node 0, 0 MiB on NUMA node 1"),
    (node.judge_memory_manager("None", {}, ""), WARNING, "'None'"),
    (node.judge_memory_manager("", {}, "Permission denied"), UNKNOWN, "Permission denied"),
    (controller(STATUS), OK, "float has CPUs '0-1'"),
    (controller(None), WARNING, "there is no /run/c, where its socket would be"),
    (controller(None, NODE), WARNING, "there is no /run/c"),
    (controller(None, MACHINE), WARNING, "there is no /run/c"),
    (controller("Connection refused"), ERROR, "Connection refused"),
    (controller("Connection refused", NODE), ERROR, "Connection refused"),
    (controller("Connection refused", POD, "affinity"), WARNING, "Connection refused"),
    (controller("Connection refused", CONTAINER), WARNING, "Connection refused"),
    (controller("Connection refused", CONTAINER, "controller"), ERROR, "Connection refused"),
    (controller({**STATUS, "protocol": 2}), ERROR, "protocol 2"),
    (controller({**STATUS, "frozen": "the file is empty"}), ERROR, "the file is empty"),
    (controller({**STATUS, "policy": "none"}), ERROR, "no exclusive CPUs"),
    (controller({**STATUS, "faults": ["one", "two"]}), WARNING, "one"),
    (controller({**STATUS, "trusting": True}), WARNING, "trusts any process"),
    (controller({**STATUS, "partitions": "they are off"}), OK, "guarantee arranged (they are off)"),
    (controller({**STATUS, "partitions": "enforced", "arranged": []}), OK, "guarantee enforced"),
    (
        controller({**STATUS, "partitions": "enforced", "arranged": [{"uuid": "a", "reason": "the kernel refuses"}]}),
        WARNING,
        "the guarantee of instance a is arranged, not enforced: the kernel refuses",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("finding", "level", "word"), CASES)
def test_a_check_in_each_of_its_levels(finding: Judgement, level: Level, word: str) -> None:
    assert (finding.level, word in finding.found) == (level, True), finding
    assert finding.why
    assert finding.remedy or level in {OK, UNKNOWN}, "a finding below ok has a remedy"
    assert not (finding.remedy and level is OK)


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (
            devices.judge_kvm(Kvm("/dev/kvm: Permission denied")),
            "let every user open it, on the node, by a rule of udev",
        ),
        (devices.judge_kvm(Kvm("/dev/kvm: No such file or directory")), "give the container the device"),
        (
            device(devices.tun, POD, "/dev/net/tun", "Permission denied"),
            "let every user open it",
        ),
        (
            device(devices.tun, POD, "/dev/net/tun", "No such file"),
            "give the container the device",
        ),
    ],
)
def test_the_remedy_for_a_node_that_its_mode_forbids_is_its_mode(finding: Judgement, expected: str) -> None:
    """In a user namespace root is not the owner of the machine's device nodes."""
    assert finding.remedy.startswith(expected)


def test_every_check_was_judged() -> None:
    assert {check.name for check in CHECKS} == {judged.subject for judged, _, _ in CASES} | {"topology-manager"}
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_each_fault_and_each_arranged_instance_is_a_judgement_of_its_own() -> None:
    arranged = [{"uuid": uid, "reason": "the kernel refuses"} for uid in ("a", "b")]
    status = {**STATUS, "faults": ["one", "two"], "remedies": {"two": "do that"}, "partitions": "enforced"}
    status["arranged"] = arranged
    found = list(node.judge_controller(POD, "/run/c/controller.sock", status, "auto"))
    assert [each.level for each in found] == [WARNING] * 4
    assert [each.found for each in found][:2] == ["one", "two"]
    assert (found[0].remedy.partition(" ")[0], found[1].remedy) == ("fix", "do that")


def test_what_an_old_kernel_lacks_is_a_judgement_each() -> None:
    found = losses("5.15.0")
    assert [each.found.split()[3] for each in found] == ["5.16", "6.2", "6.4", "6.5", "6.7"]
    *sentences, why, remedy = judgement_lines(found)
    assert [line.split()[:2] for line in sentences] == [["warning", "kernel"]] * 5
    assert (why.split()[0], remedy.split()[0]) == ("why", "fix"), "they share both"


@pytest.mark.parametrize(
    ("in_initial_pid_namespace", "has_kubelet", "in_pod", "place"),
    [
        (True, True, False, NODE),
        (True, True, True, NODE),  # the controller's pod
        (True, False, True, POD),  # hostPID, which judge_pid_namespace refuses
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
        kernel.judge_clock("tsc"),
        kernel.judge_clock("hpet"),
        kernel.judge_clock(""),
    ),
)


def test_the_text_report_ends_with_the_worst() -> None:
    lines = list(report_lines(REPORT, colour=False))
    assert lines[:2] == [
        "ok       clocksource  the clock is tsc",
        "unknown  clocksource  the kernel does not say which clock it uses",
    ]
    assert lines[-4].startswith("error    own-cpus     the pod is Burstable")
    assert lines[-3].split(maxsplit=1)[0] == "why"
    assert lines[-2].split(maxsplit=1)[0] == "fix"
    assert lines[-1] == "pod: 1 error, 1 warning, 1 unknown, 1 ok"
    assert "\x1b" not in "".join(lines)
    assert "\x1b[1;31merror  \x1b[0m" in "".join(report_lines(REPORT, colour=True))


def test_json_has_every_judgement_in_order() -> None:
    plain = fitting("check", REPORT.to_json())
    assert {key: plain[key] for key in ("version", "place", "verdict")} == {
        "version": 2,
        "place": "pod",
        "verdict": "error",
    }
    assert [each["level"] for each in plain["judgements"]] == ["error", "ok", "warning", "unknown"]
    assert set(plain["judgements"][0]) == {"subject", "level", "found", "why", "remedy"}
    assert CheckReport(POD, ()).verdict is OK


def test_the_remedy_for_missing_huge_pages_names_the_state_file_that_a_kubelet_would_not_start_with() -> None:
    assert "memory_manager_state" in hugepages("1", 3, 0)[0].remedy


def test_a_remedy_is_for_all_that_were_found() -> None:
    slices = [CpuNeighbour(f"{name}.slice", ALL) for name in ("system", "user")]
    assert cpus.judge_neighbours(slices[:1], SOME, CpuSet([0])).remedy.startswith(
        "systemctl set-property --runtime system.slice AllowedCPUs=0, and"
    )
    assert cpus.judge_neighbours(slices, SOME, CpuSet([0])).remedy.startswith(
        "for i in system.slice user.slice; do systemctl set-property --runtime $i AllowedCPUs=0; done, and"
    )
    several = cpus.judge_interrupts([interrupt(i, "nvme", SOME) for i in (8, 9)], SOME, ALL)
    assert "for i in 8 9; do echo 0-1,4-7 > /proc/irq/$i/smp_affinity_list; done" in several.remedy
    thousand = cpus.judge_interrupts([interrupt(i, "nvme", SOME) for i in range(1000)], SOME, ALL)
    assert "for i in $(cd /proc/irq && ls -d [0-9]*); do echo 0-1,4-7 > /proc/irq/$i/" in thousand.remedy
    assert len(thousand.remedy) < 400
    assert [each.found.partition(" (")[0][-11:] for each in hugepages("0-1", 0, 0)] == ["NUMA node 0", "NUMA node 1"]
