"""The files of the Kubernetes manifests; tests/images/test_manifests.py reads the output of kustomize."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from runner.controller.command_line import command_line
from runner.controller.privileged_start import KEPT_CAPABILITIES
from runner.controller.serve.namespaces import NamespaceReader
from runner.controller.tree.cgroup_writer import CgroupWriter
from runner.controller.tune.tuner_process import TunerProcess
from runner.facts.hardware import huge_limit_variable, hugepages_resource
from runner.kernel.privileges import (
    CAP_DAC_OVERRIDE,
    CAP_SYS_ADMIN,
    CAP_SYS_NICE,
    CAP_SYS_PTRACE,
    CAP_SYS_RESOURCE,
)
from runner.kubelet.pod import parse_quantity
from runner.node_plan.quirks import NEWEST_MINOR, OLDEST_MINOR
from runner.plan.instance import DEVICES_BACK, share_grace
from tests.images.manifests import (
    DIRECTORIES,
    EXAMPLES,
    INSTANCES,
    VM_DEVICES,
    Object,
    images_of,
    kustomization,
    pod_specs,
    resources,
)

DISKS = ("overlays/board", "overlays/disk", "overlays/gpu", "overlays/server")
KUBELETS = ("kubelet-configuration.yaml", "kubelet-configuration-strict.yaml")


def patch(directory: str) -> Object:
    """Return the pod's specification in the patch of an overlay."""
    found: Object = yaml.safe_load((EXAMPLES / directory / "pod.yaml").read_text())["spec"]
    return found


@pytest.mark.parametrize("name", ["overlays/board", "overlays/gpu"])
def test_a_gpu_instance_is_told_its_limit_of_huge_pages(name: str) -> None:
    spec = tomllib.loads((EXAMPLES / name / "spec.toml").read_text())["memory"]
    assert spec == {"size": "limits", "hugepages": "2MiB"}
    [container] = patch(name)["containers"]
    [variable] = container["env"]
    resource = hugepages_resource(2 << 20)
    assert variable == {
        "name": huge_limit_variable(2 << 20),
        "valueFrom": {"resourceFieldRef": {"resource": f"limits.{resource}"}},
    }
    assert resource in container["resources"]["limits"]


@pytest.mark.parametrize("name", ["overlays/board", "overlays/gpu"])
def test_every_device_that_a_spec_names_is_asked_for(name: str) -> None:
    """And the time for all of them to come back is in the grace, and that in the pod's."""
    spec = tomllib.loads((EXAMPLES / name / "spec.toml").read_text())
    [container] = patch(name)["containers"]
    limits = {
        key: int(value) for key, value in container["resources"]["limits"].items() if key.startswith("nvidia.com/")
    }
    assert {device["resource"] for device in spec["device"]} == limits.keys()
    plan = share_grace(spec["shutdown"]["grace"], 0, sum(limits.values()))
    assert plan.power_down >= spec["shutdown"]["grace"] / 3, "the guest has its part"
    assert plan.devices_back == pytest.approx(DEVICES_BACK) or name == "overlays/board"
    assert patch(name).get("terminationGracePeriodSeconds", 60) >= spec["shutdown"]["grace"] + 10


def test_the_device_plugin_hands_out_what_the_pods_ask_for() -> None:
    [pod] = pod_specs(resources("device-plugin"))
    [container] = pod["containers"]
    device = yaml.safe_load(container["args"][container["args"].index("--device") + 1])
    [group] = device["groups"]
    assert tuple(path["path"] for path in group["paths"]) == VM_DEVICES
    assert group["count"] >= 110, "the kubelet's maxPods"
    [instance] = pod_specs(resources("instance"))
    assert f"squat.ai/{device['name']}" in instance["containers"][0]["resources"]["limits"]
    asked = container["resources"]
    assert asked["requests"].keys() | asked["limits"].keys() == {"memory"}, "a part of a CPU costs the node a whole one"


def test_one_step_applies_what_a_cluster_needs() -> None:
    objects = {(found["kind"], found["metadata"]["name"]) for found in resources("cluster")}
    assert objects == {
        *(("Namespace", name) for name in ("instances", "instance-runner")),
        *(("DaemonSet", name) for name in ("instance-cgroup-controller", "instance-device-plugin")),
        ("ResourceQuota", "critical-pods"),
    }


def test_a_critical_pod_s_namespace_admits_it_where_priority_classes_are_limited() -> None:
    """kube-system does everywhere; in another namespace GKE makes no such pod without a quota of that scope."""
    for directory in ("controller", "device-plugin"):
        [critical] = pod_specs(resources(directory))
        quotas = [found["spec"] for found in resources(directory) if found["kind"] == "ResourceQuota"]
        if kustomization(directory)["namespace"] == "kube-system":
            assert quotas == []  # it would limit all critical pods there
            continue
        [quota] = quotas
        [scope] = quota["scopeSelector"]["matchExpressions"]
        assert (scope["scopeName"], scope["values"]) == ("PriorityClass", [critical["priorityClassName"]])


def test_the_names_of_the_images_stand_in_one_place() -> None:
    component = yaml.safe_load((EXAMPLES / "images/kustomization.yaml").read_text())
    named = {each["name"] for each in component["images"]}
    used = {name for directory in DIRECTORIES for name in images_of(resources(directory))}
    assert named == used
    assert [name for name in DIRECTORIES if "images" in kustomization(name)] == []
    for directory in DIRECTORIES:
        own = [name for name in kustomization(directory)["resources"] if not (EXAMPLES / directory / name).is_dir()]
        runs = [name for name in own if pod_specs(yaml.safe_load_all((EXAMPLES / directory / name).read_text()))]
        assert ("components" in kustomization(directory)) == bool(runs), directory


def test_no_instance_contains_a_namespace_or_a_disk() -> None:
    """``kubectl delete -k`` of an instance would delete it, with every other instance or the guest's data in it."""
    kinds = {name: {found["kind"] for found in resources(name)} for name in DIRECTORIES}
    for name in INSTANCES:
        assert kinds[name] in ({"Pod", "PodDisruptionBudget"}, {"Job", "PodDisruptionBudget"}), name
    assert kinds["namespace"] == {"Namespace"}
    assert kinds["disks/claim"] == {"PersistentVolumeClaim"}


def test_each_instance_has_a_name_and_a_label_of_its_own() -> None:
    """The label is what its budget selects, the name what ``kubectl delete -k`` of another one must not find."""
    names, labels = set(), set()
    for directory in INSTANCES:
        kustomized = kustomization(directory)
        [workload] = [found for found in resources(directory) if found["kind"] in {"Pod", "Job"}]
        names.add(workload["metadata"]["name"] + kustomized.get("nameSuffix", ""))
        [label] = kustomized["labels"]
        assert label["includeSelectors"] is True
        labels.add(label["pairs"]["app.kubernetes.io/instance"])
    assert names == labels
    assert len(names) == len(INSTANCES)


@pytest.mark.parametrize("name", INSTANCES)
def test_the_configuration_that_an_instance_reads_is_immutable(name: str) -> None:
    assert kustomization(name)["generatorOptions"] == {"immutable": True}


@pytest.mark.parametrize("name", DISKS)
def test_every_instance_with_a_disk_names_the_claim(name: str) -> None:
    [claim] = resources("disks/claim")
    found = [each["persistentVolumeClaim"] for each in patch(name)["volumes"] if each["name"] == "disk"]
    assert found == [{"claimName": claim["metadata"]["name"]}]


@pytest.mark.parametrize("minor", range(OLDEST_MINOR, NEWEST_MINOR + 1))
def test_the_job_that_fills_a_disk_is_valid(minor: int) -> None:
    job = yaml.safe_load((EXAMPLES / "disks/fill.yaml").read_text())
    assert kubernetes_validate.validate(job, f"1.{minor}", strict=True) == f"1.{minor}"


@pytest.mark.parametrize("name", DISKS)
def test_the_job_that_fills_a_disk_fills_that_of_the_pod(name: str) -> None:
    [filled] = pod_specs([yaml.safe_load((EXAMPLES / "disks/fill.yaml").read_text())])
    booted = patch(name)
    assert filled["volumes"] == [each for each in booted["volumes"] if each["name"] == "disk"]
    assert filled["containers"][0]["volumeDevices"] == booted["containers"][0]["volumeDevices"]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("listed", ["right", "wrong", "missing"])
def test_the_job_that_fills_a_disk_leaves_nothing_that_its_publisher_does_not_list(
    tmp_path: Path, listed: str, *, pinned: bool
) -> None:
    content = b"image" * 300_000
    summed = hashlib.sha512(content).hexdigest() if listed == "right" else "0" * 128 if listed == "wrong" else ""
    (tmp_path / "disk.raw").write_bytes(content)
    (tmp_path / "SHA512SUMS").write_text(f"{'1' * 128}  other.raw\n" + f"{summed}  disk.raw\n" * bool(summed))
    for name, does in {"apt-get": ":", "curl": 'cat "${2#https://host}"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    [job] = pod_specs([yaml.safe_load((EXAMPLES / "disks/fill.yaml").read_text())])
    [script] = job["containers"][0]["args"]
    device = tmp_path / "device"
    script = script.replace("/tmp/", f"{tmp_path}/").replace("/dev/vm-disk", str(device))  # noqa: S108
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "IMAGE": f"https://host{tmp_path}/disk.raw"}
    environment["SHA512"] = summed if pinned else ""
    ran = subprocess.run(
        [*job["containers"][0]["command"], script], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode == 0) is (listed == "right"), ran.stderr
    if listed == "right":
        assert device.read_bytes() == content
    else:
        assert not any(device.read_bytes()[: 1 << 20])
        assert "the disk is wiped" in ran.stderr


@pytest.mark.parametrize("name", ["instance", "job"])
def test_an_instance_is_not_evicted_from_an_unreachable_node(name: str) -> None:
    [pod] = pod_specs(resources(name))
    tolerated = {(each["key"], each["effect"], each.get("tolerationSeconds")) for each in pod["tolerations"]}
    assert tolerated == {(f"node.kubernetes.io/{taint}", "NoExecute", None) for taint in ("not-ready", "unreachable")}


def test_the_controller_has_time_to_say_that_it_lives() -> None:
    """By default it is a second, in which a pod may keep it busy: the kubelet would start it again."""
    [pod] = pod_specs(resources("controller"))
    [container] = pod["containers"]
    assert {container[probe]["timeoutSeconds"] for probe in ("livenessProbe", "readinessProbe")} == {5}


def test_the_controller_asks_for_no_cpu() -> None:
    """Not even for a part: instances take whole CPUs, so 20m would cost the node one of them."""
    [pod] = pod_specs(resources("controller"))
    [container] = pod["containers"]
    asked: dict[str, dict[str, Any]] = container["resources"]
    assert asked["requests"].keys() | asked["limits"].keys() == {"memory"}
    assert parse_quantity(asked["requests"]["memory"]) > 0, "Burstable, not BestEffort"


def test_the_controller_gets_what_it_keeps_and_what_it_starts_with() -> None:
    """The image's entry point enters the cgroup namespace, attaches the device filter, and gives the rights for it to its processes."""
    [pod] = pod_specs(resources("controller"))
    [container] = pod["containers"]
    assert "command" not in container
    names = {
        CAP_DAC_OVERRIDE: "DAC_OVERRIDE",
        CAP_SYS_ADMIN: "SYS_ADMIN",
        CAP_SYS_NICE: "SYS_NICE",
        CAP_SYS_PTRACE: "SYS_PTRACE",
        CAP_SYS_RESOURCE: "SYS_RESOURCE",
    }
    given = {number for kind in (NamespaceReader, TunerProcess, CgroupWriter) for number in kind.keeps}
    context: dict[str, Any] = container["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert set(context["capabilities"]["add"]) == {names[number] for number in (*KEPT_CAPABILITIES, *given)}
    assert {CAP_SYS_ADMIN, CAP_SYS_PTRACE}.isdisjoint(KEPT_CAPABILITIES)
    assert "privileged" not in context
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}, "which allows bpf(2) and setns(2) with SYS_ADMIN"
    assert pod["hostPID"], "its /proc/1 is the node's"
    assert {volume["hostPath"]["path"] for volume in pod["volumes"]} >= {"/sys/fs/cgroup"}


def test_no_instance_reaches_the_directory_of_the_controller_s_records() -> None:
    directory = str(command_line().get_default("state_dir"))
    [controller] = pod_specs(resources("controller"))
    [container] = controller["containers"]
    assert directory in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert directory in {volume["hostPath"]["path"] for volume in controller["volumes"]}
    for name in ("instance", "job"):
        [pod] = pod_specs(resources(name))
        [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "controller"]
        assert mount["readOnly"]
        assert directory not in {volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}


@pytest.mark.parametrize("name", KUBELETS)
def test_the_kubelet_s_cgroup_driver_is_configured(name: str) -> None:
    assert yaml.safe_load((EXAMPLES / name).read_text())["cgroupDriver"] == "systemd"
