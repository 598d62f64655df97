"""The HTTP server over real sockets: slow, greedy and hostile clients, and their effect on others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from runner.errors import HostError
from runner.protocol.http import Exposition, HttpResponse, labels, ok, open_http_listeners, parse_address, serve_http


def show(target: str) -> HttpResponse:
    if target == "/bug":
        raise ZeroDivisionError
    return ok(f"this is {target}")


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            listeners = await open_http_listeners("127.0.0.1", 0)
            nursery.start_soon(serve_http, listeners, show)
            yield listeners[0].socket.getsockname()[1]
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
    assert {"Connection: close", f"Content-Length: {len(body)}"} <= set(head.splitlines())
    assert body == "this is /readyz\n"


async def test_a_connection_that_waits_too_long_is_closed() -> None:
    async with served() as port:
        slow = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(64)]
        for stream in slow:
            await stream.send_all(b"GET /")
        assert (await answer(port, b"GET /a HTTP/1.1\r\n\r\n")).endswith(b"this is /a\n")
        with trio.fail_after(2.5):  # long before its time was over
            assert await slow[0].receive_some() == b"", "the oldest was disconnected"
        await slow[-1].send_all(b"b HTTP/1.1\r\n\r\n")
        assert b"this is /b" in b"".join([data async for data in slow[-1]])
        for stream in slow:
            await stream.aclose()


async def test_a_request_without_end_is_not_read_to_its_end() -> None:
    async with served() as port:
        assert b" 400 " in await answer(port, b"GET /" + b"x" * (8192 - 5))
        assert b" 400 " in await answer(port, b"\x16\x03\x01 TLS\r\n\r\n")
        assert b" 405 " in await answer(port, b"DELETE /a HTTP/1.1\r\n\r\n")


async def test_a_response_that_cannot_be_made_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as port:
        assert b" 500 " in await answer(port, b"GET /bug HTTP/1.1\r\n\r\n")
        assert b" 200 " in await answer(port, b"GET /a HTTP/1.1\r\n\r\n")
    assert "the response to '/bug' could not be made" in caplog.text


async def test_an_address_in_use_is_an_error() -> None:
    async with served() as port:
        with pytest.raises(HostError, match=f"cannot listen at 127.0.0.1:{port}"):
            await open_http_listeners("127.0.0.1", port)


def test_addresses() -> None:
    assert parse_address(":9440") == ("", 9440)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("9440", "localhost:80", "1.2.3.4:x", "1.2.3.4:65536", "1.2.3.4:٣"):
        with pytest.raises(ValueError, match=r"."):
            parse_address(wrong)


def test_numbers_are_exact_and_labels_are_escaped() -> None:
    exposition = Exposition("x")
    exposition.add("bytes_total", "counter", "Bytes.", {labels(name='a"b\\c\n'): 12345678901, "": 0.25})
    assert exposition.text() == (
        '# HELP x_bytes_total Bytes.\n# TYPE x_bytes_total counter\nx_bytes_total{name="a\\"b\\\\c\\n"} 12345678901\nx_bytes_total 0.25\n'
    )
