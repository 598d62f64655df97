"""The longest time that the end of an instance takes: the sum of the bounds of its steps."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import attrs
import pytest
import trio

from runner.base.errors import HostError, Status
from runner.instance import init
from runner.instance.exit_report import ExitReport, failed_system_call
from runner.instance.gate import StopRequest
from runner.instance.parts import console, daemons
from runner.instance.parts.cgroups import controller, delegated
from runner.instance.supervisor import Faults, open_supervisor
from runner.protocol.instance_metrics import Phase
from runner.spec.instance import ShutdownSpec

BELOW = 10
"""Seconds by which the documents keep the grace below the pod's."""


def test_the_steps_after_the_grace_fit_into_the_reserved_time() -> None:
    """This holds even if a daemon ignores SIGTERM, and the controller does not answer or a cgroup stays populated."""
    placement = max(controller.UNSEALED_WITHIN + controller.DEREGISTERED_WITHIN, delegated.EMPTY_WITHIN + 1)
    worst = console.FLUSHED_WITHIN + daemons.STOPPED_WITHIN + placement
    assert worst <= BELOW
    documented = repr(attrs.fields(ShutdownSpec).grace.metadata)
    assert f"Keep it {BELOW} s below terminationGracePeriodSeconds" in documented


def failure(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


def test_system_calls_that_fail_are_the_hosts_fault() -> None:
    report = failed_system_call(failure(errno.EIO, "/sys/devices/system/cpu/online"))
    assert report is not None
    assert (report.status, report.detail) == (
        Status.START_FAILED,
        "cannot use '/sys/devices/system/cpu/online': Input/output error",
    )
    of_tasks = ExceptionGroup("", [ExceptionGroup("", [failure(errno.EMFILE)]), failure(errno.ENOMEM)])
    report = failed_system_call(of_tasks)
    assert report is not None
    assert report.detail == "cannot run the instance: Too many open files"


def test_a_module_whose_directory_was_not_listed_is_the_hosts_fault() -> None:
    directory = Path(init.__file__).parent
    report = failed_system_call(ModuleNotFoundError("No module named …", name="runner.instance.lifecycle"))
    assert report is not None
    assert report.detail.startswith(f"cannot use {str(directory)!r}: Python did not find runner.instance.lifecycle")


def of_the_event_loop(cause: BaseException) -> trio.TrioInternalError:
    error = trio.TrioInternalError("internal error in Trio - please file a bug!")
    error.__cause__ = cause
    return error


def test_a_system_call_of_the_event_loop_is_the_hosts_fault_too() -> None:
    consequences = ExceptionGroup("", [ExceptionGroup("", [failure(errno.EIO)]), AssertionError()])
    for cause in (failure(errno.EIO), consequences):
        report = failed_system_call(of_the_event_loop(cause))
        assert report is not None
        assert report.detail == "cannot run the instance: Input/output error"
    assert failed_system_call(of_the_event_loop(AssertionError())) is None


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        OSError("without a number"),
        failure(errno.EBADF),
        ModuleNotFoundError("No module named 'runner.none'", name="runner.none"),
        ExceptionGroup("", [failure(errno.EMFILE), TypeError("x")]),
    ],
)
def test_a_mistake_of_the_program_stays_one(error: Exception) -> None:
    assert failed_system_call(error) is None


@pytest.mark.parametrize(
    ("phase", "status"),
    [("starting", Status.START_FAILED), ("running", Status.MACHINE_DIED), ("stopping", Status.MACHINE_DIED)],
)
async def test_a_start_can_only_fail_before_the_guest_runs(phase: Phase, status: Status) -> None:
    async with open_supervisor(StopRequest(), Faults()) as supervisor:
        supervisor.guest_state.phase = phase
        for error in (HostError("cannot do it"), failure(errno.ENOMEM)):

            async def run(error: Exception = error) -> ExitReport:
                await trio.lowlevel.checkpoint()
                raise error

            report = await init._reported(run, supervisor)
            assert (report.status, report.outcome) == (status, status.name.lower())
