"""Hostile pods on a real kernel: what they do with descriptors, processes and memory in float ends with them.

Runs on any machine with root, cgroup v2 with cpuset and four CPUs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from unittest.mock import ANY
from urllib.request import urlopen

import pytest

from runner.base.cpuset import CpuSet
from runner.controller.tree.held_files import FILES
from runner.kernel.cgroup import flat_keyed
from runner.protocol.controller_client import REPORT_SOCKET
from tests.node.cgroups import SECONDS, pages_by_numa_node, until
from tests.node.minimal_pods import BYSTANDER, A, B, C, Machine, Pod, cgroup_of, missing, reason, result

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")

BUSY = "Resource temporarily unavailable"
"""What a lease gives that cannot be had (EAGAIN)."""
NO_DEVICE = "No such device"
"""What a write to a file of a removed cgroup gives (ENODEV)."""


def registered(machine: Machine, pod: Pod) -> None:
    """Register *pod* and move its process to float."""
    pod.execute("anchor")
    result(pod.call(machine.socket, "registerCgroup", uuid=pod.uid, cpuset=str(pod.scope.cpus())))
    assert pod.execute("write", 0, 0) == 2
    assert cgroup_of(pod.pid) == f"/{machine.root.name}/instance-{pod.uid}/float"


@pytest.mark.gate
def test_what_was_done_with_descriptors_of_another_pod_ends_with_that_pod(machine: Machine, tmp_path: Path) -> None:
    """A gives its descriptors to B, which never registers; its threads hold A's CPUs when C has got them."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller() as process:
        registered(machine, a)
        a.execute("write", 1, a.execute("thread"))
        path = str(tmp_path / "passed")
        b.execute("listen", path)
        a.execute("give", path)
        b.execute("take")
        assert b.execute("write", 0, 0) == 2
        inner = [b.execute("thread") for _ in range(20)]
        for tid in inner:
            assert b.execute("write", 1, tid)
        strangers = machine.instance(A).threads()
        assert len(strangers) == 21

        # The kubelet forgets a static pod while its guest is powering down: nothing is moved yet.
        shared = machine.put_state({B: machine.b})
        until(lambda: machine.float_cgroup.effective_cpus() == shared - machine.a)
        assert machine.instance(A).threads() == strangers

        process.kill()
        process.wait()
        a.end()
        machine.pods.remove(a)
        machine.put_state({B: machine.b, C: machine.a})
    with machine.controller():
        until(lambda: not machine.domain(A).exists())
        log = machine.log.read_text()
        assert f"instance without a pod uuid={A} rest=ended processes=1" in log
        assert f"one={b.pid} 'python" in log
        until(lambda: b.process.poll() is not None)
        c = machine.pod(C, machine.a)
        registered(machine, c)
        assert machine.instance(C).effective_cpus() == machine.a


def test_what_one_instance_can_do_with_descriptors_of_another(machine: Machine, tmp_path: Path) -> None:
    """B, which is registered as well, got A's: neither its threads nor a process that it cannot name goes where A's are."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller():
        registered(machine, a)
        registered(machine, b)
        b.execute("forget")
        path = str(tmp_path / "passed")
        b.execute("listen", path)
        a.execute("give", path)
        b.execute("take")
        procs_of_float, threads_of_vcpus, _, threads_of_float, _ = range(5)
        assert b.execute("write", threads_of_vcpus, b.execute("thread")) == os.strerror(errno.EOPNOTSUPP)
        assert machine.bystander is not None
        assert b.execute("write", procs_of_float, machine.bystander.process.pid) == os.strerror(errno.ESRCH)
        assert b.execute("read", threads_of_float) == ["0"], "A's only thread there, without a number"
        assert not machine.instance(A).threads()
        assert cgroup_of(b.pid) == f"/{machine.root.name}/instance-{B}/float"


def test_an_instance_is_emptied_when_its_pods_cgroup_is_removed(machine: Machine, tmp_path: Path) -> None:
    """While the controller runs: the removal itself is reported. A fork bomb in the instance's cgroup is stopped first."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--pod-pids-max", "400"):
        registered(machine, a)
        path = str(tmp_path / "passed")
        b.execute("listen", path)
        a.execute("give", path)
        b.execute("take")
        b.execute("write", 0, 0)
        b.execute("write", 1, b.execute("self"))  # what it forks from here on is born on A's CPUs
        assert 300 < int(str(b.execute("fork", 1000))) < 400
        machine.put_state({B: machine.b})
        a.end()
        machine.pods.remove(a)
        until(lambda: not machine.domain(A).exists())
        until(lambda: machine.float_cgroup.effective_cpus() == machine.all - machine.b)


def test_what_enters_a_pods_own_cgroup_keeps_its_cpus_no_longer_than_a_handover(
    machine: Machine, tmp_path: Path
) -> None:
    """A gives its descriptors to B and ends; B is in A's own cgroup, which so stays, and its threads are on A's CPUs."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--handover=20"):
        registered(machine, a)
        path = str(tmp_path / "passed")
        b.execute("listen", path)
        a.execute("give", path)
        b.execute("take")
        assert b.execute("write", 2, b.execute("anchor")) == 2, "into A's own cgroup"
        b.execute("write", 0, 0)
        b.execute("push", 1, b.execute("thread"))
        until(lambda: machine.instance(A).threads())
        os.kill(a.pid, signal.SIGKILL)
        machine.put_state({B: machine.b, C: machine.a})
        c = machine.pod(C, machine.a)
        assert reason(c.call(machine.socket, "registerCgroup", uuid=C, cpuset=str(machine.a))) == "conflict"
        until(lambda: "result" in c.call(machine.socket, "registerCgroup", uuid=C, cpuset=str(machine.a))[0])
        assert machine.instance(C).effective_cpus() == machine.a
        assert not machine.instance(A).exists() or machine.instance(A).effective_cpus().isdisjoint(machine.a)
        assert b.execute("self") == 1, "nothing is ended while the pod has a cgroup"
        assert f"instance without a pod uuid={A} rest=moved" in machine.log.read_text()


def test_threads_that_are_put_back_again_and_again_do_not_keep_the_cpus(machine: Machine, tmp_path: Path) -> None:
    """B writes its threads into A's cgroup in a loop, so that it may never be empty."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller():
        registered(machine, a)
        path = str(tmp_path / "passed")
        b.execute("listen", path)
        a.execute("give", path)
        b.execute("take")
        b.execute("write", 0, 0)
        for _ in range(3):
            b.execute("push", 1, b.execute("thread"))
        until(lambda: len(machine.instance(A).threads()) == 3)
        machine.put_state({B: machine.b, C: machine.a})
        a.end()
        machine.pods.remove(a)
        c = machine.pod(C, machine.a)
        registered(machine, c)
        until(lambda: not machine.domain(A).exists())
        until(lambda: b.process.poll() is not None)
        assert machine.instance(C).effective_cpus() == machine.a


def test_a_pod_that_leases_files_keeps_nobody_waiting(machine: Machine) -> None:
    """Those of its own cgroup, and those that the controller opens for it, by whatever mount."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--metrics", "127.0.0.1:9440"):
        registered(machine, a)
        groups = (machine.pod_float(A), machine.instance(A), machine.float_cgroup)
        paths = [group.path / file for group in groups for file in FILES]
        for path in (*paths, machine.domain(A).path / "memory.events"):
            readable = path.exists() and path.stat().st_mode & stat.S_IRUSR
            kinds = ("F_WRLCK", "F_RDLCK") if readable and path.stat().st_mode & stat.S_IWUSR else ("F_WRLCK",)
            for kind in kinds if readable else ():
                assert a.execute("lease", str(path), kind) == BUSY, path
        assert a.execute("lease", str(a.scope.path / "cpuset.cpus"), "F_WRLCK") == 0
        refused = a.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a))
        assert reason(refused) == "host"
        assert "cpuset.cpus: a process holds a lease on it (fcntl(2), F_SETLEASE)" in str(refused)
        registered(machine, b)
        assert {each["uuid"] for each in machine.ask("listInstances")["instances"]} == {A, B}
        with urlopen("http://127.0.0.1:9440/metrics", timeout=SECONDS) as page:
            assert b"instance_cgroup_controller_instances 2.0" in page.read()


def test_a_pod_that_shuttles_between_its_cgroups_has_no_page_migrated(
    machine: Machine, numa: dict[int, CpuSet]
) -> None:
    """The kernel migrates pages between cgroups with different NUMA nodes, and all changes of cgroups wait for that."""
    if len(numa) == 1:
        pytest.skip("a second NUMA node is missing")
    pod = machine.pod(A, machine.a)
    pod.scope.write("cpuset.mems", "1")
    machine.put_state({A: machine.a})
    with machine.controller():
        pod.execute("guest", 64)
        registered(machine, pod)
        pod.execute("migrate", 1, 0)
        before = pages_by_numa_node(pod.pid)
        pod.execute("write", 2, 0)
        assert pages_by_numa_node(pod.pid) == before


def test_processes_in_float_are_limited_for_each_pod(machine: Machine) -> None:
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--pod-pids-max", "40"):
        registered(machine, a)
        registered(machine, b)
        assert 20 < int(str(a.execute("fork", 300))) < 40
        assert int(machine.domain(A).read("pids.current")) == 40
        assert int(str(b.execute("fork", 20))) == 20, "another pod has its own"
        assert machine.domain(A).read("cpu.weight") == "100"
        assert machine.instance(A).read("cpu.weight") == "1", "the share is float's"


def test_a_pod_that_moves_processes_to_float_without_end_is_ended(machine: Machine) -> None:
    """The kernel refuses no such move, and a process that has left counts no more in the pod's own cgroup."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--pod-pids-max=40", "--pids-max=400"):
        registered(machine, b)
        registered(machine, a)
        assert a.execute("write", 2, 0) == 2, "back to its own cgroup"

        def push() -> None:
            for _ in range(1000):
                a.execute("write", 0, a.execute("anchor"))
                time.sleep(0.02)

        with pytest.raises((AssertionError, BrokenPipeError)):
            push()
        until(lambda: int(machine.domain(A).read("pids.current")) == 0)
        assert int(str(b.execute("fork", 20))) == 20


ENDED = """
import os, signal, sys
fd, number = map(int, sys.argv[1:])
reading, writing = os.pipe()
pauses, paused = os.pipe()
if os.fork() == 0:
    os.dup2(os.open("/dev/null", os.O_RDWR), 1)
    os.dup2(1, 2)
    children = []
    for _ in range(number):
        children.append(os.fork())
        if children[-1] == 0:
            os.write(paused, b"x")
            signal.pause()
    for _ in children:
        os.read(pauses, 1)
    for each in children:
        os.write(fd, b"%d" % each)
        os.kill(each, signal.SIGKILL)
        os.waitid(os.P_PID, each, os.WEXITED | os.WNOWAIT)  # it stays, as nothing reaps it
    os.close(writing)
    signal.pause()
os.close(writing)
os.read(reading, 1)
"""
"""Leave ended processes in the float whose ``cgroup.procs`` is given, and how many, with a parent that does not wait for them."""


def test_ended_processes_count_for_a_pod_that_registers_again(machine: Machine) -> None:
    """The kernel counts them until their parent has waited for them, also after the removal of their cgroup: then in the root alone."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--pod-pids-max=100", "--pids-max=400"):
        registered(machine, b)
        a.execute("anchor")

        def leave() -> None:
            for _ in range(6):
                result(a.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
                assert a.execute("run", ["python3", "-c", ENDED, str(a.execute("fd", 0)), "90"], 0) == [0, ""]
                result(a.call(machine.socket, "deregisterCgroup", uuid=A))
                a.execute("forget")
                until(lambda: not machine.instance(A).exists())

        with pytest.raises((AssertionError, BrokenPipeError)):
            leave()
        until(lambda: int(machine.root.read("pids.current")) < 100)
        assert int(str(b.execute("fork", 20))) == 20


def test_a_pod_that_leaves_ended_processes_in_anothers_float_is_ended(machine: Machine) -> None:
    """The kernel counts them until their parent has waited for them, after the end of their pod in the root alone."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--pod-pids-max=100", "--pids-max=400"):
        registered(machine, b)
        registered(machine, a)
        passed_on = f"exec 9>{machine.pod_float(A).path}/cgroup.procs; exec python3 -c '{ENDED}' 9 90"

        def leave() -> None:
            for _ in range(6):
                assert b.execute("run", ["sh", "-c", passed_on]) == [0, ""]
                assert result(a.call(machine.socket, "deregisterCgroup", uuid=A)) == {"removed": True}
                registered(machine, a)

        with pytest.raises((AssertionError, BrokenPipeError)):
            leave()
        until(lambda: int(machine.root.read("pids.current")) < 100)
        with pytest.raises((AssertionError, BrokenPipeError)):
            b.execute("fork", 1)


TRACED = """
import ctypes, glob, os, signal, sys, threading, time
there, back, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
reading, writing = os.pipe()
if os.fork() == 0:
    os.dup2(os.open("/dev/null", os.O_RDWR), 1)
    os.dup2(1, 2)
    os.close(reading)
    runs, running = os.pipe()
    may_end, end = os.pipe()
    traced = os.fork()
    if traced == 0:
        os.close(writing)
        over = threading.Event()
        threads = [threading.Thread(target=over.wait) for _ in range(number)]
        for each in threads:
            each.start()
        with open(there, "w") as file:
            file.write("0")
        os.write(running, " ".join(str(each.native_id) for each in threads).encode())
        os.read(may_end, 1)
        over.set()
        while [open(each).read().rpartition(")")[2][1] for each in glob.glob("/proc/self/task/*/stat")].count("Z") < number:
            time.sleep(0.1)
        with open(back, "w") as file:
            file.write("0")
        os.write(running, b"x")
        signal.pause()
    os.close(running)
    for thread in os.read(runs, 1 << 12).split():
        assert ctypes.CDLL(None).ptrace(0x4206, int(thread), None, None) == 0  # PTRACE_SEIZE
    os.write(end, b"x")
    os.read(runs, 1)
    os.close(writing)
    signal.pause()
os.close(writing)
os.read(reading, 1)
"""
"""Leave ended threads in the float whose ``cgroup.procs`` is given; their process has left it, and another one traces them."""


def test_a_pod_that_leaves_ended_threads_in_anothers_float_is_ended(machine: Machine) -> None:
    """They count there as long as their tracer does not wait for them, and their process is elsewhere, and lives."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--pod-pids-max=100", "--pids-max=400"):
        registered(machine, b)
        registered(machine, a)
        assert b.execute("write", 2, 0) == 2, "back to its own cgroup"
        paths = [f"{group.path}/cgroup.procs" for group in (machine.pod_float(A), b.scope)]

        assert b.execute("run", ["python3", "-c", TRACED, *paths, "90"]) == [0, ""]
        assert 90 <= int(machine.domain(A).read("pids.current")) < 100
        with contextlib.suppress(AssertionError, BrokenPipeError):  # it is ended meanwhile
            b.execute("run", ["python3", "-c", TRACED, *paths, "150"])
        until(lambda: b.process.poll() is not None)
        until(lambda: int(machine.root.read("pids.current")) < 100)


def test_a_pod_whose_removed_cgroups_stay_in_the_kernel_makes_no_more(machine: Machine) -> None:
    """As long as sockets that were made there are open: the kernel's memory for each is charged to no cgroup."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)

    def register_and_leave() -> tuple[dict[str, object], int]:
        answer = a.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a))
        if "result" in answer[0]:
            assert a.execute("write", 0, 0) == 2
            assert a.execute("socket") is None
            assert a.execute("write", 2, 0) == 2, "back to its own cgroup"
            assert result(a.call(machine.socket, "deregisterCgroup", uuid=A)) == {"removed": True}
            a.execute("forget")
            until(lambda: not machine.pod_float(A).exists())
        return answer

    def kept() -> int:
        return flat_keyed(machine.root.read("cgroup.stat"))["nr_dying_descendants"]

    with machine.controller(before="from runner.controller.serve import registrations as r; r.MOST_REMOVED = 2"):
        for number in range(1, 4):
            assert "result" in register_and_leave()[0]
            until(lambda number=number: kept() == number)  # type: ignore[misc]
        answer = register_and_leave()
        assert reason(answer) == "host"
        assert "3 removed cgroups of it" in str(answer)
        registered(machine, b)
        a.execute("close")
        until(lambda: kept() == 0)
        assert "result" in register_and_leave()[0]


@pytest.mark.parametrize(
    ("kind", "mebibytes", "processes"),
    [
        pytest.param("anonymous", 400, 1, marks=pytest.mark.node_only),
        ("anonymous", 8, 60),
        pytest.param("memfd", 400, 1, marks=pytest.mark.node_only),
        ("flight", 400, 1),
        pytest.param("tmpfs", 400, 1, marks=pytest.mark.node_only),
        pytest.param("names", 400, 1, marks=pytest.mark.node_only),
        pytest.param("pipes", 400, 1, marks=pytest.mark.node_only),
    ],
)
def test_a_hoarder_is_ended_by_the_kernel_and_no_other_pod_notices(
    machine: Machine, kind: str, mebibytes: int, processes: int
) -> None:
    """A has a guest of 400 MiB, more than all of the tree may have; B hoards in its float, and its own domain is full."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--memory-max=256M", "--pod-memory=96M", "--pod-pids-max=4096") as process:
        a.execute("guest", 400)
        b.execute("guest", 64)  # what its own pod is charged for hides nothing
        registered(machine, a)
        registered(machine, b)
        assert a.execute("touch", 8) == 0
        b.execute("hoard", kind, mebibytes, processes)
        until(lambda: machine.counters(B)["oom_kill"])
        assert a.execute("touch", 8) == 0, "a program of another pod is neither held nor ended"
        assert not any(machine.counters(A).values())
        assert a.execute("self") == 1
        until(lambda: machine.ask("getStatus")["oom_kills"].get(B))
        assert process.poll() is None
        b.end()
        machine.pods.remove(b)
        machine.put_state({A: machine.a})
        until(lambda: not machine.domain(B).exists())
        assert not any(machine.counters(A).values())


def test_memory_that_was_left_behind_stays_charged_to_the_pod_that_took_it(machine: Machine, tmp_path: Path) -> None:
    """A takes a memfd in float, leaves it with B, and registers anew: again and again, until its own domain is full."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    path = str(tmp_path / "left")
    with machine.controller("--memory-max=384M", "--pod-memory=96M"):  # of which B and the bystander have as much
        registered(machine, b)
        b.execute("listen", path)
        for times in (1, 2):
            registered(machine, a)
            assert a.execute("leave", path, 36) == 0
            b.execute("take")
            assert a.execute("write", 2, 0) == 2, "back to its own cgroup"
            assert result(a.call(machine.socket, "deregisterCgroup", uuid=A)) == {"removed": True}
            a.execute("forget")
            assert machine.domain(A).children() == (), "it stays without groups"
            assert int(machine.domain(A).read("memory.current")) >= times * 36 << 20
            assert int(machine.domain(A).read("memory.max")) == 96 << 20, "it may have no more than that"
        registered(machine, a)
        assert a.execute("leave", path, 36) == -signal.SIGKILL
        assert not any(machine.counters(B).values())
        assert "oom 0" in machine.root.read("memory.events.local").splitlines(), (
            "the account of all together is not full"
        )

        a.end()
        machine.pods.remove(a)
        machine.put_state({B: machine.b})
        until(lambda: "MiB are charged to it that another program holds" in str(machine.ask("getStatus")["faults"]))
        assert machine.domain(A).children() == ()
        until(lambda: int(machine.domain(A).read("memory.max")) < 96 << 20)
        b.execute("forget")
        machine.put_state({B: machine.b})
        until(lambda: not machine.domain(A).exists())


def test_page_cache_that_another_program_pins_stays_charged_to_the_pod_that_took_it(machine: Machine) -> None:
    """A reads a file of the node in float, and B, which needs no more than the same file, holds its pages in pipes."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    size, file = max((each.stat().st_size, str(each)) for each in Path("/usr/bin").iterdir() if each.is_file())
    mebibytes = min(size >> 20, 48)
    assert mebibytes > 16, "less may be left of a pod that has gone"
    with machine.controller("--memory-max=384M", "--pod-memory=96M"):
        registered(machine, a)
        assert a.execute("cache", file, mebibytes) == mebibytes
        assert b.execute("splice", file, mebibytes) == mebibytes << 20
        a.end()
        machine.pods.remove(a)
        machine.put_state({B: machine.b})
        until(lambda: "MiB are charged to it that another program holds" in str(machine.ask("getStatus")["faults"]))
        assert machine.domain(A).children() == ()
        assert int(machine.domain(A).read("memory.max")) >= mebibytes << 20
        b.execute("forget")
        until(lambda: not machine.domain(A).exists())


def test_a_pod_that_takes_all_epoll_watches_keeps_the_controller_from_nothing(machine: Machine) -> None:
    """As user 0 of a container without a user namespace of its own: epoll_ctl(2) is ENOSPC for every program of root's."""
    limit = Path("/proc/sys/fs/epoll/max_user_watches")
    before = limit.read_text()
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--metrics", "127.0.0.1:9440") as process:
        registered(machine, a)
        try:
            limit.write_text("1")
            registered(machine, b)
            assert {each["uuid"] for each in machine.ask("listInstances")["instances"]} == {A, B}
            with urlopen("http://127.0.0.1:9440/metrics", timeout=SECONDS) as page:
                assert b"instance_cgroup_controller_instances 2.0" in page.read()
            with socket.socket(socket.AF_UNIX) as slow:  # what has come already takes no watch
                slow.connect(str(machine.socket))
                assert not select.select([slow], [], [], 1)[0], "it is waited for, and not hung up on"
                slow.sendall(b'{"jsonrpc": "2.0", "method": "getStatus", "id": 1}\n')
                assert slow.recv(1 << 16)
            shared = machine.put_state({A: machine.a, B: machine.b, C: machine.shared & CpuSet([min(machine.shared)])})
            until(lambda: machine.float_cgroup.effective_cpus() == shared)
        finally:
            limit.write_text(before)
        assert process.poll() is None


@pytest.mark.gate
def test_a_pod_that_sends_descriptors_keeps_the_controller_from_nothing(machine: Machine) -> None:
    """They are of sockets of which the last close takes ten minutes: since Linux 6.16 they are refused, before threads close them."""
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller() as process:
        for number in range(40):  # more than threads
            path = machine.socket if number % 4 else machine.socket.with_name(REPORT_SOCKET)
            assert a.execute("linger", str(path), number % 2) in (1, os.strerror(errno.EPERM))
        began = time.monotonic()
        registered(machine, b)
        assert time.monotonic() - began < SECONDS / 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0


def test_a_pod_with_many_processes_does_not_delay_others(machine: Machine) -> None:
    a = machine.pod(A, machine.a)
    with machine.controller():
        a.execute("anchor")
        assert a.execute("fork", 2000) == 2000
        done = threading.Event()

        def register() -> None:
            result(a.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
            done.set()

        request = json.dumps({"jsonrpc": "2.0", "method": "getStatus", "params": {}, "id": 1}).encode() + b"\n"
        answered = 0
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(machine.socket))
            connection.sendall(request)
            connection.recv(65536)
            thread = threading.Thread(target=register)
            thread.start()
            while not machine.instance(A).exists():  # it is registered; then its processes are looked at
                pass
            while not done.is_set():
                connection.sendall(request)
                connection.recv(65536)
                answered += 1
            thread.join()
        assert answered > 2, "after every few of its processes, not after the last one alone"


CONVOY = """
import atexit, errno, os, sys, threading, time
flag, *fds = sys.argv[1:]
threading.stack_size(1 << 18)
reading, writing = os.pipe()
moved = os.fork()
if moved == 0:
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    os.write(writing, b"x")
    time.sleep(3600)
atexit.register(os.kill, moved, 9)
os.close(writing)
assert os.read(reading, 1), "the process to be moved has ended"
for each in set(fds):  # opened again they are this container's, whose namespace has no float
    try:
        os.write(os.open(f"/proc/self/fd/{each}", os.O_WRONLY), b"%d" % moved)
    except OSError as error:
        assert error.errno == errno.ENOENT, error
    else:
        raise AssertionError(each)
def move(fd):
    while os.path.exists(flag):
        os.write(fd, b"%d" % moved)
writers = [threading.Thread(target=move, args=(int(fds[number % len(fds)]),)) for number in range(32)]
open(flag, "w").close()
for each in writers:
    each.start()
for each in writers:
    each.join()
"""
"""Move a process of 200 threads by the descriptors given, from 32 threads, while the file given first exists."""


def test_a_pod_that_moves_a_process_from_many_threads_delays_others_by_one_move_at_a_time(
    machine: Machine, tmp_path: Path
) -> None:
    """Each move holds the lock of all cgroups of the machine, for which a registration waits some 20 times.

    With an open file for each descriptor, each of those times waits for as many moves as there are writers.
    """
    a = machine.pod(A, machine.a, prefix=("unshare", "--pid", "--fork", "--cgroup"))
    b, flag = machine.pod(B, machine.b), tmp_path / "flag"
    with machine.controller():
        registered(machine, a)
        for _ in range(3):
            result(a.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        numbers = [first + registration * 5 for registration in range(4) for first in (0, 2)]
        fds = [str(a.execute("fd", number)) for number in numbers]
        ran: list[object] = []
        script = ["python3", "-c", CONVOY, str(flag), *fds]
        thread = threading.Thread(target=lambda: ran.append(a.execute("run", script, *numbers)))
        thread.start()
        try:
            until(flag.exists)
            b.execute("anchor")
            result(b.call(machine.socket, "registerCgroup", uuid=B, cpuset=str(machine.b)))
            assert machine.instance(B).effective_cpus() == machine.b
        finally:
            flag.unlink(missing_ok=True)
            thread.join()
        assert ran == [[0, ""]]


UNSHARE = ("unshare", "--user", "--map-root-user", "--cgroup", "--mount")
"""As root of a user namespace, the cgroup of which is the root of the hierarchy there."""
SYS_UNSHARE, SYS_SETNS = 272, 308
"""``arch/x86/entry/syscalls/syscall_64.tbl``."""


def take_cpus(machine: Machine, pod: Pod, mount: Path) -> object:
    """Have *pod* write all CPUs of the machine into its instance's cgroup, by a mount of it; return status and output."""
    mount.mkdir(exist_ok=True)
    enter, back = pod.execute("fd", 1), pod.execute("fd", 2)
    # A shell of the pod's enters the instance's cgroup as a thread does, and becomes root of the hierarchy from there on.
    write = f"echo {machine.all} >{mount}/cpuset.cpus"
    # Under nsdelegate not by a process of that very cgroup namespace: it leaves the cgroup, and makes another one.
    script = f"""
        echo $$ >&{enter} || exit 2
        exec {" ".join(UNSHARE)} sh -c 'mount -t cgroup2 none {mount} && echo 0 >&{back} &&
            exec unshare --cgroup sh -c "{write}"'
    """
    return pod.execute("run", ["sh", "-c", script], 1, 2)


def test_a_pod_without_seccomp_writes_the_cpus_of_its_instance_and_is_named(machine: Machine, tmp_path: Path) -> None:
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller():
        b.execute("forbid", SYS_UNSHARE, SYS_SETNS)
        registered(machine, a)
        registered(machine, b)
        assert result(a.call(machine.socket, "getStatus"))["without_seccomp"] == []  # in float it is nobody's
        assert "instance without seccomp" in machine.log.read_text()
        assert f"uuid={B} why" not in machine.log.read_text()
        assert machine.ask("getStatus")["without_seccomp"] == [A, BYSTANDER]
        assert {each["uuid"]: each["without_seccomp"] for each in machine.ask("listInstances")["instances"]} == {
            A: True,
            B: False,
        }

        assert take_cpus(machine, a, tmp_path / "a") == [0, ANY]
        until(lambda: "cpuset changed by others" in machine.log.read_text())
        until(lambda: machine.instance(A).cpus() == machine.a)

        refused = take_cpus(machine, b, tmp_path / "b")
        assert isinstance(refused, list)
        assert refused[0] != 0
        assert "Operation not permitted" in refused[1]
        assert machine.instance(B).cpus() == machine.b
        namespaces = Path("/proc/sys/user/max_user_namespaces")
        before = namespaces.read_text()
        try:
            namespaces.write_text("0")
            assert take_cpus(machine, a, tmp_path / "a") == [1, ANY]
        finally:
            namespaces.write_text(before)
        assert machine.log.read_text().count("cpuset changed by others") == 1


def test_a_pod_without_seccomp_is_refused_where_it_is_required(machine: Machine) -> None:
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--require-seccomp"):
        b.execute("forbid", SYS_UNSHARE, SYS_SETNS)
        registered(machine, b)
        a.execute("anchor")
        answer = a.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a))
        assert reason(answer) == "host"
        assert "set seccompProfile: RuntimeDefault" in str(answer[0]["error"])
        assert not machine.instance(A).exists()


def test_what_a_pod_does_with_a_mount_of_its_cgroup_ends_with_the_pod(machine: Machine, tmp_path: Path) -> None:
    """In a user namespace a pod mounts the hierarchy from its group on, whose files belong to root, as which it runs.

    Under ``nsdelegate`` the limits of the root of a cgroup namespace are closed to it, but not to a process of another one.
    """
    a = machine.pod(A, machine.a)
    with machine.controller():
        registered(machine, a)
        fd, mount = a.execute("fd", 2), tmp_path / "mount"
        mount.mkdir()
        script = f"""
            mount -t cgroup2 none {mount} || exit 2
            mkdir {mount}/x && exit 3
            echo 0 >&{fd} || exit 4
            unshare --cgroup sh -c 'echo 1 >{mount}/cgroup.max.descendants || exit 5; mkdir {mount}/y || exit 6'
        """
        assert a.execute("run", [*UNSHARE, "sh", "-c", script], 2) == [6, ANY], "its domain may have no more below it"
        assert machine.pod_float(A).children() == ()
        until(lambda: machine.pod_float(A).read("cgroup.max.descendants") == "0")
        assert machine.instance(A).read("cgroup.max.descendants") == "0"
        machine.put_state({B: machine.b})
        a.end()
        machine.pods.remove(a)
        until(lambda: not machine.domain(A).exists())
