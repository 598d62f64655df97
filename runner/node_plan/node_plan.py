"""The plan of a Kubernetes node: the kubelet's decision about each pod in order, and the CPUs of an instance's vCPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.facts.hardware import Hardware
from runner.kubelet.pod import Container, ContainerKind, Pod
from runner.kubelet.state import Block, CpuState, MemoryState
from runner.node_plan.admission import Kubelet, KubeletConfiguration, Outcome, SimulatedNode
from runner.node_plan.allocatable import node_allocatable
from runner.node_plan.cpu_manager import exclusive_cpus
from runner.node_plan.device_manager import Devices
from runner.node_plan.explanation import Explanation, explain
from runner.node_plan.manifests import Manifest
from runner.node_plan.memory_manager import requested_memory
from runner.node_plan.pod_notes import OWN_CONTAINER, OWN_RESOURCES, kubelet_faults, notes_of_another_start, pod_notes
from runner.node_plan.quirks import KubeletConfigError
from runner.node_plan.topology_manager import Hint
from runner.placement.pins import Pinning, all_cpus, place

KnownPods = Literal["all", "exclusive", "none"]
"""The part of the pods already on the node that is known: all, those with exclusive CPUs or memory (the state files), or none."""


@frozen
class States:
    """The contents of the kubelet's state files, ``None`` for one that was not given."""

    cpu: CpuState | None = None
    memory: MemoryState | None = None

    @property
    def cpu_pods(self) -> frozenset[str]:
        """The UIDs of the pods with CPUs."""
        return frozenset({*self.cpu.assignments, *self.cpu.pod_assignments}) if self.cpu else frozenset()

    @property
    def memory_pods(self) -> frozenset[str]:
        """The UIDs of the pods with memory."""
        return frozenset({*self.memory.assignments, *self.memory.pod_assignments}) if self.memory else frozenset()


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
    pod_cpus: CpuSet = attrs.field(factory=CpuSet)
    """The CPUs of its pod on which it runs with the pod's other containers without *cpus*; empty for the shared pool."""
    shares_memory: bool = False
    """Whether *memory* is its pod's, shared by the pod's containers that have none of their own."""


@frozen
class PodPlan:
    """The kubelet's decision about one pod; *containers* is empty unless it is admitted."""

    manifest: Manifest
    explanation: Explanation
    containers: tuple[ContainerPlan, ...]
    notes: tuple[str, ...]
    whole_cpus: CpuSet = attrs.field(factory=CpuSet)
    """The exclusive CPUs of the pod as a whole (scope ``pod``, gate ``PodLevelResourceManagers``), which its containers share."""
    whole_memory: tuple[Block, ...] = ()
    """The memory of the pod as a whole, which includes its containers'."""
    faults: tuple[str, ...] = ()
    """Sentences: faults of the kubelet in admitting the pod, or because of it."""

    @property
    def cpus(self) -> CpuSet:
        """All exclusive CPUs of the pod."""
        return self.whole_cpus | CpuSet.union(container.cpus for container in self.containers)


@frozen
class WhatIf:
    """The same pods with another configuration: the *plan*, or the *refusal* of the kubelet to start."""

    name: str
    plan: NodePlan | None
    refusal: str = ""


@frozen
class Fit:
    """The fit of an instance of *vcpus*: into *container* of *pod* with *placement*, or none, because of *error*."""

    vcpus: int
    pod: str = ""
    container: str = ""
    placement: Pinning | None = None
    error: str = ""


@frozen
class NodePlan:
    """A node *before* its pods, the decisions about them, and the node *after* them without the resources of stale pods."""

    hardware: Hardware
    """The host as the kernel describes it, where vCPUs are pinned."""
    configuration: KubeletConfiguration
    before: SimulatedNode
    pods: tuple[PodPlan, ...]
    after: SimulatedNode
    notes: tuple[str, ...] = ()
    fit: Fit | None = None
    what_if: tuple[WhatIf, ...] = ()
    known: KnownPods = "none"
    unclear: frozenset[str] = frozenset()
    """The UIDs of :func:`unclear_pods`, which *pods* takes as ended."""
    if_live: NodePlan | None = None
    """The same pods where the *unclear* ones are still active; ``None`` if the answers are the same."""

    @property
    def machine(self) -> Hardware:
        """The host as the kubelet sees it."""
        return self.before.kubelet.machine

    @property
    def fits(self) -> bool:
        """Return whether every pod is admitted without a fault of the kubelet, and an instance fits its container.

        Also if the unclear pods are still active.
        """
        admitted = all(pod.explanation.admission.admitted and not pod.faults for pod in self.pods)
        return admitted and (self.fit is None or not self.fit.error) and (self.if_live is None or self.if_live.fits)

    @property
    def answers(self) -> tuple[object, ...]:
        """Return the kubelet's answers for each pod: plans with equal answers have the same effect."""
        return tuple(
            (
                pod.explanation.admission.outcome,
                pod.explanation.admission.reason,
                pod.explanation.admission.message,
                tuple((each.cpus, each.memory, each.devices) for each in pod.containers),
            )
            for pod in self.pods
        )


def start_node(
    hardware: Hardware,
    configuration: KubeletConfiguration,
    devices: Devices,
    states: States,
    running: Iterable[Manifest] | None = None,
) -> SimulatedNode:
    """Return the node with the *states* of its state files, possibly those of a kubelet that is running.

    *running* are the active pods of the node, and all of them; ``None`` if they are not known. The resources of
    :func:`stale_pods` are released at the first admission.

    Raises :class:`KubeletConfigError` in the kubelet's words if it would not start, as from state files of another
    policy or another machine. A state that a running kubelet can have and that it would not start with is no error, but
    the node's :attr:`~runner.node_plan.admission.SimulatedNode.restart_refusal`.
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
    allocatable = node_allocatable(hardware, configuration)
    if running is None:
        stale_cpus, stale_memory = stale_pods(states)
        active = _pods_of(states, (states.cpu_pods | states.memory_pods) - stale_cpus - stale_memory)
    else:
        active = {manifest.pod.pod_uid: manifest.pod for manifest in running}
        stale_cpus, stale_memory = states.cpu_pods - active.keys(), states.memory_pods - active.keys()
    return attrs.evolve(node, stale_cpus=stale_cpus, stale_memory=stale_memory, active=active, allocatable=allocatable)


def _pods_of(states: States, pod_uids: Collection[str]) -> dict[str, Pod]:
    """Return the pods *pod_uids* as *states* show them: one container with all CPUs and memory.

    An app container has taken over what its init containers had. The fraction of a CPU of a pod without exclusive CPUs
    is not in the files.
    """
    pods = {}
    for pod_uid in sorted(pod_uids):
        cpus = states.cpu.assigned_to(pod_uid) if states.cpu else CpuSet()
        memory: dict[str, int] = {}
        for blocks in states.memory.booked_for(pod_uid).values() if states.memory else ():
            for block in blocks:
                memory[block.resource] = memory.get(block.resource, 0) + block.size
        pods[pod_uid] = Pod(pod_uid, (Container("", 1000 * len(cpus), memory),))
    return pods


def stale_pods(states: States) -> tuple[frozenset[str], frozenset[str]]:
    """Return the UIDs of inactive pods in *states*: those with CPUs, and those with memory.

    Before each admission both managers release the resources of inactive pods (``removeStaleState``). The files do not
    contain which pods are active, but an active pod with exclusive CPUs is Guaranteed, so it is in both files. With both
    policies static,

    * a pod in ``cpu_manager_state`` alone was rejected after the CPU Manager had assigned its CPUs;
    * a pod in ``memory_manager_state`` alone has ended, or it is one of the :func:`unclear_pods`, which are planned for
      both ways.

    With one file, or a manager of policy none, every pod counts as active. So does a pod in both files, although it may
    have ended less than 10 s ago, or been rejected after its first containers had got their resources.
    """
    if not states.cpu or not states.memory or states.cpu.policy == "none" or states.memory.policy == "None":
        return frozenset(), frozenset()
    return states.cpu_pods - states.memory_pods, states.memory_pods - states.cpu_pods


def unclear_pods(states: States) -> dict[str, Pod]:
    """Return the pods that have ended or run without exclusive CPUs, by UID: the state files do not tell which.

    They are in ``memory_manager_state`` alone. The CPU Manager removes an ended pod within ``cpuManagerReconcilePeriod``
    (10 s), the Memory Manager only at the next admission; but a Guaranteed pod with half a CPU is never in the first file.
    """
    return _pods_of(states, stale_pods(states)[1])


def plan_node(
    hardware: Hardware,
    configuration: KubeletConfiguration,
    before: SimulatedNode,
    manifests: Iterable[Manifest],
    *,
    unclear: Mapping[str, Pod] = MappingProxyType({}),
    known: KnownPods = "none",
) -> NodePlan:
    """Return the decisions of the kubelet of the node *before* about the pods of *manifests*, in their order.

    These pods count as active, not as stale. After a pod with which the kubelet hangs or crashes, no other is admitted.
    The *unclear* pods (:func:`unclear_pods`) are taken as ended, and in :attr:`NodePlan.if_live` as active.
    """
    asked = tuple(manifests)
    named = {manifest.pod.pod_uid for manifest in asked}
    before = attrs.evolve(before, stale_cpus=before.stale_cpus - named, stale_memory=before.stale_memory - named)
    pods, after = _decided(hardware, configuration, before, asked)
    unclear = {uid: pod for uid, pod in unclear.items() if uid in before.stale_memory}
    plan = NodePlan(hardware, configuration, before, pods, after, known=known, unclear=frozenset(unclear))
    if unclear:
        active = {**before.active, **unclear}
        live = attrs.evolve(before, stale_memory=before.stale_memory - unclear.keys(), active=active)
        pods, after = _decided(hardware, configuration, live, asked)
        other = attrs.evolve(plan, before=live, pods=pods, after=after)
        plan = attrs.evolve(plan, if_live=None if other.answers == plan.answers else other)
    return attrs.evolve(plan, notes=tuple(_of_states(plan)))


def _decided(
    hardware: Hardware, configuration: KubeletConfiguration, node: SimulatedNode, manifests: Iterable[Manifest]
) -> tuple[tuple[PodPlan, ...], SimulatedNode]:
    """Return the decisions about *manifests*, and the *node* after them without the resources of stale pods."""
    pods: list[PodPlan] = []
    for manifest in manifests:
        explanation = explain(node, manifest.pod)
        faults = tuple(kubelet_faults(node, explanation.admission))
        decided = _pod(manifest, explanation, hardware, configuration)
        notes = (*decided.notes, *notes_of_another_start(node, manifest.pod))
        node = explanation.admission.node
        pods.append(attrs.evolve(decided, notes=notes, faults=faults))
        if explanation.admission.outcome in {Outcome.HANGS, Outcome.CRASHES}:
            break
    return tuple(pods), node.without()


def fit_of(count: int | Literal["all"], cpus: CpuSet | None, plan: NodePlan, *, spare: bool = False) -> Fit:
    """Return whether an instance of *count* vCPUs, on *cpus* if given, fits into a container of the pods of *plan*.

    It is the container with the most exclusive CPUs. ``"all"`` stands for all of them, or with *spare* for all but
    those for the instance's other threads (:func:`~runner.placement.pins.all_cpus`).
    """
    containers = [
        (container, pod.manifest.name) for pod in plan.pods for container in pod.containers if container.placement
    ]
    if not containers:
        kubelet = plan.after.kubelet
        together = [pod.manifest.pod for pod in plan.pods if pod.manifest.pod.pod_level_resources]
        managed = any(kubelet.seen_by_managers(pod).pod_level_managed for pod in together)
        remedy = f"; {OWN_CONTAINER if managed else OWN_RESOURCES}" if together else ""
        return Fit(0 if count == "all" else count, error=f"no container gets exclusive CPUs{remedy}")
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
    pod = manifest.pod
    notes = (*manifest.notes, *pod_notes(manifest, admission, hardware, configuration))
    if not admission.admitted:
        return PodPlan(manifest, explanation, (), notes)
    state = admission.node
    return PodPlan(
        manifest,
        explanation,
        tuple(_containers(explanation, hardware)),
        notes,
        state.cpus.pod_assignments.get(pod.pod_uid, CpuSet()),
        state.memory.pod_assignments.get(pod.pod_uid, ()),
    )


def _containers(explanation: Explanation, hardware: Hardware) -> Iterator[ContainerPlan]:
    admission = explanation.admission
    uid = admission.pod.pod_uid
    pod = admission.node.kubelet.seen_by_managers(admission.pod)
    state = admission.node.cpus
    others = state.exclusive() - state.assigned_to(uid)
    whole = state.pod_assignments.get(uid, CpuSet())
    for container in admission.pod.containers:
        held = admission.cpus.get(container.name, CpuSet())
        cpus = held if exclusive_cpus(pod, container) else CpuSet()
        taken = others | (whole - cpus)
        memory = admission.memory.get(container.name, ())
        yield ContainerPlan(
            container,
            cpus,
            memory,
            admission.devices.get(container.name, {}),
            admission.affinity.get(container.name),
            place(len(cpus), cpus, hardware, others=taken) if cpus and container.kind is ContainerKind.APP else None,
            held - cpus,
            bool(memory) and not requested_memory(pod, container),
        )


def _of_states(plan: NodePlan) -> Iterator[str]:
    """Yield notes about assumptions where the state files of the node before *plan* are ambiguous."""
    before = plan.before
    if before.restart_refusal:
        yield (
            f"the next start of this kubelet fails with these state files: {before.restart_refusal} (it runs on until then, as"
            " planned here); before a restart or a reboot drain the node and remove the state files"
        )
    gone = before.stale_memory - plan.unclear
    if plan.unclear:
        same = "which changes an answer, see 'if live'" if plan.if_live else "with the same answers"
        yield (
            f"{_pods(plan.unclear)} in memory_manager_state and without CPUs in cpu_manager_state: ended, or still running"
            " without exclusive CPUs, which the files do not tell: planned as ended, so that the kubelet takes the memory"
            f" back before the next admission, and once more as still running, {same}; --running tells which"
        )
    if gone:
        yield (
            f"{_pods(gone)} in memory_manager_state and not among the running pods: the kubelet takes the memory back"
            " before the next admission"
        )
    if before.stale_cpus:
        why = "not among the running pods" if plan.known == "all" else "without memory in memory_manager_state"
        taken = "" if plan.known == "all" else "taken as rejected, so that "
        yield (
            f"{_pods(before.stale_cpus)} in cpu_manager_state and {why}: {taken}the kubelet takes the CPUs back before the"
            " next admission"
        )
    if plan.known != "all" and any(
        pod.manifest.pod.critical and (admission.preempted or admission.insufficient)
        for pod in plan.pods
        for admission in [pod.explanation.admission]
    ):
        yield "the pods that the kubelet ends for a critical one can be others, which are not known here: --running"
    if before.cpus.pod_assignments and not before.kubelet.pod_level_resource_managers:
        yield (
            f"{_pods(before.cpus.pod_assignments)} in cpu_manager_state with CPUs of the pod as a whole, which only a kubelet"
            " with the feature gate PodLevelResourceManagers writes: without it, as configured here, the kubelet does not start"
            " with this file; these CPUs are taken as the pod's until it ends"
        )
    if before.cpus.unattributed:
        yield (
            f"cpu_manager_state (version 1) does not say whose pod's the CPUs {before.cpus.unattributed} are: they are"
            " taken as in use"
        )


def _pods(pod_uids: Collection[str]) -> str:
    return f"{', '.join(sorted(pod_uids))} {'is' if len(pod_uids) == 1 else 'are'}"
