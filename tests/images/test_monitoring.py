"""examples/monitoring, read by a real Prometheus (Debian's): its rules, and the dashboard's queries over real metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import yaml

from runner.protocol.instance_metrics import FAMILIES
from tests.images.built import PROJECT
from tests.images.conftest import NO_KVM, PODMAN, SECONDS, Run
from tests.support.fake_node import B, Node, connected, controlled
from tests.support.monitoring import EXAMPLES, alerts, filled_in, queries, rules, selected
from tests.support.prometheus import Prometheus, prometheus, promtool, unpacked

TARGET = {"namespace": "n", "pod": "p", "container": "c", "endpoint": "e", "node": "o"}
"""The labels of a target that a PodMonitor makes, besides ``job`` and ``instance``."""
CONTROLLER = "127.0.0.1:9440"
NOT_EVERYWHERE = {
    "instance_runner_memory_charged_bytes",
    "instance_runner_vcpu_foreign_seconds_total",
    "instance_cgroup_controller_instance_report_age_seconds",
    *(f"instance_runner_{name}" for name in FAMILIES if name.startswith("disk_")),
}
"""Metrics that are left out where no cgroup v2 is mounted, the kernel keeps no statistics of its scheduler, nothing reports, or the
guest has no disk."""


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with ``prometheus`` and ``promtool``."""
    if "RUNNER_PROMETHEUS" not in os.environ:
        pytest.skip("Prometheus is missing: tests/images/run fetches it and names it in RUNNER_PROMETHEUS")
    return unpacked(os.environ["RUNNER_PROMETHEUS"], tmp_path_factory.mktemp("prometheus"))


@pytest.fixture
def rules_file(tmp_path: Path) -> Path:
    """Return a file of Prometheus' with the rules of the example."""
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(rules()))
    return path


def test_the_rules_are_valid(programs: Path, rules_file: Path) -> None:
    assert f"SUCCESS: {len(alerts())} rules found" in promtool(programs, "check", "rules", rules_file)


def test_each_alert_fires_when_it_should_and_only_then(programs: Path, rules_file: Path) -> None:
    tests = rules_file.with_name("alerts.yaml")
    tests.write_text((PROJECT / "tests/images/alerts.yaml").read_text())
    promtool(programs, "test", "rules", tests)
    tested = yaml.safe_load(tests.read_text())["tests"]
    cases = {(each["alertname"], bool(each["exp_alerts"])) for test in tested for each in test["alert_rule_test"]}
    assert cases >= {(name, fires) for name in alerts() for fires in (False, True)}


@pytest.fixture
def instance(run: Run, gpu_instance: str) -> int:
    """Start an instance that serves its metrics and return the pid of its PID 1."""
    spec = "/usr/share/instance-runner/demo/spec.toml"
    names = ("--env", "POD_NAME=web-1", "--env", "POD_NAMESPACE=prod", "--env", "NODE_NAME=n1")
    container = run(gpu_instance, "--privileged", *NO_KVM, *names, command=("run", spec, "--http=127.0.0.1:9441"))
    container.until("the guest runs")
    argv = [*PODMAN, "inspect", "--format", "{{.State.Pid}}", container.name]
    return int(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)


@pytest.fixture
def controller(instance: int, tmp_path: Path) -> Iterator[str]:
    """Start the controller's program on a fake node, with its metrics beside the instance's, and return their address.

    One request is answered, and one refused.
    """
    (tmp_path / "node").mkdir()
    node = Node.new(tmp_path / "node")

    async def build() -> None:  # beforehand: the program itself cannot make groups out of ordinary directories
        node.become(B)
        async with controlled(node), connected(node.socket) as client:
            await client.result("registerCgroup", uuid=B, cpuset="14-17")

    async def ask() -> None:
        async with connected(node.socket) as client:
            await client.result("getStatus")
            await client.refusal("registerCgroup", uuid=B, cpuset="0-3")

    trio.run(build)
    node.instance(B).populate(True)
    argv = [
        *(*inside(instance), sys.executable, "-c"),
        "import sys; from runner.controller.main import main; sys.exit(main())",
        *("--root", str(node.root.path), "--cgroupfs", str(node.mount.path), "--socket", str(node.socket)),
        *("--state-dir", str(node.path / "state")),
        *("--kubelet-dir", str(node.kubelet), "--sysfs", str(node.path / "sys"), "--procfs", str(node.proc)),
        *("--no-device-filter", "--metrics", CONTROLLER),
    ]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=PROJECT) as process:
        assert process.stderr is not None
        try:
            while "ready" not in (line := process.stderr.readline()):
                assert line, "the controller has ended"
            trio.run(ask)
            yield CONTROLLER
        finally:
            process.terminate()


def inside(pid: int) -> tuple[str, ...]:
    return ("nsenter", f"--target={pid}", "--net", "--")


@pytest.fixture
def reader(programs: Path, rules_file: Path, instance: int, controller: str, tmp_path: Path) -> Iterator[Prometheus]:
    """Start Prometheus where the two programs answer."""
    targets = {"instance-runner": "127.0.0.1:9441", "instance-cgroup-controller": controller}
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules_file)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [address], "labels": TARGET}]}
            for job, address in targets.items()
        ],
    }
    with prometheus(programs, configuration, tmp_path, inside(instance)) as it:
        yield it


def test_a_prometheus_reads_the_metrics_and_answers_the_dashboard(reader: Prometheus) -> None:
    ask, result = reader.ask, reader.result
    five = "count_over_time(up[10s]) >= 5"
    reader.wait_for(lambda: len(ask("query", query=five).get("result", ())) == 2, "five scrapes", SECONDS)
    health = {each["labels"]["job"]: (each["health"], each["lastError"]) for each in ask("targets")["activeTargets"]}
    assert health == {"instance-runner": ("up", ""), "instance-cgroup-controller": ("up", "")}
    assert not [name for name in ask("labels") if name.startswith("exported_")], (
        "labels of ours that Prometheus renamed"
    )
    [info] = result("instance_runner_info")
    names = {"name": "demo", "pod_name": "web-1", "pod_namespace": "prod", "node_name": "n1"}
    assert info["metric"].items() >= {**TARGET, **names, "job": "instance-runner"}.items()
    for name, expression in alerts().items():
        assert isinstance(result(expression), list), name

    def healths() -> set[str]:
        return {each["health"] for group in ask("rules")["groups"] for each in group["rules"]}

    reader.wait_for(lambda: healths() == {"ok"}, "rules", SECONDS)
    served = set(ask("label/__name__/values"))
    for title, query in queries():
        assert result(filled_in(query)) or (selected(query) - served) & NOT_EVERYWHERE, title


def test_kustomize_makes_the_objects_and_the_dashboard() -> None:
    if "RUNNER_KUSTOMIZE" not in os.environ:
        pytest.skip("kustomize is missing: tests/images/run fetches it and names it in RUNNER_KUSTOMIZE")
    argv = [os.environ["RUNNER_KUSTOMIZE"], "build", str(EXAMPLES)]
    found = {
        each["kind"]: each
        for each in yaml.safe_load_all(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    }
    assert found.keys() == {"PodMonitor", "PrometheusRule", "ConfigMap"}
    assert {each["metadata"]["namespace"] for each in found.values()} == {"instance-runner"}
    dashboard = found["ConfigMap"]
    assert dashboard["metadata"]["name"] == "instance-runner-dashboard"
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(dashboard["data"]["dashboard.json"])["uid"] == "instance-runner"
