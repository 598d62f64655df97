"""The methods of the controller: what ``registerCgroup`` and its siblings do.

=================  ===================  ==========================================================================
method             params               result
=================  ===================  ==========================================================================
registerCgroup     ``uuid``, ``cpuset`` ``{"cgroup_path", "float_path", "cpuset", "protocol"}``; with it travel
                                        descriptors of float's ``cgroup.procs``, the instance's
                                        ``cgroup.threads``, the pod's own ``cgroup.procs``, float's
                                        ``cgroup.threads``, in this order; the kernel's threads in the pod's
                                        group go to float
deregisterCgroup   ``uuid``             ``{"removed": bool}``; what was not there is not removed, and that is fine
listInstances      none                 ``[{"uuid", "cgroup_path", "cpuset", "effective", "populated"}, …]``
getStatus          none                 protocol, kubelet's policy, float, frozen reason, faults
=================  ===================  ==========================================================================

Errors beyond JSON-RPC's own have codes from :data:`CODES` and carry ``data: {"reason": …, …}``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import trio

from runner.controller import identity
from runner.controller.identity import (
    ContainerIdentity,
    ContainerProcess,
    RequestRefusedError,
    check_agreement,
    check_container,
    identify_container,
)
from runner.controller.loop import ReconcileLoop
from runner.controller.reconcile import ROOT, holders
from runner.cpuset import CpuSet
from runner.errors import HostError, explain
from runner.kernel.cgroup import Cgroup, CgroupError
from runner.kernel.kubelet_files import Frozen
from runner.kernel.peers import Peer, PeerError, Peers
from runner.kubelet.pod_cgroups import (
    FLOAT,
    INSTANCE_NAME,
    ContainerCgroup,
    bare_groups,
    instance_group,
    parse_bare_container,
    parse_container,
    pod_groups,
)
from runner.protocol.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND, RpcError, RpcResult

log = logging.getLogger(__name__)

PROTOCOL = 1

CODES = {
    identity.HOST: -32000,
    identity.IDENTITY: -32001,
    identity.CPUSET: -32002,
    identity.FROZEN: -32003,
    identity.CONFLICT: -32004,
    identity.BUSY: -32005,
}
"""Reason of a refusal → code of the error."""

_SHORTEST_WAIT = 0.25


@attrs.frozen
class Timeouts:
    """How long to wait for others."""

    agreement: float = 12.0
    """For the kubelet's state and the container's cpuset to agree: its reconcile period is 10 s."""
    emptying: float = 2.0
    """For the last thread of an instance that is being deregistered to end."""


@attrs.frozen
class RpcMethods:
    """Answers requests about the tree that *keeper* keeps, in the hierarchy mounted at *mount*.

    *own_cpus* are the CPUs that instances may have where there is no kubelet. *trusting* believes any peer.
    """

    keeper: ReconcileLoop
    mount: Cgroup
    peers: Peers
    own_cpus: CpuSet
    patience: Timeouts
    trusting: bool

    async def call(
        self, identify: Callable[[], Peer], method: str, params: Mapping[str, object] | list[object]
    ) -> RpcResult:
        """Do what the peer that *identify* names asks for. Raises :class:`RpcError`."""
        known = {
            "registerCgroup": ("uuid", "cpuset"),
            "deregisterCgroup": ("uuid",),
            "listInstances": (),
            "getStatus": (),
        }
        if method not in known:
            raise RpcError(METHOD_NOT_FOUND, "Method not found")
        arguments = _arguments(params, known[method])
        await trio.lowlevel.checkpoint()
        self.keeper.tally.requests[method] += 1
        try:
            match method:
                case "registerCgroup":
                    return await self._register(identify, _uid(arguments["uuid"]), _cpuset(arguments["cpuset"]))
                case "deregisterCgroup":
                    return await self._deregister(identify, _uid(arguments["uuid"]))
                case "listInstances":
                    return self._list(identify)
                case _:
                    return self._status()
        except HostError as error:
            raise self._refused(method, RequestRefusedError(identity.HOST, explain(error), lasting=True)) from error
        except RequestRefusedError as error:
            raise self._refused(method, error) from error

    # -- registerCgroup ----------------------------------------------------------------------------------------------

    async def _register(self, identify: Callable[[], Peer], uid: str, asked: CpuSet) -> RpcResult:
        await trio.lowlevel.checkpoint()
        try:
            return self._grant(identify, uid, asked)
        except RequestRefusedError as error:
            if error.lasting:
                raise
            refused = error
        with trio.move_on_after(self.patience.agreement):
            while True:
                # Nothing reports that the scope's cpuset has changed: look again soon, whatever is reported.
                with trio.move_on_after(_SHORTEST_WAIT):
                    await self.keeper.next_pass()
                try:
                    return self._grant(identify, uid, asked)
                except RequestRefusedError as error:
                    if error.lasting:
                        raise
                    refused = error
        raise refused

    def _grant(self, identify: Callable[[], Peer], uid: str, asked: CpuSet) -> RpcResult:
        """Register once, without waiting for anything, so that nothing changes between decision and deed."""
        home = self._home(identify, uid)
        self._check_cpus(home, uid, asked)
        observed = self.keeper.observe()
        for other, held in holders(asked, observed, but=uid).items():
            if held.populated or self.keeper.source is not None:
                raise RequestRefusedError(
                    identity.CONFLICT,
                    f"cannot register instance {uid!r} with CPUs '{asked}': instance {other!r} still holds "
                    f"'{held.cpus or held.effective}'; end it first",
                    lasting=False,
                    requested=str(asked),
                    holder=other,
                )
            # Without a kubelet nobody says when an instance is over; an empty one yields to who asks for its CPUs.
            log.info("empty instance gives way uuid=%s to=%s", other, uid)
            self.keeper.tree.group(instance_group(other)).remove()
        mine = observed.instances().get(uid)
        if mine is not None and mine.populated and mine.cpus != asked:
            raise RequestRefusedError(
                identity.CONFLICT,
                f"cannot register instance {uid!r} with CPUs '{asked}': its vCPUs run on '{mine.cpus}'; another container "
                "of the pod has registered them, and a pod has one instance",
                lasting=False,
                requested=str(asked),
                holder=uid,
            )
        group = self.keeper.tree.group(instance_group(uid))
        existed = group.exists()
        faults = [
            fault.reason
            for fault in self.keeper.pass_over({uid: asked})
            if fault.group in (ROOT, FLOAT, instance_group(uid))
        ]
        effective = group.effective_cpus() if not faults else CpuSet()
        if effective != asked:
            if not existed:
                group.remove()
            reason = "; ".join(faults) or f"the kernel has put '{effective}' into effect"
            raise RequestRefusedError(
                identity.HOST, f"cannot register instance {uid!r} with CPUs '{asked}': {reason}", lasting=True
            )
        log.info("instance %s uuid=%s cpus=%s", "found" if existed else "registered", uid, asked)
        floating = self.keeper.tree.floating
        passing = [(floating, "cgroup.procs"), (group, "cgroup.threads")]
        if home is not None:
            own = self.mount.at(home.cgroup)
            passing += [(own, "cgroup.procs"), (floating, "cgroup.threads")]
            self._float_kernel_threads(own)
        return RpcResult(
            {
                "cgroup_path": str(group.path),
                "float_path": str(floating.path),
                "cpuset": str(effective),
                "protocol": PROTOCOL,
            },
            tuple(passing),
        )

    def _float_kernel_threads(self, own: Cgroup) -> None:
        """Take the kernel's threads that work for the instance off its CPUs; its runner cannot even see them.

        QEMU is born in its pod's cgroup, to which its memory is charged, and the kernel puts the threads it starts for
        it there too (``cgroup_attach_task_all``): ``vhost-`` before Linux 6.4, ``kvm-nx-lpage-recovery-`` before 6.13.
        The runner registers once more when QEMU is up.
        """
        for pid in sorted(own.processes()):
            if self.peers.is_kernel_thread(pid):
                try:
                    self.keeper.tree.floating.admit(pid)
                    log.info("kernel thread moved to float pid=%d", pid)
                except CgroupError as error:
                    log.warning("kernel thread stays on the instance's CPUs pid=%d reason=%r", pid, explain(error))

    def _check_cpus(self, home: ContainerIdentity | None, uid: str, asked: CpuSet) -> None:
        online = self.keeper.machine().online
        if not asked <= online:
            raise RequestRefusedError(
                identity.CPUSET,
                f"cannot register instance {uid!r}: CPUs '{asked - online}' are not online",
                lasting=False,
                requested=str(asked),
                online=str(online),
            )
        scope = None if home is None or self.trusting else self.mount.at(home.container.path).cpus()
        if self.keeper.source is None:
            allowed = self.own_cpus if scope is None or not scope else self.own_cpus & scope
            others = {
                cpu for name, group in self.keeper.observe().instances().items() if name != uid for cpu in group.cpus
            }
            if not asked <= allowed or not online - asked - CpuSet(others):
                raise RequestRefusedError(
                    identity.CPUSET,
                    f"cannot register instance {uid!r} with CPUs '{asked}': it may have '{allowed}', and one CPU must "
                    "be left over; see --cpus",
                    lasting=True,
                    requested=str(asked),
                    allowed=str(allowed),
                )
            return
        state = self.keeper.current()
        if isinstance(state, Frozen):
            raise RequestRefusedError(
                identity.FROZEN, f"cannot register instance {uid!r} now: {state.reason}", lasting=False
            )
        if state.policy == "none":
            raise RequestRefusedError(
                identity.CPUSET,
                f"cannot register instance {uid!r}: the kubelet gives no exclusive CPUs; set cpuManagerPolicy: static",
                lasting=True,
                requested=str(asked),
            )
        check_agreement(asked, state.choices(uid), asked if scope is None else scope, uid)

    # -- deregisterCgroup --------------------------------------------------------------------------------------------

    async def _deregister(self, identify: Callable[[], Peer], uid: str) -> RpcResult:
        await trio.lowlevel.checkpoint()
        home = self._home(identify, uid)
        group = self.keeper.tree.group(instance_group(uid))
        if not group.exists():
            return RpcResult({"removed": False})
        if home is not None and self.keeper.source is not None and not self.trusting:
            check_container(home, self.mount.at(home.container.path).effective_cpus(), group.effective_cpus(), uid)
        if not group.remove():
            with trio.move_on_after(self.patience.emptying):
                while True:
                    with trio.move_on_after(_SHORTEST_WAIT):
                        await self.keeper.next_pass()  # its cgroup.events calls for one
                    if group.remove():
                        break
        if group.exists():
            threads = " ".join(map(str, sorted(group.threads())[:8]))
            raise RequestRefusedError(
                identity.HOST,
                f"cannot deregister instance {uid!r}: threads {threads} are still in {group.path}; end them, or move "
                "them to the pod's cgroup",
                lasting=True,
            )
        log.info("instance deregistered uuid=%s", uid)
        self.keeper.pass_over({})
        return RpcResult({"removed": True})

    # -- listInstances, getStatus ------------------------------------------------------------------------------------

    def _list(self, identify: Callable[[], Peer]) -> RpcResult:
        """List every instance to the node's own processes, and to a container only its own."""
        mine = self._visible(identify)
        return RpcResult(
            [
                {
                    "uuid": uid,
                    "cgroup_path": str(self.keeper.tree.group(instance_group(uid)).path),
                    "cpuset": str(group.cpus),
                    "effective": str(group.effective),
                    "populated": group.populated,
                }
                for uid, group in sorted(self.keeper.observe().instances().items())
                if mine is None or uid == mine
            ]
        )

    def _visible(self, identify: Callable[[], Peer]) -> str | None:
        if self.trusting or (peer := identify()).pid_namespace == self.peers.own_namespace():
            return None
        container = self._container(peer.cgroup)
        return container.owner if container is not None else ""

    def _status(self) -> RpcResult:
        observed = self.keeper.observe()
        floating = observed.groups.get(FLOAT)
        state = self.keeper.state
        return RpcResult(
            {
                "protocol": PROTOCOL,
                "root": str(self.keeper.tree.root.path),
                "float_path": str(self.keeper.tree.floating.path),
                "float_cpuset": str(floating.effective) if floating is not None else None,
                "instances": len(observed.instances()),
                "kubelet": self.keeper.source is not None,
                "policy": None if isinstance(state, Frozen) else state.policy,
                "shared_pool": None if isinstance(state, Frozen) else str(state.shared_pool),
                "frozen": self.keeper.frozen() or None,
                "faults": [fault.reason for fault in self.keeper.faults],
                "trusting": self.trusting,
            }
        )

    # -- who asks ----------------------------------------------------------------------------------------------------

    def _home(self, identify: Callable[[], Peer], uid: str) -> ContainerIdentity | None:
        """Return where the peer is at home, if it may speak for *uid*; ``None`` if any peer may and it has no home."""
        try:
            peer = identify()
        except PeerError as error:
            if self.trusting:
                return None
            raise RequestRefusedError(identity.IDENTITY, explain(error), lasting=True) from error
        own = self._container(peer.cgroup)
        if self.trusting:
            return None if own is None else ContainerIdentity(own, peer.cgroup)
        residents = () if own is not None else self._residents(uid)
        return identify_container(peer, own, residents, uid, self.peers.own_namespace())

    def _container(self, path: str) -> ContainerCgroup | None:
        return parse_bare_container(path) if self.keeper.source is None else parse_container(path)

    def _residents(self, uid: str) -> Iterator[ContainerProcess]:
        """Yield the processes that are in the cgroups of *uid*'s containers."""
        places = bare_groups(uid) if self.keeper.source is None else pod_groups(uid)
        for place in places:
            top = self.mount.path / place
            if top.is_dir():
                for directory in (top, *(path for path in top.rglob("*") if path.is_dir())):
                    yield from self._members(directory)

    def _members(self, directory: Path) -> Iterator[ContainerProcess]:
        path = f"/{directory.relative_to(self.mount.path)}"
        container = self._container(path)
        if container is None:
            return
        try:
            processes = Cgroup(directory).processes()
        except CgroupError:  # removed since a moment ago, or threaded: its threads are no anchor
            return
        for pid in sorted(processes):
            yield ContainerProcess(container, path, self.peers.namespace(pid))

    def _refused(self, method: str, refusal: RequestRefusedError) -> RpcError:
        self.keeper.tally.refusals[refusal.reason] += 1
        log.warning("request refused method=%s reason=%s why=%r", method, refusal.reason, str(refusal))
        return RpcError(CODES[refusal.reason], str(refusal), {"reason": refusal.reason, **refusal.values})


def _arguments(params: Mapping[str, object] | list[object], names: tuple[str, ...]) -> Mapping[str, object]:
    if isinstance(params, list):
        if len(params) != len(names):
            raise RpcError(INVALID_PARAMS, f"Invalid params: {len(params)} given, {len(names)} wanted")
        return dict(zip(names, params, strict=True))
    missing, unknown = sorted(set(names) - set(params)), sorted(set(params) - set(names))
    if missing or unknown:
        raise RpcError(INVALID_PARAMS, f"Invalid params: missing {missing}, unknown {unknown}")
    return params


def _uid(value: object) -> str:
    if not isinstance(value, str) or not INSTANCE_NAME.fullmatch(value):
        raise RpcError(
            INVALID_PARAMS, "Invalid params: 'uuid' must be 1 to 64 of a-z, 0-9 and '-', as the pod's uid is"
        )
    return value


def _cpuset(value: object) -> CpuSet:
    if not isinstance(value, str):
        raise RpcError(INVALID_PARAMS, "Invalid params: 'cpuset' must be a string like '4-7,12'")
    try:
        cpus = CpuSet.parse(value)
    except ValueError as error:
        raise RpcError(INVALID_PARAMS, f"Invalid params: 'cpuset': {error}") from None
    if not cpus:
        raise RpcError(INVALID_PARAMS, "Invalid params: 'cpuset' is empty")
    return cpus
