"""``listInstances`` and ``getStatus``: the information about instances and controller that a peer may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from runner.base.errors import explained
from runner.base.values import frozen
from runner.controller.privileged_process import PrivilegedProcess
from runner.controller.privileged_start import DeviceFilter
from runner.controller.serve.callers import Callers, RpcRequest
from runner.controller.serve.handover import handovers
from runner.controller.serve.reports import Reports
from runner.controller.serve.seals import guarantee, impossible
from runner.controller.serve.seccomp import SeccompCheck
from runner.controller.serve.tuning_passes import TuningPasses
from runner.controller.tree.loop import ReconcileLoop
from runner.kernel.kubelet_files import Frozen
from runner.protocol.controller_client import PROTOCOL
from runner.protocol.jsonrpc import RpcResult

if TYPE_CHECKING:
    from runner.controller.serve.methods_json import InstancesDocument, ListedInstanceDocument, NodeStatusDocument


@frozen
class NodeStatus:
    """Shows the tree of *loop*, and the other components' data about its instances."""

    callers: Callers
    loop: ReconcileLoop
    device_filter: DeviceFilter
    processes: tuple[PrivilegedProcess, ...]
    seccomp: SeccompCheck
    reports: Reports
    tuning: TuningPasses

    async def list_instances(self, request: RpcRequest) -> RpcResult:
        """List every instance to the node's own processes, to a container only its own, and none to a process in float."""
        await trio.lowlevel.checkpoint()
        mine, observed = self.callers.pod_of(request.identify), self.loop.recently_observed()
        without_seccomp = self.seccomp.without(observed.floats())
        pending = tuple(handovers(self.loop.state, observed))
        instances: list[ListedInstanceDocument] = [
            {
                "uuid": pod_uid,
                "cgroup_path": str(self.loop.tree.vcpus_of(pod_uid).path),
                "float_path": str(self.loop.tree.float_of(pod_uid).path),
                "memory": observed.domains[pod_uid].memory_max,
                "oom_kills": observed.domains[pod_uid].oom_kills,
                "cpuset": str(group.cpus),
                "effective": str(group.effective),
                "populated": group.populated,
                "awaited_by": [
                    each.pod_uid
                    for each in pending
                    if each.holder == pod_uid and (mine is None or each.pod_uid == mine)
                ],
                "without_seccomp": pod_uid in without_seccomp,
                "reported": self.reports.to_json(pod_uid),
                **guarantee(self.loop.tree, pod_uid, group),
            }
            for pod_uid, group in sorted(observed.instances().items())
            if mine is None or pod_uid == mine
        ]
        document: InstancesDocument = {"version": 1, "instances": instances}
        return RpcResult(document)

    async def get_status(self, request: RpcRequest) -> RpcResult:
        """Show the controller's state; a container learns only the number of the other pods' instances."""
        await trio.lowlevel.checkpoint()
        mine, observed = self.callers.pod_of(request.identify), self.loop.recently_observed()
        state, source = self.loop.state, self.loop.source
        lost = [self.device_filter.missing, *(each.ended_error() for each in self.processes if each.lost)]
        faults = [explained(error) for error in lost if error is not None]
        faults += [
            (fault.reason, fault.remedy) for fault in self.loop.faults if mine is None or fault.pod_uid in (None, mine)
        ]
        document: NodeStatusDocument = {
            "version": 1,
            "protocol": PROTOCOL,
            "root": str(self.loop.tree.root.path),
            "float_path": str(self.loop.tree.float_of(mine).path) if mine else None,
            "float_cpuset": str(self.loop.float_cpus()),
            "instances": len(observed.instances()),
            "kubelet": source is not None,
            "policy": None if isinstance(state, Frozen) else state.policy,
            "claims": source is not None and source.has_claims(),
            "shared_pool": None if isinstance(state, Frozen) else str(state.shared_pool),
            "frozen": self.loop.frozen_because or None,
            "partitions": impossible(self.loop) or "enforced",
            "arranged": [
                {"uuid": pod_uid, "reason": reason}
                for pod_uid, group in sorted(observed.instances().items())
                if mine in (None, pod_uid) and (reason := guarantee(self.loop.tree, pod_uid, group).get("reason"))
            ],
            "handovers": [
                {"uuid": each.pod_uid, "holder": each.holder, "cpuset": str(each.cpus)}
                for each in handovers(state, observed)
                if mine is None or each.pod_uid == mine
            ],
            "faults": [sentence for sentence, _ in faults],
            "remedies": {sentence: remedy for sentence, remedy in faults if remedy},
            "disturbances": list(self.tuning.reasons) if mine is None else None,
            "oom_kills": {
                pod_uid: domain.oom_kills
                for pod_uid, domain in sorted(observed.domains.items())
                if domain.oom_kills and mine in (None, pod_uid)
            },
            "without_seccomp": sorted(each for each in self.seccomp.without(observed.floats()) if mine in (None, each)),
            "trusting": self.callers.pods.trusting,
        }
        return RpcResult(document)
