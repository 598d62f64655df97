"""What a runner does in place of ``run`` when it is renewed: it takes over what the runner before exec has held.

:mod:`runner.instance.renewal.first_stage` imports it. It is no command: there is nothing to take over for a process that did
not become this program by exec.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Protocol

from runner.base.errors import HostError, RefusedError, explain
from runner.base.events import InstanceEvent
from runner.cli.outputs import Outputs
from runner.instance.init import resume_as_init
from runner.instance.renewal.codec import decode
from runner.instance.renewal.upgrade import FORMAT, committed_after, taken_over
from runner.instance.supervisor import CarryOver
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
    _state(document)


def resume(stage: ExecutedStage) -> int:
    """Go on with the instance and return its exit status."""
    document = stage.document
    state = _state(document)
    claim_inherited(document["descriptors"])
    os.set_inheritable(stage.fd, False)
    carried = state.pop("outputs")
    carry_over = taken_over(document, state, stage.index, stage.reason)
    carry_over.entry = __name__
    with Outputs(carried.log_level, carried.log_format) as outputs:
        outputs.termination_log = None if carried.termination_log is None else carried.termination_log.number
        carry_over.offer("outputs", outputs.carried)

        def commit() -> None:
            stage.commit()
            with contextlib.suppress(OSError):  # there is no way back from here on
                os.close(stage.fd)
            outputs.take_over(carried)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            _log(carry_over, committed_after(document))

        carry_over.commit, carry_over.fall_back = commit, stage.fall_back
        return outputs.reported(partial(resume_as_init, outputs.streams(state["run"].http), carry_over), carry_over)


def _state(document: dict[str, Any]) -> dict[str, Any]:
    if document["format"] != FORMAT:
        raise HostError(
            f"cannot understand the state of the runner before: its format is {document['format']}, and this program knows {FORMAT}"
        )
    return {name: decode(each) for name, each in document["state"].items()}


def _log(carry_over: CarryOver, pause: float) -> None:
    program, generation = carry_over.digest or "the image's", carry_over.generation
    match carry_over.outcome:
        case "renewed":
            log.info(InstanceEvent.RUNNER_RENEWED, generation, program, pause)
        case "fell_back":
            log.error(InstanceEvent.RUNNER_NOT_RENEWED, carry_over.reason)
        case _:
            reason = carry_over.reason
            log.error(InstanceEvent.RUNNER_RESUMED, generation, pause, reason)
