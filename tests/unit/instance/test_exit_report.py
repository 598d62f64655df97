"""What is written to the termination log: JSON of a bounded length."""

from __future__ import annotations

import json

import attrs
import pytest

from runner.base.errors import HostError, Problem, RunnerError, SpecError, Status
from runner.instance.exit_report import LONGEST_TERMINATION_LOG, ExitReport
from tests.support.json_schemas import fitting


def refused(*problems: Problem) -> SpecError:
    return SpecError("spec.toml", problems)


def with_cause() -> HostError:
    error = HostError("cannot make the tap", remedy="give the pod NET_ADMIN")
    error.__cause__ = PermissionError(1, "Operation not permitted")
    return error


@pytest.mark.parametrize(
    ("error", "status", "problems"),
    [
        (
            refused(Problem("cpu.count", "found 0", "write 1"), Problem("", "is empty")),
            Status.REFUSED,
            [("cpu.count", "found 0", "write 1"), ("", "is empty", "")],
        ),
        (
            with_cause(),
            Status.START_FAILED,
            [("", "cannot make the tap: Operation not permitted", "give the pod NET_ADMIN")],
        ),
    ],
)
def test_a_refusal_has_its_problems_as_data(
    error: RunnerError, status: Status, problems: list[tuple[str, str, str]]
) -> None:
    written = fitting("end", ExitReport.of(error).to_json())
    assert written["status"] == status
    assert [(each["path"], each["message"], each["remedy"]) for each in written["problems"]] == problems


def test_what_was_found_is_shown_but_for_secrets_and_long_values() -> None:
    document = b"""
[cpu]
count = 0
[boot]
cmdline = "%s"
[cloud_init]
user_data = "password: secret"
""" % (b"x" * 400)
    error = refused(*(Problem(path, "is wrong") for path in ("cpu.count", "boot.cmdline", "cloud_init.user_data")))
    written = fitting("end", attrs.evolve(ExitReport.of(error), document=document).to_json())
    assert [each["found"] for each in written["problems"]] == [0, None, None]
    assert {each["document"] for each in written["problems"]} == {"spec.toml"}


def test_a_document_that_is_none_is_refused_like_others() -> None:
    written = fitting("end", attrs.evolve(ExitReport.of(refused(Problem("", "is no TOML"))), document=b"[").to_json())
    assert [(each["path"], each["found"]) for each in written["problems"]] == [("", None)]


@pytest.mark.parametrize("text", ["x", "é", '"', "\N{GRINNING FACE}"])
@pytest.mark.parametrize("count", [1, 30, 1000])
def test_kubernetes_keeps_all_of_it(text: str, count: int) -> None:
    """It keeps 4096 bytes, and makes no JSON of what it cuts."""
    report = ExitReport.of(refused(*(Problem(f"disk[{number}]", text * 100, text * 50) for number in range(count))))
    line = json.dumps(report.to_json()).encode() + b"\n"
    assert len(line) <= LONGEST_TERMINATION_LOG


@pytest.mark.parametrize("text", ["x", "\N{GRINNING FACE}"])
def test_faults_do_not_make_it_longer(text: str) -> None:
    report = ExitReport(Status.DIRTY, "dirty", text * 5000, (text * 1000,) * 10)
    assert len(json.dumps(report.to_json()).encode() + b"\n") <= LONGEST_TERMINATION_LOG
