"""Errors by their cause, and the exit status that each has.

::

    RunnerError
     ├─ UsageError      the command line is wrong
     ├─ SpecError       the document is wrong; carries every problem found in it
     ├─ RefusedError    the document is right, but does not fit this host or pod; nothing was touched yet
     ├─ HostError       the kernel, or a program we started, did not do what was asked of it
     │   └─ PlacementError  a thread is not where it was put
     └─ NoInstanceError no instance is where a command looks for one

Sentences read ``cannot <verb> <object>: <reason>; <remedy>``, in lower case, values by ``!r``. Every other exception is
a bug of this program: it keeps its traceback and is reported as a bug.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from runner.base.values import frozen


class Status(enum.IntEnum):
    """Exit statuses of ``instance-runner``; part of its interface, never renumbered.

    125-127 belong to container runtimes and 128+n to signals, so ours stay below.
    """

    STOPPED = 0
    """Asked to stop (SIGTERM, SIGINT or SIGHUP); the guest powered itself down and everything was released."""
    BUG = 1
    """A fault of this program; the traceback is on standard error."""
    USAGE = 2
    """The command line is wrong."""
    FINDINGS = 3
    """``plan --node``, ``check`` or ``inspect`` found something that is not as it should be."""
    FAILED = 4
    """A command other than ``run`` and ``try`` failed: no instance is there, or it refuses; or the host could not be read."""
    GUEST_SHUTDOWN = 10
    """The guest shut itself down; ``shutdown.poweroff_status`` in the spec replaces this number."""
    GUEST_RESET = 11
    """The guest rebooted and ``shutdown.on_reboot`` is ``"exit"``."""
    GUEST_PANICKED = 12
    """The guest's kernel panicked."""
    FORCED_OFF = 13
    """Asked to stop; the guest did not power down within its grace and was switched off."""
    GUEST_HUNG = 14
    """The guest stopped feeding its watchdog and ``guest.watchdog`` is ``"exit"``."""
    MACHINE_DIED = 20
    """QEMU ended without being asked to, or could no longer be controlled."""
    SERVICE_DIED = 21
    """A daemon that the guest depends on (virtiofsd, passt) ended."""
    CPUS_LOST = 22
    """The kubelet took CPUs from the running pod, and the guest did not give up as many vCPUs; it was powered down."""
    REFUSED = 30
    """The spec, the host or the pod does not fit; nothing was touched."""
    START_FAILED = 31
    """The start was begun, failed, and was reversed."""
    DIRTY = 40
    """Something could not be released; the faults are in the log and in the termination log."""


class RunnerError(Exception):
    """An error that is reported in one line instead of a traceback; *remedy* is what the operator can do about it."""

    status = Status.START_FAILED
    remedy = ""

    def __init__(self, *arguments: object, remedy: str = "") -> None:
        super().__init__(*arguments)
        self.remedy = remedy

    @property
    def message(self) -> str:
        """The sentence without the remedy."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class UsageError(RunnerError):
    """The command line is wrong."""

    status = Status.USAGE


@frozen
class Problem:
    """One error of a document.

    *path* leads to the value (``share[1].tag``, empty for the document itself), *message* says what is wrong with it,
    *remedy* what to write or do instead, empty if there is nothing more to say.
    """

    path: str
    message: str
    remedy: str = ""

    @property
    def statement(self) -> str:
        """The path and the message, without the remedy."""
        return escaped(f"{self.path}: {self.message}" if self.path else self.message)

    def __str__(self) -> str:
        return f"{self.statement}; {self.remedy}" if self.remedy else self.statement


class SpecError(RunnerError):
    """The document is wrong: every problem found in it, in the order of the document."""

    status = Status.REFUSED

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(source, self.problems)

    def __str__(self) -> str:
        return "\n".join(escaped(f"{self.source}: {problem}") for problem in self.problems)


class RefusedError(RunnerError):
    """The refusal of a document that does not fit this host or pod, before anything is touched, or of a change of a running instance."""

    status = Status.REFUSED


class HostError(RunnerError):
    """The kernel, or a program we started, did not do what was asked of it.

    Its status is that of a failed start; where the guest already runs, the end of the instance has its own
    (:func:`runner.instance.exit_report.of_running_guest`).
    """


class PlacementError(HostError):
    """A thread is not where it was put, or cannot be put there."""


class NoInstanceError(RunnerError):
    """No instance is where a command looks for one."""

    status = Status.FAILED


@contextmanager
def doing(what: str, *, remedy: str = "") -> Iterator[None]:
    """Raise :exc:`HostError` where the kernel refuses what the block asks of it; *what* names the attempt.

    Example::

        with doing(f"remove {name!r}"):
            os.unlink(name)
    """
    try:
        yield
    except OSError as error:
        raise HostError(f"cannot {what}", remedy=remedy) from error


def explain(error: BaseException) -> str:
    """Return *error* and its chain of causes in one line, followed by their remedies; a :exc:`SpecError` has one for each problem.

    An ``OSError`` contributes its reason only: the sentence before it has named the object already. The words of a guest or
    another program in it can neither begin a line of their own nor control a terminal.
    """
    return "; ".join(filter(None, explained(error)))


def problems_of(error: RunnerError) -> tuple[Problem, ...]:
    """Return the problems of *error* and its chain of causes: those of the document, or else one without a path."""
    if isinstance(error, SpecError):
        return error.problems
    return (Problem("", *explained(error)),)


def explained(error: BaseException) -> tuple[str, str]:
    """Return the sentences of *error* and its chain of causes, and apart from them each of their remedies once."""
    chain = [error, *_causes(error)]
    # an OSError of ours may have one, too (runner/kernel/leases.py)
    remedies = dict.fromkeys(filter(None, (getattr(each, "remedy", "") for each in chain)))
    return ": ".join(map(_sentence, chain)), "; ".join(map(escaped, remedies))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _sentence(error: BaseException) -> str:
    """Return the sentence of *error* without its remedy."""
    if isinstance(error, SpecError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return escaped(error.strerror)
    return escaped((error.message if isinstance(error, RunnerError) else str(error)) or type(error).__name__)


def escaped(text: str) -> str:
    r"""Return *text* with a backslash sequence such as ``\n`` for each character that is not printable.

    Those are line and paragraph separators, control characters and so terminal escapes, marks of the direction of text
    (Unicode's category Cf), and halves of surrogate pairs, which cannot be encoded; :meth:`str.isprintable` lists them.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def in_shell(path: object) -> str:
    """Return *path* as a word of a command in a remedy, which an operator can execute in a shell as it is."""
    import shlex  # here, because only a refusal needs it

    return shlex.quote(str(path))
