"""The DRA driver for CPUs: its manifest, with what this cluster is without, and what it and the kubelet write on the node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from runner.base.cpuset import CpuSet
from tests.cluster.control_plane import ADDRESS, NODE
from tests.cluster.joined_node import JoinedNode
from tests.cluster.kubectl import Object

PROGRAM = "dracpu"
"""Its name in DIR, and the serial number of its disk in the node."""
KUBELET = {"cpuManagerPolicy": "none", "memoryManagerPolicy": "None", "reservedMemory": []}
"""What its node's kubelet has instead of the example's, as the examples' README says."""
MANIFEST = Path(__file__).with_name("cpu_driver.yaml")
NAMESPACE, NAME = "kube-system", "dra-driver-cpu"
CDI = "/var/run/cdi"


def objects(reserved: str = "") -> list[Object]:
    """Return the manifest's objects: no pod is given the *reserved* CPUs.

    There is no kube-proxy here, so the driver gets the API server's own address instead of its service's; and the machine's
    host name is not its node's.
    """
    found: list[Object] = list(yaml.safe_load_all(MANIFEST.read_text()))
    container = container_of(found)
    container["args"] += [f"--hostname-override={NODE}", *([f"--reserved-cpus={reserved}"] if reserved else [])]
    server = {"KUBERNETES_SERVICE_HOST": ADDRESS, "KUBERNETES_SERVICE_PORT": "6443"}
    container["env"] = [{"name": name, "value": value} for name, value in server.items()]
    return found


def image() -> str:
    """Return the image's reference."""
    reference: str = container_of(objects())["image"]
    return reference


def container_of(found: list[Object]) -> Object:
    """Return the one container of the objects' DaemonSet."""
    [daemon] = [each for each in found if each["kind"] == "DaemonSet"]
    [container] = daemon["spec"]["template"]["spec"]["containers"]
    out: Object = container
    return out


def claimed(node: JoinedNode) -> Mapping[str, CpuSet]:
    """Return claim UID → its CPUs, by the specifications that the driver has written for the container runtime."""
    out = {}
    for file in node("ls", CDI).split():
        for device in json.loads(node.read(f"{CDI}/{file}"))["devices"]:
            for variable in device["containerEdits"]["env"]:
                claim, _, cpus = variable.removeprefix("DRA_CPUSET_").partition("=")
                out[claim] = CpuSet.parse(cpus)
    return out
