"""Pages for probes and Prometheus, over a minimal HTTP server: ``GET``, one request a connection, everything bounded.

This is no place for a web framework: a program's pages must not cost it a thread, nor anything while nobody asks.
"""

from __future__ import annotations

import contextlib
import http
import ipaddress
import logging
from collections.abc import Callable, Mapping, Sequence

import attrs
import trio

from runner.errors import HostError

log = logging.getLogger(__name__)

_LONGEST_HEAD = 8 * 1024
"""Bytes of a request up to its empty line."""
_PATIENCE = 5.0
"""Seconds a connection may last."""
_CONNECTIONS = 64
"""Connections at a time; the oldest makes room for one more, so that slow ones cannot keep a probe out."""


@attrs.frozen
class Page:
    """One answer."""

    status: http.HTTPStatus
    text: str


def ok(text: str = "ok") -> Page:
    """Return a page that says all is well."""
    return Page(http.HTTPStatus.OK, f"{text}\n")


def unavailable(why: str) -> Page:
    """Return a page that says why not; a probe fails by it."""
    return Page(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{why}\n")


def not_found(known: Sequence[str]) -> Page:
    """Return the page for a path that is none of *known*."""
    return Page(http.HTTPStatus.NOT_FOUND, f"{', '.join(known)}\n")


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
        """Return everything that was added."""
        return "\n".join(self._lines) + "\n"


def _number(value: float) -> str:
    # Not `:g`, which rounds a counter of bytes to six digits.
    return str(int(value)) if value == int(value) else repr(float(value))


def labels(**values: object) -> str:
    """Return a set of labels as it is written, ``{vcpu="0"}``."""
    written = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())
    return f"{{{written}}}" if written else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``ADDRESS:PORT``; without an address it is every one of this machine's (the empty string).

    An address and no name, because asking for a name takes a thread. Raises ``ValueError``.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004  # the highest port
        raise ValueError(f"{text!r} is not ADDRESS:PORT")
    host = host.removeprefix("[").removesuffix("]")
    if host:
        ipaddress.ip_address(host)
    return host, int(port)


async def open_pages(host: str, port: int) -> list[trio.SocketListener]:
    """Listen where :func:`parse_address` says. Raises :class:`HostError`."""
    try:
        return await trio.open_tcp_listeners(port, host=host or None)
    except OSError as error:
        raise HostError(f"cannot listen at {host}:{port}") from error


def requested(head: bytes) -> str | Page:
    """Return the path that the request *head* asks for, or the answer to a request that is not to be had here."""
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):  # noqa: PLR2004  # METHOD TARGET VERSION
        return Page(http.HTTPStatus.BAD_REQUEST, "not HTTP/1\n")
    if words[0] != b"GET":
        return Page(http.HTTPStatus.METHOD_NOT_ALLOWED, "GET only\n")
    return words[1].partition(b"?")[0].decode("ascii", "replace")


def format_response(shown: Page) -> bytes:
    """Return *shown* as a whole HTTP/1.1 response."""
    body = shown.text.encode()
    head = (
        f"HTTP/1.1 {shown.status.value} {shown.status.phrase}\r\n"
        "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


async def serve_pages(listeners: Sequence[trio.SocketListener], show: Callable[[str], Page]) -> None:
    """Answer every request on *listeners* with what *show* makes of its path; for ever, until cancelled.

    A page that cannot be made is an answer 500 and a line in the log: nobody's question ends this program.
    """
    open_since: dict[trio.CancelScope, None] = {}  # in the order of their beginnings

    async def respond(stream: trio.SocketStream) -> None:
        if len(open_since) >= _CONNECTIONS:
            oldest = next(iter(open_since))
            del open_since[oldest]
            oldest.cancel()
        async with stream:
            with trio.move_on_after(_PATIENCE) as scope, contextlib.suppress(trio.BrokenResourceError):
                open_since[scope] = None
                try:
                    await _converse(stream, show)
                finally:
                    open_since.pop(scope, None)

    await trio.serve_listeners(respond, list(listeners))


async def _converse(stream: trio.SocketStream, show: Callable[[str], Page]) -> None:
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _LONGEST_HEAD:
        data = await stream.receive_some(_LONGEST_HEAD - len(head))
        if not data:
            return
        head += data
    found = requested(head) if b"\r\n\r\n" in head else Page(http.HTTPStatus.BAD_REQUEST, "too long\n")
    await stream.send_all(format_response(found if isinstance(found, Page) else _shown(show, found)))


def _shown(show: Callable[[str], Page], target: str) -> Page:
    try:
        return show(target)
    except Exception as error:
        log.exception("this is a bug: the page %r could not be made", target)
        return Page(http.HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}\n")
