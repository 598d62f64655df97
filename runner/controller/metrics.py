"""What the controller tells Prometheus and the kubelet's probes, over a minimal HTTP server.

``GET`` of three paths, one request a connection, everything bounded: this is no place for a web framework.

========== ============================================================================
/metrics   text exposition format 0.0.4
/healthz   200 while the controller works; says so if its decisions are frozen
/readyz    503 while its decisions are frozen
========== ============================================================================
"""

from __future__ import annotations

import contextlib
import http
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs
import trio

from runner.controller.reconcile import FLOAT, Observed

_LONGEST_HEAD = 8 * 1024
_PATIENCE = 5.0
_CONNECTIONS = 16


@attrs.define
class Tally:
    """What has happened since the start; counters only ever grow."""

    passes: Counter[str] = attrs.field(factory=Counter)
    """Reconcile passes by outcome: ``clean``, ``changed``, ``faulty``, ``frozen``."""
    pass_seconds: float = 0.0
    repairs: int = 0
    """Cpusets of ours that were found other than this program had left them."""
    removed: int = 0
    """Stale instances removed."""
    requests: Counter[str] = attrs.field(factory=Counter)
    """Requests by method."""
    refusals: Counter[str] = attrs.field(factory=Counter)
    """Refused requests by reason."""


def format_metrics(tally: Tally, observed: Observed | None, frozen: str) -> str:
    """Return everything in the text exposition format; *observed* is the tree after the last pass."""
    instances = observed.instances() if observed else {}
    floating = observed.groups.get(FLOAT) if observed else None
    lines: list[str] = []

    def metric(name: str, kind: str, text: str, values: Mapping[str, float]) -> None:
        full = f"instance_cgroup_controller_{name}"
        lines.append(f"# HELP {full} {text}")
        lines.append(f"# TYPE {full} {kind}")
        lines.extend(f"{full}{labels} {value:g}" for labels, value in sorted(values.items()))

    metric("instances", "gauge", "Instances in the tree.", {"": len(instances)})
    metric("instance_cpus", "gauge", "CPUs that instances hold.", {"": sum(len(g.cpus) for g in instances.values())})
    metric("float_cpus", "gauge", "CPUs that float runs on.", {"": len(floating.effective) if floating else 0})
    metric("frozen", "gauge", "1 while the kubelet's state cannot be used.", {"": bool(frozen)})
    metric("reconcile_passes_total", "counter", "Passes by outcome.", _labelled("outcome", tally.passes))
    metric("reconcile_seconds_total", "counter", "Time spent in passes.", {"": tally.pass_seconds})
    metric("drift_repaired_total", "counter", "Cpusets found changed by others and put right.", {"": tally.repairs})
    metric("stale_removed_total", "counter", "Stale instances removed.", {"": tally.removed})
    metric("requests_total", "counter", "Requests by method.", _labelled("method", tally.requests))
    metric("refusals_total", "counter", "Refused requests by reason.", _labelled("reason", tally.refusals))
    return "\n".join(lines) + "\n"


def _labelled(label: str, counter: Mapping[str, int]) -> dict[str, float]:
    return {f'{{{label}="{value}"}}': count for value, count in counter.items()}


@attrs.frozen
class Page:
    """One answer."""

    status: http.HTTPStatus
    text: str


def page(target: str, tally: Tally, observed: Observed | None, frozen: str) -> Page:
    """Return what *target* shows."""
    if target == "/metrics":
        return Page(http.HTTPStatus.OK, format_metrics(tally, observed, frozen))
    if target == "/healthz":
        return Page(http.HTTPStatus.OK, f"frozen: {frozen}\n" if frozen else "ok\n")
    if target == "/readyz":
        if frozen:
            return Page(http.HTTPStatus.SERVICE_UNAVAILABLE, f"frozen: {frozen}\n")
        return Page(http.HTTPStatus.OK, "ok\n")
    return Page(http.HTTPStatus.NOT_FOUND, "/metrics, /healthz, /readyz\n")


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
    """Answer every request on *listeners* with what *show* makes of its path; for ever.

    Each connection has a few seconds for its one request, and no more than a handful are served at a time.
    """
    limit = trio.CapacityLimiter(_CONNECTIONS)

    async def respond(stream: trio.SocketStream) -> None:
        async with stream, limit:
            with trio.move_on_after(_PATIENCE), contextlib.suppress(trio.BrokenResourceError):
                head = b""
                while b"\r\n\r\n" not in head and len(head) < _LONGEST_HEAD:
                    data = await stream.receive_some(_LONGEST_HEAD - len(head))
                    if not data:
                        return
                    head += data
                found = requested(head) if b"\r\n\r\n" in head else Page(http.HTTPStatus.BAD_REQUEST, "too long\n")
                await stream.send_all(format_response(found if isinstance(found, Page) else show(found)))

    await trio.serve_listeners(respond, list(listeners))
