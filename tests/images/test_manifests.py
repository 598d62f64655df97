"""The Kubernetes manifests: valid for every supported version, and consistent with the specs and our own planner."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from runner.base.cpuset import CpuSet
from runner.facts.disk import DocumentFact
from runner.kubelet.pod import parse_quantity
from runner.node_plan.quirks import NEWEST_MINOR, OLDEST_MINOR
from runner.plan.cloud_init import plan_seed
from runner.plan.memory import memory_overhead
from runner.plan.problems import Problems
from runner.spec.instance import InstanceSpec, parse_instance
from tests.images.built import PROJECT
from tests.images.manifests import DIRECTORIES, EXAMPLES, INSTANCES, Object, images_of, pod_specs, put_together
from tests.images.test_images import NEEDED, NEEDED_FOR_SHARES

NEEDED_FOR_DEVICES = ("SYS_RESOURCE", "CHOWN")
"""To lock all of the guest's memory, and to lend QEMU the node of an IOMMU group."""
HUGE_LIMIT = "LIMITS_HUGEPAGES_2MI"
DEVICES = (
    "nvidia.com/GH100=4@0",
    "nvidia.com/GH100_NVSWITCH=4@0",
    *(f"nvidia.com/{name}=4@{node}" for name in ("GH100_H200_SXM_141GB", "ib_pf") for node in (0, 1)),
)
"""Of the recorded host."""
TAKEN = {"Pod", "Job", "PodDisruptionBudget", "ConfigMap", "Secret"}
"""The kinds of an instance's objects, which are deleted with it."""


@pytest.fixture(scope="module")
def kustomize() -> None:
    """Skip what needs kustomize where it is missing."""
    if "RUNNER_KUSTOMIZE" not in os.environ:
        pytest.skip("kustomize is missing: tests/images/run fetches it and names it in RUNNER_KUSTOMIZE")


@pytest.fixture(scope="module")
def objects(kustomize: None) -> dict[str, list[Object]]:  # noqa: ARG001
    """Return directory → its objects."""
    return {name: put_together(name) for name in DIRECTORIES}


def spec_of(objects: list[Object]) -> InstanceSpec:
    """Return the spec, with ``"all"`` and ``"limits"`` replaced by the pod's limits."""
    [text] = [found["data"]["spec.toml"] for found in objects if found["kind"] == "ConfigMap"]
    spec = parse_instance("spec.toml", text.encode(), dict.fromkeys(names_of(objects), "value"))
    limits = container_of(objects)["resources"]["limits"]
    cpu = attrs.evolve(spec.cpu, count=spec.cpu.count or int(limits["cpu"]))
    size = spec.memory.size or int(parse_quantity(limits["hugepages-2Mi"]))
    return attrs.evolve(spec, cpu=cpu, memory=attrs.evolve(spec.memory, size=size))


def names_of(objects: list[Object]) -> list[str]:
    return [each["name"] for each in container_of(objects)["env"]]


def container_of(objects: list[Object]) -> Object:
    [pod] = pod_specs(objects)
    [container] = pod["containers"]
    return dict(container)


def is_guaranteed(pod: Object) -> bool:
    """Return whether every container has limits of CPU and memory, and requests, if any, that are the same.

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


def test_deleting_an_instance_deletes_nothing_of_another(objects: dict[str, list[Object]]) -> None:
    """``kubectl delete -k`` deletes no Namespace, no claim, and no object of two instances."""
    taken = [
        (found["kind"], found["metadata"]["namespace"], found["metadata"]["name"])
        for name in INSTANCES
        for found in objects[name]
    ]
    assert {kind for kind, _, _ in taken} == TAKEN
    assert {namespace for _, namespace, _ in taken} == {"instances"}
    assert len(taken) == len(set(taken))
    [namespace] = objects["namespace"]
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", "instances")


def test_the_disk_of_an_instance_is_a_claim_of_its_own_kustomization(objects: dict[str, list[Object]]) -> None:
    [claim] = objects["disks/claim"]
    assert (claim["kind"], claim["metadata"]["namespace"]) == ("PersistentVolumeClaim", "instances")
    named = {
        volume["persistentVolumeClaim"]["claimName"]
        for name in INSTANCES
        for pod in pod_specs(objects[name])
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert named == {claim["metadata"]["name"]}


def test_the_local_volume_is_one_that_the_claim_can_have(objects: dict[str, list[Object]]) -> None:
    """By the rules of the volume controller: same class and mode, every access mode, at least the size."""
    kinds = {found["kind"]: found for found in objects["disks/local"]}
    assert set(kinds) == {"StorageClass", "PersistentVolume", "PersistentVolumeClaim"}
    offered, asked = kinds["PersistentVolume"]["spec"], kinds["PersistentVolumeClaim"]["spec"]
    assert kinds["StorageClass"]["metadata"]["name"] == offered["storageClassName"] == asked["storageClassName"]
    assert kinds["StorageClass"]["provisioner"] == "kubernetes.io/no-provisioner"
    assert offered["volumeMode"] == asked["volumeMode"] == "Block"
    assert set(asked["accessModes"]) <= set(offered["accessModes"])
    sizes = (offered["capacity"]["storage"], asked["resources"]["requests"]["storage"])
    assert parse_quantity(sizes[0]) >= parse_quantity(sizes[1])
    [claim] = objects["disks/claim"]
    assert asked == {**claim["spec"], "storageClassName": "local-disks"}


def pod_labels(objects: list[Object]) -> dict[str, str]:
    [metadata] = [
        found["spec"]["template"]["metadata"] if found["kind"] == "Job" else found["metadata"]
        for found in objects
        if found["kind"] in {"Pod", "Job"}
    ]
    return dict(metadata["labels"])


@pytest.mark.parametrize("name", INSTANCES)
def test_a_budget_keeps_exactly_this_instance(name: str, objects: dict[str, list[Object]]) -> None:
    [budget] = [found["spec"] for found in objects[name] if found["kind"] == "PodDisruptionBudget"]
    # maxUnavailable needs a controller with a scale, which neither a bare pod nor a Job has
    assert {key: value for key, value in budget.items() if key != "selector"} == {"minAvailable": 1}
    selected = budget["selector"]["matchLabels"].items()
    assert [other for other in INSTANCES if selected <= pod_labels(objects[other]).items()] == [name]


@pytest.mark.parametrize("name", INSTANCES)
def test_a_node_that_is_away_does_not_end_the_instance(name: str, objects: dict[str, list[Object]]) -> None:
    """The admission plugin DefaultTolerationSeconds adds 300 s for each of these two taints that is not tolerated."""
    [pod] = pod_specs(objects[name])
    for taint in ("not-ready", "unreachable"):
        tolerated = {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute"}
        assert tolerated in pod["tolerations"], "without tolerationSeconds"


@pytest.mark.parametrize("name", INSTANCES)
def test_a_changed_instance_does_not_change_what_the_running_one_reads(
    name: str, objects: dict[str, list[Object]], tmp_path: Path
) -> None:
    def maps(found: list[Object]) -> set[str]:
        generated = [each for each in found if each["kind"] in {"ConfigMap", "Secret"}]
        assert all(each["immutable"] is True for each in generated)
        return {each["metadata"]["name"] for each in generated}

    [pod] = pod_specs(objects[name])
    sources = [volume.get("configMap", volume.get("secret", {})) for volume in pod["volumes"]]
    read = {source.get("name", source.get("secretName")) for source in sources} - {None}
    assert maps(objects[name]) == read
    changed = tmp_path / "kubernetes"
    shutil.copytree(EXAMPLES, changed)
    for file in kustomized_files(changed / name):
        file.write_text(file.read_text() + "# changed\n")
    assert maps(put_together(name, changed)).isdisjoint(read)


def kustomized_files(directory: Path) -> list[Path]:
    """Return the files from which *directory* makes ConfigMaps and Secrets."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    generators = [*kustomization["configMapGenerator"], *kustomization.get("secretGenerator", [])]
    return [directory / file for generator in generators for file in generator["files"]]


def test_the_documents_for_cloud_init_are_valid(objects: dict[str, list[Object]]) -> None:
    """The example has no SSH key and is refused; with a key its documents are accepted."""
    [secret] = [found for found in objects["overlays/server"] if found["kind"] == "Secret"]
    spec = spec_of(objects["overlays/server"])
    assert spec.cloud_init is not None
    found = {f"/etc/cloud-init/{name}": base64.b64decode(text) for name, text in secret["data"].items()}

    def refusals() -> list[str]:
        facts = {PurePosixPath(path): DocumentFact(content=content) for path, content in found.items()}
        assert spec.cloud_init is not None
        problems = Problems()
        plan_seed(spec.cloud_init, "id", "web-1", (), facts, problems)
        return [f"{each.path} {each.message}" for each in problems.found]

    [refusal] = refusals()
    assert refusal.startswith("cloud_init.ssh_keys[0] '/etc/cloud-init/authorized_keys' has no public key")
    found["/etc/cloud-init/authorized_keys"] += b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA== user@example.com\n"
    assert refusals() == []
    assert isinstance(yaml.safe_load(found["/etc/cloud-init/user-data"]), dict)


@pytest.mark.usefixtures("kustomize")
def test_an_instance_elsewhere_takes_its_manifests_from_this_repository(tmp_path: Path) -> None:
    """As the README shows it, from a git repository at a tag."""
    repository, mine = tmp_path / "repository", tmp_path / "mine"
    shutil.copytree(EXAMPLES, repository / "examples/kubernetes")
    git = ("git", "-C", repository, "-c", "user.name=x", "-c", "user.email=x@example.com")
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "x"), ("tag", "v0.1.0")):
        subprocess.run([*git, *command], check=True)
    own = (EXAMPLES / "README.md").read_text().partition("### An instance of your own\n")[2]
    shown = re.findall(r"```yaml\n(.*?)```", own, re.DOTALL)[0]
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(
        shown.replace("https://git.example/instance-runner", f"file://{repository}")
    )
    spec = (EXAMPLES / "instance/spec.toml").read_text().replace("count = 4", "count = 2").replace("2GiB", "1GiB")
    (mine / "spec.toml").write_text(spec)
    found = put_together("", mine)
    [pod] = [each for each in found if each["kind"] == "Pod"]
    assert pod["metadata"]["name"] == "instance-web"
    assert images_of(found) == ["registry.example/gpu-instance:0.1.0"]
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in found} == {"instance-web"}
    assert_fits(found)


def test_an_invalid_object_is_noticed(objects: dict[str, list[Object]]) -> None:
    [daemon] = [found for found in objects["controller"] if found["kind"] == "DaemonSet"]
    daemon = json.loads(json.dumps(daemon))
    daemon["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostPid"):
        kubernetes_validate.validate(daemon, f"1.{NEWEST_MINOR}", strict=True)


@pytest.mark.parametrize("name", INSTANCES)
def test_pod_and_spec_agree(name: str, objects: dict[str, list[Object]]) -> None:
    assert_fits(objects[name])


def assert_fits(objects: list[Object]) -> None:
    """Fail unless the pod among *objects* has what its spec needs."""
    [pod] = pod_specs(objects)
    spec, limits = spec_of(objects), container_of(objects)["resources"]["limits"]
    assert is_guaranteed(pod)
    # Without the controller's float, all threads but the vCPUs need CPUs of the pod: one whole core.
    besides = 0 if spec.cpu.placement == "controller" else 2
    cpus = int(parse_quantity(limits["cpu"]))
    vcpus = cpus - besides if spec.cpu.count == "all" else spec.cpu.count
    assert cpus == vcpus + besides > besides
    in_pages = int(parse_quantity(limits.get("hugepages-2Mi", "0")))
    size = in_pages if spec.memory.size == "limits" else spec.memory.size
    assert in_pages == (size if spec.memory.hugepages == "2MiB" else 0)
    assert size > 0
    # Emulated, as in the node of the tests, it needs more.
    assert parse_quantity(limits["memory"]) >= size - in_pages + memory_overhead(spec, vcpus, size, "tcg")
    assert {each.resource for each in spec.device} == {name for name in limits if name.startswith("nvidia.com/")}
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
    seed = spec.cloud_init
    named = {PurePosixPath(path) for path in (seed.user_data, *seed.ssh_keys) if path} if seed is not None else set()
    if named:
        [secret] = [found for found in objects[name] if found["kind"] == "Secret"]
        assert {path.name for path in named} == secret["data"].keys()
        assert {str(path.parent) for path in named} <= mounts
    for path in (spec.boot.kernel, spec.boot.initrd, spec.boot.firmware):
        assert path in {None, "uefi"} or str(path).startswith(("/usr/share/instance-runner/demo/", "/usr/share/OVMF/"))
    if spec.cpu.placement == "controller":
        assert str(spec.cpu.controller.parent) in mounts
        assert "POD_UID" in {each["name"] for each in container["env"]}
    pods = pod_specs(objects[name])
    assert not any(pod.get("hostPID") or pod.get("shareProcessNamespace") for pod in pods)


@pytest.mark.parametrize("name", INSTANCES)
def test_probes_reach_the_runner_and_not_the_guest(name: str, objects: dict[str, list[Object]]) -> None:
    spec, container = spec_of(objects[name]), container_of(objects[name])
    probes = {kind: probe for kind, probe in container.items() if kind.endswith("Probe")}
    assert set(probes) == ({"readinessProbe"} if name in {"overlays/probes", "overlays/server"} else set())
    if name == "overlays/server":  # an exec has the runtime start processes: seldom
        assert probes["readinessProbe"]["periodSeconds"] >= 10
        assert probes["readinessProbe"]["exec"] == {"command": ["test", "-e", "/run/instance-runner/ready"]}
        assert {network.mode for network in spec.network} == {"bridge"}
        return
    for probe in probes.values():
        assert set(probe) == {"httpGet", "periodSeconds"}
        assert probe["httpGet"] == {"path": "/readyz", "port": "http"}
        [port] = container["ports"]
        assert f"--http=[$(POD_IP)]:{port['containerPort']}" in container["args"]
        assert {network.mode for network in spec.network} == {"private"}


@pytest.mark.parametrize("name", INSTANCES)
def test_the_pod_has_its_identity_in_the_environment(name: str, objects: dict[str, list[Object]]) -> None:
    more = {"overlays/probes": ["POD_IP"], "overlays/gpu": [HUGE_LIMIT], "overlays/board": [HUGE_LIMIT]}.get(name, [])
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
    assert tuple(context["capabilities"]["add"]) == (
        *NEEDED,
        *(NEEDED_FOR_SHARES if spec.share else ()),
        *(NEEDED_FOR_DEVICES if spec.device else ()),
    )


@pytest.mark.parametrize("kubelet", ["kubelet-configuration.yaml", "kubelet-configuration-strict.yaml"])
@pytest.mark.parametrize("name", INSTANCES)
def test_the_kubelet_of_the_example_admits_it(
    name: str, kubelet: str, objects: dict[str, list[Object]], tmp_path: Path
) -> None:
    """By our own command, with an example's kubelet configuration and the recorded host."""
    manifest, spec = tmp_path / "pod.yaml", tmp_path / "spec.toml"
    manifest.write_text(yaml.safe_dump_all(objects[name]))
    [text] = [found["data"]["spec.toml"] for found in objects[name] if found["kind"] == "ConfigMap"]
    spec.write_text(text)
    argv: list[str | Path] = [
        *(sys.executable, "-m", "runner", "plan", "--json"),
        *("--node", EXAMPLES / kubelet, "--host", EXAMPLES.parent / "plan" / "dual-epyc.json"),
        *(word for device in DEVICES for word in ("--device", device)),
        *("--pod", manifest, spec),
    ]
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=False, cwd=PROJECT)
    answer = json.loads(done.stdout)
    [pod] = answer["pods"]
    if name == "overlays/board" and "strict" in kubelet:
        assert pod["outcome"] == "rejected", "it needs both NUMA nodes, and its NVSwitches are on one"
        return
    assert (done.returncode, answer["fits"]) == (0, True)
    assert (pod["outcome"], pod["qos"]) == ("admitted", "Guaranteed")
    [container] = pod["containers"]
    limits = container_of(objects[name])["resources"]["limits"]
    assert len(CpuSet.parse(container["cpus"])) == parse_quantity(limits["cpu"])
    assert container["memory"][0]["numa_nodes"] == ([0, 1] if name == "overlays/board" else [0])


def test_the_controller_takes_no_whole_cpu(objects: dict[str, list[Object]]) -> None:
    [pod] = pod_specs(objects["controller"])
    assert not is_guaranteed(pod)
    # Nor a part of one: instances take whole CPUs, and the rest of that one would be lost.
    resources = container_of(objects["controller"])["resources"]
    assert "cpu" not in {**resources["requests"], **resources["limits"]}
    assert parse_quantity(resources["requests"]["memory"]) > 0, "Burstable, not BestEffort"
    assert pod["hostPID"]
    assert not container_of(objects["controller"])["securityContext"].get("privileged")
