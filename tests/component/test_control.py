"""The control socket of a running instance."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath

import pytest
import trio

from runner.cli.ctl import control
from runner.errors import RunnerError, Status, explain
from runner.instance.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.plan.instance import InstancePlan
from tests.support.fake_host import FakeHost
from tests.support.sweep import FAULT_INJECTOR


async def while_a_guest_runs(fake_host: FakeHost, plan: InstancePlan, act: Callable[[], Awaitable[None]]) -> None:
    """Run *plan* and, while its guest runs, *act*; then stop it, and check that nothing is left."""

    async def meanwhile(_host: Supervisor) -> None:
        try:
            with trio.fail_after(30):
                while not fake_host.guest_runs():
                    await trio.sleep(0.005)
                await act()
        finally:
            fake_host.stop.ask("test")

    before = fake_host.snapshot()
    ended = await fake_host.run(plan, meanwhile=meanwhile)
    assert isinstance(ended, GuestEnd)
    assert ended.status is Status.STOPPED
    assert fake_host.snapshot() == before


@pytest.mark.parametrize("lacking", ["runner.instance.control.server", "runner.protocol.guest_agent"])
async def test_a_failed_import_does_not_end_the_guest(fake_host: FakeHost, lacking: str) -> None:
    plan = fake_host.plan(qemu={"agent": "answers", "at_powerdown": "shutdown"})
    before = sys.modules.pop(lacking, None)

    async def act() -> None:
        while "the guest agent is there" not in fake_host.logged():
            await trio.sleep(0.005)
        FAULT_INJECTOR.begin(1, only=frozenset({"import"}))
        if lacking == "runner.instance.control.server":
            with pytest.raises(RunnerError, match="Method not found"):  # asked a second before it could be answered
                await control(plan.state_directory, "nothing", {})

    try:
        await while_a_guest_runs(fake_host, plan, act)
    finally:
        FAULT_INJECTOR.end()
        if before is not None:
            sys.modules[lacking] = before
    message = {
        "runner.instance.control.server": "cannot be served yet",
        "runner.protocol.guest_agent": "the guest agent is not asked",
    }
    assert f"{message[lacking]}: Too many open files" in fake_host.logged()


async def test_the_path_may_be_longer_than_an_address(fake_host: FakeHost) -> None:
    plan = fake_host.plan()
    alias = fake_host.root / ("x" * 120)

    async def act() -> None:
        alias.symlink_to(plan.state_directory)
        with pytest.raises(RunnerError, match="Method not found"):
            await control(PurePosixPath(alias), "nothing", {})
        alias.unlink()

    await while_a_guest_runs(fake_host, plan, act)


async def test_no_descriptor_is_attached_later(fake_host: FakeHost) -> None:
    plan = fake_host.plan()
    refusals = []

    async def act() -> None:
        for params in ({"path": "/dev/null", "fd": "data"}, {"fd": "data"}, {"serial": "data"}):
            with pytest.raises(RunnerError) as refused:
                await control(plan.state_directory, "disk.attach", params)
            refusals.append(explain(refused.value))

    await while_a_guest_runs(fake_host, plan, act)
    assert ["disk.fd: descriptors are handed over" in refusal for refusal in refusals] == [True, True, False]
    assert "disk.path: is missing" in refusals[2]
