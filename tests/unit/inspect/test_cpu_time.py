"""The time of tasks on a CPU, and the verdict about it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.inspect.cpu_time import IDLE, RECORDED, CpuAccount, CpuTimes, InstanceTrace, TaskTime, TraceReport
from runner.inspect.observation import ObservedGuarantee
from runner.inspect.trace_render import trace_json, trace_lines
from tests.support.json_schemas import fitting
from tests.support.program_runs import PROJECT

UID = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
VCPU = 11


def times(*switches: tuple[int, int, int], begin: int = 100, end: int = 200, runs: int = IDLE) -> CpuTimes:
    found = CpuTimes(begin)
    for time, previous, following in switches:
        found.switch(time, previous, f"task {previous}", following, f"task {following}")
    found.finish(end, runs)
    return found


def test_every_nanosecond_of_the_window_belongs_to_a_task() -> None:
    found = times((110, VCPU, IDLE), (150, IDLE, 7), (160, 7, VCPU))
    assert found.nanoseconds == {VCPU: 10 + 40, IDLE: 40, 7: 10}
    assert (found.unknown, found.names[7], found.first_seen[7]) == (0, "task 7", 160)


def test_what_is_outside_of_the_window_does_not_count() -> None:
    found = CpuTimes(100, end=200)
    for time, previous, following in ((90, 5, 6), (130, 6, IDLE), (190, IDLE, 6), (220, 6, 8)):
        found.switch(time, previous, "", following, "")
    found.finish(200, IDLE)
    assert +found.nanoseconds == {6: 30 + 10, IDLE: 60}


@pytest.mark.parametrize("runs", [IDLE, VCPU, 9])
def test_a_cpu_without_a_switch_ran_one_task(runs: int) -> None:
    found = times(runs=runs)
    assert not found.has_switched
    assert found.nanoseconds == {runs: 100}


def test_what_ran_while_events_were_lost_is_not_known() -> None:
    found = CpuTimes(100)
    found.switch(110, VCPU, "", IDLE, "")
    found.lose()
    found.switch(150, 7, "", VCPU, "")
    found.finish(200, IDLE)
    assert (found.nanoseconds, found.unknown) == ({VCPU: 10 + 50}, 40)
    found = CpuTimes(100)
    found.lose()
    found.finish(200, IDLE)
    assert (+found.nanoseconds, found.unknown) == ({}, 100)


def test_a_thread_that_executes_a_program_gets_the_number_of_its_process() -> None:
    assert times((110, IDLE, 8), (120, 7, IDLE)).nanoseconds == {IDLE: 10 + 80, 7: 10}


ACCOUNT = CpuAccount(
    cpu=2,
    vcpu=0,
    vcpu_nanoseconds=600_000_000,
    idle_nanoseconds=399_999_000,
    kernel=(TaskTime("migration/2", 27, 27, "/", True, 1000),),
    others=(),
    other_nanoseconds=0,
)
INSTANCE = InstanceTrace(UID, "controller", ObservedGuarantee("enforced"), CpuSet([2]), (ACCOUNT,), ended=False)
LOOP = TaskTime("py\\nthon", 300, 301, "/kubepods/other", False, 5000)
WORKER = TaskTime("kworker/u8:1", 40, 40, "", True, 300)


def report(*, source: str = "sched_switch", ended: bool = False, **account: Any) -> TraceReport:
    instance = attrs.evolve(INSTANCE, accounts=(attrs.evolve(ACCOUNT, **account),), ended=ended)
    found = TraceReport("node", 1_000_000_000, "sched_switch", "", (instance,))
    return found if source == "sched_switch" else attrs.evolve(found, source="schedstat", fallback="no tracefs")


def verdict(found: TraceReport) -> tuple[str, tuple[str, ...]]:
    judgements = found.judgements(found.instances[0])
    assert {each.subject for each in judgements} == {"trace"}
    return found.verdict.value, tuple(each.found for each in judgements)


def test_nothing_but_the_vcpu_and_bound_kernel_threads() -> None:
    assert verdict(report()) == (
        "ok",
        ("0 ns of any other task on the CPUs '2'; 1000 ns of kernel threads bound to one of them",),
    )


def test_every_other_task_is_named_the_longest_first() -> None:
    assert verdict(report(others=(WORKER, LOOP), other_nanoseconds=5300)) == (
        "error",
        (
            "'py\\\\nthon' (thread 301 of process 300) in the cgroup '/kubepods/other' ran 5000 ns on CPU 2",
            "'kworker/u8:1' (thread 40 of process 40) in a cgroup that is not known ran 300 ns on CPU 2",
        ),
    )
    many = tuple(attrs.evolve(LOOP, tid=tid) for tid in range(15))
    result, reasons = verdict(report(others=many, other_nanoseconds=75000))
    assert (result, len(reasons)) == ("error", 15)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"lost_events": 3, "unknown_nanoseconds": 40},
            "3 events of CPU 2 were lost: what ran there for 40 ns is not known",
        ),
        ({"vcpu": None}, "there is no vCPU thread: the instance starts, or has ended"),
        ({"ended": True}, "the instance ended meanwhile"),
    ],
)
def test_what_was_not_seen_is_not_judged(change: dict[str, Any], reason: str) -> None:
    assert verdict(report(**change)) == ("unknown", (reason,))
    result, reasons = verdict(report(**change, others=(LOOP,), other_nanoseconds=5000))
    assert (result, reasons[-1]) == ("error", reason)


def test_a_sum_proves_nothing_below_its_tolerance() -> None:
    small = verdict(report(source="schedstat", others=None, other_nanoseconds=1_000_000))
    assert small == (
        "unknown",
        ("1000000 ns of other tasks, by sums that name none and prove nothing below 1/1000 of the time",),
    )
    result, reasons = verdict(report(source="schedstat", others=None, other_nanoseconds=1_000_001))
    assert (result, reasons[0]) == ("error", "other tasks ran 1000001 ns on CPU 2")


def test_the_table() -> None:
    lines = list(trace_lines(report(others=(LOOP, WORKER), other_nanoseconds=5300)))
    assert lines[:7] == [
        f"instance {UID}: CPUs '2', guarantee enforced, 1.000 s by sched_switch",
        "CPU  TASK          NAME          PID  TID  NANOSECONDS  SHARE     CGROUP",
        "2    vcpu 0                                600000000    60.0000%",
        "2    idle                                  399999000    39.9999%",
        "2    kernel        migration/2   27   27   1000         0.0001%   /",
        "2    other         py\\nthon      300  301  5000         0.0005%   /kubepods/other",
        "2    other kernel  kworker/u8:1  40   40   300          0.0000%   ?",
    ]
    assert lines[-1].startswith("Interrupts are no tasks")


def test_the_table_of_sums_says_why_it_has_no_names() -> None:
    lines = list(trace_lines(report(source="schedstat", others=None, other_nanoseconds=77, unknown_nanoseconds=5)))
    assert lines[0] == "no switch can be recorded, so these are sums: no tracefs"
    assert [line.split(maxsplit=1)[1] for line in lines if "kubectl" in line] == [RECORDED]
    runbook = (PROJECT / "examples/kubernetes/operate.md").read_text().replace("\\\n    ", "")
    assert f"$ {RECORDED.partition(': ')[2]}\n" in runbook
    assert [line.split()[:3] for line in lines if line.startswith("2 ")][-2:] == [
        ["2", "others", "77"],
        ["2", "unknown", "5"],
    ]
    assert list(trace_lines(attrs.evolve(report(), instances=()))) == [
        "no instance is placed by the controller here; others are inspected in their containers"
    ]


def test_the_json() -> None:
    document = fitting("trace", trace_json(report(others=(WORKER,), other_nanoseconds=300)))
    assert {key: value for key, value in document.items() if key != "instances"} == {
        "version": 2,
        "seen_from": "node",
        "verdict": "error",
        "nanoseconds": 1_000_000_000,
        "source": "sched_switch",
        "fallback": None,
    }
    [instance] = document["instances"]
    assert (instance["name"], instance["guarantee"], instance["cpus"]) == (UID, "enforced", "2")
    assert instance["accounts"] == [
        {
            "cpu": 2,
            "vcpu": 0,
            "vcpu_ns": 600_000_000,
            "idle_ns": 399_999_000,
            "kernel": [{"name": "migration/2", "pid": 27, "tid": 27, "cgroup": "/", "kernel": True, "ns": 1000}],
            "others": [{"name": "kworker/u8:1", "pid": 40, "tid": 40, "cgroup": None, "kernel": True, "ns": 300}],
            "other_ns": 300,
            "unknown_ns": 0,
            "lost_events": 0,
        }
    ]
    assert instance["judgements"][0]["level"] == "error"
    assert trace_json(report(source="schedstat", others=None))["instances"][0]["accounts"][0]["others"] is None
