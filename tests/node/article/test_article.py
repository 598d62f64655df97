"""The article's table: an instance on most of a host's CPUs, and where each thread is, shown and checked.

``tests/node/run --article`` runs it on the article's host, with the article's instance.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import ROOT, Cgroup, mask_of
from tests.node.instances import FLOAT, Instance, NodeFixture, Thread, members_of, threads_of
from tests.node.standin_kubelet import MIB

pytestmark = [pytest.mark.usefixtures("rom"), pytest.mark.timeout(2400)]
CPUS = {128: "1-20,65-84", 16: "1-4,9-12"}
"""CPUs of a host with two NUMA nodes → those of its instance."""


def table(instance: Instance) -> Iterator[str]:
    """Yield every thread of *instance*, as the article's ``pid_affinity`` does: by process, read from /proc; then its partition."""
    for pid in members_of(instance.running.pid):
        threads = list(threads_of(pid))
        yield f"==== {threads[0].name}, pid {pid}"
        yield f"{'TID':>5}  {'THREAD_NAME':<15}  {'ALLOWED_CPUS':<14}  {'RUNNING_ON':>10}  CGROUP"
        yield from (row(thread) for thread in threads)
    yield "==== the partition"
    partition, isolated = instance.group.read("cpuset.cpus.partition"), Cgroup(ROOT).read("cpuset.cpus.isolated")
    yield f"{partition:<14}  {short(str(instance.group))}/cpuset.cpus.partition"
    yield f"{isolated:<14}  /cpuset.cpus.isolated"


def row(thread: Thread) -> str:
    return f"{thread.tid:5}  {thread.name:<15}  {thread.cpus!s:<14}  {thread.running_on:10}  {short(thread.cgroup)}"


def short(cgroup: str) -> str:
    """Return *cgroup* as the article's table has it: without the pod's slice, and with the beginning of its last name."""
    first, *between, last = cgroup.strip("/").split("/")
    if len(between) == 1 and between[0].startswith("instance-"):
        return f"/{first}/{between[0][:17]}…/{last}"
    return f"/{first}/{last[:17]}…"


@pytest.mark.gate
def test_the_articles_instance(
    node_fixture: NodeFixture, numa: dict[int, CpuSet], capsys: pytest.CaptureFixture[str]
) -> None:
    every = numa[0] | numa[1]
    cpus = CpuSet.parse(CPUS[len(every)])
    others = every - cpus
    share = node_fixture.directory / "share"
    share.mkdir()
    instance = node_fixture.start(
        1,
        str(cpus),
        '[[share]]\ntag = "share"\npath = "/share"',
        mems=CpuSet(node for node in numa if numa[node] & cpus),
        more_mounts=[(share, "/share", "rw")],
        memory=1024 * MIB,  # 40 vCPUs need more than the other tests' pods have
    )
    instance.running.wait_for("ROM-GUEST-UP", 1200)
    with capsys.disabled():
        print("", *table(instance), sep="\n")
    instance.is_placed()
    assert instance.receipt()["guarantee"] == "enforced"
    assert Cgroup(ROOT).cpus("cpuset.cpus.isolated") == instance.cpus
    for anchor in instance.processes()["anchor"]:
        assert mask_of(anchor) == others, "although its cgroup names the exclusive CPUs alone"
    assert FLOAT.cpus() == others
    processes = instance.processes()
    assert set(processes) == {"runner", "anchor", "dnsmasq", "virtiofsd", "qemu"}
    anchored = processes.pop("anchor")
    threads = [thread for thread in instance.threads() if thread.pid not in anchored]
    pinned = [thread for thread in threads if len(thread.cpus) == 1]
    assert {str(thread.cpus) for thread in threads if thread not in pinned} == {str(others)}
    assert sorted(thread.running_on for thread in pinned) == list(instance.cpus)
    assert all(thread.cpus == CpuSet([thread.running_on]) for thread in pinned)
    assert {(thread.pid, thread.cgroup) for thread in pinned} == {(processes["qemu"][0], str(instance.group))}
    assert len(pinned) == len(cpus)
    assert instance.stop() == 0
    assert Cgroup(ROOT).cpus("cpuset.cpus.isolated") == CpuSet()
