"""The checks of the CPUs that an instance requests: by the kubelet's state, its container, and the other instances."""

from __future__ import annotations

import logging

from runner.base.cpuset import CpuSet
from runner.base.events import ControllerEvent
from runner.controller.serve import identity
from runner.controller.serve.handover import HandoverPendingError, pending_handovers
from runner.controller.serve.identity import RequestRefusedError, check_agreement
from runner.controller.tree.loop import ReconcileLoop
from runner.controller.tree.model import Group, Observed
from runner.controller.tree.reconcile import holders, is_resized
from runner.kernel.kubelet_files import Frozen

log = logging.getLogger(__name__)


def check_cpus(loop: ReconcileLoop, pod_uid: str, asked: CpuSet, scope: CpuSet | None, own_cpus: CpuSet) -> None:
    """Check that *pod_uid* may have the CPUs *asked* for, regardless of their current holder. Raises :class:`RequestRefusedError`.

    *scope* is the ``cpuset.cpus`` of its container, ``None`` if unknown. *own_cpus* are the CPUs for instances where there is no kubelet.
    """
    online = loop.machine().online
    if not asked <= online:
        raise RequestRefusedError(
            identity.CPUSET,
            f"cannot register instance {pod_uid!r}: CPUs '{asked - online}' are not online",
            lasting=False,
            requested=str(asked),
            online=str(online),
        )
    if loop.source is None:
        allowed = own_cpus & scope if scope else own_cpus
        others = {cpu for name, group in loop.observe().instances().items() if name != pod_uid for cpu in group.cpus}
        if not asked <= allowed or not online - asked - CpuSet(others):
            raise RequestRefusedError(
                identity.CPUSET,
                f"cannot register instance {pod_uid!r} with CPUs '{asked}': it may have '{allowed}', and one CPU must be left over",
                lasting=True,
                remedy="see --cpus",
                requested=str(asked),
                allowed=str(allowed),
            )
        return
    state = loop.confirmed_state()
    if isinstance(state, Frozen):
        raise RequestRefusedError(
            identity.FROZEN, f"cannot register instance {pod_uid!r} now: {state.reason}", lasting=False
        )
    if state.policy == "none" and not loop.source.has_claims():
        raise RequestRefusedError(
            identity.CPUSET,
            f"cannot register instance {pod_uid!r}: no pod of this node has CPUs of its own (the CPU Manager's policy "
            "is 'none', and no DRA driver for CPUs is there)",
            lasting=True,
            remedy="set cpuManagerPolicy: static, or install such a driver",
            requested=str(asked),
        )
    check_agreement(asked, state, asked if scope is None else scope, pod_uid)


def check_holders(loop: ReconcileLoop, pod_uid: str, asked: CpuSet, handover: float) -> Observed:
    """Check that no other instance has any of the CPUs *asked* for, and return the tree. Raises :class:`RequestRefusedError`.

    *handover* is the time in seconds that *pod_uid* waits for the end of an instance from which the kubelet has taken them.
    """
    observed = loop.evict()
    if loop.source is not None and (pending := tuple(pending_handovers(pod_uid, asked, observed))):
        raise HandoverPendingError(pod_uid, asked, pending, handover)
    for other, held in holders(asked, observed, but=pod_uid).items():
        if held.populated or loop.source is not None:
            raise RequestRefusedError(
                identity.CONFLICT,
                f"cannot register instance {pod_uid!r} with CPUs '{asked}': instance {other!r} still holds "
                f"'{held.cpus or held.effective}'",
                lasting=False,
                remedy="end it first",
                requested=str(asked),
                holder=other,
            )
        # Without a kubelet nothing reports the end of an instance; an empty one yields to another that wants its CPUs.
        loop.log_limit.log(log.info, ControllerEvent.EMPTY_INSTANCE_REMOVED, other, pod_uid, peer=pod_uid)
        loop.tree.unseal(loop.tree.vcpus_of(other))
        loop.tree.vcpus_of(other).remove()
        observed = loop.observe()
    mine = observed.instances().get(pod_uid)
    if mine is not None and mine.populated and mine.cpus != asked and not _is_resized(loop, pod_uid, mine, asked):
        raise RequestRefusedError(
            identity.CONFLICT,
            f"cannot register instance {pod_uid!r} with CPUs '{asked}': another container of the pod has "
            f"registered its vCPUs on '{mine.cpus}'",
            lasting=False,
            remedy="run one instance in a pod",
            requested=str(asked),
            holder=pod_uid,
        )
    return observed


def _is_resized(loop: ReconcileLoop, pod_uid: str, mine: Group, asked: CpuSet) -> bool:
    """Tell whether the instance's own container sends the request, after the kubelet has changed its CPUs."""
    choices = () if isinstance(loop.state, Frozen) else loop.state.choices(pod_uid)
    return is_resized(mine.cpus, asked, choices)
