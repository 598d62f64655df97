"""The types of the JSON with which the controller answers requests on its socket (see :mod:`runner.facts.json_types`)."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from runner.facts.json_types import CpuList
from runner.kubelet.state import CpuPolicy
from runner.placement.backends import GuaranteeKind
from runner.protocol.instance_metrics import ReportedValue


class GuaranteeDocument(TypedDict):
    """The guarantee that keeps others off the CPUs of an instance."""

    guarantee: GuaranteeKind
    reason: NotRequired[str]
    """The reason why it is not ``enforced``; empty if that was not requested."""


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
    """Number of processes that the kernel has ended there for lack of memory."""
    cpuset: CpuList
    """Its CPUs."""
    effective: CpuList
    """The CPUs that its vCPU threads may run on now."""
    populated: bool
    """Whether a thread is in its vCPUs' group."""
    awaited_by: list[str]
    """The uids of the pods to which the kubelet has given CPUs of this instance."""
    without_seccomp: bool
    """Whether a process of it may write the files of its groups."""
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
    """CPUs of a pod on which another pod's instance still runs."""

    uuid: str
    holder: str
    """The uid of the other pod."""
    cpuset: CpuList


class NodeStatusDocument(TypedDict):
    """The controller's state. A container learns only the number of the other pods' instances."""

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
    """Whether the kubelet assigns the CPUs; otherwise the command line does."""
    policy: CpuPolicy | None
    """The policy of the kubelet's CPU Manager; ``null`` while decisions are frozen."""
    claims: bool
    """Whether a DRA driver gives CPUs to pods, or may do so."""
    shared_pool: CpuList | None
    """``null`` while decisions are frozen."""
    frozen: str | None
    """The reason why decisions are frozen; ``null`` if they are not."""
    partitions: str
    """``enforced``, or the reason why no instance can be sealed."""
    arranged: list[ArrangedDocument]
    handovers: list[HandoverDocument]
    faults: list[str]
    """The faults found in the last pass, a sentence each."""
    remedies: NotRequired[dict[str, str]]
    """A fault → its remedy, for those that have one."""
    disturbances: list[str] | None
    """Causes of disturbance of the instances' CPUs other than threads; ``null`` for a container, because they name other pods."""
    oom_kills: dict[str, int]
    """The uid of a pod → the number of processes that the kernel has ended in its float for lack of memory."""
    without_seccomp: list[str]
    """The uids of the pods that may write the files of their groups."""
    trusting: bool
    """Whether the claims of callers are trusted without proof (``--insecure-trust-peer``)."""
