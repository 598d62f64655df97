"""The general filter: the comparison of a pod's requests, and those of all other pods, with Node Allocatable.

It is the scheduler's own check, repeated by the kubelet: ``pkg/kubelet/lifecycle/predicate.go`` with ``Fits`` of
``pkg/scheduler/framework/plugins/noderesources/fit.go``. It comes *after* the managers (``NewMainKubelet`` appends its
handler after theirs), so a pod that it rejects holds exclusive CPUs until the next admission. A critical pod is not
rejected if others can be preempted for it (``pkg/kubelet/preemption/preemption.go``). 1.33 to 1.36 do the same but for DRA.

Amounts are thousandths of CPUs, and bytes. Devices are not compared, because the Device Manager, which comes first, has found them free;
nor are node affinity, host ports and taints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from runner.base.values import frozen
from runner.kubelet.pod import CPU, EPHEMERAL_STORAGE, MEMORY, Pod, QosClass

PODS = "pods"


@frozen
class NodeAllocatable:
    """The part of the node's capacity that is for pods (``status.allocatable``)."""

    resources: Mapping[str, int]
    """By resource; :data:`EPHEMERAL_STORAGE` only where it is known, and else it is enough for every pod."""
    pods: int
    """The number of pods."""

    def unrequested(self, pods: Iterable[Pod]) -> NodeAllocatable:
        """Return the amounts that *pods* leave for others; negative if they request more than there is."""
        others = tuple(pods)
        used = total_requests(others)
        left = {resource: amount - used.get(resource, 0) for resource, amount in self.resources.items()}
        return NodeAllocatable(left, self.pods - len(others))


@frozen
class Insufficient:
    """A resource of which a pod requests more than other pods leave (``InsufficientResourceError``)."""

    resource: str
    """Its name, or :data:`PODS`."""
    requested: int
    used: int
    capacity: int

    @property
    def reason(self) -> str:
        """``status.reason`` of the rejected pod."""
        return f"OutOf{self.resource}"

    @property
    def missing(self) -> int:
        """The amount that would have to be left in addition (``GetInsufficientAmount``)."""
        return self.requested - (self.capacity - self.used)

    def __str__(self) -> str:
        return (
            f"Node didn't have enough resource: {self.resource}, requested: {self.requested}, used: {self.used},"
            f" capacity: {self.capacity}"
        )


class PreemptionError(Exception):
    """No pods can be preempted for a critical one; the text is the kubelet's own."""


def total_requests(pods: Iterable[Pod]) -> Mapping[str, int]:
    """Return the requests of all *pods* together."""
    total: dict[str, int] = {}
    for pod in pods:
        for resource, amount in pod.requests.items():
            total[resource] = total.get(resource, 0) + amount
    return total


def insufficient(pod: Pod, others: Sequence[Pod], allocatable: NodeAllocatable) -> tuple[Insufficient, ...]:
    """Return the resources that *pod*, with *others*, requests too much of; the kubelet reports the first one (``fitsRequest``).

    Where several sizes of huge pages are insufficient, the kubelet has the random order of a Go map; here they are ordered by name.
    """
    reasons = [Insufficient(PODS, 1, len(others), allocatable.pods)] if len(others) >= allocatable.pods else []
    used, requests = total_requests(others), pod.requests
    first = (CPU, MEMORY, EPHEMERAL_STORAGE)
    for resource in (*first, *sorted(requests.keys() - first)):
        if resource == EPHEMERAL_STORAGE and resource not in allocatable.resources:
            continue
        amount = requests.get(resource, 0)
        compared = Insufficient(resource, amount, used.get(resource, 0), allocatable.resources.get(resource, 0))
        if amount and compared.missing > 0:
            reasons.append(compared)
    return tuple(reasons)


def preempted(pod: Pod, missing: Iterable[Insufficient], others: Iterable[Pod]) -> tuple[Pod, ...]:
    """Return the pods of *others* that the kubelet ends to give the critical *pod* the *missing* resources (``getPodsToPreempt``).

    They are as few as possible: best-effort pods before burstable before guaranteed ones. Of equals the kubelet takes
    the last in the order of a Go map, which is random; here it is the last of *others*.
    Raises :class:`PreemptionError` if ending all of them is not enough.
    """
    requirements = {each.resource: each.missing for each in missing}
    candidates = [each for each in others if _preemptable(pod, each)]
    best_effort, burstable, guaranteed = (
        [each for each in candidates if each.qos is qos]
        for qos in (QosClass.BEST_EFFORT, QosClass.BURSTABLE, QosClass.GUARANTEED)
    )
    unmet = _without(requirements, candidates)
    if unmet:
        listed = "".join(f"(res: {resource}, q: {amount}), " for resource, amount in unmet.items())
        raise PreemptionError(
            "preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources:"
            f" [{listed}]"
        )
    last = _nearest(guaranteed, _without(requirements, (*best_effort, *burstable)))
    middle = _nearest(burstable, _without(requirements, (*best_effort, *last)))
    first = _nearest(best_effort, _without(requirements, (*middle, *last)))
    return (*first, *middle, *last)


def _preemptable(pod: Pod, other: Pod) -> bool:
    """Tell whether the critical *pod* may end *other* (``types.Preemptable``)."""
    if not other.critical:
        return True
    return pod.priority is not None and other.priority is not None and pod.priority > other.priority


def _request(pod: Pod, resource: str) -> int:
    """Return the amount of *resource* that ending *pod* returns (``GetResourceRequest``).

    With pod-level resources, other than in the filter itself, the containers' requests never count.
    """
    if resource == PODS:
        return 1
    own = pod.pod_level_requests or attrs.evolve(pod, overhead={}).requests
    amount = own.get(resource, 0)
    return amount + pod.overhead.get(resource, 0) if amount else 0


def _without(requirements: Mapping[str, int], pods: Iterable[Pod]) -> dict[str, int]:
    """Return the rest of *requirements* without *pods* (``subtract``)."""
    ended = tuple(pods)
    left = {
        resource: amount - sum(_request(pod, resource) for pod in ended) for resource, amount in requirements.items()
    }
    return {resource: amount for resource, amount in left.items() if amount > 0}


def _nearest(pods: Iterable[Pod], requirements: Mapping[str, int]) -> list[Pod]:
    """Choose pod after pod by the shortest distance to the *requirements* that are left (``getPodsToPreemptByDistance``)."""
    chosen: list[Pod] = []
    remaining = list(pods)
    while requirements:
        best = 0
        for index, pod in enumerate(remaining):
            distance, shortest = _distance(requirements, pod), _distance(requirements, remaining[best])
            if distance < shortest or (distance == shortest and _is_smaller(pod, remaining[best])):
                best = index
        chosen.append(remaining[best])
        # The kubelet's slice is changed in this way, which decides between equals in the next round.
        remaining[best] = remaining[-1]
        remaining.pop()
        requirements = _without(requirements, chosen[-1:])
    return chosen


def _distance(requirements: Mapping[str, int], pod: Pod) -> float:
    """Return the sum of the squares of the parts of *requirements* that ending *pod* would leave."""
    return sum((max(0, amount - _request(pod, resource)) / amount) ** 2 for resource, amount in requirements.items())


def _is_smaller(pod: Pod, other: Pod) -> bool:
    """Tell whether *pod* requests less memory, or as much and less CPU; equal ones count as smaller."""
    return [_request(pod, each) for each in (MEMORY, CPU)] <= [_request(other, each) for each in (MEMORY, CPU)]
