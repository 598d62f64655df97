"""One run of an instance, from its spec to the exit status and the termination log.

Its logging set-up is the only one of this program: the other commands print their result and raise their errors.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from functools import partial
from pathlib import Path, PurePosixPath

import trio

from runner.cli.options import TERMINATION_LOG, read_spec_file
from runner.errors import RunnerError, Status, UsageError, explain
from runner.instance.init import ASK_TO_STOP, ExitReport, Streams, failed_system_call, run_as_init
from runner.kernel.nonblocking_writer import NonBlockingWriter, dropped_message
from runner.protocol.logs import JsonConsole, LogHandler, json_of_dropped

log = logging.getLogger("runner")


def run(arguments: argparse.Namespace, state_directory: PurePosixPath) -> int:
    """Run the instance and return its exit status; every error ends as a status, an event and a termination log."""
    # For an entry point that forgot `env --block-signal`: late, but better than never.
    signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
    json_lines = arguments.log_format == "json"
    dropped = json_of_dropped if json_lines else dropped_message
    with NonBlockingWriter(1, dropped) as stdout, NonBlockingWriter(2, dropped) as stderr:
        console = JsonConsole(stdout).write if json_lines else stdout.write
        _set_up_logging(stderr, arguments)
        termination_log = _open_termination_log(arguments.termination_log)
        report = _run(arguments, state_directory, Streams(stdout, stderr, console, arguments.http))
        level = logging.INFO if report.status == Status.STOPPED else logging.ERROR
        for line in report.detail.splitlines():
            log.log(level, "%s", line)
        log.info("ended outcome=%s status=%d faults=%d", report.outcome, report.status, len(report.faults))
        _write_termination_log(termination_log, report)
    return report.status


def _set_up_logging(stderr: NonBlockingWriter, arguments: argparse.Namespace) -> None:
    root = logging.getLogger()
    root.addHandler(LogHandler(stderr.write, arguments.log_format))
    root.setLevel(arguments.log_level.upper())


def _run(arguments: argparse.Namespace, state_directory: PurePosixPath, streams: Streams) -> ExitReport:
    try:
        data = _read(arguments.spec)
        pid1 = not arguments.not_pid1
        return trio.run(partial(run_as_init, arguments.spec, data, state_directory, streams, pid1=pid1))
    except RunnerError as error:
        return ExitReport(error.status, error.status.name.lower(), explain(error))
    except Exception as error:
        report = failed_system_call(error)
        if report is not None:
            return report
        log.exception("this is a bug of instance-runner:")
        return ExitReport(Status.BUG, "bug", f"{type(error).__name__}: {error}")


def _read(spec: str) -> bytes:
    if spec == "-":
        raise UsageError(
            "cannot read the spec from standard input: a writer that is slow could block PID 1; name a file"
        )
    return read_spec_file(spec)


def _open_termination_log(path: Path | None) -> int | None:
    """Open *path*, or without one the file that Kubernetes made, before anything else: at the end descriptors may be short."""
    try:
        if path is None and not TERMINATION_LOG.exists():
            return None
        return os.open(
            path or TERMINATION_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644
        )
    except OSError as error:
        log.warning("cannot open the termination log: %s", error.strerror)
        return None


def _write_termination_log(fd: int | None, report: ExitReport) -> None:
    """Write *report* to the termination log *fd*, if there is one, and close it."""
    if fd is None:
        return
    try:
        os.write(fd, json.dumps(report.to_json()).encode() + b"\n")
    except OSError as error:
        log.warning("cannot write the termination log: %s", error.strerror)
    finally:
        os.close(fd)
