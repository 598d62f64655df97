"""The receipt in the state directory: written when every thread is in its place, and anew after each change."""

from __future__ import annotations

import contextlib
import json
import logging

import attrs
import trio

from runner.errors import HostError, PlacementError
from runner.instance.cgroups.active import ActivePlacement
from runner.instance.qemu import Qemu
from runner.instance.supervisor import Supervisor
from runner.instance.thread_placement import MachineThreads, Receipt, checked, read_again
from runner.kernel import files
from runner.plan.instance import InstancePlan

log = logging.getLogger(__name__)

RECEIPT = "receipt.json"
"""In the state directory, while the guest runs."""

LOOKED_AGAIN = (0.1, 0.5, 1.0)
"""Seconds between looks at the threads after a change: the sweep moves what others brought to the vCPUs' CPUs meanwhile."""


async def machine_threads(machine: Qemu, plan: InstancePlan) -> MachineThreads:
    """Ask QEMU which of its threads do what; a machine without iothreads is not asked for them."""
    vcpus = await machine.vcpu_threads()
    some = any(disk.iothread for disk in plan.machine.disks)
    return MachineThreads(machine.process, vcpus, await machine.iothreads() if some else ())


@attrs.define
class Receipts:
    """The receipt of a machine, kept true."""

    supervisor: Supervisor
    plan: InstancePlan
    machine: Qemu
    threads: MachineThreads
    seat: ActivePlacement
    receipt: Receipt

    def read(self) -> Receipt:
        """Return what the kernel says now.

        What a vCPU thread has started since the last time goes back to float first: not everywhere does somebody sweep.
        """
        found = read_again(self.supervisor, self.receipt, self.threads)
        born = [each.thread for each in found.threads if found.is_vcpus_own(each)]
        for thread in born:
            with contextlib.suppress(HostError, PlacementError):  # then it has ended, or is told of as misplaced
                self.seat.give_back(thread.tid)
                self.supervisor.counters.swept += 1
                log.info("moved to float, as a vCPU had started it tid=%d name=%s", thread.tid, thread.name)
        return read_again(self.supervisor, self.receipt, self.threads) if born else found

    def publish(self) -> None:
        """Write the receipt down."""
        who = {"instance": self.plan.name, "pod": self.plan.pod.to_json()}
        content = json.dumps({**self.receipt.to_json(), **who}, indent=1).encode() + b"\n"
        files.publish(self.plan.state_directory / RECEIPT, content)

    async def verify(self) -> None:
        """Read every thread back once more, and write it down.

        Raises :exc:`~runner.errors.PlacementError` when one is not in its place.
        """
        self.threads = attrs.evolve(self.threads, iothreads=await self.machine.iothreads())
        for pause in LOOKED_AGAIN:
            with contextlib.suppress(PlacementError):
                self._write_checked()
                return
            await trio.sleep(pause)
        self._write_checked()

    def _write_checked(self) -> None:
        self.receipt = checked(self.read())
        self.publish()
