from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from runner.base.errors import HostError, explain
from runner.facts.disk import DocumentFact
from runner.kernel.file_prober import probe_file, read_document, why_not_appended
from runner.kernel.files import append, copied, copy_new, filled_memory, opened, publish
from tests.support.fake_kernel import FAKE_KERNEL


def test_a_copy_is_made_once_and_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "template").write_bytes(b"empty")
    source, path = PurePosixPath(tmp_path / "template"), PurePosixPath(tmp_path / "store")
    copy_new(source, path)
    (tmp_path / "template").write_bytes(b"another")
    copy_new(source, path)
    assert (tmp_path / "store").read_bytes() == b"empty", "an existing file stays"
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600
    with pytest.raises(HostError) as refused:
        copy_new(source, PurePosixPath(tmp_path / "none" / "store"))
    assert explain(refused.value).endswith(f"'{tmp_path}/template': No such file or directory")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["store", "template"]


def test_a_write_follows_no_symbolic_link(tmp_path: Path) -> None:
    victim, link, store = tmp_path / "victim", tmp_path / "link", tmp_path / "store"
    victim.write_bytes(b"mine")
    link.symlink_to(victim)
    with pytest.raises(HostError, match="cannot write"):
        append(PurePosixPath(link))
    with pytest.raises(HostError, match="cannot open"), opened(PurePosixPath(link), write=True, following=False):
        pass
    store.with_name("store.new").symlink_to(victim)
    copy_new(PurePosixPath("/etc/passwd"), PurePosixPath(store))
    assert victim.read_bytes() == b"mine"
    assert store.read_bytes() == Path("/etc/passwd").read_bytes()
    assert not store.is_symlink()


def test_files_in_memory_are_opened_as_they_will_be_used(tmp_path: Path) -> None:
    """QEMU's fdsets find a descriptor by its access mode (``util/osdep.c``)."""
    (tmp_path / "file").write_bytes(b"content")
    path = PurePosixPath(tmp_path / "file")
    held = {os.O_RDONLY: copied(path), os.O_RDWR: copied(path, write=True)}
    for mode, holder in held.items():
        with holder as fd:
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == mode
            assert os.pread(fd, 99, 0) == b"content"
    with filled_memory("seed", b"content") as fd:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert os.pread(fd, 99, 0) == b"content"


def test_large_files_and_fifos_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"x" * 11)
    assert read_document(PurePosixPath(tmp_path / "large"), 11) == DocumentFact(b"x" * 11)
    assert read_document(PurePosixPath(tmp_path / "large"), 10) == DocumentFact(
        error="it has 11 bytes, of which at most 10 are taken"
    )
    assert read_document(PurePosixPath(tmp_path / "fifo"), 10) == DocumentFact(error="it is not a file")
    assert read_document(PurePosixPath(tmp_path), 10) == DocumentFact(error="it is not a file")
    assert read_document(PurePosixPath(tmp_path / "none"), 10) == DocumentFact(error="No such file or directory")


def test_a_file_that_is_no_disk_is_known_by_its_first_and_last_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, kind in (
        (FAKE_KERNEL, "kernel"),
        (bytes(40) + b"_FVH" + bytes(4052) + b"\xff" * 16, "other"),
        (b"", None),
    ):
        path.write_bytes(content)
        found = probe_file(PurePosixPath(path)).format
        assert (found and found.kind) == kind


@pytest.fixture
def another_user() -> Iterator[Path]:
    """Be a user without privileges, and yield a directory that this user may search but not write."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    (directory / "secret").write_bytes(bytes(512))
    (directory / "secret").chmod(0o600)
    (directory / "read-only").write_bytes(bytes(512))
    os.seteuid(65534)
    yield directory
    os.seteuid(0)
    shutil.rmtree(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_that_only_its_writer_may_not_open_is_distinguished(another_user: Path) -> None:
    secret = probe_file(PurePosixPath(another_user / "secret"), write=True)
    assert (secret.error, secret.read_error) == ("Permission denied", "Permission denied")
    read_only = probe_file(PurePosixPath(another_user / "read-only"), write=True)
    assert (read_only.error, read_only.read_error) == ("Permission denied", None)
    denied = why_not_appended(PurePosixPath(another_user / "log"))
    assert denied == f"this process may not create a file in '{another_user}'"
    assert why_not_appended(PurePosixPath(another_user / "secret")) == "Permission denied"


def test_a_log_that_could_be_written_is_not_created(tmp_path: Path) -> None:
    log = PurePosixPath(tmp_path / "log")
    assert why_not_appended(log) is None
    assert not (tmp_path / "log").exists()
    assert why_not_appended(log / "log") == f"there is no directory '{log}'"
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert why_not_appended(PurePosixPath(tmp_path / "link")) == "Too many levels of symbolic links"
    (tmp_path / "log").write_bytes(b"before")
    assert why_not_appended(log) is None
    assert why_not_appended(PurePosixPath("/dev/null")) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device node")
def test_a_log_is_not_written_over_a_disk(tmp_path: Path) -> None:
    os.mknod(tmp_path / "disk", stat.S_IFBLK | 0o600, os.makedev(7, (1 << 20) - 1))
    reason = why_not_appended(PurePosixPath(tmp_path / "disk"))
    assert reason == "it is a block device, whose content would be overwritten"


def test_what_is_published_follows_no_link(tmp_path: Path) -> None:
    """Neither at the name nor at the temporary one, where a guest or a killed process may have left something."""
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    for name in ("receipt", "receipt.new"):
        (tmp_path / name).symlink_to(theirs)
    publish(PurePosixPath(tmp_path / "receipt"), b"ours")
    assert theirs.read_text() == "theirs"
    assert (tmp_path / "receipt").read_text() == "ours"
    assert not (tmp_path / "receipt").is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["receipt", "theirs"]
