"""The actions that bring the controller's cgroup tree to the state that the kubelet requires (pure).

The actions are single operations on the kernel, in an order in which each may fail or the program may die after any of them: a second pass
from the resulting tree ends in the same state. Two rules have precedence:

* Only our own groups are touched: the root, ``instance-<name>`` with a well-formed name, and its ``float`` and ``vcpus``; and
  what a pod has made below the latter two, when they are removed.
* No action puts a CPU into a float and a group of vCPUs at once, or into two of these, and none opens a sealed instance's CPUs
  to others while it keeps some of them: a partition shrinks and grows as it is. Groups shrink before others grow, and one that
  keeps none of its CPUs leaves them before others get them, unless such groups exchange theirs; a stale instance is removed
  before its CPUs are given to another, and no float gets the CPUs of an instance that still runs although its pod is gone,
  unless it would have no others.

A descriptor of a group can be passed on, so that processes of any pod may be in it, also after the end of the pod that it was made for.
Before anything else is decided, the vCPUs' group of such a pod gets float's CPUs, and all processes in its domain are ended
(:func:`evictions`). The CPUs come first, because a process that holds the descriptors can enter as fast as others are ended, so that the
group may never be empty. If even this fails, the group is treated as an instance that still runs.

A domain has the memory nodes of its pod's own cgroup, and both groups below have all that the domain has: the kernel migrates the pages of
a process that moves between cgroups with different ones (``cpuset_attach`` of ``kernel/cgroup/cpuset.c``), and before Linux 6.18 every
change of a cgroup of the machine waits for that. Only the domain names them, because its files are in no pod's reach. While a process is
below, no ``cpuset.mems`` loses a node: that would migrate the pages of all at once ("Cpuset Interface Files" of cgroup-v2.rst), seconds for
a guest's memory. The domains do not set ``cpuset.cpus``: they inherit the root's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Self

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.controller.tree.limits import (
    FLOAT_LIMITS,
    LEFT_BEHIND,
    MEMORY_MAX,
    MEMORY_NODES,
    NO_PROCESSES,
    VCPUS_LIMITS,
    Limits,
    memory_for,
)
from runner.controller.tree.model import (
    BELOW,
    ISOLATED,
    PARENT,
    ROOT,
    Action,
    Desired,
    Domain,
    Evict,
    Group,
    Kill,
    Make,
    Observed,
    Remove,
    Requested,
    Restrict,
    Seal,
    Unseal,
    Write,
    granted,
    groups_below,
)
from runner.facts.hardware import OnlineCpus
from runner.kernel.cgroup import THREADED_CONTROLLERS
from runner.kubelet.pod_cgroups import VCPUS, float_group, instance_group, vcpus_group
from runner.kubelet.state import CpuState


def desire(state: CpuState, machine: OnlineCpus, limits: Limits) -> Desired:
    """Return the desired tree on *machine* for the kubelet's *state*.

    Where the shared pool is empty, float has all CPUs that are no pod's own: every one under policy ``none``, and the reserved ones when
    all others are given away under ``strict-cpu-reservation``. Float must run somewhere, and these CPUs are the system's own.
    """
    return Desired(
        cpus=machine.present,
        mems=machine.memory_nodes,
        shared_pool=state.shared_pool or machine.online - state.exclusive(),
        choices={pod_uid: state.choices(pod_uid) for pod_uid in state.assigned()},
        complete=not state.unattributed,
        limits=limits,
    )


def desire_without_kubelet(machine: OnlineCpus, limits: Limits) -> Desired:
    """Return the desired tree on *machine* without a kubelet: float has all CPUs except those that instances have registered."""
    return Desired(
        cpus=machine.present,
        mems=machine.memory_nodes,
        shared_pool=machine.online,
        choices={},
        complete=False,
        limits=limits,
        kills=False,
    )


def reconcile(desired: Desired, observed: Observed, requests: Mapping[str, Requested]) -> tuple[Action, ...]:
    """Return the actions that turn *observed* into *desired*, with the instances of *requests* as requested.

    While a threaded group directly below the root is in use there are no actions.
    """
    if any(observed.outdated.values()):
        return ()
    return tuple(_actions(_Pass.over(desired, observed, requests)))


def unseals(observed: Observed, requests: Mapping[str, Requested]) -> tuple[Action, ...]:
    """Return the actions that end the partitions of instances without a thread, and of those that *requests* unseal.

    This needs no knowledge of the kubelet's state: the CPUs return to the cpusets that name them.
    """
    return tuple(
        Unseal(vcpus_group(pod_uid))
        for pod_uid, group in observed.instances().items()
        if group.was_sealed and not (group.populated and requests.get(pod_uid, Requested()).sealed is not False)
    )


def holders(cpus: CpuSet, observed: Observed, *, but: str) -> Mapping[str, Group]:
    """Return the vCPUs' groups, except those of pod *but*, that hold any of *cpus*; a group that only shares float's holds none."""
    return {
        pod_uid: group
        for pod_uid, group in observed.instances().items()
        if pod_uid != but
        and not (group.cpus or group.effective).isdisjoint(cpus)
        and not (pod_uid in observed.gone | observed.overdue and observed.shares_float(pod_uid))
    }


def floats_on(cpus: CpuSet, observed: Observed, *, but: str) -> tuple[str, ...]:
    """Return the pods, except *but*, in whose floats threads may run on any of *cpus*, because shrinking these floats failed."""
    return tuple(
        pod_uid
        for pod_uid, group in observed.floats().items()
        if pod_uid != but
        and group.populated
        and not (group.effective & (group.cpus or group.effective)).isdisjoint(cpus)
    )


def stale(desired: Desired, observed: Observed, requests: Mapping[str, Requested]) -> tuple[str, ...]:
    """Return the pods whose vCPUs' groups are not populated, and that are not in the kubelet's state."""
    known = {*desired.choices, *granted(requests)}
    return tuple(
        pod_uid
        for pod_uid, group in observed.instances().items()
        if pod_uid not in known and not group.populated and (desired.complete or pod_uid in observed.gone)
    )


def evictions(desired: Desired, observed: Observed, requests: Mapping[str, Requested]) -> tuple[Action, ...]:
    """Return the actions that end the remains of pods that are gone: foreign processes, or ones that a runtime has left.

    An instance whose pod still has a cgroup is left alone, although the kubelet may have forgotten the pod: its guest is
    being powered down. If that takes too long, so that the pod is overdue, its threads are moved to its float, and none is ended.
    An emptied group is removed by the pass that follows (:func:`reconcile`).
    """
    return tuple(_evictions(desired, observed, requests))


def _evictions(desired: Desired, observed: Observed, requests: Mapping[str, Requested]) -> Iterator[Action]:
    for pod_uid in sorted(_without_pod(desired, observed, requests)):
        gone = pod_uid in observed.gone
        kills = desired.kills and gone
        vcpus, float_cgroup = observed.groups.get(vcpus_group(pod_uid)), observed.groups.get(float_group(pod_uid))
        of_vcpus, of_float = (group is not None and group.populated for group in (vcpus, float_cgroup))
        if not of_vcpus and not (of_float and kills):
            continue
        if not gone and observed.shares_float(pod_uid):
            continue  # it may fill its cgroup again and again
        if vcpus is not None and of_vcpus:
            if vcpus.was_sealed:
                yield Unseal(vcpus_group(pod_uid))
            if float_cgroup is not None and float_cgroup.cpus and not observed.shares_float(pod_uid):
                yield Write(vcpus_group(pod_uid), "cpuset.cpus", str(float_cgroup.cpus))
        if gone and observed.domains[pod_uid].limits.get("pids.max", NO_PROCESSES) != NO_PROCESSES:
            yield Restrict(instance_group(pod_uid), "pids.max", NO_PROCESSES)
        if kills:
            yield Kill(pod_uid)
        elif float_cgroup is not None:
            yield Evict(pod_uid)


def _without_pod(desired: Desired, observed: Observed, requests: Mapping[str, Requested]) -> frozenset[str]:
    """Return the pods that are gone or overdue and that neither the kubelet nor a grant names."""
    return (observed.gone | observed.overdue).intersection(observed.domains) - {*desired.choices, *granted(requests)}


@frozen
class _Pass:
    """The values from which a pass decides, and those that follow from them alone."""

    desired: Desired
    observed: Observed
    requests: Mapping[str, Requested]
    grants: Mapping[str, CpuSet]
    """The CPUs granted in *requests*, by the pods' UIDs."""
    removed: frozenset[str]
    """The groups to remove."""
    groups: Mapping[str, Group]
    """The groups that stay."""
    without_pod: frozenset[str]
    """The pods that are gone or overdue and that neither the kubelet nor a grant names."""

    @classmethod
    def over(cls, desired: Desired, observed: Observed, requests: Mapping[str, Requested]) -> Self:
        """Return the pass over *observed* that is to bring it to *desired* and to answer *requests*."""
        removed = frozenset(_removed(desired, observed, requests))
        groups = {path: group for path, group in observed.groups.items() if path not in removed}
        without_pod = _without_pod(desired, observed, requests)
        return cls(desired, observed, requests, granted(requests), removed, groups, without_pod)

    def has_group(self, pod_uid: str) -> bool:
        """Tell whether one of the two groups of *pod_uid* stays."""
        return any(path in self.groups for path in groups_below(pod_uid))

    def follows_float(self, pod_uid: str) -> bool:
        """Tell whether the vCPUs' group of *pod_uid* has float's CPUs until its processes have ended."""
        return pod_uid in self.without_pod and self.observed.shares_float(pod_uid)


def _actions(this: _Pass) -> Iterator[Action]:
    desired, observed, groups = this.desired, this.observed, this.groups
    yield from map(Remove, observed.outdated)
    yield from _parent_actions(desired, observed)
    yield from _root_actions(desired, observed)
    yield from _root_limits(desired, observed)
    targets = _targets(this)
    sealed = _sealed(this, targets)
    yield from _unseal_actions(sealed, observed)
    for path in observed.groups:
        if path in this.removed:
            yield Remove(path)
    yield from _domains(this)
    for path in targets:
        if path not in groups:
            yield Make(path)
        if path not in groups or not groups[path].threaded:
            yield Write(path, "cgroup.type", "threaded")
        named = groups[path].mems if path in groups else CpuSet()
        if not desired.mems <= named:
            yield Write(path, "cpuset.mems", str(named | desired.mems))
    yield from _cpuset_actions(targets, groups, sealed)
    for path in targets:
        limits = VCPUS_LIMITS if path.endswith(f"/{VCPUS}") else FLOAT_LIMITS
        yield from _restrictions(path, limits, groups[path].limits if path in groups else {}, observed)
    yield from _seal_actions(this, sealed)


def _domains(this: _Pass) -> Iterator[Action]:
    """Yield the actions that make and limit the domains of the groups that stay and of granted CPUs, and remove the others."""
    desired, observed = this.desired, this.observed
    promised = {pod_uid: domain.memory_max or 0 for pod_uid, domain in observed.domains.items()}
    for pod_uid in sorted({*observed.domains, *this.grants}):
        if pod_uid in this.grants or this.has_group(pod_uid):
            found, request = observed.domains.get(pod_uid), this.requests.get(pod_uid, Requested())
            if found is None:
                yield Make(instance_group(pod_uid))
            others = sum(promised.values()) - promised.get(pod_uid, 0)
            promised[pod_uid] = _memory_of(found, request.memory, desired.limits, others)
            wanted = {**desired.limits.of_domain(promised[pod_uid], gone=pod_uid in this.without_pod & observed.gone)}
            if request.memory_nodes is not None:
                wanted[MEMORY_NODES] = _memory_nodes(pod_uid, request.memory_nodes, desired, observed)
            yield from _restrictions(instance_group(pod_uid), wanted, found.limits if found else {}, observed)
            yield from _domain_actions(instance_group(pod_uid), desired, observed, found or Domain())
        elif not keeps_domain(pod_uid, desired, observed):
            yield Remove(instance_group(pod_uid))


def keeps_domain(pod_uid: str, desired: Desired, observed: Observed) -> bool:
    """Tell whether the domain of *pod_uid*, which has no groups, is to stay for the memory, processes and groups that count in it.

    Memory that others hold, such as a memfd that was passed on, a file in tmpfs or page cache in a pipe, stays charged when its processes
    have left; how much of it can be known once the kernel has reclaimed the rest. After the domain's removal only the root is charged,
    whose limit all pods share: a pod that registers and leaves again and again could use it up, and the kernel would end another pod's
    guest. The same holds for processes that have ended, as long as their parents do not wait for them, and for removed groups that the
    kernel keeps: what stays of groups is known in the pass after their removal. While the pod may still register, every byte, process and
    group counts; one that is gone for good may leave some kernel memory for a while, and the other processes end with it.
    """
    domain = observed.domains[pod_uid]
    if _has_gone(pod_uid, desired, observed):
        return domain.charged > LEFT_BEHIND
    return not observed.is_left_over(pod_uid) or domain.charged > 0 or domain.processes > 0 or domain.removed > 0


def left_behind(desired: Desired, observed: Observed) -> Mapping[str, int]:
    """Return the pods that are gone and whose domains are kept for the memory charged to them, with its bytes."""
    return {
        pod_uid: domain.charged
        for pod_uid, domain in observed.domains.items()
        if observed.is_left_over(pod_uid)
        and pod_uid in observed.reclaimed
        and _has_gone(pod_uid, desired, observed)
        and keeps_domain(pod_uid, desired, observed)
    }


def _has_gone(pod_uid: str, desired: Desired, observed: Observed) -> bool:
    """Tell whether *pod_uid* can no longer register: its cgroup is gone, or the kubelet does not name it."""
    return pod_uid in observed.gone or (desired.kills and pod_uid not in desired.choices)


def _removed(desired: Desired, observed: Observed, requests: Mapping[str, Requested]) -> Iterator[str]:
    """Yield the groups to remove: stale ones, and floats without an instance."""
    leaving = stale(desired, observed, requests)
    yield from map(vcpus_group, leaving)
    staying = {*observed.instances(), *granted(requests)} - {*leaving}
    yield from (
        float_group(uid) for uid, group in observed.floats().items() if not group.populated and uid not in staying
    )


def _memory_of(found: Domain | None, wanted: int | None, limits: Limits, others: int) -> int:
    """Return the ``memory.max`` of a domain: the bytes *wanted*, or the initial ones, and no less than its present ones.

    Never less than the charged bytes: the write would block until the kernel has reclaimed the difference, or has given up. A pod can
    change these at any moment, by sockets that were made in the domain.
    """
    if wanted is None and found is not None and found.memory_max is not None:
        return found.memory_max
    most = memory_for(limits.instance_memory if wanted is None else wanted, limits, others)
    return most if found is None else max(most, found.memory_max or found.charged_mebibytes)


def _memory_nodes(pod_uid: str, wanted: CpuSet, desired: Desired, observed: Observed) -> str:
    """Return ``cpuset.mems`` of the domain of a pod that may use the memory nodes *wanted*; it is empty for all."""
    found = observed.domains.get(pod_uid, Domain()).limits.get(MEMORY_NODES, "")
    groups = map(observed.groups.get, groups_below(pod_uid))
    if any(group is not None and group.populated for group in groups):
        return found and str(CpuSet.parse(found) | wanted)
    return "" if desired.mems <= wanted else str(wanted)


def _domain_actions(path: str, desired: Desired, observed: Observed, found: Domain) -> Iterator[Action]:
    """Yield the actions that complete the domain at *path*: threaded children, for which it enables threaded controllers only."""
    if found.cpus and not desired.cpus <= found.cpus:
        yield Write(path, "cpuset.cpus", str(found.cpus | desired.cpus))
    unwanted = sorted(found.enabled - THREADED_CONTROLLERS)
    if unwanted:
        yield Write(path, "cgroup.subtree_control", " ".join(f"-{name}" for name in unwanted))
    if "cpuset" not in found.enabled:
        yield Write(path, "cgroup.subtree_control", "+cpuset")
    for name in BELOW:
        if name in observed.offered - found.enabled:
            yield Restrict(path, "cgroup.subtree_control", f"+{name}")


def _sealed(this: _Pass, targets: Mapping[str, CpuSet]) -> Mapping[str, CpuSet]:
    """Return the groups that are to be isolated partitions, with their CPUs.

    Only the group itself records that an instance was sealed; the kernel keeps it when this program ends. A group without threads needs no
    CPUs, and one without a pod has float's.
    """
    if this.observed.exclusive is None or not this.desired.partitions:
        return {}
    asked = {pod_uid: each.sealed for pod_uid, each in this.requests.items() if each.sealed is not None}
    return {
        vcpus_group(pod_uid): targets.get(vcpus_group(pod_uid), group.cpus)
        for pod_uid, group in this.observed.instances().items()
        if group.populated and asked.get(pod_uid, group.was_sealed) and pod_uid not in this.without_pod
    }


def _unseal_actions(sealed: Mapping[str, CpuSet], observed: Observed) -> Iterator[Action]:
    for name, group in observed.groups.items():
        cpus = sealed.get(name)
        if group.was_sealed and not _has_exclusively(group, cpus) and not _stays_sealed(group, cpus):
            yield Unseal(name)


def _seal_actions(this: _Pass, sealed: Mapping[str, CpuSet]) -> Iterator[Action]:
    observed = this.observed
    if observed.exclusive is None:
        return
    together = CpuSet.union(sealed.values())
    missing = {
        name: cpus
        for name, cpus in sealed.items()
        if observed.groups[name].partition != ISOLATED or cpus - observed.groups[name].exclusive
    }
    for name, cpus in missing.items():
        yield Seal(name, cpus, together)
    for pod_uid, domain in observed.domains.items():  # children first: a parent must have its children's limits
        path = vcpus_group(pod_uid)
        group, cpus = observed.groups.get(path), sealed.get(path, CpuSet())
        unsealed = group is not None and group.was_sealed and not cpus
        if path not in missing and domain.exclusive != cpus and not unsealed and not _leaves(this, pod_uid):
            yield Restrict(instance_group(pod_uid), "cpuset.cpus.exclusive", str(cpus))
    if not missing and observed.exclusive != together:
        yield Restrict(ROOT, "cpuset.cpus.exclusive", str(together))


def _leaves(this: _Pass, pod_uid: str) -> bool:
    """Tell whether neither a group nor the domain of *pod_uid* stays."""
    return not this.has_group(pod_uid) and not keeps_domain(pod_uid, this.desired, this.observed)


def _has_exclusively(group: Group, cpus: CpuSet | None) -> bool:
    """Tell whether *cpus* are all the CPUs of *group*, and all its exclusive ones."""
    return group.exclusive == group.cpus == cpus


def _stays_sealed(group: Group, cpus: CpuSet | None) -> bool:
    """Tell whether *group* can remain an isolated partition while its CPUs change to *cpus*, because it keeps some of them.

    The kernel takes CPUs out of a valid partition when they leave ``cpuset.cpus.exclusive``, and adds others for a writer with
    CAP_SYS_ADMIN (``remote_cpus_update``, Linux 6.12); ``cpuset.cpus`` has no effect meanwhile.
    """
    return cpus is not None and group.partition == ISOLATED and not group.exclusive.isdisjoint(cpus)


def _cpuset_actions(
    targets: Mapping[str, CpuSet], groups: Mapping[str, Group], sealed: Mapping[str, CpuSet]
) -> Iterator[Action]:
    """Yield the actions that give each group its CPUs.

    Groups shrink first, and one that others leave waits for them: a moving CPU is for a moment in neither group, never in both. The
    exception are groups that exchange all their CPUs with each other in a ring, because none of them may be without CPUs.
    """
    current = {name: group.cpus for name, group in groups.items()}
    for name, target in targets.items():
        if name in groups and _stays_sealed(groups[name], sealed.get(name)) and groups[name].exclusive - target:
            yield Write(name, "cpuset.cpus.exclusive", str(groups[name].exclusive & target))
        before = current.get(name, CpuSet())
        if before & target and before & target != before:
            current[name] = before & target
            yield Write(name, "cpuset.cpus", str(current[name]))
    waiting = {name: target for name, target in targets.items() if current.get(name, CpuSet()) != target}
    while waiting:
        yield from _moves(next(iter(waiting)), waiting, current)


def _moves(name: str, waiting: dict[str, CpuSet], current: Mapping[str, CpuSet]) -> Iterator[Action]:
    """Yield the action that gives group *name* its CPUs, after those of the groups in *waiting* that have any of these now."""
    target = waiting.pop(name)
    for other in [*waiting]:
        if waiting.get(other, target) != target and not current.get(other, CpuSet()).isdisjoint(target):
            yield from _moves(other, waiting, current)
    yield Write(name, "cpuset.cpus", str(target))


def _restrictions(
    group: str, wanted: Mapping[str, str], found: Mapping[str, str], observed: Observed
) -> Iterator[Restrict]:
    for file, value in wanted.items():
        if file.partition(".")[0] in {"cgroup", *observed.offered} and found.get(file) != value:
            yield Restrict(group, file, value)


def _root_limits(desired: Desired, observed: Observed) -> Iterator[Restrict]:
    held_back = {file for file, _ in withheld(desired, observed)}
    for limit in _restrictions(ROOT, desired.limits.of_root(), observed.limits, observed):
        if limit.file not in held_back:
            yield limit


def withheld(desired: Desired, observed: Observed) -> tuple[tuple[str, str], ...]:
    """Return the root's limits, file and value, that are not written because the use exceeds them, or may do so.

    Lowering ``memory.max`` below the memory in use ends processes ("Memory Interface Files"), and so does a use that grows afterwards, in
    whichever domain the largest process is. No domain uses more than its own limit.
    """
    wanted = desired.limits.of_root()[MEMORY_MAX]
    lower = wanted.isdecimal() and observed.limits.get(MEMORY_MAX) != wanted
    most = max(observed.memory_used, sum(domain.memory_max or 0 for domain in observed.domains.values()))
    return ((MEMORY_MAX, wanted),) if lower and most > int(wanted) else ()


def _parent_actions(desired: Desired, observed: Observed) -> Iterator[Action]:
    """Yield the actions that enable the controllers that the root needs; none is ever disabled, because the parent is not ours."""
    if "cpuset" not in observed.delegated:
        yield Write(PARENT, "cgroup.subtree_control", "+cpuset")
    for name in desired.limits.controllers:
        if name in observed.offered - observed.delegated:
            yield Restrict(PARENT, "cgroup.subtree_control", f"+{name}")


def _root_actions(desired: Desired, observed: Observed) -> Iterator[Action]:
    """Yield the actions that build or repair the root: all controllers, and never fewer CPUs and memory nodes than it has."""
    if not observed.exists:
        yield Make(ROOT)
    cpus, mems = observed.cpus | desired.cpus, observed.mems | desired.mems
    if mems != observed.mems:
        yield Write(ROOT, "cpuset.mems", str(mems))
    if cpus != observed.cpus:
        yield Write(ROOT, "cpuset.cpus", str(cpus))
    if "cpuset" not in observed.enabled:
        yield Write(ROOT, "cgroup.subtree_control", "+cpuset")
    for name in desired.limits.controllers:
        if name in observed.offered - observed.enabled:
            yield Restrict(ROOT, "cgroup.subtree_control", f"+{name}")


def float_cpus(desired: Desired, observed: Observed) -> CpuSet:
    """Return the CPUs for every float: the shared pool, except those that instances still hold."""
    _, owned, orphaned = _owned(_Pass.over(desired, observed, {}))
    return _left_to_float(desired, owned, orphaned)


def _left_to_float(desired: Desired, owned: CpuSet, orphaned: CpuSet) -> CpuSet:
    """Return the shared pool without the CPUs *owned* by instances and those *orphaned*, of instances whose pods are gone.

    If the orphans have all of it, float shares it with them, like every other pod of the node.
    """
    return desired.shared_pool - owned - orphaned or desired.shared_pool - owned


def _targets(this: _Pass) -> Mapping[str, CpuSet]:
    """Return the CPUs for each of our groups; the floats come first, then the vCPUs' groups in order.

    Without any CPU for float, floats are left unchanged, and none is made.
    """
    targets, owned, orphaned = _owned(this)
    left = _left_to_float(this.desired, owned, orphaned)
    if not left:
        return targets
    uids = sorted({*this.observed.domains, *this.grants})
    floats = [float_group(uid) for uid in uids if uid in this.grants or float_group(uid) in this.groups]
    following = [vcpus_group(uid) for uid in uids if vcpus_group(uid) in this.groups and this.follows_float(uid)]
    return {**dict.fromkeys((*floats, *following), left), **targets}


def _owned(this: _Pass) -> tuple[Mapping[str, CpuSet], CpuSet, CpuSet]:
    """Return the CPUs for each group of vCPUs, those of all together, and those of instances whose pod is gone.

    An instance whose pod the kubelet no longer names still has live threads, or it would be stale: it is left alone
    until they end, and no other instance gets its CPUs meanwhile.
    """
    choices, grants, groups = this.desired.choices, this.grants, this.groups
    contested = _contested(this.desired)
    targets = dict[str, CpuSet]()
    orphaned = owned = CpuSet()
    instances = [(uid, groups[vcpus_group(uid)]) for uid in sorted(this.observed.domains) if vcpus_group(uid) in groups]
    for pod_uid, group in instances:
        if not this.follows_float(pod_uid) and pod_uid not in grants and pod_uid not in choices:
            orphaned |= group.cpus
    for pod_uid, group in instances:
        if pod_uid in grants or pod_uid not in choices:
            continue
        target = _choose(group.cpus, choices[pod_uid], contested)
        if target.isdisjoint(orphaned):
            targets[vcpus_group(pod_uid)] = target
            owned |= target
        else:  # another instance's last threads still run on CPUs that the kubelet has assigned; not yet
            owned |= group.cpus
    for pod_uid, cpus in sorted(grants.items()):
        targets[vcpus_group(pod_uid)] = cpus
        owned |= cpus
    return targets, owned, orphaned


def _contested(desired: Desired) -> CpuSet:
    """Return the CPUs that do not belong to one pod alone: those of the shared pool, and those that several pods may have."""
    pods = Counter(cpu for choices in desired.choices.values() for cpu in CpuSet.union(choices))
    return desired.shared_pool | CpuSet(cpu for cpu, number in pods.items() if number > 1)


def _choose(current: CpuSet, choices: tuple[CpuSet, ...], contested: CpuSet) -> CpuSet:
    """Return the cpuset of an instance that may have one of *choices* and now has *current*.

    The instance's container within the pod is not recorded. A container that the kubelet resizes keeps most of its CPUs, so its set is the
    nearest one. If that is ambiguous, an instance with CPUs of several containers keeps them, and one whose container shares CPUs with
    others of the pod gets the CPUs of all these: they are still its pod's alone, and every vCPU keeps the CPU it is pinned to. An ended
    init container keeps its entry, which is recognised by CPUs in it that are *contested* by now.
    """
    valid = tuple(cpus for cpus in choices if cpus.isdisjoint(contested)) or choices
    together = CpuSet.union(valid)
    if current and current in (*valid, together):
        return current
    most = max((len(cpus & current) for cpus in valid), default=0)
    if not most:
        return together
    nearest = [cpus for cpus in valid if len(cpus & current) == most]
    apart = all(one.isdisjoint(other) for one, other in combinations(nearest, 2))
    return current & together if apart and len(nearest) > 1 else CpuSet.union(nearest)


def is_resized(current: CpuSet, asked: CpuSet, choices: tuple[CpuSet, ...]) -> bool:
    """Tell whether the container that requests the CPUs *asked* was resized and is the one whose instance has *current*.

    No other container of the pod, in *choices*, has as many of these CPUs, except an init container, which has CPUs in common with it.
    """
    kept = len(asked & current)
    return bool(kept) and all(len(cpus & current) < kept for cpus in choices if cpus.isdisjoint(asked))


def silent_fallbacks(observed: Observed, online: CpuSet) -> Mapping[str, Group]:
    """Return our groups that run on other CPUs than were written, without an error from the kernel.

    A partition keeps its exclusive CPUs until it is extended, whatever was written to ``cpuset.cpus``.
    """
    return {
        name: group
        for name, group in observed.groups.items()
        if group.cpus
        and group.threaded
        and group.effective != group.cpus & online
        and not (group.partition == ISOLATED and group.effective == group.exclusive & online)
    }
