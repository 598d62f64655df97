"""The guest's memory on a real kernel: the size and NUMA node of its pages, their charge, and failures to get them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import SECONDS, Cgroup, until
from tests.node.instances import FLOAT, TREE, Controller, Instance, NodeFixture, pool, start_instance
from tests.node.minimal_pods import ask
from tests.node.standin_kubelet import MIB, PROJECT

pytestmark = [pytest.mark.many_cpus, pytest.mark.usefixtures("rom")]
Start = Callable[..., Instance]
BOTH_NODES = "3,7"
"""A CPU on each of two NUMA nodes."""
PAGE = 2 * MIB


def free() -> list[int]:
    return [int(pool(node, "free_hugepages").read_text()) for node in (0, 1)]


@pytest.fixture
def start(node_fixture: NodeFixture) -> Start:
    """Return a function that starts an instance with placement ``controller`` on both NUMA nodes; it takes keys of [memory]."""

    def started(ram: str, *, count: str = '"all"', more: str = "", **options: Any) -> Instance:
        cpus = CpuSet.parse(BOTH_NODES)
        spec = f'[cpu]\ncount = {count}\nplacement = "controller"\naccel = "tcg"\n[memory]\n{ram}\n'
        spec += f'[boot]\nfirmware = "/guest/rom"\n[shutdown]\ngrace = 20\n{more}'
        defaults: dict[str, Any] = {"cgroupfs": "ro", "memory": 384 * MIB}
        return start_instance(
            node_fixture.kubelet,
            1,
            cpus,
            spec=spec,
            directory=node_fixture.directory,
            sockets=node_fixture.controller.directory,
            **{**defaults, **options},
        )

    return started


def backends(pid: int) -> dict[str, str]:
    """Return guest memory → its line of ``numa_maps``, without where it is mapped."""
    lines = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
    return {found[1]: line.partition(" ")[2] for line in lines if (found := re.search(r"-(ram[0-9]+)", line))}


def test_huge_pages_are_the_pods_and_each_on_its_numa_node(start: Start, reserve: Callable[[int, int], None]) -> None:
    """As many vCPUs as CPUs, as much memory as the limit; the pod is charged for huge pages, which are free again at the end."""
    reserve(40, 40)
    # One page more than can be divided between the NUMA nodes.
    instance = start('size = "limits"\nhugepages = "2MiB"', hugepages={"2MB": 128 * MIB + PAGE})
    instance.up()
    instance.is_placed()
    scope = Cgroup(instance.running.scope.path)
    assert int(scope.read("hugetlb.2MB.current")) == 128 * MIB
    assert int(scope.read("hugetlb.2MB.rsvd.current")) == 128 * MIB
    assert int(scope.read("memory.current")) < 128 * MIB, "QEMU's own memory, not the guest's"
    for file in ("max", "current", "rsvd.max", "rsvd.current"):
        assert TREE.read(f"hugetlb.2MB.{file}") == "0", "nothing in float takes or reserves any"
    assert free() == [8, 8]
    [qemu] = instance.processes()["qemu"]
    for node, (_, line) in enumerate(sorted(backends(qemu).items())):
        assert line.startswith(f"bind:{node} ")
        assert " huge " in line
        assert re.findall(r" (N\d+=\d+)", line) == [f"N{node}=32"]
        assert "kernelpagesize_kB=2048" in line
    argv = [sys.executable, "-m", "runner", "inspect", "--json", "--kubelet-dir", str(instance.kubelet.directory)]
    inspected = subprocess.run(argv, cwd=PROJECT, stdout=subprocess.PIPE, check=False).stdout
    verdicts = {each["subject"]: each for each in json.loads(inspected)["instances"][0]["judgements"]}
    assert verdicts["local"]["level"] == "ok"
    assert "64 MiB on NUMA node 0, 64 MiB on NUMA node 1" in str(verdicts["local"])
    assert "it is bound to '0-1'" in str(verdicts["local"])
    assert "the guest's memory is there size=128MiB" in instance.running.output
    assert instance.stop() == 0
    assert free() == [40, 40]


@pytest.mark.gate
def test_ordinary_pages_follow_the_limit_too_and_can_be_locked(start: Start) -> None:
    instance = start('size = "limits"\nlock = true', memory=512 * MIB)
    instance.up()
    [qemu] = instance.processes()["qemu"]
    sizes = []
    for node, (_, line) in enumerate(sorted(backends(qemu).items())):
        [(where, pages)] = re.findall(r" N(\d+)=(\d+)", line)
        assert where == str(node)
        sizes.append(int(pages) * int(line.rpartition("=")[2]) * 1024)
    assert len(set(sizes)) == 1
    assert 32 * MIB <= sum(sizes) < 512 * MIB
    scope = Cgroup(instance.running.scope.path)
    assert sum(sizes) <= int(scope.read("memory.current")) <= 512 * MIB
    locked = re.search(r"VmLck:\s+(\d+) kB", Path(f"/proc/{qemu}/status").read_text())
    assert locked is not None
    assert int(locked[1]) * 1024 >= sum(sizes)
    assert "oom_kill 0" in scope.read("memory.events")
    assert instance.stop() == 0


@pytest.mark.parametrize(
    ("memory", "options", "sentence"),
    [
        pytest.param(
            'size = "128MiB"\nhugepages = "2MiB"',
            {"hugepages": {"2MB": 128 * MIB}},
            "memory.hugepages: 32 pages of 2MiB (64MiB) are to come from NUMA node 1, where 31 (62MiB) are free",
            marks=pytest.mark.node_only,
        ),
        pytest.param(
            'size = "128MiB"\nhugepages = "2MiB"',
            {"hugepages": {"2MB": 126 * MIB}, "mems": CpuSet([0])},
            "memory.size: 128MiB in pages of 2MiB do not fit into the 126MiB of them this pod may use (hugetlb.2MB.max, ",
            marks=pytest.mark.node_only,
        ),
        ('size = "320MiB"', {}, "do not fit into the 384MiB this pod may use"),
        pytest.param(
            'size = "limits"\nhugepages = "2MiB"',
            {},
            "leaves, and there is no limit; set limits.hugepages-2Mi",
            marks=pytest.mark.node_only,
        ),
    ],
)
def test_memory_that_does_not_fit_is_refused_before_anything_is_changed(
    start: Start, reserve: Callable[[int, int], None], memory: str, options: dict[str, Any], sentence: str
) -> None:
    reserve(80, 31)
    instance = start(memory, **options)
    assert instance.running.wait() == 30
    assert sentence in instance.running.output
    assert "in float" not in instance.running.output
    assert free() == [80, 31]


@pytest.mark.parametrize(
    ("memory", "options", "sentence"),
    [
        pytest.param(
            'size = "128MiB"\nhugepages = "2MiB"',
            {"hugepages": {"2MB": 126 * MIB}},
            "cannot preallocate the guest's memory: cannot ",
            marks=pytest.mark.node_only,
        ),
        (
            'size = "320MiB"',
            {"memory": 192 * MIB},
            "cannot preallocate the guest's memory: the preallocator was killed",
        ),
    ],
)
def test_limits_that_cannot_be_read_are_a_failed_start(
    start: Start, reserve: Callable[[int, int], None], memory: str, options: dict[str, Any], sentence: str
) -> None:
    reserve(40, 40)
    instance = start(memory, cgroupfs="none", **options)
    assert instance.running.wait() == 31
    assert sentence in instance.running.output
    assert "ended outcome=start_failed status=31 faults=0" in instance.running.output
    assert not instance.group.path.exists()
    assert free() == [40, 40]


@pytest.mark.parametrize("ending", ["asked to stop", "killed"])
@pytest.mark.node_only
def test_an_end_while_memory_is_preallocated(start: Start, ending: str) -> None:
    instance = start('size = "192MiB"', memory=512 * MIB)

    def preallocator() -> int | None:
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if b"/preallocate.py\0" in command.read_bytes() and b"\0-c\0" not in command.read_bytes():
                    return int(command.parent.name)
        return None

    pid = until(preallocator, "the preallocator")
    os.kill(pid, signal.SIGSTOP)  # so that it does not end before the test has acted
    scope = Cgroup(instance.running.scope.path)
    assert str(pid) in scope.words("cgroup.procs"), "the pod is charged"
    if ending == "killed":
        os.kill(pid, signal.SIGKILL)
    else:
        instance.running.kill()
    assert instance.running.wait() == (31 if ending == "killed" else 0)
    assert (
        "the preallocator was killed" if ending == "killed" else "asked to stop before the guest ran"
    ) in instance.running.output
    assert "faults=0" in instance.running.output
    assert "QEMU is up" not in instance.running.output
    assert not Path(f"/proc/{pid}").exists()
    assert not instance.group.path.exists()


HOARD = """
import os, pathlib, signal
pathlib.Path("/proc/self/comm").write_text("hoarder")
os.kill(os.getpid(), signal.SIGSTOP)
taken = os.memfd_create("hoard")
while True:
    os.write(taken, bytes(4 << 20))
"""
"""Stops itself; when it goes on, it takes memory that counts as no process's until it is ended.

That of QEMU, which the kernel ends before it, is charged to the pod, so that its end does not suffice.
"""


@pytest.mark.parametrize("controller_options", [("--metrics=127.0.0.1:9440", "--partitions=off")], ids=["arranged"])
def test_an_end_for_want_of_memory_in_float_is_told_everywhere(start: Start, controller: Controller) -> None:
    """By the controller's log, status and metrics, and by the instance, whose own end comes of it.

    What is started in the pod comes to float where the instance is no partition.
    """
    instance = start('size = "64MiB"')
    instance.up()
    instance.running.execute("sh", "-c", 'exec "$0" -c "$1" </dev/null >/dev/null 2>&1 &', sys.executable, HOARD)

    def hoarder() -> int | None:
        in_float = [each.pid for each in instance.threads() if each.cgroup == str(instance.float_group)]
        stats = {pid: Path(f"/proc/{pid}/stat").read_text() for pid in in_float}
        return next((pid for pid, stat in stats.items() if "(hoarder) T" in stat), None)

    pid = until(hoarder, "it to be in float, stopped")
    [qemu] = instance.processes()["qemu"]
    # containerd gives it what all of the pod have, crun none; then QEMU is chosen first, which has mapped more
    Path(f"/proc/{pid}/oom_score_adj").write_text(Path(f"/proc/{qemu}/oom_score_adj").read_text())
    os.kill(instance.running.pid, signal.SIGSTOP)  # it must not end the domain before it was looked at
    os.kill(pid, signal.SIGCONT)
    until(lambda: ask(controller.socket, "getStatus")["oom_kills"] == {instance.uid: 2}, "the status")
    listed = {each["uuid"]: each["oom_kills"] for each in ask(controller.socket, "listInstances")["instances"]}
    assert listed[instance.uid] == 2
    most = instance.domain.read("memory.max")  # the log is limited to one line for both, as they may come in two
    pattern = rf"out of memory in float uuid={instance.uid} processes=[12] most={most}\n"
    assert len(re.findall(pattern, controller.log.read_text())) == 1
    with urlopen("http://127.0.0.1:9440/metrics", timeout=SECONDS) as page:
        assert b"instance_cgroup_controller_oom_kills_total 2.0" in page.read()
    os.kill(instance.running.pid, signal.SIGCONT)
    assert instance.running.wait() == 20
    assert "QEMU was killed by the kernel: out of memory in float; raise limits.memory" in instance.running.output


TAKE = """
import mmap, sys
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000 | (0x4000 if sys.argv[1:] else 0)  # MAP_HUGETLB, MAP_NORESERVE
try:
    mmap.mmap(-1, 2 << 20, flags=flags)[0] = 1
except OSError as error:
    print(error.strerror)
else:
    print("taken")
"""


def test_no_huge_page_is_taken_in_float(controller: Controller, reserve: Callable[[int, int], None]) -> None:
    """A pod there would take those that the next instance needs, and no limit of its own would hold."""
    assert controller.process is not None
    reserve(4, 0)

    def take(*more: str, inside: bool = True) -> tuple[int, str]:
        enter = FLOAT.entering() if inside else ()
        done = subprocess.run(
            (*enter, sys.executable, "-c", TAKE, *more), check=False, stdout=subprocess.PIPE, text=True
        )
        return done.returncode, done.stdout.strip()

    assert take(inside=False) == take("without a reservation", inside=False) == (0, "taken")
    assert take() == (0, os.strerror(errno.ENOMEM))
    assert take("without a reservation") == (-signal.SIGBUS, "")
    assert free() == [4, 0]
