"""What a start learns from programs that it runs."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path, PurePosixPath

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, RefusedError, explain
from runner.facts.host import User
from runner.facts.roots import Roots
from runner.host.facts_reader import find_virtiofsd, read_allowed_cpus, read_host_facts, version_output
from runner.host.own_pod import _undelegated
from runner.kernel import preallocate
from runner.kernel.cgroup import Cgroup
from runner.kernel.child_processes import open_processes
from runner.spec.instance import parse_instance


@pytest.fixture
def virtiofsd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a virtiofsd that is found first, and cannot be started: its interpreter is missing."""
    path = tmp_path / "virtiofsd"
    path.write_text("#!/none\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return path


async def test_a_program_that_cannot_be_started_is_as_good_as_none(virtiofsd: Path) -> None:
    async with open_processes() as processes:
        found, reason = await find_virtiofsd(processes)
    assert (found, reason) == (
        None,
        f"cannot start virtiofsd-version ({str(virtiofsd)!r}): No such file or directory",
    )


@pytest.mark.usefixtures("virtiofsd")
async def test_a_shortage_is_not_blamed_on_the_program() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with open_processes() as processes:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(HostError) as caught:
                await find_virtiofsd(processes)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files; this process may have 0 files open" in explain(caught.value)


@pytest.mark.parametrize(
    ("mask", "given", "effective", "allowed"),
    [
        ("4-7", "4-7", "4-7", "4-7"),
        ("0-1", "4-7", "0-1", "4-7"),  # a partition has all of them, so that the kernel shows the parent's
        ("6-7", "4-7", "6-7", "4-7"),  # a partition has some of them
        ("6", "4-7", "6-7", "6"),  # this process was pinned
        ("0-7", "", "0-7", "0-7"),
        ("4-7", "4-7,9", "4-7", "4-7"),  # CPU 9 is not online
        ("0-1", None, None, "0-1"),  # no cgroup can be seen
    ],
)
def test_cpus_that_a_partition_still_has_are_this_containers_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str, given: str | None, effective: str | None, allowed: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(CpuSet.parse(mask)))
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-7\n")
    for file, content in (("cpuset.cpus", given), ("cpuset.cpus.effective", effective)):
        if content is not None:
            (tmp_path / file).write_text(f"{content}\n")
    assert read_allowed_cpus(Cgroup(tmp_path), Roots(sys=tmp_path / "sys")) == CpuSet.parse(allowed)


async def test_a_program_is_asked_for_its_version_by_the_user_that_will_run_it() -> None:
    """Another QEMU, named by an operator, is code that nobody has confined yet."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # others than root may execute what is there
        program = Path(directory) / "qemu"
        program.write_text("#!/bin/sh\necho user $(id -u) $(grep CapEff /proc/self/status)\n")
        program.chmod(0o755)
        async with open_processes() as processes:
            output, error = await version_output(
                processes, "qemu", PurePosixPath(program), User("nobody", 65534, 65534)
            )
    assert (output.split(), error) == (["user", "65534", "CapEff:", "0000000000000000"], "")


@pytest.mark.parametrize("name", ["virtiofsd", "qemu-system-x86_64"])
async def test_a_program_that_the_guest_may_change_is_refused_before_it_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    program = tmp_path / "share" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    spec = parse_instance(
        "spec", f'[boot]\nkernel = "/none"\n[[share]]\ntag = "a"\npath = "{program.parent}"\n'.encode()
    )
    async with open_processes() as processes:
        with pytest.raises(RefusedError, match=rf"cannot use '{program}': the guest may change it by the share"):
            await read_host_facts(spec, processes, Roots(), PurePosixPath(tmp_path / "state"), None)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("directory", [Path(preallocate.__file__).parents[1], Path(preallocate.__file__).parents[2]])
async def test_a_share_in_which_this_program_is_installed_is_refused(tmp_path: Path, directory: Path) -> None:
    spec = parse_instance("spec", f'[boot]\nkernel = "/none"\n[[share]]\ntag = "a"\npath = "{directory}"\n'.encode())
    async with open_processes() as processes:
        with pytest.raises(RefusedError, match=f"the guest may change it by the share '{directory}'"):
            await read_host_facts(spec, processes, Roots(), PurePosixPath(tmp_path / "state"), None)


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("cgroup.subtree_control", "cpuset pids", None),
        ("cgroup.type", "domain threaded", None),
        ("cgroup.type", None, "{} is not a container's cgroup"),
        ("cgroup.subtree_control", None, "{} may not be written; a privileged container's may"),
        ("cgroup.controllers", "memory pids", "{} has no cpuset controller"),
        ("cgroup.type", "threaded", "{} is 'threaded'"),
        ("cgroup.procs", "0\n7", "processes of others are in {}"),
        ("cgroup.subtree_control", "cpuset io memory", "{} hands down io, memory"),
    ],
)
def test_what_keeps_a_container_from_dividing_its_cgroup(
    tmp_path: Path, file: str, content: str | None, error: str | None
) -> None:
    files = {"cgroup.type": "domain", "cgroup.subtree_control": "", "cgroup.controllers": "cpuset", "cgroup.procs": "7"}
    for name, text in {**files, file: content}.items():
        if text is not None:
            (tmp_path / name).write_text(f"{text}\n")
    assert _undelegated(Cgroup(tmp_path)) == (error and error.format(tmp_path))
