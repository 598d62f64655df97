"""RUNNER_PASSED=FILE: the tests that have passed are not run again, and a run that hangs ends itself."""

from __future__ import annotations

from pathlib import Path

from tests.support.fresh_node import HUNG
from tests.support.nested_pytest import run_beside_conftest

BODY = """
import pathlib, pytest
HERE = pathlib.Path(__file__).parent
def test_one(): (HERE / "order").open("a").write("one ")
def test_two(): (HERE / "order").open("a").write("two "); assert {right}
@pytest.fixture
def place(): yield; assert False
def test_three(place): pass
"""
HANGS = """
import pytest, subprocess, time
from tests.support import fresh_node
fresh_node.MORE_SECONDS = 0.5
@pytest.fixture
def undone():
    with subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "sh", "-c", "kill -STOP $$"]) as process:
        yield
    # waits for it
@pytest.mark.timeout(0.5)
def test_it(undone): time.sleep(60)
"""


def test_only_what_has_not_passed_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(BODY.format(right=False))
    first = run_beside_conftest(tmp_path, RUNNER_PASSED=str(tmp_path / "passed"))
    assert "1 failed, 2 passed, 1 error" in first.stdout
    assert (tmp_path / "passed").read_text() == "test_it.py::test_one\n"
    file.write_text(BODY.format(right=True))
    second = run_beside_conftest(tmp_path, RUNNER_PASSED=str(tmp_path / "passed"))
    assert "2 passed, 1 deselected, 1 error" in second.stdout
    assert (tmp_path / "order").read_text() == "one two two "
    assert (tmp_path / "passed").read_text() == "test_it.py::test_one\ntest_it.py::test_two\n"


def test_a_test_that_hangs_in_what_its_fixtures_undo_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    done = run_beside_conftest(tmp_path, RUNNER_PASSED=str(tmp_path / "passed"))
    assert done.returncode == HUNG, done.stdout
    assert "test_it.py::test_it has not ended within 1 s" in done.stderr
    assert " T sh -c kill -STOP $$" in done.stderr
    assert "in wait" in done.stderr, "the stack of the thread that waits"
    assert not (tmp_path / "passed").exists()
