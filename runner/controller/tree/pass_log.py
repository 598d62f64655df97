"""The log and the counters of the controller's passes, in each of which it reads and adapts its cgroup tree."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

import attrs

from runner.base.cpuset import CpuSet
from runner.base.events import ControllerEvent
from runner.base.rate_limit import LogRateLimit
from runner.controller.metrics import ControllerCounters
from runner.controller.tree.faults import Fault
from runner.controller.tree.model import (
    ISOLATED,
    PARENT,
    ROOT,
    Action,
    Group,
    Observed,
    Remove,
    Restrict,
    Seal,
    Unseal,
    Write,
)
from runner.controller.tree.tree import Tree
from runner.kubelet.pod_cgroups import VCPUS, group_uid

log = logging.getLogger(__name__)


@attrs.define(eq=False)
class PassLog:
    """Logs the actions and findings of passes over *tree*, and counts them in *counters*; *limit* bounds the messages that pods cause."""

    tree: Tree
    counters: ControllerCounters
    limit: LogRateLimit
    kubelet: bool
    """Whether a kubelet assigns the CPUs; without one each registration changes float."""
    faults: tuple[Fault, ...] = ()
    """The faults of the last pass, group by group."""
    last_cpus: Mapping[str, CpuSet] = attrs.field(factory=dict)
    """The cpuset of each group at the end of the last pass: any difference was made by another program."""
    _oom_kills: Mapping[str, int] | None = None
    """Pod UID → the last :attr:`~runner.controller.tree.model.Domain.oom_kills`; ``None`` before the tree was observed."""

    def count(self, outcome: str, seconds: float) -> None:
        """Count a pass, and its time."""
        self.counters.passes[outcome] += 1
        self.counters.pass_seconds += seconds

    def add_faults(self, faults: tuple[Fault, ...]) -> None:
        """Log the new ones among *faults*, and keep all."""
        for fault in faults:
            if fault in self.faults:
                continue
            # A fault of no pod is due to the kernel or this program's options, and there may be several.
            peer = fault if fault.pod_uid is None else fault.group
            if fault.group_usable:
                self.limit.log(log.warning, ControllerEvent.LIMIT_MISSING, fault.group, str(fault), peer=peer)
            else:
                self.limit.log(log.error, ControllerEvent.GROUP_FAILED, fault.group, str(fault), peer=peer)
        self.faults = faults

    def add_oom_kills(self, observed: Observed) -> None:
        """Log and count the processes that the kernel has ended since the last observation because a domain was out of memory."""
        before = self._oom_kills
        self._oom_kills = {pod_uid: domain.oom_kills for pod_uid, domain in observed.domains.items()}
        for pod_uid, domain in observed.domains.items():
            ended = 0 if before is None else domain.oom_kills - before.get(pod_uid, 0)
            if ended > 0:
                self.counters.oom_kills += ended
                self.limit.log(
                    log.warning, ControllerEvent.OUT_OF_MEMORY, pod_uid, ended, domain.memory_max, peer=pod_uid
                )

    def add_actions(self, actions: Iterable[Action], observed: Observed, granted: Collection[str]) -> None:
        """Log *actions* that have changed *observed*, except for the CPUs of the pods *granted*; count repairs and removals."""
        for action in actions:
            match action:
                case Remove(group) if group.endswith(f"/{VCPUS}"):
                    self.counters.removed += 1
                    log.info(ControllerEvent.STALE_INSTANCE_REMOVED, group_uid(group))
                case Seal(group) | Unseal(group):
                    self._log_partition(action, observed.groups[group])
                case Restrict(group, file, value) if group in (ROOT, PARENT):
                    log.info(ControllerEvent.LIMIT_WRITTEN, self.tree.group(group).path / file, value)
                case Write(group, "cpuset.cpus", value):
                    last, found, limited = self.last_cpus.get(group), observed.groups.get(group), not self.kubelet
                    if last is not None and found is not None and found.cpus != last:
                        self.counters.repairs += 1
                        limited = True
                        self.limit.log(
                            log.warning, ControllerEvent.CPUSET_CHANGED_BY_OTHERS, group, found.cpus, peer=group
                        )
                    more = self.limit.due("written", group) if limited else ""
                    if group_uid(group) not in granted and more is not None:
                        log.info(ControllerEvent.CPUSET_WRITTEN, more, group or self.tree.root.name, value)
                case _:
                    log.debug(ControllerEvent.ACTION_DONE, action)

    def _log_partition(self, action: Seal | Unseal, found: Group) -> None:
        """Log that a group was sealed or unsealed, and count it as a repair if another program had ended its partition."""
        repaired = isinstance(action, Seal) and found.was_sealed and found.partition != ISOLATED
        self.counters.repairs += repaired
        what = "sealed" if isinstance(action, Seal) else "unsealed"
        write, pod_uid = log.warning if repaired else log.info, group_uid(action.group)
        self.limit.log(
            write, ControllerEvent.INSTANCE_SEAL_CHANGED, what, pod_uid, found.partition, kind=what, peer=pod_uid
        )
