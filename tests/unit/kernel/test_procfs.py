"""Processes and their memory from /proc, as recorded and as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError
from runner.kernel.procfs import (
    FIRST_NETWORK_NAMESPACE,
    FIRST_NETWORK_SETTINGS,
    LONGEST_COMMAND_LINE,
    MappedMemory,
    Procfs,
)

X86 = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n\nprocessor\t: 1\nvendor_id\t: of another CPU\n\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\n\nprocessor\t: 1\n\n"
NUMA_MAPS = """\
557d5de87000 default file=/usr/bin/cat mapped=2 N0=2 kernelpagesize_kB=4
7f0000000000 bind:0-1 file=/memfd:a\\040name-ram\\040(deleted) dirty=300 active=0 N0=100 N1=200 kernelpagesize_kB=4
7f1000000000 default file=/anon_hugepage\\040(deleted) huge dirty=3 N1=3 kernelpagesize_kB=2048
7f2000000000 default huge anon=1 dirty=1 N0=1 kernelpagesize_kB=2048
7f3000000000 default file=/memfd:empty-ram\\040(deleted)
7f4000000000 default anon=5 dirty=5 N0=5 kernelpagesize_kB=4
7f5000000000 default heap
"""


def test_files_and_huge_pages_are_counted_in_bytes_by_numa_node(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "numa_maps").write_text(NUMA_MAPS)
    assert Procfs(tmp_path).mappings(7) == [
        MappedMemory("/usr/bin/cat", huge=False, resident={0: 8192}),
        MappedMemory(
            "/memfd:a\\040name-ram\\040(deleted)", huge=False, resident={0: 409600, 1: 819200}, bound=CpuSet([0, 1])
        ),
        MappedMemory("/anon_hugepage\\040(deleted)", huge=True, resident={1: 6 << 20}),
        MappedMemory("", huge=True, resident={0: 2 << 20}),
    ]


LONG_COMMAND_LINE = """
import ctypes, mmap, struct, sys
area = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
begin = ctypes.addressof(ctypes.c_char.from_buffer(area))
with open("/proc/self/stat") as file:
    fields = [0, 0, 0, *file.read().rpartition(")")[2].split()]
code, stack, data, environment = fields[26:28], fields[28:29], fields[45:48], fields[50:52]
library = ctypes.CDLL(None, use_errno=True)
library.sbrk.restype = ctypes.c_void_p
numbers = map(int, (*code, *data, library.sbrk(0), *stack, begin, begin + (1 << 30), *environment))
print(library.prctl(35, 14, struct.pack("11QQIi", *numbers, 0, 0, -1), 104, 0), flush=True)  # PR_SET_MM, PR_SET_MM_MAP
sys.stdin.read()
"""
"""A process whose command line are a GiB of zeroes, of which no page exists; any process may do that."""


def test_a_command_line_without_end_costs_little() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LONG_COMMAND_LINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() == b"-1\n":
            pytest.skip("this kernel has no PR_SET_MM_MAP (CONFIG_CHECKPOINT_RESTORE)")
        assert len(Procfs().arguments(process.pid)) == LONGEST_COMMAND_LINE


def test_the_path_of_a_mapping_is_cut(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    line = f"7f0000000000 default file=/{'x' * 16000}\r huge N0=1 kernelpagesize_kB=4\n"
    (tmp_path / "7" / "numa_maps").write_text(line * 3)
    mappings = Procfs(tmp_path).mappings(7)
    assert mappings is not None
    assert [(len(each.file), each.resident) for each in mappings] == [(1000, {0: 4096})] * 3


def test_a_process_that_has_ended_gives_nothing(tmp_path: Path) -> None:
    assert Procfs(tmp_path).mappings(7) is None
    assert Procfs(tmp_path).process(7) is None
    assert Procfs(tmp_path).arguments(7) == ()
    assert Procfs(tmp_path).processes() == []


def test_the_parent_and_the_inner_pid_of_a_process_are_read() -> None:
    procfs = Procfs()
    me = procfs.process(os.getpid())
    assert me is not None
    assert (me.parent, me.inner_pid, me.kernel) == (os.getppid(), os.getpid(), False)
    assert "pytest" in " ".join(procfs.arguments(os.getpid()))
    assert os.getpid() in procfs.processes()


def test_a_zombie_runs_nowhere() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert Procfs().thread_ids(child) == [child]
    assert list(Procfs().threads(child)) == []
    os.waitpid(child, 0)


def test_kernel_threads_are_distinguished() -> None:
    kinds = {process.kernel for pid in Procfs().processes() if (process := Procfs().process(pid)) is not None}
    assert False in kinds
    status = Procfs().process(2)
    assert status is None or status.kernel == (status.name == "kthreadd")


@pytest.mark.parametrize(("text", "vendor"), [(X86, "AuthenticAMD"), (ARM, ""), ("", "")])
def test_the_vendor_of_the_cpus(tmp_path: Path, text: str, vendor: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert Procfs(tmp_path).cpu_vendor() == vendor


@pytest.mark.parametrize(
    ("flags", "invariant"), [("constant_tsc nonstop_tsc", True), ("constant_tsc", False), ("nonstop_tsc_s3", False)]
)
def test_an_invariant_time_stamp_counter_is_seen(tmp_path: Path, flags: str, *, invariant: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu vme {flags}\n\n")
    assert Procfs(tmp_path).has_invariant_tsc() is invariant


def test_memory_nodes_are_those_of_the_cpuset(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name:\tpython\nMems_allowed:\t00000005\nMems_allowed_list:\t0,2\n")
    assert Procfs(tmp_path).memory_nodes() == CpuSet([0, 2])


def test_this_machine_has_memory() -> None:
    assert Procfs().memory_nodes()


@pytest.mark.skipif(os.geteuid() != 0, reason="root privilege is missing")
def test_capabilities_of_a_user_namespace_do_not_count_for_the_machine() -> None:
    """They count for what the namespace owns, such as its networks."""
    code = "from runner.kernel.procfs import Procfs as P; print(len(P().capabilities()) > 9, len(P().machine_capabilities()))"
    argv = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    assert subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout == "True 0\n"
    mine = Procfs()
    assert mine.in_user_namespace() or mine.machine_capabilities() == mine.capabilities() != frozenset()


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (("dev_weight", "message_cost", "netdev_budget", "somaxconn"), True),
        (("message_cost", "somaxconn", "rmem_max"), False),
        ((), False),
    ],
)
def test_an_older_kernels_first_network_namespace_is_known_by_its_sysctls(
    tmp_path: Path, names: tuple[str, ...], *, first: bool
) -> None:
    for name in names:
        (tmp_path / "sys/net/core").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/net/core" / name).write_text("64\n")
    assert Procfs(tmp_path).in_first_network_namespace() is first


@pytest.mark.skipif(os.geteuid() != 0, reason="root privilege is missing")
def test_a_network_namespace_of_its_own_is_not_the_machines() -> None:
    """By its number and by its sysctls: any of them would refuse a pod."""
    code = "from runner.kernel.procfs import Procfs as P; print(P().in_first_network_namespace())"
    argv = ["unshare", "--net", sys.executable, "-c", code]
    assert subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout == "False\n"
    own = Path("/proc/self/ns/net").stat().st_ino
    if own == FIRST_NETWORK_NAMESPACE:  # else an older kernel, or these tests run in a container
        assert Procfs().in_first_network_namespace()
        assert all(Procfs().setting(name) for name in FIRST_NETWORK_SETTINGS)


def test_the_name_of_a_process_cannot_hold_a_line() -> None:
    name = Path(f"/proc/{os.getpid()}/comm")
    before = name.read_bytes()
    try:
        name.write_bytes(b"a\rPPid:\t1\x85\x1c")
        me, fields = Procfs().process(os.getpid()), Procfs().status()
    finally:
        name.write_bytes(before)
    assert me is not None
    assert (me.parent, me.name) == (os.getppid(), "a\rPPid:\t1\\x85")
    assert set(fields) == set(Procfs().status())


@pytest.mark.parametrize(
    "read",
    [
        Procfs.links,
        Procfs.steal,
        Procfs.idle,
        Procfs.oom_score_adj,
        Procfs.cpu_vendor,
        Procfs.memory_total,
        Procfs.status,
        Procfs.cgroup,
    ],
)
def test_a_file_that_must_be_there_and_cannot_be_read_is_an_error_of_the_host(
    tmp_path: Path, read: Callable[[Procfs], object]
) -> None:
    with pytest.raises(HostError, match=r"^cannot read "):
        read(Procfs(tmp_path))
