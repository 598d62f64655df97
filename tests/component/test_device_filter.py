"""The device filter and the runner: when it is in the pod's cgroup, and what it does when there is no way back to float."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import PlacementError, RunnerError, explain
from runner.instance.parts.cgroups.controller import RegisteredCgroups
from runner.instance.parts.cgroups.entered import InForce
from runner.kernel.cgroup_fds import CgroupFds
from runner.kernel.files import Descriptor
from runner.placement.backends import ControllerPlacement
from runner.placement.threads import CgroupPaths
from runner.spec.instance import DiskSpec
from tests.support.fake_host import FakeHost, hotplug_of


@pytest.fixture
def pipes() -> Iterator[dict[str, tuple[int, int]]]:
    """Return both ends of pipes in the place of the control files: a write to one without a reader fails."""
    found = {name: os.pipe() for name in ("float", "pod")}
    yield found
    for ends in found.values():
        for fd in ends:
            os.close(fd)


@pytest.fixture
def registered(pipes: dict[str, tuple[int, int]]) -> RegisteredCgroups:
    pod, float_ = (Descriptor(pipes[name][1]) for name in ("pod", "float"))
    fds = CgroupFds(float_procs=float_, instance_threads=float_, pod_procs=pod, float_threads=float_)
    placement = ControllerPlacement(cpus=CpuSet([2]), pins=(2,), socket=PurePosixPath("/none"), pod_uid="pod")
    paths = CgroupPaths("/pod", "/float", "/instance")
    return RegisteredCgroups(paths, None, fds, InForce(placement), sealing=lambda: nullcontext(""))


def test_this_process_goes_to_the_pods_cgroup_and_back(
    registered: RegisteredCgroups, pipes: dict[str, tuple[int, int]]
) -> None:
    with registered.in_pod_cgroup():
        assert os.read(pipes["pod"][0], 9) == b"0\n"
        os.set_blocking(pipes["float"][0], False)
        with pytest.raises(BlockingIOError):
            os.read(pipes["float"][0], 9)
    assert os.read(pipes["float"][0], 9) == b"0\n"


def test_it_goes_back_after_an_error(registered: RegisteredCgroups, pipes: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(ZeroDivisionError), registered.in_pod_cgroup():
        raise ZeroDivisionError
    assert os.read(pipes["float"][0], 9) == b"0\n"


def test_without_a_way_back_it_is_an_error(
    registered: RegisteredCgroups, pipes: dict[str, tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    os.dup2(pipes["pod"][0], pipes["float"][1])  # a descriptor that is not open for writing
    with pytest.raises(PlacementError, match="cannot return to float") as raised, registered.in_pod_cgroup():
        pass
    assert "Bad file descriptor" in explain(raised.value)
    assert "this process is on the vCPUs' CPUs" in caplog.text


async def test_a_disk_that_is_a_device_is_opened_in_the_pods_cgroup(fake_host: FakeHost, tmp_path: Path) -> None:
    plan = fake_host.plan()
    (tmp_path / "file").write_bytes(bytes(4096))
    os.mknod(tmp_path / "device", stat.S_IFBLK | 0o600, os.makedev(7, (1 << 20) - 1))  # there is no such device
    entered = []

    @contextmanager
    def in_pod_cgroup() -> Iterator[None]:
        entered.append("entered")
        yield
        entered.append("left")

    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()  # no QEMU is asked
        hotplug = hotplug_of(plan, ours, in_pod_cgroup)
        with pytest.raises(RunnerError, match="hung up"):
            await hotplug.attach(DiskSpec(path=PurePosixPath(tmp_path / "file")))
        assert entered == []
        with pytest.raises(RunnerError, match="device"):
            await hotplug.attach(DiskSpec(path=PurePosixPath(tmp_path / "device")))
        assert entered[0] == "entered"
