"""``instance-runner inspect`` on a real node: a real instance in its pod, the controller, and a kubelet's file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.base.subject import worst
from runner.facts.roots import Roots
from runner.inspect.observe import observe_node
from runner.inspect.rules import judge
from runner.kernel import cgroup
from tests.node.cgroups import Cgroup, until
from tests.node.instances import TREE, Controller, Instance, NodeFixture, spec_text, start_instance
from tests.node.recorded import kept_off
from tests.node.standin_kubelet import MIB, PROJECT, Container, Kubelet, Pod

pytestmark = pytest.mark.usefixtures("rom")
INSPECT = (sys.executable, "-m", "runner", "inspect")
RULES = ("vcpus", "exclusive", "local", "charged", "kubelet")


@pytest.fixture(scope="module")
def exclusive(numa: dict[int, CpuSet]) -> CpuSet:
    if len(numa) < 2 or len(numa[max(numa)]) < 3:
        pytest.skip("two NUMA nodes with three CPUs each are missing")
    return CpuSet(list(numa[max(numa)])[:2])


@attrs.frozen
class Node:
    """A node with one instance on it."""

    kubelet: Kubelet
    controller: Controller
    instance: Instance
    pod_logs: Path

    def inspect(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the program on the node."""
        argv = (*INSPECT, "--kubelet-dir", str(self.kubelet.directory), "--pod-logs-dir", str(self.pod_logs), *more)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(argv, check=False, capture_output=True, text=True, cwd=PROJECT, env=environment)

    def verdicts(self) -> dict[str, tuple[str, str]]:
        """Return rule → worst level and what was found, as this process sees it."""
        report = judge(trio.run(observe_node, Roots(), cgroup.Cgroup(TREE.path), self.kubelet.directory))
        judgements = (*(found for each in report.instances for found in each.judgements), *report.kubelet)
        by_rule = {rule: [each for each in judgements if each.subject == rule] for rule in RULES}
        return {rule: (worst(found).value, "; ".join(each.found for each in found)) for rule, found in by_rule.items()}

    def violation(self, rule: str) -> str:
        """Return why *rule* does not hold; every other one holds."""
        verdicts = self.verdicts()
        assert {each for each, (level, _) in verdicts.items() if level != "ok"} == {rule}, verdicts
        assert verdicts[rule][0] == "error"
        return verdicts[rule][1]

    def vcpu(self, index: int) -> int:
        """Return the thread of a vCPU."""
        return next(each.tid for each in self.instance.vcpus() if each.name == f"CPU {index}/TCG")


@contextlib.contextmanager
def node_of(
    kubelet: Kubelet, controller: Controller, exclusive: CpuSet, mems: CpuSet, directory: Path
) -> Iterator[Node]:
    """Hold a node with an instance on these CPUs, whose guest is up."""
    spec = spec_text(exclusive, "[[network]]", '[instance]\nname = "web"').replace(
        "[cpu]\n", '[cpu]\nplacement = "controller"\n'
    )
    sockets = controller.directory
    instance = start_instance(kubelet, 1, exclusive, spec=spec, directory=directory, mems=mems, sockets=sockets)
    instance.up()
    (directory / "logs" / f"prod_web-1_{instance.uid}").mkdir(parents=True)  # as the kubelet names them
    with kept_off(exclusive):
        yield Node(kubelet, controller, instance, directory / "logs")


@pytest.fixture(scope="module")
def node(shared_node: NodeFixture, exclusive: CpuSet, numa: dict[int, CpuSet]) -> Iterator[Node]:
    """Return the node that all of these tests share; the last one ends its instance."""
    mems = CpuSet([max(numa)])
    with node_of(shared_node.kubelet, shared_node.controller, exclusive, mems, shared_node.directory) as node:
        yield node


def test_every_rule_holds(node: Node, exclusive: CpuSet, numa: dict[int, CpuSet]) -> None:
    shown = node.inspect()
    assert shown.returncode == 0, shown.stdout + shown.stderr
    print(shown.stdout)
    lines = shown.stdout.splitlines()
    uid = node.instance.uid
    assert lines[0].split() == ["INSTANCE", "POD", "UUID", "CPUS", "UPTIME", "VERDICT"]
    assert lines[1].split()[:4] == ["web", "prod/web-1", uid, str(exclusive)]
    assert lines[1].endswith("ok")
    title = f"instance web, pod prod/web-1, {uid}: CPUs '{exclusive}' on NUMA node '{max(numa)}', placement controller"
    assert lines[3] == f"{title}, guarantee enforced"
    rows = [line.split() for line in lines]
    for index, cpu in enumerate(exclusive):
        assert ["vcpu", str(index), str(node.vcpu(index)), "CPU", f"{index}/TCG", str(cpu)] in [row[:6] for row in rows]
    roles = {row[0]: row for row in rows if row}
    for role in ("runner", "dnsmasq", "emulator"):
        assert roles[role][-1] == str(node.instance.float_group)
        assert str(node.kubelet.default) in roles[role]
    assert roles["anchor"][-1] == node.instance.scope
    assert roles["vcpu"][-1] == str(node.instance.group)
    assert [line.split()[:2] for line in lines if line.startswith("ok ")] == [["ok", rule] for rule in RULES]
    assert "only sleepers (anchors: 0, pod sandboxes: 0)" in shown.stdout, "the kernel takes these CPUs from them, too"
    assert f"64 MiB on NUMA node {max(numa)} of the guest's RAM" in shown.stdout
    # Inside the container, without privilege and without a mount of cgroupfs, most of the rules are unknown.
    report = json.loads(node.instance.running.execute(*INSPECT, "--json"))
    (inside,) = report["instances"]
    assert {each["subject"]: each["level"] for each in (*inside["judgements"], *report["judgements"])} == {
        "vcpus": "ok",
        "exclusive": "unknown",
        "local": "unknown",
        "charged": "unknown",
        "kubelet": "unknown",
    }
    assert inside["backend"] == "controller"
    assert sorted({thread["role"] for thread in inside["threads"]}) == [
        "anchor",
        "dnsmasq",
        "emulator",
        "runner",
        "vcpu",
    ]


@contextlib.contextmanager
def halted(pid: int) -> Iterator[None]:
    """Let the process *pid* do nothing in the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_vcpus_that_are_not_alone_in_their_cgroup(node: Node, exclusive: CpuSet) -> None:
    tid = node.vcpu(1)
    with halted(node.instance.running.pid):  # it puts each vCPU back within a second
        os.sched_setaffinity(tid, [min(exclusive)])
        assert node.violation("vcpus") == f"2 vCPU threads share CPU {min(exclusive)}"
        node.instance.float_group.write("cgroup.threads", tid)
        message = node.violation("vcpus")
        node.instance.group.write("cgroup.threads", tid)
    assert f"vcpu 1 (thread {tid}, 'CPU 1/TCG') may run on" in message
    assert f"is in the cgroup '{node.instance.float_group}' instead of '{node.instance.group}'" in message
    until(lambda: node.verdicts()["vcpus"][0] == "ok", "the runner to put it back")


def test_memory_that_was_moved_and_a_charge_that_is_not_there(node: Node, numa: dict[int, CpuSet]) -> None:
    [qemu] = node.instance.processes()["qemu"]
    moved = subprocess.run(["migratepages", str(qemu), str(max(numa)), str(min(numa))], check=False)
    assert moved.returncode == 0
    assert f"64 MiB on NUMA node {min(numa)} of the guest's RAM" in node.violation("local")
    subprocess.run(["migratepages", str(qemu), str(min(numa)), str(max(numa))], check=True)
    # With its anchors in another cgroup, that one counts as the pod's, and it is charged for nothing.
    scope = node.instance.running.scope
    elsewhere = Cgroup(scope.path.parent).child("elsewhere", cpuset_cpus=scope.read("cpuset.cpus"))
    anchors = node.instance.processes()["anchor"]
    for anchor in anchors:
        elsewhere.write("cgroup.procs", anchor)
    message = node.violation("charged")
    assert f"64 MiB of the guest's RAM is mapped, but '{elsewhere}' is charged only" in message
    for anchor in anchors:
        scope.write("cgroup.procs", anchor)
    assert node.verdicts()["charged"][0] == "ok"
    assert int(scope.read("memory.current")) >= 64 * MIB


def test_float_follows_the_kubelet_or_is_reported_as_different(node: Node) -> None:
    kubelet = node.kubelet
    first, second = list(kubelet.default - CpuSet([0]))[:2]
    kubelet.admit(Pod("416de7c2-21de-472d-817c-fa9d4306cb7d", (Container(("true",), cpus=CpuSet([first])),)))
    assert node.verdicts()["kubelet"][0] == "ok", "the controller follows"
    node.controller.kill()
    before = kubelet.default
    kubelet.admit(Pod("b41f38d8-2c21-4168-af77-6d0cc5482dcb", (Container(("true",), cpus=CpuSet([second])),)))
    assert node.violation("kubelet") == f"float has '{before}', but the kubelet's shared pool is '{kubelet.default}'"
    kubelet.cpu_state.unlink()
    assert node.verdicts()["kubelet"][0] == "unknown"
    [qemu] = node.instance.processes()["qemu"]
    os.kill(qemu, 9)
    node.instance.running.wait()
    verdicts = node.verdicts()
    assert verdicts["vcpus"] == ("unknown", "there is no vCPU thread: the instance starts, or has ended")
