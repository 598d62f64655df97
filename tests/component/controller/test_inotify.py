from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from runner.base.errors import HostError
from runner.kernel import inotify


async def test_reports_what_happens_in_a_directory(tmp_path: Path) -> None:
    with inotify.watching() as queue:
        number = queue.watch(tmp_path, inotify.MOVED_TO | inotify.CLOSE_WRITE | inotify.ONLYDIR)
        assert queue.watch(tmp_path, inotify.MOVED_TO | inotify.CLOSE_WRITE) == number
        (tmp_path / "a").write_text("x")
        (tmp_path / "a").rename(tmp_path / "a longer name")
        with trio.fail_after(60):
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
        with trio.fail_after(60):
            events = await queue.receive()
    assert [event.mask & (inotify.DELETE_SELF | inotify.IGNORED) for event in events] == [
        inotify.DELETE_SELF,
        inotify.IGNORED,
    ]


LIMITED = """
import sys, trio, trio.testing
from pathlib import Path
from runner.base.errors import HostError, explain
from runner.kernel import inotify
directory = Path(sys.argv[1])
limit = Path("/proc/sys/user") / f"max_inotify_{sys.argv[2]}"
before = limit.read_text()
limit.write_text("0")
async def receive():
    with inotify.watching() as queue, trio.fail_after(60):
        try:
            queue.watch(directory, inotify.CREATE)
        except HostError as error:
            print(explain(error))
        limit.write_text(before)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.receive)
            await trio.testing.wait_all_tasks_blocked()
            queue.watch(directory, inotify.CREATE)
            (directory / "x").touch()
trio.run(receive)
print("reported")
"""


@pytest.mark.parametrize(
    ("limit", "reason"), [("instances", "Too many open files"), ("watches", "No space left on device")]
)
def test_at_the_users_limit_a_watch_is_refused_and_can_be_had_later(tmp_path: Path, limit: str, reason: str) -> None:
    """In a user namespace of its own, whose limits are nobody else's (``/proc/sys/user``)."""
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", LIMITED, tmp_path, limit],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    sentence, reported = ended.stdout.splitlines()
    assert f"cannot watch {tmp_path}" in sentence
    assert reason in sentence
    assert f"raise fs.inotify.max_user_{limit}" in sentence
    assert reported == "reported"


def test_a_missing_directory_cannot_be_watched(tmp_path: Path) -> None:
    with inotify.watching() as queue, pytest.raises(HostError, match="cannot watch") as caught:
        queue.watch(tmp_path / "nothing", inotify.CREATE)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
