"""The guest's screen by VNC: connections are accepted here and handed to QEMU, which listens nowhere."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from runner.errors import explain
from runner.instance.qemu import Qemu
from runner.instance.supervisor import Supervisor
from runner.kernel.sockets import Socket, accepted, listening
from runner.protocol.qmp import QmpError

log = logging.getLogger(__name__)

SOCKET = "vnc.sock"


@asynccontextmanager
async def display_shown(supervisor: Supervisor, machine: Qemu, directory: int, *, vnc: bool) -> AsyncIterator[None]:
    """Hold the socket in *directory* by which VNC viewers come, if there is to be one."""
    if not vnc:
        yield
        return
    with listening(directory, SOCKET) as listener:
        async with supervisor.background_task(partial(_hand_over, listener, machine)):
            yield


async def _hand_over(listener: Socket, machine: Qemu) -> None:
    door = trio.socket.from_stdlib_socket(listener)
    while True:
        with await accepted(door) as viewer:
            try:
                await machine.show(viewer.fileno())
            except QmpError as error:
                log.warning("a VNC viewer was turned away: %s", explain(error))
