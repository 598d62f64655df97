"""Reads from the host everything that a plan needs to know, and changes nothing."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, RefusedError, explain
from runner.facts.disk import DocumentFact, FileFact, LateDiskFacts
from runner.facts.hardware import huge_limit_variable, hugepages_resource
from runner.facts.host import (
    CLAIMED_CPUS,
    CONSOLE_LOG,
    ROOT,
    HostFacts,
    Kvm,
    PodName,
    PodQos,
    Resolver,
    User,
    Virtiofsd,
)
from runner.facts.memory import HugeFact, MemoryLimits
from runner.facts.roots import Roots
from runner.kernel.cgroup import Cgroup
from runner.kernel.character_devices import may_open, probe_kvm, try_kvm
from runner.kernel.file_prober import free_space, probe_file, read_document, why_not_appended
from runner.kernel.files import find_program, memory
from runner.kernel.limits import cpu_limits, file_size_limit, huge_limits, memory_limit
from runner.kernel.processes import Command, Processes
from runner.kernel.procfs import Procfs
from runner.kernel.scheduler import read_cpuset, read_mask
from runner.kernel.small_files import read_os_release, read_text
from runner.kernel.sysfs import read_hardware, read_online, read_promised_pages
from runner.plan.disks import LONGEST_CHAIN, within
from runner.plan.firmware import candidates
from runner.plan.host_checks import qos_of_oom_score_adj, too_old
from runner.plan.machine import EVERY_QEMUS_MODELS, QEMU_USERS, model_name, parse_cpu_models
from runner.plan.qemu_limits import ASKED_FROM
from runner.spec.instance import DiskSpec, InstanceSpec

if TYPE_CHECKING:
    from ipaddress import IPv4Interface

    from runner.facts.descriptor import DescriptorFact
    from runner.facts.network import Interface
    from runner.facts.pci import VfioFacts
    from runner.kernel.inherited_fds import InheritedFd

VIRTIOFSD_DIRECTORIES = ("/usr/libexec", "/usr/lib/qemu", "/usr/lib/virtiofsd", "/usr/lib")
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

    *inherited* are the descriptors that other programs have opened for the instance, by name; ``None`` where only a plan
    is wanted. Raises :exc:`~runner.base.errors.HostError` where the kernel does not show what every plan needs.
    """
    procfs = Procfs(roots.proc)
    cgroup = procfs.cgroup()
    qemu = find_program("qemu-system-x86_64", SYSTEM_DIRECTORIES)
    dnsmasq, sleep = find_program("dnsmasq", SYSTEM_DIRECTORIES), find_program("sleep", SYSTEM_DIRECTORIES)
    passt = find_program("passt", SYSTEM_DIRECTORIES) if any(each.mode == "passt" for each in spec.network) else None
    _refuse_programs_in_shares((qemu, dnsmasq, sleep, passt), spec, roots)
    virtiofsd, virtiofsd_error = await find_virtiofsd(processes) if spec.share else (None, "")
    limits = _memory_limits(spec, procfs, roots, cgroup)
    mask = read_mask()
    allowed_cpus = read_allowed_cpus(Cgroup(roots.cgroup / cgroup.lstrip("/")), roots)
    asked = inherited is None or _depends_on_version(spec, allowed_cpus)
    qemu_version, qemu_error = await ask_qemu_version(processes, qemu) if asked and qemu is not None else ("", None)
    facts = HostFacts(
        allowed_cpus=allowed_cpus,
        masked_cpus=read_cpuset() - mask,
        hardware=read_hardware(roots.sys.parent),
        memory_nodes=procfs.memory_nodes(),
        cpu_vendor=procfs.cpu_vendor(),
        invariant_tsc=procfs.has_invariant_tsc(),
        cpu_models=await _cpu_models(spec.cpu.model, processes, qemu),
        console_log_error=_console_log_error(spec.console.log, state_directory),
        memory=min(procfs.memory_total(), limits.memory or 1 << 62),
        state_directory=state_directory,
        limits=limits,
        preallocator=(sys.executable, "-IS", str(PREALLOCATOR)),
        qemu=qemu,
        dnsmasq=dnsmasq,
        sleep=sleep,
        virtiofsd=virtiofsd,
        virtiofsd_error=virtiofsd_error,
        files={state_directory: probe_file(state_directory), **dict(_files(spec))},
        in_shares=dict(_in_shares(spec, state_directory, roots)),
        links=dict(_links(spec, state_directory)),
        documents=dict(_documents(spec)),
        users=dict(_users(spec)),
        qemu_version=qemu_version,
        qemu_error=qemu_error,
        address_bits=procfs.address_bits(),
        free_space=free_space(state_directory) if any(disk.ephemeral for disk in spec.disk) else None,
        io_uring_error=_io_uring_error(spec.disk),
        aio_free=procfs.aio_free() if spec.disk else None,
        kvm=await _kvm(spec, roots.dev / "kvm", processes, qemu),
        user_namespace=procfs.in_user_namespace(),
        machines_network=procfs.in_first_network_namespace(),
        os_release=read_os_release(),
        machine_id=_machine_id(roots),
        tun=not spec.network or may_open(roots.dev / "net/tun"),
        vhost_net=bool(spec.network) and may_open(roots.dev / "vhost-net"),
        passt=passt,
        passt_error=await _passt_error(processes, passt),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        unprivileged_port=int(procfs.setting("net/ipv4/ip_unprivileged_port_start") or 0),
        ipv6_error=_ipv6_error(procfs),
        descriptors=None if inherited is None else _descriptors(inherited),
        vhost_vsock=spec.guest.vsock is not None and may_open(roots.dev / "vhost-vsock"),
        interfaces=_interfaces(spec, roots),
        addresses=_addresses(spec),
        resolver=Resolver.parse(read_text(PurePosixPath("/etc/resolv.conf"))),
        vfio=_vfio(spec, roots) if spec.device else None,
    )
    return _with_pod(facts, spec, procfs, roots, cgroup)


# -- the machine -----------------------------------------------------------------------------------------------------


async def _kvm(spec: InstanceSpec, device: Path, processes: Processes, qemu: PurePosixPath | None) -> Kvm:
    kvm = probe_kvm(device)
    if kvm.error is not None or spec.cpu.accel == "tcg":
        return kvm
    kvm = attrs.evolve(kvm, trial=try_kvm(device))
    if spec.cpu.accel != "tried" or kvm.trial is not None or qemu is None:
        return kvm
    from runner.host.trial_guest import try_guest  # here, because few instances ask for it

    return attrs.evolve(kvm, guest=(await try_guest(processes, qemu, "kvm", spec.cpu.model)).error)


def read_allowed_cpus(own: Cgroup, roots: Roots) -> CpuSet:
    """Return the CPUs of this process's cpuset.

    While another instance's partition still has some of them, the kernel shows the others alone, or CPUs that are not this
    container's at all. Its *own* cgroup names what it was given, if it can be seen here.
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
        from runner.kernel.memory import CAP_IPC_LOCK, read_lockable  # here, because few instances need ctypes

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
        file_size=file_size_limit(),
    )


def read_huge_limit(mount: PurePosixPath, cgroup: str, page_size: int, environment: Mapping[str, str]) -> int | None:
    """Return the limit in bytes of this container's huge pages of *page_size* bytes; ``None`` if none can be seen.

    By default containerd sets no limit for a container, but the kubelet does for its pod (``disable_hugetlb_controller``
    of the CRI plugin). The pod's cgroup is hidden in a cgroup namespace, and its limit is that of all containers
    together. So the pod can give the container's own limit in an environment variable; there 0 is no limit.
    """
    found = list(huge_limits(mount, cgroup, page_size))
    name = huge_limit_variable(page_size)
    value = environment.get(name, "0")
    if not (value.isascii() and value.isdecimal()) or int(value) % page_size:
        raise RefusedError(
            f"cannot use {name}={value!r}: it must be bytes, a multiple of the page size {page_size}",
            remedy=f"set it with resourceFieldRef: limits.{hugepages_resource(page_size)}, without a divisor",
        )
    return min((*found, *filter(None, [int(value)])), default=None)


def _io_uring_error(disks: Iterable[DiskSpec]) -> str | None:
    if all(disk.aio != "io_uring" for disk in disks):
        return None
    from runner.kernel.io_uring import try_io_uring  # here, because few instances need ctypes

    reason = try_io_uring()
    return None if reason is None else reason.strerror


def _console_log_error(log: PurePosixPath | None, state_directory: PurePosixPath) -> str | None:
    """Return why *log*, or the one in the state directory, cannot be written; that directory itself is made at the start."""
    path = log or state_directory / CONSOLE_LOG
    made = os.path.realpath(path.parent) == os.path.realpath(state_directory)
    return None if made and not os.path.lexists(path) else why_not_appended(path)


def _users(spec: InstanceSpec) -> Iterator[tuple[str, User]]:
    names: tuple[str, ...] = (spec.instance.user, *QEMU_USERS)
    if spec.network:
        from runner.plan.network_planner import DHCP_USERS  # here, because some guests have no network

        names += DHCP_USERS
    for name in names:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        yield name, User(name, entry.pw_uid, entry.pw_gid)


def _depends_on_version(spec: InstanceSpec, allowed: CpuSet) -> bool:
    """Tell whether a start must know QEMU's version beforehand: to ask takes 20 ms, and the monitor's greeting has it as well."""
    vcpus = len(allowed) if spec.cpu.count == "all" else spec.cpu.count
    return bool(spec.device) or max(vcpus, spec.hotplug.cpus or 0) >= ASKED_FROM


async def ask_qemu_version(processes: Processes, qemu: PurePosixPath) -> tuple[str, str | None]:
    """Return the version of *qemu*, and why it cannot be used; ``None`` if it can."""
    output, reason = await version_output(processes, "qemu", qemu)
    version = re.search(r"version ([0-9.]+)", output, re.ASCII)
    if reason or version is None:
        return "", reason or f"it prints {output!r} when asked for its version"
    return version[1], too_old(version[1])


def _vfio(spec: InstanceSpec, roots: Roots) -> VfioFacts:
    # Here, because few guests have devices.
    from runner.facts.pci import VfioFacts
    from runner.host.device_claims import read_claim
    from runner.kernel.pci import read_pci_facts
    from runner.kernel.vfio import probe_node
    from runner.plan.passthrough_planner import given_addresses

    claims = {each.claim: read_claim(roots.claims, each.claim) for each in spec.device if each.claim is not None}
    return VfioFacts(
        devices=read_pci_facts(given_addresses(spec.device, os.environ, claims), roots),
        environment=os.environ,
        claims=claims,
        container=probe_node(PurePosixPath(roots.dev / "vfio/vfio")),
        iommufd=probe_node(PurePosixPath(roots.dev / "iommu")),
    )


# -- programs --------------------------------------------------------------------------------------------------------


async def find_virtiofsd(processes: Processes) -> tuple[Virtiofsd | None, str]:
    """Return the virtiofsd that serves shares, and if there is none the places searched or the output not understood.

    Raises :exc:`~runner.base.errors.HostError` when this host can start no program now, whichever is installed.
    """
    path = find_program("virtiofsd", VIRTIOFSD_DIRECTORIES)
    if path is None:
        return None, "not found in PATH, " + ", ".join(VIRTIOFSD_DIRECTORIES)
    output, reason = await version_output(processes, "virtiofsd", path)
    if reason:
        return None, reason
    return Virtiofsd.parse(path, output), f"{path} says {output!r} when asked for its version"


def _refuse_programs_in_shares(found: Iterable[PurePosixPath | None], spec: InstanceSpec, roots: Roots) -> None:
    """Refuse a program that the guest may change, here and not by the plan: to be asked for its version, it is executed.

    This program is one as well: most of its modules are imported when they are needed, also while a guest runs.
    """
    writable = [share.path for share in spec.share if not share.read_only]
    if not writable:
        return
    from runner.kernel.shared_directories import shared_directories  # here, because few instances share directories

    directories = shared_directories(writable, roots)
    own = (PurePosixPath(each) for each in (*sys.path, str(PREALLOCATOR.parent)) if each.startswith("/"))
    for path in (*found, find_program("virtiofsd", VIRTIOFSD_DIRECTORIES), *own):
        if path is not None and (share := directories.holding(path)) is not None:
            raise RefusedError(
                f"cannot use {str(path)!r}: the guest may change it by the share {str(share)!r}",
                remedy="put the program elsewhere, or set the share's read_only",
            )


async def version_output(processes: Processes, role: str, path: PurePosixPath, user: User = ROOT) -> tuple[str, str]:
    """Return the output of a program that *user* runs with ``--version``, and what is wrong with the program.

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


async def _passt_error(processes: Processes, passt: PurePosixPath | None) -> str:
    if passt is None:
        return ""
    from runner.host.passt import why_it_does_not_start  # here, because few guests have a network of its

    return await why_it_does_not_start(processes, passt, ANSWERS_WITHIN)


async def _cpu_models(asked: str | None, processes: Processes, qemu: PurePosixPath | None) -> frozenset[str]:
    """Return QEMU's CPU models if one is *asked* for that not every QEMU has; empty if they cannot be read."""
    if asked is None or qemu is None or model_name(asked) in EVERY_QEMUS_MODELS:
        return frozenset()
    with memory("cpu-models", 0) as listing:
        # In a file, because the lines of a child's output are logged, and too many of them dropped.
        script = f'exec "$0" -cpu help >/proc/self/fd/{listing}'
        command = Command("qemu-cpu-help", ("/bin/sh", "-c", script, str(qemu)), (listing,), level=logging.DEBUG)
        with contextlib.suppress(HostError):  # then the start finds out
            async with processes.daemon(command, 0) as process:
                with trio.move_on_after(ANSWERS_WITHIN):
                    await process.wait()
        return parse_cpu_models(os.pread(listing, 1 << 20, 0).decode(errors="replace"))


# -- the pod and its cgroups -----------------------------------------------------------------------------------------


def _with_pod(facts: HostFacts, spec: InstanceSpec, procfs: Procfs, roots: Roots, cgroup: str) -> HostFacts:
    placement = spec.cpu.placement
    pod = read_pod(procfs, os.environ)
    container_uid, controller_error, controller_remedy = None, None, ""
    if placement in {"auto", "controller"}:
        container_uid, controller_error, controller_remedy = _controller(spec.cpu.controller, procfs, cgroup)
    return attrs.evolve(
        facts,
        pod=pod,
        pod_name=read_pod_name(os.environ),
        cpu_time=min(cpu_limits(PurePosixPath(roots.cgroup), cgroup), default=None),
        container_uid=container_uid,
        pod_uid=_pod_uid(procfs, cgroup, of_container=pod is not None or not facts.machines_network)
        if spec.network or spec.cloud_init is not None or spec.guest.vsock is not None
        else None,
        controller_error=controller_error,
        controller_remedy=controller_remedy,
        delegation_error=_delegation_error(roots, cgroup) if placement in {"auto", "delegated"} else None,
    )


def read_pod(procfs: Procfs, environment: Mapping[str, str]) -> PodQos | None:
    """Return the QoS class of the pod this process is in, or ``None`` if nothing shows that it is in one.

    In a cgroup namespace of its own its path is ``/``. Then the kubelet's ``oom_score_adj`` tells the QoS class.
    """
    cgroup = procfs.cgroup()
    if "kubepods" in cgroup:
        from runner.kubelet.pod_cgroups import parse_container  # here, because outside of a pod nothing needs it

        container = parse_container(cgroup)
        if container is not None:
            return PodQos(container.qos, f"its cgroup is {container.path}", _claimed_cpus(environment))
    if "KUBERNETES_SERVICE_HOST" not in environment:  # the kubelet sets it in every container
        return None
    value = procfs.oom_score_adj()
    return PodQos(qos_of_oom_score_adj(value), f"its oom_score_adj is {value}", _claimed_cpus(environment))


def _claimed_cpus(environment: Mapping[str, str]) -> CpuSet:
    """Return the CPUs of the container's resource claims; none if the variables are not a DRA driver's."""
    try:
        return CpuSet.union(CpuSet.parse(cpus) for name, cpus in environment.items() if name.startswith(CLAIMED_CPUS))
    except ValueError:
        return CpuSet()


def read_pod_name(environment: Mapping[str, str]) -> PodName:
    """Return the pod's name as the Downward API gives it, by the customary names of environment variables."""
    names = ("POD_NAME", "POD_NAMESPACE", "NODE_NAME", "POD_UID")
    return PodName(*(environment.get(name, "") for name in names))


def _pod_uid(procfs: Procfs, cgroup: str, *, of_container: bool) -> str | None:
    """Return the pod's UID, and never a container's id: that is another one after each restart.

    Only the mounts *of_container* are this pod's: a node has those of every pod.
    """
    if "POD_UID" in os.environ or not of_container:
        return os.environ.get("POD_UID") or None
    from runner.kubelet.pod_uid import parse_pod_uid

    return parse_pod_uid(cgroup, procfs.mounted_roots())


def _controller(socket: PurePosixPath, procfs: Procfs, cgroup: str) -> tuple[str | None, str | None, str]:
    """Return what the controller knows this container by, why the controller cannot be asked, and the remedy.

    The first comes from the Downward API, else from the container's cgroup and mounts. A controller that does not answer
    may be starting.
    """
    if probe_file(socket.parent).kind != "directory":
        return None, f"its socket's directory {str(socket.parent)!r} is not here", "mount it from the node"
    from runner.kubelet.pod_uid import (  # here, because some pods have no controller
        is_container_uid,
        parse_container_uid,
    )

    set_pod_uid = "set the environment variable POD_UID from the Downward API (fieldRef: metadata.uid)"
    container_uid = os.environ.get("POD_UID") or parse_container_uid(cgroup, procfs.mounted_roots())
    if container_uid is None:
        return None, "the pod's UID is not to be seen here", set_pod_uid
    if not is_container_uid(container_uid):
        return container_uid, f"{container_uid!r} is no pod's UID", set_pod_uid
    return container_uid, None, ""


def _delegation_error(roots: Roots, cgroup: str) -> str | None:
    if not cgroup:
        return "there is no cgroup v2 here"
    try:
        return next(Cgroup(roots.cgroup).at(cgroup).obstacles(), None)
    except (HostError, ValueError) as error:
        return explain(error)


# -- files and disks -------------------------------------------------------------------------------------------------


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


def _in_shares(
    spec: InstanceSpec, state_directory: PurePosixPath, roots: Roots
) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Yield each path of *spec* that leads through a share that the guest can write to, and that share's."""
    writable = [share.path for share in spec.share if not share.read_only]
    if not writable:
        return
    from runner.kernel.shared_directories import shared_directories  # here, because few instances share directories
    from runner.plan.shares import our_paths

    directories = shared_directories(writable, roots)
    for _, path in our_paths(spec, state_directory):
        if (share := directories.holding(path)) is not None:
            yield path, share
    for each in spec.share:
        if (share := directories.leading_to(each.path)) is not None:
            yield each.path, share


def _links(spec: InstanceSpec, state_directory: PurePosixPath) -> Iterator[tuple[PurePosixPath, frozenset[int]]]:
    """Yield each path of *spec* that leads through symbolic links, and the users whose these are."""
    from runner.plan.shares import our_paths

    for path in (*(path for _, path in our_paths(spec, state_directory)), *(share.path for share in spec.share)):
        if os.path.realpath(path) != str(path):
            from runner.kernel.shared_directories import followed  # here, because few paths have links

            yield path, followed(path).link_owners


def _documents(spec: InstanceSpec) -> Iterator[tuple[PurePosixPath, DocumentFact]]:
    if spec.cloud_init is None:
        return
    from runner.plan.cloud_init import LARGEST, named_documents  # here, because most instances have no cloud-init

    for path in named_documents(spec.cloud_init):
        yield path, read_document(path, LARGEST)


def read_disk_facts(disk: DiskSpec, state_directory: PurePosixPath) -> LateDiskFacts:
    """Return what the plan of one disk needs to know."""
    return LateDiskFacts(
        dict(_disk_files(disk)), _io_uring_error((disk,)), free_space(state_directory) if disk.ephemeral else None
    )


def _disk_files(disk: DiskSpec) -> Iterator[tuple[PurePosixPath, FileFact]]:
    """Yield the file of *disk* and its backing files, as far as the spec allows them.

    A header may name any path: one outside of what the spec allows is not even opened.
    """
    path, fact = disk.file, probe_file(disk.file, write=disk.writes, image=True)
    yield path, fact
    for _ in range(LONGEST_CHAIN):
        backing = None if fact.image is None else fact.image.backing
        if backing is None or not within(backing, disk.backing):
            return
        path, fact = backing, probe_file(backing, image=True)
        yield path, fact


# -- networks and inherited descriptors ------------------------------------------------------------------------------


def _machine_id(roots: Roots) -> str:
    """Return the machine's id; the file may be missing, empty or ``uninitialized`` in a container's image (machine-id(5))."""
    found = read_text(PurePosixPath("/etc/machine-id")).strip()
    if re.fullmatch(r"[0-9a-f]{32}", found):
        return found
    return read_text(roots.sys / "class/dmi/id/product_uuid").strip().lower()


def _interfaces(spec: InstanceSpec, roots: Roots) -> dict[str, Interface]:
    names = sorted({each.interface or "eth0" for each in spec.network if each.mode in {"bridge", "macvtap"}})
    if not names:
        return {}
    from runner.kernel.network import read_interfaces  # here, because some guests have no network

    return read_interfaces(names, roots)


def _addresses(spec: InstanceSpec) -> dict[str, tuple[IPv4Interface, ...]]:
    if all(each.mode != "private" for each in spec.network):
        return {}
    from runner.kernel.network import read_addresses  # here, because some guests have no network

    return read_addresses()


def _ipv6_error(procfs: Procfs) -> str | None:
    """Tell why a guest's network cannot have IPv6: new interfaces have none, or dnsmasq may not open raw sockets."""
    disabled = procfs.setting("net/ipv6/conf/default/disable_ipv6")
    if disabled == "0":
        allowed = CAP_NET_RAW in procfs.capabilities()
        return None if allowed else "dnsmasq needs the capability NET_RAW for it; give it to the container"
    if not disabled:
        return "the kernel has none"
    return "it is disabled here; set net.ipv6.conf.default.disable_ipv6=0 for the pod or container"


def _descriptors(inherited: Mapping[str, InheritedFd]) -> dict[str, DescriptorFact]:
    if not inherited:
        return {}
    from runner.kernel.inherited_fds import probe_descriptor  # here, because few instances inherit descriptors

    return {name: probe_descriptor(each.descriptor.number, each.declared) for name, each in inherited.items()}
