"""QEMU is replaced under a guest of a pod, with the controller: who is charged, where every thread is, and what is sealed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.kernel import inotify
from tests.node.cgroups import PARTITIONED, ROOT, Cgroup
from tests.node.instances import Instance, NodeFixture
from tests.node.standin_kubelet import MIB
from tests.support.soak import times

pytestmark = [pytest.mark.usefixtures("rom"), pytest.mark.gate]
UPDATABLE = "[hotplug]\nqemu = true\n"
TIMES = times(3)


def start(node_fixture: NodeFixture, newest: Path, *more: str, memory: int = 64) -> Instance:
    """Start an instance with the newest QEMU, and wait until its guest is up."""
    instance = node_fixture.start(
        1,
        "2-3",
        UPDATABLE,
        *more,
        more_mounts=[(newest, "/opt/qemu", "ro")],
        more_environment={"PATH": f"/opt/qemu:{os.environ['PATH']}"},
        memory=(384 + memory) * MIB,
    )
    instance.up()
    return instance


def ctl(instance: Instance, *words: str) -> Any:
    return json.loads(instance.running.execute(sys.executable, "-m", "runner", "ctl", "--json", *words))


def charged(instance: Instance) -> int:
    """Return the bytes of shared memory, the guest's RAM, that the pod is charged for."""
    stat = Cgroup(Path(f"{ROOT}{instance.scope}")).read("memory.stat")
    return int(dict(line.split() for line in stat.splitlines())["shmem"])


def is_in_place(instance: Instance) -> None:
    instance.is_placed()
    receipt = instance.receipt()
    assert (receipt["guarantee"] == "enforced") == PARTITIONED
    if PARTITIONED:
        assert instance.group.read("cpuset.cpus.partition") == "isolated"
        assert Cgroup(ROOT).cpus("cpuset.cpus.isolated") == instance.cpus


def test_another_qemu_has_the_guest_of_a_sealed_instance(node_fixture: NodeFixture, newest: Path) -> None:
    instance = start(node_fixture, newest)
    is_in_place(instance)
    before, ram = instance.marks(), charged(instance)
    assert ctl(instance, "qemu-update", "--check")["refused"] == []
    pauses = []
    with inotify.watching() as queue:
        queue.watch(instance.group.path / "cgroup.events", inotify.MODIFY)
        for generation in range(1, TIMES + 1):
            pauses.append(ctl(instance, "qemu-update")["pause_ms"])
            is_in_place(instance)
            assert instance.marks().keys().isdisjoint(before)
            assert instance.receipt()["qemu_generation"] == generation
            assert abs(charged(instance) - ram) < 4 * MIB
        assert not queue.pending(), "the vCPUs' cgroup is never empty: the controller would unseal it"
    print(f"pauses in ms: {pauses}")
    assert instance.stop() == 0
    assert "ended outcome=stopped status=0 faults=0" in instance.running.output


@pytest.mark.node_only
def test_an_update_that_fails_leaves_a_sealed_instance_as_it_was(node_fixture: NodeFixture, newest: Path) -> None:
    """The node's own QEMU is too old for it; a program that is none fails later, once it is started."""
    instance = start(node_fixture, newest)
    before = instance.marks()
    argv = (sys.executable, "-m", "runner", "ctl", "qemu-update", "--qemu", "/usr/bin/qemu-system-x86_64")
    with pytest.raises(AssertionError, match=r"cannot update QEMU: .* older than 10\.1"):
        instance.running.execute(*argv)
    assert instance.marks() == before
    is_in_place(instance)
    assert instance.stop() == 0
