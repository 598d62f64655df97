"""The rate limit of log messages: one of each kind and peer in an interval, and no count is lost."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from runner.base.events import InstanceEvent
from runner.base.rate_limit import MOST_PEERS, REPORTED_EVERY, LogRateLimit

log = logging.getLogger(__name__)

KINDS = ("reset", "refused")


def left_out(caplog: pytest.LogCaptureFixture) -> int:
    """Return the sum of the counts that were logged at the end."""
    return sum(record.args[2] for record in caplog.records if isinstance(record.args, tuple))  # type: ignore[misc] # ours


async def test_one_of_each_kind_and_peer_in_an_interval(autojump_clock: MockClock) -> None:
    del autojump_clock  # it is the clock
    limit = LogRateLimit()
    assert [limit.due(kind, peer) for kind in KINDS for peer in (1, 2)] == [""] * 4
    assert [limit.due(kind, peer) for kind in KINDS for peer in (1, 2) for _ in range(3)] == [None] * 12
    await trio.sleep(REPORTED_EVERY - 1)
    assert limit.due("reset", 1) is None
    await trio.sleep(1)
    assert limit.due("reset", 1) == " (4 more since the last report)"
    assert limit.due("reset", 1) is None
    await trio.sleep(2 * REPORTED_EVERY)
    assert limit.due("reset", 1) == " (1 more since the last report)"
    await trio.sleep(REPORTED_EVERY)
    assert limit.due("reset", 1) == ""


async def test_what_was_left_out_stands_behind_the_words(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    del autojump_clock  # it is the clock
    limit = LogRateLimit()
    for pause in (0, REPORTED_EVERY):
        await trio.sleep(pause)
        for _ in range(2):
            limit.log(log.error, InstanceEvent.DISK_FAILED, "disk0", "write", "full", peer="disk0")
            limit.log(log.error, InstanceEvent.GUEST_PANIC_ON_CONSOLE, "oops")
    assert [record.getMessage() for record in caplog.records] == [
        "the disk disk0 has failed to write: full; the guest got the error",
        "the guest's kernel has panicked, by its console; it is not ready until it is reset line=oops",
        "the disk disk0 has failed to write: full (1 more since the last report); the guest got the error",
        "the guest's kernel has panicked, by its console; it is not ready until it is reset (1 more since the last report) line=oops",
    ]


async def test_what_was_left_out_last_is_logged_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    limit = LogRateLimit()
    await trio.lowlevel.checkpoint()
    for _ in range(8):
        limit.due("reset", "a pod")
    limit.log_left_out()
    limit.log_left_out()
    assert [record.getMessage() for record in caplog.records] == ["left out of this log kind=reset peer=a pod count=7"]


@pytest.mark.parametrize("pause", [0.0, 0.5, REPORTED_EVERY])
async def test_peers_without_end_fill_neither_the_log_nor_the_memory_and_each_message_counts(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock, pause: float
) -> None:
    del autojump_clock  # it is the clock
    caplog.set_level(logging.INFO)
    limit = LogRateLimit()
    number, passed, counted = 1000, 0, 0
    began = trio.current_time()
    for peer in range(number):
        for kind in KINDS:
            for _ in range(2):
                more = limit.due(kind, peer)
                passed += more is not None
                counted += int(more.split()[0][1:]) if more else 0
        assert len(limit._reported) <= MOST_PEERS + len(KINDS)
        await trio.sleep(pause)
    intervals = 1 + (trio.current_time() - began) / REPORTED_EVERY
    assert passed <= (MOST_PEERS + len(KINDS)) * intervals
    limit.log_left_out()
    assert passed + counted + left_out(caplog) == 2 * len(KINDS) * number
