"""What a runner that was killed leaves in its state directory, and what QEMU may do there."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath

import pytest

from runner.base.errors import RefusedError, explain
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
    (tmp_path / "meeting-0123456789abcdef/cpr.sock").write_text("")
    (tmp_path / "meeting-notes").mkdir()
    with opened(tmp_path) as fd:
        discard_leftovers(fd, PurePosixPath(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["console.log", "meeting-notes", "x.sock"]


def test_where_two_qemus_meet_another_user_connects_and_changes_nothing(tmp_path: Path) -> None:
    faults = Faults()
    tmp_path.chmod(0o700)  # as the state directory is
    with meeting_point(tmp_path, faults.recorded) as point:
        tried = subprocess.run(
            [sys.executable, "-I", "-c", _AS_ANOTHER_USER, str(point.directory)],
            pass_fds=(point.directory,),
            check=True,
            capture_output=True,
            text=True,
        )
        assert tried.stdout.split() == ["connected", "connected", *["EACCES"] * 4]
        for each in (point.cpr, point.main):
            each.accept()[0].close()
    assert list(tmp_path.iterdir()) == []
    assert faults.sentences == []


_AS_ANOTHER_USER = """
import errno, os, socket, sys
os.setgroups([]), os.setgid(64055), os.setuid(64055)
place = f"/proc/self/fd/{sys.argv[1]}/"
def bind(path):
    socket.socket(socket.AF_UNIX).bind(path)
for name in ("cpr.sock", "main.sock"):
    socket.socket(socket.AF_UNIX).connect(place + name)
    print("connected")
for act, path in ((bind, "more.sock"), (os.mkdir, "directory"), (os.unlink, "main.sock"), (os.mknod, "file")):
    try:
        act(place + path)
        print("done")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def test_where_they_met_is_a_fault_with_its_reason_if_it_cannot_be_removed(tmp_path: Path) -> None:
    faults = Faults()
    with meeting_point(tmp_path, faults.recorded):
        [directory] = tmp_path.iterdir()
        directory.rename(tmp_path / "elsewhere")
    [sentence] = faults.sentences
    assert sentence.startswith("could not remove the directory in which two QEMUs met: cannot remove 'meeting-")
    assert sentence.endswith("No such file or directory")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EWOULDBLOCK, "another runner uses it; give each instance a --state-dir of its own"),
        (errno.ENOLCK, "No locks available; its file system takes no locks now: use one that does"),
    ],
)
def test_a_state_directory_that_cannot_be_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    def flock(_fd: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with opened(tmp_path) as fd, pytest.raises(RefusedError) as refused:
        files.claim(fd, PurePosixPath(tmp_path))
    assert reason in explain(refused.value)


def test_a_state_directory_that_others_may_rename_is_refused(tmp_path: Path) -> None:
    """QEMU's user may be the guest's: it could put a link to any directory in its place while this process works there."""
    above = tmp_path / "volume"
    state = PurePosixPath(above / "sub/state")
    (above / "sub").mkdir(parents=True)
    for mode, refused in ((0o777, True), (0o1777, False), (0o755, False)):  # an emptyDir, /tmp, and root's own
        above.chmod(mode)
        expected = pytest.raises(RefusedError, match="others may put another one in its place")
        with expected if refused else nullcontext(), files.directory(state):
            pass
        assert Path(state).exists() is not refused
    above.chmod(0o777)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", above / "sub"], check=True)
    try:
        with files.directory(state):  # nobody can rename where it is mounted
            pass
    finally:
        subprocess.run(["umount", above / "sub"], check=True)


def test_a_state_directory_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="it is too deep"), files.directory(PurePosixPath(tmp_path / ("x/" * 1500))):
        pytest.fail("it was made")
    assert [*tmp_path.iterdir()] == []
