"""A kubelet's PodResources API: HTTP/2 by h2 on a real Unix socket, and an encoder of protobuf's wire format."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import attrs
import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived, StreamEnded
from h2.exceptions import H2Error

from runner.kernel.sockets import reachable
from runner.kubelet.pod_resources import GET_ALLOCATABLE, LIST

OK, RATE_LIMIT = ("0", ""), ("8", "rejected by rate limit")
"""``grpc-status`` and ``grpc-message``; the latter is what the kubelet's rate limiter says."""


def varint(value: int) -> bytes:
    """Encode a number from 0."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def field(number: int, value: int | str | bytes) -> bytes:
    """Encode one field."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def packed(number: int, values: Iterable[int]) -> bytes:
    """Encode a repeated number as the kubelet does: in one field, or in none."""
    data = b"".join(map(varint, values))
    return field(number, data) if data else b""


@attrs.frozen
class FakeContainer:
    """A container as the API tells of it."""

    pod: str
    """``namespace/name``."""
    name: str
    cpus: tuple[int, ...] = ()
    cdi_devices: tuple[str, ...] = ()

    def encoded(self) -> bytes:
        """Return its ``PodResources``."""
        namespace, _, name = self.pod.partition("/")
        claims = b"".join(
            field(
                5,
                field(2, "claim")
                + field(3, namespace)
                + field(4, field(1, field(1, device)) + field(2, "dra.cpu") + field(3, "node") + field(4, "cpudev")),
            )
            for device in self.cdi_devices
        )
        container = field(1, self.name) + field(2, field(1, "nvidia.com/gpu")) + packed(3, self.cpus) + claims
        return field(1, name) + field(2, namespace) + field(3, container)


@attrs.define(eq=False)
class FakePodResources:
    """What the fake kubelet answers, which a test may change at any time."""

    containers: list[FakeContainer] = attrs.field(factory=list)
    allocatable: tuple[int, ...] = ()
    status: tuple[str, str] = OK
    http_status: str = "200"
    flag: bool = False
    """That the message is compressed, which it never is."""
    answer: bytes | None = None
    """The message of every answer, instead of what the fields above make."""
    raw: bytes | None = None
    """The bytes that are sent instead of HTTP/2; the connection is closed after them."""
    silent: bool = False
    """Whether requests are taken and never answered."""
    calls: list[str] = attrs.field(factory=list)
    """The methods that were called."""

    def message(self, method: str) -> bytes:
        """Return the response of *method*."""
        if self.answer is not None:
            return self.answer
        if method == LIST:
            return b"".join(field(1, each.encoded()) for each in self.containers)
        assert method == GET_ALLOCATABLE
        return packed(2, self.allocatable)

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer the one request that comes on *stream*."""
        http = H2Connection(H2Configuration(client_side=False))
        http.initiate_connection()
        async with stream:
            if self.raw is not None:
                await stream.send_all(self.raw)
                await stream.send_eof()
                async for _ in stream:  # until the client has left: else it would learn of a reset alone
                    pass
                return
            await stream.send_all(http.data_to_send())
            async for data in stream:
                for event in http.receive_data(data):
                    if isinstance(event, RequestReceived):
                        self.calls.append(dict(event.headers or ())[b":path"].decode())
                    if isinstance(event, StreamEnded) and not self.silent:
                        await self._respond(http, stream)
                await stream.send_all(http.data_to_send())

    async def _respond(self, http: H2Connection, stream: trio.SocketStream) -> None:
        message = self.message(self.calls[-1])
        body = struct.pack(">?I", self.flag, len(message)) + message
        http.send_headers(1, [(":status", self.http_status), ("content-type", "application/grpc")])
        while body:
            if not (room := min(http.local_flow_control_window(1), http.max_outbound_frame_size, len(body))):
                await stream.send_all(http.data_to_send())
                http.receive_data(await stream.receive_some())
                continue
            http.send_data(1, body[:room])
            body = body[room:]
        code, reason = self.status
        http.send_headers(1, [("grpc-status", code), ("grpc-message", reason)], end_stream=True)


@asynccontextmanager
async def serving(path: Path, api: FakePodResources) -> AsyncIterator[None]:
    """Serve *api* at the socket *path*, whose directory is made."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, H2Error):  # the client has left
            await api.serve(stream)

    with trio.socket.socket(trio.socket.AF_UNIX) as listener:
        with reachable(path) as address:
            await listener.bind(address)
        listener.listen()
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, serve, [trio.SocketListener(listener)])
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()
                path.unlink()
