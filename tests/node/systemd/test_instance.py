"""Instances where systemd is PID 1: the container is in a scope unit of systemd's, which lives as long as somebody is in it."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.node.cgroups import Cgroup
from tests.node.instances import FLOAT, TREE, World, until, untouched
from tests.node.standin_kubelet import Runtime, unit_state

pytestmark = pytest.mark.usefixtures("rom")
DIRTY = 40


@pytest.mark.parametrize("runtime", ["crun", "runc"])
def test_the_scope_survives_the_leaving_of_everything_but_the_anchor(world: World, runtime: Runtime) -> None:
    """The unit is read anew meanwhile, and nothing changes."""
    instance = world.start(1, "2-3", runtime=runtime)
    instance.up()
    world.settle()
    instance.is_placed()
    marks = instance.marks()
    with untouched(FLOAT, instance.group):
        subprocess.run(["systemctl", "daemon-reload"], check=True)
        assert unit_state(instance.running.scope) == "active"
        assert Cgroup(instance.running.scope.path).populated()
    instance.is_placed()
    assert instance.marks() == marks
    assert "cpuset" in TREE.words("cgroup.subtree_control")
    assert unit_state(instance.running.scope) == "active"
    assert instance.stop() == 0
    assert "faults=0" in instance.running.output
    assert not instance.group.path.exists()


def test_an_anchor_is_started_again_and_the_scope_lives(world: World) -> None:
    """Systemd ends an empty scope quicker than a process can be started: while one is started, the other is there."""
    instance = world.start(1, "2-3")
    instance.up()
    for _ in range(4):
        before = set(instance.processes()["anchor"])
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(set(instance.processes()["anchor"]) - {min(before)}) == 2, "another anchor")  # noqa: B023
    instance.is_placed()
    assert unit_state(instance.running.scope) == "active"
    assert instance.stop() == 0
    assert "faults=0" in instance.running.output


def test_without_an_anchor_the_scope_dies_and_the_status_says_that_there_was_no_way_back(world: World) -> None:
    """The guest does not notice; the runner can neither return nor say who it is, and the controller tidies up later."""
    instance = world.start(1, "2-3", runtime="runc")
    instance.up()
    runner, marks = instance.running.pid, instance.marks()
    anchors = instance.processes()["anchor"]
    os.kill(runner, signal.SIGSTOP)  # it would start others, and systemd might or might not be quicker
    for anchor in anchors:
        os.kill(anchor, signal.SIGKILL)
    instance.running.scope.wait_gone()
    assert unit_state(instance.running.scope) in {"inactive", "failed"}
    assert instance.marks() == marks
    os.kill(runner, signal.SIGCONT)
    instance.running.wait_for("anchor was killed by SIGKILL")
    os.kill(runner, signal.SIGTERM)
    assert instance.running.wait() == DIRTY
    assert "could not return to the pod's cgroup" in instance.running.output
    instance.stop()
    world.kubelet.reconcile()
    until(lambda: not instance.group.path.exists(), "the controller to remove what is stale")
    world.settle()
