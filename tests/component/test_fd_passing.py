"""Descriptors over a socket: each has an owner or is closed, in every case of limits, errors and cancellation."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from functools import partial

import pytest
import trio
import trio.testing

from runner.kernel.fd_passing import TooManyFdsError, TruncatedFdsError, receive_with_fds, send_with_fds

Ends = tuple[trio.socket.SocketType, trio.socket.SocketType]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = trio.socket.socketpair()
    with left, right:
        yield left, right


@contextlib.contextmanager
def none_left_open() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - names only


async def test_descriptors_arrive_with_the_first_byte_and_are_closed_on_exec(ends: Ends) -> None:
    left, right = ends
    owned: list[int] = []
    text = b"x" * (1 << 20)
    received = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(send_with_fds, left, text, [0, 1]))
        while len(received) < len(text):
            received += await receive_with_fds(right, 1 << 16, 2 - len(owned), owned.append)
            assert len(owned) == 2
    assert received == text
    assert [os.get_inheritable(fd) for fd in owned] == [False, False]
    for fd in owned:
        os.close(fd)
    left.close()
    assert await receive_with_fds(right, 10, 2, owned.append) == b""


@pytest.mark.parametrize(("most", "count"), [(0, 1), (1, 2), (1, 200), (2, 3), (3, 4), (16, 17), (16, 253)])
async def test_too_many_descriptors_are_closed(ends: Ends, most: int, count: int) -> None:
    left, right = ends
    owned: list[int] = []
    await send_with_fds(left, b"x", [0] * count)
    with none_left_open(), pytest.raises(TooManyFdsError, match=f"more than {most} were sent"):
        await receive_with_fds(right, 10, most, owned.append)
    assert owned == []


async def test_a_process_without_room_closes_what_it_received(ends: Ends) -> None:
    left, right = ends
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    await send_with_fds(left, b"x", [0] * 10)
    with none_left_open():
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 4, limits[1]))
        try:
            with pytest.raises(TruncatedFdsError, match="no room for all of them"):
                await receive_with_fds(right, 10, 16, lambda fd: pytest.fail(f"owned {fd}"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("first", ["arrival", "cancellation"])
async def test_descriptors_that_arrive_with_a_cancellation_are_closed(ends: Ends, first: str) -> None:
    left, right = ends
    owned: list[int] = []
    with none_left_open():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_with_fds, right, 10, 2, owned.append)
            await trio.testing.wait_all_tasks_blocked()
            if first == "cancellation":
                nursery.cancel_scope.cancel()
            socket.send_fds(left._sock, [b"x"], [0])  # type: ignore[attr-defined]
            nursery.cancel_scope.cancel()
        if not owned:  # they are still in the socket
            await receive_with_fds(right, 10, 2, owned.append)
        assert len(owned) == 1
        os.close(owned[0])


async def test_an_owner_that_fails_does_not_lose_the_others(ends: Ends) -> None:
    left, right = ends

    def own(fd: int) -> None:
        os.close(fd)
        raise ZeroDivisionError

    await send_with_fds(left, b"x", [0, 0, 0])
    with none_left_open(), pytest.raises(ZeroDivisionError):
        await receive_with_fds(right, 10, 3, own)
