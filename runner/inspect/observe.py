"""Observing instances, from the container of one or from the node: reads /proc and cgroups, changes nothing.

Processes and threads come and go meanwhile; one that vanishes is left out. Values that the reader has no right to read become
:class:`Unknown` with the reason.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, NoInstanceError, escaped, explain
from runner.base.values import frozen
from runner.facts.roots import Roots
from runner.facts.threads import ProcessStatus, ThreadStatus
from runner.inspect.cpu_settings import read_cpu_settings
from runner.inspect.cpu_state import settled_cpu_state
from runner.inspect.memory_observer import guest_memory, pod_charge
from runner.inspect.observation import (
    InstanceObservation,
    KubeletObservation,
    Observation,
    ObservedGuarantee,
    Unknown,
)
from runner.inspect.roles import Roles
from runner.kernel.cgroup import Cgroup, CgroupError
from runner.kernel.hardware_reader import read_hardware, read_online_cpus
from runner.kernel.kubelet_files import Frozen
from runner.kernel.peers import INIT_PID_NAMESPACE, Peers
from runner.kernel.procfs import Procfs
from runner.kubelet.pod_cgroups import (
    FLOAT,
    NOT_SEALED,
    VCPUS,
    float_group,
    instance_group,
    instance_uid,
    parse_container,
    vcpus_group,
)
from runner.kubelet.pod_uid import parse_log_directory
from runner.kubelet.state_files import KubeletFiles
from runner.placement.children import DAEMONS, Role
from runner.placement.threads import (
    CgroupPaths,
    ObservedThread,
    ThreadRules,
    chosen_name,
    guarantee_of,
    parse_receipt,
)
from runner.protocol.jsonrpc_client import ask

FOLLOWS_WITHIN = 1.0
"""Seconds that the controller may take from a change of the kubelet's file to float; only later differences count."""
_AGAIN = 0.05
_PAUSE, _READINGS = 0.01, 10
"""Seconds between two readings of the kubelet's file that must be equal, and the number of readings."""
_VCPU_NAME = re.compile(r"CPU ([0-9]+)/", re.ASCII)
"""QEMU's name for a vCPU thread (``-name debug-threads=on``)."""
_IOTHREAD_NAME = re.compile(r"IO disk[0-9]+", re.ASCII)
"""QEMU's name for the iothread of a disk; ``IO mon_iothread`` belongs to QEMU itself."""
_LAST = (Role.OTHER, Role.EMULATOR, Role.IOTHREAD, Role.VCPU)
"""The roles at the end of the table, in this order; the threads of other roles come first, by their numbers."""


def _numa_node_of(roots: Roots) -> Mapping[int, int]:
    """Return CPU → NUMA node, empty if sysfs does not show it."""
    try:
        hardware = read_hardware(roots.sys.parent)
    except HostError:
        return {}
    return {cpu.cpu: cpu.numa_node for cpu in hardware.cpus}


@frozen
class ObservedProcess:
    """A process with its threads."""

    status: ProcessStatus
    namespace: int | None
    """The inode of its PID namespace; ``None`` if the reader may not read it."""
    threads: tuple[ThreadStatus, ...]
    is_sleep_infinity: bool
    """Whether it is ``sleep infinity``, as anchors are."""


@frozen
class ProcessTable:
    """Every visible process except the reader's own."""

    processes: Mapping[int, ObservedProcess]
    hidden: str

    def others(self, members: Iterable[int], cpus: CpuSet) -> tuple[ObservedThread, ...]:
        """Return the threads of all processes except *members* that may run on *cpus*."""
        strangers = [process for pid, process in self.processes.items() if pid not in set(members)]
        return tuple(
            ObservedThread(_stranger(thread), None, thread, kernel=process.status.kernel)
            for process in strangers
            for thread in process.threads
            if not thread.cpus.isdisjoint(cpus)
        )


def _stranger(thread: ThreadStatus) -> Role:
    return Role.SANDBOX if thread.name == "pause" and parse_container(thread.cgroup) else Role.OTHER


def _in_order(threads: Iterable[ObservedThread]) -> tuple[ObservedThread, ...]:
    return tuple(sorted(threads, key=_place))


def _place(each: ObservedThread) -> tuple[int, int, int]:
    return (_LAST.index(each.role) + 1 if each.role in _LAST else 0, each.vcpu or 0, each.thread.tid)


def read_processes(roots: Roots) -> ProcessTable:
    """Read every process but this one. Raises :class:`HostError` when /proc cannot be read."""
    peers = Peers(roots.proc)
    visible = peers.own_namespace() == INIT_PID_NAMESPACE
    blind = (
        "" if visible else "the node's other processes cannot be seen from inside a PID namespace; inspect on the node"
    )
    return ProcessTable({each.status.pid: each for each in _processes(Procfs(roots.proc), peers)}, blind)


def _processes(procfs: Procfs, peers: Peers) -> Iterator[ObservedProcess]:
    for pid in procfs.processes():
        status = procfs.process(pid)
        threads = tuple(procfs.threads(pid))
        if status is not None and threads and pid != os.getpid():
            is_sleep_infinity = status.name == "sleep" and procfs.arguments(pid)[1:] == ("infinity",)
            yield ObservedProcess(status, peers.namespace(pid), threads, is_sleep_infinity)


# -- from the container ----------------------------------------------------------------------------------------------


def observe_container(roots: Roots, receipt: Path) -> Observation:
    """Observe the instance that the file *receipt* describes, from its own PID namespace.

    Raises :class:`NoInstanceError` when there is no receipt, :class:`HostError` when /proc cannot be read.
    """
    try:
        text = receipt.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise NoInstanceError(f"cannot read {str(receipt)!r}") from error
    found, names = parse_receipt(text, str(receipt))
    roles = Roles.of(found)
    table = read_processes(roots)
    members = dict(_members(roles, table))
    threads = _in_order(
        roles.of_thread(role, thread) for pid, role in members.items() for thread in table.processes[pid].threads
    )
    qemu = roles.qemu if roles.qemu in members else None
    procfs = Procfs(roots.proc)
    guarantee = guarantee_of(found.backend, found.rules.cpus, threads)
    instance = InstanceObservation(
        name=names.name,
        backend=found.backend,
        guarantee=ObservedGuarantee(guarantee, found.guarantee_reason if guarantee == "arranged" else ""),
        rules=_rules_seen_from_here(found.rules),
        numa_node_of=_numa_node_of(roots),
        threads=threads,
        others=table.others(members, found.rules.cpus),
        hidden=table.hidden,
        memory=guest_memory(procfs, qemu),
        charge=pod_charge(roots, threads),
        pod=names.pod,
        pod_uid=names.pod_uid,
        uptime=None if qemu is None else procfs.age(qemu),
    )
    kubelet = Unknown("the kubelet's state cannot be seen from the container; inspect on the node")
    return Observation("container", (instance,), kubelet)


def _rules_seen_from_here(rules: ThreadRules) -> ThreadRules:
    """Return *rules* adapted to the reader of a report.

    CPUs that all threads share are not exclusive, even if no better placement was possible. The reader may be in a different cgroup
    namespace from the runner's: it sees the paths with other prefixes, and the pod's cgroup, the root of the container's namespace, under a
    different path.
    """
    cgroups = None if rules.cgroups is None else attrs.evolve(rules.cgroups, pod="", ends=True)
    return attrs.evolve(rules, shared=False, cgroups=cgroups)


def _members(roles: Roles, table: ProcessTable) -> Iterator[tuple[int, Role]]:
    for pid, process in table.processes.items():
        role = roles.of_process(process.status, is_sleep_infinity=process.is_sleep_infinity)
        # In a PID namespace of its own every process belongs to the pod.
        if role is not None or table.hidden:
            yield pid, role or Role.OTHER


# -- from the node ---------------------------------------------------------------------------------------------------


async def observe_node(
    roots: Roots,
    root: Cgroup,
    kubelet: Path,
    wanted: str = "",
    pod_logs: Path | None = None,
    controller: PurePosixPath | None = None,
) -> Observation:
    """Observe the instances below *root* whose uuid begins with *wanted*; *pod_logs* provides the pods' names.

    Their reports are read from the *controller* at that socket.

    Raises :class:`NoInstanceError` when there is no such group or no such instance, :class:`HostError` when /proc cannot be
    read.
    """
    cpus = _instances(root)
    chosen = [pod_uid for pod_uid in cpus if pod_uid.startswith(wanted)]
    if wanted and not chosen:
        there = ", ".join(cpus) or "none"
        raise NoInstanceError(
            f"cannot find an instance whose uuid begins with {wanted!r} in {root.path}: there is {there}"
        )
    table = read_processes(roots)
    numa_node_of = _numa_node_of(roots)
    procfs, pods = Procfs(roots.proc), _pod_names(pod_logs)
    reports = {} if controller is None else await _reports(controller)
    instances = []
    for pod_uid in chosen:
        threads = _in_order(_roles_on_node(root.child(instance_group(pod_uid)), table))
        members = {each.thread.pid for each in threads}
        qemu = next((each.thread.pid for each in threads if each.role in {Role.VCPU, Role.EMULATOR}), None)
        pod = pods.get(pod_uid, "")
        instances.append(
            InstanceObservation(
                name=chosen_name("" if qemu is None else _guest_name(procfs, qemu), pod, otherwise=pod_uid),
                backend="controller",
                guarantee=_guarantee(root.child(instance_group(pod_uid))),
                rules=_rules_on_node(root, pod_uid, cpus[pod_uid], threads),
                numa_node_of=numa_node_of,
                threads=threads,
                others=table.others(members, cpus[pod_uid]),
                hidden=_hidden_by(table, members),
                memory=guest_memory(procfs, qemu),
                charge=pod_charge(roots, threads),
                settings=read_cpu_settings(roots.proc.parent, cpus[pod_uid]),
                pod=pod,
                pod_uid=pod_uid,
                uptime=None if qemu is None else procfs.age(qemu),
                reported=reports.get(pod_uid),
            )
        )
    return Observation("node", tuple(instances), await followed(partial(_kubelet, roots, root, KubeletFiles(kubelet))))


async def _reports(controller: PurePosixPath) -> Mapping[str, Mapping[str, object]]:
    """Return pod UID → the instance's report; empty if the controller is absent, or too old for reports."""
    try:
        listed = await ask("the controller", controller, "listInstances", {})
    except HostError:
        return {}
    instances = listed.get("instances") if isinstance(listed, dict) else None
    return {
        each["uuid"]: each["reported"]
        for each in (instances if isinstance(instances, list) else [])
        if isinstance(each, dict) and isinstance(each.get("reported"), dict)
    }


def _pod_names(pod_logs: Path | None) -> Mapping[str, str]:
    """Return pod UID → namespace and name, from the directories in *pod_logs*."""
    try:
        names = () if pod_logs is None else os.listdir(pod_logs)  # noqa: PTH208 - names only
        return dict(filter(None, map(parse_log_directory, names)))
    except OSError:  # not a node with a kubelet
        return {}


def _guest_name(procfs: Procfs, qemu: int) -> str:
    """Return the name that QEMU was given (``-name guest=…``), empty without one."""
    arguments = procfs.arguments(qemu)
    values = [value for option, value in itertools.pairwise(arguments) if option == "-name"]
    return next((escaped(value.removeprefix("guest=").partition(",")[0]) for value in values), "")


def _rules_on_node(root: Cgroup, pod_uid: str, cpus: CpuSet, threads: Iterable[ObservedThread]) -> ThreadRules:
    """Return the rules for the *threads* of one of the controller's instances.

    It has as many vCPUs as CPUs, however many of them are visible; the CPU of each vCPU is recorded only in its container.
    """
    vcpus = sum(each.role is Role.VCPU for each in threads)
    number = max(len(cpus), vcpus) if vcpus else 0
    of_float, of_vcpus = (f"/{root.name}/{group(pod_uid)}" for group in (float_group, vcpus_group))
    cgroups = CgroupPaths("", of_float, of_vcpus, ends=True)
    return ThreadRules(cpus, (None,) * number, shared=False, cgroups=cgroups)


def _guarantee(domain: Cgroup) -> ObservedGuarantee:
    """Return the guarantee from the state of the partition in *domain* ("cpuset.cpus.partition" of cgroup-v2.rst)."""
    try:
        state = domain.child(VCPUS).partition()
    except CgroupError as error:
        return ObservedGuarantee(None, explain(error))
    if state == "isolated":
        return ObservedGuarantee("enforced")
    reason = escaped(domain.attribute(NOT_SEALED) or "") if state == "member" else f"its partition is {state!r}"
    return ObservedGuarantee("arranged", reason)


def _instances(root: Cgroup) -> dict[str, CpuSet]:
    """Return the instances below *root* and the effective CPUs of their vCPUs; one that vanishes is left out."""
    try:
        names = root.children()
    except CgroupError as error:
        raise NoInstanceError(f"cannot inspect the node's instances: {explain(error)}") from error
    instances = {}
    for name in names:
        pod_uid = instance_uid(name)
        if pod_uid is not None:
            try:
                instances[pod_uid] = root.child(name).child(VCPUS).effective_cpus()
            except CgroupError:
                continue
    return instances


def _roles_on_node(domain: Cgroup, table: ProcessTable) -> Iterator[ObservedThread]:
    """Yield the threads of the instance in *domain*: all that share QEMU's PID namespace.

    QEMU is the process with the most threads in the vCPUs' cgroup. Its threads there are the vCPUs; if threads have QEMU's names for vCPU
    threads, those are the vCPUs, in any cgroup.
    """
    try:
        confined = domain.child(VCPUS).threads()
    except CgroupError:
        return
    owners = Counter(
        pid for pid, process in table.processes.items() for thread in process.threads if thread.tid in confined
    )
    if not owners:
        return
    qemu = table.processes[owners.most_common(1)[0][0]]
    yield from _machine_threads(qemu, confined)
    for process in table.processes.values():
        inside = process.namespace == qemu.namespace and qemu.namespace not in {None, INIT_PID_NAMESPACE}
        if inside and process is not qemu:
            for thread in process.threads:
                yield ObservedThread(_role_by_name(process, thread, domain.parent.name), None, thread)


def _machine_threads(qemu: ObservedProcess, confined: frozenset[int]) -> Iterator[ObservedThread]:
    """Yield QEMU's threads."""
    named = {thread.tid: int(match[1]) for thread in qemu.threads if (match := _VCPU_NAME.match(thread.name))}
    unnamed = sorted((thread for thread in qemu.threads if thread.tid in confined), key=lambda each: list(each.cpus))
    index = named or {thread.tid: number for number, thread in enumerate(unnamed)}
    for thread in qemu.threads:
        other = Role.IOTHREAD if _IOTHREAD_NAME.match(thread.name) else Role.EMULATOR
        yield ObservedThread(Role.VCPU if thread.tid in index else other, index.get(thread.tid), thread)


def _role_by_name(process: ObservedProcess, thread: ThreadStatus, root: str) -> Role:
    status = process.status
    if status.inner_pid == 1:
        return Role.RUNNER
    if process.is_sleep_infinity and f"/{root}/" not in thread.cgroup:
        return Role.ANCHOR
    name = status.name.removesuffix(".avx2")  # passt executes this variant of itself if the CPU supports it
    return DAEMONS.get(name, Role.OTHER)


def _hidden_by(table: ProcessTable, members: Iterable[int]) -> str:
    if any(table.processes[pid].namespace is None for pid in members):
        return (
            "which processes are the instance's cannot be determined without the right to trace them; inspect as root"
        )
    return table.hidden


async def followed(read: Callable[[], Awaitable[KubeletObservation | Unknown]]) -> KubeletObservation | Unknown:
    """Return the kubelet's CPUs and the cgroups' from *read*; if they differ, read them again for :data:`FOLLOWS_WITHIN` seconds."""
    kubelet = await read()  # however long it takes on a busy node
    with trio.move_on_after(FOLLOWS_WITHIN):
        while not isinstance(kubelet, Unknown) and not kubelet.is_followed:
            await trio.sleep(_AGAIN)
            kubelet = await read()
    return kubelet


async def _kubelet(roots: Roots, root: Cgroup, files: KubeletFiles) -> KubeletObservation | Unknown:
    try:
        present = read_online_cpus(roots.sys)
        state = await settled_cpu_state(files, present, pause=_PAUSE, readings=_READINGS)
        if isinstance(state, Frozen):
            return Unknown(state.reason)
        instances = _instances(root)
        floats = [root.child(instance_group(pod_uid)).child(FLOAT).effective_cpus() for pod_uid in instances]
        return KubeletObservation(
            tuple(floats),
            state.shared_pool,
            present.online,
            instances,
            state.assigned() if state.policy == "static" or state.exclusive() else None,
            by_claims=state.policy == "none",
        )
    except HostError as error:
        return Unknown(explain(error))
