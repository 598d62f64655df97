"""vCPUs that are plugged and unplugged while the guest runs, and CPUs that the kubelet takes from the container or replaces.

Plugging is all or nothing: on failure it is undone. The guest may start a plugged vCPU at once, so it is stopped until each new thread is
confined, pinned and read back. Only the guest can release a vCPU, and it may refuse: then it keeps the vCPU, and the error says so. vCPU
indexes have no gaps: the last one is unplugged first, and the first one never.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, PlacementError, RefusedError, RunnerError, explain
from runner.base.events import InstanceEvent
from runner.base.values import frozen, short_text, whole_number
from runner.facts.hardware import Hardware
from runner.facts.host import format_version, parse_version
from runner.instance.change.running_instance import RunningInstance
from runner.instance.gate import Kind
from runner.instance.parts.cgroups.active import ActivePlacement
from runner.instance.parts.qemu import Qemu
from runner.instance.parts.thread_placement import QemuThreads, enter_places
from runner.instance.supervisor import Supervisor
from runner.instance.watch.receipts import Receipts
from runner.kernel.hardware_reader import read_hardware
from runner.kernel.scheduler import pin, read_mask
from runner.placement.backends import ControllerPlacement, Placement
from runner.placement.resize import more_pins, moved_pins, unlike, with_pins
from runner.placement.threads import guarantee_of
from runner.plan.machine import MachinePlan, VcpuHotplugPlan
from runner.protocol.qmp import ExecuteError, QmpError, QmpEvent, VcpuThread

if TYPE_CHECKING:
    from runner.instance.control_json import VcpuDocument, VcpusAnswer

log = logging.getLogger(__name__)

EMULATED_SINCE = (11, 1)
"""The first QEMU version of which an emulated vCPU may be unplugged: 7.2 was seen to corrupt its heap, 11.1 was not."""

_ORDER = ("node-id", "drawer-id", "book-id", "socket-id", "die-id", "cluster-id", "module-id", "core-id", "thread-id")
"""The properties of a slot, from the largest unit to the smallest: QEMU numbers vCPUs in this order."""


@frozen
class VcpuSlot:
    """A place for a vCPU (``query-hotpluggable-cpus``); its index is its place in the order of QEMU's vCPUs."""

    driver: str
    properties: Mapping[str, int]
    path: str | None
    """The QOM path of the vCPU in it, if there is one."""

    @property
    def plugged_later(self) -> bool:
        """Return whether its vCPU was plugged while the guest runs."""
        return self.path is not None and self.path.startswith("/machine/peripheral")


class GuestStoppedError(HostError):
    """The guest was stopped for a change, and cannot be continued."""


@frozen
class Vcpus:
    """The vCPUs of a running machine."""

    supervisor: Supervisor
    plan: MachinePlan
    machine: Qemu
    active: ActivePlacement
    receipts: Receipts

    @property
    def threads(self) -> Sequence[VcpuThread]:
        """Return the thread of each vCPU, by index."""
        return self.receipts.threads.vcpus

    async def listed(self) -> VcpusAnswer:
        """Return each vCPU as JSON, and the CPUs of the container that no vCPU has."""
        slots = await self._slots()
        pins = self.active.placement.pins
        vcpus: list[VcpuDocument] = [
            {
                "vcpu": vcpu.index,
                "thread": vcpu.tid,
                "cpu": pins[vcpu.index],
                "plugged_later": slots[vcpu.index].plugged_later,
            }
            for vcpu in self.threads
        ]
        plan = self.plan.vcpu_hotplug
        unused = self.active.container_cpus() - CpuSet(pins)
        return {"vcpus": vcpus, "unused": str(unused), "most": len(vcpus) if plan is None else plan.most}

    async def set(self, count: int) -> VcpusAnswer:
        """Plug or unplug vCPUs until there are *count*; return the result of :meth:`listed` with the guest's ``pause_ms``.

        Raises :exc:`~runner.base.errors.RunnerError`, in which case the machine is unchanged, unless the error says otherwise.
        """
        async with self.supervisor.changes.begin(Kind.VCPUS, "the vCPUs are being changed"):
            plan = self._allowed(count)
            await self._drop_released()
            await self._release_from(len(self.threads))  # vCPUs that an earlier change could not remove
            before, pause = len(self.threads), 0.0
            if count > before and self.receipts.unplugged and self.plan.accel == "tcg":
                raise RefusedError(
                    "cannot plug a vCPU: the guest has released one before, and without KVM QEMU crashes when another is plugged then",
                    remedy="start the instance again",
                )
            if count > before:
                pause = await self._grow(count, plan)
                log.info(
                    InstanceEvent.VCPUS_PLUGGED,
                    count,
                    before,
                    CpuSet(self.active.placement.pins),
                    pause * 1000,
                )
            elif count < before:
                await self._shrink(count)
                log.info(InstanceEvent.VCPUS_UNPLUGGED, count, before)
            return {**await self.listed(), "pause_ms": round(pause * 1000, 1)}

    def _allowed(self, count: int) -> VcpuHotplugPlan:
        """Return the plan's rules, which allow *count* vCPUs. Raises :exc:`RefusedError` if they do not."""
        plan = self._hotplug()
        if not 1 <= count <= plan.most:
            raise RefusedError(
                f"cannot have {count} vCPUs: this machine has 1 to {plan.most}",
                remedy="set hotplug.cpus to more and start the instance again" if count > plan.most else "",
            )
        return plan

    def _hotplug(self) -> VcpuHotplugPlan:
        """Return the plan's rules for other numbers of vCPUs. Raises :exc:`RefusedError` if there are none."""
        if self.plan.vcpu_hotplug is None:
            raise RefusedError(
                "cannot change the number of vCPUs: the machine was not started for it",
                remedy="set hotplug.cpus to the most that it may have and start the instance again",
            )
        return self.plan.vcpu_hotplug

    # -- more --------------------------------------------------------------------------------------------------------

    async def _grow(self, count: int, plan: VcpuHotplugPlan) -> float:
        """Plug vCPUs until there are *count*; return the pause of the guest in seconds."""
        before = self.active.placement
        wanted = self._with_more(count, plan, read_hardware(self.supervisor.roots.sys.parent))
        slots = await self._slots()
        threads, first = self.receipts.threads, len(self.threads)
        await self.active.change(wanted)
        failure: RunnerError | None = None
        pause, placed = 0.0, list[int]()
        try:
            self._check_guarantee(wanted)
            async with self._stopped() as stopped:
                for index in range(first, count):
                    await self._plug(index, slots[index])
                await self._place(first, placed)
            pause = stopped.seconds
            self.receipts.publish_change()
        except GuestStoppedError:  # the instance ends
            raise
        except RunnerError as error:
            failure = error
        if failure is not None:
            await self._take_back(first, placed, threads, before, failure)
            raise failure
        _log_if_shared(wanted, before)
        return pause

    def _with_more(self, count: int, plan: VcpuHotplugPlan, hardware: Hardware) -> Placement:
        """Return the placement of *count* vCPUs. Raises :exc:`RefusedError` where the CPUs or the guest cannot have them."""
        given, pins = self.active.container_cpus(), self.active.placement.pins
        available = given & hardware.online
        if lost := CpuSet(pins) - available:
            why = "are offline" if lost <= given else "no longer belong to the container"
            raise RefusedError(f"cannot have {count} vCPUs: the CPUs '{lost}' of some vCPUs {why}")
        if count > len(available):
            raise RefusedError(
                f"cannot have {count} vCPUs: the container has {len(available)} CPUs ('{available}'), and each vCPU has one of its own",
                remedy="give the container more first (`kubectl patch pod … --subresource resize`)",
            )
        found = more_pins(pins, available, count, hardware)
        if plan.alike and (others := unlike(found, hardware)):
            raise RefusedError(
                f"cannot have {count} vCPUs: the guest sees one L3 cache, and the CPUs '{others}' have another than CPU {found[0]}",
                remedy='set cpu.topology = "flat" and start the instance again',
            )
        return with_pins(self.active.placement, given, found)

    def _check_guarantee(self, placement: Placement) -> None:
        """Check that the kernel keeps all other tasks off the CPUs of *placement*, if the spec requires it."""
        if not isinstance(placement, ControllerPlacement) or not placement.enforced:
            return
        threads = self.receipts.read().threads
        if guarantee_of(placement.backend, placement.cpus, threads) != "enforced":
            raise PlacementError(
                f"cannot keep all others off the CPUs '{placement.cpus}'",
                remedy="the log of the node's controller says why",
            )

    @asynccontextmanager
    async def _stopped(self) -> AsyncIterator[_Pause]:
        """Stop the guest for the block. Raises :exc:`RefusedError` if it is not running.

        Raises :exc:`GuestStoppedError` if it cannot be continued afterwards; the instance is then asked to stop.
        """
        monitor = self.machine.monitor
        if await monitor.query("query-status", lambda reply: reply["running"]) is not True:
            raise RefusedError("cannot plug a vCPU: the guest does not run")
        pause, began = _Pause(), trio.current_time()
        try:
            await monitor.execute("stop")
            yield pause
        finally:
            within = self.supervisor.timeouts.guest_runs
            reason = f"QEMU has not answered within {within:g} s"
            with trio.move_on_after(within, shield=True):
                reason = await self._let_run()
            pause.seconds = trio.current_time() - began
            if reason:
                self._end_instance(reason)

    async def _let_run(self) -> str:
        """Let the guest run again; return the reason if that fails, empty if it works."""
        try:
            await self.machine.monitor.execute("cont")
        except QmpError as error:
            return explain(error)
        return ""

    def _end_instance(self, reason: str) -> NoReturn:
        """End the instance, whose guest cannot be continued. Raises :exc:`GuestStoppedError`."""
        if not self.machine.ends:
            log.error(InstanceEvent.GUEST_NOT_CONTINUED, reason)
            self.supervisor.stop.ask("the guest does not continue after a vCPU was to be plugged")
        raise GuestStoppedError(f"the guest does not continue, and the instance ends: {reason}")

    async def _plug(self, index: int, slot: VcpuSlot) -> None:
        arguments = {"driver": slot.driver, "id": f"vcpu{index}", **slot.properties}
        await self.machine.monitor.execute("device_add", arguments)

    async def _place(self, first: int, placed: list[int]) -> None:
        """Pin the vCPUs from index *first* on to their CPUs, and read every thread back; append their tids to *placed*."""
        vcpus = await self.machine.vcpu_threads()
        enter_places(self.active, self.active.placement, vcpus, first, placed)
        self.receipts.follow(attrs.evolve(self.receipts.threads, vcpus=vcpus))

    async def _take_back(
        self, first: int, placed: Sequence[int], threads: QemuThreads, before: Placement, failure: RunnerError
    ) -> None:
        """Unplug the vCPUs from index *first* on; if that fails, raise *failure* with the reason.

        A vCPU that the guest keeps stays in float; the next change tries again to release it.
        """
        left: RunnerError | None = None
        try:
            await self._release_from(first)
        except RunnerError as error:
            left = error
            for tid in placed:
                with suppress(HostError):  # it has ended, or was never there
                    self.active.release(tid)
        try:
            for tid in placed:
                self.active.forget(tid)
            await self.active.change(before)
            self.receipts.follow(threads)
            self.receipts.publish_change()
        except RunnerError as error:
            left = left or error
        if left is not None:
            raise HostError(f"{explain(failure)}; and not all of it is undone: {explain(left)}") from None

    async def _release_from(self, first: int) -> None:
        """Ask the guest to release all vCPUs from index *first* on, including those that the receipt does not list."""
        for index, slot in reversed(list(enumerate(await self._slots()))):
            if index >= first and slot.path is not None:
                await self._release(index, slot.path)
                self.receipts.drop_vcpus(index)

    # -- fewer -------------------------------------------------------------------------------------------------------

    async def _shrink(self, count: int) -> None:
        """Unplug vCPUs until there are *count*."""
        available = self._divided_cpus()  # before anything is unplugged, which cannot be undone
        refusal: RunnerError | None = None
        try:
            await self._unplug(count)
        except RunnerError as error:
            refusal = error
        try:
            await self._follow_threads(available)  # released vCPUs stay released
        except RunnerError as error:
            raise HostError(f"{len(self.threads)} vCPUs are left, but {explain(error)}") from refusal
        if refusal is not None:
            raise refusal

    def _divided_cpus(self) -> CpuSet:
        """Return the CPUs that the vCPUs and float have together: fewer vCPUs need no new registration."""
        placement = self.active.placement
        return placement.cpus if isinstance(placement, ControllerPlacement) else self.active.container_cpus()

    async def _follow_threads(self, available: CpuSet) -> None:
        """Change the placement to that of the remaining vCPUs, on the CPUs *available*, and publish their receipt."""
        before = self.active.placement
        await self.active.change(with_pins(before, available, before.pins[: len(self.threads)]))
        self.receipts.follow(self.receipts.threads)
        self.receipts.publish_change()

    async def _drop_released(self) -> None:
        """Forget the vCPUs that the guest has released late or unasked, which it may do at any moment.

        Raises :exc:`HostError` if it keeps others with higher indexes: indexes have no gaps.
        """
        slots, vcpus = await self._slots(), self.threads
        there = tuple(vcpu for vcpu in vcpus if slots[vcpu.index].path is not None)
        if len(there) == len(vcpus):
            return
        if there != tuple(vcpus[: len(there)]):
            missing = CpuSet(vcpu.index for vcpu in vcpus) - CpuSet(vcpu.index for vcpu in there)
            raise HostError(
                f"cannot change the vCPUs: the guest has released {missing} unasked, and keeps later ones",
                remedy="start the instance again",
            )
        available = self._divided_cpus()
        self.receipts.drop_vcpus(len(there))
        log.info(InstanceEvent.VCPUS_RELEASED, len(there), len(vcpus))
        await self._follow_threads(available)

    async def _unplug(self, count: int) -> None:
        """Ask the guest to release vCPUs until there are *count*. Raises :exc:`RefusedError` if it keeps one."""
        slots = await self._slots()
        while len(vcpus := self.threads) > count:
            last = vcpus[-1]
            if (path := slots[last.index].path) is not None:  # else it has been released meanwhile
                await self._release(last.index, path)
            self.receipts.drop_vcpus(len(vcpus) - 1)

    async def _release(self, index: int, path: str) -> None:
        """Ask the guest to release the vCPU *index* with the QOM *path*."""
        machine = self.machine
        if self.plan.accel == "tcg" and parse_version(machine.monitor.version) < EMULATED_SINCE:
            raise RefusedError(
                f"cannot unplug vCPU {index}: without KVM, QEMU {machine.monitor.version} crashes some time after it",
                remedy=f"use QEMU {format_version(EMULATED_SINCE)}",
            )
        gone = trio.Event()

        def observe(event: QmpEvent) -> None:
            if event.name == "DEVICE_DELETED" and event.data.get("path") == path:
                gone.set()

        asked, timeouts = False, self.supervisor.timeouts
        with machine.monitor.observed_by(observe), trio.move_on_after(timeouts.vcpu_released):
            while not gone.is_set():
                asked = asked or await self._ask_for(path)
                with trio.move_on_after(timeouts.vcpu_looked):
                    await gone.wait()
                if (await self._slots())[index].path != path:
                    gone.set()
        if not gone.is_set():
            reason = "has not released it" if asked else "could not be asked to release it"
            later = ", and may release it later" if asked else ""
            raise RefusedError(
                f"cannot unplug vCPU {index}: the guest {reason} within {timeouts.vcpu_released:g} s, and keeps it{later}",
                remedy="ask again once it has booted, with a kernel that can unplug CPUs",
            )

    async def _ask_for(self, path: str) -> bool:
        """Let QEMU ask the guest to release the vCPU with the QOM *path*; return ``False`` if the guest cannot be asked yet."""
        try:
            await self.machine.monitor.execute("device_del", {"id": path})
        except ExecuteError as error:
            # Until the guest has switched to the hotplug registers that can unplug (piix4/ich9: "legacy" CPU hotplug).
            if "not supported device type" in error.description:
                return False
            if error.kind != "DeviceNotFound" and not error.in_process_of_unplug:
                raise RefusedError("cannot unplug a vCPU") from error
        return True

    # -- other CPUs --------------------------------------------------------------------------------------------------

    async def fit(self, find: Callable[[], CpuSet | None]) -> None:
        """Put the vCPUs, one each, on the CPUs that *find* returns, which are all that the container still has.

        ``None`` means that there is no more to do. The threads leave the other CPUs at once; then surplus vCPUs are unplugged. Raises
        :exc:`~runner.base.errors.RunnerError` if that fails; even then no vCPU thread may run on other CPUs. The caller has begun this
        change of the instance.
        """
        if (available := find()) is not None:
            self.leave(available)
            await self._drop_released()
            before = self.active.placement
            if len(before.pins) > len(available):
                self._hotplug()
                await self._unplug(len(available))
            found = moved_pins(before.pins[: len(self.threads)], available)
            wanted, done = with_pins(before, available, found), False
            await self.active.follow(wanted)
            try:
                self._pin(found)
                self.receipts.follow(self.receipts.threads)
                done = True
            finally:
                if not done:  # the controller may be away, and has not assigned the new CPUs yet
                    self.active.adopt(before)
            self.receipts.publish_change()
            self.supervisor.log_limit.log(log.info, InstanceEvent.VCPUS_PLACED_ANEW, len(found), CpuSet(found))
            _log_if_shared(wanted, before)

    def _pin(self, pins: Sequence[int]) -> None:
        """Pin each vCPU thread to its CPU in *pins*. Raises :exc:`~runner.base.errors.PlacementError`."""
        for vcpu in self.threads:
            own = CpuSet([pins[vcpu.index]])
            try:
                mask = read_mask(vcpu.tid)
            except ProcessLookupError as error:
                raise PlacementError(f"cannot pin vCPU {vcpu.index}: its thread {vcpu.tid} has ended") from error
            if mask != own:
                pin(vcpu.tid, own)

    def leave(self, available: CpuSet) -> None:
        """Move each vCPU thread off all CPUs but *available*; the controller has done so unless it is away."""
        for vcpu in self.threads:
            with suppress(ProcessLookupError, PlacementError):  # it has ended, or its cgroup has fewer CPUs
                if not read_mask(vcpu.tid) <= available:
                    pin(vcpu.tid, available)

    async def _slots(self) -> Sequence[VcpuSlot]:
        """Return the places for vCPUs by index."""
        machine = self.plan
        least = machine.vcpus if machine.vcpu_hotplug is None else machine.vcpu_hotplug.most

        def parse(reply: Any) -> list[VcpuSlot]:
            slots = list(map(_slot, reply))
            if len(slots) < least:
                raise ValueError(f"{len(slots)} slots, and not {least}")
            return slots

        slots = await self.machine.monitor.query("query-hotpluggable-cpus", parse)
        return sorted(slots, key=lambda slot: [slot.properties.get(name, 0) for name in _ORDER])


def vcpus_of(running: RunningInstance) -> Vcpus:
    """Return the vCPUs of a running instance."""
    return Vcpus(running.supervisor, running.plan.machine, running.machine, running.active, running.receipts)


def _slot(found: Mapping[str, Any]) -> VcpuSlot:
    properties = {name: whole_number(value) for name, value in found["props"].items()}
    return VcpuSlot(
        short_text(found["type"]), properties, short_text(found["qom-path"]) if "qom-path" in found else None
    )


@attrs.define
class _Pause:
    seconds: float = 0.0
    """The duration of the pause; known after the block."""


def _log_if_shared(wanted: Placement, before: Placement) -> None:
    """Log that no CPU is left for float alone, if there was one *before*."""
    if wanted.shared and not before.shared:
        log.warning(InstanceEvent.FLOAT_WITHOUT_CPUS)
