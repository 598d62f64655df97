"""The instance's reports to its controller, so that the node can show its state in every network mode.

One call of ``reportInstance`` is open for as long as the controller runs. The controller answers when it wants the next report, and this
process sleeps until then. A change is reported through a new connection, which replaces the previous one.

Only the end of a connection shows that the controller is gone, and nothing shows that it is back: the controller, the kubelet and all of a
node's instances share the limit of 128 inotify queues (``fs.inotify.max_user_instances``), so instances use none. An instance without a
connection tries again, after random pauses.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from functools import partial

import attrs
import trio

from runner.base.errors import HostError, explain
from runner.base.events import InstanceEvent
from runner.base.tasks import first_of
from runner.base.values import frozen
from runner.instance.watch.figures import Figures
from runner.placement.backends import ControllerPlacement
from runner.protocol.controller_client import REPORT_SOCKET
from runner.protocol.instance_metrics import reported
from runner.protocol.jsonrpc_client import RpcConnection, ServerAbsentError, connected

log = logging.getLogger(__name__)


@frozen
class Pauses:
    """Pauses in seconds."""

    change: float = 1.0
    """From a change to its report, so that one report can cover several changes."""
    first: float = 1.0
    """Average pause before the first attempt to reconnect; each further pause is twice the one before."""
    longest: float = 30.0
    """Average of the longest pause."""

    def after(self, failures: int) -> float:
        """Return the pause after *failures* failures; random, so that the instances of a node do not reconnect together."""
        pause = min(self.first * 2.0 ** min(failures, 16), self.longest)
        return pause * random.uniform(0.5, 1.5)  # noqa: S311 - no secret


async def report(figures: Figures, placement: ControllerPlacement, pauses: Pauses | None = None) -> None:
    """Report to the controller from the registration on; may be cancelled at any moment."""
    pauses, supervisor, failures = pauses or Pauses(), figures.supervisor, 0
    await supervisor.guest_state.registered.wait()
    while True:
        reporter = _Reporter(figures, placement.pod_uid, pauses.change)
        try:
            async with connected("the controller", placement.socket.with_name(REPORT_SOCKET)) as controller:
                await reporter.until_changed(controller)
        except ServerAbsentError as error:  # or the controller is busy, or too old for reports
            log.debug(InstanceEvent.REPORT_MISSED, explain(error))
        except HostError as error:
            supervisor.log_limit.log(log.warning, InstanceEvent.REPORT_REFUSED, explain(error))
        else:
            failures = 0
            continue
        failures = 0 if reporter.answered else failures + 1
        await trio.sleep(pauses.after(failures))


@attrs.define
class _Reporter:
    """The reports through one connection."""

    figures: Figures
    pod_uid: str
    change: float
    answered: bool = False
    """Whether the controller has asked for another report."""

    async def until_changed(self, controller: RpcConnection) -> None:
        """Report the state, and all figures whenever *controller* asks for them; return when the state has changed."""
        supervisor = self.figures.supervisor
        while True:
            changes = (supervisor.guest_state.changes.next, supervisor.restarted.next)
            document = reported(await self.figures.samples() if self.answered else self.figures.state())
            if not await first_of(partial(self._wanted, controller, document), partial(self._changed, changes)):
                return
            self.answered = True

    async def _wanted(self, controller: RpcConnection, document: Mapping[str, object]) -> bool:
        await controller.call("reportInstance", {"uuid": self.pod_uid, "report": document})
        return True

    async def _changed(self, changes: Sequence[trio.Event]) -> bool:
        await first_of(*(each.wait for each in changes))
        await trio.sleep(self.change)
        return False
