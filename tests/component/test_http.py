"""The HTTP server over real sockets: slow, greedy and hostile clients, and their effect on others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest
import trio
import trio.testing

from runner.base.errors import HostError
from runner.protocol.exposition import counter, gauge, metrics_response
from runner.protocol.http import HttpResponse, Respond, ok, open_http_listeners, parse_address, serve_http
from tests.support.exposition import families, figures

A = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


async def show(target: str) -> HttpResponse:
    await trio.lowlevel.checkpoint()
    if target == "/bug":
        raise ZeroDivisionError
    return ok(f"this is {target}")


@asynccontextmanager
async def served(respond: Respond = show) -> AsyncIterator[int]:
    with contextlib.ExitStack() as held, trio.fail_after(30):
        [listener] = map(held.enter_context, open_http_listeners("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_http, [listener], respond)
            yield listener.getsockname()[1]
            nursery.cancel_scope.cancel()


async def answer(port: int, request: bytes) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        return b"".join([data async for data in stream])


async def test_a_client_as_the_kubelets_gets_its_response() -> None:
    lines = (
        "GET /readyz?verbose HTTP/1.1",
        "Host: 10.0.0.1:9441",
        "User-Agent: kube-probe/1.36",
        "Accept: */*",
        "",
        "",
    )
    async with served() as port:
        head, _, body = (await answer(port, "\r\n".join(lines).encode())).decode().partition("\r\n\r\n")
    assert head.splitlines()[0] == "HTTP/1.1 200 OK"
    assert set(head.splitlines()[1:]) == {
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
    }
    assert body == "this is /readyz\n"


async def test_a_connection_that_waits_too_long_is_closed(mock_clock: trio.testing.MockClock) -> None:
    """When another one needs its place, and not because its own time is over: none passes here."""
    del mock_clock  # it is the clock
    async with served() as port:
        slow = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(64)]
        for stream in slow:
            await stream.send_all(b"GET /")
        assert (await answer(port, A)).endswith(b"this is /a\n")
        assert await slow[0].receive_some() == b"", "the oldest was disconnected"
        await slow[-1].send_all(b"b HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"this is /b" in b"".join([data async for data in slow[-1]])
        for stream in slow:
            await stream.aclose()


async def test_an_address_that_asks_without_end_delays_no_other() -> None:
    shown: list[str] = []

    async def note(target: str) -> HttpResponse:
        await trio.lowlevel.checkpoint()
        shown.append(target)
        return ok()

    with contextlib.ExitStack() as held, trio.fail_after(30):
        [listener] = map(held.enter_context, open_http_listeners("127.0.0.1", 0))
        address = listener.getsockname()
        greedy = [held.enter_context(socket.create_connection(address)) for _ in range(600)]
        for each in greedy:
            each.sendall(A.replace(b"/a", b"/greedy"))
        other = held.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
        other.sendall(A.replace(b"/a", b"/probe"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_http, [listener], note)
            while "/probe" not in shown:
                await trio.sleep(0.01)
            before = shown.index("/probe")
            await trio.testing.wait_all_tasks_blocked(0.1)
            nursery.cancel_scope.cancel()
        answers = [answer_or_nothing(each) for each in greedy]
    assert before <= 600 // 64 + 1, "one of each address in its turn"
    assert len(shown) < 100, "what is too much of one address is not read"
    assert sum(b" 200 " in each for each in answers) == len(shown) - 1


def answer_or_nothing(connection: socket.socket) -> bytes:
    """Return what there is, of a server that has closed the connection."""
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("target", ["http://node:9441/metrics", "HTTP://[::1]:9441/metrics?x=/y", "/metrics?x"])
async def test_a_target_in_the_absolute_form_names_its_path(target: str) -> None:
    """As a proxy sends it, and as every server must accept it (RFC 9112, 3.2.2)."""
    async with served() as port:
        assert (await answer(port, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).endswith(b"/metrics\n")


async def test_a_response_to_head_has_no_body() -> None:
    async with served() as port:
        got = await answer(port, A)
        assert await answer(port, A.replace(b"GET", b"HEAD")) == got.removesuffix(b"this is /a\n") != got
        assert await answer(port, A) == got


async def test_a_fault_in_one_connection_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def respond(path: str) -> HttpResponse:
        return HttpResponse(HTTPStatus.OK, "no text of UTF-8: \udc80") if path == "/a" else await show(path)

    async with served(respond) as port:
        assert await answer(port, A) == b""
        assert b" 200 " in await answer(port, A.replace(b"/a", b"/b"))
    assert "connection ended by a fault of this program" in caplog.text


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"x" * (8192 - 4), 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 8192, 431),
        (b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 2000, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 63 + b"\r\n", 431),
        (b"\x16\x03\x01 TLS\r\n\r\n", 400),
        (b"GET /a\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nX : y\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /a\x00 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"DELETE /a HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    ],
)
async def test_a_request_that_is_too_long_or_invalid_is_refused(request_bytes: bytes, status: int) -> None:
    async with served() as port:
        response = await answer(port, request_bytes)
        assert response.startswith(b"HTTP/1.1 %d " % status)
        assert (b"\r\nAllow: GET, HEAD\r\n" in response) == (status == 405)
        assert b" 200 " in await answer(port, A)


async def test_a_request_without_end_is_not_read_to_its_end() -> None:
    async with served() as port, await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(b"GET /")
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(bytes(64 << 20))


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /a?b=c HTTP/1.0\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nbody",
        A + A,
    ],
)
async def test_a_connection_is_closed_after_one_response(request_bytes: bytes) -> None:
    """Whatever follows the request, such as its body, is not read."""
    async with served() as port:
        response = await answer(port, request_bytes)
    assert response.count(b"HTTP/1.1 ") == 1
    assert response.endswith(b"\r\n\r\nthis is /a\n")


async def test_a_client_that_hangs_up_early_ends_nothing() -> None:
    async with served() as port:
        for begun in (b"", b"GET /", b"GET /a HTTP/1.1\r\nHost:"):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await stream.send_all(begun)
                await stream.send_eof()
                assert b" 200 " not in b"".join([data async for data in stream])
        assert b" 200 " in await answer(port, A)


async def test_a_response_that_cannot_be_made_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as port:
        assert b" 500 " in await answer(port, b"GET /bug HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await answer(port, A)
    assert "the response to '/bug' could not be made" in caplog.text


async def test_an_address_in_use_is_an_error() -> None:
    async with served() as port:
        with pytest.raises(HostError, match=f"cannot listen at 127.0.0.1:{port}"):
            open_http_listeners("127.0.0.1", port)


def test_addresses() -> None:
    assert parse_address(":9440") == ("", 9440)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("9440", "localhost:80", "1.2.3.4:x", "1.2.3.4:65536", "1.2.3.4:٣"):
        with pytest.raises(ValueError, match=r"."):
            parse_address(wrong)


def test_the_library_reads_what_it_wrote() -> None:
    value = 'a"b\\c\n'
    response = metrics_response(
        [
            counter("x_bytes_total", "Bytes.", [((value, 1), 12345678901)], ("name", "vcpu")),
            gauge("x_seconds", "Seconds.", [((), 0.25)]),
            counter("x_never_total", "Nothing yet.", [], ("name",)),
        ]
    )
    assert response.content_type == "text/plain; version=0.0.4; charset=utf-8"
    read = families(response.text, "x_")
    assert {name: (metric.type, metric.documentation) for name, metric in read.items()} == {
        "bytes": ("counter", "Bytes."),
        "seconds": ("gauge", "Seconds."),
        "never": ("counter", "Nothing yet."),
    }
    [sample] = read["bytes"].samples
    assert (sample.labels, sample.value) == ({"name": value, "vcpu": "1"}, 12345678901)
    assert figures(response.text, "x_")["seconds"] == 0.25
