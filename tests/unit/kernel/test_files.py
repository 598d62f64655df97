from __future__ import annotations

import fcntl
import os
from pathlib import Path, PurePosixPath

import pytest

from runner.errors import HostError, explain
from runner.facts.disk import DocumentFact
from runner.kernel.files import append, copied, copy_new, filled_memory, opened, read_document


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
