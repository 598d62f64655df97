"""For runs in an emulated node that may hang: the tests that have passed are written down, and a run that hangs ends itself.

``tests/node/run`` boots a fresh node then, for the other tests (:mod:`tests.emulated_node.command`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

HUNG = 73
"""Exit status of a run that ended itself."""
MORE_SECONDS = 240.0
"""Within as many after its time-out a test must have ended, with what its fixtures undo: each wait of theirs has a limit."""


class FreshNode:
    """Leaves out the tests named in *file*, adds each that passes, and ends the run if a test outlasts its time-out."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._seconds = file, seconds
        self._failed: set[str] = set()
        # before pytest captures the output of tests
        self._terminal = os.fdopen(os.dup(2), "w")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = set(self._file.read_text().splitlines()) if self._file.exists() else set()
        left_out = [item for item in items if item.nodeid in passed]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            with self._file.open("a") as file:
                print(report.nodeid, file=file)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        marker = item.get_closest_marker("timeout")
        limit = (float(marker.args[0]) if marker and marker.args else self._seconds) + MORE_SECONDS
        timer = threading.Timer(limit, self._end, (item.nodeid, limit))
        timer.daemon = True
        timer.start()
        try:
            return (yield)
        finally:
            timer.cancel()

    def _end(self, test: str, limit: float) -> None:
        print(f"\n{test} has not ended within {limit:g} s; what waits or is stopped:", file=self._terminal)
        print(*waiting(Path("/proc")), sep="\n", file=self._terminal, flush=True)
        faulthandler.dump_traceback(self._terminal)
        os._exit(HUNG)


def waiting(proc: Path) -> Iterator[str]:
    """Yield what is known of each thread that waits uninterruptibly or is stopped: its command line and where it is in the kernel."""
    for task in proc.glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            if state in {"D", "T", "t"}:
                command = (task / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                yield f"{task.name} {state} {command or (task / 'comm').read_text().strip()}"
                yield from (f"    {line}" for line in (task / "stack").read_text().splitlines())
