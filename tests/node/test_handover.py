"""CPUs that the kubelet gives to the next pod while the old guest still runs on them: real instances, in every order."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from runner.base.cpuset import CpuSet
from runner.base.errors import Status
from runner.kernel.cgroup_events import emptied
from tests.node.cgroups import Cgroup, task, until
from tests.node.instances import FLOAT, Instance, NodeFixture
from tests.node.test_instances import isolation_monitored

pytestmark = pytest.mark.usefixtures("rom")
CPUS = "2-3"
PRESS = """
import socket
console = socket.socket(socket.AF_UNIX)
console.connect("/run/instance-runner/console.sock")
console.sendall(b'{"write": true}\\n')
console.recv(4096)
console.sendall(b"d")
console.recv(4096)
"""
WAITING = "waiting for up to 600 s"


def taken_from(node: NodeFixture, old: Instance) -> None:
    """Have the kubelet take the CPUs of *old*, which runs on, and wait until the controller has seen it."""
    float_cpus = FLOAT.cpus()
    node.kubelet.take_back(old.uid)
    assert old.group.cpus() == CpuSet.parse(CPUS)
    assert FLOAT.cpus() == float_cpus, "float does not get what an instance runs on"


@contextlib.contextmanager
def undisturbed(old: Instance) -> Iterator[None]:
    """Check that *old* keeps its cgroup's CPUs, and its threads theirs, and that float has none of them."""
    marks = old.marks()
    yield
    assert old.marks() == marks
    assert old.group.cpus() == CpuSet.parse(CPUS)
    assert FLOAT.cpus().isdisjoint(CpuSet.parse(CPUS))


def waits_for(newcomer: Instance, old: Instance) -> None:
    assert f"instance '{old.uid}' still runs on '{CPUS}'" in newcomer.running.wait_for(WAITING)
    assert not newcomer.group.path.exists()


def test_the_kernel_reports_the_end_by_an_open_descriptor(tree: Cgroup) -> None:
    """Nothing else wakes the one that waits; a group that has been removed is empty."""
    group = tree.child("group")
    events = os.open(group.path / "cgroup.events", os.O_RDONLY)
    with contextlib.closing(os.fdopen(events)), task(group) as process:

        async def kill_it_meanwhile() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(emptied, events)
                await trio.testing.wait_all_tasks_blocked(0.1)
                assert nursery.child_tasks, "it waits"
                os.kill(process.pid, signal.SIGKILL)

        trio.run(kill_it_meanwhile)
        assert not group.populated()
        group.path.rmdir()
        trio.run(emptied, events)


@pytest.mark.gate
def test_a_newcomer_waits_for_a_deaf_guest_while_the_controller_is_replaced(node_fixture: NodeFixture) -> None:
    node, kubelet = node_fixture, node_fixture.kubelet
    old = node.start(1, CPUS, cgroupfs="ro")
    old.up()
    old.running.execute(sys.executable, "-c", PRESS)
    old.running.wait_for("ROM-GUEST-DEAF")
    with isolation_monitored():
        with undisturbed(old):
            taken_from(node, old)
            new = node.start(2, CPUS, cgroupfs="ro")
            waits_for(new, old)
            node.controller.kill()
            node.controller.start()
            old.running.kill()
            old.running.wait_for("asked to stop")
        new.up()
        assert old.running.wait() == Status.FORCED_OFF
        assert not old.group.path.exists()
        new.is_placed()
    assert new.running.output.count(WAITING) == 1
    assert old.stop() == Status.FORCED_OFF
    assert new.stop() == 0
    log = node.controller.log.read_text()
    assert f"instance waits for the end of another uuid={new.uid} cpus={CPUS} holder={old.uid}" in log
    kubelet.reconcile()
    until(lambda: not new.group.path.exists(), "its group to go")
    node.settle()


@pytest.mark.node_only
def test_the_old_one_is_killed_the_newcomer_leaves_and_a_third_one_comes(node_fixture: NodeFixture) -> None:
    """The second pod goes while it waits; the third waits for the first; a fourth for the third, both of which are killed."""
    node = node_fixture
    first = node.start(1, CPUS, cgroupfs="ro")
    first.up()
    with isolation_monitored():
        with undisturbed(first):
            taken_from(node, first)
            second = node.start(2, CPUS, cgroupfs="ro")
            waits_for(second, first)
            assert second.stop() == Status.STOPPED, "the start was given up"
            node.kubelet.take_back(second.uid)
            third = node.start(3, CPUS, cgroupfs="ro")
            waits_for(third, first)
        os.kill(first.running.pid, signal.SIGKILL)
        third.up()
        third.is_placed()
        node.kubelet.stop(first.uid)
        with undisturbed(third):
            node.kubelet.take_back(third.uid)
            fourth = node.start(4, CPUS, cgroupfs="ro")
            waits_for(fourth, third)
        third.running.command("delete", "--force")  # as the container runtime does when the grace is over
        fourth.up()
        fourth.is_placed()
    assert not second.group.path.exists()
