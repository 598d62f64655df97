"""The parser of the kubelet's state files, ``cpu_manager_state`` and ``memory_manager_state``.

``cpu_manager_state`` has had four versions (``pkg/kubelet/cm/cpumanager/state/checkpoint.go``):

====  =======================================================================================================
v1    ``entries``: container ID → cpuset (Kubernetes 1.17 and before)
v2    ``entries``: pod UID → container → cpuset
v3    v2 and ``podEntries``: pod UID → ``{"cpuSet": cpuset}``, the CPUs of a pod as a whole
v4    v2 or v3 for older kubelets, possibly out of date, and ``data``: a string with the current JSON document
====  =======================================================================================================

``memory_manager_state`` has the same history from v2 on; its ``podEntries`` hold ``memoryBlocks``.

The checksums are not verified: the kubelet writes 0 where an older kubelet must accept the file. A reader never sees an incomplete file,
because the kubelet replaces it by a rename.

The kubelet writes the shared pool and the assignments one after the other. Between the two writes some CPUs are in
neither set: :func:`verify` detects this, and the file has to be read again (:func:`runner.kernel.kubelet_files.settled`).

Every malformed document raises :class:`SpecError`, with the path of the value where there is one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn, TypeVar

from runner.base.cpuset import MAX_CPU, CpuSet
from runner.base.document_value import Value
from runner.base.errors import Problem, SpecError
from runner.base.values import frozen
from runner.facts.hardware import OnlineCpus
from runner.kubelet.go_json import cpu_set, field, members, one_error, parse_document
from runner.kubelet.state import Block, CpuState, MemoryState, MemoryTable, NumaMemory

CPU_STATE = "cpu_manager_state"
MEMORY_STATE = "memory_manager_state"

_MOST_BYTES = 2**64 - 1
"""Go keeps bytes as ``uint64``."""

_NUMA_NODE = re.compile(r"0|[1-9][0-9]{0,3}", re.ASCII)

Choice = TypeVar("Choice", bound=str)


@frozen
class KubeletFiles:
    """The paths of the kubelet's state files and sockets, and of the files that DRA drivers write for the container runtime."""

    directory: Path
    """The kubelet's ``--root-dir``."""
    cdi: Path = Path("/var/run/cdi")
    """The directory of DRA drivers' CDI specifications."""

    @property
    def cpu_state(self) -> Path:
        """The CPU Manager's file."""
        return self.directory / CPU_STATE

    @property
    def memory_state(self) -> Path:
        """The Memory Manager's file."""
        return self.directory / MEMORY_STATE

    @property
    def claims(self) -> Path:
        """The file of the resource claims (DRA) that pods of this node have (:mod:`runner.kubelet.claims`)."""
        return self.directory / "dra_manager_state"

    @property
    def plugins(self) -> Path:
        """The directory in which DRA drivers are registered, each by a socket (``plugins_registry``)."""
        return self.directory / "plugins_registry"

    @property
    def pod_resources(self) -> Path:
        """The socket of the PodResources API (``getPodResourcesDir`` of ``pkg/kubelet/kubelet_getters.go``)."""
        return self.directory / "pod-resources/kubelet.sock"


def parse_cpu_state(text: bytes, source: str = CPU_STATE) -> CpuState:
    """Parse ``cpu_manager_state`` in any of its versions; *source* is its name in :class:`SpecError`."""
    with one_error(source):
        document = parse_document(text, source)
        entries = members(field(document, "entries"))
        return CpuState(
            _policy(document, "static", "none"),
            cpu_set(field(document, "defaultCpuSet", "")),
            {
                pod.key: {container.key: cpu_set(container) for container in members(pod)}
                for pod in entries
                if not isinstance(pod.value, str)
            },
            {pod.key: cpu_set(field(pod, "cpuSet", "")) for pod in members(field(document, "podEntries"))},
            CpuSet.union(cpu_set(entry) for entry in entries if isinstance(entry.value, str)),
        )


def parse_memory_state(text: bytes, source: str = MEMORY_STATE) -> MemoryState:
    """Parse ``memory_manager_state`` in any of its versions; *source* is its name in :class:`SpecError`."""
    with one_error(source):
        document = parse_document(text, source)
        numa_nodes = {_numa_node(each): _numa_memory(each) for each in members(field(document, "machineState"))}
        return MemoryState(
            _policy(document, "Static", "None"),
            dict(sorted(numa_nodes.items())),
            {
                pod.key: {container.key: _blocks(container) for container in members(pod)}
                for pod in members(field(document, "entries"))
            },
            {pod.key: _blocks(field(pod, "memoryBlocks", [])) for pod in members(field(document, "podEntries"))},
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


def _policy(document: Value, *known: Choice) -> Choice:
    policy = field(document, "policyName")
    chosen = next((choice for choice in known if choice == policy.value), None)
    if chosen is None:
        policy.fail(f"must be {' or '.join(map(repr, known))}, found {policy.value!r}")
    return chosen


def _bytes(value: Value) -> int:
    return value.number(_MOST_BYTES)


def _numa_node(member: Value) -> int:
    """Return the key of *member*, a number as Go writes it: ``01`` would be a second key for NUMA node 1."""
    if not _NUMA_NODE.fullmatch(member.key) or int(member.key) > MAX_CPU:
        member.fail(f"{member.key!r} is no NUMA node")
    return int(member.key)


def _numa_memory(value: Value) -> NumaMemory:
    return NumaMemory(
        _bytes(field(value, "numberOfAssignments")),
        {table.key: _table(table) for table in members(field(value, "memoryMap"))},
        _numa_nodes(field(value, "cells")),
    )


def _table(value: Value) -> MemoryTable:
    return MemoryTable(
        total=_bytes(field(value, "total")),
        system_reserved=_bytes(field(value, "systemReserved")),
        allocatable=_bytes(field(value, "allocatable")),
        reserved=_bytes(field(value, "reserved")),
        free=_bytes(field(value, "free")),
    )


def _blocks(value: Value) -> tuple[Block, ...]:
    return tuple(
        Block(_numa_nodes(field(each, "numaAffinity")), field(each, "type").text(), _bytes(field(each, "size")))
        for each in value.elements()
    )


def _numa_nodes(value: Value) -> tuple[int, ...]:
    try:
        return tuple(CpuSet(value.numbers()))
    except ValueError as error:
        value.fail(str(error))
