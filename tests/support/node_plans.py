"""Plans of a node for pods that are made up, on the hosts that were recorded (``tests/data/hosts``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.base.document_value import Value
from runner.facts.hardware import Hardware
from runner.node_plan.admission import KubeletConfiguration
from runner.node_plan.configuration import parse_kubelet_configuration
from runner.node_plan.device_manager import Devices
from runner.node_plan.manifests import parse_manifests
from runner.node_plan.node_plan import (
    KnownPods,
    NodePlan,
    States,
    plan_node,
    start_node,
    unclear_pods,
)
from runner.node_plan.report.text import node_lines

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "tests/data/hosts"
EPYC = Hardware.from_json((ROOT / "examples/plan/dual-epyc.json").read_text())
HEAD = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "cpuManagerPolicy": "static",
    "systemReserved": {"cpu": "1"},
}
STATIC: dict[str, Any] = {
    "memoryManagerPolicy": "Static",
    "reservedMemory": [{"limits": {"memory": "100Mi"}}],
    "topologyManagerPolicy": "best-effort",
}
NO_DEVICES: Devices = {}
NOTHING: Mapping[str, object] = {}
GPU = "nvidia.com/gpu"
NO_STATES = States()


def host(name: str) -> Hardware:
    return Hardware.from_json((HOSTS / f"{name}.json").read_text())


def configuration(hardware: Hardware, **keys: Any) -> KubeletConfiguration:
    return parse_kubelet_configuration(Value(HEAD | keys, "k.yaml"), hardware, 36)[0]


def pod(name: str, cpus: object, memory: str = "1Gi", more: Mapping[str, object] = NOTHING) -> dict[str, Any]:
    containers = [{"name": "vm", "resources": {"limits": {"cpu": cpus, "memory": memory, **more}}}]
    return {"kind": "Pod", "metadata": {"name": name}, "spec": {"containers": containers}}


def planned(
    hardware: Hardware,
    *pods: dict[str, Any],
    devices: Devices = NO_DEVICES,
    states: States = NO_STATES,
    running: Sequence[dict[str, Any]] | None = None,
    **keys: Any,
) -> NodePlan:
    configured = configuration(hardware, **keys)
    manifests, _ = parse_manifests([Value(each, "p.yaml") for each in pods], pod_level_resources=True)
    there, _ = parse_manifests([Value(each, "r.yaml") for each in running or ()], pod_level_resources=True)
    before = start_node(hardware, configured, devices, states, None if running is None else there)
    unclear = unclear_pods(states) if running is None else {}
    known: KnownPods = "exclusive" if states != NO_STATES else "none"
    known = known if running is None else "all"
    return plan_node(hardware, configured, before, manifests, unclear=unclear, known=known)


def shown(plan: NodePlan, width: int = 120) -> str:
    return "\n".join(node_lines(plan, width=width, colour=False))
