from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from runner.controller.kubelet_files import (
    CpuAssignments,
    Frozen,
    StateError,
    attempt_cpu_state,
    parse_cpu_state,
    parse_memory_nodes,
    read_memory_nodes,
    settled,
    verify,
)
from runner.controller.online_cpus import OnlineCpus, read_online_cpus
from runner.cpuset import CpuSet
from runner.errors import HostError
from tests.support.fake_cgroupfs import fake_sysfs

A, B, C = (
    "3ceda12c-3ee9-40fa-9f42-61428fe654a6",
    "416de7c2-21de-472d-817c-fa9d4306cb7d",
    "b41f38d8-2c21-4168-af77-6d0cc5482dcb",
)
ARTICLE = json.dumps(
    {
        "policyName": "static",
        "defaultCpuSet": "2-11",
        "entries": {A: {"instance": "0-1,12-13"}, B: {"instance": "14-17"}, C: {"instance": "18-19"}},
        "checksum": 3944432841,
    }
).encode()


def machine(cpus: str, online: str | None = None) -> OnlineCpus:
    return OnlineCpus(CpuSet.parse(cpus), CpuSet.parse(cpus if online is None else online), CpuSet([0]))


def document(**changes: object) -> bytes:
    return json.dumps({"policyName": "static", "defaultCpuSet": "0-3", **changes}).encode()


def test_reads_the_state_of_a_node_with_three_instances() -> None:
    state = parse_cpu_state(ARTICLE)
    assert state.shared_pool == CpuSet.parse("2-11")
    assert state.choices(B) == (CpuSet.parse("14-17"),)
    assert state.choices("unknown") == ()
    assert {uid: str(cpus) for uid, cpus in state.assigned().items()} == {A: "0-1,12-13", B: "14-17", C: "18-19"}
    verify(state, machine("0-19"), CpuSet())


def test_every_truncation_is_an_error_and_never_another_state() -> None:
    for length in range(len(ARTICLE)):
        with pytest.raises(StateError):
            parse_cpu_state(ARTICLE[:length])


def test_four_shapes_of_one_state() -> None:
    entries = {A: {"instance": "4-7"}}
    expected = CpuAssignments("static", CpuSet.parse("0-3"), {A: {"instance": CpuSet.parse("4-7")}})
    data = json.dumps({"policyName": "static", "defaultCpuSet": "0-3", "entries": entries})
    assert parse_cpu_state(document(entries=entries)) == expected
    assert parse_cpu_state(document(entries=entries, podEntries={})) == expected
    assert parse_cpu_state(document(entries=entries, data=data, dataChecksum=1)) == expected
    one = parse_cpu_state(document(entries={"0123456789ab": "4-7"}))
    assert one == CpuAssignments("static", CpuSet.parse("0-3"), unattributed=CpuSet.parse("4-7"))
    assert one.choices(A) == ()


def test_pod_entries_are_choices_beside_those_of_the_containers() -> None:
    state = parse_cpu_state(document(entries={A: {"vm": "4-5"}}, podEntries={A: {"cpuSet": "4-7"}, B: {"CPUset": "8"}}))
    assert list(map(str, state.choices(A))) == ["4-5", "4-7"]
    assert {uid: str(cpus) for uid, cpus in state.assigned().items()} == {A: "4-7", B: "8"}
    verify(state, machine("0-8"), CpuSet())


def test_in_the_newest_shape_only_the_data_count() -> None:
    data = json.dumps({"policyName": "static", "defaultCpuSet": "0-1", "entries": {A: {"c": "2-3"}}})
    state = parse_cpu_state(document(defaultCpuSet="nonsense", entries=[], data=data))
    assert str(state.shared_pool) == "0-1"
    for broken in (data[:-1], "", 7, None):
        with pytest.raises(StateError):
            parse_cpu_state(document(data=broken))


@pytest.mark.parametrize("checksum", [0, 1, -1, "x", None, {}])
def test_the_checksum_is_the_kubelets_own_affair(checksum: object) -> None:
    assert parse_cpu_state(document(checksum=checksum, somethingNew=[1])) == parse_cpu_state(document())


def test_keys_are_read_in_any_case_but_only_once() -> None:
    assert parse_cpu_state(b'{"POLICYNAME":"static","defaultcpuset":"0-3"}') == parse_cpu_state(document())
    for twice in (b'{"policyName":"static","policyname":"none"}', b'{"policyName":"static","policyName":"static"}'):
        with pytest.raises(StateError, match="twice"):
            parse_cpu_state(twice)


@pytest.mark.parametrize("text", ["1.3", "5-3", "0-", " 1", "1 ", "99999", "-", "0,,1", "a", "\n"])
def test_malformed_cpusets(text: str) -> None:
    for broken in (
        document(defaultCpuSet=text),
        document(entries={A: {"c": text}}),
        document(podEntries={A: {"cpuSet": text}}),
        document(entries={"0123": text}),
    ):
        with pytest.raises(StateError):
            parse_cpu_state(broken)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"static"',
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b'{"policyName":"static","defaultCpuSet":7}',
        b'{"policyName":"static","entries":[]}',
        b'{"policyName":"static","entries":{"a":[]}}',
        b'{"policyName":"static","entries":{"a":{"b":7}}}',
        b'{"policyName":"static","podEntries":{"a":"4"}}',
        b'{"policyName":"dynamic","defaultCpuSet":"0"}',
        b'{"policyName":["static"],"defaultCpuSet":"0"}',
    ],
)
def test_what_is_no_state_is_an_error_that_says_so(text: bytes) -> None:
    with pytest.raises(StateError, match=r"\w{2}"):
        parse_cpu_state(text)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (document(defaultCpuSet="0-2", entries={A: {"c": "4-7"}}), "CPUs 3 are neither"),
        (document(entries={A: {"c": "3-7"}}), f"CPUs 3 of {A} are also"),
        (document(entries={A: {"c": "4-5"}, B: {"c": "5-7"}}), f"CPUs 5 of {B} are also"),
        (document(entries={A: {"c": "4-7"}, "0123": "7"}), "CPUs 7 of another container"),
        (document(entries={A: {"c": "4-8"}}), "CPUs 8 do not exist"),
        (document(defaultCpuSet=""), "CPUs 0-7 are neither"),
    ],
)
def test_what_contradicts_the_machine_or_itself_is_not_believed(state: bytes, reason: str) -> None:
    with pytest.raises(StateError, match=reason):
        verify(parse_cpu_state(state), machine("0-7"), CpuSet())


def test_containers_of_one_pod_may_share_cpus() -> None:
    verify(parse_cpu_state(document(entries={A: {"init": "4-7", "vm": "4-6"}})), machine("0-7"), CpuSet())


def test_reserved_cpus_may_be_nobodys_under_strict_reservation() -> None:
    state = parse_cpu_state(document(defaultCpuSet="2-3", entries={A: {"c": "4-7"}}))
    verify(state, machine("0-7"), CpuSet.parse("0-1"))
    with pytest.raises(StateError, match="--reserved-cpus"):
        verify(state, machine("0-7"), CpuSet.parse("0"))


def test_cpus_that_are_offline_are_nobodys_fault() -> None:
    state = parse_cpu_state(document(entries={A: {"c": "4-6"}}))
    verify(state, machine("0-7", online="0-6"), CpuSet())  # 7 went before the kubelet started
    verify(state, machine("0-7", online="0-2,4-6"), CpuSet())  # 3 went afterwards
    with pytest.raises(StateError, match="CPUs 7 are neither"):
        verify(state, machine("0-7"), CpuSet())


def test_policy_none_says_nothing_about_any_cpu() -> None:
    state = parse_cpu_state(b'{"policyName":"none","defaultCpuSet":"","checksum":1353318690}')
    assert (state.policy, state.shared_pool, state.assigned()) == ("none", CpuSet(), {})
    verify(state, machine("0-7"), CpuSet())


def test_what_is_wrong_with_a_file_becomes_a_value(tmp_path: Path) -> None:
    path = tmp_path / "cpu_manager_state"
    missing = attempt_cpu_state(path, machine("0-3"), CpuSet())
    assert missing == Frozen(f"cannot use {path}: it cannot be read: No such file or directory")
    path.write_bytes(b"{")
    torn = attempt_cpu_state(path, machine("0-3"), CpuSet())
    assert isinstance(torn, Frozen)
    assert torn.reason.startswith(f"cannot use {path}: it is not JSON")
    path.write_bytes(document())
    assert attempt_cpu_state(path, machine("0-3"), CpuSet()) == parse_cpu_state(document())
    path.unlink()
    path.mkdir()
    assert isinstance(attempt_cpu_state(path, machine("0-3"), CpuSet()), Frozen)


async def test_one_reading_is_not_believed(tmp_path: Path, autojump_clock: object) -> None:  # noqa: ARG001  # its presence is its effect
    path = tmp_path / "cpu_manager_state"
    path.write_bytes(document())
    state = await settled(path, machine("0-3"), CpuSet(), pause=0.01, readings=10)
    assert state == parse_cpu_state(document())
    assert await settled(path, machine("0-3"), CpuSet(), pause=0.01, readings=1) == state
    path.write_bytes(document(defaultCpuSet="0-2"))  # the generation in which CPU 3 is in neither set
    gap = await settled(path, machine("0-3"), CpuSet(), pause=0.01, readings=10)
    assert isinstance(gap, Frozen)
    assert "CPUs 3 are neither" in gap.reason


MEMORY = {
    "policyName": "Static",
    "machineState": {"0": {"numberOfAssignments": 1, "memoryMap": {}, "cells": [0]}, "1": {}},
    "entries": {A: {"instance": [{"numaAffinity": [1], "type": "memory", "size": 12884901888}]}},
    "checksum": 7,
}


def test_memory_nodes(tmp_path: Path) -> None:
    assert parse_memory_nodes(json.dumps(MEMORY).encode()) == CpuSet([0, 1])
    assert parse_memory_nodes(json.dumps({"data": json.dumps(MEMORY)}).encode()) == CpuSet([0, 1])
    assert parse_memory_nodes(b'{"policyName":"None","machineState":null,"checksum":1}') == CpuSet()
    for broken in (b"{", b'{"machineState":{"x":{}}}', b'{"machineState":{"-1":{}}}', b'{"machineState":[]}'):
        with pytest.raises(StateError):
            parse_memory_nodes(broken)
    assert read_memory_nodes(tmp_path / "memory_manager_state") == CpuSet()


def test_the_machine(tmp_path: Path) -> None:
    sys = fake_sysfs(tmp_path / "sys", cpus="0-7", online="0-3,5-7", mems="0-1")
    found = read_online_cpus(sys)
    assert (str(found.present), str(found.online), str(found.memory_nodes)) == ("0-7", "0-3,5-7", "0-1")
    (sys / "devices/system/node/has_memory").unlink()
    assert read_online_cpus(sys).memory_nodes == CpuSet([0])
    with pytest.raises(HostError, match="cannot read the machine"):
        read_online_cpus(tmp_path)


async def test_two_equal_readings_in_a_row_are(tmp_path: Path, autojump_clock: object) -> None:  # noqa: ARG001  # its presence is its effect
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
        state = await settled(path, machine("0-3"), CpuSet(), pause=0.01, readings=10)
        assert state == parse_cpu_state(second)
        nursery.start_soon(alternate)
        restless = await settled(path, machine("0-3"), CpuSet(), pause=0.01, readings=10)
        assert isinstance(restless, Frozen)
        assert "no two of 10 readings" in restless.reason
        nursery.cancel_scope.cancel()
