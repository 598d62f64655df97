"""What the kernel says about every thread of ours: the vCPUs put in their places, everything read back before the guest runs."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence

import attrs

from runner.cpuset import CpuSet
from runner.errors import PlacementError
from runner.instance.cgroups.active import ActivePlacement, CgroupPaths
from runner.instance.supervisor import Supervisor
from runner.kernel.processes import Process
from runner.kernel.procfs import ThreadStatus
from runner.kernel.scheduler import pin
from runner.placement.backends import Placement
from runner.protocol.qmp import VcpuThread
from runner.table import aligned


@attrs.frozen
class PlacedThread:
    """A line of the receipt."""

    role: str
    """``runner``, ``anchor``, ``dnsmasq``, ``virtiofsd``, ``emulator`` (QEMU's own threads), ``iothread`` or ``vcpu``."""
    vcpu: int | None
    """The vCPU's index."""
    thread: ThreadStatus


@attrs.frozen
class Receipt:
    """What the kernel says about every thread of ours, before the guest's first instruction."""

    placement: Placement
    groups: CgroupPaths | None
    """Where the placement has cgroups: what they are called."""
    threads: tuple[PlacedThread, ...]

    def float_cpus(self) -> CpuSet:
        """Return the CPUs this program may use, which is in float with everything else that is no vCPU."""
        return next(each.thread.cpus for each in self.threads if each.role == "runner")

    def to_json(self) -> dict[str, object]:
        """Return it as written to ``receipt.json``: CPU sets in the kernel's list format."""
        return {
            "version": 1,
            "backend": self.placement.backend,
            "instance_cpus": str(self.placement.cpus),
            "float_cpus": str(self.float_cpus()),
            "shared": self.placement.shared,
            "cgroups": None if self.groups is None else attrs.asdict(self.groups),
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
            thread, who = each.thread, f"{each.role} (thread {each.thread.tid}, {each.thread.name!r})"
            if each.vcpu is not None:
                who = f"vCPU {each.vcpu} (thread {thread.tid})"
                wanted = CpuSet([self.placement.pins[each.vcpu]])
                if thread.cpus != wanted:
                    yield f"{who} may run on '{thread.cpus}' instead of '{wanted}'"
            elif self.groups is not None and each.role == "anchor":
                pass  # it stays where the vCPUs' CPUs are the only ones there are, and sleeps for ever
            elif not self.placement.shared and not thread.cpus.isdisjoint(self.placement.cpus):
                yield f"{who} may run on '{thread.cpus & self.placement.cpus}', which belong to vCPUs"
            if self.groups is not None and thread.cgroup != self.groups.of(each.role):
                yield f"{who} is in the cgroup {thread.cgroup!r} instead of {self.groups.of(each.role)!r}"

    def is_vcpus_own(self, each: PlacedThread) -> bool:
        """Tell whether a vCPU thread has started *each*, which is where it was born.

        Since Linux 6.14 the first vCPU that runs starts KVM's ``kvm-nx-lpage-recovery``.
        """
        if each.role != "emulator":
            return False
        if self.groups is not None:
            return each.thread.cgroup == self.groups.instance
        return not self.placement.shared and len(each.thread.cpus) == 1 and each.thread.cpus <= self.placement.cpus

    def table(self) -> Iterator[str]:
        """Return the receipt as lines of a table for people."""
        rows = [("ROLE", "TID", "NAME", "ALLOWED_CPUS", "RUNNING_ON")]
        for each in self.threads:
            role = each.role if each.vcpu is None else f"vcpu {each.vcpu}"
            rows.append(
                (role, str(each.thread.tid), each.thread.name, str(each.thread.cpus), str(each.thread.running_on))
            )
        return aligned(rows)


@attrs.frozen
class MachineThreads:
    """QEMU, and which of its threads do what."""

    process: Process
    vcpus: Sequence[VcpuThread]
    iothreads: Container[int] = ()
    """Their numbers."""


def confined(supervisor: Supervisor, seat: ActivePlacement, placement: Placement, machine: MachineThreads) -> Receipt:
    """Give every vCPU thread its CPU, read every thread of ours back from the kernel, and return what was read.

    Raises :exc:`~runner.errors.PlacementError` when anything is not as the plan wants it.
    """
    vcpus = machine.vcpus
    if len(vcpus) != len(placement.pins) or len({vcpu.tid for vcpu in vcpus}) != len(vcpus):
        raise PlacementError(
            f"cannot pin the vCPUs: QEMU has {len(vcpus)} vCPU threads for {len(placement.pins)} CPUs '{placement.cpus}'"
        )
    seat.admit(machine.process.pid)
    # First into the group, then onto the CPU: entering a group that has not the CPUs of the mask undoes the mask.
    for vcpu in vcpus:
        seat.confine(vcpu.tid)
    for vcpu, cpu in zip(vcpus, placement.pins, strict=True):
        pin(vcpu.tid, CpuSet([cpu]))
    return checked(read_again(supervisor, Receipt(placement, seat.groups, ()), machine))


def checked(receipt: Receipt) -> Receipt:
    """Return *receipt*. Raises :exc:`~runner.errors.PlacementError` when anything is not as the plan wants it."""
    violations = list(receipt.violations())
    if violations:
        raise PlacementError("cannot place the threads: " + "; ".join(violations))
    return receipt


def read_again(supervisor: Supervisor, receipt: Receipt, machine: MachineThreads) -> Receipt:
    """Return what the kernel says now of the instance of *receipt*: all threads it has now."""
    return attrs.evolve(receipt, threads=tuple(_read_back(supervisor, machine)))


def _read_back(supervisor: Supervisor, machine: MachineThreads) -> Iterator[PlacedThread]:
    index = {vcpu.tid: vcpu.index for vcpu in machine.vcpus}
    for thread in supervisor.procfs.threads(os.getpid()):
        yield PlacedThread("runner", None, thread)
    for process in supervisor.processes:
        for thread in supervisor.procfs.threads(process.pid):
            if process is not machine.process:
                yield PlacedThread(process.role, None, thread)
            elif thread.tid in index:
                yield PlacedThread("vcpu", index[thread.tid], thread)
            else:
                yield PlacedThread("iothread" if thread.tid in machine.iothreads else "emulator", None, thread)
