"""The directories that the guest shares, each served by a virtiofsd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import NamedTuple

from runner.instance.parts.daemons import connected_daemon
from runner.instance.supervisor import ConnectedDaemon, Supervisor
from runner.kernel.child_processes import Command, Process
from runner.kernel.sockets import Socket, listening_pair
from runner.plan.argv.virtiofsd import virtiofsd_argv
from runner.plan.shares import SharePlan


class HeldShare(NamedTuple):
    """A share, and its virtiofsd."""

    plan: SharePlan
    directory: int
    """A descriptor of the directory that its socket is made in."""
    daemon: ConnectedDaemon


@asynccontextmanager
async def shared(
    supervisor: Supervisor, plans: Sequence[SharePlan], directory: int
) -> AsyncIterator[tuple[HeldShare, ...]]:
    """Hold a virtiofsd for every share; its socket listens before it is started."""
    shares: list[HeldShare] = []
    async with AsyncExitStack() as stack:
        for plan in plans:
            started = partial(started_virtiofsd, supervisor, plan, directory)
            daemon = await stack.enter_async_context(connected_daemon(supervisor, f"share:{plan.tag}", started))
            shares.append(HeldShare(plan, directory, daemon))
        yield tuple(shares)


@contextmanager
def started_virtiofsd(supervisor: Supervisor, plan: SharePlan, directory: int) -> Iterator[tuple[Process, Socket]]:
    """Start the virtiofsd of a share, which the caller ends, and hold the connection that it is to serve."""
    with listening_pair(f"the share {plan.tag!r}", directory) as (listener, client):
        fd = listener.fileno()
        process = supervisor.processes.spawn(Command("virtiofsd", tuple(virtiofsd_argv(plan, f"--fd={fd}")), (fd,)))
        listener.close()
        yield process, client
