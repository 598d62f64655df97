"""Where the figures of an instance are shown: at its own port for HTTP, and by the controller that has placed it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from runner.instance.supervisor import Supervisor
from runner.instance.watch.figures import Figures
from runner.kernel.sockets import Socket
from runner.placement.backends import ControllerPlacement
from runner.plan.instance import InstancePlan


@asynccontextmanager
async def figures_shown(
    supervisor: Supervisor, plan: InstancePlan, http: tuple[str, int] | None
) -> AsyncIterator[None]:
    """Show the figures of the instance for as long as the block runs: at *http*, and to the controller that has placed it.

    *http* is as :func:`~runner.protocol.http.parse_address` returns it.
    """
    figures, carry_over = Figures(supervisor, plan), supervisor.carry_over
    async with AsyncExitStack() as held:
        listeners: Sequence[Socket] = ()
        if http is not None or carry_over.has("probes"):  # a runner before may not have counted for the controller
            with carry_over.taking("probes") as carried:
                if carried is not None:
                    figures.take_over(carried)
                if http is not None:
                    from runner.instance.watch.probes import probe_listeners  # here, as not all serve them

                    listeners = held.enter_context(probe_listeners(plan, http, carried))
        carry_over.offer("probes", lambda: figures.carried(listeners))
        supervisor.guest_state.placed = figures.placed
        if http is not None:
            from runner.instance.watch.probes import probes_served

            await held.enter_async_context(probes_served(figures, listeners))
        if isinstance(plan.placement, ControllerPlacement):
            from runner.instance.watch.reports import report  # here, as not every instance has a controller

            reporting = partial(report, figures, plan.placement)
            await held.enter_async_context(supervisor.background_task(reporting))
        yield
