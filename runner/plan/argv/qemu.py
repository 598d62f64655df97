"""The argument list of QEMU: the same whether it reaches files and sockets by descriptors or by paths (:class:`Endpoints`)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from runner.plan.argv.block_nodes import block_nodes, disk_device, slot
from runner.plan.argv.preallocator import MOST_PREALLOCATORS
from runner.plan.argv.qemu_endpoints import Endpoints, comma
from runner.plan.host_checks import WORKERS
from runner.plan.machine import MachinePlan
from runner.plan.memory import TRANSLATED
from runner.plan.passthrough_plan import (
    FIRST_BRIDGE,
    LAST_BUS,
    ROOT_BUS,
    PassthroughPlan,
    PciHostBridge,
    PciPort,
    x_width,
)
from runner.spec.instance import WatchdogAction
from runner.spec.rules import MIB

SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
"""QEMU's seccomp sandbox."""
UNSEEN_VGA = "VGA,vgamem_mb=8"
"""The VGA of a guest without a screen: GRUB's ``gfxterm``, the default of distributions, hangs in a BIOS without video modes.

With ``graphics=off`` SeaBIOS also uses the first serial port, and shows the text output of boot loaders there (SeaBIOS's ``src/sercon.c``).
8 MiB are enough for 1280 by 1024 pixels, which are never shown.
"""

WATCHDOG_ACTIONS: dict[WatchdogAction, str] = {"reset": "reset", "exit": "pause", "nmi": "inject-nmi", "none": "none"}
"""``guest.watchdog`` → QEMU's action; its ``poweroff`` exits without an event, so QEMU pauses and this program ends it."""

FIRST_CHASSIS = 128
"""The first chassis number of the root ports for disks; 0 to 255 are possible."""


def qemu_argv(machine: MachinePlan, endpoints: Endpoints, *, paused: bool = True) -> list[str]:
    """Return QEMU's argv; *paused* machines (``-S``) run nothing until QMP ``cont``."""
    return [str(machine.program), *_qemu_options(machine, endpoints, paused=paused)]


def _qemu_options(machine: MachinePlan, endpoints: Endpoints, *, paused: bool) -> Iterator[str]:
    yield from ("-name", f"guest={machine.name},debug-threads=on")
    if machine.smbios_uuid is not None:
        yield from ("-uuid", machine.smbios_uuid)
    yield from ("-nodefaults", "-no-user-config")
    yield from ("-display", "none")
    # spawn=deny and resourcecontrol=deny are no obstacle: this program pins the threads and passes every descriptor.
    yield from ("-sandbox", SANDBOX)
    if paused:
        yield "-S"
        # QEMU keeps running after the guest's end, so that the SHUTDOWN event with its reason cannot be lost.
        reboot = "shutdown" if machine.on_reboot == "exit" else "reset"
        yield from ("-action", f"reboot={reboot},shutdown=pause,panic=pause")
    flash = "".join(
        f",pflash{unit}={node}"
        for unit, node, present in ((0, "firmware", machine.firmware), (1, "firmware-vars", machine.firmware_vars))
        if present is not None
    )
    ram = ",memory-backend=ram" if len(machine.topology.numa_nodes) == 1 else ""
    secure = ",smm=on" if machine.secure_boot else ""
    aux = ",aux-ram-share=on" if machine.updatable else ""
    serial = ",graphics=off" if machine.bios_console else ""
    irqchip = ",kernel-irqchip=split" if machine.remapping else ""
    yield from (
        "-machine",
        f"{machine.machine_type}{ram},dump-guest-core=off,vmport=off{aux}{secure}{serial}{irqchip}{flash}",
    )
    if machine.secure_boot:
        yield from ("-global", "driver=cfi.pflash01,property=secure,value=on")
    # No suspend to RAM or disk: nothing here would wake the guest, a guest that sleeps cannot be asked to power down, and
    # OVMF with SMM cannot resume and refuses to start where it might. Linux idles instead (s2idle), and its power button wakes it.
    yield from ("-global", "ICH9-LPC.disable_s3=1", "-global", "ICH9-LPC.disable_s4=1")
    yield from ("-accel", "kvm" if machine.accel == "kvm" else f"tcg,thread=multi,tb-size={TRANSLATED // MIB}")
    yield from ("-cpu", machine.cpu_model)
    yield from _topology(machine, endpoints)
    if machine.remapping:
        # Before all devices, whose interrupts it remaps; their DMA is left alone, but QEMU demands caching-mode for VFIO.
        caching = ",caching-mode=on" if machine.passthrough.devices else ""
        yield from ("-device", f"intel-iommu,intremap=on,eim=on,dma-translation=off{caching}")
    # Clock ticks that the guest missed are delivered later, so that its clock does not fall behind.
    yield from ("-rtc", f"base={machine.guest.clock},clock=host,driftfix=slew")
    yield from endpoints.monitor()
    yield from ("-serial", "chardev:console")
    yield from ("-device", "pvpanic-pci")
    yield from _boot(machine, endpoints)
    yield from _disks(machine, endpoints)
    yield from _networks(machine, endpoints)
    for index, share in enumerate(machine.shares):
        yield from ("-chardev", f"socket,id=share{index},{endpoints.share(index)}")
        yield from ("-device", f"vhost-user-fs-pci,chardev=share{index},tag={share.tag}")
    yield from _guest_devices(machine, endpoints)
    yield from _bridges(machine.passthrough.bridges, len(machine.topology.numa_nodes))
    yield from _passed(machine.passthrough, endpoints, firmware=machine.firmware is not None)
    yield from _slots(machine.slots)


def _topology(machine: MachinePlan, endpoints: Endpoints) -> Iterator[str]:
    """Yield vCPUs and memory; a guest with one NUMA node gets no ``-numa`` options."""
    topology = machine.topology
    sockets, cores, threads = topology.sockets, topology.cores, topology.threads
    dies = f"dies={topology.dies}," if topology.dies > 1 else ""
    possible = ""
    if machine.vcpu_hotplug is not None:  # one socket, some of whose cores are plugged later
        cores = machine.vcpu_hotplug.most
        possible = f"maxcpus={cores},"
    yield from ("-smp", f"cpus={machine.vcpus},{possible}sockets={sockets},{dies}cores={cores},threads={threads}")
    yield from ("-m", f"size={machine.memory // MIB}M")
    if machine.ram.locked:
        yield from ("-overcommit", "mem-lock=on")
    if machine.idle == "guest":
        yield from ("-overcommit", "cpu-pm=on")
    numa = list(enumerate(topology.numa_nodes))
    several = len(numa) > 1
    for number, each in numa:
        shared = machine.ram.shared
        backend = endpoints.memory(number, machine.ram.page_size) if shared else "memory-backend-ram,share=off"
        kind, _, properties = backend.partition(",")
        bound = "".join(f",host-nodes={host}" for host in each.bound) + (",policy=bind" if each.bound else "")
        # For pages that exist this only maps them, and charges their page tables to the pod.
        touching = min(len(each.vcpus), MOST_PREALLOCATORS)
        touched = f",prealloc=on,prealloc-threads={touching}" if machine.ram.preallocate else ""
        name = f"ram{number}" if several else "ram"
        yield from ("-object", f"{kind},id={name},size={each.memory // MIB}M,{properties}{bound}{touched}")
    if several:
        for number, each in numa:
            vcpus = "".join(f",cpus={vcpus}" for vcpus in str(each.vcpus).split(","))
            yield from ("-numa", f"node,nodeid={number}{vcpus},memdev=ram{number}")
        for number, each in numa:
            for other, distance in enumerate(each.distances):
                if other != number:
                    yield from ("-numa", f"dist,src={number},dst={other},val={distance}")


def _bridges(planned: tuple[PciHostBridge, ...] | None, numa_nodes: int) -> Iterator[str]:
    """Yield the host bridges that are *planned*, or one for each NUMA node of a guest that has several.

    They come last: QEMU puts a device without a named bus on the bus made last, and these accept only ports.
    """
    if planned is None:
        numbers = range(numa_nodes if numa_nodes > 1 else 0)
        step = (LAST_BUS - FIRST_BRIDGE) // numa_nodes
        planned = tuple(PciHostBridge(f"pcie.{each + 1}", FIRST_BRIDGE + each * step, each, "") for each in numbers)
    for bridge in planned:
        near = "" if bridge.numa_node is None else f",numa_node={bridge.numa_node}"
        yield from ("-device", f"pxb-pcie,id={bridge.name},bus={ROOT_BUS},bus_nr={bridge.bus_number}{near}")


def _port(port: PciPort) -> str:
    """Return a port. No device is ever hot-plugged into it, so firmware need not reserve addresses behind it."""
    place = f"id={port.name},bus={port.bus}" + ("" if port.slot is None else f",addr={port.slot:#x}")
    if port.kind == "upstream":
        return f"x3130-upstream,{place}"
    of_switch = port.kind == "downstream"
    link = (
        ""
        if of_switch or port.link is None or not port.speed
        else f",x-speed={port.speed},x-width={x_width(port.link)}"
    )
    return f"{'xio3130-downstream' if of_switch else 'pcie-root-port'},{place},chassis={port.chassis},hotplug=off{link}"


def _passed(passthrough: PassthroughPlan, endpoints: Endpoints, *, firmware: bool) -> Iterator[str]:
    """Yield the ports, and each passed-through device behind its own."""
    if passthrough.window is not None:
        yield from ("-global", f"q35-pcihost.pci-hole64-size={passthrough.window}")
        if firmware:  # OVMF ignores pci-hole64-size, and uses 32 GiB without this file
            yield from ("-fw_cfg", f"name=opt/ovmf/X-PciMmio64Mb,string={passthrough.window // MIB}")
    if passthrough.iommufd is not None:
        # Not "iommufd": each device has a property of that name, so from the second device on the id would be ambiguous.
        yield from ("-object", f"iommufd,id=iommufd0{endpoints.iommufd()}")
    own = tuple(PciPort(f"port{n}", "root", each.bus, None, n + 1) for n, each in enumerate(passthrough.devices))
    for port in passthrough.ports or own:
        yield from ("-device", _port(port))
    # Function 0 of a slot comes last: QEMU accepts no further functions after it.
    for index, device in sorted(enumerate(passthrough.devices), key=lambda each: -each[1].function):
        bus = device.port or own[index].name
        place = f"id=device{index},bus={bus}"
        if device.multifunction:
            place += f",addr=0x0.{device.function:#x},multifunction=on"
        rom = "" if device.rom else ",rombar=0"
        more = "".join(f",{name}={_on_off(value)}" for name, value in device.properties)
        yield from ("-device", f"vfio-pci,{place},{endpoints.passed(device)}{rom}{more}")


def _on_off(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _guest_devices(machine: MachinePlan, endpoints: Endpoints) -> Iterator[str]:
    """Yield the devices that serve the guest, after disks and networks, whose PCI addresses must not depend on them."""
    guest = machine.guest
    # Without it a guest may wait for entropy at its first boot. QEMU's backend uses getrandom(2), and needs no path.
    yield from ("-object", "rng-builtin,id=rng")
    yield from ("-device", "virtio-rng-pci,rng=rng")
    if guest.agent:
        yield from ("-device", "virtio-serial-pci,id=serial")
        yield from ("-chardev", f"socket,id=agent,{endpoints.agent()}")
        yield from ("-device", "virtserialport,bus=serial.0,chardev=agent,id=agent,name=org.qemu.guest_agent.0")
    if guest.vsock is not None:
        yield from ("-device", f"vhost-vsock-pci,{endpoints.vsock()}")
    if guest.watchdog is not None:
        yield from ("-device", "i6300esb")
        yield from ("-action", f"watchdog={WATCHDOG_ACTIONS[guest.watchdog]}")
    if machine.vnc:
        yield from endpoints.screen()
        yield from ("-device", "VGA")
    elif machine.bios_console:
        yield from ("-device", UNSEEN_VGA)
    if machine.seed is not None:
        yield from _node("seed", endpoints, read_only=True)
        yield from ("-device", "virtio-blk-pci,drive=seed,serial=cidata")
    elif len(machine.passthrough.devices) > 1:
        from runner.plan.nccl import FW_CFG, nccl_topology  # here, because few guests have such devices

        topology = nccl_topology(machine)
        if topology:
            yield from ("-fw_cfg", f"name={FW_CFG},string={comma(topology)}")


def _networks(machine: MachinePlan, endpoints: Endpoints) -> Iterator[str]:
    if not machine.networks:
        return
    from runner.plan.argv.networks import nic_device  # here, because some guests have no network

    for index, network in enumerate(machine.networks):
        kind, _, properties = endpoints.netdev(index).partition(",")
        yield from ("-netdev", f"{kind},id=net{index},{properties}")
        yield from ("-device", nic_device(index, network))


def _disks(machine: MachinePlan, endpoints: Endpoints) -> Iterator[str]:
    """Yield disks. Nodes are JSON: ``key=value`` cannot express that an image has no backing file.

    Devices are not: QEMU makes those it is given as JSON after all others (``qemu_create_cli_devices``), on the bus made last, and a disk's
    address would depend on all other devices.
    """
    names: dict[str, str] = {}
    few = f",thread-pool-max={WORKERS}" if machine.ram.locked else ""
    if few:
        yield from ("-object", f"main-loop,id=main-loop{few}")
    for index, disk in enumerate(machine.disks):
        for name in (disk.name, *(below for below, _ in disk.below())):
            first, names[name] = endpoints.image(name)
            yield from first
        for node in block_nodes(disk, names.__getitem__):
            yield from ("-blockdev", json.dumps(node))
        if disk.iothread:
            yield from ("-object", f"iothread,id={disk.name}{few}")
        # A kernel started directly is boot index 0 itself, and the disks are not booted from.
        device = disk_device(disk, boot_index=index if machine.kernel is None else None)
        words = (f"{name}={_on_off(value)}" for name, value in device.items() if name != "driver")
        yield from ("-device", ",".join((str(device["driver"]), *words)))


def _slots(number: int) -> Iterator[str]:
    """Yield root ports for disks that are attached later: pcie.0 itself does not support hot-plugging.

    They come last for the same reason as the bridges. Chassis and slot must differ from those of every other root port.
    """
    for each in range(number):
        yield from ("-device", f"pcie-root-port,id={slot(each)},bus=pcie.0,chassis={FIRST_CHASSIS + each},slot={each}")


def _boot(machine: MachinePlan, endpoints: Endpoints) -> Iterator[str]:
    if machine.firmware is not None:
        yield from _node("firmware", endpoints, read_only=True)
    if machine.firmware_vars is not None:
        yield from _node("firmware-vars", endpoints, read_only=False)
    if machine.kernel is not None:
        yield from ("-kernel", endpoints.file("kernel"))
        if machine.initrd is not None:
            yield from ("-initrd", endpoints.file("initrd"))
        if machine.cmdline is not None:
            yield from ("-append", machine.cmdline)


def _node(name: str, endpoints: Endpoints, *, read_only: bool) -> Iterator[str]:
    """Yield a raw block node of QEMU for one of our files."""
    first, path = endpoints.image(name)
    filename = comma(path)
    yield from first
    mode = f"read-only={'on' if read_only else 'off'},auto-read-only=off"
    yield from ("-blockdev", f"driver=file,node-name={name}-file,filename={filename},{mode}")
    yield from ("-blockdev", f"driver=raw,node-name={name},file={name}-file,{mode}")
