"""An observation of instances at one moment: frozen values, which :mod:`runner.inspect.rules` judges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.facts.memory_limits import MemoryCharge
from runner.inspect.cpu_settings import CpuSettings
from runner.placement.backends import Backend, GuaranteeKind
from runner.placement.children import Role
from runner.placement.threads import ObservedThread, ThreadRules

Viewpoint = Literal["container", "node"]
"""The place from which instances are observed."""


@frozen
class Unknown:
    """A value that could not be observed; *reason* gives the cause, and the place from which it can be observed."""

    reason: str


@frozen
class ObservedGuarantee:
    """The guarantee that keeps other tasks off the vCPUs' CPUs."""

    kind: GuaranteeKind | None
    """``enforced``: the instance's cgroup is an isolated partition, so that no other cpuset has these CPUs.

    ``arranged``: other tasks have masks or cpusets without them, and strays are moved. ``None``: it cannot be seen from here.
    """
    reason: str = ""
    """The reason why it is not enforced, or unknown."""

    def __str__(self) -> str:
        return f"guarantee {self.kind or 'unknown'}" + (f" ({self.reason})" if self.reason else "")


@frozen
class PodCharge:
    """The memory charged to a pod's cgroup."""

    cgroup: str
    amount: MemoryCharge


@frozen
class GuestMemory:
    """The guest's RAM that QEMU has mapped: NUMA node → bytes, in small pages and in hugetlb pages."""

    small: Mapping[int, int]
    huge: Mapping[int, int]
    bound: CpuSet = attrs.field(factory=CpuSet)
    """The NUMA nodes that it is bound to; empty if it is not bound."""
    remote_bytes: int = 0
    """Bytes of it on NUMA nodes other than those they are bound to."""


@frozen
class InstanceObservation:
    """One instance."""

    name: str
    """The spec's name for it, or its pod's if the spec has none; its uuid on the node if neither is visible."""
    backend: Backend
    guarantee: ObservedGuarantee
    rules: ThreadRules
    """The rules for its threads' places; without pins if it has no vCPU thread and their number is unknown."""
    numa_node_of: Mapping[int, int]
    """CPU → NUMA node, for the whole machine; empty if that is hidden."""
    threads: tuple[ObservedThread, ...]
    """The threads of all its processes."""
    others: tuple[ObservedThread, ...]
    """The visible threads of other processes that may run on the exclusive CPUs."""
    hidden: str
    """The reason why there may be more such threads than are visible; empty if all are."""
    memory: GuestMemory | Unknown
    charge: PodCharge | Unknown
    settings: CpuSettings | None = None
    """The machine's settings for its CPUs; ``None`` where they are not read: in the container."""
    pod: str = ""
    """Namespace and name of its pod, ``prod/web-1``; empty if unknown."""
    pod_uid: str = ""
    """Its pod's UID; empty if unknown."""
    uptime: float | None = None
    """Seconds since QEMU was started; ``None`` without QEMU."""
    reported: Mapping[str, object] | None = None
    """Its report to the controller (``listInstances``); ``None`` if there is none, or the controller is absent."""

    @property
    def cpus(self) -> CpuSet:
        """The exclusive CPUs: the vCPUs' own."""
        return self.rules.cpus

    @property
    def numa_nodes(self) -> CpuSet:
        """The NUMA nodes of the exclusive CPUs."""
        return CpuSet(self.numa_node_of[cpu] for cpu in self.cpus if cpu in self.numa_node_of)

    @property
    def vcpu_threads(self) -> tuple[ObservedThread, ...]:
        """The vCPU threads."""
        return tuple(each for each in self.threads if each.role is Role.VCPU)


@frozen
class KubeletObservation:
    """The CPUs that the kubelet has assigned, and those of the cgroups below the controller's root."""

    floats: tuple[CpuSet, ...]
    """``cpuset.cpus.effective`` of each instance's float."""
    shared_pool: CpuSet
    """``defaultCpuSet``; under policy none every CPU outside of resource claims."""
    online: CpuSet
    instances: Mapping[str, CpuSet]
    """Instance → ``cpuset.cpus.effective`` of its cgroup."""
    given: Mapping[str, CpuSet] | None
    """Pod UID → its exclusive CPUs; ``None`` under policy none without claims for CPUs."""
    by_claims: bool = False
    """Whether the policy is none, so that some CPUs of the shared pool may be reserved, which no file shows."""

    @property
    def wanted(self) -> CpuSet:
        """The CPUs that float should have: none of an instance whose threads outlive its pod, unless no other CPU is left."""
        pool = self.shared_pool & self.online
        held = CpuSet.union(self.instances.values())
        return pool - held or pool

    @property
    def float_cpus(self) -> CpuSet:
        """The CPUs of the first float that differs from :attr:`wanted`; if none does, those of all."""
        return next(
            (cpus for cpus in self.floats if not self._follows(cpus)), self.floats[0] if self.floats else self.wanted
        )

    @property
    def is_followed(self) -> bool:
        """Return whether every float has the wanted CPUs."""
        return all(map(self._follows, self.floats))

    def _follows(self, cpus: CpuSet) -> bool:
        return cpus == self.wanted or (self.by_claims and cpus <= self.wanted)


@frozen
class Observation:
    """Everything that was observed."""

    seen_from: Viewpoint
    instances: tuple[InstanceObservation, ...]
    kubelet: KubeletObservation | Unknown
