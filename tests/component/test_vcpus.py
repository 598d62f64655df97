"""vCPUs that are plugged and unplugged while a guest runs, and CPUs that the container loses: with a fake QEMU."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, PlacementError, RunnerError, Status, explain
from runner.cli.ctl import answer_lines
from runner.cli.instance_requests import ask_instance
from runner.facts.roots import Roots
from runner.instance.change.vcpus import Vcpus
from runner.instance.parts.cgroups.affinity import FloatMask, pinned_off_vcpus
from runner.instance.parts.daemons import RestartedChild
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.instance.timeouts import InstanceTimeouts
from runner.placement.backends import AffinityPlacement, Placement
from runner.plan.instance import InstancePlan
from tests.support.fake_cgroupfs import fake_sysfs
from tests.support.fake_host import FakeHost
from tests.support.json_schemas import fitting_answer

CPUS = CpuSet(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
NEWEST: dict[str, object] = {"major": 11, "minor": 1}
"""A QEMU that may unplug vCPUs without KVM."""
GROWING = "[cpu]\ncount = 1\n[hotplug]\ncpus = 2\n"


async def run(
    fake_host: FakeHost,
    plan: InstancePlan,
    act: Callable[[], Awaitable[None]],
    status: Status = Status.STOPPED,
    *,
    stop: bool = True,
) -> GuestEnd:
    """Run *plan* and, while its guest runs, *act*; then stop it, and check how it ended and that nothing is left."""
    before = fake_host.snapshot()
    ended = await fake_host.run(plan, meanwhile=lambda _: fake_host.act_while_it_runs(act, stop=stop))
    assert isinstance(ended, GuestEnd)
    assert ended.status is status, ended
    assert fake_host.snapshot() == before
    return ended


async def asked(plan: InstancePlan, method: str, **params: object) -> Any:
    return fitting_answer(method, await ask_instance(plan.state_directory, method, params))


def vcpus_of_receipt(directory: PurePosixPath) -> dict[int, str]:
    threads = json.loads(Path(directory / "receipt.json").read_text())["threads"]
    return {each["vcpu"]: each["allowed_cpus"] for each in threads if each["role"] == "vcpu"}


def vcpus_of_qemu(fake_host: FakeHost) -> list[int]:
    found = fake_host.records("qemu", "vcpus")
    return list(found[-1]["indexes"]) if found else [0]


def release(fake_host: FakeHost) -> None:
    """Have the guest release the vCPU that it releases late."""
    Path(f"{fake_host.log_file}.released").touch()


async def test_a_vcpu_is_plugged_while_the_guest_is_stopped_and_unplugged(fake_host: FakeHost) -> None:
    plan = fake_host.plan(GROWING, qemu=NEWEST)
    first = plan.placement.pins[0]
    [other] = CPUS - CpuSet([first]) if len(CPUS) == 2 else [min(CPUS - CpuSet([first]))]

    async def act() -> None:
        shown = await asked(plan, "cpu.list")
        assert [each["cpu"] for each in shown["vcpus"]] == [first]
        assert (shown["unused"], shown["most"]) == (str(CPUS - CpuSet([first])), 2)
        answer = await asked(plan, "cpu.set", count=2)
        assert [each["plugged_later"] for each in answer["vcpus"]] == [False, True]
        assert vcpus_of_qemu(fake_host) == [0, 1]
        assert sorted(vcpus_of_receipt(plan.state_directory)) == [0, 1]
        for each in answer["vcpus"]:
            assert os.sched_getaffinity(each["thread"]) == {each["cpu"]}
        assert len({each["cpu"] for each in answer["vcpus"]}) == 2
        commands = fake_host.commands()
        assert commands.index("stop") < commands.index("device_add") < len(commands) - 1 - commands[::-1].index("cont")
        status = await asked(plan, "status")
        assert (status["guest"], status["vcpus"], status["most_vcpus"]) == ("running", 2, 2)
        assert "2 on CPUs" in "\n".join(answer_lines(status))
        lines = list(answer_lines(answer))
        assert lines[0].split() == ["VCPU", "THREAD", "CPU", "PLUGGED"]
        assert lines[2].split()[-1] == "later"
        assert any(line.startswith("the guest paused for ") for line in lines)
        assert await asked(plan, "cpu.set", count=2)  # nothing to do
        assert fake_host.commands().count("device_add") == 1

        answer = await asked(plan, "cpu.set", count=1)
        assert len(answer["vcpus"]) == 1
        assert vcpus_of_qemu(fake_host) == [0]
        assert list(vcpus_of_receipt(plan.state_directory)) == [0]
        assert (await asked(plan, "status"))["placement"]["misplaced"] == []
        assert fake_host.commands().count("stop") == 1, "to unplug, the guest must run"

    if len(CPUS) == 2:
        assert other is not None
    await run(fake_host, plan, act)


async def test_a_receipt_that_cannot_be_written_undoes_no_change(fake_host: FakeHost) -> None:
    """The volume of the state directory is full for a while: the vCPU stays, and the receipt follows."""
    plan = fake_host.plan(GROWING, qemu=NEWEST)
    obstacle = Path(plan.state_directory / "receipt.json.new")

    async def act() -> None:
        for count, before in ((2, 1), (1, 2)):
            obstacle.mkdir()
            assert len((await asked(plan, "cpu.set", count=count))["vcpus"]) == count
            assert vcpus_of_qemu(fake_host) == list(range(count))
            assert len(vcpus_of_receipt(plan.state_directory)) == before
            obstacle.rmdir()
            while len(vcpus_of_receipt(plan.state_directory)) != count:
                await trio.sleep(0.01)

    await run(fake_host, plan, act)


async def test_vcpus_of_the_start_can_be_unplugged_but_the_first(fake_host: FakeHost) -> None:
    plan = fake_host.plan("[cpu]\ncount = 2\n[hotplug]\ncpus = 2\n", qemu=NEWEST | {"vcpu_del": "silently"})

    async def act() -> None:
        answer = await asked(plan, "cpu.set", count=1)
        assert len(answer["vcpus"]) == 1
        with pytest.raises(RunnerError, match="this machine has 1 to 2"):
            await asked(plan, "cpu.set", count=0)

    await run(fake_host, plan, act)


REFUSED = {
    "below one": (GROWING, 0, "cannot have 0 vCPUs: this machine has 1 to 2"),
    "beyond what the machine can have": (GROWING, 3, "hotplug.cpus to more and start the instance again"),
    "beyond the container's CPUs": (
        "[hotplug]\ncpus = 900\n",
        900,
        "each vCPU has one of its own; give the container more",
    ),
    "a machine that was not started for it": ("", 2, "set hotplug.cpus to the most that it may have"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_is_refused_before_anything_is_touched(fake_host: FakeHost, case: str) -> None:
    spec, count, reason = REFUSED[case]
    plan = fake_host.plan(spec)

    async def act() -> None:
        with pytest.raises(RunnerError) as refused:
            await asked(plan, "cpu.set", count=count)
        assert reason in explain(refused.value)
        assert {"stop", "device_add", "device_del"}.isdisjoint(fake_host.commands())
        for wrong in ("2", True, None, 1.5):
            with pytest.raises(RunnerError, match="'count' must be a whole number"):
                await asked(plan, "cpu.set", count=wrong)

    await run(fake_host, plan, act)


FAILURES: dict[str, tuple[dict[str, object], str]] = {
    "QEMU refuses it": ({"vcpu_add": "refused"}, "refused by the fake"),
    "its thread cannot be pinned": ({"vcpu_add": "gone"}, "cannot pin thread 4000000"),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_vcpu_that_cannot_be_plugged_or_placed_is_taken_back(fake_host: FakeHost, case: str) -> None:
    behaviour, reason = FAILURES[case]
    plan = fake_host.plan(GROWING, qemu=NEWEST | behaviour)

    async def act() -> None:
        before = vcpus_of_receipt(plan.state_directory)
        with pytest.raises(RunnerError, match=reason):
            await asked(plan, "cpu.set", count=2)
        assert vcpus_of_qemu(fake_host) == [0]
        assert vcpus_of_receipt(plan.state_directory) == before
        status = await asked(plan, "status")
        assert (status["guest"], status["vcpus"], status["placement"]["misplaced"]) == ("running", 1, [])
        assert (await asked(plan, "cpu.list"))["unused"] == str(CPUS - CpuSet(plan.placement.pins))

    await run(fake_host, plan, act)


@pytest.mark.parametrize("released", [None, "late"])
async def test_a_vcpu_that_cannot_be_taken_back_is_reported(fake_host: FakeHost, released: str | None) -> None:
    """It has no place then; the next change begins with it, and the guest may release it late."""
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, vcpu_released=0.2, vcpu_looked=0.05)
    plan = fake_host.plan(GROWING, qemu=NEWEST | {"vcpu_add": "gone", "vcpu_del": released})

    async def act() -> None:
        with pytest.raises(
            RunnerError, match=r"cannot pin thread 4000000.*; and not all of it is undone: cannot unplug"
        ):
            await asked(plan, "cpu.set", count=2)
        status = await asked(plan, "status")
        assert (status["guest"], status["vcpus"], status["placement"]["misplaced"]) == ("running", 1, [])
        assert list(vcpus_of_receipt(plan.state_directory)) == [0]
        if released is None:
            with pytest.raises(RunnerError, match="cannot unplug vCPU 1"):
                await asked(plan, "cpu.set", count=1)
            return
        release(fake_host)
        while vcpus_of_qemu(fake_host) != [0]:
            await trio.sleep(0.01)
        assert len((await asked(plan, "cpu.set", count=1))["vcpus"]) == 1

    await run(fake_host, plan, act)


@pytest.mark.parametrize("again", ["deaf", "refused"])
async def test_a_guest_that_does_not_run_on_is_no_success(fake_host: FakeHost, again: str) -> None:
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, guest_runs=0.2)
    plan = fake_host.plan(GROWING, qemu=NEWEST | {"cont_again": again})

    async def act() -> None:
        with pytest.raises(RunnerError, match=r"the guest does not continue, and the instance ends: "):
            await asked(plan, "cpu.set", count=2)

    await run(fake_host, plan, act, stop=False)
    assert "asked to stop reason=the guest does not continue" in fake_host.logged()


async def test_nothing_is_unplugged_where_the_containers_cpus_cannot_be_read(
    fake_host: FakeHost, container: Container
) -> None:
    plan = fake_host.plan(TWO, qemu=NEWEST)

    async def act() -> None:
        container.hidden = True
        with pytest.raises(RunnerError, match="cannot read which CPUs the container has"):
            await asked(plan, "cpu.set", count=1)
        assert "device_del" not in fake_host.commands()
        assert sorted(vcpus_of_receipt(plan.state_directory)) == [0, 1]

    await run(fake_host, plan, act)


@pytest.mark.parametrize("kept", [None, "later"])
async def test_a_guest_that_keeps_a_vcpu_keeps_it(fake_host: FakeHost, kept: str | None) -> None:
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, vcpu_released=0.2 if kept is None else 5, vcpu_looked=0.05)
    plan = fake_host.plan(GROWING, qemu=NEWEST | {"vcpu_del": kept})

    async def act() -> None:
        await asked(plan, "cpu.set", count=2)
        if kept == "later":  # as soon as the guest can be asked
            assert len((await asked(plan, "cpu.set", count=1))["vcpus"]) == 1
            return
        with pytest.raises(RunnerError, match=r"has not released it within 0\.2 s, and keeps it"):
            await asked(plan, "cpu.set", count=1)
        assert sorted(vcpus_of_receipt(plan.state_directory)) == [0, 1]
        assert (await asked(plan, "status"))["placement"]["misplaced"] == []

    await run(fake_host, plan, act)


async def test_a_vcpu_that_is_released_late_or_unasked_is_dropped(fake_host: FakeHost, container: Container) -> None:
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, vcpu_released=0.1)
    plan = fake_host.plan(GROWING, qemu=NEWEST | {"vcpu_del": "late"})
    assert container.cpus == CPUS

    async def act() -> None:
        await asked(plan, "cpu.set", count=2)
        with pytest.raises(RunnerError, match="and keeps it"):
            await asked(plan, "cpu.set", count=1)
        assert (await asked(plan, "status"))["vcpus"] == 2
        release(fake_host)
        while "vCPUs released by the guest count=1 from=2" not in fake_host.logged():
            await trio.sleep(0.01)
        while list(vcpus_of_receipt(plan.state_directory)) != [0]:
            await trio.sleep(0.01)
        status = await asked(plan, "status")
        assert (status["vcpus"], status["placement"]["misplaced"], status["ready"]) == (1, [], True)

    await run(fake_host, plan, act)


async def test_a_change_begins_with_what_the_guest_has_released_late(fake_host: FakeHost) -> None:
    """Where the CPUs of the container cannot change, nothing looks at the threads again and again."""
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, vcpu_released=0.1)
    plan = fake_host.plan(GROWING, qemu=NEWEST | {"vcpu_del": "late"})

    async def act() -> None:
        await asked(plan, "cpu.set", count=2)
        with pytest.raises(RunnerError, match="and may release it later"):
            await asked(plan, "cpu.set", count=1)
        release(fake_host)
        while vcpus_of_qemu(fake_host) != [0]:
            await trio.sleep(0.01)
        assert len((await asked(plan, "cpu.set", count=1))["vcpus"]) == 1
        assert list(vcpus_of_receipt(plan.state_directory)) == [0]
        assert fake_host.commands().count("device_del") == 1

    await run(fake_host, plan, act)


async def test_without_kvm_an_old_qemu_unplugs_no_vcpu(fake_host: FakeHost) -> None:
    plan = fake_host.plan(GROWING)

    async def act() -> None:
        await asked(plan, "cpu.set", count=2)
        with pytest.raises(RunnerError, match=r"without KVM, QEMU 7\.2\.0 crashes some time after it; use QEMU 11\.1"):
            await asked(plan, "cpu.set", count=1)
        assert "device_del" not in fake_host.commands()
        assert (await asked(plan, "status"))["vcpus"] == 2

    await run(fake_host, plan, act)


async def test_without_kvm_no_vcpu_is_plugged_after_one_was_unplugged(fake_host: FakeHost) -> None:
    plan = fake_host.plan(GROWING, qemu=NEWEST)

    async def act() -> None:
        await asked(plan, "cpu.set", count=2)
        await asked(plan, "cpu.set", count=1)
        with pytest.raises(RunnerError, match="without KVM QEMU crashes when another is plugged"):
            await asked(plan, "cpu.set", count=2)

    await run(fake_host, plan, act)


# -- CPUs that the container loses -----------------------------------------------------------------------------------


class ResizedFloat(FloatMask):
    """Float of a container whose CPUs may change, unlike those of CPU masks alone."""

    container: Container

    @property
    def loses_cpus(self) -> bool:
        return True

    def container_cpus(self) -> CpuSet:
        if self.container.hidden:
            raise HostError("cannot read which CPUs the container has")
        return self.container.cpus

    async def follow(self, placement: Placement) -> None:
        if self.container.controller_away:
            raise PlacementError("the controller is away")
        await super().follow(placement)


@attrs.define
class Container:
    """The CPUs of the container, as a kubelet changes them."""

    cpus: CpuSet = CPUS
    hidden: bool = False
    """Whether its CPUs cannot be read."""
    controller_away: bool = False
    refused: frozenset[tuple[int, int]] = frozenset()
    """Threads, each with a CPU that the cgroup of the vCPUs lacks."""

    @asynccontextmanager
    async def enter(
        self, supervisor: Supervisor, placement: Placement, anchors: Sequence[RestartedChild]
    ) -> AsyncIterator[FloatMask]:
        """Hold a placement by CPU masks in this container."""
        assert isinstance(placement, AffinityPlacement)
        async with pinned_off_vcpus(supervisor, placement, anchors):
            active = ResizedFloat(placement, supervisor)
            active.container = self
            yield active


@pytest.fixture
def container(fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Container:
    container, set_mask = Container(), os.sched_setaffinity

    def set_unless_refused(tid: int, cpus: Iterable[int]) -> None:
        wanted = set(cpus)
        if wanted and all((tid, cpu) in container.refused for cpu in wanted):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        set_mask(tid, wanted)

    monkeypatch.setattr(os, "sched_setaffinity", set_unless_refused)
    fake_host.timeouts = InstanceTimeouts(cpus_looked=0.02, vcpu_looked=0.05)
    fake_host.enter = container.enter
    return container


TWO = "[cpu]\ncount = 2\n[hotplug]\ncpus = 2\n"


async def test_vcpus_without_a_cpu_are_unplugged_and_the_others_moved(
    fake_host: FakeHost, container: Container
) -> None:
    plan = fake_host.plan(TWO, qemu=NEWEST)
    kept = max(plan.placement.pins)  # whichever vCPU has it: the last one is unplugged

    async def act() -> None:
        container.cpus = CpuSet([kept])
        while "vCPUs placed anew" not in fake_host.logged():
            await trio.sleep(0.01)
        assert vcpus_of_qemu(fake_host) == [0]
        assert vcpus_of_receipt(plan.state_directory) == {0: str(kept)}
        status = await asked(plan, "status")
        assert (status["ready"], status["vcpus"], status["placement"]["misplaced"]) == (True, 1, [])

    await run(fake_host, plan, act)


async def test_cpus_that_are_exchanged_move_a_vcpu_and_unplug_none(fake_host: FakeHost, container: Container) -> None:
    plan = fake_host.plan(GROWING, qemu=NEWEST)
    [first] = plan.placement.pins
    container.cpus = CpuSet([first])
    other = CpuSet([next(cpu for cpu in CPUS if cpu != first)])

    async def act() -> None:
        container.cpus = other
        while vcpus_of_receipt(plan.state_directory) != {0: str(other)}:
            await trio.sleep(0.01)
        assert "device_del" not in fake_host.commands()

    await run(fake_host, plan, act)


async def test_the_vcpus_leave_the_lost_cpus_before_the_guest_releases_any(
    fake_host: FakeHost, container: Container
) -> None:
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, vcpu_released=1)
    plan = fake_host.plan(TWO, qemu=NEWEST | {"vcpu_del": None})
    first, second = plan.placement.pins

    async def act() -> None:
        vcpus = (await asked(plan, "cpu.list"))["vcpus"]
        container.cpus = CpuSet([second])
        while "device_del" not in fake_host.commands():
            await trio.sleep(0.01)
        assert first != second
        assert [os.sched_getaffinity(each["thread"]) for each in vcpus] == [{second}, {second}]

    await run(fake_host, plan, act, Status.CPUS_LOST, stop=False)


async def test_lost_cpus_do_not_wait_for_a_guest_to_release_a_disk(fake_host: FakeHost, container: Container) -> None:
    plan = fake_host.plan(f"{TWO}disks = 1\n", qemu=NEWEST | {"unplugs": False}, grace=2)
    kept = max(plan.placement.pins)
    (fake_host.root / "disk").write_bytes(bytes(1 << 20))
    refused = list[str]()

    async def detach() -> None:
        with pytest.raises(RunnerError) as error:
            await asked(plan, "disk.detach", name="disk0")
        refused.append(explain(error.value))

    async def act() -> None:
        await asked(plan, "disk.attach", path=str(fake_host.root / "disk"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(detach)
            while "device_del" not in fake_host.commands():
                await trio.sleep(0.005)
            container.cpus = CpuSet([kept])
        while vcpus_of_receipt(plan.state_directory) != {0: str(kept)}:
            await trio.sleep(0.01)

    await run(fake_host, plan, act)
    lost = f"the container no longer has the CPUs '{CPUS - CpuSet([kept])}' of some vCPUs; it has '{kept}'"
    later = "the guest may release the disk 'disk0' later; detach it again"
    assert refused == [f"cannot change a disk: {lost}; {later}"]


@pytest.mark.parametrize(
    ("spec", "qemu", "reason"),
    [
        (TWO, {"vcpu_del": None}, "the guest has not released it within 0.2 s"),
        ("[cpu]\ncount = 2\n", {}, "the machine was not started for it; set hotplug.cpus to the most that it may have"),
    ],
)
async def test_a_guest_that_gives_up_no_vcpu_is_powered_down_with_a_status_of_its_own(
    fake_host: FakeHost,
    container: Container,
    monkeypatch: pytest.MonkeyPatch,
    spec: str,
    qemu: dict[str, object],
    reason: str,
) -> None:
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, vcpu_released=0.2)
    plan = fake_host.plan(spec, qemu=NEWEST | qemu)
    seen: list[str] = []
    unplug, looked = Vcpus._unplug, trio.Event()

    async def unplug_then(vcpus: Vcpus, count: int) -> None:
        await looked.wait()
        await unplug(vcpus, count)

    monkeypatch.setattr(Vcpus, "_unplug", unplug_then)

    async def act() -> None:
        container.cpus = CpuSet([min(CPUS)])
        while qemu and "CPUs of vCPUs are lost" not in fake_host.logged():
            await trio.sleep(0.01)
        if qemu:
            seen.append((await asked(plan, "status"))["not_ready"])
        looked.set()
        while "the guest cannot continue" not in fake_host.logged():
            await trio.sleep(0.01)

    ended = await run(fake_host, plan, act, Status.CPUS_LOST, stop=False)
    assert reason in ended.detail
    assert f"the container no longer has the CPUs '{CPUS - CpuSet([min(CPUS)])}' of some vCPUs" in ended.detail
    assert "system_powerdown" in fake_host.commands()
    assert ["the container no longer has" in each for each in seen] == [True] * bool(qemu)


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("mask", ["another's", "all"])
async def test_a_mask_that_another_program_has_changed_is_put_right(
    fake_host: FakeHost, container: Container, mask: str, *, visible: bool
) -> None:
    """Linux before 6.2 does the second when the CPUs of the cgroup change. In a pod its own cgroup may not be *visible*."""
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, displaced=0.05)
    plan = fake_host.plan(TWO, qemu=NEWEST)
    assert container.cpus == CPUS

    async def act() -> None:
        container.cpus = CPUS if visible else CpuSet()
        first, second = (await asked(plan, "cpu.list"))["vcpus"]
        os.sched_setaffinity(second["thread"], {first["cpu"]} if mask == "another's" else CPUS)
        while os.sched_getaffinity(second["thread"]) != {second["cpu"]}:
            await trio.sleep(0.01)
        assert "device_del" not in fake_host.commands()
        assert "CPUs of vCPUs are lost" not in fake_host.logged()
        assert (await asked(plan, "status"))["ready"]

    await run(fake_host, plan, act)


async def test_threads_that_cannot_be_on_their_cpus_are_believed_after_a_while(
    fake_host: FakeHost, container: Container
) -> None:
    """The container's cgroup names the CPU still: the kubelet writes that last."""
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, displaced=0.5)
    plan = fake_host.plan(TWO, qemu=NEWEST)
    assert container.cpus == CPUS
    kept = CpuSet([plan.placement.pins[0]])

    async def act() -> None:
        second = (await asked(plan, "cpu.list"))["vcpus"][1]
        began = trio.current_time()
        os.sched_setaffinity(second["thread"], kept)
        container.refused = frozenset({(second["thread"], second["cpu"])})
        while vcpus_of_qemu(fake_host) != [0] or vcpus_of_receipt(plan.state_directory) != {0: str(kept)}:
            await trio.sleep(0.01)
        assert trio.current_time() >= began + 0.5

    await run(fake_host, plan, act)


async def test_while_the_controller_is_away_the_guest_runs_on(fake_host: FakeHost, container: Container) -> None:
    """The vCPUs have left the lost CPU, and are not ready; when it comes back they are as before."""
    plan = fake_host.plan(TWO, qemu=NEWEST)
    container.controller_away = True
    kept = CpuSet([plan.placement.pins[0]])

    async def act() -> None:
        before, other = (await asked(plan, "cpu.list"))["vcpus"]
        container.cpus = kept
        while "the vCPUs cannot be placed anew yet" not in fake_host.logged():
            await trio.sleep(0.01)
        status = await asked(plan, "status")
        assert "the container no longer has the CPUs" in status["not_ready"]
        assert "the container no longer has the CPUs" in status["placement"]["misplaced"][0]
        assert not Path(plan.state_directory / "ready").exists()
        assert vcpus_of_qemu(fake_host) == [0], f"thread {other['thread']} has ended"
        container.controller_away = False
        while not (await asked(plan, "status"))["ready"]:
            await trio.sleep(0.01)
        assert os.sched_getaffinity(before["thread"]) == {before["cpu"]}
        assert Path(plan.state_directory / "ready").exists()

    await run(fake_host, plan, act)


@pytest.mark.usefixtures("container")
async def test_a_cpu_that_goes_offline_and_comes_back_is_logged_and_shown(fake_host: FakeHost, tmp_path: Path) -> None:
    online = fake_sysfs(tmp_path / "sys", cpus=str(CPUS)) / "devices/system/cpu/online"
    fake_host.roots = Roots(sys=tmp_path / "sys")
    plan = fake_host.plan(TWO, qemu=NEWEST)
    gone = CpuSet([plan.placement.pins[1]])

    async def act() -> None:
        online.unlink()  # as while this process may open no more files
        await trio.sleep(0.2)
        assert (await asked(plan, "status"))["ready"]
        online.write_text(f"{CPUS - gone}\n")
        while (status := await asked(plan, "status"))["ready"]:
            await trio.sleep(0.01)
        sentence = f"the CPUs '{gone}' of vCPUs are offline: these share the instance's other CPUs"
        assert status["not_ready"] == sentence
        assert (
            f"CPUs of vCPUs went offline: the vCPUs share the instance's other CPUs cpus={gone}" in fake_host.logged()
        )
        online.write_text(f"{CPUS}\n")
        while not (await asked(plan, "status"))["ready"]:
            await trio.sleep(0.01)
        assert f"CPUs of vCPUs are online again cpus={gone}" in fake_host.logged()

    await run(fake_host, plan, act)


async def test_cpus_that_no_vcpu_has_are_given_up_as_well(fake_host: FakeHost, container: Container) -> None:
    """The number of vCPUs was lowered first, as it should be: nobody else's threads may be said to be on their CPUs."""
    plan = fake_host.plan(TWO, qemu=NEWEST)
    first = plan.placement.pins[0]

    async def act() -> None:
        await asked(plan, "cpu.set", count=1)
        assert (await asked(plan, "status"))["placement"]["float_cpus"] == str(CPUS - CpuSet([first]))
        container.cpus = CpuSet([first])
        while (await asked(plan, "status"))["placement"]["float_cpus"] != str(first):
            await trio.sleep(0.01)
        status = await asked(plan, "status")
        assert (status["ready"], status["vcpus"], status["placement"]["misplaced"]) == (True, 1, [])
        assert "all other threads share them" in fake_host.logged()

    await run(fake_host, plan, act)


async def test_cpus_that_the_controller_has_not_given_yet_are_not_lost(
    fake_host: FakeHost, container: Container
) -> None:
    """The container has another CPU, and the instance's cgroup has not: the vCPU must not go back to the one that is lost."""
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, displaced=0.05)
    plan = fake_host.plan(GROWING, qemu=NEWEST)
    [first] = plan.placement.pins
    container.cpus = CpuSet([first])
    other = CPUS - CpuSet([first])

    async def act() -> None:
        [vcpu] = (await asked(plan, "cpu.list"))["vcpus"]
        container.refused = frozenset((vcpu["thread"], cpu) for cpu in other)
        container.cpus = other
        while "the vCPUs cannot be placed anew yet" not in fake_host.logged():
            await trio.sleep(0.01)
        await trio.sleep(0.3)
        assert f"no longer has the CPUs '{first}'" in fake_host.logged()
        assert f"no longer has the CPUs '{other}'" not in (await asked(plan, "status"))["not_ready"]
        assert f"no longer has the CPUs '{first}'" in (await asked(plan, "status"))["not_ready"]
        container.refused = frozenset()
        while not (await asked(plan, "status"))["ready"]:
            await trio.sleep(0.01)
        assert CpuSet.parse(vcpus_of_receipt(plan.state_directory)[0]) <= other

    await run(fake_host, plan, act)


async def test_cpus_that_come_back_meanwhile_are_the_vcpus_again(fake_host: FakeHost, container: Container) -> None:
    plan = fake_host.plan(TWO, qemu=NEWEST | {"vcpu_del": None})
    fake_host.timeouts = attrs.evolve(fake_host.timeouts, vcpu_released=0.3)

    async def act() -> None:
        vcpus = (await asked(plan, "cpu.list"))["vcpus"]
        container.cpus = CpuSet([plan.placement.pins[0]])
        while "device_del" not in fake_host.commands():
            await trio.sleep(0.01)
        container.cpus = CPUS  # before QEMU's guest has refused
        while not (await asked(plan, "status"))["ready"]:
            await trio.sleep(0.01)
        assert [os.sched_getaffinity(each["thread"]) for each in vcpus] == [{each["cpu"]} for each in vcpus]

    await run(fake_host, plan, act)
