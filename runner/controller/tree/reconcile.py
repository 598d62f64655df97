"""The actions that bring the controller's cgroup tree to what the kubelet's state requires (pure).

The actions are single operations on the kernel, in an order in which each may fail or the program may die after any
of them: a second pass from what is then found ends in the same tree. Two rules have precedence:

* Only our own groups are touched: the root, ``float``, and ``instance-<name>`` and ``float/<name>`` with a well-formed
  name; and what a pod has made below the latter two, when they are removed.
* No action puts a CPU into two groups, and none opens a sealed instance's CPUs to others while it keeps some of them: a
  partition shrinks and grows as it is. Groups shrink before others grow, a stale instance is removed before its CPUs
  are given to another, and float does not get the CPUs of an instance that still runs although its pod is gone,
  unless float would have no others.

A descriptor of a group can be passed on, so that threads of any pod may be in it, also after the end of the pod that it
was made for. Before anything else is decided, such a group gets float's CPUs and what is in it is moved out
(:func:`evictions`). The CPUs come first, because a process that holds a descriptor can put threads into the group as fast
as they are moved out, so that it may never be empty; where even that fails, it is an instance that still runs.

``cpuset.mems`` only grows. Taking a node from a populated group makes the kernel migrate its members' pages
at once ("Cpuset Interface Files" of cgroup-v2.rst), seconds for a guest's memory; where guest memory lies is
decided by the process that populates it and by binding, not by these groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

import attrs

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.controller.tree.limits import NO_PROCESSES, Limits
from runner.facts.hardware import OnlineCpus
from runner.kernel.cgroup import THREADED_CONTROLLERS
from runner.kubelet.pod_cgroups import FLOAT, instance_group, instance_uid, pod_float_group
from runner.kubelet.state import CpuState

ROOT = ""
PARENT = ".."

MEMBER, ISOLATED = "member", "isolated"
"""``cpuset.cpus.partition`` of a group that is no partition, and of one that has its CPUs to itself."""

_BELOW = ("cpu", "pids")
"""Those that the root and float switch on for their children. Without cpuset in float, its children have float's CPUs."""


@frozen
class Group:
    """A group of ours below the root, as observed."""

    kind: str
    """``cgroup.type``."""
    cpus: CpuSet
    """``cpuset.cpus``; empty if nothing was written, or while the cpuset controller is off."""
    mems: CpuSet
    effective: CpuSet
    """``cpuset.cpus.effective``."""
    populated: bool
    """Whether it cannot be removed: it has a live member, or a group below it that a pod has made."""
    limits: Mapping[str, str] = attrs.field(factory=dict)
    """Control file → value, for the limits that the kernel offers here."""
    exclusive: CpuSet = attrs.field(factory=CpuSet)
    """``cpuset.cpus.exclusive``."""
    partition: str = MEMBER
    """``cpuset.cpus.partition``."""

    @property
    def was_sealed(self) -> bool:
        """Whether it is an isolated partition, or was one until the kernel invalidated it.

        Where its parent lost the CPUs, the kernel makes it a member without a word (``remote_partition_check``).
        """
        return self.partition != MEMBER or bool(self.exclusive)


@frozen
class PodGroup:
    """The group of a pod in float, as observed."""

    kind: str
    populated: bool
    limits: Mapping[str, str] = attrs.field(factory=dict)


@frozen
class Observed:
    """The tree as it is."""

    offered: frozenset[str]
    """The controllers that the parent has."""
    delegated: frozenset[str]
    """Those that are on in the parent's ``cgroup.subtree_control``."""
    exists: bool
    enabled: frozenset[str] = frozenset()
    """The root's ``cgroup.subtree_control``."""
    cpus: CpuSet = attrs.field(factory=CpuSet)
    mems: CpuSet = attrs.field(factory=CpuSet)
    groups: Mapping[str, Group] = attrs.field(factory=dict)
    """Float and the instances' groups by name; others are not read."""
    pods: Mapping[str, PodGroup] = attrs.field(factory=dict)
    """Pod UID → its group in float."""
    float_enabled: frozenset[str] = frozenset()
    """float's ``cgroup.subtree_control``."""
    limits: Mapping[str, str] = attrs.field(factory=dict)
    """Control file → value, for the root's limits that the kernel offers."""
    memory_used: int = 0
    """Bytes that the root is charged for."""
    memory_kept: int = 0
    """Those of them that the kernel cannot take back by dropping page cache."""
    gone: frozenset[str] = frozenset()
    """The UIDs of pods that have a group here and no cgroup of their own any more."""
    exclusive: CpuSet | None = None
    """The root's ``cpuset.cpus.exclusive``; ``None`` if the kernel has no remote partitions."""

    def instances(self) -> Mapping[str, Group]:
        """Return the instances' groups by the instance's name."""
        return dict(_instances(self.groups))


@frozen
class Desired:
    """The tree as it should be."""

    cpus: CpuSet
    """All CPUs of the machine."""
    mems: CpuSet
    """All its memory nodes."""
    shared_pool: CpuSet
    """What float should have, less what instances still hold."""
    choices: Mapping[str, tuple[CpuSet, ...]]
    """Pod UID → the cpusets its containers may have."""
    complete: bool
    """*choices* names every pod there is, so that an empty instance that it does not name is stale."""
    limits: Limits = attrs.field(factory=Limits)
    partitions: bool = True
    """Whether an instance may be an isolated partition."""


@frozen
class Make:
    """Create a group."""

    group: str


@frozen
class Remove:
    """Remove a group, if it is still empty."""

    group: str


@frozen
class Write:
    """Write *value* to *file* of a group."""

    group: str
    file: str
    value: str


@frozen
class Restrict:
    """Write a limit, or switch on the controller for one. The tree works without it, so that a failure stops nothing."""

    group: str
    file: str
    value: str


@frozen
class Evict:
    """Move the threads that are in the instance's group of pod *pod_uid* to the pod's group in float.

    The groups that the pod has made below the instance's are emptied in the same way, and removed.
    """

    pod_uid: str

    @property
    def group(self) -> str:
        """The instance's group."""
        return instance_group(self.pod_uid)


@frozen
class Seal:
    """Make an instance's group an isolated partition of *cpus*. It works without, so that a failure stops nothing."""

    group: str
    cpus: CpuSet
    together: CpuSet
    """The CPUs of all sealed instances, which the root must have for itself first."""


@frozen
class Unseal:
    """Make a group a member of its parent's partition again, without exclusive CPUs."""

    group: str


Action = Make | Remove | Write | Restrict | Evict | Seal | Unseal


def desire(state: CpuState, machine: OnlineCpus, limits: Limits) -> Desired:
    """Return what the kubelet's *state* means for the tree on *machine*.

    Where the shared pool is empty, float has all CPUs that are no pod's own: every one under policy ``none``, and the reserved
    ones when all others are given away under ``strict-cpu-reservation``. It must run somewhere, and those are the system's own.
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
    """Return what *machine* wants where no kubelet shares out CPUs: all floats but what instances registered."""
    return Desired(
        cpus=machine.present,
        mems=machine.memory_nodes,
        shared_pool=machine.online,
        choices={},
        complete=False,
        limits=limits,
    )


def reconcile(
    desired: Desired, observed: Observed, grants: Mapping[str, CpuSet], seals: Mapping[str, bool] | None = None
) -> tuple[Action, ...]:
    """Return the actions that turn *observed* into *desired*, with an instance for each of *grants* as well.

    The caller has made sure that no granted CPU is another instance's (:func:`holders`). *seals* are the instances that
    are to be sealed or unsealed; all others stay as they are, as long as a thread is in their groups.
    """
    return tuple(_actions(desired, observed, grants, seals or {}))


def unseals(observed: Observed, seals: Mapping[str, bool]) -> tuple[Action, ...]:
    """Return the actions that end the partitions of instances without a thread, and of those that *seals* names with ``False``.

    That takes no knowledge of the kubelet's state: the CPUs go back to the cpusets that name them.
    """
    return tuple(
        Unseal(instance_group(pod_uid))
        for pod_uid, group in observed.instances().items()
        if group.was_sealed and not (group.populated and seals.get(pod_uid, True))
    )


def holders(cpus: CpuSet, observed: Observed, *, but: str) -> Mapping[str, Group]:
    """Return the instances, *but* one, that hold any of *cpus*; one that only shares float's holds none."""
    return {
        pod_uid: group
        for pod_uid, group in observed.instances().items()
        if pod_uid != but
        and not (group.cpus or group.effective).isdisjoint(cpus)
        and not (pod_uid in observed.gone and _shares_floats(group, observed.groups))
    }


def stale(desired: Desired, observed: Observed, grants: Mapping[str, CpuSet]) -> tuple[str, ...]:
    """Return the instances that are neither in the kubelet's state nor populated."""
    known = {*desired.choices, *grants}
    return tuple(
        pod_uid
        for pod_uid, group in observed.instances().items()
        if pod_uid not in known and not group.populated and (desired.complete or pod_uid in observed.gone)
    )


def evictions(desired: Desired, observed: Observed, grants: Mapping[str, CpuSet]) -> tuple[Action, ...]:
    """Return the actions that empty the instances whose pods have gone: strangers, or what a runtime has left behind.

    An instance whose pod still has a cgroup is left alone, although the kubelet may have forgotten the pod: its guest is
    being powered down. An emptied group is removed by the pass that follows (:func:`reconcile`).
    """
    return tuple(_evictions(desired, observed, grants))


def _evictions(desired: Desired, observed: Observed, grants: Mapping[str, CpuSet]) -> Iterator[Action]:
    floating = observed.groups[FLOAT].cpus if FLOAT in observed.groups else CpuSet()
    without_pod = _without_pod(desired, observed, grants)
    for pod_uid, instance in observed.instances().items():
        if pod_uid not in without_pod or not instance.populated:
            continue
        if instance.was_sealed:
            yield Unseal(instance_group(pod_uid))
        if floating and not _shares_floats(instance, observed.groups):
            yield Write(instance_group(pod_uid), "cpuset.cpus", str(floating))
        if instance.limits.get("pids.max", NO_PROCESSES) != NO_PROCESSES:
            yield Restrict(instance_group(pod_uid), "pids.max", NO_PROCESSES)
        yield from _pod_group(pod_uid, observed)
        yield Evict(pod_uid)


def _without_pod(desired: Desired, observed: Observed, grants: Mapping[str, CpuSet]) -> frozenset[str]:
    """Return the pods that have gone and that no program names any more."""
    return observed.gone - {*desired.choices, *grants}


def _actions(
    desired: Desired, observed: Observed, grants: Mapping[str, CpuSet], seals: Mapping[str, bool]
) -> Iterator[Action]:
    yield from _parent_actions(desired, observed)
    yield from _root_actions(desired, observed)
    yield from _root_limits(desired, observed)
    removed = stale(desired, observed, grants)
    groups = {name: group for name, group in observed.groups.items() if instance_uid(name) not in removed}
    without_pod = _without_pod(desired, observed, grants)
    targets = _targets(desired, groups, grants, without_pod)
    sealed = _sealed(desired, observed, targets, seals, without_pod)
    yield from _unseal_actions(sealed, observed)
    for pod_uid in removed:
        yield Remove(instance_group(pod_uid))
    for name in targets:
        if name not in groups:
            yield Make(name)
        if name not in groups or groups[name].kind != "threaded":
            yield Write(name, "cgroup.type", "threaded")
        mems = groups[name].mems if name in groups else CpuSet()
        if mems | desired.mems != mems:
            yield Write(name, "cpuset.mems", str(mems | desired.mems))
    yield from _cpuset_actions(targets, groups, sealed)
    for name in targets:
        if name != FLOAT:
            found = groups[name].limits if name in groups else {}
            wanted = desired.limits.of_instance(gone=instance_uid(name) in without_pod)
            yield from _restrictions(name, wanted, found, observed)
    if FLOAT in groups or FLOAT in targets:
        yield from _float_actions(desired, observed, grants, frozenset(removed))
    yield from _seal_actions(sealed, observed)


def _sealed(
    desired: Desired,
    observed: Observed,
    targets: Mapping[str, CpuSet],
    seals: Mapping[str, bool],
    without_pod: frozenset[str],
) -> Mapping[str, CpuSet]:
    """Return the groups that are to be isolated partitions, and their CPUs.

    That an instance was sealed is recorded nowhere but in its group, which the kernel keeps when this program ends. A group
    without a thread has no use for its CPUs, and one without a pod has float's.
    """
    if observed.exclusive is None or not desired.partitions:
        return {}
    return {
        instance_group(pod_uid): targets.get(instance_group(pod_uid), group.cpus)
        for pod_uid, group in observed.instances().items()
        if group.populated and seals.get(pod_uid, group.was_sealed) and pod_uid not in without_pod
    }


def _unseal_actions(sealed: Mapping[str, CpuSet], observed: Observed) -> Iterator[Action]:
    for name, group in observed.groups.items():
        cpus = sealed.get(name)
        if group.was_sealed and not _names(group, cpus) and not _stays_sealed(group, cpus):
            yield Unseal(name)


def _seal_actions(sealed: Mapping[str, CpuSet], observed: Observed) -> Iterator[Action]:
    together = CpuSet()
    for cpus in sealed.values():
        together |= cpus
    missing = {
        name: cpus
        for name, cpus in sealed.items()
        if observed.groups[name].partition != ISOLATED or cpus - observed.groups[name].exclusive
    }
    for name, cpus in missing.items():
        yield Seal(name, cpus, together)
    if not missing and observed.exclusive is not None and observed.exclusive != together:
        yield Restrict(ROOT, "cpuset.cpus.exclusive", str(together))


def _names(group: Group, cpus: CpuSet | None) -> bool:
    """Tell whether *group* has *cpus*, and for itself; ``None``: it is to have none for itself."""
    return group.exclusive == group.cpus == cpus


def _stays_sealed(group: Group, cpus: CpuSet | None) -> bool:
    """Tell whether *group* can remain an isolated partition while its CPUs become *cpus*: it keeps some of them.

    The kernel takes CPUs out of a valid partition when they leave ``cpuset.cpus.exclusive``, and adds others for a writer with
    CAP_SYS_ADMIN (``remote_cpus_update``, Linux 6.12); ``cpuset.cpus`` has no effect meanwhile.
    """
    return cpus is not None and group.partition == ISOLATED and not group.exclusive.isdisjoint(cpus)


def _cpuset_actions(
    targets: Mapping[str, CpuSet], groups: Mapping[str, Group], sealed: Mapping[str, CpuSet]
) -> Iterator[Action]:
    """Give each group its CPUs. Shrink first: CPUs that move between two groups are in neither for a moment, never in both."""
    current = {name: group.cpus for name, group in groups.items()}
    for name, target in targets.items():
        if name in groups and _stays_sealed(groups[name], sealed.get(name)) and groups[name].exclusive - target:
            yield Write(name, "cpuset.cpus.exclusive", str(groups[name].exclusive & target))
        before = current.get(name, CpuSet())
        if before & target and before & target != before:
            current[name] = before & target
            yield Write(name, "cpuset.cpus", str(current[name]))
    for name, target in targets.items():
        if current.get(name, CpuSet()) != target:
            yield Write(name, "cpuset.cpus", str(target))


def _float_actions(
    desired: Desired, observed: Observed, grants: Mapping[str, CpuSet], removed: frozenset[str]
) -> Iterator[Action]:
    """Build or repair the pods' groups in float: one for each instance, as long as there is the instance or a member.

    A group is made by a registration only, which gives its descriptors away: one that is made again would have others.
    """
    if "cpuset" in observed.float_enabled:
        yield Restrict(FLOAT, "cgroup.subtree_control", "-cpuset")
    for name in _BELOW:
        if name in observed.offered - observed.float_enabled:
            yield Restrict(FLOAT, "cgroup.subtree_control", f"+{name}")
    instances = {*observed.instances(), *grants} - removed
    without_pod = _without_pod(desired, observed, grants)
    for pod_uid in sorted({*observed.pods, *grants}):
        group = observed.pods.get(pod_uid)
        if group is not None and not group.populated and pod_uid not in instances:
            yield Remove(pod_float_group(pod_uid))
            continue
        yield from _pod_group(pod_uid, observed)
        wanted_limits = desired.limits.of_pod(gone=pod_uid in without_pod)
        yield from _restrictions(
            pod_float_group(pod_uid), wanted_limits, {} if group is None else group.limits, observed
        )


def _pod_group(pod_uid: str, observed: Observed) -> Iterator[Action]:
    """Make the group in float of pod *pod_uid*, or finish it."""
    group = observed.pods.get(pod_uid)
    if group is None:
        yield Make(pod_float_group(pod_uid))
    if group is None or group.kind != "threaded":
        yield Write(pod_float_group(pod_uid), "cgroup.type", "threaded")


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
    """Return the root's memory limits, file and value, that are not written because more is in use.

    Lowering ``memory.max`` below what is in use kills; lowering ``memory.high`` drops page cache, which is harmless, and
    slows down the processes when there is not enough of it ("Memory Interface Files").
    """
    wanted = desired.limits.of_root()
    in_use = {"memory.high": observed.memory_kept, "memory.max": observed.memory_used}
    return tuple(
        (file, wanted[file])
        for file, used in in_use.items()
        if wanted[file].isdecimal() and observed.limits.get(file) != wanted[file] and used > int(wanted[file])
    )


def _parent_actions(desired: Desired, observed: Observed) -> Iterator[Action]:
    """Switch on the controllers that the root needs, and never one off: the parent is not ours."""
    if "cpuset" not in observed.delegated:
        yield Write(PARENT, "cgroup.subtree_control", "+cpuset")
    for name in desired.limits.controllers:
        if name in observed.offered - observed.delegated:
            yield Restrict(PARENT, "cgroup.subtree_control", f"+{name}")


def _root_actions(desired: Desired, observed: Observed) -> Iterator[Action]:
    """Build or repair the root: threaded controllers only, and never fewer CPUs and memory nodes than it has."""
    if not observed.exists:
        yield Make(ROOT)
    cpus, mems = observed.cpus | desired.cpus, observed.mems | desired.mems
    if mems != observed.mems:
        yield Write(ROOT, "cpuset.mems", str(mems))
    if cpus != observed.cpus:
        yield Write(ROOT, "cpuset.cpus", str(cpus))
    unwanted = sorted(observed.enabled - THREADED_CONTROLLERS)
    if unwanted:
        yield Write(ROOT, "cgroup.subtree_control", " ".join(f"-{name}" for name in unwanted))
    if "cpuset" not in observed.enabled:
        yield Write(ROOT, "cgroup.subtree_control", "+cpuset")
    for name in _BELOW:
        if name in observed.offered - observed.enabled:
            yield Restrict(ROOT, "cgroup.subtree_control", f"+{name}")


def _shares_floats(group: Group, groups: Mapping[str, Group]) -> bool:
    """Tell whether *group* has CPUs of float's and no others, as :func:`evictions` leaves it."""
    return FLOAT in groups and bool(group.cpus) and group.cpus <= groups[FLOAT].cpus


def _targets(
    desired: Desired, groups: Mapping[str, Group], grants: Mapping[str, CpuSet], without_pod: frozenset[str]
) -> Mapping[str, CpuSet]:
    """Return the CPUs that each of our groups should have; float comes first, then the instances in order.

    An instance whose pod the kubelet no longer names still has live threads, or it would be stale: it is left alone
    until they end, and no other instance gets its CPUs meanwhile. Without any CPU to float on, float is left as it is. What
    is in the instance of one of the pods *without_pod* has float's CPUs, and follows float until it has been moved.
    """
    targets: dict[str, CpuSet] = {}
    orphaned, owned = CpuSet(), CpuSet()  # by instances whose pod is gone, and by all others
    following = []
    for pod_uid, group in _instances(groups):
        if pod_uid in without_pod and _shares_floats(group, groups):
            following.append(instance_group(pod_uid))
        elif pod_uid not in grants and pod_uid not in desired.choices:
            orphaned |= group.cpus
    for pod_uid, group in _instances(groups):
        if pod_uid in grants or pod_uid not in desired.choices:
            continue
        target = _choose(group.cpus, desired.choices[pod_uid], _others(desired, pod_uid))
        if target.isdisjoint(orphaned):
            targets[instance_group(pod_uid)] = target
            owned |= target
        else:  # the kubelet has given away CPUs on which another instance's last threads still run; not yet
            owned |= group.cpus
    for pod_uid, cpus in sorted(grants.items()):
        targets[instance_group(pod_uid)] = cpus
        owned |= cpus
    # With the orphans on the whole shared pool, float joins them there, like every other pod of the node.
    floating = desired.shared_pool - owned - orphaned or desired.shared_pool - owned
    return {FLOAT: floating, **dict.fromkeys(following, floating), **targets} if floating else targets


def _others(desired: Desired, pod_uid: str) -> CpuSet:
    """Return the CPUs of the shared pool and of other pods than *pod_uid*."""
    return desired.shared_pool | _union(
        cpus for other, choices in desired.choices.items() if other != pod_uid for cpus in choices
    )


def _instances(groups: Mapping[str, Group]) -> list[tuple[str, Group]]:
    named = ((instance_uid(name), group) for name, group in sorted(groups.items()))
    return [(pod_uid, group) for pod_uid, group in named if pod_uid is not None]


def _choose(current: CpuSet, choices: tuple[CpuSet, ...], others: CpuSet) -> CpuSet:
    """Return the cpuset of an instance that may have one of *choices* and now has *current*.

    Which of its pod's containers an instance is, is not recorded. A container that the kubelet resizes keeps most of its CPUs,
    so that its set is the nearest. Where that is ambiguous, an instance that has CPUs of several containers keeps those, and
    one whose container is one of several with CPUs in common gets the CPUs of these: still its pod's alone, and every vCPU
    keeps the CPU it is pinned to. An init container that has ended keeps its entry: CPUs in it that are *others* by now, of
    the shared pool or of other pods, say so.
    """
    valid = tuple(cpus for cpus in choices if cpus.isdisjoint(others)) or choices
    together = _union(valid)
    if current and current in (*valid, together):
        return current
    most = max((len(cpus & current) for cpus in valid), default=0)
    if not most:
        return together
    nearest = [cpus for cpus in valid if len(cpus & current) == most]
    apart = all(one.isdisjoint(other) for one, other in combinations(nearest, 2))
    return current & together if apart and len(nearest) > 1 else _union(nearest)


def is_resized(current: CpuSet, asked: CpuSet, choices: tuple[CpuSet, ...]) -> bool:
    """Tell whether a container that asks for the CPUs *asked* is the one whose instance has *current*, and was resized.

    No other container of its pod, of *choices*, has as many of these, but for one with CPUs in common: an init container.
    """
    kept = len(asked & current)
    return bool(kept) and all(len(cpus & current) < kept for cpus in choices if cpus.isdisjoint(asked))


def _union(sets: Iterable[CpuSet]) -> CpuSet:
    return CpuSet(cpu for cpus in sets for cpu in cpus)


def silent_fallbacks(observed: Observed, online: CpuSet) -> Mapping[str, Group]:
    """Return our groups that run on other CPUs than were written, though the kernel reported no error.

    A partition has its exclusive CPUs, whatever else was written, until it has been extended.
    """
    return {
        name: group
        for name, group in observed.groups.items()
        if group.cpus
        and group.kind == "threaded"
        and group.effective != group.cpus & online
        and not (group.partition == ISOLATED and group.effective == group.exclusive & online)
    }
