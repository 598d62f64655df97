"""The places that show an instance's figures: its own HTTP port, and the controller that has placed it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from runner.instance import optional_parts
from runner.instance.supervisor import Supervisor
from runner.placement.backends import ControllerPlacement
from runner.plan.instance import InstancePlan

if TYPE_CHECKING:
    from runner.placement.threads import Receipt


@asynccontextmanager
async def figures_shown(
    supervisor: Supervisor, plan: InstancePlan, http: tuple[str, int] | None
) -> AsyncIterator[Callable[[Receipt], None]]:
    """Show the figures of the instance for as long as the block runs: at *http*, and to the controller that has placed it.

    *http* is a result of :func:`~runner.protocol.http.parse_address`. Yields the function that
    takes the places of the threads when they are set: from then on, the time of others on the vCPUs' CPUs is counted.
    """
    placement = plan.placement
    async with AsyncExitStack() as stack:
        if http is None and not isinstance(placement, ControllerPlacement):
            # The next or the previous program may use it, even if this one shows no figures.
            supervisor.held.current("foreign time", lambda: None)
            yield lambda _: None
        else:
            figures = optional_parts.held_figures(supervisor, plan)
            if http is not None:
                await stack.enter_async_context(optional_parts.probes_served(figures, http))
            if isinstance(placement, ControllerPlacement):
                reporting = partial(optional_parts.reports(), figures, placement)
                await stack.enter_async_context(supervisor.background_task(reporting))
            yield figures.count_from
