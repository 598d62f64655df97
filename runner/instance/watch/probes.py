"""Probes and metrics of an instance by HTTP; imported only where the command line asks for them.

========== =================================================================================================
/healthz   200 for as long as this program answers; the body says whether the guest starts, runs or stops
/readyz    200 while the guest is ready (:mod:`runner.instance.watch.readiness`) and every thread is in its place
/metrics   text exposition format 0.0.4
========== =================================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial

import trio

from runner.base.errors import HostError, explain
from runner.base.events import InstanceEvent
from runner.instance.held import Held
from runner.instance.watch.figures import Figures
from runner.kernel.sockets import Socket
from runner.placement.threads import sentences
from runner.plan.instance import InstancePlan
from runner.plan.network_plan import BridgedPlan
from runner.protocol.http import (
    HttpResponse,
    LatestResponse,
    adopted_http_listeners,
    not_found,
    ok,
    open_http_listeners,
    serve_http,
    unavailable,
)

log = logging.getLogger(__name__)


async def show(figures: Figures, metrics: LatestResponse, target: str) -> HttpResponse:
    """Return the response to a request for *target*."""
    await trio.lowlevel.checkpoint()
    try:
        if target == "/metrics":
            return await metrics.get()
        if target == "/healthz":
            return ok(figures.supervisor.guest_state.phase)
        if target == "/readyz":
            return _ready(figures)
    except HostError as error:
        return unavailable(explain(error))
    return not_found(("/metrics", "/healthz", "/readyz"))


async def _metrics(figures: Figures) -> HttpResponse:
    from runner.protocol.exposition import instance_metrics, metrics_response  # here, as few probes scrape

    return metrics_response(instance_metrics(await figures.samples()))


def _ready(figures: Figures) -> HttpResponse:
    figures.supervisor.guest_state.ask_qemu()  # the answer is for the next probe: this one must not wait
    receipt, unready = figures.receipt(), figures.supervisor.guest_state.unready
    if receipt is None or unready:
        return unavailable(unready)
    violations = receipt.violations()
    return unavailable("\n".join(sentences(violations))) if violations else ok()


@contextmanager
def _listeners(held: Held, plan: InstancePlan, address: tuple[str, int]) -> Iterator[Sequence[Socket]]:
    """Hold the sockets that listen at *address*."""

    def listen() -> list[Socket]:
        listeners = open_http_listeners(*address)
        _log_addresses(plan, listeners)
        return listeners

    listeners = held.value("http", listen, adopted_http_listeners, lambda made: [each.fileno() for each in made])
    with ExitStack() as stack, held.guarded():
        for each in listeners:
            stack.enter_context(each)
        yield listeners


@asynccontextmanager
async def probes_served(figures: Figures, address: tuple[str, int]) -> AsyncIterator[None]:
    """Answer at *address* for as long as the block runs."""
    supervisor = figures.supervisor
    respond = partial(show, figures, LatestResponse(partial(_metrics, figures), supervisor.timeouts.metrics_kept))
    with _listeners(supervisor.held, figures.plan, address) as listeners:
        async with supervisor.background_task(partial(serve_http, listeners, respond)):
            yield


def _log_addresses(plan: InstancePlan, listeners: Sequence[Socket]) -> None:
    log.info(InstanceEvent.PROBES_SERVED, listeners[0].getsockname()[1])
    taken = [each.pod.name for each in plan.networks if isinstance(each, BridgedPlan) and each.pod is not None]
    if taken:
        log.warning(InstanceEvent.PROBES_UNREACHABLE, ", ".join(taken))
