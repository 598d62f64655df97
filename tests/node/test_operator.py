"""Metrics, probes and ``inspect`` of an instance that is not sealed, on a real kernel with cgroup v2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.base.cpuset import CpuSet
from tests.node.cgroups import task, until
from tests.node.instances import ARRANGED, Controller, Instance, NodeFixture
from tests.node.standin_kubelet import MIB, Kubelet
from tests.node.test_inspect import node_of
from tests.support.exposition import figures

pytestmark = pytest.mark.usefixtures("rom")

CLIENT = """
import sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen(f"http://127.0.0.1:9441/{sys.argv[1]}", timeout=10)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status, answer.read().decode())
"""


def get(instance: Instance, name: str) -> str:
    argv = ("nsenter", f"--target={instance.running.pid}", "--net", sys.executable, "-c", CLIENT, name)
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


def metrics(instance: Instance) -> dict[str, float]:
    return figures(get(instance, "metrics").partition(" ")[2])


@ARRANGED
def test_metrics_and_probes_show_what_the_kernel_does(node_fixture: NodeFixture) -> None:
    names = {"POD_NAME": "web-1", "POD_NAMESPACE": "prod", "NODE_NAME": "n1"}
    arguments = ("--http=:9441", "--log-format=json")
    instance = node_fixture.start(1, "2-3", arguments=arguments, more_environment=names, cgroupfs="ro")
    instance.up()
    until(lambda: get(instance, "readyz") == "200 ok\n\n", "the instance to be ready")
    found = metrics(instance)
    assert (found["placement_holds"], found["placement_strays"], found["guarantee_enforced"]) == (1, 0, 0)
    assert 'info{name="instance",node_name="n1",placement="controller",pod_name="web-1",pod_namespace="prod"}' in found
    assert found['memory_charged_bytes{kind="memory"}'] >= 64 * MIB
    assert found['memory_charged_bytes{kind="hugetlb"}'] == 0
    for vcpu, cpu in enumerate((2, 3)):
        assert found[f'vcpu_involuntary_switches_total{{cpu="{cpu}",vcpu="{vcpu}"}}'] >= 0
        assert found[f'vcpu_steal_seconds_total{{cpu="{cpu}",vcpu="{vcpu}"}}'] >= 0
    # Processes that others start in the container are moved to float, and counted.
    instance.running.execute("sh", "-c", "sleep 30 & sleep 1.5")
    until(lambda: metrics(instance)["swept_total"] >= 1, "the sweep to be counted")
    # A vCPU thread whose mask another process changes is put back, and the instance is ready again.
    [victim] = [thread for thread in instance.vcpus() if thread.cpus == CpuSet([2])]
    os.sched_setaffinity(victim.tid, {3})
    until(lambda: os.sched_getaffinity(victim.tid) == {2}, "the vCPU to be on its own CPU again")
    until(lambda: get(instance, "readyz") == "200 ok\n\n", "the instance to be ready again")
    assert instance.receipt()["pod"]["uid"] == instance.uid
    assert {thread.cgroup for thread in instance.vcpus()} == {str(instance.group)}
    assert instance.stop() == 0
    streams = {json.loads(line)["stream"] for line in instance.running.output.splitlines()}
    assert streams == {"event", "console"}


@ARRANGED
def test_a_thread_that_may_run_on_an_exclusive_cpu_is_named(
    kubelet: Kubelet, controller: Controller, numa: dict[int, CpuSet], tmp_path: Path
) -> None:
    near = max(numa)
    exclusive = CpuSet(list(numa[near])[:2])
    with node_of(kubelet, controller, exclusive, CpuSet([near]), tmp_path) as node:
        with task(threads=2) as intruder:
            os.sched_setaffinity(intruder.tids[1], [min(exclusive)])
            message = node.violation("exclusive")
            assert f"other (thread {intruder.tids[1]}, " in message
            assert f"may run on '{min(exclusive)}'" in message
            shown = node.inspect("00000001-0000", "--json")
            assert shown.returncode == 3, shown.stderr
            judgements = json.loads(shown.stdout)["instances"][0]["judgements"]
            assert [each["found"] for each in judgements if each["subject"] == "exclusive"] == [message]
        with task(node.instance.running.scope) as shell:
            message = node.violation("exclusive")
            assert f"(thread {shell.pid}, " in message
            assert f"in the cgroup '{node.instance.scope}' may run on '{exclusive}'" in message
        assert node.verdicts()["exclusive"][0] == "ok"
