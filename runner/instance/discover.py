"""Reads of the host what a plan needs to know; touches nothing."""

from __future__ import annotations

import logging
import os
import pwd
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import attrs
import trio

from runner.cpuset import CpuSet
from runner.errors import HostError, explain
from runner.facts.descriptor import DescriptorFact
from runner.facts.disk import DocumentFact, FileFact, ImageFact, LateDiskFacts
from runner.facts.host import HostFacts, Kvm, PodName, PodQos, User, Virtiofsd
from runner.facts.memory import HugeFact, MemoryLimits
from runner.facts.network import Interface, PermanentNeighbour, Resolver, Route
from runner.instance.supervisor import Supervisor
from runner.kernel.cgroup import Cgroup
from runner.kernel.character_devices import has_tun, has_vhost_net, has_vhost_vsock, read_kvm, try_kvm
from runner.kernel.files import (
    cpu_limits,
    find_program,
    huge_limits,
    look,
    memory_limits,
    read_document,
    read_text,
    real_path,
)
from runner.kernel.netlink import LinkNeighbour, LinkRoute
from runner.kernel.network import Link, read_links
from runner.kernel.processes import Command
from runner.kernel.procfs import Procfs
from runner.kernel.scheduler import read_mask
from runner.kernel.sysfs import read_hardware, read_huge_pools
from runner.kubelet.pod_cgroups import parse_bare_container, parse_container
from runner.plan.disks import LONGEST_CHAIN, within
from runner.plan.firmware import candidates
from runner.plan.host_checks import qos_of_oom_score_adj
from runner.plan.machine import QEMU_USERS
from runner.plan.networks import DHCP_USERS
from runner.spec.instance import DiskSpec, InstanceSpec

if TYPE_CHECKING:
    from runner.facts.pci import VfioFacts
    from runner.kernel.inherited_fds import InheritedFd

VIRTIOFSD_DIRECTORIES = ("/usr/libexec", "/usr/lib/qemu", "/usr/lib/virtiofsd", "/usr/lib")
SYSTEM_DIRECTORIES = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")
CGROUP_ROOT = PurePosixPath("/sys/fs/cgroup")
CAP_NET_RAW = 13
"""``include/uapi/linux/capability.h``."""
ONLINE_CPUS = PurePosixPath("/sys/devices/system/cpu/online")
_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
"""A pod's UID; in the name of a slice its hyphens are underscores, and a static pod's has none."""
PREALLOCATOR = Path(__file__).parents[1] / "kernel" / "preallocate.py"
"""A script, which this process does not import: it is run by a Python of its own."""
ANSWERS_WITHIN = 5.0
"""Seconds a program may take to say its version."""


async def read_host_facts(
    spec: InstanceSpec, supervisor: Supervisor, state_directory: PurePosixPath, *, handing_over: bool = True
) -> HostFacts:
    """Return what *spec*'s plan needs to know of this host; *handing_over* says that descriptors were taken over."""
    virtiofsd, reason = await find_virtiofsd(supervisor) if spec.share else (None, "")
    kvm = read_kvm()
    trial = try_kvm() if kvm.error is None and spec.cpu.accel != "tcg" else None
    cgroup = supervisor.procfs.cgroup()
    pod = read_pod(supervisor.procfs, os.environ)
    qemu = find_program("qemu-system-x86_64", SYSTEM_DIRECTORIES)
    limits = _limits(spec, supervisor, cgroup)
    uid = _uid(supervisor, cgroup) if spec.cpu.placement in {"auto", "controller"} else None
    controller_error, controller_remedy = _controller_error(spec.cpu.controller, uid)
    return HostFacts(
        allowed_cpus=read_mask(),
        hardware=read_hardware(),
        memory_nodes=supervisor.procfs.memory_nodes(),
        cpu_vendor=supervisor.procfs.cpu_vendor(),
        memory=min(supervisor.procfs.memory_total(), limits.memory or 1 << 62),
        state_directory=state_directory,
        limits=limits,
        preallocator=(sys.executable, "-IS", str(PREALLOCATOR)),
        qemu=qemu,
        dnsmasq=find_program("dnsmasq", SYSTEM_DIRECTORIES),
        sleep=find_program("sleep", SYSTEM_DIRECTORIES),
        virtiofsd=virtiofsd,
        virtiofsd_error=reason,
        files=dict(_files(spec)),
        documents=dict(_documents(spec)),
        users=dict(_users((spec.instance.user, *QEMU_USERS, *DHCP_USERS))),
        io_uring_error=_io_uring_error(spec.disk),
        kvm=Kvm(kvm.error, kvm.gid, kvm.mode, trial),
        tun=not spec.network or has_tun(),
        vhost_net=bool(spec.network) and has_vhost_net(),
        passt=find_program("passt", SYSTEM_DIRECTORIES) if any(each.mode == "passt" for each in spec.network) else None,
        ipv6_error=_ipv6_error(supervisor.procfs.status()),
        descriptors=_descriptors(supervisor) if handing_over else None,
        vhost_vsock=spec.guest.vsock is not None and has_vhost_vsock(),
        interfaces=_interfaces(spec),
        resolver=parse_resolver(read_text(PurePosixPath("/etc/resolv.conf"))),
        pod=pod,
        pod_name=read_pod_name(os.environ),
        online_cpus=CpuSet() if pod is None else CpuSet.parse(read_text(ONLINE_CPUS)),
        cpu_time=min(cpu_limits(CGROUP_ROOT, cgroup), default=None),
        uid=uid,
        pod_uid=None if spec.cloud_init is None else _pod_uid(supervisor, cgroup),
        controller_error=controller_error,
        controller_remedy=controller_remedy,
        delegation_error=_delegation_error(cgroup) if spec.cpu.placement in {"auto", "delegated"} else None,
        vfio=await _vfio(spec, supervisor, qemu),
    )


async def _vfio(spec: InstanceSpec, supervisor: Supervisor, qemu: PurePosixPath | None) -> VfioFacts | None:
    if not spec.device:
        return None
    from runner.instance.passthrough import look_at_devices  # here, because few guests have devices of their own

    said, _ = await _version(supervisor, "qemu", qemu) if qemu is not None else ("", "")
    found = re.search(r"version ([0-9.]+)", said, re.ASCII)
    return look_at_devices(spec, os.environ, supervisor.procfs, "" if found is None else found[1])


async def _version(supervisor: Supervisor, role: str, path: PurePosixPath) -> tuple[str, str]:
    """Return what a program says when it is asked for its version, and why it could not be asked."""
    command = Command(f"{role}-version", (str(path), "--version"), level=logging.DEBUG)
    try:
        async with supervisor.processes.daemon(command, 0) as asked:
            with trio.move_on_after(ANSWERS_WITHIN):
                await asked.wait()
            return " ".join(asked.last_words), ""
    except HostError as error:
        return "", str(error)


def read_pod(procfs: Procfs, environment: Mapping[str, str]) -> PodQos | None:
    """Return what the kernel shows of the pod we are in, or ``None`` if nothing says that we are in one.

    In a cgroup namespace of our own our path is ``/``. Then the kubelet's ``oom_score_adj`` tells the QoS class.
    """
    cgroup = procfs.cgroup()
    if "kubepods" in cgroup:
        from runner.kubelet.pod_cgroups import parse_container  # here, because its patterns take 4 ms to compile

        container = parse_container(cgroup)
        if container is not None:
            return PodQos(container.qos, f"its cgroup is {container.path}")
    if "KUBERNETES_SERVICE_HOST" not in environment:  # the kubelet gives it to every container
        return None
    value = procfs.oom_score_adj()
    return PodQos(qos_of_oom_score_adj(value), f"its oom_score_adj is {value}")


def read_pod_name(environment: Mapping[str, str]) -> PodName:
    """Return what the pod's manifest lets Kubernetes tell of it, by the names that everybody gives to it."""
    names = ("POD_NAME", "POD_NAMESPACE", "NODE_NAME", "POD_UID")
    return PodName(*(environment.get(name, "") for name in names))


def _uid(supervisor: Supervisor, cgroup: str) -> str | None:
    """Return the pod's UID: what Kubernetes was asked to say (``metadata.uid``), else what it lets us see."""
    return os.environ.get("POD_UID") or parse_uid(cgroup, supervisor.procfs.mounted_roots())


def _pod_uid(supervisor: Supervisor, cgroup: str) -> str | None:
    """Return the pod's UID alone: a container's id is another one each time."""
    return os.environ.get("POD_UID") or parse_pod_uid(cgroup, supervisor.procfs.mounted_roots())


def parse_pod_uid(cgroup: str, roots: Iterable[str]) -> str | None:
    """Return the pod's UID by where things of this container come from.

    The kubelet names the pod's cgroup by its UID (:mod:`runner.kubelet.pod_cgroups`) and mounts ``/etc/hosts`` and
    the termination log from ``/var/lib/kubelet/pods/UID``. *roots* are what is mounted, as paths in their own file systems.
    """
    pod = parse_container(cgroup)
    if pod is not None:
        return pod.owner
    mounted = next(filter(None, (re.search(rf"/pods/({_UID})/", root, re.ASCII) for root in roots)), None)
    return None if mounted is None else mounted[1].replace("_", "-")


def parse_uid(cgroup: str, roots: Collection[str]) -> str | None:
    """Return the pod's UID, or without a kubelet the container's id: docker and podman keep ``/etc/hosts`` in a directory so named."""
    pod = parse_pod_uid(cgroup, roots)
    if pod is not None:
        return pod
    for place in (cgroup, *roots):
        container = parse_bare_container(place)
        if container is not None:
            return container.owner
        kept = re.search(r"[/-]containers?/([0-9a-f]{64})/", place, re.ASCII)
        if kept is not None:
            return kept[1]
    return None


def _limits(spec: InstanceSpec, supervisor: Supervisor, cgroup: str) -> MemoryLimits:
    lockable, may_lock = None, False
    if spec.memory.lock or spec.device:
        from runner.kernel.memory import CAP_IPC_LOCK, read_lockable  # here, because nobody else needs ctypes

        capabilities = supervisor.procfs.capabilities()
        lockable, may_lock = read_lockable(capabilities), CAP_IPC_LOCK in capabilities
    return MemoryLimits(
        memory=min(memory_limits(CGROUP_ROOT, cgroup), default=None),
        huge={
            pool.size: HugeFact(min(huge_limits(CGROUP_ROOT, cgroup, pool.size), default=None), pool.promised)
            for pool in (read_huge_pools() if spec.memory.hugepages else ())
        },
        lockable=lockable,
        may_lock=may_lock,
    )


def _controller_error(path: PurePosixPath, uid: str | None) -> tuple[str | None, str]:
    """Return why the controller cannot be asked, and the remedy. A controller that does not answer may be starting."""
    set_pod_uid = "set the environment variable POD_UID from the Downward API (fieldRef: metadata.uid)"
    if look(path.parent).kind != "directory":
        return f"its socket's directory {str(path.parent)!r} is not here", "mount it from the node"
    if uid is not None and not re.fullmatch(rf"{_UID}|[0-9a-f]{{64}}", uid, re.ASCII):
        return f"{uid!r} is no pod's UID", set_pod_uid
    if uid is None:
        return "the pod's UID is not to be seen here", set_pod_uid
    return None, ""


def _delegation_error(cgroup: str) -> str | None:
    if not cgroup:
        return "there is no cgroup v2 here"
    try:
        return next(Cgroup(Path(CGROUP_ROOT)).at(cgroup).obstacles(), None)
    except (HostError, ValueError) as error:
        return explain(error)


def _files(spec: InstanceSpec) -> Iterator[tuple[PurePosixPath, FileFact]]:
    for path in (spec.boot.kernel, spec.boot.initrd, spec.boot.firmware, *candidates(spec.boot)):
        if isinstance(path, PurePosixPath):
            yield path, _file(path)
    if (variables := spec.boot.firmware_vars) is not None:
        yield variables, _file(variables, write=True, image=True)
        yield variables.parent, _file(variables.parent)
    for disk in spec.disk:
        yield from _disk_files(disk)
    for share in spec.share:
        yield share.path, _file(share.path)


def _documents(spec: InstanceSpec) -> Iterator[tuple[PurePosixPath, DocumentFact]]:
    if spec.cloud_init is None:
        return
    from runner.plan.cloud_init import LARGEST, named_documents  # here, because most instances need none of it

    for path in named_documents(spec.cloud_init):
        content, reason = read_document(path, LARGEST)
        yield path, DocumentFact(content, reason)


def read_disk_facts(disk: DiskSpec) -> LateDiskFacts:
    """Return what the plan of one disk needs to know."""
    return LateDiskFacts(dict(_disk_files(disk)), _io_uring_error((disk,)))


def _disk_files(disk: DiskSpec) -> Iterator[tuple[PurePosixPath, FileFact]]:
    """Yield what *disk* names, and what its data comes from as far as the spec lets it.

    A header may name anything: what does not lie where it is allowed is not even opened.
    """
    path, fact = disk.file, _file(disk.file, write=disk.writes, image=True)
    yield path, fact
    for _ in range(LONGEST_CHAIN):
        backing = None if fact.image is None else fact.image.backing
        if backing is None or not within(backing, disk.backing):
            return
        path, fact = backing, _file(backing, image=True)
        yield path, fact


def _file(path: PurePosixPath, *, write: bool = False, image: bool = False) -> FileFact:
    found = look(path, write=write, image=image)
    fact = FileFact(found.kind, found.size, found.error, found.everyone_reads)
    if found.image is None:
        return fact
    said = found.image
    backing = None if said.backing is None else real_path(path, said.backing)
    image_fact = ImageFact(said.format, said.size, backing, said.backing_format, said.locked, said.error)
    return attrs.evolve(fact, image=image_fact, direct=found.direct, sparse=found.sparse, sectors=found.sectors)


def _io_uring_error(disks: Iterable[DiskSpec]) -> str | None:
    if all(disk.aio != "io_uring" for disk in disks):
        return None
    from runner.kernel.io_uring import try_io_uring

    reason = try_io_uring()
    return None if reason is None else reason.strerror


def _users(names: Iterable[str]) -> Iterator[tuple[str, User]]:
    for name in names:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        yield name, User(name, entry.pw_uid, entry.pw_gid)


def _interfaces(spec: InstanceSpec) -> dict[str, Interface]:
    names = sorted({each.interface or "eth0" for each in spec.network if each.mode in {"bridge", "macvtap"}})
    return {name: _interface(link) for name, link in read_links(names).items()} if names else {}


def _interface(link: Link) -> Interface:
    return Interface(
        link.name,
        link.mac,
        link.mtu,
        link.addresses,
        tuple(map(_fact, link.routes)),
        link.broadcast,
        link.addresses6,
        tuple(map(_fact, link.routes6)),
        tuple(PermanentNeighbour(str(each.address), each.mac) for each in link.neighbours),
        tuple(map(str, link.several_ways)),
    )


def _fact(route: LinkRoute) -> Route:
    return Route(
        route.destination, route.gateway, route.source, route.metric, route.onlink, route.protocol, route.metrics
    )


def _link_route(route: Route) -> LinkRoute:
    return LinkRoute(
        route.destination,
        route.gateway,
        route.source,
        route.metric,
        route.onlink,
        route.protocol,
        metrics=route.metrics,
    )


def pod_link(interface: Interface) -> Link:
    """Return *interface* as ``kernel/network.py`` takes it; the inverse of what the survey reads."""
    return Link(
        interface.name,
        interface.mac,
        interface.mtu,
        interface.addresses,
        tuple(map(_link_route, interface.routes)),
        interface.broadcast,
        interface.addresses6,
        tuple(map(_link_route, interface.routes6)),
        tuple(LinkNeighbour(ip_address(each.address), each.mac) for each in interface.neighbours),
    )


def _ipv6_error(status: Mapping[str, str]) -> str | None:
    """Tell why a guest's network cannot have IPv6: links of ours have none, or dnsmasq may not hear routers' solicitations."""
    disabled = read_text(PurePosixPath("/proc/sys/net/ipv6/conf/default/disable_ipv6")).strip()
    if disabled == "0":
        allowed = int(status["CapEff"], 16) >> CAP_NET_RAW & 1
        return None if allowed else "dnsmasq needs the capability NET_RAW for it; give it to the container"
    return (
        "the kernel has none"
        if not disabled
        else ("it is disabled here; set net.ipv6.conf.default.disable_ipv6=0 for the pod or container")
    )


def _descriptors(supervisor: Supervisor) -> dict[str, DescriptorFact]:
    """Return what was handed to us."""
    if not supervisor.handed:
        return {}
    from runner.kernel.inherited_fds import look as look_at  # here, because few instances pay for it

    def fact(handed: InheritedFd) -> DescriptorFact:
        found = look_at(handed.descriptor.number)
        return DescriptorFact(
            found.kind,
            found.said,
            found.writable,
            found.size,
            found.interface,
            found.mac,
            found.multi_queue,
            handed.declared,
        )

    return {name: fact(handed) for name, handed in supervisor.handed.items()}


def parse_resolver(text: str) -> Resolver:
    """Parse ``resolv.conf(5)``; loopback servers, and those that only this link knows, are left out."""
    nameservers: list[IPv4Address | IPv6Address] = []
    search: tuple[str, ...] = ()
    for line in text.splitlines():
        word, *rest = line.split() or [""]
        if word == "nameserver" and rest:
            try:
                address = ip_address(rest[0])
            except ValueError:
                continue
            if not address.is_loopback and not address.is_link_local:
                nameservers.append(address)
        elif word in {"search", "domain"}:
            search = tuple(name for name in rest if re.fullmatch(r"[A-Za-z0-9._-]{1,253}", name) and name != ".")
    return Resolver(
        tuple(each for each in nameservers if isinstance(each, IPv4Address)),
        search,
        tuple(each for each in nameservers if isinstance(each, IPv6Address)),
    )


async def find_virtiofsd(supervisor: Supervisor) -> tuple[Virtiofsd | None, str]:
    """Return the virtiofsd that shares get, and where it was looked for or what it said if there is none."""
    path = find_program("virtiofsd", VIRTIOFSD_DIRECTORIES)
    if path is None:
        return None, "not found in PATH, " + ", ".join(VIRTIOFSD_DIRECTORIES)
    said, reason = await _version(supervisor, "virtiofsd", path)
    if reason:
        return None, reason
    found = parse_virtiofsd_version(path, said)
    return found, f"{path} says {said!r} when asked for its version"


def parse_virtiofsd_version(path: PurePosixPath, said: str) -> Virtiofsd | None:
    """Tell which virtiofsd says *said*: ``virtiofsd 1.13.2`` is the one in Rust, ``virtiofsd version 7.2.22 …`` QEMU's in C."""
    match = re.match(r"virtiofsd (?:backend )?(version )?v?([0-9]+(?:\.[0-9]+)*)", said)
    if match is None:
        return None
    return Virtiofsd(path, rust=match[1] is None, version=tuple(int(part) for part in match[2].split(".")))
