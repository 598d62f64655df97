"""The state of the guest, and what keeps it from being ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.tasks import Announcements
from runner.base.values import define
from runner.instance.signs_of_life import SignsOfLife

if TYPE_CHECKING:
    from runner.placement.threads import Receipt
    from runner.protocol.instance_metrics import Phase
    from runner.protocol.qmp import Monitor

MINUTE = 60.0
"""Seconds for which a reset of the guest counts."""

RESETS_OF_A_LOOP = 3
"""Resets within :data:`MINUTE` from which on a guest counts as unable to boot; an installer, or a first boot, makes one or two."""


class RunningQemu(Protocol):
    """The QEMU that has the guest, as far as the figures need it."""

    updates: int
    """Number of times that another QEMU has taken over the guest."""

    @property
    def monitor(self) -> Monitor:
        """The connection to QEMU."""


@define
class GuestState:
    """The state of the guest, as probes and metrics show it."""

    phase: Phase = "starting"
    since: float | None = None
    """The time at which it began to run, on trio's clock."""
    read: Callable[[], Receipt] | None = None
    """Reads back the current place of every thread from the kernel; only while it runs."""
    machine: RunningQemu | None = None
    """The QEMU that has the guest; only while it runs."""
    changes: Announcements = attrs.field(factory=Announcements)
    """Announces changes of :attr:`phase` and :meth:`reasons`."""
    registered: trio.Event = attrs.field(factory=trio.Event)
    """Set when the controller knows the instance."""
    waits_for: str = ""
    """The reason why a running guest is not ready yet: the sign still missing since its last reset; empty if it was given."""
    cpus_lost: str = ""
    """The CPUs that the container has lost, while the vCPUs make room; empty otherwise."""
    offline: CpuSet = attrs.field(factory=CpuSet)
    """The CPUs of vCPUs that the machine has taken offline."""
    panic: str = ""
    """The sign of a panic of its kernel since the last reset, such as a console line; empty if there was none."""
    halted: str = ""
    """The reason why a guest that has not ended executes nothing, such as being suspended; empty if it runs."""
    no_address: dict[str, str] = attrs.field(factory=dict)
    """Bridge of a network → the reason why the guest does not get the address that it has requested there."""
    qemu_silent: str = ""
    """The reason why the state of a guest whose QEMU does not answer is unknown; empty if QEMU answers."""
    resets: deque[float] = attrs.field(factory=lambda: deque(maxlen=1000))
    """The times of resets in the last minute, on trio's clock; see :meth:`resets_lately`."""
    signs_of_life: SignsOfLife = attrs.field(factory=SignsOfLife)
    _asked: trio.Event = attrs.field(factory=trio.Event, init=False)

    def ask_qemu(self) -> None:
        """Ask whether QEMU answers, without waiting: only when a client wants to know, so that an idle PID 1 stays asleep."""
        self._asked.set()

    async def qemu_asked(self) -> None:
        """Wait until :meth:`ask_qemu` was called, also before, since this last returned."""
        await self._asked.wait()
        self._asked = trio.Event()

    def set_cpus_lost(self, cpus_lost: str) -> None:
        """Set :attr:`cpus_lost`."""
        if cpus_lost != self.cpus_lost:
            self.cpus_lost = cpus_lost
            self.changes.announce()

    def set_offline(self, offline: CpuSet) -> None:
        """Set :attr:`offline`."""
        if offline != self.offline:
            self.offline = offline
            self.changes.announce()

    def set_no_address(self, bridge: str, reason: str) -> None:
        """Set :attr:`no_address` of the network with *bridge*; with an empty *reason* it has the address."""
        if reason != self.no_address.get(bridge, ""):
            self.no_address[bridge] = reason
            self.changes.announce()

    def resets_lately(self) -> int:
        """Return the number of resets in the last minute."""
        since = trio.current_time() - MINUTE
        while self.resets and self.resets[0] <= since:
            self.resets.popleft()
        return len(self.resets)

    @property
    def unready(self) -> str:
        """Return the reason why the guest is not ready; empty if it is."""
        return next(filter(None, (sentence for _, sentence in self.reasons())), "")

    def reasons(self) -> Iterator[tuple[str, str]]:
        """Yield the possible reasons why it is not ready, causes before their consequences: the reason's name, and the sentence.

        The name is the value of a metric's label; the sentence is empty if the reason does not apply.
        """
        yield "phase", "" if self.phase == "running" else self.phase
        yield "cpus_lost", self.cpus_lost
        offline = f"the CPUs '{self.offline}' of vCPUs are offline: these share the instance's other CPUs"
        yield "cpus_offline", offline if self.offline else ""
        yield "qemu_silent", self.qemu_silent
        yield "halted", self.halted and f"the guest does not run: {self.halted}"
        yield "panicked", self.panic and f"the guest's kernel has panicked: {self.panic}"
        resets = self.resets_lately()
        again = f"the guest is reset again and again: it was reset {resets} times in the last minute"
        yield "resets", again if resets >= RESETS_OF_A_LOOP else ""
        silence = self.signs_of_life.silence
        yield "silent", "" if silence is None else f"the guest is silent: {silence}"
        yield "no_address", next(filter(None, self.no_address.values()), "")
        yield "awaits_sign", self.waits_for

    @contextmanager
    def running(self, read: Callable[[], Receipt], machine: RunningQemu, since: float | None = None) -> Iterator[None]:
        """Note that the guest runs in *machine* while the block does; it has run *since* that time, by default from now on."""
        self.phase, self.since = "running", trio.current_time() if since is None else since
        self.read, self.machine = read, machine
        self.changes.announce()
        try:
            yield
        finally:
            self.phase, self.read, self.machine = "stopping", None, None
            self.changes.announce()
