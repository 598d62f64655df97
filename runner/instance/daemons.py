"""The child processes other than QEMU, and what the death of each means."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import attrs
import trio

from runner.errors import RunnerError, Status, explain
from runner.instance.supervisor import Supervisor, first_of
from runner.kernel.processes import Command, Process, stop_bound
from runner.kernel.sockets import Socket, listening_pair
from runner.plan.argv.qemu import virtiofsd_argv
from runner.plan.shares import SharePlan
from runner.values import frozen

log = logging.getLogger(__name__)

STOPPED_WITHIN = 2.0
"""Seconds that a daemon may take to end after SIGTERM."""


@frozen
class Restart:
    """Start it again: at first after *first* seconds, then after twice as long each time, up to *longest*."""

    first: float
    longest: float
    forgiven: float = 10.0
    """Seconds of life after which earlier deaths no longer count."""


@frozen
class EndInstance:
    """The guest cannot live without it: power down and exit with *status*."""

    status: Status


RESTARTS: Mapping[str, Restart] = {
    "anchor": Restart(first=0.0, longest=5.0),  # at once: the pod's cgroup must not stay empty
    "dnsmasq": Restart(first=0.1, longest=10.0),  # the guest keeps its address meanwhile
}
FATAL: Mapping[str, EndInstance] = {
    "virtiofsd": EndInstance(Status.SERVICE_DIED),  # QEMU cannot reconnect
    "passt": EndInstance(Status.SERVICE_DIED),  # the same
    "qemu": EndInstance(Status.MACHINE_DIED),
}
DEATHS: Mapping[str, Restart | EndInstance] = {**RESTARTS, **FATAL}
"""What the death of each child means, by its role."""


@attrs.define
class RestartedChild:
    """A child that is started again whenever it ends."""

    process: Process
    command: Command
    """What is started the next time."""


@asynccontextmanager
async def restarted_child(supervisor: Supervisor, command: Command) -> AsyncIterator[RestartedChild]:
    """Hold a daemon that is started again, as :data:`RESTARTS` says, whenever it ends."""
    policy = RESTARTS[command.role]
    child = RestartedChild(supervisor.processes.spawn(command), command)
    try:
        async with supervisor.background_task(lambda: _restart(supervisor, policy, child)):
            yield child
    finally:
        with (
            supervisor.faults.recorded(f"stop {command.role}"),
            trio.move_on_after(stop_bound(STOPPED_WITHIN), shield=True),
        ):
            await supervisor.processes.stop(child.process, STOPPED_WITHIN)


@asynccontextmanager
async def anchored(
    supervisor: Supervisor, argv: tuple[str, ...]
) -> AsyncIterator[tuple[RestartedChild, RestartedChild]]:
    """Hold the anchors, which keep the pod's cgroup populated: two, so that one is there while the other is restarted.

    systemd ends a scope within milliseconds after it became empty, which is faster than a process can be started.
    """
    command = Command("anchor", argv)
    async with restarted_child(supervisor, command) as one, restarted_child(supervisor, command) as other:
        yield one, other


async def _restart(supervisor: Supervisor, policy: Restart, child: RestartedChild) -> None:
    pause = policy.first
    while True:
        born = trio.current_time()
        await child.process.wait()
        if trio.current_time() - born > policy.forgiven:
            pause = policy.first
        process = child.process
        supervisor.counters.restarts[process.role] += 1
        log.warning("%s %s; starting it again pause=%.1fs", process.role, process.how_it_ended(), pause)
        await trio.sleep(pause)
        pause = min(max(2 * pause, 0.1), policy.longest)
        try:
            child.process = supervisor.processes.spawn(child.command)
        except RunnerError as error:
            log.warning("%s", explain(error))
        else:
            supervisor.restarted.announce()


@frozen
class Shares:
    """The virtiofsd of each share, and the connection to it that QEMU gets."""

    daemons: tuple[Process, ...] = ()
    sockets: tuple[Socket, ...] = ()


async def first_dead(daemons: Sequence[Process]) -> Process:
    """Return the first of *daemons* that ends; without any, never return."""
    if not daemons:
        await trio.sleep_forever()

    async def ended(daemon: Process) -> Process:
        await daemon.wait()
        return daemon

    return await first_of(*(partial(ended, daemon) for daemon in daemons))


@asynccontextmanager
async def shared(supervisor: Supervisor, plans: Sequence[SharePlan], directory: int) -> AsyncIterator[Shares]:
    """Hold a virtiofsd for every share; its socket listens before it is started."""
    async with AsyncExitStack() as held:
        pairs = [await held.enter_async_context(_share(supervisor, plan, directory)) for plan in plans]
        yield Shares(tuple(daemon for daemon, _ in pairs), tuple(client for _, client in pairs))


@asynccontextmanager
async def _share(supervisor: Supervisor, plan: SharePlan, directory: int) -> AsyncIterator[tuple[Process, Socket]]:
    with listening_pair(f"the share {plan.tag!r}", directory) as (listener, client):
        command = Command("virtiofsd", tuple(virtiofsd_argv(plan, f"--fd={listener.fileno()}")), (listener.fileno(),))
        daemon = supervisor.processes.spawn(command)
        try:
            listener.close()
            yield daemon, client
        finally:
            client.close()  # the daemon ends by itself when its client disconnects
            what = f"stop the virtiofsd of {plan.tag!r}"
            with supervisor.faults.recorded(what), trio.move_on_after(stop_bound(STOPPED_WITHIN), shield=True):
                await supervisor.processes.stop(daemon, STOPPED_WITHIN)
