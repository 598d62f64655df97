"""The duties of an init process around one instance: signals, orphans, the first look and the last word."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import PurePosixPath

import attrs
import trio

from runner.errors import RefusedError, RunnerError, Status, explain
from runner.instance.discover import read_host_facts
from runner.instance.lifecycle import run_instance
from runner.instance.supervisor import Faults, StopRequest, StopRequestedError, Supervisor, capture, open_supervisor
from runner.kernel.nonblocking_writer import NonBlockingWriter
from runner.kernel.processes import become_subreaper, dying_with_us, signal_name
from runner.plan.descriptor_claims import with_disks
from runner.plan.instance import InstancePlan, plan_instance
from runner.spec.instance import InstanceSpec, parse_instance

log = logging.getLogger(__name__)

ASK_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that mean: end the instance. They must be blocked when Python starts and are unblocked here."""


@attrs.frozen
class ExitReport:
    """How it went: what the exit status and the termination log are made of."""

    status: int
    outcome: str
    detail: str
    faults: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return it as written to the termination log."""
        # Kubernetes keeps 4096 bytes of it: both lists are cut so that what it keeps is JSON.
        faults = [_cut(fault, 300) for fault in self.faults[:5]]
        return {"status": self.status, "outcome": self.outcome, "detail": _cut(self.detail, 1500), "faults": faults}


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


@attrs.frozen
class Streams:
    """Where this process speaks."""

    stdout: NonBlockingWriter
    stderr: NonBlockingWriter
    console: Callable[[bytes], None]
    """Says on standard output what the guest's console says; without data it was the last."""
    http: tuple[str, int] | None
    """Where it answers probes, if anywhere."""


async def run_as_init(
    source: str, data: bytes, state_directory: PurePosixPath, streams: Streams, *, pid1: bool
) -> ExitReport:
    """Run the instance that the document *data* describes, from the first signal to the last child.

    Never raises for what is not this program's own fault. Without *pid1* orphans are adopted by asking for it.
    """
    stop, faults = StopRequest(), Faults()
    try:
        if pid1 and os.getpid() != 1:
            raise RefusedError(
                f"cannot run as process {os.getpid()}: only PID 1 of a container is told of every orphan and takes everything with it "
                "when it ends; make it the ENTRYPOINT, or say --not-pid1 for a test"
            )
        if not pid1:
            become_subreaper()
        spec = parse_instance(source, data, os.environ)
    except RunnerError as error:
        return _refused(error)
    with trio.open_signal_receiver(*ASK_TO_STOP) as signals:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            async with (
                open_supervisor(stop, faults, () if pid1 else dying_with_us()) as supervisor,
                supervisor.background_task(partial(_obey, signals, stop)),
                supervisor.background_task(streams.stdout.drain),
                supervisor.background_task(streams.stderr.drain),
            ):
                verdict = await _run(source, spec, supervisor, state_directory, streams)
        finally:
            # What arrives from here on comes too late to change anything, and must not become our own death: trio
            # raises again what its receiver has not delivered.
            signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
    if faults.sentences:
        detail = f"{verdict.detail} ({verdict.outcome}), but not everything could be released"
        return ExitReport(Status.DIRTY, "dirty", detail, tuple(faults.sentences))
    return verdict


async def plan_here(source: str, data: bytes, state_directory: PurePosixPath) -> InstancePlan:
    """Return what :func:`run_as_init` would do on this host; touches nothing. Raises :exc:`~runner.errors.RunnerError`."""
    spec = parse_instance(source, data, os.environ)
    async with open_supervisor(StopRequest(), Faults(), dying_with_us()) as supervisor:
        result = await capture(partial(_plan, source, spec, supervisor, state_directory))
    return result()


async def _plan(
    source: str, spec: InstanceSpec, supervisor: Supervisor, state_directory: PurePosixPath
) -> InstancePlan:
    return plan_instance(source, spec, await read_host_facts(spec, supervisor, state_directory, handing_over=False))


async def _run(
    source: str, asked: InstanceSpec, bare: Supervisor, state_directory: PurePosixPath, streams: Streams
) -> ExitReport:
    """Run what is *asked*; errors end here, below the root's nursery, which would wrap them."""
    try:
        async with _handed(bare, asked) as supervisor:
            spec = with_disks(asked, {name: each.descriptor.number for name, each in supervisor.handed.items()})
            facts = await supervisor.unless_stopped(partial(read_host_facts, spec, supervisor, state_directory))
            plan = plan_instance(source, spec, facts)
            for remark in plan.remarks:
                log.warning("%s", remark)
            log.info("starting instance=%s", plan.name)
            if plan.pod.name:
                log.info("in the pod name=%s namespace=%s node=%s uid=%s", *attrs.astuple(plan.pod))
            async with _paged(supervisor, plan, streams.http):
                ended = await run_instance(plan, supervisor, streams.console)
    except StopRequestedError:
        return ExitReport(Status.STOPPED, "stopped", "asked to stop before anything was started")
    except RunnerError as error:
        return _refused(error)
    status = plan.shutdown.poweroff_status if ended.status is Status.GUEST_SHUTDOWN else ended.status
    return ExitReport(status, ended.status.name.lower(), ended.detail)


@asynccontextmanager
async def _handed(supervisor: Supervisor, spec: InstanceSpec) -> AsyncIterator[Supervisor]:
    """Hold *host* with the descriptors that are handed to us."""
    agent = spec.descriptors.socket
    if agent is None and not os.environ.get("LISTEN_FDS"):
        yield supervisor
        return
    from runner.kernel.inherited_fds import inherited_fds  # here, because few instances pay for it

    async with AsyncExitStack() as held:
        taking = inherited_fds(os.environ, agent)
        handed = await supervisor.unless_stopped(partial(held.enter_async_context, taking))
        yield attrs.evolve(supervisor, handed=handed)


@asynccontextmanager
async def _paged(supervisor: Supervisor, plan: InstancePlan, http: tuple[str, int] | None) -> AsyncIterator[None]:
    if http is None:
        yield
        return
    from runner.instance.probes import probes_served  # here, because nobody pays for pages that are not asked for

    async with probes_served(supervisor, plan, http):
        yield


def _refused(error: RunnerError) -> ExitReport:
    return ExitReport(error.status, error.status.name.lower(), explain(error))


async def _obey(signals: AsyncIterator[int], stop: StopRequest) -> None:
    async for number in signals:
        stop.ask(signal_name(number))
