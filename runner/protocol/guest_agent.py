"""QEMU's guest agent (``qemu-ga``), which runs in the guest, over our end of its virtio-serial port.

What comes from there comes from the guest: it may be silence, lies or no end of anything, and costs us a bounded time and
a bounded memory. The protocol is ``qga/qapi-schema.json``.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Mapping
from typing import Any

import trio

from runner.errors import HostError

LONGEST_LINE = 1 << 16
_DELIMITER = b"\xff"
"""No UTF-8 text has this byte: whatever stood before it was for somebody else (``guest-sync-delimited``)."""


class AgentError(HostError):
    """The agent cannot be talked to, or refuses."""


class GuestAgent:
    """The conversation with an agent that may be there; one task at a time has it."""

    def __init__(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        self._received = b""
        self._numbers = itertools.count(1)

    async def ping(self) -> None:
        """Return when the agent has answered to this very call: what was said to an earlier one is skipped."""
        number = next(self._numbers)
        await self._send("guest-sync-delimited", {"id": number}, _DELIMITER)
        while True:
            await self._until(_DELIMITER)
            if (await self._reply()).get("return") == number:
                return

    async def shut_down(self) -> str:
        """Have the agent power the guest off; returns, with the reason, only when it refuses: success has no reply."""
        await self._send("guest-shutdown", {"mode": "powerdown"})
        while True:
            reply = await self._reply()
            if "error" in reply:
                error = reply["error"]
                return str(error.get("desc", "no reason given"))[:200] if isinstance(error, dict) else "no reason given"

    async def _send(self, command: str, arguments: Mapping[str, object], before: bytes = b"") -> None:
        request = {"execute": command, "arguments": arguments}
        try:
            await self._stream.send_all(before + json.dumps(request).encode() + b"\n")
        except trio.BrokenResourceError as error:
            raise AgentError("cannot talk to the guest agent: QEMU hung up") from error

    async def _reply(self) -> dict[str, Any]:
        line = await self._until(b"\n")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        return reply if isinstance(reply, dict) else {}

    async def _until(self, end: bytes) -> bytes:
        """Return what comes before *end*, of which too much is as good as nothing."""
        while end not in self._received:
            if len(self._received) > LONGEST_LINE:
                raise AgentError(f"cannot understand the guest agent: it sent a line of more than {LONGEST_LINE} bytes")
            try:
                data = await self._stream.receive_some(1 << 12)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                raise AgentError("cannot talk to the guest agent: QEMU hung up")
            self._received += data
        found, _, self._received = self._received.partition(end)
        return found
