"""The guest's screen by VNC: connections are accepted here and passed to QEMU, which does not listen itself.

The clients that may attach to the console may see the screen.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from runner.base.errors import explain
from runner.base.events import InstanceEvent
from runner.base.rate_limit import LogRateLimit
from runner.instance.parts.console import may_attach
from runner.instance.parts.qemu import Qemu
from runner.instance.supervisor import Supervisor
from runner.kernel.connections import serve_connections
from runner.kernel.sockets import listening
from runner.protocol.qmp import QmpError

log = logging.getLogger(__name__)

SOCKET = "vnc.sock"


@asynccontextmanager
async def display_shown(supervisor: Supervisor, machine: Qemu, directory: int) -> AsyncIterator[None]:
    """Hold the socket in *directory* at which VNC viewers connect."""
    with listening(directory, SOCKET, supervisor.faults.recorded, supervisor.held.socket) as listener:
        pass_on = partial(_pass_on, trio.Lock(), machine, supervisor.log_limit)
        async with supervisor.background_task(partial(serve_connections, listener, pass_on)):
            yield


async def _pass_on(
    turn: trio.Lock, machine: Qemu, log_limit: LogRateLimit, viewer: trio.socket.SocketType, accepted_at: float
) -> None:
    """Pass *viewer* to QEMU in its *turn*, so that QEMU has at most one connection that it has not accepted yet."""
    if not may_attach(viewer, accepted_at):
        log_limit.log(log.warning, InstanceEvent.VNC_VIEWER_NOT_ROOT)
        return
    try:
        async with turn:
            await machine.show(viewer.fileno())
    except QmpError as error:
        log_limit.log(log.warning, InstanceEvent.VNC_VIEWER_REFUSED, explain(error))
