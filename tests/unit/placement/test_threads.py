"""The rules for the places of threads, their violations, and the receipt as JSON."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import UsageError
from runner.facts.threads import ThreadStatus
from runner.placement.children import Role, role_of_child
from runner.placement.threads import (
    UNNAMED,
    CgroupPaths,
    ObservedThread,
    Receipt,
    ReceiptNames,
    ThreadRules,
    parse_receipt,
    sentences,
)
from runner.spec.instance import parse_instance

CGROUPS = CgroupPaths("/pod", "/stelia/float", "/stelia/instance-a")
AFFINITY = ThreadRules(CpuSet([2, 3]), (3, 2), shared=False, cgroups=None)
RULES = attrs.evolve(AFFINITY, cgroups=CGROUPS)


def placed(
    role: Role, tid: int, cpus: str = "0-1", vcpu: int | None = None, cgroup: str = "", pid: int = 0
) -> ObservedThread:
    status = ThreadStatus(pid or tid, tid, role.value, cgroup, CpuSet.parse(cpus), CpuSet([0]), min(CpuSet.parse(cpus)))
    return ObservedThread(role, vcpu, status)


def grouped(role: Role, tid: int, cpus: str = "0-1", vcpu: int | None = None, pid: int = 0) -> ObservedThread:
    """Return a thread in the cgroup of its role."""
    return placed(role, tid, cpus, vcpu, CGROUPS.of(role), pid)


VCPUS = (grouped(Role.VCPU, 14, "3", 0, pid=10), grouped(Role.VCPU, 15, "2", 1, pid=10))
THREADS = (
    grouped(Role.RUNNER, 1),
    grouped(Role.ANCHOR, 6, "2-3"),
    grouped(Role.DNSMASQ, 8),
    grouped(Role.VIRTIOFSD, 9),
    grouped(Role.EMULATOR, 10),
    grouped(Role.IOTHREAD, 13, pid=10),
    *VCPUS,
)
RECEIPT = Receipt("controller", RULES, THREADS)


def violations_of(rules: ThreadRules, *threads: ObservedThread) -> list[str]:
    return list(sentences(rules.violations((*VCPUS, *threads))))


def test_correctly_placed_threads_violate_nothing() -> None:
    assert RECEIPT.violations() == ()


@pytest.mark.parametrize(
    ("thread", "sentence"),
    [
        (grouped(Role.RUNNER, 1, "0-2"), "runner (thread 1, 'runner') in the cgroup '/stelia/float' may run on '2'"),
        (
            grouped(Role.IOTHREAD, 13, "3"),
            "iothread (thread 13, 'iothread') in the cgroup '/stelia/float' may run on '3'",
        ),
        (placed(Role.PASST, 9, cgroup="/pod"), "is in the cgroup '/pod' instead of '/stelia/float'"),
        (placed(Role.ANCHOR, 6, cgroup="/stelia/float"), "is in the cgroup '/stelia/float' instead of '/pod'"),
        (placed(Role.EMULATOR, 10, cgroup="/x/stelia/float"), "instead of '/stelia/float'"),
        (placed(Role.OTHER, 70, "2-3"), "other (thread 70, 'other') may run on '2-3', which belong to vCPUs"),
    ],
)
def test_a_thread_that_breaks_a_rule(thread: ObservedThread, sentence: str) -> None:
    [found] = violations_of(RULES, thread)
    assert sentence in found


@pytest.mark.parametrize(
    ("vcpu", "sentences_"),
    [
        (grouped(Role.VCPU, 15, "3", 1), ["vcpu 1 (thread 15, 'vcpu') may run on '3' instead of '2'"]),
        (grouped(Role.VCPU, 15, "2-3", 1), ["vcpu 1 (thread 15, 'vcpu') may run on '2-3' instead of '2'"]),
        (
            placed(Role.VCPU, 15, "2", 1, "/stelia/float"),
            ["vcpu 1 (thread 15, 'vcpu') is in the cgroup '/stelia/float' instead of '/stelia/instance-a'"],
        ),
        (grouped(Role.EMULATOR, 16), ["vCPU 1 has no thread"]),
    ],
)
def test_a_vcpu_thread_has_its_pin_and_its_cgroup(vcpu: ObservedThread, sentences_: list[str]) -> None:
    assert list(sentences(RULES.violations((VCPUS[0], vcpu)))) == sentences_


def test_an_index_that_no_vcpu_has() -> None:
    """A QEMU with other thread names, or with other vCPUs than the plan's, has such a thread."""
    strange = grouped(Role.VCPU, 15, "2", 999_999_999)
    assert list(sentences(RULES.violations((VCPUS[0], strange)))) == ["vCPU 1 has no thread"]


def test_without_pins_two_vcpus_may_not_have_one_cpu() -> None:
    rules = attrs.evolve(RULES, pins=(None, None))
    assert rules.violations(VCPUS) == ()
    both = (VCPUS[0], grouped(Role.VCPU, 15, "3", 1))
    assert list(sentences(rules.violations(both))) == ["2 vCPU threads share CPU 3"]


def test_a_thread_in_float_with_a_mask_of_its_own_is_named() -> None:
    """Linux keeps a mask in every cgroup: what the container runtime has from its unit, the instance's threads would have."""
    narrow = [grouped(Role.EMULATOR, tid, "0", pid=10) for tid in (10, 11)]
    assert violations_of(RULES, grouped(Role.RUNNER, 1), *narrow, grouped(Role.DNSMASQ, 8, "1")) == [
        "emulator (thread 10, 'emulator') and 1 more of process 10 may run on '0' alone of float's CPUs '0-1': it has a CPU mask",
        "dnsmasq (thread 8, 'dnsmasq') may run on '1' alone of float's CPUs '0-1': it has a CPU mask",
    ]
    assert violations_of(AFFINITY, placed(Role.RUNNER, 1), placed(Role.EMULATOR, 10, "0")) == []


def test_the_threads_of_one_process_share_a_sentence() -> None:
    threads = [placed(Role.EMULATOR, tid, cpus, pid=10) for tid, cpus in ((10, "2"), (11, "0-1"), (12, "3"))]
    assert violations_of(AFFINITY, *threads) == [
        "emulator (thread 10, 'emulator') and 1 more of process 10 may run on '2-3', which belong to vCPUs"
    ]


def test_an_anchor_may_have_the_vcpus_cpus_only_in_a_cgroup_of_its_own() -> None:
    assert violations_of(RULES, grouped(Role.ANCHOR, 6, "2-3")) == []
    assert violations_of(AFFINITY, placed(Role.ANCHOR, 6, "2-3")) != []


def test_where_the_cpus_are_shared_everything_may_run_on_them() -> None:
    shared = attrs.evolve(RULES, shared=True)
    assert violations_of(shared, grouped(Role.EMULATOR, 10, "2-3")) == []
    assert violations_of(shared, placed(Role.EMULATOR, 10, "2-3", cgroup="/pod")) != [], "but not in any cgroup"


def test_kernel_threads_are_exempt_unless_they_are_in_a_cgroup() -> None:
    kworker = attrs.evolve(placed(Role.OTHER, 30, "2", cgroup="/"), kernel=True)
    assert violations_of(RULES, kworker) == []
    vhost = attrs.evolve(placed(Role.OTHER, 30, "2", cgroup="/pod"), kernel=True)
    assert violations_of(RULES, vhost) != []


@pytest.mark.parametrize(
    ("rules", "thread", "started_by_vcpu"),
    [
        (RULES, placed(Role.EMULATOR, 16, "2-3", cgroup="/stelia/instance-a"), True),
        (RULES, grouped(Role.EMULATOR, 16, "2"), False),
        (RULES, VCPUS[0], False),
        (AFFINITY, placed(Role.EMULATOR, 16, "2"), True),
        (AFFINITY, placed(Role.EMULATOR, 16, "0"), False),
        (AFFINITY, placed(Role.EMULATOR, 16, "2-3"), False),
        (attrs.evolve(AFFINITY, shared=True), placed(Role.EMULATOR, 16, "2"), False),
    ],
)
def test_a_thread_starts_where_its_parent_is(
    rules: ThreadRules, thread: ObservedThread, *, started_by_vcpu: bool
) -> None:
    assert rules.is_child_of_vcpu(thread) is started_by_vcpu


@pytest.mark.parametrize(
    ("name", "role"),
    [("qemu", "emulator"), ("anchor", "anchor"), ("passt", "passt"), ("virtiofsd", "virtiofsd"), ("mkfs", "runner")],
)
def test_the_role_of_a_child(name: str, role: str) -> None:
    assert role_of_child(name) == role


# -- the receipt -----------------------------------------------------------------------------------------------------


def parsed(**more: object) -> Receipt:
    return parse_receipt(json.dumps({**RECEIPT.to_json(), **more}), "receipt.json")[0]


def test_a_receipt_is_read_back_as_written() -> None:
    assert parsed() == RECEIPT
    affinity = Receipt("affinity", AFFINITY, THREADS)
    assert parse_receipt(json.dumps(affinity.to_json()), "receipt.json")[0] == affinity


def test_the_anchors_show_whether_the_kernel_keeps_the_others_off() -> None:
    """They stay in the pod's cgroup, which names the exclusive CPUs alone; an older receipt has no guarantee."""
    assert (RECEIPT.guarantee, RECEIPT.to_json()["guarantee"]) == ("arranged", "arranged")
    sealed = tuple(grouped(each.role, each.thread.tid, "0-1") if each.role is Role.ANCHOR else each for each in THREADS)
    assert attrs.evolve(RECEIPT, threads=sealed).guarantee == "enforced"
    one_of_two = (*sealed, grouped(Role.ANCHOR, 7, "3"))
    assert attrs.evolve(RECEIPT, threads=one_of_two).guarantee == "arranged"
    none = tuple(each for each in THREADS if each.role is not Role.ANCHOR)
    assert attrs.evolve(RECEIPT, threads=none).guarantee == "arranged"
    assert Receipt("affinity", AFFINITY, sealed).guarantee == "arranged", "they are pinned off them"
    refused = attrs.evolve(RECEIPT, guarantee_reason="the kernel is old")
    assert parse_receipt(json.dumps(refused.to_json()), "receipt.json")[0] == refused
    assert attrs.evolve(refused, threads=sealed).to_json()["guarantee_reason"] == ""
    assert parsed(guarantee=None).guarantee_reason == ""


def test_a_receipt_has_the_cpus_of_float() -> None:
    assert (RECEIPT.to_json()["instance_cpus"], RECEIPT.to_json()["float_cpus"]) == ("2-3", "0-1")


def test_cgroups_may_be_named_or_absent() -> None:
    assert parsed(cgroups={"pod": "/pod", "floating": "/f", "instance": "/i"}).rules.cgroups == CgroupPaths(
        "/pod", "/f", "/i"
    )
    assert parsed(cgroups={"pod": "/pod", "floating": None, "instance": None}).rules.cgroups == CgroupPaths(
        "/pod", "", ""
    )
    assert parsed(cgroups=None).rules.cgroups is None


@pytest.mark.parametrize("document", ["", "[]", "null", "{}", "7", '{"version": 1}', '{"version": 1, "threads": [1]}'])
def test_a_malformed_receipt_is_refused(document: str) -> None:
    with pytest.raises(UsageError, match=r"cannot use receipt.json: it is no receipt"):
        parse_receipt(document, "receipt.json")


@pytest.mark.parametrize(
    "change",
    [
        {"instance_cpus": "x"},
        {"threads": 3},
        {"backend": None, "threads": None},
        {"backend": "best"},
        {"threads": [{**VCPUS[1].to_json()}]},
        {"threads": [{**VCPUS[0].to_json(), "allowed_cpus": ""}]},
        {"threads": [{**VCPUS[0].to_json(), "role": "cook"}]},
        {"pod": "web-1"},
        {"pod": {"name": "web-1", "uid": 1}},
    ],
)
def test_a_receipt_with_something_else_in_it(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"cannot use receipt.json"):
        parsed(**change)


def test_a_receipt_of_another_version() -> None:
    with pytest.raises(UsageError, match="its version is 2, not 1"):
        parsed(version=2)


POD = {"name": "web-1", "namespace": "prod", "node": "n1", "uid": "3ceda12c"}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ({}, ReceiptNames("instance", "", "")),
        ({"instance": "instance", "pod": dict.fromkeys(POD, "")}, ReceiptNames("instance", "", "")),
        ({"instance": "db", "pod": POD}, ReceiptNames("db", "prod/web-1", "3ceda12c")),
        ({"instance": "instance", "pod": POD}, ReceiptNames("web-1", "prod/web-1", "3ceda12c")),
        ({"instance": "instance", "pod": {**POD, "namespace": ""}}, ReceiptNames("web-1", "web-1", "3ceda12c")),
    ],
)
def test_an_instance_has_the_name_of_its_spec_or_else_of_its_pod(names: dict[str, Any], found: ReceiptNames) -> None:
    assert parse_receipt(json.dumps({**RECEIPT.to_json(), **names}), "receipt.json")[1] == found


def test_the_name_of_a_spec_without_one_is_known() -> None:
    assert parse_instance("spec.toml", b'[boot]\nkernel = "/k"\n').instance.name == UNNAMED
