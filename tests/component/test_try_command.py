"""`instance-runner try` where it cannot work: refused before anything is touched; and the Python that the scripts need."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runner.base.errors import Status
from runner.cli.first_guest import NO_NAMESPACES, first_spec
from runner.cli.outcomes import OUTCOMES, explain_status
from tests.support.program_runs import PROJECT, RUNNER


def attempt(*argv: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        argv, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, env=environment
    )


@pytest.fixture
def guest(tmp_path: Path) -> Path:
    for name in ("vmlinuz", "initrd"):
        (tmp_path / name).write_bytes(b"no kernel")
    return tmp_path


def test_a_guest_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = attempt(RUNNER, "try", "--guest", tmp_path / "none")
    assert (done.returncode, done.stdout) == (Status.REFUSED, "")
    assert done.stderr == (
        f"instance-runner: cannot boot the demo guest: there is no '{tmp_path}/none/vmlinuz'; "
        "examples/quickstart/run makes it, or examples/quickstart/make-guest DIR for --guest DIR\n"
    )


def test_without_the_capability_for_namespaces_it_is_refused(guest: Path) -> None:
    done = attempt("setpriv", "--bounding-set", "-sys_admin", RUNNER, "try", "--guest", guest)
    assert done.returncode == Status.REFUSED
    assert done.stderr.startswith(
        "instance-runner: cannot make namespaces: this takes root and the capability SYS_ADMIN; "
    )


def test_without_a_program_that_it_needs_it_is_refused(guest: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    done = attempt(RUNNER, "try", "--guest", guest, PATH=str(tmp_path / "bin"))
    assert done.returncode == Status.REFUSED
    assert done.stderr == "instance-runner: cannot find the program 'setpriv' in PATH; apt-get install util-linux\n"


def test_a_start_that_is_refused_ends_with_its_status_explained(guest: Path) -> None:
    """Its log is shown, and nothing of it is left: the spec was in the namespace's own /run."""
    done = attempt(RUNNER, "try", "--guest", guest)
    assert done.returncode == Status.REFUSED, done.stderr
    assert "boot.kernel: " in done.stderr
    assert "ended with status 30 (refused): the spec, the host or the pod does not fit" in done.stderr
    assert "what to do: every problem is named with its path" in done.stderr
    assert not Path("/run/spec.json").exists()


def test_namespaces_that_cannot_be_made_are_no_fault_of_the_runner(guest: Path, tmp_path: Path) -> None:
    """As where seccomp or a limit of namespaces forbids them (user_namespaces(7), /proc/sys/user/max_pid_namespaces)."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "unshare").write_text(
        "#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n"
    )
    (programs / "unshare").chmod(0o755)
    done = attempt(RUNNER, "try", "--guest", guest, PATH=f"{programs}:{os.environ['PATH']}")
    assert done.returncode == NO_NAMESPACES
    assert done.stderr.splitlines() == [
        "unshare: unshare failed: Operation not permitted",
        "ended with status 125, which is none of instance-runner's: the lines before it say why",
    ]


def test_the_guest_is_given_the_size_of_a_terminal_that_has_one(guest: Path) -> None:
    """A terminal whose program has not set a size has 0 rows and 0 columns (ioctl_tty(2))."""
    boot = [first_spec(guest, size)["boot"] for size in (os.terminal_size((111, 33)), os.terminal_size((0, 0)), None)]
    assert [str(each).count("guest.rows=33 guest.columns=111") for each in boot] == [1, 0, 0]
    assert [str(each).count("guest.rows") for each in boot] == [1, 0, 0]


def test_every_status_of_run_has_an_explanation() -> None:
    assert set(OUTCOMES) == set(Status) - {Status.FINDINGS, Status.FAILED}
    assert list(explain_status(Status.STOPPED)) == []
    assert next(explain_status(137)) == (
        "ended with status 137: the runner was killed (SIGKILL); the kernel has ended all that it had started"
    )
    assert list(explain_status(125)) == [
        "ended with status 125, which is none of instance-runner's: the lines before it say why"
    ]


@pytest.mark.parametrize("script", ["examples/quickstart/run", "tests/run"])
@pytest.mark.parametrize("installed", [True, False])
def test_an_old_python_is_refused_before_anything_is_installed(tmp_path: Path, script: str, *, installed: bool) -> None:
    """A Python that is there, or the one that would be installed."""
    calls = tmp_path / "calls"
    programs = {
        "apt-cache": 'case $1 in policy) printf "python3:\\n  Installed: (none)\\n  Candidate: 3.10.6-1~22.04\\n" ;; esac',
        "apt-get": f'echo "apt-get $*" >>{calls}',
    }
    if installed:
        programs["python3"] = "echo 3.10"
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("bash", "sh", "id", "dirname", "printf", "sort", "head", "sed"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = attempt("/bin/bash", PROJECT / script, PATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert "cannot run with Python 3.10: it takes 3.11 or later" in done.stderr
    assert not calls.exists(), calls.read_text()
