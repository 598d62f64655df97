"""CPU masks of threads, on this machine's kernel."""

from __future__ import annotations

import os
import subprocess

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import PlacementError
from runner.kernel.scheduler import pin, read_cpuset, read_mask, unpin


def test_a_thread_that_was_pinned_may_run_on_all_cpus_of_its_cpuset_again() -> None:
    allowed = CpuSet(os.sched_getaffinity(0))
    one = CpuSet([min(allowed)])
    with subprocess.Popen(("sleep", "1000")) as process:
        try:
            pin(process.pid, one)
            assert read_mask(process.pid) == one
            unpin(process.pid)
            assert read_mask(process.pid) >= allowed
        finally:
            process.kill()
    with pytest.raises(PlacementError, match="cannot let thread"):
        unpin(process.pid)


def test_the_cpuset_is_read_whatever_the_mask() -> None:
    before = read_mask()
    [one, *_] = before
    try:
        pin(0, CpuSet([one]))
        assert read_cpuset() == before
        assert read_mask() == CpuSet([one])
    finally:
        unpin(0)
    assert read_mask() == before
