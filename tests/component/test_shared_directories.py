"""Which paths lead through a directory that the guest may write to, by links and by mounts of this kernel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from runner.facts.roots import Roots
from runner.kernel.shared_directories import followed, may_have, shared_directories


@pytest.fixture
def share(tmp_path: Path) -> Path:
    for name in ("share/sub", "elsewhere", "shared"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "share/sub/kernel").touch()
    (tmp_path / "elsewhere/kernel").touch()
    return tmp_path / "share"


def holding(share: Path, path: Path) -> bool:
    directories = shared_directories([PurePosixPath(share)], Roots())
    return directories.holding(PurePosixPath(path)) == PurePosixPath(share)


def test_a_path_leads_through_a_share_by_its_name_and_by_links(share: Path, tmp_path: Path) -> None:
    assert holding(share, share / "sub/kernel")
    assert holding(share, share / "none/at/all")
    assert holding(share, share)
    assert not holding(share, tmp_path / "elsewhere/kernel")
    assert not holding(share, tmp_path / "shared/kernel"), "its name only begins alike"
    (tmp_path / "in").symlink_to("share/sub")
    (share / "out").symlink_to("../elsewhere")
    (tmp_path / "round").symlink_to("round")
    assert holding(share, tmp_path / "in/kernel")
    assert holding(share, share / "out/kernel"), "the guest may change where it leads"
    assert holding(tmp_path / "in", share / "sub/kernel"), "the share's own path is a link"
    assert not holding(share, tmp_path / "round/kernel")


def test_a_file_that_has_a_hard_link_in_a_share_lies_there(share: Path, tmp_path: Path) -> None:
    ours = tmp_path / "elsewhere/kernel"
    (tmp_path / "shared/backup").hardlink_to(ours)
    assert not holding(share, ours), "its other name is elsewhere"
    (share / "sub/deeper").mkdir()
    (share / "sub/deeper/its-other-name").hardlink_to(ours)
    assert holding(share, ours)
    (tmp_path / "link").symlink_to(ours)
    assert holding(share, tmp_path / "link")
    assert not holding(share, tmp_path / "shared"), "a directory has as many links as it has directories"


def test_a_hard_link_in_a_share_that_is_too_large_to_be_looked_through_cannot_be_ruled_out(
    share: Path, tmp_path: Path
) -> None:
    ours = tmp_path / "elsewhere/kernel"
    (tmp_path / "shared/backup").hardlink_to(ours)
    found = ours.stat()
    assert not may_have(str(share), found)
    assert may_have(str(share), found, most=1)


@pytest.fixture
def mounted(share: Path, tmp_path: Path) -> Iterator[Path]:
    """Mount a directory of the share at another place, and another file system in the share and at a second place."""
    points = [tmp_path / "second", share / "volume", tmp_path / "volume"]
    for point in points:
        point.mkdir()
    subprocess.run(["mount", "--bind", share / "sub", points[0]], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", points[1]], check=True)
    subprocess.run(["mount", "--bind", points[1], points[2]], check=True)
    yield tmp_path
    for point in reversed(points):
        subprocess.run(["umount", point], check=True)


def test_a_second_mount_of_a_directory_of_a_share_is_the_share(share: Path, mounted: Path) -> None:
    assert holding(share, mounted / "second/kernel")
    assert holding(share, mounted / "volume/kernel"), "virtiofsd shows the guest what is mounted below"
    assert not holding(share, mounted / "elsewhere/kernel")
    assert holding(mounted / "second", share / "sub/kernel")
    assert not holding(mounted / "second", share / "kernel")


def leading_to(share: Path, path: Path) -> bool:
    directories = shared_directories([PurePosixPath(share)], Roots())
    return directories.leading_to(PurePosixPath(path)) == PurePosixPath(share)


def test_a_directory_in_a_share_may_become_a_link(share: Path, tmp_path: Path) -> None:
    assert leading_to(share, share / "sub")
    assert leading_to(share, share / "sub/deeper")
    assert not leading_to(share, share), "the guest does not see the directory in which its share has a name"
    assert not leading_to(share, tmp_path / "elsewhere")
    (tmp_path / "in").symlink_to("share/sub")
    (share / "out").symlink_to("../elsewhere")
    assert leading_to(share, tmp_path / "in")
    assert leading_to(share, share / "out")


def test_the_users_of_links_on_the_way_are_known(share: Path, tmp_path: Path) -> None:
    (tmp_path / "in").symlink_to("share/deeper")
    (share / "deeper").symlink_to("sub")
    os.lchown(share / "deeper", 64055, 64055)
    assert followed(PurePosixPath(tmp_path / "in/kernel")).link_owners == {os.geteuid(), 64055}
    assert followed(PurePosixPath(share / "sub/kernel")).link_owners == frozenset()


def test_a_path_is_followed_to_the_place_without_links(share: Path, tmp_path: Path) -> None:
    (tmp_path / "in").symlink_to("share/deeper/../sub")
    (share / "deeper").symlink_to(tmp_path / "share/sub")
    (tmp_path / "round").symlink_to("round")
    for path in ("in/kernel", "in/none/at/all", "elsewhere/../in", "none"):
        assert followed(PurePosixPath(tmp_path / path)).place == PurePosixPath(os.path.realpath(tmp_path / path)), path
    assert followed(PurePosixPath(tmp_path / "round")).link_owners == {os.geteuid()}


def test_what_is_mounted_in_a_share_stays_there(share: Path, mounted: Path) -> None:
    assert not leading_to(share, share / "volume"), "its name is a mount point"
    with pytest.raises(OSError, match="busy"):
        (share / "volume").rename(share / "moved")
    assert not leading_to(share, mounted / "second"), "the same directory as in the share, by a name beside it"
    (share / "volume/below").mkdir()
    assert leading_to(share, share / "volume/below"), "virtiofsd shows the guest what is mounted below"
