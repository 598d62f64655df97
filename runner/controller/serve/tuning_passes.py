"""The passes that adapt the machine's settings to the instances: their begin, and their failures."""

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
"""The extended attribute of an instance's cgroup that stores its tuning request; it ends with the cgroup."""
LEAST = 1.0
"""Seconds from one pass to the next: each reads some files of every interrupt, and an instance may request one at any time."""
RESYNC = 30.0
"""Seconds after which all settings are read again without any report of a change: new devices bring interrupts."""


@attrs.define(eq=False)
class TuningPasses:
    """Lets *process* keep the machine's settings for the instances of *loop*."""

    loop: ReconcileLoop
    process: TunerProcess
    least: float = LEAST
    _turns: Turns = attrs.field(factory=Turns)
    _begun: int = 0
    """Number of passes begun."""
    _tuned_for: Mapping[str, TunedInstance] = attrs.field(factory=dict)
    """The instances at the begin of the last pass: instances may come and go while a pass waits or writes."""
    _tuned: Tuned = attrs.field(factory=Tuned)
    """The failures of the last pass."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons why instances' CPUs are still disturbed after the last pass."""
        return self._tuned.reasons

    async def follow(self) -> None:
        """Make a pass after each of the loop's passes that changes the instances' needs, and every :data:`RESYNC` seconds."""
        while True:
            await self.tune()
            with trio.move_on_after(RESYNC):
                while self.instances() == self._tuned_for:
                    await self.loop.next_pass()

    async def tune_instance(self, pod_uid: str) -> tuple[str, ...]:
        """Adapt the settings to the instances; return the parts of *pod_uid*'s tuning that are not available, with reasons."""
        await self.tune()
        return self._tuned.missing.get(pod_uid, ()) if self._tuned.made else self.reasons

    async def tune(self) -> None:
        """Adapt the settings to the instances.

        Passes are at least :attr:`least` seconds apart; all requests made before a pass begins share it.
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
                # In a thread, because it blocks: a machine has thousands of interrupts, with a file each.
                tuned = await trio.to_thread.run_sync(self.process.tune, instances)
            except (HostError, RuntimeError) as error:  # RuntimeError: no thread can be started
                tuned = Tuned.not_made(explain(error))
            for reason in tuned.reasons:
                if reason not in self.reasons:
                    log.warning(ControllerEvent.INSTANCE_DISTURBED, reason)
            self._tuned = tuned
            self.loop.counters.disturbances = Counter(tuned.settings)

    def instances(self) -> dict[str, TunedInstance]:
        """Return the instances by pod UID, as last observed by the loop; without those that share float's CPUs."""
        observed = self.loop.observed
        if observed is None:
            return {}
        return {
            pod_uid: TunedInstance(group.cpus, read_tuning(self.loop.tree.domain(pod_uid)))
            for pod_uid, group in observed.instances().items()
            if group.cpus and not observed.shares_float(pod_uid)
        }


def read_tuning(group: Cgroup) -> Tuning:
    """Return the tuning request of the instance in *group*; the default if there is none, or the group is gone."""
    text = group.attribute(TUNING)
    try:
        return Tuning() if text is None else Tuning.parse(json.loads(text))
    except (ValueError, RecursionError):  # a pod that may make user namespaces can write it
        return Tuning()
