"""A QMP monitor for operators: any QMP client may use it, within :mod:`runner.instance.control.qmp_rules`.

It is ``qmp.sock`` in the state directory, for root in the instance's own PID namespace only, like ``control.sock``. QEMU itself
has one monitor, which PID 1 holds: a client's command is sent on it after it was checked, and the log names who asked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import attrs
import trio

from runner.base.errors import RefusedError
from runner.base.events import InstanceEvent
from runner.base.values import frozen
from runner.facts.roots import Roots
from runner.instance.control.qmp_rules import refusal
from runner.instance.control.server import allowed_peer
from runner.instance.parts.qemu import QEMU_ANSWERS_WITHIN, Qemu
from runner.kernel.connections import serve_connections
from runner.kernel.peers import Peers
from runner.kernel.sockets import Socket
from runner.protocol.jsonrpc import RpcError
from runner.protocol.qmp_server import QmpSession, turn_away
from runner.protocol.unix_server import Identify

log = logging.getLogger(__name__)

MOST_CLIENTS = 4
"""Sessions at once: each is a person or a script."""


async def serve(machine: Qemu, listener: Socket) -> None:
    """Serve the clients that connect to *listener* with the monitor of *machine*, until cancelled."""
    await serve_connections(listener, OperatorMonitor(machine, Peers(Roots().proc)).serve)


@frozen
class OperatorMonitor:
    """Serves QMP clients with the monitor of *machine*, which changes when an update replaces QEMU."""

    machine: Qemu
    peers: Peers
    _places: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(MOST_CLIENTS))

    async def serve(self, connection: trio.socket.SocketType, accepted_at: float) -> None:
        """Serve the client if it is allowed and there is a place for it. Raises ``OSError`` when the connection fails."""
        identify = partial(self.peers.identify, connection, accepted_at)
        try:
            allowed_peer(self.peers, identify)
            self._places.acquire_on_behalf_of_nowait(connection)
        except RpcError as error:
            await turn_away(connection, str(error))
            return
        except trio.WouldBlock:
            await turn_away(connection, f"cannot take more: {MOST_CLIENTS} clients are connected; wait for one to go")
            return
        try:
            await self._session(connection, identify).serve()
        finally:
            self._places.release_on_behalf_of(connection)

    def _session(self, connection: trio.socket.SocketType, identify: Identify) -> QmpSession:
        monitor = self.machine.monitor
        greeting = monitor.greeting["QMP"]
        version = greeting["version"] if isinstance(greeting, dict) else {}
        return QmpSession(connection, version, partial(self._execute, identify), monitor.observed_by)

    async def _execute(
        self, identify: Identify, command: str, arguments: Mapping[str, object] | None, wanted: trio.CancelScope
    ) -> object:
        """Execute *command* for the client, if that is allowed. Raises :exc:`~runner.base.errors.RunnerError`."""
        try:
            peer = allowed_peer(self.peers, identify)  # each time: it may have ended and passed its connection on
        except RpcError as error:
            raise RefusedError(error.message, remedy=error.remedy) from error
        reason = refusal(command)
        if reason is not None:
            log.warning(InstanceEvent.QMP_REFUSED, command, peer.pid, peer.user_id)
            raise RefusedError(f"cannot execute {command!r} here: {reason}")
        log.info(InstanceEvent.QMP_EXECUTED, command, peer.pid, peer.user_id)
        monitor = self.machine.monitor
        await monitor.within(QEMU_ANSWERS_WITHIN, monitor.answers)
        execute = partial(monitor.execute, command, arguments, wanted=wanted)
        result = await monitor.within(QEMU_ANSWERS_WITHIN, execute)
        if command == "query-commands" and isinstance(result, list):
            return [each for each in result if isinstance(each, dict) and refusal(str(each.get("name"))) is None]
        return result
