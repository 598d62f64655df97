"""The output of inspect, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import Status
from runner.base.table import duration
from runner.cli.inspect import ReportFormatter
from runner.facts.memory_limits import MemoryCharge
from runner.facts.threads import ThreadStatus
from runner.inspect.cpu_settings import CpuSettings
from runner.inspect.observation import (
    GuestMemory,
    InstanceObservation,
    KubeletObservation,
    Observation,
    ObservedGuarantee,
    PodCharge,
    Unknown,
)
from runner.inspect.render import report_json, report_lines
from runner.inspect.rules import KUBELET as KUBELET_RULE
from runner.inspect.rules import InspectionReport, judge
from runner.placement.children import Role
from runner.placement.threads import CgroupPaths, ObservedThread, ThreadRules
from tests.support.json_schemas import fitting

MIB = 1 << 20


def thread(tid: int, name: str, cpus: str, running_on: int, cgroup: str) -> ThreadStatus:
    return ThreadStatus(10, tid, name, cgroup, CpuSet.parse(cpus), CpuSet([0, 1]), running_on)


GROUP = "/stelia/instance-3ceda12c-3ee9-40fa-9f42-61428fe654a6"
UID = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
INSTANCE = InstanceObservation(
    name="web-1",
    backend="controller",
    guarantee=ObservedGuarantee("arranged"),
    rules=ThreadRules(CpuSet([4]), (None,), shared=False, cgroups=CgroupPaths("", "/stelia/float", GROUP, ends=True)),
    numa_node_of={0: 0, 4: 1},
    threads=(
        ObservedThread(Role.EMULATOR, None, thread(10, "qemu-system-x86", "0", 0, "/stelia/float")),
        ObservedThread(Role.VCPU, 0, thread(14, "CPU 0/KVM", "4", 4, GROUP)),
    ),
    others=(),
    hidden="",
    memory=GuestMemory({0: 3 * MIB}, {1: 2 * MIB}),
    charge=PodCharge("/pod", MemoryCharge(3 * MIB, 2 * MIB)),
    settings=CpuSettings(("26 (nvme0q3)",), CpuSet(), ("2",), ("performance",)),
    pod="prod/web-1",
    pod_uid=UID,
    uptime=7500.0,
)
KUBELET = KubeletObservation((CpuSet([0]),), CpuSet([0]), CpuSet([0, 4]), {UID: CpuSet([4])}, None)
REPORT = judge(Observation("node", (INSTANCE,), KUBELET))

SHOWN = """\
INSTANCE  POD         UUID                                  CPUS  UPTIME     VERDICT
web-1     prod/web-1  3ceda12c-3ee9-40fa-9f42-61428fe654a6  4     2 h 5 min  error: local

instance web-1, pod prod/web-1, 3ceda12c-3ee9-40fa-9f42-61428fe654a6: CPUs '4' on NUMA node '1', placement controller, guarantee arranged
ROLE      TID  NAME             ALLOWED_CPUS  RUNNING_ON  NUMA_NODE  CGROUP
emulator  10   qemu-system-x86  0             0           0          /stelia/float
vcpu 0    14   CPU 0/KVM        4             4           1          /stelia/instance-3ceda12c-3ee9-40fa-9f42-61428fe654a6
ok       vcpus      vCPU threads: 1, each alone on one of the CPUs '4'
ok       exclusive  only sleepers (anchors: 0, pod sandboxes: 0) and kernel threads (bound to one CPU: 0, others, \
in no cgroup: 0) may run there besides the vCPUs
error    local      3 MiB on NUMA node 0, 2 MiB on NUMA node 1 of the guest's RAM is mapped; its CPUs are on '1'
                      why   memory of another NUMA node is slower by half
                      fix   set memory.bind = true, and start the instance again
ok       charged    the pod's cgroup is charged 3 MiB of memory and 2 MiB of huge pages
         settings   interrupts: 26 (nvme0q3); unbound work queues: none; idle states: up to 2 µs; governor: performance

ok       kubelet    float has '0', the kubelet's shared pool
"""


INTRUDER = "emulator (thread 10, 'qemu-system-x86') in the cgroup '/stelia/float' may run on '4', which belong to vCPUs"


def changed(report: InspectionReport, change: Callable[[ThreadStatus], ThreadStatus]) -> InspectionReport:
    """Return *report* with the emulator's thread changed."""
    threads = tuple(
        attrs.evolve(each, thread=change(each.thread)) if each.thread.tid == 10 else each
        for each in report.instances[0].observation.threads
    )
    instance = attrs.evolve(report.instances[0].observation, threads=threads)
    return judge(Observation("node", (instance,), KUBELET))


def test_the_table_and_its_judgements() -> None:
    assert ReportFormatter(as_json=False, redraw=False, repeated=False).text(REPORT) == SHOWN


def test_the_table_shows_some_of_many_judgements() -> None:
    others = tuple(
        ObservedThread(Role.OTHER, None, attrs.evolve(thread(n, "x", "4", 4, "/"), pid=n)) for n in range(20)
    )
    crowded = judge(Observation("node", (attrs.evolve(INSTANCE, others=others),), KUBELET))
    lines = list(report_lines(crowded))
    assert sum("'x'" in line for line in lines) == 12
    assert any(line.strip() == "and 8 more; --json names all" for line in lines)
    assert len(report_json(crowded)["instances"][0]["judgements"]) == 23


def test_the_list_says_what_is_not_known() -> None:
    unknown = attrs.evolve(INSTANCE, name=UID, pod="", uptime=None, memory=Unknown("no right"))
    lines = list(report_lines(judge(Observation("node", (unknown,), KUBELET))))
    assert lines[1].split() == ["-", "-", UID, "4", "-", "unknown:", "local,", "charged"]
    assert lines[3].startswith(f"instance {UID}: CPUs '4'")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min"), (90000, "1 d 1 h")],
)
def test_a_duration_has_its_two_largest_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_node_without_instances_says_where_to_look() -> None:
    empty = judge(Observation("node", (), Unknown("no file")))
    assert list(report_lines(empty)) == [
        "no instance is placed by the controller here; others are inspected in their containers",
        "unknown  kubelet    no file",
    ]


def test_json_has_the_same_content() -> None:
    report = fitting("inspect", report_json(REPORT))
    (instance,) = report.pop("instances")
    assert report == {
        "version": 2,
        "seen_from": "node",
        "verdict": "error",
        "judgements": [
            {
                "subject": "kubelet",
                "level": "ok",
                "found": "float has '0', the kubelet's shared pool",
                "why": KUBELET_RULE.why,
                "remedy": "",
            },
        ],
    }
    assert instance["threads"][1] == {
        "role": "vcpu",
        "vcpu": 0,
        "name": "CPU 0/KVM",
        "pid": 10,
        "tid": 14,
        "cgroup": GROUP,
        "allowed_cpus": "4",
        "allowed_mems": "0-1",
        "running_on": 4,
        "numa_node": 1,
    }
    assert (instance["cpus"], instance["numa_nodes"]) == ("4", "1")
    assert (instance["name"], instance["pod"], instance["pod_uid"], instance["uptime"]) == (
        "web-1",
        "prod/web-1",
        UID,
        7500,
    )
    assert instance["memory"] == {"small_pages": {"0": 3 * MIB}, "huge_pages": {"1": 2 * MIB}}
    assert instance["charge"] == {"cgroup": "/pod", "memory": 3 * MIB, "hugetlb": 2 * MIB}
    assert [each["subject"] for each in instance["judgements"]] == ["vcpus", "exclusive", "local", "charged"]


def test_watching_without_a_terminal_prints_changes_only() -> None:
    formatter = ReportFormatter(as_json=False, redraw=False, repeated=True)
    first = formatter.text(REPORT).splitlines()
    assert first[0] == "+ 3ceda12c emulator 10 'qemu-system-x86' may run on '0' in '/stelia/float'"
    assert all(line.startswith("+ ") for line in first)
    assert formatter.text(REPORT) == ""
    assert formatter.text(changed(REPORT, lambda thread: attrs.evolve(thread, running_on=4))) == "", (
        "where a thread ran last changes all the time"
    )
    unpinned = changed(REPORT, lambda thread: attrs.evolve(thread, cpus=CpuSet([0, 4])))
    assert formatter.text(unpinned).splitlines() == [
        "- 3ceda12c emulator 10 'qemu-system-x86' may run on '0' in '/stelia/float'",
        "- 3ceda12c exclusive ok",
        "+ 3ceda12c emulator 10 'qemu-system-x86' may run on '0,4' in '/stelia/float'",
        f"+ 3ceda12c exclusive error: {INTRUDER}",
    ]
    assert formatter.status is Status.FINDINGS


def test_watching_with_json_prints_one_document_a_line() -> None:
    formatter = ReportFormatter(as_json=True, redraw=True, repeated=True)
    assert json.loads(formatter.text(REPORT)) == report_json(REPORT)
    assert formatter.text(REPORT) == ""


def test_watching_on_a_terminal_draws_the_table_anew() -> None:
    formatter = ReportFormatter(as_json=False, redraw=True, repeated=True)
    assert formatter.text(REPORT) == formatter.text(REPORT) == "\x1b[H\x1b[2J" + SHOWN


@pytest.mark.parametrize(("redraw", "repeated"), [(False, False), (False, True), (True, True)])
def test_no_name_controls_the_terminal(*, redraw: bool, repeated: bool) -> None:
    """Any process may name itself so, and be on an instance's CPUs; a user's cgroup may be named so."""
    evil = ObservedThread(Role.EMULATOR, None, thread(11, "\x1b]0;x\x07", "0", 0, "/stelia/\x1b[2J\u2028x"))
    report = judge(Observation("node", (attrs.evolve(INSTANCE, threads=(*INSTANCE.threads, evil)),), KUBELET))
    shown = ReportFormatter(as_json=False, redraw=redraw, repeated=repeated).text(report).removeprefix("\x1b[H\x1b[2J")
    assert r"\x1b]0;x\x07" in shown.replace(r"\\", "\\")
    assert [line for line in shown.split("\n") if not line.isprintable()] == []
