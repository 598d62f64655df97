"""The reasons for the kubelet's decision about a pod, and the resources or policies with which it would fit.

All of it comes from the simulation itself: the hints are those that were merged, the shortages are counted on the node
before the admission, and the alternatives are admissions of the same pod under other policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.kubelet.numa_masks import numa_nodes_of
from runner.kubelet.pod import HUGEPAGES_PREFIX, MEMORY, Pod, format_bytes
from runner.node_plan.admission import UNSUPPORTED, Admission, Outcome, SimulatedNode, Step
from runner.node_plan.cpu_manager import CpuManager, exclusive_cpus, exclusive_cpus_of_pod
from runner.node_plan.device_manager import peak_devices
from runner.node_plan.memory_manager import requested_memory
from runner.node_plan.topology_manager import Hint, HintList, Policy

MOST_HINTS = 4
"""Largest number of sets of NUMA nodes that a sentence lists."""


@frozen
class ResourceHints:
    """The hints of one provider for one resource."""

    provider: str
    """``device``, ``cpu`` or ``memory``."""
    resource: str
    hints: HintList | None
    """``None`` for no preference."""
    fits_nowhere: bool = False
    """Whether "no preference" results from :attr:`Quirk.EMPTY_MEMORY_HINTS`."""

    def __str__(self) -> str:
        if self.fits_nowhere:
            return f"{self.resource}: fits on no set of NUMA nodes, which this kubelet takes for no preference"
        if self.hints is None:
            return f"{self.resource}: any NUMA node will do"
        if not self.hints.masks:
            return f"{self.resource}: fits on no set of NUMA nodes"
        if len(self.hints.best):
            return f"{self.resource}: prefers {_some(self.hints.best)}"
        return (
            f"{self.resource}: fits on {_some(self.hints)}, but prefers none of them:"
            " fewer NUMA nodes would do on an empty host"
        )


@frozen
class MergeExplanation:
    """One merge of hints."""

    container: str | None
    """The container's name; ``None`` with scope ``pod``."""
    asked: tuple[ResourceHints, ...]
    """The hints of each resource."""
    chosen: Hint
    admitted: bool
    permutations: int
    """The number of combinations that the kubelet tries."""
    why: str
    """The reason in one sentence."""


@frozen
class Shortage:
    """The amount of one resource that is missing on as few NUMA nodes as the request needs on an empty host.

    *wanted* (the request) and *free* are CPUs, bytes of memory, or devices; *numa_nodes* are those with the most free.
    """

    container: str | None
    resource: str
    wanted: int
    free: int
    numa_nodes: tuple[int, ...]

    @property
    def missing(self) -> int:
        """The amount that would have to be free in addition."""
        return self.wanted - self.free

    def __str__(self) -> str:
        where = "NUMA node {} has" if len(self.numa_nodes) == 1 else "NUMA nodes {} have"

        def amount(value: int) -> str:
            if self.resource == MEMORY or self.resource.startswith(HUGEPAGES_PREFIX):
                return format_bytes(value)
            what = "CPU" if self.resource == "cpu" else "device"
            return f"{value} {what}{'' if value == 1 else 's'}"

        return (
            f"{self.resource}: {amount(self.wanted)} wanted; {where.format(_listed(self.numa_nodes))} most,"
            f" {amount(self.free)} free, and {amount(self.missing)} more would have to be"
        )


@frozen
class Alternative:
    """The admission of the same pod on the same node with another Topology Manager *policy*."""

    policy: Policy
    outcome: Outcome
    reason: str
    cpus: Mapping[str, CpuSet]


@frozen
class Explanation:
    """An *admission* and its reasons.

    *merges* are in their order (none with policy ``none``). *shortages* and *alternatives* are empty if the managers admit
    the pod: what the general filter compares does not depend on NUMA nodes and policies.
    """

    admission: Admission
    merges: tuple[MergeExplanation, ...]
    shortages: tuple[Shortage, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


def explain(node: SimulatedNode, pod: Pod) -> Explanation:
    """Admit *pod* on *node* (:meth:`SimulatedNode.admit`) and explain the decision."""
    admission = node.admit(pod)
    pod = node.kubelet.seen_by_managers(pod)
    policy = node.kubelet.topology_manager.policy
    merges = tuple(_merge(step, pod, policy) for step in admission.steps)
    if admission.admitted or admission.insufficient or admission.reason == UNSUPPORTED:
        return Explanation(admission, merges)
    return Explanation(
        admission,
        merges,
        tuple(_shortages(node, pod, admission)),
        tuple(_alternatives(node, pod)),
    )


def _merge(step: Step, pod: Pod, policy: Policy) -> MergeExplanation:
    asked = []
    for provider, hints in step.hints.items():
        if hints:
            asked += [ResourceHints(provider, resource, listed) for resource, listed in hints.items()]
        elif hints is not None and provider == "memory" and _memory(pod, step.container):
            asked.append(ResourceHints(provider, MEMORY, None, fits_nowhere=True))
    hint = step.merged.hint
    return MergeExplanation(
        step.container,
        tuple(asked),
        hint,
        step.merged.admitted,
        step.merged.permutations,
        _why(hint, asked, policy),
    )


def _why(hint: Hint, asked: Iterable[ResourceHints], policy: Policy) -> str:
    preferences = [each for each in asked if each.hints is not None]
    if not preferences:
        return "no resource has a preference"
    where = "any NUMA node" if hint.mask is None else _set(hint.mask)
    if hint.preferred:
        if len(preferences) == 1:
            return f"{where} is the narrowest set that {preferences[0].resource} prefers"
        return f"{where} is the narrowest set that all of {_names(preferences)} prefer"
    nowhere = [each for each in preferences if each.hints is not None and not len(each.hints)]
    not_preferring = [each for each in preferences if each.hints and not each.hints.preferred]
    if nowhere:
        reason = f"{_names(nowhere)} {'fits' if len(nowhere) == 1 else 'fit'} nowhere on the node as it is now"
    elif not_preferring:
        reason = f"{_names(not_preferring)} {'prefers' if len(not_preferring) == 1 else 'prefer'} nothing on the node as it is now"
    else:
        reason = f"no set of NUMA nodes is preferred by all of {_names(preferences)}"
    if policy is Policy.BEST_EFFORT:
        return f"{reason}; {where} is the best that is left, and policy best-effort takes it"
    return f"{reason}, and policy {policy.value} admits nothing else"


def _alternatives(node: SimulatedNode, pod: Pod) -> Iterable[Alternative]:
    manager = node.kubelet.topology_manager
    for policy in Policy:
        if policy is not manager.policy:
            kubelet = attrs.evolve(node.kubelet, topology_manager=attrs.evolve(manager, policy=policy))
            admission = attrs.evolve(node, kubelet=kubelet).admit(pod)
            own = {container.name for container in pod.containers if exclusive_cpus(pod, container)}
            cpus = {name: cpus for name, cpus in admission.cpus.items() if name in own} if admission.admitted else {}
            yield Alternative(policy, admission.outcome, admission.reason, cpus)


def _shortages(node: SimulatedNode, pod: Pod, admission: Admission) -> Iterable[Shortage]:
    """Yield the shortages for the last merge, or, with policy ``none``, for every container."""
    before = node.without()
    for container, cpus, memory, devices in _asked(pod, admission):
        plugins = before.kubelet.device_manager
        for resource in sorted(devices.keys() & plugins.devices.keys()):
            if set(plugins.devices[resource]) == {None}:
                continue
            free_devices = plugins.free(before.devices, resource)
            yield from _shortage(
                container,
                resource,
                devices[resource],
                {numa_node: free_devices[numa_node] for numa_node in plugins.numa_nodes},
                {numa_node: plugins.devices[resource].get(numa_node, 0) for numa_node in plugins.numa_nodes},
            )
        manager = before.kubelet.cpu_manager
        if manager and cpus:
            free = _cpus_free(manager, before.available)
            whole = {numa_node: len(members) for numa_node, members in manager.topology.numa_nodes.items()}
            yield from _shortage(container, "cpu", cpus, free, whole)
        if before.kubelet.memory_manager:
            for resource, amount in memory.items():
                tables = {
                    numa_node: state.tables[resource]
                    for numa_node, state in before.memory.numa_nodes.items()
                    if resource in state.tables
                }
                bytes_free = {numa_node: table.free for numa_node, table in tables.items()}
                allocatable = {numa_node: table.allocatable for numa_node, table in tables.items()}
                yield from _shortage(container, resource, amount, bytes_free, allocatable)


def _asked(pod: Pod, admission: Admission) -> Iterable[tuple[str | None, int, Mapping[str, int], Mapping[str, int]]]:
    if admission.steps and admission.steps[-1].container is None:
        yield None, exclusive_cpus_of_pod(pod), _memory(pod, None), peak_devices(pod)
        return
    for container in pod.containers:
        if not admission.steps or container.name == admission.steps[-1].container:
            yield container.name, exclusive_cpus(pod, container), _memory(pod, container.name), container.devices


def _memory(pod: Pod, name: str | None) -> Mapping[str, int]:
    """Return the bytes by resource that the Memory Manager books for container *name*, or for the whole *pod* (``None``)."""
    return requested_memory(pod, next((container for container in pod.containers if container.name == name), None))


def _cpus_free(manager: CpuManager, available: CpuSet) -> dict[int, int]:
    return {numa_node: len(available & CpuSet(cpus)) for numa_node, cpus in manager.topology.numa_nodes.items()}


def _shortage(
    container: str | None, resource: str, wanted: int, free: Mapping[int, int], whole: Mapping[int, int]
) -> Iterable[Shortage]:
    fewest = _fewest(whole.values(), wanted)
    if not whole:
        yield Shortage(container, resource, wanted, 0, ())
        return
    # Sorted by free amount, then by total amount, both descending, then by number.
    nearest = sorted(free, key=lambda numa_node: (-free[numa_node], -whole[numa_node], numa_node))[:fewest]
    most = sum(free[numa_node] for numa_node in nearest)
    if most < wanted:
        yield Shortage(container, resource, wanted, most, tuple(sorted(nearest)))


def _fewest(amounts: Iterable[int], wanted: int) -> int:
    sums = list(itertools.accumulate(sorted(amounts, reverse=True)))
    return next((number for number, total in enumerate(sums, start=1) if total >= wanted), len(sums))


def _set(mask: int) -> str:
    return "{" + _listed(numa_nodes_of(mask)) + "}"


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _names(resources: Iterable[ResourceHints]) -> str:
    return ", ".join(each.resource for each in resources)


def _some(hints: HintList) -> str:
    shown = itertools.islice(hints, MOST_HINTS)
    sets = ["any NUMA node" if hint.mask is None else _set(hint.mask) for hint in shown]
    more = f" and {len(hints) - MOST_HINTS} more" if len(hints) > MOST_HINTS else ""
    return " or ".join(sets) + more
