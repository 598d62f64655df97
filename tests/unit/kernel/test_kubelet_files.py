from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.facts.hardware import OnlineCpus
from runner.kernel.kubelet_files import OTHER_ROOT, Frozen, attempt, read_state_file, settled
from runner.kubelet.state import CpuState
from runner.kubelet.state_files import parse_cpu_state, parse_verified_cpu_state

MACHINE = OnlineCpus(CpuSet.parse("0-3"), CpuSet.parse("0-3"), CpuSet([0]))
A = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
PARSE: Callable[[bytes], CpuState] = partial(parse_verified_cpu_state, machine=MACHINE, reserved=CpuSet())


def document(**changes: object) -> bytes:
    return json.dumps({"policyName": "static", "defaultCpuSet": "0-3", **changes}).encode()


def test_an_unusable_file_becomes_a_value(tmp_path: Path) -> None:
    path = tmp_path / "cpu_manager_state"
    assert attempt(path, PARSE) == Frozen(
        f"cannot use {path}: it cannot be read: No such file or directory; {OTHER_ROOT}"
    )
    path.write_bytes(b"{")
    torn = attempt(path, PARSE)
    assert isinstance(torn, Frozen)
    assert torn.reason.startswith(f"cannot use {path}: it is not JSON")
    path.write_bytes(document(entries={"a": 7}))
    assert attempt(path, PARSE) == Frozen(f"cannot use {path}: entries.a: must be an object, found 7")
    path.write_bytes(document())
    assert attempt(path, PARSE) == parse_cpu_state(document())


def test_only_regular_files_of_at_most_16_mib_are_read(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for make in (os.mkfifo, os.mkdir):
        make(path)
        with pytest.raises(HostError, match="it is not a regular file"):
            read_state_file(path)
        (path.rmdir if path.is_dir() else path.unlink)()
    largest = 16 << 20
    path.write_bytes(b" ")
    os.truncate(path, largest)
    assert len(read_state_file(path)) == largest
    os.truncate(path, largest + 1)
    with pytest.raises(HostError, match="it is larger than 16777216 bytes"):
        read_state_file(path)


async def test_one_reading_is_not_enough(tmp_path: Path, autojump_clock: object) -> None:  # noqa: ARG001  # its presence is its effect
    path = tmp_path / "cpu_manager_state"
    path.write_bytes(document())
    state = await settled(path, PARSE, pause=0.01, readings=10)
    assert state == parse_cpu_state(document())
    assert await settled(path, PARSE, pause=0.01, readings=1) == state
    path.write_bytes(document(defaultCpuSet="0-2"))  # the generation in which CPU 3 is in neither set
    gap = await settled(path, PARSE, pause=0.01, readings=10)
    assert isinstance(gap, Frozen)
    assert "CPUs 3 are neither" in gap.reason


async def test_two_equal_readings_in_a_row_are_enough(tmp_path: Path, autojump_clock: object) -> None:  # noqa: ARG001  # its presence is its effect
    path = tmp_path / "cpu_manager_state"
    first, second = document(), document(defaultCpuSet="0-1", entries={A: {"c": "2-3"}})
    path.write_bytes(first)

    async def replace() -> None:
        await trio.sleep(0.005)
        path.write_bytes(second)

    async def alternate() -> None:
        await trio.sleep(0.005)  # between two readings, not at one
        while True:
            path.write_bytes(first if path.read_bytes() == second else second)
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(replace)
        assert await settled(path, PARSE, pause=0.01, readings=10) == parse_cpu_state(second)
        nursery.start_soon(alternate)
        restless = await settled(path, PARSE, pause=0.01, readings=10)
        assert isinstance(restless, Frozen)
        assert "no two of 10 readings" in restless.reason
        nursery.cancel_scope.cancel()
