"""The JSON that the controller answers with on its socket, as types. See :mod:`runner.facts.documents`."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from runner.facts.documents import CpuList
from runner.kubelet.state import CpuPolicy
from runner.placement.backends import GuaranteeKind
from runner.protocol.instance_metrics import ReportedValue


class GuaranteeDocument(TypedDict):
    """The guarantee that keeps others off the CPUs of an instance."""

    guarantee: GuaranteeKind
    reason: NotRequired[str]
    """Why it is not ``enforced``; empty where that was not asked for."""


class ListedInstanceDocument(GuaranteeDocument):
    """An instance in the tree."""

    uuid: str
    """The uid of its pod."""
    cgroup_path: str
    """The cgroup of its vCPU threads."""
    float_path: str
    """The cgroup of all its other threads."""
    memory: int | None
    """Bytes that both may have together; ``null`` for no limit."""
    oom_kills: int
    """Processes that the kernel has ended, out of memory there."""
    cpuset: CpuList
    """Its CPUs."""
    effective: CpuList
    """The CPUs that its vCPU threads may run on now."""
    populated: bool
    """A thread is in the group of its vCPUs."""
    awaited_by: list[str]
    """The uids of the pods that the kubelet has given CPUs of its to."""
    without_seccomp: bool
    """A process of it may write the files of its groups."""
    reported: dict[str, ReportedValue] | None
    """``seconds_ago`` and the families of its last report; ``null`` for none."""


class InstancesDocument(TypedDict):
    """The instances in the tree that the caller may know of."""

    version: Literal[1]
    instances: list[ListedInstanceDocument]


class ArrangedDocument(TypedDict):
    """An instance that the kernel does not seal."""

    uuid: str
    reason: str


class HandoverDocument(TypedDict):
    """CPUs of a pod on which the instance of another still runs."""

    uuid: str
    holder: str
    """The uid of the other pod."""
    cpuset: CpuList


class NodeStatusDocument(TypedDict):
    """The controller's state. Of other pods a container learns no more than how many instances there are."""

    version: Literal[1]
    protocol: int
    """The number of the socket's protocol."""
    root: str
    """The cgroup of the tree."""
    float_path: str | None
    """The cgroup of the caller's other threads; ``null`` for a process of the node."""
    float_cpuset: CpuList
    """The CPUs of every float."""
    instances: int
    kubelet: bool
    """The kubelet shares out the CPUs; else the command line does."""
    policy: CpuPolicy | None
    """The policy of the kubelet's CPU Manager; ``null`` while decisions are frozen."""
    claims: bool
    """A DRA driver gives CPUs to pods, or could."""
    shared_pool: CpuList | None
    """``null`` while decisions are frozen."""
    frozen: str | None
    """Why decisions are frozen; ``null`` where they are not."""
    partitions: str
    """``enforced``, or why no instance can be sealed."""
    arranged: list[ArrangedDocument]
    handovers: list[HandoverDocument]
    faults: list[str]
    """What is not as it should be since the last pass."""
    disturbances: list[str] | None
    """What else than threads disturbs instances' CPUs; ``null`` for a container, because it names other pods."""
    oom_kills: dict[str, int]
    """The uid of a pod, and how many processes the kernel has ended, out of memory in its float."""
    without_seccomp: list[str]
    """The uids of the pods that may write the files of their groups."""
    trusting: bool
    """Callers are believed what they say (``--insecure-trust-peer``)."""
