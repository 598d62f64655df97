"""The socket for reports, and the check which instance a peer may report for.

=================  ===================  ==========================================================================
method             params               result
=================  ===================  ==========================================================================
reportInstance     ``uuid``, ``report`` ``{}``, when the next report is wanted. ``report`` is an object: family of
                                        metrics (:mod:`runner.protocol.instance_metrics`) → list of samples, each
                                        a list of the values of the labels and a number
=================  ===================  ==========================================================================
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import attrs

from runner.base.values import frozen
from runner.controller.serve.callers import Callers, RpcRequest
from runner.controller.serve.identity import ContainerIdentity
from runner.controller.serve.methods import Method, RpcMethods
from runner.controller.serve.parameters import checked
from runner.controller.serve.reports import Reports
from runner.controller.tree.loop import ReconcileLoop
from runner.protocol.instance_metrics import parse_report
from runner.protocol.jsonrpc import RpcResult
from runner.protocol.unix_server import Identify, SocketLimits

METHOD = "reportInstance"

LIMITS = SocketLimits(message=4096, connections=1024, newcomers=0, connections_per_peer=4, in_flight=4)
"""More instances than a node has pods. One connection of each suffices; further ones are those that replace another."""


def report_methods(callers: Callers, loop: ReconcileLoop, reports: Reports) -> RpcMethods:
    """Return the method of the socket for reports."""
    method = Method(_ReportMethod(callers, loop, reports).report, ("uuid", "report"))
    unknown = f"Method not found: this socket is for {METHOD}"
    return RpcMethods(callers, loop.counters, loop.log_limit, {METHOD: method}, unknown)


@frozen
class _ReportMethod:
    """Takes *reports* of the instances in the tree of *loop*."""

    callers: Callers
    loop: ReconcileLoop
    reports: Reports
    _proved: WeakKeyDictionary[Identify, tuple[str, ContainerIdentity | None]] = attrs.field(factory=WeakKeyDictionary)
    """Connection → the instance that its peer may report for."""

    async def report(self, request: RpcRequest) -> RpcResult:
        """Store a report, and answer when the next one is wanted."""
        proved, caller = self._proved.get(request.identify, ("", None))
        if proved == request.pod_uid:
            self.callers.check_owner(request, caller)
        else:
            caller = await self.callers.authorize(request)
        self.callers.check_registered("take a report of", request.pod_uid)
        self._proved[request.identify] = request.pod_uid, caller
        with checked("report"):
            report = parse_report(request.arguments["report"])
        await self.reports.take(request.pod_uid, report, lambda: self.loop.recently_observed().instances().keys())
        return RpcResult({})
