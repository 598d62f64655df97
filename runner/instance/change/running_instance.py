"""The handles of a running instance, which requests of operators and changes take."""

from __future__ import annotations

from runner.base.values import frozen
from runner.instance.change.disk_hotplug import DiskHotplug
from runner.instance.change.vcpus import Vcpus
from runner.instance.parts.cgroups.active import ActivePlacement
from runner.instance.parts.qemu import QEMU_ANSWERS_WITHIN, Qemu
from runner.instance.supervisor import Supervisor
from runner.instance.watch.receipts import Receipts
from runner.plan.instance import InstancePlan


@frozen
class RunningInstance:
    """The handles of an instance whose guest runs; it has no state of its own."""

    supervisor: Supervisor
    plan: InstancePlan
    machine: Qemu
    active: ActivePlacement
    receipts: Receipts
    disks: DiskHotplug
    vcpus: Vcpus

    answers_within: float = QEMU_ANSWERS_WITHIN
    """Seconds that QEMU may take to answer."""

    async def qemu_answers(self) -> None:
        """Raise :exc:`~runner.protocol.qmp.SilentError` unless QEMU answers, for requests that need it."""
        self.supervisor.guest_state.ask_qemu()
        await self.machine.monitor.within(self.answers_within, self.machine.monitor.answers)
