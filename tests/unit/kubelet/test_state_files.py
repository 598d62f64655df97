from __future__ import annotations

import json
import re
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.errors import SpecError
from runner.facts.hardware import Cpu, Hardware, HugepagePool, NumaNode, OnlineCpus
from runner.kubelet.pod import Container, Pod
from runner.kubelet.state import Block, CpuState, MemoryState
from runner.kubelet.state_files import parse_cpu_state, parse_memory_state, parse_verified_cpu_state, verify
from runner.node_plan.admission import Kubelet, KubeletConfiguration
from runner.node_plan.quirks import KubeletConfigError

Document = dict[str, Any]
GIB = 1 << 30
A, B, C = (
    "3ceda12c-3ee9-40fa-9f42-61428fe654a6",
    "416de7c2-21de-472d-817c-fa9d4306cb7d",
    "b41f38d8-2c21-4168-af77-6d0cc5482dcb",
)
THREE_INSTANCES = json.dumps(
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


# --- cpu_manager_state ------------------------------------------------------------------------------------------------


def test_the_state_of_a_node_with_three_instances() -> None:
    state = parse_cpu_state(THREE_INSTANCES)
    assert state.shared_pool == CpuSet.parse("2-11")
    assert state.choices(B) == (CpuSet.parse("14-17"),)
    assert state.choices("unknown") == ()
    assert {uid: str(cpus) for uid, cpus in state.assigned().items()} == {A: "0-1,12-13", B: "14-17", C: "18-19"}
    assert str(state.exclusive()) == "0-1,12-19"
    verify(state, machine("0-19"), CpuSet())


def test_four_versions_of_one_state() -> None:
    entries = {A: {"instance": "4-7"}}
    expected = CpuState("static", CpuSet.parse("0-3"), {A: {"instance": CpuSet.parse("4-7")}})
    data = json.dumps({"policyName": "static", "defaultCpuSet": "0-3", "entries": entries})
    assert parse_cpu_state(document(entries=entries)) == expected
    assert parse_cpu_state(document(entries=entries, podEntries={})) == expected
    assert parse_cpu_state(document(entries=entries, data=data, dataChecksum=1)) == expected
    one = parse_cpu_state(document(entries={"0123456789ab": "4-7"}))
    assert one == CpuState("static", CpuSet.parse("0-3"), unattributed=CpuSet.parse("4-7"))
    assert one.choices(A) == ()
    assert one.exclusive() == CpuSet.parse("4-7")


def test_pod_entries_are_assignments_like_those_of_the_containers() -> None:
    state = parse_cpu_state(document(entries={A: {"vm": "4-5"}}, podEntries={A: {"cpuSet": "4-7"}, B: {"CPUset": "8"}}))
    assert list(map(str, state.choices(A))) == ["4-5", "4-7"]
    assert {uid: str(cpus) for uid, cpus in state.assigned().items()} == {A: "4-7", B: "8"}
    verify(state, machine("0-8"), CpuSet())


def test_in_version_4_only_the_data_count() -> None:
    data = json.dumps({"policyName": "static", "defaultCpuSet": "0-1", "entries": {A: {"c": "2-3"}}})
    for outer in ({"defaultCpuSet": "nonsense", "entries": []}, {"defaultCpuSet": "0-3", "entries": {B: {"c": "0"}}}):
        for key in ("data", "Data"):
            state = parse_cpu_state(document(**outer, **{key: data}))
            assert (str(state.shared_pool), state.assigned()) == ("0-1", {A: CpuSet.parse("2-3")})
    for broken in (data[:-1], "", 7, None):
        with pytest.raises(SpecError):
            parse_cpu_state(document(data=broken))


@pytest.mark.parametrize("checksum", [0, 1, -1, "x", None, {}])
def test_the_checksum_is_not_verified(checksum: object) -> None:
    assert parse_cpu_state(document(checksum=checksum, somethingNew=[1])) == parse_cpu_state(document())


def test_keys_are_read_in_any_case_but_only_once() -> None:
    assert parse_cpu_state(b'{"POLICYNAME":"static","defaultcpuset":"0-3"}') == parse_cpu_state(document())
    for twice in (b'{"policyName":"static","policyname":"none"}', b'{"policyName":"static","policyName":"static"}'):
        with pytest.raises(SpecError, match=r"twice|repeated"):
            parse_cpu_state(twice)


@pytest.mark.parametrize("text", ["1.3", "5-3", "0-", " 1", "1 ", "99999", "-", "0,,1", "a", "\n"])
def test_malformed_cpusets(text: str) -> None:
    for broken in (
        document(defaultCpuSet=text),
        document(entries={A: {"c": text}}),
        document(podEntries={A: {"cpuSet": text}}),
        document(entries={"0123": text}),
    ):
        with pytest.raises(SpecError):
            parse_cpu_state(broken)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("\n", "it is empty"),
        ("{", "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "must be an object, found []"),
        ("{}", "policyName: must be 'static' or 'none', found None"),
        ('{"policyName":"dynamic"}', "policyName: must be 'static' or 'none', found 'dynamic'"),
        ('{"policyName":["static"]}', "policyName: must be 'static' or 'none', found ['static']"),
        (
            '{"policyName":"static","defaultCpuSet":7}',
            'defaultCpuSet: must be a string, found 7; write it in quotes: "7"',
        ),
        (
            '{"policyName":"static","defaultCpuSet":"0-","entries":{}}',
            "defaultCpuSet: '0-' in '0-' is neither a CPU number nor a range like '2-5'",
        ),
        ('{"policyName":"static","entries":[]}', "entries: must be an object, found []"),
        ('{"policyName":"static","entries":{"u":[]}}', "entries.u: must be an object, found []"),
        ('{"policyName":"static","entries":{"u":{"c":[1]}}}', "entries.u.c: must be a string, found [1]"),
        ('{"policyName":"static","podEntries":{"u":"4"}}', "podEntries.u: must be an object, found '4'"),
        ('{"data":"{\\"policyName\\":7}"}', "data.policyName: must be 'static' or 'none', found 7"),
        ('{"policyName":"static","x":NaN}', "it is not JSON: NaN is not JSON"),
        (f'{{"policyName":{"[" * 100_000}', "it is nested too deeply"),
    ],
)
def test_a_malformed_cpu_state_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_cpu_state(text.encode())
    assert str(caught.value) == f"cpu_manager_state: {message}"


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ('{"data":"{"}', "data: it is not JSON: Expecting"),
        ('{"policyName":"static","entries":{"\\ud800":{}}}', "it is not JSON: 'utf-8' codec can't encode"),
        ('{"policyName":"\\ud800"}', "it is not JSON: 'utf-8' codec can't encode"),
        (f'{{"x":{"9" * 5000}}}', "it is not JSON: Exceeds the limit"),
        (f'{{"policyName":{"[" * 500}{"]" * 500}}}', "policyName: must be 'static' or 'none', found [[["),
        (f'{{"policyName":"static","entries":{{"{"u" * 5000}":7}}}}', "entries.uuu"),
    ],
)
def test_messages_quote_the_python_parser_or_the_start_of_a_long_value(text: str, start: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(f'cpu_manager_state: {start}')}") as caught:
        parse_cpu_state(text.encode())
    assert len(str(caught.value)) < 700


def test_text_that_is_not_utf_8() -> None:
    with pytest.raises(SpecError, match="it is not JSON: 'utf-8' codec can't decode"):
        parse_cpu_state(b"\xff\xfe")


@pytest.mark.parametrize("text", [THREE_INSTANCES, document(data=THREE_INSTANCES.decode())])
def test_every_truncation_is_an_error_and_never_another_state(text: bytes) -> None:
    for length in range(len(text)):
        with pytest.raises(SpecError):
            parse_cpu_state(text[:length])


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
def test_a_state_that_contradicts_the_machine_or_itself_is_an_error(state: bytes, reason: str) -> None:
    with pytest.raises(SpecError, match=f"^file: {reason}"):
        parse_verified_cpu_state(state, machine("0-7"), CpuSet(), "file")


def test_containers_of_one_pod_may_share_cpus() -> None:
    verify(parse_cpu_state(document(entries={A: {"init": "4-7", "vm": "4-6"}})), machine("0-7"), CpuSet())


def test_reserved_cpus_may_be_in_no_set_under_strict_reservation() -> None:
    state = parse_cpu_state(document(defaultCpuSet="2-3", entries={A: {"c": "4-7"}}))
    verify(state, machine("0-7"), CpuSet.parse("0-1"))
    with pytest.raises(SpecError, match="--reserved-cpus"):
        verify(state, machine("0-7"), CpuSet.parse("0"))


def test_cpus_that_are_offline_are_no_error() -> None:
    state = parse_cpu_state(document(entries={A: {"c": "4-6"}}))
    verify(state, machine("0-7", online="0-6"), CpuSet())  # 7 went before the kubelet started
    verify(state, machine("0-7", online="0-2,4-6"), CpuSet())  # 3 went afterwards
    with pytest.raises(SpecError, match="CPUs 7 are neither"):
        verify(state, machine("0-7"), CpuSet())


def test_policy_none_has_an_empty_state() -> None:
    state = parse_cpu_state(b'{"policyName":"none","defaultCpuSet":"","checksum":1353318690}')
    assert state == CpuState("none", CpuSet())
    verify(state, machine("0-7"), CpuSet())


# --- memory_manager_state ---------------------------------------------------------------------------------------------


def table(*amounts: int) -> dict[str, int]:
    return dict(zip(("total", "systemReserved", "allocatable", "reserved", "free"), amounts, strict=True))


def numa_memory(hugepages: dict[str, int], memory: dict[str, int]) -> Document:
    return {
        "numberOfAssignments": 2,
        "memoryMap": {"hugepages-1Gi": hugepages, "memory": memory},
        "cells": [0, 1],
    }


MEMORY: Document = {
    "policyName": "Static",
    "machineState": {
        "0": numa_memory(table(2 * GIB, 0, 2 * GIB, 2 * GIB, 0), table(8 * GIB, GIB, 5 * GIB, 5 * GIB, 0)),
        "1": numa_memory(table(2 * GIB, 0, 2 * GIB, GIB, GIB), table(8 * GIB, 0, 6 * GIB, 2 * GIB, 4 * GIB)),
    },
    "entries": {
        "uid-1": {
            "vm": [
                {"numaAffinity": [0, 1], "type": "memory", "size": 7 * GIB},
                {"numaAffinity": [0, 1], "type": "hugepages-1Gi", "size": 3 * GIB},
            ]
        }
    },
    "checksum": 2,
}
MEMORY_STATE = json.dumps(MEMORY).encode()


def test_versions_of_one_memory_state() -> None:
    expected = parse_memory_state(MEMORY_STATE)
    assert sorted(expected.numa_nodes) == [0, 1]
    assert expected.numa_nodes[0].tables["memory"].system_reserved == GIB
    assert expected.assignments["uid-1"]["vm"][1] == Block((0, 1), "hugepages-1Gi", 3 * GIB)
    stale = {"policyName": "Static", "machineState": {}, "data": json.dumps(MEMORY), "dataChecksum": 1}
    assert parse_memory_state(json.dumps(stale).encode()) == expected
    upper = json.dumps(MEMORY).replace("machineState", "MachineState").replace("numaAffinity", "NUMAAFFINITY")
    assert parse_memory_state(upper.encode()) == expected
    whole = {"uid-1": {"memoryBlocks": MEMORY["entries"]["uid-1"]["vm"]}}
    state = parse_memory_state(json.dumps({**MEMORY, "podEntries": whole}).encode())
    assert state.booked_for("uid-1") == {"": expected.assignments["uid-1"]["vm"]}


@pytest.mark.parametrize(
    "text",
    ['{"policyName":"None","machineState":{},"checksum":1}', '{"policyName":"None","machineState":null,"checksum":1}'],
)
def test_policy_none_has_an_empty_memory_state(text: str) -> None:
    assert parse_memory_state(text.encode()) == MemoryState("None", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"machineState":[]}', "machineState: must be an object, found []"),
        ('{"machineState":{"x":{}}}', "machineState.x: 'x' is no NUMA node"),
        ('{"machineState":{"-1":{}}}', "machineState.-1: '-1' is no NUMA node"),
        ('{"machineState":{"01":{}}}', "machineState.01: '01' is no NUMA node"),
        ('{"machineState":{"9999":{}}}', "machineState.9999: '9999' is no NUMA node"),
        ('{"machineState":{"²":{}}}', "machineState.²: '²' is no NUMA node"),
        ('{"machineState":{"0":{}}}', "machineState.0.numberOfAssignments: must be a whole number, found None"),
        ('{"machineState":{"0":null}}', "machineState.0.numberOfAssignments: must be a whole number, found None"),
        (
            '{"machineState":{"0":{"numberOfAssignments":0,"memoryMap":{"memory":{"total":-1}},"cells":[0]}}}',
            "machineState.0.memoryMap.memory.total: must be a whole number, found -1",
        ),
        (
            '{"machineState":{"0":{"numberOfAssignments":18446744073709551616}}}',
            "machineState.0.numberOfAssignments: must be a whole number up to 18446744073709551615",
        ),
        (
            '{"policyName":"Static","entries":{"u":{"c":[{"numaAffinity":"0"}]}}}',
            "entries.u.c[0].numaAffinity: must be a list, found '0'",
        ),
        (
            '{"policyName":"Static","entries":{"u":{"c":[{"numaAffinity":[99999]}]}}}',
            "entries.u.c[0].numaAffinity: CPU numbers go from 0 to 8191, found 99999 to 99999",
        ),
        ('{"policyName":"static"}', "policyName: must be 'Static' or 'None', found 'static'"),
    ],
)
def test_a_malformed_memory_state_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_memory_state(text.encode())
    assert str(caught.value) == f"memory_manager_state: {message}"


def test_every_truncation_of_a_memory_state_is_an_error() -> None:
    for length in range(len(MEMORY_STATE)):
        with pytest.raises(SpecError):
            parse_memory_state(MEMORY_STATE[:length])


# --- anything ---------------------------------------------------------------------------------------------------------

KEYS = ("policyName", "DEFAULTCPUSET", "entries", "podEntries", "cpuSet", "data", "machineState", "memoryMap", "cells")
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(10**400), max_value=10**400),
    st.floats(),
    st.text(st.characters()),  # halves of surrogate pairs among them
    st.sampled_from(
        ["static", "Static", "none", "None", "0-3", "\ud800", "{}", '{"policyName":"static"}', '{"a":NaN}']
    ),
)
DOCUMENTS = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner),
    max_leaves=12,
)
STATES = st.fixed_dictionaries(
    {"policyName": st.sampled_from(["static", "Static"]) | ATOMS, "defaultCpuSet": st.just("0-3") | ATOMS},
    optional={
        "entries": st.dictionaries(st.text(max_size=3), DOCUMENTS, max_size=2),
        "podEntries": st.dictionaries(st.text(max_size=3), DOCUMENTS, max_size=2),
        "machineState": st.dictionaries(st.sampled_from(["0", "1", "00", "²", "9" * 5000]), DOCUMENTS, max_size=2),
    },
)


@given(DOCUMENTS | STATES)
def test_any_json_is_a_state_or_the_one_error(value: object) -> None:
    for text in (json.dumps(value), json.dumps({"data": json.dumps(value)})):
        no_other_exception(text.encode())


@given(st.binary(max_size=60), st.integers(min_value=0), st.integers(min_value=0, max_value=3))
def test_any_bytes_are_a_state_or_the_one_error(noise: bytes, place: int, removed: int) -> None:
    no_other_exception(noise)
    for text in (THREE_INSTANCES, MEMORY_STATE):
        at = place % len(text)
        no_other_exception(text[:at] + noise[:3] + text[at + removed :])


@pytest.mark.parametrize("depth", [10, 100, 300, 900, 990, 1000, 5000])
@pytest.mark.parametrize("bracket", ["[]", '{"a":}'])
def test_deep_nesting_is_the_one_error(depth: int, bracket: str) -> None:
    left, right = bracket[:-1], bracket[-1]
    for key in KEYS:
        no_other_exception(f'{{"policyName":"static","{key}":{left * depth}1{right * depth}}}'.encode())


def no_other_exception(text: bytes) -> None:
    for parse in (parse_cpu_state, parse_memory_state):
        try:
            shown = repr(parse(text))
        except SpecError as error:
            shown = str(error)
        shown.encode()  # can be logged


# --- a node from the files --------------------------------------------------------------------------------------------


def kubelet(policy: str = "restricted", reserved: int = GIB) -> Kubelet:
    """Start a kubelet with *reserved* bytes of memory for the system."""
    hardware = Hardware(
        tuple(Cpu(cpu, cpu, cpu // 4, cpu // 4 * 4, cpu // 4) for cpu in range(8)),
        tuple(NumaNode(node, 8 * GIB, (10, 20), (HugepagePool(GIB, 2, 2),)) for node in range(2)),
    )
    configuration = KubeletConfiguration(
        cpu_manager_policy="static",
        reserved_cpus=CpuSet((0,)),
        memory_manager_policy="Static",
        reserved_memory={0: {"memory": reserved}},
        topology_manager_policy=policy,
    )
    return Kubelet.configured(hardware, configuration)


POD = Pod("uid-1", (Container("vm", 3000, {"memory": 7 * GIB, "hugepages-1Gi": 3 * GIB}),))

CPU_STATE = b'{"policyName":"static","defaultCpuSet":"0,4-7","entries":{"uid-1":{"vm":"1-3"}},"checksum":1}'


def test_a_node_continues_from_its_state_files() -> None:
    running = kubelet(policy="best-effort")
    restored = running.restored(parse_cpu_state(CPU_STATE), parse_memory_state(MEMORY_STATE))
    admitted = running.empty_node.admit(POD)
    assert admitted.admitted
    assert (restored.cpus.shared_pool, restored.cpus.assignments) == (
        admitted.node.cpus.shared_pool,
        admitted.node.cpus.assignments,
    )
    assert restored.memory.numa_nodes == admitted.node.memory.numa_nodes
    assert restored.memory.assignments == admitted.node.memory.assignments
    assert restored.without("uid-1").memory.numa_nodes == running.empty_node.memory.numa_nodes
    # A pod that has its share is admitted again with the same, as after a restart of the kubelet.
    assert restored.admit(POD).cpus == admitted.cpus


def test_pod_entries_are_the_pods_until_it_ends() -> None:
    running = kubelet()
    whole = {"uid-1": {"memoryBlocks": MEMORY["entries"]["uid-1"]["vm"]}}
    cpus = parse_cpu_state(document(defaultCpuSet="0,4-7", entries={A: {}}, podEntries={A: {"cpuSet": "1-3"}}))
    parts: dict[str, dict[str, list[object]]] = {"uid-1": {"vm": []}}
    memory = parse_memory_state(json.dumps({**MEMORY, "entries": parts, "podEntries": whole}).encode())
    restored = running.restored(cpus, memory)
    assert str(restored.available) == "4-7"
    assert restored.without(A).cpus.shared_pool == CpuSet.parse("0-7")
    assert restored.without("uid-1").memory.numa_nodes == running.empty_node.memory.numa_nodes
    # Without a container that has a part of it the kubelet does not count it when it starts.
    forgotten = running.restored(cpus, attrs.evolve(memory, assignments={}))
    assert "the expected machine state is different from the real one" in forgotten.restart_refusal


def test_states_of_another_machine_are_refused_with_the_kubelet_s_message() -> None:
    cpus, memory = parse_cpu_state(CPU_STATE), parse_memory_state(MEMORY_STATE)
    for others in ("0,4-9", "0,4-6"):
        with pytest.raises(KubeletConfigError, match="doesn't match with CPUs in state"):
            kubelet().restored(attrs.evolve(cpus, shared_pool=CpuSet.parse(others)), memory)
    elsewhere = parse_memory_state(MEMORY_STATE.replace(b"[0, 1]", b"[0, 7]"))
    with pytest.raises(KubeletConfigError, match="the memory assignment uses the NUMA that does not exist"):
        kubelet().restored(cpus, elsewhere)
    other_pages = parse_memory_state(MEMORY_STATE.replace(b"hugepages-1Gi", b"hugepages-2Mi"))
    with pytest.raises(KubeletConfigError, match="the expected machine state is different from the real one"):
        kubelet().restored(cpus, other_pages)


@pytest.mark.parametrize(
    ("pool", "reserved", "refusal"),
    [
        ("0,4-7", GIB, ""),
        ("4-7", GIB, 'not all reserved cpus: "0" are present in defaultCpuSet: "4-7"'),
        ("0,3-7", GIB, 'pod: uid-1, container: vm cpuset: "1-3" overlaps with default cpuset "0,3-7"'),
        ("0,4-7", 2 * GIB, "[memorymanager] the expected machine state is different from the real one"),
    ],
)
def test_a_running_kubelet_goes_on_with_a_state_that_its_restart_would_refuse(
    pool: str, reserved: int, refusal: str
) -> None:
    cpus = attrs.evolve(parse_cpu_state(CPU_STATE), shared_pool=CpuSet.parse(pool))
    node = kubelet(reserved=reserved).restored(cpus, parse_memory_state(MEMORY_STATE))
    assert node.restart_refusal == refusal
    assert node.cpus == cpus


def test_an_empty_shared_pool_stops_the_next_start() -> None:
    """Under strict-cpu-reservation, after the last CPU was given away."""
    cpus = attrs.evolve(parse_cpu_state(CPU_STATE), shared_pool=CpuSet(), assignments={A: {"vm": CpuSet.parse("1-7")}})
    running = attrs.evolve(kubelet(), memory_manager=None)
    node = running.restored(cpus, parse_memory_state(MEMORY_STATE))
    assert node.restart_refusal == "default cpuset cannot be empty"


def test_a_state_file_without_any_cpu_is_that_of_an_empty_node() -> None:
    cpus = attrs.evolve(parse_cpu_state(CPU_STATE), shared_pool=CpuSet(), assignments={})
    node = kubelet().restored(cpus, parse_memory_state(MEMORY_STATE))
    assert node.cpus == kubelet().empty_node.cpus
