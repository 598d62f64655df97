"""The socket for reports: who may report for which instance.

=================  ===================  ==========================================================================
method             params               result
=================  ===================  ==========================================================================
reportInstance     ``uuid``, ``report`` ``{}``, when the next report is wanted. ``report`` is an object: family of
                                        metrics (:mod:`runner.protocol.instance_metrics`) → list of samples, each
                                        a list of the values of the labels and a number
=================  ===================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import attrs

from runner.base.values import frozen
from runner.controller.serve.identity import ContainerIdentity
from runner.controller.serve.methods import RpcMethods, parse_arguments
from runner.kernel.peers import Peers
from runner.protocol.instance_metrics import parse_report
from runner.protocol.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND, RpcError, RpcResult
from runner.protocol.unix_server import Identify, SocketLimits

METHOD = "reportInstance"

LIMITS = SocketLimits(message=4096, connections=1024, newcomers=0, connections_per_peer=4, in_flight=4)
"""More instances than a node has pods. One connection of each is enough; more are those that take the place of another."""


@frozen
class ReportMethods:
    """Serves the socket for reports: the peers, and whom they may speak for, are those of *methods*."""

    methods: RpcMethods
    _proved: WeakKeyDictionary[Identify, tuple[str, ContainerIdentity | None]] = attrs.field(factory=WeakKeyDictionary)
    """By connection: the instance that its peer may speak for."""

    @property
    def peers(self) -> Peers:
        """Return where peers are looked up."""
        return self.methods.peers

    def admit(self, identify: Identify) -> int:
        """Return the peer's container (:meth:`RpcMethods.admit`)."""
        return self.methods.admit(identify)

    def busy(self, reason: str) -> RpcError:
        """Return the error for a peer that is over a limit."""
        return self.methods.busy(reason)

    async def call(self, identify: Identify, method: str, params: Mapping[str, object] | list[object]) -> RpcResult:
        """Take a report, and answer it when the next one is wanted. Raises :class:`RpcError`."""
        if method != METHOD:
            raise RpcError(METHOD_NOT_FOUND, f"Method not found: this socket is for {METHOD}")
        arguments = parse_arguments(params, ("uuid", "report"))
        pod_uid, caller = self._proved.get(identify, ("", None))
        if pod_uid and pod_uid == arguments["uuid"]:
            self.methods.check_speaker(identify, METHOD, caller, pod_uid)
        else:
            self._proved[identify] = await self.methods.prove_speaker(identify, METHOD, arguments["uuid"])
            pod_uid, _ = self._proved[identify]
        try:
            report = parse_report(arguments["report"])
        except ValueError as error:
            raise RpcError(INVALID_PARAMS, f"Invalid params: 'report': {error}") from None
        await self.methods.reports.take(pod_uid, report, self.methods.registered)
        return RpcResult({})
