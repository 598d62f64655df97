"""What was seen of instances at one moment: frozen values, which :mod:`runner.inspect.rules` judges."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from runner.cpuset import CpuSet
from runner.facts.memory import MemoryCharge
from runner.kernel.procfs import ThreadStatus

ANCHOR = "anchor"
EMULATOR = "emulator"
IOTHREAD = "iothread"
OTHER = "other"
RUNNER = "runner"
SANDBOX = "sandbox"
VCPU = "vcpu"


@attrs.frozen
class Unknown:
    """Something could not be seen, and *reason* says why and from where it can."""

    reason: str


@attrs.frozen
class ObservedThread:
    """One thread and what it is for."""

    role: str
    """``runner``, ``anchor``, ``dnsmasq``, ``virtiofsd``, ``emulator``, ``iothread``, ``vcpu``;
    ``sandbox`` (a pod's ``pause``), ``other``."""
    vcpu: int | None
    """The vCPU's index, where it is known."""
    thread: ThreadStatus
    kernel: bool = False
    """It is the kernel's."""

    @property
    def title(self) -> str:
        """The role, with the vCPU's index."""
        return self.role if self.vcpu is None else f"{self.role} {self.vcpu}"


@attrs.frozen
class GuestMemory:
    """The guest's RAM as far as QEMU has mapped it: NUMA node → bytes, in small pages and in hugetlb pages."""

    small: Mapping[int, int]
    huge: Mapping[int, int]
    bound: CpuSet = attrs.field(factory=CpuSet)
    """The NUMA nodes that it is bound to; empty where that is so for none of it."""
    remote_bytes: int = 0
    """Bytes of it that lie elsewhere than they are bound to."""


@attrs.frozen
class InstanceObservation:
    """One instance."""

    name: str
    """Its uuid on the node; ``instance`` in its own container, which does not know it."""
    backend: str
    """How it is placed: ``controller``, ``delegated`` or ``affinity``."""
    cpus: CpuSet
    """The exclusive CPUs: what the vCPUs own."""
    numa_node_of: Mapping[int, int]
    """CPU → NUMA node, for the whole machine; empty where that is hidden."""
    cgroup: str
    """How the path of the vCPU threads' cgroup ends; empty where the back end has none."""
    vcpus: int | None
    """How many vCPUs there are, where somebody wrote it down."""
    threads: tuple[ObservedThread, ...]
    """The threads of all its processes."""
    others: tuple[ObservedThread, ...]
    """Threads of other processes, as far as they can be seen, that may run on the exclusive CPUs."""
    hidden: str
    """Why there may be more of these than could be seen; empty when all were."""
    memory: GuestMemory | Unknown
    charge: MemoryCharge | Unknown
    pod_cgroup: str = ""
    """The path of the cgroup that *charge* is of, the pod's; empty where it is not known."""

    @property
    def numa_nodes(self) -> CpuSet:
        """The NUMA nodes of the exclusive CPUs."""
        return CpuSet(self.numa_node_of[cpu] for cpu in self.cpus if cpu in self.numa_node_of)

    @property
    def vcpu_threads(self) -> tuple[ObservedThread, ...]:
        """The vCPU threads."""
        return tuple(each for each in self.threads if each.role == VCPU)


@attrs.frozen
class KubeletObservation:
    """What the kubelet has shared out, and what the cgroups below the controller's root have of it."""

    float_cpus: CpuSet
    """``cpuset.cpus.effective`` of float."""
    shared_pool: CpuSet
    """``defaultCpuSet``; every CPU under policy none."""
    online: CpuSet
    instances: Mapping[str, CpuSet]
    """Instance → ``cpuset.cpus.effective`` of its cgroup."""
    given: Mapping[str, CpuSet] | None
    """Pod uid → its exclusive CPUs; ``None`` under policy none."""


@attrs.frozen
class Observation:
    """Everything that was looked at."""

    seen_from: str
    """``container`` or ``node``."""
    instances: tuple[InstanceObservation, ...]
    kubelet: KubeletObservation | Unknown
