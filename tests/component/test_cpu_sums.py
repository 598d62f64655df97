"""The sums of a window where no switch can be recorded, over files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.facts.roots import Roots
from runner.facts.threads import ThreadStatus
from runner.inspect.cpu_sums import CpuSums
from runner.placement.children import Role
from runner.placement.threads import ObservedThread

SECOND = 1_000_000_000
QEMU, VCPU, MIGRATION, WORKER = 100, 101, 27, 40
PF_KTHREAD = 0x00200000
VCPUS = {2: ObservedThread(Role.VCPU, 0, ThreadStatus(QEMU, VCPU, "CPU 0/KVM", "/", CpuSet([2]), CpuSet(), 2))}


@attrs.frozen
class Kernel:
    """A procfs of ordinary files."""

    root: Path

    def add(self, tid: int, name: str, cpus: str, *, flags: int = PF_KTHREAD) -> None:
        """Add a process of one thread."""
        stat = f"{tid} ({name}) S 2 0 0 0 -1 {flags}" + " 0" * 29 + " 2 0 0\n"
        status = (
            f"Name:\t{name}\nTgid:\t{tid}\nPPid:\t2\nNSpid:\t{tid}\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0\n"
        )
        for directory in (self.root / str(tid), self.root / str(tid) / "task" / str(tid)):
            directory.mkdir(parents=True)
            for file, text in (("stat", stat), ("status", status), ("cgroup", "0::/\n"), ("cmdline", "")):
                (directory / file).write_text(text)

    def write(self, *, cpu: int, idle: int = 0, vcpu: int = 0, **threads: int) -> None:
        (self.root / "schedstat").write_text(f"version 15\ntimestamp 1\ncpu2 0 0 0 0 0 0 {cpu} 7 1\ndomain0 3 0\n")
        (self.root / "stat").write_text(f"cpu  1 2 3 4 5 6 7 8 9 0\ncpu2 0 0 0 {idle} 0 0 0 0 0 0\n")
        for pid, tid, ran in (
            (QEMU, VCPU, vcpu),
            (MIGRATION, MIGRATION, threads.get("migration", 0)),
            (WORKER, WORKER, threads.get("worker", 0)),
        ):
            task = self.root / str(pid) / "task" / str(tid)
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"{ran} 0 1\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    kernel = Kernel(tmp_path)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    kernel.add(MIGRATION, "migration/2", "2")
    kernel.add(WORKER, "kworker/u8:1", "0-7")
    kernel.write(cpu=500 * SECOND, idle=1000, vcpu=300 * SECOND, migration=5000)
    return kernel


def begin(kernel: Kernel) -> CpuSums:
    return CpuSums.begin(Roots(proc=kernel.root), CpuSet([2]), VCPUS)


def test_what_is_left_of_the_cpus_time_is_that_of_others(kernel: Kernel) -> None:
    sums = begin(kernel)
    kernel.write(cpu=500 * SECOND + 1000, idle=1000, vcpu=300 * SECOND + 600, migration=5100, worker=200)
    window, accounts = sums.end()
    assert window > 1000
    found = accounts[2]
    assert (found.vcpu, found.vcpu_nanoseconds, found.idle_nanoseconds) == (0, 600, 0)
    assert [(task.name, task.nanoseconds) for task in found.kernel] == [("migration/2", 100)]
    assert (found.others, found.other_nanoseconds) == (None, 300), "a worker that is bound to no CPU is another task"


def test_what_a_vcpu_ran_before_the_window_is_not_anothers_time(kernel: Kernel) -> None:
    """The kernel adds to the CPU's time when the vCPU leaves, here after a minute."""
    sums = begin(kernel)
    kernel.write(cpu=560 * SECOND, idle=1000, vcpu=300 * SECOND, migration=5000)
    window, accounts = sums.end()
    assert accounts[2].other_nanoseconds <= window < 60 * SECOND


def test_a_vcpu_that_runs_all_the_time_has_not_been_added_yet(kernel: Kernel) -> None:
    sums = begin(kernel)
    kernel.write(cpu=500 * SECOND, idle=1000, vcpu=310 * SECOND, migration=5000)
    assert sums.end()[1][2].other_nanoseconds == 0


def test_a_kernel_without_sums_is_named(kernel: Kernel) -> None:
    (kernel.root / "schedstat").unlink()
    with pytest.raises(HostError, match="cannot sum up the time of the CPUs '2': /proc/schedstat has none"):
        begin(kernel)
