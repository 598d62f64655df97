"""Requests to a running instance, each with a time limit, in case its PID 1 does not answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

import trio

from runner.cli.unanswered import ANSWERED_WITHIN, unanswered
from runner.instance.control.method_table import METHODS
from runner.kernel.sockets import CONTROL_SOCKET, START_INSTANCE
from runner.protocol.jsonrpc_client import ServerAbsentError, ask

CHANGED_WITHIN = 900.0
"""Seconds for a change, which may wait for the guest; each change has a shorter limit of its own in the instance."""


async def ask_instance(state_directory: PurePosixPath, method: str, params: Mapping[str, object]) -> object:
    """Return the answer of the instance with *state_directory*.

    Raises :exc:`~runner.base.errors.RunnerError` when no instance listens there, it refuses the request, or does not answer.
    """
    changes = method in METHODS and METHODS[method].changes
    within = CHANGED_WITHIN if changes else ANSWERED_WITHIN
    with trio.move_on_after(within):
        try:
            return await ask("the instance", state_directory / CONTROL_SOCKET, method, params)
        except ServerAbsentError as error:
            if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
                error.remedy = START_INSTANCE
            elif isinstance(error.__cause__, ConnectionError):
                error.remedy = "it has just ended, or too many ask it at the same time: ask again"
            raise
    raise unanswered(within, "the change may still be made: see `ctl status`" if changes else "")
