"""The receipt, a file with the place of every thread: written when every thread is in its place, and again after each change."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import attrs
import trio

from runner.base.errors import HostError, PlacementError, RunnerError, explain
from runner.base.events import InstanceEvent
from runner.base.table import aligned
from runner.base.tasks import first_of
from runner.base.values import define
from runner.instance.parts.qemu import Qemu, started_within
from runner.instance.parts.state_directory import PUBLISHED_AGAIN, RECEIPT
from runner.instance.parts.thread_placement import QemuThreads, place_threads, read_back, read_threads, verified
from runner.instance.supervisor import Supervisor
from runner.kernel import files
from runner.placement.backends import ControllerPlacement
from runner.placement.threads import Receipt, sentences
from runner.plan.instance import InstancePlan
from runner.protocol.logs import LogTable
from runner.protocol.qmp import VcpuThread

if TYPE_CHECKING:
    from runner.instance.parts.cgroups.active import ActivePlacement
    from runner.placement.receipt_json import PlacedThreadDocument, ReceiptDocument

log = logging.getLogger(__name__)

VERIFIED_AGAIN = (0.1, 0.5, 1.0)
"""Seconds between readings of the threads after a change: strays on the vCPUs' CPUs are moved meanwhile."""


async def query_threads(machine: Qemu, plan: InstancePlan) -> QemuThreads:
    """Ask QEMU which of its threads are vCPUs and iothreads; the latter only where a disk has one."""
    vcpus = await machine.vcpu_threads()
    has_iothreads = any(disk.iothread for disk in plan.machine.disks)
    return QemuThreads(machine.process, vcpus, await machine.iothreads() if has_iothreads else ())


def receipt_table(receipt: Receipt) -> LogTable:
    """Return *receipt* as a table for the log; a vCPU that was just pinned has not run there yet, so it is shown on no CPU.

    A JSON line that container runtimes do not split (16 KiB, ``maxLogLineSize`` of the CRI) has room for some 130 threads; ``receipt.json``
    has the further details of each.
    """
    lines = [("ROLE", "TID", "NAME", "ALLOWED_CPUS", "RUNNING_ON")]
    rows: list[PlacedThreadDocument] = []
    for each in receipt.threads:
        thread = each.thread
        running_on = thread.running_on if thread.has_run_there else None
        shown = "-" if running_on is None else str(running_on)
        lines.append((each.title, str(thread.tid), thread.name, str(thread.cpus), shown))
        rows.append(
            {
                "role": each.role.value,
                "vcpu": each.vcpu,
                "tid": thread.tid,
                "name": thread.name,
                "allowed_cpus": str(thread.cpus),
                "running_on": running_on,
            }
        )
    return LogTable("threads", rows, tuple(aligned(lines)))


class PlacedThreads(NamedTuple):
    """QEMU's threads by role, and the receipt with the places of all threads."""

    vcpus: tuple[VcpuThread, ...]
    iothreads: frozenset[int]
    receipt: Receipt
    unplugged: bool = False
    """Whether the guest has released a vCPU."""


@define
class Receipts:
    """The receipt of a running QEMU, kept up to date."""

    _supervisor: Supervisor
    _plan: InstancePlan
    _machine: Qemu
    threads: QemuThreads
    _active: ActivePlacement
    receipt: Receipt
    _count_from: Callable[[Receipt], None]
    """Counts the time of other tasks on the vCPUs' CPUs from a receipt on."""
    unplugged: bool = False
    """Whether the guest has released a vCPU."""
    _unpublished: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set when the receipt could not be written."""

    def read(self) -> Receipt:
        """Return the current place of every thread, from the kernel.

        Threads that a vCPU thread has started since the last call are moved to float first, because not every placement sweeps.
        """
        receipt = self._read_once()
        strays = [each.thread for each in receipt.threads if receipt.rules.is_child_of_vcpu(each)]
        for thread in strays:
            with contextlib.suppress(HostError):  # it has ended, or it is reported as misplaced
                self._active.release(thread.tid)
                self._supervisor.counters.swept += 1
                self._supervisor.log_limit.log(log.info, InstanceEvent.THREAD_MOVED_TO_FLOAT, thread.tid, thread.name)
        return self._read_once() if strays else receipt

    def _read_once(self) -> Receipt:
        threads = read_threads(self._supervisor.processes, self._supervisor.procfs, self._active, self.threads)
        return attrs.evolve(self.receipt, threads=threads)

    def confirm(self, reason: str) -> None:
        """Read every thread back after the CPUs were sealed, or failed to be because of *reason*; log and publish the receipt.

        Raises :exc:`~runner.base.errors.PlacementError` when a thread is misplaced, or the plan requires sealed CPUs.
        """
        self.receipt = verified(attrs.evolve(self.read(), guarantee_reason=reason))
        log.info(InstanceEvent.THREADS_PLACED, receipt_table(self.receipt))
        if self.receipt.guarantee == "enforced":
            log.info(InstanceEvent.GUARANTEE_ENFORCED, self.receipt.rules.cpus)
        else:
            reason = reason or "the kernel lets other processes of the pod run there"
            if isinstance(self._plan.placement, ControllerPlacement) and self._plan.placement.enforced:
                raise PlacementError(
                    f"cannot keep all others off the vCPUs' CPUs: {reason}",
                    remedy='set cpu.exclusive = "auto" to start without that guarantee',
                )
            log.warning(InstanceEvent.GUARANTEE_ARRANGED, reason)
        self.publish()

    def drop_vcpus(self, first: int) -> None:
        """Forget the vCPUs from index *first* on, which the guest has released; :meth:`follow` then makes a receipt without them."""
        vcpus = self.threads.vcpus
        for vcpu in vcpus[first:]:
            self._active.forget(vcpu.tid)
        self.threads, self.unplugged = attrs.evolve(self.threads, vcpus=vcpus[:first]), True

    def follow(self, threads: QemuThreads) -> None:
        """Read every thread back after a change of QEMU's *threads* or of the placement in force; the result is the receipt from now on.

        Raises :exc:`~runner.base.errors.RunnerError` when a thread is misplaced; the receipt is then unchanged.
        """
        supervisor, active = self._supervisor, self._active
        receipt = read_back(supervisor.processes, supervisor.procfs, active, active.placement, threads)
        self.threads = threads
        self.receipt = attrs.evolve(receipt, guarantee_reason=self.receipt.guarantee_reason)
        self._count_from(self.receipt)

    def publish(self) -> None:
        """Write the receipt to the state directory, with the names of the instance and of its pod."""
        renewal = self._supervisor.renewal
        document: ReceiptDocument = {
            **self.receipt.to_json(),
            "instance": self._plan.name,
            "pod": self._plan.pod.to_json(),
            "generation": renewal.generation,
            "qemu_generation": self._machine.updates,
        }
        content = json.dumps(document, indent=1).encode() + b"\n"
        try:
            files.publish(self._plan.state_directory / RECEIPT, content)
        except HostError:
            self._unpublished.set()
            raise

    def publish_change(self) -> None:
        """Publish the receipt of a completed change; a failure is logged and retried, because the change is not undone for it."""
        try:
            self.publish()
        except HostError as error:
            self._log_outdated(error)

    def _log_outdated(self, error: RunnerError) -> None:
        self._supervisor.log_limit.log(log.warning, InstanceEvent.RECEIPT_OUTDATED, explain(error))

    def placed(self) -> PlacedThreads:
        """Return QEMU's threads, and the receipt."""
        vcpus, iothreads = tuple(self.threads.vcpus), frozenset(self.threads.iothreads)
        return PlacedThreads(vcpus, iothreads, self.receipt, self.unplugged)

    def reread(self) -> None:
        """Read back every thread, all placed by the previous program.

        Raises :exc:`~runner.base.errors.PlacementError` if one is misplaced and the renewal is strict.
        """
        self.receipt = self.read()
        if self._supervisor.renewal.strict:
            verified(self.receipt)

    def misplaced(self) -> str:
        """Return a description of the threads that are not in their places at this moment; empty if all are."""
        if self._supervisor.guest_state.cpus_lost:
            return self._supervisor.guest_state.cpus_lost
        try:
            return "; ".join(sentences(self.read().violations()))
        except HostError as error:
            return explain(error)

    def busiest_vcpu(self) -> float | None:
        """Return the CPU time of the busiest vCPU in seconds; ``None`` if the kernel does not show it."""
        pid = self.threads.process.pid
        try:
            times = [self._supervisor.procfs.times(pid, each.tid) for each in self.threads.vcpus]
        except HostError:
            return None
        return max((each.ran for each in times if each is not None and each.ran is not None), default=None)

    async def verify(self) -> None:
        """Read every thread back once more, and publish the receipt.

        Raises :exc:`~runner.base.errors.PlacementError` when a thread is still misplaced after 1.6 s.
        """
        self.threads = attrs.evolve(self.threads, iothreads=await self._machine.iothreads())
        await self._publish_settled()

    async def follow_restarts(self) -> None:
        """Publish the receipt anew after each restart of a child, and where it could not be written; may be cancelled at any moment."""
        happened = self._supervisor.restarted.next
        while True:
            await first_of(happened.wait, self._unpublished.wait)
            # The new process may not have executed its program yet.
            await trio.sleep(PUBLISHED_AGAIN if self._unpublished.is_set() else VERIFIED_AGAIN[0])
            # Before the threads are read, so that a restart meanwhile is not missed.
            happened, self._unpublished = self._supervisor.restarted.next, trio.Event()
            try:
                await self._publish_settled()
            except RunnerError as error:
                self._log_outdated(error)

    async def _publish_settled(self) -> None:
        for pause in VERIFIED_AGAIN:
            with contextlib.suppress(PlacementError):
                self.publish_verified()
                return
            await trio.sleep(pause)
        self.publish_verified()

    def publish_verified(self) -> None:
        """Read every thread back, and publish the receipt. Raises :exc:`~runner.base.errors.RunnerError`."""
        self.receipt = verified(self.read())
        self.publish()


@asynccontextmanager
async def placed_threads(
    supervisor: Supervisor,
    plan: InstancePlan,
    active: ActivePlacement,
    machine: Qemu,
    count_from: Callable[[Receipt], None],
) -> AsyncIterator[Receipts]:
    """Hold the vCPU threads on their CPUs, and the receipt that proves it in the state directory."""

    async def place() -> Receipts:
        threads = await started_within(supervisor, plan.start_timeout, partial(query_threads, machine, plan))
        receipt = place_threads(supervisor.processes, supervisor.procfs, active, plan.placement, threads)
        count_from(receipt)
        return Receipts(supervisor, plan, machine, threads, active, receipt, count_from)

    def adopt(before: PlacedThreads) -> Receipts:
        threads = QemuThreads(machine.process, before.vcpus, before.iothreads)
        return Receipts(supervisor, plan, machine, threads, active, before.receipt, count_from, before.unplugged)

    receipts = await supervisor.held.once("threads", place, adopt, Receipts.placed)
    supervisor.held.before_commit(receipts.reread)
    async with (
        _sealed_cpus(supervisor, plan, active, receipts),
        supervisor.background_task(active.settle),
        supervisor.background_task(receipts.follow_restarts),
    ):
        yield receipts


@asynccontextmanager
async def _sealed_cpus(
    supervisor: Supervisor, plan: InstancePlan, active: ActivePlacement, receipts: Receipts
) -> AsyncIterator[None]:
    """Keep all other tasks off the vCPUs' CPUs as far as this host can, and record the result in the receipt."""
    async with active.sealed() as reason:
        supervisor.held.value("placement confirmed", lambda: receipts.confirm(reason))
        try:
            yield
        finally:
            with supervisor.faults.recorded("remove the receipt"):
                files.remove(plan.state_directory / RECEIPT)
