"""The Kubernetes manifests: valid for every version we know, and consistent with the specs and our own planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from runner.cpuset import CpuSet
from runner.plan.memory import needed_beside
from runner.spec.instance import InstanceSpec, parse_instance
from runner.topology.kubelet import NEWEST_MINOR, OLDEST_MINOR
from runner.topology.pod import parse_quantity
from tests.images.built import PROJECT
from tests.images.manifests import DIRECTORIES, EXAMPLES, Object, pod_specs, put_together
from tests.images.test_images import NEEDED, NEEDED_FOR_SHARES

INSTANCES = [name for name in DIRECTORIES if name != "controller"]


@pytest.fixture(scope="module")
def objects() -> dict[str, list[Object]]:
    """Return what every directory makes, by its name."""
    if "RUNNER_KUSTOMIZE" not in os.environ:
        pytest.skip("kustomize is missing: tests/images/run fetches it and names it in RUNNER_KUSTOMIZE")
    return {name: put_together(name) for name in DIRECTORIES}


def spec_of(objects: list[Object]) -> InstanceSpec:
    [text] = [found["data"]["spec.toml"] for found in objects if found["kind"] == "ConfigMap"]
    return parse_instance("spec.toml", text.encode(), dict.fromkeys(names_of(objects), "value"))


def names_of(objects: list[Object]) -> list[str]:
    return [each["name"] for each in container_of(objects)["env"]]


def container_of(objects: list[Object]) -> Object:
    [pod] = pod_specs(objects)
    [container] = pod["containers"]
    return dict(container)


def is_guaranteed(pod: Object) -> bool:
    """Tell whether every container has limits of CPU and memory, and requests, if any, that are the same.

    The API server makes missing requests of the limits (``SetDefaults_Pod``), and the kubelet computes the class
    (``pkg/apis/core/v1/helper/qos``).
    """
    return all(
        {"cpu", "memory"} <= set(limits := container["resources"].get("limits", {}))
        and all(
            parse_quantity(str(container["resources"].get("requests", {}).get(name, limits[name])))
            == parse_quantity(str(limits[name]))
            for name in ("cpu", "memory")
        )
        for container in [*pod.get("initContainers", []), *pod["containers"]]
    )


@pytest.mark.parametrize("minor", range(OLDEST_MINOR, NEWEST_MINOR + 1))
@pytest.mark.parametrize("name", DIRECTORIES)
def test_every_object_is_valid(name: str, minor: int, objects: dict[str, list[Object]]) -> None:
    version = f"1.{minor}"
    assert objects[name]
    for found in objects[name]:
        # strict: unknown keys are errors, as they are for kubectl
        assert kubernetes_validate.validate(found, version, strict=True) == version


def test_an_invalid_object_is_noticed(objects: dict[str, list[Object]]) -> None:
    [daemon] = [found for found in objects["controller"] if found["kind"] == "DaemonSet"]
    daemon = json.loads(json.dumps(daemon))
    daemon["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostPid"):
        kubernetes_validate.validate(daemon, f"1.{NEWEST_MINOR}", strict=True)


@pytest.mark.parametrize("name", INSTANCES)
def test_pod_and_spec_agree(name: str, objects: dict[str, list[Object]]) -> None:
    [pod] = pod_specs(objects[name])
    spec, limits = spec_of(objects[name]), container_of(objects[name])["resources"]["limits"]
    assert is_guaranteed(pod)
    # Without the controller's float, everything that is no vCPU needs CPUs of the pod: one whole core.
    besides = 0 if spec.cpu.placement == "controller" else 2
    assert parse_quantity(limits["cpu"]) == spec.cpu.count + besides
    # Emulated, as in the node of the tests, it needs more.
    assert parse_quantity(limits["memory"]) >= spec.memory.size + needed_beside(spec, "tcg")
    assert pod["terminationGracePeriodSeconds"] >= spec.shutdown.grace + 5
    assert pod["restartPolicy"] in {"Never", "OnFailure"}
    assert spec.shutdown.poweroff_status == 0, "else a guest that shut itself down would be started again"


@pytest.mark.parametrize("name", INSTANCES)
def test_what_the_spec_names_is_in_the_pod(name: str, objects: dict[str, list[Object]]) -> None:
    spec, container = spec_of(objects[name]), container_of(objects[name])
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    devices = {device["devicePath"] for device in container.get("volumeDevices", [])}
    assert {str(disk.path) for disk in spec.disk} == devices
    assert {str(share.path) for share in spec.share} <= mounts
    assert "/run/instance-runner" in mounts, "the root is read-only"
    assert container["args"][1].rpartition("/")[0] in mounts
    for path in (spec.boot.kernel, spec.boot.initrd, spec.boot.firmware):
        assert path is None or str(path).startswith(("/usr/share/instance-runner/demo/", "/usr/share/OVMF/"))
    if spec.cpu.placement == "controller":
        assert str(spec.cpu.controller.parent) in mounts
        assert "POD_UID" in {each["name"] for each in container["env"]}
    pods = pod_specs(objects[name])
    assert not any(pod.get("hostPID") or pod.get("shareProcessNamespace") for pod in pods)


@pytest.mark.parametrize("name", INSTANCES)
def test_probes_reach_the_runner_and_not_the_guest(name: str, objects: dict[str, list[Object]]) -> None:
    spec, container = spec_of(objects[name]), container_of(objects[name])
    probes = {kind: probe for kind, probe in container.items() if kind.endswith("Probe")}
    assert set(probes) == ({"readinessProbe"} if name == "overlays/probes" else set())
    for probe in probes.values():
        assert set(probe) == {"httpGet", "periodSeconds"}, "no exec probes: they start on the vCPUs' CPUs"
        assert probe["httpGet"] == {"path": "/readyz", "port": "http"}
        [port] = container["ports"]
        assert f"--http=[$(POD_IP)]:{port['containerPort']}" in container["args"]
        assert {network.mode for network in spec.network} == {"private"}


@pytest.mark.parametrize("name", INSTANCES)
def test_the_pod_is_told_who_it_is(name: str, objects: dict[str, list[Object]]) -> None:
    more = ["POD_IP"] if name == "overlays/probes" else []
    assert sorted(names_of(objects[name])) == sorted(["POD_UID", "POD_NAME", "POD_NAMESPACE", "NODE_NAME", *more])


@pytest.mark.parametrize("name", INSTANCES)
def test_an_instance_has_no_more_rights_than_it_needs(name: str, objects: dict[str, list[Object]]) -> None:
    spec, container = spec_of(objects[name]), container_of(objects[name])
    context: dict[str, Any] = container["securityContext"]
    assert context["readOnlyRootFilesystem"]
    if name == "overlays/privileged":
        assert context["privileged"]
        return
    assert not context.get("privileged")
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    # test_images.py runs the image with these and no more
    assert tuple(context["capabilities"]["add"]) == (*NEEDED, *(NEEDED_FOR_SHARES if spec.share else ()))


@pytest.mark.parametrize("name", INSTANCES)
def test_the_kubelet_of_the_example_admits_it(name: str, objects: dict[str, list[Object]], tmp_path: Path) -> None:
    """By our own command, with the example's kubelet configuration and recorded host."""
    manifest, spec = tmp_path / "pod.yaml", tmp_path / "spec.toml"
    manifest.write_text(yaml.safe_dump_all(objects[name]))
    [text] = [found["data"]["spec.toml"] for found in objects[name] if found["kind"] == "ConfigMap"]
    spec.write_text(text)
    argv: list[str | Path] = [
        *(sys.executable, "-m", "runner", "plan", "--json"),
        *("--node", EXAMPLES / "kubelet-configuration.yaml", "--host", EXAMPLES.parent / "plan" / "dual-epyc.json"),
        *("--pod", manifest, spec),
    ]
    told = {**os.environ, **dict.fromkeys(names_of(objects[name]), "value")}
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=False, cwd=PROJECT, env=told)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["fits"]) == (0, True)
    [pod] = answer["pods"]
    assert (pod["outcome"], pod["qos"]) == ("admitted", "Guaranteed")
    [container] = pod["containers"]
    limits = container_of(objects[name])["resources"]["limits"]
    assert len(CpuSet.parse(container["cpus"])) == parse_quantity(limits["cpu"])
    assert container["memory"][0]["numa_nodes"] == [0]


def test_the_controller_takes_no_whole_cpu(objects: dict[str, list[Object]]) -> None:
    [pod] = pod_specs(objects["controller"])
    assert not is_guaranteed(pod)
    assert pod["hostPID"]
    assert not container_of(objects["controller"])["securityContext"].get("privileged")
