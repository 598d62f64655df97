"""The duties of an init process around one instance: signals, orphans, the plan, and an end that is always reported."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import attrs

from runner.base.errors import RefusedError, RunnerError, Status
from runner.base.events import InstanceEvent
from runner.base.tasks import capture
from runner.base.values import frozen
from runner.base.version import VERSION
from runner.facts.roots import Roots
from runner.host.facts_reader import read_host_facts
from runner.instance import optional_parts
from runner.instance.exit_report import ExitReport, failed_system_call, of_running_guest, report_of, with_faults
from runner.instance.gate import Kind, StopRequest, StopRequestedError
from runner.instance.lifecycle import run_instance
from runner.instance.supervisor import Faults, Renewal, Supervisor, open_supervisor
from runner.kernel.child_processes import become_subreaper, dying_with_us, signal_name
from runner.kernel.files import all_closed
from runner.kernel.nonblocking_writer import NonBlockingWriter
from runner.kernel.signals import received
from runner.placement.backends import ControllerPlacement
from runner.plan.descriptor_claims import with_disks
from runner.plan.instance import InstancePlan, plan_instance
from runner.spec.instance import InstanceSpec, parse_instance

if TYPE_CHECKING:
    from runner.kernel.inherited_fds import InheritedFd
    from runner.placement.threads import Receipt

log = logging.getLogger(__name__)

ASK_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that mean: end the instance. They must be blocked when Python starts and are unblocked here."""


@frozen
class Streams:
    """The outputs of this process, and the address at which it answers requests."""

    stdout: NonBlockingWriter
    stderr: NonBlockingWriter
    console: Callable[[bytes], None]
    """Writes the guest's console output to standard output; empty data marks the end."""
    http: tuple[str, int] | None
    """Address and port for probes and metrics, if they are served."""


async def run_as_init(
    source: str,
    data: bytes,
    state_directory: PurePosixPath,
    streams: Streams,
    *,
    pid1: bool,
    renewal: Renewal | None = None,
) -> ExitReport:
    """Run the instance that the document *data* describes, from the first signal to the last child.

    Raises only for bugs of this program. Without *pid1* it becomes a subreaper to adopt orphans.
    """
    try:
        if pid1 and os.getpid() != 1:
            raise RefusedError(
                f"cannot run as process {os.getpid()}: only PID 1 of a container adopts every orphan, and ends every other process "
                "when it ends",
                remedy="make it the ENTRYPOINT, or say --not-pid1 for a test",
            )
        _refuse_foreign_procfs()
        if not pid1:
            become_subreaper()
        spec = parse_instance(source, data, os.environ)
    except RunnerError as error:
        return attrs.evolve(ExitReport.of(error), document=data)

    async def run(supervisor: Supervisor) -> ExitReport:
        return await _run(spec, supervisor, streams, partial(_planned, source, spec, state_directory))

    return attrs.evolve(await _supervised(run, streams, renewal or Renewal(), pid1=pid1), document=data)


def _refuse_foreign_procfs() -> None:
    """Raise :exc:`~runner.base.errors.RefusedError` unless /proc shows the processes of our PID namespace, with our numbers.

    It must also show the machine, and so must /sys.
    """
    try:
        shown = os.readlink("/proc/self")  # noqa: PTH115 - PID 1 needs no more of pathlib
    except OSError as error:
        raise RefusedError(
            "cannot read /proc/self: no procfs is mounted at /proc",
            remedy="`mount -t proc proc /proc` in the container, as `unshare --mount-proc` does",
        ) from error
    if shown != str(os.getpid()):
        raise RefusedError(
            f"cannot use /proc: it is that of another PID namespace, in which this process is {shown}, and not {os.getpid()}",
            remedy="mount the container's own, by `mount -t proc proc /proc`, as `unshare --mount-proc` does",
        )
    if not os.path.exists("/proc/cpuinfo"):  # noqa: PTH110 - as above
        raise RefusedError(
            "cannot use /proc: it shows processes alone, and nothing of the machine",
            remedy="mount it without subset=pid (ProcSubset=all in a unit of systemd)",
        )
    if not os.path.exists("/sys/devices/system/cpu/online"):  # noqa: PTH110
        raise RefusedError(
            "cannot use /sys: no sysfs is mounted there", remedy="`mount -t sysfs sysfs /sys` in the container"
        )


async def resume_as_init(streams: Streams, renewal: Renewal) -> ExitReport:
    """Continue the instance that the previous program of this process has held; see :func:`run_as_init`."""

    async def run(supervisor: Supervisor) -> ExitReport:
        return await _run(None, supervisor, streams, None)

    return await _supervised(run, streams, renewal, pid1=False)


async def _supervised(
    run: Callable[[Supervisor], Awaitable[ExitReport]], streams: Streams, renewal: Renewal, *, pid1: bool
) -> ExitReport:
    held, stop = renewal.held, StopRequest()
    pid1 = held.value("pid1", lambda: pid1)
    sentences = held.value("faults", list[str])
    faults = Faults(sentences, begun=held.go_back, own=renewal.loop_ended_by)
    if faults.own is not None:
        stop.ask("a fault of instance-runner")
    with received(*ASK_TO_STOP, note=stop.signals.add) as signals:
        try:
            held.at_commit(partial(signal.pthread_sigmask, signal.SIG_SETMASK, ()))
            async with (
                open_supervisor(stop, faults, () if pid1 else dying_with_us(), renewal) as supervisor,
                supervisor.background_task(partial(_obey, signals, stop)),
                supervisor.background_task(streams.stdout.drain),
                supervisor.background_task(streams.stderr.drain),
            ):
                report = await run(supervisor)
        finally:
            # A signal from here on is too late to change anything, and must not end this process: trio raises a signal again that its
            # receiver has not delivered.
            signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
    if faults.own is not None:
        of_fault = of_running_guest(report_of(faults.own))
        report = attrs.evolve(of_fault, detail=f"{of_fault.detail}; {report.detail}")
    return with_faults(report, tuple(faults.sentences))


async def plan_here(source: str, data: bytes, state_directory: PurePosixPath) -> InstancePlan:
    """Return the plan that :func:`run_as_init` would carry out here; change nothing. Raises :exc:`~runner.base.errors.RunnerError`."""
    spec = parse_instance(source, data, os.environ)
    async with open_supervisor(StopRequest(), Faults(), dying_with_us()) as supervisor:
        result = await capture(partial(_plan, source, spec, supervisor, state_directory))
    return result()


async def _plan(
    source: str, spec: InstanceSpec, supervisor: Supervisor, state_directory: PurePosixPath
) -> InstancePlan:
    facts = await read_host_facts(spec, supervisor.processes, Roots(), state_directory, None)
    return plan_instance(source, spec, facts)


async def _run(
    asked: InstanceSpec | None,
    bare: Supervisor,
    streams: Streams,
    planned: Callable[[Supervisor], Awaitable[InstancePlan]] | None,
) -> ExitReport:
    """Run the instance *asked* for, or the one taken over; *planned* returns the plan of a new instance and is absent otherwise."""

    async def run() -> ExitReport:
        async with _with_inherited_fds(bare, asked) as supervisor:
            # Without its remarks, which were logged, and without cloud-init's documents, which hold secrets and which QEMU has.
            plan = await supervisor.held.once(
                "plan",
                planned and partial(planned, supervisor),
                now=lambda plan: attrs.evolve(plan, remarks=(), machine=attrs.evolve(plan.machine, seed=None)),
            )
            async with figures_shown(supervisor, plan, streams.http) as count_from:
                ended = await run_instance(plan, supervisor, streams.console, count_from)
        status = plan.shutdown.poweroff_status if ended.status is Status.GUEST_SHUTDOWN else ended.status
        return ExitReport(status, ended.status.name.lower(), ended.detail)

    return await _reported(run, bare)


@asynccontextmanager
async def figures_shown(
    supervisor: Supervisor, plan: InstancePlan, http: tuple[str, int] | None
) -> AsyncIterator[Callable[[Receipt], None]]:
    """Show the figures of the instance for as long as the block runs: at *http*, and to the controller that has placed it.

    *http* is a result of :func:`~runner.protocol.http.parse_address`. Yields the function that
    takes the places of the threads when they are set: from then on, the time of others on the vCPUs' CPUs is counted.
    """
    placement = plan.placement
    if http is None and not isinstance(placement, ControllerPlacement):
        # The next or the previous program may use it, even if this one shows no figures.
        supervisor.held.current("foreign time", lambda: None)
        yield lambda _: None
        return
    figures = optional_parts.held_figures(supervisor, plan)
    async with optional_parts.probes_served(figures, http), optional_parts.reported(figures, placement):
        yield figures.count_from


async def _planned(
    source: str, asked: InstanceSpec, state_directory: PurePosixPath, supervisor: Supervisor
) -> InstancePlan:
    fds = supervisor.inherited_fds
    spec = with_disks(asked, {name: each.descriptor.number for name, each in fds.items()})
    async with supervisor.changes.begin(Kind.START, "the host is being read"):
        facts = await read_host_facts(spec, supervisor.processes, Roots(), state_directory, fds)
    plan = plan_instance(source, spec, facts)
    for remark in plan.remarks:
        log.warning(InstanceEvent.PLAN_REMARKED, remark)
    log.info(InstanceEvent.INSTANCE_STARTING, plan.name, VERSION)
    if plan.pod.name:
        log.info(InstanceEvent.POD_NAMED, *plan.pod.to_json().values())
    return plan


async def _reported(run: Callable[[], Awaitable[ExitReport]], supervisor: Supervisor) -> ExitReport:
    """Return the report of *run*; errors end here, inside of the root's nursery, which would wrap them."""
    try:
        report = await _reported_as_start(run)
    except OSError as error:  # here, so that what could not be released is reported with it
        found = failed_system_call(error)
        if found is None:
            raise
        report = found
    if supervisor.guest_state.phase == "starting":
        return report
    return of_running_guest(report)


async def _reported_as_start(run: Callable[[], Awaitable[ExitReport]]) -> ExitReport:
    try:
        return await run()
    except StopRequestedError:
        return ExitReport(Status.STOPPED, "stopped", "asked to stop before anything was started")
    except RunnerError as error:
        return ExitReport.of(error)


@asynccontextmanager
async def _with_inherited_fds(supervisor: Supervisor, spec: InstanceSpec | None) -> AsyncIterator[Supervisor]:
    """Hold *supervisor* with the descriptors that another process has opened for this instance."""
    async with AsyncExitStack() as stack:

        async def inherit() -> Mapping[str, InheritedFd]:
            if spec is None or not (spec.descriptors.socket is not None or os.environ.get("LISTEN_FDS")):
                return {}
            async with supervisor.changes.begin(Kind.START, "descriptors are being received"):
                return await stack.enter_async_context(
                    optional_parts.inherited_fds(os.environ, spec.descriptors.socket)
                )

        def adopt(fds: Mapping[str, InheritedFd]) -> Mapping[str, InheritedFd]:
            stack.enter_context(all_closed(each.descriptor for each in fds.values()))
            return fds

        fds = await supervisor.held.once("inherited descriptors", inherit, adopt)
        stack.enter_context(supervisor.held.guarded())
        yield attrs.evolve(supervisor, inherited_fds=fds)


async def _obey(signals: AsyncIterator[int], stop: StopRequest) -> None:
    async for number in signals:
        stop.ask(signal_name(number))
        stop.signals.discard(number)
