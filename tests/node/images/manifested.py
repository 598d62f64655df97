"""From Kubernetes manifests to pods of the stand-in kubelet: what the API server, the kubelet and containerd make of them.

``tests/images/run`` builds the manifests and writes them, with the images' configurations, to a file.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest

from runner.base.cpuset import CpuSet
from runner.kubelet.pod import parse_quantity
from tests.images.manifests import VM_DEVICES, images_of
from tests.node.standin_kubelet import Container, Mount, Pod, Runtime, capabilities

Object = dict[str, Any]
DISKS = {"gpu-instance": "gpu-instance", "instance-cgroup-controller": "controller"}
"""Name of an image in the manifests → serial number of its disk."""


@attrs.frozen
class Manifests:
    """The objects of every directory of manifests, and the configuration of every image."""

    objects: dict[str, list[Object]]
    configurations: dict[str, Object]

    @classmethod
    def read(cls) -> Manifests:
        return cls(**json.loads(Path(os.environ["RUNNER_NODE_MANIFESTS"]).read_text()))

    def images(self) -> dict[str, str]:
        """Return reference → name of each image that is ours; a device plugin's is not."""
        names = {reference: reference.partition(":")[0] for reference in self.references()}
        return {reference: name for reference, name in names.items() if name in self.configurations}

    def references(self) -> list[str]:
        """Return the reference of every image."""
        return images_of(found for objects in self.objects.values() for found in objects)

    def of(self, directory: str, kind: str) -> Object:
        [found] = [found for found in self.objects[directory] if found["kind"] == kind]
        return found


@attrs.define
class Cluster:
    """What the manifests do not name: the images' files, the node's own paths, and a directory for the pods' volumes."""

    manifests: Manifests
    images: dict[str, Path]
    """Their root file systems; empty if the runtime has images."""
    scratch: Path
    host_paths: dict[str, Path]
    """Path in a manifest → where that is on this node, when it is elsewhere."""
    pod_ip: str = "127.0.0.1"
    networked: bool = False
    """Pods have an interface that a guest can take over."""

    def with_the_rom(self, directory: str) -> Cluster:
        """Replace the demo guest in the spec of *directory*, because Linux would take a minute to boot here."""
        manifests = copy.deepcopy(self.manifests)
        data: Object = manifests.of(directory, "ConfigMap")["data"]
        text, guests = re.subn(
            r"\[boot\].*?(?=\n\n)", '[boot]\nfirmware = "/guest/rom"', data["spec.toml"], flags=re.DOTALL
        )
        # this guest's real mode is not for the KVM that an emulated machine has
        text, accelerators = re.subn(r"^\[cpu\]$", '[cpu]\naccel = "tcg"', text, flags=re.MULTILINE)
        text, sizes = re.subn(r'size = "\w+"', 'size = "64MiB"', text)
        assert (guests, accelerators, sizes, len(re.findall('mode = "(bridge|private)"', text))) == (1, 1, 1, 1)
        data["spec.toml"] = text if self.networked else text.replace('mode = "bridge"', 'mode = "private"')
        return attrs.evolve(self, manifests=manifests)

    def pod(
        self, directory: str, kind: str, uid: str, cpus: CpuSet, *, runtime: Runtime, mounts: tuple[Mount, ...] = ()
    ) -> Pod:
        """Return the pod of *directory*; it gets *cpus*, and *mounts* besides its own."""
        template = self.manifests.of(directory, kind)
        template = template if kind == "Pod" else template["spec"]["template"]
        [container] = template["spec"]["containers"]
        requests = container["resources"].get("requests", container["resources"]["limits"])
        guaranteed = requests == container["resources"]["limits"]
        assert guaranteed == bool(cpus), "exclusive CPUs are for Guaranteed pods"
        assert not guaranteed or len(cpus) == parse_quantity(requests["cpu"])
        return Pod(
            uid,
            (self.container(directory, container, template["spec"].get("volumes", []), uid, cpus, mounts),),
            qos="guaranteed" if guaranteed else "burstable",
            host_pid=template["spec"].get("hostPID", False),
            share_processes=template["spec"].get("shareProcessNamespace", False),
            runtime=runtime,
        )

    def container(
        self,
        directory: str,
        container: Object,
        volumes: list[Object],
        uid: str,
        cpus: CpuSet,
        mounts: tuple[Mount, ...],
    ) -> Container:
        """Return one container as its runtime gets it."""
        image = container["image"].partition(":")[0].rpartition("/")[2]
        fields = {
            "metadata.uid": uid,
            "metadata.name": container["name"],
            "metadata.namespace": "instances",
            "spec.nodeName": "node",
            "status.podIP": self.pod_ip,
        }
        environment = {
            each["name"]: each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            for each in container.get("env", [])
        }
        root = self.images.get(image)
        entry = container.get("command", self.manifests.configurations[image]["Entrypoint"] if root else None)
        command = [*(entry or ()), *container.get("args", [])]
        context, limits = container["securityContext"], container["resources"]["limits"]
        added = " ".join(context.get("capabilities", {}).get("add", []))
        sources = {volume["name"]: self.source(directory, volume, uid) for volume in volumes}
        declared: list[Mount] = [
            (sources[mount["name"]], mount["mountPath"], "ro" if mount.get("readOnly") else "rw")
            for mount in container["volumeMounts"]
        ]
        return Container(
            tuple(re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in command),
            name=container["name"],
            image=root,
            reference=container["image"],
            keeps_entry_point=entry is None,
            cpus=cpus,
            memory=math.ceil(parse_quantity(limits["memory"])),
            privileged=context.get("privileged", False),
            capabilities=capabilities(added),
            drop_all=context.get("capabilities", {}).get("drop") == ["ALL"],
            allow_privilege_escalation=context.get("allowPrivilegeEscalation", True),
            read_only_root=context.get("readOnlyRootFilesystem", False),
            devices=tuple(path for path in VM_DEVICES if "squat.ai/vm" in limits and Path(path).exists()),
            mounts=(*sorted(declared, key=lambda mount: mount[1].count("/")), *mounts),
            environment=environment,
        )

    def source(self, directory: str, volume: Object, uid: str) -> Path:
        """Return the directory of a volume's files; it is made if it is the pod's own."""
        if "hostPath" in volume:
            path = Path(volume["hostPath"]["path"])
            path = self.host_paths.get(str(path), path)
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            assert path.is_dir(), path
            return path
        place: Path = self.scratch / uid / volume["name"]
        place.mkdir(parents=True)
        if "configMap" in volume:
            data = self.manifests.of(directory, "ConfigMap")["data"]
            for name, text in data.items():
                (place / name).write_text(text)
        else:
            assert "emptyDir" in volume
            place.chmod(0o777)
        return place


def mount_image(name: str, place: Path) -> None:
    """Mount the root file system of an image, which is one of the node's disks, at *place*."""
    subprocess.run(["mount", "-t", "erofs", "-o", "ro", disk(DISKS[name]), place], check=True)


def disk(serial: str) -> Path:
    """Return the device of a disk that the node was given."""
    serials = {path.read_text().strip(): path.parent.name for path in Path("/sys/block").glob("vd*/serial")}
    if serial not in serials:
        pytest.skip(f"the disk {serial!r} is missing: tests/images/run gives it to the node")
    return Path("/dev") / serials[serial]
