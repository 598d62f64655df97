"""The kubelet gives a running instance more CPUs, takes some, and exchanges some: on a real kernel, sealed and not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import PARTITIONED, ROOT, Cgroup, until
from tests.node.instances import DEVICES, FLOAT, LINUX_CMDLINE, Instance, NodeFixture, spec_text, start_instance
from tests.node.recorded import recorded
from tests.node.standin_kubelet import Kubelet
from tests.support.soak import some

pytestmark = pytest.mark.usefixtures("rom")
SEALED_AND_NOT = pytest.mark.parametrize(
    "controller_options",
    some(
        [
            pytest.param(("--partitions", "off"), id="arranged"),
            pytest.param((), id="enforced", marks=pytest.mark.skipif(not PARTITIONED, reason="no remote partitions")),
        ],
        1,
    ),
)
CTL = (sys.executable, "-m", "runner", "ctl", "--json")
ONLINE = "while :; do for c in /sys/devices/system/cpu/cpu*/online; do echo 1 >$c; done 2>/dev/null; sleep 1; done &"
"""What a udev rule does: bring each CPU online that is plugged."""
SHOW = "while :; do read -r n </sys/devices/system/cpu/online; echo GUEST-HAS $n; sleep 1; done &"


class Observer:
    """Looks at the instance again and again: what it keeps must stay its own, and nothing of it may be elsewhere."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.over = instance, threading.Event()
        self.kept = instance.cpus
        self.isolated: set[str] = set()
        self.sealed = instance.group.read("cpuset.cpus.partition") == "isolated" if PARTITIONED else False
        self.found: list[str] = []
        self.looks = 0

    def look(self) -> None:
        """Note what is wrong.

        The CPUs of the cgroup are read before and after the threads', whose CPUs they contain. A thread may enter the cgroup between the
        reading of its CPUs and that of its cgroup, so only those count that were in the cgroup before their CPUs were read.
        """
        group = self.instance.group
        if self.sealed:
            isolated = Cgroup(ROOT).cpus("cpuset.cpus.isolated")
            self.isolated.add(str(isolated))
            if not self.kept <= isolated:
                self.found.append(f"isolated are {isolated}")
        before = group.cpus()
        with contextlib.suppress(KeyError):  # QEMU is gone
            inside = {thread.tid for thread in self.instance.vcpus() if thread.cgroup == str(group)}
            for thread in self.instance.vcpus():
                if thread.tid in inside and thread.cgroup == str(group) and not thread.cpus <= before | group.cpus():
                    self.found.append(f"{thread} outside of {before}")
        if not group.cpus().isdisjoint(FLOAT.cpus()) and group.cpus() == before:
            self.found.append(f"float has {FLOAT.cpus()}, the instance {before}")
        self.looks += 1

    def run(self) -> None:
        with contextlib.suppress(OSError):  # the instance has ended
            before = self.found
            while not self.over.is_set() and "the guest cannot continue" not in self.instance.running.output:
                before = list(self.found)
                self.look()
                self.over.wait(0.05)  # on an emulated CPU a look takes as long, and the instance is to go on
            if "the guest cannot continue" in self.instance.running.output:
                self.found = before  # it was unsealed while this was looking


@contextlib.contextmanager
def observed(instance: Instance, kept: str) -> Iterator[Observer]:
    """Hold an observer of *instance*, which keeps the CPUs *kept* whatever happens in the block."""
    observer = Observer(instance)
    observer.kept = CpuSet.parse(kept)
    thread = threading.Thread(target=observer.run)
    thread.start()
    try:
        yield observer
    finally:
        observer.over.set()
        thread.join()
    assert observer.looks
    assert observer.found == []


def ctl(instance: Instance, *arguments: object) -> Any:
    return json.loads(instance.running.execute(*CTL, *map(str, arguments)))


def linux(node: NodeFixture, guest: tuple[Path, Path], cpus: str, most: int) -> Instance:
    """Start an instance with the Linux guest, which brings its CPUs online, and wait until it is up."""
    wanted = CpuSet.parse(cpus)
    accel = "kvm" if Path("/dev/kvm").exists() else "tcg"
    spec = (
        f'[cpu]\nplacement = "controller"\ncount = {len(wanted)}\naccel = "{accel}"\ntopology = "flat"\nmodel = "Skylake-Server"\n'
        '[memory]\nsize = "160MiB"\n[boot]\nkernel = "/linux/kernel"\ninitrd = "/linux/initrd"\n'
        f'cmdline = "{LINUX_CMDLINE}"\n[hotplug]\ncpus = {most}\n[shutdown]\ngrace = 20\n'
    )
    devices = (*DEVICES, *(["/dev/kvm"] if accel == "kvm" else []))
    kernel, initrd = guest
    place = node.directory / "linux"
    place.mkdir()
    for name, file in (("kernel", kernel), ("initrd", initrd)):
        shutil.copy(file, place / name)
    instance = start_instance(
        node.kubelet,
        1,
        wanted,
        spec=spec,
        directory=node.directory,
        sockets=node.controller.directory,
        more_mounts=((place, "/linux", "ro"),),
        devices=devices,
        cgroupfs="ro",
    )
    instance.running.wait_for("LINUX-GUEST-UP", 400)
    for command in (ONLINE, SHOW):
        instance.type(command)
    return instance


def guest_has(instance: Instance, cpus: str) -> None:
    """Wait until the guest has these CPUs."""
    seen = len(instance.running.lines)
    until(
        lambda: f"GUEST-HAS {cpus}" in "\n".join(instance.running.lines[seen:]), f"the guest to have CPUs {cpus}", 120
    )


def resized(instance: Instance, cpus: str) -> Instance:
    """Wait until the vCPUs are alone on *cpus* each, which the instance's cgroup has; return the instance as it is now."""
    now = replace(instance, cpus=CpuSet.parse(cpus))

    def holds() -> bool:
        masks = sorted(str(thread.cpus) for thread in now.vcpus())
        return masks == sorted(str(cpu) for cpu in now.cpus) and now.group.cpus() == now.cpus

    until(holds, f"the vCPUs to be on {cpus}", 60)
    until(lambda: FLOAT.cpus() == now.kubelet.default, f"float to be {now.kubelet.default}")
    now.is_placed()
    return now


@SEALED_AND_NOT
@pytest.mark.timeout(900)
def test_a_guest_grows_and_shrinks_and_moves_with_its_pod(
    node_fixture: NodeFixture, linux_guest: tuple[Path, Path]
) -> None:
    kubelet = node_fixture.kubelet
    instance = linux(node_fixture, linux_guest, "2-3", 5)
    instance.is_placed()
    with observed(instance, "2-3") as observer:
        kubelet.resize(instance.uid, CpuSet.parse("2-6"))
        until(lambda: instance.group.cpus() == CpuSet.parse("2-6"), "the controller to give them")
        shown = ctl(instance, "cpus")
        assert (len(shown["vcpus"]), shown["unused"]) == (2, "4-6")
        answer = ctl(instance, "cpus", 4)
        print(f"pause in ms: {answer['pause_ms']}")
        assert (len(answer["vcpus"]), answer["unused"]) == (4, "6")
        assert sorted(str(thread.cpus) for thread in instance.vcpus()) == ["2", "3", "4", "5"]
        guest_has(instance, "0-3")
        assert instance.receipt()["instance_cpus"] == "2-6"
        guarantee = "enforced" if observer.sealed else "arranged"
        assert instance.receipt()["guarantee"] == guarantee
        assert ctl(instance, "status")["placement"]["misplaced"] == []

        # The kubelet takes three: one that no vCPU has, and two.
        observer.kept = CpuSet.parse("2-3")
        began = time.monotonic()
        kubelet.resize(instance.uid, CpuSet.parse("2-3"))
        instance = resized(instance, "2-3")
        print(f"two vCPUs were unplugged in {time.monotonic() - began:.1f} s")
        guest_has(instance, "0-1")
        node_fixture.settle()
        instance.is_placed()
        until(lambda: instance.receipt()["instance_cpus"] == "2-3", "the receipt")
        assert instance.receipt()["guarantee"] == guarantee
        assert ctl(instance, "status")["ready"]

        # It exchanges one.
        observer.kept = CpuSet.parse("2")
        kubelet.resize(instance.uid, CpuSet.parse("2,5"))
        instance = resized(instance, "2,5")
        guest_has(instance, "0-1")
        assert instance.receipt()["guarantee"] == guarantee
    if observer.sealed:
        print(f"isolated were {observer.isolated}")
        assert Cgroup(ROOT).cpus("cpuset.cpus.isolated") == CpuSet.parse("2,5")
    assert instance.stop() == 0
    assert "repaired" not in node_fixture.controller.log.read_text()


@SEALED_AND_NOT
def test_a_guest_that_cannot_give_up_a_vcpu_is_powered_down(node_fixture: NodeFixture) -> None:
    """It leaves the CPUs at once all the same."""
    kubelet = node_fixture.kubelet
    instance = node_fixture.start(1, "2-4", cgroupfs="ro")
    instance.up()
    vcpus = {thread.tid for thread in instance.vcpus()}
    with observed(instance, "2-3"):
        kubelet.resize(instance.uid, CpuSet.parse("2-3"), applied=False)
        until(lambda: instance.group.cpus() == CpuSet.parse("2-3"), "the controller to take it")
        assert {thread.tid for thread in instance.vcpus()} == vcpus
        assert all(thread.cpus <= CpuSet.parse("2-3") for thread in instance.vcpus())
        node_fixture.settle()
        with recorded(CpuSet([4])) as record:
            time.sleep(2)  # the runner waits for 3, because the container's cgroup names CPU 4 still
    assert instance.running.wait(60) == 22
    assert vcpus.isdisjoint({task.tid for task in record.others()})
    output = instance.running.output
    assert "cannot change the number of vCPUs: the machine was not started for it; set hotplug.cpus" in output
    assert "ended outcome=cpus_lost status=22 faults=0" in output
    until(lambda: not instance.group.path.exists(), "the instance to be removed")


@SEALED_AND_NOT
@pytest.mark.node_only
def test_cpus_that_no_vcpu_has_are_given_up_without_a_word(node_fixture: NodeFixture) -> None:
    """The instance has more CPUs than vCPUs, as after ``ctl cpus`` with fewer; the kubelet takes the others."""
    kubelet = node_fixture.kubelet
    spec = spec_text(CpuSet.parse("2-5"), "[hotplug]\ncpus = 4").replace(
        "count = 4", 'count = 2\nplacement = "controller"\ntopology = "flat"'
    )
    instance = start_instance(
        kubelet,
        1,
        CpuSet.parse("2-5"),
        spec=spec,
        directory=node_fixture.directory,
        sockets=node_fixture.controller.directory,
        cgroupfs="ro",
    )
    instance.up()
    pins = sorted(str(thread.cpus) for thread in instance.vcpus())
    kept = f"{pins[0]},{pins[1]}"
    with observed(instance, kept):
        kubelet.resize(instance.uid, CpuSet.parse(kept))
        instance = resized(instance, kept)
        until(lambda: instance.receipt()["instance_cpus"] == str(CpuSet.parse(kept)), "the receipt")
        until(lambda: ctl(instance, "status")["ready"], "the instance to be ready")
        assert ctl(instance, "status")["placement"]["misplaced"] == []
    assert instance.stop() == 0
    assert "cpus_lost" not in instance.running.output


@SEALED_AND_NOT
@pytest.mark.node_only
def test_the_vcpus_leave_also_while_the_controller_is_away(node_fixture: NodeFixture) -> None:
    kubelet, controller = node_fixture.kubelet, node_fixture.controller
    instance = node_fixture.start(1, "2-3", cgroupfs="ro")
    instance.up()
    controller.kill()
    kubelet.resize(instance.uid, CpuSet.parse("2,5"))
    # The controller's cgroup has not got CPU 5 yet, so that both share CPU 2.
    until(lambda: all(thread.cpus == CpuSet([2]) for thread in instance.vcpus()), "the vCPUs to leave CPU 3")
    controller.start()
    instance = resized(instance, "2,5")
    assert instance.stop() == 0
    assert "faults=0" in instance.running.output


@SEALED_AND_NOT
@pytest.mark.node_only
def test_a_runner_that_is_killed_in_the_middle_leaves_nothing(node_fixture: NodeFixture) -> None:
    kubelet = node_fixture.kubelet
    instance = node_fixture.start(1, "2-4", cgroupfs="ro")
    instance.up()
    with observed(instance, "2-3"):
        kubelet.resize(instance.uid, CpuSet.parse("2-3"), applied=False)
        until(lambda: instance.group.cpus() == CpuSet.parse("2-3"), "the controller to take it")
    os.kill(instance.running.pid, 9)
    instance.running.wait()
    kubelet.stop(instance.uid, grace=0)
    kubelet.reconcile()
    until(lambda: not instance.group.path.exists(), "the instance to be removed")
    node_fixture.settle()
    if PARTITIONED:
        assert Cgroup(ROOT).read("cpuset.cpus.isolated") == ""


@pytest.mark.node_only
def test_a_resize_during_a_resize(node_fixture: NodeFixture) -> None:
    """The kubelet takes one CPU, exchanges another meanwhile, and gives both back."""
    kubelet = node_fixture.kubelet
    instance = node_fixture.start(1, "2-4", cgroupfs="ro")
    instance.up()
    for cpus in ("2,4-5", "2,5-6", "2-4"):
        kubelet.resize(instance.uid, CpuSet.parse(cpus))
    instance = resized(instance, "2-4")
    assert instance.stop() == 0


def test_with_cgroups_of_its_own_an_instance_grows_into_float_and_follows_its_container(
    kubelet: Kubelet, tmp_path: Path
) -> None:
    """Placement ``delegated``."""
    cpus = CpuSet.parse("2-6")
    spec = spec_text(cpus, "[hotplug]\ncpus = 4").replace(
        "count = 5", 'count = 2\ncpus = "2-3"\nplacement = "delegated"\ntopology = "flat"'
    )
    instance = start_instance(
        kubelet, 1, cpus, spec=spec, directory=tmp_path, privileged=True, cgroupfs="rw", cgroup_namespace="private"
    )
    instance.up()
    scope = Cgroup(Path(f"{ROOT}{instance.scope}"))
    own, float_cgroup = Cgroup(scope.path / "instance"), Cgroup(scope.path / "float")
    assert (str(own.cpus()), str(float_cgroup.cpus())) == ("2-3", "4-6")
    assert ctl(instance, "cpus")["unused"] == "4-6"
    assert len(ctl(instance, "cpus", 3)["vcpus"]) == 3
    assert (str(own.cpus()), str(float_cgroup.cpus())) == ("2-4", "5-6")
    assert sorted(str(thread.cpus) for thread in instance.vcpus()) == ["2", "3", "4"]
    assert ctl(instance, "status")["placement"]["misplaced"] == []
    kubelet.resize(instance.uid, CpuSet.parse("3-6"))
    until(
        lambda: sorted(str(thread.cpus) for thread in instance.vcpus()) == ["3", "4", "5"] and str(own.cpus()) == "3-5",
        "vCPU 0 to leave CPU 2",
    )
    until(lambda: str(float_cgroup.cpus()) == "6", "float to have what is left")
    until(lambda: ctl(instance, "status")["ready"], "the instance to be ready")
    assert instance.stop() == 0
