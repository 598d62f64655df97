"""Putting QEMU's vCPU threads onto their CPUs, and reading every thread back from the kernel before the guest runs."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence

from runner.cpuset import CpuSet
from runner.errors import PlacementError
from runner.instance.cgroups.active import ActivePlacement
from runner.kernel.processes import Process, Processes
from runner.kernel.procfs import Procfs
from runner.kernel.scheduler import pin
from runner.placement.backends import Placement
from runner.placement.threads import ObservedThread, Receipt, Role, sentences, thread_rules
from runner.protocol.qmp import VcpuThread
from runner.values import frozen


@frozen
class QemuThreads:
    """QEMU, and what it says its threads are."""

    process: Process
    vcpus: Sequence[VcpuThread]
    iothreads: Container[int] = ()
    """Their tids."""

    def observed(self, procfs: Procfs) -> Iterator[ObservedThread]:
        """Yield every thread that QEMU has now, as the kernel shows it."""
        index = {vcpu.tid: vcpu.index for vcpu in self.vcpus}
        for thread in procfs.threads(self.process.pid):
            if thread.tid in index:
                yield ObservedThread(Role.VCPU, index[thread.tid], thread)
            else:
                role = Role.IOTHREAD if thread.tid in self.iothreads else Role.EMULATOR
                yield ObservedThread(role, None, thread)


def place_threads(
    processes: Processes, procfs: Procfs, active: ActivePlacement, placement: Placement, qemu: QemuThreads
) -> Receipt:
    """Give every vCPU thread its CPU, read every thread of the instance back from the kernel, and return what was read.

    Raises :exc:`~runner.errors.PlacementError` when anything is not as *placement* wants it.
    """
    vcpus = qemu.vcpus
    if len(vcpus) != len(placement.pins) or len({vcpu.tid for vcpu in vcpus}) != len(vcpus):
        raise PlacementError(
            f"cannot pin the vCPUs: QEMU has {len(vcpus)} vCPU threads for {len(placement.pins)} CPUs '{placement.cpus}'"
        )
    active.admit(qemu.process.pid)
    # Confine first, pin second: a thread that enters a cgroup without the CPUs of its mask gets all of the cgroup's CPUs.
    for vcpu in vcpus:
        active.confine(vcpu.tid)
    for vcpu, cpu in zip(vcpus, placement.pins, strict=True):
        pin(vcpu.tid, CpuSet([cpu]))
    rules = thread_rules(placement, active.cgroups)
    return verified(Receipt(placement.backend, rules, read_threads(processes, procfs, qemu)))


def verified(receipt: Receipt) -> Receipt:
    """Return *receipt*. Raises :exc:`~runner.errors.PlacementError` when a thread breaks the rules."""
    if violations := receipt.violations():
        raise PlacementError("cannot place the threads: " + "; ".join(sentences(violations)))
    return receipt


def read_threads(processes: Processes, procfs: Procfs, qemu: QemuThreads) -> tuple[ObservedThread, ...]:
    """Return every thread that this process and its children have now, as the kernel shows it."""
    return tuple(_threads(processes, procfs, qemu))


def _threads(processes: Processes, procfs: Procfs, qemu: QemuThreads) -> Iterator[ObservedThread]:
    for thread in procfs.threads(os.getpid()):
        yield ObservedThread(Role.RUNNER, None, thread)
    for process in processes:
        if process is qemu.process:
            yield from qemu.observed(procfs)
        else:
            role = Role.of_child(process.role)
            for thread in procfs.threads(process.pid):
                yield ObservedThread(role, None, thread)
