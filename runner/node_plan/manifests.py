"""The parser of pod manifests, with the QoS class of each pod and the reasons for it.

It reads pods and the kinds that create pods (Deployment, Job, …), each as one pod regardless of ``replicas``. It applies
the API server's defaults (requests from limits) and refuses ``resources`` that the API server would refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

import attrs

from runner.base.document_value import Value
from runner.base.values import frozen
from runner.kubelet.pod import (
    CPU,
    EPHEMERAL_STORAGE,
    HUGEPAGES_PREFIX,
    LARGEST,
    MEMORY,
    SYSTEM_CRITICAL_PRIORITY,
    Container,
    ContainerKind,
    Pod,
    QosClass,
    read_quantity,
)
from runner.node_plan.manifest_notes import manifest_notes

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    **dict.fromkeys(
        ("DaemonSet", "Deployment", "Job", "ReplicaSet", "ReplicationController", "StatefulSet"), ("spec", "template")
    ),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
"""Kind → the keys that lead to the object with the pod's ``metadata`` and ``spec``."""
QOS_RESOURCES = (CPU, MEMORY)
"""``supportedQoSComputeResources``."""
PRIORITIES = {
    "system-cluster-critical": SYSTEM_CRITICAL_PRIORITY,
    "system-node-critical": SYSTEM_CRITICAL_PRIORITY + 1000,
}
"""The priority classes that every cluster has; others are below ``SystemCriticalPriority``."""
CONFIG_SOURCE, MIRROR = "kubernetes.io/config.source", "kubernetes.io/config.mirror"
"""Annotations: where the kubelet has read a pod; on the API server's copy of a static pod, the static pod's UID."""
DEFAULT_GRACE = 30
"""Seconds of ``terminationGracePeriodSeconds`` where a manifest has none."""
ENDED = frozenset({"Succeeded", "Failed"})
"""``status.phase`` of pods that the kubelet does not count."""


@frozen
class Manifest:
    """A pod as its manifest describes it."""

    name: str
    source: str
    """The name of the file."""
    pod: Pod
    qos: QosClass
    why: tuple[str, ...] = ()
    """Sentences: the reasons why it is not Guaranteed."""
    notes: tuple[str, ...] = ()
    """Sentences: other properties that affect its CPUs."""
    node_name: str = ""
    """``spec.nodeName``; empty for a pod that is assigned to no node."""
    ended: bool = False
    """Whether all of its containers have ended."""
    grace: int = DEFAULT_GRACE
    """``spec.terminationGracePeriodSeconds``."""


@frozen
class _Resources:
    """The ``resources`` of one container, or of a whole pod, after the API server's defaults."""

    requests: Mapping[str, Fraction]
    limits: Mapping[str, Fraction]


def parse_manifests(documents: Iterable[Value], *, pod_level_resources: bool) -> tuple[list[Manifest], list[str]]:
    """Parse the pods of *documents*, in their order; the second list has a sentence for each document without a pod.

    The UID of a pod without ``metadata.uid`` is its name; a second pod of the same name gets the UID ``name#2``.
    *pod_level_resources* is the feature gate, which decides what ``spec.resources`` does to the QoS class.
    """
    manifests: list[Manifest] = []
    skipped: list[str] = []
    taken: dict[str, int] = {}
    for document in _flattened(documents):
        kind = document.get("kind").text()
        if kind not in TEMPLATES:
            skipped.append(f"{document.source}: a {kind} creates no pod and was left out")
            continue
        manifest = _manifest(document, kind, pod_level_resources=pod_level_resources)
        taken[manifest.pod.pod_uid] = taken.get(manifest.pod.pod_uid, 0) + 1
        number = taken[manifest.pod.pod_uid]
        if number > 1:
            suffix = f"#{number}"
            pod = attrs.evolve(manifest.pod, pod_uid=manifest.pod.pod_uid + suffix)
            manifest = attrs.evolve(manifest, name=manifest.name + suffix, pod=pod)
        manifests.append(manifest)
    return manifests, skipped


def _flattened(documents: Iterable[Value]) -> Iterator[Value]:
    for document in documents:
        if document.get("kind").text() == "List":
            yield from _flattened(document.get("items").elements())
        else:
            yield document


def _manifest(document: Value, kind: str, *, pod_level_resources: bool) -> Manifest:
    name, pod_uid = _identity(document, kind)
    template = document
    for key in TEMPLATES[kind]:
        template = template.get(key)
    spec = template.get("spec")
    containers = []
    resources: dict[str, _Resources] = {}
    for key, default in (("initContainers", ContainerKind.INIT), ("containers", ContainerKind.APP)):
        listed = spec.get(key)
        for value in listed.elements() if listed or default is ContainerKind.APP else ():
            name_of = value.get("name").text()
            if name_of in resources:
                value.get("name").fail(f"{name_of!r} is the name of another container already")
            sidecar = default is ContainerKind.INIT and value.get("restartPolicy").value == "Always"
            resources[name_of] = _resources(value.get("resources", {}))
            containers.append(_container(name_of, resources[name_of], ContainerKind.SIDECAR if sidecar else default))
    if not any(container.kind is ContainerKind.APP for container in containers):
        spec.get("containers").fail("must hold at least one container")
    whole = _pod_level(spec.get("resources", {}), containers, resources)
    # An empty spec.resources counts as well (ComputePodQOS).
    if spec.get("resources") and pod_level_resources:
        qos, why = _qos({"the pod": whole})
    else:
        qos, why = _qos({f"container {each!r}": resources[each] for each in resources})
    overhead = {each.key: read_quantity(each) for each in spec.get("overhead", {}).members()}
    annotations = document.get("metadata", {}).get("annotations", {})
    pod = Pod(
        pod_uid,
        tuple(containers),
        qos,
        pod_level_resources=bool(whole.requests or whole.limits),
        pod_level_requests=_rounded(whole.requests) if pod_level_resources else {},
        overhead=_rounded(overhead),
        priority=_priority(spec),
        static=bool(annotations.get(MIRROR)) or _word(annotations.get(CONFIG_SOURCE)) not in {"", "api"},
    )
    hugepages = {name for each in resources.values() for name in each.requests if name.startswith(HUGEPAGES_PREFIX)}
    return Manifest(
        name,
        document.source,
        pod,
        qos,
        tuple(why),
        tuple(manifest_notes(document, spec, pod, hugepages)),
        node_name=_word(spec.get("nodeName")),
        ended=_word(document.get("status", {}).get("phase")) in ENDED,
        grace=spec.get("terminationGracePeriodSeconds").number()
        if spec.get("terminationGracePeriodSeconds")
        else DEFAULT_GRACE,
    )


def _priority(spec: Value) -> int | None:
    """Return ``spec.priority``, or that of a ``priorityClassName`` that every cluster has."""
    value = spec.get("priority")
    if value and type(value.value) is not int:
        value.fail(f"must be a whole number, found {value.value!r}")
    return value.value if value else PRIORITIES.get(_word(spec.get("priorityClassName")))


def _word(value: Value) -> str:
    return value.text() if value else ""


def _pod_level(value: Value, containers: Iterable[Container], parts: Mapping[str, _Resources]) -> _Resources:
    """Return ``spec.resources`` after the API server's defaults (``defaultHugePagePodLimits``, ``defaultPodRequests``).

    *parts* are the resources of *containers*. A missing request is the sum of the containers' requests, or the limit if they request
    nothing.
    """
    own = _amounts(value, "requests")
    limits = _amounts(value, "limits")
    if not own and not limits:
        return _Resources({}, {})
    for name in (*own, *limits):
        if not _is_pod_level(name):
            value.fail(f"must be of cpu, memory and hugepages-SIZE for a whole pod, found {name!r}")
    peaks = Pod("", tuple(containers)).requests
    named = dict.fromkeys(name for part in parts.values() for name in part.requests if _is_pod_level(name))
    requested = {name: Fraction(peaks[name], 1000 if name == CPU else 1) for name in named}
    # A container's limit of huge pages is its request.
    huge = {name: amount for name, amount in requested.items() if name.startswith(HUGEPAGES_PREFIX)}
    limits = {name: amount for name, amount in huge.items() if name not in own} | limits
    requests = limits | {name: requested[name] for name in requested.keys() - huge.keys() if limits} | own
    for name, amount in requested.items():
        if amount > requests.get(name, amount):
            where = value.get("requests" if name in own else "limits").get(name)
            where.fail(f"must not be below the {_spelled(amount)} that its containers request together")
    for container, part in parts.items():
        for name, amount in part.limits.items():
            if amount > limits.get(name, amount):
                where = value.get("limits").get(name)
                where.fail(f"must not be below the limit of container {container!r}, {_spelled(amount)}")
    _check_pairs(value, own, requests, limits)
    return _Resources(requests, limits)


def _is_pod_level(resource: str) -> bool:
    """Tell whether ``spec.resources`` of a pod may name *resource* (``IsSupportedPodLevelResource``)."""
    return resource in QOS_RESOURCES or resource.startswith(HUGEPAGES_PREFIX)


def _identity(document: Value, kind: str) -> tuple[str, str]:
    """Return the name and the UID of the pod; a controller gives the pods that it creates other names and UIDs."""
    metadata = document.get("metadata", {})
    name = next((each.text() for each in map(metadata.get, ("name", "generateName")) if each), kind.lower())
    pod_uid = metadata.get("annotations", {}).get(MIRROR) or metadata.get("uid")
    return name, pod_uid.text() if pod_uid and kind == "Pod" else name


def _container(name: str, resources: _Resources, kind: ContainerKind) -> Container:
    devices = {
        resource: int(amount) for resource, amount in resources.limits.items() if _is_device(resource) and amount
    }
    requests = _rounded(resources.requests)
    memory = {key: amount for key, amount in requests.items() if key == MEMORY or key.startswith(HUGEPAGES_PREFIX)}
    guaranteed = all(
        resources.requests.get(each) and resources.requests[each] == resources.limits.get(each)
        for each in QOS_RESOURCES
    )
    storage = requests.get(EPHEMERAL_STORAGE, 0)
    return Container(name, requests.get(CPU, 0), memory, kind, devices, storage, guaranteed)


def _rounded(amounts: Mapping[str, Fraction]) -> dict[str, int]:
    """Return *amounts* in thousandths of CPUs and whole bytes, rounded up."""
    return {resource: math.ceil(amount * 1000 if resource == CPU else amount) for resource, amount in amounts.items()}


def _is_device(resource: str) -> bool:
    """Tell whether *resource* is an extended one, which device plugins register (``IsExtendedResourceName``)."""
    return "/" in resource and not resource.split("/", maxsplit=1)[0].endswith("kubernetes.io")


def _amounts(value: Value, key: str) -> dict[str, Fraction]:
    return {each.key: read_quantity(each) for each in value.get(key, {}).members()}


def _resources(value: Value) -> _Resources:
    limits, own = _amounts(value, "limits"), _amounts(value, "requests")
    requests = limits | own
    _check_pairs(value, own, requests, limits)
    return _Resources(requests, limits)


def _check_pairs(
    value: Value, own: Mapping[str, Fraction], requests: Mapping[str, Fraction], limits: Mapping[str, Fraction]
) -> None:
    """Refuse *requests*, of which *own* are in the manifest, that do not go with their *limits*."""
    for resource, amount in requests.items():
        limit = limits.get(resource)
        where = value.get("requests" if resource in own else "limits", {}).get(resource)
        if limit is not None and amount > limit:
            where.fail(f"must be less than or equal to the limit, {_spelled(limit)}")
        if _is_device(resource) or resource.startswith(HUGEPAGES_PREFIX):
            if limit is None or limit != amount:
                where.fail("must have a limit that is the same")
            if amount % 1:
                where.fail(f"must be a whole number, found {_spelled(amount)}")


def _spelled(amount: Fraction) -> str:
    return str(float(amount)) if amount.denominator > 1 and amount < LARGEST else str(round(amount))


def _qos(parts: Mapping[str, _Resources]) -> tuple[QosClass, list[str]]:
    """Return the QoS class of a pod, and the reasons why it is not Guaranteed (``ComputePodQOS``).

    *parts* are its containers by name, or the pod as a whole.
    """
    why = []
    nothing = True
    for what, resources in parts.items():
        for resource in QOS_RESOURCES:
            request, limit = resources.requests.get(resource, 0), resources.limits.get(resource, 0)
            nothing = nothing and not request and not limit
            if not limit:
                why.append(f"{what} has no limits.{resource}")
            elif request != limit:
                why.append(f"{what} has requests.{resource} below its limits.{resource}")
    if nothing:
        return QosClass.BEST_EFFORT, why
    return (QosClass.BURSTABLE, why) if why else (QosClass.GUARANTEED, [])
