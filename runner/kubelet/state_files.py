"""The kubelet's state files, ``cpu_manager_state`` and ``memory_manager_state``, as the states they hold.

Formats of ``pkg/kubelet/cm/{cpumanager,memorymanager}/state/checkpoint.go`` (version 2 of the former). The checksum is
not looked at: the kubelet replaces the files as a whole, so that a reader never meets half of one.

The kubelet writes the shared pool and the assignments one after the other. A reader may meet the file between the two,
when some CPUs are in neither: :meth:`CpuManager.validate` says so, and the file is to be read again.
"""

from __future__ import annotations

import attrs

from runner.kubelet.cpu_manager import CpuState
from runner.kubelet.memory_manager import Block, MemoryState, MemoryTable, NumaMemory
from runner.spec.value import Value

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
    document = Value.of_json(text, source)
    pods = document.get("podEntries", {}).members()
    if pods:
        pods[0].fail("CPUs are assigned to whole pods (PodLevelResourceManagers), which is not known here")
    assignments = {
        pod.key: {container.key: container.cpu_set() for container in pod.members()}
        for pod in document.get("entries", {}).members()
    }
    return CpuCheckpoint(
        document.get("policyName").text(), CpuState(document.get("defaultCpuSet").cpu_set(), assignments)
    )


def parse_memory_manager_state(text: str, source: str = MEMORY_STATE) -> MemoryCheckpoint:
    """Read the text of ``memory_manager_state``; *source* names it in errors.

    Raises :class:`SpecError`, which names the path into the document, for anything that the kubelet does not write.
    """
    document = Value.of_json(text, source)
    numa_nodes = {
        numa_node.decimal(): NumaMemory(
            numa_node.get("numberOfAssignments").number(),
            {
                table.key: MemoryTable(
                    total=table.get("total").number(),
                    system_reserved=table.get("systemReserved").number(),
                    allocatable=table.get("allocatable").number(),
                    reserved=table.get("reserved").number(),
                    free=table.get("free").number(),
                )
                for table in numa_node.get("memoryMap").members()
            },
            numa_node.get("cells").numbers(),
        )
        for numa_node in document.get("machineState", {}).members()
    }
    assignments = {
        pod.key: {
            container.key: tuple(
                Block(block.get("numaAffinity").numbers(), block.get("type").text(), block.get("size").number())
                for block in container.elements()
            )
            for container in pod.members()
        }
        for pod in document.get("entries", {}).members()
    }
    state = MemoryState(dict(sorted(numa_nodes.items())), assignments)
    return MemoryCheckpoint(document.get("policyName").text(), state)
