"""The schema of a spec, the document that describes one instance: its tables, keys, defaults and meanings.

Each class is a table and each attribute a key of it. ``doc=`` is user documentation, of which ``examples/SPEC.md`` is
generated. A key that takes one of a few words has the type ``Literal`` of these words.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Literal

from runner.base.cpuset import CpuSet
from runner.base.errors import Problem, SpecError
from runner.base.values import frozen
from runner.facts.descriptor import DESCRIPTOR_NAME
from runner.facts.roots import CONTROLLER_SOCKET
from runner.spec.document_parser import parse_document
from runner.spec.ports import EVERY_PORT, MOST_OF_ALL, PortForward
from runner.spec.readiness import AgentSign, PortSign, ReadySign, ready_sign
from runner.spec.rules import (
    MIB,
    Rule,
    address,
    choice,
    cpu_set,
    descriptor_names,
    document,
    documents,
    either,
    flag,
    integer,
    key,
    mac,
    path,
    path_or,
    paths,
    ports,
    seconds,
    settings,
    size,
    structure,
    subnet,
    subnet6,
    table,
    tables,
    text,
)
from runner.spec.variables import (
    NO_ENVIRONMENT,
    EnvironmentSpec,
    declared_variables,
    used_variables,
    variables_of,
    with_environment,
    with_variables,
)

WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
WORD_ALLOWED = "up to 63 letters, digits, '.', '_' and '-', the first a letter or digit"
TAG = r"[A-Za-z0-9_.-]{1,35}"
PCI_ADDRESS = r"[0-9a-f]{4,6}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]"
LEAST_MEMORY = 32 * MIB
UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"

PlacementChoice = Literal["auto", "controller", "delegated", "affinity"]
PinningChoice = Literal["auto", "packed-siblings", "linear"]
ExclusiveChoice = Literal["auto", "enforced"]
TopologyChoice = Literal["host", "flat"]
AccelChoice = Literal["auto", "kvm", "tcg", "tried"]
IdleChoice = Literal["host", "guest"]
LatencyChoice = Literal["default", "low"]
HugePageSize = Literal["2MiB", "1GiB"]
FirmwareBuild = Literal["uefi", "uefi-secure"]
DiskFormat = Literal["raw", "qcow2"]
CacheChoice = Literal["auto", "none", "writeback", "writethrough"]
AioChoice = Literal["auto", "native", "io_uring", "threads"]
DetectZeroes = Literal["off", "on", "unmap"]
NetworkMode = Literal["private", "bridge", "macvtap", "passt", "descriptor"]
MsixRelocation = Literal["off", "auto", "bar0", "bar1", "bar2", "bar3", "bar4", "bar5"]
IommuChoice = Literal["auto", "legacy", "iommufd"]
DeviceTopology = Literal["host", "numa", "flat"]
ClockBase = Literal["utc", "localtime"]
WatchdogAction = Literal["reset", "exit", "nmi", "none"]
RebootAction = Literal["reset", "exit"]


@frozen
class IdentitySpec:
    """The instance's names."""

    name: str = key(
        text(WORD, WORD_ALLOWED),
        default="instance",
        doc="the instance's name in logs and in QEMU's process title",
    )
    uuid: str | None = key(
        text(UUID, "a UUID in lower case"),
        default=None,
        doc="the SMBIOS UUID that the guest sees. MAC addresses are derived from it, so that they stay the same in its next pod. "
        "Without it the guest sees no UUID, and they are derived from the pod's UID",
    )
    user: str = key(
        text(r"auto|[a-z_][a-z0-9_-]{0,31}", 'a user name, or "auto"'),
        default="auto",
        doc='the user that QEMU runs as; `"auto"`: the first of `qemu`, `libvirt-qemu` and `nobody` that exists; in a pod a number '
        "of the pod's own, with that user's group",
    )


@frozen
class CpuSpec:
    """The vCPUs and the CPUs that they run on."""

    count: int | Literal["all"] = key(
        either(Literal["all"], integer(1, 1024)),
        default=1,
        elsewhere=("vcpus", "vcpu", "cores", "cpu", "smp", "number"),
        doc="number of vCPUs. Each has one CPU of its own. "
        '`"all"`: as many vCPUs as the container has CPUs, without one core if QEMU\'s other threads run on these CPUs too',
    )
    cpus: CpuSet | None = key(
        cpu_set(),
        default=None,
        doc="the CPUs of the vCPUs. Without it they are chosen from the CPUs that the container may use: whole cores of as few NUMA "
        "nodes as possible",
    )
    placement: PlacementChoice = key(
        choice(PlacementChoice),
        default="auto",
        doc='how other threads are kept off the CPUs of the vCPUs: by cgroups of the Kubernetes node\'s controller (`"controller"`), '
        'by cgroups inside the container\'s own cgroup (`"delegated"`), by `sched_setaffinity` alone (`"affinity"`), or by the first '
        'of these that works here (`"auto"`)',
    )
    controller: PurePosixPath = key(
        path(),
        default=CONTROLLER_SOCKET,
        doc="the Unix socket of the Kubernetes node's controller",
    )
    exclusive: ExclusiveChoice = key(
        choice(ExclusiveChoice),
        default="auto",
        doc='what must keep all other threads off the CPUs of the vCPUs while the guest runs. `"enforced"`: the kernel, by an isolated '
        'partition (Linux 6.7, placement `"controller"`), or the instance does not start. `"auto"`: the kernel where it can, else the '
        "cpusets of the others and the sweep (`arranged`). The log, `ctl status` and `inspect` name the guarantee that is in force",
    )
    sweep: bool = key(
        flag(),
        default=True,
        doc="whether processes that other programs start in the container (`kubectl exec`, probes) are moved to the float cgroup "
        'within a second. It has no effect with placement `"affinity"`, which has no cgroups',
    )
    pinning: PinningChoice = key(
        choice(PinningChoice),
        default="auto",
        doc='`"packed-siblings"`: the vCPUs of one guest core are pinned to the siblings of one host core. `"linear"`: vCPU *i* is '
        'pinned to the *i*-th CPU. `"auto"`: `"packed-siblings"` if the CPUs are whole cores, else `"linear"`',
    )
    topology: TopologyChoice = key(
        choice(TopologyChoice),
        default="host",
        elsewhere=("sockets", "threads"),
        doc='the topology that the guest sees. `"host"`: the sockets, L3 caches, threads and NUMA nodes that its vCPUs are pinned to. '
        '`"flat"`: one socket of cores with one thread each',
    )
    accel: AccelChoice = key(
        choice(AccelChoice),
        default="auto",
        doc='`"kvm"`, or `"tcg"` (emulation in software). `"auto"`: KVM if /dev/kvm can be used, else TCG. `"tried"`: KVM if a trial '
        "guest of 200 bytes runs with it as well, else TCG. The trial takes 0.2 s before the start, and 10 s at most",
    )
    model: str | None = key(
        text(r"[A-Za-z0-9_.,=+-]{1,200}", "a QEMU CPU model"),
        default=None,
        doc="QEMU's CPU model. Without it, it is `host` under KVM (on AMD with `topoext` if guest cores have two threads, and with "
        "`invtsc` if the host's time stamp counter is invariant), and under TCG `max` without the features that make it slower (`erms`, "
        '`fsrm`, `la57`). With placement `"controller"` under KVM each model also gets `kvm-hint-dedicated`, which tells the guest that '
        "nothing else runs on its CPUs",
    )
    idle: IdleChoice = key(
        choice(IdleChoice),
        default="host",
        doc='which kernel idles a CPU that its vCPU does not need. `"host"`: the host\'s, after an exit from the guest. `"guest"`: the '
        "guest's, by MWAIT and HLT that do not exit (KVM only). Then it wakes sooner, but its CPUs always look busy to the host, and the "
        "sibling threads of their cores may become slower",
    )
    latency: LatencyChoice = key(
        choice(LatencyChoice),
        default="default",
        doc='`"low"`: the node\'s controller keeps the CPUs of the vCPUs out of idle states that take more than 2 µs to leave, and sets '
        "their frequency governor to `performance`, which costs power. Both are restored at the instance's end. If one is not possible, "
        'that is logged, and the guest runs without it. Only with placement `"controller"`',
    )
    cache_ways: int | None = key(
        integer(1, 32),
        default=None,
        doc="the number of ways of each L3 cache of these CPUs that nothing else on the node fills (resctrl). All instances together "
        "can have at most half of a cache. Without it these CPUs share the remaining ways with all others. If it is not possible, that "
        'is logged, and the guest runs without it. Only with placement `"controller"`',
    )
    memory_bandwidth: int | None = key(
        integer(1, 100),
        default=None,
        doc="the percentage of the memory bandwidth that these CPUs may use at most (resctrl), rounded up to a step that they support. "
        "Without it there is no limit. If it is not possible, that is logged, and the guest runs without it. Only with placement "
        '`"controller"`',
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if self.cpus is not None and self.count == "all":
            yield Problem(
                "count",
                '"all" and cpu.cpus contradict each other',
                f"set it to {len(self.cpus)}, or leave cpu.cpus out",
            )
        elif self.cpus is not None and len(self.cpus) != self.count:
            yield Problem(
                "cpus",
                f"{str(self.cpus)!r} are {len(self.cpus)} CPUs, but cpu.count asks for {self.count} vCPUs",
            )


@frozen
class MemorySpec:
    """The guest's RAM."""

    size: int | Literal["limits"] = key(
        either(Literal["limits"], size(LEAST_MEMORY)),
        elsewhere=("ram", "memory", "amount", "mib", "limit"),
        default=512 * MIB,
        doc='the size of the RAM; `"limits"`: as much as the limits of the container allow (`hugetlb.<size>.max` or '
        "`LIMITS_HUGEPAGES_2MI` with huge pages, else `memory.max` without the overhead of QEMU and the daemons)",
    )
    bind: bool = key(
        flag(),
        default=True,
        doc="whether the RAM comes only from the NUMA nodes that the vCPUs are pinned to (`mbind(2)`)",
    )
    hugepages: HugePageSize | None = key(
        choice(HugePageSize),
        default=None,
        doc="the size of the huge pages that the RAM consists of. Without it ordinary pages",
    )
    prealloc: bool | None = key(
        flag(),
        default=None,
        doc="whether all RAM is allocated before the guest runs; by default it is with placement "
        '`"controller"`, `hugepages`, `lock` or `[[device]]`',
    )
    lock: bool = key(flag(), default=False, doc="whether QEMU locks the RAM and all its other memory (`mlockall(2)`)")
    shared: bool = key(
        flag(),
        default=True,
        doc="whether other processes can map the RAM, as virtiofsd must. With `false` it is anonymous memory, which gets transparent "
        "huge pages more often",
    )

    @property
    def page_size(self) -> int | None:
        """The size of the huge pages in bytes; ``None`` without them."""
        return None if self.hugepages is None else {"2MiB": 2 * MIB, "1GiB": 1024 * MIB}[self.hugepages]


@frozen
class BootSpec:
    """How the guest boots: a kernel that QEMU starts directly, or a disk that firmware boots."""

    kernel: PurePosixPath | None = key(path(), default=None, doc="a Linux kernel that QEMU starts directly")
    initrd: PurePosixPath | None = key(path(), default=None, doc="the kernel's initial RAM disk")
    cmdline: str | None = key(
        text(),
        default=None,
        elsewhere=("append", "args", "kernel_args"),
        doc="the kernel's command line. With `console=ttyS0` its messages appear on the serial console",
    )
    firmware: PurePosixPath | FirmwareBuild | None = key(
        path_or(
            FirmwareBuild,
            elsewhere={"ovmf": "uefi", "efi": "uefi", "edk2": "uefi", "secure-boot": "uefi-secure"},
        ),
        default=None,
        elsewhere=("uefi", "bios", "efi", "ovmf", "loader"),
        doc='a firmware image that is mapped as flash, such as OVMF_CODE.fd. `"uefi"`: the installed OVMF. `"uefi-secure"`: the '
        "installed OVMF with Secure Boot and Microsoft's keys. Without it the guest has SeaBIOS",
    )
    firmware_vars: PurePosixPath | None = key(
        path(),
        default=None,
        doc="the file for the firmware's variables, which the guest can write. If it does not exist, it is created as a copy of the "
        "firmware's empty store. Without this key the variables are lost when the instance ends",
    )

    @property
    def by_bios(self) -> bool:
        """Return whether SeaBIOS, which is part of QEMU, boots a disk."""
        return self.kernel is None and self.firmware is None

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if self.kernel is None:
            for name in ("initrd", "cmdline"):
                if getattr(self, name) is not None:
                    yield Problem(name, "needs boot.kernel: only a kernel that QEMU starts directly uses it")
        if self.firmware_vars is not None and self.firmware is None:
            yield Problem("firmware_vars", "needs boot.firmware")


@frozen
class DiskSpec:
    """A virtio disk. Firmware tries to boot the disks in their order."""

    path: PurePosixPath | None = key(
        path(),
        default=None,
        doc="a file or block device. A disk has either `path` or `fd`",
        elsewhere=("file", "image", "source"),
    )
    fd: str | None = key(
        text(DESCRIPTOR_NAME, "the name of a descriptor"),
        default=None,
        doc="the name of an inherited descriptor (`[descriptors]`) of a file or block device",
    )
    format: DiskFormat = key(
        choice(DiskFormat), default="raw", elsewhere=("type", "driver"), doc="the format of the file"
    )
    read_only: bool = key(flag(), default=False, doc="whether the guest can only read the disk")
    serial: str | None = key(
        text(r"[A-Za-z0-9_-]{1,20}", "up to 20 letters, digits, '_' and '-'"),
        default=None,
        doc="the disk's serial number in the guest",
    )
    ephemeral: bool = key(
        flag(),
        default=False,
        doc="whether writes of the guest go to an unnamed file in the state directory, which is lost when the instance ends. `path` is "
        "only read, so that several instances can use it",
    )
    ephemeral_size: int | None = key(
        size(MIB),
        default=None,
        doc="the largest size of the unnamed file of an ephemeral disk. A write beyond it is an I/O error in the guest. Without it "
        "there is room for the whole disk",
    )
    backing: tuple[PurePosixPath, ...] = key(
        paths(),
        default=(),
        doc="the directories that may hold backing files of a qcow2 image. An image with a backing file elsewhere is refused",
    )
    cache: CacheChoice = key(
        choice(CacheChoice),
        default="auto",
        doc='`"none"`: QEMU bypasses the page cache (`O_DIRECT`). `"writeback"`: it uses the page cache. `"writethrough"`: each write is '
        'on stable storage before the guest sees it complete. `"auto"`: `"none"` if the file system supports `O_DIRECT`, else '
        '`"writeback"`',
    )
    aio: AioChoice = key(
        choice(AioChoice),
        default="auto",
        doc='how QEMU reads and writes: by `io_submit(2)` (`"native"`, with cache `"none"` only), by `"io_uring"`, or by worker '
        '`"threads"`. `"auto"`: `"native"` for block devices and files without holes, to which a write allocates no space, else '
        '`"threads"`',
    )
    discard: bool = key(
        flag(),
        default=True,
        doc="whether space that the guest discards is freed on the host: by holes in a file, by `BLKDISCARD` on a block device",
    )
    detect_zeroes: DetectZeroes = key(
        choice(DetectZeroes),
        default="off",
        doc='whether QEMU detects blocks of zeroes that the guest writes, and writes them without data (`"on"`) or discards them '
        '(`"unmap"`)',
    )
    iothread: bool = key(
        flag(),
        default=False,
        doc="whether an iothread of its own serves the disk instead of QEMU's main thread. It runs in the float cgroup",
    )

    @property
    def file(self) -> PurePosixPath:
        """The file or block device; ``fd:NAME`` for a descriptor that has not been received yet."""
        return PurePosixPath(f"fd:{self.fd}") if self.path is None else self.path

    @property
    def writes(self) -> bool:
        """Return whether the file or block device itself is written to."""
        return not self.read_only and not self.ephemeral

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if self.ephemeral:
            if self.read_only:
                yield Problem("read_only", "contradicts ephemeral = true, which never writes to path")
            for name in ("cache", "aio"):
                if getattr(self, name) != "auto":
                    yield Problem(name, "contradicts ephemeral = true: what such a disk writes need not survive")
        elif self.ephemeral_size is not None:
            yield Problem("ephemeral_size", "needs ephemeral = true")
        if self.backing and self.format != "qcow2":
            yield Problem("backing", 'needs format = "qcow2": a raw image has no backing file')
        if self.aio == "native" and self.cache not in {"auto", "none"}:
            yield Problem(
                "aio", f'"native" needs cache = "none", not "{self.cache}": io_submit(2) waits for the page cache'
            )
        if self.detect_zeroes == "unmap" and not self.discard:
            yield Problem("detect_zeroes", '"unmap" needs discard = true')


@frozen
class HotplugSpec:
    """What can change while the guest runs."""

    disks: int = key(
        integer(0, 16),
        default=4,
        doc="how many disks `instance-runner ctl disk attach` can add. The guest has a PCI Express root port for each from the start",
    )
    cpus: int | None = key(
        integer(1, 1024),
        default=None,
        doc="the largest number of vCPUs while the guest runs. `instance-runner ctl cpus COUNT` plugs and unplugs them, and they are "
        "unplugged when the kubelet takes CPUs from the pod. The guest must see one socket of cores with one thread each "
        '(`cpu.topology = "flat"`). Without this key the number of vCPUs cannot change',
    )
    qemu: bool = key(
        flag(),
        default=False,
        doc="whether `instance-runner ctl qemu-update` can replace QEMU while the guest runs. This needs QEMU 10.1",
    )


@frozen
class NetworkSpec:
    """A virtio network interface."""

    mode: NetworkMode = key(
        choice(NetworkMode, elsewhere={"user": "passt", "slirp": "passt", "nat": "passt", "tap": "private"}),
        default="private",
        elsewhere=("type", "kind"),
        doc='`"private"`: a subnet that only this instance has. `"bridge"`: the guest takes over the address of the pod\'s interface. '
        '`"macvtap"`: the guest is a host of its own, with its own MAC address, on the network of an interface. `"passt"`: the guest '
        'connects through the pod\'s sockets, which needs no privilege. `"descriptor"`: an inherited tap, macvtap or socket',
    )
    interface: str | None = key(
        text(r"[!-.0-9;-~]{1,15}", "the name of a network interface"),
        default=None,
        doc='`"bridge"` and `"macvtap"` only: the pod\'s interface. Without it `eth0`',
    )
    subnet: ipaddress.IPv4Network | None = key(
        subnet(),
        default=None,
        doc='`"private"` only: the subnet, whose first address the bridge has, and whose second one the guest. Without it '
        "`192.168.77.0/24`, `192.168.78.0/24`, … by the network's index",
    )
    address: ipaddress.IPv4Address | None = key(
        address(),
        default=None,
        elsewhere=("ip", "ipv4", "ip_address"),
        doc='`"private"` only: the guest\'s address. Without it the second one of the subnet',
    )
    ipv6: bool = key(
        flag(),
        default=False,
        doc='`"private"` and `"bridge"` only: whether the guest gets an IPv6 address too, by DHCPv6. With `"private"` it also gets a '
        'router advertisement, with `"bridge"` it gets the address of the pod\'s interface',
    )
    subnet6: ipaddress.IPv6Network | None = key(
        subnet6(),
        default=None,
        doc='`"private"` only: the IPv6 subnet, whose first address the bridge has, and whose second one the guest. Without it a '
        "unique local subnet derived as MAC addresses are",
    )
    mac: str | None = key(
        mac(),
        default=None,
        doc="the guest's MAC address. Without it, it is that of the pod's interface with `\"bridge\"`, or that of an inherited macvtap, "
        "else one derived from `instance.uuid`, else from the pod's UID. Without a pod it is derived from this machine's id and the "
        "state directory",
    )
    mtu: int | None = key(
        integer(576, 65521),
        default=None,
        doc='the guest\'s MTU in bytes. Without it that of the pod\'s interface with `"bridge"` and `"macvtap"` (`"bridge"`: or of one of '
        'its routes, if that is less), 65520 with `"passt"`, else 1500',
    )
    queues: int | None = key(
        integer(1, 64),
        default=None,
        doc='pairs of queues, each with a vhost thread of its own. Without it as many as vCPUs, at most 8. With `"descriptor"` there is '
        "one for each descriptor",
    )
    fd: tuple[str, ...] = key(
        descriptor_names(),
        default=(),
        doc='`"descriptor"` only: the names of inherited descriptors of a tap or macvtap, one for each queue, or of a stream socket',
    )
    vhost_fd: tuple[str, ...] = key(
        descriptor_names(),
        default=(),
        doc='`"descriptor"` only: the names of inherited descriptors of /dev/vhost-net, one for each queue. Without it the runner opens '
        "/dev/vhost-net if the container has it",
    )
    ports: tuple[PortForward, ...] | Literal["all"] = key(
        either(Literal["all"], ports()),
        default=(),
        elsewhere=("hostfwd", "forward", "publish", "port"),
        doc='`"passt"` only: ports of the pod that lead to the guest: `22`, `"8000-8010"`, `"80:8080"` for another one of the guest\'s, '
        '`"127.0.0.1/2222:22"` at one address alone, `"53/udp"`. `"all"`: all TCP ports but those that the runner listens at and '
        "the ephemeral ones. Without it nothing reaches the guest",
    )

    @property
    def forwards(self) -> tuple[PortForward, ...]:
        """Return the pod's ports that are, or may be, forwarded to the guest."""
        return (EVERY_PORT,) if self.ports == "all" else self.ports

    @property
    def listened_at(self) -> int:
        """Return the largest possible number of ports on which passt listens."""
        return MOST_OF_ALL if self.ports == "all" else sum(each.count for each in self.ports)

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        for name, modes in NETWORK_KEYS.items():
            if getattr(self, name) not in {None, (), False} and self.mode not in modes:
                words = " or ".join(f'"{mode}"' for mode in modes)
                yield Problem(name, f'needs mode = {words}, and it is "{self.mode}"')
        if self.subnet6 is not None and not self.ipv6:
            yield Problem("subnet6", "needs ipv6 = true")
        if self.mode == "descriptor":
            yield from self._descriptor_contradictions()
        if self.mode == "passt" and self.queues not in {None, 1}:
            yield Problem("queues", 'must be 1 with mode = "passt"')

    def _descriptor_contradictions(self) -> Iterator[Problem]:
        if not self.fd:
            yield Problem("fd", "is missing", 'mode = "descriptor" needs the name of one')
        if self.vhost_fd and len(self.vhost_fd) != len(self.fd):
            counts = f"names {len(self.vhost_fd)}, but fd names {len(self.fd)}"
            yield Problem("vhost_fd", counts, "each queue needs one of both")
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
    "ports": ("passt",),
}
"""Key → the modes in which it is allowed."""


@frozen
class DescriptorsSpec:
    """Descriptors that another program opened for this one."""

    socket: PurePosixPath | None = key(
        path(),
        default=None,
        doc="the Unix socket of an agent on the host that sends descriptors (`SCM_RIGHTS`). Without it they are inherited through exec "
        "(`LISTEN_FDS`)",
    )


@frozen
class ShareSpec:
    """A directory shared with the guest by virtiofs."""

    tag: str = key(
        text(TAG, "up to 35 letters, digits, '.', '_' and '-'"),
        elsewhere=("name", "target"),
        doc="the name by which the guest mounts it: `mount -t virtiofs TAG /mnt`",
    )
    path: PurePosixPath = key(path(), elsewhere=("source", "directory", "dir"), doc="the directory")
    read_only: bool = key(flag(), default=False, doc="whether the guest can only read (virtiofsd 1.11 or later)")


DEVICE_PROPERTIES: Mapping[str, Rule[object]] = {
    "x-nv-gpudirect-clique": integer(0, 15),
    "x-no-geforce-quirks": flag(),
    "x-no-mmap": flag(),
    "x-no-kvm-intx": flag(),
    "x-no-kvm-msi": flag(),
    "x-no-kvm-msix": flag(),
    "x-intx-mmap-timeout-ms": integer(0, 60000),
    "x-msix-relocation": choice(MsixRelocation),
    "x-pci-sub-vendor-id": integer(0, 0xFFFF),
    "x-pci-sub-device-id": integer(0, 0xFFFF),
}
"""The properties of QEMU's ``vfio-pci`` that a document may set: every QEMU from 7.2 to 11.1 has these."""
OBJECT_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
"""Pattern of the name of an object in Kubernetes (a DNS subdomain, RFC 1123), which a path can hold."""


@frozen
class DeviceSpec:
    """A PCI device of the host that is passed through to the guest (VFIO)."""

    address: str | None = key(
        text(PCI_ADDRESS, 'a PCI address in lower case, such as "0000:41:00.0"'),
        default=None,
        doc="the PCI address of the device. A device has one of `address`, `resource`, `claim` and `variable`",
    )
    resource: str | None = key(
        text(r"[A-Za-z0-9.-]{1,253}/[A-Za-z0-9_.-]{1,63}", 'a resource of Kubernetes, such as "nvidia.com/GH100"'),
        default=None,
        doc="the resource whose devices a device plugin has allocated to the container. It lists their addresses in the environment "
        "(`PCI_RESOURCE_NVIDIA_COM_GH100`, `PCIDEVICE_…`)",
    )
    claim: str | None = key(
        text(OBJECT_NAME, 'the name of a resource claim, such as "gpus"'),
        default=None,
        doc="the resource claim (DRA) whose devices a driver has prepared for the container. It describes them in files in the "
        "container, with their addresses (KEP-5304). The name is that of the entry in the pod's `resourceClaims` if this has a "
        "`resourceClaimTemplateName`, and otherwise its `resourceClaimName`",
    )
    request: str | None = key(
        text(OBJECT_NAME, 'the name of a request of the claim, such as "gpu"'),
        default=None,
        doc="the request of the claim. Without it all those of which the container has the devices",
    )
    variable: str | None = key(
        text(r"[A-Za-z_][A-Za-z0-9_]{0,254}", "the name of an environment variable"),
        default=None,
        doc="the environment variable that lists the addresses, separated by commas, where a driver describes devices by CDI in no "
        "other way, such as `SRIOVNETWORK_PCI_ADDRESSES`",
    )
    count: int | None = key(
        integer(1, 64),
        default=None,
        doc="how many of the devices of the resource, claim or variable. Without it all that other `[[device]]` tables leave",
    )
    iommu: IommuChoice = key(
        choice(IommuChoice),
        default="auto",
        doc='how QEMU opens the device: by its IOMMU group (`"legacy"`), by iommufd (`"iommufd"`, QEMU 9.0 or later), or by one of '
        'them that works, the same for all devices where possible (`"auto"`)',
    )
    topology: DeviceTopology = key(
        choice(DeviceTopology),
        default="host",
        doc='where the guest sees the device. `"host"`: behind a host bridge for its root complex, and behind a switch together with the '
        'devices that share one with it on the host. `"numa"`: behind the host bridge of its NUMA node, in a guest with several. '
        '`"flat"`: on the root bus',
    )
    properties: tuple[tuple[str, object], ...] = key(
        settings(DEVICE_PROPERTIES), default=(), doc="further properties of QEMU's `vfio-pci`"
    )
    rom: bool = key(flag(), default=False, doc="whether the guest sees the option ROM, which booting from a NIC needs")

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        ways = {"address": self.address, "resource": self.resource, "claim": self.claim, "variable": self.variable}
        given = [name for name, value in ways.items() if value is not None]
        if not given:
            yield Problem("address", "is missing", "a device needs an address, a resource, a claim or a variable")
        for name in given[1:]:
            yield Problem(name, f"{given[0]} and {name} are both given", "leave one of them out")
        if self.count is not None and given in ([], ["address"]):
            yield Problem("count", "needs a resource, a claim or a variable: an address names one device")
        if self.request is not None and self.claim is None:
            yield Problem("request", "needs the claim whose request it is")


@frozen
class ConsoleSpec:
    """The guest's serial console."""

    stdout: bool = key(
        flag(), default=True, doc="whether its output goes to standard output, which `kubectl logs` shows"
    )
    log: PurePosixPath | None = key(
        path(),
        default=None,
        elsewhere=("file", "path"),
        doc="the file that its output is written to. Without it `console.log` in the state directory",
    )
    log_size: int = key(
        size(MIB),
        default=4 * MIB,
        doc="the largest size of the file. When it is reached, the file is renamed to `….1`, which replaces the previous one",
    )


@frozen
class DisplaySpec:
    """The guest's screen."""

    vnc: bool = key(
        flag(),
        default=False,
        doc="whether the guest has a VGA screen, with a VNC server on the socket `vnc.sock` in the state directory",
    )


@frozen
class GuestSpec:
    """Devices that serve the guest."""

    agent: bool = key(
        flag(),
        default=True,
        doc="whether there is a channel for QEMU's guest agent (`qemu-ga`). If the agent answers, it is asked to shut the guest down "
        "before the ACPI power button is pressed",
    )
    ready: ReadySign | None = key(
        ready_sign(),
        default=None,
        doc='the sign by which the guest shows that it is ready. `"agent"`: the guest agent answers. `"console:REGEX"`: a line of the '
        'console matches (Python\'s syntax). `"port:N"`: it accepts a TCP connection in its network with `mode = "private"`. Without it '
        "the guest is ready as soon as its vCPUs run and every thread is in its place",
    )
    clock: ClockBase = key(
        choice(ClockBase),
        default="utc",
        doc='the time that the hardware clock shows. Windows expects `"localtime"` (in the time zone of the container)',
    )
    vsock: int | Literal["auto"] | None = key(
        either(Literal["auto"], integer(3, (1 << 32) - 2), first=True),
        default=None,
        doc="the context identifier (CID) of the guest's vsock device, which no other guest of the host may have; "
        '`"auto"`: a free one. Without it there is no vsock device',
    )
    watchdog: WatchdogAction | None = key(
        choice(WatchdogAction),
        default=None,
        doc='the action when the guest no longer resets its watchdog (i6300esb): `"reset"` resets the guest, `"exit"` ends the '
        'instance, `"nmi"` sends the guest an NMI, `"none"` only logs it. Without it there is no watchdog',
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if isinstance(self.ready, AgentSign) and not self.agent:
            yield Problem("ready", 'is "agent", but guest.agent = false', "leave one of them out")


_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
"""A part of a host name (RFC 1123, 2.1): at most 63 characters, which are what Linux takes as its own name."""


@frozen
class CloudInitSpec:
    """The data that cloud-init in the guest reads from a NoCloud seed. An empty table makes a seed with defaults."""

    user_data: PurePosixPath | str | None = key(
        document(), default=None, doc="the user-data: `#cloud-config`, a script, MIME, …"
    )
    ssh_keys: tuple[PurePosixPath | str, ...] = key(
        documents(), default=(), doc="public SSH keys for the image's default user. A file may hold several"
    )
    hostname: str | None = key(
        text(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", "a host name"),
        default=None,
        doc="the guest's host name. Without it the instance's name",
    )
    meta_data: PurePosixPath | str | None = key(
        document(),
        default=None,
        doc="the meta-data, YAML or JSON. It replaces the generated one with id, host name and keys",
    )
    network_config: PurePosixPath | str | None = key(
        document(),
        default=None,
        doc="the network-config, YAML or JSON. Without it DHCP on each network, which is matched by its MAC address",
    )

    @property
    def files(self) -> list[PurePosixPath]:
        """The files that it names; each may have :data:`~runner.spec.document_parser.LARGEST_DOCUMENT` bytes."""
        values = (self.user_data, self.meta_data, self.network_config, *self.ssh_keys)
        return [value for value in values if isinstance(value, PurePosixPath)]

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict others."""
        if self.meta_data is not None:
            for name, given in (("ssh_keys", self.ssh_keys), ("hostname", self.hostname)):
                if given:
                    yield Problem(name, "contradicts cloud_init.meta_data, which must contain it")


@frozen
class ShutdownSpec:
    """How the instance ends."""

    grace: float = key(
        seconds(1, 3600),
        default=30.0,
        elsewhere=("timeout",),
        doc="seconds that the whole power-down of the guest may take. Keep it 10 s below terminationGracePeriodSeconds: the teardown of "
        "network, shares and cgroups follows",
    )
    on_reboot: RebootAction = key(
        choice(RebootAction),
        default="reset",
        doc='what happens when the guest reboots: `"reset"` resets it, `"exit"` ends the instance',
    )
    poweroff_status: int = key(
        integer(0, 124),
        default=10,
        doc="the runner's exit status when the guest shuts itself down. With 0, `restartPolicy: OnFailure` does not restart it",
    )


@frozen
class InstanceSpec:
    """The whole document."""

    instance: IdentitySpec = key(
        table(IdentitySpec),
        default=IdentitySpec(),
        elsewhere=("vm", "machine", "domain"),
        doc="the instance's identity",
    )
    cpu: CpuSpec = key(
        table(CpuSpec), default=CpuSpec(), doc="vCPUs and the CPUs that they run on", elsewhere=("vcpu", "vcpus", "smp")
    )
    memory: MemorySpec = key(table(MemorySpec), default=MemorySpec(), doc="the guest's RAM", elsewhere=("ram",))
    boot: BootSpec = key(
        table(BootSpec), default=BootSpec(), elsewhere=("uefi", "bios", "kernel", "firmware"), doc="how the guest boots"
    )
    disk: tuple[DiskSpec, ...] = key(
        tables(DiskSpec), default=(), doc="virtio disks", elsewhere=("drive", "drives", "volume", "volumes", "storage")
    )
    hotplug: HotplugSpec = key(
        table(HotplugSpec), default=HotplugSpec(), doc="what can be attached while the guest runs"
    )
    network: tuple[NetworkSpec, ...] = key(
        tables(NetworkSpec),
        default=(),
        doc="virtio network interfaces",
        elsewhere=("nic", "net", "interface", "interfaces"),
    )
    descriptors: DescriptorsSpec = key(
        table(DescriptorsSpec), default=DescriptorsSpec(), doc="descriptors that another program has opened"
    )
    share: tuple[ShareSpec, ...] = key(
        tables(ShareSpec),
        default=(),
        doc="directories shared by virtiofs",
        elsewhere=("filesystem", "filesystems", "virtiofs", "mount"),
    )
    device: tuple[DeviceSpec, ...] = key(
        tables(DeviceSpec),
        default=(),
        doc="PCI devices of the host that become the guest's own",
        elsewhere=("gpu", "gpus", "hostdev", "hostdevs", "vfio", "pci"),
    )
    console: ConsoleSpec = key(table(ConsoleSpec), default=ConsoleSpec(), doc="the serial console")
    display: DisplaySpec = key(table(DisplaySpec), default=DisplaySpec(), doc="the screen")
    guest: GuestSpec = key(table(GuestSpec), default=GuestSpec(), doc="what else the machine has for the guest")
    cloud_init: CloudInitSpec | None = key(
        table(CloudInitSpec), default=None, doc="the data for cloud-init in the guest"
    )
    shutdown: ShutdownSpec = key(table(ShutdownSpec), default=ShutdownSpec(), doc="how the instance ends")
    environment: EnvironmentSpec = key(
        table(EnvironmentSpec),
        default=EnvironmentSpec(),
        doc="the variables of the runner's environment that this document uses",
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield the keys that contradict keys of other tables."""
        if self.boot.kernel is None and self.boot.firmware is None and not self.disk:
            yield Problem("boot", "there is nothing to boot", "set boot.kernel or boot.firmware, or add a [[disk]]")
        if isinstance(self.guest.ready, PortSign) and all(each.mode != "private" for each in self.network):
            yield Problem(
                "guest.ready",
                'names a port, and the runner can connect to the guest only in a network with mode = "private"',
                'add such a [[network]], or use "agent" or "console:REGEX"',
            )
        yield from _repeated("share", "tag", (share.tag for share in self.share))
        yield from _repeated("disk", "serial", (disk.serial for disk in self.disk))
        yield from _repeated("device", "address", (device.address for device in self.device))
        yield from _repeated("network", "mac", (network.mac for network in self.network))
        yield from _networks(self.network)
        yield from _repeated_ports(self.network)
        yield from _repeated_descriptors(self.disk, self.network)
        for index, disk in enumerate(self.disk):
            if disk.path is None and disk.fd is None:
                yield Problem(
                    f"disk[{index}].path", "is missing", "a disk needs a path, or the fd that it is inherited as"
                )
            if disk.path is not None and disk.fd is not None:
                yield Problem(f"disk[{index}].fd", "path and fd are both given", "leave one of them out")
        writable = {disk.path for disk in self.disk if disk.writes and disk.fd is None}
        seen = set[PurePosixPath | None]()
        for index, disk in enumerate(self.disk):
            if disk.path in writable and disk.path in seen:
                yield Problem(f"disk[{index}].path", f"{str(disk.path)!r} is given twice and one of them is writable")
            seen.add(disk.path)


def _networks(networks: tuple[NetworkSpec, ...]) -> Iterator[Problem]:
    """Yield contradictions between networks."""
    given = (((each.interface or "eth0") if each.mode == "bridge" else None) for each in networks)
    yield from _repeated("network", "interface", given)
    bridged = {each.interface or "eth0" for each in networks if each.mode == "bridge"}
    for index, network in enumerate(networks):
        if network.mode == "macvtap" and (network.interface or "eth0") in bridged:
            yield Problem(f"network[{index}].interface", 'another network uses this interface with mode = "bridge"')
    subnets = [
        private_subnet(index, network) if network.mode == "private" else None for index, network in enumerate(networks)
    ]
    for index, mine in enumerate(subnets):
        for earlier, other in enumerate(subnets[:index]):
            if mine is not None and other is not None and mine.overlaps(other):
                yield Problem(f"network[{index}].subnet", f"{mine} overlaps {other} of network[{earlier}]")
                break  # a thousand equal ones would cause half a million sentences
        address = networks[index].address
        if (
            mine is not None
            and address is not None
            and not (address in mine and mine[1] < address < mine.broadcast_address)
        ):
            yield Problem(
                f"network[{index}].address",
                f"{address} is not a guest's address of {mine}",
                f"take one from {mine[2]} to {mine.broadcast_address - 1}",
            )


def _repeated_ports(networks: tuple[NetworkSpec, ...]) -> Iterator[Problem]:
    """Yield the pod's ports that are forwarded twice: one without an address covers every address."""
    given = [(each, index) for index, network in enumerate(networks) for each in network.forwards]
    reached: dict[tuple[str, str | None], tuple[int, int]] = {}
    """Protocol and address, ``None`` for any → the last port forwarded there so far, and its network."""
    for each, index in sorted(given, key=lambda item: item[0].first):
        addresses = (each.address, "") if each.address else (None,)
        last, other = max(reached.get((each.protocol, address), (0, 0)) for address in addresses)
        if last >= each.first:
            also = "" if other == index else f", with network[{min(index, other)}]"
            where, remedy = f"network[{max(index, other)}].ports", "leave one of them out"
            yield Problem(where, f"gives {each.first} to two ports of the guest{also}", remedy)
        for where_given in ((each.protocol, each.address), (each.protocol, None)):
            reached[where_given] = max(reached.get(where_given, (0, 0)), (each.last, index))


def _repeated_descriptors(disks: tuple[DiskSpec, ...], networks: tuple[NetworkSpec, ...]) -> Iterator[Problem]:
    """Yield the descriptors that are used twice."""
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
    """Return the subnet of the private *network* ``network[index]``: its own, or the *index*-th after 192.168.77.0/24."""
    first = ipaddress.IPv4Network("192.168.77.0/24")
    nth = int(first.network_address) + index * first.num_addresses
    return network.subnet or ipaddress.IPv4Network((nth, first.prefixlen))


def _repeated(table_name: str, name: str, values: Iterable[Hashable]) -> Iterator[Problem]:
    seen: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if value is not None and seen.setdefault(value, index) != index:
            yield Problem(f"{table_name}[{index}].{name}", f"{value!r} is taken by {table_name}[{seen[value]}] already")


PLACEHOLDER = "unset"
"""The value of a declared but unset variable in a document that is only checked."""


def parse_instance(source: str, data: bytes, environment: Mapping[str, str] = NO_ENVIRONMENT) -> InstanceSpec:
    """Parse and check a whole document, TOML or JSON; *source* is its name in errors.

    ``${NAME}`` in its strings is replaced from *environment* if the document declares NAME.
    Raises :exc:`~runner.base.errors.SpecError` with every problem found.
    """
    problems: list[Problem] = []
    written = parse_document(source, data)
    document = with_environment(written, environment, problems)
    if problems:  # a string with an unresolved variable would only cause further problems
        raise SpecError(source, problems)
    spec = structure(InstanceSpec, document, "", problems)
    if spec is None or problems:
        raise SpecError(source, with_variables(problems, written))
    return spec


def parse_elsewhere(
    source: str, data: bytes, environment: Mapping[str, str]
) -> tuple[InstanceSpec | None, tuple[str, ...]]:
    """Parse a document although some of its declared variables are not set; return the spec and the names of these variables.

    They get the value :data:`PLACEHOLDER`. If that is invalid for a key, the key is not judged, and no spec is returned. Raises
    :exc:`~runner.base.errors.SpecError` with every other problem.
    """
    unset = tuple(name for name in declared_variables(source, data) if name not in environment)
    try:
        return parse_instance(source, data, {**environment, **dict.fromkeys(unset, PLACEHOLDER)}), unset
    except SpecError as error:
        used = used_variables(parse_document(source, data))
        left = [problem for problem in error.problems if not set(unset).intersection(variables_of(problem, used))]
        if left:
            raise SpecError(source, left) from None
        return None, unset


def opened_paths(spec: InstanceSpec, state_directory: PurePosixPath | None) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield the path of each file of *spec* that this process opens, or that QEMU executes as firmware, by its key.

    A share is not included: virtiofsd opens it, and the guest may change its content.
    """
    named: list[tuple[str, object]] = [
        ("console.log", spec.console.log),
        ("boot.firmware_vars", spec.boot.firmware_vars),
        ("--state-dir", state_directory),
        ("boot.kernel", spec.boot.kernel),
        ("boot.initrd", spec.boot.initrd),
        ("boot.firmware", spec.boot.firmware),
        ("descriptors.socket", spec.descriptors.socket),
        ("cpu.controller", spec.cpu.controller if spec.cpu.placement in {"auto", "controller"} else None),
    ]
    for index, disk in enumerate(spec.disk):
        if disk.fd is None:
            named.append((f"disk[{index}].path", disk.file))
        named += ((f"disk[{index}].backing", each) for each in disk.backing)
    if spec.cloud_init is not None:
        named += (("cloud_init", each) for each in spec.cloud_init.files)
    yield from ((where, path) for where, path in named if isinstance(path, PurePosixPath))
