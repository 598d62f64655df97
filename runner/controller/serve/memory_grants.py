"""The memory limit of an instance's cgroup (its domain), by the options in :mod:`runner.controller.tree.limits`."""

from __future__ import annotations

from collections.abc import Callable

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.controller.serve import identity
from runner.controller.serve.identity import RequestRefusedError
from runner.controller.tree.limits import LEAST_INSTANCE_MEMORY, Limits, memory_for, share_of
from runner.controller.tree.model import Observed
from runner.controller.tree.pods import PodCgroups
from runner.kernel.cgroup import Cgroup
from runner.kubelet.pod_cgroups import ContainerCgroup


@frozen
class MemoryRequest:
    """The memory that a registration asks for."""

    overhead: int
    """Bytes that the instance needs besides the guest's memory; 0 if not given."""
    charged: bool
    """Whether the guest's memory is charged to the pod."""


def memory_granted(
    pod_uid: str, request: MemoryRequest, read_most: Callable[[], int], limits: Limits, observed: Observed
) -> int | None:
    """Return the memory of the domain of *pod_uid*, or ``None`` if it keeps its limit. Raises :class:`RequestRefusedError`.

    At first each gets the same amount. Once the guest's memory is charged, it gets the result of *read_most* (:func:`most_memory`), if that
    is more: the guest's page tables are allocated later, and charged to the domain. The client's figure is only compared with that, and
    never raises the limit above the pod's share. Together the domains never get more than the tree has.
    """
    runs = pod_uid in observed.domains and not observed.is_left_over(pod_uid)
    has = observed.domains[pod_uid].memory_max if runs else None
    if "memory" not in observed.offered or (has is not None and not request.charged):
        return None
    most = max(read_most(), limits.instance_memory)
    others = sum(each.memory_max or 0 for uid, each in observed.domains.items() if uid != pod_uid)
    found = memory_for(most, limits, others)
    if has is not None:
        return max(found, has)
    if limits.memory_max is not None and found < (least := request.overhead or LEAST_INSTANCE_MEMORY):
        reason = (
            f"{max(limits.memory_max - others, 0) >> 20} of the {limits.memory_max >> 20} MiB of --memory-max are left"
        )
        remedy = "give the controller more, and reserve as much for the system"
        if most < least:
            reason = f"it may have {most >> 20}, for its pod has no larger part of the machine"
            remedy = "give each more by --pod-memory, or the pod more by limits.memory"
        raise RequestRefusedError(
            identity.HOST,
            f"cannot register instance {pod_uid!r}: it needs {least >> 20} MiB besides the guest's memory, and {reason}",
            lasting=most < least,
            remedy=remedy,
        )
    return found if request.charged else min(found, max(limits.instance_memory, request.overhead))


def most_memory(
    container: ContainerCgroup | None, cpus: CpuSet, overhead: int, pods: PodCgroups, limits: Limits, online: CpuSet
) -> int:
    """Return the bytes that the instance of *container*, with *cpus*, may have, if more than each gets at first.

    They are what the limits of pod and container leave, up to its share of the tree's memory, which is the share of these limits in the
    machine's memory. It may also have the *overhead* that it names, up to the share of its exclusive CPUs in those *online*: a container
    started without a memory limit has no other share, and one on a small machine may need it.
    """
    own = share_of(len(cpus), len(online), limits)
    named = overhead if own is None else min(overhead, own)
    groups = []
    if container is not None:
        groups = [pods.mount.at(container.path), *map(Cgroup, pods.existing(container.owner))]
    limited = [(group, limit) for group in groups if (limit := group.memory_limit()) is not None]
    if not limited:
        return named
    left = min(max(limit - group.memory_kept(), 0) for group, limit in limited)
    if container is not None and container.qos == "burstable":
        return min(left, named)  # its limits do not reserve a part of the machine
    share = share_of(min(limit + group.huge_page_limit() for group, limit in limited), limits.ram, limits)
    return left if share is None else min(left, max(share, named))
