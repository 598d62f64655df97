"""Three instances at once on a real kernel, and everything that kills one of them, or their controller, under them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.cpuset import CpuSet
from tests.node.instances import (
    FLOAT,
    TREE,
    Controller,
    Instance,
    World,
    controller_of,
    kubelet_of,
    marks_of,
    members_of,
    names,
    threads_of,
    uid_of,
    until,
    untouched,
)
from tests.node.standin_kubelet import PROJECT, Container, Pod

pytestmark = pytest.mark.usefixtures("rom", "shown")
SIZES = {1: "1-2,9-10", 2: "5,13", 3: "3-4,12"}
"""The instances and their CPUs, of 16 on two NUMA nodes (0-3,8-11 and 4-7,12-15); the third spans both."""
WEB = Pod(uid_of(9), (Container(("sleep", "infinity"), name="web", cpus=CpuSet.parse("6-7")),))
"""A Guaranteed pod that is no instance."""
LATER = (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3)
"""Seconds after it answers at which a controller is killed."""


class Fleet:
    """The three instances of a node; those that a test has ended are started again by the next one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.started: dict[int, Instance] = {}

    def start(self, number: int) -> Instance:
        self.started[number] = self.world.start(number, SIZES[number])
        return self.started[number]

    def up(self) -> tuple[Instance, ...]:
        """Start at once what does not run, and return all three when they do."""
        for number in SIZES:
            if uid_of(number) not in self.world.kubelet.running:
                self.start(number)
        for instance in self.started.values():
            instance.up()
        self.placed()
        return tuple(self.started[number] for number in SIZES)

    def placed(self) -> None:
        """Check that float is what the kubelet says, and everything that runs where it belongs."""
        self.world.settle()
        for instance in self.started.values():
            if instance.uid in self.world.kubelet.running:
                instance.is_placed()

    def forgotten(self, instance: Instance) -> None:
        """Check that nothing is left of an *instance* that has ended, once the kubelet has given its CPUs back."""
        self.world.kubelet.reconcile()
        until(lambda: not instance.group.path.exists(), "its group to go")
        self.placed()


class Watch:
    """Looks at the whole tree again and again, and keeps what must never be seen.

    Between two looks that find the same instances with the same CPUs, nobody else may have had those CPUs: not float,
    not another instance, not one thread of the tree. The kernel is asked in several reads, so only what did not change
    from before them to after them is held against anybody.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.seen: list[str] = []
        self.over = threading.Event()

    def look(self) -> None:
        before = held()
        floating = FLOAT.cpus()
        threads = [thread for pid in TREE.read("cgroup.procs").split() for thread in threads_of(int(pid))]
        after = held()
        for name, cpus in before.items():
            if after.get(name) != cpus:
                continue
            if not floating.isdisjoint(cpus):
                self.seen.append(f"float has {floating & cpus} of {name}")
            for other, theirs in before.items():
                if other < name and after.get(other) == theirs and not theirs.isdisjoint(cpus):
                    self.seen.append(f"{other} has {theirs & cpus} of {name}")
            pod = name.removeprefix("instance-").replace("-", "_")
            for thread in threads:
                at_home = thread.cgroup.endswith(f"/{name}") or pod in thread.cgroup
                if not at_home and not thread.cpus.isdisjoint(cpus):
                    self.seen.append(f"{thread} may run on {thread.cpus & cpus} of {name}")
        self.looks += 1

    def go_on(self) -> None:
        while not self.over.wait(0.05):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - it is the test's to fail
                self.seen.append(repr(error))


def held() -> dict[str, CpuSet]:
    """Return the CPUs of every instance's group that has some."""
    found = {}
    for group in TREE.children():
        with contextlib.suppress(OSError):  # it may be going
            if group.path.name.startswith("instance-") and group.read("cpuset.cpus"):
                found[group.path.name] = group.cpus("cpuset.cpus")
    return found


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    watch = Watch()
    thread = threading.Thread(target=watch.go_on)
    thread.start()
    try:
        yield watch
    finally:
        watch.over.set()
        thread.join()
    assert watch.looks > 10
    assert watch.seen == []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, numa: dict[int, CpuSet]) -> Iterator[World]:
    """Return a node that all of these tests share, as a start is most of what they take."""
    directory = tmp_path_factory.mktemp("node")
    with kubelet_of(directory, numa) as kubelet, controller_of(kubelet, directory) as controller:
        yield World(kubelet, controller, directory)


@pytest.fixture(scope="module")
def fleet(world: World) -> Fleet:
    return Fleet(world)


@pytest.fixture
def shown(fleet: Fleet) -> Iterator[None]:
    """Show what the instances and the controller have said when a test fails."""
    yield
    for instance in fleet.started.values():
        print(f"--- {instance.uid}\n{instance.running.output}")
    print(f"--- controller\n{fleet.world.controller.log.read_text()}")


# The order saves starts: every test uses what the one before has left running.

# -- the controller dies ---------------------------------------------------------------------------------------------

FORKED = """
import os, sys
from runner.controller.main import main
for _ in sys.stdin:
    child = os.fork()
    if not child:
        os._exit(main(sys.argv[1:]))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""
"""Starts controllers without the second that an emulated CPU takes to import one."""


class Mortal:
    """Controllers that live only for a moment."""

    def __init__(self, controller: Controller, process: subprocess.Popen[str]) -> None:
        self.controller, self.process = controller, process
        self.ready: list[float] = []

    def live(self, seconds: float | None = None) -> None:
        """Start one and kill it after *seconds* or, without, as soon as it answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        pid = int(self.process.stdout.readline())
        begun = time.monotonic()
        if seconds is None:
            until(self.controller.listens, "the controller to answer")
            self.ready.append(time.monotonic() - begun)
        else:
            time.sleep(seconds)  # the moment is what is tested: any
        os.kill(pid, signal.SIGKILL)
        assert self.process.stdout.readline() == "ended\n"


@contextlib.contextmanager
def mortal(controller: Controller) -> Iterator[Mortal]:
    """Have the controller replaced by ones that are killed at once; afterwards there is one again that stays."""
    controller.kill()
    argv = [sys.executable, "-c", FORKED, *controller.argv[3:]]
    with (
        controller.log.open("ab") as log,
        subprocess.Popen(
            argv,
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=controller.environment,
            text=True,
        ) as process,
    ):
        yield Mortal(controller, process)
    controller.start()


def test_the_controller_is_killed_a_hundred_times_under_three_instances(
    fleet: Fleet, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """At any moment of its life, float's changes for another pod among them; no vCPU thread notices."""
    seed = random.randrange(1 << 32)  # noqa: S311 - no secret
    print(f"seed {seed}")
    chance = random.Random(seed)  # noqa: S311
    kubelet, three = fleet.world.kubelet, fleet.up()
    marks = [instance.marks() for instance in three]
    with untouched(*(instance.group for instance in three)), mortal(fleet.world.controller) as controllers:
        for number in range(100):
            if number % 10 == 0:
                controllers.live()
            else:
                controllers.live(chance.uniform(0, 1.5 * statistics.median(controllers.ready)))
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


def test_the_controller_is_killed_while_an_instance_registers_and_deregisters(fleet: Fleet) -> None:
    a, b, c = fleet.up()
    assert c.stop() == 0
    fleet.forgotten(c)
    marks = [instance.marks() for instance in (a, b)]
    with watched(), untouched(a.group, b.group):
        with mortal(fleet.world.controller) as controllers:
            c = fleet.start(3)
            c.running.wait_for("waiting for the controller")
            controllers.live()
            for extra in LATER:  # the runner asks every 0.25 s
                controllers.live(controllers.ready[-1] + extra)
        c.up()
        fleet.placed()
        with mortal(fleet.world.controller) as controllers:
            c.running.kill()
            controllers.live()
            for extra in LATER * 50:
                controllers.live(controllers.ready[-1] + extra)
                if c.running.process.poll() is not None:
                    break
        assert c.stop() == 0
        assert "ended outcome=stopped status=0 faults=0" in c.running.output
        fleet.forgotten(c)
    assert [instance.marks() for instance in (a, b)] == marks


# -- the instances come and go ---------------------------------------------------------------------------------------


def test_three_at_once_beside_another_pod_that_comes_and_goes(fleet: Fleet) -> None:
    """They end one alone and two at the same moment: every CPU is always one instance's alone."""
    kubelet = fleet.world.kubelet
    with watched():
        a, b, c = fleet.up()
        kubelet.run(WEB)
        fleet.placed()
        assert FLOAT.cpus() == CpuSet.parse("0,8,11,14-15")
        assert b.stop() == 0
        fleet.forgotten(b)
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
            fleet.forgotten(instance)
    assert FLOAT.cpus() == CpuSet(cpu for cpus in kubelet.numa.values() for cpu in cpus)
    assert FLOAT.read("cgroup.threads") == ""
    assert names(TREE) == ["float"]


def test_whatever_ends_an_instance_leaves_nothing_and_the_others_alone(fleet: Fleet) -> None:
    kubelet = fleet.world.kubelet
    with watched():
        a, b, c = fleet.up()  # all at the same moment

    def dead(instance: Instance, kill: Callable[[], object], *neighbours: Instance) -> None:
        members = members_of(instance.running.pid)
        marks = [each.marks() for each in neighbours]
        with untouched(*(each.group for each in neighbours)):
            kill()
            instance.running.wait()
            until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in members), "its processes to be gone")
            assert [each.marks() for each in neighbours] == marks

    dead(a, lambda: os.kill(a.running.pid, signal.SIGKILL), b, c)
    assert a.group.path.exists(), "its pod lives, and so does its group"
    again = Instance(kubelet, a.uid, a.cpus, kubelet.restart(a.uid))
    fleet.started[1] = again
    again.up()
    fleet.placed()
    dead(again, lambda: os.kill(again.running.pid, signal.SIGKILL), b, c)
    kubelet.stop(again.uid)
    fleet.forgotten(again)
    dead(b, lambda: b.running.command("delete", "--force"), c)
    kubelet.stop(b.uid)
    fleet.forgotten(b)
    dead(c, lambda: c.running.kill("KILL"))
    kubelet.stop(c.uid)
    fleet.forgotten(c)
    assert names(TREE) == ["float"]
