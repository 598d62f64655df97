"""The control socket of an instance that runs."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from runner.ctl import control
from runner.errors import RunnerError, explain
from runner.instance.host import Host
from runner.instance.machine import Ended


async def asked(bench: Any, method: str, *several: dict[str, object]) -> list[str]:
    """Ask for *method* with each of *several* params and return how that was refused."""
    plan = bench.plan()
    refusals = []

    async def beside(_host: Host) -> None:
        try:
            with trio.fail_after(30):
                while not bench.guest_runs():
                    await trio.sleep(0.005)
                for params in several:
                    with pytest.raises(RunnerError) as refused:
                        await control(plan.state_directory, method, params)
                    refusals.append(explain(refused.value))
        finally:
            bench.stop.ask("test")

    assert isinstance(await bench.run(plan, beside=beside), Ended)
    return refusals


async def test_no_descriptor_is_attached_later(bench: Any) -> None:
    refusals = await asked(
        bench, "disk.attach", {"path": "/dev/null", "fd": "data"}, {"fd": "data"}, {"serial": "data"}
    )
    assert ["disk.fd: descriptors are handed over" in refusal for refusal in refusals] == [True, True, False]
    assert "disk.path: is missing" in refusals[2]
