"""Which PCI devices of the host a guest gets, by which way, and where it sees them: decided before anything is touched.

Only a plan with devices imports this.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import attrs

from runner.errors import Problem
from runner.facts.host import HostFacts, User
from runner.facts.pci import Bar, DeviceNode, PciFact, PciLink, VfioFacts
from runner.placement.guest_topology import GuestTopology
from runner.plan.passthrough_plan import DevicePlan, PassthroughPlan
from runner.plan.root_bus import ROOT_BUS
from runner.spec.instance import PCI_ADDRESS, DeviceSpec, InstanceSpec
from runner.spec.rules import MIB, format_size

PREFIXES = ("PCI_RESOURCE", "PCIDEVICE")
"""KubeVirt's and NVIDIA's plugins; the SR-IOV plugin. Each ``_`` and the resource's name (``ResourceNameToEnvVar``)."""
MEDIATED_PREFIX = "MDEV_PCI_RESOURCE"

IOMMUFD_SINCE = (9, 0)
"""QEMU's version."""
CLIQUE = "x-nv-gpudirect-clique"
"""It tells GPUs that they can reach each other, and only a legacy container maps their memory for each other: iommufd takes
no device memory (QEMU's ``backends/iommufd.c``, before Linux 6.19)."""

GIB = 1 << 30
PORT_GRAIN = 1 << 20
"""Bytes; the windows of PCI bridges are multiples of it."""
OTHERS = 256 * MIB
"""Bytes of the window for what the machine has beside: 16 KiB for a virtio device, 2 MiB for a port that takes disks later."""
DEFAULT_WINDOW = 32 * GIB
"""``pci-hole64-size`` of QEMU's q35, and the 64-bit aperture of OVMF."""
LOW_RAM = 2 * GIB
"""The least RAM that q35 has below 4 GiB when it has more than that."""
HYPERTRANSPORT = 1012 * GIB
"""AMD's CPUs reserve the 12 GiB below 1 TiB; RAM that would reach it is put above (``hw/i386/pc.c``)."""
EMULATED_BITS = 40
"""Of physical addresses, with every CPU model that is not told otherwise (``target/i386/cpu.h``)."""

PORTS_ON_BRIDGE = 23
"""Devices of a NUMA node: of eight, each has 24 bus numbers (``plan/argv/qemu.py``)."""

BIND = (
    "bind it: driverctl set-override {0} vfio-pci (or write vfio-pci to its driver_override and {0} to drivers_probe)"
)
GIVE = "give the container the node: by a device plugin's resource, or `--device {0}`"
HOLDER = "end the other instance or process; `fuser {0}` on the node names it"


def resource_variables(resource: str) -> tuple[str, ...]:
    """Return the names under which device plugins say what they give for *resource*; hyphens are kept."""
    word = resource.upper().replace("/", "_").replace(".", "_")
    return tuple(f"{prefix}_{word}" for prefix in PREFIXES)


def listed(resource: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses that *environment* lists for *resource*, each once, in their order."""
    words = [
        word.strip().lower()
        for name in resource_variables(resource)
        for word in environment.get(name, "").split(",")
        if word.strip()
    ]
    return tuple(dict.fromkeys(words))


@attrs.frozen
class Asked:
    """A device that the spec asks for: ``device[index]``."""

    index: int
    address: str
    device: DeviceSpec


def asked_devices(devices: Sequence[DeviceSpec], environment: Mapping[str, str]) -> tuple[list[Asked], list[Problem]]:
    """Return the devices that the spec asks for, and what keeps it from saying which."""
    asked: list[Asked] = []
    problems: list[Problem] = []
    taken = {device.address for device in devices if device.address is not None}
    for index, device in enumerate(devices):
        if device.address is not None:
            asked.append(Asked(index, device.address, device))
            continue
        found, why = _of_resource(device, environment, taken)
        taken |= set(found)
        asked += [Asked(index, address, device) for address in found]
        problems += [Problem(f"device[{index}].resource", sentence) for sentence in why]
    return asked, problems


def _of_resource(
    device: DeviceSpec, environment: Mapping[str, str], taken: Collection[str]
) -> tuple[tuple[str, ...], list[str]]:
    resource = device.resource or ""
    variables = resource_variables(resource)
    everything = listed(resource, environment)
    if not everything:
        mediated = f"{MEDIATED_PREFIX}_{variables[0].removeprefix(PREFIXES[0] + '_')}"
        if environment.get(mediated):
            return (), [
                f"{mediated} names mediated devices, which are not passed; take whole devices or SR-IOV functions"
            ]
        why = f"no device is given for it: neither of {' and '.join(variables)} is in the environment"
        return (), [f"{why}; ask for `{resource}` in the container's limits, or name the address"]
    wrong = [address for address in everything if not re.fullmatch(PCI_ADDRESS, address, re.ASCII)]
    if wrong:
        return (), [f"the environment lists {wrong[0]!r} for it, which is no PCI address"]
    left = tuple(address for address in everything if address not in taken)
    wanted = len(left) if device.count is None else device.count
    if not left or len(left) < wanted:
        why = f"{len(left)} are left of the {len(everything)} that were given ({', '.join(everything)})"
        return (), [f"asks for {wanted or 'some'}, but {why}; ask for more of `{resource}` in the container's limits"]
    return left[:wanted], []


def plan_devices(
    spec: InstanceSpec, facts: HostFacts, topology: GuestTopology, user: User, accel: str
) -> tuple[PassthroughPlan, list[Problem], list[str]]:
    """Decide about every device of *spec*; returns what will be done, why it cannot be, and what is second best about it."""
    decision = _Decision(spec, facts, topology, user, accel)
    passing = decision.passing()
    return passing, decision.problems, decision.remarks


class _Decision:
    """Collects problems and remarks on the way."""

    def __init__(self, spec: InstanceSpec, facts: HostFacts, topology: GuestTopology, user: User, accel: str) -> None:
        self.spec, self.facts, self.topology, self.user, self.accel = spec, facts, topology, user, accel
        self.vfio = facts.vfio or VfioFacts()
        self.asked, self.problems = asked_devices(spec.device, self.vfio.environment)
        self.remarks: list[str] = []

    def passing(self) -> PassthroughPlan:
        facts = [(each, self.vfio.devices.get(each.address)) for each in self.asked]
        preferred = self.preferred([fact for _, fact in facts if fact is not None])
        passed = {each.address for each in self.asked}
        plans = []
        for each, fact in facts:
            where = f"device[{each.index}]"
            reasons = device_errors(each.address, fact, passed)
            self.problems += [Problem(where, reason) for reason in reasons]
            if fact is not None and not reasons:
                plan = self.device(where, each, fact, preferred)
                plans += [plan] if plan is not None else []
                self.remarks += device_remarks(fact)
        self.ports(plans)
        used = any(plan.way == "iommufd" for plan in plans)
        return PassthroughPlan(tuple(plans), self.vfio.iommufd.path if used else None, self.window(plans))

    def preferred(self, facts: Sequence[PciFact]) -> tuple[str, str]:
        """Return the ways in the order they are tried for devices that name none: one way for all, or RAM is locked twice."""
        told = {each.device.iommu for each in self.asked} - {"auto"}
        cliques = any(name == CLIQUE for each in self.asked for name, _ in each.device.properties)
        legacy = "legacy" in told or cliques
        if not told and not legacy:
            legacy = any(self.reason("iommufd", fact) is not None for fact in facts)
        return ("legacy", "iommufd") if legacy else ("iommufd", "legacy")

    def reason(self, way: str, fact: PciFact) -> str | None:
        return legacy_error(fact, self.vfio) if way == "legacy" else iommufd_error(fact, self.vfio)

    def device(self, where: str, asked: Asked, fact: PciFact, preferred: tuple[str, str]) -> DevicePlan | None:
        ways = preferred if asked.device.iommu == "auto" else (asked.device.iommu,)
        reasons = {way: self.reason(way, fact) for way in ways}
        way = next((way for way, reason in reasons.items() if reason is None), None)
        if way is None:
            why = "; ".join(f"not by {way!r}: {reason}" for way, reason in reasons.items())
            self.problems.append(Problem(f"{where}.iommu", f"{fact.address} cannot be handed to QEMU; {why}"))
            return None
        group, node = fact.group_node, fact.device_node
        if CLIQUE in dict(asked.device.properties) and way == "iommufd":
            self.remarks.append(
                f"{fact.address} has {CLIQUE}, but by iommufd no device reaches the memory of another: the guest's drivers "
                'find that out; use iommu = "legacy"'
            )
        guest = self.guest_numa_node(fact)
        return DevicePlan(
            address=fact.address,
            sysfs=fact.sysfs,
            name=fact.name,
            driver=fact.driver or "",
            way=way,
            group_node=None if group is None or (group.error is not None and not group.busy) else group.path,
            device_node=node.path if node is not None and way == "iommufd" else None,
            lent_to=self.user.user_id
            if way == "legacy" and self.user.user_id and group and not group.everyone
            else None,
            bus=ROOT_BUS if guest is None else f"pcie.{guest + 1}",
            host_numa_node=fact.numa_node,
            guest_numa_node=guest,
            memory=sum(bar.size for bar in fact.bars),
            properties=asked.device.properties,
            rom=asked.device.rom,
        )

    def guest_numa_node(self, fact: PciFact) -> int | None:
        """Return the guest's NUMA node whose vCPUs sit on the device's; a guest of one is told of none."""
        numa_nodes = self.topology.numa_nodes
        several = len(self.facts.hardware.numa_nodes) > 1
        if fact.numa_node < 0:
            if several:
                self.remarks.append(
                    f"the firmware does not say on which NUMA node {fact.address} is, and so the guest is not told"
                )
            return None
        near = next((number for number, each in enumerate(numa_nodes) if each.host == fact.numa_node), None)
        if self.spec.cpu.topology == "host" and near is None and several:
            hosts = ", ".join(str(each.host) for each in numa_nodes)
            self.remarks.append(
                f"{fact.address} is on the host's NUMA node {fact.numa_node}, the vCPUs are on {hosts}: every access goes "
                "farther; let the Topology Manager align devices and CPUs (policy restricted or single-numa-node)"
            )
        return near if len(numa_nodes) > 1 else None

    def ports(self, plans: Sequence[DevicePlan]) -> None:
        for bus in sorted({plan.bus for plan in plans} - {ROOT_BUS}):
            number = sum(plan.bus == bus for plan in plans)
            if number > PORTS_ON_BRIDGE:
                self.problems.append(
                    Problem(
                        "device",
                        f"{number} devices would be on the guest's bus {bus!r}, which takes {PORTS_ON_BRIDGE}; pass fewer to one "
                        "instance, or give it CPUs of every NUMA node that its devices are on",
                    )
                )

    def window(self, plans: Iterable[DevicePlan]) -> int | None:
        window = bar_window(self.vfio.devices[plan.address].bars for plan in plans)
        if window <= DEFAULT_WINDOW:
            return None
        top = top_of_addresses(self.spec.memory.size, window, amd=self.facts.cpu_vendor == "AuthenticAMD")
        bits = guest_address_bits(self.accel, self.spec.cpu.model, self.vfio.address_bits)
        if bits and top > 1 << bits:
            self.problems.append(
                Problem(
                    "device",
                    f"the devices' memory needs a window of {format_size(window)} above {format_size(self.spec.memory.size)} of "
                    f"RAM, which ends at {format_size(top)}; the guest's CPU has addresses of {bits} bits, up to "
                    f"{format_size(1 << bits)}; under KVM leave cpu.model out or add host-phys-bits=on to it, or pass fewer devices",
                )
            )
        return window


def device_errors(address: str, fact: PciFact | None, passed: Iterable[str]) -> list[str]:
    """Return what keeps the device at *address* from being passed, whatever the way; *passed* are all that are to be."""
    if fact is None:
        return [f"there is no PCI device {address} here; `lspci -D` lists them"]
    if fact.silent:
        what = "does not answer: its configuration space reads as nothing but ones"
        return [f"{address} ({fact.name}) {what}; reset it, or switch the machine off and on"]
    if fact.group is None:
        remedy = "switch on VT-d or AMD-Vi in the firmware, and boot the node with intel_iommu=on (AMD: amd_iommu=on)"
        return [f"{address} ({fact.name}) has no IOMMU group, so the IOMMU is off; {remedy}"]
    reasons = []
    if not fact.vfio:
        bound = f"is bound to {fact.driver!r}, not to vfio-pci" if fact.driver else "is bound to no driver"
        reasons.append(f"{address} ({fact.name}) {bound}; {BIND.format(address)}")
    reasons += [
        f"{address} shares its IOMMU group {fact.group} with {member.address}, which is bound to {member.driver!r} and "
        f"could reach the guest's memory; {BIND.format(member.address)}"
        for member in fact.members
        if not member.bridge and member.driver is not None and member.address not in set(passed)
    ]
    if fact.group_node is not None and fact.group_node.busy:
        node = fact.group_node.path
        reasons.append(f"{address} is in use: somebody else has {node} open; {HOLDER.format(node)}")
    return reasons


def _node_error(node: DeviceNode | None, what: str) -> str | None:
    if node is None:
        return f"the kernel makes no {what}"
    if node.error is None or node.busy:
        return None
    return f"{node.path}: {node.error}; {GIVE.format(node.path)}"


def legacy_error(fact: PciFact, vfio: VfioFacts) -> str | None:
    """Return why the device cannot be passed by its group."""
    return _node_error(vfio.container, "/dev/vfio/vfio") or _node_error(
        fact.group_node, "nodes of IOMMU groups (CONFIG_VFIO_GROUP)"
    )


def iommufd_error(fact: PciFact, vfio: VfioFacts) -> str | None:
    """Return why the device cannot be passed by descriptor."""
    version = re.match(r"([0-9]+)\.([0-9]+)", vfio.qemu_version, re.ASCII)
    if version is None or (int(version[1]), int(version[2])) < IOMMUFD_SINCE:
        return f"QEMU {vfio.qemu_version or 'of unknown version'} is older than {'.'.join(map(str, IOMMUFD_SINCE))}"
    return _node_error(vfio.iommufd, "/dev/iommu (CONFIG_IOMMUFD)") or _node_error(
        fact.device_node, "nodes of VFIO devices (CONFIG_VFIO_DEVICE_CDEV)"
    )


def device_remarks(fact: PciFact) -> Iterator[str]:
    """Yield what is not as it should be with a device that can be passed."""
    if not fact.resets:
        yield (
            f"{fact.address} ({fact.name}) cannot be reset by itself: what one guest leaves in it, the next one finds; "
            "see its reset_method in sysfs"
        )
    link = fact.link
    if link is not None and link.best_width and (link.width < link.best_width or link.speed != link.best_speed):
        yield f"{fact.address} ({fact.name}): {link_words(link)}"


def link_words(link: PciLink) -> str:
    """Return what is wrong with a link that is not at its best."""
    best = f"{link.best_speed} x{link.best_width}"
    if link.width == 0:
        return f"its PCI Express link is down (its best is {best}); look at its seat and power"
    rest = "; an idle GPU lowers its speed" if link.width == link.best_width else "; look at its seat, riser and slot"
    return f"its PCI Express link is {link.speed} x{link.width}, its best is {best}{rest}"


def bar_window(devices: Iterable[Iterable[Bar]]) -> int:
    """Return the bytes of addresses, a power of two, that hold the high regions of *devices*, each behind a port of its own.

    A port's window begins at a multiple of its largest region and is a multiple of it, so ports sorted by that leave no
    gaps; and regions, as firmware sorts them, leave none in it. The emulated devices' small ones come after them.
    """
    total = 0
    for bars in devices:
        high = [bar.size for bar in bars if bar.high]
        if high:
            total += _up(sum(high), max(*high, PORT_GRAIN))
    return 1 << (total + OTHERS - 1).bit_length() if total else 0


def _up(value: int, grain: int) -> int:
    return -(-value // grain) * grain


def top_of_addresses(memory: int, window: int, *, amd: bool) -> int:
    """Return where *window*, which begins at a multiple of its size as OVMF puts it, ends above *memory* bytes of RAM."""
    ram = 4 * GIB + max(0, memory - LOW_RAM)
    top = _up(ram, window) + window
    if amd and top > HYPERTRANSPORT:
        top = _up(1024 * GIB + max(0, memory - LOW_RAM), window) + window
    return top


def guest_address_bits(accel: str, model: str | None, host: int) -> int:
    """Return how many bits a physical address of the guest has; 0 where that is not known."""
    if accel != "kvm":
        return EMULATED_BITS
    told = re.search(r",phys-bits=([0-9]+)", model or "", re.ASCII)
    if told is not None:
        return int(told[1])
    whole = model is None or re.match(r"(host|max)\b", model) or ",host-phys-bits=on" in model
    return host if whole else EMULATED_BITS
