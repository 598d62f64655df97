"""The outputs of one run of an instance: the log, the guest's console and the termination log.

Their logging set-up is the only one of this program: the other commands print their result and raise their errors.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import trio

from runner.base.errors import RunnerError, Status
from runner.instance.init import ExitReport, Streams, failed_system_call
from runner.protocol.logs import JsonConsole, LogHandler, open_output

if TYPE_CHECKING:
    from runner.instance.renewal.carried import CarriedOutputs  # only a runner that is renewed carries any

log = logging.getLogger("runner")


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
        from runner.instance.renewal.carried import CarriedOutputs
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
        return ExitReport.of(error)
    except Exception as error:
        report = failed_system_call(error)
        if report is not None:
            return report
        log.exception("this is a bug of instance-runner:")
        return ExitReport(Status.BUG, "bug", f"{type(error).__name__}: {error}")


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
