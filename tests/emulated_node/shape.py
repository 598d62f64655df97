"""The hardware of the node: its CPUs, their numbers, and its NUMA nodes."""

from __future__ import annotations

from dataclasses import dataclass

from runner.base.cpuset import CpuSet
from tests.emulated_node.cache import EmulatedNodeError

THREADS = 2
"""Threads of a core, as on the hosts of GPU instances."""


@dataclass(frozen=True)
class Shape:
    """A machine of *numa_nodes* sockets with equal shares of *cpus* and *memory_mib*.

    CPUs are numbered as firmware of real multi-socket hosts numbers them, first threads first: of 128 CPUs on two
    NUMA nodes, node 0 has ``0-31,64-95`` and the siblings are ``n`` and ``n + 64``.
    """

    cpus: int = 16
    numa_nodes: int = 2
    memory_mib: int = 4096

    def __post_init__(self) -> None:
        if self.numa_nodes < 1 or self.cpus < 1 or self.cpus % (self.numa_nodes * THREADS):
            raise EmulatedNodeError(
                f"cannot divide {self.cpus} CPUs into {self.numa_nodes} NUMA nodes of cores with {THREADS} threads"
            )
        if max(self.apic_ids) >= 0xFF:  # an 8-bit id, 0xff meaning all
            raise EmulatedNodeError(f"{self.cpus} CPUs need x2APIC ids, which the CPU table here does not write")

    @property
    def cores(self) -> int:
        """Return the number of cores a socket."""
        return self.cpus // self.numa_nodes // THREADS

    @property
    def apic_ids(self) -> list[int]:
        """Return the APIC id of every CPU in QEMU's order: socket, core, thread, each field a power of two wide.

        The first two are QEMU's ``x86_apicid_from_topo_ids`` (``include/hw/i386/topology.h``).
        """
        core_shift = (THREADS - 1).bit_length()
        socket_shift = core_shift + (self.cores - 1).bit_length()
        return [
            socket << socket_shift | core << core_shift | thread
            for socket in range(self.numa_nodes)
            for core in range(self.cores)
            for thread in range(THREADS)
        ]

    def numa_cpus(self, numa_node: int) -> CpuSet:
        """Return the CPUs of a NUMA node, as the node's kernel numbers them."""
        half = self.cpus // THREADS
        first = range(numa_node * self.cores, (numa_node + 1) * self.cores)
        return CpuSet(cpu + thread * half for cpu in first for thread in range(THREADS))
