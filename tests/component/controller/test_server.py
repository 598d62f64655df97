"""Hostile, slow and broken clients on the real socket."""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from runner.base.errors import HostError, explain
from runner.controller.serve.socket_file import listening
from runner.controller.serve.timeouts import Timeouts
from runner.kernel.sockets import refuse_fds
from runner.protocol.controller_client import REPORT_SOCKET
from runner.protocol.unix_server import SocketLimits
from tests.support.fake_node import B, Client, Node, connected, controlled
from tests.support.frames import STATUS, frames
from tests.support.soak import SEED, times


def refused() -> bool:
    with socket.socket(socket.AF_UNIX) as any_of_them:
        return refuse_fds(any_of_them)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node.new(tmp_path)


def error_code(line: bytes) -> object:
    response = json.loads(line)
    return response["error"]["code"] if "error" in response else None


async def works(node: Node) -> None:
    """Check that the controller answers another client."""
    async with connected(node.socket) as client:
        assert await client.result("getStatus")


async def ended(client: Client) -> bool:
    """Wait for the end of the connection."""
    await trio.lowlevel.checkpoint()
    data = b"x"
    while data:
        try:
            data = await client.connection.recv(65536)
        except ConnectionResetError:
            data = b""
    return True


async def test_a_silent_client_is_disconnected(node: Node) -> None:
    async with controlled(node, limits=SocketLimits(first_byte=0.1)), connected(node.socket) as client:
        assert await ended(client)
        await works(node)


async def test_a_client_that_sends_byte_by_byte_is_disconnected_and_delays_no_other(
    node: Node, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock  # it is the clock
    limits = SocketLimits(first_byte=3, idle=3, connections=64, connections_per_peer=64)
    async with controlled(node, limits=limits), trio.open_nursery() as nursery:
        left = 0

        async def send_slowly() -> None:
            nonlocal left
            async with connected(node.socket) as client:
                try:
                    for byte in STATUS:
                        await client.send(bytes([byte]))
                        await trio.sleep(0.1)
                except (BrokenPipeError, ConnectionResetError):
                    left += 1

        for _ in range(60):
            nursery.start_soon(send_slowly)
        await trio.sleep(0.1)
        with trio.fail_after(20):
            for _ in range(10):
                await works(node)
        assert left == 0
    assert left == 60


async def test_a_client_that_is_idle_between_messages_is_disconnected(node: Node) -> None:
    async with controlled(node, limits=SocketLimits(idle=0.2)), connected(node.socket) as client:
        await client.send(STATUS)
        assert error_code(await client.line()) is None
        assert await ended(client)


async def test_a_client_that_does_not_read_is_disconnected(node: Node) -> None:
    async with controlled(node, limits=SocketLimits(idle=0.3)), connected(node.socket) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:  # until both directions are full, and then until the controller times out
                await client.send(STATUS * 100)
        await works(node)


async def test_a_client_that_stops_sending_still_gets_its_answer(node: Node) -> None:
    async with controlled(node):
        for request in (STATUS, STATUS.rstrip()):  # the last line end may be missing
            async with connected(node.socket) as client:
                await client.send(request)
                client.connection.shutdown(socket.SHUT_WR)
                assert error_code(await client.line()) is None
                assert await ended(client)
        async with connected(node.socket) as client:
            await client.send(b'{"jsonrpc":')
            client.connection.shutdown(socket.SHUT_WR)
            assert error_code(await client.line()) == -32700


async def test_a_client_that_resets_after_its_request_affects_no_other(node: Node) -> None:
    async with controlled(node):
        for _ in range(50):
            async with connected(node.socket) as client:
                await client.send(STATUS * 3)
                client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await works(node)


async def test_a_client_that_cannot_be_identified_is_refused(node: Node) -> None:
    async with controlled(node):
        (node.proc / str(os.getpid()) / "status").unlink()
        async with connected(node.socket) as client:
            response = json.loads(await client.line())
            assert response["error"]["data"] == {"reason": "identity"}
            assert await ended(client)
    async with controlled(node, trusting=True):
        await works(node)


async def test_a_client_that_disconnects_during_the_wait_registers_nothing(node: Node) -> None:
    node.become(B)
    node.scope(B).write("cpuset.cpus", "2-11")
    async with controlled(node, timeouts=Timeouts(agreement=20)) as controller:
        async with connected(node.socket) as client:
            params = {"uuid": B, "cpuset": "14-17"}
            await client.send(json.dumps({"jsonrpc": "2.0", "method": "registerCgroup", "params": params}).encode())
            client.connection.shutdown(socket.SHUT_WR)
            while not controller.server.in_flight:
                await trio.testing.wait_all_tasks_blocked()
        (node.proc / str(os.getpid()) / "stat").unlink()  # the process has ended
        node.scope(B).write("cpuset.cpus", "14-17")
        await controller.eventually(lambda: controller.loop.counters.refusals["identity"] == 1)
        assert not node.instance(B).exists()


async def test_a_message_beyond_the_limit_ends_the_connection(node: Node) -> None:
    async with controlled(node):
        for flood in (b"x" * 70_000, b'"' + b"x" * 70_000 + b'"\n', b"[" * 100_000, b"{\n" + b" \n" * 40_000):
            async with connected(node.socket) as client:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await client.send(flood)
                    assert error_code(await client.line()) == -32600
                    assert await ended(client)
        async with connected(node.socket) as client:  # 10 MiB without a line end
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(160):
                    await client.send(b"x" * 65536)
                assert await ended(client)
        await works(node)


async def test_the_longest_message_is_read(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client:
        await client.send(STATUS.rstrip().ljust(SocketLimits().message - 1) + b"\n")
        assert error_code(await client.line()) is None


async def test_a_bracket_without_end_is_answered_soon(node: Node) -> None:
    async with controlled(node, limits=SocketLimits(unfinished=0.1)), connected(node.socket) as client:
        await client.send(b"{\n")
        assert error_code(await client.line()) == -32700
        await client.send(b'[\n {"jsonrpc":"2.0","method":"getStatus","id":7}\n ]\n')  # its bracket is indented
        assert json.loads(await client.line())[0]["id"] == 7
        await client.send(STATUS)
        assert error_code(await client.line()) is None


async def test_many_messages_are_answered_in_order(node: Node) -> None:
    async with controlled(node), connected(node.socket) as client, trio.open_nursery() as nursery:
        wire = b"".join(b'{"jsonrpc":"2.0","method":"no","id":%d}\n' % number for number in range(3000))
        nursery.start_soon(client.send, wire)
        assert [json.loads(await client.line())["id"] for _ in range(3000)] == list(range(3000))


async def test_connections_have_a_limit(node: Node) -> None:
    async with controlled(node, limits=SocketLimits(connections=64, connections_per_peer=16)) as controller:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connected(node.socket)) for _ in range(16)]
            for client in clients:
                await client.send(STATUS)
                assert error_code(await client.line()) is None
            one_too_many = await stack.enter_async_context(connected(node.socket))
            assert error_code(await one_too_many.line()) == -32005
            assert await ended(one_too_many)
        await controller.eventually(lambda: controller.server.connections == 0)
        await works(node)
    limits = SocketLimits(connections=3, connections_per_peer=16)
    async with controlled(node, limits=limits), contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            client = await stack.enter_async_context(connected(node.socket))
            await client.send(STATUS)
            await client.line()
        one_too_many = await stack.enter_async_context(connected(node.socket))
        assert error_code(await one_too_many.line()) == -32005


async def test_a_container_gets_no_more_connections_by_namespaces_of_its_own(node: Node) -> None:
    limits = SocketLimits(connections=4, connections_per_peer=2)
    async with controlled(node, limits=limits), contextlib.AsyncExitStack() as stack:
        for number in range(3):
            node.become(B, inner=7)
            node.nest(os.getpid(), f"nested-{number}")
            client = await stack.enter_async_context(connected(node.socket))
            await client.send(STATUS)
            assert error_code(await client.line()) == (None if number < 2 else -32005)
        node.become(B)
        await works(node)


async def test_requests_in_flight_have_a_limit(node: Node) -> None:
    node.become(B)
    node.scope(B).write("cpuset.cpus", "2-11")  # a registration waits for it
    request = {"jsonrpc": "2.0", "method": "registerCgroup", "params": {"uuid": B, "cpuset": "14-17"}, "id": 1}
    async with controlled(node, timeouts=Timeouts(agreement=20)) as controller, contextlib.AsyncExitStack() as stack:
        waiting = [await stack.enter_async_context(connected(node.socket)) for _ in range(5)]
        for client in waiting:
            await client.send(json.dumps(request).encode() + b"\n")
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert controller.server.in_flight == 5
        sixth = await stack.enter_async_context(connected(node.socket))
        assert (await sixth.refusal("getStatus"))["code"] == -32005
        node.scope(B).write("cpuset.cpus", "14-17")
        assert [error_code(await client.line()) for client in waiting] == [None] * 5
        assert await sixth.result("getStatus")


async def test_registrations_that_wait_leave_connections_to_others(node: Node) -> None:
    """Two containers, each with as many requests as it may have, all of which wait for the kubelet."""
    node.scope(B).write("cpuset.cpus", "2-11")
    request = {"jsonrpc": "2.0", "method": "registerCgroup", "params": {"uuid": B, "cpuset": "14-17"}, "id": 1}
    limits, timeouts = SocketLimits(connections=10), Timeouts(agreement=20)
    async with (
        controlled(node, limits=limits, timeouts=timeouts, most_waiting=6) as controller,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = []
        for number in range(limits.connections):
            node.become(B, namespace=f"pid-{number // limits.in_flight}")
            clients.append(await stack.enter_async_context(connected(node.socket)))
            await clients[-1].send(json.dumps(request).encode() + b"\n")
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert error_code(await clients[-1].line()) == -32005
        assert controller.server.in_flight == 6
        node.become(B)
        await works(node)


def rights(*numbers: int) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]


@pytest.mark.parametrize("count", [1, 253])
async def test_a_client_that_sends_descriptors_is_hung_up_on_and_they_are_closed(node: Node, count: int) -> None:
    read_end, write_end = os.pipe()
    async with controlled(node, passes_fds=True), connected(node.socket) as client:
        await client.send(STATUS)
        await client.line()
        await trio.testing.wait_all_tasks_blocked(0.01)  # the controller may have a file open for a moment
        await client.connection.sendmsg([STATUS], rights(*[write_end] * count))
        assert error_code(await client.line()) == -32600
        assert await ended(client)
        os.close(write_end)
        assert os.read(read_end, 1) == b""  # no process holds the other end any more
        os.close(read_end)


async def test_descriptors_are_refused_where_the_kernel_can(node: Node) -> None:
    if not refused():
        pytest.skip("the kernel cannot refuse descriptors")
    async with controlled(node):
        for path in (node.socket, node.socket.with_name(REPORT_SOCKET)):
            async with connected(path) as client:
                with pytest.raises(PermissionError):
                    await client.connection.sendmsg([STATUS], rights(0))
        await works(node)


@contextlib.contextmanager
def lingering() -> Iterator[int]:
    """Hold a socket of which the last close takes a minute, or until the end of the block: its peer does not take what was sent."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as ours,
    ):
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
        yield ours.detach()


@pytest.mark.parametrize("sent", ["with a request", "behind one", "urgently", "in time", "too often"])
async def test_descriptors_that_take_long_to_be_closed_keep_nobody_waiting(node: Node, sent: str) -> None:
    limits = SocketLimits(first_byte=0.1, connections_per_peer=2)
    async with controlled(node, limits=limits, passes_fds=True), contextlib.AsyncExitStack() as held:
        began = trio.current_time()
        for _ in range(8 if sent == "too often" else 1):
            fd = held.enter_context(lingering())
            client = await held.enter_async_context(connected(node.socket))
            if sent == "behind one":
                await client.send(STATUS)
            data, flags = {"urgently": (b"!", socket.MSG_OOB), "in time": (b"{", 0)}.get(sent, (STATUS, 0))
            await client.connection.sendmsg([data], rights(fd), flags)
            os.close(fd)
        node.become(B)
        for _ in range(4):
            await works(node)
            await trio.sleep(0.1)
    assert trio.current_time() - began < 30


@pytest.mark.soak
async def test_broken_messages(node: Node) -> None:
    """Every answer is a well-formed response, no group appears, no internal error, and the controller goes on."""
    seed, wanted = SEED, times(20_000)
    async with controlled(node, limit=math.inf) as controller, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connected(node.socket))
        source = frames(seed)
        before = node.snapshot()
        for _ in range(wanted // 100):
            # A request after each hundred marks the end of their answers; not all of them are answered.
            await client.send(
                b"".join(next(source) for _ in range(100)) + b'{"jsonrpc":"2.0","method":"","id":"end"}\n'
            )
            while True:
                answer = json.loads(await client.line())
                for response in answer if isinstance(answer, list) else [answer]:
                    assert response["jsonrpc"] == "2.0", seed
                    assert ("result" in response) != ("error" in response), seed
                    assert "error" not in response or response["error"]["code"] != -32603, seed
                if not isinstance(answer, list) and answer["id"] == "end":
                    break
        assert node.snapshot() == before
        assert controller.server.in_flight == 0
        await works(node)


# -- the socket's file ------------------------------------------------------------------------------------------------


def test_the_socket_of_a_dead_controller_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening(path) as listener:
        assert listener.getsockname() != ""
        assert path.stat().st_mode & 0o777 == 0o666
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert list(tmp_path.iterdir()) == []


def test_the_socket_of_a_running_controller_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listening(path):
        with pytest.raises(HostError) as refused, listening(path):
            pass
        assert "another controller answers there; end it first" in explain(refused.value)
        assert path.exists()


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "socket"
    path.mkdir() if kind == "directory" else path.write_text("x")
    with pytest.raises(HostError) as refused, listening(path):
        pass
    assert "no socket; remove it" in explain(refused.value)
    assert path.exists()


def test_a_successors_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listening(path):
        path.rename(tmp_path / "old")
        with listening(path) as successor:
            assert successor.fileno() >= 0
            (tmp_path / "old").unlink()
            path.rename(tmp_path / "kept")
        (tmp_path / "kept").rename(path)
        os.link(path, tmp_path / "mine")
        path.unlink()
        path.write_text("another program's")
    assert path.read_text() == "another program's"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(HostError, match=r"cannot listen at .*missing/socket"),
        listening(tmp_path / "missing" / "socket"),
    ):
        pass
