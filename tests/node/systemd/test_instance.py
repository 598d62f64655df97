"""Instances where systemd is PID 1: the container is in a scope unit, which systemd ends as soon as it is empty."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.node.cgroups import Cgroup, until
from tests.node.instances import FLOAT, TREE, NodeFixture, untouched
from tests.node.standin_kubelet import Runtime, unit_state

pytestmark = pytest.mark.usefixtures("rom")
DIRTY = 40


@pytest.mark.parametrize("runtime", ["crun", pytest.param("runc", marks=pytest.mark.node_only)])
def test_the_scope_survives_when_all_but_the_anchors_leave(node_fixture: NodeFixture, runtime: Runtime) -> None:
    """Nor does it end when systemd reads its units again."""
    instance = node_fixture.start(1, "2-3", runtime=runtime)
    instance.up()
    node_fixture.settle()
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


def test_an_anchor_is_started_again_and_the_scope_lives(node_fixture: NodeFixture) -> None:
    """Systemd ends an empty scope faster than a process can be started: while one is restarted, the other is there."""
    instance = node_fixture.start(1, "2-3")
    instance.up()
    for _ in range(4):
        before = set(instance.processes()["anchor"])
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(set(instance.processes()["anchor"]) - {min(before)}) == 2, "another anchor")  # noqa: B023
    instance.is_placed()
    assert unit_state(instance.running.scope) == "active"
    assert instance.stop() == 0
    assert "faults=0" in instance.running.output


def test_without_an_anchor_the_scope_ends_and_the_status_reports_that_it_could_not_return(
    node_fixture: NodeFixture,
) -> None:
    """The guest runs on; the runner can neither return nor deregister, and the controller removes the cgroup later."""
    instance = node_fixture.start(1, "2-3", runtime="runc")
    instance.up()
    runner, marks = instance.running.pid, instance.marks()
    anchors = instance.processes()["anchor"]
    os.kill(runner, signal.SIGSTOP)  # otherwise it would start others, perhaps before systemd has ended the scope
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
    node_fixture.kubelet.reconcile()
    until(lambda: not instance.group.path.exists(), "the controller to remove the stale cgroup")
    node_fixture.settle()
