"""Children, orphans and their reaper."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import pytest
import trio

from runner.base.errors import HostError, doing, explained
from runner.base.values import Fd
from runner.instance.parts.cgroups.entered import OUT_OF_MEMORY, OomKills
from runner.kernel.child_processes import (
    LONGEST_LINE,
    Command,
    ProcessRecord,
    _state,
    more_likely_to_be_killed,
    open_processes,
    signal_name,
)
from runner.kernel.leases import END_LEASE, LEASED, read_at_once
from runner.kernel.limits import own_groups
from tests.support.leases import leasing


def shell(text: str, role: str = "test") -> Command:
    return Command(role, ("/bin/sh", "-c", text))


async def test_statuses() -> None:
    async with open_processes() as processes:
        assert await processes.spawn(shell("exit 7")).wait() == 7
        assert await processes.spawn(shell("kill -KILL $$")).wait() == -signal.SIGKILL
        process = processes.spawn(shell("echo; echo one; echo two; exit 1"))
        await process.wait()
        assert process.how_it_ended() == "exited with status 1, saying 'two'"
        assert list(process.last_lines) == ["one", "two"]


async def test_a_child_that_the_kernel_has_killed_for_want_of_memory_is_told_from_others(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\nmax 3\noom_kill 1\noom_group_kill 0\n")
    with events.open() as file:
        async with open_processes() as processes:
            processes.out_of_memory = OomKills(file.fileno(), processes.out_of_memory).kills
            before = processes.spawn(shell("kill -KILL $$"))
            await before.wait()
            assert before.how_it_ended() == "was killed by SIGKILL"
            process = processes.spawn(shell("echo one; read -r _ </dev/zero"))
            events.write_text("low 0\nmax 3\noom_kill 2\noom_group_kill 0\n")
            process.send_signal(signal.SIGKILL)
            await process.wait()
            assert process.how_it_ended() == f"was killed by the kernel: {OUT_OF_MEMORY}"
            exited = processes.spawn(shell("exit 9"))
            events.write_text("low 0\nmax 3\noom_kill 3\noom_group_kill 0\n")
            await exited.wait()
            assert exited.how_it_ended() == "exited with status 9"


async def test_children_are_killed_before_this_process_when_memory_is_short(tmp_path: Path) -> None:
    own = int(Path("/proc/self/oom_score_adj").read_text())
    found = tmp_path / "found"
    async with open_processes() as processes:
        for more in (0, 150, 5000):
            processes.oom_score = more
            assert await processes.spawn(shell(f"cat /proc/self/oom_score_adj >{found}")).wait() == 0
            assert int(found.read_text()) == min(own + more, 1000)
            assert int(Path("/proc/self/oom_score_adj").read_text()) == own
    with more_likely_to_be_killed(150):
        assert int(Path("/proc/self/oom_score_adj").read_text()) == own + 150


async def test_each_of_many_children_gets_its_own_status() -> None:
    """Orphans end at the same instants; no status is lost and none reads 0 that is not."""
    async with open_processes() as processes:
        wrong: list[tuple[int, int]] = []

        async def one(number: int) -> None:
            process = processes.spawn(shell(f"(exit 0) & (sleep 0.0{number % 3}) & exit {number}"))
            status = await process.wait()
            if status != number:
                wrong.append((number, status))

        async with trio.open_nursery() as nursery:
            for number in range(1, 101):
                nursery.start_soon(one, number)
        assert wrong == []
        with trio.fail_after(60):
            while processes.orphans < 100:
                await trio.sleep(0.01)


async def test_a_storm_of_orphans_does_not_delay_other_tasks() -> None:
    """Two thousand orphans end at once: a timer is hardly late, and all are reaped."""
    storm = "import os\nfor _ in range(2000):\n    if os.fork() == 0:\n        os.read(0, 1)\n        os._exit(1)\nos._exit(0)"
    reading, writing = os.pipe()
    async with open_processes() as processes:
        maker = processes.spawn(
            Command(
                "storm", (sys.executable, "-IS", "-c", storm.replace("os.read(0", f"os.read({reading}")), (reading,)
            )
        )
        os.close(reading)
        assert await maker.wait() == 0
        os.close(writing)
        with trio.fail_after(30):
            while processes.orphans < 2000:
                assert await processes.spawn(shell("exit 3")).wait() == 3


async def test_stop_sends_sigterm_first_and_sigkill_later() -> None:
    async with open_processes() as processes:
        handling = processes.spawn(shell("trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done"))
        ignoring = processes.spawn(shell("trap '' TERM; echo ready; while :; do sleep 0.01; done"))
        for process in (handling, ignoring):
            while not process.last_lines:
                await trio.sleep(0.005)
        await processes.stop(handling, 5)
        await processes.stop(ignoring, 0.05)
        assert (handling.returncode, ignoring.returncode) == (5, -signal.SIGKILL)
        await processes.stop(handling, 5)  # it has ended: stop has no effect


async def test_a_stopped_process_gets_the_sigterm() -> None:
    async with open_processes() as processes:
        process = processes.spawn(shell("echo ready; exec sleep 100"))
        while not process.last_lines:
            await trio.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        await processes.stop(process, 5)
        assert process.returncode == -signal.SIGTERM, "not SIGKILL, which comes after 5 s"


async def test_releases_work_although_everything_is_cancelled() -> None:
    process = None
    with trio.CancelScope() as scope:
        async with open_processes() as processes, processes.daemon(shell("exec sleep 100"), 5) as process:
            scope.cancel()
            await trio.sleep_forever()
    assert process is not None
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(("program", "reason"), [("/none", "No such file"), ("/etc/passwd", "Permission denied")])
async def test_a_program_that_cannot_be_started(program: str, reason: str) -> None:
    before = sorted(entry.name for entry in Path("/proc/self/fd").iterdir())
    async with open_processes() as processes:
        with pytest.raises(HostError, match=f"cannot start test \\('{program}'\\)") as caught:
            processes.spawn(Command("test", (program,)))
        assert reason in str(caught.value.__cause__)
    assert sorted(entry.name for entry in Path("/proc/self/fd").iterdir()) == before


async def test_a_child_gets_a_user_and_nothing_else_of_ours() -> None:
    reading, writing = os.pipe()
    os.environ["OF_OURS"] = "x"
    try:
        async with open_processes() as processes:
            text = "id -u; id -g; id -G; pwd; echo secret=$OF_OURS; ls /proc/self/fd | tr '\\n' ' '"
            command = Command("test", ("/bin/sh", "-c", text), (writing,), 65534, 65533, (4242,))
            process = processes.spawn(command)
            await process.wait()
    finally:
        del os.environ["OF_OURS"]
        os.close(reading)
        os.close(writing)
    uid, gid, groups, directory, secret, numbers = list(process.last_lines)[:6]
    assert (uid, gid, sorted(groups.split()), directory, secret) == (
        "65534",
        "65533",
        ["4242", "65533"],
        "/",
        "secret=",
    )
    assert set(numbers.split()) - {"3"} <= {"0", "1", "2", str(writing)}


async def test_a_child_ignores_no_signal_that_we_ignore() -> None:
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        async with open_processes() as processes:
            process = processes.spawn(Command("test", ("grep", "SigIgn", "/proc/self/status")))
            await process.wait()
        assert signal.getsignal(signal.SIGTTOU) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTTOU, before)
    assert list(process.last_lines) == ["SigIgn:\t0000000000000000"]


async def test_a_child_with_endless_output_does_not_delay_other_tasks() -> None:
    async with open_processes() as processes:
        process = processes.spawn(Command("test", ("/usr/bin/yes",), level=logging.NOTSET))
        with trio.fail_after(10):
            for _ in range(20):
                await trio.sleep(0.01)
            await processes.stop(process, 5)
    assert process.returncode == -signal.SIGTERM


async def test_endless_output_without_a_line_end_is_bounded() -> None:
    """In the last lines, which are part of messages, limits and remedies are looked for."""
    async with open_processes() as processes:
        process = processes.spawn(shell("head -c 3000000 /dev/zero | tr '\\0' x"))
        assert await process.wait() == 0
        assert max(map(len, process.last_lines)) <= LONGEST_LINE


def test_signal_names() -> None:
    assert signal_name(15) == "SIGTERM"
    assert signal_name(40) == "signal 40"


async def test_a_lost_signal_delays_an_end_and_makes_no_fault() -> None:
    async with open_processes() as processes:
        process = processes.spawn(shell("exec sleep 100"))
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            with trio.fail_after(60):
                await processes.stop(process, 2)
        finally:
            signal.signal(signal.SIGCHLD, handler)
        assert process.returncode == -signal.SIGTERM


async def test_output_that_cannot_be_read_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    directory = os.open("/", os.O_RDONLY)
    async with open_processes() as processes:
        process = processes.spawn(shell("exit 7"))
        os.dup2(directory, process._output)  # neither epoll nor read(2) takes a directory
        with trio.fail_after(60):
            assert await process.wait() == 7
    os.close(directory)
    assert "cannot read the output of test: Is a directory" in caplog.text


def test_the_state_of_a_process_is_read_without_waiting_for_a_lease() -> None:
    file = Path(f"/proc/{os.getpid()}/stat")
    with leasing(file):
        assert _state(os.getpid()) == "unknown"
        with pytest.raises(HostError) as refused, doing("read it"):
            read_at_once(file)
        assert explained(refused.value) == (f"cannot read it: {LEASED}", END_LEASE)
    assert _state(os.getpid()) in "RS"


@pytest.mark.timeout(20)  # the kernel waits 45 s for a lease
async def test_a_child_is_taken_over_whatever_leases_it_has_on_its_files_in_proc() -> None:
    """QEMU may have them as another user: a lease needs no capability for a file of the same user."""
    output, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})  # noqa: ASYNC221 - it does not wait
    os.close(written)
    async with open_processes() as processes:
        with leasing(*(Path(f"/proc/{pid}/{name}") for name in ("stat", "status", "cgroup"))):
            child = processes.adopt(ProcessRecord("test", pid, Fd(output), logging.INFO))
            assert child.record().pid == pid
        child.send_signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL


async def test_a_child_begins_with_no_signal_blocked_whatever_this_process_blocks() -> None:
    """While the runner is renewed it blocks signals for a moment: a dnsmasq of that moment would be deaf to SIGTERM."""
    async with open_processes() as processes:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        try:
            child = processes.spawn(Command("child", ("sleep", "infinity")))
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert {signal.SIGTERM, signal.SIGINT} <= blocked
        status = Path(f"/proc/{child.pid}/status").read_text()
        assert "SigBlk:\t0000000000000000\n" in status
        await processes.stop(child, 10)
        assert child.returncode == -signal.SIGTERM


IN_GROUP = """
import sys, trio
from pathlib import Path
from runner.base.errors import HostError, explain
from runner.kernel.child_processes import LONGEST_LINE, Command, open_processes

async def main():
    Path(sys.argv[1], "cgroup.procs").write_text("0")
    async with open_processes() as processes:
        try:
            child = processes.spawn(Command("child", ("/bin/sh", "-c", sys.argv[2])))
            await child.wait()
            print(child.why_it_ended())
        except HostError as error:
            print(explain(error))

trio.run(main)
"""


@contextmanager
def own_group(controller: str, limit: str, value: str) -> Iterator[PurePosixPath]:
    """Hold a cgroup below this process's, in which *limit* is *value*."""
    group = next(own_groups(controller)) / f"test-{os.getpid()}"
    try:
        Path(group).mkdir()
        Path(group, limit).write_text(value)
    except OSError as error:
        pytest.skip(f"no cgroup with {limit} can be made here: {error}")
    try:
        yield group
    finally:
        Path(group).rmdir()


def run_in(group: PurePosixPath, script: str) -> str:
    argv = [sys.executable, "-c", IN_GROUP, str(group), script]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def test_a_child_that_the_kernel_ends_for_want_of_memory_was_out_of_memory() -> None:
    version_1 = Path(next(own_groups("memory")), "memory.limit_in_bytes").exists()
    limit = "memory.limit_in_bytes" if version_1 else "memory.max"
    with own_group("memory", limit, str(64 << 20)) as group:
        output = run_in(group, f"exec {sys.executable} -c 'held = bytearray(256 << 20)'")
        assert output.startswith(
            f"was killed by the kernel: out of memory, as the container may have 64 MiB of memory ({limit} of '{group}')"
        )
        assert run_in(group, "kill -KILL $$") == "was killed by SIGKILL\n"


def test_a_child_for_which_there_is_no_process_left_is_told_the_limit() -> None:
    with own_group("pids", "pids.max", "1") as group:
        assert run_in(group, "true").startswith(
            "cannot start child ('/bin/sh'): Resource temporarily unavailable; the container may have 1 processes and threads "
            f"(pids.max of '{group}'): raise it"
        )
    with own_group("pids", "pids.max", "2") as group:
        script = "import os\ntry:\n    os.fork()\nexcept OSError as error:\n    print('cannot create thread:', error.strerror)"
        output = run_in(group, f'exec {sys.executable} -c "{script}"')
        assert output.startswith(
            "exited with status 0, saying 'cannot create thread: Resource temporarily unavailable'; the container may"
        )
