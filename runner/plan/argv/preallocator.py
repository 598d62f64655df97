"""The argument list of the program that preallocates the RAM of a guest."""

from __future__ import annotations

from runner.base.cpuset import CpuSet
from runner.placement.backends import Placement
from runner.plan.machine import MachinePlan

MOST_PREALLOCATORS = 16
"""Threads that touch the guest's memory; more of them wait for the same memory channels (``util/oslib-posix.c``)."""

REPORT_INTERVAL = "1"
"""Seconds between two reports of how much memory is preallocated."""


def preallocator_argv(machine: MachinePlan, placement: Placement, ram: tuple[int, ...]) -> list[str]:
    """Return the argv of the program that preallocates the memory of the descriptors *ram*.

    It has one argument for each of them: descriptor, bytes, bytes of a page (0 for ordinary pages), the NUMA nodes to bind it to, the CPUs
    near it, and the number of threads (:mod:`runner.kernel.preallocate`).
    """
    words = (
        ":".join(
            (
                *(str(descriptor), str(each.memory), str(machine.ram.page_size or 0), ",".join(map(str, each.bound))),
                str(CpuSet(placement.pins[vcpu] for vcpu in each.vcpus)),
                str(min(len(each.vcpus), MOST_PREALLOCATORS)),
            )
        )
        for descriptor, each in zip(ram, machine.topology.numa_nodes, strict=True)
    )
    return [*machine.ram.preallocator, REPORT_INTERVAL, *words]
