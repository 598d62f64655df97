"""The placement back ends on a real kernel: real pods, the node's controller, every thread where it belongs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import ROOT, Cgroup, cgroup_of, until
from tests.node.instances import (
    ARRANGED,
    FLOAT,
    TREE,
    Controller,
    Instance,
    NodeFixture,
    Thread,
    spec_text,
    start_instance,
    threads_of,
)
from tests.node.standin_kubelet import MIB, Kubelet, Runtime

pytestmark = [pytest.mark.many_cpus, pytest.mark.usefixtures("rom")]
Start = Callable[..., Instance]
BOTH = pytest.mark.parametrize("runtime", [pytest.param("crun", marks=pytest.mark.node_only), "runc"])


@pytest.fixture
def start(node_fixture: NodeFixture) -> Start:
    """Return a function that starts an instance with placement ``controller`` and no privilege."""
    return node_fixture.start


@BOTH
@pytest.mark.gate
def test_an_instance_from_start_to_end(start: Start, kubelet: Kubelet, runtime: Runtime) -> None:
    instance = start(1, "2-3,10-11", runtime=runtime)
    instance.up()
    instance.is_placed()
    receipt = instance.receipt()
    assert receipt["backend"] == "controller"
    assert CpuSet.parse(receipt["float_cpus"]) == kubelet.default
    domain = instance.domain.path.name
    assert {name: path.split("/")[-2:] for name, path in receipt["cgroups"].items()} == {
        "pod": ["", ""],
        "floating": [domain, "float"],
        "instance": [domain, "vcpus"],
    }
    assert instance.stop() == 0
    assert "ended outcome=stopped status=0 faults=0" in instance.running.output
    assert not instance.group.path.exists(), "it was deregistered, with the entry still in the kubelet's state"
    until(lambda: not instance.domain.path.exists(), "its domain to go, with the memory of its runner")


@pytest.mark.gate
def test_the_guests_memory_is_the_pods_and_on_its_numa_node(start: Start, kubelet: Kubelet) -> None:
    """All of it is charged before the guest runs, and it stays there while float and other instances change."""
    instance = start(1, "9-10", mems=CpuSet([1]), memory=384 * MIB)
    instance.up()
    scope = Cgroup(instance.running.scope.path)
    charged = int(scope.read("memory.current"))
    assert charged >= 64 * MIB
    [qemu] = instance.processes()["qemu"]

    def pages() -> dict[str, int]:
        lines = Path(f"/proc/{qemu}/numa_maps").read_text().splitlines()
        [ram] = [line for line in lines if "-ram" in line]
        return {word[:2]: int(word[3:]) for word in ram.split() if word[0] == "N" and word[1].isdigit()}

    assert pages() == {"N1": 64 * MIB // 4096}
    neighbour = start(2, "2-3", mems=CpuSet([0]))
    neighbour.up()
    neighbour.is_placed()
    instance.is_placed()
    assert neighbour.stop() == 0
    kubelet.reconcile()
    until(lambda: FLOAT.cpus() == kubelet.default, "float to grow")
    assert pages() == {"N1": 64 * MIB // 4096}
    assert int(scope.read("memory.current")) >= 64 * MIB
    assert instance.stop() == 0


@pytest.mark.node_only
def test_the_anchor_is_started_again_where_it_was(start: Start) -> None:
    instance = start(1, "2-3")
    instance.up()
    for _ in range(3):
        before = set(instance.processes()["anchor"])
        os.kill(min(before), signal.SIGKILL)
        until(lambda: set(instance.processes().get("anchor", before)) - before, "another anchor")  # noqa: B023
        for anchor in instance.processes()["anchor"]:
            assert cgroup_of(anchor) == instance.scope
    instance.is_placed()
    assert instance.stop() == 0


@pytest.mark.node_only
def test_threads_that_the_kernel_starts_for_qemu_go_to_float(start: Start) -> None:
    """Older kernels (before Linux 6.4 and 6.13) start them in the pod's cgroup; here the test moves one there."""
    instance = start(1, "2-3")
    instance.running.wait_for("in float")
    kernel = next(
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if (path / "comm").read_text().strip() == "oom_reaper" and not (path / "cmdline").read_bytes()
    )
    Cgroup(instance.running.scope.path).write("cgroup.procs", kernel)
    assert cgroup_of(kernel) == instance.scope
    try:
        instance.up()
        until(lambda: cgroup_of(kernel) == str(instance.float_group), "the kernel's thread to be in float")
    finally:
        Cgroup(ROOT).write("cgroup.procs", kernel)
    assert instance.stop() == 0


def test_threads_that_a_vcpu_starts_go_back_to_float(start: Start, kubelet: Kubelet) -> None:
    """They start on its CPU; since Linux 6.14 the first vCPU that runs starts one for KVM. Here the test moves one there."""
    instance = start(1, "2-3")
    instance.up()
    [qemu] = instance.processes()["qemu"]
    [late] = [thread.tid for thread in threads_of(qemu) if thread.name == "IO mon_iothread"]
    instance.group.write("cgroup.threads", late)
    with contextlib.suppress(OSError):  # the sweep may have moved it already, and in float this CPU is refused
        os.sched_setaffinity(late, {2})
    until(lambda: cgroup_of(late) == str(instance.float_group), "the thread to be in float")
    until(lambda: os.sched_getaffinity(late) == set(kubelet.default), "the thread to be free")
    instance.is_placed()
    assert "moved to float, because a vCPU had started it" in instance.running.wait_for("because a vCPU had started it")
    assert instance.stop() == 0


@ARRANGED
@pytest.mark.parametrize("swept", [True, pytest.param(False, marks=pytest.mark.node_only)])
def test_processes_executed_in_the_pod_are_kept_off_the_vcpus_cpus(start: Start, kubelet: Kubelet, swept: bool) -> None:  # noqa: FBT001
    instance = start(1, "2-3", keys="" if swept else "sweep = false\n")
    instance.up()
    instance.running.execute("sh", "-c", "sleep 1000 >/dev/null 2>&1 & sleep 1001 >/dev/null 2>&1 &")

    def strays() -> list[Thread]:
        return [
            thread
            for thread in instance.threads()
            if Path(f"/proc/{thread.pid}/cmdline").read_bytes() in {b"sleep\x001000\x00", b"sleep\x001001\x00"}
        ]

    until(lambda: len(strays()) == 2, "the strays")
    if swept:
        until(
            lambda: {thread.cgroup for thread in strays()} == {str(instance.float_group)}, "the strays to be in float"
        )
        assert {thread.cpus for thread in strays()} == {kubelet.default}
        instance.running.wait_for("moved to float, because it was started in the pod's cgroup")
    anchors = [
        pid for pid in instance.processes()["anchor"] if b"infinity" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert {thread.cgroup for anchor in anchors for thread in threads_of(anchor)} == {instance.scope}
    if not swept:
        assert {thread.cgroup for thread in strays()} == {instance.scope}
    assert instance.stop() == 0
    assert not instance.group.path.exists()


def test_a_guest_runs_and_ends_in_order_while_all_epoll_watches_are_taken(start: Start) -> None:
    limit = Path("/proc/sys/fs/epoll/max_user_watches")
    before = limit.read_text()
    instance = start(1, "2-3")
    instance.up()
    try:
        limit.write_text("1")
        instance.is_placed()
        assert instance.stop() == 0
    finally:
        limit.write_text(before)
    assert "ended outcome=stopped status=0 faults=0" in instance.running.output


@pytest.mark.node_only
def test_the_controller_may_be_down_while_the_instance_runs_and_when_it_ends(
    start: Start, controller: Controller, kubelet: Kubelet
) -> None:
    instance = start(1, "2-3")
    instance.up()
    controller.kill()
    instance.is_placed()
    assert instance.stop() == 0
    assert "it will remove the instance's cgroup when it is back" in instance.running.output
    assert instance.group.path.exists()
    kubelet.reconcile()
    controller.start()
    until(lambda: not instance.group.path.exists(), "the controller to remove the stale cgroup")


@pytest.mark.node_only
def test_a_controller_that_starts_later_is_waited_for(start: Start, controller: Controller) -> None:
    controller.kill()
    instance = start(1, "2-3")
    instance.running.wait_for("waiting for the controller")
    controller.start()
    instance.up()
    instance.is_placed()
    assert instance.stop() == 0


@pytest.mark.node_only
def test_a_refused_registration_is_a_failed_start_with_its_reason(start: Start) -> None:
    instance = start(1, "2-3", environment_uid="0000000f-0000-4000-8000-00000000000f")
    assert instance.running.wait() == 31
    assert "cannot act for instance '0000000f-0000-4000-8000-00000000000f'" in instance.running.output
    assert "ended outcome=start_failed status=31 faults=0" in instance.running.output
    assert not TREE.path.joinpath("instance-0000000f-0000-4000-8000-00000000000f").exists()


# -- without a controller --------------------------------------------------------------------------------------------


@pytest.fixture
def alone(kubelet: Kubelet, tmp_path: Path) -> Iterator[Callable[..., Instance]]:
    """Return a function that starts an instance in a privileged container, without a controller."""

    def started(count: int, cpus: str, keys: str, **options: Any) -> Instance:
        wanted = CpuSet.parse(cpus)
        spec = spec_text(wanted, "[[network]]").replace(f"count = {len(wanted)}", f"count = {count}\n{keys}")
        return start_instance(
            kubelet, 1, wanted, spec=spec, directory=tmp_path, privileged=True, cgroupfs="rw", **options
        )

    yield started
    for uid, containers in list(kubelet.running.items()):
        print(*(f"--- {name} of {uid}\n{container.output}" for name, container in containers.items()), sep="\n")
        kubelet.stop(uid, grace=0)


@pytest.mark.parametrize(
    ("runtime", "namespace", "keys"),
    [
        ("crun", "private", 'placement = "delegated"'),
        pytest.param("runc", "private", "", marks=pytest.mark.node_only),
        pytest.param("crun", "host", "", marks=pytest.mark.node_only),
    ],
)
def test_delegated_divides_the_containers_own_cgroup(
    alone: Callable[..., Instance], runtime: Runtime, namespace: str, keys: str
) -> None:
    instance = alone(3, "2-5", keys, runtime=runtime, cgroup_namespace=namespace)
    instance.up()
    scope = instance.scope
    vcpus = instance.vcpus()
    assert sorted(str(thread.cpus) for thread in vcpus) == ["2", "3", "4"]
    assert {thread.cgroup for thread in vcpus} == {f"{scope}/instance"}
    mine = {thread.tid for thread in vcpus}
    others = [thread for thread in instance.threads() if thread.tid not in mine and thread.name != "sleep"]
    assert {(thread.cgroup, str(thread.cpus)) for thread in others} == {(f"{scope}/float", "5")}
    instance.running.execute("sh", "-c", "sleep 1000 >/dev/null 2>&1 &")
    until(
        lambda: (
            {
                thread.cgroup
                for thread in instance.threads()
                if Path(f"/proc/{thread.pid}/cmdline").read_bytes() == b"sleep\x001000\x00"
            }
            == {f"{scope}/float"}
        ),
        "the stray to be in float",
    )
    instance.running.kill()
    assert instance.running.wait() == 0, instance.running.output
    assert "ended outcome=stopped status=0 faults=0" in instance.running.output


def test_delegated_without_a_writable_cgroup_is_refused(kubelet: Kubelet, tmp_path: Path) -> None:
    cpus = CpuSet([2, 3])
    spec = spec_text(cpus).replace("count = 2", 'count = 1\nplacement = "delegated"')
    instance = start_instance(kubelet, 1, cpus, spec=spec, directory=tmp_path, cgroupfs="ro")
    assert instance.running.wait() == 30
    assert "cpu.placement: 'delegated' cannot be used: /sys/fs/cgroup may not be written" in instance.running.output
