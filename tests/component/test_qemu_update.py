"""QEMU is replaced by another one under a guest that runs: a real runner, fake QEMUs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from runner.base.errors import HostError, RunnerError, Status, explain
from runner.cli.instance_requests import ask_instance
from runner.instance.change import qemu_update
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.instance.timeouts import InstanceTimeouts
from runner.kernel.child_processes import ProcessRecord
from runner.kernel.small_files import read_text
from runner.plan.instance import InstancePlan
from runner.plan.machine import Accel
from runner.plan.network_plan import BridgedPlan
from runner.plan.passthrough_plan import VfioBackend
from runner.protocol.qmp import Monitor
from tests.support.fake_host import FakeHost
from tests.support.fake_pci import with_devices
from tests.support.json_schemas import fitting_answer
from tests.support.soak import some

SPEC = "[hotplug]\nqemu = true\n"
NEW: dict[str, object] = {"major": 11, "minor": 1}
CONTINUES = "; the one before continues"

Act = Callable[[Supervisor], Awaitable[None]]


async def run(fake_host: FakeHost, plan: InstancePlan, act: Act) -> GuestEnd:
    """Run *plan*, and *act* while its guest runs; stop it then, and check that nothing is left."""

    async def meanwhile(supervisor: Supervisor) -> None:
        try:
            with trio.fail_after(60):
                while not fake_host.guest_runs():
                    await trio.sleep(0.005)
                await act(supervisor)
        finally:
            fake_host.stop.ask("the test")

    before = fake_host.snapshot()
    ended = await fake_host.run(plan, meanwhile=meanwhile)
    assert isinstance(ended, GuestEnd), ended
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before
    return ended


def plan_of(fake_host: FakeHost, spec: str = "", **qemu: object) -> InstancePlan:
    return fake_host.plan(SPEC + spec, qemu={**NEW, **qemu})


async def update(plan: InstancePlan, program: object = None, **params: object) -> dict[str, Any]:
    params |= {} if program is None else {"qemu": str(program)}
    answer: Any = fitting_answer("qemu.update", await ask_instance(plan.state_directory, "qemu.update", params))
    return dict(answer)


async def guest_and_generation(plan: InstancePlan) -> tuple[str, int]:
    status: Any = await ask_instance(plan.state_directory, "status", {})
    assert status["placement"]["misplaced"] == []
    return status["guest"], status["qemu"]["generation"]


def pids(fake_host: FakeHost, *commands: str) -> list[tuple[int, str]]:
    """Return which of the *commands* were received, in their order, each with the number of the QEMU that did."""
    found = [each for each in fake_host.records("qemu", "command") if each["command"] in commands]
    order = list(dict.fromkeys(each["pid"] for each in fake_host.records("qemu", "command")))
    return [(order.index(each["pid"]), each["command"]) for each in found]


async def test_another_qemu_has_the_guest_and_everything_goes_on(fake_host: FakeHost) -> None:
    plan = plan_of(fake_host, "[[network]]\n[guest]\nagent = true\n", console="echo")
    receipt = plan.state_directory / "receipt.json"

    async def act(supervisor: Supervisor) -> None:
        [first] = [each for each in supervisor.processes if each.role == "qemu"]
        for generation in range(1, 4):
            answer = await update(plan)
            [now] = [each for each in supervisor.processes if each.role == "qemu"]
            assert now.pid != first.pid
            assert {**answer, "pause_ms": 0} == {
                "version": 1,
                "from": "11.1.0",
                "to": "11.1.0",
                "pid": now.pid,
                "pause_ms": 0,
            }
            assert await guest_and_generation(plan) == ("running", generation)
            published = json.loads(read_text(receipt))
            assert published["qemu_generation"] == generation
            assert {each["pid"] for each in published["threads"] if each["role"] == "vcpu"} == {now.pid}
            assert supervisor.counters.qemu_updates == {"updated": generation}
        assert await ask_instance(plan.state_directory, "disk.list", {}) == {"version": 1, "disks": []}

    assert (await run(fake_host, plan, act)).status is Status.STOPPED
    assert pids(fake_host, "migrate", "cont", "quit", "system_powerdown") == [
        (0, "cont"),
        *((0, "migrate"), (1, "cont")),
        *((1, "migrate"), (2, "cont")),
        *((2, "migrate"), (3, "cont")),
        *((3, "system_powerdown"), (3, "quit")),
    ]
    first, *others = (each["argv"] for each in fake_host.records("qemu", "start"))
    assert "q35," in " ".join(first)
    assert all("pc-q35-11.1," in " ".join(each) and "aux-ram-share=on" in " ".join(each) for each in others)


async def test_an_instance_that_cannot_be_updated_keeps_no_descriptors(fake_host: FakeHost) -> None:
    numbers = []
    for spec in ("", SPEC):

        async def act(_supervisor: Supervisor) -> None:
            await trio.lowlevel.checkpoint()
            numbers.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208

        await run(fake_host, fake_host.plan(spec, qemu=NEW), act)
        fake_host.stop.__init__()  # type: ignore[misc]
    assert numbers[1] > numbers[0]
    assert "aux-ram-share" not in " ".join(fake_host.records("qemu", "start")[0]["argv"])


@pytest.mark.parametrize(
    ("successor", "reason"),
    [
        ("exit at start", "cannot start QEMU: it exited with status 7, saying 'fake-qemu: something is wrong"),
        ("hang at start", "the next one was not ready within 1 s"),
        ("exit", "its state was not transferred: of the fake"),
        ("another cpu", "shows the guest another CPU; name a CPU model that both know (cpu.model)"),
        ("inmigrate", "the next one did not take over within 1 s of the guest's stop"),
        ("shutdown", "the guest did not run: the next one says 'shutdown'"),
        ("refuses cont", "cannot execute 'cont': refused by the fake"),
    ],
)
async def test_a_successor_that_fails_before_it_has_the_guest_is_ended(
    fake_host: FakeHost, successor: str, reason: str
) -> None:
    if "not ready within" in reason:
        fake_host.timeouts = InstanceTimeouts(next_qemu=1)
    elif "not take over within" in reason:
        fake_host.timeouts = InstanceTimeouts(takeover=1)
    plan = plan_of(fake_host)
    bad = fake_host.program("next", "fake_qemu.py", **NEW, as_successor=successor)

    async def act(supervisor: Supervisor) -> None:
        before = [(each.role, each.pid) for each in supervisor.processes]
        with pytest.raises(RunnerError) as error:
            await update(plan, bad)
        assert reason in explain(error.value)
        assert explain(error.value).endswith(CONTINUES)
        assert [(each.role, each.pid) for each in supervisor.processes] == before
        assert await guest_and_generation(plan) == ("running", 0)
        assert supervisor.counters.qemu_updates == {"fell_back": 1}
        if "within" in reason:  # in so short a time another one need not be ready
            return
        await update(plan)
        assert await guest_and_generation(plan) == ("running", 1)

    assert (await run(fake_host, plan, act)).status is Status.STOPPED


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("refuses", "cannot execute 'migrate': refused by the fake"),
        ("fails", "its state was not transferred: of the fake"),
        ("hangs", "the next one did not take over within 1 s of the guest's stop"),
        (
            "names a property",
            "cannot understand QEMU's answer to 'qom-get': 'pc-q35-11.1,dumpdtb=/file-machine': no name of a machine",
        ),
    ],
)
async def test_a_source_that_cannot_send_its_state_runs_on(fake_host: FakeHost, source: str, reason: str) -> None:
    if "within" in reason:
        fake_host.timeouts = InstanceTimeouts(takeover=1)
    plan = plan_of(fake_host, as_source=source)

    async def act(_supervisor: Supervisor) -> None:
        with pytest.raises(RunnerError) as error:
            await update(plan)
        assert explain(error.value) == f"cannot update QEMU: {reason}{CONTINUES}"
        assert await guest_and_generation(plan) == ("running", 0)

    assert (await run(fake_host, plan, act)).status is Status.STOPPED


def attached_queues(tap: str) -> int:
    """Return how many queues of *tap* carry packets, by a sysfs of this network namespace."""
    argv = ["unshare", "--mount", "sh", "-c", f"mount -t sysfs sysfs /sys && ls /sys/class/net/{tap}/queues"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.count("rx-")


@pytest.mark.parametrize(("queues", "used"), [("one", 1), ("all", 2)])
async def test_the_queues_of_a_tap_are_those_that_the_guest_uses(fake_host: FakeHost, queues: str, used: int) -> None:
    plan = plan_of(fake_host, "[[network]]\nqueues = 2\n", queues=queues)
    failing = [
        fake_host.program(name.replace(" ", "-"), "fake_qemu.py", **NEW, queues=queues, as_successor=name)
        for name in (
            "exit at start",
            "exit",
            "another cpu",
        )  # before it detaches queues, after it, after it has attached them
    ]
    [network] = plan.machine.networks
    assert isinstance(network, BridgedPlan)

    @contextmanager
    def nowhere_to_meet(_directory: object, _recorded: object) -> Iterator[None]:
        raise HostError("injected before anything is started")
        yield

    async def act(_supervisor: Supervisor) -> None:
        assert attached_queues(network.tap) == used
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(qemu_update, "meeting_point", nowhere_to_meet)
            with pytest.raises(RunnerError, match=CONTINUES):
                await update(plan)
        assert attached_queues(network.tap) == used
        for bad in failing:
            with pytest.raises(RunnerError, match=CONTINUES):
                await update(plan, bad)
            assert attached_queues(network.tap) == used
        for _ in range(2):
            await update(plan)
            assert attached_queues(network.tap) == used

    assert (await run(fake_host, plan, act)).status is Status.STOPPED


@pytest.mark.parametrize("successor", ["exits at cont", "hangs at cont"])
async def test_a_successor_that_is_lost_with_the_guest_ends_the_instance(fake_host: FakeHost, successor: str) -> None:
    """The one before has an old state of the guest: it must not run it again."""
    fake_host.timeouts = InstanceTimeouts(guest_runs=0.5)
    plan = plan_of(fake_host)
    bad = fake_host.program("next", "fake_qemu.py", **NEW, as_successor=successor)

    async def act(supervisor: Supervisor) -> None:
        await update(plan, bad)
        if successor == "exits at cont":
            await trio.sleep_forever()
        [qemu] = [each for each in supervisor.processes if each.role == "qemu"]
        qemu.send_signal(signal.SIGKILL)
        await trio.sleep_forever()

    with trio.move_on_after(30):
        ended = await run_until_over(fake_host, plan, act)
    assert ended.status is Status.MACHINE_DIED
    assert pids(fake_host, "cont") == [(0, "cont"), (1, "cont")]


async def run_until_over(fake_host: FakeHost, plan: InstancePlan, act: Act) -> GuestEnd:
    """Run *plan*, and *act* while its guest runs, until the instance ends."""
    scope = trio.CancelScope()

    async def meanwhile(supervisor: Supervisor) -> None:
        with scope:
            while not fake_host.guest_runs():
                await trio.sleep(0.005)
            await act(supervisor)

    fake_host.when_over = scope.cancel
    before = fake_host.snapshot()
    ended = await fake_host.run(plan, meanwhile=meanwhile)
    assert isinstance(ended, GuestEnd), ended
    assert fake_host.snapshot() == before
    return ended


@contextmanager
def before_step(number: int, act: Callable[[Monitor, str], None]) -> Iterator[list[str]]:
    """Call *act* before QMP command *number* of those that follow; yield the commands."""
    execute, seen = Monitor.execute, list[str]()

    async def counted(monitor: Monitor, command: str, *arguments: Any, **options: Any) -> object:
        seen.append(command)
        if len(seen) - 1 == number:
            act(monitor, command)
        return await execute(monitor, command, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Monitor, "execute", counted)
        yield seen


STEPS = 28
"""More than there are commands before ``cont``."""


def _fail(_monitor: Monitor, command: str) -> None:
    raise HostError(f"injected at {command}")


@pytest.mark.parametrize("step", some(range(STEPS), 6))
async def test_a_failure_at_any_step_leaves_the_guest_where_it_is(fake_host: FakeHost, step: int) -> None:
    plan = plan_of(fake_host, "[[network]]\n" + fake_host.share())

    async def act(_supervisor: Supervisor) -> None:
        failure: RunnerError | None = None
        with before_step(step, _fail) as seen:
            try:
                await update(plan)
            except RunnerError as error:
                failure = error
        if "cont" in seen[: step + 1] and failure is None:
            assert await guest_and_generation(plan) == ("running", 1)
            return
        assert failure is not None, seen
        assert "injected at" in explain(failure)
        assert await guest_and_generation(plan) == ("running", 0)
        await update(plan)
        assert await guest_and_generation(plan) == ("running", 1)

    assert (await run(fake_host, plan, act)).status is Status.STOPPED


async def test_a_successor_is_ended_when_a_step_fails_right_after_its_start(fake_host: FakeHost) -> None:
    """It is known from the moment at which it exists: nothing else would end it."""
    plan = plan_of(fake_host)

    @contextmanager
    def failing(_size: int) -> Iterator[None]:
        yield
        raise HostError("injected")

    async def act(supervisor: Supervisor) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(qemu_update, "lockable", failing)
            with pytest.raises(RunnerError, match="injected; the one before continues"):
                await update(plan)
        assert [each.role for each in supervisor.processes].count("qemu") == 1
        await update(plan)

    assert (await run(fake_host, plan, act)).status is Status.STOPPED


VIRTIOFSD = {
    "exit": "",
    "refuse": "; virtiofsd: fake-virtiofsd: cannot load it",
    "hang": "the next one did not take over within 1 s of the guest's stop",
}
"""What the second virtiofsd does with the state of the first, and what is in the error then."""


def served_by(supervisor: Supervisor) -> list[int]:
    """Return the pids of the virtiofsd that live."""
    return [each.pid for each in supervisor.processes if each.role == "virtiofsd"]


async def test_a_share_goes_along_with_the_state_of_its_virtiofsd(fake_host: FakeHost) -> None:
    fake_host.timeouts = InstanceTimeouts(cause=0)  # the end of a virtiofsd that serves the guest ends it at once
    plan = plan_of(fake_host, fake_host.share())
    receipt = plan.state_directory / "receipt.json"

    async def act(supervisor: Supervisor) -> None:
        daemons = served_by(supervisor)
        for generation in range(1, 4):
            await update(plan)
            [now] = served_by(supervisor)
            assert now not in daemons
            daemons.append(now)
            assert await guest_and_generation(plan) == ("running", generation)
            published = json.loads(read_text(receipt))
            assert {each["pid"] for each in published["threads"] if each["role"] == "virtiofsd"} == {now}
        loaded = [(each["pid"], each["state"]) for each in fake_host.records("virtiofsd", "loaded")]
        assert loaded == [(pid, f"state of {daemons[0]}") for pid in daemons[1:]]
        held = supervisor.held.read["share:share"]()
        assert isinstance(held, ProcessRecord)
        assert held.pid == daemons[-1]
        await trio.testing.wait_all_tasks_blocked()

    assert (await run(fake_host, plan, act)).status is Status.STOPPED
    first, *others = (_without_fd(each["argv"]) for each in fake_host.records("virtiofsd", "start"))
    assert others == [first] * 3
    assert "--migration-verify-handles" in first


async def test_a_virtiofsd_that_does_not_end_with_its_qemu_is_ended(fake_host: FakeHost) -> None:
    plan = fake_host.plan(SPEC + fake_host.share(), qemu=NEW, daemon={"virtiofsd": {"ignores_sigterm": True}})

    async def act(supervisor: Supervisor) -> None:
        [first] = served_by(supervisor)
        await update(plan)
        [second] = served_by(supervisor)
        assert second != first

    assert (await run(fake_host, plan, act)).status is Status.STOPPED


def _without_fd(argv: list[str]) -> list[str]:
    return [word for word in argv if not word.startswith("--fd=")]


@pytest.mark.parametrize("at_load", VIRTIOFSD)
async def test_a_virtiofsd_that_cannot_take_over_leaves_the_share_to_the_first(
    fake_host: FakeHost, at_load: str
) -> None:
    if at_load == "hang":
        fake_host.timeouts = InstanceTimeouts(takeover=1)
    plan = plan_of(fake_host, fake_host.share())

    async def act(supervisor: Supervisor) -> None:
        before = [(each.role, each.pid) for each in supervisor.processes]
        fake_host.program("virtiofsd", "fake_daemon.py", at_load=at_load, ignores_sigterm=at_load == "hang")
        with pytest.raises(RunnerError) as error:
            await update(plan)
        assert VIRTIOFSD[at_load] in explain(error.value)
        assert explain(error.value).endswith(CONTINUES)
        assert [(each.role, each.pid) for each in supervisor.processes] == before
        assert await guest_and_generation(plan) == ("running", 0)
        fake_host.program("virtiofsd", "fake_daemon.py")
        if at_load == "hang":  # in so short a time another one need not be ready
            return
        await update(plan)
        assert await guest_and_generation(plan) == ("running", 1)

    assert (await run(fake_host, plan, act)).status is Status.STOPPED


@pytest.mark.parametrize("step", sorted({*some(range(STEPS), 6), 20}))  # the second one has the state then
@pytest.mark.parametrize("victim", ["first", "second"])
async def test_a_virtiofsd_killed_at_any_step_means_what_it_means(fake_host: FakeHost, victim: str, step: int) -> None:
    """That of the second costs nothing before the guest is its own; that of the first costs nothing once its state is sent."""
    plan = plan_of(fake_host, fake_host.share())
    expected: list[Status] = []

    async def act(supervisor: Supervisor) -> None:
        [first] = served_by(supervisor)
        killed: list[int] = []

        def kill(_monitor: Monitor, _command: str) -> None:
            killed.extend(pid for pid in served_by(supervisor) if (pid == first) == (victim == "first"))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

        updated = True
        with before_step(step, kill) as seen:
            try:
                await update(plan)
            except RunnerError:
                updated = False
        before = seen[:step]
        if killed and ("migrate" not in before if victim == "first" else step < len(seen) - 4):
            assert not updated
        elif not killed or (victim == "first" and "query-migrate" in before):
            assert updated
        if killed and updated == (victim == "second"):
            expected.append(Status.SERVICE_DIED)
            await trio.sleep_forever()
        assert await guest_and_generation(plan) == ("running", int(updated))
        await update(plan)
        expected.append(Status.STOPPED)
        fake_host.stop.ask("the test")
        await trio.sleep_forever()

    ended = await run_until_over(fake_host, plan, act)
    assert [ended.status] == expected


@pytest.mark.parametrize("step", some(range(STEPS), 6))
async def test_a_request_to_stop_at_any_step_ends_the_guest_in_order(fake_host: FakeHost, step: int) -> None:
    plan = plan_of(fake_host, "[[network]]\n" + fake_host.share())

    async def act(_supervisor: Supervisor) -> None:
        with before_step(step, lambda _monitor, _command: fake_host.stop.ask("a step")), suppress(RunnerError):
            await update(plan)

    assert (await run(fake_host, plan, act)).status is Status.STOPPED
    *_, (which, last) = pids(fake_host, "system_powerdown", "cont")
    assert (which, last) in {(0, "system_powerdown"), (1, "system_powerdown")}


@pytest.mark.parametrize("step", some(range(STEPS), 6))
@pytest.mark.parametrize("victim", ["source", "successor"])
async def test_a_qemu_killed_at_any_step_means_what_it_means(fake_host: FakeHost, victim: str, step: int) -> None:
    """A successor that is killed before it has the guest costs nothing; the death of the QEMU that has it is the guest's."""
    plan = plan_of(fake_host)
    expected: list[Status] = []

    async def act(supervisor: Supervisor) -> None:
        [first] = [each for each in supervisor.processes if each.role == "qemu"]

        def kill(_monitor: Monitor, _command: str) -> None:
            for each in supervisor.processes:
                if each.role == "qemu" and (each is first) == (victim == "source"):
                    each.send_signal(signal.SIGKILL)

        with before_step(step, kill) as seen, suppress(RunnerError):
            await update(plan)
        at = seen[step] if step < len(seen) else "after it"
        transferred = "migrate" in seen[:step] and "query-migrate" in seen[seen.index("migrate") : step]
        if (victim, at) == ("successor", "cont") or (victim == "source" and at != "after it" and not transferred):
            expected.append(Status.MACHINE_DIED)
            await trio.sleep_forever()
        assert (await guest_and_generation(plan))[0] == "running"
        expected.append(Status.STOPPED)
        fake_host.stop.ask("the test")
        await trio.sleep_forever()

    ended = await run_until_over(fake_host, plan, act)
    assert [ended.status] == expected


REFUSED: Mapping[str, tuple[str, str]] = {
    "blocked": ("", "QEMU cannot hand its devices over: of the fake"),
    "lock": ("[memory]\nlock = true\n", "memory.lock cannot go along"),
}


def devices_of(fake_host: FakeHost, accel: Accel, *backends: VfioBackend) -> InstancePlan:
    plan = with_devices(plan_of(fake_host), fake_host.root, *backends)
    return attrs.evolve(plan, machine=attrs.evolve(plan.machine, accel=accel))


@pytest.mark.parametrize(
    ("accel", "backend", "reason"),
    [
        ("kvm", "legacy", 'its IOMMU group can be opened by one process; set device.iommu = "iommufd"'),
        ("tcg", "iommufd", "without KVM, QEMU crashes when it hands a device over"),
        ("kvm", "iommufd", "QEMU crashes, and the guest ends, if the update fails then; --no-way-back accepts that"),
    ],
)
async def test_a_device_that_cannot_go_along_is_refused(
    fake_host: FakeHost, accel: Accel, backend: VfioBackend, reason: str
) -> None:
    plan = devices_of(fake_host, accel, backend)

    async def act(_supervisor: Supervisor) -> None:
        with pytest.raises(RunnerError) as error:
            await update(plan, no_way_back="--no-way-back" not in reason)
        [device] = plan.machine.passthrough.devices
        assert f"the device {device.address} cannot go along: {reason}" in explain(error.value)

    await run(fake_host, plan, act)


async def test_a_device_given_by_iommufd_is_left_to_the_first_qemu_to_hand_over(fake_host: FakeHost) -> None:
    plan = devices_of(fake_host, "kvm", "iommufd")
    [device] = plan.machine.passthrough.devices

    async def act(_supervisor: Supervisor) -> None:
        await update(plan, no_way_back=True)
        assert await guest_and_generation(plan) == ("running", 1)

    await run(fake_host, plan, act)
    first, successor = fake_host.records("qemu", "start")
    assert str(device.device_node) in first["held"]
    assert not {str(device.device_node), str(plan.machine.passthrough.iommufd)} & set(successor["held"])
    options = " ".join(successor["argv"])
    assert re.search(r"-object iommufd,id=iommufd0,fd=[0-9]+ ", options)
    assert re.search(r"-device vfio-pci,id=device0,bus=port0,fd=[0-9]+,iommufd=iommufd0", options)


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_go_along_is_refused_by_name(fake_host: FakeHost, name: str) -> None:
    text, reason = REFUSED[name]
    plan = plan_of(fake_host, text.format(share=fake_host.share()), as_source="blocked" if name == "blocked" else None)

    async def act(supervisor: Supervisor) -> None:
        found: Any = fitting_answer("qemu.check", await ask_instance(plan.state_directory, "qemu.check", {}))
        assert any(reason in each for each in found["refused"]), found
        with pytest.raises(RunnerError, match="cannot update QEMU") as error:
            await update(plan)
        assert reason in explain(error.value)
        assert supervisor.counters.qemu_updates == {}

    await run(fake_host, plan, act)
    assert len(fake_host.records("qemu", "start")) == 1


@pytest.mark.parametrize(
    ("version", "started_for_it", "reason"),
    [
        ((1, 11), True, "virtiofsd 1.11 cannot hand its state over; the one in Rust can from 1.12 on"),
        ((1, 13), False, "its virtiofsd was not started for it; start the instance again"),
    ],
)
async def test_a_share_whose_virtiofsd_cannot_hand_over_is_refused(
    fake_host: FakeHost, version: tuple[int, ...], *, started_for_it: bool, reason: str
) -> None:
    plan = fake_host.plan(SPEC + fake_host.share(), qemu=NEW, virtiofsd=version)
    if not started_for_it:  # by a runner that is older than this one
        shares = tuple(attrs.evolve(each, updatable=False) for each in plan.shares)
        plan = attrs.evolve(plan, machine=attrs.evolve(plan.machine, shares=shares))

    async def act(supervisor: Supervisor) -> None:
        before = served_by(supervisor)
        found: Any = fitting_answer("qemu.check", await ask_instance(plan.state_directory, "qemu.check", {}))
        assert found["refused"] == [f"the share 'share' cannot go along: {reason}"]
        with pytest.raises(RunnerError) as error:
            await update(plan)
        assert explain(error.value) == f"cannot update QEMU: the share 'share' cannot go along: {reason}"
        assert served_by(supervisor) == before

    await run(fake_host, plan, act)
    assert len(fake_host.records("qemu", "start")) == 1
    assert len(fake_host.records("virtiofsd", "start")) == 1


async def test_a_virtiofsd_that_others_than_root_may_change_is_refused(fake_host: FakeHost) -> None:
    plan = plan_of(fake_host, fake_host.share())

    async def act(_supervisor: Supervisor) -> None:
        virtiofsd = fake_host.root / "bin" / "virtiofsd"
        virtiofsd.chmod(0o777)
        with pytest.raises(RunnerError, match="virtiofsd': others than root may change it"):
            await update(plan)
        virtiofsd.chmod(0o755)
        virtiofsd.rename(fake_host.root / "share" / "virtiofsd")
        virtiofsd.symlink_to(fake_host.root / "share" / "virtiofsd")
        with pytest.raises(
            RunnerError, match=r"cannot update QEMU: the guest may change .*virtiofsd' by the share 'share'"
        ):
            await update(plan)
        assert await guest_and_generation(plan) == ("running", 0)
        virtiofsd.unlink()
        (fake_host.root / "share" / "virtiofsd").rename(virtiofsd)

    await run(fake_host, plan, act)


async def test_a_program_that_says_no_version_is_refused(fake_host: FakeHost) -> None:
    plan = plan_of(fake_host)
    program = fake_host.root / "bin" / "other"
    program.write_text("#!/bin/sh\necho nothing known\n")
    program.chmod(0o755)

    async def act(_supervisor: Supervisor) -> None:
        found: Any = await ask_instance(plan.state_directory, "qemu.check", {"qemu": str(program)})
        reason = f"cannot use '{program}': it prints 'nothing known' when asked for its version"
        assert (found["program_version"], found["refused"]) == ("", [reason])

    await run(fake_host, plan, act)


async def test_a_program_of_another_digest_than_the_one_demanded_is_refused(fake_host: FakeHost) -> None:
    plan = plan_of(fake_host)
    program = fake_host.program("next", "fake_qemu.py", **NEW)
    digest = f"sha256:{hashlib.sha256(Path(program).read_bytes()).hexdigest()}"

    async def act(_supervisor: Supervisor) -> None:
        other = f"sha256:{'0' * 64}"
        reason = f"cannot use '{program}': its digest is {digest}, not {other}"
        found: Any = await ask_instance(plan.state_directory, "qemu.check", {"qemu": str(program), "digest": other})
        assert (found["program_version"], found["refused"]) == ("", [reason]), "it is not even asked for its version"
        with pytest.raises(RunnerError) as refused:
            await update(plan, program, digest=other)
        assert explain(refused.value) == f"cannot update QEMU: {reason}"
        with pytest.raises(RunnerError, match="'digest' must be sha256: and 64 hexadecimal digits"):
            await update(plan, program, digest="md5:00")
        await update(plan, program, digest=digest)
        assert await guest_and_generation(plan) == ("running", 1)

    assert (await run(fake_host, plan, act)).status is Status.STOPPED


async def test_a_program_that_the_guest_may_change_is_refused(fake_host: FakeHost) -> None:
    plan = plan_of(fake_host, fake_host.share())
    linked = fake_host.program("next", "fake_qemu.py", **NEW)
    in_share = fake_host.root / "share" / "qemu"
    in_share.hardlink_to(linked)

    async def act(_supervisor: Supervisor) -> None:
        for program in (in_share, linked):
            with pytest.raises(RunnerError) as refused:
                await update(plan, program)
            assert explain(refused.value) == (
                f"cannot update QEMU: the guest may change '{program}' by the share 'share'; put the program elsewhere"
            )
        assert await guest_and_generation(plan) == ("running", 0)

    await run(fake_host, plan, act)
