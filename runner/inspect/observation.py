"""An observation of instances at one moment: frozen values, which :mod:`runner.inspect.rules` judges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.facts.memory import MemoryCharge
from runner.inspect.cpu_settings import CpuSettings
from runner.placement.backends import Backend, GuaranteeKind
from runner.placement.children import Role
from runner.placement.threads import ObservedThread, ThreadRules

Viewpoint = Literal["container", "node"]
"""From where instances are observed."""


@frozen
class Unknown:
    """A value that could not be observed; *reason* says why, and from where it can be."""

    reason: str


@frozen
class ObservedGuarantee:
    """The guarantee that keeps other tasks off the vCPUs' CPUs."""

    kind: GuaranteeKind | None
    """``enforced``: the instance's cgroup is an isolated partition, so that no other cpuset has these CPUs.

    ``arranged``: other tasks have masks or cpusets without them, and strays are moved. ``None``: it cannot be seen from here.
    """
    reason: str = ""
    """Why it is not enforced, or not known."""

    def __str__(self) -> str:
        return f"guarantee {self.kind or 'unknown'}" + (f" ({self.reason})" if self.reason else "")


@frozen
class PodCharge:
    """The memory that a pod's cgroup is charged for."""

    cgroup: str
    amount: MemoryCharge


@frozen
class GuestMemory:
    """The guest's RAM as far as QEMU has mapped it: NUMA node → bytes, in small pages and in hugetlb pages."""

    small: Mapping[int, int]
    huge: Mapping[int, int]
    bound: CpuSet = attrs.field(factory=CpuSet)
    """The NUMA nodes that it is bound to; empty where none of it is bound."""
    remote_bytes: int = 0
    """Bytes of it on other NUMA nodes than they are bound to."""


@frozen
class InstanceObservation:
    """One instance."""

    name: str
    """The spec's name for it, or its pod's where the spec names none; its uuid on the node where neither can be seen."""
    backend: Backend
    guarantee: ObservedGuarantee
    rules: ThreadRules
    """Where its threads may be; without pins where it has no vCPU thread and their number is not known."""
    numa_node_of: Mapping[int, int]
    """CPU → NUMA node, for the whole machine; empty where that is hidden."""
    threads: tuple[ObservedThread, ...]
    """The threads of all its processes."""
    others: tuple[ObservedThread, ...]
    """Threads of other processes, as far as they can be seen, that may run on the exclusive CPUs."""
    hidden: str
    """Why there may be more of these than can be seen; empty when all can be."""
    memory: GuestMemory | Unknown
    charge: PodCharge | Unknown
    settings: CpuSettings | None = None
    """The machine's settings for its CPUs; ``None`` where they are not read: in the container."""
    pod: str = ""
    """Namespace and name of its pod, ``prod/web-1``; empty where they are not known."""
    pod_uid: str = ""
    """Its pod's UID; empty where it is not known."""
    uptime: float | None = None
    """Seconds since QEMU was started; ``None`` without QEMU."""
    reported: Mapping[str, object] | None = None
    """What it has reported to its controller (``listInstances``); ``None`` if nothing, or if the controller is not there."""

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
    """``defaultCpuSet``; under policy none every CPU that is in no resource claim."""
    online: CpuSet
    instances: Mapping[str, CpuSet]
    """Instance → ``cpuset.cpus.effective`` of its cgroup."""
    given: Mapping[str, CpuSet] | None
    """Pod UID → its exclusive CPUs; ``None`` under policy none without claims for CPUs."""
    by_claims: bool = False
    """Whether that is policy none, so that some of the shared pool may be reserved, which no file says."""

    @property
    def wanted(self) -> CpuSet:
        """The CPUs for float: none of an instance whose threads outlive its pod, unless no other CPU is left."""
        pool = self.shared_pool & self.online
        held = CpuSet.union(self.instances.values())
        return pool - held or pool

    @property
    def float_cpus(self) -> CpuSet:
        """The CPUs of the first float that has others than it should; where none has, those of all."""
        return next(
            (cpus for cpus in self.floats if not self._follows(cpus)), self.floats[0] if self.floats else self.wanted
        )

    @property
    def is_followed(self) -> bool:
        """Return whether every float has them."""
        return all(map(self._follows, self.floats))

    def _follows(self, cpus: CpuSet) -> bool:
        return cpus == self.wanted or (self.by_claims and cpus <= self.wanted)


@frozen
class Observation:
    """Everything that was observed."""

    seen_from: Viewpoint
    instances: tuple[InstanceObservation, ...]
    kubelet: KubeletObservation | Unknown
