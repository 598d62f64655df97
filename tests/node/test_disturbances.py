"""Interrupts, work queues and idle states of a real kernel: kept off instances' CPUs, and put back whatever dies.

Runs where :mod:`tests.node.test_controller_tree` does. Frequency governors and resctrl need hardware: their tests are
``tests/component/controller/test_host_tuner.py``, with fake trees.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio

from runner.base.cpuset import CpuSet
from runner.controller.main import RECORDS
from runner.controller.tune.tuner_process import TunerProcess
from runner.facts.roots import Roots
from runner.inspect.observe import observe_node
from runner.inspect.render import report_lines
from runner.inspect.rules import judge
from runner.kernel.cgroup import Cgroup as KernelCgroup
from tests.node.cgroups import SECONDS, until
from tests.node.forked_controllers import Process
from tests.node.host_settings import (
    DEFAULT,
    WORK_QUEUES,
    effective,
    interrupts,
    latency,
    mask,
    movable,
    refusal,
    settings,
)
from tests.node.instances import TREE, NodeFixture
from tests.node.minimal_pods import A, B, Machine, Pod, missing, result
from tests.node.stopped_controller import SETTING_FILES, Stop, child_of, stopped
from tests.support.soak import some, times

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")


def kept_off(cpus: CpuSet) -> bool:
    found = interrupts()
    return (
        all(found[number].isdisjoint(cpus) for number in movable())
        and mask(DEFAULT).isdisjoint(cpus)
        and mask(WORK_QUEUES).isdisjoint(cpus)
    )


def register(machine: Machine, uid: str, cpus: CpuSet) -> Pod:
    pod = machine.pod(uid, cpus)
    ask_for_its_cpus(machine, pod)
    return pod


def ask_for_its_cpus(machine: Machine, pod: Pod) -> None:
    pod.execute("anchor")
    result(pod.call(machine.socket, "registerCgroup", uuid=pod.uid, cpuset=str(pod.scope.cpus())))


def end(machine: Machine, pod: Pod) -> None:
    """Kill all of the pod's processes, and remove it from the kubelet's state."""
    machine.pods.remove(pod)
    pod.end()
    machine.put_state({each.uid: machine.a if each.uid == A else machine.b for each in machine.pods})


def test_settings_leave_the_cpus_and_come_back(machine: Machine, before: dict[str, str]) -> None:
    with machine.controller():
        pod = register(machine, A, machine.a)
        until(lambda: kept_off(machine.a))
        status = machine.ask("getStatus")
        refused = {number for number, cpus in interrupts().items() if cpus & machine.a}
        assert all(refusal(number, machine.shared) in {errno.EIO, errno.EPERM} for number in refused)
        delivered = {number for number in refused if effective(number) & machine.a}
        assert isinstance(status["disturbances"], list)
        sentences = " ".join(status["disturbances"])
        assert ("isolcpus=managed_irq" in sentences) == bool(delivered), status
        result(pod.call(machine.socket, "deregisterCgroup", uuid=A))
        until(lambda: settings() == before)


def test_two_instances_each_give_back_their_own(machine: Machine, before: dict[str, str]) -> None:
    with machine.controller():
        first, second = register(machine, A, machine.a), register(machine, B, machine.b)
        until(lambda: kept_off(machine.a | machine.b))
        result(first.call(machine.socket, "deregisterCgroup", uuid=A))
        until(lambda: mask(DEFAULT) >= machine.a)
        assert kept_off(machine.b)
        result(second.call(machine.socket, "deregisterCgroup", uuid=B))
        until(lambda: settings() == before)


def test_a_narrow_mask_of_an_administrator_comes_back(machine: Machine, before: dict[str, str]) -> None:
    number = movable()[0]
    narrow, wished = CpuSet([min(machine.a)]), CpuSet([min(machine.shared)])
    with administrators_mask(number, narrow), machine.controller():
        pod = register(machine, A, machine.a)
        until(lambda: kept_off(machine.a))
        result(pod.call(machine.socket, "deregisterCgroup", uuid=A))
        until(lambda: settings() == {**before, str(number): str(narrow)})
        # What he sets while an instance runs is what comes back, too.
        result(pod.call(machine.socket, "registerCgroup", uuid=A, cpuset=str(machine.a)))
        until(lambda: kept_off(machine.a))
        assert refusal(number, wished) == 0
        tuned(machine, pod, {})  # it looks at all of them
        result(pod.call(machine.socket, "deregisterCgroup", uuid=A))
        until(lambda: settings() == {**before, str(number): str(wished)})


@contextlib.contextmanager
def administrators_mask(number: int, cpus: CpuSet) -> Iterator[None]:
    found = interrupts()[number]
    assert refusal(number, cpus) == 0
    yield
    assert refusal(number, found) == 0


def test_nothing_is_lost_when_everything_is_killed(machine: Machine, before: dict[str, str]) -> None:
    """The controller dies with one instance, comes back, dies with two, and is away when both are killed."""
    with machine.controller() as process:
        first = register(machine, A, machine.a)
        tuned(machine, first, {"latency": "low"})
        until(lambda: kept_off(machine.a))
        kill(process)
    with machine.controller() as process:
        second = register(machine, B, machine.b)
        until(lambda: kept_off(machine.a | machine.b))
        assert {latency(cpu).read_text() for cpu in machine.a} == {"2\n"}
        assert {latency(cpu).read_text() for cpu in machine.b} == {"0\n"}
        kill(process)
    end(machine, first)
    end(machine, second)
    assert kept_off(machine.a | machine.b)
    with machine.controller():
        until(lambda: settings() == before)


@pytest.mark.timeout(times(600))
def test_everything_killed_at_any_step_of_the_settings_leaves_nothing(
    before: dict[str, str], machine: Machine, tmp_path: Path
) -> None:
    """An instance comes and goes again and again; it and the controller are killed before another write each time.

    The records of one step are removed before the next: they have the values that this one needs.
    """
    stop, records = Stop(tmp_path, SETTING_FILES), tmp_path / "state" / RECORDS
    changed = len(movable()) + 2 + len(machine.a)  # interrupts; their default, work queues; the latency of each CPU
    for number in some(range(2 * changed), 4):  # there and back
        with machine.controller(before=stop.code) as process:
            until(lambda: settings() == before)
            records.unlink(missing_ok=True)
            killed_before_write(machine, process, stop, number)
    with machine.controller():
        until(lambda: settings() == before)


def killed_before_write(machine: Machine, process: Process, stop: Stop, number: int) -> None:
    """Let an instance come and go; kill it and its controller *process* before the write *number* of these."""
    machine.put_state({A: machine.a})
    tuner = child_of(process.pid, TunerProcess)
    stop.choose(number)
    with ThreadPoolExecutor(1) as pool:
        pod = machine.pod(A, machine.a)
        arrival = pool.submit(arrive, machine, pod)
        try:
            until(lambda: stopped(tuner) or arrival.done())
            if not stopped(tuner):
                arrival.result()
                until(lambda: stopped(tuner) or kept_off(machine.a))
            if not stopped(tuner):
                end(machine, pod)
                until(lambda: stopped(tuner))
        finally:
            kill(process)  # with which the pod's request ends, for which the block waits
    if pod in machine.pods:
        end(machine, pod)


def arrive(machine: Machine, pod: Pod) -> None:
    """Register *pod*, and ask for low latency."""
    ask_for_its_cpus(machine, pod)
    tuned(machine, pod, {"latency": "low"})


def kill(process: Process) -> None:
    process.kill()
    process.wait(SECONDS)


def tuned(machine: Machine, pod: Pod, tuning: dict[str, object]) -> list[str]:
    received = pod.execute("call", str(machine.socket), "tuneInstance", {"uuid": pod.uid, "tuning": tuning})
    assert isinstance(received, list)
    reasons = result((received[0], 0))["missing"]
    assert isinstance(reasons, list)
    return reasons


def test_low_latency_lasts_as_long_as_the_instance(machine: Machine, before: dict[str, str]) -> None:
    with machine.controller():
        pod = register(machine, A, machine.a)
        tuned(machine, pod, {"latency": "low"})
        assert {latency(cpu).read_text() for cpu in machine.a} == {"2\n"}
        assert {latency(cpu).read_text() for cpu in machine.shared} == {"0\n"}
        end(machine, pod)
        until(lambda: settings() == before)


@pytest.mark.usefixtures("rom")
def test_a_real_instance_is_quiet_until_it_is_killed(before: dict[str, str], node_fixture: NodeFixture) -> None:
    """The runner asks for what its spec says; then it and the controller are killed, and the next one gives all back."""
    cpus = CpuSet.parse("2-3")
    instance = node_fixture.start(1, str(cpus), keys='latency = "low"\n')
    instance.up()
    until(lambda: kept_off(cpus))
    until(lambda: {latency(cpu).read_text() for cpu in cpus} == {"2\n"})
    report = trio.run(observe_node, Roots(), KernelCgroup(TREE.path), node_fixture.kubelet.directory)
    [line] = [each for each in report_lines(judge(report)) if each.strip().startswith("settings")]
    assert "unbound work queues: none; idle states: up to 2 µs; governor: none" in line
    node_fixture.controller.kill()
    os.kill(instance.running.pid, signal.SIGKILL)
    node_fixture.kubelet.stop(instance.uid, grace=0)
    node_fixture.kubelet.reconcile()
    assert kept_off(cpus)
    node_fixture.controller.start()
    until(lambda: settings() == before)


def test_what_cannot_be_had_is_answered(machine: Machine, before: dict[str, str]) -> None:
    with machine.controller():
        pod = register(machine, A, machine.a)
        [reason] = [each for each in tuned(machine, pod, {"cache_ways": 2}) if A in each]
        assert "resctrl" in reason
        end(machine, pod)
        until(lambda: settings() == before)


def test_switched_off_nothing_is_touched(machine: Machine, before: dict[str, str]) -> None:
    with machine.controller("--no-move-interrupts", "--no-move-work-queues", "--no-low-latency"):
        pod = register(machine, A, machine.a)
        [reason] = [each for each in tuned(machine, pod, {"latency": "low"}) if A in each]
        assert "--no-low-latency" in reason
        assert settings() == before
        assert not kept_off(machine.a)
        end(machine, pod)


def test_it_needs_no_right_but_those_it_keeps(machine: Machine, before: dict[str, str]) -> None:
    """As in the DaemonSet's container: /proc/irq and /sys are read-only there, and SYS_ADMIN is given away."""
    hidden = "mount --bind /proc/irq /proc/irq && mount -o remount,bind,ro /proc/irq && mount -o remount,bind,ro /sys"
    with machine.controller(prefix=("unshare", "--mount", "sh", "-c", f'{hidden} && exec "$@"', "sh")):
        pod = register(machine, A, machine.a)
        until(lambda: kept_off(machine.a))
        end(machine, pod)
        until(lambda: settings() == before)
