"""The manifests: as they are in their files, and as ``kubectl apply -k`` builds them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
DIRECTORIES = sorted(
    str(path.parent.relative_to(EXAMPLES))
    for path in EXAMPLES.rglob("kustomization.yaml")
    if "kind: Kustomization\n" in path.read_text()
)
"""What can be applied; ``images`` is a component of others."""
INSTANCES = [name for name in DIRECTORIES if name.split("/")[0] in {"instance", "job", "overlays"}]
"""The directories of one instance each, which ``kubectl delete -k`` deletes."""
VM_DEVICES = ("/dev/kvm", "/dev/net/tun", "/dev/vhost-net")
"""The devices that the resource ``squat.ai/vm`` gives."""
Object = dict[str, Any]


def kustomization(directory: str) -> Object:
    """Return the ``kustomization.yaml`` of one of :data:`DIRECTORIES`."""
    return dict(yaml.safe_load((EXAMPLES / directory / "kustomization.yaml").read_text()))


def resources(directory: str) -> list[Object]:
    """Return the objects in the files that a kustomization names, and those it refers to; nothing is generated or patched."""
    found: list[Object] = []
    for name in kustomization(directory)["resources"]:
        path = (EXAMPLES / directory / name).resolve()
        if path.is_dir():
            found += resources(str(path.relative_to(EXAMPLES)))
        else:
            found += yaml.safe_load_all(path.read_text())
    return found


def container_of(directory: str) -> Object:
    """Return the one container of the pods in the files of *directory*."""
    [pod] = pod_specs(resources(directory))
    [container] = pod["containers"]
    return dict(container)


def put_together(directory: str, examples: Path = EXAMPLES) -> list[Object]:
    """Return the objects that applying one of :data:`DIRECTORIES` makes."""
    argv = [os.environ["RUNNER_KUSTOMIZE"], "build", str(examples / directory)]
    return list(yaml.safe_load_all(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout))


def images_of(objects: Iterable[Object]) -> list[str]:
    """Return the names of the images that pods of *objects* run."""
    return sorted({container["image"] for spec in pod_specs(objects) for container in spec["containers"]})


def pod_specs(objects: Iterable[Object]) -> list[Object]:
    """Return the specifications of pods among *objects*, those of templates too."""
    specs = (found if found["kind"] == "Pod" else found.get("spec", {}).get("template", {}) for found in objects)
    return [found["spec"] for found in specs if "spec" in found]
