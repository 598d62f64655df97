"""The faults of the controller's cgroup tree (pure): actions without their effect, and problems that no action can fix."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.controller.tree.model import PARENT, ROOT, Desired, Observed
from runner.controller.tree.reconcile import left_behind, silent_fallbacks, withheld
from runner.kubelet.pod_cgroups import group_uid, instance_group

_NAMED = 8
"""Number of threaded groups that a fault names."""


@frozen
class Fault:
    """An action without the effect it should have: its group, the reason, and the remedy, empty if there is none."""

    group: str
    reason: str
    remedy: str = ""
    group_usable: bool = False
    """Whether only a limit or the partition is missing, so that the group can be used, and the node is ready."""

    @property
    def pod_uid(self) -> str | None:
        """The UID of the pod whose group it is, or ``None``."""
        return group_uid(self.group)

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


def standing_faults(
    root: Path, desired: Desired, observed: Observed, online: CpuSet, failed: Container[str]
) -> Iterator[Fault]:
    """Yield the faults of the tree at *root* after a pass, except for the groups whose actions have *failed*."""
    for name, group in silent_fallbacks(observed, online).items():
        if name not in failed:
            yield Fault(
                name, f"cannot hold {name} to the CPUs {group.cpus}: the kernel has {group.effective} in effect"
            )
    yield from _missing_limits(root, desired, observed)
    if used := [name for name, populated in observed.outdated.items() if populated]:
        yield Fault(
            ROOT,
            f"cannot make a domain for each instance: threaded groups are in use in {root} ({', '.join(used[:_NAMED])})",
            "drain the node",
        )


def _missing_limits(root: Path, desired: Desired, observed: Observed) -> Iterator[Fault]:
    for name in desired.limits.controllers:
        if name not in observed.offered:
            yield Fault(
                PARENT,
                f"cannot limit what is in {root} by the {name} controller: {root.parent} does not offer it",
                group_usable=True,
            )
    for pod_uid, charged in left_behind(desired, observed).items():
        yield Fault(
            instance_group(pod_uid),
            f"cannot remove {root / instance_group(pod_uid)}: {charged >> 20} MiB are charged to it that another program holds, "
            "in a memfd, in tmpfs or in a pipe",
            "end that program: until then --memory-max has that much less to give",
            group_usable=True,
        )
    for file, value in withheld(desired, observed):
        yield Fault(
            ROOT,
            f"cannot lower {root / file} to {value}: more than that is in use, or given to instances",
            f"end instances, or give --{file.replace('.', '-')} a larger value",
            group_usable=True,
        )
