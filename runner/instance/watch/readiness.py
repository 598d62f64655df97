"""The readiness of the guest: it runs, has given the sign that ``guest.ready`` names, if any, and nothing shows that it is down.

It is down while QEMU does not answer, while it is suspended or QEMU has stopped it, from a panic to the next reset, and while it is reset
again and again. The file ``ready`` in the state directory, ``/readyz`` and ``ctl status`` show it. After a reset the sign is awaited again.
No console output ends a guest: a line on the console is a claim that any program in the guest can make, and the pvpanic device, whose
driver is the kernel's, is what ends an instance by a panic.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, assert_never

import trio

from runner.base.errors import HostError, explain
from runner.base.events import InstanceEvent
from runner.base.tasks import Announcements
from runner.instance import optional_parts
from runner.instance.guest_state import MINUTE, RESETS_OF_A_LOOP
from runner.instance.parts.qemu import QEMU_ANSWERS_WITHIN, Qemu
from runner.instance.parts.state_directory import PUBLISHED_AGAIN, READY
from runner.instance.supervisor import Supervisor, kernel_time, loop_time
from runner.instance.watch.console_watch import SEARCHED_SHARE, SEARCHED_WITHIN, ConsoleWatch
from runner.kernel import files
from runner.plan.guest_devices import GuestPort
from runner.plan.instance import InstancePlan
from runner.protocol.qmp import QmpError, QmpEvent, SilentError
from runner.spec.readiness import AgentSign, ConsoleSign

if TYPE_CHECKING:
    from runner.placement.threads import Receipt

log = logging.getLogger(__name__)

AGENT_ANSWERS_WITHIN = 5.0
"""Seconds for an agent's answer, and until it is asked again, as long as its guest boots."""

CONNECTED_WITHIN = 5.0
"""Seconds a connection to the guest's port may take."""

HALTED = {
    "suspended": "it is suspended; when the instance is to end, it is woken first",
    "internal-error": "QEMU has stopped it, because its accelerator cannot execute it any more (internal-error)",
    "io-error": "QEMU has stopped it after an error of a disk (io-error)",
    "guest-panicked": "QEMU has stopped it after a panic of its kernel (guest-panicked)",
    "watchdog": "QEMU has stopped it, because it stopped feeding its watchdog (watchdog)",
}
"""``RunState`` (``qapi/run-state.json``) → the reason why the guest executes nothing. In other states it runs, or this program has stopped
it."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
"""Seconds between two attempts to connect; each pause is twice the one before, because a guest boots in a second or in minutes."""


class Readiness:
    """The readiness of the guest, derived from the console, QEMU's events, the agent and the guest's port."""

    def __init__(self, supervisor: Supervisor, plan: InstancePlan) -> None:
        self._supervisor = supervisor
        self._state = supervisor.guest_state
        self._path = plan.state_directory / READY
        self._sign = plan.machine.guest.ready
        self._accel = plan.machine.accel
        self._pattern = self._sign.compiled() if isinstance(self._sign, ConsoleSign) else None
        if isinstance(self._sign, AgentSign):  # now: later, with a running guest, files may be short
            optional_parts.guest_agent()
        search = None if self._pattern is None else optional_parts.console_search()
        self._events = 0
        """Number of QEMU's events that were handled."""
        self._changed = Announcements()
        self.console = ConsoleWatch(self._panicked, self._signed, self._searched_too_slowly, search)
        self._begin()

    @asynccontextmanager
    async def kept(
        self, machine: Qemu, read: Callable[[], Receipt], busiest: Callable[[], float | None]
    ) -> AsyncIterator[None]:
        """Show, while the block runs, whether the guest is ready: by a file, and to probes, metrics and ``ctl``.

        *read* reads back the place of every thread; *busiest* returns the CPU time of the busiest vCPU in seconds. The guest runs, and no
        stop was requested.
        """
        watch = partial(self._state.signs_of_life.watch, self._accel, busiest, self._change)
        since = self._keep_state()
        with self._state.running(read, machine, since):
            async with AsyncExitStack() as stack:
                for each in (watch, partial(self._follow_qemu, machine), self._follow_resets, self._show):
                    await stack.enter_async_context(self._supervisor.background_task(each))
                if (ask := self._asking(machine)) is not None:
                    await stack.enter_async_context(self._supervisor.background_task(partial(self._ask, ask)))
                yield

    def _keep_state(self) -> float:
        """Hold the guest's state; return the time at which it began to run, on trio's clock."""
        held, state, console, clock = self._supervisor.held, self._state, self.console, self._supervisor.clock
        signs = state.signs_of_life
        held.keep(state, waits_for="awaited sign", panic="panic", halted="halted")
        searching = held.current("sign searched", lambda: console.pattern is not None)
        console.pattern = self._pattern if searching else None
        held.keep(console, begun="console searches")
        held.keep(signs, silence="silence")
        if held.current("console written", signs.console_written.is_set):
            signs.console_written.set()
        return loop_time(
            held.current(
                "running since",
                lambda: kernel_time(clock.current_time() if state.since is None else state.since, clock),
            )
        )

    def _asking(self, machine: Qemu) -> Callable[[], Awaitable[bool]] | None:
        """Return the function that waits for the sign and returns whether it was given; ``None`` for a sign that arrives unasked."""
        match self._sign:
            case AgentSign():
                return partial(self._agent_answers, machine)
            case GuestPort() as port:
                return partial(self._accepts, port)
            case None | ConsoleSign():
                return None
            case _ as never:
                assert_never(never)

    async def _show(self) -> None:
        """Create the file while the guest is ready, and remove it otherwise; may be cancelled at any moment.

        While it stays ready, the file stays: a probe that looks for it never misses it.
        """
        with ExitStack() as shown:
            published = False
            while True:
                changed, again = self._state.changes.next, math.inf
                if self._state.unready:
                    shown.close()
                    published = False
                elif not published:
                    try:
                        files.publish(self._path, b"")
                    except HostError as error:  # no reason to end a running guest: a full volume may have room again
                        self._supervisor.log_limit.log(log.warning, InstanceEvent.READY_FILE_FAILED, explain(error))
                        again = PUBLISHED_AGAIN
                    else:
                        shown.callback(self._withdraw)
                        published = True
                with trio.move_on_after(again):
                    await changed.wait()

    def _withdraw(self) -> None:
        with self._supervisor.faults.recorded("remove the sign that the guest runs"):
            files.remove(self._path)

    def _begin(self) -> None:
        """Wait for the sign of a guest that has just begun to run."""
        self._state.panic = self._state.halted = ""
        self._state.waits_for = "" if self._sign is None else f"the guest has not given its sign yet: {self._sign}"
        self.console.pattern = self._pattern
        self.console.forget()
        self._change()

    def _change(self) -> None:
        self._changed.announce()
        self._state.changes.announce()

    def observe(self, event: QmpEvent) -> None:
        """Follow *event*, from the start of QEMU on: a guest may fail at its first instruction."""
        self._events += 1
        match event.name:
            case "RESET":
                self._state.resets.append(trio.current_time())
                self._supervisor.counters.resets += 1
                self._begin()
            case "VSERPORT_CHANGE":  # the agent may listen now
                self._changed.announce()
            case "SUSPEND":
                self._halt("suspended")
            case "WAKEUP" | "RESUME":
                self._halt("running")
            case "STOP":  # only query-status gives the reason
                self._state.ask_qemu()
            case "GUEST_CRASHLOADED" if not self._state.panic:
                self._state.panic = "it handles that itself, as kdump does"
                self._supervisor.log_limit.log(log.error, InstanceEvent.GUEST_CRASH_LOADED)
                self._change()

    def _halt(self, run_state: str) -> None:
        """Note the guest's ``RunState``."""
        before, self._state.halted = self._state.halted, HALTED.get(run_state, "")
        if self._state.halted == before:
            return
        if self._state.halted:
            self._supervisor.log_limit.log(log.warning, InstanceEvent.GUEST_HALTED, self._state.halted)
        else:
            self._supervisor.log_limit.log(log.info, InstanceEvent.GUEST_RUNS_AGAIN)
        self._change()

    async def _follow_qemu(self, machine: Qemu) -> None:
        """Note, at each request, whether QEMU answers and the guest runs; may be cancelled at any moment."""
        while True:
            await self._state.qemu_asked()
            monitor = machine.monitor
            with suppress(QmpError):  # it has ended, or another QEMU has replaced it
                try:
                    events = self._events
                    self._note(await monitor.within(QEMU_ANSWERS_WITHIN, monitor.answers), events)
                except SilentError as error:
                    self._state.qemu_silent = explain(error)
                    self._supervisor.log_limit.log(log.warning, InstanceEvent.QEMU_SILENT, self._state.qemu_silent)
                    self._change()
                    events = self._events
                    self._note(await monitor.answers(), events)
            if self._state.qemu_silent:
                self._state.qemu_silent = ""
                self._supervisor.log_limit.log(log.info, InstanceEvent.QEMU_ANSWERS_AGAIN)
                self._change()

    def _note(self, run_state: str, events: int) -> None:
        """Note an answer of QEMU, requested after *events* events, unless an event came since, which is newer."""
        if run_state and events == self._events:
            self._halt(run_state)

    async def _follow_resets(self) -> None:
        """Show that a guest has stopped being reset again and again; may be cancelled at any moment."""
        while True:
            while self._state.resets_lately() < RESETS_OF_A_LOOP:
                await self._changed.next.wait()
            self._supervisor.log_limit.log(
                log.warning, InstanceEvent.GUEST_RESETS_AGAIN_AND_AGAIN, self._state.resets_lately()
            )
            await trio.sleep_until(self._state.resets[-RESETS_OF_A_LOOP] + MINUTE)
            self._change()

    def _signed(self) -> None:
        self._state.waits_for = ""
        self._supervisor.log_limit.log(log.info, InstanceEvent.GUEST_READY, self._sign)
        self._change()

    def _panicked(self, line: str) -> None:
        if self._state.panic:
            return
        self._state.panic = line
        self._supervisor.log_limit.log(log.error, InstanceEvent.GUEST_PANIC_ON_CONSOLE, line)
        self._change()

    def _searched_too_slowly(self) -> None:
        self._state.waits_for = (
            f"the pattern of guest.ready takes more than {SEARCHED_WITHIN:g} s for some lines, or more than "
            f"{SEARCHED_SHARE:.0%} of the time for all; simplify it"
        )
        self._supervisor.log_limit.log(log.error, InstanceEvent.GUEST_SIGN_GIVEN_UP, self._state.waits_for)
        self._change()

    async def _ask(self, ask: Callable[[], Awaitable[bool]]) -> None:
        """Wait for the guest's sign by *ask* after each reset; may be cancelled at any moment."""
        while True:
            while not self._state.waits_for:
                await self._changed.next.wait()
            if await ask():
                self._signed()

    async def _agent_answers(self, machine: Qemu) -> bool:
        """Wait until the agent listens, and return whether it answers; if it does not, return after a pause."""
        while not machine.agent_listens:
            await self._changed.next.wait()
        changed = self._changed.next
        with trio.move_on_after(AGENT_ANSWERS_WITHIN):
            if await machine.agent_answers():
                return not changed.is_set()
            await trio.sleep_forever()
        return False

    async def _accepts(self, port: GuestPort) -> bool:
        """Wait until the guest accepts a connection; return ``False`` if it may have been reset meanwhile."""
        pause, changed = FIRST_PAUSE, self._changed.next
        while not changed.is_set():
            with trio.move_on_after(CONNECTED_WITHIN):
                if await _connects(port):
                    return not changed.is_set()
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return False


async def _connects(port: GuestPort) -> bool:
    try:
        with trio.socket.socket() as connection:
            await connection.connect((str(port.address), port.port))
    except OSError:  # no listener yet, no address yet, or descriptors are short
        return False
    return True
