"""``instance-cgroup-controller``: its logs, its errors, and the function that holds everything that it runs."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath

import trio

from runner.base.cpuset import CpuSet
from runner.base.errors import RunnerError, Status, UsageError, explain
from runner.base.events import ControllerEvent
from runner.base.version import VERSION
from runner.controller.command_line import Options, choose_limits, command_line
from runner.controller.privileged_start import PrivilegedParts, start_privileged
from runner.controller.restarted_task import restarted
from runner.controller.serve.callers import Callers
from runner.controller.serve.hang_ups import HangUps
from runner.controller.serve.http_endpoints import HttpEndpoints
from runner.controller.serve.methods import controller_methods
from runner.controller.serve.node_status import NodeStatus
from runner.controller.serve.registrations import Registrations
from runner.controller.serve.report_methods import LIMITS, report_methods
from runner.controller.serve.reports import Reports
from runner.controller.serve.seals import Seals
from runner.controller.serve.seccomp import SeccompCheck
from runner.controller.serve.socket_file import listening
from runner.controller.serve.timeouts import Timeouts
from runner.controller.serve.tuning_passes import TuningPasses
from runner.controller.tree.cpu_source import CpuSource
from runner.controller.tree.loop import Intervals, ReconcileLoop
from runner.controller.tree.pods import PodCgroups
from runner.controller.tree.tree import Tree
from runner.controller.tune.cache_tuner import RESCTRL, CacheTuner
from runner.controller.tune.host_tuner import HostTuner, TuningOptions
from runner.kernel.cgroup import Cgroup
from runner.kernel.child_processes import raise_limits
from runner.kernel.hardware_reader import read_promised_pages
from runner.kernel.host_settings import HostSettings
from runner.kernel.nonblocking_writer import NonBlockingWriter
from runner.kernel.peers import Peers
from runner.kernel.procfs import Procfs
from runner.kernel.resctrl import Resctrl
from runner.kubelet.state_files import KubeletFiles
from runner.protocol.controller_client import REPORT_SOCKET
from runner.protocol.http import open_http_listeners, serve_http
from runner.protocol.logs import LogHandler, open_output
from runner.protocol.unix_server import SocketLimits, UnixServer

log = logging.getLogger(__name__)

_STDERR = 2
RECORDS = "host-settings.json"
"""In the state directory: the machine's settings before an instance needed others."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT and return the exit status; the tree stays as it is."""
    parser = command_line()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from runner.base.completion import complete

        complete(parser)
    try:
        options = parser.parse_args(argv, Options())
    except UsageError as error:
        sys.stderr.write(f"{parser.prog}: {explain(error)}\n")
        return error.status
    with open_output(_STDERR, options.log_format) as output:
        root = logging.getLogger()
        root.addHandler(LogHandler(output.write, options.log_format))
        root.setLevel(logging.DEBUG if options.debug else logging.INFO)
        return _run(options, output)


def _run(options: Options, output: NonBlockingWriter) -> int:
    try:
        rules = None if options.no_device_filter else options.allow_device
        privileged = start_privileged(
            options.root, options.procfs, rules, _host_tuner(options), macvtaps=options.allow_macvtap
        )
        raise_limits()  # files: some 20 for each instance (runner/controller/tree/held_files.py)
        trio.run(control, options, privileged, output)
    except RunnerError as error:
        return _log_failure(error)
    except Exception as error:
        ours, others = error.split(RunnerError) if isinstance(error, ExceptionGroup) else (None, error)
        if ours is not None and others is None:
            return max(map(_log_failure, _leaves(ours)))
        # Not left to the interpreter, whose own report could block until the log is read.
        log.exception(ControllerEvent.CONTROLLER_BUG)
        return Status.BUG
    return 0


async def control(options: Options, privileged: PrivilegedParts, output: NonBlockingWriter) -> None:
    """Hold everything until a signal asks to stop. Raises :class:`RunnerError`, bare or in an exception group.

    The log's backlog is written to *output* as its reader makes room.
    """
    kubelet = options.cpus is None
    trusting = options.insecure_trust_peer
    pods = PodCgroups(Cgroup(options.cgroupfs), Procfs(options.procfs), kubelet=kubelet, trusting=trusting)
    files = KubeletFiles(options.kubelet_dir, options.cdi_dir)
    loop = ReconcileLoop(
        tree=Tree(Cgroup(options.root), None if options.partitions == "off" else privileged.cgroup_writer),
        source=CpuSource(files, options.sysfs, options.reserved_cpus) if kubelet else None,
        sys=options.sysfs,
        intervals=Intervals(handover=options.handover or math.inf),
        limits=choose_limits(options, pods, read_promised_pages(options.sysfs.parent)),
        pods=pods,
        cgroup_writer=privileged.cgroup_writer,
    )
    timeouts = Timeouts(handover=options.handover)
    callers = Callers(Peers(options.procfs, look_up=privileged.namespace_reader.look_up), pods, loop.tree)
    device_filter = privileged.device_filter
    processes = privileged.processes
    reports = Reports()
    tuning = TuningPasses(loop, privileged.tuner)
    seccomp = SeccompCheck(loop.tree, pods.procfs, loop.log_limit, options.require_seccomp)
    seals = Seals(callers, loop, timeouts, options.partitions == "required")
    registrations = Registrations(
        callers, loop, device_filter, seccomp, timeouts, options.cpus or CpuSet(), seals.required
    )
    status = NodeStatus(callers, loop, device_filter, processes, seccomp, reports, tuning)
    if trusting:
        log.warning(ControllerEvent.INSECURE_PEERS)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with loop.running():
            with (
                listening(options.socket) as listener,
                listening(options.socket.with_name(REPORT_SOCKET)) as report_listener,
                contextlib.ExitStack() as stack,
            ):
                # A copy of each stays open until the process exits: the last close closes what clients have left in the queue.
                for each in (listener, report_listener):
                    os.dup(each.fileno())
                hang_up = HangUps().hang_up
                methods = controller_methods(callers, loop, registrations, seals, tuning, status)
                server = UnixServer(methods, SocketLimits(), hang_up)
                report_server = UnixServer(report_methods(callers, loop, reports), LIMITS, hang_up)
                tasks: dict[str, Callable[[], Awaitable[None]]] = {
                    "log": output.drain,
                    "tuner": tuning.follow,
                    "socket": partial(server.accept, listener),
                    "reports": partial(report_server.accept, report_listener),
                }
                if options.metrics is not None:
                    http = [stack.enter_context(each) for each in open_http_listeners(*options.metrics)]
                    endpoints = HttpEndpoints(loop, device_filter, processes, reports, seccomp)
                    tasks["endpoints"] = partial(serve_http, http, endpoints.respond)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(privileged.namespace_reader.until_its_end)
                    for name, task in tasks.items():
                        nursery.start_soon(restarted, name, task, loop.counters)
                    log.info(
                        ControllerEvent.CONTROLLER_READY, options.socket, options.root, loop.frozen_because, VERSION
                    )
                    number = await anext(signals)
                    log.info(ControllerEvent.CONTROLLER_STOPPING, signal.Signals(number).name)
                    nursery.cancel_scope.cancel()


def _host_tuner(options: Options) -> HostTuner:
    root = options.procfs / "1/root"  # the node's root, whose /proc and /sys are writable
    return HostTuner(
        procfs=Procfs(options.procfs),
        sys=options.sysfs,
        host=HostSettings(root),
        caches=CacheTuner(root, Resctrl(root / RESCTRL)),
        store=PurePosixPath(options.state_dir / RECORDS),
        options=TuningOptions(
            options.move_interrupts, options.move_work_queues, options.low_latency, options.cache_groups
        ),
    )


def _log_failure(error: RunnerError) -> int:
    """Log *error*, and return the exit status for it."""
    log.critical(ControllerEvent.CONTROLLER_FAILED, explain(error))
    return error.status


def _leaves(error: BaseExceptionGroup[RunnerError] | RunnerError) -> Iterator[RunnerError]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
