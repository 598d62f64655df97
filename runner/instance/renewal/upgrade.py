"""Replacing a runner under a running guest, by another program or by a fresh image of its own.

``runner/README.md`` describes the steps ("Renewal"). Here are the first three, up to exec: rehearsal, quiescence, and the state in sealed
memory. The first stage (:mod:`runner.instance.renewal.first_stage`) belongs to the program that takes over.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

import trio

from runner.base.errors import HostError, RefusedError, doing, explain
from runner.base.events import InstanceEvent
from runner.instance.gate import Kind, OvertakenError
from runner.instance.held import Held
from runner.instance.renewal import first_stage
from runner.instance.renewal.first_stage import ProgramDocument, RenewalDocument, stage_argv
from runner.instance.renewal.names import FORMAT, OLDEST, name_of
from runner.instance.renewal.state_codec import from_document, to_document
from runner.instance.supervisor import Renewal, Supervisor
from runner.kernel.child_processes import Command
from runner.kernel.execution import execute, identity, memory, sealed_memory

if TYPE_CHECKING:
    from runner.protocol.instance_metrics import RenewalOutcome

log = logging.getLogger(__name__)

QUIET_WITHIN = 5.0
"""Seconds to wait for a moment at which nothing is half done, for a renewal that was asked for."""
QUIET_WITHIN_AFTER_FAULT = 20.0
"""The same limit after a fault: detaching a disk takes up to 15 s."""
LOOKED_AGAIN = 0.02
"""Seconds between two checks for such a moment."""

REHEARSED_WITHIN = 60.0
"""Seconds in which a program must show that it can be imported and understands the state; 0.5 are usual."""

MOST_FAULTS, FORGIVEN = 2, 600.0
"""Faults of its own that a runner survives, and the seconds after which one no longer counts."""

MARGIN = 3
"""The time limit of a program's takeover, as a multiple of the time its child took: it does the same work, and little more."""

_REFUSED = f"{RefusedError.__name__}: "
BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
"""Signals that are kept for the program that continues."""


def running_program(digest: str) -> ProgramDocument:
    """Return the running program in the form that the first stage takes: its import path, its bytecode directory and *digest*."""
    own = str(Path(first_stage.__file__).parents[3])
    path = [own, *(each for each in sys.path if each.startswith("/") and each != own)]
    return {"path": path, "bytecode": sys.pycache_prefix, "digest": digest}


async def upgrade(supervisor: Supervisor, directory: PurePosixPath, digest: str) -> NoReturn:
    """Become the program in *directory*, which has this *digest*.

    Raises :exc:`~runner.base.errors.RunnerError`, in which case nothing has changed.
    """
    with memory("program") as archive:
        programs: list[ProgramDocument] = [
            {"path": [f"/proc/{os.getpid()}/fd/{archive}"], "digest": digest},
            running_program(supervisor.renewal.digest),
        ]
        document = _document(supervisor, programs, "upgrade")
        made: RenewalDocument = {**document, "directory": str(directory), "archive": archive}
        await _rehearse(supervisor, made, 1, "this program", (archive,))
        begun = trio.current_time()
        await _rehearse(supervisor, document, 0, f"the program in {str(directory)!r}")
        programs[0]["within"] = max(first_stage.COMMITTED_WITHIN, math.ceil(MARGIN * (trio.current_time() - begun)))
        os.set_inheritable(archive, True)  # for good: a child of this or the next program gets what it is given by name
        await _become(supervisor, Kind.RENEWAL, programs, "upgrade", QUIET_WITHIN)


async def resume_after_fault(supervisor: Supervisor, error: Exception) -> None:
    """Become a fresh image of this program after its own fault; return if there were too many faults, or it is impossible."""
    renewal = supervisor.renewal
    if not _count_fault(renewal):
        return
    try:
        programs = _this_program_twice(renewal)
        await _become(supervisor, Kind.FAULT, programs, "fault", QUIET_WITHIN_AFTER_FAULT, _reason(error))
    except Exception as failure:  # noqa: BLE001 - whatever it is, the guest is to power down in order
        log.error(InstanceEvent.RUNNER_NOT_RESUMED, explain(failure))  # noqa: TRY400


def execute_again(supervisor: Supervisor, error: Exception) -> None:
    """Become a fresh image of this program at once, even in the middle of a change; return if that is not allowed, or fails."""
    if _count_fault(supervisor.renewal):
        try:
            _execute(supervisor, _this_program_twice(supervisor.renewal), "fault", _reason(error))
        except HostError as failure:
            log.error(InstanceEvent.RUNNER_NOT_RESUMED, explain(failure))  # noqa: TRY400 - the log is for operators


def _count_fault(renewal: Renewal) -> bool:
    """Count a fault of this program; tell whether it may be survived, and log if there were too many."""
    now = time.monotonic()
    renewal.own_faults = [each for each in renewal.own_faults if now - each < FORGIVEN]
    if len(renewal.own_faults) >= MOST_FAULTS:
        log.error(InstanceEvent.RUNNER_FAULTS_TOO_MANY, MOST_FAULTS, FORGIVEN)
        return False
    renewal.own_faults.append(now)
    return True


def _this_program_twice(renewal: Renewal) -> list[ProgramDocument]:
    """Return this program twice: if the takeover fails, it is tried once more."""
    return [running_program(renewal.digest)] * 2


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _document(supervisor: Supervisor, programs: list[ProgramDocument], cause: str, reason: str = "") -> RenewalDocument:
    renewal, descriptors = supervisor.renewal, list[int]()
    state = {name: to_document(read(), name_of(name).type, descriptors) for name, read in renewal.held.read.items()}
    return {
        "format": FORMAT,
        "cause": cause,
        "reason": reason,
        "generation": renewal.generation,
        "own_faults": renewal.own_faults,
        "programs": programs,
        "entry": renewal.entry,
        "left_at": time.monotonic(),
        "descriptors": {str(number): identity(number) for number in descriptors},
        "state": state,
    }


async def _rehearse(
    supervisor: Supervisor, document: RenewalDocument, index: int, what: str, fds: Sequence[int] = ()
) -> None:
    """Start a child that imports the program *index* and reads the state. Raises :exc:`~runner.base.errors.RunnerError`."""
    with _staged(document) as (argv, own):
        command = Command("rehearsal", (*argv("rehearse", index),), (*own, *fds), level=logging.DEBUG)
        async with supervisor.processes.daemon(command, 0) as process:
            with trio.move_on_after(REHEARSED_WITHIN):
                await process.wait()
    if process.returncode is None or process.returncode < 0:
        raise RefusedError(f"cannot renew the runner: {what} could not be tried within {REHEARSED_WITHIN:g} s")
    if process.returncode:
        output = process.last_lines[-1] if process.last_lines else process.how_it_ended()
        refused = output.removeprefix(_REFUSED)  # the running program refused the directory
        raise RefusedError(
            f"cannot renew the runner: {refused if refused != output else f'{what} cannot go on: {output}'}"
        )


@contextmanager
def _staged(document: RenewalDocument) -> Iterator[tuple[Callable[[str, int], list[str]], tuple[int, int]]]:
    """Hold the first stage and *document* in sealed memory.

    Yield the command line by its mode and the index of the program, and the two descriptors.
    """
    loader: Any = first_stage.__loader__  # from the archive it is bytecode, which the interpreter executes as well
    try:
        source = loader.get_data(first_stage.__file__)
    except (ImportError, OSError) as error:
        raise HostError("cannot read the first stage of the program that runs") from error
    with sealed_memory("stage", source) as stage:
        document["stage"] = {"interpreter": sys.executable, "file": f"/proc/self/fd/{stage}", "fd": stage}
        with sealed_memory("state", json.dumps(document).encode()) as fd:
            yield lambda mode, index: stage_argv(document["stage"], mode, fd, index, ""), (stage, fd)


async def _become(
    supervisor: Supervisor, kind: Kind, programs: list[ProgramDocument], cause: str, within: float, reason: str = ""
) -> NoReturn:
    """Become the first of *programs* as soon as no change is in progress. Raises :exc:`~runner.base.errors.RunnerError`."""
    changes, deadline, unfinished = supervisor.changes, trio.current_time() + within, ""
    while trio.current_time() < deadline:
        # Another change has overtaken it before anything was done; it begins anew.
        with trio.move_on_at(deadline), suppress(OvertakenError):
            async with changes.begin(kind, "the runner is being renewed"):
                while True:
                    unfinished = await _try_once(supervisor, programs, cause, reason)
                    await trio.sleep(LOOKED_AGAIN)
    raise RefusedError(f"cannot renew the runner now: {changes.current or unfinished}", remedy="ask again later")


async def _try_once(supervisor: Supervisor, programs: list[ProgramDocument], cause: str, reason: str) -> str:
    """Become the first of *programs* if nothing is unfinished, and otherwise return what is. Raises as :func:`_execute` does."""
    if unfinished := _unfinished(supervisor):
        return unfinished
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        begun = supervisor.processes.begun
        await _signals_handled()
        if begun != supervisor.processes.begun:
            return "a child is being started"  # which takes signals meanwhile
        if unfinished := _unfinished(supervisor):
            return unfinished
        _execute(supervisor, programs, cause, reason)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _unfinished(supervisor: Supervisor) -> str:
    """Return the reason why the state cannot be carried over at this moment, empty if it can."""
    if supervisor.renewal.resume_after_fault is None:
        return "the guest does not run"
    return supervisor.renewal.unfinished()


async def _signals_handled() -> None:
    """Return when the tasks that wait for signals have received all signals that came before they were blocked.

    The event loop's signal handler appends a call to the same queue as this function, so the calls of earlier signals come first.
    """
    for _ in range(3):
        handled = trio.Event()
        trio.lowlevel.current_trio_token().run_sync_soon(handled.set, idempotent=True)
        await handled.wait()
        await trio.lowlevel.checkpoint()


def _execute(supervisor: Supervisor, programs: list[ProgramDocument], cause: str, reason: str) -> NoReturn:
    """Carry the state over to the first of *programs*, and execute it.

    Raises :exc:`~runner.base.errors.HostError`. Then nothing has changed, but if the kernel does not execute it, the console's clients
    have been told to attach again.
    """
    supervisor.log_limit.log_left_out()
    with doing("carry over what this process holds"):
        document = _document(supervisor, programs, cause, reason)
    with _staged(document) as (argv, own):
        for leave in supervisor.renewal.leaving:
            leave()
        execute(argv("resume", 0), os.environ, (*own, *map(int, document["descriptors"])))


def state_of(document: RenewalDocument) -> dict[str, Any]:
    """Return the previous runner's state, by name. Raises :exc:`~runner.base.errors.HostError` for names and formats not known here."""
    if not OLDEST <= document["format"] <= FORMAT:
        raise HostError(
            f"cannot understand the state of the runner before: its format is {document['format']}, and this program knows {FORMAT}"
        )
    return {name: from_document(each, name_of(name).type, name) for name, each in document["state"].items()}


def taken_over(document: RenewalDocument, index: int, reason: str) -> Renewal:
    """Return the state that the program *index* of *document* takes over; *reason* says why it is not the first program."""
    resumed, upgraded = document["cause"] == "fault", document["cause"] == "upgrade" and index == 0
    outcome: RenewalOutcome = "resumed" if resumed else "renewed" if upgraded else "fell_back"
    found = state_of(document)
    found["counters"].renewals[outcome] += 1
    held = Held(found, newer=lambda name: name_of(name).since > document["format"])
    return Renewal(
        held,
        document["generation"] + (resumed or upgraded),
        outcome=outcome,
        reason=reason or document["reason"],
        digest=document["programs"][index]["digest"],
        strict=upgraded,
        own_faults=list(document["own_faults"]),
    )
