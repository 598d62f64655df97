"""The methods that the controller serves: ``registerCgroup`` and the others.

=================  ===================  ==========================================================================
method             params               result
=================  ===================  ==========================================================================
registerCgroup     ``uuid``, ``cpuset`` ``{"cgroup_path", "float_path", "cpuset", "protocol", "memory"}``:
                   [``protocol``,       ``cgroup_path`` takes the vCPU threads, ``float_path``, beside it, all others;
                   ``overhead``,        ``memory`` are the bytes that both may have. With it travel descriptors of
                   ``charged``]         float's ``cgroup.procs``, the vCPUs' ``cgroup.threads``, the pod's own
                                        ``cgroup.procs``, float's ``cgroup.threads``, and ``memory.events`` of the
                                        instance's domain to read, in this order; the kernel's threads in the pod's
                                        own group go to float
deregisterCgroup   ``uuid``             ``{"removed": bool}``; ``false`` if there was no such instance
sealCgroup         ``uuid``             ``{"guarantee": "enforced"}``: the kernel keeps all others off its CPUs; or
                                        ``{"guarantee": "arranged", "reason"}``
unsealCgroup       ``uuid``             ``{"unsealed": bool}``; ``false`` if it was not sealed
tuneInstance       ``uuid``, ``tuning`` ``{"missing": [reason, …]}``: what of it cannot be had; it lasts as long as the
                                        instance's cgroup
listInstances      none                 ``[{"uuid", "cgroup_path", "float_path", "cpuset", "effective",
                                        "populated", "guarantee", "awaited_by", "without_seccomp", "reported"}, …]``
getStatus          none                 protocol, kubelet's policy, whether resource claims have CPUs, float, frozen
                                        reason, whether CPUs can be sealed, CPUs that change hands, faults,
                                        disturbances, oom_kills, without_seccomp
=================  ===================  ==========================================================================

``uuid`` is the uid of the instance's pod. ``overhead`` are the bytes that the instance needs besides the guest's memory: where less
is left, it is refused. With ``charged``, when the guest's memory is charged to the pod, the instance gets what the pod's own limit
leaves. Errors beyond JSON-RPC's own have codes from :data:`CODES` and carry
``data: {"reason": …, …}``.

The CPUs of an instance that is still being powered down may already be another's in the kubelet's state. Then ``conflict``
is answered at once, with ``data: {"within": seconds, "holder": its pod's uid, …}``, and a descriptor of the ``cgroup.events``
of that instance. The kernel reports its end through it (:mod:`runner.kernel.cgroup_events`), and the runner asks again. So a
wait of minutes takes no connection of the controller's, and goes on while the controller is replaced.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from weakref import WeakValueDictionary

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, explain
from runner.base.events import ControllerEvent
from runner.base.values import frozen
from runner.controller.privileged_start import DeviceFilter
from runner.controller.serve import identity
from runner.controller.serve.handover import HandoverPendingError, pending_handovers
from runner.controller.serve.identity import (
    ContainerIdentity,
    ContainerProcess,
    RequestRefusedError,
    check_agreement,
    check_container,
    check_init_process,
    identify_container,
)
from runner.controller.serve.reports import Reports
from runner.controller.tree.limits import LEAST_INSTANCE_MEMORY, memory_for, share_of
from runner.controller.tree.loop import ReconcileLoop
from runner.controller.tree.reconcile import ISOLATED, Group, Observed, floats_on, holders, is_resized
from runner.controller.tune.host_tuner import TUNING, HostTuner
from runner.controller.tune.tuning import Tuning
from runner.kernel.cgroup import MEMORY_EVENTS, Cgroup, CgroupError
from runner.kernel.device_filter import cgroup_id
from runner.kernel.kubelet_files import Frozen
from runner.kernel.peers import Peer, PeerError, Peers
from runner.kubelet.pod_cgroups import (
    INSTANCE_NAME,
    ContainerCgroup,
)
from runner.protocol.controller_client import BUSY, PROTOCOL
from runner.protocol.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND, SERVER_ERROR, RpcError, RpcResult
from runner.protocol.unix_server import Identify

log = logging.getLogger(__name__)

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "registerCgroup": ("uuid", "cpuset"),
    "deregisterCgroup": ("uuid",),
    "sealCgroup": ("uuid",),
    "unsealCgroup": ("uuid",),
    "tuneInstance": ("uuid", "tuning"),
    "listInstances": (),
    "getStatus": (),
}
"""Method → the names of its parameters, in the order in which they may be given without names."""
OPTIONAL: Mapping[str, frozenset[str]] = {"registerCgroup": frozenset({"protocol", "overhead", "charged"})}
"""Method → parameters besides, which may be left out."""

CODES = {
    identity.HOST: SERVER_ERROR,
    identity.IDENTITY: -32001,
    identity.CPUSET: -32002,
    identity.FROZEN: -32003,
    identity.CONFLICT: -32004,
    identity.BUSY: BUSY,
}
"""Reason of a refusal → code of the error."""

SECCOMP_REMEDY = (
    "give the pod seccompProfile: RuntimeDefault, or the node's kubelet seccompDefault: true, or set user.max_user_namespaces "
    "to 0 on the node"
)

MOST_WAITING = 32
"""Registrations that wait for the kubelet at a time: half of the connections, so that these do not take all of them."""
MOST_PROCESSES = 4096
"""Processes of a pod that are looked at for a request; one that has more finds its anchor among the first, or not."""
BETWEEN_CHECKPOINTS = 64
"""Processes that are looked at, 0.02 ms each, before other requests have their turn."""


@frozen
class MemoryRequest:
    """What a registration says of memory."""

    overhead: int
    """Bytes that the instance needs besides the guest's memory; 0 if they are not named."""
    charged: bool
    """Whether the guest's memory is charged to the pod."""


@frozen
class Timeouts:
    """Seconds to wait for the kubelet, for threads to end, for an instance to end, and between two seals."""

    agreement: float = 12.0
    """For the kubelet's state and the container's cpuset to agree: its reconcile period is 10 s."""
    emptying: float = 2.0
    """For the last thread of an instance that is being deregistered to end."""
    handover: float = 600.0
    """For an instance to end whose CPUs the kubelet has given to another: ten times the grace of our example pod."""
    sealed_again: float = 1.0
    """From one seal of an instance to the next: for each the kernel rebuilds its scheduling domains, and no request is answered."""
    seals_apart: float = 0.1
    """The same between any two on the node: many pods may ask together."""


@frozen
class RpcMethods:
    """Serves requests about the cgroups that *loop* reconciles, in the hierarchy mounted at *mount*.

    *own_cpus* are the CPUs that instances may have where there is no kubelet. With *trusting* every peer may act for every
    instance.
    """

    loop: ReconcileLoop
    mount: Cgroup
    peers: Peers
    own_cpus: CpuSet
    timeouts: Timeouts
    trusting: bool
    device_filter: DeviceFilter
    tuner: HostTuner
    reports: Reports = attrs.field(factory=Reports)
    require_seccomp: bool = False
    """Whether a pod that may write the files of its groups is refused, and not only named in the log."""
    partitions_required: bool = False
    """Whether an instance is refused where the kernel does not keep all others off its CPUs."""
    most_waiting: int = MOST_WAITING
    """Registrations that wait for the kubelet at a time."""
    _walks: WeakValueDictionary[int, trio.Lock] = attrs.field(factory=WeakValueDictionary)
    """By PID namespace: of one container's requests, one at a time looks at the pod's processes."""
    _requests: WeakValueDictionary[str, trio.Lock] = attrs.field(factory=WeakValueDictionary)
    """By instance: of the requests to seal it, one at a time waits for its turn among all (:attr:`_turns`)."""
    _turns: trio.Lock = attrs.field(factory=trio.Lock)
    """Whose turn it is to seal; trio gives it in the order in which it was asked for."""
    _sealed_at: dict[str, float] = attrs.field(factory=dict)
    """When the instances of the last second were sealed, on trio's clock."""
    _waits: trio.Semaphore = attrs.field(init=False)

    @_waits.default
    def _none_waits(self) -> trio.Semaphore:
        return trio.Semaphore(self.most_waiting)

    def admit(self, identify: Identify) -> int:
        """Return the peer's container, by its PID namespace, or the process itself if it is one of the node's own.

        All peers of namespaces that were made inside of containers count as one: none of them may act for an instance.
        Raises :class:`RpcError` for a peer that is not visible from here.
        """
        try:
            peer = identify()
        except PeerError as error:
            if self.trusting:
                return 0
            self.loop.counters.refusals[identity.IDENTITY] += 1
            raise RpcError(CODES[identity.IDENTITY], explain(error), {"reason": identity.IDENTITY}) from error
        return self._key(peer)

    def _key(self, peer: Peer) -> int:
        own_namespace = self.peers.own_namespace()
        if peer.nested:
            return own_namespace
        return peer.pid if peer.pid_namespace == own_namespace else peer.pid_namespace

    def busy(self, reason: str) -> RpcError:
        """Return the error for a peer that is over a limit, and count it."""
        self.loop.counters.refusals[identity.BUSY] += 1
        return RpcError(CODES[identity.BUSY], f"cannot take more: {reason}; wait for them", {"reason": identity.BUSY})

    async def call(self, identify: Identify, method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
        """Do what the peer asks for. Raises :class:`RpcError`."""
        if method not in PARAMETERS:
            raise RpcError(METHOD_NOT_FOUND, "Method not found")
        arguments = parse_arguments(params, PARAMETERS[method], OPTIONAL.get(method, frozenset()))
        await trio.lowlevel.checkpoint()
        with self._answered(identify, method):
            return await self._act(identify, method, arguments)

    @contextmanager
    def _answered(self, identify: Identify, method: str) -> Iterator[None]:
        """Count a request, and answer it by what the block raises."""
        self.loop.counters.requests[method] += 1
        try:
            yield
        except HandoverPendingError as error:
            raise self._pending(error) from error
        except HostError as error:
            refusal = RequestRefusedError(identity.HOST, explain(error), lasting=True)
            raise self._refused(identify, method, refusal) from error
        except RequestRefusedError as error:
            raise self._refused(identify, method, error) from error

    async def prove_speaker(
        self, identify: Identify, method: str, value: object
    ) -> tuple[str, ContainerIdentity | None]:
        """Return the registered instance *value*, and the peer's container, if that may speak for it. Raises :class:`RpcError`."""
        pod_uid = _pod_uid(value)
        with self._answered(identify, method):
            caller = await self._owner(identify, pod_uid)
            self._check_registered(pod_uid)
        return pod_uid, caller

    def check_speaker(self, identify: Identify, method: str, caller: ContainerIdentity | None, pod_uid: str) -> None:
        """Check that the peer, which has proved that once, may still speak for *pod_uid*. Raises :class:`RpcError`."""
        with self._answered(identify, method):
            self._check_owner(identify, caller, pod_uid)
            self._check_registered(pod_uid)

    def registered(self) -> Collection[str]:
        """Return the instances in the tree after the last pass, which each registration makes."""
        return (self.loop.observed or self.loop.observe()).instances().keys()

    def _check_registered(self, pod_uid: str) -> None:
        if not self.loop.tree.vcpus_of(pod_uid).exists():
            raise RequestRefusedError(
                identity.CONFLICT,
                f"cannot take a report of instance {pod_uid!r}: it is not registered; register it first",
                lasting=True,
            )

    async def _act(self, identify: Identify, method: str, arguments: Mapping[str, object]) -> RpcResult:
        if method in {"listInstances", "getStatus"}:
            return self._list(identify) if method == "listInstances" else self._status(identify)
        pod_uid = _pod_uid(arguments["uuid"])
        match method:
            case "registerCgroup":
                return await self._register(identify, pod_uid, arguments)
            case "deregisterCgroup":
                return await self._deregister(identify, pod_uid)
            case "sealCgroup":
                return await self._seal(identify, pod_uid)
            case "unsealCgroup":
                return await self._unseal(identify, pod_uid)
            case _:
                return await self._tune(identify, pod_uid, arguments["tuning"])

    # -- registerCgroup ----------------------------------------------------------------------------------------------

    async def _register(self, identify: Identify, pod_uid: str, arguments: Mapping[str, object]) -> RpcResult:
        # First, because only a peer that may act is worth the time to parse its list.
        caller = await self._caller(identify, pod_uid)
        asked, protocol = _cpuset(arguments["cpuset"]), _number(arguments, "protocol", PROTOCOL)
        memory = MemoryRequest(_number(arguments, "overhead", 0), charged=arguments.get("charged") is True)
        if protocol < PROTOCOL:
            raise RequestRefusedError(
                identity.HOST,
                f"cannot register instance {pod_uid!r}: its runner is older than this controller, and does not know that each "
                f"instance has a domain of its own (protocol {protocol} instead of {PROTOCOL}); update its image",
                lasting=True,
            )
        if "protocol" not in arguments and self.partitions_required:
            raise RequestRefusedError(
                identity.HOST,
                f"cannot register instance {pod_uid!r}: its client names no protocol, and so does not seal its CPUs, which "
                "--partitions required demands; use instance-runner",
                lasting=True,
            )
        self._check_seccomp(identify, pod_uid)
        register_once = partial(self._register_once, identify, caller, pod_uid, asked, memory)
        result = await self._registered(register_once, caller)
        if caller is not None:
            await self._float_kernel_threads(identify, self.mount.at(caller.cgroup), pod_uid)
        return result

    async def _registered(self, register_once: Callable[[], RpcResult], caller: ContainerIdentity | None) -> RpcResult:
        """Register as soon as the kubelet agrees; its files and the container's CPUs are followed until then."""
        await trio.lowlevel.checkpoint()
        try:
            return register_once()
        except RequestRefusedError as error:
            if error.lasting:
                raise
            refused = error
        try:
            self._waits.acquire_nowait()
        except trio.WouldBlock:
            raise self.busy(f"{self.most_waiting} registrations wait for the kubelet") from refused
        deadline = trio.current_time() + self.timeouts.agreement
        container = () if caller is None else (self.mount.at(caller.container.path).path / "cpuset.cpus",)
        try:
            with self.loop.following(container):
                while True:
                    with trio.move_on_at(deadline) as timeout:
                        await self.loop.next_pass()
                    try:
                        return register_once()
                    except RequestRefusedError as again:
                        if again.lasting or timeout.cancelled_caught:
                            raise
        finally:
            self._waits.release()

    def _register_once(
        self,
        identify: Identify,
        caller: ContainerIdentity | None,
        pod_uid: str,
        asked: CpuSet,
        memory: MemoryRequest,
    ) -> RpcResult:
        """Register without waiting, so that nothing changes between the decision and its effect."""
        self._check_alive(identify)
        self._check_cpus(caller, pod_uid, asked)
        observed = self._check_holders(pod_uid, asked)
        bytes_of = self._memory(caller, pod_uid, asked, memory, observed)
        group, floating = self.loop.tree.vcpus_of(pod_uid), self.loop.tree.float_of(pod_uid)
        existed = group.exists()
        faults = [
            fault.reason
            for fault in self.loop.pass_over({pod_uid: asked}, memory=bytes_of, seen=observed)
            if fault.pod_uid in (pod_uid, None) and not fault.unlimited
        ]
        others = floats_on(asked, self.loop.observed or self.loop.observe(), but=pod_uid)
        faults += [f"the float of pod {other!r} could not be shrunk, and runs on them still" for other in others]
        if not faults and not floating.exists():
            faults.append("no CPU is left for its float")
        if self.device_filter.missing:  # asked after the pass, which makes a root that was removed
            faults.append(self.device_filter.missing)
        effective = group.effective_cpus() if not faults else CpuSet()
        if effective != asked:
            if not existed:
                group.remove()
            reason = "; ".join(faults) or f"the kernel has put '{effective}' into effect"
            raise RequestRefusedError(
                identity.HOST, f"cannot register instance {pod_uid!r} with CPUs '{asked}': {reason}", lasting=True
            )
        what = "found" if existed else "registered"
        if (more := self.loop.log_limit.due(what, pod_uid)) is not None:
            log.info(ControllerEvent.INSTANCE_REGISTERED, what, more, pod_uid, asked)
        domain = self.loop.tree.domain(pod_uid)
        control_files = [(floating, "cgroup.procs"), (group, "cgroup.threads")]
        if caller is not None:
            control_files += [(self.mount.at(caller.cgroup), "cgroup.procs"), (floating, "cgroup.threads")]
            if domain.read_if_there(MEMORY_EVENTS) is not None:
                control_files.append((domain, MEMORY_EVENTS))
        return RpcResult(
            {
                "cgroup_path": str(group.path),
                "float_path": str(floating.path),
                "cpuset": str(effective),
                "protocol": PROTOCOL,
                "memory": domain.memory_limit(),
            },
            tuple(control_files),
        )

    def _memory(
        self,
        caller: ContainerIdentity | None,
        pod_uid: str,
        asked: CpuSet,
        request: MemoryRequest,
        observed: Observed,
    ) -> Mapping[str, int]:
        """Return what the domain of *pod_uid* gets, nothing if it keeps what it has. Raises :class:`RequestRefusedError`.

        At first each gets the same. When the guest's memory is charged, what the pod's own limits leave, if that is more: the
        tables of the guest's pages come later, and are charged to the domain. What the client names is compared with that, and is
        no reason for more than the pod's share of all. All together never get more than the tree has.
        """
        limits = self.loop.limits
        runs = pod_uid in observed.domains and not observed.is_left_over(pod_uid)
        has = observed.domains[pod_uid].memory_max if runs else None
        if "memory" not in observed.offered or (has is not None and not request.charged):
            return {}
        most = max(self._most_memory(caller, asked, request.overhead), limits.instance_memory)
        others = sum(each.memory_max or 0 for uid, each in observed.domains.items() if uid != pod_uid)
        found = memory_for(most, limits, others)
        if has is not None:
            return {pod_uid: max(found, has)}
        if limits.memory_max is not None and found < (least := request.overhead or LEAST_INSTANCE_MEMORY):
            reason = f"{max(limits.memory_max - others, 0) >> 20} of the {limits.memory_max >> 20} MiB of --memory-max are left; give the "
            reason += "controller more, and reserve as much for the system"
            if most < least:
                reason = f"it may have {most >> 20}, for its pod has no larger part of the machine; give each more by --pod-memory, or the "
                reason += "pod more by limits.memory"
            raise RequestRefusedError(
                identity.HOST,
                f"cannot register instance {pod_uid!r}: it needs {least >> 20} MiB besides the guest's memory, and {reason}",
                lasting=most < least,
            )
        return {pod_uid: found if request.charged else min(found, max(limits.instance_memory, request.overhead))}

    def _most_memory(self, caller: ContainerIdentity | None, cpus: CpuSet, overhead: int) -> int:
        """Return the bytes that the instance of *caller*'s pod, with *cpus*, may have, if they are more than each gets at first.

        They are what the limits of pod and container leave, up to its share of the tree's memory: that of these limits in the
        machine's memory. Of the *overhead* that it names it may have as much as is the share of its CPUs, which are its alone: a
        container that the machine's owner has started without a limit has no other, and one on a small machine may need that.
        """
        limits = self.loop.limits
        own = share_of(len(cpus), len(self.loop.machine().online), limits)
        named = overhead if own is None else min(overhead, own)
        groups = []
        if caller is not None:
            groups = [
                self.mount.at(caller.container.path),
                *map(Cgroup, self.loop.pods.existing(caller.container.owner)),
            ]
        limited = [(group, limit) for group in groups if (limit := group.memory_limit()) is not None]
        if not limited:
            return named
        left = min(max(limit - group.memory_kept(), 0) for group, limit in limited)
        if caller is not None and caller.container.qos == "burstable":
            return min(left, named)  # its limits are no part of the machine that is its own
        share = share_of(min(limit + group.huge_page_limit() for group, limit in limited), limits.ram, limits)
        return left if share is None else min(left, max(share, named))

    def _check_holders(self, pod_uid: str, asked: CpuSet) -> Observed:
        """Check that no other instance has any of the CPUs *asked* for, and return the tree. Raises :class:`RequestRefusedError`."""
        observed = self.loop.evict()
        if self.loop.source is not None and (pending := tuple(pending_handovers(pod_uid, asked, observed))):
            raise HandoverPendingError(pod_uid, asked, pending, self.timeouts.handover)
        for other, held in holders(asked, observed, but=pod_uid).items():
            if held.populated or self.loop.source is not None:
                raise RequestRefusedError(
                    identity.CONFLICT,
                    f"cannot register instance {pod_uid!r} with CPUs '{asked}': instance {other!r} still holds "
                    f"'{held.cpus or held.effective}'; end it first",
                    lasting=False,
                    requested=str(asked),
                    holder=other,
                )
            # Without a kubelet nothing reports the end of an instance; an empty one yields to another that wants its CPUs.
            if (more := self.loop.log_limit.due("gives way", pod_uid)) is not None:
                log.info(ControllerEvent.EMPTY_INSTANCE_REMOVED, more, other, pod_uid)
            self.loop.tree.unseal(self.loop.tree.vcpus_of(other))
            self.loop.tree.vcpus_of(other).remove()
            observed = self.loop.observe()
        mine = observed.instances().get(pod_uid)
        if mine is not None and mine.populated and mine.cpus != asked and not self._is_resized(pod_uid, mine, asked):
            raise RequestRefusedError(
                identity.CONFLICT,
                f"cannot register instance {pod_uid!r} with CPUs '{asked}': its vCPUs run on '{mine.cpus}'; another container "
                "of the pod has registered them, and a pod has one instance",
                lasting=False,
                requested=str(asked),
                holder=pod_uid,
            )
        return observed

    def _is_resized(self, pod_uid: str, mine: Group, asked: CpuSet) -> bool:
        """Tell whether the container of the instance itself asks, whose CPUs the kubelet has changed."""
        state = self.loop.state
        choices = () if isinstance(state, Frozen) else state.choices(pod_uid)
        return is_resized(mine.cpus, asked, choices)

    async def _float_kernel_threads(self, identify: Identify, own: Cgroup, pod_uid: str) -> None:
        """Move the kernel's threads that work for the instance off its CPUs; its runner cannot even see them.

        QEMU starts in its pod's cgroup, to which its memory is charged, and the kernel puts the threads it starts for
        QEMU there too (``cgroup_attach_task_all``): ``vhost-`` before Linux 6.4, ``kvm-nx-lpage-recovery-`` before 6.13.
        The runner registers once more when QEMU is up.
        """
        async with self._walk(self._peer(identify)):
            for number, pid in enumerate(islice(own.each_process(), MOST_PROCESSES)):
                if number % BETWEEN_CHECKPOINTS == 0:
                    await trio.lowlevel.checkpoint()
                if self.peers.is_kernel_thread(pid):
                    try:
                        self.loop.tree.float_of(pod_uid).admit(pid)
                        if (more := self.loop.log_limit.due("kernel thread moved", pod_uid)) is not None:
                            log.info(ControllerEvent.KERNEL_THREAD_MOVED, more, pid)
                    except CgroupError as error:
                        if (more := self.loop.log_limit.due("kernel thread stays", pod_uid)) is not None:
                            why = explain(error)
                            log.warning(ControllerEvent.KERNEL_THREAD_NOT_MOVED, more, pid, why)

    def _check_seccomp(self, identify: Identify, pod_uid: str) -> None:
        """Check, or only say, that the peer cannot be root of a user namespace, as which it may mount its groups.

        Raises :class:`RequestRefusedError` if that is required.
        """
        peer = self._peer(identify)
        if peer is None or not self.loop.may_make_root(peer.pid, peer.pid_namespace):
            return
        sentence = (
            "its process runs without a seccomp profile and may make user namespaces, in which it can write the limits and "
            f"CPUs of its cgroups; {SECCOMP_REMEDY}"
        )
        if self.require_seccomp:
            raise RequestRefusedError(identity.HOST, f"cannot register instance {pod_uid!r}: {sentence}", lasting=True)
        if (more := self.loop.log_limit.due("without seccomp", pod_uid)) is not None:
            log.warning(ControllerEvent.INSTANCE_WITHOUT_SECCOMP, more, pod_uid, sentence)

    def _check_cpus(self, caller: ContainerIdentity | None, pod_uid: str, asked: CpuSet) -> None:
        online = self.loop.machine().online
        if not asked <= online:
            raise RequestRefusedError(
                identity.CPUSET,
                f"cannot register instance {pod_uid!r}: CPUs '{asked - online}' are not online",
                lasting=False,
                requested=str(asked),
                online=str(online),
            )
        scope = None if caller is None or self.trusting else self.mount.at(caller.container.path).cpus()
        if self.loop.source is None:
            allowed = self.own_cpus if scope is None or not scope else self.own_cpus & scope
            others = {
                cpu for name, group in self.loop.observe().instances().items() if name != pod_uid for cpu in group.cpus
            }
            if not asked <= allowed or not online - asked - CpuSet(others):
                raise RequestRefusedError(
                    identity.CPUSET,
                    f"cannot register instance {pod_uid!r} with CPUs '{asked}': it may have '{allowed}', and one CPU must "
                    "be left over; see --cpus",
                    lasting=True,
                    requested=str(asked),
                    allowed=str(allowed),
                )
            return
        state = self.loop.current()
        if isinstance(state, Frozen):
            raise RequestRefusedError(
                identity.FROZEN, f"cannot register instance {pod_uid!r} now: {state.reason}", lasting=False
            )
        if state.policy == "none" and not self.loop.source.has_claims():
            raise RequestRefusedError(
                identity.CPUSET,
                f"cannot register instance {pod_uid!r}: no pod of this node has CPUs of its own, because the CPU Manager's policy "
                "is 'none' and no DRA driver for CPUs is there; set cpuManagerPolicy: static, or install such a driver",
                lasting=True,
                requested=str(asked),
            )
        check_agreement(asked, state, asked if scope is None else scope, pod_uid)

    # -- sealCgroup, unsealCgroup ------------------------------------------------------------------------------------

    async def _seal(self, identify: Identify, pod_uid: str) -> RpcResult:
        caller = await self._owner(identify, pod_uid)
        reason = await self._seal_in_turn(identify, caller, pod_uid)
        if not reason:
            return RpcResult({"guarantee": "enforced"})
        if self.partitions_required:
            raise RequestRefusedError(
                identity.HOST,
                f"cannot keep all others off the CPUs of instance {pod_uid!r}: {reason}; --partitions auto goes on without",
                lasting=True,
            )
        if (more := self.loop.log_limit.due("arranged", pod_uid)) is not None:
            log.warning(ControllerEvent.INSTANCE_NOT_SEALED, more, pod_uid, reason)
        return RpcResult({"guarantee": "arranged", "reason": reason})

    async def _seal_in_turn(self, identify: Identify, caller: ContainerIdentity | None, pod_uid: str) -> str:
        """Seal the instance after those that were asked for before it; return why it is not sealed, empty if it is.

        What is not registered or is sealed takes no turn: every container of the node may ask, as often as it likes.
        """
        group = self.loop.tree.vcpus_of(pod_uid)
        async with self._requests.setdefault(pod_uid, trio.Lock()):  # each instance has one place in the order
            if not group.exists():
                return "it is not registered"
            if group.partition() == ISOLATED:
                return ""
            await trio.sleep_until(self._sealed_at.get(pod_uid, -math.inf) + self.timeouts.sealed_again)
            async with self._turns:
                await trio.sleep_until(max(self._sealed_at.values(), default=-math.inf) + self.timeouts.seals_apart)
                self._check_owner(identify, caller, pod_uid)
                return self._seal_now(pod_uid)

    def _seal_now(self, pod_uid: str) -> str:
        now = trio.current_time()
        for uid in [uid for uid, at in self._sealed_at.items() if at + self.timeouts.sealed_again < now]:
            del self._sealed_at[uid]
        self._sealed_at[pod_uid] = now
        return self.loop.seal(pod_uid)

    async def _unseal(self, identify: Identify, pod_uid: str) -> RpcResult:
        await self._owner(identify, pod_uid)
        return RpcResult({"unsealed": self._unsealed(pod_uid)})

    def _unsealed(self, pod_uid: str) -> bool:
        """Unseal the instance and return whether it was sealed."""
        # Each pass that seals ends with a look at the tree.
        group = self.loop.seen().instances().get(pod_uid)
        if group is None or not group.was_sealed:
            return False
        self.loop.pass_over({}, {pod_uid: False})
        return True

    async def _owner(self, identify: Identify, pod_uid: str) -> ContainerIdentity | None:
        """Return the peer's container as :meth:`_caller` does, if it is the one that has the instance's CPUs."""
        caller = await self._caller(identify, pod_uid)
        self._check_owner(identify, caller, pod_uid)
        return caller

    def _check_owner(self, identify: Identify, caller: ContainerIdentity | None, pod_uid: str) -> None:
        """Check that the peer lives still, and that *caller*, its container, has the CPUs of the instance."""
        self._check_alive(identify)
        group = self.loop.tree.vcpus_of(pod_uid)
        if caller is not None and self.loop.source is not None and not self.trusting and group.exists():
            # Not the CPUs in effect: a pod has none of its own while its instance is sealed.
            check_container(caller, self.mount.at(caller.container.path).cpus(), group.cpus(), pod_uid)

    # -- deregisterCgroup --------------------------------------------------------------------------------------------

    async def _deregister(self, identify: Identify, pod_uid: str) -> RpcResult:
        await self._owner(identify, pod_uid)
        group = self.loop.tree.vcpus_of(pod_uid)
        if not group.exists():
            return RpcResult({"removed": False})
        self._unsealed(pod_uid)
        with trio.move_on_after(self.timeouts.emptying):
            while not group.remove():
                await self.loop.next_pass()  # a change of its cgroup.events starts one
        if not group.remove():
            threads = " ".join(map(str, sorted(group.threads())[:8]))
            raise RequestRefusedError(
                identity.HOST,
                f"cannot deregister instance {pod_uid!r}: threads {threads} are still in {group.path}; end them, or move "
                "them to the pod's cgroup",
                lasting=True,
            )
        if (more := self.loop.log_limit.due("deregistered", pod_uid)) is not None:
            log.info(ControllerEvent.INSTANCE_DEREGISTERED, more, pod_uid)
        self.loop.pass_over({})
        return RpcResult({"removed": True})

    # -- tuneInstance ------------------------------------------------------------------------------------------------

    async def _tune(self, identify: Identify, pod_uid: str, asked: object) -> RpcResult:
        tuning = _tuning(asked)
        await self._owner(identify, pod_uid)
        domain = self.loop.tree.domain(pod_uid)
        if not domain.exists():
            raise RequestRefusedError(
                identity.CONFLICT,
                f"cannot tune instance {pod_uid!r}: it is not registered; register it first",
                lasting=True,
            )
        domain.set_attribute(TUNING, tuning.to_json())
        self.loop.observe()
        missing = await self.tuner.tune_instance(pod_uid)
        if (more := self.loop.log_limit.due("tuned", pod_uid)) is not None:
            log.info(ControllerEvent.INSTANCE_TUNED, more, pod_uid, tuning.to_json())
        return RpcResult({"missing": list(missing)})

    # -- listInstances, getStatus ------------------------------------------------------------------------------------

    def _list(self, identify: Identify) -> RpcResult:
        """List every instance to the node's own processes, and to a container only its own; none to one that is in float."""
        mine, without_seccomp = self._visible(identify), self.loop.without_seccomp()
        observed = self.loop.seen()
        pending = self.loop.handovers()
        return RpcResult(
            [
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
                    **self._guarantee(pod_uid, group),
                }
                for pod_uid, group in sorted(observed.instances().items())
                if mine is None or pod_uid == mine
            ]
        )

    def _guarantee(self, pod_uid: str, group: Group) -> dict[str, str]:
        if group.partition == ISOLATED:
            return {"guarantee": "enforced"}
        return {"guarantee": "arranged", "reason": self.loop.not_sealed(pod_uid)}

    def _visible(self, identify: Identify) -> str | None:
        if self.trusting or (peer := identify()).pid_namespace == self.peers.own_namespace():
            return None
        container = self.loop.pods.container(peer.cgroup)
        return container.owner if container is not None else ""

    def _status(self, identify: Identify) -> RpcResult:
        """Return the controller's state; of other pods a container learns no more than how many instances there are."""
        mine = self._visible(identify)
        observed = self.loop.seen()
        state = self.loop.state
        return RpcResult(
            {
                "protocol": PROTOCOL,
                "root": str(self.loop.tree.root.path),
                "float_path": str(self.loop.tree.float_of(mine).path) if mine else None,
                "float_cpuset": str(self.loop.float_cpus()),
                "instances": len(observed.instances()),
                "kubelet": self.loop.source is not None,
                "policy": None if isinstance(state, Frozen) else state.policy,
                "claims": self.loop.source is not None and self.loop.source.has_claims(),
                "shared_pool": None if isinstance(state, Frozen) else str(state.shared_pool),
                "frozen": self.loop.frozen() or None,
                "partitions": self.loop.no_partitions() or "enforced",
                "arranged": [
                    {"uuid": pod_uid, "reason": reason}
                    for pod_uid, group in sorted(observed.instances().items())
                    if mine in (None, pod_uid) and (reason := self._guarantee(pod_uid, group).get("reason"))
                ],
                "handovers": [
                    {"uuid": each.pod_uid, "holder": each.holder, "cpuset": str(each.cpus)}
                    for each in self.loop.handovers()
                    if mine is None or each.pod_uid == mine
                ],
                "faults": [
                    *filter(None, [self.device_filter.missing]),
                    *(fault.reason for fault in self.loop.faults if mine is None or fault.pod_uid in (None, mine)),
                ],
                "disturbances": list(self.tuner.reasons) if mine is None else None,
                "oom_kills": {
                    pod_uid: domain.oom_kills
                    for pod_uid, domain in sorted(observed.domains.items())
                    if domain.oom_kills and mine in (None, pod_uid)
                },
                "without_seccomp": sorted(each for each in self.loop.without_seccomp() if mine in (None, each)),
                "trusting": self.trusting,
            }
        )

    # -- the caller --------------------------------------------------------------------------------------------------

    async def _caller(self, identify: Identify, pod_uid: str) -> ContainerIdentity | None:
        """Return the peer's container, if it may act for *pod_uid*; ``None`` if every peer may and this one has none.

        It stays true as long as the peer lives (:meth:`_check_alive`): the init process of a container cannot leave its PID
        namespace, and the path of a container's cgroup names its pod for good.
        """
        peer = self._peer(identify)
        if peer is None:
            await trio.lowlevel.checkpoint()
            return None
        own = self.loop.pods.container(peer.cgroup)
        if self.trusting:
            await trio.lowlevel.checkpoint()
            return None if own is None else ContainerIdentity(own, peer.cgroup)
        own_namespace = self.peers.own_namespace()
        check_init_process(peer, own_namespace)  # first, because only for such a peer processes are looked at
        witnesses = () if own is not None else await self._witnesses(peer, pod_uid)
        return identify_container(peer, own, witnesses, pod_uid, own_namespace)

    def _peer(self, identify: Identify) -> Peer | None:
        """Return the peer; ``None`` if it cannot be identified and every peer may act."""
        try:
            return identify()
        except PeerError as error:
            if self.trusting:
                return None
            raise RequestRefusedError(identity.IDENTITY, explain(error), lasting=True) from error

    def _check_alive(self, identify: Identify) -> None:
        """Check that the process that connected lives still. Raises :class:`RequestRefusedError`."""
        self._peer(identify)

    async def _witnesses(self, peer: Peer, pod_uid: str) -> tuple[ContainerProcess, ...]:
        """Return a process in the peer's PID namespace of each container of *pod_uid* that has one."""
        found: dict[ContainerCgroup, ContainerProcess] = {}
        async with self._walk(peer):
            for number, process in enumerate(islice(self.loop.pods.processes(pod_uid), MOST_PROCESSES)):
                if number % BETWEEN_CHECKPOINTS == 0:
                    await trio.lowlevel.checkpoint()
                container = process.container
                if container not in found and self.peers.namespace(process.pid) == peer.pid_namespace:
                    made_as = cgroup_id(self.mount.at(container.path).path)
                    if made_as is not None:  # else it has just been removed
                        found[container] = ContainerProcess(container, process.cgroup, peer.pid_namespace, made_as)
        return tuple(found.values())

    def _walk(self, peer: Peer | None) -> trio.Lock:
        """Return the lock that the requests of the peer's container take to look at processes."""
        return self._walks.setdefault(0 if peer is None else peer.pid_namespace, trio.Lock())

    def _pending(self, refusal: HandoverPendingError) -> RpcError:
        """Return the error with which a runner gets the descriptor that reports the end that it waits for."""
        for each in refusal.pending:
            if (more := self.loop.log_limit.due("waits", each.pod_uid)) is not None:
                log.info(
                    ControllerEvent.INSTANCE_WAITS_FOR_ANOTHER,
                    more,
                    each.pod_uid,
                    each.cpus,
                    each.holder,
                )
        events = (self.loop.tree.vcpus_of(refusal.holder), "cgroup.events")
        return RpcError(CODES[refusal.reason], str(refusal), {"reason": refusal.reason, **refusal.values}, (events,))

    def _refused(self, identify: Identify, method: str, refusal: RequestRefusedError) -> RpcError:
        self.loop.counters.refusals[refusal.reason] += 1
        try:
            key = self._key(identify())
        except PeerError:  # it has ended
            key = 0
        if (more := self.loop.log_limit.due(f"refused: {refusal.reason}", key)) is not None:
            why = str(refusal)
            log.warning(ControllerEvent.REQUEST_REFUSED, more, method, refusal.reason, why)
        return RpcError(CODES[refusal.reason], str(refusal), {"reason": refusal.reason, **refusal.values})


def parse_arguments(
    params: Mapping[str, object] | list[object], names: tuple[str, ...], optional: frozenset[str] = frozenset()
) -> Mapping[str, object]:
    """Return *params* by name: all *names*, of those in *optional* some. Raises :class:`RpcError`."""
    if isinstance(params, list):
        if len(params) != len(names):
            raise RpcError(INVALID_PARAMS, f"Invalid params: {len(params)} given, {len(names)} wanted")
        return dict(zip(names, params, strict=True))
    missing, unknown = sorted(set(names) - set(params)), sorted(set(params) - {*names, *optional})
    if missing or unknown:
        raise RpcError(INVALID_PARAMS, f"Invalid params: missing {missing}, unknown {unknown}")
    return params


def _pod_uid(value: object) -> str:
    if not isinstance(value, str) or not INSTANCE_NAME.fullmatch(value):
        raise RpcError(INVALID_PARAMS, "Invalid params: 'uuid' must be 1 to 64 of a-z, 0-9 and '-', as a pod's uid is")
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


def _number(arguments: Mapping[str, object], name: str, default: int) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise RpcError(INVALID_PARAMS, f"Invalid params: {name!r} must be a whole number")
    return value


def _tuning(value: object) -> Tuning:
    try:
        return Tuning.parse(value)
    except ValueError as error:
        raise RpcError(INVALID_PARAMS, f"Invalid params: 'tuning': {error}") from None
