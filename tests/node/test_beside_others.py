"""Instances beside what others do on a real node: a debugger's container, a paused one, a runtime's mask, a CPU that goes offline."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import ROOT, Cgroup, until
from tests.node.instances import Instance, NodeFixture

pytestmark = pytest.mark.usefixtures("rom")

CPUS = Path("/sys/devices/system/cpu")


def scope_of(instance: Instance) -> Cgroup:
    return Cgroup(ROOT / instance.scope.lstrip("/"))


@contextmanager
def debugger(node: NodeFixture, instance: Instance, *, listed_first: bool) -> Iterator[None]:
    """Hold a process of a container of its own in the instance's PID namespace, as ``kubectl debug --target`` has it.

    A directory of cgroupfs lists its children by a hash of their names, so that names are tried until one fits.
    """
    own = scope_of(instance)
    pod = Cgroup(own.path.parent)
    while True:
        beside = pod.child(f"cri-containerd-{os.urandom(32).hex()}.scope")
        found = [name for name in os.listdir(pod.path) if name in (own.path.name, beside.path.name)]  # noqa: PTH208
        if (found[0] == beside.path.name) is listed_first:
            break
        beside.path.rmdir()
    beside.write("cpuset.cpus", str(node.kubelet.default))
    inside = ["nsenter", f"--target={instance.running.pid}", "--pid", "sleep", "infinity"]
    with subprocess.Popen([*beside.entering(), *inside]) as shell:
        try:
            until(lambda: beside.read("cgroup.procs"), "the debugger to run")
            yield
        finally:
            shell.kill()
    until(lambda: not beside.path.exists() or not beside.read("cgroup.procs"), "the debugger to have ended")
    with contextlib.suppress(
        FileNotFoundError
    ):  # the kubelet removes what is left in the cgroup of a pod that it stops
        beside.path.rmdir()


@pytest.mark.parametrize("listed_first", [True, pytest.param(False, marks=pytest.mark.node_only)])
def test_a_debugger_in_its_pid_namespace_is_not_the_instance(node_fixture: NodeFixture, *, listed_first: bool) -> None:
    instance = node_fixture.start(1, "2-3")
    instance.up()
    with debugger(node_fixture, instance, listed_first=listed_first):
        node_fixture.kubelet.resize(instance.uid, CpuSet.parse("2,4"))
        until(lambda: instance.group.read("cpuset.cpus") == "2,4", "the vCPUs to be on the CPUs that the pod has now")
        until(lambda: {str(each.cpus) for each in instance.vcpus()} == {"2", "4"}, "each vCPU to be on one of them")
        assert instance.stop() == 0
    assert not instance.group.path.exists()
    assert "belongs to" not in node_fixture.controller.log.read_text()
    assert "another container's" not in node_fixture.controller.log.read_text()


@pytest.mark.parametrize("cgroupfs", ["ro", pytest.param("none", marks=pytest.mark.node_only)])
def test_an_instance_whose_container_is_paused_ends(node_fixture: NodeFixture, cgroupfs: str) -> None:
    """``docker pause``: the guest runs on, as what is in float is not in the container's cgroup, and SIGTERM ends it."""
    instance = node_fixture.start(1, "2-3", cgroupfs=cgroupfs)
    instance.up()
    scope = scope_of(instance)
    scope.write("cgroup.freeze", "1")
    until(lambda: "frozen 1" in scope.read("cgroup.events"), "the container to be frozen")
    instance.running.kill("TERM")
    assert instance.running.wait() == 0
    assert "the container's cgroup is frozen" in instance.running.output
    assert not scope.path.exists(), "the runtime has removed it, with the anchors"
    node_fixture.kubelet.stop(instance.uid)
    node_fixture.settle()


@pytest.mark.parametrize("runtime", ["crun", pytest.param("runc", marks=pytest.mark.node_only)])
def test_a_mask_of_the_container_runtime_does_not_narrow_an_instance(node_fixture: NodeFixture, runtime: str) -> None:
    """``CPUAffinity=`` of systemd's unit: since Linux 6.2 a process keeps such a mask in every cgroup."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0})
    try:
        instance = node_fixture.start(1, "2-3", runtime=runtime)
        instance.up()
        instance.is_placed()
        allowed = {str(each.cpus) for each in instance.threads() if each not in instance.vcpus()}
        assert allowed == {str(node_fixture.kubelet.default)}
        assert instance.stop() == 0
    finally:
        os.sched_setaffinity(0, before)


def test_a_cpu_that_goes_offline_is_reported_and_taken_again(node_fixture: NodeFixture) -> None:
    instance = node_fixture.start(1, "2-3")
    instance.up()
    online = CPUS / "cpu3/online"
    online.write_text("0")
    try:
        instance.running.wait_for("CPUs of vCPUs went offline")
    finally:
        online.write_text("1")
    instance.running.wait_for("CPUs of vCPUs are online again")
    until(lambda: sorted(str(each.cpus) for each in instance.vcpus()) == ["2", "3"], "each vCPU to have its CPU again")
    assert instance.stop() == 0
