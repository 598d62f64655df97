"""The start of QEMU: its descriptors and endpoints, until it has greeted and its guest is paused."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import trio

from runner.base.errors import HostError
from runner.base.events import InstanceEvent
from runner.instance import optional_parts
from runner.instance.parts.qemu import Qemu, spawn_qemu, started_within
from runner.instance.supervisor import Supervisor
from runner.kernel import files
from runner.kernel.character_devices import vhost_vsock
from runner.kernel.child_processes import Process, ProcessRecord, stop_bound
from runner.kernel.limits import lockable
from runner.kernel.sockets import Socket
from runner.plan.argv.qemu_endpoints import QemuFds
from runner.plan.firmware import ForgottenVariables, VariablesPlan
from runner.plan.guest_devices import GuestPlan
from runner.plan.host_checks import too_old
from runner.plan.instance import InstancePlan
from runner.plan.machine import FilePlan
from runner.protocol.qmp import Monitor, QmpEvent

if TYPE_CHECKING:
    from runner.instance.parts.nic_backends import NicBackend
    from runner.instance.parts.shares import HeldShare

log = logging.getLogger(__name__)


class GuestAgentChannel(NamedTuple):
    """Both ends of the guest agent's channel, if the guest has one."""

    ours: Socket | None = None
    theirs: Socket | None = None


@asynccontextmanager
async def guest_agent_channel(supervisor: Supervisor, guest: GuestPlan) -> AsyncIterator[GuestAgentChannel]:
    """Hold the guest agent's channel; it is not read until the guest is to shut down."""
    if not guest.agent:
        yield GuestAgentChannel()
        return
    with supervisor.held.pair("guest agent", "the guest agent") as (ours, theirs):
        yield GuestAgentChannel(ours, theirs)


class OpenedFiles(NamedTuple):
    """The files and devices that QEMU inherits, as :class:`~runner.plan.argv.qemu_endpoints.QemuFds` names them."""

    files: Mapping[str, int]
    devices: Mapping[str, int]
    vhost_vsock: tuple[int, int] | None
    stack: ExitStack

    def close(self) -> None:
        """Close our copies; a second call does nothing."""
        self.stack.close()


@contextmanager
def opened_files(plan: InstancePlan) -> Iterator[OpenedFiles]:
    """Hold every file and device that QEMU inherits and that a path names, until QEMU has its copies.

    They must be opened before this process enters float, whose device filter does not allow the devices given to this pod.
    """
    machine = plan.machine
    with ExitStack() as stack:

        def file(file_plan: FilePlan) -> int:
            return stack.enter_context(
                files.copied(file_plan.path) if file_plan.copied else files.opened(file_plan.path)
            )

        named = {"kernel": machine.kernel, "initrd": machine.initrd, "firmware": machine.firmware}
        numbers = {name: file(found) for name, found in named.items() if found is not None}
        if machine.firmware_vars is not None:
            numbers["firmware-vars"] = stack.enter_context(_variables(machine.firmware_vars))
        numbers |= stack.enter_context(optional_parts.opened_seed(plan))
        numbers |= stack.enter_context(optional_parts.opened_disks(plan))
        devices = stack.enter_context(optional_parts.opened_device_nodes(plan))
        vsock = machine.guest.vsock
        vhost_vsock_fd = None if vsock is None else stack.enter_context(vhost_vsock(vsock.cid, exact=vsock.exact))
        if vhost_vsock_fd is not None:
            log.info(InstanceEvent.VSOCK_ASSIGNED, vhost_vsock_fd[1])
        yield OpenedFiles(numbers, devices, vhost_vsock_fd, stack)


class QemuEndpoints(NamedTuple):
    """The descriptors that QEMU inherits; our copies are closed afterwards, so that each side notices the other's death."""

    opened: OpenedFiles
    ram: Sequence[files.Descriptor]
    nic_backends: Sequence[NicBackend]
    shares: Sequence[HeldShare]
    console: Socket | None
    """``None`` if QEMU has it already, because this runner is a renewed one."""
    agent: GuestAgentChannel

    def close_our_copies(self) -> None:
        """Close our copies."""
        self.opened.close()
        if self.console is not None:
            self.console.close()
        if self.agent.theirs is not None:
            self.agent.theirs.close()
        for each in self.ram:
            each.close()
        for nic_backend in self.nic_backends:
            nic_backend.close_our_copies()
        for share in self.shares:
            if share.daemon.connection is not None:
                share.daemon.connection.close()


@asynccontextmanager
async def paused_qemu(
    supervisor: Supervisor,
    plan: InstancePlan,
    endpoints: QemuEndpoints,
    memory_cgroup_fd: int | None,
    meanwhile: Callable[[], object],
    observe: Callable[[QmpEvent], None],
) -> AsyncIterator[Qemu]:
    """Hold a QEMU that has greeted, and whose guest has not run yet.

    It is started in the cgroup of *memory_cgroup_fd* (a descriptor of its ``cgroup.procs``; ``None``: this process's) and
    has all of its memory when it greets, if the plan says so: a page stays charged to the cgroup that touched it first.
    *meanwhile* is called once it has been started: it takes 50 ms to greet. *observe* is called with each event.
    """
    held = supervisor.held
    with (
        held.pair("QMP", "QMP", lambda _: machine.monitor.fileno()) as (ours, theirs),  # possibly a later QEMU's
        ExitStack() as stack,
        ExitStack() as lent,
    ):

        def descriptors() -> QemuFds:
            assert theirs is not None  # noqa: S101 - a QEMU that is started has not got them yet
            return _descriptors(theirs, endpoints)

        channel = endpoints.agent.ours
        agent = None if channel is None else lambda: optional_parts.guest_agent()(channel)

        def controlled(process: Process) -> Qemu:
            return Qemu(process, Monitor(ours), agent, supervisor.changes, supervisor.log_limit)

        def start() -> Qemu:
            lent.enter_context(optional_parts.group_nodes_owned_by_qemu(supervisor.faults, plan))
            with lockable(plan.machine.lockable):
                return controlled(spawn_qemu(supervisor, plan.machine, descriptors(), memory_cgroup_fd))

        def adopt(record: ProcessRecord) -> Qemu:
            return controlled(supervisor.processes.adopt(record))

        machine = held.value("qemu", start, adopt, lambda qemu: qemu.process.record())
        machine.keep_state(held)
        stack.enter_context(machine.monitor.observed_by(machine.observe))
        stack.enter_context(machine.monitor.observed_by(observe))
        machine.shares = tuple(endpoints.shares)
        machine.fds = stack.enter_context(optional_parts.kept_fds(held, plan, descriptors))

        async def greeted() -> None:
            version = await started_within(supervisor, plan.start_timeout, machine.greeted)
            log.info(InstanceEvent.QEMU_STARTED, machine.process.pid, version)
            if (reason := too_old(version)) is not None:
                raise HostError(f"cannot use this QEMU: {reason}", remedy="install a newer one")

        try:
            if theirs is not None:
                theirs.close()
                endpoints.close_our_copies()
            meanwhile()
            await held.once("QEMU is up", greeted)
            lent.close()
            yield machine
        finally:
            bound = plan.shutdown.quit + stop_bound(plan.shutdown.terminate)
            with supervisor.faults.recorded("end QEMU"), trio.move_on_after(bound, shield=True):
                await machine.quit(plan.shutdown, supervisor)
            machine.monitor.close()  # possibly that of a later QEMU


def _descriptors(qmp: Socket, endpoints: QemuEndpoints) -> QemuFds:
    assert endpoints.console is not None  # noqa: S101 - a QEMU that is started has not got it yet
    connections = (share.daemon.connection for share in endpoints.shares)
    return QemuFds(
        qmp=qmp.fileno(),
        console=endpoints.console.fileno(),
        ram=tuple(each.number for each in endpoints.ram),
        files=dict(endpoints.opened.files),
        wires=tuple(nic_backend.numbers() for nic_backend in endpoints.nic_backends),
        shares=tuple(each.fileno() for each in connections if each is not None),
        devices=dict(endpoints.opened.devices),
        guest_agent_channel=None if endpoints.agent.theirs is None else endpoints.agent.theirs.fileno(),
        vhost_vsock=endpoints.opened.vhost_vsock,
    )


@contextmanager
def _variables(plan: VariablesPlan) -> Iterator[int]:
    """Hold the firmware's variable store, which is copied from its template if it is missing."""
    if isinstance(plan, ForgottenVariables):
        with files.copied(plan.template, write=True) as store:
            yield store
        return
    if plan.template is not None:
        files.copy_new(plan.template, plan.path)
        log.info(InstanceEvent.FIRMWARE_VARIABLES_MADE, plan.path)
    with files.opened(plan.path, write=True, following=False) as store:
        yield store
