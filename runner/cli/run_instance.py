"""One run of an instance, from its spec to the exit status and the termination log.

Its logging set-up is the only one of this program: the other commands print their result and raise their errors.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import trio

from runner.cli.options import TERMINATION_LOG, read_spec_file
from runner.errors import RunnerError, Status, UsageError, explain
from runner.instance.init import ASK_TO_STOP, ExitReport, Streams, failed_system_call, run_as_init
from runner.instance.supervisor import CarryOver
from runner.protocol.logs import JsonConsole, LogHandler, open_output

if TYPE_CHECKING:
    from runner.instance.carried import CarriedOutputs  # only a runner that is renewed carries any

log = logging.getLogger("runner")


def run(arguments: argparse.Namespace, state_directory: PurePosixPath) -> int:
    """Run the instance and return its exit status; every error ends as a status, an event and a termination log."""
    # For an entry point that forgot `env --block-signal`: late, but better than never.
    signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
    carry_over = CarryOver()
    with Outputs(arguments.log_level, arguments.log_format) as outputs:
        outputs.termination_log = _open_termination_log(arguments.termination_log)
        carry_over.offer("outputs", outputs.carried)
        streams = outputs.streams(arguments.http)

        async def act() -> ExitReport:
            data, pid1 = _read(arguments.spec), not arguments.not_pid1
            source = arguments.spec
            return await run_as_init(source, data, state_directory, streams, pid1=pid1, carry_over=carry_over)

        return outputs.reported(act)


class Outputs:
    """The log, the console's output, and the termination log. A context manager that writes what is left at its end."""

    def __init__(self, log_level: str, log_format: Literal["text", "json"]) -> None:
        self.termination_log: int | None = None
        self._log_level = log_level
        self._log_format = log_format
        self.stdout, self.stderr = open_output(1, log_format), open_output(2, log_format)
        self._json_console = JsonConsole(self.stdout) if log_format == "json" else None
        root = logging.getLogger()
        root.addHandler(LogHandler(self.stderr.write, log_format))
        root.setLevel(log_level.upper())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in (self.stderr, self.stdout):
            writer.__exit__(kind, error, trace)

    def streams(self, http: tuple[str, int] | None) -> Streams:
        """Return them for the instance."""
        console = self.stdout.write if self._json_console is None else self._json_console.write
        return Streams(self.stdout, self.stderr, console, http)

    def carried(self) -> CarriedOutputs:
        """Return what the program that renews this one must know of them."""
        from runner.instance.carried import CarriedOutputs
        from runner.kernel.carried import CarriedFd

        return CarriedOutputs(
            self._log_level,
            self._log_format,
            None if self.termination_log is None else CarriedFd(self.termination_log),
            self.stdout.carried(),
            self.stderr.carried(),
            b"" if self._json_console is None else self._json_console.unfinished,
        )

    def take_over(self, carried: CarriedOutputs) -> None:
        """Continue with what the runner before exec has not written yet."""
        self.stdout.take_over(carried.stdout)
        self.stderr.take_over(carried.stderr)
        if self._json_console is not None:
            self._json_console.take_over(carried.console_line)

    def reported(self, act: Callable[[], Awaitable[ExitReport]]) -> int:
        """Run *act*, log its report and write it to the termination log; return the exit status."""
        report = _run(act)
        level = logging.INFO if report.status == Status.STOPPED else logging.ERROR
        for line in report.detail.splitlines():
            log.log(level, "%s", line)
        log.info("ended outcome=%s status=%d faults=%d", report.outcome, report.status, len(report.faults))
        _write_termination_log(self.termination_log, report)
        return report.status


def _run(act: Callable[[], Awaitable[ExitReport]]) -> ExitReport:
    try:
        return trio.run(act)
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
