"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_never

import attrs

from runner.base.subject import FORMAT, judgement_lines
from runner.placement.backends import ControllerPlacement
from runner.placement.guest_topology import GuestTopology
from runner.plan.disks import disk_words
from runner.plan.identity import Identity
from runner.plan.instance import InstancePlan
from runner.plan.machine import MachinePlan
from runner.plan.network_plan import EVERY, BridgedPlan, InheritedFdPlan, MacvtapPlan, NetworkPlan, PasstPlan
from runner.plan.network_planner import derived_mac
from runner.plan.passthrough_plan import ROOT_BUS, PassthroughPlan, PciPort
from runner.spec.rules import counted, format_size


def plan_json(plan: InstancePlan) -> dict[str, Any]:
    """Return *plan* as plain values; CPU sets, paths and addresses in their text forms."""
    plain = attrs.asdict(plan, filter=lambda field, _: field.name != "remarks", value_serializer=_plain)
    placement = {"backend": plan.placement.backend, "shared": plan.placement.shared, **plain.pop("placement")}
    guest_sees = {name: plain["machine"].pop(name) for name in ("networks", "shares")}
    judgements = [each.to_json() for each in plan.remarks]
    return {"version": FORMAT, **plain, "placement": placement, **guest_sees, "judgements": judgements}


def _plain(_instance: type, _attribute: object, value: object) -> object:
    if value is None or isinstance(value, str | int | float | list | tuple | dict) or attrs.has(type(value)):
        return value
    return str(value)


def plan_lines(plan: InstancePlan) -> Iterator[str]:
    """Yield a description of all steps, in their order, for an operator."""
    machine, placement = plan.machine, plan.placement
    vcpus = counted(machine.vcpus, "vCPU")
    yield f"instance {plan.name}: {vcpus}, {format_size(machine.memory)}, {machine.accel}, CPU model {machine.cpu_model}"
    yield f"  1 anchors    two of '{' '.join(plan.anchor)}' stay in the pod's cgroup"
    rest = "the node's shared CPUs" if isinstance(placement, ControllerPlacement) else f"'{placement.float_cpus}'"
    rest += " (shared with the vCPUs: no other CPU is left)" if placement.shared else ""
    yield f"  2 placement  {placement.backend}: this program, dnsmasq, virtiofsd and QEMU's own threads on {rest}"
    for number, network in enumerate(plan.networks):
        yield f"  3 network {number}  {_network(network, _derived(plan.identity, number, network))}"
    for share in plan.shares:
        kind = "Rust" if share.program.rust else "C"
        mode = "read-only" if share.read_only else "read-only as its mount" if share.mounted_read_only else "writable"
        yield f"  4 share      {share.path} as {share.tag!r}, {mode}, by {share.program.path} ({kind})"
    yield f"  5 console    {'standard output and ' if plan.console.stdout else ''}{plan.console.log}"
    yield f"  6 machine    {machine.program} as user {machine.user.name}, paused"
    if machine.kernel is not None:
        yield f"               starts the kernel {machine.kernel.path}"
    elif machine.firmware is not None:
        yield f"               starts the firmware {machine.firmware.path}"
    for disk in machine.disks:
        yield f"               disk {disk_words(disk)}"
    yield from _devices_of_guest(machine)
    yield from _guest(machine.topology)
    if machine.vcpu_hotplug is not None:
        yield f"               takes up to {machine.vcpu_hotplug.most} vCPUs while it runs"
    yield f"               {_ram(machine)}"
    yield from _devices(machine.passthrough)
    pins = ", ".join(f"{vcpu}→{cpu}" for vcpu, cpu in enumerate(placement.pins))
    yield f"  7 pins       vCPU→CPU {pins}; read back from the kernel, then the guest runs"
    shutdown = plan.shutdown
    yield (
        f"  8 SIGTERM    ACPI power button for up to {shutdown.power_down:g} s, then quit, SIGTERM and SIGKILL "
        f"within {shutdown.forced:g} s; then all of it from below"
    )
    yield from judgement_lines(plan.remarks)


def _devices_of_guest(machine: MachinePlan) -> Iterator[str]:
    variables, guest, seed = machine.firmware_vars, machine.guest, machine.seed
    if variables is not None:
        kept = "forgotten at the end" if variables.path is None else f"kept in {variables.path}"
        made = "" if variables.template is None else f", at first a copy of {variables.template}"
        yield f"               firmware variables {kept}{made}"
    if seed is not None:
        identity = f"instance-id {seed.instance_id}" if seed.instance_id else "your meta-data"
        yield f"               cloud-init seed: {identity}, user-data of {len(seed.user_data.content)} bytes"
    vsock = (
        None
        if guest.vsock is None
        else f"vsock {guest.vsock.cid}{'' if guest.vsock.exact else ' or the next free one'}"
    )
    watchdog = None if guest.watchdog is None else f"watchdog ({guest.watchdog})"
    has = [
        "entropy",
        "guest agent's channel" if guest.agent else None,
        "screen (VNC)" if machine.vnc else None,
        "BIOS on the serial console (with a VGA that is no screen)" if machine.bios_console else None,
        vsock,
        watchdog,
        f"clock in {guest.clock}",
    ]
    yield f"               has {', '.join(each for each in has if each is not None)}; no balloon"
    if guest.ready is not None:
        yield f"               is ready when it gives the sign {str(guest.ready)!r}"


def _guest(topology: GuestTopology) -> Iterator[str]:
    parts = (
        (topology.sockets, "socket"),
        (topology.dies, "L3 cache"),
        (topology.cores, "core"),
        (topology.threads, "thread"),
    )
    yield "               guest sees " + " of ".join(counted(number, what) for number, what in parts)
    for number, each in enumerate(topology.numa_nodes):
        where = (
            f"the host's NUMA node {' or '.join(map(str, each.bound))}" if each.bound else "any NUMA node of the host"
        )
        far = [f"{distance} to {other}" for other, distance in enumerate(each.distances) if other != number]
        yield (
            f"               NUMA node {number}: vCPUs {each.vcpus}, {format_size(each.memory)} from {where}"
            + (f"; distance {', '.join(far)}" if far else "")
        )


def _devices(passthrough: PassthroughPlan) -> Iterator[str]:
    for device in passthrough.devices:
        if device.guest_numa_node is None:
            where = "no NUMA node" if device.host_numa_node < 0 else f"NUMA node {device.host_numa_node}"
        else:
            where = f"NUMA node {device.host_numa_node}, the guest's {device.guest_numa_node}"
        memory = format_size(device.memory)
        yield f"               device {device.address} ({device.name}) by {device.vfio_backend}, on {where}, {memory} of device memory"
    if passthrough.window is not None:
        yield f"               {format_size(passthrough.window)} of addresses for device memory"
    yield from _tree(passthrough)


def _tree(passthrough: PassthroughPlan) -> Iterator[str]:
    """Yield the guest's PCI tree beside the host's: the guest's address, the kind of device, ``=``, the host's address."""
    if not passthrough.ports:
        return
    yield "               PCI tree of the guest = of the host (a bridge that no two devices share is not shown):"
    for bridge in (None, *(passthrough.bridges or ())):
        name = ROOT_BUS if bridge is None else bridge.name
        below = list(_below(passthrough, name, 2))
        if bridge is None and below:
            yield "                 the root bus"
        elif bridge is not None:
            near = "" if bridge.numa_node is None else f" on NUMA node {bridge.numa_node}"
            root = bridge.root or "the devices of this NUMA node"
            yield f"                 host bridge of bus {bridge.bus_number:02x}{near} = {root}"
        yield from below


def _below(passthrough: PassthroughPlan, bus: str, depth: int) -> Iterator[str]:
    indent = "               " + "  " * depth
    for port in passthrough.ports:
        if port.bus != bus:
            continue
        if port.kind == "upstream":
            yield f"{indent}{port.address} switch = {port.host} ({port.host_name.partition(' ')[0]}){_link(port)}"
        for device in passthrough.devices:
            if device.port == port.name:
                yield f"{indent}{device.guest_address} = {device.address} ({device.name}){_link(port)}"
        yield from _below(passthrough, port.name, depth + (port.kind == "upstream"))


def _link(port: PciPort) -> str:
    return "" if port.link is None else f", {port.link.speed.removesuffix(' PCIe')} x{port.link.width}"


def _ram(machine: MachinePlan) -> str:
    ram = machine.ram
    pages = "ordinary pages" if ram.page_size is None else f"huge pages of {format_size(ram.page_size)}"
    when = "all taken before the guest runs" if ram.preallocate else "taken as the guest uses it"
    locked = ", locked" if ram.locked else ""
    private = "" if ram.shared else ", QEMU's alone"
    return f"memory in {pages}{locked}{private}, {when}; at most {format_size(ram.overhead)} of overhead"


def _derived(identity: Identity, number: int, network: NetworkPlan) -> str:
    """Return the source of a derived MAC address, with a space before it; empty for one that was given or taken over."""
    return f" from {identity.origin}" if network.mac == derived_mac(identity, number) else ""


def _names(network: BridgedPlan) -> str:
    """Return the guest's name servers, and the options of the pod's resolver that it does not get."""
    servers = ", ".join(map(str, network.nameservers)) or "none"
    left = f" (without {' '.join(network.dns_options)}, which DHCP cannot say)" if network.dns_options else ""
    return f"DNS {servers} {' '.join(network.search)}".rstrip() + left


def _network(network: NetworkPlan, derived: str) -> str:
    guest = f"({network.mac}{derived}, MTU {network.mtu}"
    guest += f", {network.queues} queues)" if network.queues > 1 else ")"
    vhost = ", vhost-net"
    match network:
        case PasstPlan():
            ports = [*network.ports, *(f"{each}/udp" for each in network.udp_ports)]
            into = f"ports {', '.join(ports)} alone lead to it" if ports else "nothing reaches the guest"
            if network.ports == (EVERY,):
                into = "all of its TCP ports lead to it but those that the runner listens at and the ephemeral ones"
            return f"passt {guest}: the guest reaches what the pod reaches, and {into}"
        case MacvtapPlan():
            return f"macvtap {network.link} over {network.over} {guest}" + vhost * network.vhost
        case InheritedFdPlan():
            opened = f"{network.kind} inherited as {', '.join(network.fds)} {guest}"
            return opened + vhost * (network.vhost or bool(network.vhost_fds))
        case BridgedPlan():
            also = "" if network.ipv6 is None else f" and {network.ipv6.guest}"
            place = "" if network.pod is None else f", in the place of {network.pod.name}, {_names(network)}"
            return f"guest {network.guest}{also} {guest} on bridge {network.bridge}{place}" + vhost * network.vhost
        case other:
            assert_never(other)
