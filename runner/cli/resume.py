"""The entry point of a renewed runner, in place of ``run``: it takes over the state of the previous program.

:mod:`runner.instance.renewal.first_stage` imports it. It is no command, because only a process that became this program by exec has a state
to take over.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import PurePosixPath

from runner.base.errors import RefusedError, explain
from runner.base.events import InstanceEvent
from runner.instance.init import resume_as_init
from runner.instance.outputs import Outputs
from runner.instance.renewal.first_stage import FirstStage, RenewalDocument
from runner.instance.renewal.upgrade import state_of, taken_over
from runner.instance.supervisor import Renewal
from runner.kernel.execution import claim_inherited

log = logging.getLogger("runner")


def rehearse(stage: FirstStage) -> None:
    """Check that this program could continue; the running one first makes the archive of the other one.

    Raises :exc:`~runner.base.errors.RunnerError`.
    """
    document = stage.document
    if stage.index:
        from runner.kernel.program_archive import write_archive  # here, because only this child writes one

        try:
            write_archive(PurePosixPath(document["directory"]), document["programs"][0]["digest"], document["archive"])
        except RefusedError as error:  # the first stage prints no causes
            raise RefusedError(explain(error)) from None
    state_of(document)


def resume(stage: FirstStage) -> int:
    """Continue the instance and return its exit status."""
    document = stage.document
    renewal = taken_over(document, stage.index, stage.reason)
    claim_inherited(document["descriptors"])
    os.set_inheritable(stage.fd, False)
    renewal.entry = __name__
    held = renewal.held
    held.fall_back = stage.fall_back
    held.at_commit(stage.commit)
    assert held.found is not None  # noqa: S101 - all of it
    with Outputs(held, held.found["log level"], held.found["log format"]) as outputs:
        held.at_commit(partial(_log, renewal, document))
        return outputs.reported(partial(resume_as_init, outputs.streams(held), renewal), renewal)


def _log(renewal: Renewal, document: RenewalDocument) -> None:
    pause = time.monotonic() - document["left_at"]  # the time in which no runner was at work
    program, generation = renewal.digest or "the image's", renewal.generation
    match renewal.outcome:
        case "renewed":
            log.info(InstanceEvent.RUNNER_RENEWED, generation, program, pause)
        case "fell_back":
            log.error(InstanceEvent.RUNNER_NOT_RENEWED, renewal.reason)
        case _:
            log.error(InstanceEvent.RUNNER_RESUMED, generation, pause, renewal.reason)
