"""Argument lists: one pure function for each program that is started.

QEMU reaches everything through *endpoints*: descriptors it inherits when we start it (:class:`QemuFds`), paths when a
person runs the command in a terminal (:class:`Paths`). The rest of its command line is the same for both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import Fd, frozen
from runner.placement.backends import Placement
from runner.plan.argv.block_nodes import block_nodes, disk_device, slot
from runner.plan.disks import DiskPlan
from runner.plan.host_checks import WORKERS
from runner.plan.instance import InstancePlan
from runner.plan.machine import MachinePlan
from runner.plan.memory import TRANSLATED
from runner.plan.passthrough_plan import (
    FIRST_BRIDGE,
    LAST_BUS,
    ROOT_BUS,
    DevicePlan,
    PassthroughPlan,
    PciHostBridge,
    PciPort,
    x_width,
)
from runner.plan.shares import SharePlan
from runner.spec.instance import WatchdogAction
from runner.spec.rules import MIB

if TYPE_CHECKING:
    from runner.plan.argv.wires import WireNumbers

SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
"""QEMU's seccomp sandbox."""
UNSEEN_VGA = "VGA,vgamem_mb=8"
"""The VGA of a guest without a screen: GRUB's ``gfxterm``, the default of distributions, hangs in a BIOS without video modes.

With ``graphics=off`` SeaBIOS also uses the first serial port, and shows the text output of boot loaders there (SeaBIOS's ``src/sercon.c``).
8 MiB are enough for 1280 by 1024 pixels, which are never shown.
"""

SEED = "seed.iso"

WATCHDOG_ACTIONS: dict[WatchdogAction, str] = {"reset": "reset", "exit": "pause", "nmi": "inject-nmi", "none": "none"}
"""``guest.watchdog`` → QEMU's action; its ``poweroff`` exits without an event, so QEMU pauses and this program ends it."""

FIRST_CHASSIS = 128
"""The first chassis number of the root ports for disks; 0 to 255 are possible."""

MOST_PREALLOCATORS = 16
"""Threads that touch the guest's memory; more of them wait for the same memory channels (``util/oslib-posix.c``)."""

REPORT_INTERVAL = "1"
"""Seconds between two reports of how much memory is preallocated."""


class Endpoints(Protocol):
    """The ways in which QEMU reaches files, sockets and devices."""

    def monitor(self) -> Iterator[str]:
        """Yield the options that make a chardev ``qmp`` or another monitor, and the serial console's chardev ``console``."""

    def memory(self, index: int, page_size: int | None) -> str:
        """Return the memory backend, with the properties of the RAM of the guest's NUMA node *index*."""

    def file(self, name: str) -> str:
        """Return the path of the kernel, initial RAM disk or firmware."""

    def image(self, name: str) -> tuple[list[str], str]:
        """Return the options that must come first, and the file name of a block device."""

    def netdev(self, index: int) -> str:
        """Return the kind and properties of network *index*."""

    def share(self, index: int) -> str:
        """Return the chardev properties of share *index*."""

    def agent(self) -> str:
        """Return the chardev properties of the guest agent's channel."""

    def vsock(self) -> str:
        """Return the device properties of the vsock device."""

    def screen(self) -> Iterator[str]:
        """Yield the options of the VNC server."""

    def iommufd(self) -> str:
        """Return further properties of the object ``iommufd``."""

    def passed(self, device: DevicePlan) -> str:
        """Return the properties of ``vfio-pci`` that identify *device*."""


@frozen
class QemuFds:
    """Endpoints as inherited descriptors; *ram*, *wires* and *shares* are by index."""

    qmp: Fd
    console: Fd
    ram: tuple[Fd, ...]
    files: dict[str, Fd] = attrs.field(factory=dict)
    """``kernel``, ``initrd``, ``firmware``, ``firmware-vars``, ``disk0``, …"""
    wires: tuple[WireNumbers, ...] = ()
    shares: tuple[Fd, ...] = ()
    guest_agent_channel: Fd | None = None
    vhost_vsock: tuple[Fd, int] | None = None
    """The descriptor and its context identifier."""
    devices: dict[str, Fd] = attrs.field(factory=dict)
    """PCI address → descriptor of each device that is inherited; ``iommufd`` is ``/dev/iommu``."""

    def numbers(self) -> tuple[int, ...]:
        """Return every descriptor that QEMU inherits."""
        wires = (number for wire in self.wires for number in wire.numbers())
        agent = () if self.guest_agent_channel is None else (self.guest_agent_channel,)
        vsock = () if self.vhost_vsock is None else self.vhost_vsock[:1]
        served = (*wires, *self.shares, *agent, *vsock, *self.devices.values())
        return (self.qmp, self.console, *self.ram, *self.files.values(), *served)

    def monitor(self) -> Iterator[str]:
        yield from ("-chardev", f"socket,id=qmp,fd={self.qmp}")
        yield from ("-mon", "chardev=qmp,mode=control")
        yield from ("-chardev", f"socket,id=console,fd={self.console}")

    def memory(self, index: int, _page_size: int | None) -> str:
        return f"memory-backend-file,mem-path=/proc/self/fd/{self.ram[index]},share=on"

    def file(self, name: str) -> str:
        # QEMU reads these with fopen(3), which knows no fdset.
        return f"/proc/self/fd/{self.files[name]}"

    def image(self, name: str) -> tuple[list[str], str]:
        # The fdset has the number of the descriptor it holds.
        number = self.files[name]
        return ["-add-fd", f"fd={number},set={number},opaque={name}"], f"/dev/fdset/{number}"

    def netdev(self, index: int) -> str:
        return self.wires[index].netdev()

    def share(self, index: int) -> str:
        return f"fd={self.shares[index]}"

    def agent(self) -> str:
        return f"fd={self.guest_agent_channel}"

    def vsock(self) -> str:
        number, cid = self.vhost_vsock or (-1, 0)
        return f"guest-cid={cid},vhostfd={number}"

    def screen(self) -> Iterator[str]:
        # QEMU's VNC server does not listen; it receives connections by QMP add_client.
        yield from ("-vnc", "none")

    def iommufd(self) -> str:
        return f",fd={self.devices['iommufd']}"

    def passed(self, device: DevicePlan) -> str:
        number = self.devices.get(device.address)
        return f"host={device.address}" if number is None else f"fd={number},iommufd=iommufd0"


@frozen
class Paths:
    """Endpoints as paths and a terminal, for a person who runs the command."""

    plan: InstancePlan

    def monitor(self) -> Iterator[str]:
        # Console and human monitor share the terminal, Ctrl-A c switches.
        yield from ("-chardev", "stdio,id=console,mux=on,signal=off")
        yield from ("-mon", "chardev=console,mode=readline")

    def memory(self, _index: int, page_size: int | None) -> str:
        huge = "" if page_size is None else f",hugetlb=on,hugetlbsize={page_size // MIB}M"
        return f"memory-backend-memfd,share=on{huge}"

    def file(self, name: str) -> str:
        machine = self.plan.machine
        found = {"kernel": machine.kernel, "initrd": machine.initrd}[name]
        return "" if found is None else str(found.path)

    def image(self, name: str) -> tuple[list[str], str]:
        machine = self.plan.machine
        paths: dict[str, PurePosixPath | None] = {}
        for disk in machine.disks:
            paths[disk.name] = disk.path if disk.overlay is None else _overlay(self.plan, disk)
            paths |= {below: layer.path for below, layer in disk.below()}
        paths["firmware"] = None if machine.firmware is None else machine.firmware.path
        paths["firmware-vars"] = _variables_path(self.plan)
        paths["seed"] = self.plan.state_directory / SEED
        return [], str(paths[name])

    def netdev(self, index: int) -> str:
        from runner.plan.argv.networks import netdev_by_hand

        return netdev_by_hand(index, self.plan.networks[index])

    def share(self, index: int) -> str:
        return f"path={_comma(str(_share_socket(self.plan, index)))}"

    def agent(self) -> str:
        # Any program may connect there.
        return f"path={_comma(str(self.plan.state_directory / 'agent.sock'))},server=on,wait=off"

    def vsock(self) -> str:
        vsock = self.plan.machine.guest.vsock
        return f"guest-cid={0 if vsock is None else vsock.cid}"

    def screen(self) -> Iterator[str]:
        yield from ("-vnc", f"unix:{_comma(str(self.plan.state_directory / 'vnc.sock'))}")

    def iommufd(self) -> str:
        return ""

    def passed(self, device: DevicePlan) -> str:
        return f"host={device.address}" + (",iommufd=iommufd0" if device.vfio_backend == "iommufd" else "")


def _comma(value: str) -> str:
    """Escape *value* for QEMU's ``key=value,…`` syntax, where a comma is written twice."""
    return value.replace(",", ",,")


def _overlay(plan: InstancePlan, disk: DiskPlan) -> PurePosixPath:
    return plan.state_directory / f"{disk.name}.qcow2"


def _share_socket(plan: InstancePlan, index: int) -> PurePosixPath:
    return plan.state_directory / f"share{index}.sock"


def _variables_path(plan: InstancePlan) -> PurePosixPath | None:
    variables = plan.machine.firmware_vars
    return None if variables is None else variables.path or plan.state_directory / "firmware-vars.fd"


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


def preallocator_argv(machine: MachinePlan, placement: Placement, ram: tuple[int, ...]) -> list[str]:
    """Return the argv of the program that preallocates the memory of the descriptors *ram*.

    It has one argument for each of them: descriptor, bytes, bytes of a page (0 for ordinary pages), the NUMA nodes to bind it to, the CPUs
    near it, and the number of threads (:mod:`runner.kernel.preallocate`).
    """
    words = (
        ":".join(
            (
                *(str(descriptor), str(each.memory), str(machine.ram.page_size or 0), ",".join(map(str, each.bound))),
                str(CpuSet(placement.pins[vcpu] for vcpu in each.vcpus)),
                str(min(len(each.vcpus), MOST_PREALLOCATORS)),
            )
        )
        for descriptor, each in zip(ram, machine.topology.numa_nodes, strict=True)
    )
    return [*machine.ram.preallocator, REPORT_INTERVAL, *words]


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
            yield from ("-fw_cfg", f"name={FW_CFG},string={_comma(topology)}")


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
    filename = _comma(path)
    yield from first
    mode = f"read-only={'on' if read_only else 'off'},auto-read-only=off"
    yield from ("-blockdev", f"driver=file,node-name={name}-file,filename={filename},{mode}")
    yield from ("-blockdev", f"driver=raw,node-name={name},file={name}-file,{mode}")


def virtiofsd_argv(share: SharePlan, listener: str) -> list[str]:
    """Return virtiofsd's argv; *listener* is ``--fd=N`` (a listening socket) or ``--socket-path=…``.

    ``sandbox=chroot`` needs CAP_SYS_CHROOT only, the default ``namespace`` needs CAP_SYS_ADMIN. ``--rlimit-nofile=0`` leaves the limit
    alone: raising it needs CAP_SYS_RESOURCE. ``--modcaps=-mknod`` (since 1.5) makes CAP_MKNOD unnecessary, with which the pod's processes
    could make nodes of the host's devices; the guest cannot make device nodes in the share, which float's device filter forbids anyway.
    ``--migration-verify-handles``: after an update another virtiofsd finds the guest's files by their paths, where another process may have
    put other files meanwhile.
    """
    if share.program.rust:
        argv = [str(share.program.path), listener, f"--shared-dir={share.path}", "--sandbox=chroot", "--cache=auto"]
        argv += ["--announce-submounts", "--rlimit-nofile=0", "--log-level=warn"]
        argv += ["--modcaps=-mknod"] if share.program.version >= (1, 5) else []
        argv += ["--migration-verify-handles"] if share.updatable else []
        return [*argv, "--readonly"] if share.read_only else argv
    options = f"source={_virtiofsd_escape(str(share.path))},sandbox=chroot,cache=auto,announce_submounts,log_level=warn"
    return [str(share.program.path), listener, "-f", "-o", options, "--rlimit-nofile=0"]


def _virtiofsd_escape(value: str) -> str:
    """Escape *value* for the C virtiofsd's ``-o`` lists (libfuse's ``fuse_opt``: backslash before comma and backslash)."""
    return value.replace("\\", "\\\\").replace(",", "\\,")


_WITHOUT_VALUE = {"-nodefaults", "-no-user-config", "-S"}
"""Options without a value; the value of any other option may also begin with a dash."""


def _made_first(plan: InstancePlan, seed: bytes | None) -> Iterator[str]:
    """Yield the commands that make the files which this program keeps in memory, or creates if missing."""
    import shlex

    machine, directory = plan.machine, shlex.quote(str(plan.state_directory))
    if machine.guest.agent or machine.vnc or seed is not None or machine.firmware_vars is not None:
        yield f"mkdir -p {directory}"
    if machine.firmware_vars is not None and machine.firmware_vars.template is not None:
        yield shlex.join(("cp", "-n", str(machine.firmware_vars.template), str(_variables_path(plan))))
    if seed is not None:
        import base64  # here, because no instance needs them
        import zlib

        packer = zlib.compressobj(wbits=31)  # gzip
        packed = base64.b64encode(packer.compress(seed) + packer.flush()).decode()
        yield f"base64 -d <<'END' | gzip -d >{shlex.quote(str(plan.state_directory / SEED))}"
        yield from (packed[start : start + 100] for start in range(0, len(packed), 100))
        yield "END"


def pasteable(plan: InstancePlan, seed: bytes | None) -> str:
    """Return a shell script that runs the same machine by hand: the same devices, with paths instead of descriptors, not pinned.

    *seed* is the image of the plan's cloud-init seed, ``None`` for a plan without one. The script needs no
    ``instance-runner``; it must be run as root when there are networks or shares.
    """
    import shlex  # here, because no instance needs them

    from runner.plan.argv.networks import dnsmasq_argv, network_by_hand

    lines = [
        "# The same machine by hand: paths instead of descriptors, console and monitor on the terminal (Ctrl-A c), not pinned."
    ]
    lines += _made_first(plan, seed)
    overlays = [(disk, disk.overlay) for disk in plan.machine.disks if disk.overlay is not None]
    if plan.shares or overlays:
        lines.append(f"mkdir -p {shlex.quote(str(plan.state_directory))}")
    for disk, overlay in overlays:
        path = shlex.quote(str(_overlay(plan, disk)))
        lines.append(f"qemu-img create -q -f qcow2 {path} {overlay.size} && truncate -s {overlay.limit} {path}")
    for index, network in enumerate(plan.networks):
        lines += network_by_hand(index, network)
    lines += [f"{shlex.join(dnsmasq_argv(dhcp))} &" for dhcp in plan.dhcp]
    for index, share in enumerate(plan.shares):
        lines.append(f"{shlex.join(virtiofsd_argv(share, f'--socket-path={_share_socket(plan, index)}'))} &")
        lines.append(f"until [ -S {shlex.quote(str(_share_socket(plan, index)))} ]; do sleep 0.1; done")
    program, *options = qemu_argv(plan.machine, Paths(plan), paused=False)
    words, line = iter(options), shlex.quote(program)
    for option in words:
        line += f" \\\n  {shlex.join([option] if option in _WITHOUT_VALUE else [option, next(words)])}"
    lines.append(line)
    return "\n".join(lines) + "\n"
