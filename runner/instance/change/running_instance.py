"""The handles of a running instance, which its lifecycle, requests of operators and changes take."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from runner.base.values import frozen
from runner.instance.parts.cgroups.active import ActivePlacement
from runner.instance.parts.qemu import QEMU_ANSWERS_WITHIN, Qemu
from runner.instance.supervisor import Supervisor
from runner.instance.watch.receipts import Receipts, placed_threads
from runner.placement.threads import Receipt
from runner.plan.disks import DiskPlan
from runner.plan.instance import InstancePlan

UndoCommand = tuple[str, dict[str, object]]
"""A QMP command, with its arguments, that undoes another one."""


@frozen
class AttachedDisk:
    """A disk that was attached while the guest runs."""

    plan: DiskPlan
    slot: int
    undo: tuple[UndoCommand, ...]
    """Commands that undo each step, in the order of the steps."""


@frozen
class RunningInstance:
    """The handles of an instance whose threads are in their places."""

    supervisor: Supervisor
    plan: InstancePlan
    machine: Qemu
    active: ActivePlacement
    receipts: Receipts
    attached: dict[str, AttachedDisk]
    """The disks that were attached while the guest runs, by name; the one value that changes here."""

    answers_within: float = QEMU_ANSWERS_WITHIN
    """Seconds that QEMU may take to answer."""

    def unfinished(self) -> str:
        """Return the activity that a renewal would interrupt, empty if there is none."""
        return self.machine.unfinished or self.receipts.misplaced()

    async def qemu_answers(self) -> None:
        """Raise :exc:`~runner.protocol.qmp.SilentError` unless QEMU answers, for requests that need it."""
        self.supervisor.guest_state.ask_qemu()
        await self.machine.monitor.within(self.answers_within, self.machine.monitor.answers)


@asynccontextmanager
async def running_instance(
    supervisor: Supervisor,
    plan: InstancePlan,
    active: ActivePlacement,
    machine: Qemu,
    count_from: Callable[[Receipt], None],
) -> AsyncIterator[RunningInstance]:
    """Hold the threads of *machine* in their places, as :func:`placed_threads` does."""
    async with placed_threads(supervisor, plan, active, machine, count_from) as receipts:
        attached = supervisor.held.value(
            "disks",
            dict[str, AttachedDisk],
            lambda found: {each.plan.name: each for each in found},
            lambda disks: tuple(disks.values()),
        )
        for name in attached:
            machine.disk_events.unplugged(name)  # watched from now on; set if it was released already
        yield RunningInstance(supervisor, plan, machine, active, receipts, attached)
