"""The guest's PCI Express tree for the passed-through devices, modelled on the host's.

NCCL, UCX and ``nvidia-smi topo`` judge by this tree which NIC is next to which GPU. So two devices that share a switch on the host share
one in the guest, and those of one root complex are behind one host bridge, on its NUMA node. Parts that no two devices share are left out,
because they change no relation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from runner.base.values import frozen
from runner.facts.host import parse_version
from runner.facts.pci import PciBridge, PciFact, PciLink
from runner.plan.passthrough_plan import FIRST_BRIDGE, LAST_BUS, ROOT_BUS, LinkSpeed, PciHostBridge, PciPort, PortKind
from runner.plan.problems import Problems
from runner.spec.instance import DeviceTopology

SLOTS = 32
"""Device numbers on a bus."""
LAST_CHASSIS = 127
"""Chassis numbers of these ports are 1 to this one; higher ones are for the ports of disks (``plan/argv/qemu.py``)."""

SPEEDS = {2.5: "2_5", 5.0: "5", 8.0: "8", 16.0: "16", 32.0: "32", 64.0: "64"}
"""Transfers per second in thousands of millions → the value of ``x-speed`` of a root port."""
FASTER_SINCE, SLOWER_FASTEST = (9, 1), 16.0
"""QEMU before the first version refuses speeds above the second value."""


@frozen
class Placed:
    """A device to be placed: *numa_node* is the guest's, ``None`` if it sees none."""

    fact: PciFact
    numa_node: int | None
    topology: DeviceTopology


@frozen
class DevicePlace:
    """The place of a device in the guest."""

    bus: str
    port: str
    function: int
    multifunction: bool
    address: str
    link: LinkSpeed | None


@frozen
class GuestTree:
    """The guest's host bridges and ports, and the place of each device by its address on the host."""

    bridges: tuple[PciHostBridge, ...]
    ports: tuple[PciPort, ...]
    places: Mapping[str, DevicePlace]


class _Slot:
    """Functions of one device that share a slot, the path to it on the host, and its link."""

    def __init__(self, devices: Sequence[Placed]) -> None:
        self.devices = devices
        first = devices[0]
        self.bridges = first.fact.bridges if first.topology == "host" else ()

    def way(self) -> tuple[str, ...]:
        """Return the addresses on the path to it, the sort key of slots whose path is known."""
        return (*(bridge.address for bridge in self.bridges), self.devices[0].fact.address) if self.bridges else ()


class _Switch:
    """A switch of the host, or a bus shared by several devices, which is shown as a switch."""

    def __init__(self, port: PciBridge, way: Sequence[PciBridge]) -> None:
        self.port, self.way = port, way
        self.items: dict[str, _Switch | _Slot] = {}
        """The switches and slots below it, in the host's order."""

    def below(self, port: PciBridge, way: Sequence[PciBridge]) -> _Switch:
        """Return the switch below this one that begins with *port*."""
        switch = self.items.get(port.address)
        if not isinstance(switch, _Switch):
            switch = self.items[port.address] = _Switch(port, way)
        return switch


def guest_tree(devices: Iterable[Placed], numa_nodes: int, qemu_version: str, problems: Problems) -> GuestTree:
    """Return the tree for *devices* of a guest with *numa_nodes*; refuse devices that do not fit into it."""
    groups: dict[tuple[str, int | None], list[_Slot]] = {}
    for slot in _slots(devices):
        groups.setdefault(_group(slot.devices[0]), []).append(slot)
    root_bus = groups.pop(_ON_ROOT_BUS, [])
    if len(groups) == 1 and numa_nodes == 1:  # the root bus is that root complex
        root_bus += groups.popitem()[1]
    builder = _Builder(qemu_version)
    builder.build(ROOT_BUS, 0, root_bus)
    needed = sum(_Builder("").build("", 0, slots) + 1 for slots in groups.values())
    spare = (LAST_BUS - FIRST_BRIDGE - needed) // max(1, len(groups))
    number, bridges = FIRST_BRIDGE, []
    for index, ((root, numa_node), slots) in enumerate(sorted(groups.items(), key=_order)):
        bridges.append(PciHostBridge(f"pcie.{index + 1}", number, numa_node, root))
        number = builder.build(f"pcie.{index + 1}", number, slots) + 1 + spare
    if spare < 0:
        problems.refuse(
            "device",
            f"the guest's PCI tree takes {needed} bus numbers, and {LAST_BUS - FIRST_BRIDGE} are there for it",
            'pass fewer to one instance, or set device.topology = "numa", which shows no switches',
        )
    for bus, ports in Counter(port.bus for port in builder.ports).items():
        if ports > SLOTS and bus != ROOT_BUS:  # for the root bus: runner.plan.machine.refuse_too_few_slots
            problems.refuse(
                "device",
                f"{ports} devices would be on the guest's bus {bus!r}, which takes {SLOTS}",
                "pass fewer to one instance, or give it CPUs of every NUMA node that its devices are on",
            )
    if builder.chassis > LAST_CHASSIS:
        problems.refuse(
            "device",
            f"the guest's PCI tree takes {builder.chassis} ports, and {LAST_CHASSIS} can be numbered",
            "pass fewer to one instance",
        )
    return GuestTree(tuple(bridges), tuple(builder.ports), builder.places)


_ON_ROOT_BUS = ("", -1)


def _group(placed: Placed) -> tuple[str, int | None]:
    """Return the root complex and the guest's NUMA node of *placed*, which all devices behind one host bridge share."""
    match placed.topology:
        case "host" if placed.fact.root:
            return (placed.fact.root, placed.numa_node)
        case "host" | "numa" if placed.numa_node is not None:
            return ("", placed.numa_node)
        case _:
            return _ON_ROOT_BUS


def _order(group: tuple[tuple[str, int | None], object]) -> tuple[str, int]:
    """Return the key that sorts host bridges in the host's order."""
    (root, numa_node), _ = group
    return (root, -1 if numa_node is None else numa_node)


def _slots(devices: Iterable[Placed]) -> Iterator[_Slot]:
    """Yield the functions of each device together; a virtual function counts as a device of its own."""
    slots: dict[str, list[Placed]] = {}
    for each in devices:
        fact = each.fact
        slots.setdefault(fact.address if fact.physical_function else fact.slot, []).append(each)
    return (_Slot(sorted(slot, key=lambda each: each.fact.address)) for slot in slots.values())


@frozen
class _Bus:
    """A bus with ports: *bridge* is the host bridge above it."""

    bridge: str
    name: str
    kind: PortKind
    """The kind of these ports."""
    number: int


class _Builder:
    """Numbers ports and buses in the order in which firmware does: depth first, by device number."""

    def __init__(self, qemu_version: str) -> None:
        self._fastest = max(SPEEDS) if parse_version(qemu_version) >= FASTER_SINCE else SLOWER_FASTEST
        self.ports: list[PciPort] = []
        self.places: dict[str, DevicePlace] = {}
        self.chassis = self._switches = 0

    def build(self, bus: str, number: int, slots: Sequence[_Slot]) -> int:
        """Place *slots* behind the host bridge *bus*, whose bus has this *number*; return the last number in use."""
        top = _Switch(PciBridge(""), ())
        for slot in sorted(slots, key=_Slot.way):
            _add(top, slot)
        last, on = number, _Bus(bus, bus, "root", number)
        for index, item in enumerate(top.items.values()):
            last = self._behind(on, None if bus == ROOT_BUS else index, last, _essence(item))
        return last

    def _behind(self, on: _Bus, place: int | None, last: int, item: _Switch | _Slot) -> int:
        """Put a port in the slot *place* of the bus *on*, and *item* behind it; return the last bus number in use."""
        self.chassis += 1
        name, own = f"port{self.chassis - 1}", last + 1
        way = item.way if isinstance(item, _Switch) else item.bridges
        end = item.port.link if isinstance(item, _Switch) else item.devices[0].fact.link
        link = _slowest(way if on.kind == "root" else way[-1:], end)
        host = way[-1] if way else PciBridge("")
        self.ports.append(
            PciPort(
                name,
                on.kind,
                on.name,
                place,
                self.chassis,
                speed=self._speed(link) if on.kind == "root" else "",
                link=link,
                host=host.address,
                host_name=host.name,
                address="" if place is None else f"0000:{on.number:02x}:{place:02x}.0",
            )
        )
        if isinstance(item, _Slot):
            functions = [int(each.fact.address[-1]) for each in item.devices]
            if functions[0] != 0:  # the guest looks for other functions only where it finds function 0
                functions = list(range(len(functions)))
            for function, each in zip(functions, item.devices, strict=True):
                address = f"0000:{own:02x}:00.{function}"
                several = len(functions) > 1
                self.places[each.fact.address] = DevicePlace(on.bridge, name, function, several, address, link)
            return own
        self._switches += 1
        switch = f"switch{self._switches - 1}"
        names = f"{item.port.name} {item.port.subsystem}".strip()
        address = f"0000:{own:02x}:00.0"
        self.ports.append(
            PciPort(switch, "upstream", name, 0, 0, link=link, host=item.port.address, host_name=names, address=address)
        )
        inside = _Bus(on.bridge, switch, "downstream", own + 1)
        last = inside.number
        for index, below in enumerate(item.items.values()):
            last = self._behind(inside, index, last, below)
        return last

    def _speed(self, link: LinkSpeed | None) -> str:
        if link is None:
            return ""
        fitting = [speed for speed in SPEEDS if speed <= min(gigatransfers(link.speed), self._fastest)]
        return SPEEDS[max(fitting)] if fitting else ""


def _add(top: _Switch, slot: _Slot) -> None:
    """Add *slot* below *top*, under each switch on its path on the host."""
    way, at = slot.bridges, top
    for index, bridge in enumerate(way):
        if index == 0 or slot.devices[0].fact.begins_switch(index):
            at = at.below(bridge, way[:index])
    at.items[slot.devices[0].fact.address] = slot


def _essence(item: _Switch | _Slot) -> _Switch | _Slot:
    """Return the part of *item* that its devices share: a switch with a single path through it is replaced by its content."""
    while isinstance(item, _Switch) and len(item.items) == 1:
        item = next(iter(item.items.values()))
    return item


def _slowest(way: Sequence[PciBridge], end: PciLink | None) -> LinkSpeed | None:
    """Return the lowest speed and width on the path *way* that ends in the link *end*; ``None`` if unknown."""
    links = [link for link in (*(bridge.link for bridge in way), end) if link is not None]
    speeds = [link.best_speed for link in links if gigatransfers(link.best_speed)]
    # An idle link lowers only its speed, not its width.
    widths = [width for link in links for width in (link.width, link.best_width) if width]
    return LinkSpeed(min(speeds, key=gigatransfers), min(widths)) if speeds and widths else None


def gigatransfers(speed: str) -> float:
    """Return the number in sysfs's form of a link's *speed*; 0 if there is none (``Unknown``)."""
    match = re.match(r"[0-9]+(\.[0-9]+)?", speed, re.ASCII)
    return float(match[0]) if match else 0.0
