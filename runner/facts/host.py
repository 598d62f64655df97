"""The facts about a host and its pod that a plan is made from, as frozen values."""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, ip_address
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Self

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.facts.descriptor import DescriptorFact
from runner.facts.disk import DocumentFact, FileFact
from runner.facts.hardware import Hardware
from runner.facts.memory_limits import MemoryLimits

if TYPE_CHECKING:  # few guests have PCI devices, some have no network, and PID 1 pays for what it imports
    from runner.facts.json_types import PodDocument
    from runner.facts.network import Interface
    from runner.facts.pci import VfioFacts


PODS_USERS = range(0x70000000, 0x78000000)
"""The user ids from which each pod's QEMU gets one of its own; systemd's list of users (``UIDS-GIDS.md``) leaves them unused."""


@frozen
class User:
    """A user that a child process runs as."""

    name: str
    user_id: int
    group_id: int
    groups: tuple[int, ...] = ()
    """The ids of its supplementary groups."""

    def may_control(self, link_owners: Collection[int]) -> bool:
        """Tell whether a QEMU of this user, or of another pod, can have made a link of *link_owners*; a volume outlives its pods."""
        return any(each in PODS_USERS or each == self.user_id for each in link_owners if each != ROOT.user_id)


ROOT = User("root", 0, 0)


VIRTIOFSD_DIRECTORIES = ("/usr/libexec", "/usr/lib/qemu", "/usr/lib/virtiofsd", "/usr/lib")
"""Directories of distributions for it, besides PATH."""


Version = tuple[int, ...]


def parse_version(text: str) -> Version:
    """Parse a version of QEMU, such as ``7.2.22``, to its first two numbers; to none, less than any version, if it is unknown."""
    numbers = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", text, re.ASCII)
    return () if numbers is None else (int(numbers[1]), int(numbers[2]))


def format_version(version: Version) -> str:
    """Return *version* as its program prints it."""
    return ".".join(map(str, version))


@frozen
class Virtiofsd:
    """The installed virtiofsd: the one in C of QEMU up to 7.2, or its successor in Rust."""

    path: PurePosixPath
    rust: bool
    version: Version
    """The numbers of the version, such as ``(1, 13, 2)``; of the one in C they are QEMU's."""

    @classmethod
    def parse(cls, path: PurePosixPath, output: str) -> Self | None:
        """Parse the output of ``virtiofsd --version``; return ``None`` if it has an unknown form.

        The one in Rust prints ``virtiofsd 1.13.2``, the one in C ``virtiofsd version 7.2.22 …``.
        """
        match = re.match(r"virtiofsd (?:backend )?(version )?v?([0-9]{1,9}(?:\.[0-9]{1,9})*)", output)
        if match is None:
            return None
        return cls(path, rust=match[1] is None, version=tuple(int(part) for part in match[2].split(".")))

    @property
    def read_only(self) -> bool:
        """Return whether it can share read-only (``--readonly``, since 1.11)."""
        return self.rust and self.version >= (1, 11)

    @property
    def hands_over(self) -> bool:
        """Return whether it can transfer its state to another virtiofsd (``VHOST_USER_PROTOCOL_F_DEVICE_STATE``) in a short pause.

        1.11 can as well, but searches the whole share for the guest's files, while the guest is paused; from 1.12 on it reads their paths
        from ``/proc/self/fd`` (``preserialization/proc_paths.rs`` of virtiofsd).
        """
        return self.rust and self.version >= (1, 12)


@frozen
class Kvm:
    """The state of ``/dev/kvm``."""

    error: str | None
    """The reason why it cannot be used; ``None`` if ``KVM_GET_API_VERSION`` returned 12."""
    group_id: int = 0
    """The group that owns the file."""
    mode: int = 0
    """``st_mode`` of the file."""
    trial: str | None = None
    """The reason why ``KVM_CREATE_VM`` failed; ``None`` if it succeeded or was not tried."""
    most_vcpus: int = 0
    """The most vCPUs of a guest; 0 if unknown."""
    guest: str | None = None
    """The reason why a trial guest did not run to its end; ``None`` if it did, or if none was requested."""

    @property
    def admits_everyone(self) -> bool:
        """Return whether any user may read and write it."""
        bits = stat.S_IROTH | stat.S_IWOTH
        return self.mode & bits == bits

    @property
    def admits_group(self) -> bool:
        """Return whether its group, which is not root's, may read and write it."""
        bits = stat.S_IRGRP | stat.S_IWGRP
        return self.mode & bits == bits and self.group_id != 0


CONSOLE_LOG = "console.log"
"""The file for the console's output in the state directory, if the spec names no other."""

CLAIMED_CPUS = "DRA_CPUSET_"
"""The prefix of the environment variables, one for each resource claim, with which a DRA driver passes a container its CPUs.

A runner uses them only to explain its CPUs. The controller does not trust them: :mod:`runner.kubelet.claims`.
"""


IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""An environment variable that the kubelet sets in every container."""


@frozen
class PodQos:
    """The QoS class of the Kubernetes pod that this process is in."""

    qos: str = ""
    """``guaranteed``, ``burstable``, ``besteffort``, or empty if it cannot be read from inside the pod."""
    evidence: str = ""
    """The file or setting from which it is known, as a clause of a message."""
    claimed: CpuSet = attrs.field(factory=CpuSet)
    """The CPUs of the container's resource claims, according to its environment (:data:`CLAIMED_CPUS`)."""

    def has_claimed(self, allowed: CpuSet) -> bool:
        """Tell whether a resource claim contains the *allowed* CPUs, whatever the QoS class."""
        return bool(allowed) and allowed <= self.claimed


@frozen
class PodName:
    """The names that the pod's manifest puts into the environment (Downward API); empty if it does not."""

    name: str = ""
    namespace: str = ""
    node: str = ""
    """The Kubernetes node that the pod runs on."""
    pod_uid: str = ""

    def to_json(self) -> PodDocument:
        """Return the names under their keys in the placement receipt."""
        return {"name": self.name, "namespace": self.namespace, "node": self.node, "uid": self.pod_uid}


@frozen
class Resolver:
    """The content of ``/etc/resolv.conf``; the plan decides which parts a guest can use."""

    nameservers: tuple[IPv4Address, ...] = ()
    search: tuple[str, ...] = ()
    nameservers6: tuple[IPv6Address, ...] = ()
    options: tuple[str, ...] = ()
    """Its other words, such as ``ndots:5``."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``resolv.conf(5)``; malformed addresses and the root domain are ignored, as by the C library."""
        nameservers: list[IPv4Address | IPv6Address] = []
        search: tuple[str, ...] = ()
        options: list[str] = []
        for line in text.splitlines():
            word, *rest = line.split() or [""]
            if word == "nameserver" and rest:
                try:
                    address = ip_address(rest[0])
                except ValueError:
                    continue
                nameservers.append(address)
            elif word in {"search", "domain"}:
                search = tuple(name for name in rest if name != ".")
            elif word in {"options", "sortlist"}:
                options += rest
        return cls(
            tuple(each for each in nameservers if isinstance(each, IPv4Address)),
            search,
            tuple(each for each in nameservers if isinstance(each, IPv6Address)),
            tuple(options),
        )


@frozen
class HostFacts:
    """Everything that a plan needs to know about the host and the pod."""

    allowed_cpus: CpuSet
    """The CPUs of this process's cpuset, which are the container's."""
    hardware: Hardware
    memory_nodes: CpuSet
    """The NUMA nodes this process may take memory from (``Mems_allowed_list``)."""
    memory: int
    """Bytes that the pod may use: the smallest of the machine's RAM and the memory limits of its cgroups."""
    state_directory: PurePosixPath
    """The directory for this instance's sockets, logs and temporary files."""
    masked_cpus: CpuSet = attrs.field(factory=CpuSet)
    """The CPUs of the cpuset that are not in the mask with which this process was started (``sched_setaffinity(2)``)."""
    limits: MemoryLimits = attrs.field(factory=MemoryLimits)
    preallocator: tuple[str, ...] = ()
    """The command that preallocates guest memory; :mod:`runner.kernel.preallocate` describes its arguments."""
    # The programs below are None if they are not in PATH.
    qemu: PurePosixPath | None = None
    dnsmasq: PurePosixPath | None = None
    sleep: PurePosixPath | None = None
    virtiofsd: Virtiofsd | None = None
    virtiofsd_error: str = "not found"
    files: Mapping[PurePosixPath, FileFact] = attrs.field(factory=dict)
    """The files and directories that the spec names, and the backing files of its disks, by path."""
    in_shares: Mapping[PurePosixPath, PurePosixPath] = attrs.field(factory=dict)
    """Paths of the spec, and of the state directory, that lead through a writable share → the path of the share."""
    links: Mapping[PurePosixPath, frozenset[int]] = attrs.field(factory=dict)
    """The same paths, and those of the shares, that lead through symbolic links → the owners of these links."""
    documents: Mapping[PurePosixPath, DocumentFact] = attrs.field(factory=dict)
    """The files that the spec's table ``[cloud_init]`` names, by path."""
    users: Mapping[str, User] = attrs.field(factory=dict)
    """The existing ones of the users that the plan may choose, by name."""
    kvm: Kvm = Kvm("not found")
    io_uring_error: str | None = "it was not looked for"
    """The reason why ``io_uring`` cannot be used; tried only if a disk names it."""
    free_space: int | None = None
    """Bytes free on the volume of the state directory; ``None`` if it cannot be seen. Read only if a disk is ephemeral."""
    aio_free: int | None = None
    """Requests of native AIO that are free on the machine (``fs.aio-max-nr`` less ``fs.aio-nr``); read only with disks."""
    qemu_version: str = ""
    """QEMU's version; a start reads it only for PCI devices, for many vCPUs and with ``hotplug.qemu``. Empty if QEMU did not print it."""
    qemu_error: str | None = None
    """The reason why QEMU cannot be used; ``None`` if it can, or its version was not read."""
    address_bits: int = 0
    """The width of a physical address in bits; 0 where the kernel does not say."""
    cpu_models: frozenset[str] = frozenset()
    """QEMU's CPU models; read only if the spec names a model of its own, empty if QEMU did not list them."""
    cpu_model_error: str = ""
    """The end of a QEMU that refuses the spec's CPU model with its properties; tried only for a model with properties."""
    console_log_error: str | None = None
    """The reason why the spec's file for the console's output cannot be written; ``None`` if it can."""
    cpu_vendor: str = ""
    """The vendor string of CPUID, such as ``GenuineIntel``; empty where the kernel does not report it."""
    invariant_tsc: bool = False
    """Whether the time stamp counter of the CPUs runs at the same rate in every state of the CPU."""
    user_namespace: bool = False
    """Whether this process is in a user namespace other than the machine's first: its root is not the machine's."""
    machines_network: bool = False
    """Whether this process is in the machine's first network namespace: its interfaces are the machine's, not a container's."""
    os_release: str = ""
    """The text of os-release(5), by which messages name packages (:func:`runner.facts.packages.install`)."""
    machine_id: str = ""
    """The machine's id (machine-id(5), else its SMBIOS UUID); empty where neither can be read."""
    tun: bool = True
    """Whether /dev/net/tun can be opened; tried only if the spec has networks."""
    vhost_net: bool = False
    """Whether /dev/vhost-net can be opened; tried only if the spec has networks."""
    passt: PurePosixPath | None = None
    passt_error: str = ""
    """The error with which passt ends if it does not start here; empty if it starts, or no network needs it."""
    unprivileged_port: int = 0
    """The lowest port at which every process may listen (``net.ipv4.ip_unprivileged_port_start``)."""
    open_files: int = 1 << 20
    """The most files that a process may have open (``RLIMIT_NOFILE``, the hard limit)."""
    ipv6_error: str | None = None
    """The reason why new links of this network namespace have no IPv6; ``None`` if they have it."""
    descriptors: Mapping[str, DescriptorFact] | None = None
    """The inherited descriptors, by name; ``None`` for ``instance-runner plan``, which inherits none."""
    vhost_vsock: bool = False
    """Whether /dev/vhost-vsock can be opened; tried only if the spec has a vsock device."""
    interfaces: Mapping[str, Interface] = attrs.field(factory=dict)
    """The existing ones of the interfaces that the spec's networks use, by name."""
    addresses: Mapping[str, tuple[IPv4Interface, ...]] = attrs.field(factory=dict)
    """The IPv4 addresses of every interface of this network namespace but ours, by its name; read only for mode ``private``."""
    resolver: Resolver = attrs.field(factory=Resolver)
    pod: PodQos | None = None
    """``None`` outside Kubernetes."""
    pod_name: PodName = PodName()
    cpu_time: float | None = None
    """The smallest ``cpu.max`` of this process's cgroups, as a number of CPUs; ``None`` without a limit."""
    container_uid: str | None = None
    """The identifier of this container at the node's controller: the pod's UID, or without a kubelet the container's id."""
    pod_uid: str | None = None
    """The pod's UID; ``None`` outside Kubernetes, if it cannot be determined, or if no derived value needs it."""
    controller_error: str | None = "it was not looked for"
    """The reason why the node's controller cannot be used; ``None`` if the directory of its socket exists."""
    controller_remedy: str = ""
    delegation_error: str | None = "it was not looked for"
    """The reason why child cgroups cannot be created in this process's own cgroup; ``None`` if they can."""
    vfio: VfioFacts | None = None
    """Read only if the spec has devices."""


def parse_cpu_models(output: str) -> frozenset[str]:
    """Parse the names of CPU models in the *output* of ``-cpu help``; QEMU before 9 prefixes them with ``x86``."""
    listed, _, _ = output.partition("Recognized CPUID flags")
    words = (line.removeprefix("x86 ").split() for line in listed.splitlines()[1:])
    return frozenset(each[0] for each in words if each)
