"""``examples/kubernetes/upgrade-runners``: a fleet's runners, one pod after the other, by a kubectl that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fake_host import FAKES

PROGRAM = Path(__file__).parents[2] / "examples/kubernetes/upgrade-runners"
Upgrade = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "new/runner").mkdir(parents=True)
    (tmp_path / "new/runner/__main__.py").write_text("new\n")
    (tmp_path / "new/ä b").write_text("a name with a space\n")
    return tmp_path / "cluster"


def pods(cluster: Path, **nodes: str) -> None:
    for name, node in nodes.items():
        (cluster / name).mkdir()
        (cluster / name / "node").write_text(node)


@pytest.fixture
def upgrade(cluster: Path) -> Upgrade:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [
            sys.executable,
            str(PROGRAM),
            str(cluster.parent / "new"),
            "--kubectl",
            str(FAKES / "kubectl.py"),
            *options,
        ]
        environment = {**os.environ, "FAKE_CLUSTER": str(cluster)}
        return subprocess.run(argv, check=False, capture_output=True, text=True, env=environment, timeout=120)

    return run


def begun(cluster: Path) -> list[str]:
    return (cluster / "begun").read_text().split()


def test_every_pod_is_renewed_once_and_the_first_alone(cluster: Path, upgrade: Upgrade) -> None:
    pods(cluster, d="n2", c="n1", b="n1", a="n2")
    (cluster / "c/slow").write_text("a")  # which begins beside it: two are renewed at a time, after the first
    done = upgrade("--parallel", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "b on n1: renewed"
    assert done.stdout.splitlines()[-1] == "4 renewed"
    assert begun(cluster)[0] == "b"
    again = upgrade()
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, "4 already")
    assert len(begun(cluster)) == 4


def test_after_a_failure_none_is_begun_and_it_can_be_run_again(cluster: Path, upgrade: Upgrade) -> None:
    pods(cluster, a="n1", b="n1", c="n1", d="n1")
    (cluster / "b/bad").touch()
    done = upgrade("--parallel", "1")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "a on n1: renewed",
        "b on n1: failed: instance-runner: cannot renew the runner now: a disk is being attached (for 7 s)",
        "c on n1: not tried",
        "d on n1: not tried",
        "1 renewed, 1 failed, 2 not tried",
    ]
    (cluster / "b/bad").unlink()
    again = upgrade("--parallel", "1")
    assert (again.returncode, again.stdout.splitlines()[-1]) == (0, "1 already, 3 renewed")


def test_one_that_runs_beside_a_failure_is_waited_for_and_said(cluster: Path, upgrade: Upgrade) -> None:
    pods(cluster, a="n1", b="n1", c="n1", d="n1")
    (cluster / "b/slow").write_text("c")
    (cluster / "c/bad").touch()
    done = upgrade("--parallel", "2")
    assert done.returncode == 1
    assert "b on n1: renewed" in done.stdout.splitlines()
    assert "d on n1: not tried" in done.stdout.splitlines()


def test_one_node_and_what_would_be_done(cluster: Path, upgrade: Upgrade) -> None:
    pods(cluster, a="n1", b="n2")
    done = upgrade("--check", "--node", "n2")
    assert done.stdout.splitlines() == ["b on n2: would be renewed", "1 would be renewed"]
    assert not (cluster / "begun").exists()


def test_a_program_that_is_not_what_was_named_is_refused_before_anything(cluster: Path, upgrade: Upgrade) -> None:
    pods(cluster, a="n1")
    done = upgrade("--digest", f"sha256:{'0' * 64}")
    assert done.returncode == 2
    assert f"not sha256:{'0' * 64}" in done.stderr
    assert not (cluster / "begun").exists()
