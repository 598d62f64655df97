"""The tree of groups in the kernel: observing it, and applying what :mod:`runner.controller.reconcile` decided."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from runner.controller.reconcile import PARENT, ROOT, Action, Group, Make, Observed, Remove, Write
from runner.cpuset import CpuSet
from runner.errors import explain
from runner.kernel.cgroup import Cgroup, CgroupError
from runner.kubelet.pod_cgroups import FLOAT, instance_uid
from runner.values import frozen


@frozen
class Fault:
    """An action without the effect it should have: its group, and the reason."""

    group: str
    reason: str


@frozen
class Tree:
    """The controller's part of the hierarchy, below the group *root*."""

    root: Cgroup

    @property
    def floating(self) -> Cgroup:
        """The group of all threads without a CPU of their own."""
        return self.root.child(FLOAT)

    def group(self, name: str) -> Cgroup:
        """Return the group that the actions call *name*."""
        if name == ROOT:
            return self.root
        return self.root.parent if name == PARENT else self.root.child(name)

    def observe(self) -> Observed:
        """Read the tree as it is. Raises :class:`CgroupError` where there is no cgroup v2 with cpuset at all.

        A group that vanishes while it is read is left out.
        """
        if "cpuset" not in self.root.parent.controllers():
            raise CgroupError(
                f"cannot use {self.root.parent.path}: it offers no cpuset controller; the kernel must have cpuset in "
                "the version 2 hierarchy (systemd.unified_cgroup_hierarchy=1, no cgroup v1 cpuset mount)",
                errno.EOPNOTSUPP,
            )
        delegated = "cpuset" in self.root.parent.enabled()
        if not self.root.exists():
            return Observed(delegated=delegated, exists=False)
        groups = {}
        for name in self.root.children():
            if name == FLOAT or instance_uid(name) is not None:
                group = _observe(self.root.child(name))
                if group is not None:
                    groups[name] = group
        return Observed(
            delegated=delegated,
            exists=True,
            enabled=self.root.enabled(),
            cpus=self.root.cpus() if delegated else CpuSet(),
            mems=self.root.mems() if delegated else CpuSet(),
            groups=groups,
        )

    def apply(self, actions: Iterable[Action], online: CpuSet) -> tuple[Fault, ...]:
        """Apply *actions* in order; a failure is returned, and stops the actions on its own group only.

        Where the kernel accepts a cpuset and silently runs something else, the read-back shows it: of the CPUs
        written, those *online* must be the ones in effect.
        """
        faults: dict[str, Fault] = {}
        for action in actions:
            if action.group in faults or ROOT in faults:
                continue
            try:
                reason = self._perform(action, online)
            except CgroupError as error:
                reason = explain(error)
            if reason:
                faults[action.group] = Fault(action.group, reason)
        return tuple(faults.values())

    def _perform(self, action: Action, online: CpuSet) -> str:
        group = self.group(action.group)
        match action:
            case Make():
                group.create()
            case Remove():
                if not group.remove():
                    return f"cannot remove {group.path}: it has been populated again"
            case Write(_, "cpuset.cpus", value):
                asked = CpuSet.parse(value) & online
                effective = group.set_cpus(CpuSet.parse(value))
                if effective != asked:
                    return f"cannot give {group.path} the CPUs {asked}: the kernel has put {effective} into effect"
            case Write():
                group.write(action.file, action.value)
        return ""


def _observe(group: Cgroup) -> Group | None:
    try:
        kind, populated = group.kind(), group.populated()
    except CgroupError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return None
        raise
    try:
        return Group(
            kind=kind, cpus=group.cpus(), mems=group.mems(), effective=group.effective_cpus(), populated=populated
        )
    except CgroupError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        # No cpuset files: the controller is switched off in the root (or the group is gone since a moment ago).
        return Group(kind=kind, cpus=CpuSet(), mems=CpuSet(), effective=CpuSet(), populated=populated)
