"""The roles of a container's processes, from the file in which the runner recorded the place of every thread."""

from __future__ import annotations

from collections.abc import Mapping

from runner.base.values import frozen
from runner.facts.threads import ProcessStatus, ThreadStatus
from runner.placement.children import DAEMONS, RESTARTS, Role
from runner.placement.threads import ObservedThread, Receipt


@frozen
class Roles:
    """The roles of processes, and of QEMU's threads. Numbers may have been reused since the receipt was written."""

    processes: Mapping[int, tuple[Role, str]]
    """pid → role and name; QEMU's role is ``emulator``."""
    vcpus: Mapping[int, int]
    """tid → vCPU index."""
    iothreads: frozenset[int]
    """The tids of threads that serve disks."""

    @classmethod
    def of(cls, receipt: Receipt) -> Roles:
        """Return the roles that *receipt* names."""
        return cls(
            processes={
                each.thread.pid: (each.role, each.thread.name)
                for each in receipt.threads
                if each.thread.tid == each.thread.pid
            },
            vcpus={each.thread.tid: each.vcpu for each in receipt.threads if each.vcpu is not None},
            iothreads=frozenset(each.thread.tid for each in receipt.threads if each.role is Role.IOTHREAD),
        )

    @property
    def runner(self) -> int | None:
        """The pid of the runner."""
        return next((pid for pid, (role, _) in self.processes.items() if role is Role.RUNNER), None)

    @property
    def qemu(self) -> int | None:
        """The pid of QEMU."""
        return next((pid for pid, (role, _) in self.processes.items() if role is Role.EMULATOR), None)

    def of_process(self, process: ProcessStatus, *, is_sleep_infinity: bool) -> Role | None:
        """Return the role of *process*, or ``None`` if it does not belong to the instance.

        The runner restarts anchors (recognised by *is_sleep_infinity*, from the command line) and some daemons, which then have other
        numbers.
        """
        role, known_as = self.processes.get(process.pid, (None, ""))
        if role is not None and process.name == known_as:
            return role
        if process.parent != self.runner:
            return None
        daemon = DAEMONS.get(process.name) if process.name in RESTARTS else None
        return Role.ANCHOR if is_sleep_infinity else daemon

    def of_thread(self, role: Role, thread: ThreadStatus) -> ObservedThread:
        """Return *thread* of a process with *role*, with QEMU's vCPUs and iothreads recognised."""
        if role is Role.EMULATOR and thread.tid in self.vcpus:
            return ObservedThread(Role.VCPU, self.vcpus[thread.tid], thread)
        if role is Role.EMULATOR and thread.tid in self.iothreads:
            return ObservedThread(Role.IOTHREAD, None, thread)
        return ObservedThread(role, None, thread)
