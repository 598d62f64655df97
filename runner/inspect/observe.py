"""Looking at instances, from the container of one or from the node: reads /proc and cgroups, changes nothing.

Processes and threads come and go while they are looked at; one that vanishes has not been there. What the reader has
no right to becomes :class:`Unknown` with the reason.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs
import trio

from runner.controller.kubelet_files import Frozen, KubeletFiles, settled
from runner.controller.online_cpus import read_online_cpus
from runner.controller.reconcile import FLOAT, instance_group, instance_uid
from runner.cpuset import CpuSet
from runner.errors import HostError, UsageError, explain
from runner.facts.memory import MemoryCharge
from runner.facts.roots import Roots
from runner.inspect.observation import (
    ANCHOR,
    EMULATOR,
    IOTHREAD,
    OTHER,
    RUNNER,
    SANDBOX,
    VCPU,
    GuestMemory,
    InstanceObservation,
    KubeletObservation,
    Observation,
    ObservedThread,
    Unknown,
)
from runner.inspect.receipt import Roles, parse_receipt
from runner.kernel.cgroup import Cgroup, CgroupError
from runner.kernel.peers import INIT_PID_NAMESPACE, Peers
from runner.kernel.procfs import ProcessStatus, Procfs, ThreadStatus
from runner.kernel.sysfs import read_hardware
from runner.kubelet.pod_cgroups import parse_container

FOLLOWS_WITHIN = 1.0
"""Seconds the controller may take from the kubelet's file to float; only then does a difference count."""
_AGAIN = 0.05
_PAUSE, _READINGS = 0.01, 10
"""Between two readings of the kubelet's file that must be equal, and how many are tried."""
_VCPU_NAME = re.compile(r"CPU ([0-9]+)/", re.ASCII)
"""What QEMU calls a vCPU thread (``-name debug-threads=on``)."""
_IOTHREAD_NAME = re.compile(r"IO disk[0-9]+", re.ASCII)
"""What it calls the iothread of a disk; ``IO mon_iothread`` is its own."""
_GUEST_RAM = re.compile(r"/memfd:.*-ram[0-9]*\\040\(deleted\)", re.ASCII)
"""The file that the runner makes the guest's RAM of, as ``numa_maps`` writes it."""
_SERVICES = ("dnsmasq", "virtiofsd", "passt")
_LAST = (OTHER, EMULATOR, IOTHREAD, VCPU)
"""Of the table; the roles before them stand in the order of their births."""


def _numa_node_of(roots: Roots) -> Mapping[int, int]:
    """Return CPU → NUMA node, nothing where sysfs does not say."""
    try:
        hardware = read_hardware(roots.sys.parent)
    except HostError:
        return {}
    return {cpu.cpu: cpu.numa_node for cpu in hardware.cpus}


@attrs.frozen
class _ObservedProcess:
    """A process with its threads."""

    status: ProcessStatus
    namespace: int | None
    """The inode of its PID namespace; ``None`` when the reader may not know."""
    threads: tuple[ThreadStatus, ...]
    is_sleep_infinity: bool
    """It is ``sleep infinity``, which is what anchors are."""


@attrs.frozen
class _ProcessTable:
    """Every process that can be seen, but the reader's own."""

    processes: Mapping[int, _ObservedProcess]
    hidden: str

    def others(self, members: Iterable[int], cpus: CpuSet) -> tuple[ObservedThread, ...]:
        """Return the threads of all but *members* that may run on *cpus*."""
        strangers = [process for pid, process in self.processes.items() if pid not in set(members)]
        return tuple(
            ObservedThread(_stranger(thread), None, thread, kernel=process.status.kernel)
            for process in strangers
            for thread in process.threads
            if not thread.cpus.isdisjoint(cpus)
        )


def _stranger(thread: ThreadStatus) -> str:
    return SANDBOX if thread.name == "pause" and parse_container(thread.cgroup) else OTHER


def _in_order(threads: Iterable[ObservedThread]) -> tuple[ObservedThread, ...]:
    return tuple(sorted(threads, key=_place))


def _place(each: ObservedThread) -> tuple[int, int, int]:
    return (_LAST.index(each.role) + 1 if each.role in _LAST else 0, each.vcpu or 0, each.thread.tid)


def _read_processes(roots: Roots) -> _ProcessTable:
    peers = Peers(roots.proc)
    visible = peers.own_namespace() == INIT_PID_NAMESPACE
    blind = (
        "" if visible else "the node's other processes cannot be seen from inside a PID namespace; inspect on the node"
    )
    return _ProcessTable({each.status.pid: each for each in _processes(Procfs(roots.proc), peers)}, blind)


def _processes(procfs: Procfs, peers: Peers) -> Iterator[_ObservedProcess]:
    for pid in procfs.processes():
        status = procfs.process(pid)
        threads = tuple(procfs.threads(pid))
        if status is not None and threads and pid != os.getpid():
            is_sleep_infinity = status.name == "sleep" and procfs.arguments(pid)[1:] == ("infinity",)
            yield _ObservedProcess(status, peers.namespace(pid), threads, is_sleep_infinity)


# -- from the container ----------------------------------------------------------------------------------------------


def observe_container(roots: Roots, receipt: Path) -> Observation:
    """Look at the instance that *receipt* describes, from its own PID namespace.

    Raises :class:`UsageError` when there is no receipt, :class:`HostError` when /proc cannot be read.
    """
    try:
        roles = parse_receipt(receipt.read_text(), str(receipt))
    except OSError as error:
        raise UsageError(f"cannot read {str(receipt)!r}") from error
    crowd = _read_processes(roots)
    members = dict(_members(roles, crowd))
    threads = _in_order(_roles_by_receipt(roles, crowd, members))
    pod_cgroup = _pod_cgroup(threads)
    instance = InstanceObservation(
        name="instance",
        backend=roles.backend,
        cpus=roles.cpus,
        numa_node_of=_numa_node_of(roots),
        cgroup=roles.instance_cgroup,
        vcpus=len(roles.vcpus),
        threads=threads,
        others=crowd.others(members, roles.cpus),
        hidden=crowd.hidden,
        memory=_guest_memory(Procfs(roots.proc), roles.machine if roles.machine in members else None),
        charge=_charge(roots, pod_cgroup),
        pod_cgroup=pod_cgroup,
    )
    kubelet = Unknown("the kubelet's state cannot be seen from the container; inspect on the node")
    return Observation("container", (instance,), kubelet)


def _members(roles: Roles, crowd: _ProcessTable) -> Iterator[tuple[int, str]]:
    for pid, process in crowd.processes.items():
        role = roles.of_process(process.status, is_sleep_infinity=process.is_sleep_infinity)
        # In a PID namespace of its own everybody belongs to the pod, whoever he is.
        if role is not None or crowd.hidden:
            yield pid, role or OTHER


def _roles_by_receipt(roles: Roles, crowd: _ProcessTable, members: Mapping[int, str]) -> Iterator[ObservedThread]:
    for pid, role in members.items():
        for thread in crowd.processes[pid].threads:
            if role == EMULATOR and thread.tid in roles.vcpus:
                yield ObservedThread(VCPU, roles.vcpus[thread.tid], thread)
            elif role == EMULATOR and thread.tid in roles.iothreads:
                yield ObservedThread(IOTHREAD, None, thread)
            else:
                yield ObservedThread(role, None, thread)


# -- from the node ---------------------------------------------------------------------------------------------------


async def observe_node(roots: Roots, root: Cgroup, kubelet: Path, wanted: str = "") -> Observation:
    """Look at the instances below *root* whose uuid begins with *wanted*.

    Raises :class:`UsageError` when there is no such group or no such instance, :class:`HostError` when /proc cannot be
    read.
    """
    cpus = _instances(root)
    chosen = [uid for uid in cpus if uid.startswith(wanted)]
    if wanted and not chosen:
        there = ", ".join(cpus) or "none"
        raise UsageError(f"cannot find an instance whose uuid begins with {wanted!r} in {root.path}: there is {there}")
    crowd = _read_processes(roots)
    numa_node_of = _numa_node_of(roots)
    instances = []
    for uid in chosen:
        threads = _in_order(_roles_on_node(root.child(instance_group(uid)), crowd))
        members = {each.thread.pid for each in threads}
        machines = [each.thread.pid for each in threads if each.role in {VCPU, EMULATOR}]
        pod_cgroup = _pod_cgroup(threads)
        instances.append(
            InstanceObservation(
                name=uid,
                backend="controller",
                cpus=cpus[uid],
                numa_node_of=numa_node_of,
                cgroup=f"/{root.name}/{instance_group(uid)}",
                vcpus=None,
                threads=threads,
                others=crowd.others(members, cpus[uid]),
                hidden=_out_of_sight(crowd, members),
                memory=_guest_memory(Procfs(roots.proc), machines[0] if machines else None),
                charge=_charge(roots, pod_cgroup),
                pod_cgroup=pod_cgroup,
            )
        )
    return Observation("node", tuple(instances), await _kubelet(roots, root, kubelet))


def _instances(root: Cgroup) -> dict[str, CpuSet]:
    """Return the instances below *root* and the CPUs their groups have in effect; one that vanishes is not there."""
    try:
        names = root.children()
    except CgroupError as error:
        raise UsageError(f"cannot inspect the node's instances: {explain(error)}") from error
    found = {}
    for name in names:
        uid = instance_uid(name)
        if uid is not None:
            try:
                found[uid] = root.child(name).effective_cpus()
            except CgroupError:
                continue
    return found


def _roles_on_node(group: Cgroup, crowd: _ProcessTable) -> Iterator[ObservedThread]:
    """Yield the threads of the instance in *group*: all that share QEMU's PID namespace.

    QEMU is the process most threads in *group* belong to. Its threads there are the vCPUs'; where they have QEMU's
    names for vCPU threads, those with the name are, wherever they are.
    """
    try:
        confined = group.threads()
    except CgroupError:
        return
    owners = Counter(
        pid for pid, process in crowd.processes.items() for thread in process.threads if thread.tid in confined
    )
    if not owners:
        return
    qemu = crowd.processes[owners.most_common(1)[0][0]]
    yield from _machine_threads(qemu, confined)
    for process in crowd.processes.values():
        inside = process.namespace == qemu.namespace and qemu.namespace not in {None, INIT_PID_NAMESPACE}
        if inside and process is not qemu:
            for thread in process.threads:
                yield ObservedThread(_role_by_name(process, thread, group.parent.name), None, thread)


def _machine_threads(qemu: _ObservedProcess, confined: frozenset[int]) -> Iterator[ObservedThread]:
    """Yield QEMU's threads."""
    named = {thread.tid: int(match[1]) for thread in qemu.threads if (match := _VCPU_NAME.match(thread.name))}
    unnamed = sorted((thread for thread in qemu.threads if thread.tid in confined), key=lambda each: list(each.cpus))
    index = named or {thread.tid: number for number, thread in enumerate(unnamed)}
    for thread in qemu.threads:
        other = IOTHREAD if _IOTHREAD_NAME.match(thread.name) else EMULATOR
        yield ObservedThread(VCPU if thread.tid in index else other, index.get(thread.tid), thread)


def _role_by_name(process: _ObservedProcess, thread: ThreadStatus, root: str) -> str:
    status = process.status
    if status.inner_pid == 1:
        return RUNNER
    if process.is_sleep_infinity and f"/{root}/" not in thread.cgroup:
        return ANCHOR
    name = status.name.removesuffix(".avx2")  # what passt becomes where the CPU allows
    return name if name in _SERVICES else OTHER


def _out_of_sight(crowd: _ProcessTable, members: Iterable[int]) -> str:
    if any(crowd.processes[pid].namespace is None for pid in members):
        return "which processes are the instance's cannot be told without the right to trace them; inspect as root"
    return crowd.hidden


async def _kubelet(roots: Roots, root: Cgroup, directory: Path) -> KubeletObservation | Unknown:
    """Return what the kubelet says beside what is; what differs is looked at again until the controller had its time."""
    seen: KubeletObservation | Unknown = Unknown("")
    with trio.move_on_after(FOLLOWS_WITHIN):
        while True:
            seen = await _kubelet_now(roots, root, directory)
            if isinstance(seen, Unknown) or seen.float_cpus == seen.shared_pool & seen.online:
                return seen
            await trio.sleep(_AGAIN)
    return seen


async def _kubelet_now(roots: Roots, root: Cgroup, directory: Path) -> KubeletObservation | Unknown:
    file = KubeletFiles(directory).cpu_state
    try:
        present = read_online_cpus(roots.sys)
        # Reserved CPUs may be in no set, and here nobody knows which those are.
        state = await settled(file, present, present.present, pause=_PAUSE, readings=_READINGS)
        if isinstance(state, Frozen):
            return Unknown(state.reason)
        given = None if state.policy == "none" else state.assigned()
        pool = present.online if state.policy == "none" else state.shared_pool
        return KubeletObservation(root.child(FLOAT).effective_cpus(), pool, present.online, _instances(root), given)
    except HostError as error:
        return Unknown(explain(error))


# -- memory ----------------------------------------------------------------------------------------------------------


def _guest_memory(procfs: Procfs, qemu: int | None) -> GuestMemory | Unknown:
    if qemu is None:
        return Unknown("there is no QEMU")
    try:
        mappings = procfs.mappings(qemu)
    except HostError as error:
        return Unknown(f"{explain(error)}; inspect on the node, as root")
    if mappings is None:
        return Unknown("QEMU has ended, or the kernel knows no NUMA nodes")
    small: Counter[int] = Counter()
    huge: Counter[int] = Counter()
    bound: set[int] = set()
    remote_bytes = 0
    for mapping in mappings:
        if not mapping.huge and not _GUEST_RAM.fullmatch(mapping.file):
            continue
        (huge if mapping.huge else small).update(mapping.resident)
        bound |= set(mapping.bound)
        remote_bytes += sum(
            size for node, size in mapping.resident.items() if mapping.bound and node not in mapping.bound
        )
    return GuestMemory(dict(small), dict(huge), CpuSet(bound), remote_bytes)


def _pod_cgroup(threads: Iterable[ObservedThread]) -> str:
    """Return the path of the pod's cgroup, where the anchor is; empty where there is none."""
    return next((each.thread.cgroup for each in threads if each.role == ANCHOR), "")


def _charge(roots: Roots, path: str) -> MemoryCharge | Unknown:
    if not path:
        return Unknown("the pod's cgroup is not known: there is no anchor, or no cgroup v2")
    try:
        return Cgroup(roots.cgroup).at(path).charge()
    except (HostError, ValueError) as error:
        return Unknown(f"the charge of the pod's cgroup '{path}' cannot be read: {explain(error)}")
