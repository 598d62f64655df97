"""The end of an instance as a value, from which its exit status and the termination log are made; and which errors are the host's."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs
import trio

from runner.base.errors import HostError, Problem, RunnerError, SpecError, Status, explain, problems_of
from runner.base.events import InstanceEvent
from runner.base.values import frozen
from runner.instance import optional_parts
from runner.spec.document_parser import parse_document

if TYPE_CHECKING:
    from runner.instance.control_json import EndDocument
    from runner.spec.refusals import ProblemDocument

log = logging.getLogger(__name__)

LONGEST_TERMINATION_LOG = 4096
"""Bytes that Kubernetes keeps of a termination log (``MaxContainerTerminationMessageLength``)."""
LONGEST_FOUND = 300
"""Bytes of a value of the spec in the termination log."""
_MISTAKES = {None, errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTSOCK}
"""Error numbers of system calls that indicate a bug of this program, not a problem of the host."""


@frozen
class ExitReport:
    """The end of the instance, source of the exit status and the termination log."""

    status: int
    outcome: str
    detail: str
    faults: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    """The problems for which it was refused or its start failed; those of the spec with their keys."""
    source: str = ""
    document: bytes = b""
    """The spec that the problems are about, and its name; empty if they concern none."""

    @classmethod
    def of(cls, error: RunnerError) -> Self:
        """Return the report of an instance ended by *error*."""
        source = error.source if isinstance(error, SpecError) else ""
        return cls(error.status, error.status.name.lower(), explain(error), (), problems_of(error), source)

    def to_json(self) -> EndDocument:
        """Return it as written to the termination log."""
        # Kubernetes keeps 4096 bytes of it: the fields are shortened so that these are valid JSON.
        document: EndDocument = {
            "version": 1,
            "status": self.status,
            "outcome": self.outcome,
            "detail": _cut(self.detail, 1500),
            "faults": [_cut(fault, 300) for fault in self.faults[:5]],
            "problems": [],
        }
        if self.problems:
            document["problems"] = self._problems()
        while document["problems"] and len(json.dumps(document)) >= LONGEST_TERMINATION_LOG:
            document["problems"].pop()
        return document

    def _problems(self) -> list[ProblemDocument]:
        """Return the problems; *found* values that are long, or may be a secret of cloud-init, are left out."""
        written: Mapping[str, object] = {}
        with suppress(RunnerError):  # that it cannot be parsed is the problem
            written = {**parse_document(self.source, self.document), "cloud_init": None}
        problems = optional_parts.problem_documents(self.source, self.problems, written)
        return [
            each if len(json.dumps(each["found"])) <= LONGEST_FOUND else {**each, "found": None} for each in problems
        ]


def _cut(text: str, most: int) -> str:
    """Return *text*, shortened where it would take more than *most* bytes in JSON."""
    if len(json.dumps(text)) <= most:
        return text
    room = most - len(json.dumps("…"))
    sizes = accumulate(len(json.dumps(character)) - len('""') for character in text)
    return text[: sum(1 for _ in takewhile(lambda size: size <= room, sizes))] + "…"


def with_faults(report: ExitReport, faults: tuple[str, ...]) -> ExitReport:
    """Return *report* together with the release failures, if any."""
    if not faults:
        return report
    detail = f"{report.detail} ({report.outcome}), but not everything could be released"
    return ExitReport(Status.DIRTY, "dirty", detail, faults)


def of_running_guest(report: ExitReport) -> ExitReport:
    """Return *report* of an instance whose guest had begun to run: a failed start is then the end of the machine."""
    if report.status != Status.START_FAILED:
        return report
    return attrs.evolve(report, status=Status.MACHINE_DIED, outcome=Status.MACHINE_DIED.name.lower())


def report_of(error: Exception) -> ExitReport:
    """Return the report of an instance ended by *error*."""
    if isinstance(error, RunnerError):
        return ExitReport.of(error)
    if (report := failed_system_call(error)) is not None:
        return report
    return ExitReport(Status.BUG, "bug", f"{type(error).__name__}: {error}")


def failed_system_call(error: BaseException) -> ExitReport | None:
    """Return the report of an end by failed system calls, or ``None`` if *error* is a bug of this program.

    Background tasks raise in groups. A system call's error about a wrong argument counts as a bug, too.
    """
    failed = _os_error(error)
    if failed is None:
        return None
    log.debug(InstanceEvent.SYSTEM_CALL_FAILED, exc_info=error)
    named = f"cannot use {os.fsdecode(failed.filename)!r}" if isinstance(failed.filename, (str, bytes)) else ""
    host = HostError(named or "cannot run the instance")
    host.__cause__ = failed
    return ExitReport.of(host)


def _os_error(error: BaseException | None) -> OSError | None:
    if isinstance(error, trio.TrioInternalError):  # a call of the event loop itself; other errors are its consequence
        cause = error.__cause__
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        return _os_error(cause)
    if isinstance(error, BaseExceptionGroup):
        found = [_os_error(each) for each in error.exceptions]
        return None if None in found else found[0]
    if isinstance(error, ModuleNotFoundError):
        return _unlisted_directory(error)
    return error if isinstance(error, OSError) and error.errno not in _MISTAKES else None


def _unlisted_directory(error: ModuleNotFoundError) -> OSError | None:
    """Return the error of a directory that could not be listed, in which Python has therefore not found a module that exists.

    Python takes such a directory for an empty one (``FileFinder._fill_cache``). Return ``None`` if there is no such module.
    """
    relative = (error.name or "").replace(".", "/")
    candidates = (Path(root, each) for root in sys.path for each in (f"{relative}.py", relative) if relative)
    found = next(filter(Path.exists, candidates), None)
    if found is None:
        return None
    importlib.invalidate_caches()  # it is listed again: the report needs modules, too
    return OSError(errno.EIO, f"Python did not find {error.name} there when it listed the directory", str(found.parent))
