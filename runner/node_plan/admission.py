"""The admission of pods by the kubelet of one node, and its state between them.

Modelled on ``pkg/kubelet/cm/topologymanager/scope_{none,container,pod}.go`` and ``container_manager_linux.go`` of
Kubernetes 1.33 to 1.36.3. The order of the handlers is that of ``pkg/kubelet/kubelet.go``, ``NewMainKubelet``: first the
managers, then the general filter, then the check of the pod's features.

A :class:`SimulatedNode` is a value: admitting a pod returns a new node and does not change the old one, so that
alternatives can be tried.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import RefusedError
from runner.base.values import frozen
from runner.facts.hardware import Hardware
from runner.kubelet.pod import MEMORY, Container, Pod
from runner.kubelet.state import Block, CpuState, MemoryState
from runner.node_plan.cpu_assignment import CpuTopology
from runner.node_plan.cpu_manager import CpuManager, CpuPolicyOptions
from runner.node_plan.device_manager import DeviceManager, Devices, DeviceState
from runner.node_plan.general_filter import Insufficient, NodeAllocatable, PreemptionError, insufficient, preempted
from runner.node_plan.machine_info import machine_info
from runner.node_plan.memory_manager import MemoryManager, check_reservation, requested_memory
from runner.node_plan.quirks import (
    FROM_SOURCE_MINOR,
    AllocationError,
    KubeletConfigError,
    KubeletCrashesError,
    KubeletHangsError,
    Quirk,
    parse_bool,
    quirks_of,
)
from runner.node_plan.topology_manager import (
    DEFAULT_MAX_NUMA_NODES,
    Hint,
    HintList,
    Merged,
    Policy,
    ProviderHints,
    Scope,
    TopologyManager,
)

REJECTION = "TopologyAffinityError"
REJECTION_MESSAGE = "Resources cannot be allocated with Topology locality"
POD_LEVEL_REJECTION_MESSAGES = {
    Scope.CONTAINER: (
        "Pod Scope pod with pod-level resources failed admission with a container-level topology manager"
    ),
    Scope.POD: "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager",
}
"""The messages of ``PodLevelTopologyAffinityError``, by the Topology Manager's scope."""
UNSUPPORTED = "PodLevelResourcesNotSupported"
UNSUPPORTED_MESSAGE = "PodLevelResources feature gate is disabled"
NO_AFFINITY = Hint(None, preferred=False)
"""The affinity that the managers get where the Topology Manager asked no provider for hints."""


@frozen
class KubeletConfiguration:
    """The part of ``KubeletConfiguration`` that decides about placement; values as in the file."""

    minor: int = 36
    """The kubelet's minor version."""
    cpu_manager_policy: str = "none"
    cpu_manager_policy_options: Mapping[str, str] = attrs.field(factory=dict)
    reserved_cpus: CpuSet = attrs.field(factory=CpuSet)
    """``reservedSystemCPUs``."""
    reserved_millicpus: int = 0
    """The CPUs of kubeReserved and systemReserved in thousandths; used only without *reserved_cpus*."""
    memory_manager_policy: str = "None"
    reserved_memory: Mapping[int, Mapping[str, int]] = attrs.field(factory=dict)
    """``reservedMemory``: NUMA node → resource → bytes."""
    node_allocatable_memory: int | None = None
    """The bytes that kubeReserved, systemReserved and the hard eviction threshold keep from pods; *reserved_memory* must add
    up to it. ``None`` if it is not known."""
    topology_manager_policy: str = "none"
    topology_manager_scope: str = "container"
    topology_manager_policy_options: Mapping[str, str] = attrs.field(factory=dict)
    max_pods: int = 110
    pods_per_core: int = 0
    """Largest number of pods for each CPU; 0 for no such limit."""
    shutdown_graces: tuple[tuple[int, float], ...] = ()
    """Lowest priority → seconds that pods have at a shutdown of the node, ascending; empty without ``shutdownGracePeriod``."""
    pod_level_resources: bool = True
    """The feature gate ``PodLevelResources``, on since 1.34."""
    pod_level_resource_managers: bool = False
    """The feature gate ``PodLevelResourceManagers``, alpha in 1.36; it needs *pod_level_resources*."""


@frozen
class Kubelet:
    """The managers of one kubelet after its start; ``None`` for a manager with policy none."""

    topology_manager: TopologyManager
    cpu_manager: CpuManager | None
    memory_manager: MemoryManager | None
    quirks: frozenset[Quirk]
    device_manager: DeviceManager
    minor: int
    machine: Hardware
    """The host as cadvisor describes it (:func:`~runner.node_plan.machine_info.machine_info`)."""
    pod_level_resources: bool
    """The feature gate ``PodLevelResources``."""
    pod_level_resource_managers: bool = False
    """The feature gate ``PodLevelResourceManagers``."""

    @classmethod
    def configured(
        cls,
        hardware: Hardware,
        configuration: KubeletConfiguration,
        *,
        devices: Devices = MappingProxyType({}),
        quirks: frozenset[Quirk] | None = None,
    ) -> Self:
        """Start the kubelet with *configuration* on *hardware*; plugins will register *devices*.

        *quirks* replaces the known bugs of its version. Raises :class:`KubeletConfigError` in the kubelet's words if it
        would not start, :class:`RefusedError` for a version that is not modelled.
        """
        known = quirks_of(configuration.minor) if quirks is None else quirks
        hardware = machine_info(hardware)
        return cls(
            _topology_manager(hardware, configuration),
            _cpu_manager(CpuTopology.of(hardware), configuration, known),
            _memory_manager(hardware, configuration),
            known,
            DeviceManager(tuple(node.id for node in hardware.numa_nodes), devices, known),
            configuration.minor,
            hardware,
            configuration.pod_level_resources,
            configuration.pod_level_resource_managers,
        )

    def seen_by_managers(self, pod: Pod) -> Pod:
        """Return *pod* as the static policies see it (``policy_static.go`` of both managers, ``Allocate``).

        1.33 ignores pod-level resources, 1.34 and 1.35 ignore them unless their gate is on. Without the gate ``PodLevelResourceManagers``
        they assign nothing to such a pod, with it by these resources.
        """
        noticed = self.minor >= 36 or (self.minor >= 34 and self.pod_level_resources)  # noqa: PLR2004 - versions
        if not noticed:
            return attrs.evolve(pod, pod_level_resources=False)
        gates = self.pod_level_resources and self.pod_level_resource_managers
        managed = pod.pod_level_resources and gates and self.minor >= 36  # noqa: PLR2004 - a version
        return attrs.evolve(pod, pod_level_managed=managed)

    def manages_as_whole(self, pod: Pod) -> bool:
        """Return whether *pod*, as seen by the managers, gets its resources as a whole (``podScope.Admit``)."""
        manager = self.topology_manager
        return pod.pod_level_managed and manager.scope is Scope.POD and manager.policy is not Policy.NONE

    @property
    def empty_node(self) -> SimulatedNode:
        """The node before its first pod."""
        cpus = self.cpu_manager.initial if self.cpu_manager else CpuState("none", CpuSet())
        return SimulatedNode(
            self, cpus, self.memory_manager.initial if self.memory_manager else MemoryState("None", {})
        )

    def restored(self, cpus: CpuState, memory: MemoryState) -> SimulatedNode:
        """Return the node with the states in the state files of a running kubelet.

        A kubelet compares them with the machine only when it starts; so a running kubelet can have a state that it would refuse at its next
        start (:attr:`SimulatedNode.restart_refusal`). Raises :class:`KubeletConfigError` in the kubelet's words for CPUs, NUMA nodes or
        sizes of pages of another machine.
        """
        empty = self.empty_node
        if self.cpu_manager:
            cpus = self.cpu_manager.restored(cpus)
        if self.memory_manager and not self.memory_manager.describes_this_machine(memory):
            self.memory_manager.validate(memory)
        return SimulatedNode(
            self, cpus if self.cpu_manager else empty.cpus, memory if self.memory_manager else empty.memory
        )

    def hints(self, node: SimulatedNode, pod: Pod, container: Container | None) -> dict[str, ProviderHints]:
        """Return the hints of each provider, in the kubelet's order, for *container*, or for the whole *pod* (``None``)."""
        plugins = self.device_manager
        device = plugins.hints(node.devices, pod, container) if container else plugins.pod_hints(node.devices, pod)
        cpu: ProviderHints = None
        memory: ProviderHints = None
        if self.cpu_manager:
            manager = self.cpu_manager
            cpu = manager.hints(node.cpus, pod, container) if container else manager.pod_hints(node.cpus, pod)
        if self.memory_manager:
            booking = self.memory_manager
            memory = booking.hints(node.memory, pod, container) if container else booking.pod_hints(node.memory, pod)
        nowhere = memory == {} and requested_memory(pod, container)
        if nowhere and Quirk.EMPTY_MEMORY_HINTS not in self.quirks:
            memory = {MEMORY: HintList()}
        return {"device": device or None, "cpu": cpu, "memory": memory}


def _topology_manager(hardware: Hardware, configuration: KubeletConfiguration) -> TopologyManager:
    """Check and build the Topology Manager (``NewManager``, ``NewPolicyOptions``)."""
    numa_nodes = tuple(node.id for node in hardware.numa_nodes)
    try:
        policy = Policy(configuration.topology_manager_policy)
    except ValueError:
        raise KubeletConfigError(f'unknown policy: "{configuration.topology_manager_policy}"') from None
    try:
        scope = Scope(configuration.topology_manager_scope)
    except ValueError:
        raise KubeletConfigError(f'unknown scope: "{configuration.topology_manager_scope}"') from None
    distances = {node.id: node.distances for node in hardware.numa_nodes}
    if policy is Policy.NONE:  # it returns before it reads the options
        return TopologyManager(numa_nodes, policy, scope, distances=distances)
    options = dict(configuration.topology_manager_policy_options)
    closest = parse_bool("prefer-closest-numa-nodes", options.pop("prefer-closest-numa-nodes", "false"))
    limit = options.pop("max-allowable-numa-nodes", str(DEFAULT_MAX_NUMA_NODES))
    for name in options:
        raise KubeletConfigError(f'unknown Topology Manager Policy option: "{name}"')
    if not re.fullmatch("[0-9]{1,18}", limit, re.ASCII):
        raise KubeletConfigError(
            'unable to convert policy option to integer "max-allowable-numa-nodes":'
            f' strconv.Atoi: parsing "{limit}": invalid syntax'
        )
    if int(limit) < DEFAULT_MAX_NUMA_NODES:
        raise KubeletConfigError(
            f'the minimum value of "max-allowable-numa-nodes" should not be less than {DEFAULT_MAX_NUMA_NODES}'
        )
    if closest and not all(distances.values()):
        raise KubeletConfigError("error getting NUMA distances from cadvisor")
    if len(numa_nodes) > int(limit):
        raise KubeletConfigError(f"unsupported on machines with more than {limit} NUMA Nodes")
    # Only these two policies are given the option.
    closest = closest and policy in {Policy.BEST_EFFORT, Policy.RESTRICTED}
    return TopologyManager(numa_nodes, policy, scope, closest, distances)


def _cpu_manager(
    topology: CpuTopology, configuration: KubeletConfiguration, quirks: frozenset[Quirk]
) -> CpuManager | None:
    if configuration.cpu_manager_policy == "none":
        return None
    if configuration.cpu_manager_policy != "static":
        raise KubeletConfigError(f'unknown policy: "{configuration.cpu_manager_policy}"')
    options = CpuPolicyOptions.parse(configuration.cpu_manager_policy_options)
    if configuration.minor >= FROM_SOURCE_MINOR:
        _refuse_unknown_options(options)
    if options.align_by_socket and configuration.topology_manager_policy == Policy.SINGLE_NUMA_NODE.value:
        raise KubeletConfigError(
            "Topolgy manager single-numa-node policy is incompatible with CPUManager align-by-socket policy option"
        )
    return CpuManager.configured(
        topology,
        options,
        reserved_cpus=configuration.reserved_cpus,
        reserved_millicpus=configuration.reserved_millicpus,
        quirks=quirks,
    )


def _refuse_unknown_options(options: CpuPolicyOptions) -> None:
    """Refuse the options whose effect in 1.37 is not modelled."""
    for chosen, names, change in (
        (options.distribute_cpus_across_cores, "distribute-cpus-across-cores", "kubernetes#140766"),
        (
            options.distribute_cpus_across_numa and options.align_by_socket,
            "distribute-cpus-across-numa together with align-by-socket",
            "kubernetes#139778",
        ),
    ):
        if chosen:
            raise RefusedError(
                f"cannot predict kubelet 1.{FROM_SOURCE_MINOR} with {names}: it chooses other CPUs than 1.36 ({change}), which is"
                " not known here",
                remedy="leave the option out, or plan with --kubelet 1.36",
            )


def _memory_manager(hardware: Hardware, configuration: KubeletConfiguration) -> MemoryManager | None:
    if configuration.memory_manager_policy == "None":
        return None
    if configuration.memory_manager_policy != "Static":
        raise KubeletConfigError(f'unknown policy: "{configuration.memory_manager_policy}"')
    if configuration.node_allocatable_memory is not None:
        check_reservation(configuration.reserved_memory, {MEMORY: configuration.node_allocatable_memory})
    return MemoryManager.configured(hardware, configuration.reserved_memory)


class Outcome(enum.Enum):
    """The outcome of an admission."""

    ADMITTED = "admitted"
    REJECTED = "rejected"
    HANGS = "hangs"
    """The kubelet would never finish, and admit no other pod (:attr:`Quirk.LIVELOCK`)."""
    CRASHES = "crashes"
    """The kubelet would panic."""


@frozen
class Step:
    """One merge of hints by the Topology Manager."""

    container: str | None
    """The container's name; ``None`` with scope ``pod``."""
    hints: Mapping[str, ProviderHints]
    """The hints of the providers ``device``, ``cpu`` and ``memory``, in this order."""
    merged: Merged


@frozen
class Admission:
    """The admission of one pod."""

    pod: Pod
    outcome: Outcome
    reason: str
    """``status.reason`` of the pod; empty if it is admitted."""
    message: str
    """``status.message`` of the pod; empty if it is admitted."""
    steps: tuple[Step, ...]
    affinity: Mapping[str, Hint]
    """The merged hint of each container that was considered; empty with policy ``none``."""
    node: SimulatedNode
    """The node after the admission."""
    insufficient: tuple[Insufficient, ...] = ()
    """The reasons of the general filter, if it rejects the pod; *reason* and *message* are those of the first."""
    preempted: tuple[Pod, ...] = ()
    """The pods that the kubelet ends to admit this critical one."""

    @property
    def admitted(self) -> bool:
        """Return whether the pod may start."""
        return self.outcome is Outcome.ADMITTED

    @property
    def cpus(self) -> Mapping[str, CpuSet]:
        """The exclusive CPUs by container; a rejected pod may hold some until the next admission."""
        return self.node.cpus.assignments.get(self.pod.pod_uid, {})

    @property
    def devices(self) -> Mapping[str, Devices]:
        """The devices by container, those that plugins registered."""
        return self.node.devices.assignments.get(self.pod.pod_uid, {})

    @property
    def memory(self) -> Mapping[str, tuple[Block, ...]]:
        """The memory booked by container; a rejected pod may hold some until the next admission."""
        return self.node.memory.assignments.get(self.pod.pod_uid, {})


@frozen
class SimulatedNode:
    """The state of a kubelet's managers between two admissions.

    *stale_cpus*, *stale_memory* and *stale_devices* are the UIDs of inactive pods that may still hold resources. Each
    manager releases them before it decides about the next pod, and when a pod ends (``removeStaleState``). Each manager
    has its own set, because a pod that the CPU Manager rejects never reaches the Memory Manager.
    """

    kubelet: Kubelet
    cpus: CpuState
    memory: MemoryState
    devices: DeviceState = attrs.field(factory=DeviceState)
    stale_cpus: frozenset[str] = frozenset()
    stale_memory: frozenset[str] = frozenset()
    stale_devices: frozenset[str] = frozenset()
    active: Mapping[str, Pod] = attrs.field(factory=dict)
    """The known admitted pods that have not ended, by UID; the general filter counts their requests."""
    allocatable: NodeAllocatable | None = None
    """The amounts that the general filter compares with; ``None`` for a node without it."""

    @property
    def shared_pool(self) -> CpuSet:
        """The CPUs of all pods without exclusive ones (``defaultCpuSet``)."""
        return self.cpus.shared_pool

    @property
    def available(self) -> CpuSet:
        """The CPUs that can be assigned exclusively."""
        manager = self.kubelet.cpu_manager
        return manager.available(self.cpus) if manager else CpuSet()

    @property
    def restart_refusal(self) -> str:
        """The kubelet's words if it would not start again with this state; else empty."""
        cpu_manager, memory_manager = self.kubelet.cpu_manager, self.kubelet.memory_manager
        try:
            if cpu_manager:
                cpu_manager.validate(self.cpus)
            if memory_manager:
                memory_manager.validate(self.memory)
        except KubeletConfigError as error:
            return str(error)
        return ""

    def without(self, *pod_uids: str) -> SimulatedNode:
        """Return the node after the pods *pod_uids* have ended; the resources of stale pods are released as well."""
        node = self.with_devices_back(*pod_uids).with_cpus_back(*pod_uids).with_memory_back(*pod_uids)
        return attrs.evolve(node, active={uid: pod for uid, pod in node.active.items() if uid not in pod_uids})

    def with_devices_back(self, *pod_uids: str) -> SimulatedNode:
        """Release the devices of stale pods and of *pod_uids*."""
        devices = self.devices
        for pod_uid in sorted(self.stale_devices.union(pod_uids)):
            devices = self.kubelet.device_manager.without(devices, pod_uid)
        return attrs.evolve(self, devices=devices, stale_devices=frozenset())

    def with_cpus_back(self, *pod_uids: str) -> SimulatedNode:
        """Release the CPUs of stale pods and of *pod_uids*."""
        cpus = self.cpus
        for pod_uid in sorted(self.stale_cpus.union(pod_uids)):
            cpus = self.kubelet.cpu_manager.without(cpus, pod_uid) if self.kubelet.cpu_manager else cpus
        return attrs.evolve(self, cpus=cpus, stale_cpus=frozenset())

    def with_memory_back(self, *pod_uids: str) -> SimulatedNode:
        """Release the memory of stale pods and of *pod_uids*."""
        memory = self.memory
        for pod_uid in sorted(self.stale_memory.union(pod_uids)):
            memory = self.kubelet.memory_manager.without(memory, pod_uid) if self.kubelet.memory_manager else memory
        return attrs.evolve(self, memory=memory, stale_memory=frozenset())

    def admit(self, pod: Pod) -> Admission:
        """Return the admission of *pod* (``canAdmitPod``); rejecting, hanging and crashing are outcomes, not exceptions."""
        attempt = _Attempt(self.kubelet.seen_by_managers(pod), self)
        rejection: _RejectedError | None = None
        ended: tuple[Pod, ...] = ()
        try:
            attempt.run()
            ended = self._filter(pod)
            self._check_features(pod)
            attempt.start()
        except _RejectedError as error:
            rejection = error
        except AllocationError as error:
            message = str(error)
            if error.reason == AllocationError.reason:
                message = f"Allocate failed due to {error}, which is unexpected"
            rejection = _RejectedError(error.reason, message)
        except KubeletHangsError as error:
            return Admission(pod, Outcome.HANGS, "", str(error), tuple(attempt.steps), attempt.affinity, self)
        except KubeletCrashesError as error:
            return Admission(pod, Outcome.CRASHES, "", str(error), tuple(attempt.steps), attempt.affinity, self)
        steps, affinity = tuple(attempt.steps), attempt.affinity
        if rejection:
            after = attempt.node.ending(pod.pod_uid)
            reason, message = rejection.reason, rejection.message
            return Admission(pod, Outcome.REJECTED, reason, message, steps, affinity, after, rejection.insufficient)
        after = attempt.node.ending(*(each.pod_uid for each in ended))
        after = attrs.evolve(after, active={**after.active, pod.pod_uid: pod})
        return Admission(pod, Outcome.ADMITTED, "", "", steps, affinity, after, preempted=ended)

    def ending(self, *pod_uids: str) -> SimulatedNode:
        """Return the node with the pods *pod_uids* inactive; they hold their resources until the next admission."""
        return attrs.evolve(
            self,
            stale_cpus=self.stale_cpus.union(pod_uids),
            stale_memory=self.stale_memory.union(pod_uids),
            stale_devices=self.stale_devices.union(pod_uids),
            active={uid: pod for uid, pod in self.active.items() if uid not in pod_uids},
        )

    def _filter(self, pod: Pod) -> tuple[Pod, ...]:
        """Return the pods that end so that *pod* passes the general filter; raise :exc:`_RejectedError` if it does not."""
        if self.allocatable is None:
            return ()
        others = tuple(other for uid, other in self.active.items() if uid != pod.pod_uid)
        missing = insufficient(pod, others, self.allocatable)
        if not missing:
            return ()
        if not pod.critical:
            raise _RejectedError(missing[0].reason, str(missing[0]), missing)
        try:
            return preempted(pod, missing, others)
        except PreemptionError as error:
            message = f"Unexpected error while attempting to recover from admission failure: {error}"
            raise _RejectedError(AllocationError.reason, message, missing) from error

    def _check_features(self, pod: Pod) -> None:
        """Raise :exc:`_RejectedError` for a pod with a feature that is off (``isPodLevelResourcesSupported``, since 1.34)."""
        supported = self.kubelet.pod_level_resources or self.kubelet.minor < 34  # noqa: PLR2004 - a version
        if pod.pod_level_resources and not supported:
            raise _RejectedError(UNSUPPORTED, UNSUPPORTED_MESSAGE)


class _RejectedError(Exception):
    """A handler of the kubelet does not admit the pod."""

    def __init__(self, reason: str, message: str, missing: tuple[Insufficient, ...] = ()) -> None:
        super().__init__(reason, message)
        self.reason, self.message, self.insufficient = reason, message, missing


class _Attempt:
    """One admission in progress."""

    def __init__(self, pod: Pod, node: SimulatedNode) -> None:
        self.pod = pod
        self.node = node
        self.steps: list[Step] = []
        self.affinity: dict[str, Hint] = {}

    def run(self) -> None:
        manager = self.node.kubelet.topology_manager
        together = manager.scope is Scope.POD and manager.policy is not Policy.NONE
        affinity = self._merged(None) if together else NO_AFFINITY
        if self.node.kubelet.manages_as_whole(self.pod):
            self.affinity = {container.name: affinity for container in self.pod.containers}
            self._allocate_pod(affinity)
            return
        for container in self.pod.containers:
            if manager.policy is not Policy.NONE:
                if not together:
                    affinity = self._merged(container)
                self.affinity[container.name] = affinity
            self._allocate(container, affinity)

    def _merged(self, container: Container | None) -> Hint:
        kubelet = self.node.kubelet
        self.node = self.node.without()
        hints = kubelet.hints(self.node, self.pod, container)
        merged = kubelet.topology_manager.merge(hints.values())
        self.steps.append(Step(container.name if container else None, hints, merged))
        if not merged.admitted:
            messages = POD_LEVEL_REJECTION_MESSAGES if self.pod.pod_level_managed else {}
            scope = kubelet.topology_manager.scope
            raise _RejectedError(REJECTION, messages.get(scope, REJECTION_MESSAGE))
        return merged.hint

    def start(self) -> None:
        """Give the containers the devices that they do not have yet (``GetDeviceRunContainerOptions``).

        The Device Manager assigns nothing in ``AllocatePod``, and makes up for it when a container starts. A container that
        gets none then does not start, and its pod stays admitted.
        """
        for container in self.pod.containers:
            affinity = self.affinity.get(container.name, NO_AFFINITY).mask
            with contextlib.suppress(AllocationError):
                devices = self.node.kubelet.device_manager.allocate(self.node.devices, self.pod, container, affinity)
                self.node = attrs.evolve(self.node, devices=devices)

    def _allocate_pod(self, affinity: Hint) -> None:
        """Let the managers assign resources to the pod as a whole (``admitUsingPodResources``)."""
        kubelet, pod = self.node.kubelet, self.pod
        if kubelet.cpu_manager:
            self.node = self.node.with_cpus_back()
            cpus = kubelet.cpu_manager.allocate_pod(self.node.cpus, pod, affinity.mask)
            self.node = attrs.evolve(self.node, cpus=cpus)
        if kubelet.memory_manager:
            self.node = self.node.with_memory_back()
            memory = kubelet.memory_manager.allocate_pod(self.node.memory, pod, affinity)
            self.node = attrs.evolve(self.node, memory=memory)

    def _allocate(self, container: Container, affinity: Hint) -> None:
        """Let each manager assign resources to *container*; if one fails, those that others have assigned stay assigned."""
        kubelet, pod = self.node.kubelet, self.pod
        self.node = self.node.with_devices_back()
        devices = kubelet.device_manager.allocate(self.node.devices, pod, container, affinity.mask)
        self.node = attrs.evolve(self.node, devices=devices)
        if kubelet.cpu_manager:
            self.node = self.node.with_cpus_back()
            cpus = kubelet.cpu_manager.allocate(self.node.cpus, pod, container, affinity.mask)
            self.node = attrs.evolve(self.node, cpus=cpus)
        if kubelet.memory_manager:
            self.node = self.node.with_memory_back()
            memory = kubelet.memory_manager.allocate(self.node.memory, pod, container, affinity)
            self.node = attrs.evolve(self.node, memory=memory)
