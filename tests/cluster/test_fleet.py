"""What an operator sees of all instances at once, and does to them: Prometheus in the cluster, the programs on the node, an upgrade."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.control_plane import SERVER, ControlPlane
from tests.cluster.instances import (
    CONTROLLER,
    GUEST_SECONDS,
    POD_SECONDS,
    SOON,
    Deployed,
    deployed,
    digest_of,
    instances_left,
    program_of,
)
from tests.cluster.joined_node import JoinedNode
from tests.cluster.kubectl import Kubectl, Object, until
from tests.cluster.manifests import variant
from tests.images.manifests import EXAMPLES
from tests.support.monitoring import alerts, documents, filled_in, queries, rules, selected
from tests.support.prometheus import Prometheus, prometheus, unpacked

pytestmark = pytest.mark.timeout(1800)
CPUS, MEMORY, EMULATED_MEMORY = "2", "640Mi", "2304Mi"
"""Limits of the pods; with more memory a pod has the larger part of the machine that an emulated guest needs."""
MODES = {
    "bridge": "",
    "private": '[guest]\nready = "console:^never written$"\n',
    "passt": "",
}
"""Network mode → what its instance has besides."""
EMULATED, AWAITS_SIGN = "passt", "private"
"""Those that an operator has to find."""
OF_THE_MACHINE = {"InstanceRunnerCpuShared", "InstanceRunnerVcpuDelayed", "InstanceRunnerDisturbed"}
"""Alerts that fire by what this emulated machine's own kernel and CPUs do."""
NOT_HERE = {"instance_cgroup_controller_refusals_total", "instance_runner_child_restarts_total"}
"""Families that have no series before the first case."""
NO_DISK = "instance_runner_disk_"


def spec_of(mode: str) -> str:
    """Return the example's document with a smaller machine on this network."""
    text = (EXAMPLES / "instance" / "spec.toml").read_text()
    replaced = {"count = 4": "count = 2", '"2GiB"': '"256MiB"', 'mode = "bridge"': f'mode = "{mode}"'}
    if mode == EMULATED:
        replaced["count = 4"] += '\naccel = "tcg"'
    for words, others in replaced.items():
        assert text.count(words) == 1, words
        text = text.replace(words, others)
    return text + MODES[mode]


@pytest.fixture(scope="module")
def fleet(kubectl: Kubectl, node: JoinedNode, cluster: Path) -> Iterator[dict[str, Deployed]]:
    """Start an instance in each network mode; their guests run, and have booted where they are not emulated."""
    with ExitStack() as stack:
        its = {}
        for mode in MODES:
            limits = {"cpu": CPUS, "memory": EMULATED_MEMORY if mode == EMULATED else MEMORY}
            container: Object = {"resources": {"limits": limits}}
            if mode == "passt":  # as the page on networks says
                container["securityContext"] = {"seccompProfile": {"type": "Unconfined"}}
            place = cluster / variant(cluster, mode, spec_of(mode), container)
            its[mode] = stack.enter_context(deployed(kubectl, node, place, f"instance-{mode}"))
        for it in its.values():
            it.up()
        for mode, it in its.items():
            if (
                mode != EMULATED
            ):  # an emulated guest of an emulated machine takes too long; the others leave the node its time then
                it.logged("guest: done after", GUEST_SECONDS)
        yield its
    until(lambda: not instances_left(node), "no instance's cgroup to be left", SOON)


def as_the_operator_has_it(monitor: Object, found: Path) -> Object:
    """Return what Prometheus' operator makes of a PodMonitor of ours, for the pods that are in the file *found*."""
    spec, name = monitor["spec"], monitor["metadata"]["name"]
    [endpoint] = spec["podMetricsEndpoints"]
    kept = {f"pod_label_{as_label(label)}": value for label, value in spec["selector"].get("matchLabels", {}).items()}
    kept |= {
        "pod_container_port_name": endpoint["port"],
        "namespace": "|".join(spec["namespaceSelector"]["matchNames"]),
    }
    given = {"namespace": "namespace", "pod_container_name": "container", "pod_name": "pod"}
    relabel = [
        {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "Failed|Succeeded", "action": "drop"},
        *(
            {"source_labels": [f"__meta_kubernetes_{each}"], "regex": value, "action": "keep"}
            for each, value in kept.items()
        ),
        *(
            {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target}
            for source, target in given.items()
        ),
        {"target_label": "job", "replacement": f"instance-runner/{name}"},
        {"target_label": "endpoint", "replacement": endpoint["port"]},
        *(
            {"source_labels": each["sourceLabels"], "target_label": each["targetLabel"]}
            for each in endpoint["relabelings"]
        ),
    ]
    return {
        "job_name": f"podMonitor/instance-runner/{name}/0",
        "scrape_interval": "5s",
        "file_sd_configs": [{"files": [str(found)]}],
        "relabel_configs": relabel,
    }


def as_label(name: str) -> str:
    """Return the name of a pod's label as Prometheus has it."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def discovered(pods: list[Object]) -> list[Object]:
    """Return the targets that Prometheus' discovery of the role ``pod`` makes, which Debian's Prometheus is built without.

    One for each port of a container, and one for a container without (its manual, ``kubernetes_sd_config``).
    """
    found = []
    for pod in pods:
        address, metadata = pod["status"]["podIP"], pod["metadata"]
        labels = {
            "namespace": metadata["namespace"],
            "pod_name": metadata["name"],
            "pod_phase": pod["status"]["phase"],
            "pod_node_name": pod["spec"]["nodeName"],
            "pod_uid": metadata["uid"],
            **{f"pod_label_{as_label(name)}": value for name, value in metadata["labels"].items()},
        }
        for container in pod["spec"]["containers"]:
            labels["pod_container_name"] = container["name"]
            ports: list[Object] = container.get("ports", [{}])
            for port in ports:
                number = {"pod_container_port_name": port.get("name", "")}
                target = f"{address}:{port['containerPort']}" if port else address
                of_target = {f"__meta_kubernetes_{name}": value for name, value in (labels | number).items()}
                found.append({"targets": [target], "labels": of_target})
    return found


@pytest.fixture(scope="module")
def reader(
    given: dict[str, Any], control: ControlPlane, fleet: dict[str, Deployed], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Start Prometheus with the example's objects, for one who may read the pods of the two namespaces, and nothing else."""
    assert fleet, "it finds the pods that there are"
    directory = tmp_path_factory.mktemp("prometheus")
    control.certificates.client("prometheus", "/CN=prometheus", SERVER)
    user = Kubectl(control.kubectl.program, Path(control.certificates["prometheus.conf"]))
    group, pods = "rbac.authorization.k8s.io", []
    rights = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    for namespace in ("instances", "instance-runner"):
        named = {"apiVersion": f"{group}/v1", "metadata": {"name": "prometheus", "namespace": namespace}}
        reference = {"roleRef": {"apiGroup": group, "kind": "Role", "name": "prometheus"}}
        subjects = {"subjects": [{"apiGroup": group, "kind": "User", "name": "prometheus"}]}
        control.kubectl.apply(
            {**named, "kind": "Role", "rules": [rights]}, {**named, **reference, **subjects, "kind": "RoleBinding"}
        )
        pods += until(partial(user.items, "pods", "-n", namespace), f"the right to list the pods of {namespace}", SOON)
    rules_file, found = directory / "rules.yaml", directory / "pods.json"
    rules_file.write_text(yaml.safe_dump(rules()))
    found.write_text(json.dumps(discovered(pods)))
    configuration = {
        "global": {"scrape_timeout": "4s", "evaluation_interval": "5s"},
        "rule_files": [str(rules_file)],
        "scrape_configs": [as_the_operator_has_it(each, found) for each in documents("podmonitors.yaml")],
    }
    with prometheus(unpacked(given["prometheus"], directory), configuration, directory) as it:
        yield it


def uid(it: Deployed) -> str:
    return str(it.pod["metadata"]["uid"])


def test_prometheus_answers_an_operators_questions(
    kubectl: Kubectl, node: JoinedNode, fleet: dict[str, Deployed], reader: Prometheus
) -> None:
    """Which instances are not enforced, not ready, silent, emulated, slow, and since when: from the controllers' pages alone."""
    its = {uid(it): mode for mode, it in fleet.items()}

    def by_mode(expression: str) -> dict[str, float]:
        """Return mode → value of the series that *expression* selects."""
        return {its[each["metric"]["pod_uid"]]: float(each["value"][1]) for each in reader.result(expression)}

    of_all = dict.fromkeys(MODES, 1.0)
    uptimes = "count_over_time(instance_runner_guest_uptime_seconds[1m]) >= 4"
    reader.wait_for(lambda: reader.ask("query", query=uptimes).get("result") and len(by_mode(uptimes)) == 3, "it", 240)
    [target] = reader.ask("targets")["activeTargets"]
    [controller] = kubectl.items("pods", "-n", "instance-runner", f"-l=app.kubernetes.io/name={CONTROLLER}")
    assert (target["health"], target["lastError"]) == ("up", "")
    assert target["labels"].items() >= {"pod": controller["metadata"]["name"], "node": node.name}.items()
    assert by_mode("instance_cgroup_controller_instance_enforced") == of_all
    assert by_mode("instance_cgroup_controller_instance_enforced == 0") == {}
    assert by_mode("instance_runner_emulated > 0") == {EMULATED: 1}
    assert by_mode(alerts()["InstanceRunnerNotReady"]) == {AWAITS_SIGN: 1}
    assert by_mode('instance_runner_guest_unready{reason="awaits_sign"} > 0') == {AWAITS_SIGN: 1}
    assert by_mode("instance_runner_guest_ready") == of_all | {AWAITS_SIGN: 0}
    assert by_mode('instance_runner_guest_unready{reason="silent"}') == dict.fromkeys(MODES, 0)
    for family in ("run_delay", "foreign", "cpu"):
        rates = by_mode(f"rate(instance_runner_vcpu_{family}_seconds_total[1m])")
        assert set(rates) == set(MODES), family
        assert all(0 <= rate <= 2.1 for rate in rates.values()), (family, rates)
    names = {
        its[each["metric"]["pod_uid"]]: each["metric"]["reported_pod_name"]
        for each in reader.result("instance_runner_info")
    }
    assert names == {mode: f"instance-{mode}" for mode in MODES}

    def alerted() -> set[tuple[str, str]]:
        """Return the alerts that wait or fire, each since when, and the instance's mode."""
        found = reader.ask("alerts")["alerts"]
        assert all(each["activeAt"] for each in found)
        return {
            (each["labels"]["alertname"], its.get(each["labels"].get("pod_uid"), ""))
            for each in found
            if each["labels"]["alertname"] not in OF_THE_MACHINE
        }

    expected = {
        ("InstanceRunnerEmulated", EMULATED),
        ("InstanceRunnerNotReady", AWAITS_SIGN),
        ("InstanceRunnerWithoutSeccomp", ""),  # of the controller, for the pod with passt
    }
    reader.wait_for(lambda: alerted() >= expected, "the alerts", SOON)
    assert alerted() == expected
    served = set(reader.ask("label/__name__/values"))
    without = [
        title
        for title, query in queries()
        if not reader.result(filled_in(query).replace("[10s]", "[1m]"))
        and not any(name in NOT_HERE or name.startswith(NO_DISK) for name in selected(query) - served)
    ]
    assert without == []


def test_the_programs_on_the_node(kubectl: Kubectl, node: JoinedNode, fleet: dict[str, Deployed]) -> None:
    """By the lines of the document: ``inspect``, ``check`` and ``plan`` of the controller's pod, ``--trace`` of a privileged one."""
    text = (EXAMPLES / "operate.md").read_text()
    block = text[text.index("### Programs on the node") :]
    lines = [line.removeprefix("$ ") for line in block[: block.index("\n```\n")].replace("\\\n", "").splitlines()]
    [inspect, check, plan, trace] = [line for line in lines if re.search("-- +instance-runner", line)]
    [controller] = kubectl.items("pods", "-n", "instance-runner", f"-l=app.kubernetes.io/name={CONTROLLER}")
    pod = kubectl("kustomize", str(EXAMPLES / "instance"))

    def typed(line: str) -> subprocess.CompletedProcess[str]:
        words = line.partition("<")[0].split()
        assert words[0] == "kubectl"
        names = {
            "CONTROLLER": controller["metadata"]["name"],
            "node/NODE": f"node/{node.name}",
            f"--image={CONTROLLER}": f"--image={CONTROLLER}:0.1.0",
            "-it": "-i",  # no terminal here
        }
        return kubectl.run(*(names.get(word, word) for word in words[1:]), given=pod if "<" in line else "")

    shown = typed(inspect)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert all(uid(it) in shown.stdout for it in fleet.values())
    checked = typed(check)
    assert checked.returncode in {0, 3}, checked.stdout + checked.stderr
    assert "cgroup" in checked.stdout
    planned = typed(plan)
    assert planned.returncode in {0, 3}, planned.stdout + planned.stderr
    assert "instance" in planned.stdout
    debugger = re.search(r"debugging pod (\S+)", (traced := typed(trace)).stdout + traced.stderr)
    assert debugger is not None, traced.stdout + traced.stderr  # no terminal is attached here: its words are in its log

    def log() -> str:
        return kubectl("logs", "-n", "default", debugger[1])

    until(lambda: "Interrupts are no tasks" in log(), "the record", POD_SECONDS)
    assert all(uid(it) in log() for it in fleet.values()), log()
    assert log().count("ok       trace  0 ns of any other task") == len(fleet), log()
    kubectl("delete", "pod", "-n", "default", debugger[1], "--wait=false")


def test_an_upgrade_of_all_runners(
    control: ControlPlane, fleet: dict[str, Deployed], reader: Prometheus, tmp_path: Path
) -> None:
    """By ``upgrade-runners``, as an operator calls it; then all run the program, under the guests that they had, and so it is served.

    The emulated instance ends before: it takes the time in which the program gets to the others.
    """
    control.kubectl("delete", "-k", str(fleet[EMULATED].place), "--ignore-not-found", f"--timeout={POD_SECONDS}s")
    its = [it for mode, it in fleet.items() if mode != EMULATED]
    program_of(its[0], tmp_path)
    with (tmp_path / "runner" / "__init__.py").open("a") as module:
        module.write("# another program\n")
    digest = digest_of(tmp_path)
    environment = {**os.environ, "KUBECONFIG": str(control.kubectl.configuration)}

    def called(*options: str) -> list[str]:
        argv = [sys.executable, str(EXAMPLES / "upgrade-runners"), str(tmp_path), "--digest", f"sha256:{digest}"]
        argv += ["--kubectl", str(control.kubectl.program), "--timeout", str(2 * GUEST_SECONDS), *options]
        done = subprocess.run(argv, check=False, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    assert called("--check")[-1] == "2 would be renewed"
    assert called()[-1] == "2 renewed"
    assert called()[-1] == "2 already"
    for it in its:
        it.holds()
        status = json.loads(it.execute("instance-runner", "ctl", "--json", "status"))["runner"]
        assert (status["generation"], status["digest"]) == (1, f"sha256:{digest}")

    def one_program() -> bool:
        info = reader.result("instance_runner_build_info")
        return [each["metric"]["reported_digest"] for each in info] == [f"sha256:{digest}"] * len(its)

    reader.wait_for(one_program, "the new program's digest on the page", POD_SECONDS)
