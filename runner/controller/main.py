"""``instance-cgroup-controller``: its command line, its logs and the one function that holds everything it runs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import trio

from runner.arguments import LOG_FORMATS, argument_type
from runner.controller.loop import Intervals, ReconcileLoop, running_loop
from runner.controller.methods import RpcMethods, Timeouts
from runner.controller.metrics import respond
from runner.controller.server import listening
from runner.controller.tree import Tree
from runner.cpuset import CpuSet
from runner.errors import RunnerError, explain
from runner.kernel.cgroup import Cgroup
from runner.kernel.peers import Peers
from runner.kubelet.state_files import KubeletFiles
from runner.protocol.http import HttpResponse, open_http_listeners, parse_address, serve_http
from runner.protocol.logs import LogHandler
from runner.protocol.unix_server import SocketLimits, UnixServer
from runner.values import frozen

log = logging.getLogger(__name__)

_STDERR = 2


@frozen
class Options:
    """The command line, checked."""

    root: Path
    cgroupfs: Path
    socket: Path
    kubelet: Path | None
    cpus: CpuSet
    reserved: CpuSet
    metrics: tuple[str, int] | None
    trusting: bool
    sys: Path
    proc: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT and return the exit status; the tree stays as it is."""
    arguments = command_line().parse_args(argv)
    root = logging.getLogger()
    root.addHandler(LogHandler(_write_log, arguments.log_format))
    root.setLevel(logging.DEBUG if arguments.debug else logging.INFO)
    try:
        trio.run(control, _options(arguments))
    except RunnerError as error:
        return _failed(error)
    except BaseExceptionGroup as group:
        ours, others = group.split(RunnerError)
        if ours is None or others is not None:
            raise  # a fault of this program
        return max(map(_failed, _leaves(ours)))
    return 0


async def control(options: Options) -> None:
    """Hold everything until a signal asks to stop. Raises :class:`RunnerError`, bare or in an exception group."""
    loop = ReconcileLoop(
        tree=Tree(Cgroup(options.root)),
        source=None if options.kubelet is None else KubeletFiles(options.kubelet),
        sys=options.sys,
        reserved=options.reserved,
        intervals=Intervals(),
    )
    methods = RpcMethods(
        loop=loop,
        mount=Cgroup(options.cgroupfs),
        peers=Peers(options.proc),
        own_cpus=options.cpus,
        timeouts=Timeouts(),
        trusting=options.trusting,
    )
    if options.trusting:
        log.warning("INSECURE: any process that reaches the socket may register and remove any instance")
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with running_loop(loop):
            with listening(options.socket) as listener:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(UnixServer(methods, SocketLimits()).accept, listener)
                    if options.metrics is not None:
                        nursery.start_soon(
                            serve_http, await open_http_listeners(*options.metrics), partial(respond_about, loop)
                        )
                    log.info("ready socket=%s root=%s frozen=%r", options.socket, options.root, loop.frozen())
                    number = await anext(signals)
                    log.info("stopping signal=%s", signal.Signals(number).name)
                    nursery.cancel_scope.cancel()


def _write_log(line: bytes) -> None:
    with contextlib.suppress(OSError):  # without a reader of the log, the node's instances still need this program
        os.write(_STDERR, line)


def _failed(error: RunnerError) -> int:
    log.critical("%s", explain(error))
    return error.status


def respond_about(loop: ReconcileLoop, target: str) -> HttpResponse:
    """Return the response for the path *target* about the present state of *loop*."""
    return respond(target, loop.counters, loop.observed, loop.frozen(), loop.error)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def command_line() -> argparse.ArgumentParser:
    """Return the parser of this program's arguments."""
    parser = argparse.ArgumentParser(
        prog="instance-cgroup-controller",
        description="Keeps the cgroups of this node's instances as the kubelet shares out the CPUs.",
        epilog="It needs the node's PID and cgroup namespaces, the cgroup v2 hierarchy writable and the kubelet's directory\n"
        "readable. SIGTERM ends it; instances do not notice.\n\n"
        "examples:\n"
        "  instance-cgroup-controller --metrics :9440\n"
        "  instance-cgroup-controller --cpus 4-15    on a machine without a kubelet",
        formatter_class=_Formatter,
    )
    add = parser.add_argument
    add("--root", type=Path, default=Path("/sys/fs/cgroup/stelia"), metavar="DIR", help="the tree's own cgroup")
    add("--cgroupfs", type=Path, default=Path("/sys/fs/cgroup"), metavar="DIR", help="where cgroup v2 is mounted")
    add(
        "--socket",
        type=Path,
        default=Path("/run/instance-cgroup-controller/controller.sock"),
        metavar="PATH",
        help="where runners connect",
    )
    add("--kubelet-dir", type=Path, default=Path("/var/lib/kubelet"), metavar="DIR", help="the kubelet's --root-dir")
    add(
        "--cpus",
        type=argument_type(_some_cpus),
        metavar="LIST",
        help="this machine has no kubelet; instances may have these CPUs, first come, first served (example: 4-15)",
    )
    add(
        "--reserved-cpus",
        type=argument_type(CpuSet.parse),
        default=CpuSet(),
        metavar="LIST",
        help="the kubelet's reservedSystemCPUs, needed with its option strict-cpu-reservation",
    )
    add(
        "--metrics",
        type=argument_type(parse_address),
        metavar="ADDRESS:PORT",
        help="serve /metrics, /healthz and /readyz here",
    )
    add(
        "--insecure-trust-peer",
        action="store_true",
        help="for development only: believe every peer that it is the instance it names",
    )
    add("--sysfs", type=Path, default=Path("/sys"), metavar="DIR", help="where sysfs is mounted")
    add("--procfs", type=Path, default=Path("/proc"), metavar="DIR", help="where procfs is mounted")
    add(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="the log on standard error: for people, or one JSON object a line",
    )
    add("--debug", action="store_true", help="log every action")
    return parser


def _options(arguments: argparse.Namespace) -> Options:
    cpus: CpuSet | None = arguments.cpus
    return Options(
        root=arguments.root,
        cgroupfs=arguments.cgroupfs,
        socket=arguments.socket,
        kubelet=arguments.kubelet_dir if cpus is None else None,
        cpus=cpus or CpuSet(),
        reserved=arguments.reserved_cpus,
        metrics=arguments.metrics,
        trusting=arguments.insecure_trust_peer,
        sys=arguments.sysfs,
        proc=arguments.procfs,
    )


def _some_cpus(text: str) -> CpuSet:
    cpus = CpuSet.parse(text)
    if not cpus:
        raise ValueError("the list is empty")
    return cpus


def _leaves(error: BaseExceptionGroup[RunnerError] | RunnerError) -> Iterator[RunnerError]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
