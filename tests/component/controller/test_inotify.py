from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from runner.errors import HostError
from runner.kernel import inotify


async def test_reports_what_happens_in_a_directory(tmp_path: Path) -> None:
    with inotify.watching() as queue:
        number = queue.watch(tmp_path, inotify.MOVED_TO | inotify.CLOSE_WRITE | inotify.ONLYDIR)
        assert queue.watch(tmp_path, inotify.MOVED_TO | inotify.CLOSE_WRITE) == number
        (tmp_path / "a").write_text("x")
        (tmp_path / "a").rename(tmp_path / "a longer name")
        with trio.fail_after(10):
            events = await queue.receive()
    assert [(event.watch, event.mask, event.name) for event in events] == [
        (number, inotify.CLOSE_WRITE, "a"),
        (number, inotify.MOVED_TO, "a longer name"),
    ]


async def test_waits_until_something_happens(tmp_path: Path) -> None:
    with inotify.watching() as queue:
        queue.watch(tmp_path, inotify.CREATE)
        received: list[inotify.FileEvent] = []

        async def receive() -> None:
            received.extend(await queue.receive())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            assert not received
            (tmp_path / "b").touch()
        assert [event.name for event in received] == ["b"]


async def test_reports_that_a_watched_directory_is_gone(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    with inotify.watching() as queue:
        queue.watch(directory, inotify.DELETE_SELF)
        directory.rmdir()
        with trio.fail_after(10):
            events = await queue.receive()
    assert [event.mask & (inotify.DELETE_SELF | inotify.IGNORED) for event in events] == [
        inotify.DELETE_SELF,
        inotify.IGNORED,
    ]


def test_a_missing_directory_cannot_be_watched(tmp_path: Path) -> None:
    with inotify.watching() as queue, pytest.raises(HostError, match="cannot watch") as caught:
        queue.watch(tmp_path / "nothing", inotify.CREATE)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
