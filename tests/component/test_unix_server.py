"""The server's limits and their division among peers: the connections it closes when no place is left."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from runner.controller.serve.methods import reported_end
from runner.controller.serve.socket_file import listening
from runner.controller.tree.held_files import SentFiles
from runner.kernel.cgroup import Cgroup
from runner.kernel.connections import WaitingConnections, accepted
from runner.kernel.peers import Peers
from runner.kernel.waiting import shortages
from runner.protocol.jsonrpc import RpcError, RpcResult
from runner.protocol.unix_server import Identify, SocketLimits, UnixServer
from tests.support.fake_node import Client, connected

BUSY = -32005


@attrs.define
class Service:
    """A service with the peer key that the test sets: ``wait`` waits for its event, ``fail`` has a bug, others answer at once."""

    peers: Peers = attrs.field(factory=lambda: Peers(Path("/proc")))
    key: int = 1
    finished: trio.Event = attrs.field(factory=trio.Event)
    calls: int = 0

    def admit(self, identify: Identify) -> int:
        assert identify().pid == os.getpid()
        return self.key

    def busy(self, reason: str) -> RpcError:
        return RpcError(BUSY, reason)

    async def call(self, identify: Identify, method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
        del identify, params
        self.calls += 1
        if method == "wait":
            await self.finished.wait()
        if method.startswith("fail"):
            raise ZeroDivisionError(method)
        return RpcResult(method)


@asynccontextmanager
async def served(
    path: Path, limits: SocketLimits, service: Service | None = None
) -> AsyncIterator[tuple[Service, UnixServer]]:
    service = service or Service()
    server = UnixServer(service, limits)
    with trio.fail_after(30), listening(path) as listener:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.accept, listener)
            yield service, server
            nursery.cancel_scope.cancel()


class GrantingService(Service):
    """A service whose answers carry descriptors of two files."""

    async def call(self, identify: Identify, method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
        result = await super().call(identify, method, params)
        files = [(Cgroup(Path("/dev")), "null"), (Cgroup(Path("/dev")), method)]
        return RpcResult(result.value, partial(SentFiles().open, files))


async def answered_without_rights(path: Path) -> None:
    """Print the answers of a :class:`GrantingService` while too many descriptors are in flight, and then."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    left, right = socket.socketpair()
    socket.send_fds(left, [b"x"], [0] * 65)
    async with served(path, SocketLimits(), GrantingService()), connected(path) as client:
        print((await ask(client)).decode())
        right.recv(1)
        left.close()
        right.close()
        print((await ask(client)).decode(), flush=True)


async def ask(client: Client, method: str = "zero") -> bytes:
    await client.send(b'{"jsonrpc":"2.0","method":"%s","id":"mine"}\n' % method.encode())
    return await client.line()


def test_an_answer_whose_descriptors_the_kernel_does_not_send_is_an_error(tmp_path: Path) -> None:
    """The process has no CAP_SYS_RESOURCE, and root's processes have more in flight than it may have open."""
    code = (
        "import sys, trio, logging, pathlib; logging.basicConfig(level=logging.WARNING)\n"
        "from tests.component.test_unix_server import answered_without_rights\n"
        "trio.run(answered_without_rights, pathlib.Path(sys.argv[1]))"
    )
    argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code, str(tmp_path / "socket")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["id"], first["error"]["code"], first["error"]["data"]) == ("mine", -32000, {"reason": "host"})
    assert "cannot send descriptors: processes of this user have sent too many" in first["error"]["message"]
    assert "CAP_SYS_RESOURCE" in first["error"]["message"]
    assert "WARNING:runner.protocol.unix_server:request done, but its descriptors could not be sent" in done.stderr
    assert (second["id"], second["result"]) == ("mine", "zero"), "the connection goes on"


async def test_an_answer_whose_control_files_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with served(path, SocketLimits(), GrantingService()), connected(path) as client:
        answer = json.loads(await ask(client, "nothing"))
        assert (answer["id"], answer["error"]["data"]) == ("mine", {"reason": "host"})
        assert "cannot open /dev/nothing" in answer["error"]["message"]
        assert json.loads(await ask(client))["result"] == "zero"


class WaitingService(Service):
    """A service that refuses with a descriptor of the events of a cgroup, at whose change the client is to ask again."""

    async def call(self, identify: Identify, method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
        await super().call(identify, method, params)
        raise RpcError(-32004, "wait", {"reason": "conflict"}, partial(reported_end, Cgroup(Path(method))))


@pytest.mark.parametrize("left", [1, 2])  # for the connection; and for a look at its process, which takes two
async def test_a_client_that_cannot_be_looked_at_for_want_of_descriptors_is_told_busy(
    tmp_path: Path, left: int
) -> None:
    path = tmp_path / "socket"
    async with served(path, SocketLimits()):
        client = trio.socket.socket(socket.AF_UNIX)
        with client, ExitStack() as held:
            _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
            held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))  # noqa: PTH208
            taken = list(_all_descriptors())
            held.callback(lambda: deque(map(os.close, taken), maxlen=0))
            for _ in range(left):
                os.close(taken.pop())
            await client.connect(str(path))
            answer = json.loads(await client.recv(1 << 12))
        assert answer["error"] == {"code": BUSY, "message": "Too many open files, which others have"}
        async with connected(path) as another:
            assert json.loads(await ask(another))["result"] == "zero"


def _all_descriptors() -> Iterator[int]:
    with suppress(OSError):
        while True:
            yield os.dup(0)


async def test_who_is_to_wait_for_a_group_that_has_gone_is_to_ask_again(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    (tmp_path / "cgroup.events").touch()
    async with served(path, SocketLimits(), WaitingService()), connected(path) as client:
        assert json.loads(await ask(client, str(tmp_path)))["error"]["data"] == {"reason": "conflict"}
        answer = json.loads(await ask(client, str(tmp_path / "gone")))
        assert (answer["id"], answer["error"]["code"], answer["error"]["data"]) == (
            "mine",
            BUSY,
            {"reason": "busy", "remedy": "ask again"},
        )
        assert answer["error"]["message"].endswith("; ask again")


async def refused(client: Client) -> bool:
    """Return whether the client gets the error that the server is busy; ``False`` if it is served."""
    await client.send(b'{"jsonrpc":"2.0","method":"x","id":1}\n')
    line = await client.line()
    return "error" in json.loads(line) and json.loads(line)["error"]["code"] == BUSY


async def disconnected(client: Client) -> bool:
    """Return whether the server has disconnected the client, when it has done all that it has to do."""
    await trio.testing.wait_all_tasks_blocked()
    readable, _, _ = select.select([client.connection], [], [], 0)
    return bool(readable) and await client.line() == b""


async def test_a_new_peer_replaces_the_oldest_idle_connection_of_the_peer_with_most(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with (
        served(path, SocketLimits(connections=4, connections_per_peer=4)) as (service, server),
        connected(path) as busy,
        connected(path) as oldest,
        connected(path) as third,
        connected(path) as last,
    ):
        await busy.send(b'{"jsonrpc":"2.0","method":"wait","id":1}\n')
        await trio.testing.wait_all_tasks_blocked()
        assert (server.connections, server.in_flight) == (4, 1)
        service.key = 2
        async with connected(path) as newcomer:
            assert not await refused(newcomer)
            assert [await disconnected(each) for each in (busy, oldest, third, last)] == [False, True, False, False]
            assert server.connections == 4
            async with connected(path) as second, connected(path) as one_too_many:
                assert not await refused(second)
                assert await refused(one_too_many), "both peers have two"
            assert [await disconnected(each) for each in (busy, third, last)] == [False, True, False]
        service.finished.set()
        assert json.loads(await busy.line())["result"] == "wait"


async def test_a_bug_is_an_internal_error_and_reported_once_to_each_peer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "socket"
    async with served(path, SocketLimits()) as (service, _):
        for service.key in (1, 2):
            async with connected(path) as client:
                for number in range(100):
                    request = {"jsonrpc": "2.0", "method": f"fail {number}", "id": number}
                    await client.send(json.dumps(request).encode() + b"\n")
                    assert json.loads(await client.line())["error"]["code"] == -32603
    failed = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.args[1] for record in failed if isinstance(record.args, tuple)] == ["fail 0"] * 2
    assert all(record.exc_info for record in failed)
    rest = [record.getMessage() for record in caplog.records if record.name == "runner.base.rate_limit"]
    assert rest == [f"left out of this log kind=method_bug peer={key} count=99" for key in (1, 2)]


async def test_a_peer_replaces_no_connection_of_a_peer_with_as_few(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with served(path, SocketLimits(connections=2, connections_per_peer=4)) as (service, server):
        async with connected(path) as first:
            assert not await refused(first)
            service.key = 2
            async with connected(path) as second:
                assert not await refused(second)
                for service.key in (1, 2):
                    async with connected(path) as newcomer:
                        assert await refused(newcomer)
                assert server.connections == 2
                assert not await refused(first)
                assert not await refused(second)
        assert service.calls == 4


async def test_a_peer_without_a_connection_replaces_the_oldest_idle_one(tmp_path: Path) -> None:
    """A pod may have as many containers as there are connections, and keep one of each."""
    path = tmp_path / "socket"
    async with served(path, SocketLimits(connections=3)) as (service, server), AsyncExitStack() as held:
        clients = []
        for service.key in (1, 2, 3):
            clients.append(await held.enter_async_context(connected(path)))
            await clients[-1].send(
                b'{"jsonrpc":"2.0","method":"%s","id":1}\n' % (b"wait" if service.key == 1 else b"x")
            )
            await trio.testing.wait_all_tasks_blocked()
        assert [json.loads(await client.line())["result"] for client in clients[1:]] == ["x", "x"]
        service.key = 4
        async with connected(path) as newcomer:
            assert not await refused(newcomer)
            assert [await disconnected(each) for each in clients] == [False, True, False]
            assert server.connections == 3
        service.finished.set()


async def test_a_peer_without_a_connection_is_served_while_all_others_are_worked_on(tmp_path: Path) -> None:
    """Requests may take minutes, and are not hung up on: few peers could keep all others out."""
    path = tmp_path / "socket"
    async with served(path, SocketLimits(connections=2, newcomers=1)) as (service, server), AsyncExitStack() as held:
        for _ in range(2):
            client = await held.enter_async_context(connected(path))
            await client.send(b'{"jsonrpc":"2.0","method":"wait","id":1}\n')
            await trio.testing.wait_all_tasks_blocked()
        async with connected(path) as third:
            assert await refused(third), "its peer has others"
        service.key = 2
        async with connected(path) as newcomer:
            assert not await refused(newcomer)
            assert server.connections == 3
            async with connected(path) as second:
                assert await refused(second)
            service.key = 3
            await newcomer.send(b'{"jsonrpc":"2.0","method":"wait","id":1}\n')
            await trio.testing.wait_all_tasks_blocked()
            async with connected(path) as one_too_many:
                assert await refused(one_too_many)
        service.finished.set()


async def test_a_refused_client_can_still_send_its_request_and_read_the_reason(tmp_path: Path) -> None:
    """Disconnected before it has sent, it would get EPIPE and never read the error."""
    path = tmp_path / "socket"
    async with (
        served(path, SocketLimits(connections=1)) as (_, server),
        connected(path) as first,
        connected(path) as second,
    ):
        assert not await refused(first)
        await trio.testing.wait_all_tasks_blocked()
        assert await refused(second)
        assert server.connections == 1


async def test_while_nothing_can_be_accepted_it_pauses_and_counts_that(
    autojump_clock: trio.testing.MockClock,
) -> None:
    numbers = iter([errno.ECONNABORTED, errno.ENOSPC, errno.EMFILE, errno.ENOSPC])
    with trio.socket.from_stdlib_socket(socket.socket(socket.AF_UNIX)) as connection:

        class Listener(trio.socket.SocketType):
            async def accept(self) -> tuple[trio.socket.SocketType, object]:
                await trio.lowlevel.checkpoint()
                for number in numbers:
                    raise OSError(number, os.strerror(number))
                return connection, ""

        begun, counted = trio.current_time(), shortages.count
        assert await accepted(Listener()) is connection
        assert trio.current_time() - begun == 3
        assert shortages.count - counted == 3
    del autojump_clock


class AdmittingService(Service):
    """A service that counts its peers by process, and notes the order in which they were admitted."""

    admitted: list[int]

    def admit(self, identify: Identify) -> int:
        self.admitted = [*getattr(self, "admitted", ()), identify().pid]
        return self.admitted[-1]


FLOOD = """
import select, socket, sys
flood = [socket.socket(socket.AF_UNIX) for _ in range(300)]
for each in flood:
    each.connect(sys.argv[1])
    each.setblocking(False)
print("connected", flush=True)
sys.stdin.readline()
def end(each):
    try:
        return "answered" if each.recv(1) else "closed"
    except BlockingIOError:
        return "open"
ends = [end(each) for each in flood]
print(ends.count("closed"), ends.count("answered"), ends.count("open"), flush=True)
"""


@pytest.mark.parametrize(
    "limits", [SocketLimits(), SocketLimits(connections=8, newcomers=8, connections_per_peer=400)], ids=["peer", "all"]
)
async def test_a_peer_that_fills_the_queue_of_connections_costs_others_no_time(
    tmp_path: Path, limits: SocketLimits
) -> None:
    """Those of its connections that are too many are closed before any time is spent on them, and told nothing."""
    path, service = tmp_path / "socket", AdmittingService()
    server = UnixServer(service, limits)
    argv = [sys.executable, "-S", "-c", FLOOD, str(path)]
    with listening(path) as listener, subprocess.Popen(argv, stdin=-1, stdout=-1, text=True) as flood:  # noqa: ASYNC220 - waited for
        assert flood.stdout is not None
        assert flood.stdin is not None
        assert flood.stdout.readline() == "connected\n"
        with trio.fail_after(30):
            async with connected(path) as client, trio.open_nursery() as nursery:
                nursery.start_soon(server.accept, listener)
                assert json.loads(await ask(client))["result"] == "zero"
                await trio.testing.wait_all_tasks_blocked()
                flood.stdin.write("\n")
                flood.stdin.flush()
                closed, answered, left = map(int, flood.stdout.readline().split())
                nursery.cancel_scope.cancel()
    assert service.admitted.index(os.getpid()) < 8, "it was the last of 301"
    assert answered + left == len(service.admitted) - 1 <= 24
    assert closed == 300 - answered - left


def test_a_few_connections_of_each_peer_wait_and_one_of_each_of_1024() -> None:
    queue, closed = WaitingConnections(256, 16), list[object]()
    for key in (*["greedy"] * 20, *range(2000)):
        connection: Any = SimpleNamespace(close=partial(closed.append, key))
        queue._add(key, (connection, 0))
    assert closed == ["greedy"] * 4 + list(range(1023, 2000))


async def test_refused_clients_of_one_peer_keep_no_other_peer_out(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    limits = SocketLimits(connections=2, connections_per_peer=1, unfinished=30.0)
    async with served(path, limits) as (service, server), AsyncExitStack() as held:
        silent = []
        for _ in range(10):
            silent.append(await held.enter_async_context(connected(path)))
            await trio.testing.wait_all_tasks_blocked()
        assert server.connections == 1
        service.key = 2
        async with connected(path) as other:
            assert not await refused(other)
        # Each was told why; of those that do not go, as many are waited for as may be connected.
        assert all([json.loads(await client.line())["error"]["code"] == BUSY for client in silent[1:]])
        for client in silent[1:8]:
            assert await client.line() == b""


class Turns(trio.abc.Instrument):
    """Counts the turns of the event loop."""

    count = 0

    def before_io_wait(self, timeout: float) -> None:
        del timeout
        self.count += 1


async def test_one_message_of_each_peer_is_parsed_in_a_turn(tmp_path: Path) -> None:
    """However many connections it has: a long one takes milliseconds, and each connection has one ready."""
    path, turns, parsed = tmp_path / "socket", Turns(), list[tuple[int, str]]()

    class WatchedService(Service):
        async def call(self, identify: Identify, method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
            parsed.append((turns.count, method))
            return await super().call(identify, method, params)

    limits = SocketLimits(connections=32, connections_per_peer=8)
    async with served(path, limits, WatchedService()) as (service, _), AsyncExitStack() as held:
        trio.lowlevel.add_instrument(turns)
        held.callback(trio.lowlevel.remove_instrument, turns)
        clients = []
        for key in (1, 2):
            service.key = key
            for _ in range(8):
                clients.append((key, await held.enter_async_context(connected(path))))
                await trio.testing.wait_all_tasks_blocked()
        for key, client in clients:
            await client.send(b'{"jsonrpc":"2.0","method":"of %d","id":1}\n' % key * 3)
        await trio.testing.wait_all_tasks_blocked()
    assert len(parsed) == 48
    assert len(set(parsed)) == 48, "none shares a turn with another one of its peer"


async def test_peers_are_served_in_rotation(tmp_path: Path) -> None:
    """Some in each turn, so that many of them do not make one long; the one that was served longest ago comes first."""
    path, waiting, whose = tmp_path / "socket", WaitingConnections(1 << 16, 4), dict[object, int]()
    numbers = iter([*range(40), *range(40)])

    def peer(connection: trio.socket.SocketType) -> int:
        whose[connection] = next(numbers)
        return whose[connection]

    with listening(path) as listener, ExitStack() as held:
        for _ in range(80):
            held.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        turns = []
        for _ in range(5):
            served_now = await waiting.next_of_each(listener, lambda: peer)
            turns.append([whose[held.enter_context(connection)] for connection, _ in served_now])
    assert list(map(len, turns)) == [16] * 5
    assert [each for turn in turns for each in turn] == [*range(40), *range(40)]
