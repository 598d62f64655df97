"""The plan of an instance: every decision of a start, made before anything is touched.

The plan is frozen and complete: the code that carries it out decides nothing. :func:`plan_instance` reports all problems at once, each with
its path in the document.
"""

from __future__ import annotations

from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import attrs

from runner.base.errors import SpecError
from runner.base.judgement import Judgement
from runner.base.values import frozen
from runner.facts.disk import MISSING
from runner.facts.host import CONSOLE_LOG, HostFacts, PodName, User, parse_version
from runner.placement.backends import ControllerPlacement, Placement
from runner.placement.guest_topology import GuestTopology
from runner.plan.cpu_planner import choose_backend, plan_placement, plan_topology, plan_vcpu_hotplug
from runner.plan.descriptor_claims import Claims
from runner.plan.disks import plan_disks
from runner.plan.firmware import choose_firmware, judge_boot
from runner.plan.guest_devices import plan_guest
from runner.plan.host_checks import bytes_to_lock
from runner.plan.identity import Identity, identify
from runner.plan.machine import (
    Accel,
    MachinePlan,
    bytes_copied,
    choose_accelerator,
    choose_cpu_model,
    choose_idle,
    plan_file,
    refuse_too_few_slots,
    require_program,
)
from runner.plan.memory import (
    RamPlan,
    memory_overhead,
    plan_ram,
    refuse_too_few_pages,
    refuse_too_large_files,
    refuse_unlockable,
)
from runner.plan.passthrough_plan import PassthroughPlan
from runner.plan.problems import Problems
from runner.plan.qemu_limits import ALWAYS_FITS, REPLACED_SINCE, needs_remapping, refuse_too_many_vcpus
from runner.plan.resolve import resolve_memory, resolve_vcpus
from runner.plan.shares import SharePlan, plan_shares
from runner.spec.instance import InstanceSpec

if TYPE_CHECKING:
    from runner.plan.cloud_init import SeedPlan
    from runner.plan.network_plan import DhcpPlan, NetworkPlan

GREETING_TIMEOUT = 60.0
"""Seconds QEMU may take to greet: it takes 0.1 s."""

SLOWEST_PREALLOCATION = 256 << 20
"""Bytes a second; one slow CPU that zeroes pages on a remote NUMA node still reaches 1 GiB/s."""

DEVICE_RESET = 2.0
"""Seconds for the kernel to reset a PCI device and to unlock the RAM it could reach."""

DEVICES_BACK = 5.0
"""Seconds after QEMU's end within which its devices are free again: the kernel has reset them by then."""


@frozen
class ConsolePlan:
    """The outputs of the serial console."""

    stdout: bool
    log: PurePosixPath
    log_size: int
    """Size in bytes at which the log is renamed and a new one begun."""


@frozen
class ShutdownPlan:
    """The seconds of each step of a power-down, in their order; their sum is the grace period."""

    power_down: float
    """ACPI power button, pressed repeatedly."""
    quit: float
    """QMP ``quit``."""
    terminate: float
    """SIGTERM to QEMU; SIGKILL follows, which takes no time."""
    poweroff_status: int
    devices_back: float = 0.0
    """For its PCI devices to be free again, if it had any."""

    @property
    def forced(self) -> float:
        """Seconds for everything after the guest's power-down."""
        return self.quit + self.terminate


@frozen
class InstancePlan:
    """Everything that will be done for one instance."""

    name: str
    pod: PodName
    state_directory: PurePosixPath
    anchor: tuple[str, ...]
    """The argv of the process that stays in the pod's cgroup."""
    placement: Placement
    dhcp: tuple[DhcpPlan, ...]
    console: ConsolePlan
    machine: MachinePlan
    shutdown: ShutdownPlan
    start_timeout: float
    """Seconds that preallocation may take, and again QEMU's greeting."""
    remarks: tuple[Judgement, ...]
    identity: Identity = Identity()
    """The source of MAC addresses, IPv6 subnets and the vsock identifier that the spec leaves open."""

    @property
    def networks(self) -> tuple[NetworkPlan, ...]:
        """The guest's networks, in the order of the document."""
        return self.machine.networks

    @property
    def shares(self) -> tuple[SharePlan, ...]:
        """The directories shared with the guest, in the order of the document."""
        return self.machine.shares


@frozen
class _GuestResources:
    """The CPUs, the memory and the PCI devices of an instance; everything else is planned for these."""

    placement: Placement | None
    """``None``: there are no CPUs for it, which is a problem found."""
    vcpus: int
    topology: GuestTopology | None
    """``None`` after a problem as well."""
    accel: Accel
    user: User
    """The user that QEMU runs as."""
    memory: int
    """Bytes of RAM."""
    ram: RamPlan
    passthrough: PassthroughPlan
    lockable: int
    """Bytes that QEMU may have to lock, 0 if none."""


def plan_instance(source: str, spec: InstanceSpec, facts: HostFacts) -> InstancePlan:
    """Plan the start of *spec* on the host of *facts*.

    Raises :exc:`~runner.base.errors.SpecError` with every reason why the host cannot run it.
    """
    problems = Problems()
    resources = _plan_resources(spec, facts, problems)
    identity, claims = identify(spec, facts), Claims(facts, problems)
    networks, dhcp = _networks(spec, identity, resources.vcpus, facts, claims, problems)
    claims.claim_disks(spec.disk)
    claims.refuse_unclaimed()
    sleep = require_program(facts.sleep, "sleep", facts, problems)
    console = ConsolePlan(spec.console.stdout, _console_log(spec.console.log, facts, problems), spec.console.log_size)
    machine = _plan_machine(spec, resources, identity, networks, facts, problems)
    placement, ram, passthrough = resources.placement, resources.ram, resources.passthrough
    if placement is None or machine is None or sleep is None or problems.found:
        raise SpecError(source, problems.explained(spec.environment))
    return InstancePlan(
        name=spec.instance.name,
        pod=facts.pod_name,
        state_directory=facts.state_directory,
        anchor=(str(sleep), "infinity"),
        placement=_with_devices(placement, ram.overhead, passthrough, facts, problems),
        dhcp=dhcp,
        console=console,
        machine=machine,
        shutdown=share_grace(spec.shutdown.grace, spec.shutdown.poweroff_status, len(passthrough.devices)),
        start_timeout=GREETING_TIMEOUT + (machine.memory / SLOWEST_PREALLOCATION if ram.preallocate else 0),
        remarks=tuple(problems.remarks),
        identity=identity,
    )


def _plan_resources(spec: InstanceSpec, facts: HostFacts, problems: Problems) -> _GuestResources:
    """Plan the CPUs, then the memory on their NUMA nodes, then the devices near both."""
    backend = choose_backend(spec.cpu, facts, problems)
    vcpus = resolve_vcpus(spec.cpu, backend, facts)
    growing, most_vcpus = spec.hotplug.cpus is not None, max(vcpus, spec.hotplug.cpus or 0)
    placement = plan_placement(spec.cpu, vcpus, backend, facts, problems, growing=growing)
    pins = () if placement is None else placement.pins
    accel, user = choose_accelerator(spec, facts, problems)
    if spec.cpu.model is not None:
        from runner.plan.cpu_models import refuse_unknown_cpu_model  # here, because few specs name one

        refuse_unknown_cpu_model(spec.cpu.model, accel, facts, problems)
    overhead = partial(memory_overhead, spec, most_vcpus, accel=accel, copied=bytes_copied(spec.boot, user, facts))
    size = resolve_memory(spec, pins, overhead, facts, problems)
    ram = plan_ram(spec, size, overhead, facts, problems, controller=isinstance(placement, ControllerPlacement))
    siblings = accel == "kvm" or spec.cpu.model is not None
    topology = plan_topology(spec, pins, size, facts, problems, siblings=siblings) if pins else None
    refuse_too_few_pages(spec.memory, size, topology, facts, problems)
    if topology is not None:
        refuse_too_many_vcpus(spec, topology, accel, facts, problems)
    if topology is not None and ram.shared:
        refuse_too_large_files(topology, facts.limits, problems)

    passthrough = _passthrough(spec, topology, facts, user, accel, problems)
    if size > ALWAYS_FITS and passthrough.window is None:  # a window has been judged together with the RAM below it
        from runner.plan.guest_addresses import refuse_too_much_memory  # here, because few guests have as much memory

        refuse_too_much_memory(spec, size, accel, facts, problems)
    lockable = bytes_to_lock(spec, most_vcpus, size, sum(device.memory for device in passthrough.devices))
    refuse_unlockable(spec, lockable, user, facts.limits, problems)
    return _GuestResources(placement, vcpus, topology, accel, user, size, ram, passthrough, lockable)


def _plan_machine(
    spec: InstanceSpec,
    resources: _GuestResources,
    identity: Identity,
    networks: tuple[NetworkPlan, ...],
    facts: HostFacts,
    problems: Problems,
) -> MachinePlan | None:
    """Plan the machine that QEMU makes of *resources*; ``None`` if QEMU or a topology is missing, which is a problem found."""
    user, accel, topology = resources.user, resources.accel, resources.topology
    shares = tuple(plan_shares(spec, user, facts, problems))
    disks = plan_disks(spec.disk, facts, problems)
    qemu = require_program(facts.qemu, "qemu-system-x86_64", facts, problems, facts.qemu_error)
    if spec.hotplug.qemu and () < parse_version(facts.qemu_version) < REPLACED_SINCE:
        reason, remedy = (
            f"needs QEMU 10.1, and {facts.qemu} is {facts.qemu_version}",
            "install another one, or leave it out",
        )
        problems.refuse("hotplug.qemu", reason, remedy)
    kernel = plan_file("kernel", spec.boot.kernel, user, facts, problems)
    initrd = plan_file("initrd", spec.boot.initrd, user, facts, problems)
    chosen = choose_firmware(spec.boot, facts, problems)
    firmware = plan_file("firmware", chosen.code, user, facts, problems)
    judge_boot(spec, resources.memory, disks, facts, problems)
    guest = plan_guest(spec.guest, identity, networks, facts, problems)
    seed = _seed(spec, networks, facts, problems)
    if qemu is None or topology is None:
        return None
    exclusive = isinstance(resources.placement, ControllerPlacement)
    machine = MachinePlan(
        program=qemu,
        name=spec.instance.name,
        smbios_uuid=spec.instance.uuid,
        user=user,
        vcpus=resources.vcpus,
        memory=resources.memory,
        topology=topology,
        ram=resources.ram,
        lockable=resources.lockable,
        accel=accel,
        cpu_model=choose_cpu_model(spec.cpu.model, accel, topology, facts, exclusive=exclusive),
        idle=choose_idle(spec.cpu.idle, accel, problems),
        kernel=kernel,
        initrd=initrd,
        cmdline=spec.boot.cmdline,
        firmware=firmware,
        firmware_vars=chosen.variables,
        secure_boot=chosen.secure,
        disks=disks,
        slots=spec.hotplug.disks,
        networks=networks,
        shares=shares,
        guest=guest,
        seed=seed,
        vnc=spec.display.vnc,
        on_reboot=spec.shutdown.on_reboot,
        passthrough=resources.passthrough,
        updatable=spec.hotplug.qemu,
        remapping=accel == "kvm" and needs_remapping(topology, spec.hotplug.cpus),
        bios_console=spec.boot.by_bios and not spec.display.vnc,
        vcpu_hotplug=plan_vcpu_hotplug(spec, resources.vcpus, topology, problems),
    )
    refuse_too_few_slots(machine, problems)
    return _with_topology_file(machine, problems)


def _console_log(log: PurePosixPath | None, facts: HostFacts, problems: Problems) -> PurePosixPath:
    directory = facts.files.get(facts.state_directory, MISSING)
    if directory.kind not in {"missing", "directory"}:
        problems.refuse("--state-dir", f"{str(facts.state_directory)!r} {directory.words}, not a directory")
    path = log or facts.state_directory / CONSOLE_LOG
    if facts.console_log_error is not None:
        problems.refuse(
            "console.log",
            f"cannot write {str(path)!r}: {facts.console_log_error}",
            "name a file that this process may write",
        )
    return path


def _networks(
    spec: InstanceSpec, identity: Identity, vcpus: int, facts: HostFacts, claims: Claims, problems: Problems
) -> tuple[tuple[NetworkPlan, ...], tuple[DhcpPlan, ...]]:
    if not spec.network:
        return (), ()
    from runner.plan.network_planner import plan_dhcp, plan_networks  # here, because some guests have no network

    networks = tuple(plan_networks(spec, identity, vcpus, facts, claims, problems))
    return networks, tuple(plan_dhcp(networks, facts, problems))


def _passthrough(
    spec: InstanceSpec,
    topology: GuestTopology | None,
    facts: HostFacts,
    user: User,
    accel: Accel,
    problems: Problems,
) -> PassthroughPlan:
    if not spec.device or topology is None:
        return PassthroughPlan()
    from runner.plan.passthrough_planner import plan_passthrough  # here, because few guests have devices of their own

    return plan_passthrough(spec, topology, facts, user, accel, problems)


def _with_devices(
    placement: Placement, overhead: int, passthrough: PassthroughPlan, facts: HostFacts, problems: Problems
) -> Placement:
    """Return *placement* with the data for the controller: the bytes of *overhead*, and the devices to keep powered.

    Without a controller, remark the devices that may lose their power.
    """
    if isinstance(placement, ControllerPlacement):
        devices = tuple(device.address for device in passthrough.devices)
        return attrs.evolve(placement, overhead=overhead, tuning=attrs.evolve(placement.tuning, devices=devices))
    if passthrough.devices:
        from runner.plan.pci_judgements import power_remarks  # here, because few guests have devices of their own

        vfio = facts.vfio
        known = {} if vfio is None else vfio.devices
        problems.remarks += power_remarks([known[device.address] for device in passthrough.devices])
    return placement


def _with_topology_file(machine: MachinePlan, problems: Problems) -> MachinePlan:
    """Return *machine* with the NCCL topology of its devices in its cloud-init seed; remark if there is no seed."""
    if len(machine.passthrough.devices) <= 1:
        return machine
    from runner.plan.cloud_init import Secret  # here, because few guests have such devices
    from runner.plan.nccl import FW_CFG, nccl_topology, vendor_data

    topology = nccl_topology(machine)
    if topology and machine.seed is not None:
        return attrs.evolve(machine, seed=attrs.evolve(machine.seed, vendor_data=Secret(vendor_data(topology))))
    if topology and any(port.kind == "upstream" for port in machine.passthrough.ports):
        problems.remark(
            "device",
            "NCCL in the guest takes 2.5 GT/s x1, which QEMU's switches show, for the speed of all links",
            f"add [cloud_init], or copy {FW_CFG} (qemu_fw_cfg) to its NCCL_TOPO_FILE",
        )
    return machine


def _seed(
    spec: InstanceSpec, networks: tuple[NetworkPlan, ...], facts: HostFacts, problems: Problems
) -> SeedPlan | None:
    if spec.cloud_init is None:
        return None
    from runner.plan.cloud_init import plan_seed  # here, because most instances need none of it

    # To cloud-init another id means another machine, whose keys and users it creates anew.
    identity = spec.instance.uuid or facts.pod_uid or spec.instance.name
    if identity == facts.pod_uid and spec.cloud_init.meta_data is None and any(disk.writes for disk in spec.disk):
        problems.remark(
            "instance.uuid",
            "in its next pod cloud-init runs as on a first boot, with other host keys, on the disk that the guest has written to",
            "set instance.uuid for a guest that is to stay the same",
        )
    macs = [(network.mac, each.ipv6) for network, each in zip(networks, spec.network, strict=False)]
    return plan_seed(spec.cloud_init, identity, spec.instance.name, macs, facts.documents, problems)


def share_grace(grace: float, poweroff_status: int, devices: int = 0) -> ShutdownPlan:
    """Divide *grace* seconds among the steps of a power-down: the guest gets all but a tenth (at most 3 s).

    The kernel resets each of its PCI *devices* when QEMU ends, and the instance waits for them: 2 s for each and 5 s for all are taken from
    the guest's time, up to half of the grace.
    """
    forced, back = min(3.0, grace / 10), 0.0
    if devices:
        resets = DEVICE_RESET * devices
        part = min(1.0, (grace / 2 - forced) / (resets + DEVICES_BACK))
        forced, back = forced + part * resets, part * DEVICES_BACK
    return ShutdownPlan(grace - forced - back, forced / 2, forced / 2, poweroff_status, back)
