"""The list of mounts, whose names a pod chooses."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from runner.base.errors import HostError
from runner.facts.roots import Roots
from runner.kernel.cgroup_mounts import read_cgroup_mounts
from runner.kernel.mounts import Mount, read_mounts
from runner.kernel.shared_directories import shared_directories

ODD = (
    "a\u2028b",
    "c\x0cd",
    "e\x85f",
    "g\rh",
    "i\x1cj",
    "k\xa0l",
    "m - n",
    "o\tp",
    "q\nr",
    "s\\040t",
    "\udcff",
    "-",
    "#",
)


def escaped(name: str) -> str:
    """Return *name* as the kernel writes it (``mangle``, ``fs/seq_file.c``)."""
    return "".join(f"\\{ord(each):03o}" if each in " \t\n\\" else each for each in name)


@pytest.fixture(params=ODD, ids=ascii)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name: str = request.param
    path = f"/{escaped(name)}"
    (tmp_path / "self").mkdir()
    lines = (
        f"36 35 0:1 {path} {path} rw,noatime shared:1 master:2 - tmpfs  rw,mode=755\n",
        f"37 35 0:2 {path} /cgroup{path} rw - cgroup2 c rw,x\n",
    )
    (tmp_path / "self/mountinfo").write_bytes(os.fsencode("".join(lines)))
    return name


def test_a_name_may_have_any_character(tmp_path: Path, odd: str) -> None:
    path = PurePosixPath(f"/{odd}")
    assert read_mounts(tmp_path) == [
        Mount("0:1", path, path, "tmpfs", ("rw", "mode=755")),
        Mount("0:2", path, PurePosixPath(f"/cgroup/{odd}"), "cgroup2", ("rw", "x")),
    ]
    mounts = read_cgroup_mounts(tmp_path)
    assert (mounts.unified, mounts.options) == (f"/cgroup/{odd}", ("x",))
    assert path in shared_directories([PurePosixPath("/share")], Roots(proc=tmp_path)).mounts


def test_this_machines_mounts_are_read() -> None:
    assert PurePosixPath("/proc") in {each.point for each in read_mounts(Path("/proc")) if each.kind == "proc"}


def test_mounts_that_cannot_be_read_are_an_error_where_a_share_is_judged_by_them(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"^cannot read the mounts of this process"):
        shared_directories([PurePosixPath("/share")], Roots(proc=tmp_path))
    assert read_cgroup_mounts(tmp_path).unified is None
