"""Cgroups over ordinary directories: the part that needs no kernel support. The rest is in tests/node."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.controller.tree.pods import PodCgroups
from runner.kernel.cgroup import Cgroup, CgroupError, write_control
from runner.kernel.procfs import Procfs
from runner.kubelet.pod_cgroups import pod_groups
from tests.support.fake_node import A


@pytest.fixture
def group(tmp_path: Path) -> Cgroup:
    for file in ("cgroup.procs", "cgroup.threads", "cpuset.cpus"):
        (tmp_path / file).touch()
    return Cgroup(tmp_path)


def test_writes_one_line_and_clears_with_a_line_end(group: Cgroup) -> None:
    group.write("cpuset.cpus", "0-3")
    assert (group.path / "cpuset.cpus").read_bytes() == b"0-3\n"
    (group.path / "cpuset.cpus").write_bytes(b"")
    group.write("cpuset.cpus", "")
    assert (group.path / "cpuset.cpus").read_bytes() == b"\n"


def test_never_makes_a_control_file(group: Cgroup) -> None:
    with pytest.raises(CgroupError, match=r"cannot open .*cpuset\.cpu$") as caught:
        group.write("cpuset.cpu", "0-3")
    assert caught.value.errno == errno.ENOENT
    assert not (group.path / "cpuset.cpu").exists()


def test_descriptors_are_for_writing_and_closed_on_exec(group: Cgroup) -> None:
    fd = group.open("cgroup.procs")
    try:
        assert not os.get_inheritable(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.read(fd, 1)
        write_control(fd, "0", "cgroup.procs")
    finally:
        os.close(fd)
    assert (group.path / "cgroup.procs").read_bytes() == b"0\n"


def test_admits_processes_and_confines_threads(group: Cgroup) -> None:
    group.admit(12)
    group.confine(34)
    assert group.processes() == {12}
    assert group.threads() == {34}


def test_creating_and_removing_are_idempotent(group: Cgroup) -> None:
    child = group.child("float")
    child.create()
    child.create()
    assert group.children() == ("float",)
    assert child.parent == group
    assert child.remove()
    assert child.remove()
    assert not child.exists()


def test_creating_without_a_parent_says_what_is_missing(group: Cgroup) -> None:
    with pytest.raises(CgroupError, match="there is no such cgroup"):
        group.child("a").child("b").create()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\0"])
def test_a_child_has_a_plain_name(group: Cgroup, name: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        group.child(name)


@pytest.mark.parametrize("path", ["", "kubepods", "/../../other", "/a/../b"])
def test_a_path_of_proc_stays_in_the_namespace(group: Cgroup, path: str) -> None:
    with pytest.raises(ValueError, match="not a group"):
        group.at(path)
    assert group.at("/a/b").path == group.path / "a" / "b"
    assert group.at("/").path == group.path


def test_only_populated_one_means_members(group: Cgroup) -> None:
    for text, populated in (("populated 1\nfrozen 0\n", True), ("populated 0\nfrozen 1\n", False)):
        (group.path / "cgroup.events").write_text(text)
        assert group.populated() is populated


def test_a_malformed_cpuset_is_an_error_that_names_the_file(group: Cgroup) -> None:
    (group.path / "cpuset.cpus").write_text("0-\n")
    with pytest.raises(CgroupError, match=r"cpuset\.cpus: '0-' .*neither a CPU number nor a range"):
        group.cpus()
    (group.path / "cpuset.cpus").write_text("0-2\n")
    assert group.cpus() == CpuSet([0, 1, 2])


def test_errors_explain_the_kernels_error_numbers(group: Cgroup) -> None:
    read_only = os.open(group.path / "cgroup.threads", os.O_RDONLY)
    try:
        with pytest.raises(CgroupError, match=r"cannot write '7' to x/cgroup\.threads") as caught:
            write_control(read_only, "7", "x/cgroup.threads")
    finally:
        os.close(read_only)
    assert caught.value.errno == errno.EBADF


def test_a_container_with_many_groups_hides_no_process_of_another_one(tmp_path: Path) -> None:
    pod = tmp_path / pod_groups(A)[0]
    for number in range(10):
        for inner in range(256 if number else 1):
            (pod / f"cri-containerd-{number:064x}.scope" / str(inner)).mkdir(parents=True)
    (pod / f"cri-containerd-{0:064x}.scope" / "cgroup.procs").write_text("7\n")
    found = PodCgroups(Cgroup(tmp_path), Procfs(tmp_path), kubelet=True).processes(A)
    assert [each.pid for each in found] == [7]
