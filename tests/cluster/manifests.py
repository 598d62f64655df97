"""The examples as a user has them: a copy to write into, and the objects that ``kubectl kustomize`` makes of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kubectl import Object
from tests.images.manifests import EXAMPLES

Patch = dict[str, Any]
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKdGZ0b2ZnR0b2ZnR0b2ZnR0b2ZnR0b2ZnR0b2Zn nobody@nowhere\n"


def copied(place: Path, *, volume_on: str = "node") -> Path:
    """Return a copy of the examples with what their README tells a user to write: a public key, and the volume's node."""
    examples = place / "kubernetes"
    shutil.copytree(EXAMPLES, examples)
    (examples / "overlays/server/authorized_keys").write_text(KEY)
    storage = examples / "disks/local/storage.yaml"
    storage.write_text(storage.read_text().replace("your-node", volume_on))
    return examples


def patched(examples: Path, directory: str, pod: str, spec: Object) -> str:
    """Write, beside *examples*, a kustomization of *directory* with another *spec* of its *pod*, and return its directory."""
    place = examples / f"patched-{pod}"
    place.mkdir(exist_ok=True)
    patch = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "namespace": "instances"}, "spec": spec}
    kustomization = {"resources": [f"../{directory}"], "patches": [{"patch": json.dumps(patch)}]}
    (place / "kustomization.yaml").write_text(json.dumps(kustomization))
    return place.name


def variant(examples: Path, name: str, spec: str, container: Object) -> str:
    """Write, beside *examples*, an overlay of the instance as users do, and return its directory; the pod is ``instance-<name>``.

    It has another *spec*, and what *container* says instead.
    """
    place = examples / "variants" / name
    place.mkdir(parents=True)
    (place / "spec.toml").write_text(spec)
    containers = [{"name": "instance", **container}]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "instance"}, "spec": {"containers": containers}}
    kustomization = {
        "namespace": "instances",
        "nameSuffix": f"-{name}",
        "resources": ["../../instance"],
        "labels": [{"includeSelectors": True, "pairs": {"app.kubernetes.io/instance": f"instance-{name}"}}],
        "configMapGenerator": [{"name": "instance-spec", "behavior": "merge", "files": ["spec.toml"]}],
        "generatorOptions": {"immutable": True},
        "patches": [{"patch": json.dumps(pod)}],
    }
    (place / "kustomization.yaml").write_text(json.dumps(kustomization))
    return str(place.relative_to(examples))


def of_kind(kind: str, text: str) -> list[Object]:
    """Return the objects of one kind in YAML documents."""
    return [found for found in yaml.safe_load_all(text) if found and found["kind"] == kind]


def files_of(heading: str) -> dict[str, str]:
    """Return file name → text of the YAML blocks below a heading of the examples' page on nodes that begin with a file's name."""
    _, _, below = (EXAMPLES / "nodes.md").read_text().partition(f"\n## {heading}\n")
    section = re.split("^##", below, maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL))
