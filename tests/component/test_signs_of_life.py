"""A guest without a sign of life: noticed once it is silent for too long, by log, probe and status; one with a sign costs nothing."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Literal

import attrs
import pytest
import trio
from trio.testing import MockClock

from runner.cli.instance_requests import ask_instance
from runner.instance.signs_of_life import MUTE_AFTER, NEARLY_NOTHING, SILENT_AFTER, SignsOfLife
from runner.instance.supervisor import Supervisor
from runner.plan.instance import InstancePlan
from runner.plan.machine import FilePlan
from tests.component.test_console import WRITE, attached
from tests.component.test_probes import ask, wait_for
from tests.support.fake_host import FakeHost

ACCELERATORS: tuple[Literal["kvm", "tcg"], ...] = ("kvm", "tcg")


@contextmanager
def never_asked() -> Iterator[Callable[[], float | None]]:
    """Hold a reader of CPU time that must not be called."""

    def busiest() -> float | None:
        raise AssertionError("the CPU time was read")

    yield busiest


def unchanged() -> None:
    raise AssertionError("nothing has changed")


@pytest.mark.parametrize("accel", ACCELERATORS)
async def test_silence_is_reported_after_its_time_and_ends_with_the_first_output(
    accel: Literal["kvm", "tcg"], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    del autojump_clock  # it is the clock
    caplog.set_level(logging.INFO)
    life = SignsOfLife()
    async with trio.open_nursery() as nursery:
        changes: list[bool] = []
        nursery.start_soon(life.watch, accel, lambda: 0.003, lambda: changes.append(life.silence is None))
        await trio.sleep(SILENT_AFTER[accel] - 0.001)
        assert life.silence is None
        await trio.sleep(0.002)
        assert life.silence is not None
        assert str(life.silence).startswith(
            "no output on its console and 0.003 s of CPU time of its busiest vCPU in "
            f"{SILENT_AFTER[accel]:.0f} s under {accel.upper()}; "
        )
        assert ('set cpu.accel = "tcg"' in str(life.silence)) == (accel == "kvm")
        await trio.sleep(SILENT_AFTER[accel])
        assert life.silence.seconds == 2 * SILENT_AFTER[accel]
        assert caplog.text.count("the guest is silent") == 1
        life.console_written.set()
    assert (life.silence, changes) == (None, [False, True])
    assert caplog.messages[-1] == "the guest shows a sign of life"


async def test_a_guest_that_writes_costs_no_timer(caplog: pytest.LogCaptureFixture) -> None:
    life = SignsOfLife()
    with never_asked() as busiest:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life.watch, "kvm", busiest, unchanged)
            await trio.testing.wait_all_tasks_blocked()
            assert trio.lowlevel.current_statistics().seconds_to_next_deadline < math.inf
            life.console_written.set()
    await trio.testing.wait_all_tasks_blocked()
    assert trio.lowlevel.current_statistics().seconds_to_next_deadline == math.inf
    assert caplog.text == ""


@pytest.mark.parametrize("ran", [NEARLY_NOTHING, None])
async def test_a_guest_that_computes_or_whose_time_is_unknown_is_not_silent(
    ran: float | None, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    del autojump_clock
    life = SignsOfLife()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.watch, "tcg", lambda: ran, unchanged)
        await trio.sleep(SILENT_AFTER["tcg"] + 1)
        assert life.silence is None
        life.console_written.set()
    assert "the guest is silent" not in caplog.text


@pytest.mark.parametrize("accel", ACCELERATORS)
async def test_a_console_without_output_is_remarked_whatever_the_cpu_time(
    accel: Literal["kvm", "tcg"], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    del autojump_clock
    caplog.set_level(logging.INFO)
    life = SignsOfLife()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.watch, accel, lambda: 50.0, unchanged)
        await trio.sleep(MUTE_AFTER - 0.001)
        assert life.mute == ""
        await trio.sleep(0.002)
        assert life.mute.startswith("nothing on the console in the first 120 s; unless it has its own display or none")
        life.console_written.set()
    assert life.mute == ""
    assert caplog.text.count("the guest does not use its console, or does not boot") == 1
    assert caplog.messages[-1] == "the guest has begun to use its console"


async def test_a_guest_that_begins_to_compute_is_silent_no_more(autojump_clock: MockClock) -> None:
    del autojump_clock
    life, times = SignsOfLife(), iter((0.001, 0.002, 5.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(life.watch, "kvm", lambda: next(times), lambda: None)
        await trio.sleep(3 * SILENT_AFTER["kvm"] + 1)
        life.console_written.set()
    assert (life.silence, list(times)) == (None, [])


async def silent_run(fake_host: FakeHost, plan: InstancePlan, clock: MockClock, *, speaks: bool) -> None:
    """Run *plan* on a *clock* that jumps over the time after which its guest is silent; see that each place says so."""
    clock.rate = 1  # processes take their time
    state = Path(plan.state_directory)
    seen = []

    async def meanwhile(host: Supervisor) -> None:
        port = int(fake_host.logged().rpartition("port=")[2].split()[0])
        await wait_for(fake_host.guest_runs)
        await wait_for(lambda: host.guest_state.read)
        assert (await ask(port, "/readyz"))[0] == 200
        assert (state / "ready").exists()
        before = await ask_instance(plan.state_directory, "status", {})
        assert isinstance(before, dict)
        assert (before["ready"], before["not_ready"]) == (True, "")
        clock.jump(SILENT_AFTER[plan.machine.accel])
        await wait_for(lambda: "the guest is silent" in fake_host.logged())
        status, text = await ask(port, "/readyz")
        assert (status, text.startswith("the guest is silent: no output on its console and 0.0")) == (503, True)
        assert (await ask(port, "/healthz"))[0] == 200
        after = await ask_instance(plan.state_directory, "status", {})
        assert isinstance(after, dict)
        assert (after["ready"], f"{after['not_ready']}\n") == (False, text)
        assert not (state / "ready").exists()
        if speaks:
            async with attached(fake_host, WRITE) as client:
                await client.stream.send_all(b"wake up")
                await client.until(b"you typed")
            await wait_for(lambda: "the guest shows a sign of life" in fake_host.logged())
            await wait_for((state / "ready").exists)
            assert (await ask(port, "/readyz"))[0] == 200
        seen.append(True)
        fake_host.stop.ask("test")

    before = fake_host.snapshot()
    with trio.fail_after(300):
        await fake_host.run(plan, meanwhile=meanwhile, http=("127.0.0.1", 0))
    assert seen, fake_host.logged()
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


async def test_a_qemu_whose_vcpus_never_run_is_noticed(fake_host: FakeHost, mock_clock: MockClock) -> None:
    plan = fake_host.plan(qemu={"silent": True, "console": "echo"})
    await silent_run(fake_host, plan, mock_clock, speaks=True)


async def test_a_real_guest_that_executes_nothing_is_noticed(
    fake_host: FakeHost, mock_clock: MockClock, tmp_path: Path
) -> None:
    program = shutil.which("qemu-system-x86_64")
    assert program is not None
    firmware = tmp_path / "rom"
    firmware.write_bytes(b"\xff" * 65520 + b"\xfa\xf4\xeb\xfd".ljust(16, b"\xff"))  # cli, hlt, at the reset vector
    plan = fake_host.plan(grace=1)
    machine = attrs.evolve(
        plan.machine, program=PurePosixPath(program), kernel=None, firmware=FilePlan(PurePosixPath(firmware), False)
    )
    await silent_run(fake_host, attrs.evolve(plan, machine=machine), mock_clock, speaks=False)
