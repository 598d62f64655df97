"""The types of the JSON of ``plan --node`` (see :mod:`runner.facts.json_types`). Memory is in bytes, CPU requests in thousandths."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from runner.facts.json_types import CpuList, JudgementDocument
from runner.kubelet.pod import ContainerKind, QosClass
from runner.node_plan.admission import Outcome
from runner.node_plan.general_filter import Insufficient
from runner.node_plan.node_plan import KnownPods
from runner.node_plan.topology_manager import Policy
from runner.placement.pins import PinPolicy


class HostDocument(TypedDict):
    """The CPUs of the host."""

    cpus: CpuList
    numa_nodes: dict[str, CpuList]


class KubeletDocument(TypedDict):
    """The part of the kubelet's configuration that affects placement."""

    minor: int
    """The minor number of its version: 36 for 1.36."""
    cpu_manager_policy: str
    cpu_manager_policy_options: dict[str, str]
    memory_manager_policy: str
    topology_manager_policy: Annotated[str, Policy]
    topology_manager_scope: str
    topology_manager_policy_options: dict[str, str]
    reserved_cpus: CpuList


class StateDocument(TypedDict):
    """The assigned resources of the node, and the free ones."""

    shared_pool: CpuList
    available: CpuList
    """The CPUs that can be assigned."""
    exclusive: dict[str, dict[str, CpuList]]
    """Pod UID → container → its exclusive CPUs."""
    exclusive_pods: dict[str, CpuList]
    """Pod UID → the CPUs that its containers share."""
    memory_free: dict[str, dict[str, int]]
    """NUMA node → resource → bytes."""
    allocatable: dict[str, int] | None
    """Resource → the amount that pods may request; ``null`` if unknown."""
    unrequested: dict[str, int] | None
    """Resource → the amount that no pod requests."""
    devices_free: dict[str, dict[str, int]]
    """Resource → NUMA node, ``""`` for none → devices."""


class MemoryBlockDocument(TypedDict):
    """Memory that a container gets."""

    resource: str
    bytes: int
    numa_nodes: list[int]


class HintDocument(TypedDict):
    """NUMA nodes that can satisfy a request."""

    numa_nodes: list[int] | None
    """``null`` for no preference."""
    preferred: bool


class PinningDocument(TypedDict):
    """The CPUs for an instance's vCPUs."""

    policy: Annotated[str, PinPolicy]
    threads: int
    """Threads of a core of the guest that are threads of one core of the host."""
    pins: list[int]
    """The CPU of each vCPU."""
    judgements: list[JudgementDocument]


class ContainerDocument(TypedDict):
    """The resources that a container would get."""

    name: str
    kind: Annotated[str, ContainerKind]
    cpus: CpuList
    """Its exclusive CPUs; empty where it runs in the shared pool."""
    pod_cpus: CpuList
    """The CPUs that it shares with other containers of its pod."""
    memory: list[MemoryBlockDocument]
    shares_memory: bool
    devices: dict[str, dict[str, int]]
    """Resource → NUMA node, ``""`` for none → devices."""
    affinity: HintDocument | None
    placement: PinningDocument | None
    """``null`` without exclusive CPUs."""


class AskedDocument(TypedDict):
    """The NUMA nodes that can provide a resource."""

    provider: str
    resource: str
    says: str


class MergeDocument(TypedDict):
    """The steps of the Topology Manager's decision."""

    container: str | None
    """``null`` with scope ``pod``."""
    asked: list[AskedDocument]
    chosen: HintDocument
    admitted: bool
    permutations: int
    why: str


class MissingDocument(TypedDict):
    """A resource of which too little is free."""

    container: str | None
    resource: str
    wanted: int
    free: int
    numa_nodes: list[int]


class OtherwiseDocument(TypedDict):
    """The result of another policy of the Topology Manager."""

    topology_manager_policy: Annotated[str, Policy]
    outcome: Annotated[str, Outcome]
    reason: str
    cpus: dict[str, CpuList]
    """Container → its exclusive CPUs."""


class PlannedPodDocument(TypedDict):
    """The kubelet's decision about a pod."""

    name: str
    uid: str
    source: str
    """The document that contains it."""
    qos: Annotated[str, QosClass]
    not_guaranteed_because: list[str]
    outcome: Annotated[str, Outcome]
    reason: str
    """``status.reason`` of a pod that is rejected."""
    message: str
    pod_cpus: CpuList
    pod_memory: list[MemoryBlockDocument]
    containers: list[ContainerDocument]
    merges: list[MergeDocument]
    missing: list[MissingDocument]
    insufficient: list[Annotated[dict[str, Any], Insufficient]]
    preempted: list[str]
    """The UIDs of the pods that would be ended for it."""
    otherwise: list[OtherwiseDocument]
    faults: list[str]
    """Faults of this kubelet that affect the decision."""
    notes: list[str]


class OutcomesDocument(TypedDict):
    """The decisions about all pods."""

    pods: list[PlannedPodDocument]
    after: StateDocument


class WhatIfDocument(TypedDict):
    """The same with other values in the configuration."""

    name: str
    refusal: str | None
    """The reason why the kubelet would not start with them."""
    pods: list[PlannedPodDocument]
    after: StateDocument | None
    if_live: OutcomesDocument | None


class FitDocument(TypedDict):
    """The fit of the instance of SPEC."""

    vcpus: int
    pod: str
    container: str
    reason: str | None
    """The reason why it does not fit; ``null`` if it does."""
    placement: PinningDocument | None


class NodeDocument(TypedDict):
    """The decisions of a Kubernetes node about pods."""

    version: Literal[2]
    fits: bool
    """Whether every pod is admitted, and SPEC, if given, fits."""
    host: HostDocument
    kubelet: KubeletDocument
    notes: list[str]
    known_pods: KnownPods
    """The pods on the node that are known."""
    before: StateDocument
    pods: list[PlannedPodDocument]
    unclear_pods: list[str]
    """The pods in only one of the state files, which are taken as ended."""
    if_live: OutcomesDocument | None
    """The decisions if they have not ended."""
    instance: FitDocument | None
    """``null`` without SPEC."""
    after: StateDocument
    what_if: list[WhatIfDocument]
