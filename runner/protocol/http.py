"""An HTTP server for probes and metrics on h11: ``GET`` and ``HEAD``, one request a connection, everything bounded.

h11 parses requests and writes responses; the connections, their number and their time are bounded here. Imported only where
the command line asks for it.
"""

from __future__ import annotations

import errno
import http
import ipaddress
import logging
import math
import re
import socket
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import attrs
import h11
import trio

from runner.base.errors import HostError
from runner.base.events import SharedEvent
from runner.base.values import frozen
from runner.kernel.connections import serve_connections
from runner.kernel.fd_passing import send_with_fds
from runner.kernel.sockets import Socket
from runner.kernel.waiting import persistently

log = logging.getLogger(__name__)

_LONGEST_HEAD = 8 * 1024
"""Bytes of a request before its body."""
_MOST_LINES = 64
"""Header lines of a request: h11 takes 2 microseconds for each, and there may be thousands."""
_CHUNK = 4 * 1024
_CONNECTION_WITHIN = 5.0
"""Seconds a connection may last."""
_CONNECTIONS = 64
"""Connections at a time; a further one replaces the oldest of the address with the most, so that slow clients cannot keep a probe out."""
_WAITING, _WAITING_OF_EACH = 256, 16
"""The most connections that wait to be served: of all addresses together, and of one address."""
_BACKLOG = 4096
"""Connections in the kernel's queue, ``net.core.somaxconn`` at most."""


@frozen
class HttpResponse:
    """The status and the text of one response."""

    status: http.HTTPStatus
    text: str
    content_type: str = "text/plain; charset=utf-8"


@attrs.define(eq=False)
class LatestResponse:
    """A response that is costly to make, and is made once for all clients that ask within *kept* seconds."""

    make: Callable[[], Awaitable[HttpResponse]]
    kept: float
    _turn: trio.Lock = attrs.field(factory=trio.Lock)
    _made: HttpResponse | None = None
    _made_at: float = -math.inf

    async def get(self) -> HttpResponse:
        """Return the response, at most *kept* seconds old. Raises as *make* does."""
        async with self._turn:
            if self._made is None or trio.current_time() - self._made_at >= self.kept:
                self._made = await self.make()
                self._made_at = trio.current_time()
            return self._made


def ok(text: str = "ok") -> HttpResponse:
    """Return the response of a probe that succeeds."""
    return HttpResponse(http.HTTPStatus.OK, f"{text}\n")


def unavailable(reason: str) -> HttpResponse:
    """Return the response of a probe that fails, with its *reason*."""
    return HttpResponse(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n")


def not_found(known: Sequence[str]) -> HttpResponse:
    """Return the response for a path that is not one of *known*."""
    return HttpResponse(http.HTTPStatus.NOT_FOUND, f"{', '.join(known)}\n")


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``ADDRESS:PORT``; an empty address means every address of this machine.

    Host names are not accepted, because resolving one needs a thread. Raises ``ValueError``.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004  # the highest port
        raise ValueError(f"{text!r} is not ADDRESS:PORT")
    host = host.removeprefix("[").removesuffix("]")
    if host:
        ipaddress.ip_address(host)
    return host, int(port)


def open_http_listeners(host: str, port: int) -> list[Socket]:
    """Listen at *port* of *host*, as :func:`parse_address` returns them. Raises :class:`HostError`."""
    listeners: list[Socket] = []
    with ExitStack() as stack:
        for address in [host] if host else ["0.0.0.0", "::"]:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                listener = stack.enter_context(socket.create_server((address, port), family=family, backlog=_BACKLOG))
            except OSError as error:
                if listeners and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    continue  # a kernel without IPv6
                raise HostError(f"cannot listen at {host}:{port}") from error
            listener.setblocking(False)
            listeners.append(listener)
        stack.pop_all()
    return listeners


def adopted_http_listeners(numbers: Iterable[int]) -> list[Socket]:
    """Listen on the descriptors *numbers*, inherited through exec. Raises ``OSError``."""
    return [socket.socket(fileno=number) for number in numbers]


_ABSOLUTE = re.compile(rb"https?://[^/?]*", re.IGNORECASE)
"""The beginning of a request target in the absolute form, up to its path."""

Respond = Callable[[str], Awaitable[HttpResponse]]
"""Returns the response for a path, within the time limit of a connection."""


async def serve_http(listeners: Sequence[Socket], respond: Respond) -> None:
    """Answer every request on *listeners* with the response of *respond*, until cancelled; they stay open.

    If *respond* fails, the answer is 500 and the traceback is logged: no request ends this program.
    """
    server = _HttpServer(respond)
    async with trio.open_nursery() as nursery:
        for listener in listeners:
            nursery.start_soon(server.accept, listener)


@attrs.define(eq=False)
class _HttpServer:
    respond: Respond
    _open: dict[Hashable, list[trio.CancelScope]] = attrs.field(factory=dict)
    """Open connections by address, the oldest first."""

    async def accept(self, listener: Socket) -> None:
        await serve_connections(listener, self._serve, lambda: _address, waiting=(_WAITING, _WAITING_OF_EACH))

    async def _serve(self, connection: trio.socket.SocketType, _: float) -> None:
        address = _address(connection)
        with trio.move_on_after(_CONNECTION_WITHIN) as scope:
            self._add(address, scope)
            try:
                await _converse(connection, self.respond)
            finally:
                self._remove(address, scope)

    def _add(self, address: Hashable, scope: trio.CancelScope) -> None:
        if sum(map(len, self._open.values())) >= _CONNECTIONS:
            most = max(self._open, key=lambda each: len(self._open[each]))
            oldest = self._open[most][0]
            self._remove(most, oldest)
            oldest.cancel()
        self._open.setdefault(address, []).append(scope)

    def _remove(self, address: Hashable, scope: trio.CancelScope) -> None:
        mine = self._open.get(address, [])
        if scope in mine:
            mine.remove(scope)
        if not mine:
            self._open.pop(address, None)


def _address(connection: trio.socket.SocketType) -> Hashable:
    """Return the address of the client, without its port. Raises ``OSError`` if it has hung up."""
    name: tuple[str, int] | str = connection.getpeername()
    return name[0] if isinstance(name, tuple) else name  # the name of a Unix socket has no port


async def _converse(client: trio.socket.SocketType, respond: Respond) -> None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST_HEAD)
    with_body = True
    try:
        event = await _read_request(client, connection)
    except h11.RemoteProtocolError as error:
        response = HttpResponse(http.HTTPStatus(error.error_status_hint), f"{error}\n")
    else:
        if not isinstance(event, h11.Request):
            return  # the peer hung up
        response = await _response(event, respond)
        with_body = event.method != b"HEAD"
    await send_with_fds(client, _encoded(connection, response, with_body=with_body))


async def _read_request(client: trio.socket.SocketType, connection: h11.Connection) -> object:
    """Return the request, or the event received in its place. Raises :exc:`h11.RemoteProtocolError` for a refused one.

    The rest of a request with too many lines is read without being parsed, because unread data would reset the connection, and the answer
    would be lost.
    """
    received = b""
    while (event := connection.next_event()) is h11.NEED_DATA:
        received += (data := await persistently(partial(client.recv, _CHUNK)))
        if received.count(b"\n") <= _MOST_LINES:
            connection.receive_data(data)
        elif not data or len(received) > _LONGEST_HEAD or b"\r\n\r\n" in received:
            raise h11.RemoteProtocolError(f"more than {_MOST_LINES} lines", error_status_hint=431)
    return event


async def _response(request: h11.Request, respond: Respond) -> HttpResponse:
    if request.method not in {b"GET", b"HEAD"}:
        await trio.lowlevel.checkpoint()
        return HttpResponse(http.HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only\n")
    absolute = _ABSOLUTE.match(request.target)  # RFC 9112, 3.2.2: a server must accept it
    target = request.target if absolute is None else request.target[absolute.end() :] or b"/"
    path = target.partition(b"?")[0].decode("ascii") or "/"
    try:
        return await respond(path)
    except Exception as error:
        log.exception(SharedEvent.HTTP_RESPONSE_BUG, path)
        return HttpResponse(http.HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}\n")


def _encoded(connection: h11.Connection, response: HttpResponse, *, with_body: bool) -> bytes:
    body = response.text.encode()
    headers = [("Content-Type", response.content_type), ("Content-Length", str(len(body))), ("Connection", "close")]
    if response.status is http.HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", "GET, HEAD"))  # RFC 9110, 15.5.6
    head = h11.Response(status_code=response.status, reason=response.status.phrase, headers=headers)
    data = (h11.Data(data=body),) if with_body else ()  # RFC 9110, 9.3.2: a response to HEAD has the headers alone
    return b"".join(connection.send(event) or b"" for event in (head, *data, h11.EndOfMessage()))
