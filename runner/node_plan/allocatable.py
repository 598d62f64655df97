"""The resources that a node has for pods (``status.allocatable``), and amounts of resources for people."""

from __future__ import annotations

from runner.facts.hardware import Hardware, hugepages_resource
from runner.kubelet.pod import CPU, MEMORY, format_bytes
from runner.node_plan.admission import KubeletConfiguration
from runner.node_plan.general_filter import NodeAllocatable


def format_amount(resource: str, amount: int) -> str:
    """Write *amount* of *resource*, thousandths of CPUs or bytes, for people: ``3.98 CPUs``, ``2Gi memory``."""
    if resource == CPU:
        number = f"{amount // 1000}.{amount % 1000:03}".rstrip("0").rstrip(".")
        return f"{number} CPU{'' if number == '1' else 's'}"
    return f"{format_bytes(amount)} {resource}"


def node_allocatable(hardware: Hardware, configuration: KubeletConfiguration) -> NodeAllocatable:
    """Return the node's resources for pods (``status.allocatable``, ``nodestatus.MachineInfo``).

    Huge pages are taken from memory, whether they are used or not. Ephemeral storage is not known.
    """
    cpus = len(hardware.cpus)
    limit = configuration.pods_per_core * cpus
    pods = min(limit, configuration.max_pods) if limit else configuration.max_pods
    resources = {CPU: max(0, 1000 * cpus - configuration.reserved_millicpus)}
    return NodeAllocatable(resources | allocatable_memory(hardware, configuration), pods)


def allocatable_memory(hardware: Hardware, configuration: KubeletConfiguration) -> dict[str, int]:
    """Return the bytes by resource that the node has for pods."""
    hugepages: dict[str, int] = {}
    for node in hardware.numa_nodes:
        for pool in node.hugepages:
            resource = hugepages_resource(pool.size)
            hugepages[resource] = hugepages.get(resource, 0) + pool.size * pool.total
    memory = hardware.total_memory - sum(hugepages.values())
    return {MEMORY: max(0, memory - (configuration.node_allocatable_memory or 0))} | hugepages
