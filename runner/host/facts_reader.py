"""Reads everything that a plan needs to know from the host, and changes nothing."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, RefusedError, explain
from runner.facts.disk import FileFact, LateDiskFacts
from runner.facts.hardware import huge_limit_variable, hugepages_resource
from runner.facts.host import (
    CONSOLE_LOG,
    IN_A_POD,
    ROOT,
    VIRTIOFSD_DIRECTORIES,
    HostFacts,
    Kvm,
    PodName,
    Resolver,
    User,
    Virtiofsd,
)
from runner.facts.memory_limits import HugeFact, MemoryLimits
from runner.facts.roots import Roots
from runner.kernel.cgroup import Cgroup
from runner.kernel.character_devices import may_open, probe_kvm, try_kvm
from runner.kernel.child_processes import Command, Processes
from runner.kernel.file_prober import free_space, probe_file, read_document, why_not_appended
from runner.kernel.files import find_program
from runner.kernel.hardware_reader import read_hardware, read_online, read_promised_pages
from runner.kernel.limits import CAP_IPC_LOCK, cpu_limits, hard_limit, huge_limits, memory_limit, read_lockable
from runner.kernel.procfs import Procfs
from runner.kernel.scheduler import read_cpuset, read_mask
from runner.kernel.small_files import read_os_release, read_text
from runner.plan.disks import LONGEST_CHAIN, within
from runner.plan.firmware import candidates
from runner.plan.host_checks import too_old
from runner.plan.machine import DHCP_USERS, QEMU_USERS
from runner.plan.qemu_limits import ASKED_FROM
from runner.spec.document_parser import LARGEST_DOCUMENT
from runner.spec.instance import DiskSpec, InstanceSpec, opened_paths

if TYPE_CHECKING:
    from runner.kernel.inherited_fds import InheritedFd

SYSTEM_DIRECTORIES = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
CAP_NET_RAW = 13
"""``include/uapi/linux/capability.h``."""
PREALLOCATOR = Path(__file__).parents[1] / "kernel" / "preallocate.py"
"""A script that another Python interpreter runs; it is not imported here."""
ANSWERS_WITHIN = 5.0
"""Seconds that a program may take to print its version."""


async def read_host_facts(
    spec: InstanceSpec,
    processes: Processes,
    roots: Roots,
    state_directory: PurePosixPath,
    inherited: Mapping[str, InheritedFd] | None,
) -> HostFacts:
    """Return everything that the plan of *spec* needs to know of this host.

    *inherited* are the descriptors that other programs have opened for the instance, by name; ``None`` if only a plan is wanted. Raises
    :exc:`~runner.base.errors.HostError` if the kernel does not show a fact that every plan needs.
    """
    procfs = Procfs(roots.proc)
    cgroup = procfs.cgroup()
    facts = _with_files(_machine(spec, procfs, roots, cgroup, state_directory), spec, procfs, inherited)
    for part in _parts(spec, cgroup):
        facts = part(facts, spec, roots)
    return await _with_answers(facts, spec, processes, asked=inherited is None)


def _parts(spec: InstanceSpec, cgroup: str) -> Iterator[Callable[[HostFacts, InstanceSpec, Roots], HostFacts]]:
    """Import the readers of facts that only some specs need: each module costs PID 1 time at its start, and memory."""
    if spec.network:
        yield _with_networks
    if any(each.mode in {"bridge", "macvtap", "private"} for each in spec.network):
        from runner.host.interfaces import with_interfaces

        yield with_interfaces
    if spec.share:
        from runner.host.shared_paths import with_shares

        yield with_shares
    if spec.device:
        from runner.host.devices import with_devices

        yield with_devices
    identified = spec.network or spec.cloud_init is not None or spec.guest.vsock is not None
    if identified or spec.cpu.placement != "affinity" or "kubepods" in cgroup or IN_A_POD in os.environ:
        from runner.host.own_pod import with_pod

        yield with_pod


# -- the machine -----------------------------------------------------------------------------------------------------


def _machine(
    spec: InstanceSpec, procfs: Procfs, roots: Roots, cgroup: str, state_directory: PurePosixPath
) -> HostFacts:
    limits = _memory_limits(spec, procfs, roots, cgroup)
    return HostFacts(
        allowed_cpus=read_allowed_cpus(Cgroup(roots.cgroup / cgroup.lstrip("/")), roots),
        masked_cpus=read_cpuset() - read_mask(),
        hardware=read_hardware(roots.sys.parent),
        memory_nodes=procfs.memory_nodes(),
        cpu_vendor=procfs.cpu_vendor(),
        invariant_tsc=procfs.has_invariant_tsc(),
        address_bits=procfs.address_bits(),
        memory=min(procfs.memory_total(), limits.memory or 1 << 62),
        limits=limits,
        cpu_time=min(cpu_limits(PurePosixPath(roots.cgroup), cgroup), default=None),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        state_directory=state_directory,
        preallocator=(sys.executable, "-IS", str(PREALLOCATOR)),
        qemu=find_program("qemu-system-x86_64", SYSTEM_DIRECTORIES),
        dnsmasq=find_program("dnsmasq", SYSTEM_DIRECTORIES),
        sleep=find_program("sleep", SYSTEM_DIRECTORIES),
        users=dict(_users(spec.instance.user, *QEMU_USERS, *DHCP_USERS)),
        kvm=_kvm(spec, roots.dev / "kvm"),
        vhost_vsock=spec.guest.vsock is not None and may_open(roots.dev / "vhost-vsock"),
        user_namespace=procfs.in_user_namespace(),
        machines_network=procfs.in_first_network_namespace(),
        os_release=read_os_release(),
        machine_id=_machine_id(roots),
        pod_name=read_pod_name(os.environ),
    )


def _kvm(spec: InstanceSpec, device: Path) -> Kvm:
    kvm = probe_kvm(device)
    return kvm if kvm.error is not None or spec.cpu.accel == "tcg" else attrs.evolve(kvm, trial=try_kvm(device))


def read_allowed_cpus(own: Cgroup, roots: Roots) -> CpuSet:
    """Return the CPUs of this process's cpuset.

    While another instance's partition still has some of them, the kernel shows only the others, or CPUs that are not this container's. Its
    *own* cgroup lists the assigned CPUs, if it is visible here.
    """
    cpus = read_cpuset()
    try:
        given, effective = own.cpus() & read_online(roots.sys), own.effective_cpus()
    except HostError:
        return cpus
    return given if given and cpus == effective and not given <= effective else cpus


def _memory_limits(spec: InstanceSpec, procfs: Procfs, roots: Roots, cgroup: str) -> MemoryLimits:
    lockable, may_lock = None, False
    if spec.memory.lock or spec.device:
        capabilities = procfs.machine_capabilities()
        lockable, may_lock = read_lockable(capabilities), CAP_IPC_LOCK in capabilities
    mount = PurePosixPath(roots.cgroup)
    return MemoryLimits(
        memory=None if (limit := memory_limit(roots)) is None else limit.size,
        huge={
            size: HugeFact(read_huge_limit(mount, cgroup, size, os.environ), promised)
            for size, promised in (read_promised_pages(roots.sys.parent).items() if spec.memory.hugepages else ())
        },
        lockable=lockable,
        may_lock=may_lock,
        file_size=hard_limit(resource.RLIMIT_FSIZE),
    )


def read_huge_limit(mount: PurePosixPath, cgroup: str, page_size: int, environment: Mapping[str, str]) -> int | None:
    """Return the limit in bytes of this container's huge pages of *page_size* bytes; ``None`` if no limit is visible.

    By default containerd sets no limit for a container, but the kubelet does for its pod (``disable_hugetlb_controller``
    of the CRI plugin). The pod's cgroup is hidden in a cgroup namespace, and its limit is that of all containers
    together. So the pod can give the container's own limit in an environment variable; there 0 is no limit.
    """
    limits = list(huge_limits(mount, cgroup, page_size))
    name = huge_limit_variable(page_size)
    value = environment.get(name, "0")
    if re.fullmatch("[0-9]{1,18}", value) is None or int(value) % page_size:
        raise RefusedError(
            f"cannot use {name}={value!r}: it must be bytes, a multiple of the page size {page_size}",
            remedy=f"set it with resourceFieldRef: limits.{hugepages_resource(page_size)}, without a divisor",
        )
    return min((*limits, *filter(None, [int(value)])), default=None)


def _io_uring_error(disks: Iterable[DiskSpec]) -> str | None:
    if all(disk.aio != "io_uring" for disk in disks):
        return None
    from runner.kernel.io_uring import try_io_uring  # here, because few instances need ctypes

    reason = try_io_uring()
    return None if reason is None else reason.strerror


def _console_log_error(log: PurePosixPath | None, state_directory: PurePosixPath) -> str | None:
    """Return the reason why *log*, or the one in the state directory, cannot be written; that directory is created at the start."""
    path = log or state_directory / CONSOLE_LOG
    made = os.path.realpath(path.parent) == os.path.realpath(state_directory)
    return None if made and not os.path.lexists(path) else why_not_appended(path)


def _users(*names: str) -> Iterator[tuple[str, User]]:
    for name in names:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        yield name, User(name, entry.pw_uid, entry.pw_gid)


def _machine_id(roots: Roots) -> str:
    """Return the machine's id; the file may be missing, empty or ``uninitialized`` in a container's image (machine-id(5))."""
    machine_id = read_text(PurePosixPath("/etc/machine-id")).strip()
    if re.fullmatch(r"[0-9a-f]{32}", machine_id):
        return machine_id
    return read_text(roots.sys / "class/dmi/id/product_uuid").strip().lower()


def read_pod_name(environment: Mapping[str, str]) -> PodName:
    """Return the pod's name from the Downward API, by the customary names of environment variables."""
    names = ("POD_NAME", "POD_NAMESPACE", "NODE_NAME", "POD_UID")
    return PodName(*(environment.get(name, "") for name in names))


# -- programs --------------------------------------------------------------------------------------------------------


async def _with_answers(facts: HostFacts, spec: InstanceSpec, processes: Processes, *, asked: bool) -> HostFacts:
    """Add the facts that programs print about themselves; those that the guest may change have been refused before.

    QEMU is asked for its version if it is *asked*, else only where a start must know it: that takes 20 ms.
    """
    qemu = facts.qemu
    if spec.share:
        virtiofsd, error = await find_virtiofsd(processes)
        facts = attrs.evolve(facts, virtiofsd=virtiofsd, virtiofsd_error=error)
    if qemu is not None and (asked or _depends_on_version(spec, facts.allowed_cpus)):
        version, reason = await ask_qemu_version(processes, qemu)
        facts = attrs.evolve(facts, qemu_version=version, qemu_error=reason)
    if spec.cpu.model is not None:
        from runner.host.cpu_models import with_cpu_model  # here, because few specs name one

        facts = await with_cpu_model(facts, spec.cpu, spec.cpu.model, processes)
    kvm = facts.kvm
    if qemu is not None and spec.cpu.accel == "tried" and kvm.error is None and kvm.trial is None:
        from runner.host.trial_guest import try_guest  # here, because few instances ask for it

        guest = await try_guest(processes, qemu, "kvm", spec.cpu.model)
        facts = attrs.evolve(facts, kvm=attrs.evolve(kvm, guest=guest.error))
    if facts.passt is not None:
        from runner.host.passt import why_it_does_not_start  # here, because few guests have a network of its

        error = await why_it_does_not_start(processes, facts.passt, ANSWERS_WITHIN)
        facts = attrs.evolve(facts, passt_error=error)
    return facts


def _depends_on_version(spec: InstanceSpec, allowed: CpuSet) -> bool:
    """Tell whether a start needs QEMU's version beforehand: asking takes 20 ms, and the monitor's greeting has it as well."""
    vcpus = len(allowed) if spec.cpu.count == "all" else spec.cpu.count
    return bool(spec.device) or spec.hotplug.qemu or max(vcpus, spec.hotplug.cpus or 0) >= ASKED_FROM


async def ask_qemu_version(processes: Processes, qemu: PurePosixPath, user: User = ROOT) -> tuple[str, str | None]:
    """Return the version of *qemu*, which *user* runs, and the reason why it cannot be used; ``None`` if it can."""
    output, reason = await version_output(processes, "qemu", qemu, user)
    version = re.search(r"version ([0-9.]+)", output, re.ASCII)
    if reason or version is None:
        return "", reason or f"it prints {output!r} when asked for its version"
    return version[1], too_old(version[1])


async def find_virtiofsd(processes: Processes) -> tuple[Virtiofsd | None, str]:
    """Return the virtiofsd that serves shares; if there is none, the places searched or the output not understood.

    Raises :exc:`~runner.base.errors.HostError` when this host cannot start any program now.
    """
    path = find_program("virtiofsd", VIRTIOFSD_DIRECTORIES)
    if path is None:
        return None, "not found in PATH, " + ", ".join(VIRTIOFSD_DIRECTORIES)
    output, reason = await version_output(processes, "virtiofsd", path)
    if reason:
        return None, reason
    return Virtiofsd.parse(path, output), f"{path} says {output!r} when asked for its version"


async def version_output(processes: Processes, role: str, path: PurePosixPath, user: User = ROOT) -> tuple[str, str]:
    """Return the output of a program that *user* runs with ``--version``, and the error of the program.

    Raises :exc:`~runner.base.errors.HostError` when descriptors, processes or memory are short instead.
    """
    command = Command(f"{role}-version", (str(path), "--version"), level=logging.DEBUG)
    command = command.of_user(user.user_id, user.group_id, user.groups)
    try:
        async with processes.daemon(command, 0) as process:
            with trio.move_on_after(ANSWERS_WITHIN):
                await process.wait()
            return " ".join(process.last_lines), ""
    except HostError as error:
        if getattr(error.__cause__, "errno", None) in {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}:
            raise
        return "", explain(error)


# -- files and disks -------------------------------------------------------------------------------------------------


def _with_files(
    facts: HostFacts, spec: InstanceSpec, procfs: Procfs, inherited: Mapping[str, InheritedFd] | None
) -> HostFacts:
    directory = facts.state_directory
    documents = () if spec.cloud_init is None else spec.cloud_init.files
    return attrs.evolve(
        facts,
        console_log_error=_console_log_error(spec.console.log, directory),
        files={directory: probe_file(directory), **dict(_files(spec))},
        links=dict(_links(spec, directory)),
        documents={path: read_document(path, LARGEST_DOCUMENT) for path in documents},
        free_space=free_space(directory) if any(disk.ephemeral for disk in spec.disk) else None,
        io_uring_error=_io_uring_error(spec.disk),
        aio_free=procfs.aio_free() if spec.disk else None,
        descriptors=None if inherited is None else {name: each.probe() for name, each in inherited.items()},
    )


def _files(spec: InstanceSpec) -> Iterator[tuple[PurePosixPath, FileFact]]:
    for path in (spec.boot.kernel, spec.boot.initrd, spec.boot.firmware, *candidates(spec.boot)):
        if isinstance(path, PurePosixPath):
            yield path, probe_file(path)
    if (variables := spec.boot.firmware_vars) is not None:
        yield variables, probe_file(variables, write=True, image=True)
        yield variables.parent, probe_file(variables.parent)
    for disk in spec.disk:
        yield from _disk_files(disk)
    for share in spec.share:
        yield share.path, probe_file(share.path)


def _links(spec: InstanceSpec, state_directory: PurePosixPath) -> Iterator[tuple[PurePosixPath, frozenset[int]]]:
    """Yield each path of *spec* that leads through symbolic links, and the owners of these links."""
    for path in (*(path for _, path in opened_paths(spec, state_directory)), *(share.path for share in spec.share)):
        if os.path.realpath(path) != str(path):
            from runner.kernel.shared_directories import followed  # here, because few paths have links

            yield path, followed(path).link_owners


def read_disk_facts(disk: DiskSpec, state_directory: PurePosixPath) -> LateDiskFacts:
    """Return the facts that the plan of one disk needs."""
    return LateDiskFacts(
        dict(_disk_files(disk)), _io_uring_error((disk,)), free_space(state_directory) if disk.ephemeral else None
    )


def _disk_files(disk: DiskSpec) -> Iterator[tuple[PurePosixPath, FileFact]]:
    """Yield the file of *disk* and its backing files, as far as the spec allows them.

    A header may name any path: one that the spec does not allow is not even opened.
    """
    path, fact = disk.file, probe_file(disk.file, write=disk.writes, image=True)
    yield path, fact
    for _ in range(LONGEST_CHAIN):
        backing = None if fact.image is None else fact.image.backing
        if backing is None or not within(backing, disk.backing):
            return
        path, fact = backing, probe_file(backing, image=True)
        yield path, fact


# -- networks --------------------------------------------------------------------------------------------------------


def _with_networks(facts: HostFacts, spec: InstanceSpec, roots: Roots) -> HostFacts:
    procfs = Procfs(roots.proc)
    return attrs.evolve(
        facts,
        tun=may_open(roots.dev / "net/tun"),
        vhost_net=may_open(roots.dev / "vhost-net"),
        passt=find_program("passt", SYSTEM_DIRECTORIES) if any(each.mode == "passt" for each in spec.network) else None,
        unprivileged_port=int(procfs.setting("net/ipv4/ip_unprivileged_port_start") or 0),
        ipv6_error=_ipv6_error(procfs),
        resolver=Resolver.parse(read_text(PurePosixPath("/etc/resolv.conf"))),
    )


def _ipv6_error(procfs: Procfs) -> str | None:
    """Return the reason why a guest's network cannot have IPv6: new interfaces have none, or dnsmasq may not open raw sockets."""
    disabled = procfs.setting("net/ipv6/conf/default/disable_ipv6")
    if disabled == "0":
        allowed = CAP_NET_RAW in procfs.capabilities()
        return None if allowed else "dnsmasq needs the capability NET_RAW for it; give it to the container"
    if not disabled:
        return "the kernel has none"
    return "it is disabled here; set net.ipv6.conf.default.disable_ipv6=0 for the pod or container"
