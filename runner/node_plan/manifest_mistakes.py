"""Mistakes in manifests of pods that the API server or kubectl would refuse, and that a plan would silently ignore.

A patch of kustomize has no image, and a misspelled ``limits`` makes a pod BestEffort.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator

from runner.base.document_value import Value
from runner.kubelet.pod import HUGEPAGES_PREFIX, MEMORY
from runner.node_plan.manifests import TEMPLATES

CONTAINER_KEYS = (
    *("args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name", "ports"),
    *("readinessProbe", "resizePolicy", "resources", "restartPolicy", "restartPolicyRules", "securityContext"),
    *("startupProbe", "stdin", "stdinOnce", "terminationMessagePath", "terminationMessagePolicy", "tty"),
    *("volumeDevices", "volumeMounts", "workingDir"),
)
"""The keys of ``Container`` (``core/v1``, Kubernetes 1.36)."""
RESOURCES_KEYS = ("limits", "requests", "claims")
"""The keys of ``ResourceRequirements`` (``core/v1``)."""
STANDARD_RESOURCES = ("cpu", MEMORY, "ephemeral-storage")
"""``standardContainerResources`` (``pkg/apis/core/helper``); huge pages and names with a slash are allowed as well."""


def mistakes_of(documents: Iterable[Value]) -> Iterator[str]:
    """Yield a sentence for each mistake in the pods of *documents*."""
    for document in documents:
        kind = document.get("kind").text()
        if kind == "List":
            yield from mistakes_of(document.get("items").elements())
            continue
        spec = document
        for key in (*TEMPLATES.get(kind, ("",)), "spec"):
            spec = spec.get(key, {})
        for listed in (spec.get("initContainers"), spec.get("containers")):
            for container in listed.elements() if listed else ():
                yield from (f"{document.source}: {mistake}" for mistake in _mistakes(container))


def _mistakes(container: Value) -> Iterator[str]:
    if not container.get("image"):
        yield (
            f"{container.path} has no image, so that the API server refuses this pod; a patch is completed by"
            " `kubectl kustomize DIR | instance-runner plan --node … --pod -`"
        )
    resources = container.get("resources", {})
    for value, known in ((container, CONTAINER_KEYS), (resources, RESOURCES_KEYS)):
        for member in value.members():
            if member.key not in known:
                yield f"{member.path} is an unknown key, which is ignored here and refused by kubectl{_meant(member, known)}"
    for key in ("limits", "requests"):
        for member in resources.get(key, {}).members():
            if not ("/" in member.key or member.key in STANDARD_RESOURCES or member.key.startswith(HUGEPAGES_PREFIX)):
                yield f"{member.path} is no resource, and the API server refuses it{_meant(member, STANDARD_RESOURCES)}"


def _meant(member: Value, known: Collection[str]) -> str:
    near = difflib.get_close_matches(member.key, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
