"""The plan of the machine: QEMU's user and accelerator, the files that it reads, and the slots of the guest's root bus."""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

import attrs

from runner.base.values import frozen
from runner.facts.disk import MISSING, FileFact
from runner.facts.file_errors import remedy_of
from runner.facts.file_formats import FORMATS, unusable
from runner.facts.host import PODS_USERS, ROOT, HostFacts, User
from runner.facts.packages import install
from runner.placement.guest_topology import GuestTopology
from runner.plan.disks import DiskPlan
from runner.plan.firmware import VariablesPlan
from runner.plan.guest_devices import GuestPlan
from runner.plan.host_checks import (
    KVM_UNUSABLE_REMEDY,
    emulated,
    kvm_remedy,
    kvm_unusable,
    root_for_kvm,
    runs_no_guest,
)
from runner.plan.memory import RamPlan
from runner.plan.passthrough_plan import ROOT_BUS, PassthroughPlan
from runner.plan.problems import Problems, Reason
from runner.plan.qemu_limits import FLASH_SECTOR, MOST_FLASH
from runner.plan.shares import SharePlan
from runner.spec.instance import BootSpec, IdleChoice, InstanceSpec, RebootAction

if TYPE_CHECKING:
    from runner.plan.cloud_init import SeedPlan
    from runner.plan.network_plan import NetworkPlan

Accel = Literal["kvm", "tcg"]

TOPOEXT_VENDORS = {"AuthenticAMD", "HygonGenuine"}
"""Their CPUs report siblings in CPUID's TOPOEXT leaves, which QEMU's model ``host`` leaves out unless asked for them."""

DEDICATED = "kvm-hint-dedicated"

EMULATED_CPU = "max,erms=off,fsrm=off,la57=off"
"""The model of a CPU that QEMU emulates: all features except those that slow it down.

Kernels and C libraries copy and clear by ``rep movsb`` and ``rep stosb`` where a CPU has them fast (ERMS, FSRM); TCG executes them byte by
byte. A fifth level of page tables (LA57), which 128 TiB do not need, costs one more access at each miss of the TLB. A Debian booted in 7 %
less CPU time.
"""

QEMU_USERS = ("qemu", "libvirt-qemu", "nobody")
DHCP_USERS = ("dnsmasq", "nobody")

ROOT_BUS_SLOTS = 30
"""Slots for devices, of 32: q35 itself takes the first and the last one."""
SLOTS_OF_EVERY_GUEST = 2
"""Those of pvpanic and the source of random numbers."""


UNPACKED = [each for each in FORMATS if each.name in {"gzip", "bzip2", "lzma", "xz", "lzop", "lz4 -l", "zstd"}]
"""The formats of initial RAM disks, besides cpio, that Linux unpacks (``lib/decompress.c``)."""


@frozen
class FilePlan:
    """A file QEMU reads; *copied* into memory first when QEMU's user may not read it."""

    path: PurePosixPath
    copied: bool


@frozen
class VcpuHotplugPlan:
    """The bounds within which the number of vCPUs can change while the guest runs."""

    most: int
    """The greatest number of vCPUs."""
    alike: bool
    """Whether the guest is shown one L3 cache, so that no vCPU may be pinned to a CPU with a different one."""


@frozen
class MachinePlan:
    """The complete input of QEMU's command line."""

    program: PurePosixPath
    name: str
    smbios_uuid: str | None
    user: User
    vcpus: int
    memory: int
    """Bytes, whole MiB."""
    topology: GuestTopology
    ram: RamPlan
    lockable: int
    """Bytes that QEMU may have to lock, 0 if none."""
    accel: Accel
    cpu_model: str
    idle: IdleChoice
    kernel: FilePlan | None
    initrd: FilePlan | None
    cmdline: str | None
    firmware: FilePlan | None
    firmware_vars: VariablesPlan | None
    secure_boot: bool
    """Whether the firmware runs in System Management Mode, the only mode in which its variables can be written."""
    disks: tuple[DiskPlan, ...]
    slots: int
    """Root ports for disks that are attached later."""
    networks: tuple[NetworkPlan, ...]
    shares: tuple[SharePlan, ...]
    guest: GuestPlan
    seed: SeedPlan | None
    """The seed for cloud-init; ``None``: none."""
    vnc: bool
    """Whether it has a screen, and a VNC server that receives its connections from this program."""
    on_reboot: RebootAction
    passthrough: PassthroughPlan
    machine_type: str = attrs.field(default="q35")
    """Possibly the versioned name from another QEMU, such as ``pc-q35-10.1``, which the guest keeps when QEMU is updated."""
    updatable: bool = attrs.field(default=False)
    """Whether another QEMU can replace it while the guest runs: then all of the guest's memory is shared."""
    bios_console: bool = attrs.field(default=False)
    """Whether SeaBIOS uses the serial console; the guest then has a VGA without a screen, which boot loaders draw on."""
    remapping: bool = attrs.field(default=False)
    """Whether an IOMMU remaps interrupts, which vCPUs with APIC IDs beyond 254 need (only under KVM)."""
    vcpu_hotplug: VcpuHotplugPlan | None = attrs.field(default=None)
    """``None``: the number of vCPUs cannot change while the guest runs."""


def choose_accelerator(spec: InstanceSpec, facts: HostFacts, problems: Problems) -> tuple[Accel, User]:
    """Decide whether KVM runs the guest, and which user QEMU runs as: it opens ``/dev/kvm`` itself."""
    kvm = facts.kvm
    user = _qemu_user(spec.instance.user, facts, problems)
    if spec.cpu.accel == "tcg":
        return "tcg", user
    if kvm.error is not None:
        if spec.cpu.accel == "kvm":
            problems.refuse(
                "cpu.accel",
                f"no KVM ({kvm.error})",
                kvm_remedy(kvm) or 'give the pod the device, or ask for "tcg"',
            )
        else:
            problems.remark("cpu.accel", str(emulated(kvm)), kvm_remedy(kvm))
        return "tcg", user
    if spec.cpu.accel == "tried" and (reason := runs_no_guest(kvm)) is not None:
        problems.remark("cpu.accel", reason)
        return "tcg", user
    if (reason := kvm_unusable(kvm)) is not None:
        problems.refuse("cpu.accel", reason, KVM_UNUSABLE_REMEDY)
    root = root_for_kvm(kvm)
    if root is None:
        return "kvm", user if kvm.admits_everyone else attrs.evolve(user, groups=(kvm.group_id,))
    remedy = "chmod it to 660 with a group"
    if spec.instance.user not in {"auto", "root"} and spec.instance.user in facts.users:
        problems.refuse("instance.user", f"{user.name!r} cannot use /dev/kvm (mode {kvm.mode & 0o777:o})", remedy)
    problems.remark("instance.user", root, remedy)
    return "kvm", ROOT


def _qemu_user(asked: str, facts: HostFacts, problems: Problems) -> User:
    if asked == "auto":
        found = next((_of_pod(facts.users[name], facts) for name in QEMU_USERS if name in facts.users), None)
    else:
        found = facts.users.get(asked)
        if found is None:
            problems.refuse("instance.user", f"user {asked!r} does not exist here", "name one from /etc/passwd")
    if found is None and asked == "auto":
        problems.remark(
            "instance.user", f"QEMU runs as root, because none of the users {', '.join(QEMU_USERS)} exists here"
        )
    return found or ROOT


def _of_pod(user: User, facts: HostFacts) -> User:
    """Return *user* with a number by the pod's UID, so that QEMUs of different pods are different users to the kernel.

    The kernel limits some resources of each user, in all containers together. If all QEMUs were one user, one that its guest has taken over
    could have so many descriptors in flight that no other could send any, as it must to virtiofsd (``too_many_unix_fds``). A user namespace
    has users of its own already, and may lack these numbers.
    """
    if facts.pod_uid is None or facts.user_namespace:
        return user
    digest = hashlib.sha256(f"{facts.pod_uid}/qemu".encode()).digest()
    number = PODS_USERS[int.from_bytes(digest[:4], "big") % len(PODS_USERS)]
    return attrs.evolve(user, name=str(number), user_id=number)


def choose_cpu_model(
    asked: str | None, accel: Accel, topology: GuestTopology, facts: HostFacts, *, exclusive: bool
) -> str:
    """Return QEMU's CPU model: the one *asked* for, or the one that shows the guest the most features of the host's CPU.

    A guest with *exclusive* CPUs is informed of it (KVM_HINTS_REALTIME in CPUID 0x40000001, Documentation/virt/kvm/x86/cpuid.rst):
    it then spins for a lock instead of having its vCPU halted. A hint that *asked* contains is kept.
    """
    if accel != "kvm":
        return asked or EMULATED_CPU
    model = asked or "host"
    if asked is None and topology.threads > 1 and facts.cpu_vendor in TOPOEXT_VENDORS:
        model += ",topoext=on"
    if asked is None and facts.invariant_tsc:
        model += ",invtsc=on"  # left out by QEMU unless asked for, because it forbids a migration
    return f"{model},{DEDICATED}=on" if exclusive and DEDICATED not in model else model


def choose_idle(asked: IdleChoice, accel: Accel, problems: Problems) -> IdleChoice:
    """Decide whether the guest or the host idles the CPUs; under TCG it is always the host."""
    if asked == "guest" and accel != "kvm":
        problems.remark("cpu.idle", 'cpu.idle = "guest" has no effect without KVM', "leave it out")
        return "host"
    return asked


def require_program(
    path: PurePosixPath | None, name: str, facts: HostFacts, problems: Problems, error: str | None = None
) -> PurePosixPath | None:
    """Return *path*; refuse the document if the program was not found, or is unusable because of *error*."""
    if path is None:
        problems.refuse("", f"cannot find the program {name!r} in PATH", install(name, facts.os_release))
    elif error is not None:
        problems.refuse("", f"cannot use {path}: {error}", "install another one")
    return path


def plan_file(
    use: Literal["kernel", "initrd", "firmware"],
    path: PurePosixPath | None,
    user: User,
    facts: HostFacts,
    problems: Problems,
) -> FilePlan | None:
    """Plan how QEMU, running as *user*, reads the file at *path* that the key *use* of ``[boot]`` names."""
    if path is None:
        return None
    where, fact = f"boot.{use}", facts.files.get(path, MISSING)
    if fact.kind == "missing":
        problems.refuse(where, f"{str(path)!r} does not exist")
    elif fact.kind != "file":
        problems.refuse(where, f"{str(path)!r} {fact.words}, not a file")
    elif fact.error is not None:
        problems.refuse(where, f"cannot read {str(path)!r}: {fact.error}", remedy_of(fact.error_number))
    elif (unfit := _unfit(use, path, fact)) is not None:
        problems.refuse(where, *unfit)
    return FilePlan(path, copied=_is_copied(fact, user))


def _unfit(use: Literal["kernel", "initrd", "firmware"], path: PurePosixPath, fact: FileFact) -> Reason | None:
    """Return the reason why a file does not fit its key; ``None`` if it fits, or its format is unknown."""
    name, format_ = repr(str(path)), fact.format
    kind = "" if format_ is None else format_.kind
    held, command = ("", "") if format_ is None else unusable(format_, str(path))
    if use == "kernel" and kind != "kernel":
        also = f"; it {held}" if held else ""
        return Reason(
            f"{name} is no kernel that QEMU can start: it is no bzImage (no 'HdrS' at byte 0x202), ELF or multiboot image{also}",
            command or "name a kernel for x86-64, such as /boot/vmlinuz-…",
        )
    if (
        use == "initrd"
        and kind in {"image", "packed", "text", "kernel", "program", "firmware"}
        and fact.format not in UNPACKED
    ):
        return Reason(f"{name} {held}, which Linux does not take as an initial RAM disk", command)
    if use == "firmware" and (fact.size == 0 or fact.size % FLASH_SECTOR or fact.size > MOST_FLASH):
        return Reason(
            f"{name} has {fact.size} bytes, and QEMU takes firmware of a multiple of {FLASH_SECTOR} bytes, at most {MOST_FLASH}",
            command or "name a firmware for x86, such as /usr/share/OVMF/OVMF_CODE_4M.fd",
        )
    if use == "firmware" and kind not in {"", "firmware"}:
        return Reason(f"{name} is no firmware: it {held}", command or "name the file of the firmware's code")
    return None


def bytes_copied(boot: BootSpec, user: User, facts: HostFacts) -> int:
    """Return how many bytes of files are copied into memory for QEMU, which runs as *user*."""
    named = (path for path in (boot.kernel, boot.initrd, boot.firmware) if isinstance(path, PurePosixPath))
    found = (facts.files.get(path, MISSING) for path in named)
    return sum(fact.size for fact in found if _is_copied(fact, user))


def _is_copied(fact: FileFact, user: User) -> bool:
    """Tell whether QEMU's *user* may not read a file that this process may."""
    return not fact.everyone_reads and user.user_id != 0


def refuse_too_few_slots(machine: MachinePlan, problems: Problems) -> None:
    """Refuse more devices than the root bus of *machine* has slots; :mod:`runner.plan.argv.qemu` puts them there."""
    guest, numa_nodes, bridges = machine.guest, len(machine.topology.numa_nodes), machine.passthrough.bridges
    takers = {
        "disks": len(machine.disks),
        "networks": len(machine.networks),
        "shares": len(machine.shares),
        "devices": sum(port.bus == ROOT_BUS for port in machine.passthrough.ports),
        "for disks attached later (hotplug.disks)": machine.slots,
        "host bridges": (numa_nodes if numa_nodes > 1 else 0) if bridges is None else len(bridges),
        "for agent, vsock, watchdog, screen and cloud-init": sum(
            (
                guest.agent,
                guest.vsock is not None,
                guest.watchdog is not None,
                machine.vnc or machine.bios_console,
                machine.seed is not None,
            )
        ),
        "that every guest has": SLOTS_OF_EVERY_GUEST,
    }
    wanted = sum(takers.values())
    if wanted <= ROOT_BUS_SLOTS:
        return
    listed = ", ".join(f"{number} {taker}" for taker, number in takers.items() if number)
    left = machine.slots - (wanted - ROOT_BUS_SLOTS)
    problems.refuse(
        "hotplug.disks" if left >= 0 else "",
        f"the guest's root bus has {ROOT_BUS_SLOTS} slots, and {wanted} are wanted: {listed}",
        f"lower hotplug.disks to {left}" if left >= 0 else "give one instance fewer of them, and lower hotplug.disks",
    )
