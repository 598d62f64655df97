"""The command ``inspect``: its targets, its interval, and the output for each report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import attrs
import trio

from runner.base.errors import HostError, NoInstanceError, Status, escaped
from runner.base.judgement import Level
from runner.base.values import frozen
from runner.cli.options import add_json, add_state_dir
from runner.facts.roots import CONTROLLER_CGROUP, CONTROLLER_SOCKET, KUBELET_DIRECTORY, Roots
from runner.inspect.cpu_time import TraceReport
from runner.inspect.observation import Observation
from runner.inspect.observe import observe_container, observe_node
from runner.inspect.render import report_json, report_lines, state_lines
from runner.inspect.rules import InspectionReport, judge
from runner.inspect.trace_render import trace_json, trace_lines
from runner.instance.parts.state_directory import RECEIPT
from runner.kernel.cgroup import Cgroup
from runner.kernel.privileges import enter_cgroup_namespace

_CLEAR = "\x1b[H\x1b[2J"
"""Cursor home, erase the screen (ECMA-48)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to *parser*."""
    parser.description = (
        f"{parser.description} In an instance's container it shows that instance; on the node, as root, every instance that the "
        "controller placed. With --trace there is one rule: only vCPUs and kernel threads bound to one CPU ran on the instance's CPUs.\n\n"
        f"exit status: 0, also where a rule cannot be judged; {Status.FINDINGS.value} if a rule does not hold, "
        f"{Status.FAILED.value} if there is no instance."
    )
    parser.epilog = (
        "examples:\n"
        "  kubectl exec POD -- instance-runner inspect\n"
        "  instance-runner inspect --watch 2\n"
        "  instance-runner inspect 3ceda12c --json\n"
        "  instance-runner inspect --trace 10\n"
        "  kubectl debug node/NODE -it --profile=sysadmin --image=instance-cgroup-controller -- \\\n"
        "    instance-runner inspect --trace 10"
    )
    add = parser.add_argument
    add(
        "instance",
        metavar="UUID",
        nargs="?",
        default="",
        help="on the node: only the instances whose UUID begins with this",
    )
    add_json(parser, "the report")
    several = parser.add_mutually_exclusive_group()
    several.add_argument(
        "--trace",
        type=_seconds,
        metavar="SECONDS",
        help="show how long each task ran on the instance's CPUs within the next SECONDS; on the node, as root",
    )
    several.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=5.0,
        metavar="SECONDS",
        help="repeat until Ctrl-C (default: every 5 s); if the output is no terminal, print only what has changed",
    )
    add_state_dir(parser)
    add(
        "--root",
        type=Path,
        default=Path(CONTROLLER_CGROUP),
        metavar="DIR",
        help="the controller's cgroup (default: %(default)s)",
    )
    add(
        "--cgroupfs",
        type=Path,
        default=Path("/sys/fs/cgroup"),
        metavar="DIR",
        help="where cgroup v2 is mounted (default: %(default)s)",
    )
    add(
        "--socket",
        type=PurePosixPath,
        default=CONTROLLER_SOCKET,
        metavar="PATH",
        help="the controller's socket, which is asked for what instances report (default: %(default)s)",
    )
    add(
        "--kubelet-dir",
        type=Path,
        default=Path(KUBELET_DIRECTORY),
        metavar="DIR",
        help="the kubelet's --root-dir (default: %(default)s)",
    )
    add(
        "--pod-logs-dir",
        type=Path,
        default=Path("/proc/1/root/var/log/pods"),  # reachable from the controller's pod, too, which does not mount it
        metavar="DIR",
        help="the kubelet's podLogsDir, by which pods are named (default: the node's /var/log/pods)",
    )


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= (seconds := float(text)) <= 86400:  # noqa: PLR2004 - a person watches no more often, and once a day
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")


def main(arguments: argparse.Namespace) -> int:
    """Print one report, or one after another; return ``FINDINGS`` if a rule is broken in the last one."""
    target = InspectionTarget(
        receipt=Path(arguments.state_dir / RECEIPT),
        root=Cgroup(arguments.root),
        kubelet=arguments.kubelet_dir,
        controller=arguments.socket,
        pod_logs=arguments.pod_logs_dir,
        roots=Roots(cgroup=arguments.cgroupfs),
        pod_uid=arguments.instance,
    )
    if arguments.trace is not None:
        return _show_trace(target, arguments.trace, as_json=arguments.json)
    watching = arguments.watch is not None
    formatter = ReportFormatter(arguments.json, redraw=sys.stdout.isatty(), repeated=watching)

    def show(report: InspectionReport) -> None:
        print(formatter.text(report), end="", flush=True)

    try:
        trio.run(_inspect, target, arguments.watch, show)
    except KeyboardInterrupt:
        if not watching:
            raise
    return formatter.status


def _show_trace(target: InspectionTarget, seconds: float, *, as_json: bool) -> Status:
    """Record for *seconds*, print the tasks that ran, and return ``FINDINGS`` if another task was among them."""
    report = trio.run(_trace, target, seconds)
    whole = json.dumps(trace_json(report), indent=1) + "\n" if as_json else _text(trace_lines(report))
    print(whole, end="", flush=True)
    return Status.FINDINGS if report.verdict is Level.ERROR else Status.STOPPED


async def _trace(target: InspectionTarget, seconds: float) -> TraceReport:
    """Record for *seconds*; SIGTERM and SIGHUP end it like Ctrl-C, because a killed recording would stay in the kernel."""
    from runner.inspect.trace import trace  # here, because most inspections record nothing

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not below nohup(1)
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    return await trace(target.roots, await _observe(target), seconds)


@frozen
class InspectionTarget:
    """The paths and names with which instances are found."""

    receipt: Path
    """The receipt of the container's own instance."""
    root: Cgroup
    """The controller's tree on the node."""
    kubelet: Path
    """The kubelet's directory on the node."""
    controller: PurePosixPath
    """The controller's socket on the node."""
    pod_logs: Path
    """The kubelet's directory of the pods' logs, whose entries contain the names of the pods."""
    roots: Roots
    pod_uid: str
    """The prefix of an instance's pod UID on the node; empty for all, or for the container's own."""

    def has_receipt(self) -> bool:
        """Tell whether this is the container of a running instance."""
        return os.path.lexists(self.receipt)


async def _inspect(target: InspectionTarget, interval: float | None, show: Callable[[InspectionReport], None]) -> None:
    """Observe, judge and *show* the report: once, or every *interval* seconds until cancelled.

    Raises :class:`NoInstanceError` when there is nothing to observe, :class:`~runner.base.errors.HostError` when /proc cannot be
    read.
    """
    while True:
        show(judge(await _observe(target)))
        if interval is None:
            return
        await trio.sleep(interval)


async def _observe(target: InspectionTarget) -> Observation:
    inside, outside = target.has_receipt(), target.root.exists()
    if target.pod_uid or (outside and not inside):
        # Without that right all threads are visible, but their cgroups have other names.
        with contextlib.suppress(HostError):
            enter_cgroup_namespace(target.roots.proc / "1")
        return await observe_node(
            target.roots, target.root, target.kubelet, target.pod_uid, target.pod_logs, target.controller
        )
    if not inside and not outside:
        raise NoInstanceError(
            f"cannot find an instance: there is neither {target.receipt} nor {target.root.path}",
            remedy="run this in an instance's container or on a node with the controller, or name --state-dir or --root",
        )
    return observe_container(target.roots, target.receipt)


@attrs.define
class ReportFormatter:
    """Formats successive reports: each as a whole, or the differences from the previous one."""

    as_json: bool
    redraw: bool
    """Whether each report replaces the previous one on the terminal."""
    repeated: bool
    """Whether more reports follow."""
    status: Status = Status.STOPPED
    """The exit status for the last report."""
    _before: list[str] = attrs.field(factory=list)

    def text(self, report: InspectionReport) -> str:
        """Return the text for *report*, depending on the previous reports."""
        self.status = Status.FINDINGS if report.verdict is Level.ERROR else Status.STOPPED
        if not self.repeated:
            return json.dumps(report_json(report), indent=1) + "\n" if self.as_json else _text(report_lines(report))
        if self.redraw and not self.as_json:
            return _CLEAR + _text(report_lines(report))
        before, self._before = self._before, list(state_lines(report))
        changes = list(_changes(before, self._before))
        if self.as_json and changes:
            changes = [json.dumps(report_json(report))]
        return _text(changes)


def _text(lines: Iterable[str]) -> str:
    """Return *lines* for a terminal, escaped so that names of tasks and cgroups cannot control it."""
    return "".join(f"{escaped(line)}\n" for line in lines)


def _changes(before: list[str], after: list[str]) -> Iterator[str]:
    yield from (f"- {line}" for line in before if line not in after)
    yield from (f"+ {line}" for line in after if line not in before)
