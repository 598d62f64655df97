"""The metric of other tasks' time, over files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.facts.threads import ThreadStatus
from runner.instance.watch.foreign_time import ForeignTime
from runner.kernel.procfs import Procfs
from runner.placement.children import Role
from runner.placement.threads import ObservedThread, Receipt, ThreadRules

SECOND = 1_000_000_000


def thread(role: Role, vcpu: int | None, tid: int, cpu: int) -> ObservedThread:
    return ObservedThread(role, vcpu, ThreadStatus(10, tid, "", "", CpuSet([cpu]), CpuSet(), cpu))


RECEIPT = Receipt(
    "affinity",
    ThreadRules(CpuSet([2, 5]), (2, 5), shared=False, cgroups=None),
    (thread(Role.EMULATOR, None, 10, 0), thread(Role.VCPU, 0, 11, 2), thread(Role.VCPU, 1, 12, 5)),
)


@attrs.frozen
class Kernel:
    """The two files that count."""

    root: Path

    def write(self, cpus: dict[int, int], threads: dict[int, int]) -> None:
        lines = [f"cpu{cpu} 0 0 0 0 0 0 {ran} 77 9\ndomain0 3 1 2" for cpu, ran in cpus.items()]
        (self.root / "schedstat").write_text("\n".join(("version 16", "timestamp 4294941247", *lines, "")))
        for tid, ran in threads.items():
            task = self.root / "10/task" / str(tid)
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"{ran} 5 6\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    kernel = Kernel(tmp_path)
    kernel.write({0: 1, 2: 100 * SECOND, 5: 7 * SECOND}, {11: 3 * SECOND, 12: 2 * SECOND})
    return kernel


@pytest.fixture
def foreign(kernel: Kernel) -> ForeignTime:
    return ForeignTime.begin(Procfs(kernel.root), RECEIPT)


def test_what_ran_before_does_not_count(kernel: Kernel, foreign: ForeignTime) -> None:
    assert foreign.read(Procfs(kernel.root)) == {0: 0, 1: 0}


def test_what_others_run_is_what_the_cpu_ran_more_than_its_vcpu(kernel: Kernel, foreign: ForeignTime) -> None:
    kernel.write({2: 110 * SECOND, 5: 8 * SECOND}, {11: 11 * SECOND, 12: 3 * SECOND})
    assert foreign.read(Procfs(kernel.root)) == {0: 2, 1: 0}


def test_it_never_shrinks_while_a_vcpu_runs_without_a_pause(kernel: Kernel, foreign: ForeignTime) -> None:
    kernel.write({2: 102 * SECOND, 5: 7 * SECOND}, {11: 4 * SECOND, 12: 9 * SECOND})
    assert foreign.read(Procfs(kernel.root)) == {0: 1, 1: 0}
    kernel.write({2: 102 * SECOND, 5: 7 * SECOND}, {11: 50 * SECOND, 12: 60 * SECOND})  # it has not left its CPU yet
    assert foreign.read(Procfs(kernel.root)) == {0: 1, 1: 0}
    kernel.write({2: 151 * SECOND, 5: 65 * SECOND}, {11: 50 * SECOND, 12: 60 * SECOND})  # it has
    assert foreign.read(Procfs(kernel.root)) == {0: 4, 1: 0}


def test_what_can_no_longer_be_read_stays_as_it_was(kernel: Kernel, foreign: ForeignTime) -> None:
    kernel.write({2: 101 * SECOND, 5: 7 * SECOND}, {})
    assert foreign.read(Procfs(kernel.root)) == {0: 1, 1: 0}
    (kernel.root / "10/task/11/schedstat").unlink()
    kernel.write({5: 9 * SECOND}, {})
    assert foreign.read(Procfs(kernel.root)) == {0: 1, 1: 2}


def test_without_the_kernels_sums_there_are_none(kernel: Kernel) -> None:
    (kernel.root / "schedstat").unlink()
    assert ForeignTime.begin(Procfs(kernel.root), RECEIPT).read(Procfs(kernel.root)) == {}


def test_vcpus_that_come_go_and_move_are_counted_on(kernel: Kernel, foreign: ForeignTime) -> None:
    """One stays and runs without a pause at that moment, one gets another CPU, one is new, and then one goes."""
    kernel.write(
        {2: 101 * SECOND, 5: 9 * SECOND, 6: 50 * SECOND, 7: 80 * SECOND}, {11: 9 * SECOND, 12: 2 * SECOND, 13: 0}
    )
    assert foreign.read(Procfs(kernel.root)) == {0: 0, 1: 2}
    threads = (thread(Role.VCPU, 0, 11, 2), thread(Role.VCPU, 1, 12, 6), thread(Role.VCPU, 2, 13, 7))
    later = foreign.succeeded_by(Procfs(kernel.root), attrs.evolve(RECEIPT, threads=threads))
    assert later.read(Procfs(kernel.root)) == {0: 0, 1: 2, 2: 0}
    # vCPU 0 has left its CPU: what it ran is none of the others' time.
    kernel.write({2: 110 * SECOND, 6: 53 * SECOND, 7: 84 * SECOND}, {11: 12 * SECOND, 12: 3 * SECOND, 13: 3 * SECOND})
    assert later.read(Procfs(kernel.root)) == {0: 1, 1: 4, 2: 1}
    fewer = later.succeeded_by(Procfs(kernel.root), attrs.evolve(RECEIPT, threads=threads[:2]))
    kernel.write({2: 110 * SECOND, 6: 54 * SECOND}, {11: 12 * SECOND, 12: 3 * SECOND})
    assert fewer.read(Procfs(kernel.root)) == {0: 1, 1: 5, 2: 1}, "what was counted stays"
