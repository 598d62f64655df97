from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from runner.controller.tree.held_files import SentFiles
from runner.kernel.cgroup import Cgroup


def _group(path: Path) -> Cgroup:
    path.mkdir()
    (path / "cgroup.procs").touch()
    return Cgroup(path)


def test_a_descriptor_that_is_being_sent_stays_open_when_its_group_is_removed(tmp_path: Path) -> None:
    """Otherwise its number could be another pod's file by the time that a slow client takes it."""
    files, mine = SentFiles(), _group(tmp_path / "mine")
    with ExitStack() as sending, ExitStack() as later:
        (slow,) = files.open([(mine, "cgroup.procs")], sending)
        was = os.fstat(slow).st_ino
        (mine.path / "cgroup.procs").rename(
            tmp_path / "removed"
        )  # as long as a descriptor has it, no other file has its inode
        mine.path.rmdir()
        files.forget_removed()
        files.open([(_group(tmp_path / "other"), "cgroup.procs")], later)
        assert os.fstat(slow).st_ino == was
    files.close()
