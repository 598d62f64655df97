"""What a runner that was killed leaves in its state directory, and what QEMU may put there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pytest

from runner.base.errors import HostError
from runner.instance.parts.state_directory import discard_leftovers
from runner.instance.supervisor import Faults
from runner.kernel import files
from runner.kernel.meeting_point import meeting_point


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_what_a_killed_runner_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("ready", "receipt.json", "0123456789abcdef.sock", "overlay.0123456789abcdef", "console.log", "x.sock"):
        (tmp_path / name).write_text("")
    (tmp_path / "meeting-0123456789abcdef").mkdir()
    (tmp_path / "meeting-0123456789abcdef/listening.sock").write_text("")
    (tmp_path / "meeting-notes").mkdir()
    with opened(tmp_path) as fd:
        discard_leftovers(fd, PurePosixPath(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["console.log", "meeting-notes", "x.sock"]


def test_a_tree_of_any_depth_is_removed_without_following_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, other = tmp_path / "top", tmp_path / "other"
    other.mkdir(mode=0o755)
    (other / "kept").write_text("x")
    top.mkdir()
    (top / "link").symlink_to(other)
    monkeypatch.chdir(top)
    for _ in range(2000):  # deeper than a path may be long, or a recursion deep
        Path("d" * 200).mkdir()
        os.chdir("d" * 200)
        Path("link").symlink_to("..")
    os.chdir(tmp_path)
    with opened(tmp_path) as fd:
        files.remove_tree("top", fd)
    assert [each.name for each in tmp_path.iterdir()] == ["other"]
    assert (other / "kept").read_text() == "x"
    assert stat.S_IMODE(other.stat().st_mode) == 0o755


def test_what_two_qemus_put_where_they_meet_goes_with_it(tmp_path: Path) -> None:
    faults = Faults()
    with meeting_point(tmp_path, faults.recorded) as point:
        os.mkdir("directory", dir_fd=point.directory)
        os.mkdir("directory/below", dir_fd=point.directory)
    assert list(tmp_path.iterdir()) == []
    assert faults.sentences == []


def test_a_tree_that_grows_while_it_is_removed_is_left(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    for number in range(4):
        (tmp_path / f"top/{number}").mkdir()
    with opened(tmp_path) as fd:
        with pytest.raises(HostError, match="cannot remove 'top': it has more than 3 entries"):
            files.remove_tree("top", fd, most=3)
        files.remove_tree("top", fd)
    assert list(tmp_path.iterdir()) == []


def test_where_they_met_is_a_fault_with_its_reason_if_it_cannot_be_removed(tmp_path: Path) -> None:
    faults = Faults()
    with meeting_point(tmp_path, faults.recorded):
        [directory] = tmp_path.iterdir()
        directory.rename(tmp_path / "elsewhere")
    [sentence] = faults.sentences
    assert sentence.startswith("could not remove the directory in which two QEMUs met: cannot remove 'meeting-")
    assert sentence.endswith("No such file or directory")
