"""The controller's cgroup tree in the kernel: observing it, and applying the actions of :mod:`runner.controller.tree.model`."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from typing import TypeVar, assert_never

import attrs

from runner.base.cpuset import CpuSet
from runner.base.errors import explained
from runner.base.values import frozen
from runner.controller.tree.cgroup_writer import CgroupWriter
from runner.controller.tree.faults import Fault
from runner.controller.tree.held_files import FILES
from runner.controller.tree.limits import MEMORY_MAX, MEMORY_NODES, SWAP_MAX
from runner.controller.tree.model import (
    ISOLATED,
    PARENT,
    ROOT,
    Action,
    Domain,
    Evict,
    Group,
    Kill,
    Make,
    Observed,
    Remove,
    Restrict,
    Seal,
    Unseal,
    Write,
    groups_below,
)
from runner.kernel.cgroup import MEMORY_EVENTS, Cgroup, CgroupError, flat_keyed
from runner.kubelet.pod_cgroups import FLOAT, VCPUS, float_group, instance_group, instance_uid, vcpus_group

T = TypeVar("T")

MOVED_AT_ONCE = 256
"""Threads that one action moves out of a group: 0.2 ms each, and no request is answered meanwhile."""
REMOVED_AT_ONCE = 256
"""Descendant groups, made by a pod, that one action removes below a group of ours."""

_ROOT_LIMITS = (MEMORY_MAX, "memory.high", SWAP_MAX, "pids.max", "cpu.weight")
_DOMAIN_LIMITS = (*_ROOT_LIMITS, "cgroup.max.descendants", MEMORY_NODES)
_GROUP_LIMITS = ("cgroup.max.descendants", "cpu.weight")


@frozen
class Tree:
    """The controller's part of the hierarchy, below the group *root*."""

    root: Cgroup
    partition_writer: CgroupWriter | None = None
    """``None`` if no partitions are made."""

    def domain(self, pod_uid: str) -> Cgroup:
        """Return the domain of pod *pod_uid*."""
        return self.group(instance_group(pod_uid))

    def float_of(self, pod_uid: str) -> Cgroup:
        """Return the float of pod *pod_uid*."""
        return self.group(float_group(pod_uid))

    def vcpus_of(self, pod_uid: str) -> Cgroup:
        """Return the group of the vCPU threads of pod *pod_uid*."""
        return self.group(vcpus_group(pod_uid))

    def group(self, name: str) -> Cgroup:
        """Return the group that actions refer to as *name*."""
        match name.split("/"):
            case [only] if only == ROOT:
                return self.root
            case [only] if only == PARENT:
                return self.root.parent
            case names:
                return reduce(Cgroup.child, names, self.root)

    def _domains(self) -> Iterator[tuple[str, Cgroup]]:
        for name in self.root.children() if self.root.exists() else ():
            if (pod_uid := instance_uid(name)) is not None:
                yield pod_uid, self.root.child(name)

    def removed_below(self, pod_uid: str) -> int:
        """Return how many groups below the domain of *pod_uid* were removed and are kept by the kernel (``nr_dying_descendants``).

        Open sockets that were made in a group keep it, and so do ended processes that are not waited for.
        """
        stat = self.domain(pod_uid).read_if_there("cgroup.stat") or ""
        return flat_keyed(stat).get("nr_dying_descendants", 0)

    def half_full(self) -> bool:
        """Tell whether all pods together have half of the processes that they may have, or more."""
        used, most = self.root.tasks()
        return 2 * used >= most

    def crowded(self) -> Iterator[tuple[str, int]]:
        """Yield the pods that have more processes than they may, and how many.

        A pod that is gone may have none: its processes are ended anyway, but not without a kubelet, where its guest may still run.
        """
        for pod_uid, domain in self._domains():
            used, most = domain.tasks()
            if used > most > 0:
                yield pod_uid, used

    def reachable(self) -> Iterator[str]:
        """Yield the control files that pods can reach by their descriptors: all of floats and vCPUs' groups, and one of each domain."""
        for _, domain in self._domains():
            yield f"{domain.path}/{MEMORY_EVENTS}"
            for group in filter(Cgroup.exists, map(domain.child, (FLOAT, VCPUS))):
                yield from (f"{group.path}/{file}" for file in FILES)

    def observe(self) -> Observed:
        """Read the tree. Raises :class:`CgroupError` where there is no cgroup v2 with cpuset at all.

        A group that vanishes while it is read is left out.
        """
        offered = self.root.parent.controllers()
        if "cpuset" not in offered:
            raise CgroupError(
                f"cannot use {self.root.parent.path}: it offers no cpuset controller",
                errno.EOPNOTSUPP,
                remedy="the kernel must have cpuset in the version 2 hierarchy (systemd.unified_cgroup_hierarchy=1, no cgroup v1 "
                "cpuset mount)",
            )
        delegated = self.root.parent.enabled()
        if not self.root.exists():
            return Observed(offered, delegated, exists=False)
        domains, groups, outdated, enabled = {}, {}, dict(self._outdated()), self.root.enabled()
        huge_pages = tuple(self.root.huge_page_limit_files())
        observe_domain = partial(_observe_domain, limits=(*_DOMAIN_LIMITS, *huge_pages))
        for pod_uid, each in self._domains():
            if each.name in outdated or (domain := _while_there(observe_domain, each)) is None:
                continue
            domains[pod_uid] = domain
            for path, below in ((float_group(pod_uid), FLOAT), (vcpus_group(pod_uid), VCPUS)):
                if (group := _while_there(_observe, each.child(below))) is not None:
                    groups[path] = group
            if not any(path in groups and groups[path].populated for path in groups_below(pod_uid)):
                charged = _while_there(Cgroup.memory_in_use, each) if "memory" in enabled else 0
                processes, removed = each.tasks()[0], self.removed_below(pod_uid)
                domains[pod_uid] = attrs.evolve(domain, charged=charged or 0, processes=processes, removed=removed)
        return Observed(
            offered,
            delegated,
            exists=True,
            enabled=enabled,
            cpus=self.root.cpus() if "cpuset" in delegated else CpuSet(),
            mems=self.root.mems() if "cpuset" in delegated else CpuSet(),
            domains=domains,
            groups=groups,
            limits=_limits(self.root, (*_ROOT_LIMITS, *huge_pages)),
            memory_used=self.root.memory_in_use() if "memory" in delegated else 0,
            exclusive=self.root.exclusive_cpus(),
            outdated=outdated,
        )

    def _outdated(self) -> Iterator[tuple[str, bool]]:
        """Yield the names of the threaded groups beside domains, which have one float for all instances, and whether they are populated."""
        for name in self.root.children():
            if (name == FLOAT or instance_uid(name) is not None) and (
                _while_there(Cgroup.kind, group := self.root.child(name)) == "threaded"
            ):
                yield name, bool(_while_there(Cgroup.populated, group))

    def apply(self, actions: Iterable[Action], online: CpuSet) -> tuple[tuple[Action, ...], tuple[Fault, ...]]:
        """Apply *actions* in order; return those that succeeded, and the faults.

        Except for a limit, a failure stops the further actions on the same group. The kernel may accept a cpuset and silently use another
        one, so it is read back: the effective CPUs must be the *online* ones of those written.
        """
        done, faults = list[Action](), list[Fault]()
        for action in actions:
            if any(fault.group in (action.group, ROOT) and not fault.group_usable for fault in faults):
                continue
            try:
                self._perform(action, online)
                done.append(action)
            except CgroupError as error:
                usable = isinstance(action, Restrict | Seal)
                faults.append(Fault(action.group, *explained(error), group_usable=usable))
        return tuple(done), tuple(faults)

    def _perform(self, action: Action, online: CpuSet) -> None:
        group = self.group(action.group)
        match action:
            case Make():
                group.create()
            case Remove():
                # A float that has been populated again is no fault, because no other group gets its CPUs; nor is its domain.
                if not _removed(group) and group.name == VCPUS:
                    raise CgroupError(f"cannot remove {group.path}: it has been populated again", errno.EBUSY)
            case Write(_, "cpuset.cpus", value):
                asked = CpuSet.parse(value) & online
                effective = group.set_cpus(CpuSet.parse(value))
                if effective != asked and not self._is_sealed_with(group, effective, online):
                    sentence = f"cannot give {group.path} the CPUs {asked}: the kernel has put {effective} into effect"
                    raise CgroupError(sentence, errno.EBUSY)
            case Write() | Restrict():
                group.write(action.file, action.value)
            case Unseal():
                self.unseal(group)
            case Seal(_, cpus, together):
                self._seal(group, cpus, together, online)
            case Kill() | Evict():
                self._empty(action)
            case _ as never:
                assert_never(never)

    def _empty(self, action: Kill | Evict) -> None:
        group = self.group(action.group)
        if isinstance(action, Kill):
            group.kill()
            for below in reversed(self.vcpus_of(action.pod_uid).below(REMOVED_AT_ONCE)):
                below.remove()  # a group with live processes is removed by the next pass
        else:
            _evict(group, self.float_of(action.pod_uid))

    def _is_sealed_with(self, group: Cgroup, effective: CpuSet, online: CpuSet) -> bool:
        """Tell whether *group* is an isolated partition with the CPUs *effective*, on which ``cpuset.cpus`` has no effect."""
        return group.partition() == ISOLATED and effective == (group.exclusive_cpus() or CpuSet()) & online

    def unseal(self, group: Cgroup) -> None:
        """End the partition of *group*, if it is one; then neither it nor its domain has exclusive CPUs.

        The kernel returns only CPUs that the ancestors still have exclusively (``remote_partition_disable``, Linux 6.12). If another
        program has removed them from these, they would stay isolated for ever, so they are first added again.
        """
        exclusive = group.exclusive_cpus()
        try:
            for above in (self.root, group.parent):
                ours = above.exclusive_cpus()
                if exclusive and ours is not None and not exclusive <= ours:
                    above.write("cpuset.cpus.exclusive", str(ours | exclusive))
        finally:  # even if a sibling of the root has taken them: then they belong to that one
            group.end_partition()
        if group.name == VCPUS and group.parent.exclusive_cpus():
            group.parent.write("cpuset.cpus.exclusive", "")

    def _seal(self, group: Cgroup, cpus: CpuSet, together: CpuSet, online: CpuSet) -> None:
        """Make *group* an isolated partition of *cpus*, or enlarge its partition. Raises :class:`CgroupError`."""
        if self.partition_writer is None:
            raise CgroupError("the controller makes no partitions", errno.EOPNOTSUPP)
        for above, wanted in ((self.root, together), (group.parent, cpus)):
            if above.exclusive_cpus() != wanted:
                above.write("cpuset.cpus.exclusive", str(wanted))
        before = group.exclusive_cpus() if group.partition() == ISOLATED else None
        if before:
            self._extend(self.partition_writer, group, before, cpus, online)
        else:
            self._isolate(self.partition_writer, group, cpus, online)

    def _extend(self, writer: CgroupWriter, group: Cgroup, before: CpuSet, cpus: CpuSet, online: CpuSet) -> None:
        """Extend the partition *group* from *before* to *cpus*; if that fails, keep *before*. Raises :class:`CgroupError`."""
        refusal = None
        try:
            writer.extend(f"{group.parent.name}/{group.name}", cpus)
        except CgroupError as error:
            refusal = error
        state, effective = group.partition(), group.effective_cpus()
        if state == ISOLATED and effective == cpus & online:
            return
        refusal = refusal or CgroupError(f"the kernel says {state!r} with {effective}", errno.EBUSY)
        if state != ISOLATED:  # the kernel has ended it
            try:
                self._isolate(writer, group, before, online)
            except CgroupError as error:  # that is worse
                refusal = error
        sentence = f"cannot extend the isolated partition {group.path} to the CPUs {cpus}"
        raise CgroupError(sentence, refusal.errno) from refusal

    def _isolate(self, writer: CgroupWriter, group: Cgroup, cpus: CpuSet, online: CpuSet) -> None:
        """Make *group* an isolated partition of *cpus*; if that fails, undo all of it. Raises :class:`CgroupError`."""
        try:
            group.write("cpuset.cpus.exclusive", str(cpus))
            writer.isolate(f"{group.parent.name}/{group.name}")
            state, effective = group.partition(), group.effective_cpus()
        except CgroupError:
            self.unseal(group)
            raise
        if state != ISOLATED or effective != cpus & online:
            self.unseal(group)
            sentence = f"cannot make {group.path} an isolated partition of the CPUs {cpus}"
            raise CgroupError(f"{sentence}: the kernel says {state!r} with {effective}", errno.EBUSY)


def _while_there(read: Callable[[Cgroup], T], group: Cgroup) -> T | None:
    """Return the result of *read* for *group*; ``None`` if the group is gone."""
    try:
        return read(group)
    except CgroupError as error:
        if error.gone:
            return None
        raise


def _removed(group: Cgroup) -> bool:
    """Remove *group*, with the child groups that a pod has made, and return whether it is gone."""
    if group.remove():
        return True
    for below in reversed(group.below(REMOVED_AT_ONCE)):
        below.remove()
    return group.remove()


def _evict(group: Cgroup, target: Cgroup) -> None:
    """Move the threads of *group* to *target*, and remove the child groups that a pod has made."""
    _move_threads(group, target)
    for below in reversed(group.below(REMOVED_AT_ONCE)):
        with contextlib.suppress(CgroupError):  # a group that cannot have threads yet, or is gone
            _move_threads(below, target)
        below.remove()


def _move_threads(source: Cgroup, target: Cgroup) -> None:
    """Move threads from *source* to *target* until none is left or :data:`MOVED_AT_ONCE` have been tried.

    A number read earlier may belong to another thread when it is written, so each is read just before. The remaining race is harmless:
    within microseconds the thread would have to end, and a new one get its number (``idr_alloc_cyclic`` of ``kernel/pid.c`` gives a number
    again after all others). A thread of another domain cannot be moved (EOPNOTSUPP).
    """
    passed = {0}  # never 0, a thread without a number here: writing 0 would move this program
    for _ in range(MOVED_AT_ONCE):
        tid = next((tid for tid in source.each_thread() if tid not in passed), None)
        if tid is None:
            return
        try:
            target.confine(tid)
        except CgroupError as error:
            if error.errno != errno.ESRCH:
                raise
            passed.add(tid)  # it has ended


def _limits(group: Cgroup, files: Iterable[str]) -> Mapping[str, str]:
    """Return the content of those *files* that the kernel offers in *group*."""
    found = {file: group.read_if_there(file) for file in files}
    return {file: value for file, value in found.items() if value is not None}


def _observe_domain(group: Cgroup, limits: Iterable[str]) -> Domain:
    cpus = CpuSet.parse(group.read_if_there("cpuset.cpus") or "")
    return Domain(group.enabled(), cpus, group.exclusive_cpus() or CpuSet(), _limits(group, limits), group.oom_kills())


def _observe(group: Cgroup) -> Group:
    threaded = group.kind() == "threaded"
    populated = group.populated() or (group.name == VCPUS and bool(group.children()))
    limits = _limits(group, _GROUP_LIMITS)
    try:
        cpus, mems, effective = group.cpus(), group.mems(), group.effective_cpus()
        exclusive, partition = group.exclusive_cpus() or CpuSet(), group.partition()
        return Group(cpus, mems, effective, threaded, populated, limits, exclusive, partition)
    except CgroupError as error:
        if not error.gone:
            raise
        # No cpuset files: the controller is disabled in an ancestor, or the group was just removed.
        return Group(CpuSet(), CpuSet(), CpuSet(), threaded, populated, limits)
