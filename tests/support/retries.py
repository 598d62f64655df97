"""A second attempt at the few tests that failed, after all others have ended: what passes only then is named, not hidden."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from _pytest.runner import runtestprotocol


class Retries:
    """Keeps back the reports of up to *most* tests that fail, and runs those tests again when nothing else is left to run.

    The tests start real processes on machines that are shared and noisy. More failures than *most* are not noise: they
    all count at once, also those that were kept back.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._failed: dict[pytest.Item, list[pytest.TestReport]] = {}
        self._passed_later: list[pytest.Item] = []
        self._again = False

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        if self._again:
            self._run_again(item)
            return True
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failed = any(report.failed for report in reports)
        if failed:
            self._failed[item] = reports
        if not failed or len(self._failed) > self._most:
            publish(item, reports)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run_again(self, item: pytest.Item) -> None:
        reports = runtestprotocol(item, log=False, nextitem=None)
        publish(item, reports)
        if not any(report.failed for report in reports):
            self._passed_later.append(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        result = yield
        if len(self._failed) <= self._most:
            self._again = True
            for item in self._failed:  # by the hook, so that it has a time-out, too
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        else:
            for item, reports in list(self._failed.items())[: self._most]:
                publish(item, reports)
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._passed_later:
            return
        terminalreporter.section("failed, and passed when run again after all others")
        for item in self._passed_later:
            for report in self._failed[item]:
                if report.failed:
                    terminalreporter.write_line(f"{item.nodeid} ({report.when})", yellow=True)
                    terminalreporter.write_line(report.longreprtext)


def publish(item: pytest.Item, reports: list[pytest.TestReport]) -> None:
    """Count *reports* and show them."""
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
