"""The plan of PCI devices that are passed through: the VFIO backend of each, and its bus in the guest.

Only a plan with devices imports this module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import assert_never

import attrs

from runner.base.errors import RefusedError
from runner.base.table import some
from runner.base.values import frozen
from runner.facts.host import HostFacts, User, format_version, parse_version
from runner.facts.pci import Bar, ClaimFile, DeviceNode, GroupMember, PciFact, VfioFacts
from runner.placement.guest_topology import GuestTopology
from runner.plan.guest_addresses import guest_address_bits, round_up, top_of_addresses
from runner.plan.host_checks import DENIED, LET_IN
from runner.plan.machine import Accel
from runner.plan.passthrough_plan import ROOT_BUS, DevicePlan, PassthroughPlan, PciPort, VfioBackend
from runner.plan.pci_judgements import device_remarks
from runner.plan.pci_tree import DevicePlace, GuestTree, Placed, guest_tree
from runner.plan.problems import Problems, Reason
from runner.plan.qemu_limits import HOLE
from runner.spec.instance import PCI_ADDRESS, DeviceSpec, InstanceSpec
from runner.spec.rules import MIB, format_size

PREFIXES = ("PCI_RESOURCE", "PCIDEVICE")
"""The beginning of a device plugin's variable, which ``_`` and the resource's name follow (``ResourceNameToEnvVar``): of
KubeVirt's and NVIDIA's plugins, and of the SR-IOV plugin."""
MEDIATED_PREFIX = "MDEV_PCI_RESOURCE"

IOMMUFD_SINCE = (9, 0)
"""The first version of QEMU with iommufd."""
CLIQUE = "x-nv-gpudirect-clique"
"""The property that declares which GPUs can access each other's memory. Only a legacy VFIO container maps device memory:
iommufd maps only RAM (QEMU's ``backends/iommufd.c``, before Linux 6.19)."""

PORT_GRAIN = 1 << 20
"""Bytes; the window of a PCI bridge is a multiple of it."""
OTHERS = 256 * MIB
"""Bytes of the window for the machine's other devices: 16 KiB for a virtio device, 2 MiB for a port for disks attached later."""

BIND = (
    "bind it: driverctl set-override {0} vfio-pci (or write vfio-pci to its driver_override and {0} to drivers_probe)"
)
GIVE = "give the container the node: by a device plugin's resource or a resource claim, or `--device {0}`"
WEDGED = "look at its slot and power; if it was a guest's before, that guest or its reset has left it so: switch the machine off and on"
NOT_MEDIATED = "use whole devices or SR-IOV functions"
HOLDER = "end the other instance or process; `fuser {0}` on the node names it"


def resource_variables(resource: str) -> tuple[str, ...]:
    """Return the variables in which device plugins list the devices of *resource*; hyphens are kept."""
    word = resource.upper().replace("/", "_").replace(".", "_")
    return tuple(f"{prefix}_{word}" for prefix in PREFIXES)


def listed(variables: Iterable[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses in *variables* of *environment*, each once, in their order."""
    words = [
        word.strip().lower() for name in variables for word in environment.get(name, "").split(",") if word.strip()
    ]
    return tuple(dict.fromkeys(words))


@frozen
class DriverLocation:
    """The place of a device on the host according to the driver of a resource claim."""

    numa_node: int | None = None
    """``None`` if the driver names none."""
    pcie_root: str | None = None
    """The host bridge; ``None`` if the driver names none."""


@frozen
class Asked:
    """One PCI device that ``device[index]`` of the spec asks for."""

    index: int
    address: str
    device: DeviceSpec
    location: DriverLocation = DriverLocation()


_Given = dict[str, DriverLocation]
"""PCI address of each device given to the container → the place named with it."""


def given_addresses(
    devices: Sequence[DeviceSpec], environment: Mapping[str, str], claims: Mapping[str, tuple[ClaimFile, ...]]
) -> tuple[str, ...]:
    """Return the addresses of all devices from which :func:`asked_devices` chooses."""
    addresses: dict[str, None] = {}
    for device in devices:
        try:
            addresses |= dict.fromkeys([device.address] if device.address else _given(device, environment, claims))
        except RefusedError:  # asked_devices reports the reason
            continue
    return tuple(addresses)


def asked_devices(
    devices: Sequence[DeviceSpec],
    environment: Mapping[str, str],
    claims: Mapping[str, tuple[ClaimFile, ...]],
    facts: Mapping[str, PciFact],
    problems: Problems,
) -> list[Asked]:
    """Return the devices that the spec requests; refuse tables whose devices are unknown.

    *environment*, *claims* and *facts* are those of :class:`~runner.facts.pci.VfioFacts`.
    """
    asked: list[Asked] = []
    taken = {device.address for device in devices if device.address is not None}
    for index, device in enumerate(devices):
        if device.address is not None:
            asked.append(Asked(index, device.address, device))
            continue
        try:
            found = _share(device, _given(device, environment, claims), taken, facts)
        except RefusedError as error:
            key = next(name for name in ("claim", "variable", "resource") if getattr(device, name) is not None)
            problems.refuse(f"device[{index}].{key}", error.message, error.remedy)
            continue
        taken |= found.keys()
        asked += [Asked(index, address, device, location) for address, location in found.items()]
    return asked


def _given(device: DeviceSpec, environment: Mapping[str, str], claims: Mapping[str, tuple[ClaimFile, ...]]) -> _Given:
    """Return the container's devices under the name in *device*, which has no address of its own."""
    if device.claim is not None:
        return _of_claim(device.claim, device.request, claims.get(device.claim, ()))
    if device.variable is not None:
        return _of_variable(device.variable, environment)
    return _of_resource(device.resource or "", environment)


def _share(device: DeviceSpec, given: _Given, taken: Collection[str], facts: Mapping[str, PciFact]) -> _Given:
    """Return the devices of *given* for *device*, without those *taken*; companions are included with their devices."""
    left: dict[str, list[str]] = {}
    for address in given:
        if address not in taken:
            left.setdefault(_accompanied(address, given, facts), []).append(address)
    wanted = len(left) if device.count is None else device.count
    if not left or len(left) < wanted:
        everything = ", ".join(given)
        why = f"{len(left)} are left of the {len(given)} that were given ({everything})"
        where = "the resource claim" if device.resource is None else f"`{device.resource}` in the container's limits"
        raise RefusedError(f"asks for {wanted or 'some'}, but {why}", remedy=f"ask for more of {where}")
    chosen = {address for each in list(left.values())[:wanted] for address in each}
    return {address: location for address, location in given.items() if address in chosen}


def _accompanied(address: str, given: Collection[str], facts: Mapping[str, PciFact]) -> str:
    """Return the address of the device that the one at *address* belongs to, as a GPU's audio function does; otherwise *address*.

    Some device plugins list every function of an IOMMU group. A companion shares slot and group with a function before it
    and is of another class: two ports of a NIC are two devices.
    """
    fact = facts.get(address)
    if fact is None or fact.physical_function or fact.group is None:
        return address
    siblings = (facts[each] for each in sorted(given) if each in facts)
    first = next(each for each in siblings if (each.slot, each.group) == (fact.slot, fact.group))
    return address if first.device_class >> 16 == fact.device_class >> 16 else first.address


def _of_resource(resource: str, environment: Mapping[str, str]) -> _Given:
    """Return the devices that a device plugin has allocated."""
    variables = resource_variables(resource)
    everything = listed(variables, environment)
    if everything:
        return _checked(everything)
    mediated = f"{MEDIATED_PREFIX}_{variables[0].removeprefix(PREFIXES[0] + '_')}"
    if environment.get(mediated):
        raise RefusedError(f"{mediated} names mediated devices, which cannot be passed through", remedy=NOT_MEDIATED)
    raise RefusedError(
        f"no device is given for it: neither of {' and '.join(variables)} is in the environment",
        remedy=f"ask for `{resource}` in the container's limits, or name the address",
    )


def _of_variable(variable: str, environment: Mapping[str, str]) -> _Given:
    """Return the devices in a variable that a DRA driver sets."""
    everything = listed((variable,), environment)
    if not everything:
        remedy = "list the claim in the container's resources.claims, and name the variable that its driver sets by CDI"
        raise RefusedError(f"the environment has no address in {variable}", remedy=remedy)
    return _checked(everything)


def _checked(addresses: Iterable[str]) -> _Given:
    wrong = next((each for each in addresses if not re.fullmatch(PCI_ADDRESS, each, re.ASCII)), None)
    if wrong is not None:
        raise RefusedError(f"the environment lists {wrong!r} for it, which is no PCI address")
    return dict.fromkeys(addresses, DriverLocation())


def _of_claim(claim: str, request: str | None, files: Sequence[ClaimFile]) -> _Given:
    """Return the devices of *claim*, of one *request* or of all, from the *files* of its drivers."""
    if not files:
        raise RefusedError(
            f"the container has no file about the devices of a claim {claim!r}",
            remedy="list the claim in the container's resources.claims, and let its driver write device metadata (KEP-5304, "
            "Kubernetes 1.36)",
        )
    kinds = {each.path.parents[1] for each in files}
    if len(kinds) > 1:
        raise RefusedError(
            f"two claims have this name, {' and '.join(sorted(map(str, kinds)))}",
            remedy="give the entry with the template another name in the pod's resourceClaims",
        )
    chosen = [each for each in files if request in {None, each.request}]
    if not chosen:
        has = ", ".join(dict.fromkeys(each.request for each in files))
        raise RefusedError(
            f"the container has no devices of its request {request!r}, but of {has}",
            remedy="list the request in the container's resources.claims, or name another one",
        )
    return dict(given for file in chosen for given in _of_file(file))


def _of_file(file: ClaimFile) -> Iterator[tuple[str, DriverLocation]]:
    if file.error is not None:
        raise RefusedError(f"{file.path}: {file.error}")
    if not file.devices:
        raise RefusedError(f"{file.path} names no device", remedy="see the log of its driver on this node")
    for device in file.devices:
        what = f"the device {device.name!r} of the driver {device.driver}"
        if device.address is None and any(name.lower().endswith("mdevuuid") for name in device.attributes):
            raise RefusedError(f"{what} is a mediated device, which cannot be passed through", remedy=NOT_MEDIATED)
        if device.address is None:
            has = some(device.attributes, 32) or "none"
            raise RefusedError(
                f"{file.path} does not say the PCI address of {what} (resource.kubernetes.io/pciBusID), and its attributes are {has}",
                remedy="name the request of the PCI devices in `request`, use a driver that says their addresses, or name the address",
            )
        if not re.fullmatch(PCI_ADDRESS, device.address, re.ASCII):
            raise RefusedError(f"{file.path} says {device.address!r} for {what}, which is no PCI address")
        yield device.address, DriverLocation(device.numa_node, device.pcie_root)


def plan_passthrough(
    spec: InstanceSpec, topology: GuestTopology, facts: HostFacts, user: User, accel: Accel, problems: Problems
) -> PassthroughPlan:
    """Plan every device of *spec*; QEMU runs as *user*."""
    planner = _DevicePlanner(spec, topology, facts, user, problems)
    return planner.plan(accel)


class _DevicePlanner:
    """The values that the decisions about all devices of one instance share; only *problems* changes."""

    def __init__(
        self, spec: InstanceSpec, topology: GuestTopology, facts: HostFacts, user: User, problems: Problems
    ) -> None:
        self._spec, self._topology, self._facts, self._user, self._problems = spec, topology, facts, user, problems
        self._vfio = facts.vfio or VfioFacts()
        vfio = self._vfio
        self._asked = asked_devices(spec.device, vfio.environment, vfio.claims, vfio.devices, problems)

    def plan(self, accel: Accel) -> PassthroughPlan:
        facts = [(each, self._fact(each)) for each in self._asked]
        preferred = self._preferred([fact for _, fact in facts if fact is not None])
        passed = {each.address for each in self._asked}
        plans: dict[str, DevicePlan] = {}
        placed = []
        for each, fact in facts:
            where = f"device[{each.index}]"
            errors = device_errors(each.address, fact, passed)
            for message, remedy in errors:
                self._problems.refuse(where, message, remedy)
            if fact is not None and not errors:
                plan = self._device(where, each, fact, preferred)
                if plan is not None:
                    plans[each.address] = plan
                    placed.append(Placed(fact, plan.guest_numa_node, each.device.topology))
        self._problems.remarks += device_remarks([each.fact for each in placed])
        self._remark_hidden(placed)
        tree = guest_tree(placed, len(self._topology.numa_nodes), self._facts.qemu_version, self._problems)
        devices = tuple(_in_place(plan, tree.places[address]) for address, plan in plans.items())
        used = any(plan.vfio_backend == "iommufd" for plan in devices)
        iommufd = self._vfio.iommufd.path if used else None
        return PassthroughPlan(devices, iommufd, self._window(tree, accel), tree.bridges, tree.ports)

    def _fact(self, asked: Asked) -> PciFact | None:
        """Return the facts about the requested device; the driver's NUMA node is used if the firmware reports none.

        The same holds for its root complex, if sysfs does not show it.
        """
        fact = self._vfio.devices.get(asked.address)
        if fact is not None and not fact.root and asked.location.pcie_root is not None:
            fact = attrs.evolve(fact, root=asked.location.pcie_root)
        if fact is None or asked.location.numa_node in {None, fact.numa_node}:
            return fact
        if fact.numa_node < 0:
            return attrs.evolve(fact, numa_node=asked.location.numa_node)
        self._problems.remark(
            "device",
            f"{fact.address} is on NUMA node {fact.numa_node} by its sysfs, and on {asked.location.numa_node} by the driver of the "
            f"claim {asked.device.claim!r}; the first counts",
        )
        return fact

    def _preferred(self, facts: Sequence[PciFact]) -> tuple[VfioBackend, VfioBackend]:
        """Return the backends in the order of preference for ``iommu = "auto"``: with one for all devices, RAM is locked once."""
        named = {each.device.iommu for each in self._asked} - {"auto"}
        cliques = any(name == CLIQUE for each in self._asked for name, _ in each.device.properties)
        legacy = "legacy" in named or cliques
        if not named and not legacy:
            legacy = any(iommufd_error(fact, self._vfio, self._facts.qemu_version) is not None for fact in facts)
        return ("legacy", "iommufd") if legacy else ("iommufd", "legacy")

    def _device(
        self, where: str, asked: Asked, fact: PciFact, preferred: tuple[VfioBackend, VfioBackend]
    ) -> DevicePlan | None:
        backends = preferred if asked.device.iommu == "auto" else (asked.device.iommu,)
        errors = {backend: backend_error(backend, fact, self._vfio, self._facts.qemu_version) for backend in backends}
        backend = next((backend for backend, error in errors.items() if error is None), None)
        if backend is None:
            why = "; ".join(f"not by {backend!r}: {error}" for backend, error in errors.items())
            self._problems.refuse(f"{where}.iommu", f"{fact.address} cannot be passed through; {why}")
            return None
        group, node = fact.group_node, fact.device_node
        if CLIQUE in dict(asked.device.properties) and backend == "iommufd":
            self._problems.remark(
                "device",
                f"{fact.address} has {CLIQUE}, but with iommufd no device can access another's memory: the guest's drivers "
                "detect that",
                'use iommu = "legacy"',
            )
        guest = self._guest_numa_node(fact)
        lends = backend == "legacy" and self._user.user_id and group and not group.everyone
        return DevicePlan(
            address=fact.address,
            sysfs=fact.sysfs,
            name=fact.name,
            driver=fact.driver or "",
            vfio_backend=backend,
            group_node=None if group is None or (group.error is not None and not group.busy) else group.path,
            device_node=node.path if node is not None and backend == "iommufd" else None,
            lent_to=self._user.user_id if lends else None,
            bus=ROOT_BUS,
            host_numa_node=fact.numa_node,
            guest_numa_node=guest,
            memory=sum(bar.size for bar in fact.bars),
            properties=asked.device.properties,
            rom=asked.device.rom,
            device_class=fact.device_class,
        )

    def _guest_numa_node(self, fact: PciFact) -> int | None:
        """Return the guest's NUMA node for the device's node on the host; ``None`` if there is none or the guest has only one."""
        numa_nodes = self._topology.numa_nodes
        several = len(self._facts.hardware.numa_nodes) > 1
        if fact.numa_node < 0:
            if several:
                self._problems.remark(
                    "device",
                    f"the firmware does not report the NUMA node of {fact.address}, so the guest does not see one either",
                )
            return None
        near = next((number for number, each in enumerate(numa_nodes) if each.host == fact.numa_node), None)
        if self._spec.cpu.topology == "host" and near is None and several:
            hosts = ", ".join(str(each.host) for each in numa_nodes)
            self._problems.remark(
                "device",
                f"{fact.address} is on the host's NUMA node {fact.numa_node}, the vCPUs are on {hosts}: every access goes "
                "farther",
                "let the Topology Manager align devices and CPUs (policy restricted or single-numa-node)",
            )
        return near if len(numa_nodes) > 1 else None

    def _remark_hidden(self, placed: Sequence[Placed]) -> None:
        hidden = [each.fact.address for each in placed if each.topology == "host" and not each.fact.root]
        if hidden and len(placed) > 1:
            self._problems.remark(
                "device",
                "the guest cannot see which NIC is next to which GPU, and NCCL may leave GPUDirect RDMA off: sysfs does not show "
                f"the bridges above {some(hidden)}",
                "let the container see the host's /sys/devices",
            )

    def _window(self, tree: GuestTree, accel: Accel) -> int | None:
        bars: dict[str, list[Bar]] = {}
        for address, place in tree.places.items():
            bars.setdefault(place.port, []).extend(self._vfio.devices[address].bars)
        window = tree_window(tree.ports, bars)
        if window <= HOLE:
            return None
        size = sum(each.memory for each in self._topology.numa_nodes)
        top = top_of_addresses(size, window, amd=self._facts.cpu_vendor == "AuthenticAMD")
        bits = guest_address_bits(accel, self._spec.cpu.model, self._facts.address_bits)
        if bits and top > 1 << bits:
            self._problems.refuse(
                "device",
                f"the devices' memory needs a window of {format_size(window)} above {format_size(size)} of "
                f"RAM, which ends at {format_size(top)}, and the guest has {bits} address bits ({format_size(1 << bits)})",
                "pass fewer devices, or under KVM add host-phys-bits=on to cpu.model, or leave it out",
            )
        return window


def device_errors(address: str, fact: PciFact | None, passed: Iterable[str]) -> list[Reason]:
    """Return the reasons why no backend can pass the device at *address* through.

    *passed* are the addresses of all devices to pass through.
    """
    if fact is None:
        return [Reason(f"there is no PCI device {address} here", "`lspci -D` lists them")]
    if fact.wedged is not None:
        return [Reason(f"{address} ({fact.name}) cannot be used: {fact.wedged}", WEDGED)]
    if fact.group is None:
        remedy = "switch on VT-d or AMD-Vi in the firmware, and boot the node with intel_iommu=on (AMD: amd_iommu=on)"
        return [Reason(f"{address} ({fact.name}) has no IOMMU group, so the IOMMU is off", remedy)]
    errors = []
    if not fact.vfio:
        bound = f"is bound to {fact.driver!r}, not to vfio-pci" if fact.driver else "is bound to no driver"
        errors.append(Reason(f"{address} ({fact.name}) {bound}", BIND.format(address)))
    errors += [
        Reason(_reachable_by(member, address, fact.group), BIND.format(member.address))
        for member in fact.members
        if not member.bridge and member.driver is not None and member.address not in set(passed)
    ]
    if fact.group_node is not None and fact.group_node.busy:
        node = fact.group_node.path
        errors.append(Reason(f"{address} is in use: another process has {node} open", HOLDER.format(node)))
    return errors


def _reachable_by(member: GroupMember, address: str, group: str) -> str:
    return (
        f"{address} shares its IOMMU group {group} with {member.address}, which is bound to {member.driver!r} and "
        "could reach the guest's memory"
    )


def _node_error(node: DeviceNode | None, what: str) -> str | None:
    if node is None:
        return f"the kernel makes no {what}"
    if node.error is None or node.busy:
        return None
    return f"{node.path}: {node.error}; {LET_IN if node.error == DENIED else GIVE.format(node.path)}"


def backend_error(backend: VfioBackend, fact: PciFact, vfio: VfioFacts, qemu_version: str) -> str | None:
    """Return the reason why *backend* cannot pass the device through; ``None`` if it can."""
    match backend:
        case "legacy":
            return legacy_error(fact, vfio)
        case "iommufd":
            return iommufd_error(fact, vfio, qemu_version)
        case other:
            assert_never(other)


def legacy_error(fact: PciFact, vfio: VfioFacts) -> str | None:
    """Return the reason why the device cannot be passed through by its IOMMU group; ``None`` if it can."""
    return _node_error(vfio.container, "/dev/vfio/vfio") or _node_error(
        fact.group_node, "nodes of IOMMU groups (CONFIG_VFIO_GROUP)"
    )


def iommufd_error(fact: PciFact, vfio: VfioFacts, qemu_version: str) -> str | None:
    """Return the reason why the device cannot be passed through by iommufd; ``None`` if it can."""
    if parse_version(qemu_version) < IOMMUFD_SINCE:
        return f"QEMU {qemu_version or 'of unknown version'} is older than {format_version(IOMMUFD_SINCE)}"
    return _node_error(vfio.iommufd, "/dev/iommu (CONFIG_IOMMUFD)") or _node_error(
        fact.device_node, "nodes of VFIO devices (CONFIG_VFIO_DEVICE_CDEV)"
    )


def tree_window(ports: Iterable[PciPort], bars: Mapping[str, Iterable[Bar]]) -> int:
    """Return the size of the address window for *ports* with the high regions of *bars* behind them: a power of two.

    The window of a port begins at a multiple of its largest region, and its size is one too; sorted by this size, ports
    leave no gaps, and neither do the regions in a port. The small regions of emulated devices follow.
    """
    behind: dict[str, list[PciPort]] = {}
    ports = tuple(ports)
    names = {port.name for port in ports}
    for port in ports:
        behind.setdefault(port.bus, []).append(port)

    def window(port: PciPort) -> tuple[int, int]:
        """Return size and alignment of the window of *port*; zeroes if nothing behind it has a high region."""
        parts = [(bar.size, bar.size) for bar in bars.get(port.name, ()) if bar.high]
        parts += [part for each in behind.get(port.name, ()) if (part := window(each)) != (0, 0)]
        if not parts:
            return 0, 0
        grain = max(PORT_GRAIN, *(alignment for _, alignment in parts))
        return round_up(sum(size for size, _ in parts), grain), grain

    total = sum(window(port)[0] for port in ports if port.bus not in names)
    return 1 << (total + OTHERS - 1).bit_length() if total else 0


def _in_place(plan: DevicePlan, place: DevicePlace) -> DevicePlan:
    return attrs.evolve(
        plan,
        bus=place.bus,
        port=place.port,
        function=place.function,
        multifunction=place.multifunction,
        guest_address=place.address,
        link=place.link,
    )
