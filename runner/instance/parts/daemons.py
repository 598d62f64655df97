"""The child processes other than QEMU: those that are started again when they end, and those that serve QEMU."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import NamedTuple

import attrs
import trio

from runner.base.errors import HostError, RunnerError, explain
from runner.base.events import InstanceEvent
from runner.base.tasks import first_of
from runner.base.values import define
from runner.instance.gate import Kind
from runner.instance.supervisor import ConnectedDaemon, Supervisor, kernel_time, loop_time
from runner.kernel.child_processes import Command, Process, ProcessRecord, stop_bound
from runner.kernel.sockets import Socket
from runner.placement.children import RESTARTS, Restart

log = logging.getLogger(__name__)

SERVES_WITHIN = 10.0
"""Seconds within which a daemon says that it serves: dnsmasq takes 4 ms."""

STOPPED_WITHIN = 2.0
"""Seconds that a daemon may take to end after SIGTERM."""


class RestartedChildRecord(NamedTuple):
    """The state of a :class:`RestartedChild` that the next program needs."""

    process: ProcessRecord
    born: float
    """Start time, on the monotonic clock."""
    pause: float
    down: bool


@define
class RestartedChild:
    """A child that is started again whenever it ends."""

    process: Process
    command: Command
    """The command of the next start."""
    pause: float
    """Seconds to wait before the next start."""
    born: float = attrs.field(factory=trio.current_time)
    down: bool = False
    """Whether its end was logged and it is about to be started again."""

    def record(self, clock: trio.abc.Clock) -> RestartedChildRecord:
        """Return the state that the next program needs to continue; *clock* is the event loop's."""
        return RestartedChildRecord(self.process.record(), kernel_time(self.born, clock), self.pause, self.down)


@asynccontextmanager
async def restarted_child(supervisor: Supervisor, command: Command, name: str) -> AsyncIterator[RestartedChild]:
    """Hold a daemon that is restarted whenever it ends, by :data:`~runner.placement.children.RESTARTS`; *name* is its name in the store.

    Raises :exc:`~runner.base.errors.HostError` if its first start fails, which is part of the instance's start.
    """
    policy = RESTARTS[command.role]
    held = supervisor.held

    def start() -> RestartedChild:
        return RestartedChild(supervisor.processes.spawn(command), command, policy.first)

    def adopt(record: RestartedChildRecord) -> RestartedChild:
        process = supervisor.processes.adopt(record.process)
        process.on_line = command.on_line
        return RestartedChild(process, command, record.pause, loop_time(record.born), record.down)

    child = held.value(name, start, adopt, lambda child: child.record(supervisor.clock))
    try:
        if command.up:

            async def come_up() -> None:
                async with supervisor.changes.begin(Kind.START, f"{command.role} is being started"):
                    await _wait_until_it_serves(child.process)

            await held.once(f"up:{name}", come_up)
        async with supervisor.background_task(lambda: _restart(supervisor, policy, child)):
            yield child
    finally:
        with trio.move_on_after(stop_bound(STOPPED_WITHIN), shield=True):
            await _stop(supervisor, child.process)


async def _stop(supervisor: Supervisor, process: Process) -> None:
    with supervisor.faults.recorded(f"stop {process.role}"):
        await supervisor.processes.stop(process, STOPPED_WITHIN)


@asynccontextmanager
async def connected_daemon(
    supervisor: Supervisor, name: str, started: Callable[[], AbstractContextManager[tuple[Process, Socket]]]
) -> AsyncIterator[ConnectedDaemon]:
    """Hold the daemon that *started* starts, and its connection; its end is the guest's. *name* is its name in the store."""
    with ExitStack() as stack:

        def start() -> ConnectedDaemon:
            return ConnectedDaemon(*stack.enter_context(started()))

        def adopt(record: ProcessRecord) -> ConnectedDaemon:
            return ConnectedDaemon(supervisor.processes.adopt(record), None)

        daemon = supervisor.held.value(name, start, adopt, lambda daemon: daemon.process.record())
        supervisor.daemons.append(daemon)
        try:
            yield daemon
        finally:
            supervisor.daemons.remove(daemon)
            stack.close()  # the daemon ends by itself when its client disconnects
            with trio.move_on_after(stop_bound(STOPPED_WITHIN), shield=True):
                await _stop(supervisor, daemon.process)


async def _wait_until_it_serves(process: Process) -> None:
    with trio.move_on_after(SERVES_WITHIN) as waiting:
        if not await process.serves():
            raise HostError(f"cannot start {process.role}: it {process.how_it_ended()}", remedy=process.limit())
    if waiting.cancelled_caught:
        raise HostError(f"cannot start {process.role}: it has not reported within {SERVES_WITHIN:g} s that it serves")


def refuse_dead(supervisor: Supervisor) -> None:
    """Raise :exc:`~runner.base.errors.HostError` if a connected daemon has ended: the guest would start without its service."""
    for dead in (each.process for each in supervisor.daemons if each.process.returncode is not None):
        raise HostError(f"cannot let the guest run: {dead.role} {dead.how_it_ended()}", remedy=dead.limit())


@asynccontextmanager
async def anchored(
    supervisor: Supervisor, argv: tuple[str, ...]
) -> AsyncIterator[tuple[RestartedChild, RestartedChild]]:
    """Hold the anchors, which keep the pod's cgroup populated: two of them, so that one is there while the other is restarted.

    systemd ends a scope within milliseconds after it became empty, which is faster than a process can be started.
    """
    command = Command("anchor", argv)
    async with (
        restarted_child(supervisor, command, "anchor:0") as one,
        restarted_child(supervisor, command, "anchor:1") as other,
    ):
        yield one, other


async def _restart(supervisor: Supervisor, policy: Restart, child: RestartedChild) -> None:
    while True:
        if not child.down:
            await _ended(supervisor, policy, child)
        await trio.sleep(child.pause)
        await supervisor.changes.over(Kind.RENEWAL, Kind.FAULT)  # a child would inherit the signals they block
        child.pause = min(max(2 * child.pause, 0.1), policy.longest)
        child.born, child.down = trio.current_time(), False
        try:
            child.process = supervisor.processes.spawn(child.command)
        except RunnerError as error:
            log.warning(InstanceEvent.CHILD_NOT_RESTARTED, explain(error))
        else:
            supervisor.restarted.announce()


async def _ended(supervisor: Supervisor, policy: Restart, child: RestartedChild) -> None:
    """Wait for the end of *child*, count and log it."""
    process = child.process
    await process.wait()
    if trio.current_time() - child.born > policy.forgiven:
        child.pause = policy.first
    supervisor.counters.restarts[process.role] += 1
    log.warning(InstanceEvent.CHILD_RESTARTING, process.role, process.why_it_ended(), child.pause)
    child.down = True


async def lost_daemon(supervisor: Supervisor) -> Process:
    """Wait for the end of a connected daemon, and return it; without any, never return."""

    async def ended(process: Process) -> Process:
        await process.wait()
        return process

    if not supervisor.daemons:
        await trio.sleep_forever()
    while True:
        dead = await first_of(*(partial(ended, each.process) for each in supervisor.daemons))
        await supervisor.changes.over(Kind.QEMU_UPDATE)
        if any(dead is each.process for each in supervisor.daemons):  # otherwise it ended with the QEMU that it served
            return dead
