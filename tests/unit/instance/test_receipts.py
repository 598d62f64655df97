"""The table that a start logs."""

from __future__ import annotations

from runner.base.cpuset import CpuSet
from runner.facts.threads import ThreadStatus
from runner.instance.watch.receipts import receipt_table
from runner.placement.children import Role
from runner.placement.threads import ObservedThread, Receipt, ThreadRules


def placed(role: Role, tid: int, cpus: str, running_on: int) -> ObservedThread:
    thread = ThreadStatus(10, tid, "sleep", "/", CpuSet.parse(cpus), CpuSet([0]), running_on)
    return ObservedThread(role, None, thread)


def test_a_thread_that_has_not_run_since_it_was_moved_runs_on_no_cpu() -> None:
    threads = (placed(Role.ANCHOR, 11, "0-1", 1), placed(Role.ANCHOR, 12, "0-1", 2))
    rules = ThreadRules(CpuSet([3]), (), shared=False, cgroups=None)
    table = receipt_table(Receipt("affinity", rules, threads))
    assert [line.split()[-1] for line in table.lines] == ["RUNNING_ON", "1", "-"]
    assert table.rows == [
        {"role": "anchor", "vcpu": None, "tid": 11, "name": "sleep", "allowed_cpus": "0-1", "running_on": 1},
        {"role": "anchor", "vcpu": None, "tid": 12, "name": "sleep", "allowed_cpus": "0-1", "running_on": None},
    ]
