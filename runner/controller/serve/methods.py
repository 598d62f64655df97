"""The methods that the controller serves, by the protocol in ``runner/controller/protocol.md``; errors have codes from :data:`CODES`.

The CPUs of an instance that is still being powered down may already be another's in the kubelet's state. Then ``conflict``
is answered at once, with ``data: {"within": seconds, "holder": its pod's uid, …}``, and a descriptor of the ``cgroup.events``
of that instance. The kernel reports its end through it (:mod:`runner.kernel.cgroup_events`), and the runner asks again. So a
wait of minutes takes no connection of the controller's, and goes on while the controller is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from runner.base.errors import HostError, explain, explained
from runner.base.events import ControllerEvent
from runner.base.rate_limit import LogRateLimit
from runner.base.values import frozen
from runner.controller.metrics import ControllerCounters
from runner.controller.serve import identity
from runner.controller.serve.callers import Callers, RpcRequest, busy_error
from runner.controller.serve.handover import HandoverPendingError
from runner.controller.serve.identity import RequestRefusedError
from runner.controller.serve.node_status import NodeStatus
from runner.controller.serve.parameters import checked, parse_arguments, parse_pod_uid
from runner.controller.serve.registrations import Registrations
from runner.controller.serve.seals import Seals
from runner.controller.serve.tuning_passes import TUNING, TuningPasses
from runner.controller.tree.loop import ReconcileLoop
from runner.controller.tune.tuner_messages import Tuning
from runner.kernel.cgroup import Cgroup, CgroupError
from runner.kernel.files import owned
from runner.kernel.peers import PeerError, Peers
from runner.protocol.jsonrpc import BUSY, METHOD_NOT_FOUND, SERVER_ERROR, Attached, RpcError, RpcResult
from runner.protocol.unix_server import Identify

log = logging.getLogger(__name__)

CODES = {
    identity.HOST: SERVER_ERROR,
    identity.IDENTITY: -32001,
    identity.CPUSET: -32002,
    identity.FROZEN: -32003,
    identity.CONFLICT: -32004,
    identity.BUSY: BUSY,
}
"""Reason of a refusal → code of the error."""


@frozen
class Method:
    """A method of a socket: the function that answers it, and the parameters of a request."""

    act: Callable[[RpcRequest], Awaitable[RpcResult]]
    parameters: tuple[str, ...] = ()
    """Their names, in the order for positional parameters; ``uuid`` is the instance."""
    optional: frozenset[str] = frozenset()
    """Further parameters, which may be left out."""


@frozen
class RpcMethods:
    """Answers the requests of *callers* by *methods*, counts them, and logs those that are refused."""

    callers: Callers
    counters: ControllerCounters
    log_limit: LogRateLimit
    methods: Mapping[str, Method]
    unknown: str = "Method not found"
    """The error message for an unknown method."""

    @property
    def peers(self) -> Peers:
        """Return the lookup of peers."""
        return self.callers.peers

    def admit(self, identify: Identify) -> int:
        """Return the key of the peer's container (:meth:`Callers.key`). Raises :class:`RpcError` for a peer that is not visible."""
        try:
            return self.callers.key(identify)
        except PeerError as error:
            if self.callers.pods.trusting:
                return 0
            self.counters.refusals[identity.IDENTITY] += 1
            sentence, remedy = explained(error)
            raise RpcError(CODES[identity.IDENTITY], sentence, {"reason": identity.IDENTITY}, remedy=remedy) from error

    def busy(self, reason: str) -> RpcError:
        """Return the error for a peer that exceeds a limit, and count it."""
        return busy_error(self.counters, reason)

    async def call(self, identify: Identify, method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
        """Carry out the peer's request. Raises :class:`RpcError`."""
        if method not in self.methods:
            raise RpcError(METHOD_NOT_FOUND, self.unknown)
        called = self.methods[method]
        arguments = parse_arguments(params, called.parameters, called.optional)
        self.counters.requests[method] += 1
        pod_uid = parse_pod_uid(arguments["uuid"]) if "uuid" in called.parameters else ""
        with self._refusals_answered(identify, method):
            return await called.act(RpcRequest(identify, arguments, pod_uid))

    @contextmanager
    def _refusals_answered(self, identify: Identify, method: str) -> Iterator[None]:
        try:
            yield
        except HandoverPendingError as error:
            raise self._pending(error) from error
        except HostError as error:
            sentence, remedy = explained(error)
            refusal = RequestRefusedError(identity.HOST, sentence, lasting=True, remedy=remedy)
            raise self._refused(identify, method, refusal) from error
        except RequestRefusedError as error:
            raise self._refused(identify, method, error) from error

    def _pending(self, refusal: HandoverPendingError) -> RpcError:
        """Return the error for a pending handover, with the descriptor that reports the end of the holder."""
        for each in refusal.pending:
            self.log_limit.log(
                log.info,
                ControllerEvent.INSTANCE_WAITS_FOR_ANOTHER,
                each.pod_uid,
                each.cpus,
                each.holder,
                peer=each.pod_uid,
            )
        return _answer(refusal, partial(reported_end, self.callers.tree.vcpus_of(refusal.holder)))

    def _refused(self, identify: Identify, method: str, refusal: RequestRefusedError) -> RpcError:
        self.counters.refusals[refusal.reason] += 1
        try:
            key = self.callers.key(identify)
        except PeerError:  # it has ended
            key = 0
        self.log_limit.log(
            log.warning,
            ControllerEvent.REQUEST_REFUSED,
            method,
            refusal.reason,
            str(refusal),
            kind=f"refused: {refusal.reason}",
            peer=key,
        )
        return _answer(refusal)


def _answer(refusal: RequestRefusedError, attached: Attached | None = None) -> RpcError:
    data = {"reason": refusal.reason, **refusal.values}
    return RpcError(CODES[refusal.reason], refusal.message, data, attached, remedy=refusal.remedy)


def reported_end(group: Cgroup, stack: ExitStack) -> Sequence[int]:
    """Open the file through which the kernel reports the end of the last process in *group*, for a client that is to wait for it."""
    try:
        return [stack.enter_context(owned(group.open("cgroup.events"))).number]
    except CgroupError as error:
        if not error.gone:
            raise
        reason = f"cannot answer: {explain(error)}"  # they have already ended
        raise RpcError(BUSY, reason, {"reason": identity.BUSY}, remedy="ask again") from error


def controller_methods(
    callers: Callers,
    loop: ReconcileLoop,
    registrations: Registrations,
    seals: Seals,
    tuning: TuningPasses,
    status: NodeStatus,
) -> RpcMethods:
    """Return the methods of the controller's socket."""
    optional = frozenset({"protocol", "overhead", "charged"})
    return RpcMethods(
        callers,
        loop.counters,
        loop.log_limit,
        {
            "registerCgroup": Method(registrations.register, ("uuid", "cpuset"), optional),
            "deregisterCgroup": Method(registrations.deregister, ("uuid",)),
            "sealCgroup": Method(seals.seal, ("uuid",)),
            "unsealCgroup": Method(seals.unseal, ("uuid",)),
            "tuneInstance": Method(partial(_tune, callers, loop, tuning), ("uuid", "tuning")),
            "listInstances": Method(status.list_instances),
            "getStatus": Method(status.get_status),
        },
    )


async def _tune(callers: Callers, loop: ReconcileLoop, host: TuningPasses, request: RpcRequest) -> RpcResult:
    pod_uid = request.pod_uid
    with checked("tuning"):
        tuning = Tuning.parse(request.arguments["tuning"])
    await callers.authorize(request)
    callers.check_registered("tune", pod_uid)
    loop.tree.domain(pod_uid).set_attribute(TUNING, tuning.to_json())
    loop.observe()
    missing = await host.tune_instance(pod_uid)
    loop.log_limit.log(log.info, ControllerEvent.INSTANCE_TUNED, pod_uid, tuning.to_json(), peer=pod_uid)
    return RpcResult({"missing": list(missing)})
