"""The files from which distributions generate the kubelet's configuration, recognised to explain how to get that configuration.

None of them is read, because the generated configuration depends on the distribution's version. A running kubelet returns the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from runner.base.document_value import Value
from runner.base.errors import UsageError

ASK_THE_KUBELET = "kubectl get --raw /api/v1/nodes/NODE/proxy/configz"
"""The command that prints the configuration of the kubelet of a running node, which ``plan --node`` takes."""

KINDS: Mapping[tuple[str, str], str] = {
    ("machineconfiguration.openshift.io", "KubeletConfig"): "OpenShift's KubeletConfig",
    ("machineconfiguration.openshift.io", "MachineConfig"): "OpenShift's MachineConfig",
    ("performance.openshift.io", "PerformanceProfile"): "OpenShift's PerformanceProfile",
    ("node.eks.aws", "NodeConfig"): "EKS's NodeConfig (nodeadm)",
    ("eksctl.io", "ClusterConfig"): "eksctl's ClusterConfig",
    ("karpenter.k8s.aws", "EC2NodeClass"): "Karpenter's EC2NodeClass",
    ("karpenter.sh", "NodePool"): "Karpenter's NodePool",
    ("k0s.k0sproject.io", "ClusterConfig"): "k0s's ClusterConfig",
    ("k0sctl.k0sproject.io", "Cluster"): "k0sctl's Cluster",
    ("kops.k8s.io", "Cluster"): "kOps's Cluster",
    ("kops.k8s.io", "InstanceGroup"): "kOps's InstanceGroup",
    ("core.gardener.cloud", "Shoot"): "Gardener's Shoot",
    ("kind.x-k8s.io", "Cluster"): "kind's Cluster",
    ("kubeadm.k8s.io", "InitConfiguration"): "kubeadm's InitConfiguration",
    ("kubeadm.k8s.io", "JoinConfiguration"): "kubeadm's JoinConfiguration",
    ("kubeadm.k8s.io", "ClusterConfiguration"): "kubeadm's ClusterConfiguration",
    ("bootstrap.cluster.x-k8s.io", "KubeadmConfig"): "Cluster API's KubeadmConfig",
    ("bootstrap.cluster.x-k8s.io", "KubeadmConfigTemplate"): "Cluster API's KubeadmConfigTemplate",
    ("controlplane.cluster.x-k8s.io", "KubeadmControlPlane"): "Cluster API's KubeadmControlPlane",
    ("v1", "ConfigMap"): "a ConfigMap, such as kubeadm's kubelet-config, whose data is text",
    ("v1", "Node"): "a Node object",
    ("v1", "Status"): "an error of the API server",
}
"""Group of ``apiVersion`` (``v1`` for the core) and kind → description of the document."""
KEYS: Mapping[str, str] = {
    "machine": "Talos' machine configuration",
    "kubelet-arg": "RKE2's or k3s' config.yaml",
    "kubeletConfig": "GKE's node system configuration",
    "linuxConfig": "GKE's node system configuration",
    "services": "RKE's cluster.yml",
    "cpuManagerPolicy": "AKS' custom node configuration, or a KubeletConfiguration without kind and apiVersion",
    "topologyManagerPolicy": "AKS' custom node configuration, or a KubeletConfiguration without kind and apiVersion",
    "featureGates": "a KubeletConfiguration without kind and apiVersion",
}
"""Top-level key of a document without kind → description of the document."""


FLAGS = "the kubelet's flags, as in MicroK8s' args/kubelet, kubeadm-flags.env or a unit of systemd"
_SETTINGS = re.compile(r"^[ \t]*(?:\[[ \t]*)?settings[ \t]*[.\]=]", re.MULTILINE)
"""A table of Bottlerocket's, or a key below one. For a key of n parts :mod:`tomllib` takes memory in n² (1.6 GB for 40 KB)."""
_FLAG = re.compile(r"""(?:^|[\s"'=\0])--[a-z]+(?:-[a-z]+)+(?:[=\s\0]|$)""")
"""A long option of the kubelet's, whose names have several words."""


def form_of(document: Value) -> str:
    """Return a description of *document* if it is no ``KubeletConfiguration``; empty if it is unknown."""
    if isinstance(document.value, str) and _FLAG.search(document.value):
        return FLAGS
    if not isinstance(document.value, dict):
        return ""
    group = str(document.value.get("apiVersion")).partition("/")[0]
    kind = document.value.get("kind")
    if kind is not None:
        return KINDS.get((group, str(kind)), "")
    if any(str(key).startswith("kubelet_") for key in document.value):
        return "kubespray's variables"
    return next((form for key, form in KEYS.items() if key in document.value), "")


def form_of_text(data: bytes) -> tuple[str, str]:
    """Return the language of *data*, which is no YAML, and the distribution's form of it; empty if unknown."""
    text = data.decode(errors="replace")
    if _SETTINGS.search(text):
        return "TOML", "Bottlerocket's settings"
    return ("text", FLAGS) if _FLAG.search(text) else ("", "")


def no_configuration(source: str, found: str, form: str) -> UsageError:
    """Return the error for the file *source*, in which *found* is no kubelet configuration but *form*, if known."""
    known_form = f", {form}, from which the distribution makes one" if form else ""
    return UsageError(
        f"cannot use {source!r}: it must hold one KubeletConfiguration, found {found}{known_form}",
        remedy=f"the one of a running node is printed by: {ASK_THE_KUBELET}",
    )
