"""Three instances at once on a real kernel, while one of them or their controller is killed in every way."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import Cgroup, until
from tests.node.forked_controllers import ForkedController
from tests.node.instances import (
    FLOAT,
    TREE,
    Controller,
    Instance,
    NodeFixture,
    marks_of,
    members_of,
    names,
    threads_of,
    uid_of,
    untouched,
)
from tests.node.minimal_pods import BYSTANDER
from tests.node.standin_kubelet import Container, Pod
from tests.support.soak import chance, times

pytestmark = [pytest.mark.many_cpus, pytest.mark.usefixtures("rom", "shown")]
SIZES = {1: "1-2,9-10", 2: "5,13", 3: "3-4,12"}
"""Instance → its CPUs, of 16 on two NUMA nodes (0-3,8-11 and 4-7,12-15); the third one's are on both."""
WEB = Pod(uid_of(9), (Container(("sleep", "infinity"), name="web", cpus=CpuSet.parse("6-7")),))
"""A Guaranteed pod that is not an instance."""
LATER = (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3)
"""Seconds after it answers at which a controller is killed."""


class Fleet:
    """The three instances of a node; one that a test has ended is started again by the next test."""

    def __init__(self, node_fixture: NodeFixture) -> None:
        self.node_fixture = node_fixture
        self.started: dict[int, Instance] = {}

    def start(self, number: int) -> Instance:
        self.started[number] = self.node_fixture.start(number, SIZES[number])
        return self.started[number]

    def up(self) -> tuple[Instance, ...]:
        """Start those that do not run, all at once, and return the three when they are up."""
        for number in SIZES:
            if uid_of(number) not in self.node_fixture.kubelet.running:
                self.start(number)
        for instance in self.started.values():
            instance.up()
        self.placed()
        return tuple(self.started[number] for number in SIZES)

    def placed(self) -> None:
        """Check that float is the kubelet's shared pool, and that each running instance is placed."""
        self.node_fixture.settle()
        for instance in self.started.values():
            if instance.uid in self.node_fixture.kubelet.running:
                instance.is_placed()

    def wait_removed(self, instance: Instance) -> None:
        """Give the CPUs of an ended *instance* back to the pool, and wait until nothing of it is left."""
        self.node_fixture.kubelet.reconcile()
        until(lambda: not instance.domain.path.exists(), "its domain to go")
        self.placed()


class IsolationMonitor:
    """Observes the whole tree again and again, and records violations of the isolation.

    The CPUs of an instance may belong neither to float, nor to another instance, nor to the mask of any other thread of the
    tree. One observation takes several reads, so that only instances whose CPUs are the same before and after count.
    """

    def __init__(self) -> None:
        self.observations = 0
        self.violations: list[str] = []
        self.stopped = threading.Event()

    def observe(self) -> None:
        before = instance_cpus()
        float_cpus = FLOAT.cpus()
        pids: list[str] = []
        for domain in TREE.children():
            with contextlib.suppress(OSError):  # it may just be removed
                pids += domain.read("cgroup.procs").split()
        threads = [thread for pid in pids for thread in threads_of(int(pid))]
        after = instance_cpus()
        for name, cpus in before.items():
            if after.get(name) != cpus:
                continue
            if not float_cpus.isdisjoint(cpus):
                self.violations.append(f"float has {float_cpus & cpus} of {name}")
            for other, theirs in before.items():
                if other < name and after.get(other) == theirs and not theirs.isdisjoint(cpus):
                    self.violations.append(f"{other} has {theirs & cpus} of {name}")
            pod = name.removeprefix("instance-").replace("-", "_")
            for thread in threads:
                of_the_instance = thread.cgroup.endswith(f"/{name}/vcpus") or pod in thread.cgroup
                if not of_the_instance and not thread.cpus.isdisjoint(cpus):
                    self.violations.append(f"{thread} may run on {thread.cpus & cpus} of {name}")
        self.observations += 1

    def observe_until_stopped(self) -> None:
        while not self.stopped.wait(0.05):
            try:
                self.observe()
            except Exception as error:  # noqa: BLE001 - the test fails with it, not the thread
                self.violations.append(repr(error))


def instance_cpus() -> dict[str, CpuSet]:
    """Return the name and the CPUs of every instance's cgroup that has some."""
    found = {}
    for domain in TREE.children():
        with contextlib.suppress(OSError):  # it may just be removed, and one has no vCPUs
            if cpus := Cgroup(domain.path / "vcpus").cpus("cpuset.cpus"):
                found[domain.path.name] = cpus
    return found


@contextlib.contextmanager
def isolation_monitored() -> Iterator[IsolationMonitor]:
    monitor = IsolationMonitor()
    thread = threading.Thread(target=monitor.observe_until_stopped)
    thread.start()
    try:
        yield monitor
    finally:
        monitor.stopped.set()
        thread.join()
    assert monitor.observations > 10
    assert monitor.violations == []


@pytest.fixture(scope="module")
def fleet(shared_node: NodeFixture) -> Fleet:
    return Fleet(shared_node)


@pytest.fixture
def shown(fleet: Fleet) -> Iterator[None]:
    """Show the output of the instances and of the controller when a test fails."""
    yield
    for instance in fleet.started.values():
        print(f"--- {instance.uid}\n{instance.running.output}")
    print(f"--- controller\n{fleet.node_fixture.controller.log.read_text()}")


# The order saves starts: each test uses the instances that the one before has left running.

# -- the controller dies ---------------------------------------------------------------------------------------------


class ShortLivedControllers:
    """Controllers that are killed soon after their start."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.ready: list[float] = []

    @contextlib.contextmanager
    def one(self, seconds: float | None = None) -> Iterator[None]:
        """Hold one from the moment at which it answers or, with *seconds*, so long after its start; it is killed afterwards."""
        begun = time.monotonic()
        with self.controller.log.open("ab") as log, ForkedController(self.controller.arguments, log) as process:
            try:
                if seconds is None:
                    until(self.controller.listens, "the controller to answer")
                    self.ready.append(time.monotonic() - begun)
                else:
                    time.sleep(seconds)  # the moment is what is tested: any
                yield
            finally:
                process.kill()

    def start_and_kill(self, seconds: float | None = None) -> None:
        """Start one and kill it after *seconds* or, without, as soon as it answers."""
        with self.one(seconds):
            pass


@contextlib.contextmanager
def short_lived_controllers(controller: Controller) -> Iterator[ShortLivedControllers]:
    """Replace the controller by short-lived ones until the block ends; then start it again."""
    controller.kill()
    yield ShortLivedControllers(controller)
    controller.start()


@pytest.mark.node_only
def test_the_controller_is_killed_again_and_again_under_three_instances(
    fleet: Fleet, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """At any moment, also while float changes for another pod: no vCPU thread changes its cgroup or mask."""
    seconds = chance()
    kubelet, three = fleet.node_fixture.kubelet, fleet.up()
    marks = [instance.marks() for instance in three]
    with (
        untouched(*(instance.group for instance in three)),
        short_lived_controllers(fleet.node_fixture.controller) as controllers,
    ):
        for number in range(times(10)):
            if number % 10 == 0:
                controllers.start_and_kill()
            else:
                controllers.start_and_kill(seconds.uniform(0, 1.5 * statistics.median(controllers.ready)))
            if number % 2:
                kubelet.reconcile()
            else:
                kubelet.admit(WEB)
            assert [marks_of(each) for each in marks] == marks
    record_testsuite_property("seconds from fork to answer", statistics.median(controllers.ready))
    kubelet.admit(WEB)
    fleet.placed()
    kubelet.reconcile()
    fleet.placed()
    assert [instance.marks() for instance in three] == marks


@pytest.mark.node_only
def test_the_controller_is_killed_while_an_instance_registers_and_deregisters(fleet: Fleet) -> None:
    a, b, c = fleet.up()
    assert c.stop() == 0
    fleet.wait_removed(c)
    marks = [instance.marks() for instance in (a, b)]
    with isolation_monitored(), untouched(a.group, b.group):
        with short_lived_controllers(fleet.node_fixture.controller) as controllers:
            c = fleet.start(3)
            c.running.wait_for("waiting for the controller")
            deadline = time.monotonic() + 10  # of the runner's 30 s; a start of the controller takes seconds here
            controllers.start_and_kill()
            for extra in LATER:  # the runner asks every 0.25 s
                if time.monotonic() < deadline:
                    controllers.start_and_kill(controllers.ready[-1] + extra)
            with controllers.one():  # a fresh process imports for many seconds on an emulated CPU that others load
                c.up()
        fleet.placed()
        with short_lived_controllers(fleet.node_fixture.controller) as controllers:
            c.running.kill()
            controllers.start_and_kill()
            for extra in LATER * 50:
                controllers.start_and_kill(controllers.ready[-1] + extra)
                if c.running.process.poll() is not None:
                    break
        assert c.stop() == 0
        assert "ended outcome=stopped status=0 faults=0" in c.running.output
        fleet.wait_removed(c)
    assert [instance.marks() for instance in (a, b)] == marks


# -- instances start and end ---------------------------------------------------------------------------------------


def test_three_at_once_while_another_pod_starts_and_ends(fleet: Fleet) -> None:
    """One ends alone and two at the same moment: each exclusive CPU always belongs to one instance alone."""
    kubelet = fleet.node_fixture.kubelet
    with isolation_monitored():
        a, b, c = fleet.up()
        kubelet.run(WEB)
        fleet.placed()
        assert FLOAT.cpus() == CpuSet.parse("0,8,11,14-15")
        assert b.stop() == 0
        fleet.wait_removed(b)
        b = fleet.start(2)
        kubelet.stop(WEB.uid, grace=0)
        kubelet.reconcile()
        b.up()
        fleet.placed()
        assert c.stop() == 0
        for instance in (b, a):
            instance.running.kill()
        assert (a.stop(), b.stop()) == (0, 0)
        for instance in (a, b, c):
            assert "faults=0" in instance.running.output
            fleet.wait_removed(instance)
    assert FLOAT.cpus() == CpuSet(cpu for cpus in kubelet.numa.values() for cpu in cpus)
    assert names(TREE) == [f"instance-{BYSTANDER}"]


@pytest.mark.node_only
def test_every_way_to_end_an_instance_leaves_nothing_and_the_others_unchanged(fleet: Fleet) -> None:
    kubelet = fleet.node_fixture.kubelet
    with isolation_monitored():
        a, b, c = fleet.up()  # all at the same moment

    def ended(instance: Instance, kill: Callable[[], object], *neighbours: Instance) -> None:
        members = members_of(instance.running.pid)
        marks = [each.marks() for each in neighbours]
        with untouched(*(each.group for each in neighbours)):
            kill()
            instance.running.wait()
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in members), "its processes to be gone")
            assert [each.marks() for each in neighbours] == marks

    ended(a, lambda: os.kill(a.running.pid, signal.SIGKILL), b, c)
    assert a.group.path.exists(), "its pod still exists, and so does its cgroup"
    again = Instance(kubelet, a.uid, a.cpus, kubelet.restart(a.uid))
    fleet.started[1] = again
    again.up()
    fleet.placed()
    ended(again, lambda: os.kill(again.running.pid, signal.SIGKILL), b, c)
    kubelet.stop(again.uid)
    fleet.wait_removed(again)
    ended(b, lambda: b.running.command("delete", "--force"), c)
    kubelet.stop(b.uid)
    fleet.wait_removed(b)
    ended(c, lambda: c.running.kill("KILL"))
    kubelet.stop(c.uid)
    fleet.wait_removed(c)
    assert names(TREE) == [f"instance-{BYSTANDER}"]
