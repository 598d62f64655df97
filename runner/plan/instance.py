"""From what was asked and what was found to what will be done: every decision of a start is made here, before it.

The plan is frozen and complete: the code that carries it out does not decide. Whatever cannot be done is said by
:func:`plan_instance` with the path into the document, all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import attrs

from runner.cpuset import CpuSet
from runner.errors import Problem, RefusedError, SpecError
from runner.facts.disk import MISSING, FileFact
from runner.facts.host import ROOT, HostFacts, PodName, User, Virtiofsd
from runner.placement.backends import AffinityPlacement, ControllerPlacement, DelegatedPlacement, Placement
from runner.placement.guest_topology import GuestTopology, flat, guest_topology, unbound
from runner.placement.pins import PinPolicy, all_cpus, choose_cpus, place
from runner.plan.descriptor_claims import Claims
from runner.plan.disks import DiskPlan, plan_disk, within
from runner.plan.firmware import VariablesPlan, choose_firmware
from runner.plan.guest_devices import GuestPlan, plan_guest
from runner.plan.host_checks import (
    ASKING_FOR_LESS,
    CPU_TIME,
    KVM_UNUSABLE_REMEDY,
    OWN_CPUS,
    bytes_to_lock,
    emulated,
    kvm_unusable,
    root_for_kvm,
    shared_cpus,
    too_little_time,
)
from runner.plan.memory import (
    PAGE_SIZE,
    RamPlan,
    contradictions,
    memory_overhead,
    not_lockable,
    size_by_limits,
    too_few_pages,
    too_little_memory,
    with_size,
)
from runner.plan.networks import DhcpPlan, NetworkPlan, NetworkPlanner
from runner.plan.passthrough_plan import PassthroughPlan
from runner.plan.root_bus import too_few_slots
from runner.spec.instance import (
    ALL_CPUS,
    LEAST_MEMORY,
    WHAT_LIMITS_LEAVE,
    CpuSpec,
    DiskSpec,
    InstanceSpec,
    ShareSpec,
)
from runner.spec.rules import format_size

if TYPE_CHECKING:
    from runner.plan.cloud_init import SeedPlan

PATIENCE = 60.0
"""Seconds QEMU may take to greet: it takes 0.1 s."""

SLOWEST_PREALLOCATION = 256 << 20
"""Bytes a second; pages that are zeroed by one slow CPU on the wrong NUMA node still come at 1 GiB/s."""

DEVICE_RESET = 2.0
"""Seconds for the kernel to reset a PCI device and to unlock the RAM it could reach."""

DEVICES_BACK = 5.0
"""Seconds after QEMU's end within which its devices are free again: the kernel has reset them by then."""

TOPOEXT_VENDORS = {"AuthenticAMD", "HygonGenuine"}
"""Whose CPUs tell siblings by CPUID's TOPOEXT leaves, which QEMU's model ``host`` leaves out unless asked for them."""

QEMU_USERS = ("qemu", "libvirt-qemu", "nobody")


@attrs.frozen
class SharePlan:
    """virtiofsd for one directory."""

    program: Virtiofsd
    tag: str
    path: PurePosixPath
    read_only: bool


@attrs.frozen
class FilePlan:
    """A file QEMU reads; *copied* into memory first when QEMU's user may not read it."""

    path: PurePosixPath
    copied: bool


@attrs.frozen
class MachinePlan:
    """QEMU's part."""

    program: PurePosixPath
    name: str
    uuid: str | None
    user: User
    vcpus: int
    memory: int
    """Bytes, whole MiB."""
    topology: GuestTopology
    ram: RamPlan
    lockable: int
    """Bytes that it may have to lock, 0 if none."""
    accel: str
    cpu_model: str
    kernel: FilePlan | None
    initrd: FilePlan | None
    cmdline: str | None
    firmware: FilePlan | None
    firmware_vars: VariablesPlan | None
    secure_boot: bool
    """The firmware runs in System Management Mode, and nobody else writes its variables."""
    disks: tuple[DiskPlan, ...]
    slots: int
    """Root ports for disks that are attached later."""
    networks: tuple[NetworkPlan, ...]
    shares: tuple[SharePlan, ...]
    guest: GuestPlan
    seed: SeedPlan | None
    """cloud-init's."""
    vnc: bool
    """It has a screen, and a VNC server that is handed its connections."""
    on_reboot: str
    passing: PassthroughPlan


@attrs.frozen
class ConsolePlan:
    """Where the serial console goes."""

    stdout: bool
    log: PurePosixPath
    log_size: int
    """Bytes after which the log is moved aside."""


@attrs.frozen
class ShutdownPlan:
    """Each step's share of the grace period, in seconds; the steps follow one another."""

    power_down: float
    """ACPI power button, pressed again and again."""
    quit: float
    """QMP ``quit``."""
    terminate: float
    """SIGTERM to QEMU; after it comes SIGKILL, which needs no time of its own."""
    poweroff_status: int
    devices_back: float = 0.0
    """For its PCI devices to be as they were, if it had any."""

    @property
    def forced(self) -> float:
        """Seconds for everything after the guest's own time."""
        return self.quit + self.terminate


@attrs.frozen
class InstancePlan:
    """All that will be done, in the order it will be done."""

    name: str
    pod: PodName
    state_directory: PurePosixPath
    anchor: tuple[str, ...]
    """The argv of the process that stays behind in the pod's cgroup."""
    placement: Placement
    networks: tuple[NetworkPlan, ...]
    dhcp: tuple[DhcpPlan, ...]
    shares: tuple[SharePlan, ...]
    console: ConsolePlan
    machine: MachinePlan
    shutdown: ShutdownPlan
    patience: float
    """Seconds preallocation may take, and those QEMU may take to greet."""
    remarks: tuple[str, ...]
    """What is second best about it, for the operator."""


def plan_instance(source: str, spec: InstanceSpec, facts: HostFacts) -> InstancePlan:
    """Decide everything about the start of *spec* on the host of *facts*.

    Raises :exc:`~runner.errors.SpecError` with every reason why it cannot be done there.
    """
    planner = _Planner(spec, facts)
    plan = planner.instance()
    if planner.problems or plan is None:
        raise SpecError(source, planner.problems)
    return plan


class _Planner:
    """Collects problems and remarks on the way; lives for one call of :func:`plan_instance`."""

    def __init__(self, spec: InstanceSpec, facts: HostFacts) -> None:
        self.spec = spec
        self.facts = facts
        self.problems: list[Problem] = []
        self.remarks: list[str] = []

    def refuse(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message))

    def instance(self) -> InstancePlan | None:
        spec, facts = self.spec, self.facts
        placement = self.placement(spec.cpu)
        accel, user = self.accelerator()
        ram = self.memory(placement, accel, self.copied(user))
        topology = None if placement is None else self.topology(placement, accel)
        self.pages(topology)
        spec = self.spec
        passing = PassthroughPlan() if topology is None else self.devices(topology, user, accel)
        lockable = bytes_to_lock(spec, sum(device.memory for device in passing.devices))
        self.problems += not_lockable(spec, lockable, facts.limits, root=user.user_id == 0)
        claims = Claims(facts, self.refuse)
        planner = NetworkPlanner(spec, facts, claims, self.refuse)
        networks = tuple(planner.networks())
        shares = tuple(self.shares())
        disks = tuple(
            plan_disk(f"disk{index}", disk, self.known(disk), f"disk[{index}]", self.refuse)
            for index, disk in enumerate(spec.disk)
        )
        qemu = self.program(facts.qemu, "", "qemu-system-x86_64", "qemu-system-x86")
        dhcp = tuple(planner.dhcp(networks))
        self.remarks += planner.remarks
        for index, each in enumerate(spec.disk):
            if each.fd is not None:
                claims.claim(f"disk[{index}].fd", each.fd, {"file", "block"}, write=each.writes)
        claims.unclaimed()
        sleep = self.program(facts.sleep, "", "sleep", "coreutils")
        kernel = self.file("boot.kernel", spec.boot.kernel, user)
        initrd = self.file("boot.initrd", spec.boot.initrd, user)
        chosen = choose_firmware(spec.boot, facts, self.refuse, self.remarks.append)
        firmware = self.file("boot.firmware", chosen.code, user)
        identity = spec.instance.uuid or spec.instance.name
        guest = plan_guest(spec.guest, identity, facts, self.refuse)
        seed = self.seed(networks)
        if placement is None or topology is None or qemu is None or sleep is None:
            return None
        plan = InstancePlan(
            name=spec.instance.name,
            pod=facts.pod_name,
            state_directory=facts.state_directory,
            anchor=(str(sleep), "infinity"),
            placement=placement,
            networks=networks,
            dhcp=dhcp,
            shares=shares,
            console=ConsolePlan(
                spec.console.stdout, spec.console.log or facts.state_directory / "console.log", spec.console.log_size
            ),
            machine=MachinePlan(
                program=qemu,
                name=spec.instance.name,
                uuid=spec.instance.uuid,
                user=user,
                vcpus=spec.cpu.count,
                memory=spec.memory.size,
                topology=topology,
                ram=ram,
                lockable=lockable,
                accel=accel,
                cpu_model=spec.cpu.model or self.cpu_model(accel, topology),
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
                passing=passing,
            ),
            shutdown=share_grace(spec.shutdown.grace, spec.shutdown.poweroff_status, len(passing.devices)),
            patience=PATIENCE + (spec.memory.size / SLOWEST_PREALLOCATION if ram.preallocate else 0),
            remarks=tuple(self.remarks),
        )
        self.problems += too_few_slots(plan.machine)
        return plan

    def own_cpus(self, cpu: CpuSpec, backend: str) -> None:
        """Refuse a pod whose CPUs are not its own all the time, unless less was asked for."""
        facts = self.facts
        # The controller takes the vCPUs out of the pod's cgroup, and so from under its cpu.max.
        short = None if backend == "controller" else too_little_time(facts.cpu_time, cpu.count)
        shared = shared_cpus(facts.pod, facts.allowed_cpus, facts.online_cpus)
        for reason, remedy in ((shared, OWN_CPUS), (short, CPU_TIME)):
            if reason is None:
                continue
            if facts.pod is None or cpu.placement in ASKING_FOR_LESS:
                self.remarks.append(f"{reason}; {remedy}")
            else:
                self.refuse("cpu.placement", f'{reason}; {remedy}, or say "affinity" and do with less')

    def placement(self, cpu: CpuSpec) -> Placement | None:
        allowed = self.facts.allowed_cpus
        backend = self.backend(cpu)
        if cpu.count == ALL_CPUS:
            cpu = attrs.evolve(cpu, count=all_cpus(self.facts.hardware, allowed, spare=backend != "controller"))
            self.spec = attrs.evolve(self.spec, cpu=cpu)
        self.own_cpus(cpu, backend)
        if cpu.cpus is not None and not cpu.cpus <= allowed:
            self.refuse(
                "cpu.cpus",
                f"'{cpu.cpus - allowed}' of '{cpu.cpus}' may not be used by this process, which has '{allowed}'",
            )
            return None
        if cpu.count > len(allowed):
            self.refuse(
                "cpu.count",
                f"asks for {cpu.count} vCPUs, but this process may use {len(allowed)} CPUs ('{allowed}'); one CPU for each vCPU",
            )
            return None
        if backend == "controller":
            return self.registered(cpu, allowed)
        pins = self.pins(cpu)
        if pins is None:
            return None
        cpus = CpuSet(pins)
        rest = allowed - cpus
        if not rest:
            self.remarks.append(
                f"all CPUs this process may use ('{allowed}') belong to vCPUs: QEMU's own threads, dnsmasq, virtiofsd and this "
                "program share them; give it more CPUs than vCPUs"
            )
        if backend == "delegated":
            return DelegatedPlacement(cpus, pins, rest or allowed, shared=not rest, sweep=cpu.sweep and bool(rest))
        return AffinityPlacement(cpus, pins, rest or allowed, shared=not rest)

    def pins(self, cpu: CpuSpec) -> tuple[int, ...] | None:
        hardware = self.facts.hardware
        policy = None if cpu.pinning == "auto" else PinPolicy(cpu.pinning)
        try:
            cpus = cpu.cpus or choose_cpus(hardware, self.facts.allowed_cpus, cpu.count)
            placed = place(cpu.count, cpus, hardware, policy=policy)
        except RefusedError as error:
            self.refuse("cpu.cpus" if cpu.cpus else "cpu.count", str(error))
            return None
        self.remarks += [finding.message for finding in placed.findings]
        return placed.pins

    def topology(self, placement: Placement, accel: str) -> GuestTopology | None:
        """Decide what the guest sees. QEMU's emulated model ``max`` calls itself an AMD and has no words for siblings."""
        spec, hardware = self.spec, self.facts.hardware
        real = spec.cpu.topology == "host"
        try:
            topology = guest_topology(
                placement.pins,
                hardware,
                spec.memory.size,
                page_size=spec.memory.page_size or (PAGE_SIZE if real else 1),
                memory_nodes=self.facts.memory_nodes,
                siblings=accel == "kvm" or spec.cpu.model is not None,
            )
        except RefusedError as error:
            self.refuse("memory.size", f'{error}, or set cpu.topology = "flat"')
            return None
        if not spec.memory.bind:
            topology = unbound(topology)
        for each in topology.numa_nodes:
            if each.bound and each.bound != (each.host,):
                where = " and ".join(map(str, each.bound))
                self.remarks.append(
                    f"{format_size(each.memory)} of memory for the vCPUs on the host's NUMA node {each.host} come from {where}: "
                    "it has not that much, or none that this pod may use"
                )
        return topology if real else flat(topology)

    def devices(self, topology: GuestTopology, user: User, accel: str) -> PassthroughPlan:
        if not self.spec.device:
            return PassthroughPlan()
        from runner.plan.passthrough import plan_devices  # here, because few guests have devices of their own

        passing, problems, remarks = plan_devices(self.spec, self.facts, topology, user, accel)
        self.problems += problems
        self.remarks += remarks
        return passing

    def cpu_model(self, accel: str, topology: GuestTopology) -> str:
        if accel != "kvm":
            return "max"
        return "host,topoext=on" if topology.threads > 1 and self.facts.cpu_vendor in TOPOEXT_VENDORS else "host"

    def registered(self, cpu: CpuSpec, allowed: CpuSet) -> Placement | None:
        """Place with the node's controller: the vCPUs own what the kubelet gave the container, all of it."""
        if cpu.count < len(allowed):
            self.refuse(
                "cpu.count",
                f"asks for {cpu.count} vCPUs, but the container has {len(allowed)} CPUs ('{allowed}'), and under placement "
                '"controller" each belongs to a vCPU; give the container as many CPUs as vCPUs, and make its pod Guaranteed',
            )
            return None
        pins = self.pins(cpu)
        if pins is None:
            return None
        return ControllerPlacement(allowed, pins, cpu.controller, self.facts.container_uid or "", sweep=cpu.sweep)

    def backend(self, cpu: CpuSpec) -> str:
        """Return the placement back end: the one asked for, or the best that works."""
        reasons = {"controller": self.facts.controller_error, "delegated": self.facts.delegation_error}
        if cpu.placement != "auto":
            reason = reasons.get(cpu.placement)
            if reason is not None:
                self.refuse("cpu.placement", f"{cpu.placement!r} cannot be used: {reason}")
            backend = cpu.placement
        else:
            backend = next((name for name, reason in reasons.items() if reason is None), "affinity")
        if backend == "affinity":
            why = "".join(f"; no {name!r}: {reason}" for name, reason in reasons.items() if cpu.placement == "auto")
            self.remarks.append(
                "placement 'affinity' is second best: nothing but CPU masks keeps the vCPUs' CPUs free, and processes "
                f"of others may run there{why}"
            )
        return backend

    def accelerator(self) -> tuple[str, User]:
        asked, kvm = self.spec.cpu.accel, self.facts.kvm
        found = self.user("instance.user", self.spec.instance.user, QEMU_USERS)
        if found is None:
            self.remarks.append(f"QEMU runs as root, because none of the users {', '.join(QEMU_USERS)} exists here")
        user = found or ROOT
        if asked == "tcg":
            return "tcg", user
        if kvm.error is not None:
            if asked == "kvm":
                self.refuse("cpu.accel", f'cannot use /dev/kvm: {kvm.error}; give the pod the device, or ask for "tcg"')
            else:
                self.remarks.append(str(emulated(kvm)))
            return "tcg", user
        if (reason := kvm_unusable(kvm)) is not None:
            self.refuse("cpu.accel", f"{reason}; {KVM_UNUSABLE_REMEDY}")
        root = root_for_kvm(kvm)
        if root is None:
            return "kvm", user if kvm.admits_everyone else attrs.evolve(user, groups=(kvm.group_id,))
        if self.spec.instance.user not in {"auto", "root"}:
            self.refuse(
                "instance.user",
                f"{user.name!r} cannot use /dev/kvm (mode {kvm.mode & 0o777:o}); chmod it to 660 with a group",
            )
        self.remarks.append(f"{root}; chmod it to 660 with a group")
        return "kvm", ROOT

    def user(self, where: str, asked: str, candidates: Iterable[str]) -> User | None:
        if asked != "auto":
            user = self.facts.users.get(asked)
            if user is None:
                self.refuse(where, f"user {asked!r} does not exist here; name one from /etc/passwd")
            return user
        return next((self.facts.users[name] for name in candidates if name in self.facts.users), None)

    def memory(self, placement: Placement | None, accel: str, copied: int) -> RamPlan:
        facts, asked = self.facts, self.spec.memory
        if asked.size == WHAT_LIMITS_LEAVE:
            numa_node_of = {cpu.cpu: cpu.numa_node for cpu in facts.hardware.cpus}
            several = placement is not None and self.spec.cpu.topology == "host"
            pins = placement.pins if placement is not None and several else ()
            size = size_by_limits(self.spec, accel, facts.limits, len({numa_node_of[cpu] for cpu in pins}) or 1, copied)
            if isinstance(size, Problem):
                self.problems.append(size)
                size = LEAST_MEMORY  # said once is enough
            self.spec = with_size(self.spec, size)
        beside = memory_overhead(self.spec, accel, copied)
        controller = isinstance(placement, ControllerPlacement)
        self.problems += contradictions(self.spec, controller=controller)
        self.problems += too_little_memory(self.spec, beside, facts.memory, facts.limits)
        return RamPlan(
            page_size=asked.page_size,
            # What is locked is there at once, and must then lie where it shall be already.
            preallocate=asked.prealloc
            or controller
            or asked.hugepages is not None
            or asked.lock
            or bool(self.spec.device),
            locked=asked.lock,
            shared=asked.shared,
            beside=beside,
            preallocator=facts.preallocator,
        )

    def pages(self, topology: GuestTopology | None) -> None:
        facts = self.facts
        self.problems += too_few_pages(self.spec.memory, topology, facts.hardware, facts.memory_nodes, facts.limits)

    def program(self, path: PurePosixPath | None, where: str, name: str, package: str) -> PurePosixPath | None:
        if path is None:
            self.refuse(where, f"cannot find the program {name!r} in PATH; install the package {package}")
        return path

    def shares(self) -> Iterator[SharePlan]:
        for index, share in enumerate(self.spec.share):
            self.directory(f"share[{index}].path", share)
            program = self.facts.virtiofsd
            if program is None:
                self.refuse(
                    f"share[{index}]",
                    f"cannot use virtiofsd: {self.facts.virtiofsd_error}; install the package virtiofsd (Debian 12: qemu-system-common)",
                )
                continue
            if share.read_only and not program.read_only:
                version = ".".join(map(str, program.version))
                self.refuse(
                    f"share[{index}].read_only",
                    f"virtiofsd {version} cannot share read-only, 1.11 can; mount the directory read-only in the pod instead",
                )
            if not share.read_only:
                self.keep_out(share)
            yield SharePlan(program, share.tag, share.path, share.read_only)

    def keep_out(self, share: ShareSpec) -> None:
        """Refuse to write, with our rights, to what the guest can make a link to anything."""
        for where, path in (
            ("console.log", self.spec.console.log),
            ("boot.firmware_vars", self.spec.boot.firmware_vars),
        ):
            if path is not None and within(path, [share.path]):
                self.refuse(
                    where,
                    f"{str(path)!r} lies in the share {share.tag!r}, where the guest may put a link in its place; keep it "
                    "elsewhere, or set the share's read_only",
                )

    def directory(self, where: str, share: ShareSpec) -> None:
        fact = self.fact(share.path)
        if fact.kind != "directory":
            self.refuse(
                where,
                f"{str(share.path)!r} {fact.words}, not a directory"
                if fact is not MISSING
                else f"{str(share.path)!r} does not exist",
            )

    def fact(self, path: PurePosixPath) -> FileFact:
        return self.facts.files.get(path, MISSING)

    def file(self, where: str, path: PurePosixPath | None, user: User) -> FilePlan | None:
        if path is None:
            return None
        fact = self.fact(path)
        if fact.kind == "missing":
            self.refuse(where, f"{str(path)!r} does not exist")
        elif fact.kind != "file":
            self.refuse(where, f"{str(path)!r} {fact.words}, not a file")
        elif fact.error is not None:
            self.refuse(where, f"cannot read {str(path)!r}: {fact.error}")
        return FilePlan(path, copied=_is_copied(fact, user))

    def copied(self, user: User) -> int:
        """Return how many bytes of files are copied into memory for QEMU."""
        boot = self.spec.boot
        named = (path for path in (boot.kernel, boot.initrd, boot.firmware) if isinstance(path, PurePosixPath))
        return sum(fact.size for fact in map(self.fact, named) if _is_copied(fact, user))

    def known(self, disk: DiskSpec) -> HostFacts:
        """Return the facts with the spec's word for *disk*, if it would be handed over and nothing was."""
        if disk.fd is None or self.facts.descriptors is not None:
            return self.facts
        return attrs.evolve(self.facts, files={disk.path: FileFact("file")})

    def seed(self, networks: Iterable[NetworkPlan]) -> SeedPlan | None:
        spec, facts = self.spec, self.facts
        if spec.cloud_init is None:
            return None
        from runner.plan.cloud_init import plan_seed  # here, because most instances need none of it

        # To cloud-init another id is another machine, whose keys and users it makes anew.
        identity = spec.instance.uuid or facts.pod_uid or spec.instance.name
        macs = [network.mac for network in networks]
        return plan_seed(spec.cloud_init, identity, spec.instance.name, macs, facts.documents, self.refuse)


def _is_copied(fact: FileFact, user: User) -> bool:
    """Tell whether QEMU's *user* may not read a file that we may."""
    return not fact.everyone_reads and user.user_id != 0


def share_grace(grace: float, poweroff_status: int, devices: int = 0) -> ShutdownPlan:
    """Divide *grace* seconds among the steps of a power-down: the guest gets all but a tenth (at most 3 s).

    Each of its PCI *devices* has to be reset when QEMU goes, and then all of them are waited for: for that 2 s each and 5 s
    are taken from the guest's time, up to half of the grace.
    """
    forced, back = min(3.0, grace / 10), 0.0
    if devices:
        resets = DEVICE_RESET * devices
        part = min(1.0, (grace / 2 - forced) / (resets + DEVICES_BACK))
        forced, back = forced + part * resets, part * DEVICES_BACK
    return ShutdownPlan(grace - forced - back, forced / 2, forced / 2, poweroff_status, back)
