"""A log file whose volume is full for a while goes on when there is room, with a mark where output is missing."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from runner.kernel.log_file import LogFileRecord, kept_log


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", directory], check=True)
    yield directory
    subprocess.run(["umount", directory], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 - what ends it is what is wanted


def test_a_volume_that_is_full_for_a_while(small: Path) -> None:
    path = small / "console.log"
    with kept_log(PurePosixPath(path), 1 << 20) as log:
        assert not log.write(b"before\n")
        fill(small / "filler")
        assert log.write(b"x" * 5000)
        assert log.error == "No space left on device"
        assert not log.write(b"y" * 5000), "it fails still"
        missing, kept = log.missing, path.stat().st_size - len(b"before\n")
        assert missing + kept == 10000, "a disk that is nearly full takes a part"
        (small / "filler").unlink()
        assert log.write(b"after\n")
        assert log.missing == 0
        assert not log.write(b"later\n")
    mark = b"\n[%d bytes of output are missing here: No space left on device]\n" % missing
    assert path.read_bytes() == b"before\n" + b"x" * kept + mark + b"after\nlater\n"


def test_what_is_missing_goes_along_to_the_next_program(small: Path) -> None:
    path = PurePosixPath(small / "console.log")
    with kept_log(path, 1 << 20, LogFileRecord(-1, "No space left on device", 7)) as log:
        assert log.write(b"after\n")
    assert Path(path).read_bytes() == b"\n[7 bytes of output are missing here: No space left on device]\nafter\n"


def test_a_file_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    with kept_log(PurePosixPath(path), 1 << 20) as log:
        log.write(b"before\n")
        path.unlink()
        assert not log.write(b"after\n")
    assert path.read_bytes() == b"after\n"


def test_a_file_that_somebody_renames_is_written_to_until_it_is_full(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    with kept_log(PurePosixPath(path), 10) as log:
        log.write(b"before\n")
        path.rename(tmp_path / "theirs")
        assert not log.write(b"it\n")
        assert not log.write(b"after\n")
    assert (tmp_path / "theirs").read_bytes() == b"before\nit\n"
    assert path.read_bytes() == b"after\n"
