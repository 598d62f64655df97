"""QEMU's guest agent (``qemu-ga``), which runs in the guest, over our end of its virtio-serial port.

All input comes from the guest, which may be silent, lie or never end a line: it costs a bounded time and a bounded memory. The
protocol is ``qga/qapi-schema.json``.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Mapping
from typing import Any

import trio

from runner.base.errors import HostError
from runner.kernel.fd_passing import send_with_fds
from runner.kernel.line_reader import LineFramer, OverlongError, receive_line
from runner.kernel.waiting import receive

LONGEST_LINE = 1 << 16
_DELIMITER = b"\xff"
"""A byte that no UTF-8 text contains: bytes before it belong to the answer to another client (``guest-sync-delimited``)."""
_NUMBERS = itertools.count(1)
"""A number for each call of this process: answers to an earlier conversation may still be unread."""
_HUNG_UP = "cannot talk to the guest agent: QEMU hung up"


class AgentError(HostError):
    """The agent cannot be reached, or it refuses a command."""


class GuestAgent:
    """The conversation with an agent that may be absent; used by one task at a time."""

    def __init__(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        self._ours = ours
        self._socket = trio.socket.from_stdlib_socket(ours)
        self._lines = LineFramer(LONGEST_LINE)

    async def ping(self) -> None:
        """Return when the agent has answered this very call; answers to earlier calls are skipped.

        Raises :exc:`AgentError`.
        """
        number = next(_NUMBERS)
        await self._send("guest-sync-delimited", {"id": number}, _DELIMITER)
        while True:
            await self._until(_DELIMITER)
            if (await self._reply()).get("return") == number:
                return

    async def shut_down(self) -> str:
        """Ask the agent to power the guest off; return the reason if it refuses. Success has no reply.

        Raises :exc:`AgentError`.
        """
        await self._send("guest-shutdown", {"mode": "powerdown"})
        while True:
            reply = await self._reply()
            if "error" in reply:
                error = reply["error"]
                return str(error.get("desc", "no reason given"))[:200] if isinstance(error, dict) else "no reason given"

    async def _send(self, command: str, arguments: Mapping[str, object], before: bytes = b"") -> None:
        request = {"execute": command, "arguments": arguments}
        try:
            await send_with_fds(self._socket, before + json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise AgentError(_HUNG_UP) from error

    async def _reply(self) -> dict[str, Any]:
        """Return the next message, empty if the next line is not one."""
        line = await self._until(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        return reply if isinstance(reply, dict) else {}

    async def _until(self, end: bytes) -> bytes:
        """Return the bytes before *end*."""
        try:
            line = await receive_line(self._receive, self._lines, end)
        except OverlongError:
            raise AgentError(
                f"cannot understand the guest agent: it sent a line of more than {LONGEST_LINE} bytes"
            ) from None
        except OSError as error:
            raise AgentError(_HUNG_UP) from error
        if line is None:
            raise AgentError(_HUNG_UP)
        return line

    async def _receive(self, size: int) -> bytes:
        return await receive(self._ours, size)
