"""Background tasks of the controller: the failure of one does not end the program, on which all instances of the node depend."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from runner.base.errors import HostError
from runner.base.events import ControllerEvent
from runner.controller.metrics import ControllerCounters

log = logging.getLogger(__name__)

BEGUN_AGAIN = 1.0
"""Seconds until a task that has failed is begun again."""


async def restarted(name: str, task: Callable[[], Awaitable[None]], counters: ControllerCounters) -> None:
    """Run *task* until cancelled: when it fails, log and count that, and begin it again.

    A task that can handle a lack of kernel resources does so itself, and does not fail.
    """
    while True:
        try:
            await task()
        except Exception as error:
            counters.task_failures[name] += 1
            expected = isinstance(error, HostError | OSError)
            log.error(  # noqa: TRY400 - a traceback only of what is a bug
                ControllerEvent.TASK_BEGUN_AGAIN, name, str(error), exc_info=not expected
            )
        await trio.sleep(BEGUN_AGAIN)
