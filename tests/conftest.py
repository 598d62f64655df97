"""Hooks of all test folders: a skip names what is missing, and is a failure where everything is required."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest

from tests.support.soak import FACTOR, SEED

EVERYTHING_REQUIRED = os.environ.get("RUNNER_REQUIRE") == "all"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what it runs in the background; the programs under test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> list[str]:
    return [f"soak: RUNNER_SOAK={FACTOR} RUNNER_SEED={SEED}"] if FACTOR else []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        judge(report)
    return report


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip that gives no reason, or that RUNNER_REQUIRE=all forbids, into a failure."""
    reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
    if reason in {"", "Skipped", "unconditional skip"}:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped without a reason"
    elif EVERYTHING_REQUIRED:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: RUNNER_REQUIRE=all, but this was skipped: {reason}"
