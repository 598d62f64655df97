"""Everything that is read of a host and its pod before anything is decided: frozen values, no I/O."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Self

import attrs

from runner.cpuset import CpuSet
from runner.facts.descriptor import DescriptorFact
from runner.facts.disk import DocumentFact, FileFact
from runner.facts.hardware import Hardware
from runner.facts.memory import MemoryLimits
from runner.facts.network import Interface, Resolver

if TYPE_CHECKING:  # few guests have PCI devices, and the classes of their facts cost PID 1 two milliseconds
    from runner.facts.pci import VfioFacts


@attrs.frozen
class User:
    """A user that a child runs as; *groups* are its supplementary groups."""

    name: str
    user_id: int
    group_id: int
    groups: tuple[int, ...] = ()


ROOT = User("root", 0, 0)


@attrs.frozen
class Virtiofsd:
    """The installed virtiofsd: the one in C that came with QEMU up to 7.2, or the one in Rust after it."""

    path: PurePosixPath
    rust: bool
    version: tuple[int, ...]

    @classmethod
    def parse(cls, path: PurePosixPath, output: str) -> Self | None:
        """Parse the output of ``virtiofsd --version``, ``None`` if it is not understood.

        ``virtiofsd 1.13.2`` is the one in Rust, ``virtiofsd version 7.2.22 …`` QEMU's in C.
        """
        match = re.match(r"virtiofsd (?:backend )?(version )?v?([0-9]+(?:\.[0-9]+)*)", output)
        if match is None:
            return None
        return cls(path, rust=match[1] is None, version=tuple(int(part) for part in match[2].split(".")))

    @property
    def read_only(self) -> bool:
        """Whether it can share read-only (``--readonly``, since 1.11)."""
        return self.rust and self.version >= (1, 11)


@attrs.frozen
class Kvm:
    """The state of ``/dev/kvm``."""

    error: str | None
    """Why it cannot be used; ``None`` when the kernel answered ``KVM_GET_API_VERSION`` with 12."""
    group_id: int = 0
    mode: int = 0
    trial: str | None = None
    """Why no virtual machine could be created with it; ``None`` when one was, or when that was not tried."""

    @property
    def admits_everyone(self) -> bool:
        """Whether any user may use it."""
        wanted = stat.S_IROTH | stat.S_IWOTH
        return self.mode & wanted == wanted

    @property
    def admits_group(self) -> bool:
        """Whether a group that is not root's may use it."""
        wanted = stat.S_IRGRP | stat.S_IWGRP
        return self.mode & wanted == wanted and self.group_id != 0


@attrs.frozen
class PodQos:
    """The QoS class of the Kubernetes pod that this process is in."""

    qos: str = ""
    """``guaranteed``, ``burstable``, ``besteffort``, or empty when it cannot be seen from inside."""
    evidence: str = ""
    """How it is known, as a clause of a message."""


@attrs.frozen
class PodName:
    """The names of the pod, as far as its manifest sets them (Downward API); a missing one is empty."""

    name: str = ""
    namespace: str = ""
    node: str = ""
    """The Kubernetes node that the pod runs on."""
    pod_uid: str = ""

    def to_json(self) -> dict[str, str]:
        """Return it as the placement receipt holds it."""
        return {"name": self.name, "namespace": self.namespace, "node": self.node, "uid": self.pod_uid}


@attrs.frozen
class HostFacts:
    """Everything that a plan needs to know of the host and the pod."""

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
    """The command that preallocates guest memory; :mod:`runner.kernel.preallocate` describes its arguments."""
    qemu: PurePosixPath | None = None
    dnsmasq: PurePosixPath | None = None
    sleep: PurePosixPath | None = None
    virtiofsd: Virtiofsd | None = None
    virtiofsd_error: str = "not found"
    files: Mapping[PurePosixPath, FileFact] = attrs.field(factory=dict)
    """The files and directories that the spec names, and the backing files of its disks."""
    documents: Mapping[PurePosixPath, DocumentFact] = attrs.field(factory=dict)
    """The files that the spec's cloud-init section names."""
    users: Mapping[str, User] = attrs.field(factory=dict)
    """The users that the plan may choose from, as far as they exist, by name."""
    kvm: Kvm = Kvm("not found")
    io_uring_error: str | None = "it was not looked for"
    """Why ``io_uring`` cannot be used; tried only when a disk names it."""
    cpu_vendor: str = ""
    """CPUID's vendor, such as ``GenuineIntel``; empty where the kernel does not say."""
    tun: bool = True
    """Whether /dev/net/tun may be used; asked only when there are networks."""
    vhost_net: bool = False
    passt: PurePosixPath | None = None
    ipv6_error: str | None = None
    """Why new links of this network namespace have no IPv6; ``None`` when they do."""
    descriptors: Mapping[str, DescriptorFact] | None = None
    """The inherited descriptors, by name; ``None`` where only a plan is wanted and none are taken over."""
    vhost_vsock: bool = False
    """Asked only when the guest is to have a vsock device."""
    interfaces: Mapping[str, Interface] = attrs.field(factory=dict)
    """The interfaces that the spec's networks use, as far as they exist, by name."""
    resolver: Resolver = attrs.field(factory=Resolver)
    pod: PodQos | None = None
    """``None`` outside Kubernetes."""
    pod_name: PodName = PodName()
    online_cpus: CpuSet = attrs.field(factory=CpuSet)
    """The machine's; read only in a pod."""
    cpu_time: float | None = None
    """The least ``cpu.max`` of its cgroups, as a number of CPUs; ``None`` without a limit."""
    container_uid: str | None = None
    """What the node's controller knows this container by: the pod's UID, without a kubelet the container's id."""
    pod_uid: str | None = None
    """The pod's UID; ``None`` outside Kubernetes. Read only for cloud-init."""
    controller_error: str | None = "it was not looked for"
    """Why the node's controller cannot be used; ``None`` when the directory of its socket is here."""
    controller_remedy: str = ""
    delegation_error: str | None = "it was not looked for"
    """Why cgroups cannot be made in this process's own cgroup; ``None`` when they can."""
    vfio: VfioFacts | None = None
    """Read only when the spec has devices."""
