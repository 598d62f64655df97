"""A renewed runner is in its cgroups already: it takes over the descriptors, asks the controller for nothing, and leaves as ever."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.facts.roots import Roots
from runner.instance.gate import StopRequest
from runner.instance.optional_parts import entered_cgroups
from runner.instance.parts.cgroups.controller import RegisteredCgroups
from runner.instance.parts.cgroups.entered import EnteredCgroups, InForce
from runner.instance.parts.cgroups.float import entered_float, is_frozen
from runner.instance.parts.daemons import restarted_child
from runner.instance.supervisor import Faults, Renewal, open_supervisor
from runner.kernel.cgroup_fds import CgroupFds
from runner.kernel.child_processes import Command
from runner.kernel.files import Descriptor, owned
from runner.kernel.procfs import Procfs
from runner.kernel.scheduler import read_mask
from runner.placement.backends import AffinityPlacement, ControllerPlacement, DelegatedPlacement
from runner.placement.threads import CgroupPaths

PATHS = CgroupPaths("/pod", "/stelia/instance-a/float", "/stelia/instance-a/vcpus")
FILES = ("float_procs", "instance_threads", "pod_procs", "float_threads")


def registered(placement: ControllerPlacement, numbers: list[int]) -> dict[str, Any]:
    """Return what a runner has held that has registered with the controller."""
    fds = CgroupFds(*map(Descriptor, numbers))
    return {"placement": placement, "registration": (PATHS, fds), "cgroups": PATHS}


async def test_registered_cgroups_are_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in FILES]
    renewal, faults = Renewal(), Faults()
    placement = ControllerPlacement(CpuSet([1]), (1,), PurePosixPath(tmp_path / "no-controller.sock"), "a")
    held = renewal.held
    async with (
        open_supervisor(StopRequest(), faults, renewal=renewal) as supervisor,
        restarted_child(supervisor, Command("anchor", ("sleep", "infinity")), "anchor 0") as anchor,
    ):
        held.found = {**registered(placement, numbers), "vCPU threads": {7, 8}, "seal": "the kernel is old"}
        async with entered_cgroups(supervisor, placement, [anchor]) as active:
            assert isinstance(active, RegisteredCgroups)
            assert active.cgroups == PATHS
            assert active.confined == {7, 8}
            assert anchor.command.entering == numbers[2]
            async with active.sealed() as reason:
                assert reason == "the kernel is old"
                assert held.read["seal"]() == "the kernel is old"
            active.confined.add(9)
            assert held.read["vCPU threads"]() == {7, 8, 9}
            assert [(tmp_path / name).read_text() for name in FILES] == [""] * 4
        assert held.found == {}
        assert (tmp_path / "pod_procs").read_text() == "0\n"
        assert anchor.command.entering is None
    assert faults.sentences == []
    assert "it will remove the instance's cgroup when it is back" in caplog.text
    for number in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


async def test_out_of_float_into_a_frozen_cgroup_no_process_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``podman pause``: this process would stop there for good, and so would the end of the instance."""
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod/cgroup.events").write_text("populated 1\nfrozen 0\n")
    numbers = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in FILES]
    renewal, faults = Renewal(), Faults()
    placement = ControllerPlacement(CpuSet([1]), (1,), PurePosixPath(tmp_path / "no-controller.sock"), "a")
    async with (
        open_supervisor(StopRequest(), faults, renewal=renewal, roots=Roots(cgroup=tmp_path)) as supervisor,
        restarted_child(supervisor, Command("anchor", ("sleep", "infinity")), "anchor 0") as anchor,
    ):
        renewal.held.found = {**registered(placement, numbers), "vCPU threads": set()}
        async with entered_cgroups(supervisor, placement, [anchor]):
            (tmp_path / "pod/cgroup.events").write_text("populated 1\nfrozen 1\n")
    assert faults.sentences == []
    assert (tmp_path / "pod_procs").read_text() == ""
    assert "the container's cgroup is frozen: what is in float ends there cgroup=/pod" in caplog.text
    assert "it will remove the instance's cgroup when it is back" not in caplog.text, (
        "it is not asked: float is populated"
    )


@pytest.fixture
def real_group(tmp_path: Path) -> Iterator[Path]:
    """Yield the directory of a real cgroup of version 2."""
    mounted = tmp_path / "cgroupfs"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "cgroup2", "none", mounted], check=True)
    group = mounted / f"anchors-{os.getpid()}"
    group.mkdir()
    yield group
    group.rmdir()
    subprocess.run(["umount", mounted], check=True)


async def test_a_container_without_cgroupfs_is_seen_to_be_frozen_at_its_anchors(real_group: Path) -> None:
    async with (
        open_supervisor(StopRequest(), Faults()) as supervisor,
        restarted_child(supervisor, Command("anchor", ("sleep", "infinity")), "anchor 0") as anchor,
    ):
        (real_group / "cgroup.procs").write_text(str(anchor.process.pid))
        for frozen in (False, True, False):
            (real_group / "cgroup.freeze").write_text(str(int(frozen)))
            while f"frozen {frozen:d}" not in (real_group / "cgroup.events").read_text():
                await trio.sleep(0.005)
            assert is_frozen("/nowhere", supervisor, [anchor]) is frozen


async def test_the_containers_own_cgroup_is_taken_over(tmp_path: Path) -> None:
    """Nothing of the tree is written to; at the end it is removed, and the controllers are those of before the first start."""
    scope = tmp_path / "pod"
    for name in ("float", "instance"):
        (scope / name).mkdir(parents=True)
    control = scope / "cgroup.subtree_control"
    control.write_text("cpu cpuset\n")
    numbers = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in FILES]
    paths = CgroupPaths("/pod", "/pod/float", "/pod/instance")
    placement = DelegatedPlacement(CpuSet([1]), (1,), CpuSet([0]), shared=False)
    found = {
        "pod's cgroup": "/pod",
        "controllers": frozenset({"cpu"}),
        "placement": placement,
        "cgroups made": None,
        "cgroup descriptors": CgroupFds(*map(Descriptor, numbers)),
        "vCPU threads": {7},
        "cgroups": paths,
    }
    renewal, faults = Renewal(), Faults()
    async with (
        open_supervisor(StopRequest(), faults, renewal=renewal, roots=Roots(cgroup=tmp_path)) as supervisor,
        restarted_child(supervisor, Command("anchor", ("sleep", "infinity")), "anchor 0") as anchor,
    ):
        held = renewal.held
        held.found = dict(found)
        async with entered_cgroups(supervisor, placement, [anchor]) as active:
            assert active.cgroups == paths
            assert {name: held.read[name]() for name in found} == found
            assert [(tmp_path / name).read_text() for name in FILES] == [""] * 4
            assert control.read_text() == "cpu cpuset\n"
        assert held.found == {}
    assert faults.sentences == []
    assert (tmp_path / "pod_procs").read_text() == "0\n"
    assert sorted(each.name for each in scope.iterdir()) == ["cgroup.subtree_control"]
    assert control.read_text().startswith("-cpuset\n")


async def test_the_mask_of_before_the_start_is_given_back() -> None:
    """The new program's own mask is float's already; that of before goes over."""
    before = read_mask()
    renewal, faults = Renewal(), Faults()
    other = CpuSet([min(before)])
    try:
        os.sched_setaffinity(0, set(other))
        placement = AffinityPlacement(CpuSet(set(before) - set(other)), (), other, shared=False)
        async with (
            open_supervisor(StopRequest(), faults, renewal=renewal) as supervisor,
        ):
            held = renewal.held
            held.found = {"mask": before, "in float": None, "vCPU threads": set(), "placement": placement}
            async with entered_cgroups(supervisor, placement, ()):
                assert read_mask() == other
                assert held.read["mask"]() == before
        assert read_mask() == before
    finally:
        os.sched_setaffinity(0, set(before))


async def test_a_cpu_mask_of_before_the_start_is_lifted_in_float(tmp_path: Path) -> None:
    """What is started from then on has float's CPUs, and the anchors have the container's."""
    cpus = read_mask()
    [one, *_] = cpus
    scope = tmp_path / "pod"
    scope.mkdir()
    placement = DelegatedPlacement(CpuSet(), (), cpus, shared=True, sweep=False)
    numbers = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in FILES]
    with ExitStack() as held:
        fds = CgroupFds(*(held.enter_context(owned(number)) for number in numbers))
        own = Procfs().cgroup().rpartition("/")[2]  # this process is in its float already
        cgroups = EnteredCgroups(CgroupPaths("/pod", own, "instance"), None, fds, InForce(placement))
        try:
            os.sched_setaffinity(0, {one})
            async with (
                open_supervisor(StopRequest(), Faults()) as supervisor,
                restarted_child(supervisor, Command("anchor", ("sleep", "infinity")), "anchor 0") as anchor,
            ):
                assert read_mask(anchor.process.pid) == CpuSet([one])
                async with entered_float(supervisor, [anchor], cgroups):
                    assert read_mask() == cpus
                    assert read_mask(anchor.process.pid) == cpus
        finally:
            os.sched_setaffinity(0, set(cpus))
