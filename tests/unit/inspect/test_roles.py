"""The roles of a container's processes and threads, by the receipt."""

from __future__ import annotations

from runner.base.cpuset import CpuSet
from runner.facts.threads import ProcessStatus, ThreadStatus
from runner.inspect.roles import Roles
from runner.placement.children import Role
from runner.placement.threads import ObservedThread, Receipt, ThreadRules


def status(pid: int, tid: int, name: str) -> ThreadStatus:
    return ThreadStatus(pid, tid, name, "/", CpuSet([1]), CpuSet([0]), 1)


def placed(role: str, pid: int, tid: int, name: str, vcpu: int | None = None) -> ObservedThread:
    return ObservedThread(Role(role), vcpu, status(pid, tid, name))


ROLES = Roles.of(
    Receipt(
        "affinity",
        ThreadRules(CpuSet([2, 3]), (2, 3), shared=False, cgroups=None),
        (
            placed("runner", 1, 1, "instance-runner"),
            placed("anchor", 6, 6, "sleep"),
            placed("dnsmasq", 8, 8, "dnsmasq"),
            placed("emulator", 10, 10, "qemu-system-x86"),
            placed("iothread", 10, 13, "IO disk0"),
            placed("vcpu", 10, 14, "CPU 0/KVM", 0),
            placed("vcpu", 10, 15, "CPU 1/KVM", 1),
        ),
    )
)


def test_the_receipt_names_the_runner_qemu_and_its_threads() -> None:
    assert (ROLES.runner, ROLES.qemu) == (1, 10)
    assert ROLES.vcpus == {14: 0, 15: 1}
    threads = [(10, "emulator", None), (13, "iothread", None), (15, "vcpu", 1), (99, "emulator", None)]
    for tid, role, vcpu in threads:
        found = ROLES.of_thread(Role.EMULATOR, status(10, tid, "x"))
        assert (found.role, found.vcpu) == (role, vcpu)
    assert ROLES.of_thread(Role.OTHER, status(60, 14, "x")).role is Role.OTHER, "of another process"


def role(pid: int, parent: int, name: str, *, is_sleep_infinity: bool = False) -> str | None:
    process = ProcessStatus(pid, pid, parent, name, kernel=False)
    return ROLES.of_process(process, is_sleep_infinity=is_sleep_infinity)


def test_a_process_is_recognised_by_its_pid_and_name() -> None:
    assert role(8, 1, "dnsmasq") == "dnsmasq"
    assert role(8, 0, "sh") is None, "another process has the number now"


def test_restarted_children_are_recognised_by_their_parent() -> None:
    assert role(77, 1, "sleep", is_sleep_infinity=True) == "anchor"
    assert role(78, 1, "dnsmasq") == "dnsmasq"
    assert role(79, 60, "sleep", is_sleep_infinity=True) is None
    assert role(80, 1, "sleep") is None, "an orphan that is no sleep infinity"
    assert role(81, 1, "sh") is None
