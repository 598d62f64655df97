from __future__ import annotations

from pathlib import PurePosixPath

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.errors import SpecError
from runner.facts.disk import FileFact
from runner.facts.host import PODS_USERS, Kvm, Virtiofsd
from runner.plan.instance import share_grace
from tests.support.plans import FACTS, KERNEL, POD, plan_of, problems


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
            KERNEL + '[[share]]\ntag="a"\npath="/proc/sys"\n',
            {"files": {**FACTS.files, PurePosixPath("/proc/sys"): FileFact("directory")}},
            "share[0].path: '/proc/sys' is the kernel's, not a file",
        ),
        (KERNEL + '[console]\nlog = "/sys/kernel/x"\n', {}, "console.log: '/sys/kernel/x' is the kernel's, not a file"),
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


def test_a_kernel_qemu_may_not_read_is_copied() -> None:
    text = '[boot]\nkernel = "/boot/private"\ninitrd = "/boot/initrd"\n'
    machine = plan_of(text).machine
    assert machine.kernel is not None
    assert machine.initrd is not None
    assert (machine.kernel.copied, machine.initrd.copied) == (True, False)


@given(st.floats(1, 3600))
def test_the_grace_period_is_divided_whole(grace: float) -> None:
    plan = share_grace(grace, 10)
    assert plan.power_down + plan.forced == pytest.approx(grace)
    assert min(plan.power_down, plan.quit, plan.terminate) > 0
    assert plan.power_down >= 0.9 * grace - 1e-9


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
