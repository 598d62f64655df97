"""Which tmpfs mounts of a process are looked at: none behind a file system that a process may serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.kernel.shared_memory import SharedMemory

ROW = "{number} 1 0:{number} / {point} rw - {kind} none rw\n"


def mounts(tmp_path: Path, *rows: tuple[str, str]) -> SharedMemory:
    (tmp_path / "7").mkdir(exist_ok=True)
    lines = (ROW.format(number=number, point=point, kind=kind) for number, (kind, point) in enumerate(rows, start=40))
    (tmp_path / "7/mountinfo").write_text("".join(lines))
    return SharedMemory(tmp_path, 1, 1)


@pytest.mark.parametrize(
    ("wall", "point", "reachable"),
    [
        ("/a", "/a/b", False),
        ("/a", "/a", False),
        ("/a/b", "/a/b/c/d", False),
        ("/a", "/ab", True),
        ("/a/b", "/a", True),
        ("/", "/a", False),
    ],
)
def test_the_way_to_a_tmpfs_leads_through_no_fuse(tmp_path: Path, wall: str, point: str, *, reachable: bool) -> None:
    found = mounts(tmp_path, ("fuse.x", wall), ("tmpfs", point)).mounts(7, None)[0]
    assert [(mount.point, mount.reachable) for mount in found] == [(point, reachable)]


def test_a_list_of_very_many_mounts_is_not_read(tmp_path: Path) -> None:
    memory = mounts(tmp_path, *(("tmpfs", f"/mnt/{number}") for number in range(100)))
    assert len(memory.mounts(7, None)[0]) == 100
    assert len(memory.mounts(7, 1 << 20)[0]) == 100
    assert memory.mounts(7, 100) == ((), 101)


def test_only_so_many_mapped_files_are_remembered(tmp_path: Path) -> None:
    memory = mounts(tmp_path)
    lines = (f"{at:x}000-{at + 1:x}000 rw-s 00000000 00:01 {at % 8 + 1} /memfd:x (deleted)\n" for at in range(16))
    (tmp_path / "7/maps").write_text("".join(lines))
    assert len(memory.mappings(7, frozenset(), 100)) == 8
    assert set(memory.mappings(7, frozenset(), 3).values()) == {8192}
