"""Trace instances of the real kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.kernel.ring_buffer import has_missed_events, records
from runner.kernel.tracefs import remove_stale_instances, trace_instance, tracefs_reached

SWITCH = ("sched/sched_switch",)
CPU = max(os.sched_getaffinity(0))
PING_PONG = """
import os
a, b = os.pipe(), os.pipe()
if os.fork():
    for _ in range(2000):
        os.write(a[1], b"x")
        os.read(b[0], 1)
else:
    for _ in range(2000):
        os.read(a[0], 1)
        os.write(b[1], b"x")
"""
"""Two processes that wait for each other: 4,000 switches where they have one CPU."""


@pytest.fixture
def tracefs() -> Iterator[Path]:
    try:
        with tracefs_reached(Path("/sys")) as path:
            yield path
    except HostError as error:
        pytest.skip(f"tracefs is missing: {explain(error)}")


def switch() -> None:
    subprocess.run(("taskset", "-c", str(CPU), sys.executable, "-I", "-S", "-c", PING_PONG), check=True)


def test_every_switch_is_recorded_in_order(tracefs: Path) -> None:
    with trace_instance(tracefs, SWITCH, CpuSet([CPU]), 4096, pid=os.getpid()) as instance:
        switch()
        assert list(instance.pages(CPU)) == [], "it does not record yet"
        instance.start()
        switch()
        instance.stop()
        pages = list(instance.pages(CPU))
        times = [time for page in pages for time, _ in records(page)]
        assert len(times) >= 4000
        assert times == sorted(times)
        assert not any(map(has_missed_events, pages))
        assert instance.lost_events(CPU) == 0
        switch()
        assert list(instance.pages(CPU)) == []
    assert not instance.path.exists()


def test_events_that_a_full_buffer_lost_are_counted_and_flagged(tracefs: Path) -> None:
    with trace_instance(tracefs, SWITCH, CpuSet([CPU]), 16, pid=os.getpid()) as instance:
        instance.start()
        switch()
        instance.stop()
        assert any(map(has_missed_events, instance.pages(CPU)))
        assert instance.lost_events(CPU) > 3000


def test_only_the_instances_of_dead_processes_are_removed(tracefs: Path) -> None:
    with subprocess.Popen("true") as ended:
        ended.wait()
    stale, others = (
        tracefs / "instances" / name for name in (f"instance-runner-{ended.pid}-0", "instance-runner-of-others")
    )
    with trace_instance(tracefs, SWITCH, CpuSet([CPU]), 16, pid=os.getpid()) as alive:
        stale.mkdir()
        others.mkdir()
        try:
            remove_stale_instances(tracefs, Path("/proc"))
            assert (alive.path.exists(), stale.exists(), others.exists()) == (True, False, True)
        finally:
            others.rmdir()


def test_an_event_that_the_kernel_does_not_have_is_refused_and_nothing_is_left(tracefs: Path) -> None:
    before = set((tracefs / "instances").iterdir())
    with (
        pytest.raises(HostError, match=r"cannot read .*/events/sched/none/format"),
        trace_instance(tracefs, ("sched/none",), CpuSet([CPU]), 16, pid=os.getpid()),
    ):
        pass
    assert {path for path in (tracefs / "instances").iterdir() if f"-{os.getpid()}-" in path.name} <= before


def test_tracefs_is_used_where_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "kernel/tracing/instances").mkdir(parents=True)
    with tracefs_reached(tmp_path) as path:
        assert path == tmp_path / "kernel/tracing"
