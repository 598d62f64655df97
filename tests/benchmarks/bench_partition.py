"""Measure how long the kernel needs to seal an instance: ``tests/node/run --article -- tests/benchmarks/bench_partition.py``.

An isolated partition of 4, 40 and 120 CPUs, as far as the machine has them, is made and ended by the controller's own
code, with a thread in it. Medians.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.controller.tree.cgroup_writer import start_cgroup_writer
from runner.controller.tree.model import Action, Seal, Unseal
from runner.controller.tree.tree import Tree
from runner.kernel.cgroup import Cgroup
from tests.node.cgroups import ROOT, task
from tests.node.cgroups import Cgroup as Group

ROUNDS, COUNTS = 9, (4, 40, 120)


@pytest.mark.timeout(1200)
def test_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    online = CpuSet(range(os.cpu_count() or 1))
    mount = Group(ROOT)
    mount.delegate("cpuset")
    root = mount.child("bench", cpuset_cpus=online)
    writer = start_cgroup_writer(root.path, Path("/proc"))
    try:
        root.delegate("cpuset")
        tree = Tree(Cgroup(root.path), writer)
        for count in (each for each in COUNTS if each < len(online) - 1):
            cpus = CpuSet(list(online)[-count:])
            group = root.child(f"instance-{count}", threaded=True, cpuset_cpus=cpus)
            seal, unseal = Seal(group.path.name, cpus, cpus), Unseal(group.path.name)
            with task() as sleeper:
                group.write("cgroup.procs", sleeper.pid)
                found = [(spent(tree, seal, online), spent(tree, unseal, online)) for _ in range(ROUNDS)]
            group.wait_empty()
            root.write("cpuset.cpus.exclusive", "")
            group.path.rmdir()
            with capsys.disabled():
                print(f"\n{count} CPUs of {len(online)}, medians of {ROUNDS} in ms:", end="")
                for name, times in zip(("seal", "unseal"), zip(*found, strict=True), strict=True):
                    print(f" {name} {statistics.median(times):.1f} ({min(times):.1f} … {max(times):.1f});", end="")
    finally:
        writer.connection.close()
        root.remove()


def spent(tree: Tree, action: Action, online: CpuSet) -> float:
    """Return the milliseconds that *action* takes."""
    started = time.perf_counter()
    assert tree.apply([action], online) == ((action,), ())
    return 1000 * (time.perf_counter() - started)
