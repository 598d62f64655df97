"""vCPUs are plugged into a real guest that runs, brought online there, and unplugged again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulated_node.cache import fetch
from tests.machine.test_renewal import inside, ticks, type_in, upgrade
from tests.support.newest_qemu import mounted, newest_qemu
from tests.support.program_runs import RUNNER, ProgramRun, ProgramStarter, until
from tests.support.renewals import make_program

TICKING = "(i=0; while :; do echo tick $i; i=$((i+1)); usleep 50000; done) &\n"
ONLINE = "echo 1 >/sys/devices/system/cpu/cpu1/online; echo on''line $(grep -c ^processor /proc/cpuinfo)\n"
BUSY = "taskset 2 sh -c 'while :; do :; done' & sleep 1; echo bu''sy\n"
"""Something runs on the guest's second CPU without a pause."""

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


def ctl(run: ProgramRun, *words: object) -> subprocess.CompletedProcess[str]:
    argv = (*inside(run), RUNNER, "ctl", "--state-dir", run.state, "--json", *words)
    return subprocess.run([str(word) for word in argv], check=False, capture_output=True, text=True, timeout=60)


def asked(run: ProgramRun, *words: object) -> Any:
    ended = ctl(run, *words)
    assert ended.returncode == 0, ended.stderr + run.log
    return json.loads(ended.stdout)


def vcpu_threads(run: ProgramRun) -> dict[str, str]:
    """Return name and CPUs of QEMU's vCPU threads, as the kernel says it now."""
    [qemu] = run.descendants()["qemu-system-x86"]
    status = "/proc/{}/task/{}/status"
    found = {}
    for tid in map(int, os.listdir(f"/proc/{qemu}/task")):  # noqa: PTH208
        with open(status.format(qemu, tid)) as file:  # noqa: PTH123
            text = file.read()
        name, cpus = re.findall(r"^(?:Name|Cpus_allowed_list):\t(.*)$", text, re.MULTILINE)
        if name.startswith("CPU "):
            found[name] = cpus
    return found


def vcpus_of_receipt(run: ProgramRun) -> list[int]:
    threads = json.loads((run.state / "receipt.json").read_text())["threads"]
    return [thread["vcpu"] for thread in threads if thread["role"] == "vcpu"]


@pytest.fixture(scope="module")
def newest() -> Iterator[dict[str, str]]:
    """Yield an environment in which QEMU is the newest, which survives that an emulated vCPU is unplugged."""
    with mounted(fetch(newest_qemu())) as program:
        yield {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def started(start: ProgramStarter, environment: dict[str, str] | None = None) -> ProgramRun:
    run = start("[cpu]\ncount = 1\n[hotplug]\ncpus = 2\n", "guest.then=shell", environment=environment)
    run.until_done()
    run.until("guest# ", lambda: run.console)
    type_in(run, TICKING)
    run.until("tick 5", lambda: run.console)
    return run


def test_a_guest_gets_a_vcpu_and_gives_it_back(start: ProgramStarter, newest: dict[str, str]) -> None:
    run = started(start, newest)
    assert "up with 1 vCPUs" in run.console
    assert [(vcpu["vcpu"], vcpu["plugged_later"]) for vcpu in asked(run, "cpus")["vcpus"]] == [(0, False)]

    answer = asked(run, "cpus", 2)
    print(f"pause in ms: {answer['pause_ms']}")
    assert [(vcpu["vcpu"], vcpu["plugged_later"]) for vcpu in answer["vcpus"]] == [(0, False), (1, True)]
    cpus = [str(vcpu["cpu"]) for vcpu in answer["vcpus"]]
    assert vcpu_threads(run) == {f"CPU {index}/TCG": cpu for index, cpu in enumerate(cpus)}
    type_in(run, ONLINE)
    run.until("online 2", lambda: run.console)
    type_in(run, BUSY)
    run.until("busy", lambda: run.console)
    assert vcpus_of_receipt(run) == [0, 1]
    status = asked(run, "status")
    assert (status["vcpus"], status["most_vcpus"], status["placement"]["misplaced"]) == (2, 2, [])

    began = time.monotonic()
    answer = asked(run, "cpus", 1)
    print(f"the guest released it in {time.monotonic() - began:.1f} s")
    assert [vcpu["vcpu"] for vcpu in answer["vcpus"]] == [0]
    assert vcpu_threads(run) == {"CPU 0/TCG": cpus[0]}
    assert vcpus_of_receipt(run) == [0]
    assert asked(run, "status")["placement"]["misplaced"] == []
    ended = ctl(run, "cpus", 2)
    assert ended.returncode == 4
    assert "without KVM QEMU crashes when another is plugged" in ended.stderr
    seen = len(ticks(run))
    until(lambda: len(ticks(run)) > seen + 5, "the guest to run on")
    counted = ticks(run)
    assert counted == list(range(len(counted)))
    assert run.stop() == 0, run.log
    assert run.termination_log()["faults"] == []


def test_what_cannot_be_is_refused_and_nothing_changes(start: ProgramStarter) -> None:
    run = started(start)
    before = vcpu_threads(run)
    for count, reason in ((0, "this machine has 1 to 2"), (3, "set hotplug.cpus to more and start")):
        ended = ctl(run, "cpus", count)
        assert ended.returncode == 4
        assert reason in ended.stderr
    assert vcpu_threads(run) == before
    assert asked(run, "cpus")["most"] == 2

    # This machine's QEMU plugs a vCPU, and would not survive its end.
    print(f"pause in ms: {asked(run, 'cpus', 2)['pause_ms']}")
    type_in(run, ONLINE)
    run.until("online 2", lambda: run.console)
    if tuple(map(int, asked(run, "status")["qemu"]["version"].split("."))) < (11, 1):
        ended = ctl(run, "cpus", 1)
        assert ended.returncode == 4
        assert "without KVM, QEMU" in ended.stderr
    assert len(vcpu_threads(run)) == 2
    assert run.stop() == 0, run.log


def test_a_guest_without_cpu_hotplug_keeps_its_vcpu(start: ProgramStarter, newest: dict[str, str]) -> None:
    spec = "[cpu]\ncount = 1\n[hotplug]\ncpus = 2\n[shutdown]\ngrace = 3\n"
    run = start(spec, "guest.then=shell acpi=off", environment=newest)
    run.until_done()
    asked(run, "cpus", 2)
    ended = ctl(run, "cpus", 1)
    assert ended.returncode == 4
    assert "the guest has not released it within 15 s, and keeps it" in ended.stderr
    assert len(vcpu_threads(run)) == 2
    assert asked(run, "status")["placement"]["misplaced"] == []
    assert run.stop() == 13, run.log  # nor does it know a power button


def test_a_renewed_runner_knows_the_vcpus(start: ProgramStarter, newest: dict[str, str], tmp_path: Path) -> None:
    program = make_program(tmp_path / "program")
    run = started(start, newest)
    asked(run, "cpus", 2)
    type_in(run, ONLINE)
    run.until("online 2", lambda: run.console)
    before = vcpu_threads(run)
    assert upgrade(run, program)["runner"]["generation"] == 1
    assert vcpu_threads(run) == before
    assert [vcpu["plugged_later"] for vcpu in asked(run, "cpus")["vcpus"]] == [False, True]
    assert asked(run, "status")["placement"]["misplaced"] == []
    assert len(asked(run, "cpus", 1)["vcpus"]) == 1
    assert len(vcpu_threads(run)) == 1
    assert run.stop() == 0, run.log
