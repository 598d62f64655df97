"""Everything that was read of a host and its pod before anything is decided: frozen values, no I/O."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import attrs

from runner.cpuset import CpuSet
from runner.facts.descriptor import DescriptorFact
from runner.facts.disk import DocumentFact, FileFact
from runner.facts.hardware import Hardware
from runner.facts.memory import MemoryLimits
from runner.facts.network import Interface, Resolver

if TYPE_CHECKING:  # few guests have devices of their own, and eight classes cost PID 1 two milliseconds
    from runner.facts.pci import VfioFacts


@attrs.frozen
class User:
    """A user a child runs as; *groups* are its supplementary groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


ROOT = User("root", 0, 0)


@attrs.frozen
class Virtiofsd:
    """The virtiofsd found: the one in C that came with QEMU up to 7.2, or the one in Rust after it."""

    path: PurePosixPath
    rust: bool
    version: tuple[int, ...]

    @property
    def read_only(self) -> bool:
        """Whether it can share read-only (``--readonly``, since 1.11)."""
        return self.rust and self.version >= (1, 11)


@attrs.frozen
class Kvm:
    """The state of ``/dev/kvm``."""

    error: str | None
    """Why it cannot be used; ``None`` when the kernel answered ``KVM_GET_API_VERSION`` with 12."""
    gid: int = 0
    mode: int = 0
    trial: str | None = None
    """Why no virtual machine could be made with it; ``None`` when one was, or when nobody asked."""

    @property
    def admits_everyone(self) -> bool:
        """Whether any user may use it."""
        wanted = stat.S_IROTH | stat.S_IWOTH
        return self.mode & wanted == wanted

    @property
    def admits_group(self) -> bool:
        """Whether a group that is not root's may use it."""
        wanted = stat.S_IRGRP | stat.S_IWGRP
        return self.mode & wanted == wanted and self.gid != 0


@attrs.frozen
class PodQos:
    """What can be seen, from inside, of the Kubernetes pod this process is in."""

    qos: str = ""
    """``guaranteed``, ``burstable``, ``besteffort``, or empty when it cannot be seen."""
    evidence: str = ""
    """By what it is known, in words."""


@attrs.frozen
class PodName:
    """Who the pod is, as far as Kubernetes was asked to say it (Downward API); each empty where it was not."""

    name: str = ""
    namespace: str = ""
    node: str = ""
    uid: str = ""


@attrs.frozen
class HostFacts:
    """Everything a plan needs to know of the host and the pod."""

    allowed_cpus: CpuSet
    """The CPUs this process may use (``sched_getaffinity``)."""
    hardware: Hardware
    memory_nodes: CpuSet
    """The NUMA nodes this process may take memory from (``Mems_allowed_list``)."""
    memory: int
    """Bytes the pod may use: the smallest of the machine's RAM and the memory limits of its cgroups."""
    state_directory: PurePosixPath
    limits: MemoryLimits = attrs.field(factory=MemoryLimits)
    preallocator: tuple[str, ...] = ()
    """How the program that touches the guest's pages is started; :mod:`runner.kernel.preallocate` says what it takes."""
    qemu: PurePosixPath | None = None
    dnsmasq: PurePosixPath | None = None
    sleep: PurePosixPath | None = None
    virtiofsd: Virtiofsd | None = None
    virtiofsd_error: str = "not found"
    files: Mapping[PurePosixPath, FileFact] = attrs.field(factory=dict)
    documents: Mapping[PurePosixPath, DocumentFact] = attrs.field(factory=dict)
    users: Mapping[str, User] = attrs.field(factory=dict)
    """The users asked about, those that exist."""
    kvm: Kvm = Kvm("not found")
    io_uring_error: str | None = "it was not looked for"
    """Why ``io_uring`` cannot be used; asked only when a disk names it."""
    cpu_vendor: str = ""
    """CPUID's vendor, such as ``GenuineIntel``; empty where the kernel does not say."""
    tun: bool = True
    """Whether /dev/net/tun may be used; asked only when there are networks."""
    vhost_net: bool = False
    passt: PurePosixPath | None = None
    ipv6_error: str | None = None
    """Why new links of this network namespace have no IPv6; ``None`` when they do."""
    descriptors: Mapping[str, DescriptorFact] | None = None
    """What was handed to us, by name; ``None`` where nothing is taken over, because only a plan is wanted."""
    vhost_vsock: bool = False
    """Asked only when the guest is to have a vsock device."""
    interfaces: Mapping[str, Interface] = attrs.field(factory=dict)
    """The interfaces asked about, those that exist."""
    resolver: Resolver = attrs.field(factory=Resolver)
    pod: PodQos | None = None
    """``None`` outside Kubernetes."""
    pod_name: PodName = PodName()
    online_cpus: CpuSet = attrs.field(factory=CpuSet)
    """The machine's; asked only in a pod."""
    cpu_time: float | None = None
    """The least ``cpu.max`` of its cgroups, as a number of CPUs; ``None`` without a limit."""
    uid: str | None = None
    """What the node's controller knows this container by: the pod's UID, without a kubelet the container's id."""
    pod_uid: str | None = None
    """The pod's UID; ``None`` outside Kubernetes. Asked only when the guest is told who it is (cloud-init)."""
    controller_error: str | None = "it was not looked for"
    """Why the node's controller cannot be used; ``None`` when the directory of its socket is here."""
    controller_remedy: str = ""
    delegation_error: str | None = "it was not looked for"
    """Why groups cannot be made in this process's own cgroup; ``None`` when they can."""
    vfio: VfioFacts | None = None
    """Looked at only when the spec has devices."""
