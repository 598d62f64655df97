"""Who is who by the receipt, and what is no receipt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.cpuset import CpuSet
from runner.errors import UsageError
from runner.inspect.receipt import Roles, parse_receipt
from runner.instance.thread_placement import PlacedThread, Receipt
from runner.kernel.procfs import ProcessStatus, ThreadStatus
from runner.placement.backends import AffinityPlacement


def placed(role: str, pid: int, tid: int, name: str, vcpu: int | None = None) -> PlacedThread:
    return PlacedThread(role, vcpu, ThreadStatus(pid, tid, name, "/", CpuSet([1]), CpuSet([0]), 1))


RECEIPT = Receipt(
    AffinityPlacement(CpuSet([2, 3]), (2, 3), CpuSet([0, 1]), shared=False),
    None,
    (
        placed("runner", 1, 1, "instance-runner"),
        placed("anchor", 6, 6, "sleep"),
        placed("dnsmasq", 8, 8, "dnsmasq"),
        placed("emulator", 10, 10, "qemu-system-x86"),
        placed("emulator", 10, 13, "IO mon_iothread"),
        placed("vcpu", 10, 14, "CPU 0/KVM", 0),
        placed("vcpu", 10, 15, "CPU 1/KVM", 1),
    ),
).to_json()


def roles(**more: object) -> Roles:
    return parse_receipt(json.dumps({**RECEIPT, **more}), "receipt.json")


def test_the_runners_own_receipt_is_understood() -> None:
    found = roles()
    assert (found.backend, found.cpus, found.instance_cgroup) == ("affinity", CpuSet([2, 3]), "")
    assert (found.runner, found.machine) == (1, 10)
    assert found.vcpus == {14: 0, 15: 1}


def test_cgroups_may_be_named_or_absent() -> None:
    assert roles(cgroups={"pod": "/pod", "floating": "/f", "instance": "/i"}).instance_cgroup == "/i"
    assert roles(cgroups={"pod": "/pod", "floating": None, "instance": None}).instance_cgroup == ""
    assert roles(cgroups=None).instance_cgroup == ""


def role(pid: int, parent: int, name: str, *, is_sleep_infinity: bool = False) -> str | None:
    return roles().of_process(ProcessStatus(pid, pid, parent, name, kernel=False), is_sleep_infinity=is_sleep_infinity)


def test_a_process_is_known_by_its_number_and_name() -> None:
    assert role(8, 1, "dnsmasq") == "dnsmasq"
    assert role(8, 0, "sh") is None, "another process has the number now"


def test_children_that_were_started_again_are_known_by_their_parent() -> None:
    assert role(77, 1, "sleep", is_sleep_infinity=True) == "anchor"
    assert role(78, 1, "dnsmasq") == "dnsmasq"
    assert role(79, 60, "sleep", is_sleep_infinity=True) is None
    assert role(80, 1, "sleep") is None, "an orphan that will wake up"
    assert role(81, 1, "sh") is None


@pytest.mark.parametrize("document", ["", "[]", "null", "{}", "7", '{"version": 1}', '{"version": 1, "threads": [1]}'])
def test_what_is_no_receipt(document: str) -> None:
    with pytest.raises(UsageError, match=r"cannot use receipt.json: it is no receipt"):
        parse_receipt(document, "receipt.json")


@pytest.mark.parametrize("change", [{"instance_cpus": "x"}, {"threads": 3}, {"backend": None, "threads": None}])
def test_a_receipt_with_something_else_in_it(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"cannot use receipt.json"):
        roles(**change)


def test_a_receipt_of_another_version() -> None:
    with pytest.raises(UsageError, match="its version is 2, not 1"):
        roles(version=2)
