"""``instance-runner inspect`` on a real node: real cgroups, the controller, and a kubelet's file that changes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import trio

from runner.cpuset import CpuSet
from runner.host import cgroup
from runner.inspection.look import Machine, look_at_node
from runner.inspection.rules import judge
from tests.node.cgroups import ROOT, SECONDS, Cgroup, task
from tests.node.standin_kubelet import Container, Kubelet, Pod
from tests.support.crew import PYTHON, Crew, crew

UID = "3ceda12c-3ee9-40fa-9f42-61428fe654a6"
ID = "5baab67f1daf9297c60974e50ad9f94f288077161a7c41376478e79aae671e07"
PROJECT = Path(__file__).parents[2]
MIB = 1 << 20
RULES = ("vcpus", "exclusive", "local", "charged", "kubelet")


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {SECONDS} s for {what}"
        time.sleep(0.05)


@pytest.fixture
def exclusive(numa: dict[int, CpuSet]) -> Iterator[CpuSet]:
    """Return two CPUs of the last NUMA node that nothing of this machine's user space may run on until a pod does."""
    if len(numa) < 2 or len(numa[max(numa)]) < 3:
        pytest.skip("two NUMA nodes with three CPUs each are missing")
    cpus = CpuSet(list(numa[max(numa)])[:2])
    before = {}
    for path in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or it is the kernel's and stays where it is
            flags = int((path / "stat").read_text().rpartition(")")[2].split()[6])
            if not flags & 0x00200000:
                before[int(path.name)] = os.sched_getaffinity(int(path.name))
                os.sched_setaffinity(int(path.name), CpuSet(before[int(path.name)]) - cpus)
    yield cpus
    for tid, mask in before.items():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(tid, mask)


@attrs.frozen
class Node:
    """A node with a controller, and the kubelet that it follows."""

    kubelet: Kubelet
    root: Cgroup
    controller: subprocess.Popen[bytes]

    def inspect(self, *more: str) -> subprocess.CompletedProcess[str]:
        where = ("--root", str(self.root.path), "--kubelet-dir", str(self.kubelet.directory))
        argv = (*PYTHON, "-m", "runner", "inspect", *where, *more)
        return subprocess.run(argv, check=False, capture_output=True, text=True)

    def verdicts(self) -> dict[str, tuple[str, str]]:
        """Return rule → result and reasons, as this process sees it."""
        report = judge(trio.run(look_at_node, Machine(), cgroup.Cgroup(self.root.path), self.kubelet.directory))
        return {verdict.rule: (verdict.result.value, "; ".join(verdict.reasons)) for verdict in report.verdicts}

    def violation(self, rule: str) -> str:
        """Return why *rule* is violated; every other one holds."""
        verdicts = self.verdicts()
        assert {each for each, (result, _) in verdicts.items() if result != "ok"} == {rule}, verdicts
        assert verdicts[rule][0] == "violated"
        return verdicts[rule][1]


@pytest.fixture
def node(kubelet: Kubelet, exclusive: CpuSet, tmp_path: Path) -> Iterator[Node]:
    kubelet.admit(Pod(UID, (Container(("true",), cpus=exclusive),)))
    root = Cgroup(ROOT / f"inspect-{os.getpid()}")
    command = "import sys; from runner.controller.main import main; sys.exit(main())"
    where = ("--root", root.path, "--socket", tmp_path / "socket", "--kubelet-dir", kubelet.directory)
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        controller = subprocess.Popen([sys.executable, "-c", command, *map(str, where)], cwd=PROJECT, stderr=stderr)
    try:
        until(lambda: (tmp_path / "socket").exists() or controller.poll() is not None, "the controller's socket")
        assert controller.poll() is None, log.read_text()
        yield Node(kubelet, root, controller)
    finally:
        controller.kill()
        controller.wait()
        until(lambda: not root.populated(), "the tree is empty")
        root.remove()


@attrs.frozen
class Instance:
    """An instance of two vCPUs that a runner of flesh and blood has placed: this file."""

    crew: Crew
    qemu: int
    """Its pid in the crew."""
    scope: Cgroup
    group: Cgroup
    vcpus: tuple[int, int]
    """Their numbers on the node."""


@pytest.fixture
def instance(node: Node, exclusive: CpuSet) -> Iterator[Instance]:
    pod = node.kubelet.cgroup.child(f"kubepods-pod{UID.replace('-', '_')}.slice")
    pod.delegate()
    scope = pod.child(f"cri-containerd-{ID}.scope", cpuset_cpus=exclusive)
    with crew() as found:
        scope.write("cgroup.procs", found.pid)
        anchor = found.outside(found.start("sleep", [])[0])
        qemu, threads = found.start("qemu-system-x86", [], {"CPU 0/TCG": [], "CPU 1/TCG": [], "worker": []}, 8 * MIB)
        group = node.root.child(f"instance-{UID}")
        until(lambda: group.read("cgroup.type") == "threaded" and group.cpus() == exclusive, "the controller mends it")
        for pid in map(int, scope.read("cgroup.procs").split()):
            if pid != anchor:
                Cgroup(node.root.path / "float").write("cgroup.procs", pid)
        vcpus = (found.outside(threads["CPU 0/TCG"]), found.outside(threads["CPU 1/TCG"]))
        for tid, cpu in zip(vcpus, exclusive, strict=True):
            group.write("cgroup.threads", tid)
            os.sched_setaffinity(tid, [cpu])
        yield Instance(found, qemu, scope, group, vcpus)


def test_every_rule_holds(node: Node, instance: Instance, exclusive: CpuSet, numa: dict[int, CpuSet]) -> None:
    shown = node.inspect()
    assert shown.returncode == 0, shown.stdout + shown.stderr
    print(shown.stdout)
    lines = shown.stdout.splitlines()
    assert lines[0] == (f"instance {UID}: CPUs '{exclusive}' on NUMA node '{max(numa)}', placement controller")
    rows = [line.split() for line in lines]
    for index, (tid, cpu) in enumerate(zip(instance.vcpus, exclusive, strict=True)):
        assert ["vcpu", str(index), str(tid), "CPU", f"{index}/TCG", str(cpu)] in [row[:6] for row in rows]
    floating = Cgroup(node.root.path / "float")
    roles = {row[0]: row for row in rows if row}
    for role in ("runner", "emulator"):
        assert roles[role][-1] == str(floating)
        assert str(floating.cpus()) in roles[role]
    assert roles["anchor"][-1] == str(instance.scope)
    assert [line.split()[:2] for line in lines if line.startswith("ok ")] == [["ok", rule] for rule in RULES]
    assert "only sleepers (anchors: 1, pod sandboxes: 0)" in shown.stdout


def test_who_else_may_run_on_an_exclusive_cpu_is_named(node: Node, instance: Instance, exclusive: CpuSet) -> None:
    with task(threads=2) as intruder:
        os.sched_setaffinity(intruder.tids[1], [min(exclusive)])
        said = node.violation("exclusive")
        assert f"other (thread {intruder.tids[1]}, " in said
        assert f"may run on '{min(exclusive)}'" in said
        shown = node.inspect("3ceda", "--json")
        assert shown.returncode == 3, shown.stderr
        assert json.loads(shown.stdout)["instances"][0]["verdicts"][1]["reasons"] == [said]
    with task(instance.scope) as shell:
        said = node.violation("exclusive")
        assert f"(thread {shell.pid}, " in said
        assert f"in the cgroup '{instance.scope}' may run on '{exclusive}'" in said
    assert node.verdicts()["exclusive"][0] == "ok"


def test_vcpus_that_are_not_alone_in_their_cgroup(node: Node, instance: Instance, exclusive: CpuSet) -> None:
    os.sched_setaffinity(instance.vcpus[1], [min(exclusive)])
    assert node.violation("vcpus") == f"2 vCPU threads share CPU {min(exclusive)}"
    Cgroup(node.root.path / "float").write("cgroup.threads", instance.vcpus[1])
    said = node.violation("vcpus")
    assert f"vcpu 1 (thread {instance.vcpus[1]}, 'CPU 1/TCG') may run on" in said
    assert f"is in the cgroup '{node.root}/float' instead of '/{node.root.path.name}/instance-{UID}'" in said


def test_memory_from_another_numa_node_charged_to_nobody(
    node: Node, instance: Instance, numa: dict[int, CpuSet], exclusive: CpuSet
) -> None:
    """Touched first by a thread that is in float already, and on the first NUMA node."""
    instance.crew.tell("end", instance.qemu)
    cpu = min(numa[min(numa)] - CpuSet([0]))
    _, threads = instance.crew.start("qemu-system-x86", [cpu], {"CPU 0/TCG": [], "CPU 1/TCG": []}, 64 * MIB)
    for name, each in zip(threads, exclusive, strict=True):
        tid = instance.crew.outside(threads[name])
        instance.group.write("cgroup.threads", tid)
        os.sched_setaffinity(tid, [each])
    verdicts = node.verdicts()
    assert [verdicts[rule][0] for rule in RULES] == ["ok", "ok", "violated", "violated", "ok"]
    assert f"64 MiB on NUMA node {min(numa)} of the guest's RAM" in verdicts["local"][1]
    assert f"64 MiB of the guest's RAM is mapped, but '{instance.scope}' is charged only" in verdicts["charged"][1]


def test_float_follows_the_kubelet_or_is_found_beside_it(node: Node, instance: Instance) -> None:
    assert instance.vcpus
    kubelet = node.kubelet
    first, second = list(kubelet.default - CpuSet([0]))[:2]
    kubelet.admit(Pod("416de7c2-21de-472d-817c-fa9d4306cb7d", (Container(("true",), cpus=CpuSet([first])),)))
    assert node.verdicts()["kubelet"][0] == "ok", "the controller follows while we look"
    node.controller.kill()
    node.controller.wait()
    floating = kubelet.default
    kubelet.admit(Pod("b41f38d8-2c21-4168-af77-6d0cc5482dcb", (Container(("true",), cpus=CpuSet([second])),)))
    assert node.violation("kubelet") == f"float has '{floating}', but the kubelet's shared pool is '{kubelet.default}'"
    kubelet.cpu_state.unlink()
    assert node.verdicts()["kubelet"][0] == "unknown"


def test_an_instance_that_has_ended(node: Node, instance: Instance) -> None:
    instance.crew.tell("end", instance.qemu)
    until(lambda: not instance.group.populated(), "QEMU has ended")
    verdicts = node.verdicts()
    assert verdicts["vcpus"] == ("unknown", "there is no vCPU thread: the instance starts, or has ended")
