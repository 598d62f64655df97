"""One call of gRPC to a server on this machine: one request, one response, on h2 over a Unix socket.

The framing is that of https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md: a message has a byte for its compression, four bytes
for its length, and its content; the status is in the trailers. h2 implements HTTP/2; this module adds the connection, its limits and that
framing. Each connection carries a single call.

Imported only where the caller needs it: it brings h2.
"""

from __future__ import annotations

import struct
import urllib.parse
from collections.abc import Iterable
from functools import partial
from pathlib import PurePath
from typing import NoReturn

import attrs
import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error

from runner.base.errors import HostError, escaped
from runner.kernel.sockets import reachable
from runner.kernel.waiting import persistently

LARGEST_RESPONSE = 4 << 20
"""Bytes of a message: a hundred times the kubelet's answer about 100 pods."""
_CHUNK = 1 << 16
_HEAD = struct.Struct(">?I")
_LONGEST_REASON = 300
"""Characters of the server's own message in an error."""
_STREAM = 1
"""The number of a client's first stream."""
_HTTP_OK, _GRPC_OK = b"200", b"0"


async def call(path: PurePath, method: str, request: bytes) -> bytes:
    """Call *method*, such as ``/v1.PodResourcesLister/List``, of the server at the socket *path*, and return its response.

    Both are encoded messages. The caller bounds the time. Raises :class:`HostError` if no server answers, if it refuses, or if its answer
    is not gRPC or longer than :data:`LARGEST_RESPONSE`.
    """
    exchange = _Exchange(method)
    try:
        with reachable(path) as address, trio.socket.socket(trio.socket.AF_UNIX) as connection:
            await connection.connect(address)
            to_send = exchange.begin(request)
            while True:
                while to_send:
                    to_send = to_send[await persistently(partial(connection.send, to_send)) :]
                if exchange.ended:
                    return exchange.response()
                received = await persistently(partial(connection.recv, _CHUNK))
                if not received:
                    exchange.fail("it hung up before it had answered")
                to_send = exchange.receive(received)
    except OSError as error:
        raise HostError(f"cannot talk to the server at {str(path)!r}") from error


@attrs.define(eq=False)
class _Exchange:
    """A request and its response, without the socket."""

    method: str
    ended: bool = False
    """Whether the server has sent everything."""
    _http: H2Connection = attrs.field(
        factory=lambda: H2Connection(H2Configuration(client_side=True, header_encoding=None))
    )
    _body: bytearray = attrs.field(factory=bytearray)
    _headers: dict[bytes, bytes] = attrs.field(factory=dict)
    """The headers before and after the response; their names do not overlap."""

    def begin(self, request: bytes) -> bytes:
        """Return the bytes to send for *request*."""
        self._http.initiate_connection()
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": self.method,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        self._http.send_headers(_STREAM, list(headers.items()))
        self._http.send_data(_STREAM, _HEAD.pack(False, len(request)) + request, end_stream=True)
        return self._http.data_to_send()

    def receive(self, received: bytes) -> bytes:
        """Process bytes from the server; return the bytes to send next. Raises :class:`HostError`."""
        try:
            for event in self._http.receive_data(received):
                self._take(event)
            return self._http.data_to_send()
        except H2Error as error:
            self.fail(f"it does not speak HTTP/2: {error!r}")

    def _take(self, event: Event) -> None:
        match event:
            case ResponseReceived(headers=headers) | TrailersReceived(headers=headers):
                self._keep(headers or ())
            case DataReceived(data=data, flow_controlled_length=length):
                self._body += data or b""
                if len(self._body) > _HEAD.size + LARGEST_RESPONSE:
                    self.fail(f"its answer is longer than {LARGEST_RESPONSE} bytes")
                self._http.acknowledge_received_data(length or 0, _STREAM)
            case StreamEnded():
                self.ended = True
            case StreamReset(error_code=code) | ConnectionTerminated(error_code=code):
                if not self.ended:
                    self.fail(f"it ended the call with the code {code!r} of HTTP/2")

    def _keep(self, headers: Iterable[tuple[bytes | str, bytes | str]]) -> None:
        for name, value in headers:
            if isinstance(name, bytes) and isinstance(value, bytes):  # as header_encoding asks for
                self._headers[name] = value

    def response(self) -> bytes:
        """Return the response, once the server has :attr:`ended`. Raises :class:`HostError`."""
        if (status := self._headers.get(b":status")) != _HTTP_OK:
            self.fail(f"it answered with the HTTP status {_shown(status or b'')}")
        if (code := self._headers.get(b"grpc-status")) != _GRPC_OK:
            reason = urllib.parse.unquote_to_bytes(self._headers.get(b"grpc-message", b""))
            self.fail(f"it answered with the status {_shown(code or b'none')}: {_shown(reason) or 'without a reason'}")
        if len(self._body) < _HEAD.size:
            self.fail("its answer holds no message")
        compressed, size = _HEAD.unpack_from(self._body)
        message = bytes(self._body[_HEAD.size :])
        if compressed:
            self.fail("its answer is compressed, which was not offered")
        if size != len(message):
            self.fail(f"it announced a message of {size} bytes and sent {len(message)}")
        return message

    def fail(self, reason: str) -> NoReturn:
        """Raise :class:`HostError` with the method and *reason*."""
        raise HostError(f"cannot call {self.method}: {reason}")


def _shown(text: bytes) -> str:
    return escaped(text[:_LONGEST_REASON].decode(errors="replace"))
