"""The passes that bring the machine's settings to what the instances need: when one begins, and what it could not do."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping

import attrs
import trio
import trio.to_thread

from runner.base.errors import HostError, explain
from runner.base.events import ControllerEvent
from runner.controller.serve.turns import Turns
from runner.controller.tree.loop import ReconcileLoop
from runner.controller.tune.tuner_messages import Tuned, TunedInstance, Tuning
from runner.controller.tune.tuner_process import TunerProcess
from runner.kernel.cgroup import Cgroup

log = logging.getLogger(__name__)

TUNING = "user.instance-runner.tuning"
"""The attribute of an instance's cgroup that holds what it asked for; it ends with the cgroup."""
LEAST = 1.0
"""Seconds from one pass to the next: each reads some files of every interrupt, and an instance may ask for one at any time."""
RESYNC = 30.0
"""Seconds after which all settings are looked at again, whatever has changed: interrupts come with devices."""


@attrs.define(eq=False)
class TuningPasses:
    """Has *process* keep the machine's settings for the instances of *loop*."""

    loop: ReconcileLoop
    process: TunerProcess
    least: float = LEAST
    _turns: Turns = attrs.field(factory=Turns)
    _begun: int = 0
    """Passes that have begun."""
    _tuned_for: Mapping[str, TunedInstance] = attrs.field(factory=dict)
    """The instances when the last pass began: they may come and go while it waits to begin, and while it writes."""
    _tuned: Tuned = attrs.field(factory=Tuned)
    """What the last pass could not do."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why instances' CPUs are disturbed nevertheless, since the last pass."""
        return self._tuned.reasons

    async def follow(self) -> None:
        """Make a pass after each one of the loop's that has changed what instances need, and each :data:`RESYNC` seconds."""
        while True:
            await self.tune()
            with trio.move_on_after(RESYNC):
                while self.instances() == self._tuned_for:
                    await self.loop.next_pass()

    async def tune_instance(self, pod_uid: str) -> tuple[str, ...]:
        """Bring the settings to what the instances need now; return what of *pod_uid*'s tuning cannot be had, and why."""
        await self.tune()
        return self._tuned.missing.get(pod_uid, ()) if self._tuned.made else self.reasons

    async def tune(self) -> None:
        """Bring the settings to what the instances need now.

        Passes are at least :attr:`least` seconds apart, and all that ask for one before it begins share it.
        """
        before = self._begun
        async with self._turns.of():
            if self._begun != before:
                return
            await self._turns.rested()
            self._begun += 1
            self._turns.rest(self.least)
            try:
                self._tuned_for = instances = self.instances()
                # In a thread, which waits: a machine has thousands of interrupts, a file each.
                tuned = await trio.to_thread.run_sync(self.process.tune, instances)
            except (HostError, RuntimeError) as error:  # RuntimeError: no thread can be started
                tuned = Tuned.not_made(explain(error))
            for reason in tuned.reasons:
                if reason not in self.reasons:
                    log.warning(ControllerEvent.INSTANCE_DISTURBED, reason)
            self._tuned = tuned
            self.loop.counters.disturbances = Counter(tuned.settings)

    def instances(self) -> dict[str, TunedInstance]:
        """Return the instances by pod UID, as the loop has seen them last; one that shares float's CPUs has none."""
        observed = self.loop.observed
        if observed is None:
            return {}
        return {
            pod_uid: TunedInstance(group.cpus, read_tuning(self.loop.tree.domain(pod_uid)))
            for pod_uid, group in observed.instances().items()
            if group.cpus and not observed.shares_float(pod_uid)
        }


def read_tuning(group: Cgroup) -> Tuning:
    """Return what the instance in *group* has asked for: nothing where it has not, or has gone."""
    text = group.attribute(TUNING)
    try:
        return Tuning() if text is None else Tuning.parse(json.loads(text))
    except (ValueError, RecursionError):  # a pod that may make user namespaces can write it
        return Tuning()
