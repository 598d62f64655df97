"""What is known of tasks that have ended, from the record of their births, moves and switches: pages as the kernel writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.facts.threads import ThreadStatus
from runner.inspect.cpu_time import IDLE, CpuTimes
from runner.inspect.task_table import KnownTask, TaskTable
from runner.inspect.trace import SwitchRecorder
from runner.kernel.procfs import Procfs
from runner.kernel.ring_buffer import EventFormat
from runner.kernel.tracefs import TraceInstance
from runner.placement.children import Role
from runner.placement.threads import ObservedThread
from tests.support.ring_buffer_pages import SIZE, event, page

FORK = EventFormat(11, {"parent_pid": (8, 4), "child_pid": (12, 4)})
ATTACH = EventFormat(12, {"dst_root": (8, 4), "pid": (12, 4), "dst_path": (16, 4)})
SWITCH = EventFormat(13, {"prev_comm": (8, 16), "prev_pid": (24, 4), "next_comm": (28, 16), "next_pid": (44, 4)})
PATH_AT = 20
"""Where the string of an ATTACH begins."""
MISSED = 1 << 31
SHELL, CHILD, GRANDCHILD, KTHREADD, VCPU = 100, 101, 102, 2, 7
KNOWN = {SHELL: KnownTask("sh", SHELL, "/pod", kernel=False, bound=False)}


def fork(delta: int, parent: int, child: int) -> bytes:
    return event(delta, FORK, parent_pid=parent, child_pid=child)


def attach(delta: int, tid: int, path: str, *, hierarchy: int = 0) -> bytes:
    text = path.encode() + b"\0"
    return event(delta, ATTACH, text, dst_root=hierarchy, pid=tid, dst_path=len(text) << 16 | PATH_AT)


def switch(delta: int, previous: int, name: str, following: int, following_name: str) -> bytes:
    values = {"prev_comm": name.encode(), "next_comm": following_name.encode()}
    return event(delta, SWITCH, prev_pid=previous, next_pid=following, **values)


class Trace:
    """A trace instance whose buffers are pipes."""

    def __init__(self, path: Path, formats: tuple[EventFormat, ...], cpus: tuple[int, ...], held: ExitStack) -> None:
        self.ends = {cpu: os.pipe2(os.O_NONBLOCK) for cpu in cpus}
        for fd in (fd for ends in self.ends.values() for fd in ends):
            held.callback(os.close, fd)
        path.mkdir()
        (path / "tracing_on").touch()
        for cpu in cpus:
            (path / f"per_cpu/cpu{cpu}").mkdir(parents=True)
            (path / f"per_cpu/cpu{cpu}/stats").write_text("entries: 9\noverrun: 2\ndropped events: 1\n")
        self.instance = TraceInstance(path, formats, cpus, {cpu: ends[0] for cpu, ends in self.ends.items()}, SIZE)

    def put(self, cpu: int, content: bytes) -> None:
        os.write(self.ends[cpu][1], content)


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Trace]:
    with ExitStack() as held:
        yield Trace(tmp_path / "tasks", (FORK, ATTACH), (0,), held)


@pytest.fixture
def table(tmp_path: Path, tasks: Trace) -> TaskTable:
    return TaskTable(Procfs(tmp_path / "proc"), tasks.instance, dict(KNOWN))


def test_an_ended_task_has_the_cgroup_of_its_ancestors_at_its_birth(tasks: Trace, table: TaskTable) -> None:
    tasks.put(0, page(1000, fork(10, SHELL, CHILD), fork(10, CHILD, GRANDCHILD), attach(10, SHELL, "/moved")))
    table.read()
    table.look_up([GRANDCHILD])
    assert table.task(GRANDCHILD, "loop", 2000) == KnownTask("loop", GRANDCHILD, "/pod", kernel=False, bound=False)
    assert table.task(SHELL, "", 1029).cgroup == "/pod"
    assert table.task(SHELL, "", 1030) == KnownTask("sh", SHELL, "/moved", kernel=False, bound=False)


def test_an_own_move_counts_and_none_of_another_hierarchy(tasks: Trace, table: TaskTable) -> None:
    tasks.put(0, page(1000, fork(0, SHELL, CHILD), attach(5, CHILD, "/v1", hierarchy=1), attach(5, CHILD, "/float")))
    table.read()
    assert [table.task(CHILD, "x", at).cgroup for at in (1009, 1010)] == ["/pod", "/float"]


def test_a_task_of_unknown_parents_has_the_cgroup_that_it_is_being_moved_to(tasks: Trace, table: TaskTable) -> None:
    tasks.put(0, page(1000, fork(0, 999, CHILD), attach(5, CHILD, "/float"), attach(5, CHILD, "/later")))
    table.read()
    assert [table.task(CHILD, "x", at).cgroup for at in (1004, 1010)] == ["/float", "/later"]


def test_a_number_that_was_given_again_is_another_task(tasks: Trace, table: TaskTable) -> None:
    tasks.put(0, page(1000, fork(0, KTHREADD, SHELL)))
    table.read()
    assert table.task(SHELL, "kworker/3:1", 2000) == KnownTask("kworker/3:1", SHELL, "", kernel=True, bound=True)
    assert table.task(SHELL, "kworker/u8:1", 2000).bound is False


def test_a_task_of_which_nothing_was_recorded_is_known_by_its_name_alone(table: TaskTable) -> None:
    assert table.task(999, "ghost", 2000) == KnownTask("ghost", 999, "", kernel=False, bound=False)


def test_parents_without_end_are_not_followed(tasks: Trace, table: TaskTable) -> None:
    tasks.put(0, page(1000, fork(0, CHILD, GRANDCHILD), fork(0, GRANDCHILD, CHILD)))
    table.read()
    assert table.task(CHILD, "x", 2000).cgroup == ""


def test_the_accounts_of_recorded_cpus(tmp_path: Path, tasks: Trace, table: TaskTable) -> None:
    with ExitStack() as held:
        switches = Trace(tmp_path / "switches", (SWITCH,), (4, 5), held)
        times = {cpu: CpuTimes(1000) for cpu in (4, 5)}
        recorder = SwitchRecorder(Procfs(tmp_path / "proc"), switches.instance, table, times)
        tasks.put(0, page(1000, fork(1, SHELL, CHILD)))
        tasks.put(0, page(1000, fork(1, KTHREADD, 55)))
        switches.put(
            4, page(1100, switch(0, VCPU, "CPU 0/KVM", CHILD, "loop\x1b"), switch(30, CHILD, "loop\x1b", VCPU, ""))
        )
        switches.put(5, page(1100, switch(0, IDLE, "swapper/5", 55, "ksoftirqd/5")))
        recorder.read()
        switches.put(5, page(1300, switch(0, 55, "ksoftirqd/5", IDLE, ""), flags=MISSED))
        window = recorder.finish()
        vcpu = ObservedThread(Role.VCPU, 0, ThreadStatus(6, VCPU, "CPU 0/KVM", "/i", CpuSet([4]), CpuSet(), 4))
        accounts = recorder.accounts({4: vcpu})
    end = 1000 + window
    assert (accounts[4].vcpu, accounts[4].vcpu_nanoseconds) == (0, 100 + end - 1130)
    [other] = accounts[4].others or ()
    assert (other.name, other.tid, other.cgroup, other.nanoseconds) == (r"loop\x1b", CHILD, "/pod", 30)
    assert (accounts[4].kernel, accounts[4].lost_events) == ((), 3)
    assert (accounts[5].vcpu, accounts[5].others, accounts[5].unknown_nanoseconds) == (None, (), 200)
    assert accounts[5].idle_nanoseconds == 100 + end - 1300
    assert (switches.instance.path / "tracing_on").read_text() == "0"
