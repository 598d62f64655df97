"""Where the figures of an instance are shown: at its own port for HTTP, and by the controller that has placed it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from runner.instance.supervisor import Supervisor
from runner.instance.watch.figures import Figures
from runner.placement.backends import ControllerPlacement
from runner.plan.instance import InstancePlan


@asynccontextmanager
async def figures_shown(
    supervisor: Supervisor, plan: InstancePlan, http: tuple[str, int] | None
) -> AsyncIterator[None]:
    """Show the figures of the instance for as long as the block runs: at *http*, and to the controller that has placed it.

    *http* is as :func:`~runner.protocol.http.parse_address` returns it.
    """
    figures, held = Figures(supervisor, plan), supervisor.held
    figures.foreign = held.current("foreign time", lambda: figures.foreign)
    supervisor.guest_state.placed = figures.placed
    async with AsyncExitStack() as stack:
        if http is not None:
            from runner.instance.watch.probes import probe_listeners, probes_served  # here, as not all serve them

            listeners = stack.enter_context(probe_listeners(held, plan, http))
            await stack.enter_async_context(probes_served(figures, listeners))
        if isinstance(plan.placement, ControllerPlacement):
            from runner.instance.watch.reports import report  # here, as not every instance has a controller

            reporting = partial(report, figures, plan.placement)
            await stack.enter_async_context(supervisor.background_task(reporting))
        yield
