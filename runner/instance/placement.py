"""Where every thread runs: decided by the plan, done here, read back from the kernel before the guest runs.

One interface, several back ends. ``affinity`` uses CPU masks alone: it needs no rights and no cgroup v2, and it cannot keep
other people's processes off the vCPUs' CPUs. It is the second best way and says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import attrs

from runner.cpuset import CpuSet
from runner.errors import PlacementError
from runner.host.processes import Process
from runner.host.procfs import ThreadStatus
from runner.host.qmp import VcpuThread
from runner.host.scheduler import pin, read_mask
from runner.instance.host import Host
from runner.instance.services import Keeper
from runner.plan.instance import Placement
from runner.table import aligned

log = logging.getLogger(__name__)


@attrs.frozen
class PlacedThread:
    """A line of the receipt."""

    role: str
    """``runner``, ``anchor``, ``dnsmasq``, ``virtiofsd``, ``emulator`` (QEMU's own threads) or ``vcpu``."""
    vcpu: int | None
    """The vCPU's index."""
    thread: ThreadStatus


@attrs.frozen
class Receipt:
    """What the kernel says about every thread of ours, before the guest's first instruction."""

    placement: Placement
    threads: tuple[PlacedThread, ...]

    def to_json(self) -> dict[str, object]:
        """Return it as written to ``receipt.json``: CPU sets in the kernel's list format."""
        return {
            "version": 1,
            "backend": self.placement.backend,
            "instance_cpus": str(self.placement.cpus),
            "float_cpus": str(self.placement.float_cpus),
            "shared": self.placement.shared,
            "threads": [
                {
                    "role": each.role,
                    "vcpu": each.vcpu,
                    "name": each.thread.name,
                    "pid": each.thread.pid,
                    "tid": each.thread.tid,
                    "cgroup": each.thread.cgroup,
                    "allowed_cpus": str(each.thread.cpus),
                    "allowed_mems": str(each.thread.mems),
                    "running_on": each.thread.running_on,
                }
                for each in self.threads
            ],
        }

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each thread that is not where the placement wants it."""
        seen = {each.vcpu for each in self.threads if each.vcpu is not None}
        yield from (f"vCPU {index} has no thread" for index in range(len(self.placement.pins)) if index not in seen)
        for each in self.threads:
            thread = each.thread
            if each.vcpu is not None:
                wanted = CpuSet([self.placement.pins[each.vcpu]])
                if thread.cpus != wanted:
                    yield f"vCPU {each.vcpu} (thread {thread.tid}) may run on '{thread.cpus}' instead of '{wanted}'"
            elif not self.placement.shared and not thread.cpus.isdisjoint(self.placement.cpus):
                taken = thread.cpus & self.placement.cpus
                yield f"{each.role} (thread {thread.tid}, {thread.name!r}) may run on '{taken}', which belong to vCPUs"

    def table(self) -> Iterator[str]:
        """Return the receipt as lines of a table for people."""
        rows = [("ROLE", "TID", "NAME", "ALLOWED_CPUS", "RUNNING_ON")]
        for each in self.threads:
            role = each.role if each.vcpu is None else f"vcpu {each.vcpu}"
            rows.append(
                (role, str(each.thread.tid), each.thread.name, str(each.thread.cpus), str(each.thread.running_on))
            )
        return aligned(rows)


class Seat(Protocol):
    """A placement in force: this process and what it forks are in float."""

    async def confine(self, vcpus: Sequence[VcpuThread]) -> None:
        """Give each vCPU thread its CPU; :exc:`~runner.errors.PlacementError` when one cannot have it."""


@attrs.frozen
class _AffinitySeat:
    placement: Placement

    async def confine(self, vcpus: Sequence[VcpuThread]) -> None:
        for vcpu, cpu in zip(vcpus, self.placement.pins, strict=True):
            pin(vcpu.tid, CpuSet([cpu]))


@asynccontextmanager
async def placed(host: Host, placement: Placement, anchor: Keeper) -> AsyncIterator[Seat]:
    """Hold a placement: inside the block, this process and everything it starts run on float's CPUs.

    Raises :exc:`~runner.errors.PlacementError` when the kernel does not do as it is told.
    """
    before = read_mask()
    try:
        pin(0, placement.float_cpus)
        pin(anchor.process.pid, placement.float_cpus)
        yield _AffinitySeat(placement)
    finally:
        with host.faults.recorded("take back this process's CPU mask"):
            pin(0, before)


async def confined(
    host: Host, seat: Seat, placement: Placement, machine: Process, vcpus: Sequence[VcpuThread]
) -> Receipt:
    """Give every vCPU thread its CPU, read every thread of ours back from the kernel, and return what was read.

    Raises :exc:`~runner.errors.PlacementError` when anything is not as the plan wants it.
    """
    if len(vcpus) != len(placement.pins) or len({vcpu.tid for vcpu in vcpus}) != len(vcpus):
        raise PlacementError(
            f"cannot pin the vCPUs: QEMU has {len(vcpus)} vCPU threads for {len(placement.pins)} CPUs '{placement.cpus}'"
        )
    await seat.confine(vcpus)
    receipt = Receipt(placement, tuple(_read_back(host, machine, vcpus)))
    violations = list(receipt.violations())
    if violations:
        raise PlacementError("cannot place the threads: " + "; ".join(violations))
    return receipt


def _read_back(host: Host, machine: Process, vcpus: Sequence[VcpuThread]) -> Iterator[PlacedThread]:
    index = {vcpu.tid: vcpu.index for vcpu in vcpus}
    for thread in host.procfs.threads(os.getpid()):
        yield PlacedThread("runner", None, thread)
    for process in host.processes:
        for thread in host.procfs.threads(process.pid):
            if process is not machine:
                yield PlacedThread(process.role, None, thread)
            elif thread.tid in index:
                yield PlacedThread("vcpu", index[thread.tid], thread)
            else:
                yield PlacedThread("emulator", None, thread)
