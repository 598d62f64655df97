"""Endless output of children and guests: the amount that one step of the event loop handles is bounded."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from runner.base.rate_limit import LogRateLimit
from runner.instance.parts.console import Console
from runner.kernel.child_processes import LINES_PER_SECOND, Command, open_processes
from runner.kernel.line_reader import LINES_PER_STEP
from runner.kernel.log_file import kept_log
from runner.protocol.jsonrpc import MessageFramer
from runner.protocol.logs import JsonConsole
from runner.protocol.qmp import Monitor


class StepMeter(trio.abc.Instrument):
    """Counts what is handled between two steps of the event loop."""

    def __init__(self) -> None:
        self.most = self.total = self._now = 0

    def count(self, number: int) -> None:
        self._now += number
        self.total += number
        self.most = max(self.most, self._now)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        self._now = 0


@pytest.fixture
def meter() -> StepMeter:
    """Return a meter; a test adds it to its run."""
    return StepMeter()


@contextmanager
def counted_records(meter: StepMeter) -> Iterator[list[logging.LogRecord]]:
    """Have *meter* count each log record of a child's output."""
    records: list[logging.LogRecord] = []

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            meter.count(1)
            records.append(record)

    log, handler = logging.getLogger("runner.kernel.child_processes"), Counting()
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield records
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before


async def test_a_child_that_prints_endless_short_lines_is_bounded(meter: StepMeter) -> None:
    size = 4 << 20
    trio.lowlevel.add_instrument(meter)
    with counted_records(meter) as records:
        async with open_processes() as processes:
            process = processes.spawn(Command("yes", ("/bin/sh", "-c", f"yes | head -c {size}; echo the end")))
            assert await process.wait() == 0
    # The last lines are logged with the child's status, and a count before them.
    assert meter.most <= LINES_PER_STEP + 2
    dropped = [record.args[1] for record in records if "dropped" in str(record.msg) and isinstance(record.args, tuple)]
    logged = len(records) - len(dropped)
    assert logged + sum(number for number in dropped if isinstance(number, int)) == size // 2 + 1
    assert logged < size // 4
    assert process.last_lines[-1] == "the end"
    assert list(process.last_lines)[-3:-1] == ["y", "y"]


async def test_a_burst_of_a_child_is_logged_whole(meter: StepMeter) -> None:
    number = LINES_PER_SECOND - LINES_PER_STEP
    with counted_records(meter) as records:
        async with open_processes() as processes:
            process = processes.spawn(Command("burst", ("/bin/sh", "-c", f"seq {number}; read -r _ </dev/zero")))
            while len(records) < number:
                await trio.lowlevel.checkpoint()
            await processes.stop(process, 5)
    assert [record.getMessage() for record in records] == [f"burst: {each + 1}" for each in range(number)]


class Output:
    """A writer that keeps everything."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    dropping = False

    def drop(self, size: int) -> None:
        raise AssertionError(size)

    def write(self, data: bytes) -> None:
        self.lines.append(data)


@pytest.mark.parametrize("line", [b"\n", b"y\n"])
async def test_a_console_full_of_lines_in_json(meter: StepMeter, tmp_path: Path, line: bytes) -> None:
    number = 1 << 15
    output = Output()
    json_console = JsonConsole(output)

    def show(data: bytes) -> None:
        meter.count(data.count(b"\n"))
        json_console.write(data)

    ours, theirs = socket.socketpair()
    with ours, kept_log(tmp_path / "log", 1 << 20) as log_file:  # type: ignore[arg-type] # a path is a pure path
        console = Console(ours, show, log_file, LogRateLimit())
        trio.lowlevel.add_instrument(meter)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(console.read_guest)
            theirs.setblocking(False)
            async with trio.SocketStream(trio.socket.from_stdlib_socket(theirs)) as guest:
                await guest.send_all(line * number)
    assert meter.total == number
    assert meter.most <= LINES_PER_STEP
    found = [json.loads(each) for each in output.lines]
    assert sum(each.get("lines", 1) for each in found) == number
    if line == b"\n":
        assert len(found) <= number // LINES_PER_STEP + 4 * number // (1 << 12), "empty lines in a row are one object"


async def test_events_of_qemu_without_end(meter: StepMeter) -> None:
    class Counting(Monitor):
        def _take_in(self, line: bytes) -> None:
            meter.count(1)
            super()._take_in(line)

    number = 10_000
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, trio.socket.from_stdlib_socket(theirs) as qemu:
        monitor = Counting(ours)
        trio.lowlevel.add_instrument(meter)
        async with trio.open_nursery() as nursery:

            async def storm() -> None:
                theirs.setblocking(False)
                async with trio.SocketStream(qemu) as stream:
                    await stream.send_all(b'{"event":"E"}\n' * number)

            nursery.start_soon(storm)
            await monitor.until(lambda: meter.total >= number)
    assert meter.most <= LINES_PER_STEP


def test_lines_of_a_client_that_are_no_messages() -> None:
    framer = MessageFramer(1 << 16)
    framer.feed(b"\n" * (1 << 16))
    steps = 0
    while framer.has_line:
        assert list(framer.step()) == []
        steps += 1
    assert steps == (1 << 16) // LINES_PER_STEP
