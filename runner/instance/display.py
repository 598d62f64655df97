"""The guest's screen by VNC: connections are accepted here and handed to QEMU, which listens nowhere."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from runner.errors import explain
from runner.host.qmp import MonitorError
from runner.host.sockets import Socket, listening
from runner.instance.host import Host
from runner.instance.machine import Machine

log = logging.getLogger(__name__)

SOCKET = "vnc.sock"


@asynccontextmanager
async def display_shown(host: Host, machine: Machine, directory: int, *, vnc: bool) -> AsyncIterator[None]:
    """Hold the socket in *directory* by which VNC viewers come, if there is to be one."""
    if not vnc:
        yield
        return
    with listening(directory, SOCKET) as listener:
        async with host.observed(partial(_hand_over, listener, machine)):
            yield


async def _hand_over(listener: Socket, machine: Machine) -> None:
    door = trio.socket.from_stdlib_socket(listener)
    while True:
        try:
            viewer, _ = await door.accept()
        except OSError as error:  # out of descriptors: others of ours need them more
            log.warning("nobody can see the screen: %s", error.strerror)
            await trio.sleep(1)
            continue
        with viewer:
            try:
                await machine.show(viewer.fileno())
            except MonitorError as error:
                log.warning("a VNC viewer was turned away: %s", explain(error))
