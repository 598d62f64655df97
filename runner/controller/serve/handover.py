"""Handovers of CPUs: the kubelet has given them to a pod while another pod's instance still runs on them (pure).

When a static pod is removed, or a pod deleted with ``--force``, the kubelet takes its CPUs (``removeStaleState`` of
``pkg/kubelet/cm/cpumanager/cpu_manager.go``) while its guest is still being powered down, and gives them to the next pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runner.base.cpuset import CpuSet
from runner.base.values import frozen
from runner.controller.serve.identity import CONFLICT, RequestRefusedError
from runner.controller.tree.model import Observed
from runner.controller.tree.reconcile import holders
from runner.kernel.kubelet_files import Frozen
from runner.kubelet.state import CpuState


@frozen
class Handover:
    """The *cpus* that the kubelet has given to pod *pod_uid*, and that the instance of pod *holder* still runs on."""

    pod_uid: str
    holder: str
    cpus: CpuSet


class HandoverPendingError(RequestRefusedError):
    """Instance *pod_uid* cannot have the CPUs *asked* for before the holders of *pending* have ended.

    *within* is how long it waits for that, in seconds. *holder* is the first one to wait for.
    """

    def __init__(self, pod_uid: str, asked: CpuSet, pending: Sequence[Handover], within: float) -> None:
        self.holder = pending[0].holder
        holding = " and ".join(f"instance {each.holder!r} still runs on '{each.cpus}'" for each in pending)
        super().__init__(
            CONFLICT,
            f"cannot register instance {pod_uid!r} with CPUs '{asked}': {holding}, and the kubelet has taken them from it",
            lasting=True,
            remedy=f"wait for its end, or `crictl stop` what `crictl ps --label io.kubernetes.pod.uid={self.holder}` names",
            requested=str(asked),
            holder=self.holder,
            within=within,
        )
        self.pending = tuple(pending)


def handovers(state: CpuState | Frozen, observed: Observed) -> Iterator[Handover]:
    """Yield the handovers, including those to pods without an instance; none while the kubelet's *state* is unknown."""
    if isinstance(state, Frozen):
        return
    for pod_uid in state.assigned():
        for cpus in state.choices(pod_uid):
            yield from pending_handovers(pod_uid, cpus, observed)


def pending_handovers(pod_uid: str, cpus: CpuSet, observed: Observed) -> Iterator[Handover]:
    """Yield the handovers for which pod *pod_uid* waits: other pods' populated instances on *cpus*, its CPUs from the kubelet."""
    for holder, group in holders(cpus, observed, but=pod_uid).items():
        if group.populated:
            yield Handover(pod_uid, holder, (group.cpus or group.effective) & cpus)
