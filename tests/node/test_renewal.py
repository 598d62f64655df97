"""A runner is renewed in a real pod, sealed by a real controller: nothing is written to its cgroups, no vCPU thread moves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import PARTITIONED, ROOT, SECONDS, Cgroup, until
from tests.node.instances import FLOAT, TREE, Instance, NodeFixture, members_of, spec_text, start_instance, untouched
from tests.node.standin_kubelet import Kubelet
from tests.support.renewals import ProgramDirectory, hook, make_program

pytestmark = [
    pytest.mark.usefixtures("rom"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PARTITIONED, reason="remote partitions are missing: they come with Linux 6.7"),
]
CTL = (sys.executable, "-m", "runner", "ctl", "--json")
FAILURES = {
    "import missing_package": "No module named 'missing_package'",
    "time.sleep(1000)": "it has not taken everything over within [0-9]+ s",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ProgramDirectory:
    """Return another version of this program, which does in between what :func:`does` says."""
    program = make_program(tmp_path_factory.mktemp("programs") / "program")
    hook(program)
    does(program, 0, "")
    return program


def does(program: ProgramDirectory, at: int, statements: str) -> None:
    """Have *program* execute *statements* before it takes over holder number *at*."""
    (program.path.parent / "hook.json").write_text(json.dumps({"at": at, "do": statements}))


def start(node: NodeFixture, program: ProgramDirectory) -> Instance:
    """Start a sealed instance whose pod has the *program* at the same path; its guest is up."""
    there = program.path.parent
    instance = node.start(1, "2-3", more_mounts=[(there, str(there), "ro")])
    instance.up()
    assert instance.receipt()["guarantee"] == "enforced"
    does(program, 0, "")
    return instance


def upgrade(instance: Instance, program: ProgramDirectory) -> subprocess.CompletedProcess[str]:
    """Ask for an upgrade, as ``kubectl exec`` does; three programs start one after the other, which is slow here."""
    words = ("upgrade", "--from", str(program.path), "--digest", program.digest)
    argv = (*instance.running.runtime, "exec", instance.running.id, *CTL, *words)
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10 * SECONDS)


@contextlib.contextmanager
def left_alone(instance: Instance) -> Iterator[None]:
    """Check that the block writes to no cgroup, and that each thread, process and guarantee is as before; end the instance."""
    marks, processes, receipt = instance.marks(), instance.processes(), instance.receipt()
    with untouched(TREE, FLOAT, instance.group, instance.float_group):
        yield
    assert (instance.marks(), instance.processes()) == (marks, processes)
    assert vcpus_of(instance.receipt()) == vcpus_of(receipt)
    assert instance.receipt()["guarantee"] == "enforced"
    assert isolated() == instance.cpus
    ended_in_order(instance, instance.stop())


def renew(instance: Instance, program: ProgramDirectory, generation: int) -> None:
    """Renew the runner, for the *generation*-th time."""
    assert upgrade(instance, program).returncode == 0
    until(lambda: instance.receipt()["generation"] == generation, "the receipt")
    instance.running.wait_for(f"the runner is renewed generation={generation} program={program.digest}")


@pytest.mark.gate
def test_an_upgrade_leaves_the_partition_and_the_vcpus_alone(
    node_fixture: NodeFixture, program: ProgramDirectory
) -> None:
    instance = start(node_fixture, program)
    with left_alone(instance):
        renew(instance, program, 1)


@pytest.mark.node_only
def test_upgrades_after_programs_that_fail(node_fixture: NodeFixture, program: ProgramDirectory) -> None:
    """One that cannot import what it needs, and one that does not commit in time; then two of a program that can."""
    instance = start(node_fixture, program)
    with left_alone(instance):
        for number, (statements, reason) in enumerate(FAILURES.items(), 1):
            does(program, 3, statements)
            assert re.search(f"{reason}.*the program before continues", upgrade(instance, program).stderr)
            assert instance.running.output.count("the runner is not renewed") == number
        does(program, 0, "")
        for generation in (1, 2):
            renew(instance, program, generation)


def vcpus_of(receipt: dict[str, Any]) -> list[tuple[int, str, str]]:
    """Return the vCPU threads of a *receipt*: tid, cgroup and CPUs."""
    return [
        (each["tid"], each["cgroup"], each["allowed_cpus"]) for each in receipt["threads"] if each["role"] == "vcpu"
    ]


def isolated() -> CpuSet:
    return Cgroup(ROOT).cpus("cpuset.cpus.isolated")


def ended_in_order(instance: Instance, status: int) -> None:
    """Check that the guest of an *instance* that has ended was asked to power down, and that nothing is left."""
    assert status == 0, instance.running.output
    assert "ROM-GUEST-POWER-BUTTON" in instance.running.output
    assert "ended outcome=stopped status=0 faults=0" in instance.running.output
    gone(instance)


def gone(instance: Instance) -> None:
    """Wait until nothing is left of an *instance* that has ended."""
    instance.kubelet.reconcile()
    until(lambda: isolated() == CpuSet(), "the partition to be gone")
    until(lambda: not instance.group.path.exists(), "its cgroup to be removed")
    assert TREE.read("cpuset.cpus.exclusive") == ""


def taking_over(instance: Instance, program: ProgramDirectory) -> threading.Thread:
    """Upgrade to a *program* that takes long to take over; return at that moment the thread that waits for the answer."""
    does(program, 3, "sys = __import__('sys'); sys.stderr.write('taking over\\n'); sys.stderr.flush(); time.sleep(3)")
    thread = threading.Thread(target=upgrade, args=(instance, program))
    thread.start()
    instance.running.wait_for("taking over")
    return thread


@pytest.mark.node_only
def test_a_stop_during_an_upgrade_ends_the_guest_in_order(node_fixture: NodeFixture, program: ProgramDirectory) -> None:
    instance = start(node_fixture, program)
    asking = taking_over(instance, program)
    status = instance.stop()
    asking.join()
    ended_in_order(instance, status)
    assert "the runner is renewed generation=1" in instance.running.output


@pytest.mark.node_only
def test_a_runner_killed_during_an_upgrade_leaves_nothing(node_fixture: NodeFixture, program: ProgramDirectory) -> None:
    instance = start(node_fixture, program)
    members = members_of(instance.running.pid)
    asking = taking_over(instance, program)
    os.kill(instance.running.pid, signal.SIGKILL)
    asking.join()
    instance.running.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in members), "its processes to be gone")
    instance.stop()
    gone(instance)


@pytest.mark.node_only
def test_an_upgrade_in_the_containers_own_cgroup(kubelet: Kubelet, program: ProgramDirectory, tmp_path: Path) -> None:
    """Placement ``delegated``: the tree in the container's cgroup is taken over, and removed at the end."""
    does(program, 0, "")
    cpus, there = CpuSet.parse("2-4"), program.path.parent
    spec = spec_text(cpus, "[[network]]").replace("count = 3", 'count = 2\nplacement = "delegated"')
    instance = start_instance(
        kubelet,
        1,
        cpus,
        spec=spec,
        directory=tmp_path,
        privileged=True,
        cgroupfs="rw",
        more_mounts=[(there, str(there), "ro")],
    )
    instance.up()
    marks, processes = instance.marks(), instance.processes()
    assert {cgroup for cgroup, _ in marks.values()} == {f"{instance.scope}/instance"}
    with untouched(Cgroup(Path(f"{ROOT}{instance.scope}/instance"))):  # what is exec'ed is swept to the other one
        assert upgrade(instance, program).returncode == 0, instance.running.output
    assert (instance.marks(), instance.processes()) == (marks, processes)
    instance.running.kill()
    assert instance.running.wait() == 0, instance.running.output
    assert "ended outcome=stopped status=0 faults=0" in instance.running.output
