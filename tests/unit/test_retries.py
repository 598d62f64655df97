"""RUNNER_RETRIES=N: up to N failed tests are run once more after all others, and named where they pass then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nested_pytest import run_beside_conftest

BODY = """
import pathlib, pytest
HERE = pathlib.Path(__file__).parent
@pytest.fixture(params=[{noisy}], ids=["noisy"])
def place(request):
    with (HERE / "order").open("a") as order: order.write("noisy ")
    first = not (HERE / "seen").exists()
    (HERE / "seen").touch()
    if first: assert not request.param, "too late"
    yield
def test_noisy(place): pass
@pytest.mark.parametrize("broken", [{broken}])
def test_other(broken):
    with (HERE / "order").open("a") as order: order.write("other ")
    assert not broken, "for good"
"""


def run(folder: Path, retries: str, *, noisy: bool, broken: str) -> tuple[int, str, list[str]]:
    """Return pytest's status and output for a file whose test fails the first time, and the order its tests ran in."""
    (folder / "test_it.py").write_text(BODY.format(noisy=noisy, broken=broken))
    done = run_beside_conftest(folder, RUNNER_RETRIES=retries)
    return done.returncode, done.stdout, (folder / "order").read_text().split()


def test_a_test_that_passes_the_second_time_passes_and_is_named(tmp_path: Path) -> None:
    status, out, order = run(tmp_path, "1", noisy=True, broken="False")
    assert (status, order) == (0, ["noisy", "other", "noisy"])
    assert "2 passed" in out
    assert "failed, and passed when run again after all others" in out
    assert "test_noisy[noisy] (setup)" in out
    assert "AssertionError: too late" in out


def test_a_test_that_fails_twice_fails(tmp_path: Path) -> None:
    status, out, order = run(tmp_path, "1", noisy=False, broken="True")
    assert (status, order) == (1, ["noisy", "other", "other"])
    assert "1 failed, 1 passed" in out
    assert "run again after all others" not in out


def test_more_failures_than_that_are_no_noise(tmp_path: Path) -> None:
    status, out, order = run(tmp_path, "2", noisy=True, broken="True, True, True")
    assert (status, order) == (1, ["noisy", "other", "other", "other"])
    assert "3 failed, 1 error" in out


@pytest.mark.parametrize("retries", ["", "0"])
def test_without_retries_the_first_failure_counts(tmp_path: Path, retries: str) -> None:
    status, out, order = run(tmp_path, retries, noisy=True, broken="False")
    assert (status, order) == (1, ["noisy", "other"])
    assert "1 passed, 1 error" in out


HANGS = """
import pathlib, pytest, time
@pytest.mark.timeout(1)
def test_it():
    seen = pathlib.Path(__file__).with_name("seen")
    if seen.exists():
        time.sleep(60)
    seen.touch()
    assert False
"""


def test_the_second_attempt_has_a_time_out_too(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    done = run_beside_conftest(tmp_path, RUNNER_RETRIES="1")
    assert done.returncode == 1
    assert "Timeout (>1.0s) from pytest-timeout" in done.stdout
