"""What ``tests/run`` does with its parts: each of them is run and told, and all of them end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner.kernel.procfs import Procfs
from tests.parts import LANES, PARTS, TIERS, Part
from tests.support.namespaces import CAP_SYS_ADMIN
from tests.support.run_parts import PROJECT, Parts, chosen

MAIN = """
import sys
from pathlib import Path
from tests.parts import Part
from tests.support.run_parts import Parts
given = [each.split("=", 1) for each in sys.argv[2:]]
parts = Parts([Part(name, "", command) for name, command in given], Path(sys.argv[1]), at_once=3, lanes={"here": 3}, every=0.05)
print("ended" if parts.run() else "interrupted", *parts.failed)
"""


def program(directory: Path, **parts: str) -> subprocess.Popen[str]:
    """Start a program that runs these parts, and says at the end which of them failed."""
    argv = [sys.executable, "-c", MAIN, str(directory), *(f"{name}={command}" for name, command in parts.items())]
    return subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.PIPE, text=True)


def test_the_others_are_run_and_the_output_of_what_failed_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [
        Part("fails", "", "echo 'the reason'; false | true"),
        Part("passes", "", "echo hidden; echo '== 3 passed, 1 skipped in 0.5s =='"),
        Part("is killed", "", "kill -KILL $$"),
    ]
    runner = Parts(parts, tmp_path, at_once=1)
    assert runner.run()
    assert runner.failed == ["fails", "is killed"]
    shown = capfd.readouterr().out
    assert "the reason\n" in shown
    assert "hidden" not in shown
    assert "fails: FAILED with status 1" in shown
    assert "is killed: FAILED with status -9" in shown
    assert "of CPU time: 3 passed, 1 skipped\n" in shown


def test_parts_of_a_full_lane_wait_for_each_other_and_let_the_next_pass(tmp_path: Path) -> None:
    """The first can only end when the last has begun; the second one must not have begun then."""
    meets, second = tmp_path / "meets", tmp_path / "second"
    os.mkfifo(meets)
    parts = [
        Part("first", "", f"read -r word <{meets}; test ! -e {second}", "narrow"),
        Part("second", "", f"touch {second}", "narrow"),
        Part("last", "", f"echo word >{meets}", "wide"),
    ]
    runner = Parts(parts, tmp_path, at_once=2, lanes={"narrow": 1, "wide": 2})
    assert runner.run()
    assert runner.failed == []
    assert second.exists()


def test_progress_names_what_runs_until_it_ends(tmp_path: Path) -> None:
    """The part ends when the line that names it has been read."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with program(tmp_path, slow=f"echo '.... [ 37%]'; read -r word <{fifo}") as process:
        assert process.stdout is not None
        while "slow: [ 37%]" not in process.stdout.readline():
            pass
        fifo.write_text("word\n")
        assert "ended" in process.communicate()[0].splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_of_them_undo_what_they_did_when_it_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    fifos = [tmp_path / name for name in ("never", "one", "two", "three")]
    for each in fifos:
        os.mkfifo(each)
    never, *begun = fifos
    waits = f"trap 'echo undone >>{tmp_path}/undone; exit 1' INT; echo begun >{{}}; while :; do read -r word <>{never}; done"
    parts = {each.name: waits.replace("{}", str(each)) for each in begun}
    with program(tmp_path, **parts, never=f"touch {tmp_path}/began") as process:
        for each in begun:
            each.read_text()
        process.send_signal(number)
        out, _ = process.communicate()
    last = out.splitlines()[-1].split()
    assert (last[0], set(last[1:])) == ("interrupted", set(parts))
    assert (tmp_path / "undone").read_text() == "undone\n" * 3
    assert not (tmp_path / "began").exists()


def test_every_part_is_in_a_tier_and_in_a_lane() -> None:
    for part in PARTS:
        assert part.tiers
        assert all(LANES[part.lane] <= TIERS[tier] for tier in part.tiers.split())


def test_arguments_choose_tests_instead_of_the_others() -> None:
    names = [part.command for part in chosen("newcomer", ["-k", "a b"])]
    assert names[0] == "pytest -k 'a b'"
    assert "mypy" in names
    assert not any("tests/machine" in name or "tests/unit" in name for name in names)


@pytest.mark.skipif(CAP_SYS_ADMIN not in Procfs().capabilities(), reason="CAP_SYS_ADMIN is missing: it mounts")
def test_temporary_files_are_in_memory_and_no_mount_stays_when_it_is_killed() -> None:
    show = "import subprocess; from tests.support.run_parts import temporary_directory\nwith temporary_directory() as directory:\n"
    show += '    subprocess.run(["findmnt", "-nro", "FSTYPE,TARGET", directory]); input()'
    argv = [sys.executable, "-c", show]
    with subprocess.Popen(argv, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        kind, directory = process.stdout.readline().split()
        assert kind == "tmpfs"
        assert not os.path.ismount(directory)
        process.kill()
    Path(directory).rmdir()
