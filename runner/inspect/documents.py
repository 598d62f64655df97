"""The JSON of ``inspect``, as types (see :mod:`runner.facts.documents`). Sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from runner.base.judgement import Level
from runner.facts.documents import CpuList, JudgementDocument
from runner.inspect.observation import Viewpoint
from runner.placement.backends import Backend, GuaranteeKind
from runner.placement.documents import ThreadDocument


class ShownThreadDocument(ThreadDocument):
    """A thread, and the NUMA node of the CPU on which it ran last."""

    numa_node: int | None


class GuestMemoryDocument(TypedDict):
    """The guest's RAM as far as QEMU has mapped it, by NUMA node."""

    small_pages: dict[str, int]
    huge_pages: dict[str, int]


class ChargeDocument(TypedDict):
    """The memory that the pod's cgroup is charged for."""

    cgroup: str
    memory: int
    hugetlb: int
    """Huge pages."""


class SettingsDocument(TypedDict):
    """Settings of the machine that decide what else takes time from the instance's CPUs."""

    interrupts: list[str]
    """The interrupts that are delivered there: number and handlers."""
    work_queues: CpuList
    """The CPUs of the instance that unbound work queues may use."""
    resume_latencies_us: list[str]
    """Each ``pm_qos_resume_latency_us`` there is; ``0`` is no limit."""
    governors: list[str]


class InspectedDocument(TypedDict):
    """An instance."""

    name: str
    pod: str
    """Namespace and name, ``prod/web-1``; empty where they are not known."""
    pod_uid: str
    uptime: float | None
    """Seconds since QEMU was started."""
    backend: Backend
    guarantee: GuaranteeKind | None
    """``null`` where it cannot be seen from here."""
    guarantee_reason: str | None
    cpus: CpuList
    """The CPUs of its vCPUs."""
    numa_nodes: CpuList
    threads: list[ShownThreadDocument]
    judgements: list[JudgementDocument]
    memory: GuestMemoryDocument | None
    """``null`` where it could not be read."""
    charge: ChargeDocument | None
    settings: SettingsDocument | None
    """``null`` where they are not read: in the container."""
    reported: Mapping[str, Any] | None
    """Its last report to the controller: ``seconds_ago``, and metrics by their names; ``null`` without one."""


class InspectDocument(TypedDict):
    """The observed instances of a node, or of a container, and the judgements about them."""

    version: Literal[2]
    seen_from: Viewpoint
    verdict: Annotated[str, Level]
    """The worst level of all."""
    instances: list[InspectedDocument]
    judgements: list[JudgementDocument]
    """About the node."""


class TaskDocument(TypedDict):
    """A task that ran on a vCPU's CPU."""

    name: str
    pid: int
    tid: int
    cgroup: str | None
    kernel: bool
    """It is a kernel thread."""
    ns: int
    """Nanoseconds for which it ran there."""


class AccountDocument(TypedDict):
    """The time of a CPU by its users, in nanoseconds."""

    cpu: int
    vcpu: int | None
    vcpu_ns: int
    idle_ns: int
    kernel: list[TaskDocument]
    """Kernel threads that are bound to this CPU."""
    others: list[TaskDocument] | None
    """All other tasks; ``null`` where only their sum is known."""
    other_ns: int
    unknown_ns: int
    """Time in which it is not known what ran."""
    lost_events: int


class TracedDocument(TypedDict):
    """An instance."""

    name: str
    pod: str
    pod_uid: str
    backend: Backend
    guarantee: GuaranteeKind | None
    cpus: CpuList
    accounts: list[AccountDocument]
    judgements: list[JudgementDocument]


class TraceDocument(TypedDict):
    """The tasks that ran on the CPUs of instances while it was recorded."""

    version: Literal[2]
    seen_from: Viewpoint
    verdict: Annotated[str, Level]
    nanoseconds: int
    """For how long it was recorded."""
    source: str
    fallback: str | None
    """Why there are only sums; ``null`` where each switch was recorded."""
    instances: list[TracedDocument]
