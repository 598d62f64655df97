"""What a runner does in place of ``run`` when it is renewed: it takes over what the runner before exec has held.

:mod:`runner.instance.renewal.first_stage` imports it. It is no command: there is nothing to take over for a process that did
not become this program by exec.
"""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Protocol

from runner.base.errors import RefusedError, explain
from runner.base.events import InstanceEvent
from runner.cli.outputs import Outputs
from runner.instance.init import resume_as_init
from runner.instance.renewal.upgrade import committed_after, state_of, taken_over
from runner.instance.supervisor import Renewal
from runner.kernel.execution import claim_inherited
from runner.kernel.program_directory import check_program

log = logging.getLogger("runner")


class ExecutedStage(Protocol):
    """The first stage, which may be that of another version: these names are its interface."""

    fd: int
    document: dict[str, Any]
    index: int
    reason: str

    def commit(self) -> None:
        """Give up the way back."""

    def fall_back(self, error: BaseException) -> None:
        """Execute the program before; return if there is none."""


def rehearse(stage: ExecutedStage) -> None:
    """Show that this program could go on; the one that runs now checks the other one's directory first.

    Raises :exc:`~runner.base.errors.RunnerError`.
    """
    document = stage.document
    if stage.index:
        try:
            manifest = check_program(PurePosixPath(document["directory"]), document["programs"][0]["digest"])
            with open(document["manifest"], "w", closefd=False) as file:
                file.write(manifest)
        except RefusedError as error:  # the first stage prints no causes
            raise RefusedError(explain(error)) from None
    state_of(document)


def resume(stage: ExecutedStage) -> int:
    """Go on with the instance and return its exit status."""
    document = stage.document
    renewal = taken_over(document, stage.index, stage.reason)
    claim_inherited(document["descriptors"])
    os.set_inheritable(stage.fd, False)
    renewal.entry = __name__
    held = renewal.held
    held.fall_back = stage.fall_back
    held.at_commit(stage.commit)
    held.at_commit(partial(_close, stage.fd))
    assert held.found is not None  # noqa: S101 - all of it
    with Outputs(held, held.found["log level"], held.found["log format"]) as outputs:
        held.at_commit(partial(_log, renewal, document))
        return outputs.reported(partial(resume_as_init, outputs.streams(held), renewal), renewal)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # there is no way back from here on
        os.close(fd)


def _log(renewal: Renewal, document: dict[str, Any]) -> None:
    pause = committed_after(document)
    program, generation = renewal.digest or "the image's", renewal.generation
    match renewal.outcome:
        case "renewed":
            log.info(InstanceEvent.RUNNER_RENEWED, generation, program, pause)
        case "fell_back":
            log.error(InstanceEvent.RUNNER_NOT_RENEWED, renewal.reason)
        case _:
            reason = renewal.reason
            log.error(InstanceEvent.RUNNER_RESUMED, generation, pause, reason)
