"""What the memory guard reads about real processes, in groups of a fake cgroupfs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from pathlib import Path

import pytest
import trio
import trio.testing

from runner.base.rate_limit import LogRateLimit
from runner.controller.metrics import ControllerCounters, MemoryEnd
from runner.controller.serve.pods import PodCgroups
from runner.controller.tree import memory_guard
from runner.controller.tree.float_memory import MemoryByKind, PodMemory
from runner.controller.tree.memory_guard import (
    MOST_LONG_STATUSES,
    MOST_OWN_PROCESSES,
    SETTLED_WITHIN,
    MemoryGuard,
    _SharedSearch,
)
from runner.controller.tree.tree import Tree
from runner.kernel.pidfds import kill_process
from runner.kernel.procfs import LONG_STATUS, LongStatuses, Procfs
from tests.support.fake_node import A, B, Node, scope_path
from tests.support.leases import leasing

MIB, GIB = 1 << 20, 1 << 30
SIZE = 64 * MIB
CODE = """
import ctypes, json, mmap, os, signal, sys, threading
size, kind = int(sys.argv[1]), sys.argv[2]
held = []
if kind == "private":
    held.append(b"x" * size)
elif kind == "private of a dead leader":
    held.append(b"x" * size)
elif kind in ("descriptor", "mapping", "thread's descriptor"):
    fd = os.memfd_create("held")
    os.truncate(fd, size)
    ram = mmap.mmap(fd, size)
    ram.madvise(23)
    if kind == "descriptor":
        ram.close()
    elif kind == "mapping":
        os.close(fd)
        held.append(ram)
elif kind == "shared anonymous":
    held.append(mmap.mmap(-1, size))
    held[0].madvise(23)
elif kind == "tmpfs":
    library = ctypes.CDLL(None)
    assert library.unshare(0x20000) == library.mount(b"none", b"/", None, 1 << 14 | 1 << 18, None) == 0
    assert library.mount(b"none", b"/mnt", b"tmpfs", 0, b"") == 0
    with open("/mnt/file", "wb") as file:
        file.write(bytes(size))
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        signal.pause()
    children.append(child)
print(json.dumps(children), flush=True)
if "leader" in kind:
    for child in children:
        os.kill(child, 9)
    threading.Thread(target=threading.Event().wait).start()
    ctypes.CDLL(None).pthread_exit(None)
signal.pause()
"""


@contextmanager
def holding(kind: str, *fds: int) -> Iterator[list[int]]:
    """Run a process that holds *SIZE* bytes, and *fds*, and two children of it; yield the numbers of all."""
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-ISc", CODE, str(SIZE), kind], stdout=subprocess.PIPE, text=True, pass_fds=fds
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        pids = [process.pid, *json.loads(process.stdout.readline())]
        for child in pids[1:]:
            stack.callback(kill_process, child, lambda: True)
        yield pids


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a node with the groups of two instances."""
    node = Node.new(tmp_path)
    node.mount.write("cgroup.subtree_control", "+memory")
    node.mount.child("kubepods.slice").write("cgroup.subtree_control", "+memory")
    for path in (
        "stelia",
        "stelia/float",
        *(f"stelia/{name}{uid}" for uid in (A, B) for name in ("float/", "instance-")),
    ):
        node.mount.at(f"/{path}").create()
    for uid in (A, B):
        (node.scope(uid).path / "cgroup.procs").write_text("")
    return node


def put(node: Node, uid: str, pids: list[int]) -> None:
    node.pod(uid).put_threads(pids)
    both = {*node.pod(A).threads(), *node.pod(B).threads()}
    (node.root.path / "cgroup.procs").write_text("\n".join(map(str, both)))


def charge(node: Node, uid: str, stat: str) -> None:
    (node.scope(uid).parent.path / "memory.stat").write_text(stat)


def measured(node: Node, uid: str) -> PodMemory:
    pods = PodCgroups(node.mount, Procfs(Path("/proc")), kubelet=True)
    guard = MemoryGuard(Tree(node.root), pods, 0, {A, B}, ControllerCounters(), LogRateLimit())
    return next(pod for pod in guard.measure(shared=True) if pod.pod_uid == uid)


def about(size: int) -> range:
    return range(size, size + 16 * MIB)


@pytest.mark.parametrize("kind", ["descriptor", "mapping", "shared anonymous", "tmpfs"])
def test_shared_memory_is_counted_once(node: Node, kind: str) -> None:
    with holding(kind) as pids:
        put(node, A, pids)
        found = measured(node, A)
        assert found.found.shared in about(SIZE)
        assert found.processes.keys() == {*pids}
        assert measured(node, B).found == MemoryByKind()
        charge(node, A, f"shmem {SIZE}")
        root = MemoryByKind(1 << 40, 1 << 40, 1 << 40)
        assert measured(node, A).of_root(root).shared < 16 * MIB, "its own pod is charged for it"


def test_private_memory_is_that_of_all_processes(node: Node) -> None:
    with holding("private") as pids:
        put(node, A, pids[:1])
        assert measured(node, A).found.anonymous in about(SIZE)
        (node.scope(A).path / "cgroup.procs").write_text(f"{pids[1]}\n")
        both = measured(node, A)
        assert both.found.anonymous in about(2 * SIZE)
        assert (both.elsewhere, set(both.processes)) == (True, {pids[0]})
        charge(node, A, f"anon {2 * SIZE}\npagetables {8 * MIB}")
        assert measured(node, A).of_root(MemoryByKind(1 << 40, 0, 1 << 40)).total < 16 * MIB


def test_memory_of_a_process_whose_first_thread_has_ended_is_found(node: Node) -> None:
    with holding("private of a dead leader") as pids:
        status = Path(f"/proc/{pids[0]}/status")
        while "State:\tZ" not in status.read_text():
            pass
        tids = [int(path.name) for path in Path(f"/proc/{pids[0]}/task").iterdir()]
        put(node, A, tids)
        (node.root.path / "cgroup.procs").write_text(f"{pids[0]}\n")
        assert measured(node, A).found.anonymous in about(SIZE)


def test_a_pod_with_too_many_processes_or_groups_may_hold_everything(node: Node) -> None:
    root = MemoryByKind(1 << 40)
    with holding("private") as pids:
        put(node, A, pids[:1])
        charge(node, A, f"anon {SIZE * 2}")
        assert measured(node, A).of_root(root).anonymous == 0
        (node.scope(A).path / "cgroup.procs").write_text("1000000000\n" * (MOST_OWN_PROCESSES + 1))
        assert measured(node, A).of_root(root) == root
        (node.scope(A).path / "cgroup.procs").write_text("")
        assert measured(node, A).of_root(root).anonymous == 0
        for number in range(300):
            (node.scope(A).path / str(number)).mkdir()
        assert measured(node, A).of_root(root) == root


@pytest.mark.parametrize("file", ["cgroup.procs", "../memory.stat"])
def test_a_pod_with_a_lease_on_its_files_may_hold_everything(node: Node, file: str) -> None:
    root = MemoryByKind(1 << 40)
    charge(node, A, "anon 0")
    assert measured(node, A).of_root(root).anonymous == 0
    with leasing(node.scope(A).path / file):
        assert measured(node, A).of_root(root) == root


def test_a_charge_that_grows_while_its_processes_are_read_is_deducted(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a guest that takes its memory just then."""
    held = MemoryGuard._held

    def growing(guard: MemoryGuard, pid: int, statuses: LongStatuses, search: _SharedSearch | None) -> MemoryByKind:
        charge(node, A, f"anon {2 * SIZE}")
        return held(guard, pid, statuses, search)

    monkeypatch.setattr(MemoryGuard, "_held", growing)
    with holding("private") as pids:
        put(node, A, pids[:1])
        assert measured(node, A).of_root(MemoryByKind(1 << 40)).anonymous == 0


def test_a_search_of_a_pod_ends_with_what_it_has_found(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with holding("descriptor") as pids:
        put(node, A, pids)
        monkeypatch.setattr(memory_guard, "POD_SEARCHED_WITHIN", 0)
        assert measured(node, A).found.shared == 0
        assert measured(node, A).found.anonymous > 0


def test_the_lists_of_a_pods_mounts_have_one_budget(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for all mount namespaces together: each may have 100,000 mounts."""
    with holding("tmpfs") as first, holding("tmpfs") as second:
        put(node, A, [first[0], second[0]])
        assert measured(node, A).found.shared in about(2 * SIZE)
        size = len(Path(f"/proc/{first[0]}/mountinfo").read_bytes())
        monkeypatch.setattr(
            _SharedSearch, "__init__", partialmethod(_SharedSearch.__init__, mountinfo=size + size // 2)
        )
        assert measured(node, A).found.shared in about(SIZE)


def test_what_the_node_has_mounted_is_no_pods(node: Node) -> None:
    """A file in a tmpfs of the node that a pod has open, as hostPath volumes are."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file, holding("private", file.fileno()) as pids:
        file.write(bytes(SIZE))
        put(node, A, pids)
        assert measured(node, A).found.shared == 0


# -- whom it ends, by what a fake /proc says about real processes


@contextmanager
def described(node: Node, uid: str, private: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in float that is said to have *private* bytes."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        node.put_process(process.pid, f"/stelia/float/{uid}", inner=1, namespace=f"pid-{uid}")
        status = node.proc / str(process.pid) / "status"
        text = f"{status.read_text()}RssAnon:\t{private >> 10} kB\nRssShmem:\t0 kB\nVmPTE:\t0 kB\nThreads:\t1\n"
        status.write_text(text)
        put(node, uid, [process.pid, *node.pod(uid).threads()])
        try:
            yield process
        finally:
            process.kill()


def fill(node: Node, used: int, stat: str) -> None:
    (node.root.path / "memory.high").write_text(f"{1 << 30}\n")
    (node.root.path / "memory.current").write_text(f"{used}\n")
    (node.root.path / "memory.stat").write_text(f"{stat}\n")


def guard_of(node: Node) -> MemoryGuard:
    pods = PodCgroups(node.mount, Procfs(node.proc), kubelet=True)
    return MemoryGuard(Tree(node.root), pods, 256 * MIB, set(), ControllerCounters(), LogRateLimit())


async def test_nothing_is_ended_for_page_cache_or_below_the_limit(node: Node) -> None:
    with described(node, A, GIB) as process:
        guard = guard_of(node)
        fill(node, GIB, f"anon {GIB}")
        assert await guard.check() == "enough"
        fill(node, 2 * GIB, f"anon {GIB // 2}\nactive_file {GIB // 2}\ninactive_file {GIB // 2}")
        assert await guard.check() == "enough"
        (node.root.path / "memory.high").write_text("max\n")
        assert await guard.check() == "enough"
        assert process.poll() is None


async def test_the_largest_processes_of_the_pod_that_holds_most_are_ended(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    (node.scope(A).parent.path / "cgroup.kill").touch()
    with (
        described(node, A, 900 * MIB) as large,
        described(node, A, 50 * MIB) as small,
        described(node, B, 800 * MIB) as other,
    ):
        guard = guard_of(node)
        fill(node, GIB + 100 * MIB, f"anon {GIB + 100 * MIB}")
        assert await guard.check() == "ended"
        assert (large.wait(), small.poll(), other.poll()) == (-9, None, None)
        put(node, A, [small.pid])
        assert list(guard.counters.memory_ends) == [MemoryEnd(A, 950 * MIB, 1)]
        assert f"uuid={A} processes=1 private={950 * MIB}" in caplog.text

        assert await guard.check() == "ended"
        assert other.poll() is None, "the memory of the first may still be on its way"
        guard._ended_at[A] -= SETTLED_WITHIN
        fill(node, GIB, f"anon {GIB}")
        assert await guard.check() == "enough"
        assert (small.poll(), other.poll()) == (None, None)


async def test_a_pod_that_is_chosen_again_is_ended_as_a_whole(node: Node) -> None:
    kill = node.scope(A).parent.path / "cgroup.kill"
    kill.touch()
    fill(node, 2 * GIB, f"anon {2 * GIB}")
    guard = guard_of(node)
    with described(node, A, 1900 * MIB) as first, described(node, A, MIB) as second:
        assert await guard.check() == "ended"
        assert (first.wait(), second.poll(), kill.read_text()) == (-9, None, "")
        (node.proc / str(second.pid) / "status").write_text(
            (node.proc / str(second.pid) / "status").read_text().replace(f"RssAnon:\t{1 << 10}", f"RssAnon:\t{1 << 20}")
        )
        put(node, A, [second.pid])
        assert await guard.check() == "ended"
        assert (second.wait(), kill.read_text()) == (-9, "1\n")
        assert guard.counters.memory_ended == 2


async def test_a_pod_that_hides_a_hoarder_behind_many_processes_is_ended_as_a_whole(node: Node) -> None:
    """None of the processes that are looked at holds anything."""
    kill = node.scope(A).parent.path / "cgroup.kill"
    kill.touch()
    (node.scope(A).path / "cgroup.procs").write_text("1000000000\n" * (MOST_OWN_PROCESSES + 1))
    fill(node, 2 * GIB, f"anon {2 * GIB}")
    with described(node, A, MIB) as small, described(node, B, GIB) as other:
        assert await guard_of(node).check() == "ended"
        assert (small.wait(), other.poll(), kill.read_text()) == (-9, None, "1\n")


async def test_a_pod_with_many_long_statuses_is_ended_as_a_whole(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 16 of them no more is read: setgroups(2) makes each of 2000 statuses 700 KB long, 20 ms a read."""
    (node.scope(A).parent.path / "cgroup.kill").touch()
    read = list[str]()

    def reading(statuses: LongStatuses, path: str) -> str:
        text = original(statuses, path)
        read.append(path) if text else None
        return text

    original = LongStatuses.read
    monkeypatch.setattr(LongStatuses, "read", reading)
    with described(node, A, MIB) as small, described(node, B, GIB) as other:
        own = [str(1_000_000_000 + number) for number in range(MOST_LONG_STATUSES + 100)]
        for pid in own:
            (node.proc / pid).mkdir()
        groups = "Groups:\t" + "4294967294 " * (LONG_STATUS // 11 + 1) + "\n"
        status = (node.proc / str(small.pid) / "status").read_text()
        fill(node, 2 * GIB, f"anon {2 * GIB}")
        for number, pid in enumerate(own, start=1):
            (node.proc / pid / "status").write_text(groups + status)
            if number == MOST_LONG_STATUSES:
                (node.scope(A).path / "cgroup.procs").write_text("\n".join(own[:number]))
                found = {pod.pod_uid: pod for pod in guard_of(node).measure(shared=False)}[A]
                assert (found.hidden, found.found.anonymous) == (False, (number + 1) * MIB)
        (node.scope(A).path / "cgroup.procs").write_text("\n".join(own))
        read.clear()
        assert await guard_of(node).check() == "ended"
        assert sum(path.split("/")[-2] in own for path in read) == MOST_LONG_STATUSES + 1
        assert (small.wait(), other.poll()) == (-9, None)


async def test_a_pod_that_leases_its_files_is_ended_as_a_whole(node: Node) -> None:
    """Also the one with which the kernel would kill it."""
    kill = node.scope(A).parent.path / "cgroup.kill"
    kill.touch()
    fill(node, 2 * GIB, f"anon {2 * GIB}")
    with (
        described(node, A, MIB) as small,
        described(node, A, MIB) as hoarder,
        described(node, B, GIB) as other,
        leasing(node.scope(A).path / "cgroup.procs", kill),
    ):
        put(node, A, [small.pid])
        node.put_process(hoarder.pid, scope_path(A), inner=1, namespace=f"pid-{A}")
        assert await guard_of(node).check() == "ended"
        assert (small.wait(), hoarder.wait(), other.poll()) == (-9, -9, None)


async def test_a_pod_that_left_with_what_it_took_in_float_is_ended(node: Node) -> None:
    """Another process of it, in its own cgroup, holds the memory, and the instance has been deregistered."""
    kill = node.scope(A).parent.path / "cgroup.kill"
    kill.touch()
    fill(node, 2 * GIB, f"anon {2 * GIB}")
    guard = guard_of(node)
    with described(node, A, GIB) as process:
        put(node, A, [])
        (node.scope(A).path / "cgroup.procs").write_text(f"{process.pid}\n")
        assert node.pod(A).remove()
        assert node.instance(A).remove()
        assert await guard.check() == "unattributed"
        guard.registered |= {A, "a-pod-that-has-gone"}
        assert await guard.check() == "ended"
        assert (kill.read_text(), guard.registered) == ("1\n", {A})


TRACER = """
import ctypes, signal, sys
PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 0x4206, 0x40
library = ctypes.CDLL(None)
library.ptrace.argtypes = [ctypes.c_long] * 4
print(library.ptrace(PTRACE_SEIZE, int(sys.argv[1]), 0, PTRACE_O_TRACEEXIT), flush=True)
signal.pause()
"""


@contextmanager
def tracing(pid: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a tracer of process *pid*, which holds it at its end."""
    with subprocess.Popen([sys.executable, "-ISc", TRACER, str(pid)], stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == b"0\n"
        try:
            yield tracer
        finally:
            tracer.kill()


async def test_a_killed_process_that_its_tracer_holds_gives_the_pod_no_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_guard, "ENDED_WITHIN", 3600)
    (node.scope(A).parent.path / "cgroup.kill").touch()
    fill(node, 2 * GIB, f"anon {2 * GIB}")
    guard = guard_of(node)
    with (
        trio.fail_after(60),
        described(node, A, 1900 * MIB) as held,
        tracing(held.pid) as tracer,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(guard.check)
            while "State:\tt" not in Path(f"/proc/{held.pid}/status").read_text():
                await trio.sleep(0.01)
            assert held.poll() is None
            fill(node, 3 * GIB, f"anon {3 * GIB}")
        assert held.poll() is None
        node.put_process(tracer.pid, f"/stelia/float/{A}", inner=2, namespace=f"pid-{A}")
        put(node, A, [held.pid, tracer.pid])
        assert await guard.check() == "ended"
        assert (held.wait(), tracer.wait()) == (-9, -9)


async def test_all_processes_of_a_pod_are_ended_also_those_whose_end_is_not_awaited(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_guard, "AWAITED", 1)
    (node.scope(A).parent.path / "cgroup.kill").touch()
    fill(node, 2 * GIB, f"anon {2 * GIB}")
    guard = guard_of(node)
    guard._ended_at[A] = trio.current_time()
    with described(node, A, GIB) as first, described(node, A, MIB) as second, described(node, A, MIB) as third:
        assert await guard.check() == "ended"
        assert guard.counters.memory_ended == 3
        assert {process.wait() for process in (first, second, third)} == {-9}


async def test_no_pod_is_chosen_while_what_it_is_charged_for_cannot_be_read(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it, a guest's memory would count as taken from the root."""
    fill(node, 2 * GIB, f"anon {2 * GIB}")
    (node.scope(A).parent.path / "memory.stat").unlink()
    (node.scope(A).parent.path / "memory.stat").mkdir()
    with described(node, A, 2 * GIB) as process:
        assert await guard_of(node).check() == "unattributed"
        assert process.poll() is None
        assert "memory guard failed" in caplog.text


async def test_where_every_search_hangs_the_guard_goes_on_without(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_guard, "READ_WITHIN", 3600)
    fill(node, 2 * GIB, f"shmem {2 * GIB}")
    guard = guard_of(node)
    for _ in range(2):
        guard._readers.acquire_on_behalf_of_nowait(object())
    with trio.fail_after(30), described(node, A, MIB):
        assert await guard.check() == "unattributed"
    assert "shared memory not attributed" in caplog.text


async def test_where_no_pod_holds_enough_none_is_ended(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    fill(node, 2 * GIB, f"anon {2 * GIB}")
    with described(node, A, 200 * MIB) as a, described(node, B, 255 * MIB) as b:
        guard = guard_of(node)
        assert await guard.check() == "unattributed"
        assert (a.poll(), b.poll()) == (None, None)
        assert f"no pod holds enough to be ended root={node.root.path} excess={GIB}" in caplog.text
        assert f"most={B} {255 * MIB}, {A}" in caplog.text


async def test_a_report_of_the_kernel_wakes_the_guard(node: Node) -> None:
    fill(node, MIB, f"anon {MIB}")
    (node.root.path / "memory.events").write_text("high 0\n")
    with trio.fail_after(30), described(node, A, 2 * GIB) as process:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(guard_of(node).run)
            await trio.testing.wait_all_tasks_blocked(0.2)
            assert process.poll() is None
            fill(node, 2 * GIB, f"anon {2 * GIB}")
            (node.root.path / "memory.events").write_text("high 1\n")
            while process.poll() is None:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()


def test_a_process_that_is_another_one_meanwhile_is_not_ended() -> None:
    with subprocess.Popen(["sleep", "infinity"]) as process:
        assert kill_process(process.pid, lambda: False) is None
        assert process.poll() is None
        assert kill_process(process.pid, lambda: True) is not None
        assert process.wait() == -9
    assert kill_process(process.pid, lambda: True) is None
