"""The QMP monitor with a peer whose every message the test sends."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
import trio
from qemu.qmp.models import ErrorResponse
from trio.testing import MockClock

from runner.base.errors import explain
from runner.base.tasks import capture
from runner.kernel.fd_passing import TooManyFdsInFlightError
from runner.protocol.qmp import (
    LONGEST_EVENT,
    LONGEST_LINE,
    BadReplyError,
    ExecInterruptedError,
    ExecuteError,
    Monitor,
    MonitorRecord,
    QmpEvent,
    VcpuThread,
)
from runner.protocol.qmp_server import QmpSession
from tests.support.sweep import CancelAtStep

GREETING = {"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": ""}, "capabilities": []}}


class Peer:
    """QEMU's end of the connection, controlled by the test."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.buffer = b""

    def send(self, **message: object) -> None:
        self.end.sendall(json.dumps(message).encode() + b"\r\n")

    def received(self) -> dict[str, object]:
        """Return the next command, which must have arrived already."""
        while b"\n" not in self.buffer:
            self.buffer += self.end.recv(1 << 16, socket.MSG_DONTWAIT)
        line, _, self.buffer = self.buffer.partition(b"\n")
        result: dict[str, object] = json.loads(line)
        return result


@pytest.fixture
def ends() -> Iterator[tuple[Monitor, Peer]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Monitor(ours), Peer(theirs)


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def sent_and_cancelled(monitor: Monitor, command: str) -> None:
    """Cancel *command* when it has been sent, and waits for its reply."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.execute, command)
        await settle()
        nursery.cancel_scope.cancel()


async def test_greeting_and_version(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    async with trio.open_nursery() as nursery:
        peer.send(**GREETING)
        versions: list[str] = []

        async def greet() -> None:
            versions.append(await monitor.greet())

        nursery.start_soon(greet)
        await settle()
        assert peer.received() == {"execute": "qmp_capabilities", "id": "1"}
        peer.send(**{"return": {}, "id": "1"})
    assert versions == ["10.0.2"]


async def test_replies_find_their_commands_in_any_order(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    results: dict[str, object] = {}

    async def ask(command: str) -> None:
        results[command] = await monitor.execute(command)

    async with trio.open_nursery() as nursery:
        for command in "abc":
            nursery.start_soon(ask, command)
        await settle()
        asked = [peer.received() for _ in "abc"]
        for request in reversed(asked):
            peer.send(**{"return": request["execute"], "id": request["id"]})
    assert results == {"a": "a", "b": "b", "c": "c"}


async def events(monitor: Monitor, count: int = 1) -> list[QmpEvent]:
    """Return the next events, at least *count*."""
    seen: list[QmpEvent] = []
    with monitor.observed_by(seen.append):
        await monitor.until(lambda: len(seen) >= count)
    return seen


async def test_events_between_request_and_reply_are_kept(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.execute, "stop")
        await settle()
        peer.send(event="STOP", data={}, timestamp={})
        peer.send(**{"return": {}, "id": peer.received()["id"]})
        peer.send(event="RESUME", timestamp={})
    assert [each.name for each in await events(monitor, 2)] == ["STOP", "RESUME"]


async def test_each_event_is_passed_to_all_observers_before_the_next(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    seen: list[str] = []
    with (
        monitor.observed_by(lambda event: seen.append(f"first {event.name}")),
        monitor.observed_by(lambda event: seen.append(f"second {event.name}")),
    ):
        for name in ("STOP", "RESUME"):
            peer.send(event=name, timestamp={})
        await monitor.until(lambda: len(seen) == 4)
    assert seen == ["first STOP", "second STOP", "first RESUME", "second RESUME"]


async def test_the_events_of_a_conversation_are_kept_for_the_observers_that_it_takes_over(
    ends: tuple[Monitor, Peer],
) -> None:
    """They are those of a QEMU that is about to get the guest: what the observers know is of the one that has it."""
    successor, peer = ends
    ours, theirs = socket.socketpair()
    seen: list[str] = []
    with ours, theirs:
        source = Monitor(ours)
        with source.observed_by(lambda event: seen.append(event.name)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(successor.execute, "cont")
                await settle()
                peer.send(event="RESUME", timestamp={})
                peer.send(**{"return": {}, "id": peer.received()["id"]})
            assert seen == []
            successor.take_over_observers(source)
            theirs.sendall(b'{"event": "SHUTDOWN", "timestamp": {}}\n')
            peer.send(event="SUSPEND", timestamp={})
            with trio.move_on_after(0.1):
                await source.until(lambda: bool(seen))
            assert seen == [], "the source's events are nobody's any more"
            await successor.until(lambda: len(seen) == 2)
        assert seen == ["RESUME", "SUSPEND"]
        peer.send(event="WAKEUP", timestamp={})
        assert [each.name for each in await events(successor)] == ["WAKEUP"], "the block is over in both"


async def test_events_that_a_program_before_has_not_passed_on_are_passed_on_first(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    before = (("RESET", '{"guest": true}'), ("SUSPEND", "{}"))
    monitor.continue_from(MonitorRecord("{}", 5, unfinished=b'{"event": "WAKE', events=before))
    peer.end.sendall(b'UP", "timestamp": {}}\n')
    found = await events(monitor, 3)
    assert [(each.name, each.data) for each in found] == [("RESET", {"guest": True}), ("SUSPEND", {}), ("WAKEUP", {})]


async def test_an_event_waiter_and_a_command_read_for_each_other(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    seen: list[QmpEvent] = []

    async def wait() -> None:
        seen.extend(await events(monitor))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await settle()  # the event waiter reads
        nursery.start_soon(monitor.execute, "x")
        await settle()  # the command waits for it
        peer.send(**{"return": {}, "id": peer.received()["id"]})
        await settle()
        peer.send(event="E", timestamp={})
    assert [each.name for each in seen] == ["E"]


async def test_a_reply_may_overtake_the_end_of_its_sending(ends: tuple[Monitor, Peer]) -> None:
    """Another task reads the reply while the command's own still returns from sending."""
    monitor, peer = ends
    async with trio.open_nursery() as nursery:
        nursery.start_soon(events, monitor)
        await settle()  # the event waiter reads
        peer.send(**{"return": "early", "id": "1"})
        with trio.fail_after(60):
            assert await monitor.execute("x") == "early"
        nursery.cancel_scope.cancel()


async def test_the_reader_is_cancelled_and_another_takes_over(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def read() -> None:
            with scope:
                await events(monitor)

        nursery.start_soon(read)
        await settle()
        nursery.start_soon(monitor.execute, "x")
        await settle()
        scope.cancel()
        await settle()
        peer.send(**{"return": {}, "id": peer.received()["id"]})


async def test_a_cancelled_commands_late_reply_is_dropped(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    await sent_and_cancelled(monitor, "slow")
    late = peer.received()["id"]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.execute, "next")
        await settle()
        peer.send(**{"return": {}, "id": late})
        peer.send(**{"return": {}, "id": peer.received()["id"]})


async def test_a_reply_to_a_command_that_was_never_sent_is_no_answer(
    ends: tuple[Monitor, Peer], autojump_clock: MockClock
) -> None:
    del autojump_clock
    monitor, peer = ends
    await sent_and_cancelled(monitor, "late")
    await trio.sleep(5)
    peer.send(**{"return": {}, "id": "never sent"})
    with trio.move_on_after(1) as waiting:
        await monitor.answers()
    assert waiting.cancelled_caught
    assert monitor.owed_for >= 5
    peer.send(**{"return": {}, "id": peer.received()["id"]})
    assert not await monitor.answers()
    assert monitor.owed_for == 0


async def test_a_command_with_a_descriptor_is_sent_or_not(ends: tuple[Monitor, Peer]) -> None:
    """Wherever it is cancelled, the connection stays usable."""
    monitor, peer = ends
    for n in range(1, 8):
        with trio.CancelScope() as scope:
            instrument = CancelAtStep(scope, n)
            trio.lowlevel.add_instrument(instrument)
            try:
                with trio.move_on_after(0.05):
                    await monitor.execute("add-fd", fds=(peer.end.fileno(),))
            finally:
                trio.lowlevel.remove_instrument(instrument)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(monitor.execute, "next")
            await settle()
            request = peer.received()
            request = peer.received() if request["execute"] == "add-fd" else request
            peer.send(**{"return": {}, "id": request["id"]})


async def test_a_refusal_keeps_the_sent_and_received_messages(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    peer.send(error={"class": "CommandNotFound", "desc": "The command x has not been found"}, id="1")
    with pytest.raises(ExecuteError, match="cannot execute 'x': The command x has not been found") as caught:
        await monitor.execute("x")
    assert caught.value.kind == "CommandNotFound"
    assert caught.value.sent == {"execute": "x", "id": "1"}
    assert isinstance(caught.value.received, ErrorResponse)
    assert caught.value.received.error.desc == "The command x has not been found"
    peer.send(**{"return": 1, "id": "2"})
    assert await monitor.execute("y") == 1


async def test_vcpus_come_in_any_order(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    peer.send(**{"return": [{"cpu-index": 1, "thread-id": 11}, {"cpu-index": 0, "thread-id": 10}], "id": "1"})
    assert await monitor.vcpu_threads() == (VcpuThread(0, 10), VcpuThread(1, 11))


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        (b"", ExecInterruptedError, "it hung up"),
        (b'{"QMP": ', ExecInterruptedError, "it hung up in the middle of"),
        (b"hello\n", BadReplyError, "it sent b'hello'"),
        (b"[]\n", BadReplyError, r"it sent b'\[\]'"),
        (b"\xff\xfe\n", BadReplyError, "it sent"),
        (b"[" * 100_000 + b"\n", BadReplyError, "it sent"),
        (b'{"QMP": 3}\n', BadReplyError, "greeting"),
    ],
)
async def test_malformed_qmp_ends_the_connection(
    ends: tuple[Monitor, Peer], data: bytes, error: type[Exception], sentence: str
) -> None:
    monitor, peer = ends
    peer.end.sendall(data)
    peer.end.shutdown(socket.SHUT_WR)
    with pytest.raises(error, match=sentence):
        await monitor.greet()
    with pytest.raises(error):
        await monitor.execute("anything")


async def test_a_reply_before_the_garbage_counts(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.execute, "cont")
        await settle()
        number = peer.received()["id"]
        peer.end.sendall(json.dumps({"return": {}, "id": number}).encode() + b"\r\ngarbage\n")
    with pytest.raises(BadReplyError):
        await events(monitor)


async def test_a_line_without_end(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends

    def flood() -> None:
        try:
            for _ in range(100):
                peer.end.sendall(b"x" * (1 << 16))
        except ConnectionError:
            pass

    flooding = threading.Thread(
        target=flood
    )  # joined here: a thread of trio's pool would stay, and snapshots of other tests would count it
    flooding.start()
    with pytest.raises(BadReplyError, match="a line of more than"):
        await events(monitor)
    monitor.close()
    flooding.join()


def send_overlong(peer: Peer, number: object, after: bytes) -> threading.Thread:
    """Send a reply to command *number* that is longer than may be held, and *after* behind it."""

    def send() -> None:
        peer.end.sendall(b'{"return": "')
        for _ in range(LONGEST_LINE // (1 << 16) + 3):
            peer.end.sendall(b"x" * (1 << 16))
        peer.end.sendall(b'", "id": "%s"}\r\n' % str(number).encode() + after)

    sending = threading.Thread(target=send)
    sending.start()
    return sending


async def test_an_overlong_reply_fails_its_command_alone(ends: tuple[Monitor, Peer]) -> None:
    """Also when a command before it was abandoned, whose reply comes first, and with another line behind it."""
    monitor, peer = ends
    await sent_and_cancelled(monitor, "abandoned")
    results: list[object] = []

    async def other() -> None:
        results.append(await monitor.execute("query-status"))

    async with trio.open_nursery() as nursery:

        async def overlong() -> None:
            with pytest.raises(
                ExecuteError, match=r"cannot execute 'query-all': it sent a line of more than 4194304 bytes"
            ):
                await monitor.execute("query-all")

        nursery.start_soon(overlong)
        await settle()
        nursery.start_soon(other)
        await settle()
        first, second, third = (peer.received()["id"] for _ in range(3))
        peer.send(**{"return": {}, "id": first})
        event = b'{"event": "RESUME", "timestamp": {}}\r\n'
        sending = send_overlong(peer, second, event + json.dumps({"return": "b", "id": third}).encode() + b"\r\n")
    sending.join()
    assert results == ["b"]
    assert [each.name for each in await events(monitor)] == ["RESUME"]


async def test_a_command_whose_descriptors_could_not_be_sent_has_no_reply(
    ends: tuple[Monitor, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ETOOMANYREFS``: nothing was sent, and an overlong reply is the next command's."""
    monitor, peer = ends

    async def refused(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise TooManyFdsInFlightError("cannot send descriptors: too many")

    with monkeypatch.context() as patched:
        patched.setattr("runner.protocol.qmp.begin_to_send", refused)
        with pytest.raises(TooManyFdsInFlightError):
            await monitor.execute("add-fd", fds=(0,))
    assert list(monitor.record().unanswered) == []
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(monitor.execute, "query-status")
            await settle()
            peer.send(**{"return": {}, "id": peer.received()["id"]})


async def test_a_client_that_hangs_up_does_not_wait_for_qemu(ends: tuple[Monitor, Peer]) -> None:
    """One that only sends no more gets its replies; after one that has gone, the monitor goes on."""
    monitor, peer = ends

    async def execute(command: str, arguments: object, wanted: trio.CancelScope) -> object:
        assert arguments is None
        return await monitor.execute(command, wanted=wanted)

    number: object = None
    for leaves in (False, True):
        ours, theirs = socket.socketpair()
        with trio.fail_after(60), trio.socket.from_stdlib_socket(ours) as connection, theirs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(QmpSession(connection, {}, execute, monitor.observed_by).serve)
                theirs.sendall(b'{"execute": "qmp_capabilities"} {"execute": "query-status"}')
                await settle()
                number = peer.received()["id"]
                if leaves:
                    theirs.close()
                else:
                    theirs.shutdown(socket.SHUT_WR)
                    await settle()
                    peer.send(**{"return": "running", "id": number})
            if not leaves:
                assert b'{"return":"running"}' in theirs.recv(4096)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.execute, "stop")
        await settle()
        peer.send(**{"return": "late", "id": number})
        peer.send(**{"return": {}, "id": peer.received()["id"]})


async def test_a_command_cancelled_half_sent_ends_the_connection(ends: tuple[Monitor, Peer]) -> None:
    monitor, _peer = ends
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.execute, "big", {"text": "x" * (8 << 20)})
        await settle()
        nursery.cancel_scope.cancel()
    with pytest.raises(ExecInterruptedError, match="half-sent"):
        await monitor.execute("next")


async def test_commands_cancelled_while_there_is_no_room_for_them_were_not_sent(ends: tuple[Monitor, Peer]) -> None:
    """QEMU's main loop stands still for a moment, while clients request metrics without end."""
    monitor, peer = ends
    async with trio.open_nursery() as nursery:
        for _ in range(1000):
            nursery.start_soon(monitor.execute, "query-blockstats")
        await settle()
        nursery.cancel_scope.cancel()
    unanswered = monitor.record().unanswered
    assert 0 < len(unanswered) < 1000
    for number in unanswered:
        assert peer.received()["id"] == number
        peer.send(**{"return": [], "id": number})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.execute, "query-status")
        await settle()
        peer.send(**{"return": {}, "id": peer.received()["id"]})
    assert monitor.record().unanswered == ()


async def test_events_without_end_do_not_fill_memory(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.execute, "x")
        await settle()
        number = peer.received()["id"]

        def storm() -> None:
            for count in range(3000):
                peer.send(event=f"E{count}", timestamp={})
            peer.send(**{"return": {}, "id": number})

        storming = threading.Thread(target=storm)
        storming.start()
    storming.join()
    kept = await events(monitor)
    assert (kept[0].name, len(kept)) == ("E2000", 1000), "the newest thousand are kept"


async def test_descriptors_travel_with_a_command(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    reading, writing = os.pipe()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(monitor.execute, "add-fd", {"opaque": "x" * 100_000}, fds=(reading,)))
        await settle()
        data, received, _, _ = socket.recv_fds(peer.end, 1 << 16, 4)
        peer.buffer += data
        await settle()
        while b"\n" not in peer.buffer:
            peer.buffer += peer.end.recv(1 << 16, socket.MSG_DONTWAIT)
            await settle()
        peer.send(**{"return": {"fdset-id": 0}, "id": peer.received()["id"]})
    os.write(writing, b"word")
    assert [os.read(number, 4) for number in received] == [b"word"]
    os.fstat(reading)  # our copy stays open
    for number in (reading, writing, *received):
        os.close(number)


NUMBERS: list[object] = [True, -1, 1.5, 1e400, 1 << 63, 10**400, "7", None, [], {}]
THREAD_LISTS: list[object] = [
    *([{"cpu-index": each, "thread-id": 7, "id": "a"}] for each in NUMBERS),
    *([{"cpu-index": 0, "thread-id": each, "id": "a"}] for each in NUMBERS),
    *([], {}, "text", 3, None, [3], [[]], ["cpu-index"]),
]


NO_WORDS: list[object] = [7, None, True, {}, [[]], "x" * 2000]


@pytest.mark.parametrize(
    ("ask", "replies"),
    [
        (Monitor.vcpu_threads, THREAD_LISTS),
        (Monitor.iothreads, THREAD_LISTS),
        (Monitor.iothreads, [[{"thread-id": 7, "id": each}] for each in NO_WORDS]),
        (Monitor.run_state, [[], {}, 3, None, *({"status": each} for each in NO_WORDS)]),
    ],
)
async def test_an_answer_that_is_none_is_an_error_that_can_be_shown(
    ends: tuple[Monitor, Peer], ask: Callable[[Monitor], Awaitable[object]], replies: list[object]
) -> None:
    """QEMU may be the guest's. The conversation goes on, and what no reply is taken for is shown by its beginning."""
    monitor, peer = ends
    for number, reply in enumerate([*replies, "x" * 3_000_000]):
        sending = threading.Thread(target=partial(peer.send, **{"return": reply, "id": str(number + 1)}))
        sending.start()
        outcome = await capture(partial(ask, monitor))
        sending.join()
        try:
            answer = outcome()
        except BadReplyError as error:
            answer = explain(error)
        assert answer in ((), {}, {7: "a"}) or (isinstance(answer, str) and len(answer) < 4000), reply


async def test_a_greeting_is_believed_once(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    peer.send(**GREETING)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(monitor.greet)
        await settle()
        peer.send(**{"return": {}, "id": "1"})
    assert monitor.version == "10.0.2"
    peer.send(QMP={"version": None, "capabilities": []})
    peer.send(**{"return": {}, "id": "2"})
    await monitor.execute("x")
    assert monitor.version == "10.0.2"


@pytest.mark.parametrize("part", [10**30, -1, True, 1e400, "\x1b[2J"])
async def test_a_version_has_numbers(ends: tuple[Monitor, Peer], part: object) -> None:
    monitor, peer = ends
    peer.send(QMP={"version": {"qemu": {"major": part, "minor": 0, "micro": 2}}, "capabilities": []})
    with pytest.raises(BadReplyError, match="greeting"):
        await monitor.greet()


async def test_what_is_kept_of_events_is_bounded(ends: tuple[Monitor, Peer]) -> None:
    """A long event has its place, and nothing of what it says, in whatever order; a nested value is none that is asked for."""
    monitor, peer = ends
    long = {"x": "y" * LONGEST_EVENT}
    peer.send(timestamp={}, event="BLOCK_IMAGE_CORRUPTED", data=long)
    peer.send(data=long, event="BLOCK_IMAGE_CORRUPTED")
    peer.send(timestamp={}, event="BLOCK_IMAGE_CORRUPTED", data={"device": [[]], "msg": {"a": 1}, "reason": "known"})
    *both, nested = await events(monitor, 3)
    assert [(each.name.startswith("an event of 4"), each.data) for each in both] == [(True, {})] * 2
    assert (nested.name, nested.data) == ("BLOCK_IMAGE_CORRUPTED", {"reason": "known"})
    assert all(len(json.dumps(dict(each.message))) < LONGEST_EVENT for each in (*both, nested))


async def test_iothreads_by_their_threads(ends: tuple[Monitor, Peer]) -> None:
    monitor, peer = ends
    found: list[object] = []

    async def ask() -> None:
        try:
            found.append(await monitor.iothreads())
        except BadReplyError as error:
            found.append(type(error))

    for reply in ([{"id": "disk0", "thread-id": 7}], [{"id": "disk0"}]):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await settle()
            peer.send(**{"return": reply, "id": peer.received()["id"]})
    assert found == [{7: "disk0"}, BadReplyError]
