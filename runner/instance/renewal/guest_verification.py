"""The first step of a renewed runner after its takeover: it compares every thread with the receipt, and asks QEMU for the guest's state."""

from __future__ import annotations

import logging

from runner.base.errors import RunnerError, explain
from runner.base.events import InstanceEvent
from runner.base.values import short_text
from runner.instance.parts.qemu import Qemu
from runner.instance.watch.receipts import Receipts
from runner.protocol.qmp import QmpError

log = logging.getLogger(__name__)


async def verify_guest(machine: Qemu, receipts: Receipts) -> None:
    """Publish the receipt, with this program's generation, and log a guest that does not run; this may take any time."""
    try:
        receipts.publish()
    except RunnerError as error:
        log.warning(InstanceEvent.RECEIPT_NOT_RENEWED, explain(error))
    try:
        running, state = await machine.monitor.query(
            "query-status", lambda reply: (reply["running"], short_text(reply["status"]))
        )
    except QmpError:  # the task that waits for the guest's end reports it
        return
    if running is not True:
        log.warning(InstanceEvent.GUEST_NOT_RUNNING, state)
