"""Waiting while the kernel is short of watches, memory or descriptors: nothing ends, and it goes on when there are some again."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from runner.controller.metrics import ControllerCounters
from runner.controller.restarted_task import BEGUN_AGAIN, restarted
from runner.instance.held import Held
from runner.kernel import inotify
from runner.kernel.connections import copy_between, hung_up
from runner.kernel.fd_passing import receive_with_fds, send_with_fds
from runner.kernel.sockets import SO_PASSRIGHTS
from runner.kernel.waiting import SHORT, Shortages, persistently, receive, shortages
from runner.protocol.guest_agent import AgentError, GuestAgent
from runner.protocol.qmp import Monitor, QmpError, QmpEvent


class ShortEpoll:
    """trio's epoll while nothing more can be registered, as at ``fs.epoll.max_user_watches``."""

    def __init__(self, real: select.epoll, number: int) -> None:
        self._real, self._number = real, number
        self.refused = trio.Event()

    def modify(self, fd: int, events: int) -> None:
        self._real.modify(fd, events)

    def register(self, *_: int) -> None:
        self.refused.set()
        raise OSError(self._number, os.strerror(self._number))

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


@contextlib.contextmanager
def short(number: int = errno.ENOSPC) -> Iterator[trio.Event]:
    """Let the event loop register nothing more during the block; the event is set at the first attempt."""
    manager = trio._core._run.GLOBAL_RUN_CONTEXT.runner.io_manager
    real = manager._epoll
    found = ShortEpoll(real, number)
    setattr(manager, "_epoll", found)  # noqa: B010 - not of its type
    try:
        yield found.refused
    finally:
        manager._epoll = real


@pytest.mark.parametrize("number", sorted(SHORT))
async def test_a_call_that_fails_for_want_of_something_is_made_again(
    number: int, autojump_clock: trio.testing.MockClock
) -> None:
    failures = iter([number] * 3)

    async def act() -> str:
        await trio.lowlevel.checkpoint()
        for each in failures:
            raise OSError(each, os.strerror(each))
        return "done"

    before = shortages.count
    assert await persistently(act) == "done"
    assert shortages.count == before + 3
    del autojump_clock


async def test_any_other_error_is_raised() -> None:
    async def act() -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))

    with pytest.raises(BrokenPipeError):
        await persistently(act)


def test_the_log_has_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    found = Shortages()
    for _ in range(100):
        found.note(OSError(errno.ENOSPC, "No space left on device"))
    assert found.count == 100
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_what_was_sent_is_received_while_nothing_can_be_watched() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for each in (ours, theirs):
            each.setblocking(False)
        connection = trio.socket.from_stdlib_socket(ours)
        async with trio.open_nursery() as nursery:
            with short() as refused:
                received: list[bytes] = []

                async def receive() -> None:
                    received.append(await receive_with_fds(connection, 10, 0, os.close))

                nursery.start_soon(receive)
                await refused.wait()
                theirs.send(b"hello")
                while not received:
                    await trio.sleep(0.01)
                await send_with_fds(connection, b"back")
        assert received == [b"hello"]
        assert theirs.recv(10) == b"back"


async def wait_for_file(path: Path) -> None:
    with inotify.watching() as queue:
        queue.watch(path, inotify.CREATE)
        await queue.receive()


async def test_every_wait_goes_on_when_there_are_watches_again(tmp_path: Path) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    held = contextlib.ExitStack()
    for pair in pairs:
        for each in pair:
            held.enter_context(each).setblocking(False)
    monitor, agent, client = Monitor(pairs[0][0]), GuestAgent(pairs[1][0]), trio.socket.from_stdlib_socket(pairs[2][0])
    ended: list[str] = []
    events: list[QmpEvent] = []
    held.enter_context(monitor.observed_by(events.append))
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + 10

        async def wait(name: str, act: Callable[[], object]) -> None:
            await act()  # type: ignore[misc]
            ended.append(name)

        with short() as refused:
            nursery.start_soon(wait, "monitor", lambda: monitor.until(lambda: bool(events)))
            nursery.start_soon(wait, "agent", agent.shut_down)
            nursery.start_soon(wait, "client", lambda: hung_up(client))
            nursery.start_soon(wait, "file", lambda: wait_for_file(tmp_path))
            await refused.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert ended == []
        pairs[0][1].send(b'{"event": "RESET", "timestamp": {"seconds": 1, "microseconds": 0}}\n')
        pairs[1][1].send(b'{"error": {"desc": "no"}}\n')
        pairs[2][1].close()
        while len(ended) < 3:
            await trio.sleep(0.01)
        (tmp_path / "file").touch()
    assert sorted(ended) == ["agent", "client", "file", "monitor"]
    held.close()


async def test_a_task_of_the_controller_that_fails_is_begun_again(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    counters = ControllerCounters()
    failures = iter([RuntimeError("can't start new thread"), OSError(errno.EMFILE, "Too many open files")])
    done = trio.Event()

    async def task() -> None:
        for failure in failures:
            raise failure
        done.set()
        await trio.sleep_forever()

    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(restarted, "tuner", task, counters)
        await done.wait()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - begun == 2 * BEGUN_AGAIN
    assert counters.task_failures == {"tuner": 2}
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 2
    del autojump_clock


@pytest.mark.parametrize("early", [True, False])
async def test_what_is_received_is_returned_in_the_same_step(early: bool) -> None:  # noqa: FBT001
    """A program that is renewed between two steps has it, or finds it in the kernel."""
    ours, theirs = socket.socketpair()
    found: list[bytes] = []

    async def read() -> None:
        found.append(await receive(ours, 100))

    with ours, theirs:
        ours.setblocking(False)
        async with trio.open_nursery() as nursery:
            if early:
                theirs.send(b"some")
            nursery.start_soon(read)
            if not early:
                await trio.testing.wait_all_tasks_blocked()
                theirs.send(b"some")
            while not found:
                assert ours.recv(100, socket.MSG_PEEK) == b"some"
                await trio.lowlevel.checkpoint()
    assert found == [b"some"]


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


async def converse(ours: socket.socket) -> None:
    """Receive as the monitor of a QEMU does, until the conversation has failed."""
    monitor = Monitor(ours)
    with pytest.raises(QmpError, match="hung up"):
        await monitor.until(lambda: False)
    monitor.close()


async def ask_agent(ours: socket.socket) -> None:
    with pytest.raises(AgentError, match="hung up"):
        await GuestAgent(ours).ping()


async def leave_unread(_: socket.socket) -> None:
    await trio.lowlevel.checkpoint()


async def copy(ours: socket.socket) -> None:
    """Pass on what one QEMU sends to the next one."""
    one, other = socket.socketpair()
    with one, other:
        ours.setblocking(False)
        one.setblocking(False)
        await copy_between(*map(trio.socket.from_stdlib_socket, (ours, one)))


@pytest.mark.parametrize("flags", [0, socket.MSG_OOB])
@pytest.mark.parametrize("act", [converse, ask_agent, leave_unread, copy])
async def test_descriptors_that_take_long_to_be_closed_do_not_hold_this_process(
    act: Callable[[socket.socket], Awaitable[None]], flags: int
) -> None:
    """A QEMU under its guest's control may send them, and before Linux 6.16 the kernel does not refuse them."""
    began = trio.current_time()
    with Held().pair("QMP", "a test") as (ours, theirs):
        assert theirs is not None
        with contextlib.suppress(OSError):  # before Linux 6.16
            ours.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
        ours.setblocking(False)
        with theirs, lingering() as fd:
            theirs.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))], flags)
            os.close(fd)
            await act(ours)
    assert trio.current_time() - began < 30
