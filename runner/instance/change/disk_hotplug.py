"""Disks that are attached, detached and grown while the guest runs; each change is followed by a check of every thread.

An attachment is all or nothing: one that fails is undone. Steps that can fail come before the guest gets the disk, because only the guest
can release it, and it may refuse: the threads are verified and the receipt is written before the device is added, and again afterwards. A
guest that does not release a disk keeps it; a second detach continues from there. A disk that was detached or grown stays so even if a
thread is found out of its place afterwards, or the receipt cannot be written, which is reported as an error that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import attrs
import trio

from runner.base.errors import HostError, RefusedError, RunnerError, SpecError, explain
from runner.base.events import InstanceEvent
from runner.base.values import define, short_text, whole_number
from runner.facts.disk import LateDiskFacts
from runner.facts.host import User
from runner.host.facts_reader import read_disk_facts
from runner.instance.change.running_instance import AttachedDisk, RunningInstance, UndoCommand
from runner.instance.gate import Changes, Kind
from runner.instance.parts.disks import opened
from runner.instance.parts.qemu_events import DiskEvents
from runner.kernel.file_prober import probe_file
from runner.kernel.shared_directories import followed, place_of
from runner.plan.argv.block_nodes import block_nodes, disk_device, slot
from runner.plan.disks import DiskPlan, disk_words, plan_disk, remark_little_space
from runner.plan.instance import InstancePlan
from runner.plan.problems import Problems
from runner.protocol.qmp import ExecuteError, Monitor
from runner.spec.instance import DiskSpec
from runner.spec.rules import format_size

if TYPE_CHECKING:
    from runner.instance.control_json import DiskDocument

log = logging.getLogger(__name__)

UNDONE_WITHIN = 5.0
"""Seconds in which QEMU must remove the objects created for a disk; it takes milliseconds, unless a file system hangs."""


class DiskMachine(Protocol):
    """The machine that disks are attached to: a running :class:`~runner.instance.parts.qemu.Qemu`."""

    @property
    def monitor(self) -> Monitor:
        """Return the connection to the QEMU that has the guest."""

    @property
    def disk_events(self) -> DiskEvents:
        """Return QEMU's events about disks, such as the guest's release of one."""


@define
class DiskHotplug:
    """The disks of a running machine."""

    _plan: InstancePlan
    _machine: DiskMachine
    _changes: Changes
    _verify: Callable[[], Awaitable[None]]
    _in_pod_cgroup: Callable[[], AbstractContextManager[None]]
    _released_within: float
    """Seconds in which the guest must release a disk."""
    _attached: dict[str, AttachedDisk] = attrs.field(factory=dict)

    @property
    def free_slots(self) -> int:
        """Return how many disks can still be attached."""
        return len(list(self._free_slots()))

    async def listed(self) -> list[DiskDocument]:
        """Return each disk as JSON; those present at the start come first."""
        return self._listed(await self._sizes())

    def listed_without_sizes(self) -> list[DiskDocument]:
        """Return each disk as :meth:`listed` does, without asking QEMU."""
        return self._listed({})

    def _listed(self, sizes: Mapping[str, int]) -> list[DiskDocument]:
        disks = [self._described(disk, sizes, None) for disk in self._plan.machine.disks]
        return disks + [self._described(each.plan, sizes, each) for each in self._attached.values()]

    def _described(self, disk: DiskPlan, sizes: Mapping[str, int], attached: AttachedDisk | None) -> DiskDocument:
        released = attached is not None and self._machine.disk_events.unplugged(disk.name).is_set()
        return {
            "name": disk.name,
            "path": str(disk.path),
            "format": disk.layers[0].format,
            "size": sizes.get(disk.name),
            "read_only": disk.read_only,
            "ephemeral": disk.overlay is not None,
            "serial": disk.serial,
            "attached": attached is not None,
            "released": released,
        }

    async def attach(self, disk: DiskSpec) -> DiskDocument:
        """Attach *disk* and return it as :meth:`listed` does.

        Raises :exc:`~runner.base.errors.RunnerError`, in which case the machine is unchanged.
        """
        async with self._changes.begin(Kind.DISK, "a disk is being attached") as change:
            number = next(self._free_slots(), None)
            if number is None:
                raise RefusedError(
                    f"cannot attach another disk: all {self._plan.machine.slots} slots are taken",
                    remedy="detach one, or start the instance with more (hotplug.disks)",
                )
            with ExitStack() as stack:
                plan, numbers = self._opened(f"disk{len(self._plan.machine.disks) + number}", disk, stack)
                self._machine.disk_events.watch(plan.name)
                attached = AttachedDisk(plan, number, await self._create(plan, numbers))
            self._attached[plan.name] = attached
            change.left = f"the disk {plan.name!r} is attached"
            await self._add(attached)
            failure: RunnerError | None = None
            try:
                await self._verify()
            except RunnerError as error:
                failure = error
            if failure is not None:
                await self._take_back(attached, failure)
            log.info(InstanceEvent.DISK_ATTACHED, plan.name, disk_words(plan))
            return self._described(plan, await self._sizes(), attached)

    async def _take_back(self, attached: AttachedDisk, failure: RunnerError) -> NoReturn:
        """Detach a disk that the guest already has, and raise *failure*, together with the reason if the disk stays."""
        try:
            await self._detach(attached)
            await self._verify()  # the receipt may name a thread that has ended with the disk
        except RunnerError as error:
            if attached.plan.name in self._attached:
                raise HostError(f"{explain(failure)}; and the disk is still attached: {explain(error)}") from None
        raise failure

    def _opened(self, name: str, disk: DiskSpec, stack: ExitStack) -> tuple[DiskPlan, Mapping[str, int]]:
        """Plan *disk* and open its files; if one is a block device, in the pod's cgroup, where the pod may open it."""
        facts = read_disk_facts(disk, self._plan.state_directory)
        with ExitStack() as moved:
            if any(file.kind == "block" for file in facts.files.values()):
                moved.enter_context(self._in_pod_cgroup())
                facts = read_disk_facts(disk, self._plan.state_directory)
            plan = self._planned(name, disk, facts)
            numbers = stack.enter_context(opened(plan, self._plan.state_directory))
            top = plan.name if plan.overlay is None else next(name for name, _ in plan.below())
            refuse_elsewhere(plan.path, numbers[top], self._plan.machine.user)
            return plan, numbers

    def _planned(self, name: str, disk: DiskSpec, facts: LateDiskFacts) -> DiskPlan:
        problems = Problems()
        plan = plan_disk(name, disk, facts, "disk", problems)
        others = (*self._plan.machine.disks, *(each.plan for each in self._attached.values()))
        if disk.serial is not None and any(other.serial == disk.serial for other in others):
            problems.refuse("disk.serial", f"{disk.serial!r} is taken by another disk already")
        if plan.iothread and self._plan.machine.ram.locked:
            problems.refuse(
                "disk.iothread", "must be false: with memory.lock all threads are counted at the start", "leave it out"
            )
        remark_little_space((plan,), facts.free_space, problems)
        if problems.found:
            raise SpecError("ctl", problems.found)
        for remark in problems.remarks:
            log.warning(InstanceEvent.DISK_REMARKED, plan.name, remark)
        return plan

    async def _create(self, plan: DiskPlan, numbers: Mapping[str, int]) -> tuple[UndoCommand, ...]:
        """Create the fdsets, nodes and iothread of *plan*; return the commands that undo each step, in the order of the steps."""
        done: list[UndoCommand] = []

        async def execute(
            command: str, arguments: Mapping[str, object], undo: UndoCommand, fds: Sequence[int] = ()
        ) -> None:
            done.append(undo)  # recorded first: an overtaken change does not wait for the answer
            try:
                await self._machine.monitor.execute(command, arguments, fds=fds)
            except ExecuteError:
                done.pop()
                raise

        try:
            names: dict[str, str] = {}
            for fdset, (name, number) in enumerate(numbers.items(), await self._free_fdset()):
                arguments = {"fdset-id": fdset, "opaque": name}
                await execute("add-fd", arguments, ("remove-fd", {"fdset-id": fdset}), (number,))
                names[name] = f"/dev/fdset/{fdset}"
            for node in block_nodes(plan, names.__getitem__):
                await execute("blockdev-add", node, ("blockdev-del", {"node-name": node["node-name"]}))
            if plan.iothread:
                iothread = {"qom-type": "iothread", "id": plan.name}
                await execute("object-add", iothread, ("object-del", {"id": plan.name}))
            await self._verify()
        except BaseException:
            await self._undo(done)  # noqa: ASYNC102 - it shields itself, and has a limit
            raise
        return tuple(done)

    async def _add(self, attached: AttachedDisk) -> None:
        """Give the guest the disk, whose other parts exist already; undo those if QEMU refuses the device."""
        failure: RunnerError | None = None
        try:
            await self._machine.monitor.execute("device_add", disk_device(attached.plan, bus=slot(attached.slot)))
        except RunnerError as error:
            failure = error
        if failure is not None:
            del self._attached[attached.plan.name]
            await self._undo(attached.undo)
            raise failure

    async def _free_fdset(self) -> int:
        """Return the first number above those of all fdsets; if QEMU numbers one, only its answer says which one to remove."""

        def parse(reply: Any) -> int:
            return 1 + max((whole_number(each["fdset-id"]) for each in reply), default=0)

        return await self._machine.monitor.query("query-fdsets", parse)

    async def _undo(self, done: Sequence[UndoCommand]) -> None:
        """Undo the steps *done*, even when this change is overtaken."""
        with trio.move_on_after(UNDONE_WITHIN, shield=True):
            for command, arguments in reversed(done):
                try:
                    await self._machine.monitor.execute(command, arguments)
                except ExecuteError as error:  # the other steps can still be undone
                    log.warning(InstanceEvent.DISK_UNDO_FAILED, explain(error))

    async def detach(self, name: str) -> None:
        """Detach the disk *name*; the guest may refuse to release it.

        Raises :exc:`~runner.base.errors.RunnerError`, in which case the disk is still attached, unless the error says otherwise.
        """
        async with self._changes.begin(Kind.DISK, f"the disk {name!r} is being detached") as change:
            if any(disk.name == name for disk in self._plan.machine.disks):
                raise RefusedError(
                    f"cannot detach {name!r}: the machine was started with it",
                    remedy="what `disk attach` has added can be detached",
                )
            change.left = f"the guest may release the disk {name!r} later; detach it again"
            await self._detach(self._find(name))
            change.left = f"the disk {name!r} is detached"
            await self._verify_after(f"the disk {name!r} is detached")
            log.info(InstanceEvent.DISK_DETACHED, name)

    async def _detach(self, attached: AttachedDisk) -> None:
        name = attached.plan.name
        unplugged = self._machine.disk_events.unplugged(name)
        try:
            await self._machine.monitor.execute("device_del", {"id": name})
        except ExecuteError as error:
            if error.kind == "DeviceNotFound":  # the guest has released it meanwhile, or unasked
                unplugged.set()
            elif not error.in_process_of_unplug:
                raise
        with trio.move_on_after(self._released_within):
            await unplugged.wait()
        if not unplugged.is_set():
            raise RefusedError(
                f"cannot detach {name!r}: the guest has not released it within {self._released_within:g} s, and it stays attached",
                remedy="unmount it there and detach it again",
            )
        await self._undo(attached.undo)
        del self._attached[name]

    async def grow(self, name: str, size: int | None) -> DiskDocument:
        """Grow the disk *name* to *size* bytes, or to all of its block device, and return it as :meth:`listed` does.

        Raises :exc:`~runner.base.errors.RunnerError`, in which case nothing has changed, unless the error says otherwise.
        """
        async with self._changes.begin(Kind.DISK, f"the disk {name!r} is being grown") as change:
            attached = self._attached.get(name)
            boot = next((disk for disk in self._plan.machine.disks if disk.name == name), None)
            disk = boot or self._find(name).plan
            before = (await self._sizes()).get(name, 0)
            with self._in_pod_cgroup() if disk.layers[0].block else nullcontext():
                size = _target_size(disk, before, size)
            change.left = f"the disk {name!r} may have {format_size(size)} now"
            await self._machine.monitor.execute("block_resize", {"node-name": name, "size": size})
            await self._verify_after(f"the disk {name!r} has {format_size(size)}")
            log.info(InstanceEvent.DISK_GROWN, name, format_size(before), format_size(size))
            return self._described(disk, await self._sizes(), attached)

    async def _verify_after(self, done: str) -> None:
        """Verify every thread. Raises :exc:`~runner.base.errors.HostError`, which names the steps *done*."""
        try:
            await self._verify()
        except RunnerError as error:
            raise HostError(f"{done}, but {explain(error)}") from None

    def _find(self, name: str) -> AttachedDisk:
        if name not in self._attached:
            known = ", ".join([disk.name for disk in self._plan.machine.disks] + list(self._attached)) or "none"
            raise RefusedError(f"cannot find the disk {name!r}", remedy=f"there are: {known}")
        return self._attached[name]

    def _free_slots(self) -> Iterator[int]:
        taken = {each.slot for each in self._attached.values()}
        return (number for number in range(self._plan.machine.slots) if number not in taken)

    async def _sizes(self) -> dict[str, int]:
        def parse(reply: Any) -> dict[str, int]:
            return {short_text(node["node-name"]): whole_number(node["image"]["virtual-size"]) for node in reply}

        return await self._machine.monitor.query("query-named-block-nodes", parse, {"flat": True})


def disks_of(running: RunningInstance) -> DiskHotplug:
    """Return the disks of a running instance."""
    changes, within = running.supervisor.changes, running.supervisor.timeouts.disk_released
    verify, in_pod_cgroup = running.receipts.verify, running.active.in_pod_cgroup
    return DiskHotplug(running.plan, running.machine, changes, verify, in_pod_cgroup, within, running.attached)


def refuse_elsewhere(path: PurePosixPath, fd: int, user: User) -> None:
    """Refuse *fd*, opened by *path*, if the path now leads elsewhere, or leads through a link of QEMU's *user*."""
    place, found = place_of(fd), followed(path)
    if place != found.place or user.may_control(found.link_owners):
        raise HostError(f"cannot open {str(path)!r}: it led to {str(place)!r} for a moment")


def _target_size(disk: DiskPlan, before: int, size: int | None) -> int:
    """Return the size in bytes that *disk* is to have. Raises :exc:`RefusedError` if it cannot grow to *size*."""
    if not disk.written:
        kind = "read-only" if disk.read_only else "ephemeral"
        raise RefusedError(f"cannot grow {disk.name!r}: it is {kind}")
    if disk.layers[0].block:
        there = probe_file(PurePosixPath(disk.path)).size
        if size is not None and size > there:
            raise RefusedError(
                f"cannot grow {disk.name!r} to {format_size(size)}: {str(disk.path)!r} has {format_size(there)}",
                remedy="grow that first",
            )
        size = size or there
    if size is None:
        raise RefusedError(f"cannot grow {disk.name!r}: it is a file", remedy="say to what size")
    if size <= before:
        raise RefusedError(
            f"cannot grow {disk.name!r} to {format_size(size)}: it has {format_size(before)} already, and a disk never shrinks"
        )
    return size
