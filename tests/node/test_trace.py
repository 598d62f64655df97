"""``instance-runner inspect --trace`` on a real node: what ran on an instance's CPUs, by the scheduler's own record."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from runner.facts.roots import Roots
from runner.inspect import trace as trace_module
from runner.inspect.observe import ProcessTable, read_processes
from runner.inspect.trace import switch_recorder
from runner.kernel.tracefs import tracefs_reached
from tests.node.cgroups import PARTITIONED, cgroup_of, until
from tests.node.instances import Instance, NodeFixture
from tests.node.recorded import kept_off, recorded
from tests.node.standin_kubelet import PROJECT
from tests.support.exposition import figures

pytestmark = [pytest.mark.usefixtures("rom"), pytest.mark.timeout(900)]
TRACE = (sys.executable, "-m", "runner", "inspect", "--trace")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
BUSY = """
import sys, time
end = time.process_time() + float(sys.argv[1])
while time.process_time() < end:
    pass
"""


@pytest.fixture(scope="module")
def exclusive(numa: dict[int, CpuSet]) -> CpuSet:
    found = CpuSet(list(numa[max(numa)])[:2])
    if len(found) < 2 or 0 in found:
        pytest.skip("two CPUs of a NUMA node, without CPU 0, are missing")
    return found


@pytest.fixture(scope="module")
def instance(shared_node: NodeFixture, exclusive: CpuSet, numa: dict[int, CpuSet]) -> Iterator[Instance]:
    """Return the instance that all of these tests look at."""
    started = shared_node.start(1, str(exclusive), mems=CpuSet([max(numa)]), arguments=("--http", "127.0.0.1:9440"))
    started.up()
    with contextlib.nullcontext() if PARTITIONED else kept_off(exclusive):
        yield started


@contextlib.contextmanager
def busy(instance: Instance, cpu: int, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Hold a loop of *seconds* of CPU time on a vCPU's CPU, in the one cgroup that always has it: the instance's."""
    enter = instance.group.entering()
    pinned = ("taskset", "-c", str(cpu), sys.executable, "-I", "-S", "-c", BUSY, str(seconds))
    with subprocess.Popen((*enter, *pinned)) as loop:
        try:
            yield loop
        finally:
            loop.kill()


def trace(seconds: float, *more: str) -> subprocess.CompletedProcess[str]:
    argv = (*TRACE, str(seconds), *more)
    return subprocess.run(argv, check=False, capture_output=True, text=True, cwd=PROJECT, env=ENVIRONMENT)


def accounts(shown: subprocess.CompletedProcess[str]) -> dict[int, dict[str, Any]]:
    """Return CPU → its account; each adds up to the window."""
    report = json.loads(shown.stdout)
    assert (report["source"], report["fallback"]) == ("sched_switch", None), report
    [instance] = report["instances"]
    for account in instance["accounts"]:
        kernel = sum(task["ns"] for task in account["kernel"])
        assert sum(task["ns"] for task in account["others"]) == account["other_ns"]
        spent = account["vcpu_ns"] + account["idle_ns"] + kernel + account["other_ns"] + account["unknown_ns"]
        assert spent == report["nanoseconds"]
        assert account["lost_events"] == 0
    return {account["cpu"]: account for account in instance["accounts"]}


def test_nothing_else_runs_on_the_vcpus_cpus(instance: Instance, exclusive: CpuSet) -> None:
    shown = trace(2)
    print(shown.stdout)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    guarantee = "enforced" if PARTITIONED else "arranged"
    assert f"instance {instance.uid}: CPUs '{exclusive}', guarantee {guarantee}" in shown.stdout
    assert f"ok       trace  0 ns of any other task on the CPUs '{exclusive}'" in shown.stdout
    found = accounts(trace(2, "--json"))
    assert {cpu: account["vcpu"] for cpu, account in found.items()} == dict(zip(exclusive, range(2), strict=True))
    assert [task for account in found.values() for task in account["others"]] == []


def test_a_busy_loop_on_a_vcpus_cpu_is_named_with_its_time(instance: Instance, exclusive: CpuSet) -> None:
    cpu = min(exclusive)
    with busy(instance, cpu, 3600) as loop:
        shown = trace(2, "--json")
        readable = trace(0.5)
    print(readable.stdout)
    assert shown.returncode == readable.returncode == 3, shown.stdout + shown.stderr
    found = accounts(shown)
    [task] = found[cpu]["others"]
    assert (task["pid"], task["tid"], task["cgroup"]) == (loop.pid, loop.pid, str(instance.group))
    assert task["ns"] > 1e9, "it competes with a guest that sleeps"
    assert found[max(exclusive)]["others"] == []
    [verdict] = json.loads(shown.stdout)["instances"][0]["judgements"]
    assert verdict["level"] == "error"
    assert f"(thread {loop.pid} of process {loop.pid}) in the cgroup '{instance.group}' ran {task['ns']} ns" in str(
        verdict
    )
    assert f"on CPU {cpu}" in readable.stdout


def test_the_record_of_a_block_has_the_time_of_a_loop_that_has_ended(instance: Instance, exclusive: CpuSet) -> None:
    vcpus = [thread.tid for thread in instance.vcpus()]
    before = foreign_seconds(instance)
    with recorded(exclusive) as record:
        with busy(instance, max(exclusive), 0.5) as loop:
            assert loop.wait() == 0
        after = foreign_seconds(instance)
    found = [each for each in record.others(vcpus) if not each.kernel]
    # Without a partition, what reads the metric in the container begins on these CPUs, too.
    taken = Counter[str]()
    for task in found:
        taken[task.cgroup] += task.nanoseconds
    assert {task.pid for task in found if task.cgroup == str(instance.group)} == {loop.pid}
    assert not PARTITIONED or len(taken) == 1
    # Before it is on its own CPU the loop may start on the other one.
    assert 0.5e9 <= taken[str(instance.group)] < 2.5e9, "the loop, and the start of Python"
    assert 0.5 <= after[max(exclusive)] - before[max(exclusive)] <= sum(taken.values()) / 1e9 + 0.1


def test_a_task_of_a_moment_is_named_with_its_cgroup(instance: Instance, exclusive: CpuSet) -> None:
    """It has ended before anything could read its entry in /proc: it is known by its birth and its move.

    It waits until it has been moved: one that moves itself runs there before the kernel has recorded its move.
    """
    vcpus = [thread.tid for thread in instance.vcpus()]
    argv = ("sh", "-c", f"read -r word && exec taskset -c {min(exclusive)} true")
    with recorded(exclusive) as record, subprocess.Popen(argv, stdin=subprocess.PIPE) as child:
        instance.group.write("cgroup.procs", child.pid)
        child.communicate(b"word\n")
        assert child.returncode == 0
    found = [(task.name, task.cgroup) for task in record.others(vcpus) if not task.kernel]
    assert ("true", str(instance.group)) in found
    assert {cgroup for _, cgroup in found} == {str(instance.group)}


def test_a_task_that_is_born_while_the_others_are_listed_is_named_with_its_cgroup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is on no list, and has ended before it can be looked up: it is known by its birth."""
    cpu = max(os.sched_getaffinity(0))
    waits = f"read -r word; taskset -c {cpu} sh -c 'echo $$; read -r word'; exit 0"
    born: list[int] = []
    with subprocess.Popen(("sh", "-c", waits), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        given, output = parent.stdin, parent.stdout
        assert given is not None
        assert output is not None

        def listed(roots: Roots) -> ProcessTable:
            found = read_processes(roots)
            given.write(b"word\n")
            given.flush()
            born.append(int(output.readline()))
            return found

        monkeypatch.setattr(trace_module, "read_processes", listed)
        with switch_recorder(Roots(), CpuSet([cpu])) as recorder:
            parent.communicate(b"word\n")
            recorder.finish()
            [account] = recorder.accounts({}).values()
    assert {task.cgroup for task in account.others or () if task.tid in born} == {cgroup_of(os.getpid())}


def foreign_seconds(instance: Instance) -> dict[int, float]:
    """Return CPU → the metric ``vcpu_foreign_seconds_total``, on a page that names the guarantee, too."""
    page = instance.running.execute(
        sys.executable,
        "-c",
        "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9440/metrics').read().decode())",
    )
    found = figures(page)
    assert found["guarantee_enforced"] == PARTITIONED
    return {
        cpu: found[f'vcpu_foreign_seconds_total{{cpu="{cpu}",vcpu="{vcpu}"}}'] for vcpu, cpu in enumerate(instance.cpus)
    }


@pytest.mark.usefixtures("instance")
@pytest.mark.node_only
def test_a_killed_record_is_removed_by_the_next(tmp_path: Path) -> None:
    with tracefs_reached(Roots().sys) as tracefs:

        def left() -> list[str]:
            return sorted(path.name for path in (tracefs / "instances").iterdir())

        def begun(names: list[str]) -> bool:
            return left() == names

        assert left() == []
        for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
            with (tmp_path / "output").open("wb") as output:
                recording = subprocess.Popen(
                    (*TRACE, "600"), stdout=output, stderr=output, cwd=PROJECT, env=ENVIRONMENT
                )
            mine = [f"instance-runner-{recording.pid}-{each}" for each in (0, 1)]
            until(partial(begun, mine), "the record to begin")
            recording.send_signal(number)
            assert recording.wait() == status, (tmp_path / "output").read_text()
            assert left() == (mine if number == signal.SIGKILL else [])


@pytest.mark.node_only
def test_without_tracefs_sums_show_the_loop(instance: Instance, exclusive: CpuSet) -> None:
    hidden = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mkdir -p /run/none && mount --bind /run/none /sys/kernel && exec "$@"',
        "-",
    )
    refused = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    argv = (*hidden, *refused, *TRACE, "2", "--json")
    with busy(instance, min(exclusive), 3600):
        shown = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=PROJECT, env=ENVIRONMENT)
    report = json.loads(shown.stdout)
    assert shown.returncode == 3, shown.stdout + shown.stderr
    assert (report["source"], report["fallback"]) == (
        "schedstat",
        "cannot mount tracefs: Operation not permitted",
    )
    loaded, free = report["instances"][0]["accounts"]
    assert loaded["others"] is free["others"] is None
    assert 1e9 < loaded["other_ns"] <= report["nanoseconds"]
    assert free["other_ns"] < report["nanoseconds"] / 100
