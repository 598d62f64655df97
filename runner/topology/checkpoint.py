"""The kubelet's state files, ``cpu_manager_state`` and ``memory_manager_state``, as the states they hold.

Formats of ``pkg/kubelet/cm/{cpumanager,memorymanager}/state/checkpoint.go`` (version 2 of the former). The checksum is
not looked at: the kubelet replaces the files as a whole, so that a reader never meets half of one.

The kubelet writes the shared pool and the assignments one after the other. A reader may meet the file between the two,
when some CPUs are in neither: :meth:`CpuManager.validate` says so, and the file is to be read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import attrs

from runner.cpuset import MAX_CPU, CpuSet
from runner.errors import Problem, SpecError
from runner.topology.cpu_manager import CpuState
from runner.topology.memory_manager import Block, MemoryState, MemoryTable, NumaMemory

CPU_STATE = "cpu_manager_state"
MEMORY_STATE = "memory_manager_state"


@attrs.frozen
class CpuCheckpoint:
    """What ``cpu_manager_state`` holds; with *policy* ``none`` the state is empty."""

    policy: str
    state: CpuState


@attrs.frozen
class MemoryCheckpoint:
    """What ``memory_manager_state`` holds; with *policy* ``None`` the state is empty."""

    policy: str
    state: MemoryState


def parse_cpu_manager_state(text: str, source: str = CPU_STATE) -> CpuCheckpoint:
    """Read the text of ``cpu_manager_state``; *source* names it in errors.

    Raises :class:`SpecError`, which names the path into the document, for anything that the kubelet does not write.
    Assignments to whole pods (gate ``PodLevelResourceManagers``) are among these.
    """
    document = _Value(text, source).mapping()
    pods = document.get("podEntries", {}).items()
    if pods:
        pods[0][0].fail("CPUs are assigned to whole pods (PodLevelResourceManagers), which is not known here")
    assignments = {
        uid.key: {name.key: cpus.cpu_set() for name, cpus in containers.items()}
        for uid, containers in document.get("entries", {}).items()
    }
    return CpuCheckpoint(
        document.get("policyName", None).text(), CpuState(document.get("defaultCpuSet", None).cpu_set(), assignments)
    )


def parse_memory_manager_state(text: str, source: str = MEMORY_STATE) -> MemoryCheckpoint:
    """Read the text of ``memory_manager_state``; *source* names it in errors.

    Raises :class:`SpecError`, which names the path into the document, for anything that the kubelet does not write.
    """
    document = _Value(text, source).mapping()
    numa_nodes = {
        numa_node.decimal(): NumaMemory(
            memory.get("numberOfAssignments", None).number(),
            {
                resource.key: MemoryTable(
                    total=table.get("total", None).number(),
                    system_reserved=table.get("systemReserved", None).number(),
                    allocatable=table.get("allocatable", None).number(),
                    reserved=table.get("reserved", None).number(),
                    free=table.get("free", None).number(),
                )
                for resource, table in memory.get("memoryMap", None).items()
            },
            memory.get("cells", None).numbers(),
        )
        for numa_node, memory in document.get("machineState", {}).items()
    }
    assignments = {
        uid.key: {
            name.key: tuple(
                Block(
                    block.get("numaAffinity", None).numbers(),
                    block.get("type", None).text(),
                    block.get("size", None).number(),
                )
                for block in blocks.elements()
            )
            for name, blocks in containers.items()
        }
        for uid, containers in document.get("entries", {}).items()
    }
    state = MemoryState(dict(sorted(numa_nodes.items())), assignments)
    return MemoryCheckpoint(document.get("policyName", None).text(), state)


@attrs.frozen
class _Value:
    """A JSON value that knows where it is, so that whoever cannot use it can say so."""

    value: Any
    source: str
    path: str = ""
    key: str = ""

    def fail(self, message: str) -> NoReturn:
        raise SpecError(self.source, [Problem(self.path, message)])

    def mapping(self) -> _Value:
        """Take the value for the text of a document, which is an object."""
        try:
            document = attrs.evolve(self, value=json.loads(self.value))
        except ValueError as error:
            self.fail(f"is not JSON: {error}")
        document.items()
        return document

    def get(self, key: str, default: Mapping[str, Any] | None) -> _Value:
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, found {self.value!r}")
        # Go leaves an empty map out, or writes null.
        value = self.value.get(key)
        return _Value(default if value is None else value, self.source, f"{self.path}.{key}".lstrip("."), key)

    def items(self) -> list[tuple[_Value, _Value]]:
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, found {self.value!r}")
        return [(self.get(key, None), self.get(key, None)) for key in self.value]

    def elements(self) -> Iterator[_Value]:
        if not isinstance(self.value, list):
            self.fail(f"must be a list, found {self.value!r}")
        for index, value in enumerate(self.value):
            yield _Value(value, self.source, f"{self.path}[{index}]")

    def number(self) -> int:
        if type(self.value) is not int or self.value < 0:
            self.fail(f"must be a whole number, found {self.value!r}")
        return self.value

    def numbers(self) -> tuple[int, ...]:
        return tuple(element.number() for element in self.elements())

    def decimal(self) -> int:
        """Take the key for a NUMA node."""
        if not self.key.isascii() or not self.key.isdigit() or int(self.key) > MAX_CPU:
            self.fail(f"{self.key!r} is no NUMA node")
        return int(self.key)

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.fail(f"must be a string, found {self.value!r}")
        return self.value

    def cpu_set(self) -> CpuSet:
        try:
            return CpuSet.parse(self.text())
        except ValueError as error:
            self.fail(str(error))
