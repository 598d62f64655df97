"""The controller's cgroup tree as values (pure): as observed, as desired, as requested, and the actions that change it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.controller.tree.limits import (
    MEMORY_MAX,
    MIB,
    NO_LIMIT,
    Limits,
)
from runner.kubelet.pod_cgroups import float_group, instance_group, vcpus_group

ROOT = ""
PARENT = ".."

MEMBER, ISOLATED = "member", "isolated"
"""``cpuset.cpus.partition`` of a group that is no partition, and of an isolated one."""

BELOW = ("cpu", "pids")
"""The controllers that a domain switches on for its children, besides cpuset."""


def groups_below(pod_uid: str) -> tuple[str, str]:
    """Return the two groups below the domain of *pod_uid*."""
    return float_group(pod_uid), vcpus_group(pod_uid)


@frozen
class Group:
    """The float or the vCPUs' group of an instance, as observed."""

    cpus: CpuSet
    """``cpuset.cpus``; empty if nothing was written, or while the cpuset controller is off."""
    mems: CpuSet
    effective: CpuSet
    """``cpuset.cpus.effective``."""
    threaded: bool
    """Whether its ``cgroup.type`` is that; a new group is "domain invalid"."""
    populated: bool
    """Whether it has a live member, or a child group that a pod has made; then it cannot be removed."""
    limits: Mapping[str, str] = attrs.field(factory=dict)
    """Control file → value, for the limits that the kernel offers here."""
    exclusive: CpuSet = attrs.field(factory=CpuSet)
    """``cpuset.cpus.exclusive``."""
    partition: str = MEMBER
    """``cpuset.cpus.partition``."""

    @property
    def was_sealed(self) -> bool:
        """Return whether it is an isolated partition, or was one until the kernel invalidated it.

        If its parent lost the CPUs, the kernel silently makes it a member (``remote_partition_check``).
        """
        return self.partition != MEMBER or bool(self.exclusive)


@frozen
class Domain:
    """The group that has an instance's limits, as observed."""

    enabled: frozenset[str] = frozenset()
    """``cgroup.subtree_control``."""
    cpus: CpuSet = attrs.field(factory=CpuSet)
    """``cpuset.cpus``, which is to be empty."""
    exclusive: CpuSet = attrs.field(factory=CpuSet)
    limits: Mapping[str, str] = attrs.field(factory=dict)
    oom_kills: int = 0
    """Processes that the kernel has ended because the domain was out of memory."""
    charged: int = 0
    """Bytes charged to it; read only if nothing runs in it."""
    processes: int = 0
    """Processes that have ended and count in it until their parents have waited for them; read only if nothing runs in it."""
    removed: int = 0
    """Groups below it that were removed, and that the kernel keeps for what still refers to them; read only if nothing runs in it."""

    @property
    def charged_mebibytes(self) -> int:
        """The least ``memory.max``, in whole MiB, for which the kernel need not reclaim anything."""
        return -(-self.charged // MIB) * MIB

    @property
    def memory_max(self) -> int | None:
        """The bytes granted to it; ``None`` if it has no limit yet."""
        text = self.limits.get(MEMORY_MAX, NO_LIMIT)
        return int(text) if text.isdecimal() else None


@frozen
class Observed:
    """The tree as observed."""

    offered: frozenset[str]
    """The controllers available in the parent."""
    delegated: frozenset[str]
    """The controllers enabled in the parent's ``cgroup.subtree_control``."""
    exists: bool
    enabled: frozenset[str] = frozenset()
    """The root's ``cgroup.subtree_control``."""
    cpus: CpuSet = attrs.field(factory=CpuSet)
    mems: CpuSet = attrs.field(factory=CpuSet)
    domains: Mapping[str, Domain] = attrs.field(factory=dict)
    """Pod UID → its domain."""
    groups: Mapping[str, Group] = attrs.field(factory=dict)
    """The floats and the vCPUs' groups by their paths below the root; others are not read."""
    limits: Mapping[str, str] = attrs.field(factory=dict)
    """Control file → value, for the root's limits that the kernel offers."""
    memory_used: int = 0
    """Bytes charged to the root."""
    gone: frozenset[str] = frozenset()
    """The UIDs of pods that have a domain here but no cgroup of their own any more. A pod that the kubelet still names is included only if
    nothing but its domain is left."""
    overdue: frozenset[str] = frozenset()
    """The UIDs of pods whose CPUs the kubelet has given to others so long ago that their instances should have ended."""
    reclaimed: frozenset[str] = frozenset()
    """The UIDs of pods that have nothing left but the domain, after the kernel has reclaimed as much of its memory as it could."""
    exclusive: CpuSet | None = None
    """The root's ``cpuset.cpus.exclusive``; ``None`` if the kernel has no remote partitions."""
    outdated: Mapping[str, bool] = attrs.field(factory=dict)
    """Name of each threaded group directly below the root → whether it is populated; no domain can have processes beside one."""

    def instances(self) -> Mapping[str, Group]:
        """Return the vCPUs' groups by the pods' UIDs."""
        return {uid: self.groups[vcpus_group(uid)] for uid in sorted(self.domains) if vcpus_group(uid) in self.groups}

    def floats(self) -> Mapping[str, Group]:
        """Return the floats by the pods' UIDs."""
        return {uid: self.groups[float_group(uid)] for uid in sorted(self.domains) if float_group(uid) in self.groups}

    def is_left_over(self, pod_uid: str) -> bool:
        """Tell whether the domain of *pod_uid* has no groups any more, and exists only for what is charged to it."""
        return not any(path in self.groups for path in groups_below(pod_uid))

    def left_over(self, more: int) -> Iterator[str]:
        """Yield the pods that have nothing left but the domain, if more than *more* bytes are charged to it."""
        return (uid for uid, each in self.domains.items() if each.charged > more and self.is_left_over(uid))

    def shares_float(self, pod_uid: str) -> bool:
        """Tell whether the vCPUs' group of *pod_uid* has only CPUs of its float, as after :func:`evictions`."""
        vcpus, float_cgroup = self.groups.get(vcpus_group(pod_uid)), self.groups.get(float_group(pod_uid))
        return vcpus is not None and float_cgroup is not None and bool(vcpus.cpus) and vcpus.cpus <= float_cgroup.cpus


@frozen
class Desired:
    """The desired tree."""

    cpus: CpuSet
    """All CPUs of the machine."""
    mems: CpuSet
    """All its memory nodes."""
    shared_pool: CpuSet
    """The CPUs for float, except those that instances still hold."""
    choices: Mapping[str, tuple[CpuSet, ...]]
    """Pod UID → the possible cpusets, one of each of its containers."""
    complete: bool
    """Whether *choices* names all existing pods, so that an empty instance missing in it is stale."""
    limits: Limits = attrs.field(factory=Limits)
    partitions: bool = True
    """Whether an instance may be an isolated partition."""
    kills: bool = True
    """Whether the remains of a pod without a cgroup are ended; otherwise they are moved to float: without a kubelet the cgroup is a
    container's, which the runtime may remove with its last anchor while the guest runs."""


@frozen
class Requested:
    """The properties of an instance that a request sets in a pass; those that are ``None`` stay as they are."""

    cpus: CpuSet | None = None
    """The CPUs granted to it. The caller has made sure that none is another instance's (:func:`holders`)."""
    memory: int | None = None
    """Bytes for its domain."""
    memory_nodes: CpuSet | None = None
    """The memory nodes of its pod's own cgroup."""
    sealed: bool | None = None
    """Whether it is an isolated partition, as long as a thread is in its group."""


def granted(requests: Mapping[str, Requested]) -> Mapping[str, CpuSet]:
    """Return the CPUs granted in *requests*, by the pods' UIDs."""
    return {pod_uid: each.cpus for pod_uid, each in requests.items() if each.cpus is not None}


@frozen
class Make:
    """Create a group."""

    group: str


@frozen
class Remove:
    """Remove a group, if it is still empty."""

    group: str


@frozen
class Write:
    """Write *value* to *file* of a group."""

    group: str
    file: str
    value: str


@frozen
class Restrict:
    """Write a limit, or enable the controller for one. The tree works without it, so a failure stops nothing."""

    group: str
    file: str
    value: str


@frozen
class Kill:
    """End every process in the domain of pod *pod_uid*."""

    pod_uid: str

    @property
    def group(self) -> str:
        """The domain."""
        return instance_group(self.pod_uid)


@frozen
class Evict:
    """Move the threads that are in the vCPUs' group of pod *pod_uid* to its float.

    The groups that the pod has made below are emptied in the same way, and removed.
    """

    pod_uid: str

    @property
    def group(self) -> str:
        """The vCPUs' group."""
        return vcpus_group(self.pod_uid)


@frozen
class Seal:
    """Make a group of vCPUs an isolated partition of *cpus*. The instance works without it, so a failure stops nothing."""

    group: str
    cpus: CpuSet
    together: CpuSet
    """The CPUs of all sealed instances, which the root must have exclusively before."""


@frozen
class Unseal:
    """Make a group of vCPUs a member of its parent's partition again; neither it nor its domain then has exclusive CPUs."""

    group: str


Action = Make | Remove | Write | Restrict | Kill | Evict | Seal | Unseal
