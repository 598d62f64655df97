"""The schema of an instance's document: what a user may ask for.

An attribute's name is the key in the document. A key that takes one of a few words has a ``Literal`` of them.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Literal, get_args

import attrs

from runner.cpuset import CpuSet
from runner.errors import Problem, SpecError
from runner.spec.rules import (
    DESCRIPTOR_NAME,
    MIB,
    address,
    choice,
    cpu_set,
    descriptor_names,
    document,
    documents,
    either,
    expanded,
    flag,
    format_size,
    integer,
    key,
    mac,
    parse_document,
    path,
    path_or,
    paths,
    rule_of,
    seconds,
    settings,
    size,
    structure,
    subnet,
    subnet6,
    table,
    tables,
    text,
    variables,
)

WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
WORD_ALLOWED = "up to 63 letters, digits, '.', '_' and '-', the first a letter or digit"
TAG = r"[A-Za-z0-9_.-]{1,35}"
PCI_ADDRESS = r"[0-9a-f]{4,6}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]"
LEAST_MEMORY = 32 * MIB
UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"

PlacementChoice = Literal["auto", "controller", "delegated", "affinity"]
PinningChoice = Literal["auto", "packed-siblings", "linear"]
TopologyChoice = Literal["host", "flat"]
AccelChoice = Literal["auto", "kvm", "tcg"]
HugePageSize = Literal["2MiB", "1GiB"]
FirmwareBuild = Literal["uefi", "uefi-secure"]
DiskFormat = Literal["raw", "qcow2"]
CacheChoice = Literal["auto", "none", "writeback", "writethrough"]
AioChoice = Literal["auto", "native", "io_uring", "threads"]
DetectZeroes = Literal["off", "on", "unmap"]
NetworkMode = Literal["private", "bridge", "macvtap", "passt", "descriptor"]
IommuChoice = Literal["auto", "legacy", "iommufd"]
ClockBase = Literal["utc", "localtime"]
WatchdogAction = Literal["reset", "exit", "nmi", "none"]
RebootAction = Literal["reset", "exit"]


@attrs.frozen
class IdentitySpec:
    """The instance's names."""

    name: str = key(
        text(WORD, WORD_ALLOWED),
        default="instance",
        doc="its name in logs, in QEMU's process title and in derived MAC addresses",
    )
    uuid: str | None = key(
        text(UUID, "a UUID in lower case"),
        default=None,
        doc="the SMBIOS UUID the guest sees; without it QEMU gives none",
    )
    user: str = key(
        text(r"auto|[a-z_][a-z0-9_-]{0,31}", 'a user name, or "auto"'),
        default="auto",
        doc='whom QEMU runs as; `"auto"` is the first of `qemu`, `libvirt-qemu` and `nobody` that exists',
    )


@attrs.frozen
class CpuSpec:
    """The vCPUs and the CPUs they own."""

    count: int | Literal["all"] = key(
        either("all", integer(1, 1024)),
        default=1,
        doc="number of vCPUs; each gets one CPU to itself. "
        '`"all"`: as many as the container has CPUs; where everything else runs there too, one core less',
    )
    cpus: CpuSet | None = key(
        cpu_set(),
        default=None,
        doc="the CPUs the vCPUs own; without it, of those this process may use, whole cores of few NUMA nodes",
    )
    placement: PlacementChoice = key(
        choice(*get_args(PlacementChoice)),
        default="auto",
        doc='how threads are kept apart: by the node\'s `"controller"`, by cgroups in the container\'s own one (`"delegated"`), '
        'by `sched_setaffinity` alone (`"affinity"`), or by the best way that works here (`"auto"`)',
    )
    controller: PurePosixPath = key(
        path(),
        default=PurePosixPath("/run/instance-cgroup-controller/controller.sock"),
        doc="the socket of the node's controller",
    )
    sweep: bool = key(
        flag(),
        default=True,
        doc="whether what others start in the container (`kubectl exec`, probes) is moved to float within a second; "
        "without cgroups there is nothing to sweep",
    )
    pinning: PinningChoice = key(
        choice(*get_args(PinningChoice)),
        default="auto",
        doc='`"packed-siblings"`: vCPUs of one guest core sit on siblings; `"linear"`: vCPU *i* on the *i*-th CPU; '
        '`"auto"`: the first for whole cores, else the second',
    )
    topology: TopologyChoice = key(
        choice(*get_args(TopologyChoice)),
        default="host",
        doc='what the guest sees: `"host"`: sockets, L3 caches, threads and NUMA nodes as its vCPUs really lie; '
        '`"flat"`: one socket of cores',
    )
    accel: AccelChoice = key(
        choice(*get_args(AccelChoice)),
        default="auto",
        doc='`"kvm"`, `"tcg"` (software), or `"auto"`: KVM when /dev/kvm is usable',
    )
    model: str | None = key(
        text(r"[A-Za-z0-9_.,=+-]{1,200}", "a QEMU CPU model"),
        default=None,
        doc="QEMU's CPU model; `host` under KVM (on AMD with `topoext` where the guest has siblings), `max` under TCG",
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if self.cpus is not None and self.count == "all":
            yield Problem(
                "count", '"all" and cpu.cpus contradict each other', f"say {len(self.cpus)}, or leave cpu.cpus out"
            )
        elif self.cpus is not None and len(self.cpus) != self.count:
            yield Problem(
                "cpus",
                f"{str(self.cpus)!r} are {len(self.cpus)} CPUs, but cpu.count asks for {self.count} vCPUs",
            )


@attrs.frozen
class MemorySpec:
    """The guest's RAM."""

    size: int | Literal["limits"] = key(
        either("limits", size(LEAST_MEMORY)),
        default=512 * MIB,
        doc='how much; `"limits"`: what the limits of the container\'s cgroup leave (`hugetlb.<size>.max`, else `memory.max` '
        "without what is needed beside the guest)",
    )
    bind: bool = key(
        flag(),
        default=True,
        doc="whether it comes from the NUMA nodes its vCPUs sit on, and from nowhere else (`mbind(2)`)",
    )
    hugepages: HugePageSize | None = key(
        choice(*get_args(HugePageSize)),
        default=None,
        doc="the size of the huge pages it consists of; ordinary pages without it",
    )
    prealloc: bool | None = key(
        flag(),
        default=None,
        doc='whether all of it is taken before the guest runs; without it, with placement `"controller"`, huge pages, lock or `[[device]]`',
    )
    lock: bool = key(flag(), default=False, doc="whether QEMU locks it, and all else it has, in memory (`mlockall(2)`)")
    shared: bool = key(
        flag(),
        default=True,
        doc="whether others can map it, as virtiofsd must; anonymous memory, which is not, gets transparent huge pages "
        "more readily",
    )

    @property
    def page_size(self) -> int | None:
        """The size of the huge pages in bytes; ``None`` without them."""
        return None if self.hugepages is None else {"2MiB": 2 * MIB, "1GiB": 1024 * MIB}[self.hugepages]


@attrs.frozen
class BootSpec:
    """What the machine boots: a kernel directly, or a disk through firmware."""

    kernel: PurePosixPath | None = key(path(), default=None, doc="a Linux kernel to start directly")
    initrd: PurePosixPath | None = key(path(), default=None, doc="its initial RAM disk")
    cmdline: str | None = key(
        text(), default=None, doc="its command line; `console=ttyS0` shows it on the serial console"
    )
    firmware: PurePosixPath | FirmwareBuild | None = key(
        path_or(*get_args(FirmwareBuild)),
        default=None,
        doc='a firmware image mapped as flash, such as OVMF_CODE.fd; `"uefi"`: the one that is installed; `"uefi-secure"`: with '
        "Secure Boot and Microsoft's keys; SeaBIOS without it",
    )
    firmware_vars: PurePosixPath | None = key(
        path(),
        default=None,
        doc="the file that keeps the firmware's variables, written by the guest; made from the firmware's own empty store "
        "when it is missing. Without it they are forgotten at the end",
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if self.kernel is None:
            for name in ("initrd", "cmdline"):
                if getattr(self, name) is not None:
                    yield Problem(name, "needs boot.kernel: only a directly started kernel takes it")
        if self.firmware_vars is not None and self.firmware is None:
            yield Problem("firmware_vars", "needs boot.firmware")


@attrs.frozen
class DiskSpec:
    """A virtio disk; the order of disks is the order they are tried for booting."""

    path: PurePosixPath | None = key(path(), default=None, doc="a file or block device; or else `fd`")
    fd: str | None = key(
        text(DESCRIPTOR_NAME, "the name of a descriptor"),
        default=None,
        doc="the descriptor of a file or block device that is handed to us; opened again by what it is",
    )
    format: DiskFormat = key(choice(*get_args(DiskFormat)), default="raw", doc="what the file holds")
    read_only: bool = key(flag(), default=False, doc="whether the guest is kept from writing")
    serial: str | None = key(
        text(r"[A-Za-z0-9_-]{1,20}", "up to 20 letters, digits, '_' and '-'"),
        default=None,
        doc="its serial number in the guest",
    )
    ephemeral: bool = key(
        flag(),
        default=False,
        doc="whether what the guest writes goes to a file without a name in the state directory and ends with the instance; "
        "`path` is only read, and others may read it too",
    )
    ephemeral_size: int | None = key(
        size(MIB),
        default=None,
        doc="the most that what it writes may take; more is an I/O error in the guest. Without it: as much as the disk holds",
    )
    backing: tuple[PurePosixPath, ...] = key(
        paths(),
        default=(),
        doc="directories in which the files lie that a qcow2 image takes data from; without them such an image is refused",
    )
    cache: CacheChoice = key(
        choice(*get_args(CacheChoice)),
        default="auto",
        doc='`"none"`: past the page cache (`O_DIRECT`); `"writeback"`: through it; `"writethrough"`: every write of the guest is on '
        'stable storage when it ends; `"auto"`: `"none"` where the file system can do it',
    )
    aio: AioChoice = key(
        choice(*get_args(AioChoice)),
        default="auto",
        doc='how QEMU reads and writes: `"native"` (`io_submit(2)`, cache `"none"` only), `"io_uring"`, or worker threads; '
        '`"auto"`: `"native"` for what takes no allocation (block devices, files without holes), else `"threads"`',
    )
    discard: bool = key(
        flag(),
        default=True,
        doc="whether what the guest discards is given back: holes in files, `BLKDISCARD` for devices",
    )
    detect_zeroes: DetectZeroes = key(
        choice(*get_args(DetectZeroes)),
        default="off",
        doc='whether zeroes the guest writes are looked for and written cheaply (`"on"`), or discarded (`"unmap"`)',
    )
    iothread: bool = key(
        flag(), default=False, doc="whether a thread of its own serves it, beside QEMU's main thread; it runs in float"
    )

    @property
    def file(self) -> PurePosixPath:
        """The file or block device; ``fd:NAME`` for a descriptor that has not been handed over yet."""
        return PurePosixPath(f"fd:{self.fd}") if self.path is None else self.path

    @property
    def writes(self) -> bool:
        """Whether the file or block device itself is written to."""
        return not self.read_only and not self.ephemeral

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if self.ephemeral:
            if self.read_only:
                yield Problem("read_only", "goes with a disk that is kept; ephemeral = true never writes to path")
            for name in ("cache", "aio"):
                if getattr(self, name) != "auto":
                    yield Problem(name, "goes with a disk that is kept; what an ephemeral one writes need not survive")
        elif self.ephemeral_size is not None:
            yield Problem("ephemeral_size", "needs ephemeral = true")
        if self.backing and self.format != "qcow2":
            yield Problem("backing", 'goes with format = "qcow2"; a raw image takes data from no other file')
        if self.aio == "native" and self.cache not in {"auto", "none"}:
            yield Problem(
                "aio", f'"native" needs cache = "none", not "{self.cache}": io_submit(2) waits for the page cache'
            )
        if self.detect_zeroes == "unmap" and not self.discard:
            yield Problem("detect_zeroes", '"unmap" needs discard = true')


@attrs.frozen
class HotplugSpec:
    """What can change while the guest runs."""

    disks: int = key(
        integer(0, 16),
        default=4,
        doc="how many disks `instance-runner ctl disk attach` can add: each takes a PCI Express root port, there from the start",
    )


@attrs.frozen
class NetworkSpec:
    """A virtio network interface."""

    mode: NetworkMode = key(
        choice(*get_args(NetworkMode)),
        default="private",
        doc='`"private"`: a subnet of its own; `"bridge"`: the guest takes over the pod interface\'s address; `"macvtap"`: a MAC '
        'address of its own on the network behind an interface; `"passt"`: what the pod reaches, without privilege; '
        '`"descriptor"`: a tap, macvtap or socket that is handed to us',
    )
    interface: str | None = key(
        text(r"[!-.0-9;-~]{1,15}", "the name of a network interface"),
        default=None,
        doc='`"bridge"` and `"macvtap"` only: the pod interface; `eth0` without it',
    )
    subnet: ipaddress.IPv4Network | None = key(
        subnet(),
        default=None,
        doc='`"private"` only: first address ours, second the guest\'s; `192.168.77.0/24` and the next ones without it',
    )
    address: ipaddress.IPv4Address | None = key(
        address(), default=None, doc='`"private"` only: another address of its subnet for the guest'
    )
    ipv6: bool = key(
        flag(),
        default=False,
        doc='whether the guest gets an IPv6 address too: `"private"`: by advertisement and DHCPv6; '
        '`"bridge"`: the pod interface\'s, by DHCPv6',
    )
    subnet6: ipaddress.IPv6Network | None = key(
        subnet6(),
        default=None,
        doc="`\"private\"` only: first address ours, second the guest's; else a unique local one derived from the instance's name",
    )
    mac: str | None = key(
        mac(),
        default=None,
        doc="the guest's MAC address; else the pod interface's, or one derived from the instance's name",
    )
    mtu: int | None = key(
        integer(576, 65521),
        default=None,
        doc="the guest's MTU; else the pod interface's, with `\"passt\"` 65520, else 1500",
    )
    queues: int | None = key(
        integer(1, 64),
        default=None,
        doc="pairs of queues, each with a vhost thread of its own; else as many as vCPUs, up to 8, and one for each descriptor",
    )
    fd: tuple[str, ...] = key(
        descriptor_names(),
        default=(),
        doc='`"descriptor"` only: the tap, macvtap or stream socket; one name for each queue',
    )
    vhost_fd: tuple[str, ...] = key(
        descriptor_names(),
        default=(),
        doc='`"descriptor"` only: the vhost-net of each queue; else ours, if /dev/vhost-net is here',
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        for name, modes in NETWORK_KEYS.items():
            if getattr(self, name) not in {None, (), False} and self.mode not in modes:
                words = " or ".join(f'"{mode}"' for mode in modes)
                yield Problem(name, f'goes with mode = {words}, not with "{self.mode}"')
        if self.subnet6 is not None and not self.ipv6:
            yield Problem("subnet6", "needs ipv6 = true")
        if self.mode == "descriptor":
            yield from self._descriptor_contradictions()
        if self.mode == "passt" and self.queues not in {None, 1}:
            yield Problem("queues", "passt has one pair of queues")

    def _descriptor_contradictions(self) -> Iterator[Problem]:
        if not self.fd:
            yield Problem("fd", "is missing", 'mode = "descriptor" needs the name of one')
        if self.vhost_fd and len(self.vhost_fd) != len(self.fd):
            yield Problem(
                "vhost_fd", f"names {len(self.vhost_fd)}, but fd names {len(self.fd)}; each queue has one of both"
            )
        if self.queues is not None and self.queues != len(self.fd):
            yield Problem("queues", f"is {self.queues}, but fd names {len(self.fd)}", "leave it out")


NETWORK_KEYS: dict[str, tuple[NetworkMode, ...]] = {
    "interface": ("bridge", "macvtap"),
    "subnet": ("private",),
    "address": ("private",),
    "ipv6": ("private", "bridge"),
    "subnet6": ("private",),
    "fd": ("descriptor",),
    "vhost_fd": ("descriptor",),
}
"""Key → the modes that it belongs to."""


@attrs.frozen
class DescriptorsSpec:
    """Descriptors that another program opened for this one."""

    socket: PurePosixPath | None = key(
        path(),
        default=None,
        doc="the socket of an agent of the host that hands over descriptors; without it they are inherited (`LISTEN_FDS`)",
    )


@attrs.frozen
class ShareSpec:
    """A directory shared with the guest by virtiofs."""

    tag: str = key(
        text(TAG, "up to 35 letters, digits, '.', '_' and '-'"),
        doc="the name the guest mounts: `mount -t virtiofs TAG /mnt`",
    )
    path: PurePosixPath = key(path(), doc="the directory")
    read_only: bool = key(flag(), default=False, doc="whether the guest is kept from writing (virtiofsd 1.11 or later)")


DEVICE_PROPERTIES = {
    "x-nv-gpudirect-clique": integer(0, 15),
    "x-no-geforce-quirks": flag(),
    "x-no-mmap": flag(),
    "x-no-kvm-intx": flag(),
    "x-no-kvm-msi": flag(),
    "x-no-kvm-msix": flag(),
    "x-intx-mmap-timeout-ms": integer(0, 60000),
    "x-msix-relocation": choice("off", "auto", *(f"bar{number}" for number in range(6))),
    "x-pci-sub-vendor-id": integer(0, 0xFFFF),
    "x-pci-sub-device-id": integer(0, 0xFFFF),
}
"""The properties of QEMU's ``vfio-pci`` that a document may set: every QEMU from 7.2 to 10 has these."""


@attrs.frozen
class DeviceSpec:
    """A PCI device of the host that becomes the guest's own (VFIO)."""

    address: str | None = key(
        text(PCI_ADDRESS, 'a PCI address in lower case, such as "0000:41:00.0"'),
        default=None,
        doc="the device, by where it is",
    )
    resource: str | None = key(
        text(r"[A-Za-z0-9.-]{1,253}/[A-Za-z0-9_.-]{1,63}", 'a resource of Kubernetes, such as "nvidia.com/GH100"'),
        default=None,
        doc="the devices that a device plugin has put into the environment for this resource "
        "(`PCI_RESOURCE_NVIDIA_COM_GH100`, `PCIDEVICE_…`)",
    )
    count: int | None = key(
        integer(1, 64), default=None, doc="how many of the resource's devices; without it, all that are left"
    )
    iommu: IommuChoice = key(
        choice(*get_args(IommuChoice)),
        default="auto",
        doc='how QEMU gets it: by its IOMMU group (`"legacy"`), by descriptors (`"iommufd"`, QEMU 9.0 or later), or by the '
        'better way that works (`"auto"`)',
    )
    properties: tuple[tuple[str, object], ...] = key(
        settings(DEVICE_PROPERTIES), default=(), doc="further properties of QEMU's `vfio-pci`"
    )
    rom: bool = key(flag(), default=False, doc="whether the guest sees its option ROM, as booting from a NIC takes")

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if (self.address is None) == (self.resource is None):
            yield Problem("", "takes either an address or a resource, and one of them")
        if self.count is not None and self.resource is None:
            yield Problem("count", "goes with a resource; an address is one device")


@attrs.frozen
class ConsoleSpec:
    """The guest's serial console."""

    stdout: bool = key(flag(), default=True, doc="whether it appears on standard output, where `kubectl logs` finds it")
    log: PurePosixPath | None = key(
        path(), default=None, doc="the file it is written to; `console.log` in the state directory without it"
    )
    log_size: int = key(
        size(MIB),
        default=4 * MIB,
        doc="when the file would hold more it is moved aside to `….1`, in the place of the one before",
    )


@attrs.frozen
class DisplaySpec:
    """The guest's screen."""

    vnc: bool = key(
        flag(),
        default=False,
        doc="whether it has one (VGA), shown by VNC to whoever connects to `vnc.sock` in the state directory",
    )


@attrs.frozen
class GuestSpec:
    """Devices that serve the guest."""

    agent: bool = key(
        flag(),
        default=True,
        doc="whether there is a channel for QEMU's guest agent, which is asked to shut the guest down before its power button is "
        "pressed, if it is there",
    )
    clock: ClockBase = key(
        choice(*get_args(ClockBase)),
        default="utc",
        doc='what the hardware clock shows; `"localtime"` (the time zone of the container) is for Windows',
    )
    vsock: int | Literal["auto"] | None = key(
        either("auto", integer(3, (1 << 32) - 2), first=True),
        default=None,
        doc='the context identifier of a vsock device, which no other guest of the node may have; `"auto"`: one that is free',
    )
    watchdog: WatchdogAction | None = key(
        choice(*get_args(WatchdogAction)),
        default=None,
        doc="a watchdog (i6300esb), and what follows when the guest feeds it no more: it is reset, the instance ends, it gets an "
        "NMI, or the log says so and no more",
    )


@attrs.frozen
class CloudInitSpec:
    """The data that cloud-init in the guest reads; an empty table is enough for a seed."""

    user_data: PurePosixPath | str | None = key(
        document(), default=None, doc="its user-data: `#cloud-config`, a script, MIME, …"
    )
    ssh_keys: tuple[PurePosixPath | str, ...] = key(
        documents(), default=(), doc="public keys that may log in as the image's default user; a file may hold several"
    )
    hostname: str | None = key(
        text(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", "a host name"),
        default=None,
        doc="the guest's host name; else the instance's name",
    )
    meta_data: PurePosixPath | str | None = key(
        document(), default=None, doc="its meta-data, YAML or JSON, in the place of ours with id, host name and keys"
    )
    network_config: PurePosixPath | str | None = key(
        document(),
        default=None,
        doc="its network-config, YAML or JSON; else DHCP on each network, known by its MAC address",
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if self.meta_data is not None:
            for name, given in (("ssh_keys", self.ssh_keys), ("hostname", self.hostname)):
                if given:
                    yield Problem(name, "goes into cloud_init.meta_data when that is given")


@attrs.frozen
class ShutdownSpec:
    """How the instance ends."""

    grace: float = key(
        seconds(1, 3600),
        default=30.0,
        doc="seconds the whole power-down may take; keep it 10 s below terminationGracePeriodSeconds, which network, shares and the "
        "controller may take then",
    )
    on_reboot: RebootAction = key(
        choice(*get_args(RebootAction)),
        default="reset",
        doc='when the guest reboots: `"reset"` restarts it in place, `"exit"` ends the instance',
    )
    poweroff_status: int = key(
        integer(0, 124),
        default=10,
        doc="exit status when the guest shuts itself down; 0 makes it a success for `restartPolicy: OnFailure`",
    )


@attrs.frozen
class EnvironmentSpec:
    """The variables of the runner's environment that the document may use."""

    allow: tuple[str, ...] = key(
        variables(),
        default=(),
        doc="what `${NAME}` in a string of this document may name; without this table `$` means nothing, "
        "with it `${` is written `$${`",
    )


@attrs.frozen
class InstanceSpec:
    """The whole document."""

    instance: IdentitySpec = key(table(IdentitySpec), default=IdentitySpec(), doc="who it is")
    cpu: CpuSpec = key(table(CpuSpec), default=CpuSpec(), doc="vCPUs and the CPUs they own")
    memory: MemorySpec = key(table(MemorySpec), default=MemorySpec(), doc="RAM")
    boot: BootSpec = key(table(BootSpec), default=BootSpec(), doc="what it starts")
    disk: tuple[DiskSpec, ...] = key(tables(DiskSpec), default=(), doc="virtio disks")
    hotplug: HotplugSpec = key(table(HotplugSpec), default=HotplugSpec(), doc="what can change while it runs")
    network: tuple[NetworkSpec, ...] = key(tables(NetworkSpec), default=(), doc="virtio network interfaces")
    descriptors: DescriptorsSpec = key(
        table(DescriptorsSpec), default=DescriptorsSpec(), doc="what is handed to us already open"
    )
    share: tuple[ShareSpec, ...] = key(tables(ShareSpec), default=(), doc="directories shared by virtiofs")
    device: tuple[DeviceSpec, ...] = key(
        tables(DeviceSpec), default=(), doc="PCI devices of the host that become the guest's own"
    )
    console: ConsoleSpec = key(table(ConsoleSpec), default=ConsoleSpec(), doc="the serial console")
    display: DisplaySpec = key(table(DisplaySpec), default=DisplaySpec(), doc="the screen")
    guest: GuestSpec = key(table(GuestSpec), default=GuestSpec(), doc="what else the machine has for the guest")
    cloud_init: CloudInitSpec | None = key(
        table(CloudInitSpec), default=None, doc="what cloud-init in the guest is told"
    )
    shutdown: ShutdownSpec = key(table(ShutdownSpec), default=ShutdownSpec(), doc="how it ends")
    environment: EnvironmentSpec = key(
        table(EnvironmentSpec), default=EnvironmentSpec(), doc="what it may take from its environment"
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict keys of other tables."""
        if self.boot.kernel is None and self.boot.firmware is None and not self.disk:
            yield Problem("boot", "nothing to start", "name boot.kernel, or give it a [[disk]]")
        yield from _repeated("share", "tag", (share.tag for share in self.share))
        yield from _repeated("disk", "serial", (disk.serial for disk in self.disk))
        yield from _repeated("device", "address", (device.address for device in self.device))
        yield from _repeated("network", "mac", (network.mac for network in self.network))
        yield from _networks(self.network)
        yield from _repeated_descriptors(self.disk, self.network)
        for index, disk in enumerate(self.disk):
            if (disk.fd is None) == (disk.path is None):
                yield Problem(f"disk[{index}].path", "takes an absolute path, or else fd names a descriptor")
        writable = {disk.path for disk in self.disk if disk.writes and disk.fd is None}
        for index, disk in enumerate(self.disk):
            if disk.path in writable and any(other.path == disk.path for other in self.disk[:index]):
                yield Problem(f"disk[{index}].path", f"{str(disk.path)!r} is given twice and one of them is writable")


def _networks(networks: tuple[NetworkSpec, ...]) -> Iterator[Problem]:
    """Yield contradictions between networks."""
    given = (((each.interface or "eth0") if each.mode == "bridge" else None) for each in networks)
    yield from _repeated("network", "interface", given)
    bridged = {each.interface or "eth0" for each in networks if each.mode == "bridge"}
    for index, network in enumerate(networks):
        if network.mode == "macvtap" and (network.interface or "eth0") in bridged:
            yield Problem(
                f"network[{index}].interface", 'has mode = "bridge" on it already; a link is one or the other'
            )
    subnets = [
        private_subnet(index, network) if network.mode == "private" else None for index, network in enumerate(networks)
    ]
    for index, mine in enumerate(subnets):
        for earlier, other in enumerate(subnets[:index]):
            if mine is not None and other is not None and mine.overlaps(other):
                yield Problem(f"network[{index}].subnet", f"{mine} overlaps {other} of network[{earlier}]")
        address = networks[index].address
        if (
            mine is not None
            and address is not None
            and not (address in mine and mine[1] < address < mine.broadcast_address)
        ):
            yield Problem(
                f"network[{index}].address", f"{address} is not a guest's address of {mine}; the first one is ours"
            )


def _repeated_descriptors(disks: tuple[DiskSpec, ...], networks: tuple[NetworkSpec, ...]) -> Iterator[Problem]:
    """Yield the descriptors that are named twice."""
    names = [(disk.fd, f"disk[{index}].fd") for index, disk in enumerate(disks) if disk.fd is not None]
    for index, network in enumerate(networks):
        names += [(name, f"network[{index}].fd") for name in network.fd]
        names += [(name, f"network[{index}].vhost_fd") for name in network.vhost_fd]
    seen: dict[str, str] = {}
    for name, where in names:
        if name in seen:
            yield Problem(where, f"the descriptor {name!r} is taken by {seen[name]} already")
        seen.setdefault(name, where)


def private_subnet(index: int, network: NetworkSpec) -> ipaddress.IPv4Network:
    """Return the subnet of the private *network*, which is ``network[index]``."""
    first = ipaddress.IPv4Network("192.168.77.0/24")
    nth = int(first.network_address) + index * first.num_addresses
    return network.subnet or ipaddress.IPv4Network((nth, first.prefixlen))


def _repeated(table_name: str, name: str, values: Iterable[Hashable]) -> Iterator[Problem]:
    seen: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if value is not None and seen.setdefault(value, index) != index:
            yield Problem(f"{table_name}[{index}].{name}", f"{value!r} is taken by {table_name}[{seen[value]}] already")


NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})
"""The environment for a document that uses none."""


def parse_instance(source: str, data: bytes, environment: Mapping[str, str] = NO_ENVIRONMENT) -> InstanceSpec:
    """Parse and check a whole document; *source* is its name in errors.

    It can use the variables of *environment* that it declares. Raises :exc:`~runner.errors.SpecError` with every problem found.
    """
    problems: list[Problem] = []
    document = _with_environment(parse_document(source, data), environment, problems)
    if problems:  # a string with an unresolved variable would only cause further problems
        raise SpecError(source, problems)
    spec = structure(InstanceSpec, document, "", problems)
    if spec is None or problems:
        raise SpecError(source, problems)
    return spec


def declared_variables(source: str, data: bytes) -> tuple[str, ...]:
    """Return the variables that a document declares; none if the table is wrong, which :func:`parse_instance` reports."""
    declared = structure(EnvironmentSpec, parse_document(source, data).get("environment", {}), "environment", [])
    return () if declared is None else declared.allow


def _with_environment(
    document: dict[str, object], environment: Mapping[str, str], problems: list[Problem]
) -> dict[str, object]:
    if "environment" not in document:
        return document
    declared = structure(EnvironmentSpec, document["environment"], "environment", [])
    if declared is None:  # structure() reports it with the whole document
        return document
    for index, name in enumerate(declared.allow):
        if name not in environment:
            problems.append(
                Problem(
                    f"environment.allow[{index}]",
                    f"the environment has no {name}",
                    "set it in the pod (env:, fieldRef:) or on the command line",
                )
            )
    known = {name: environment.get(name, f"${{{name}}}") for name in declared.allow}
    return {
        name: value if name == "environment" else expanded(value, known, name, problems)
        for name, value in document.items()
    }


def reference() -> Iterator[tuple[str, str, str, str]]:
    """Yield ``(key, what it takes, default, meaning)`` for every key of the schema, in document order."""
    for table_name, schema, _ in _tables():
        for inner in attrs.fields(schema):
            default = _shown(inner.name, inner.default)
            yield f"{table_name}.{inner.name}", rule_of(inner).allowed, default, inner.metadata["doc"]


def tables_of_reference() -> dict[str, str]:
    """Return the meaning of each table of :func:`reference`, by the name it has there."""
    return {name: doc for name, _, doc in _tables()}


def _tables() -> Iterator[tuple[str, type, str]]:
    """Yield name, schema and meaning of each table; the name of an array of tables ends in ``[]``."""
    for attribute in attrs.fields(InstanceSpec):
        rule = rule_of(attribute)
        if rule.schema is not None:
            yield f"{attribute.name}[]" if rule.many else attribute.name, rule.schema, attribute.metadata["doc"]


def _shown(name: str, default: object) -> str:
    if default is attrs.NOTHING:
        return "required"
    if default in (None, ()):
        return "-"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return json.dumps(default)
    if name.endswith("size") and isinstance(default, int):
        return f'"{format_size(default)}"'
    return (
        f"{default:g}" if isinstance(default, float) else f'"{default}"' if isinstance(default, str) else str(default)
    )
