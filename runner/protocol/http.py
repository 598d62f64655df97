"""A minimal HTTP server for probes and metrics: ``GET``, one request a connection, everything bounded.

A web framework would cost threads and memory for a server that a kubelet and a Prometheus ask a few times a minute.
"""

from __future__ import annotations

import contextlib
import http
import ipaddress
import logging
from collections.abc import Callable, Mapping, Sequence

import trio

from runner.errors import HostError
from runner.kernel.lines import LineFramer, OverlongError, receive_line
from runner.values import frozen

log = logging.getLogger(__name__)

_LONGEST_HEAD = 8 * 1024
"""Bytes of a request, its empty line included."""
_END_OF_HEAD = b"\r\n\r\n"
_CONNECTION_WITHIN = 5.0
"""Seconds a connection may last."""
_CONNECTIONS = 64
"""Connections at a time; one more takes the place of the oldest, so that slow ones cannot keep a probe out."""


@frozen
class HttpResponse:
    """The status and the text of one response."""

    status: http.HTTPStatus
    text: str


def ok(text: str = "ok") -> HttpResponse:
    """Return the response of a probe that succeeds."""
    return HttpResponse(http.HTTPStatus.OK, f"{text}\n")


def unavailable(reason: str) -> HttpResponse:
    """Return the response of a probe that fails, with its *reason*."""
    return HttpResponse(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n")


def not_found(known: Sequence[str]) -> HttpResponse:
    """Return the response for a path that is none of *known*."""
    return HttpResponse(http.HTTPStatus.NOT_FOUND, f"{', '.join(known)}\n")


class Exposition:
    """Metrics in Prometheus' text exposition format 0.0.4, each named with *prefix*."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lines: list[str] = []

    def add(self, name: str, kind: str, text: str, values: Mapping[str, float]) -> None:
        """Add a metric: *kind* is ``gauge`` or ``counter``, *values* are by their labels (see :func:`labels`)."""
        full = f"{self._prefix}_{name}"
        self._lines.append(f"# HELP {full} {text}")
        self._lines.append(f"# TYPE {full} {kind}")
        self._lines.extend(f"{full}{labelled} {_number(value)}" for labelled, value in values.items())

    def text(self) -> str:
        """Return all metrics that were added."""
        return "\n".join(self._lines) + "\n"


def _number(value: float) -> str:
    # Not `:g`, which rounds a counter of bytes to six digits.
    return str(int(value)) if value == int(value) else repr(float(value))


def labels(**values: object) -> str:
    """Return a set of labels in the exposition format, ``{vcpu="0"}``."""
    written = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())
    return f"{{{written}}}" if written else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``ADDRESS:PORT``; an empty address means every address of this machine.

    It takes no host name, because resolving one takes a thread. Raises ``ValueError``.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004  # the highest port
        raise ValueError(f"{text!r} is not ADDRESS:PORT")
    host = host.removeprefix("[").removesuffix("]")
    if host:
        ipaddress.ip_address(host)
    return host, int(port)


async def open_http_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listen at *port* of *host*, as :func:`parse_address` returns them. Raises :class:`HostError`."""
    try:
        return await trio.open_tcp_listeners(port, host=host or None)
    except OSError as error:
        raise HostError(f"cannot listen at {host}:{port}") from error


def requested(head: bytes) -> str | HttpResponse:
    """Return the path that the request *head* asks for, or the response to a request that is not served here."""
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):  # noqa: PLR2004  # METHOD TARGET VERSION
        return HttpResponse(http.HTTPStatus.BAD_REQUEST, "not HTTP/1\n")
    if words[0] != b"GET":
        return HttpResponse(http.HTTPStatus.METHOD_NOT_ALLOWED, "GET only\n")
    return words[1].partition(b"?")[0].decode("ascii", "replace")


def format_response(response: HttpResponse) -> bytes:
    """Return *response* encoded as HTTP/1.1."""
    body = response.text.encode()
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


Respond = Callable[[str], HttpResponse]
"""Returns the response for a path."""


async def serve_http(listeners: Sequence[trio.SocketListener], respond: Respond) -> None:
    """Answer every request on *listeners* with the response of *respond*, until cancelled.

    If *respond* fails, the answer is 500 and the log has the traceback: no request ends this program.
    """
    open_since: dict[trio.CancelScope, None] = {}  # the oldest first

    async def serve(stream: trio.SocketStream) -> None:
        if len(open_since) >= _CONNECTIONS:
            oldest = next(iter(open_since))
            del open_since[oldest]
            oldest.cancel()
        async with stream:
            with trio.move_on_after(_CONNECTION_WITHIN) as scope, contextlib.suppress(trio.BrokenResourceError):
                open_since[scope] = None
                try:
                    await _converse(stream, respond)
                finally:
                    open_since.pop(scope, None)

    await trio.serve_listeners(serve, list(listeners))


async def _converse(stream: trio.SocketStream, respond: Respond) -> None:
    try:
        framer = LineFramer(_LONGEST_HEAD - len(_END_OF_HEAD))
        head = await receive_line(stream.receive_some, framer, _END_OF_HEAD)
    except OverlongError:
        response = HttpResponse(http.HTTPStatus.BAD_REQUEST, "too long\n")
    else:
        if head is None:
            return
        found = requested(head)
        response = found if isinstance(found, HttpResponse) else _response(respond, found)
    await stream.send_all(format_response(response))


def _response(respond: Respond, target: str) -> HttpResponse:
    try:
        return respond(target)
    except Exception as error:
        log.exception("this is a bug: the response to %r could not be made", target)
        return HttpResponse(http.HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}\n")
