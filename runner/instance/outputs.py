"""The outputs of one run of an instance: the log, the guest's console and the termination log.

No other command sets up logging: they print their results and raise their errors.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Literal, Self

import trio

from runner.base.errors import Status
from runner.base.events import InstanceEvent
from runner.instance.exit_report import ExitReport, of_running_guest, report_of, with_faults
from runner.instance.held import Held
from runner.instance.init import Streams, resume_as_init
from runner.instance.supervisor import Renewal
from runner.protocol.logs import JsonConsole, LogHandler, open_output

log = logging.getLogger("runner")


class Outputs:
    """The log, the console's output, and the termination log. A context manager that writes the remaining data at its end."""

    def __init__(self, held: Held, log_level: str, log_format: Literal["text", "json"]) -> None:
        self.termination_log: int | None = None
        self._abandoned: list[trio.lowlevel.Task] = []
        """The root tasks of event loops that have ended by themselves. Each is kept because it refers to all of its loop's tasks: collected
        as garbage, they would begin to release resources that now belong to another loop."""
        self._log_level = log_level
        self._log_format = log_format
        self.stdout, self.stderr = open_output(1, log_format), open_output(2, log_format)
        self._json_console = JsonConsole(self.stdout) if log_format == "json" else None
        held.at_commit(partial(self._begin_with, *self._hold(held)))
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

    def streams(self, held: Held, http: tuple[str, int] | None = None) -> Streams:
        """Return the streams for the instance, with the address *http* for probes and metrics unless it is held already."""
        console = self.stdout.write if self._json_console is None else self._json_console.write
        return Streams(self.stdout, self.stderr, console, held.value("http address", lambda: http))

    def _hold(self, held: Held) -> tuple[bytes, bytes, bytes]:
        """Keep in *held* the state that the next program needs; return the data that the previous one has not written yet."""
        held.keep(self, _log_level="log level", _log_format="log format", termination_log="termination log")
        console = self._json_console
        return (
            held.current("stdout", lambda: self.stdout.unwritten),
            held.current("stderr", lambda: self.stderr.unwritten),
            held.current("console line", lambda: b"" if console is None else console.unfinished),
        )

    def _begin_with(self, stdout: bytes, stderr: bytes, console_line: bytes) -> None:
        """Write the data that the previous program has not written yet."""
        self.stdout.begin_with(stdout)
        self.stderr.begin_with(stderr)
        if self._json_console is not None:
            self._json_console.take_over(console_line)

    def reported(self, act: Callable[[], Awaitable[ExitReport]], renewal: Renewal) -> int:
        """Run *act*, log its report and write it to the termination log; return the exit status.

        If a renewed program fails during its takeover, the previous one continues before anything is reported; see :class:`Renewal`.
        """
        report = self._run(act, renewal)
        level = logging.INFO if report.status == Status.STOPPED else logging.ERROR
        for line in report.detail.splitlines():
            log.log(level, InstanceEvent.END_EXPLAINED, line)
        log.info(InstanceEvent.INSTANCE_ENDED, report.outcome, report.status, len(report.faults))
        _write_termination_log(self.termination_log, report)
        if self._abandoned:
            self.__exit__(None, None, None)
            os._exit(report.status)
        return report.status

    def _run(self, act: Callable[[], Awaitable[ExitReport]], renewal: Renewal) -> ExitReport:
        root: trio.lowlevel.Task | None = None

        async def run() -> ExitReport:
            nonlocal root
            root = trio.lowlevel.current_root_task()
            try:
                return await act()
            finally:
                root = None

        try:
            return trio.run(run)
        except Exception as error:
            renewal.held.go_back()
            if root is not None:
                self._abandoned.append(root)
                return self._after_loop(renewal, error)
            report = report_of(error)
            if report.status == Status.BUG:
                log.exception(InstanceEvent.BUG)
            return report

    def _after_loop(self, renewal: Renewal, error: Exception) -> ExitReport:
        """Continue without the event loop that *error* has ended: in another one, or report the resources not released."""
        log.error(InstanceEvent.EVENT_LOOP_ENDED, exc_info=error)
        if (resume := renewal.resume_after_loop) is None:
            outcome: Renewal | tuple[str, ...] = (renewal.unreleased(),)
        else:
            outcome = resume(error)
        if isinstance(outcome, tuple):
            report = report_of(error)
            ran = resume is not None or renewal.loop_ended_by is not None
            return with_faults(of_running_guest(report) if ran else report, outcome)
        self._hold(outcome.held)
        with warnings.catch_warnings(action="ignore"):
            error.__traceback__ = None  # it refers to the ended loop, which would prevent a new one
        return self._run(partial(resume_as_init, self.streams(outcome.held), outcome), outcome)


def _write_termination_log(fd: int | None, report: ExitReport) -> None:
    """Write *report* to the termination log *fd*, if there is one, and close it.

    Whole or not at all: for an empty one the kubelet uses the last lines of the log (``FallbackToLogsOnError``). A file server may report a
    lack of space only when the file is closed (close(2)).
    """
    if fd is None:
        return
    rest = json.dumps(report.to_json()).encode() + b"\n"
    try:
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            with suppress(OSError):  # a pipe
                os.ftruncate(fd, 0)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        log.warning(InstanceEvent.TERMINATION_LOG_UNWRITTEN, error.strerror)
