"""Replacing QEMU under a running guest: ``cpr-transfer`` (``docs/devel/migration/CPR.rst`` of QEMU).

1. Parts of the machine that cannot be transferred are refused by name, before anything is touched.
2. A second QEMU is started, in the pod's cgroup as the first was, with the same machine and the same descriptors: RAM, files, taps,
   console. Each share gets a second virtiofsd, which serves it. The second QEMU waits for the first.
3. The first QEMU sends the descriptors of its other memory (``aux-ram-share``), stops the guest, and sends the devices' state, with
   that of each virtiofsd in it (``docs/interop/vhost-user.rst``, *Migrating back-end state*).
4. The second QEMU's vCPU threads are confined, pinned and read back. It must show the guest the same CPU.
5. ``cont``: the second QEMU runs the guest. The first is ended, with each virtiofsd that served it.

A failure before step 5, or a request to stop, ends the second QEMU, and the first continues. Until then the first keeps the guest's
memory and devices, and its virtiofsd the guest's files. Both never run the guest at the same time, because the first continues only
after the second has ended. With a device there is no such way back, because QEMU crashes on it (:func:`_device_reason`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import HostError, RefusedError, RunnerError, explain
from runner.base.events import InstanceEvent
from runner.base.tasks import first_of
from runner.base.values import frozen, short_text, whole_number
from runner.facts.host import format_version, parse_version
from runner.host.facts_reader import ask_qemu_version
from runner.instance.change.running_instance import RunningInstance
from runner.instance.change.vcpus import vcpus_of
from runner.instance.gate import Kind
from runner.instance.parts.daemons import STOPPED_WITHIN
from runner.instance.parts.qemu import EXITS_WITHIN, Qemu, spawn_qemu
from runner.instance.parts.shares import HeldShare, started_virtiofsd
from runner.instance.parts.thread_placement import QemuThreads, enter_places
from runner.kernel.character_devices import vhost_net
from runner.kernel.child_processes import Process, stop_bound
from runner.kernel.connections import accepted, copy_between
from runner.kernel.files import reopened
from runner.kernel.limits import lockable
from runner.kernel.meeting_point import CPR_SOCKET, MAIN_SOCKET, MeetingPoint, meeting_point
from runner.kernel.program_directory import check_file
from runner.kernel.sockets import Socket, connected_pair
from runner.kernel.tap_queues import attach_queue, detach_queue
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.machine import Accel, MachinePlan
from runner.plan.network_plan import InheritedFdPlan, NetworkPlan, PasstPlan
from runner.plan.passthrough_plan import DevicePlan
from runner.plan.qemu_limits import REPLACED_SINCE
from runner.plan.shares import SharePlan
from runner.protocol.qmp import ExecuteError, Monitor, QmpError, QmpEvent

if TYPE_CHECKING:
    from runner.instance.control_json import QemuCheckAnswer, QemuUpdateAnswer
    from runner.protocol.instance_metrics import QemuUpdateOutcome

log = logging.getLogger(__name__)

CONTINUES_WITHIN = 10.0
"""Seconds in which the first QEMU must run the guest again after a failure."""

ASKED_AGAIN = 0.002
"""Seconds between two queries of a state for which QEMU sends no event."""

_AGAIN = "start the instance again"
_OVER = frozenset({"completed", "failed", "cancelled", "none"})
"""States of a transfer that has ended (``MigrationStatus`` of ``qapi/migration.json``)."""


@frozen
class _NextQemu:
    path: PurePosixPath
    version: str


@frozen
class QemuProgram:
    """The QEMU that is to take over, as the request names it."""

    path: PurePosixPath | None
    """``None`` stands for the plan's program."""
    digest: str | None
    """The required digest of its file; ``None`` accepts any."""


async def check(running: RunningInstance, program: QemuProgram, *, no_way_back: bool) -> QemuCheckAnswer:
    """Return the versions of the running QEMU and of *program*, and the reasons why *program* cannot take over.

    With *no_way_back*, passed-through devices are allowed, although the first QEMU then cannot continue if the update fails.
    """
    successor, reasons = await _checked(running, program, no_way_back=no_way_back)
    return {
        "running": running.machine.monitor.version,
        "program": str(successor.path),
        "program_version": successor.version,
        "machine": await _machine_type(running.machine.monitor),
        "refused": reasons,
    }


async def _checked(running: RunningInstance, program: QemuProgram, *, no_way_back: bool) -> tuple[_NextQemu, list[str]]:
    path = program.path or running.plan.machine.program
    reasons = [*_start_reasons(running), *_part_reasons(running, no_way_back=no_way_back)]
    for daemon in dict.fromkeys(share.program.path for share in running.plan.machine.shares):
        reasons += await _program_reasons(daemon)
    if unusable := await _program_reasons(path, program.digest):
        return _NextQemu(path, ""), [*reasons, *unusable]  # the program is not executed
    # With QEMU's own rights: asking a program for its version already executes its code.
    version, error = await ask_qemu_version(running.supervisor.processes, path, running.plan.machine.user)
    successor = _NextQemu(path, version)
    if not version:
        reasons.append(f"cannot use {str(path)!r}: {error}")
    versions = ((f"{str(path)!r}", successor.version), ("the QEMU that runs", running.machine.monitor.version))
    oldest = format_version(REPLACED_SINCE)
    reasons += [f"{which} is QEMU {version}, older than {oldest}" for which, version in versions if _older(version)]
    monitor = running.machine.monitor
    return successor, [*reasons, *await monitor.within(running.answers_within, partial(_qemu_reasons, running))]


async def _qemu_reasons(running: RunningInstance) -> list[str]:
    """Return QEMU's own reasons against the update."""
    monitor = running.machine.monitor
    blocked = [] if _older(monitor.version) else await _blocker_reasons(monitor)
    return [*blocked, *await _vcpu_reasons(running), *await _state_reasons(running)]


async def _program_reasons(program: PurePosixPath, digest: str | None = None) -> list[str]:
    """Return the reasons why *program* must not be executed: users other than root may change it, or its digest is not *digest*."""
    try:
        await check_file(program, digest)
    except RefusedError as error:
        return [explain(error)]
    return []


def _older(version: str) -> bool:
    return bool(version) and parse_version(version) < REPLACED_SINCE


def _start_reasons(running: RunningInstance) -> Iterator[str]:
    """Yield the reason why the machine, as it was started, cannot be transferred."""
    if not running.plan.machine.updatable:
        yield f"the machine was not started for it; set hotplug.qemu = true and {_AGAIN}"
    elif running.machine.fds is None:
        yield f"the runner that started it kept no copies of QEMU's descriptors; {_AGAIN}"


def _part_reasons(running: RunningInstance, *, no_way_back: bool) -> Iterator[str]:
    """Yield the reasons why parts of the machine, by their names in the spec, cannot be transferred to another QEMU."""
    machine = running.plan.machine
    for share in machine.shares:
        if not share.updatable:
            yield f"the share {share.tag!r} cannot go along: {_share_reason(share)}"
    if machine.guest.vsock is not None:
        yield "guest.vsock cannot go along: its context identifier belongs to the first QEMU until that has ended"
    for device in machine.passthrough.devices:
        if reason := _device_reason(device, machine.accel, no_way_back=no_way_back):
            yield f"the device {device.address} cannot go along: {reason}"
    if machine.ram.locked:
        yield "memory.lock cannot go along: two QEMUs would lock their memory at the same time"
    for index, network in enumerate(machine.networks):
        if reason := _network_reason(network):
            yield f"network[{index}] cannot go along: {reason}"
    for disk in running.attached.values():
        yield (
            f"the disk {disk.plan.name!r} cannot go along: it was attached while the guest runs; detach it first, and attach it "
            "again afterwards"
        )


def _share_reason(share: SharePlan) -> str:
    """Return the reason why another virtiofsd cannot take over *share*."""
    if share.program.hands_over:
        return f"its virtiofsd was not started for it; {_AGAIN}"
    version = format_version(share.program.version)
    return f"virtiofsd {version}{'' if share.program.rust else ' (in C)'} cannot hand its state over; the one in Rust can from 1.12 on"


def _device_reason(device: DevicePlan, accel: Accel, *, no_way_back: bool) -> str:
    """Return the reason why *device* cannot be transferred, empty if it can.

    QEMU 11.1.3 was seen to crash in ``vfio_cpr_set_msi_virq``: without KVM at once, and with KVM when the transfer fails.
    """
    if device.vfio_backend == "legacy":
        return f'its IOMMU group can be opened by one process; set device.iommu = "iommufd" and {_AGAIN}'
    if accel == "tcg":
        return "without KVM, QEMU crashes when it hands a device over"
    return (
        "" if no_way_back else "QEMU crashes, and the guest ends, if the update fails then; --no-way-back accepts that"
    )


def _network_reason(network: NetworkPlan) -> str:
    """Return the reason why the connection of *network* cannot be transferred, empty if it can."""
    if isinstance(network, PasstPlan) or (isinstance(network, InheritedFdPlan) and network.kind == "socket"):
        return "QEMU may have read half a packet from its connection"
    if isinstance(network, InheritedFdPlan) and network.vhost_fds:
        return "its vhost-net descriptors serve one QEMU, and this program did not open them"
    return ""


async def _blocker_reasons(monitor: Monitor) -> list[str]:
    """Return QEMU's own blockers, such as a device whose kernel has no ``IOMMU_IOAS_CHANGE_PROCESS``.

    QEMU answers for the migration mode that is set, which is the one used for the transfer.
    """
    await monitor.execute("migrate-set-parameters", {"mode": "cpr-transfer"})
    blockers = await monitor.query(
        "query-migrate", lambda reply: [short_text(each) for each in reply.get("blocked-reasons", ())]
    )
    return [f"QEMU cannot hand its devices over: {reason}" for reason in blockers]


async def _vcpu_reasons(running: RunningInstance) -> list[str]:
    """Return the reason why the vCPUs cannot be transferred: the next QEMU is started with the number in the spec."""
    count = running.plan.machine.vcpus
    if running.plan.machine.vcpu_hotplug is None:
        return []
    vcpus = (await vcpus_of(running).listed())["vcpus"]
    if later := CpuSet(each["vcpu"] for each in vcpus if each["plugged_later"]):
        reason = f"`ctl cpus {min(later)}` unplugs them, and they can be plugged again afterwards"
        return [f"the vCPUs {later} cannot go along: they were plugged while the guest runs; {reason}"]
    if len(vcpus) != count:
        return [
            f"the machine was started with {count} vCPUs, and {len(vcpus)} are left, which cannot go along; {_AGAIN}"
        ]
    return []


async def _state_reasons(running: RunningInstance) -> list[str]:
    """Return the reason why the update is not possible at this moment."""
    runs, state = await running.machine.monitor.query(
        "query-status", lambda reply: (reply["running"], short_text(reply["status"]))
    )
    reasons = [] if runs is True else [f"the guest does not run: QEMU says {state!r}"]
    if misplaced := running.receipts.misplaced():
        reasons.append(f"not every thread is in its place: {misplaced}")
    return reasons


async def _machine_type(monitor: Monitor) -> str:
    """Return the versioned name of the machine that the guest was started with, such as ``pc-q35-10.1``.

    It becomes a word of the successor's command line, where a comma would begin another property of the machine.
    """

    def parse(reply: Any) -> str:
        name = short_text(reply).removesuffix("-machine")
        if re.fullmatch(r"[A-Za-z0-9._+-]+", name) is None:
            raise ValueError("no name of a machine")
        return name

    return await monitor.query("qom-get", parse, {"path": "/machine", "property": "type"})


async def update(running: RunningInstance, program: QemuProgram, *, no_way_back: bool) -> QemuUpdateAnswer:
    """Replace the running QEMU by *program*; return both versions, the process and the pause.

    Raises :exc:`~runner.base.errors.RunnerError`; the previous QEMU then still has the guest, unless the error says otherwise.
    """
    async with running.supervisor.changes.begin(Kind.QEMU_UPDATE, "QEMU is being updated"):
        successor, reasons = await _checked(running, program, no_way_back=no_way_back)
        if reasons:
            raise RefusedError(f"cannot update QEMU: {'; '.join(reasons)}")
        before = running.machine.monitor.version
        moved = await _Move(running, successor, running.receipts.threads).carry_out()
    log.info(InstanceEvent.QEMU_UPDATED, moved.pid, successor.version, before, moved.pause * 1000)
    return {"from": before, "to": successor.version, "pid": moved.pid, "pause_ms": round(moved.pause * 1000)}


@frozen
class _Moved:
    pid: int
    pause: float
    """Seconds for which the guest did not run."""


@attrs.define
class _Move:
    """The transfer of one guest from the QEMU that has it, the *source*, to another one, the *successor*."""

    running: RunningInstance
    program: _NextQemu
    threads: QemuThreads
    """The source's threads."""
    successor: Qemu | None = None
    stopped: float | None = None
    """The time at which the guest was stopped, on the clock of the event loop."""
    daemons: list[Process] = attrs.field(factory=list)
    """The virtiofsd that serves the successor, one for each share."""
    over: trio.Event = attrs.field(factory=trio.Event)
    """Set when the source reports the end of the transfer, successful or not."""
    preparing: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Until the successor could run the guest; cancelled at its deadline, which counts anew when the guest is stopped."""
    displaced: bool = False
    """Whether the source's vCPU threads have left their CPUs."""
    queues: dict[int, bool] = attrs.field(factory=dict)
    """The tap queues that were attached for the successor: our descriptor → whether the queue was detached before."""

    @property
    def source(self) -> Qemu:
        """The QEMU that has the guest."""
        return self.running.machine

    async def carry_out(self) -> _Moved:
        """Transfer the guest. Raises :exc:`~runner.base.errors.HostError`; the source then keeps it, unless the error says otherwise."""
        moved: _Moved | None = None
        failure, continues = "", False
        try:
            moved = await self._let_run(await self._prepared())
        except RunnerError as error:
            failure = explain(error)
        finally:
            if moved is None:
                with trio.move_on_after(stop_bound(CONTINUES_WITHIN), shield=True):
                    continues = await self._go_back()
                with trio.move_on_after(stop_bound(len(self.daemons)), shield=True):
                    await self._end_daemons()
        if moved is None:
            failure += "".join(f"; {each.role}: {each.last_lines[-1]}" for each in self.daemons if each.last_lines)
            log.warning(InstanceEvent.QEMU_NOT_UPDATED, failure)
            failure += "; the one before continues" if continues else "; and the one before does not continue"
            raise HostError(f"cannot update QEMU: {failure}")
        return moved

    async def _prepared(self) -> Qemu:
        """Return the successor, ready to run the guest, as the source still is."""
        timeouts = self.running.supervisor.timeouts
        self.preparing.deadline = trio.current_time() + timeouts.next_qemu
        with self.preparing, ExitStack() as stack:
            return await self._prepare(stack)
        if self.stopped is None:
            raise HostError(f"the next one was not ready within {timeouts.next_qemu:g} s")
        raise HostError(f"the next one did not take over within {timeouts.takeover:g} s of the guest's stop")

    async def _prepare(self, stack: ExitStack) -> Qemu:
        monitor = self.source.monitor
        plan = attrs.evolve(
            self.running.plan.machine, program=self.program.path, machine_type=await _machine_type(monitor)
        )
        cpu = await _cpu(monitor)
        stack.enter_context(monitor.observed_by(self._observe))
        successor = await self._transferred(plan, stack)
        if await _cpu(successor.monitor) != cpu:
            raise HostError(
                f"{str(self.program.path)!r} shows the guest another CPU",
                remedy="name a CPU model that both know (cpu.model)",
            )
        await self._place(successor)
        return successor

    async def _transferred(self, plan: MachinePlan, stack: ExitStack) -> Qemu:
        """Return the successor, which has received the source's state and is paused."""
        await self.source.monitor.execute(
            "migrate-set-capabilities", {"capabilities": [{"capability": "events", "state": True}]}
        )
        recorded = self.running.supervisor.faults.recorded
        point = stack.enter_context(meeting_point(self.running.plan.state_directory, recorded))
        ours, theirs = stack.enter_context(connected_pair("the guest's state"))
        return await first_of(partial(self._transfer, plan, point, theirs), partial(_pass_on, point.main, ours))

    async def _transfer(self, plan: MachinePlan, point: MeetingPoint, main: Socket) -> Qemu:
        monitor = self.source.monitor
        number = await monitor.query(
            "add-fd", lambda reply: whole_number(reply["fd"]), {"opaque": _MEETING_POINT}, fds=(point.directory,)
        )
        incoming = (
            _channel("cpr", type="fd", str=str(point.cpr.fileno())),
            _channel("main", type="fd", str=str(main.fileno())),
        )
        successor = self._start(plan, incoming, (point.cpr.fileno(), main.fileno()))
        point.cpr.close()
        main.close()
        beneath = f"/proc/self/fd/{number}"
        outgoing = (
            _channel("main", type="unix", path=f"{beneath}/{MAIN_SOCKET}"),
            _channel("cpr", type="unix", path=f"{beneath}/{CPR_SOCKET}"),
        )
        refused: ExecuteError | None = None
        try:
            await monitor.execute("migrate", {"channels": outgoing})
        except ExecuteError as error:
            refused = error
        if refused is not None:
            with trio.move_on_after(EXITS_WITHIN):  # its listening socket is closed before its end is known
                await successor.process.wait()
            if successor.process.returncode is None:
                raise refused
        await successor.greeted()  # or raises the reason why it has ended
        await first_of(self.over.wait, successor.process.wait, self.source.process.wait)
        transferred, reason = await monitor.query(
            "query-migrate", lambda reply: (short_text(reply["status"]), short_text(reply.get("error-desc", "")))
        )
        if transferred != "completed":
            raise HostError(f"its state was not transferred: {reason or transferred}")
        while (state := await successor.monitor.run_state()) == "inmigrate":  # noqa: ASYNC110 - QEMU sends no event then
            await trio.sleep(ASKED_AGAIN)
        self.source.process.send_signal(signal.SIGSTOP)  # otherwise it reads a packet from each tap, which is lost
        if state != "paused":  # the state before the transfer, unless the guest ran
            raise HostError(f"the guest did not run: the next one says {state!r}")
        return successor

    def _observe(self, event: QmpEvent) -> None:
        if event.name == "STOP" and self.stopped is None:
            self.stopped = trio.current_time()
            self.preparing.deadline = self.stopped + self.running.supervisor.timeouts.takeover
        if event.name == "MIGRATION" and event.data.get("status") in _OVER:
            self.over.set()

    def _start(self, plan: MachinePlan, incoming: Iterable[Mapping[str, object]], more: tuple[int, ...]) -> Qemu:
        """Start the successor, which waits for the source's state, in the cgroup that the guest's memory is charged to."""
        supervisor, kept = self.running.supervisor, self.source.fds
        assert kept is not None  # noqa: S101 - else it was refused
        options = tuple(word for each in incoming for word in ("-incoming", json.dumps(each)))
        with ExitStack() as lent:
            ours, theirs = lent.enter_context(connected_pair("QMP"))
            vhosts = [
                tuple(lent.enter_context(vhost_net()).number for _ in (each.taps if _has_vhost(network) else ()))
                for each, network in zip(kept.wires, plan.networks, strict=True)
            ]
            wires = (attrs.evolve(each, vhosts=fds) for each, fds in zip(kept.wires, vhosts, strict=True))
            files = {name: lent.enter_context(reopened(number)) for name, number in kept.files.items()}
            shares = tuple(lent.enter_context(self._start_virtiofsd(share)).fileno() for share in self.source.shares)
            devices = _devices(plan, theirs.fileno())
            for queue in _more_queues(kept):
                self.queues[queue] = attach_queue(queue)
            descriptors = attrs.evolve(
                kept, qmp=theirs.fileno(), wires=tuple(wires), files=files, shares=shares, devices=devices
            )
            cgroup = self.running.active.memory_cgroup_fd
            lent.enter_context(lockable(plan.lockable))
            process = spawn_qemu(supervisor, plan, descriptors, cgroup, options, more)
            # Noted before anything else can fail: what is lent is released at the end of this block.
            monitor = Monitor(Socket(ours.family, ours.type, ours.proto, ours.detach()))
            self.successor = Qemu(process, monitor, None, supervisor.changes, supervisor.log_limit)
        return self.successor

    @contextmanager
    def _start_virtiofsd(self, share: HeldShare) -> Iterator[Socket]:
        """Start another virtiofsd for *share*; hold the connection that the successor gets."""
        with started_virtiofsd(self.running.supervisor, share.plan, share.directory) as (daemon, connection):
            self.daemons.append(daemon)
            yield connection

    async def _place(self, successor: Qemu) -> None:
        """Give the successor's vCPU threads the CPUs of the source's threads, and read every thread back."""
        active = self.running.active
        threads = QemuThreads(successor.process, await successor.vcpu_threads(), await successor.iothreads())
        active.admit(successor.process.pid)
        # Before the source's leave: the controller unseals the CPUs of a cgroup without threads.
        enter_places(active, active.placement, threads.vcpus)
        self.displaced = True
        for vcpu in self.threads.vcpus:
            with contextlib.suppress(HostError):  # it has ended, or reading back detects it
                active.release(vcpu.tid)
        self.running.receipts.follow(threads)

    async def _let_run(self, successor: Qemu) -> _Moved:
        """Let the successor run the guest; from here on the source's state is out of date, and it never runs the guest again.

        The successor has the whole guest: the source may have ended meanwhile.
        """
        if self.source.guest_ended:
            raise HostError("the guest ends")
        if successor.process.returncode is not None:
            raise HostError(f"the next one {successor.process.how_it_ended()}")
        for daemon in self.daemons:
            if daemon.returncode is not None:
                raise HostError(f"the next {daemon.role} {daemon.how_it_ended()}")
        with trio.CancelScope(shield=True):
            try:
                with trio.move_on_after(self.running.supervisor.timeouts.guest_runs):
                    await successor.resume()
            except ExecuteError:
                raise
            except QmpError as error:  # the successor has ended, or is in an unknown state: the guest's end
                log.error(InstanceEvent.NEXT_QEMU_LOST, explain(error))  # noqa: TRY400 - one line
            pause = 0.0 if self.stopped is None else trio.current_time() - self.stopped
            process, monitor = self.source.replace(successor.process, successor.monitor)
            shares = zip(self.source.shares, self.daemons, strict=True)
            daemons = [share.daemon.replace(daemon) for share, daemon in shares]
            supervisor = self.running.supervisor
            supervisor.counters.qemu_updates["updated"] += 1
            monitor.close()
            with supervisor.faults.recorded("end the QEMU before"):  # its disks are inactive: nothing to write
                await supervisor.processes.kill(process)
            for daemon in daemons:
                with supervisor.faults.recorded(f"end the {daemon.role} before"):
                    await supervisor.processes.stop(daemon, STOPPED_WITHIN)
            try:
                self.running.receipts.publish_verified()
            except RunnerError as error:
                log.warning(InstanceEvent.RECEIPT_OUTDATED_BY_QEMU_UPDATE, explain(error))
        return _Moved(successor.process.pid, pause)

    async def _go_back(self) -> bool:
        """End the successor, let the source run the guest again, and return whether it does."""
        supervisor = self.running.supervisor
        outcome: QemuUpdateOutcome = "lost"
        try:
            if self.displaced:
                with contextlib.suppress(HostError):  # found when they are read back
                    enter_places(self.running.active, self.running.active.placement, self.threads.vcpus)
            if self.successor is not None:
                self.successor.monitor.close()
                await supervisor.processes.kill(self.successor.process)
            with trio.fail_after(CONTINUES_WITHIN):
                await self._continue()
            outcome = "fell_back"
        except (RunnerError, trio.TooSlowError) as error:
            if not self.source.ends:
                log.error(InstanceEvent.QEMU_LOST, explain(error))  # noqa: TRY400
                supervisor.stop.ask("QEMU could not be updated, and the one before does not continue")
        finally:
            supervisor.counters.qemu_updates[outcome] += 1
        return outcome == "fell_back"

    async def _end_daemons(self) -> None:
        """End the successor's daemons, which normally end by themselves with their connections."""
        supervisor = self.running.supervisor
        for daemon in self.daemons:
            with supervisor.faults.recorded(f"end the next {daemon.role}"):
                await supervisor.processes.kill(daemon)

    async def _continue(self) -> None:
        """Let the source run the guest, whatever state of the transfer it is in."""
        monitor = self.source.monitor
        self.source.process.send_signal(signal.SIGCONT)
        ask = partial(monitor.query, "query-migrate", lambda reply: short_text(reply.get("status", "none")))
        if (state := await ask()) not in _OVER:
            await monitor.execute("migrate_cancel")
        while state not in _OVER:
            await trio.sleep(ASKED_AGAIN)
            state = await ask()
        await _take_back_fds(monitor)
        for queue, detached in self.queues.items():
            (detach_queue if detached else attach_queue)(queue)
        if self.displaced:
            self.running.receipts.follow(self.threads)
        if await monitor.run_state() in {"postmigrate", "finish-migrate", "paused"}:
            await monitor.execute("cont")


def _devices(plan: MachinePlan, any_fd: int) -> dict[str, int]:
    """Return the successor's substitutes for the descriptors of *plan*'s devices.

    The successor ignores the numbers in its options and uses the descriptors that the source sends under the devices' names
    (``cpr_get_fd_param``, and ``iommufd_backend_complete`` of QEMU); the options still have to be numbers.
    """
    names = [device.address for device in plan.passthrough.devices]
    return dict.fromkeys([*names, "iommufd"] if names else [], any_fd)


def _more_queues(kept: QemuFds) -> Iterator[int]:
    """Yield each queue of a tap except the first, from the copies *kept*.

    QEMU detaches them when it makes its machine, and attaches them when the guest uses them. It requires that they are attached before, and
    ends otherwise (``virtio_net_set_queue_pairs``). So they are attached for the successor, and detached again if the source continues.
    """
    for wire in kept.wires:
        yield from wire.taps[1:]


def _has_vhost(network: NetworkPlan) -> bool:
    return not isinstance(network, PasstPlan) and network.vhost


_MEETING_POINT = "qemu-update"
"""The name by which the source receives the directory with the sockets that it connects to."""


async def _pass_on(listener: Socket, successor: Socket) -> NoReturn:
    """Copy the data that the source sends to *listener* to the successor; end only when cancelled.

    The successor takes a connected socket, not a listening one, while the source takes a path to connect to.
    """
    listener.setblocking(False)
    successor.setblocking(False)
    source = await accepted(trio.socket.from_stdlib_socket(listener))
    await copy_between(source, trio.socket.from_stdlib_socket(successor))
    await trio.sleep_forever()


def _channel(name: str, **address: str) -> dict[str, object]:
    return {"channel-type": name, "addr": {"transport": "socket", **address}}


async def _take_back_fds(monitor: Monitor) -> None:
    """Close the descriptors that QEMU has received for a transfer."""

    def parse(reply: Any) -> list[int]:
        return [
            whole_number(each["fdset-id"])
            for each in reply
            if any(fd.get("opaque") == _MEETING_POINT for fd in each["fds"])
        ]

    for fdset in await monitor.query("query-fdsets", parse):
        await monitor.execute("remove-fd", {"fdset-id": fdset})


async def _cpu(monitor: Monitor) -> object:
    """Return the first vCPU as the guest sees it: CPUID's features, and the model's name and numbers."""

    def parse(reply: Any) -> str:
        return short_text(min(reply, key=lambda vcpu: whole_number(vcpu["cpu-index"]))["qom-path"])

    path = await monitor.query("query-cpus-fast", parse)
    names = ("feature-words", "vendor", "family", "model", "stepping", "model-id")
    return [await monitor.execute("qom-get", {"path": path, "property": name}) for name in names]
