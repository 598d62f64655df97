"""The plan of a Kubernetes node: the kubelet's decision about each pod in order, and the CPUs of an instance's vCPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Literal

import attrs

from runner.cpuset import CpuSet
from runner.facts.hardware import Hardware
from runner.kubelet.admission import Kubelet, KubeletConfiguration, Outcome, SimulatedNode
from runner.kubelet.device_manager import Devices, peak_devices
from runner.kubelet.explanation import Explanation, explain
from runner.kubelet.manifests import Manifest
from runner.kubelet.memory_manager import hugepages_resource, peak_memory
from runner.kubelet.pod import MEMORY, Container, ContainerKind, Pod, format_bytes, peak
from runner.kubelet.quirks import KubeletConfigError
from runner.kubelet.state import Block, CpuState, MemoryState
from runner.kubelet.topology_manager import Hint
from runner.placement.pins import Pinning, all_cpus, place
from runner.values import frozen


@frozen
class States:
    """The contents of the kubelet's state files, ``None`` for one that was not given."""

    cpu: CpuState | None = None
    memory: MemoryState | None = None


@frozen
class ContainerPlan:
    """The resources of one container of an admitted pod."""

    container: Container
    cpus: CpuSet
    """Its exclusive CPUs; if empty it runs in the shared pool."""
    memory: tuple[Block, ...]
    devices: Devices
    affinity: Hint | None
    """The Topology Manager's merged hint; ``None`` with policy ``none``."""
    placement: Pinning | None
    """The pinning of an instance with as many vCPUs as *cpus*; ``None`` for init containers and sidecars."""


@frozen
class PodPlan:
    """The kubelet's decision about one pod; *containers* is empty unless it is admitted."""

    manifest: Manifest
    explanation: Explanation
    containers: tuple[ContainerPlan, ...]
    notes: tuple[str, ...]

    @property
    def cpus(self) -> CpuSet:
        """All exclusive CPUs of the pod."""
        return CpuSet(cpu for container in self.containers for cpu in container.cpus)


@frozen
class WhatIf:
    """The same pods with another configuration: the *plan*, or the *refusal* of the kubelet to start."""

    name: str
    plan: NodePlan | None
    refusal: str = ""


@frozen
class Fit:
    """Whether an instance of *vcpus* fits: into *container* of *pod* with *placement*, or not, because of *error*."""

    vcpus: int
    pod: str = ""
    container: str = ""
    placement: Pinning | None = None
    error: str = ""


@frozen
class NodePlan:
    """A node *before* its pods, the decisions about them, and the node *after* them without the resources of stale pods."""

    hardware: Hardware
    configuration: KubeletConfiguration
    before: SimulatedNode
    pods: tuple[PodPlan, ...]
    after: SimulatedNode
    notes: tuple[str, ...] = ()
    fit: Fit | None = None
    what_if: tuple[WhatIf, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every pod is admitted, and an instance fits its container."""
        admitted = all(pod.explanation.admission.admitted for pod in self.pods)
        return admitted and (self.fit is None or not self.fit.error)


def start_node(
    hardware: Hardware, configuration: KubeletConfiguration, devices: Devices, states: States
) -> SimulatedNode:
    """Return the node with the *states* of its state files, possibly those of a kubelet that is running.

    The resources of :func:`stale_pods` are released at the first admission.

    Raises :class:`KubeletConfigError` in the kubelet's words if it would not start, as from state files of another
    policy or another machine.
    """
    kubelet = Kubelet.configured(hardware, configuration, devices=devices)
    empty = kubelet.empty_node
    for words, file, state, policy in (
        ("", "CPU manager checkpoint file", states.cpu, configuration.cpu_manager_policy),
        ("[memorymanager] ", "memory manager checkpoint file", states.memory, configuration.memory_manager_policy),
    ):
        if state is not None and state.policy != policy:
            raise KubeletConfigError(
                f'could not restore state from checkpoint: {words}configured policy "{policy}" differs from state'
                f' checkpoint policy "{state.policy}", please drain this node and delete the {file}'
                " before restarting Kubelet"
            )
    node = kubelet.restored(states.cpu or empty.cpus, states.memory or empty.memory)
    stale_cpus, stale_memory = stale_pods(states)
    return attrs.evolve(node, stale_cpus=stale_cpus, stale_memory=stale_memory)


def stale_pods(states: States) -> tuple[frozenset[str], frozenset[str]]:
    """Return the UIDs of inactive pods in *states*: those with CPUs, and those with memory.

    Before each admission both managers release the resources of inactive pods (``removeStaleState``). The files do not
    contain which pods are active, but an active pod with exclusive CPUs is Guaranteed, so it is in both files. With both
    policies static,

    * a pod in ``cpu_manager_state`` alone was rejected after the CPU Manager had assigned its CPUs;
    * a pod in ``memory_manager_state`` alone has ended: the CPU Manager removes such a pod within
      ``cpuManagerReconcilePeriod`` (10 s), the Memory Manager only at the next admission. It may also be an active
      Guaranteed pod without exclusive CPUs, such as one with half a CPU. The files do not distinguish the two cases, so
      :func:`plan_node` adds a note.

    With one file, or a manager of policy none, every pod counts as active. So does a pod in both files, although it may
    have ended less than 10 s ago, or been rejected after its first containers had got their resources.
    """
    if not states.cpu or not states.memory or states.cpu.policy == "none" or states.memory.policy == "None":
        return frozenset(), frozenset()
    cpu_pods = frozenset({*states.cpu.assignments, *states.cpu.pod_assignments})
    memory_pods = frozenset({*states.memory.assignments, *states.memory.pod_assignments})
    return cpu_pods - memory_pods, memory_pods - cpu_pods


def plan_node(
    hardware: Hardware,
    configuration: KubeletConfiguration,
    before: SimulatedNode,
    manifests: Iterable[Manifest],
    notes: Iterable[str] = (),
) -> NodePlan:
    """Return the decisions of the kubelet of the node *before* about the pods of *manifests*, in their order.

    These pods count as active, not as stale. After a pod with which the kubelet hangs or crashes, no other is admitted.
    """
    pods: list[PodPlan] = []
    asked = tuple(manifests)
    active = {manifest.pod.pod_uid for manifest in asked}
    node = before = attrs.evolve(
        before, stale_cpus=before.stale_cpus - active, stale_memory=before.stale_memory - active
    )
    for manifest in asked:
        explanation = explain(node, manifest.pod)
        node = explanation.admission.node
        pods.append(_pod(manifest, explanation, hardware, configuration))
        if explanation.admission.outcome in {Outcome.HANGS, Outcome.CRASHES}:
            break
    return NodePlan(hardware, configuration, before, tuple(pods), node.without(), (*notes, *_of_states(before)))


def fit_of(count: int | Literal["all"], cpus: CpuSet | None, plan: NodePlan, *, spare: bool = False) -> Fit:
    """Return whether an instance of *count* vCPUs, on *cpus* if given, fits into a container of the pods of *plan*.

    It is the container with the most exclusive CPUs. ``"all"`` stands for all of them, or with *spare* for all but
    those for the instance's other threads (:func:`~runner.placement.pins.all_cpus`).
    """
    containers = [
        (container, pod.manifest.name) for pod in plan.pods for container in pod.containers if container.placement
    ]
    if not containers:
        return Fit(0 if count == "all" else count, error="no container gets exclusive CPUs")
    best, pod = max(containers, key=lambda each: len(each[0].cpus))
    vcpus = all_cpus(plan.hardware, best.cpus, spare=spare) if count == "all" else count
    fit = Fit(vcpus, pod, best.container.name)
    if vcpus > len(best.cpus):
        reason = f"it gets {len(best.cpus)} CPUs; ask for {vcpus} in the pod, or for fewer vCPUs"
        return attrs.evolve(fit, error=reason)
    if cpus is not None and not cpus <= best.cpus:
        reason = f"cpu.cpus names {cpus - best.cpus}, which the kubelet does not give; leave cpu.cpus out"
        return attrs.evolve(fit, error=reason)
    others = plan.hardware.online - plan.after.shared_pool - best.cpus
    return attrs.evolve(fit, placement=place(vcpus, cpus or best.cpus, plan.hardware, others=others))


def _pod(
    manifest: Manifest, explanation: Explanation, hardware: Hardware, configuration: KubeletConfiguration
) -> PodPlan:
    admission = explanation.admission
    containers = tuple(_containers(explanation, hardware)) if admission.admitted else ()
    notes = (*manifest.notes, *_unknown_devices(admission.node, manifest.pod))
    return PodPlan(manifest, explanation, containers, (*notes, *_too_big(manifest.pod, hardware, configuration)))


def _containers(explanation: Explanation, hardware: Hardware) -> Iterator[ContainerPlan]:
    admission = explanation.admission
    own = admission.cpus
    state = admission.node.cpus
    others = state.exclusive() - state.assigned_to(admission.pod.pod_uid)
    for container in admission.pod.containers:
        cpus = own.get(container.name, CpuSet())
        yield ContainerPlan(
            container,
            cpus,
            admission.memory.get(container.name, ()),
            admission.devices.get(container.name, {}),
            admission.affinity.get(container.name),
            place(len(cpus), cpus, hardware, others=others) if cpus and container.kind is ContainerKind.APP else None,
        )


def _of_states(before: SimulatedNode) -> Iterator[str]:
    """Yield notes about assumptions where the state files of the node *before* are ambiguous."""
    if before.stale_memory:
        yield (
            f"{_pods(before.stale_memory)} in memory_manager_state and without CPUs in cpu_manager_state: taken as"
            " ended, so that the kubelet takes the memory back before the next admission; it keeps the memory of a pod"
            " that still runs without exclusive CPUs"
        )
    if before.stale_cpus:
        yield (
            f"{_pods(before.stale_cpus)} in cpu_manager_state and without memory in memory_manager_state: taken as"
            " rejected, so that the kubelet takes the CPUs back before the next admission"
        )
    if before.cpus.pod_assignments:
        yield (
            f"{_pods(before.cpus.pod_assignments)} in cpu_manager_state with CPUs of the pod as a whole"
            " (PodLevelResourceManagers): these CPUs are taken as the pod's until it ends"
        )
    if before.cpus.unattributed:
        yield (
            f"cpu_manager_state (version 1) does not say whose pod's the CPUs {before.cpus.unattributed} are: they are"
            " taken as in use"
        )


def _pods(pod_uids: Collection[str]) -> str:
    return f"{', '.join(sorted(pod_uids))} {'is' if len(pod_uids) == 1 else 'are'}"


def _unknown_devices(node: SimulatedNode, pod: Pod) -> Iterator[str]:
    known = node.kubelet.device_manager.devices
    for resource in peak_devices(pod):
        if resource not in known:
            yield (
                f"the devices of {resource!r} on this host are not known, so any NUMA node is assumed to fit;"
                f" name them: --device {resource}=COUNT@NUMA_NODE"
            )


def _too_big(pod: Pod, hardware: Hardware, configuration: KubeletConfiguration) -> Iterator[str]:
    """Yield the requests of *pod* that exceed Node Allocatable: no scheduler binds it to such a node."""
    millicpus = 1000 * len(hardware.cpus) - configuration.reserved_millicpus
    asked = peak(pod, lambda container: container.millicpus)
    if asked > millicpus:
        yield _beyond("CPUs", str(Fraction(asked, 1000)), str(Fraction(millicpus, 1000)))
    allocatable = allocatable_memory(hardware, configuration)
    for resource, amount in peak_memory(pod).items():
        if amount > allocatable.get(resource, 0):
            yield _beyond(resource, format_bytes(amount), format_bytes(allocatable.get(resource, 0)))


def _beyond(what: str, asked: str, allocatable: str) -> str:
    return f"it asks for {asked} {what}, more than the node's allocatable {allocatable}: no scheduler binds it to this node"


def allocatable_memory(hardware: Hardware, configuration: KubeletConfiguration) -> Mapping[str, int]:
    """Return the bytes by resource that the node has for pods (``status.allocatable``)."""
    allocatable: dict[str, int] = {}
    for node in hardware.numa_nodes:
        for pool in node.hugepages:
            resource = hugepages_resource(pool.size)
            allocatable[resource] = allocatable.get(resource, 0) + pool.size * pool.total
    memory = sum(node.memory for node in hardware.numa_nodes) - sum(allocatable.values())
    return allocatable | {MEMORY: max(0, memory - (configuration.node_allocatable_memory or 0))}
