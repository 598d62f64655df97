"""What was read from a host before anything is decided: plain values, made by ``instance/discover.py``."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

import attrs

from runner.cpuset import CpuSet
from runner.facts.hardware import Hardware

if TYPE_CHECKING:  # few guests have devices of their own, and eight classes cost PID 1 two milliseconds
    from runner.facts.pci import VfioFacts


@attrs.frozen
class ImageFact:
    """What a disk image says of itself."""

    format: str
    """``raw`` or ``qcow2``, by the file's first bytes."""
    size: int = 0
    """Bytes the guest sees."""
    backing: PurePosixPath | None = None
    """The file it takes data from: the real path of what its header names, seen from the directory it lies in."""
    backing_format: str | None = None
    """What that file holds, as the header says; old images do not say it."""
    locked: bool = False
    """Another process holds QEMU's image lock for writing (``block/file-posix.c``: byte ranges 100 and 200)."""
    trouble: str | None = None
    """Why it cannot be used at all, in words: encryption, damage, an external data file."""


@attrs.frozen
class FileFact:
    """A path that the spec names."""

    kind: str
    """``file``, ``directory``, ``block``, ``character``, ``other`` or ``missing``."""
    size: int = 0
    """Bytes; of a block device, its capacity."""
    trouble: str | None = None
    """Why it cannot be opened as asked (reading, or reading and writing), in the kernel's words."""
    everyone_reads: bool = True
    """Whether its mode lets any user read it."""
    image: ImageFact | None = None
    """Of a disk only, like the rest."""
    direct: bool = False
    """It can be read past the page cache (``O_DIRECT``): tried."""
    sparse: bool = False
    """A file with holes: writing to it may have to find room on the disk."""
    sectors: tuple[int, int] = (512, 512)
    """Bytes of a logical and of a physical block; of a block device the kernel's word."""

    @property
    def words(self) -> str:
        """What it is, as the end of a sentence."""
        if self.kind == "other" and self.trouble is not None:
            return f"cannot be looked at ({self.trouble})"
        return {
            "file": "is a file",
            "directory": "is a directory",
            "block": "is a block device",
            "character": "is a character device",
        }.get(self.kind, "is something special")


MISSING = FileFact("missing")


@attrs.frozen
class DocumentFact:
    """A small file that the spec names, whole."""

    content: bytes = attrs.field(default=b"", repr=False)
    trouble: str | None = None
    """Why it was not read."""


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

    trouble: str | None
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
class Route:
    """A route through one interface, in the main table."""

    destination: IPv4Network | IPv6Network
    gateway: IPv4Address | IPv6Address | None = None
    source: IPv4Address | IPv6Address | None = None
    metric: int = 0
    onlink: bool = False
    """The gateway is reachable although no address of the interface covers it."""
    protocol: int = 3
    """Who made it (``RTPROT_*``); kept, like *metrics*, so that it can be given back as it was."""
    metrics: str = ""
    """Its MTU, window and so on, as the kernel gave them."""


@attrs.frozen
class PermanentNeighbour:
    """A permanent entry of an interface's neighbour table."""

    address: str
    mac: str


@attrs.frozen
class Interface:
    """A network interface as it was found, with all that is needed to give it back."""

    name: str
    mac: str
    mtu: int
    addresses: tuple[IPv4Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    broadcast: bool = False
    """Whether its addresses came with their subnet's broadcast address."""
    addresses6: tuple[IPv6Interface, ...] = ()
    """The global ones that are there for good; not those that a router's advertisements made."""
    routes6: tuple[Route, ...] = ()
    neighbours: tuple[PermanentNeighbour, ...] = ()
    several_ways: tuple[str, ...] = ()
    """The destinations of routes over several gateways, of which this interface is one."""


@attrs.frozen
class DescriptorFact:
    """A descriptor that was handed to us, as the kernel describes it."""

    kind: str
    """``tap``, ``macvtap``, ``vhost-net``, ``socket``, ``file``, ``block`` or ``other``."""
    said: str
    """The same in words."""
    writable: bool = True
    """Whether it may be read and written."""
    size: int = 0
    """Bytes, of a file or block device."""
    interface: str = ""
    """The name of a tap or macvtap."""
    mac: str = ""
    """Its MAC address; a macvtap hands on only what is sent to that."""
    multi_queue: bool = False
    declared: str | None = None
    """What the agent that sent it says it is."""


@attrs.frozen
class Resolver:
    """What ``/etc/resolv.conf`` says."""

    nameservers: tuple[IPv4Address, ...] = ()
    search: tuple[str, ...] = ()
    nameservers6: tuple[IPv6Address, ...] = ()


class DiskFacts(Protocol):
    """What a disk's plan needs to know."""

    @property
    def files(self) -> Mapping[PurePosixPath, FileFact]:
        """What was found at the paths of disks, and at those of the files their data comes from."""

    @property
    def io_uring_trouble(self) -> str | None:
        """Why ``io_uring`` cannot be used."""


@attrs.frozen
class LateDiskFacts:
    """What was read about a disk that is attached while the machine runs."""

    files: Mapping[PurePosixPath, FileFact]
    io_uring_trouble: str | None


@attrs.frozen
class HugeFact:
    """What this process may have of the huge pages of one size, beside what is free on each NUMA node."""

    limit: int | None = None
    """Bytes: the least ``hugetlb.<size>.max`` and ``.rsvd.max`` of its cgroups; ``None`` without a limit."""
    promised: int = 0
    """Pages that are free and yet others' (``resv_hugepages``): mapped, and not touched yet."""


@attrs.frozen
class MemoryLimits:
    """What bounds the memory of this process."""

    memory: int | None = None
    """Bytes: the least ``memory.max`` of its cgroups; ``None`` without a limit."""
    huge: Mapping[int, HugeFact] = attrs.field(factory=dict)
    """By page size in bytes, every size that the host knows."""
    lockable: int | None = None
    """Bytes that a process we start may lock without CAP_IPC_LOCK, once we have raised its limit as far as we may; ``None``
    without a limit. Looked at only when something is to be locked."""
    may_lock: bool = False
    """This process has CAP_IPC_LOCK, and so has QEMU if it runs as root."""


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
    limits: MemoryLimits = MemoryLimits()
    preallocator: tuple[str, ...] = ()
    """How the program that touches the guest's pages is started; :mod:`runner.kernel.preallocate` says what it takes."""
    qemu: PurePosixPath | None = None
    dnsmasq: PurePosixPath | None = None
    sleep: PurePosixPath | None = None
    virtiofsd: Virtiofsd | None = None
    virtiofsd_trouble: str = "not found"
    files: Mapping[PurePosixPath, FileFact] = attrs.field(factory=dict)
    documents: Mapping[PurePosixPath, DocumentFact] = attrs.field(factory=dict)
    users: Mapping[str, User] = attrs.field(factory=dict)
    """The users asked about, those that exist."""
    kvm: Kvm = Kvm("not found")
    io_uring_trouble: str | None = "it was not looked for"
    """Why ``io_uring`` cannot be used; asked only when a disk names it."""
    cpu_vendor: str = ""
    """CPUID's vendor, such as ``GenuineIntel``; empty where the kernel does not say."""
    tun: bool = True
    """Whether /dev/net/tun may be used; asked only when there are networks."""
    vhost_net: bool = False
    passt: PurePosixPath | None = None
    ipv6_trouble: str | None = None
    """Why new links of this network namespace have no IPv6; ``None`` when they do."""
    descriptors: Mapping[str, DescriptorFact] | None = None
    """What was handed to us, by name; ``None`` where nothing is taken over, because only a plan is wanted."""
    vhost_vsock: bool = False
    """Asked only when the guest is to have a vsock device."""
    interfaces: Mapping[str, Interface] = attrs.field(factory=dict)
    """The interfaces asked about, those that exist."""
    resolver: Resolver = Resolver()
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
    controller_trouble: str | None = "it was not looked for"
    """Why the node's controller cannot be used; ``None`` when the directory of its socket is here."""
    delegation_trouble: str | None = "it was not looked for"
    """Why groups cannot be made in this process's own cgroup; ``None`` when they can."""
    vfio: VfioFacts | None = None
    """Looked at only when the spec has devices."""
