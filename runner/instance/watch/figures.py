"""The figures of an instance, read on request: for its own port, and for its controller."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import trio

from runner.base.errors import HostError
from runner.instance.supervisor import Supervisor
from runner.instance.watch.foreign_time import ForeignTime
from runner.placement.threads import Receipt
from runner.plan.instance import InstancePlan

if TYPE_CHECKING:
    from runner.instance.watch.metrics import NamedSamples

READ_AGAIN = 1.0
"""Seconds for which one reading of all threads answers every request, because it reads three files of each thread."""


@attrs.define
class Figures:
    """The state of an instance in numbers, one object for all who ask."""

    supervisor: Supervisor
    plan: InstancePlan
    foreign: ForeignTime | None = None
    """``None`` until the vCPUs are pinned, and where all threads share their CPUs."""
    _receipt: Receipt | None = None
    _read_at: float = 0.0

    def count_from(self, receipt: Receipt) -> None:
        """Count the time of other tasks on the vCPUs' CPUs from *receipt* on, the first of them while no vCPU runs yet."""
        if not self.plan.placement.shared:
            with suppress(HostError):  # no reason to give up a start
                begun, procfs = self.foreign, self.supervisor.procfs
                self.foreign = (
                    ForeignTime.begin(procfs, receipt) if begun is None else begun.succeeded_by(procfs, receipt)
                )

    def receipt(self) -> Receipt | None:
        """Return the place of every thread, read at most :data:`READ_AGAIN` seconds ago; ``None`` unless the guest runs."""
        read, now = self.supervisor.guest_state.read, trio.current_time()
        if read is None:
            return None
        if self._receipt is None or now - self._read_at > READ_AGAIN:
            self._receipt, self._read_at = read(), now
        return self._receipt

    def state(self) -> list[NamedSamples]:
        """Return the samples that need no reading of threads, disks and networks."""
        from runner.instance.watch.metrics import state_samples  # here: not all is scraped

        return list(state_samples(self.supervisor, self.plan))

    async def samples(self) -> list[NamedSamples]:
        """Return all samples."""
        from runner.instance.watch.metrics import all_samples  # here: not all is scraped

        self.supervisor.guest_state.ask_qemu()  # the answer is for the next scrape: this one must not wait
        return await all_samples(self.supervisor, self.plan, self.receipt(), self.foreign)


def held_figures(supervisor: Supervisor, plan: InstancePlan) -> Figures:
    """Return the figures of an instance, counted from its first receipt on, or continued from the previous program."""
    figures = Figures(supervisor, plan)
    supervisor.held.keep(figures, foreign="foreign time")
    return figures
