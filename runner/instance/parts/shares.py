"""The directories that the guest shares, each served by a virtiofsd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import NamedTuple

import attrs
import trio

from runner.instance.parts.daemons import STOPPED_WITHIN
from runner.instance.supervisor import Supervisor
from runner.kernel.child_processes import Command, Process, stop_bound
from runner.kernel.sockets import Socket, listening_pair
from runner.plan.argv.virtiofsd import virtiofsd_argv
from runner.plan.shares import SharePlan


@attrs.define
class ShareDaemon:
    """The virtiofsd of a share; another one replaces it when QEMU is updated."""

    plan: SharePlan
    directory: int
    """A descriptor of the directory that its socket is made in."""
    process: Process

    def replace(self, process: Process) -> Process:
        """Let another virtiofsd serve the share; return the previous one, whose end then has no meaning."""
        before, self.process = self.process, process
        return before


class HeldShare(NamedTuple):
    """The virtiofsd of a share, and the connection to it until QEMU has it."""

    daemon: ShareDaemon
    client: Socket | None


@asynccontextmanager
async def shared(
    supervisor: Supervisor, plans: Sequence[SharePlan], directory: int
) -> AsyncIterator[tuple[HeldShare, ...]]:
    """Hold a virtiofsd for every share; its socket listens before it is started."""
    async with AsyncExitStack() as held:
        yield tuple([await held.enter_async_context(_share(supervisor, plan, directory)) for plan in plans])


@contextmanager
def started_virtiofsd(supervisor: Supervisor, plan: SharePlan, directory: int) -> Iterator[tuple[Process, Socket]]:
    """Start the virtiofsd of a share, which the caller ends, and hold the connection that it is to serve."""
    with listening_pair(f"the share {plan.tag!r}", directory) as (listener, client):
        fd = listener.fileno()
        process = supervisor.processes.spawn(Command("virtiofsd", tuple(virtiofsd_argv(plan, f"--fd={fd}")), (fd,)))
        listener.close()
        yield process, client


@asynccontextmanager
async def _share(supervisor: Supervisor, plan: SharePlan, directory: int) -> AsyncIterator[HeldShare]:
    with ExitStack() as held:
        client: Socket | None = None

        def start() -> Process:
            nonlocal client
            process, client = held.enter_context(started_virtiofsd(supervisor, plan, directory))
            return process

        name = f"share:{plan.tag}"
        process = supervisor.held.child(name, supervisor.processes, start, lambda: daemon.process)
        daemon = ShareDaemon(plan, directory, process)
        try:
            yield HeldShare(daemon, client)
        finally:
            held.close()  # the daemon ends by itself when its client disconnects
            what = f"stop the virtiofsd of {plan.tag!r}"
            with supervisor.faults.recorded(what), trio.move_on_after(stop_bound(STOPPED_WITHIN), shield=True):
                await supervisor.processes.stop(daemon.process, STOPPED_WITHIN)
