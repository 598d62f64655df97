"""The kubelet's configuration of examples/kubernetes, with what the emulated node has to reserve."""

from __future__ import annotations

import yaml

from tests.node.images.manifested import Object
from tests.node.standin_kubelet import PROJECT

EXAMPLE = PROJECT / "examples" / "kubernetes" / "kubelet-configuration.yaml"


def example_on_a_small_machine(reserved: str) -> Object:
    """Return the example with *reserved* CPUs, and memory figures of a machine with two NUMA nodes and few GiB."""
    out: Object = yaml.safe_load(EXAMPLE.read_text())
    return out | {
        "reservedSystemCPUs": reserved,
        "kubeReserved": {"memory": "64Mi"},
        "systemReserved": {"memory": "64Mi"},
        "evictionHard": {"memory.available": "64Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "reservedMemory": [{"numaNode": node, "limits": {"memory": "96Mi"}} for node in (0, 1)],
        "cpuManagerReconcilePeriod": "2s",
        "failSwapOn": False,
    }
