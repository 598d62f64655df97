"""Threads read by what the kernel says of whole cgroups: the same as what it says of each."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from runner.base.cpuset import CpuSet
from runner.facts.threads import ThreadStatus
from runner.instance.parts.cgroups.affinity import FloatMask
from runner.instance.parts.cgroups.entered import EnteredCgroups, InForce
from runner.instance.parts.thread_placement import ThreadReader
from runner.instance.supervisor import Supervisor
from runner.kernel.cgroup import Cgroup, CgroupError, read_members
from runner.kernel.cgroup_fds import open_cgroup_fds
from runner.kernel.procfs import Procfs
from runner.placement.backends import AffinityPlacement, DelegatedPlacement
from runner.placement.threads import CgroupPaths

PLACEMENT = DelegatedPlacement(CpuSet([1]), (1,), CpuSet([0]), shared=False)
NAMED = """
import sys, threading
gate = threading.Event()
def become(name):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:
        comm.write(name)
    print(flush=True)
    gate.wait()
for name in ("CPU 0/KVM", "a) b", "back\\\\slash", "new\\nline"):
    threading.Thread(target=become, args=(name,), daemon=True).start()
sys.stdin.read()
"""


@pytest.fixture
def process() -> Iterator[int]:
    """Yield a process with four threads besides its first."""
    with subprocess.Popen((sys.executable, "-c", NAMED), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        for _ in range(4):
            running.stdout.readline()
        yield running.pid
        running.stdin.close()


def comparable(threads: Iterator[ThreadStatus]) -> list[tuple[object, ...]]:
    """Return everything but the CPU that each ran on last, which may change at any moment."""
    return [(each.pid, each.tid, each.name, each.cgroup, each.cpus, each.mems) for each in threads]


def test_threads_of_a_group_are_read_as_each_alone(process: int) -> None:
    tids = Procfs().thread_ids(process)
    alone = comparable(Procfs().threads(process))
    assert [name for _, _, name, *_ in alone][2:] == ["a) b", "back\\\\slash", "new\\nline"]
    for groups in [], [frozenset(tids)], [frozenset(tids[:2]), frozenset(tids[2:4])]:
        assert comparable(ThreadReader(Procfs(), groups).threads(process)) == alone


def test_a_mask_that_is_not_the_groups_is_seen(process: int) -> None:
    tids = Procfs().thread_ids(process)
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(tids[3], [cpu])
    reader = ThreadReader(Procfs(), [frozenset(tids)])
    assert [each.cpus for each in reader.threads(process)][3] == CpuSet([cpu])


def test_one_thread_of_a_group_and_every_other_thread_are_read_in_full(process: int) -> None:
    tids = Procfs().thread_ids(process)
    full: list[int] = []

    class WatchedProcfs(Procfs):
        def thread(self, pid: int, tid: int) -> ThreadStatus | None:
            full.append(tid)
            return super().thread(pid, tid)

    assert len(list(ThreadReader(WatchedProcfs(), [frozenset(tids[1:3]), frozenset(tids[3:4])]).threads(process))) == 5
    assert full == [tids[0], tids[1], tids[3], tids[4]]


def test_a_process_that_has_ended_has_no_threads(process: int) -> None:
    assert Procfs().name_and_last_cpu(process, 1) is None
    assert list(ThreadReader(Procfs(), [frozenset({process})]).threads(1 << 22)) == []


@pytest.fixture
def tree(tmp_path: Path) -> Cgroup:
    """Return the parent of two groups, made of ordinary files."""
    for name, members in (("float", "1\n0\n7\n"), ("instance", "8\n9\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.threads").write_text(members)
        (tmp_path / name / "cgroup.procs").touch()
    (tmp_path / "cgroup.procs").touch()
    return Cgroup(tmp_path)


def test_a_placement_lists_the_members_of_its_groups(tree: Cgroup) -> None:
    with ExitStack() as held:
        fds = open_cgroup_fds(tree.child("float"), tree.child("instance"), tree, held)
        active = EnteredCgroups(CgroupPaths("/", "/float", "/instance"), None, fds, InForce(PLACEMENT))
        for _ in range(2):  # each reading begins anew
            assert list(active.members()) == [frozenset({0, 1, 7}), frozenset({8, 9})]
    mask = AffinityPlacement(CpuSet([0]), (0,), CpuSet([1]), shared=False)
    assert FloatMask(mask, cast("Supervisor", None)).members() == ()


def test_a_group_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(CgroupError, match=r"cannot read float/cgroup\.threads") as caught:
            read_members(fd, "float/cgroup.threads")
        assert caught.value.errno == errno.EISDIR
    finally:
        os.close(fd)
