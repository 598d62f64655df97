"""Isolated partitions on a real kernel: what the kernel itself keeps off an instance's CPUs, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from runner.kernel import inotify
from tests.node import minimal_pods
from tests.node.cgroups import PARTITIONED, ROOT, Cgroup, cgroup_of, mask_of, refusal_of, task, until
from tests.node.host_settings import changes
from tests.node.instances import TREE, Instance, NodeFixture, controller_of, uid_of
from tests.node.minimal_pods import A, B, Machine, reason, result
from tests.node.recorded import recorded
from tests.node.standin_kubelet import Container, Kubelet, Pod
from tests.node.stopped_controller import PARTITION_FILES, Stop, go_on, stopped, writer_of
from tests.support.soak import some, times

pytestmark = pytest.mark.usefixtures("rom")
Start = Callable[..., Instance]
EVERY = f"0-{(os.cpu_count() or 1) - 1}"
PARTITIONS = pytest.mark.skipif(not PARTITIONED, reason="remote partitions are missing: they come with Linux 6.7")


@pytest.fixture
def start(node_fixture: NodeFixture) -> Start:
    return node_fixture.start


def isolated() -> CpuSet:
    """Return the CPUs of all isolated partitions of the machine."""
    return Cgroup(ROOT).cpus("cpuset.cpus.isolated")


@PARTITIONS
@pytest.mark.gate
def test_an_instance_is_sealed_before_its_guest_runs_and_unsealed_at_its_end(start: Start) -> None:
    instance = start(1, "2-3")
    instance.up()
    assert isolated() == instance.cpus
    assert instance.group.read("cpuset.cpus.partition") == "isolated"
    assert TREE.cpus("cpuset.cpus.exclusive") == instance.cpus
    instance.is_placed()
    receipt = instance.receipt()
    assert (receipt["guarantee"], receipt["guarantee_reason"]) == ("enforced", "")
    output = instance.running.output
    assert output.index("guarantee enforced cpus=2-3") < output.index("the guest runs")
    assert Cgroup(Path(f"{ROOT}{instance.scope}")).cpus("cpuset.cpus") == instance.cpus
    assert Cgroup(Path(f"{ROOT}{instance.scope}")).cpus().isdisjoint(instance.cpus)
    assert instance.stop() == 0
    assert "ended outcome=stopped status=0 faults=0" in instance.running.output
    assert isolated() == CpuSet()
    assert TREE.read("cpuset.cpus.exclusive") == ""
    until(lambda: not instance.group.path.exists(), "the instance to be removed")


def refused(pid: int, cpus: CpuSet) -> None:
    """Check that process *pid* may not run on any of *cpus*, and cannot make that so."""
    assert mask_of(pid).isdisjoint(cpus)
    for cpu in cpus:
        assert refusal_of(partial(os.sched_setaffinity, pid, {cpu})) == "EINVAL"
    assert mask_of(pid).isdisjoint(cpus)


@PARTITIONS
@pytest.mark.gate
def test_nothing_else_can_run_there_wherever_it_is_started(start: Start, kubelet: Kubelet, tree: Cgroup) -> None:
    instance = start(1, "2-3")
    instance.up()
    instance.running.execute("sh", "-c", "while :; do :; done >/dev/null 2>&1 &")
    loops = [pid for name, pids in instance.processes().items() if name == "sh" for pid in pids]
    assert loops
    assert cgroup_of(loops[0]) == instance.scope, "it is not swept, because it need not be"
    neighbour = kubelet.run(
        Pod(uid_of(2), (Container(("sh", "-c", "echo ready; exec sleep infinity"), cpus=CpuSet.parse("4-5")),))
    )["main"]
    neighbour.wait_for("ready")
    neighbour.update_cpus(CpuSet.parse("2-5"))  # another Guaranteed pod, and a kubelet that is wrong
    assert mask_of(neighbour.pid) == CpuSet.parse("4-5")
    tree.delegate()
    everywhere = tree.child("service", cpuset_cpus=EVERY)
    with task(everywhere) as service, task() as rootless:
        for pid in (*loops, neighbour.pid, service.pid, rootless.pid):
            refused(pid, instance.cpus)
        kubepods = Cgroup(ROOT / "kubepods.slice")
        for group in (kubepods, *kubepods.children(), Cgroup(Path(f"{ROOT}{instance.scope}"))):
            before = group.read("cpuset.cpus")
            for cpus in (EVERY, str(instance.cpus), before or EVERY):  # ENOSPC: a populated cpuset is not cleared
                group.write("cpuset.cpus", cpus)
                assert isolated() == instance.cpus
        kubelet.reconcile()
        for pid in (*loops, neighbour.pid, service.pid, rootless.pid):
            refused(pid, instance.cpus)
    instance.vcpus_hold()
    assert kubelet.stop(uid_of(2), grace=0)
    assert instance.stop() == 0
    assert isolated() == CpuSet()


GRAB = """
import os, sys
cpus = [int(cpu) for cpu in sys.argv[1:]]
while True:
    for cpu in cpus:
        try:
            os.sched_setaffinity(0, {cpu})
        except OSError:
            pass
"""
LOOP = ("sh", "-c", "while :; do :; done")
WORKED = 0.3
"""Seconds of CPU time that each of the processes that are to disturb has had, before it counts as having tried."""


@contextlib.contextmanager
def looping(*argv: str, cgroup: Cgroup | None = None) -> Iterator[int]:
    """Hold a process that never rests, in *cgroup* if it is given."""
    enter = () if cgroup is None else cgroup.entering()
    with subprocess.Popen((*enter, *argv)) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of process *pid*."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@PARTITIONS
@pytest.mark.node_only
def test_the_trace_shows_nothing_else_under_stress_of_everything_else(
    start: Start, kubelet: Kubelet, tree: Cgroup
) -> None:
    """Busy loops by exec, of another Guaranteed pod, of a service with all CPUs, and one that asks for these CPUs all the time."""
    instance = start(1, "2-3")
    instance.up()
    instance.running.execute("sh", "-c", f"{LOOP[2]} >/dev/null 2>&1 &")
    cpus = CpuSet.parse("4-5")
    neighbour = kubelet.run(Pod(uid_of(2), (Container(("sh", "-c", f"echo ready; {LOOP[2]}"), cpus=cpus),)))["main"]
    neighbour.wait_for("ready")
    neighbour.update_cpus(cpus | instance.cpus)
    tree.delegate()
    service = tree.child("service", cpuset_cpus=EVERY)
    with (
        looping(*LOOP, cgroup=service) as served,
        looping(sys.executable, "-I", "-S", "-c", GRAB, *map(str, instance.cpus)) as grabbing,
    ):
        [executed] = instance.processes()["sh"]
        loops = (executed, neighbour.pid, served, grabbing)
        vcpus = [thread.tid for thread in instance.vcpus()]
        with recorded(instance.cpus) as record:
            before = {pid: cpu_seconds(pid) for pid in loops}
            kubelet.reconcile()
            until(lambda: all(cpu_seconds(pid) - before[pid] >= WORKED for pid in loops), "every loop to have worked")
        assert record.others(vcpus) == []
        for account in record.accounts.values():
            print(account.cpu, {task.name: task.nanoseconds for task in account.kernel})
    assert kubelet.stop(uid_of(2), grace=0)
    assert instance.stop() == 0


@PARTITIONS
def test_a_partition_that_others_invalidate_is_repaired(start: Start) -> None:
    instance = start(1, "2-3")
    instance.up()
    TREE.write("cpuset.cpus.exclusive", "")
    until(lambda: TREE.cpus("cpuset.cpus.exclusive") == instance.cpus, "the root to have its CPUs for itself again")
    until(lambda: isolated() == instance.cpus, "the partition, which is made after that")
    instance.group.write("cpuset.cpus.exclusive", "3")
    until(lambda: isolated() == instance.cpus, "the partition to have both CPUs again")
    instance.vcpus_hold()
    assert instance.stop() == 0
    assert isolated() == CpuSet()


@PARTITIONS
@pytest.mark.parametrize("victim", [pytest.param("qemu", marks=pytest.mark.node_only), "runner"])
@pytest.mark.gate
def test_nothing_stays_of_a_partition_when_its_owner_is_killed(start: Start, victim: str) -> None:
    instance = start(1, "2-3")
    instance.up()
    os.kill(instance.processes()[victim][0], signal.SIGKILL)
    until(lambda: isolated() == CpuSet(), "the partition to be gone")
    instance.running.wait()
    until(lambda: TREE.read("cpuset.cpus.exclusive") == "", "nothing to be exclusive")


@PARTITIONS
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", some(["qemu", "runner"], 1))
@pytest.mark.node_only
def test_an_instance_killed_at_any_step_of_its_partition_leaves_nothing(
    before: dict[str, str], node_fixture: NodeFixture, tmp_path: Path, victim: str
) -> None:
    """Its life is repeated, and it is killed before another write of the controller's each time; QEMU while there is one."""
    stop, controller = Stop(tmp_path, PARTITION_FILES), node_fixture.controller
    controller.kill()
    controller.before = stop.code
    controller.start()
    assert controller.process is not None
    pids = (controller.process.pid, writer_of(controller.process.pid))
    killed = 0
    for number in itertools.count():
        instance = node_fixture.start(1, "2-3")
        stop.choose(number)
        running = instance.running
        until(lambda: stopped(*pids) or "the guest runs" in running.output, "a step, or the guest")  # noqa: B023
        if not stopped(*pids):
            running.kill()
            until(lambda: stopped(*pids) or running.ended, "a step, or the end")  # noqa: B023
        survived = stop.forget()
        victims = [] if survived else instance.processes().get(victim, [])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        killed += len(victims)
        go_on(*pids)
        running.wait()
        node_fixture.kubelet.stop(instance.uid, grace=0)
        node_fixture.kubelet.reconcile()
        until(lambda: not instance.group.path.exists(), "the instance to be removed")  # noqa: B023
        until(lambda: TREE.read("cpuset.cpus.exclusive") == "", "nothing to be exclusive")
        assert isolated() == CpuSet()
        until(lambda: not changes(before), "the settings to be as before")
        if survived:
            break
    assert number >= 5, "three writes seal it, three unseal it"
    assert killed >= (3 if victim == "qemu" else 5)


@pytest.mark.node_only
def test_a_demand_that_cannot_be_met_is_a_refused_start(kubelet: Kubelet, tmp_path: Path) -> None:
    with controller_of(kubelet, tmp_path, "--partitions", "off") as controller:
        node = NodeFixture(kubelet, controller, tmp_path)
        instance = node.start(1, "2-3", keys='exclusive = "enforced"\n')
        assert instance.running.wait() == 31
        assert 'set cpu.exclusive = "auto" to start without that guarantee' in instance.running.output
        assert "the controller's option --partitions is off" in instance.running.output
        until(lambda: not instance.group.path.exists(), "the instance to be removed")


@pytest.mark.node_only
def test_without_partitions_the_instance_runs_as_before(start: Start) -> None:
    """On a kernel before 6.7; on others a foreign partition has its CPU."""
    foreign = Cgroup(ROOT).child("foreign") if PARTITIONED else None
    try:
        if foreign is not None:
            foreign.write("cpuset.cpus.exclusive", "3")
        instance = start(1, "2-3")
        instance.up()
        reason = "they come with Linux 6.7" if foreign is None else "a cgroup beside it has some of these CPUs"
        assert "guarantee arranged (" in instance.running.output
        assert reason in instance.receipt()["guarantee_reason"]
        instance.is_placed()
        assert instance.stop() == 0
        assert "ended outcome=stopped status=0 faults=0" in instance.running.output
    finally:
        if foreign is not None:
            foreign.path.rmdir()


# -- minimal pods ----------------------------------------------------------------------------------------------------


def sealed(machine: Machine, pod: minimal_pods.Pod) -> str:
    """Take *pod* to the point where its guest would run; return the guarantee that it has."""
    if not pod.scope.processes() - {pod.pid}:
        pod.execute("anchor")
    result(pod.call(machine.socket, "registerCgroup", uuid=pod.uid, cpuset=str(pod.scope.cpus())))
    pod.execute("write", -5, 0)
    pod.execute("write", -4, pod.execute("thread"))
    return str(result(pod.call(machine.socket, "sealCgroup", uuid=pod.uid))["guarantee"])


def ended(machine: Machine, pod: minimal_pods.Pod) -> None:
    """Let *pod* go the way back."""
    result(pod.call(machine.socket, "unsealCgroup", uuid=pod.uid))
    pod.execute("write", -3, 0)
    assert result(pod.call(machine.socket, "deregisterCgroup", uuid=pod.uid)) == {"removed": True}


def left_over(machine: Machine, before: dict[str, str]) -> dict[str, object]:
    """Return what is isolated, exclusive, or not as *before*."""
    found = {"isolated": isolated(), "exclusive": machine.root.exclusive_cpus(), **changes(before)}
    return {name: value for name, value in found.items() if value}


def all_given_back(machine: Machine, before: dict[str, str]) -> None:
    """Wait until nothing is isolated or exclusive, and everything is as *before*.

    A moment later that may be untrue: the tuner's pass for an instance that has just ended may still be at work.
    """
    try:
        until(lambda: not left_over(machine, before), "nothing to be left")
    except AssertionError:
        pytest.fail(f"left: {left_over(machine, before)}")


@PARTITIONS
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", some(["controller", "writer", "pod", "everything"], 1))
@pytest.mark.node_only
def test_a_kill_at_any_step_of_sealing_and_unsealing_leaves_nothing(
    before: dict[str, str], machine: Machine, tmp_path: Path, victim: str
) -> None:
    """The life of an instance is repeated, and something is killed before another write of the controller's each time.

    What survives goes on: a pod with the next controller, a controller without its writer or its pod.
    """
    stop = Stop(tmp_path, PARTITION_FILES)

    def live(pod: minimal_pods.Pod) -> str:
        guarantee = sealed(machine, pod)
        ended(machine, pod)
        return guarantee

    def over() -> None:
        """Let the last pod live once more if it is alive, remove it, and check that nothing is left."""
        for pod in list(machine.pods):
            if victim in {"controller", "writer"}:
                assert live(pod) == "enforced"
            machine.pods.remove(pod)
            pod.end()
        machine.put_state({B: machine.b})
        all_given_back(machine, before)
        until(lambda: machine.a <= machine.float_cgroup.effective_cpus(), "float to have the CPUs")

    for number in itertools.count():
        # The pod's thread ends with the controller, which may be stopped.
        with ThreadPoolExecutor(1) as pool, machine.controller(before=stop.code) as controller:
            over()
            machine.put_state({A: machine.a, B: machine.b})
            pod = machine.pod(A, machine.a)
            pids = (controller.pid, writer_of(controller.pid))
            stop.choose(number)
            life = pool.submit(live, pod)
            until(lambda: stopped(*pids) or life.done(), "a step, or the end")  # noqa: B023
            if stop.forget():
                assert life.result() == "enforced"
                break
            targets = {"controller": pids[:1], "writer": pids[1:], "pod": (pod.pid,), "everything": (*pids, pod.pid)}
            for pid in targets[victim]:
                os.kill(pid, signal.SIGKILL)
            go_on(*pids)
            assert life.exception() is None or victim != "writer"
            if victim in {"writer", "pod"}:
                all_given_back(machine, before)
    assert number >= 5, "three writes seal it, three unseal it"
    with machine.controller():  # which changes nothing, but gives back
        all_given_back(machine, before)


@PARTITIONS
@pytest.mark.timeout(times(300))
@pytest.mark.node_only
def test_two_instances_start_and_end_against_each_other(machine: Machine) -> None:
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)

    def live(pod: minimal_pods.Pod) -> None:
        for _ in range(times(2)):
            assert sealed(machine, pod) == "enforced"
            assert pod.scope.cpus() <= isolated()
            ended(machine, pod)

    with machine.controller(), ThreadPoolExecutor(2) as pool:
        list(pool.map(live, (a, b)))
        assert isolated() == CpuSet()
        assert machine.root.exclusive_cpus() == CpuSet()
        assert machine.float_cgroup.effective_cpus() == machine.shared


@PARTITIONS
def test_the_controller_killed_at_any_step_is_not_noticed(machine: Machine) -> None:
    pod = machine.pod(A, machine.a)
    with machine.controller() as process:
        assert sealed(machine, pod) == "enforced"
        process.kill()
    assert isolated() == machine.a, "the partition is the kernel's"
    machine.instance(A).write("cpuset.cpus.partition", "member")  # as it is if it was killed between two writes
    assert isolated() == CpuSet()
    with machine.controller() as process:
        until(lambda: isolated() == machine.a, "the partition to be there again")
        process.kill()
    with inotify.watching() as queue:
        for group in (machine.root, machine.float_cgroup, machine.instance(A)):
            queue.watch(group.path, inotify.MODIFY | inotify.CREATE | inotify.DELETE)
        with machine.controller() as process:
            assert result(pod.call(machine.socket, "sealCgroup", uuid=A)) == {"guarantee": "enforced"}
            process.kill()
        assert queue.pending() == (), "no file of the tree was written to"
    machine.root.write("cpuset.cpus.exclusive", "")  # without which the kernel forgets what to give back
    os.kill(pod.pid, signal.SIGKILL)
    with machine.controller():  # finds a partition without a thread
        until(lambda: isolated() == CpuSet(), "the partition to be gone")
        until(lambda: machine.root.exclusive_cpus() == CpuSet(), "nothing to be exclusive")


@PARTITIONS
def test_without_its_writer_the_controller_goes_on(machine: Machine) -> None:
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller("--metrics", "127.0.0.1:9440") as process:
        assert sealed(machine, a) == "enforced"
        writer = writer_of(process.pid)
        status = dict(line.split(":", 1) for line in Path(f"/proc/{writer}/status").read_text().splitlines())
        assert int(status["CapPrm"], 16) == 1 << 21, "CAP_SYS_ADMIN and no other"
        status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        assert not int(status["CapPrm"], 16) & 1 << 21, "the controller has it no more"
        os.kill(writer, signal.SIGKILL)
        until(lambda: "cgroup writer has ended" in health(), "the kubelet to be asked for another controller")
        assert sealed(machine, b) == "arranged"
        assert isolated() == machine.a
        ended(machine, a)
        assert isolated() == CpuSet(), "a partition ends without the writer"
        process.kill()
        until(lambda: not Path(f"/proc/{writer}").exists(), "the writer to be reaped")
    with machine.controller() as process:
        writer = writer_of(process.pid)
        assert sealed(machine, b) == "enforced"
        process.kill()
        until(lambda: not Path(f"/proc/{writer}").exists(), "the writer to end with its controller")


def health() -> str:
    """Return what the controller answers to the kubelet's question whether it lives."""
    try:
        with urllib.request.urlopen("http://127.0.0.1:9440/healthz") as answer:
            return str(answer.read())
    except urllib.error.HTTPError as error:
        return str(error.read())


@PARTITIONS
def test_only_its_own_pod_seals_an_instance(machine: Machine) -> None:
    a, b = machine.pod(A, machine.a), machine.pod(B, machine.b)
    with machine.controller():
        assert sealed(machine, a) == "enforced"
        result(b.call(machine.socket, "registerCgroup", uuid=B, cpuset=str(machine.b)))
        for method in ("sealCgroup", "unsealCgroup"):
            assert reason(b.call(machine.socket, method, uuid=A)) == "identity"
        answer = result(b.call(machine.socket, "sealCgroup", uuid=B))
        assert answer == {"guarantee": "arranged", "reason": "no thread is in its cgroup"}
        assert isolated() == machine.a
        assert machine.instance(A).partition() == "isolated"
