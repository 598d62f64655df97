"""Calls of gRPC over a real Unix socket, to a server on h2 that answers, refuses, and sends garbage."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from runner.base.errors import HostError, explain
from runner.kubelet.pod_resources import GET_ALLOCATABLE, LIST, NO_FIELDS, parse_allocatable_cpus
from runner.protocol import grpc
from tests.support.fake_pod_resources import RATE_LIMIT, FakePodResources, packed, serving
from tests.support.soak import chance, times


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pod-resources/kubelet.sock"


async def refusal(path: Path, api: FakePodResources) -> str:
    """Return why a call fails; there is another one, which does not, if *api* answers as it should."""
    async with serving(path, api):
        with trio.fail_after(60), pytest.raises(HostError) as caught:
            await grpc.call(path, LIST, NO_FIELDS)
    return explain(caught.value)


async def test_a_call_is_answered(path: Path) -> None:
    api = FakePodResources(allocatable=(2, 3, 300))
    async with serving(path, api):
        for _ in range(2):
            assert await grpc.call(path, GET_ALLOCATABLE, NO_FIELDS) == packed(2, [2, 3, 300])
    assert api.calls == [GET_ALLOCATABLE, GET_ALLOCATABLE]


async def test_an_answer_larger_than_the_window_of_http_2_comes_whole(path: Path) -> None:
    """The server may send 64 KiB before the client has said that it took them."""
    message = packed(2, [7] * 500_000)
    async with serving(path, FakePodResources(answer=message)):
        with trio.fail_after(60):
            received = await grpc.call(path, GET_ALLOCATABLE, NO_FIELDS)
    assert received == message
    assert list(parse_allocatable_cpus(received)) == [7]


async def test_an_answer_that_is_too_large_is_refused(path: Path) -> None:
    reason = await refusal(path, FakePodResources(answer=bytes(grpc.LARGEST_RESPONSE + 1)))
    assert reason == f"cannot call {LIST}: its answer is longer than 4194304 bytes"


@pytest.mark.parametrize(
    ("api", "reason"),
    [
        (FakePodResources(status=RATE_LIMIT), "it answered with the status 8: rejected by rate limit"),
        (FakePodResources(status=("2", "pod%20not%0afound")), r"it answered with the status 2: pod not\nfound"),
        (FakePodResources(status=("13", "")), "it answered with the status 13: without a reason"),
        (FakePodResources(http_status="404"), "it answered with the HTTP status 404"),
        (FakePodResources(flag=True), "its answer is compressed, which was not offered"),
        (FakePodResources(raw=b"HTTP/1.1 400 Bad Request\r\n\r\n"), "it hung up before it had answered"),
        (FakePodResources(raw=b"\0\0\0\7\0\0\0\0\0"), "it does not speak HTTP/2: "),
        (FakePodResources(raw=b""), "it hung up before it had answered"),
    ],
    ids=["rate-limit", "escapes", "no-reason", "http-status", "compressed", "http-1", "no-frame", "hung-up"],
)
async def test_a_refusal_has_a_reason(path: Path, api: FakePodResources, reason: str) -> None:
    assert (await refusal(path, api)).startswith(f"cannot call {LIST}: {reason}")


async def test_a_server_that_is_not_there_is_named(path: Path) -> None:
    for exists in (False, True):
        if exists:
            path.parent.mkdir()
        with pytest.raises(HostError, match="cannot talk to the server"):
            await grpc.call(path, LIST, NO_FIELDS)
    async with serving(path, FakePodResources()):
        path.rename(path.with_name("aside"))
        path.touch()
        with pytest.raises(HostError, match="cannot talk to the server"):
            await grpc.call(path, LIST, NO_FIELDS)


async def test_a_silent_server_costs_its_caller_the_callers_time_alone(
    path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with serving(path, FakePodResources(silent=True)):
        with trio.move_on_after(5) as timeout:
            await grpc.call(path, LIST, NO_FIELDS)
    assert timeout.cancelled_caught
    assert autojump_clock.current_time() >= 5


async def test_garbage_is_an_error_and_never_a_fault(path: Path) -> None:
    """The bytes of a good answer with some of them changed, which the server sends whatever it is asked."""
    good = await recorded()
    source, seen = chance(), set()
    for _ in range(times(60)):
        damaged = bytearray(good)
        for _ in range(source.randrange(1, 6)):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        async with serving(path, FakePodResources(raw=bytes(damaged[: source.randrange(len(damaged) + 1)]))):
            try:
                with trio.fail_after(60):
                    await grpc.call(path, LIST, NO_FIELDS)
            except HostError as error:
                seen.add(explain(error))
    assert len(seen) > 3


async def recorded() -> bytes:
    """Return what the server sends for one call."""
    api, sent = FakePodResources(allocatable=tuple(range(64))), bytearray()
    ours, theirs = trio.socket.socketpair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.serve, trio.SocketStream(theirs))
        exchange = grpc._Exchange(GET_ALLOCATABLE)
        to_send = exchange.begin(NO_FIELDS)
        with ours:
            while not exchange.ended:
                await ours.send(to_send)
                data = await ours.recv(65536)
                sent += data
                to_send = exchange.receive(data)
    return bytes(sent)
