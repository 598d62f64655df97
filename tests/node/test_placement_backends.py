"""The placements on a real kernel, cancelled at every step and failed at every operation: nothing is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import RunnerError
from runner.instance.gate import StopRequest
from runner.instance.optional_parts import entered_cgroups
from runner.instance.parts.daemons import anchored
from runner.instance.supervisor import Faults, open_supervisor
from runner.kernel.child_processes import Command
from runner.placement.backends import ControllerPlacement, DelegatedPlacement, Placement
from tests.node.cgroups import ROOT, SECONDS, Cgroup, cgroup_of
from tests.node.instances import TREE, Controller, uid_of
from tests.node.standin_kubelet import Container, Kubelet, Pod
from tests.support.sweep import FAULT_INJECTOR, CancelAtStep

UID = uid_of(7)
CPUS = CpuSet([2, 3])
SLEEP = ("/usr/bin/sleep", "infinity")


@attrs.frozen
class PlacementFixture:
    """This process in the cgroup of a pod's container, as its init would be, and the placement under test."""

    scope: Cgroup
    placement: Placement
    faults: Faults = attrs.field(factory=Faults)

    def snapshot(self) -> dict[str, object]:
        """Return everything that must be the same before and after."""
        groups = [*self.scope.path.rglob("*/"), *TREE.path.glob("*/")]
        return {
            "own": cgroup_of(os.getpid()),
            "mask": os.sched_getaffinity(0),
            "groups": sorted(map(str, groups)),
            "control": self.scope.read("cgroup.subtree_control"),
            "members": self.scope.read("cgroup.procs"),
            "kind": self.scope.read("cgroup.type"),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        }

    async def hold(self) -> bool:
        """Hold the placement with a machine of one thread in it, and return that this was reached."""
        placement = self.placement
        async with (
            open_supervisor(StopRequest(), self.faults) as host,
            anchored(host, SLEEP) as anchors,
            entered_cgroups(host, placement, anchors) as active,
            host.processes.daemon(Command("qemu", SLEEP, entering=active.memory_cgroup_fd), 0) as machine,
        ):
            FAULT_INJECTOR.end()  # the start is over; the assertions below must not fail
            assert active.cgroups is not None
            assert cgroup_of(os.getpid()) == active.cgroups.float_cgroup
            assert [cgroup_of(anchor.process.pid) for anchor in anchors] == [active.cgroups.pod] * 2
            while host.procfs.name(machine.pid) != "sleep":  # it enters its cgroup before it executes its program
                await trio.sleep(0.001)
            active.admit(machine.pid)
            assert cgroup_of(machine.pid) == active.cgroups.float_cgroup
            active.confine(machine.pid)
            assert cgroup_of(machine.pid) == active.cgroups.instance
            assert os.sched_getaffinity(machine.pid) == set(placement.cpus)
            await trio.lowlevel.checkpoint()
        return True


@pytest.fixture(params=["controller", "delegated"])
def placement_fixture(request: pytest.FixtureRequest, kubelet: Kubelet, tmp_path: Path) -> Iterator[PlacementFixture]:
    pod = Pod(UID, (Container(("none",), cpus=CPUS),))
    kubelet.admit(pod)
    path = ROOT
    for part in pod.cgroup_path.parts:
        path /= part
        if not path.exists():
            path.mkdir()
            Cgroup(path).delegate()
    scope = Cgroup(path).child(f"cri-containerd-{'7' * 64}.scope", cpuset_cpus=CPUS)
    before = cgroup_of(os.getpid())
    # This process shares the controller's PID namespace, which is refused without the option.
    controller = Controller(kubelet, tmp_path / "sockets", "--insecure-trust-peer")
    socket = PurePosixPath(controller.socket)
    try:
        if request.param == "controller":
            controller.start()
        scope.write("cgroup.procs", os.getpid())
        yield PlacementFixture(
            scope,
            ControllerPlacement(CPUS, (2, 3), socket, UID)
            if request.param == "controller"
            else DelegatedPlacement(CpuSet([3]), (3,), CpuSet([2]), shared=False),
        )
    finally:
        Cgroup(ROOT / before.lstrip("/")).write("cgroup.procs", os.getpid())
        controller.end()
        scope.remove()
        kubelet.entries.clear()


async def test_entered_and_left(placement_fixture: PlacementFixture) -> None:
    await placement_fixture.hold()  # the domain stays, as memory that this process took in float is charged to it
    before = placement_fixture.snapshot()
    assert await placement_fixture.hold()
    assert placement_fixture.faults.sentences == []
    assert placement_fixture.snapshot() == before


@pytest.mark.node_only
async def test_cancelled_at_every_step(placement_fixture: PlacementFixture) -> None:
    await placement_fixture.hold()
    before = placement_fixture.snapshot()
    steps = n = 1
    while n <= steps:
        with trio.CancelScope() as scope:
            instrument = CancelAtStep(scope, n)
            trio.lowlevel.add_instrument(instrument)
            try:
                with trio.fail_after(2 * SECONDS):
                    if await placement_fixture.hold():
                        steps = max(steps, instrument.steps)
            finally:
                trio.lowlevel.remove_instrument(instrument)
        steps = max(steps, instrument.steps)
        assert placement_fixture.snapshot() == before, f"cancelled at step {n} of {steps}"
        assert placement_fixture.faults.sentences == [], f"cancelled at step {n} of {steps}"
        n += 1
    assert steps > 15


async def test_every_operation_fails_once(placement_fixture: PlacementFixture) -> None:
    """When any file cannot be opened or made, the start fails with a message, and everything is as before."""
    await placement_fixture.hold()
    before = placement_fixture.snapshot()
    refused = n = 0
    FAULT_INJECTOR.count = 0
    messages: list[str] = []
    while FAULT_INJECTOR.count >= n:
        n += 1
        placement_fixture.faults.sentences.clear()
        FAULT_INJECTOR.begin(n)
        try:
            with trio.fail_after(2 * SECONDS):
                await placement_fixture.hold()
        except* RunnerError as group:
            refused += 1
            messages.append(f"{n}: {group.exceptions}")
        finally:
            FAULT_INJECTOR.end()
        assert placement_fixture.faults.sentences == [], f"operation {n}"
        assert placement_fixture.snapshot() == before, f"operation {n}"
    assert refused > 3, (messages, placement_fixture.faults.sentences)
