"""The parser of the kubelet's state files, ``cpu_manager_state`` and ``memory_manager_state``.

``cpu_manager_state`` has had four versions (``pkg/kubelet/cm/cpumanager/state/checkpoint.go``):

====  =======================================================================================================
v1    ``entries``: container ID → cpuset (Kubernetes 1.17 and before)
v2    ``entries``: pod UID → container → cpuset
v3    v2 and ``podEntries``: pod UID → ``{"cpuSet": cpuset}``, the CPUs of a pod as a whole
v4    v2 or v3 for older kubelets, possibly out of date, and ``data``: a string with the current JSON document
====  =======================================================================================================

``memory_manager_state`` has the same history from v2 on; its ``podEntries`` hold ``memoryBlocks``.

The checksums are not verified: the kubelet writes 0 where an older kubelet must accept the file. A reader never sees
half of a file, because the kubelet replaces it by a rename.

The kubelet writes the shared pool and the assignments one after the other. Between the two writes some CPUs are in
neither set: :func:`verify` detects this, and the file has to be read again (:func:`runner.kernel.kubelet_files.settled`).

Every malformed document raises :class:`SpecError`, with the path of the value where there is one.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import attrs

from runner.cpuset import MAX_CPU, CpuSet
from runner.errors import Problem, SpecError
from runner.facts.hardware import OnlineCpus
from runner.kubelet.state import Block, CpuState, MemoryState, MemoryTable, NumaMemory
from runner.spec.value import Value
from runner.values import frozen

CPU_STATE = "cpu_manager_state"
MEMORY_STATE = "memory_manager_state"

_LONGEST = 300
"""Largest number of characters of an error message, which quotes values: a file may be one string of 16 MiB."""
_UINT64 = 2**64
"""Go keeps bytes as ``uint64``."""

_NUMA_NODE = re.compile(r"0|[1-9][0-9]{0,3}", re.ASCII)

Choice = TypeVar("Choice", bound=str)


@frozen
class KubeletFiles:
    """The paths of the kubelet's state files, and of its socket."""

    directory: Path
    """The kubelet's ``--root-dir``."""

    @property
    def cpu_state(self) -> Path:
        """The CPU Manager's file."""
        return self.directory / CPU_STATE

    @property
    def memory_state(self) -> Path:
        """The Memory Manager's file."""
        return self.directory / MEMORY_STATE

    @property
    def pod_resources(self) -> Path:
        """The socket of the PodResources API (``getPodResourcesDir`` of ``pkg/kubelet/kubelet_getters.go``)."""
        return self.directory / "pod-resources/kubelet.sock"


def parse_cpu_state(text: bytes, source: str = CPU_STATE) -> CpuState:
    """Parse ``cpu_manager_state`` in any of its versions; *source* is its name in :class:`SpecError`."""
    with _one_error(source):
        document = _document(text, source)
        entries = _members(_field(document, "entries"))
        return CpuState(
            _policy(document, "static", "none"),
            _cpus(_field(document, "defaultCpuSet", "")),
            {
                pod.key: {container.key: _cpus(container) for container in _members(pod)}
                for pod in entries
                if not isinstance(pod.value, str)
            },
            {pod.key: _cpus(_field(pod, "cpuSet", "")) for pod in _members(_field(document, "podEntries"))},
            CpuSet(cpu for entry in entries if isinstance(entry.value, str) for cpu in _cpus(entry)),
        )


def parse_memory_state(text: bytes, source: str = MEMORY_STATE) -> MemoryState:
    """Parse ``memory_manager_state`` in any of its versions; *source* is its name in :class:`SpecError`."""
    with _one_error(source):
        document = _document(text, source)
        numa_nodes = {_numa_node(each): _numa_memory(each) for each in _members(_field(document, "machineState"))}
        return MemoryState(
            _policy(document, "Static", "None"),
            dict(sorted(numa_nodes.items())),
            {
                pod.key: {container.key: _blocks(container) for container in _members(pod)}
                for pod in _members(_field(document, "entries"))
            },
            {pod.key: _blocks(_field(pod, "memoryBlocks", [])) for pod in _members(_field(document, "podEntries"))},
        )


def verify(state: CpuState, machine: OnlineCpus, reserved: CpuSet, source: str = CPU_STATE) -> None:
    """Check that each online CPU of *machine* is in the shared pool or exclusive to one pod; else raise :class:`SpecError`.

    *reserved* CPUs may be in neither (``strict-cpu-reservation`` removes them from the shared pool). Offline CPUs in
    *state* are no error: only the kubelet can remove them. Containers of one pod may share CPUs, because the main
    container takes over those of an init container that has ended.
    """

    def fail(reason: str) -> NoReturn:
        raise SpecError(source, [Problem("", reason)])

    if state.policy == "none":
        return
    taken = state.shared_pool
    for pod_uid, cpus in (*state.assigned().items(), ("another container", state.unattributed)):
        if not taken.isdisjoint(cpus):
            fail(f"CPUs {taken & cpus} of {pod_uid} are also in the shared pool or another pod's")
        taken |= cpus
    if not taken <= machine.present:
        fail(f"CPUs {taken - machine.present} do not exist: this machine has {machine.present}")
    if not machine.online - taken <= reserved:
        fail(
            f"CPUs {machine.online - taken - reserved} are neither in the shared pool nor any pod's; under "
            "strict-cpu-reservation say so with --reserved-cpus"
        )


def parse_verified_cpu_state(text: bytes, machine: OnlineCpus, reserved: CpuSet, source: str = CPU_STATE) -> CpuState:
    """Parse ``cpu_manager_state`` and :func:`verify` it. Raises :class:`SpecError`."""
    state = parse_cpu_state(text, source)
    verify(state, machine, reserved, source)
    return state


@contextlib.contextmanager
def _one_error(source: str) -> Iterator[None]:
    """Turn deep nesting into :class:`SpecError`, and shorten messages that quote long values."""
    try:
        yield
    except RecursionError:  # from the JSON scanner, or from repr() of what it returned
        raise SpecError(source, [Problem("", "it is nested too deeply")]) from None
    except SpecError as error:
        problems = [Problem(_short(each.path), _short(each.message), _short(each.remedy)) for each in error.problems]
        raise SpecError(source, problems) from None


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _document(text: bytes, source: str) -> Value:
    """Return the current JSON object: the document, or the one in its string ``data`` (v4)."""
    document = _object(text, Value(None, source))
    if not _spellings(document, "data"):
        return document
    data = _field(document, "data")
    return _object(data.text().encode(), data)


def _object(text: bytes, at: Value) -> Value:
    try:
        value = json.loads(text.decode(), object_pairs_hook=_pairs, parse_constant=_no_constant)
    except ValueError as error:
        at.fail(f"it is not JSON: {error}" if text.strip() else "it is empty")
    document = attrs.evolve(at, value=value)
    _members(document)
    return document


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object; ``ValueError`` for repeated keys and lone surrogates, which other JSON parsers read differently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice in one object")
    for text in (*found, *found.values()):
        if isinstance(text, str):
            text.encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair (\\ud800)
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _spellings(struct: Value, name: str) -> list[str]:
    """Return the keys of *struct* that Go reads as the field *name*: ``encoding/json`` ignores case."""
    return [member.key for member in _members(struct) if member.key.casefold() == name.casefold()]


def _field(struct: Value, name: str, default: object = None) -> Value:
    """Return the field *name* of *struct*, or *default* where it is missing or null, as for an empty map in Go."""
    spellings = _spellings(struct, name)
    if len(spellings) > 1:
        struct.fail(f"a key appears twice in one object: {' and '.join(map(repr, spellings))}")
    value = struct.value[spellings[0]] if spellings else None
    return Value(default if value is None else value, struct.source, f"{struct.path}.{name}".lstrip("."), name)


def _members(value: Value) -> list[Value]:
    """Return the members of an object, or an empty list for null, which Go writes for an empty map."""
    return value.members() if value else []


def _policy(document: Value, *known: Choice) -> Choice:
    policy = _field(document, "policyName")
    found = next((choice for choice in known if choice == policy.value), None)
    if found is None:
        policy.fail(f"must be {' or '.join(map(repr, known))}, found {policy.value!r}")
    return found


def _cpus(value: Value) -> CpuSet:
    text = value.text()
    if text != text.strip():  # Go's cpuset.Parse takes none, CpuSet.parse the kernel's line end
        value.fail(f"{text!r} has white space around it")
    return value.cpu_set()


def _bytes(value: Value) -> int:
    if value.number() >= _UINT64:
        value.fail(f"must be less than 2^64, found {value.value!r}")
    return value.number()


def _numa_node(member: Value) -> int:
    """Return the key of *member*, a number as Go writes it: ``01`` would be a second key for NUMA node 1."""
    if not _NUMA_NODE.fullmatch(member.key) or int(member.key) > MAX_CPU:
        member.fail(f"{member.key!r} is no NUMA node")
    return int(member.key)


def _numa_memory(value: Value) -> NumaMemory:
    return NumaMemory(
        _bytes(_field(value, "numberOfAssignments")),
        {table.key: _table(table) for table in _members(_field(value, "memoryMap"))},
        _numa_nodes(_field(value, "cells")),
    )


def _table(value: Value) -> MemoryTable:
    return MemoryTable(
        total=_bytes(_field(value, "total")),
        system_reserved=_bytes(_field(value, "systemReserved")),
        allocatable=_bytes(_field(value, "allocatable")),
        reserved=_bytes(_field(value, "reserved")),
        free=_bytes(_field(value, "free")),
    )


def _blocks(value: Value) -> tuple[Block, ...]:
    return tuple(
        Block(_numa_nodes(_field(each, "numaAffinity")), _field(each, "type").text(), _bytes(_field(each, "size")))
        for each in value.elements()
    )


def _numa_nodes(value: Value) -> tuple[int, ...]:
    try:
        return tuple(CpuSet(value.numbers()))
    except ValueError as error:
        value.fail(str(error))
