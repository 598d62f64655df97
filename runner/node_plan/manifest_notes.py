"""Notes on a planned pod: requests that are not met, and properties that are unknown."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from runner.base.document_value import Value
from runner.kubelet.pod import (
    ContainerKind,
    Pod,
)


def _claim_notes(spec: Value) -> Iterator[str]:
    """Yield notes about unknown properties of devices that the pod's containers get by resource claims (DRA)."""
    named = (
        {each.get("name").text() for each in spec.get("resourceClaims").elements()}
        if spec.get("resourceClaims")
        else set()
    )
    used: dict[str, None] = {}
    for key in ("initContainers", "containers"):
        for container in spec.get(key).elements() if spec.get(key) else ():
            claims = container.get("resources", {}).get("claims")
            words = []
            for claim in claims.elements() if claims else ():
                name = claim.get("name").text()
                if name not in named:
                    claim.get("name").fail(f"must be the name of an entry of the pod's resourceClaims, found {name!r}")
                used[name] = None
                request = claim.get("request").text() if claim.get("request") else ""
                words.append(f"{name!r} (request {request!r})" if request else repr(name))
            if words:
                yield (
                    f"container {container.get('name').text()!r} has devices by resource claims (DRA): {', '.join(words)}; not "
                    "known here: which devices these are, on which NUMA nodes, and whether this node has any left"
                )
    if used:
        yield (
            "the Topology Manager does not look at resource claims: their devices may be on other NUMA nodes than the CPUs and "
            "the memory above, unless a claim's constraints forbid it; CPUs or memory that a DRA driver gives are not in this plan"
        )
    if named - used.keys():
        yield f"no container uses the pod's resource claims {', '.join(map(repr, sorted(named - used.keys())))}"


SHARED_NAMESPACES: Mapping[str, str] = {
    "shareProcessNamespace": "is refused when it registers, because it must be PID 1 of a PID namespace of its own",
    "hostPID": "is refused when it registers, because it must be PID 1 of a PID namespace of its own",
    "hostNetwork": "with a [[network]] of mode 'bridge' does not start, because it would take the node's own address: use"
    " mode 'user' or 'passt', or leave hostNetwork out",
}
"""Key of a pod's spec → its effect on an instance in that pod."""


def _notes_of_namespaces(spec: Value, pod: Pod) -> Iterator[str]:
    """Yield the restrictions of an instance in *pod* from shared namespaces; only a pod with exclusive CPUs can hold one."""
    if not pod.guaranteed or all(each.millicpus % 1000 for each in pod.containers if each.kind is ContainerKind.APP):
        return
    for key, consequence in SHARED_NAMESPACES.items():
        if spec.get(key).value is True:
            yield f"spec.{key} is true: an instance in this pod {consequence}"


def manifest_notes(document: Value, spec: Value, pod: Pod, hugepages: Collection[str]) -> Iterator[str]:
    """Yield the notes on the *pod* of *document*, whose containers request the resources *hugepages*."""
    replicas = document.get("spec", {}).get("replicas").value if document.get("kind").value != "Pod" else None
    if isinstance(replicas, int) and not isinstance(replicas, bool) and replicas != 1:
        yield f"{replicas} replicas, planned as one pod; name the file once for each that comes to this node"
    if pod.guaranteed and not pod.pod_level_resources:
        for container in pod.containers:
            if container.millicpus % 1000:
                yield (
                    f"container {container.name!r} asks for {container.millicpus}m CPUs, which is not a whole number:"
                    " it runs in the shared pool"
                )
    yield from _notes_of_namespaces(spec, pod)
    yield from _claim_notes(spec)
    if hugepages and not pod.guaranteed:
        yield f"{', '.join(sorted(hugepages))}: the Memory Manager places them for Guaranteed pods only"
