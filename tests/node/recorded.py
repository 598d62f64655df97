"""CPUs that are kept free, and a record of what runs on them: the scheduler's own, for any test of the node."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from runner.base.cpuset import CpuSet
from runner.facts.roots import Roots
from runner.inspect.cpu_time import CpuAccount, TaskTime
from runner.inspect.trace import READ_AGAIN, SwitchRecorder, switch_recorder

WORK_QUEUES = Path("/sys/devices/virtual/workqueue/cpumask")
PF_NO_SETAFFINITY = 0x04000000


@attrs.define
class Record:
    """What ran on CPUs while a block ran; complete at its end."""

    nanoseconds: int = 0
    """The length of the block."""
    accounts: dict[int, CpuAccount] = attrs.field(factory=dict)
    """CPU → how it spent this time. No vCPU is told from other tasks."""

    def others(self, known: Iterable[int] = ()) -> list[TaskTime]:
        """Return every task that ran and is neither one of the threads *known* nor a kernel thread bound to the CPU."""
        assert not any(account.lost_events for account in self.accounts.values())
        mine = set(known)
        return [task for account in self.accounts.values() for task in account.others or () if task.tid not in mine]


@contextlib.contextmanager
def recorded(cpus: CpuSet) -> Iterator[Record]:
    """Record every task that runs on *cpus* while the block runs."""
    record, over = Record(), threading.Event()

    def read(recorder: SwitchRecorder) -> None:
        while not over.wait(READ_AGAIN):
            recorder.read()

    with switch_recorder(Roots(), cpus) as recorder:
        reader = threading.Thread(target=read, args=(recorder,))
        reader.start()
        try:
            yield record
        finally:
            over.set()
            reader.join()
        record.nanoseconds = recorder.finish()
        record.accounts = recorder.accounts({})


@contextlib.contextmanager
def kept_off(cpus: CpuSet) -> Iterator[None]:
    """Keep everything that can be moved off *cpus*, as the operator of a node does (``CPUAffinity=``, work queues)."""
    before: dict[int, set[int]] = {}
    others = os.sched_getaffinity(0) - set(cpus)
    moving = True
    while moving:  # a process may have forked between the list and its own turn
        moving = False
        for path in Path("/proc").glob("[0-9]*/task/[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or it is a vCPU thread, which has no other CPUs
                name, _, rest = (path / "stat").read_text().rpartition(")")
                mask = os.sched_getaffinity(int(path.name))
                fixed = int(rest.split()[6]) & PF_NO_SETAFFINITY
                if not fixed and not name.endswith("(pause") and mask & set(cpus):
                    # A kernel thread of a NUMA node, such as kcompactd1, may have none but these.
                    os.sched_setaffinity(int(path.name), mask - set(cpus) or others)
                    before[int(path.name)] = mask
                    moving = True
    queues = WORK_QUEUES.read_text()
    WORK_QUEUES.write_text(f"{int(queues.replace(',', ''), 16) & ~sum(1 << cpu for cpu in cpus):x}")
    try:
        yield
    finally:
        WORK_QUEUES.write_text(queues)
        for tid, mask in before.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(tid, mask)
