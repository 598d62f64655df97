"""RUNNER_REQUIRE=all makes a skip a failure, wherever it comes from; a skip without a reason always is one."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.nested_pytest import run_beside_conftest

SKIPS = {
    "call": "def test(): pytest.skip('no kvm')",
    "mark": "@pytest.mark.skipif(True, reason='no kvm')\ndef test(): pass",
    "fixture": "@pytest.fixture\ndef f(): pytest.skip('no kvm')\ndef test(f): pass",
    "module": "pytest.skip('no kvm', allow_module_level=True)",
    "import": "pytest.importorskip('no_such_module')",
}


def outcomes(folder: Path, tests: dict[str, str], required: str) -> dict[str, int]:
    """Run pytest on *tests* (name → body of a file) next to the shared conftest and return its summary as numbers."""
    for name, body in tests.items():
        (folder / f"test_{name}.py").write_text(f"import pytest\n{body}\n")
    done = run_beside_conftest(folder, RUNNER_REQUIRE=required)
    summary = done.stdout.strip().splitlines()[-1]
    found = re.findall(r"(\d+) (passed|failed|error|skipped|xfailed)", summary)
    return {kind: int(count) for count, kind in found}


def test_a_skip_with_its_reason_is_a_skip(tmp_path: Path) -> None:
    assert outcomes(tmp_path, SKIPS, "") == {"skipped": len(SKIPS)}


def test_every_skip_is_a_failure_where_everything_is_required(tmp_path: Path) -> None:
    found = outcomes(tmp_path, SKIPS, "all")
    assert "skipped" not in found
    assert found["failed"] + found["error"] == len(SKIPS)


def test_a_skip_must_say_what_is_missing(tmp_path: Path) -> None:
    assert outcomes(tmp_path, {"silent": "@pytest.mark.skip\ndef test(): pass"}, "") == {"error": 1}


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    known = "@pytest.mark.xfail(reason='known')\ndef test(): assert False"
    assert outcomes(tmp_path, {"known": known}, "all") == {"xfailed": 1}
