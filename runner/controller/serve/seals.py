"""Instances as isolated partitions: ``sealCgroup`` and ``unsealCgroup``, in turns."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import attrs

from runner.base.errors import escaped
from runner.base.events import ControllerEvent
from runner.base.values import frozen
from runner.controller.serve import identity
from runner.controller.serve.callers import Callers, RpcRequest
from runner.controller.serve.identity import ContainerIdentity, RequestRefusedError
from runner.controller.serve.timeouts import Timeouts
from runner.controller.serve.turns import Turns
from runner.controller.tree.loop import ReconcileLoop
from runner.controller.tree.model import ISOLATED, Group, Requested
from runner.controller.tree.tree import Tree
from runner.kernel.cgroup import CgroupError
from runner.kubelet.pod_cgroups import NOT_SEALED, vcpus_group
from runner.protocol.jsonrpc import RpcResult

if TYPE_CHECKING:
    from runner.controller.serve.methods_json import GuaranteeDocument

log = logging.getLogger(__name__)

_MOST_REASON = 1000
"""Characters of a reason that is read from a cgroup: a pod that may make user namespaces can write it."""


@frozen
class Seals:
    """Seals the instances in the tree of *loop*, one after another; with *required*, an instance that cannot be sealed is refused."""

    callers: Callers
    loop: ReconcileLoop
    timeouts: Timeouts
    required: bool
    _turns: Turns = attrs.field(factory=Turns)
    """Turns by instance; the empty name is the node's turn, for which one request of each instance waits."""

    async def seal(self, request: RpcRequest) -> RpcResult:
        """Answer ``sealCgroup``."""
        caller = await self.callers.authorize(request)
        reason = await self._in_turn(request, caller)
        if not reason:
            return RpcResult({"guarantee": "enforced"})
        if self.required:
            raise RequestRefusedError(
                identity.HOST,
                f"cannot keep all others off the CPUs of instance {request.pod_uid!r}: {reason}",
                lasting=True,
                remedy="with --partitions auto it starts all the same",
            )
        self.loop.log_limit.log(
            log.warning, ControllerEvent.INSTANCE_NOT_SEALED, request.pod_uid, reason, peer=request.pod_uid
        )
        return RpcResult({"guarantee": "arranged", "reason": reason})

    async def unseal(self, request: RpcRequest) -> RpcResult:
        """Answer ``unsealCgroup``."""
        await self.callers.authorize(request)
        return RpcResult({"unsealed": unsealed(self.loop, request.pod_uid)})

    async def _in_turn(self, request: RpcRequest, caller: ContainerIdentity | None) -> str:
        """Seal the instance after earlier requests; return the reason if it is not sealed, empty if it is.

        An instance that is not registered, or is sealed already, takes no turn: every container of the node may ask, as often as it likes.
        """
        pod_uid, group, turns = request.pod_uid, self.loop.tree.vcpus_of(request.pod_uid), self._turns
        async with turns.of(pod_uid):
            if not group.exists():
                return "it is not registered"
            if group.partition() == ISOLATED:
                return ""
            await turns.rested(pod_uid)
            async with turns.of():
                await turns.rested()
                self.callers.check_owner(request, caller)
                turns.rest(self.timeouts.sealed_again, pod_uid)
                turns.rest(self.timeouts.seals_apart)
                return self.make(pod_uid)

    def make(self, pod_uid: str) -> str:
        """Make the group of instance *pod_uid* an isolated partition; return the reason if that fails, otherwise an empty string.

        The reason is stored with the group, for later requests.
        """
        reason = self._make(pod_uid)
        if reason != _not_sealed(self.loop.tree, pod_uid):
            with contextlib.suppress(CgroupError):  # the attribute is only information
                self.loop.tree.domain(pod_uid).set_attribute(NOT_SEALED, reason)
        return reason

    def _make(self, pod_uid: str) -> str:
        if reason := impossible(self.loop):
            return reason
        faults = self.loop.pass_over({pod_uid: Requested(sealed=True)})
        group = self.loop.recently_observed().instances().get(pod_uid)
        if group is not None and group.partition == ISOLATED:
            return ""
        if group is None or not group.populated:
            return "no thread is in its cgroup"
        reasons = [str(fault) for fault in faults if fault.group == vcpus_group(pod_uid)]
        return "; ".join(reasons) or self.loop.frozen_because or f"the kernel says {group.partition!r}"


def impossible(loop: ReconcileLoop) -> str:
    """Return the reason why no instance in the tree of *loop* can be sealed, empty if one can."""
    writer = loop.tree.partition_writer
    if writer is None:
        return "the controller's option --partitions is off"
    if not writer.missing and loop.recently_observed().exclusive is None:
        return "the kernel has no remote partitions (cpuset.cpus.exclusive); they come with Linux 6.7"
    return writer.missing


def guarantee(tree: Tree, pod_uid: str, group: Group) -> GuaranteeDocument:
    """Return whether the kernel keeps all other tasks off the CPUs of *pod_uid*; if not, with the reason of the last attempt."""
    if group.partition == ISOLATED:
        return {"guarantee": "enforced"}
    return {"guarantee": "arranged", "reason": _not_sealed(tree, pod_uid)}


def _not_sealed(tree: Tree, pod_uid: str) -> str:
    return escaped(tree.domain(pod_uid).attribute(NOT_SEALED) or "")[:_MOST_REASON]


def unsealed(loop: ReconcileLoop, pod_uid: str) -> bool:
    """Unseal the instance and return whether it was sealed."""
    # Each pass that seals ends by reading the tree.
    group = loop.recently_observed().instances().get(pod_uid)
    if group is None or not group.was_sealed:
        return False
    loop.pass_over({pod_uid: Requested(sealed=False)})
    return True
