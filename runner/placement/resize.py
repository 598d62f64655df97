"""The CPUs of the vCPUs when their number, or the CPUs of the container, change while the guest runs (pure).

A vCPU keeps its CPU as long as the container has that CPU. vCPU indexes have no gaps: the one with the highest index is plugged last and
unplugged first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import attrs

from runner.base.cpuset import CpuSet
from runner.facts.hardware import Hardware
from runner.placement.backends import AffinityPlacement, ControllerPlacement, DelegatedPlacement, Placement
from runner.placement.pins import place


def more_pins(pins: Sequence[int], available: CpuSet, count: int, hardware: Hardware) -> tuple[int, ...]:
    """Return the CPUs of *count* vCPUs, of which the first have *pins*; the others get unused ones of *available*.

    Raises :class:`~runner.base.errors.RefusedError` if there are too few, or one is not online.
    """
    return (*pins, *place(count - len(pins), available - CpuSet(pins), hardware).pins)


def moved_pins(pins: Sequence[int], available: CpuSet) -> tuple[int, ...]:
    """Return the CPUs of as many vCPUs as have *pins*, now that their container has *available*, which are enough.

    Each keeps its CPU if that is available, and gets an unused one otherwise.
    """
    free = iter(available - CpuSet(pins))
    return tuple(cpu if cpu in available else next(free) for cpu in pins)


def with_pins(placement: Placement, available: CpuSet, pins: tuple[int, ...]) -> Placement:
    """Return *placement* with the CPUs *pins* for the vCPUs, in a container that has *available*."""
    cpus = CpuSet(pins)
    match placement:
        case ControllerPlacement():
            return attrs.evolve(placement, cpus=available, pins=pins)
        case DelegatedPlacement() | AffinityPlacement():
            rest = available - cpus
            return attrs.evolve(placement, cpus=cpus, pins=pins, float_cpus=rest or available, shared=not rest)
        case _ as never:
            assert_never(never)


def unlike(pins: Sequence[int], hardware: Hardware) -> CpuSet:
    """Return the CPUs of *pins* that do not share an L3 cache and a NUMA node with the first one."""
    first = hardware.by_cpu[pins[0]]
    return CpuSet(
        cpu
        for cpu in pins
        if (found := hardware.by_cpu[cpu]).l3 != first.l3
        or found.numa_node != first.numa_node
        or found.socket != first.socket
    )
