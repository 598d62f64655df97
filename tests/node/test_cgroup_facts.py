"""The behaviour of cgroup v2 that the design relies on, observed on the kernel under test.

References: ``Documentation/admin-guide/cgroup-v2.rst`` ("Threads", "Cpuset", "Delegation") of Linux 6.12.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import (
    CLEARABLE,
    LEASABLE,
    MASKS_KEPT,
    ROOT,
    SECONDS,
    Cgroup,
    cgroup_of,
    mask_of,
    pages_by_numa_node,
    refusal_of,
    task,
)
from tests.support.leases import attempting_leases

pytestmark = pytest.mark.node_only

CPUS = CpuSet.parse(Path("/sys/devices/system/cpu/online").read_text())


def instance(threaded: Cgroup, cpus: str, name: str = "instance") -> Cgroup:
    return threaded.child(name, threaded=True, cpuset_cpus=cpus)


# -- types


@pytest.mark.parametrize("controller", ["memory", "io", "hugetlb"])
def test_no_threaded_child_while_a_domain_controller_is_enabled_for_children(tree: Cgroup, controller: str) -> None:
    if controller not in tree.words("cgroup.controllers"):
        pytest.skip(f"the {controller} controller is missing")
    tree.delegate(controller, "cpuset")
    child = tree.child("child")
    assert child.refusal("cgroup.type", "threaded") == "EOPNOTSUPP"
    tree.write("cgroup.subtree_control", f"-{controller}")
    assert child.refusal("cgroup.type", "threaded") == ""
    assert tree.refusal("cgroup.subtree_control", f"+{controller}") in {"EOPNOTSUPP", "EBUSY"}


def test_threaded_controllers_may_be_enabled_for_children(tree: Cgroup) -> None:
    tree.delegate("cpuset", "cpu", "pids")
    assert tree.child("child").refusal("cgroup.type", "threaded") == ""
    assert tree.read("cgroup.type") == "domain threaded"


def test_a_sibling_of_a_threaded_cgroup_is_invalid_until_its_type_is_written(threaded: Cgroup) -> None:
    threaded.child("float", threaded=True)
    made = threaded.child("made")
    assert made.read("cgroup.type") == "domain invalid"
    with task() as other:
        assert made.refusal("cgroup.procs", other.pid) == "EOPNOTSUPP"
        assert made.refusal("cgroup.threads", other.pid) == "EOPNOTSUPP"
        made.write("cgroup.type", "threaded")
        assert made.refusal("cgroup.procs", other.pid) == ""


def test_a_threaded_cgroup_cannot_become_a_domain_again(threaded: Cgroup) -> None:
    child = threaded.child("float", threaded=True)
    assert child.refusal("cgroup.type", "domain") == "EINVAL"


def test_a_populated_cgroup_becomes_domain_threaded_without_an_error(tree: Cgroup) -> None:
    """Children made afterwards as ordinary domains are invalid; the delegated placement has to heed that."""
    tree.delegate()
    scope = tree.child("scope")
    with task(scope):
        scope.write("cgroup.subtree_control", "+cpuset")
        assert scope.read("cgroup.type") == "domain threaded"
        assert scope.child("child").read("cgroup.type") == "domain invalid"


# -- leases (fcntl(2), F_SETLEASE)


def test_a_lease_on_a_control_file_is_refused_while_another_has_the_file_open(tree: Cgroup) -> None:
    file = tree.path / "cgroup.procs"
    if not LEASABLE:
        with attempting_leases(file) as results:
            assert results == ["refused"]
        return
    with attempting_leases(file) as results:
        assert results == ["leased"]
        assert refusal_of(lambda: os.open(file, os.O_RDONLY | os.O_NONBLOCK)) == "EAGAIN"
        os.close(os.open(file, os.O_PATH))
    for mode in (os.O_RDONLY, os.O_RDWR):
        fd = os.open(file, mode)
        with attempting_leases(file) as results:
            assert results == ["refused"]
        os.close(fd)


def test_procfs_of_a_container_is_another_file_system_than_the_nodes() -> None:
    """So that a lease on a file of the one delays nobody who opens that of the other."""
    device = ["stat", "--format=%d", "/proc"]
    mounted = ["unshare", "--fork", "--pid", "--mount-proc"]
    inner, outer = (subprocess.run(argv, stdout=-1, check=True).stdout for argv in ([*mounted, *device], device))
    assert inner != outer


# -- how processes and threads are moved


def test_procs_of_a_threaded_cgroup_takes_a_process_of_another_domain(pod: Cgroup, threaded: Cgroup) -> None:
    """PID 1's own move from its pod's cgroup to float, its threads with it."""
    float_ = threaded.child("float", threaded=True)
    with task(pod, threads=3) as runner:
        assert float_.refusal("cgroup.threads", runner.pid) == "EOPNOTSUPP"
        assert float_.refusal("cgroup.procs", runner.pid) == ""
        assert {cgroup_of(tid) for tid in runner.tids} == {str(float_)}
        assert not pod.populated()


def test_threads_move_within_their_domain(pod: Cgroup, threaded: Cgroup) -> None:
    float_, inst = threaded.child("float", threaded=True), instance(threaded, "1")
    with task(pod, threads=2) as qemu:
        float_.write("cgroup.procs", qemu.pid)
        leader, vcpu, worker = qemu.tids
        inst.write("cgroup.threads", vcpu)
        assert [cgroup_of(tid) for tid in (leader, vcpu, worker)] == [str(float_), str(inst), str(float_)]
        assert mask_of(vcpu) == CpuSet([1])


def test_a_threaded_cgroup_does_not_list_its_processes(threaded: Cgroup) -> None:
    float_ = threaded.child("float", threaded=True)
    with task() as one:
        float_.write("cgroup.procs", one.pid)
        assert refusal_of(lambda: float_.read("cgroup.procs")) == "EOPNOTSUPP"
        assert float_.refusal("cgroup.kill", 1) in {"EOPNOTSUPP", "ENOENT"}
        assert float_.read("cgroup.threads") == str(one.pid)
        assert threaded.read("cgroup.procs") == str(one.pid), "the root lists the processes of the whole domain"
        assert float_.populated()


def test_one_thread_brings_the_whole_process_back_to_the_pod(pod: Cgroup, threaded: Cgroup) -> None:
    float_, inst = threaded.child("float", threaded=True), instance(threaded, "1")
    with task(pod, threads=4) as qemu:
        float_.write("cgroup.procs", qemu.pid)
        for vcpu in qemu.tids[1:3]:
            inst.write("cgroup.threads", vcpu)
        pod.write("cgroup.procs", qemu.tids[2])
        assert {cgroup_of(tid) for tid in qemu.tids} == {str(pod)}
        inst.path.rmdir()


def test_a_dead_process_and_a_kernel_thread_cannot_be_moved(threaded: Cgroup) -> None:
    float_ = threaded.child("float", threaded=True)
    with task() as short:
        pid = short.pid
    assert float_.refusal("cgroup.procs", pid) == "ESRCH"
    assert float_.refusal("cgroup.threads", 2) == "EINVAL", "kthreadd"


PASSED_FD = """
import array, os, socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
_, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(4))
fd = array.array("i", ancillary[0][2])[0]
os.setgroups([])
os.setresgid(1000, 1000, 1000)
os.setresuid(1000, 1000, 1000)
try:
    os.open(sys.argv[2], os.O_WRONLY)
    sys.exit("could open it itself")
except PermissionError:
    pass
os.write(fd, b"0\\n")
print(open("/proc/self/cgroup").read().strip())
"""


@pytest.mark.parametrize("cgroup_namespace", [False, True], ids=["host-namespace", "own-namespace"])
def test_an_open_procs_file_is_a_permission_that_can_be_passed(
    pod: Cgroup, threaded: Cgroup, *, cgroup_namespace: bool
) -> None:
    """The opener's rights count: user 1000 moves itself through a descriptor that root opened and sent."""
    float_ = threaded.child("float", threaded=True)
    ours, theirs = socket.socketpair()
    procs = float_.path / "cgroup.procs"
    enter = 'echo 0 >"$0" && exec "$@"'
    unshare = ["unshare", "--cgroup"] if cgroup_namespace else []
    argv = ["sh", "-c", enter, str(pod.path / "cgroup.procs"), *unshare, sys.executable, "-I", "-S", "-c", PASSED_FD]
    with (
        ours,
        subprocess.Popen(
            [*argv, str(theirs.fileno()), str(procs)], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        theirs.close()
        fd = os.open(procs, os.O_WRONLY)
        socket.send_fds(ours, [b"x"], [fd])
        os.close(fd)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert output.strip().endswith("/threaded/float")


LISTED = """
import os, sys
os.setgroups([])
os.setresgid(1000, 1000, 1000)
os.setresuid(1000, 1000, 1000)
print(*sorted(map(int, os.pread(int(sys.argv[1]), 4096, 0).split())))
"""


def test_an_open_threads_file_lists_its_group_to_any_holder(pod: Cgroup, threaded: Cgroup) -> None:
    """The runner reads its threads' cgroups by it: user 1000, in the pod's cgroup and a cgroup namespace of its own."""
    inst = instance(threaded, "1")
    with task(threaded.child("float", threaded=True), threads=4) as qemu:
        for vcpu in qemu.tids[1:3]:
            inst.write("cgroup.threads", vcpu)
        fd = os.open(inst.path / "cgroup.threads", os.O_RDWR)
        enter = 'echo 0 >"$0" && exec unshare --cgroup "$@"'
        argv = ("sh", "-c", enter, str(pod.path / "cgroup.procs"), sys.executable, "-I", "-S", "-c", LISTED, str(fd))
        done = subprocess.run(argv, pass_fds=[fd], check=True, capture_output=True, text=True, timeout=SECONDS)
        os.close(fd)
        assert done.stdout.split() == [str(tid) for tid in sorted(qemu.tids[1:3])]


# -- cpusets


def test_an_empty_cpuset_inherits(threaded: Cgroup) -> None:
    threaded.write("cpuset.cpus", "1-2")
    float_ = threaded.child("float", threaded=True)
    assert float_.read("cpuset.cpus") == ""
    assert float_.cpus() == CpuSet([1, 2])


def test_a_cpuset_outside_its_parents_falls_back_without_an_error(threaded: Cgroup) -> None:
    """This is why every write is read back: the instance would run on the root's CPUs."""
    threaded.write("cpuset.cpus", "0-1")
    inst = instance(threaded, "2-3")
    assert inst.read("cpuset.cpus") == "2-3"
    assert inst.cpus() == CpuSet([0, 1])
    threaded.write("cpuset.cpus", CPUS)
    assert inst.cpus() == CpuSet([2, 3])


def test_overlapping_cpusets_are_accepted_without_an_error(threaded: Cgroup) -> None:
    assert instance(threaded, "1-2", "one").cpus() & instance(threaded, "2-3", "two").cpus() == CpuSet([2])


def test_cpus_the_machine_does_not_have_are_refused(threaded: Cgroup) -> None:
    assert threaded.refusal("cpuset.cpus", f"0-{max(CPUS) + 1}") in {"ERANGE", "EINVAL"}


def test_a_populated_cpuset_cannot_be_cleared_or_inherits_then(tree: Cgroup) -> None:
    tree.delegate("cpuset")
    child = tree.child("child", cpuset_cpus="1", cpuset_mems="0")
    with task(child):
        assert child.refusal("cpuset.cpus", "") == ("" if CLEARABLE else "ENOSPC")
        assert child.cpus() == (tree.cpus() if CLEARABLE else CpuSet([1]))
        assert child.refusal("cpuset.mems", "") == ("" if CLEARABLE else "ENOSPC")
        assert child.refusal("cpuset.cpus", "2") == ""


# -- the end of a cgroup


def test_a_cgroup_that_is_populated_or_has_children_cannot_be_removed(threaded: Cgroup) -> None:
    float_ = threaded.child("float", threaded=True)
    assert refusal_of(threaded.path.rmdir) == "EBUSY"
    with task() as one:
        float_.write("cgroup.procs", one.pid)
        assert refusal_of(float_.path.rmdir) == "EBUSY"
        one.kill()
        float_.wait_empty()
        float_.path.rmdir()


def test_becoming_empty_can_be_waited_for(threaded: Cgroup) -> None:
    inst = instance(threaded, "1")
    with task() as one, (inst.path / "cgroup.events").open() as events:
        inst.write("cgroup.procs", one.pid)
        events.read()
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        assert poll.poll(0) == []
        one.kill()
        while True:
            assert poll.poll(SECONDS * 1000)
            events.seek(0)
            if "populated 0" in events.read():
                break


# -- masks


def test_a_pinned_mask_is_kept_next_to_the_cpuset(threaded: Cgroup) -> None:
    """Effective is mask ∩ cpuset, the cpuset where they are disjoint, and the mask comes back when the cpuset grows.

    Before Linux 6.2 the thread has the whole cpuset after each change.
    """
    float_ = threaded.child("float", threaded=True, cpuset_cpus="0-3")
    with task(threads=1) as one:
        float_.write("cgroup.procs", one.pid)
        free, pinned = one.tids
        os.sched_setaffinity(pinned, {2, 3})
        float_.write("cpuset.cpus", "0-2")
        assert (mask_of(free), mask_of(pinned)) == (CpuSet([0, 1, 2]), CpuSet([2] if MASKS_KEPT else [0, 1, 2]))
        float_.write("cpuset.cpus", "0-1")
        assert mask_of(pinned) == CpuSet([0, 1])
        float_.write("cpuset.cpus", "0-3")
        assert (mask_of(free), mask_of(pinned)) == (
            CpuSet([0, 1, 2, 3]),
            CpuSet([2, 3] if MASKS_KEPT else [0, 1, 2, 3]),
        )


def test_a_mask_outside_the_cpuset_is_refused_and_one_partly_outside_is_clipped(threaded: Cgroup) -> None:
    inst = instance(threaded, "1-2")
    with task() as one:
        inst.write("cgroup.procs", one.pid)
        assert refusal_of(lambda: os.sched_setaffinity(one.pid, {0, 3})) == "EINVAL"
        os.sched_setaffinity(one.pid, {0, 1})
        assert mask_of(one.pid) == CpuSet([1])


def test_a_child_of_a_pinned_thread_is_pinned_too(threaded: Cgroup) -> None:
    inst = instance(threaded, "1-2")
    code = "import os, subprocess, sys; os.sched_setaffinity(0, {2}); print(sys.stdin.readline() and '', flush=True); "
    code += "subprocess.run(['sh', '-c', 'cat /proc/self/cgroup; grep Cpus_allowed_list /proc/self/status'])"
    enter = [*inst.entering()]
    done = subprocess.run(
        [*enter, sys.executable, "-c", code], input="\n", capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert done.stdout.split() == [f"0::{inst}", "Cpus_allowed_list:", "2"]


# -- memory


POPULATE = """
import mmap, os, sys
fd = os.memfd_create("guest")
os.ftruncate(fd, 32 << 20)
memory = mmap.mmap(fd, 32 << 20)
memory.madvise(23)  # MADV_POPULATE_WRITE
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_stays_charged_and_placed_where_it_was_first_touched(
    tree: Cgroup, threaded: Cgroup, numa: dict[int, CpuSet]
) -> None:
    """This is why RAM is preallocated in the pod's cgroup, before the process is admitted to float."""
    if len(numa) == 1:
        pytest.skip("a second NUMA node is missing")
    scope = tree.child("numa.scope", cpuset_mems="1")
    float_ = threaded.child("float", threaded=True, cpuset_mems="0-1")
    enter = [*scope.entering()]
    with subprocess.Popen(
        [*enter, sys.executable, "-I", "-S", "-c", POPULATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        pages = pages_by_numa_node(process.pid)
        assert pages.keys() == {1}
        float_.write("cgroup.procs", process.pid)
        assert pages_by_numa_node(process.pid) == pages
        assert int(scope.read("memory.current")) >= 32 << 20
        assert int(threaded.read("memory.current")) < 16 << 20
        process.kill()


def test_narrowing_the_memory_nodes_of_a_populated_cgroup_moves_its_pages(
    tree: Cgroup, threaded: Cgroup, numa: dict[int, CpuSet]
) -> None:
    """This is why float's and the instances' memory nodes are never narrowed."""
    if len(numa) == 1:
        pytest.skip("a second NUMA node is missing")
    scope = tree.child("numa.scope", cpuset_mems="1")
    float_ = threaded.child("float", threaded=True, cpuset_mems="0-1")
    enter = [*scope.entering()]
    with subprocess.Popen(
        [*enter, sys.executable, "-I", "-S", "-c", POPULATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        float_.write("cgroup.procs", process.pid)
        assert pages_by_numa_node(process.pid).keys() == {1}
        float_.write("cpuset.mems", "0")
        assert pages_by_numa_node(process.pid).keys() == {0}
        process.kill()


# -- other behaviour


def test_cgroups_take_extended_attributes(tree: Cgroup) -> None:
    os.setxattr(tree.path, "user.owner", b"us")
    assert os.getxattr(tree.path, "user.owner") == b"us"


def test_a_process_can_be_born_in_another_cgroup_by_clone3_or_by_a_shell(tree: Cgroup) -> None:
    """Python cannot use CLONE_INTO_CGROUP; a shell that enters the cgroup and then executes has the same effect."""
    scope = tree.child("scope")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(scope.path, os.O_RDONLY | os.O_DIRECTORY)
    clone_args = (ctypes.c_uint64 * 11)(0x200000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, fd)
    pid = libc.syscall(435, clone_args, ctypes.sizeof(clone_args))
    if pid == 0:
        os._exit(0 if cgroup_of("self") == str(scope) else 1)
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with task(scope) as entered:
        assert cgroup_of(entered.pid) == str(scope)


def test_the_hierarchy_is_mounted_as_systemd_does_it() -> None:
    options = next(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {ROOT} " in line)
    assert "- cgroup2 " in options
    assert "nsdelegate" in options
