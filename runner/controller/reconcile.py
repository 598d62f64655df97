"""The actions that bring the controller's cgroup tree to what the kubelet's state requires (pure).

The actions are single operations on the kernel, in an order in which each may fail or the program may die after any
of them: a second pass from what is then found ends in the same tree. Two rules have precedence:

* Only our own groups are touched: the root, ``float`` and ``instance-<name>`` with a well-formed name.
* No action puts a CPU into two groups. Groups shrink before others grow, a stale instance is removed before its CPUs
  are given to another, and float does not get the CPUs of an instance that still runs although its pod is gone,
  unless float would have no others.

``cpuset.mems`` only grows. Taking a node from a populated group makes the kernel migrate its members' pages
at once ("Cpuset Interface Files" of cgroup-v2.rst), seconds for a guest's memory; where guest memory lies is
decided by the process that populates it and by binding, not by these groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from runner.cpuset import CpuSet
from runner.facts.hardware import OnlineCpus
from runner.kernel.cgroup import THREADED_CONTROLLERS
from runner.kubelet.pod_cgroups import FLOAT, instance_group, instance_uid
from runner.kubelet.state import CpuState
from runner.values import frozen

ROOT = ""
PARENT = ".."


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


@frozen
class Observed:
    """The tree as it is."""

    delegated: bool
    """The cpuset controller is on in the parent's ``cgroup.subtree_control``."""
    exists: bool
    enabled: frozenset[str] = frozenset()
    """The root's ``cgroup.subtree_control``."""
    cpus: CpuSet = attrs.field(factory=CpuSet)
    mems: CpuSet = attrs.field(factory=CpuSet)
    groups: Mapping[str, Group] = attrs.field(factory=dict)
    """Our groups by name; others are not read."""

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


Action = Make | Remove | Write


def desire(state: CpuState, machine: OnlineCpus, reserved: CpuSet) -> Desired:
    """Return what the kubelet's *state* means for the tree on *machine*.

    Under policy ``none`` no pod has exclusive CPUs and float has all CPUs. When every CPU but the
    reserved ones is given away under ``strict-cpu-reservation``, the shared pool is empty and float gets the
    reserved CPUs: it must run somewhere, and those are the system's own.
    """
    return Desired(
        cpus=machine.present,
        mems=machine.memory_nodes,
        shared_pool=machine.online if state.policy == "none" else state.shared_pool or reserved,
        choices={pod_uid: state.choices(pod_uid) for pod_uid in state.assigned()},
        complete=not state.unattributed,
    )


def desire_without_kubelet(machine: OnlineCpus) -> Desired:
    """Return what *machine* wants where no kubelet shares out CPUs: all floats but what instances registered."""
    return Desired(
        cpus=machine.present, mems=machine.memory_nodes, shared_pool=machine.online, choices={}, complete=False
    )


def reconcile(desired: Desired, observed: Observed, grants: Mapping[str, CpuSet]) -> tuple[Action, ...]:
    """Return the actions that turn *observed* into *desired*, with an instance for each of *grants* as well.

    The caller has made sure that no granted CPU is another instance's (:func:`holders`).
    """
    return tuple(_actions(desired, observed, grants))


def holders(cpus: CpuSet, observed: Observed, *, but: str) -> Mapping[str, Group]:
    """Return the instances, *but* one, that hold any of *cpus*."""
    return {
        pod_uid: group
        for pod_uid, group in observed.instances().items()
        if pod_uid != but and not (group.cpus or group.effective).isdisjoint(cpus)
    }


def stale(desired: Desired, observed: Observed, grants: Mapping[str, CpuSet]) -> tuple[str, ...]:
    """Return the instances that are neither in the kubelet's state nor populated."""
    if not desired.complete:
        return ()
    known = {*desired.choices, *grants}
    return tuple(
        pod_uid for pod_uid, group in observed.instances().items() if pod_uid not in known and not group.populated
    )


def _actions(desired: Desired, observed: Observed, grants: Mapping[str, CpuSet]) -> Iterator[Action]:
    yield from _root_actions(desired, observed)
    gone = stale(desired, observed, grants)
    for pod_uid in gone:
        yield Remove(instance_group(pod_uid))

    groups = {name: group for name, group in observed.groups.items() if instance_uid(name) not in gone}
    targets = _targets(desired, groups, grants)
    for name in targets:
        if name not in groups:
            yield Make(name)
        if name not in groups or groups[name].kind != "threaded":
            yield Write(name, "cgroup.type", "threaded")
        mems = groups[name].mems if name in groups else CpuSet()
        if mems | desired.mems != mems:
            yield Write(name, "cpuset.mems", str(mems | desired.mems))

    # Shrink first: CPUs that move between two groups are in neither for a moment, and never in both.
    current = {name: group.cpus for name, group in groups.items()}
    for name, target in targets.items():
        before = current.get(name, CpuSet())
        if before & target and before & target != before:
            current[name] = before & target
            yield Write(name, "cpuset.cpus", str(current[name]))
    for name, target in targets.items():
        if current.get(name, CpuSet()) != target:
            yield Write(name, "cpuset.cpus", str(target))


def _root_actions(desired: Desired, observed: Observed) -> Iterator[Action]:
    """Build or repair the root: threaded controllers only, and never fewer CPUs and memory nodes than it has."""
    if not observed.delegated:
        yield Write(PARENT, "cgroup.subtree_control", "+cpuset")
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


def _targets(desired: Desired, groups: Mapping[str, Group], grants: Mapping[str, CpuSet]) -> Mapping[str, CpuSet]:
    """Return the CPUs that each of our groups should have; float comes first, then the instances in order.

    An instance whose pod the kubelet no longer names still has live threads, or it would be stale: it is left alone
    until they end, and no other instance gets its CPUs meanwhile. Without any CPU to float on, float is left as it is.
    """
    targets: dict[str, CpuSet] = {}
    orphaned, owned = CpuSet(), CpuSet()  # by instances whose pod is gone, and by all others
    for pod_uid, group in _instances(groups):
        if pod_uid not in grants and pod_uid not in desired.choices:
            orphaned |= group.cpus
    for pod_uid, group in _instances(groups):
        if pod_uid in grants or pod_uid not in desired.choices:
            continue
        target = _choose(group.cpus, desired.choices[pod_uid])
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
    return {FLOAT: floating, **targets} if floating else targets


def _instances(groups: Mapping[str, Group]) -> list[tuple[str, Group]]:
    named = ((instance_uid(name), group) for name, group in sorted(groups.items()))
    return [(pod_uid, group) for pod_uid, group in named if pod_uid is not None]


def _choose(current: CpuSet, choices: tuple[CpuSet, ...]) -> CpuSet:
    """Return the cpuset of an instance that may have one of *choices* and now has *current*.

    Which of its pod's containers an instance is, is not recorded. Where that is ambiguous, it gets the CPUs of all of
    them: still its pod's alone, and every vCPU keeps the CPU it is pinned to.
    """
    together = CpuSet()
    for cpus in choices:
        together |= cpus
    return current if current and current in (*choices, together) else together


def silent_fallbacks(observed: Observed, online: CpuSet) -> Mapping[str, Group]:
    """Return our groups that run on other CPUs than were written, though the kernel reported no error."""
    return {
        name: group
        for name, group in observed.groups.items()
        if group.cpus and group.kind == "threaded" and group.effective != group.cpus & online
    }
