"""The types of the JSON of ``inspect`` (see :mod:`runner.facts.json_types`). Sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from runner.base.judgement import Level
from runner.facts.json_types import CpuList, JudgementDocument
from runner.inspect.observation import Viewpoint
from runner.placement.backends import Backend, GuaranteeKind
from runner.placement.receipt_json import ThreadDocument


class ShownThreadDocument(ThreadDocument):
    """A thread, and the NUMA node of the CPU on which it last ran."""

    numa_node: int | None


class GuestMemoryDocument(TypedDict):
    """The guest's RAM that QEMU has mapped, by NUMA node."""

    small_pages: dict[str, int]
    huge_pages: dict[str, int]


class ChargeDocument(TypedDict):
    """The memory charged to the pod's cgroup."""

    cgroup: str
    memory: int
    hugetlb: int
    """Bytes of huge pages."""


class SettingsDocument(TypedDict):
    """The machine's settings that allow other work to take time from the instance's CPUs."""

    interrupts: list[str]
    """The interrupts that are delivered there: number and handlers."""
    work_queues: CpuList
    """The CPUs of the instance that unbound work queues may use."""
    resume_latencies_us: list[str]
    """The distinct values of ``pm_qos_resume_latency_us`` on these CPUs; ``0`` is no limit."""
    governors: list[str]


class InspectedDocument(TypedDict):
    """An instance."""

    name: str
    pod: str
    """Namespace and name, ``prod/web-1``; empty if unknown."""
    pod_uid: str
    uptime: float | None
    """Seconds since QEMU was started."""
    backend: Backend
    guarantee: GuaranteeKind | None
    """``null`` if it cannot be seen from here."""
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
    """Judgements about the node."""


class TaskDocument(TypedDict):
    """A task that ran on a vCPU's CPU."""

    name: str
    pid: int
    tid: int
    cgroup: str | None
    kernel: bool
    """Whether it is a kernel thread."""
    ns: int
    """Nanoseconds that it ran there."""


class AccountDocument(TypedDict):
    """The time of a CPU by its users, in nanoseconds."""

    cpu: int
    vcpu: int | None
    vcpu_ns: int
    idle_ns: int
    kernel: list[TaskDocument]
    """Kernel threads that are bound to this CPU."""
    others: list[TaskDocument] | None
    """All other tasks; ``null`` if only their sum is known."""
    other_ns: int
    unknown_ns: int
    """Time in which the running task is unknown."""
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
    """Length of the recording."""
    source: str
    fallback: str | None
    """The reason why there are only sums; ``null`` if each switch was recorded."""
    instances: list[TracedDocument]
