"""The guest's memory is preallocated before QEMU starts, by a program that can be stopped, can fail and be killed."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path, PurePosixPath

import attrs
import pytest
import trio

from runner.base.errors import RunnerError, Status, explain
from runner.host.facts_reader import PREALLOCATOR
from runner.instance.parts.qemu import GuestEnd
from runner.instance.supervisor import Supervisor
from runner.kernel import files
from runner.kernel.preallocate import NO_MEMORY, NO_THREADS, NOT_BOUND
from runner.spec.instance import DiskSpec
from tests.support.fake_host import FakeHost, hotplug_of

MIB = 1 << 20
PREALLOC = '[memory]\nprealloc = true\nsize = "64MiB"\n'


async def test_memory_is_preallocated_before_qemu_starts(fake_host: FakeHost) -> None:
    plan = fake_host.plan(PREALLOC, qemu={"at_cont": "shutdown"})
    before = fake_host.snapshot()
    ended = await fake_host.run(plan)
    assert isinstance(ended, GuestEnd), explain(ended)
    [taker], [qemu] = fake_host.records("preallocator", "start"), fake_host.records("qemu", "start")
    lines = fake_host.log_file.read_text().splitlines()
    assert lines.index(next(line for line in lines if "preallocator" in line)) < lines.index(
        next(line for line in lines if '"fake": "qemu"' in line)
    )
    ram, *rest = taker["argv"][2].split(":")
    assert rest[:3] == [str(64 * MIB), "0", ""]
    assert taker["fds"] == [0, 1, 2, int(ram)]
    assert any(f"mem-path=/proc/self/fd/{ram}," in word for word in qemu["argv"])
    assert "the guest's memory is there size=64MiB" in fake_host.logged()
    assert fake_host.snapshot() == before


async def test_a_request_to_stop_ends_preallocation_at_once(fake_host: FakeHost) -> None:
    plan = fake_host.plan(PREALLOC, preallocator={"does": "hang"})
    before = fake_host.snapshot()

    async def stop(_host: Supervisor) -> None:
        while not fake_host.records("preallocator", "start"):
            await trio.sleep(0.005)
        fake_host.stop.ask("SIGTERM")

    with trio.fail_after(60):
        ended = await fake_host.run(plan, meanwhile=stop)
    assert ended == GuestEnd(Status.STOPPED, "asked to stop before the guest ran")
    assert fake_host.records("qemu", "start") == []
    assert fake_host.faults.sentences == []
    assert fake_host.snapshot() == before


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        (
            {"does": "fail"},
            "cannot preallocate the guest's memory: nothing is left; raise the pod's limits of memory and huge pages",
        ),
        (
            {"does": "fail", "output": "cannot bind memory to NUMA nodes (mbind): not permitted", "status": NOT_BOUND},
            "not permitted; let the container's seccomp profile allow mbind(2)",
        ),
        (
            {
                "does": "fail",
                "output": "cannot start 4 threads: Resource temporarily unavailable",
                "status": NO_THREADS,
            },
            "cannot start 4 threads: Resource temporarily unavailable",
        ),
        ({"does": "fail", "output": "Traceback (mbind)", "status": 1}, "the preallocator exited with status 1, saying"),
        (
            {"does": "die"},
            "the preallocator was killed, as the kernel does when a cgroup is over memory.max; raise the pod's limits",
        ),
    ],
)
async def test_failed_preallocation_is_a_failed_start(
    fake_host: FakeHost, behaviour: dict[str, object], sentence: str
) -> None:
    plan = fake_host.plan(PREALLOC, preallocator=behaviour)
    before = fake_host.snapshot()
    ended = await fake_host.run(plan)
    assert isinstance(ended, RunnerError)
    assert sentence in explain(ended)
    assert fake_host.records("qemu", "start") == []
    assert fake_host.snapshot() == before


async def test_preallocation_has_a_timeout(fake_host: FakeHost) -> None:
    plan = attrs.evolve(fake_host.plan(PREALLOC, preallocator={"does": "hang"}), start_timeout=0.5)
    ended = await fake_host.run(plan)
    assert isinstance(ended, RunnerError)
    assert "it takes more than 0.5 s, and its last output was 'nothing'" in explain(ended)


def taken(*words: str, descriptors: tuple[int, ...], every: str = "1") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-IS", str(PREALLOCATOR), every, *words]
    return subprocess.run(argv, pass_fds=descriptors, capture_output=True, text=True, check=False)


def test_every_page_is_preallocated_and_zero() -> None:
    with files.memory("one", 70 * MIB) as one, files.memory("two", 33 * MIB) as two:
        done = taken(f"{one}:{70 * MIB}:0:0:0-1:3", f"{two}:{33 * MIB}:0::9999:1", descriptors=(one, two))
        assert (done.returncode, done.stderr) == (0, "")
        for descriptor, size in ((one, 70 * MIB), (two, 33 * MIB)):
            assert os.fstat(descriptor).st_blocks * 512 == size
            with mmap.mmap(descriptor, size) as seen:
                assert seen[-1] == 0


def test_progress_is_reported_repeatedly() -> None:
    with files.memory("big", 256 * MIB) as big:
        done = taken(f"{big}:{256 * MIB}:0::0:1", descriptors=(big,), every="0.005")
    assert done.returncode == 0
    progress = [int(line.partition(" of 256 MiB taken, ")[0]) for line in done.stdout.splitlines()]
    assert len(progress) >= 2
    assert progress == sorted(progress)


def test_threads_that_cannot_be_started_are_the_reason() -> None:
    """The stack of one is larger than all that the process may have (``RLIMIT_STACK``, ``RLIMIT_AS``)."""
    limited = ["prlimit", f"--as={1 << 29}", f"--stack={1 << 30}", sys.executable, "-IS", str(PREALLOCATOR), "60"]
    with files.memory("some", MIB) as some:
        argv = [*limited, f"{some}:{MIB}:0::0:4"]
        done = subprocess.run(argv, pass_fds=[some], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (NO_THREADS, "")
    assert done.stdout == "cannot start 4 threads: Resource temporarily unavailable\n"


def test_a_refusal_by_the_kernel_is_reported_with_the_numbers() -> None:
    pool = Path("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages")
    if not pool.exists() or int(pool.read_text()):
        pytest.skip("a kernel that has huge pages of 1 GiB, and none free, is missing")
    with files.owned(files.create_memory("huge", 1 << 30, 1 << 30)) as huge:
        done = taken(f"{huge.number}:{1 << 30}:{1 << 30}::0:1", descriptors=(huge.number,))
    assert (done.returncode, done.stdout) == (
        NO_MEMORY,
        "cannot map 1024 MiB in pages of 1024 MiB: Cannot allocate memory\n",
    )


async def test_qemus_limit_of_locked_memory_is_raised_where_something_is_locked(fake_host: FakeHost) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, hard))
    try:
        for lock in (False, True):
            plan = fake_host.plan(f"[memory]\nlock = {str(lock).lower()}\n", qemu={"at_cont": "shutdown"})
            await fake_host.run(plan)
            limit = fake_host.records("qemu", "start")[-1]["lockable"]
            assert (limit == 1 << 16) is not lock
            assert not lock or limit in {-1, hard}
        assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (1 << 16, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


async def test_a_disk_attached_later_brings_no_threads_where_memory_is_locked(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    (tmp_path / "disk").write_bytes(bytes(4096))
    disk = DiskSpec(path=PurePosixPath(tmp_path / "disk"), iothread=True)
    for lock in (False, True):
        plan = fake_host.plan(f"[memory]\nlock = {str(lock).lower()}\n")
        ours, theirs = socket.socketpair()
        with ours:
            theirs.close()  # no QEMU is asked before it is refused
            hotplug = hotplug_of(plan, ours)
            with pytest.raises(RunnerError) as raised:
                await hotplug.attach(disk)
            assert ("disk.iothread: must be false: with memory.lock" in explain(raised.value)) is lock
