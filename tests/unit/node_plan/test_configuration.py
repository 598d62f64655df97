from __future__ import annotations

import contextlib
import re
import tracemalloc
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.cpuset import CpuSet
from runner.base.document_value import Value
from runner.base.errors import RefusedError, SpecError, UsageError
from runner.cli.plan_node_files import read_configuration
from runner.facts.hardware import Hardware
from runner.node_plan.admission import Kubelet, KubeletConfiguration
from runner.node_plan.configuration import (
    OTHER_KEYS,
    STRING_KEYS,
    TABLE_KEYS,
    changed,
    configuration_among,
    parse_kubelet_configuration,
)
from runner.node_plan.quirks import KubeletConfigError
from runner.node_plan.topology_manager import Policy
from runner.spec.yaml import parse_yaml

pytestmark = pytest.mark.kubelet_model

ROOT = Path(__file__).parents[3]
HARDWARE = Hardware.from_json((ROOT / "examples/plan/dual-epyc.json").read_text())
MEMORY = sum(node.memory for node in HARDWARE.numa_nodes)
MIB, GIB = 1 << 20, 1 << 30
HEAD = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}


def read(minor: int = 36, **keys: Any) -> KubeletConfiguration:
    return parse_kubelet_configuration(Value(HEAD | keys, "k.yaml"), HARDWARE, minor)[0]


def notes(**keys: Any) -> tuple[str, ...]:
    return parse_kubelet_configuration(Value(HEAD | keys, "k.yaml"), HARDWARE, 36)[1]


def test_the_example() -> None:
    path = ROOT / "examples/kubernetes/kubelet-configuration.yaml"
    (document,) = parse_yaml(str(path), path.read_bytes())
    configuration, remarks = parse_kubelet_configuration(document, HARDWARE, 36)
    assert configuration == KubeletConfiguration(
        minor=36,
        cpu_manager_policy="static",
        reserved_cpus=CpuSet((0, 64)),
        reserved_millicpus=2000,
        memory_manager_policy="Static",
        reserved_memory={0: {"memory": 2 * GIB}, 1: {"memory": 2 * GIB}},
        node_allocatable_memory=4 * GIB,
        topology_manager_policy="best-effort",
        topology_manager_scope="pod",
    )
    assert remarks == (
        (
            "reservedSystemCPUs (2 CPUs) takes the place of kubeReserved.cpu and systemReserved.cpu (4000m together),"
            " which count for nothing"
        ),
    )


def test_the_strict_example_differs_in_three_lines() -> None:
    examples = ROOT / "examples/kubernetes"

    def read_example(name: str) -> KubeletConfiguration:
        (document,) = parse_yaml(name, (examples / name).read_bytes())
        return parse_kubelet_configuration(document, HARDWARE, 36)[0]

    strict = read_example("kubelet-configuration-strict.yaml")
    assert strict == attrs.evolve(
        read_example("kubelet-configuration.yaml"),
        cpu_manager_policy_options={"full-pcpus-only": "true"},
        topology_manager_policy="single-numa-node",
    )


def test_the_one_configuration_of_a_file() -> None:
    other, ours = Value({"kind": "ClusterConfiguration"}, "k.yaml (document 1)"), Value(HEAD, "k.yaml (document 2)")
    assert configuration_among([other, ours]) is ours
    with pytest.raises(UsageError) as caught:
        configuration_among([other])
    assert str(caught.value) == (
        "cannot use 'k.yaml': it must hold one KubeletConfiguration, found 'ClusterConfiguration'; the one of a running node"
        " is printed by: kubectl get --raw /api/v1/nodes/NODE/proxy/configz"
    )
    for documents in ([ours, ours], [Value([1], "k.yaml")]):
        with pytest.raises(UsageError, match="it must hold one KubeletConfiguration"):
            configuration_among(documents)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("apiVersion: machineconfiguration.openshift.io/v1\nkind: KubeletConfig", "OpenShift's KubeletConfig"),
        ("apiVersion: node.eks.aws/v1alpha1\nkind: NodeConfig", "EKS's NodeConfig"),
        ("kubeletConfig:\n  cpuManagerPolicy: static", "GKE's node system configuration"),
        ('{"cpuManagerPolicy": "static", "failSwapOn": false}', "AKS' custom node configuration"),
        ("machine:\n  kubelet:\n    extraConfig: {}", "Talos' machine configuration"),
        ("kubelet-arg:\n- cpu-manager-policy=static", "RKE2's or k3s' config.yaml"),
        ("[settings.kubernetes]\ncpu-manager-policy = 'static'", "Bottlerocket's settings"),
        ("[motd]\n[ settings.kubernetes ]\ncpu-manager-policy = 'static'", "Bottlerocket's settings"),
        ("--cpu-manager-policy=static\n--reserved-cpus=0", "the kubelet's flags, as in MicroK8s' args/kubelet"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {kubelet: x}", "a ConfigMap"),
        ('KUBELET_KUBEADM_ARGS="--cpu-manager-policy=static --reserved-cpus=0"\n', "the kubelet's flags"),
        ("[Service]\nExecStart=/usr/bin/kubelet --cpu-manager-policy=static $ARGS\n", "the kubelet's flags"),
        ("/usr/bin/kubelet\0--cpu-manager-policy=static\0", "the kubelet's flags"),
        ("services:\n  kubelet:\n    extra_args: {cpu-manager-policy: static}", "RKE's cluster.yml"),
        ("kubelet_cpu_manager_policy: static\nkubelet_topology_manager_scope: pod", "kubespray's variables"),
        ('{"kind": "Status", "apiVersion": "v1", "code": 403}', "an error of the API server"),
        ("", "found nothing"),
    ],
)
def test_the_forms_of_distributions_are_told_and_the_way_out_is_named(tmp_path: Path, text: str, form: str) -> None:
    (tmp_path / "node.conf").write_text(text)
    with pytest.raises(UsageError) as caught:
        read_configuration(str(tmp_path / "node.conf"))
    assert form in str(caught.value)
    assert str(caught.value).endswith(": kubectl get --raw /api/v1/nodes/NODE/proxy/configz")


def test_what_is_neither_yaml_nor_toml_is_refused_as_yaml(tmp_path: Path) -> None:
    (tmp_path / "node.conf").write_text("[settings\n=")
    with pytest.raises(SpecError, match="cannot parse the document as YAML"):
        read_configuration(str(tmp_path / "node.conf"))


@pytest.mark.parametrize("text", ["[x]\n" + "a." * 10_000 + "a = 1", "[x]\na = " + "[" * 900])
def test_what_is_nearly_toml_is_refused_in_little_memory(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.conf").write_text(text)
    tracemalloc.start()
    with pytest.raises(SpecError, match="cannot parse the document as YAML"):
        read_configuration(str(tmp_path / "node.conf"))
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("keys", "graces"),
    [
        ({}, ()),
        ({"shutdownGracePeriod": "0s"}, ()),
        ({"shutdownGracePeriod": "1m30s", "shutdownGracePeriodCriticalPods": "10s"}, ((0, 80), (2_000_000_000, 10))),
        (
            {"shutdownGracePeriodByPodPriority": [{"priority": 9, "shutdownGracePeriodSeconds": 5}, {"priority": 0}]},
            None,
        ),
        (
            {
                "shutdownGracePeriodByPodPriority": [
                    {"priority": 9, "shutdownGracePeriodSeconds": 5},
                    {"priority": -1, "shutdownGracePeriodSeconds": 60},
                ]
            },
            ((-1, 60), (9, 5)),
        ),
        ({"shutdownGracePeriod": "30"}, None),
        ({"shutdownGracePeriod": 30}, None),
    ],
)
def test_what_pods_have_at_a_shutdown_of_the_node(keys: dict[str, Any], graces: object) -> None:
    if graces is None:
        with pytest.raises(SpecError, match="shutdownGracePeriod"):
            read(**keys)
        return
    assert read(**keys).shutdown_graces == graces


def test_critical_pods_have_a_part_of_the_shutdown_s_time() -> None:
    with pytest.raises(
        KubeletConfigError, match="shutdownGracePeriodCriticalPods 40s must be <= shutdownGracePeriod 30s"
    ):
        read(shutdownGracePeriod="30s", shutdownGracePeriodCriticalPods="40s")


def test_the_configuration_that_a_running_kubelet_reports() -> None:
    running = Value({"kubeletconfig": {"topologyManagerPolicy": "restricted", "reservedSystemCPUs": 0}}, "configz.json")
    document = configuration_among([running])
    with pytest.raises(SpecError) as caught:
        parse_kubelet_configuration(document, HARDWARE, 36)
    assert str(caught.value).startswith("configz.json: kubeletconfig.reservedSystemCPUs: must be a string, found 0")
    fixed = changed(document, {"reservedSystemCPUs": "0"})
    assert parse_kubelet_configuration(fixed, HARDWARE, 36)[0] == read(
        topologyManagerPolicy="restricted", reservedSystemCPUs="0"
    )


def test_reserved_memory_of_no_numa_node_matters_to_a_memory_manager_only() -> None:
    assert read(reservedMemory=[{"numaNode": 7, "limits": {"memory": "1Gi"}}]).reserved_memory == {
        7: {"memory": 1 << 30}
    }


def test_the_defaults() -> None:
    assert read() == KubeletConfiguration(minor=36, node_allocatable_memory=100 * MIB)
    [note] = notes()
    assert note == (
        "cpuManagerPolicy is 'none': the kubelet gives no container exclusive CPUs; set it to 'static', unless a DRA driver"
        " gives them, of which nothing is known here"
    )


@pytest.mark.parametrize(
    ("keys", "reserved"),
    [
        ({}, 100 * MIB),
        ({"evictionHard": {}}, 0),
        ({"evictionHard": None}, 100 * MIB),
        ({"evictionHard": {}, "mergeDefaultEvictionSettings": True}, 100 * MIB),
        ({"evictionHard": {"nodefs.available": "10%"}}, 0),
        ({"evictionHard": {"nodefs.available": "10%"}, "mergeDefaultEvictionSettings": True}, 100 * MIB),
        ({"evictionHard": {"memory.available": "1Gi"}, "mergeDefaultEvictionSettings": False}, GIB),
        ({"evictionHard": {"memory.available": "0%"}}, 0),
        ({"evictionHard": {"memory.available": "100%"}}, 0),
        ({"evictionHard": {"memory.available": "1Gi"}, "kubeReserved": {"memory": "1Gi", "pid": "100"}}, 2 * GIB),
        # Five hundredths as a float32 are a little more than that.
        ({"evictionHard": {"memory.available": "5%"}}, int(MEMORY * 0.05000000074505806)),
    ],
)
def test_reserved_cpus_and_memory(keys: dict[str, Any], reserved: int) -> None:
    assert read(**keys).node_allocatable_memory == reserved


def test_the_number_of_pods() -> None:
    assert (read().max_pods, read().pods_per_core) == (110, 0)
    limited = read(maxPods=250, podsPerCore=10)
    assert (limited.max_pods, limited.pods_per_core) == (250, 10)
    with pytest.raises(KubeletConfigError) as caught:
        read(maxPods=-1)
    assert str(caught.value) == "invalid configuration: maxPods (--max-pods) -1 must not be a negative number"
    with pytest.raises(SpecError, match=r"podsPerCore: must be a whole number, found '10'"):
        read(podsPerCore="10")
    assert "did you mean 'maxPods'" in notes(maxpods=1)[0]


def test_the_gate_of_pod_level_resources() -> None:
    gates = {"PodLevelResources": False}
    assert [
        read(33).pod_level_resources,
        read(34).pod_level_resources,
        read(featureGates=gates).pod_level_resources,
    ] == [
        False,
        True,
        False,
    ]


def test_reservations_in_cpus_are_added_and_rounded_late() -> None:
    keys: dict[str, Any] = {
        "kubeReserved": {"cpu": "500m"},
        "systemReserved": {"cpu": "1.2", "ephemeral-storage": "1Gi"},
    }
    assert read(**keys).reserved_millicpus == 1700


def test_a_reservation_that_does_not_add_up_keeps_the_kubelet_from_starting() -> None:
    keys: dict[str, Any] = {
        "memoryManagerPolicy": "Static",
        "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi"}}],
    }
    with pytest.raises(KubeletConfigError) as caught:
        Kubelet.configured(HARDWARE, read(**keys))
    assert str(caught.value) == (
        'the total amount "1Gi" of type "memory" is not equal to the value "100Mi" determined by Node Allocatable feature'
    )
    assert Kubelet.configured(HARDWARE, read(**keys, kubeReserved={"memory": "924Mi"})).memory_manager


@pytest.mark.parametrize(
    ("minor", "option", "gate", "shown"),
    [
        (36, "full-pcpus-only", {}, True),
        (33, "distribute-cpus-across-numa", {}, True),
        (36, "distribute-cpus-across-numa", {"CPUManagerPolicyBetaOptions": False}, False),
        (36, "align-by-socket", {}, False),
        (36, "align-by-socket", {"CPUManagerPolicyAlphaOptions": True}, True),
        (33, "prefer-align-cpus-by-uncorecache", {}, False),
        (34, "prefer-align-cpus-by-uncorecache", {}, True),
        (35, "prefer-align-cpus-by-uncorecache", {"CPUManagerPolicyBetaOptions": False}, False),
        (36, "prefer-align-cpus-by-uncorecache", {"CPUManagerPolicyBetaOptions": False}, True),
        (34, "strict-cpu-reservation", {"CPUManagerPolicyBetaOptions": False}, False),
        (35, "strict-cpu-reservation", {"CPUManagerPolicyBetaOptions": False}, True),
    ],
)
def test_feature_gates_show_options_by_version(minor: int, option: str, gate: dict[str, bool], shown: bool) -> None:  # noqa: FBT001
    keys: dict[str, Any] = {
        "cpuManagerPolicy": "static",
        "cpuManagerPolicyOptions": {option: "true"},
        "featureGates": gate,
    }
    if shown:
        assert read(minor, **keys).cpu_manager_policy_options == {option: "true"}
        return
    with pytest.raises(KubeletConfigError, match=f'-level Options not enabled, but option "{option}" provided'):
        read(minor, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"topologyManagerPolicy": "strict"},
            (
                'invalid configuration: topologyManagerPolicy (--topology-manager-policy) "strict" must be one of:'
                ' ["none" "best-effort" "restricted" "single-numa-node"]'
            ),
        ),
        (
            {"topologyManagerScope": "node"},
            (
                'invalid configuration: topologyManagerScope (--topology-manager-scope) "node" must be one of:'
                ' "container", or "pod"'
            ),
        ),
        ({"reservedSystemCPUs": "0,200"}, "reserved-cpus: 0,200 is not a subset of online-cpus: 0-127"),
        (
            {"cpuManagerPolicyOptions": {"full-pcpus-only": "true"}},
            "None policy: received unsupported options=map[full-pcpus-only:true]",
        ),
        ({"kubeReserved": {"hugepages-2Mi": "1Gi"}}, 'cannot reserve "hugepages-2Mi" resource'),
        (
            {"memoryManagerPolicy": "Static", "reservedMemory": [{"numaNode": 7, "limits": {"memory": "1Gi"}}]},
            "the reserved memory configuration references a NUMA node 7 that does not exist on this machine",
        ),
        (
            {"reservedMemory": [{"numaNode": 0, "limits": {"cpu": "1"}}]},
            (
                'invalid configuration: the limit type "cpu" for NUMA node 0 is not supported,'
                " only [memory hugepages-<HugePageSize>] is accepted"
            ),
        ),
        (
            {"reservedMemory": [{"numaNode": 0, "limits": {"memory": 0}}]},
            'invalid configuration: reserved memory may not be zero for NUMA node 0 and resource "memory"',
        ),
        (
            {"reservedMemory": [{"limits": {"memory": 1}}, {"numaNode": 0, "limits": {"memory": 1}}]},
            'invalid configuration: the reserved memory has a duplicate value for NUMA node 0 and resource "memory"',
        ),
        (
            {"evictionHard": {"memory.available": "0"}},
            "eviction threshold memory.available must be positive: 0",
        ),
        *(
            (
                {"featureGates": {gate: enabled}},
                f"failed to set feature gates from initial flags-based config: {reason}",
            )
            for gate, enabled, reason in (
                ("CPUManager", True, "unrecognized feature gate: CPUManager"),
                ("TopologyManager", False, "unrecognized feature gate: TopologyManager"),
                ("MemoryManager", True, "unrecognized feature gate: MemoryManager"),
                ("DevicePlugins", True, "unrecognized feature gate: DevicePlugins"),
                ("NodeSwap", False, "cannot set feature gate NodeSwap to false, feature is locked to true"),
            )
        ),
        (
            {"reservedSystemCPUs": "0", "systemReservedCgroup": "/system.slice"},
            (
                "invalid configuration: can't use reservedSystemCPUs (--reserved-cpus) with systemReservedCgroup"
                " (--system-reserved-cgroup) or kubeReservedCgroup (--kube-reserved-cgroup)"
            ),
        ),
    ],
)
def test_configurations_that_the_kubelet_refuses_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(KubeletConfigError) as caught:
        read(**keys)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"apiVersion": "v1"}, "apiVersion: must be 'kubelet.config.k8s.io/v1beta1', found 'v1'"),
        ({"reservedSystemCPUs": 0}, 'reservedSystemCPUs: must be a string, found 0; write it in quotes: "0"'),
        (
            {"cpuManagerPolicyOptions": {"full-pcpus-only": True}},
            'cpuManagerPolicyOptions.full-pcpus-only: must be a string, found True; write it in quotes: "true"',
        ),
        ({"kubeReserved": {"cpu": 3}}, 'kubeReserved.cpu: must be a string, found 3; write it in quotes: "3"'),
        ({"kubeReserved": ["cpu"]}, "kubeReserved: must be an object, found ['cpu']"),
        ({"kubeReserved": {"cpu": "x"}}, "kubeReserved.cpu: 'x' is not a quantity like '4', '500m' or '1Gi'"),
        ({"systemReserved": {"memory": "-1Gi"}}, "systemReserved.memory: must not be negative, found '-1Gi'"),
        ({"featureGates": {"X": "true"}}, "featureGates.X: must be true or false, found 'true'"),
        ({"reservedMemory": {"numaNode": 0}}, "reservedMemory: must be a list, found {'numaNode': 0}"),
        ({"reservedMemory": [{"numaNode": "0"}]}, "reservedMemory[0].numaNode: must be a whole number, found '0'"),
        (
            {"reservedMemory": [{"limits": {"memory": True}}]},
            "reservedMemory[0].limits.memory: must be a quantity like '4', '500m' or '1Gi', found True",
        ),
        (
            {"reservedSystemCPUs": "4-1"},
            "reservedSystemCPUs: range '4-1' in '4-1' runs backwards",
        ),
        (
            {"evictionHard": {"memory.available": "x%"}},
            "evictionHard.memory.available: must be a quantity or a percentage, found 'x%'",
        ),
        (
            {"evictionHard": {"memory.available": "101%"}},
            "evictionHard.memory.available: must be a percentage from 0 to 100, found '101%'",
        ),
        (
            {"evictionHard": {"memory.available": "nan%"}},
            "evictionHard.memory.available: must be a percentage from 0 to 100, found 'nan%'",
        ),
    ],
)
def test_documents_that_the_kubelet_cannot_decode_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(**keys)
    assert str(caught.value) == f"k.yaml: {message}"


def test_a_gate_is_locked_before_it_is_gone() -> None:
    read(34, featureGates={"MemoryManager": True, "NodeSwap": True})
    read(33, featureGates={"NodeSwap": False})
    with pytest.raises(
        KubeletConfigError, match="cannot set feature gate MemoryManager to false, feature is locked to true"
    ):
        read(34, featureGates={"MemoryManager": False})


def test_options_under_policy_none_are_not_looked_at() -> None:
    options = {"max-allowable-numa-nodes": "4", "prefer-closest-numa-nodes": "x", "unknown": "1"}
    found = read(topologyManagerPolicyOptions=options)
    assert Kubelet.configured(HARDWARE, found).topology_manager.policy is Policy.NONE
    for option, value in options.items():
        found = read(topologyManagerPolicy="restricted", topologyManagerPolicyOptions={option: value})
        with pytest.raises(KubeletConfigError):
            Kubelet.configured(HARDWARE, found)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        *(
            (key, "reservedSystemCPUs")
            for key in ("reservedCpus", "reserved-cpus", "reservedCPUs", "reserved_system_cpus")
        ),
        ("cpu-manager-policy", "cpuManagerPolicy"),
        ("topology-manager-policy-options", "topologyManagerPolicyOptions"),
        ("cpuManager", "cpuManagerPolicy"),
        ("system-reserved", "systemReserved"),
    ],
)
def test_the_name_of_a_flag_is_no_key(key: str, meant: str) -> None:
    (note,) = notes(cpuManagerPolicy="static", **{key: "0"})
    assert note == f"{key}: the kubelet has no such key and we ignore it; did you mean {meant!r}?"


def test_a_misspelled_key_is_noted() -> None:
    found = notes(topologyManagerpolicy="x", cpuManagerReconcilePeriod="10s", podPidsLimit=1, cpuManagerPolicy="static")
    assert found == (
        "topologyManagerpolicy: the kubelet has no such key and we ignore it; did you mean 'topologyManagerPolicy'?",
    )


@pytest.mark.parametrize(
    ("period", "policy", "noted"),
    [("1m0s", "static", ["60 s"]), ("10s", "static", []), ("0s", "static", []), ("1m0s", "none", [])],
)
def test_a_reconcile_period_for_which_the_controller_does_not_wait_is_noted(
    period: str, policy: str, noted: list[str]
) -> None:
    found = [note for note in notes(cpuManagerPolicy=policy, cpuManagerReconcilePeriod=period) if "Reconcile" in note]
    assert [note.split(":")[0] for note in found] == [f"cpuManagerReconcilePeriod is {each}" for each in noted]


def test_the_gate_of_pod_level_resource_managers() -> None:
    gates = {"PodLevelResourceManagers": True}
    assert read(featureGates=gates).pod_level_resource_managers
    (note,) = notes(cpuManagerPolicy="static", featureGates=gates)
    assert note.startswith("featureGates.PodLevelResourceManagers is alpha, and planned as kubelet 1.36.2 has it")
    start = "^failed to set feature gates from initial flags-based config: "
    with pytest.raises(KubeletConfigError, match=f"{start}unrecognized feature gate: PodLevelResourceManagers$"):
        read(35, featureGates={"PodLevelResourceManagers": False})
    disabled = "PodLevelResourceManagers is enabled, but depends on features that are disabled: [PodLevelResources]"
    with pytest.raises(KubeletConfigError, match=f"{start}{re.escape(disabled)}$"):
        read(featureGates={**gates, "PodLevelResources": False})


def test_changes() -> None:
    document = Value(HEAD | {"cpuManagerPolicyOptions": {"full-pcpus-only": "true"}}, "k.yaml")
    other = changed(
        document,
        {
            "cpuManagerPolicy": "static",
            "cpuManagerPolicyOptions.full-pcpus-only": "",
            "evictionHard.memory.available": "2Gi",
            "featureGates.CPUManagerPolicyAlphaOptions": "true",
        },
    )
    assert other.value == HEAD | {
        "cpuManagerPolicy": "static",
        "cpuManagerPolicyOptions": {},
        "evictionHard": {"memory.available": "2Gi"},
        "featureGates": {"CPUManagerPolicyAlphaOptions": True},
    }
    assert document.value == HEAD | {"cpuManagerPolicyOptions": {"full-pcpus-only": "true"}}


@pytest.mark.parametrize(
    "key", ["reservedMemory", "cpuManagerPolicyOptions", "cpuManagerPolicy.x", "topologyManagerPolcy", ""]
)
def test_unknown_changes_are_refused(key: str) -> None:
    with pytest.raises(UsageError, match="it takes cpuManagerPolicy, "):
        changed(Value(HEAD, "k.yaml"), {key: "x"})
    if key.startswith("topology"):
        with pytest.raises(UsageError, match="did you mean 'topologyManagerPolicy'"):
            changed(Value(HEAD, "k.yaml"), {key: "x"})


NOISE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["static", "0", "0-3", "1Gi", "5%", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["cpu", "memory", "numaNode", "limits", "memory.available", "full-pcpus-only", "x"]), inner
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*STRING_KEYS, *TABLE_KEYS, *OTHER_KEYS]), NOISE))
@settings(max_examples=300)
def test_noise_gives_a_spec_error_or_a_configuration(keys: dict[str, Any]) -> None:
    with contextlib.suppress(SpecError, RefusedError):
        Kubelet.configured(HARDWARE, read(**keys))
