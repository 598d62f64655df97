"""`instance-runner try` where it cannot work: refused before anything is touched; and the Python that the scripts need."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from runner.base.errors import Status
from runner.cli.generated_specs import demo_spec
from runner.cli.outcomes import OUTCOMES, explain_status
from runner.cli.tried_guest import NO_NAMESPACES
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
        "examples/quickstart/run makes it, or examples/quickstart/make-guest DIR for --guest DIR, "
        "and `try SPEC` or `try --disk FILE` tries a guest of yours\n"
    )


def test_without_the_capability_for_namespaces_it_is_refused(guest: Path) -> None:
    done = attempt("setpriv", "--bounding-set", "-sys_admin", RUNNER, "try", "--guest", guest)
    assert done.returncode == Status.REFUSED
    assert done.stderr.startswith(
        "instance-runner: cannot make namespaces: this takes the capability SYS_ADMIN; in a container, "
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
    assert not Path("/run/try").exists()


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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("x.toml --disk y", "cannot try SPEC and --disk at once: each is a guest; leave one of them out"),
        ("--guest x --disk y", "cannot try --disk and --guest at once: each is a guest; leave one of them out"),
        ("-", "cannot read the spec from standard input: the guest's console has it; name a file"),
        ("--memory 2GiB", "cannot use --memory without --disk: name the disk of a guest of yours with --disk"),
        ("x.toml --login", "cannot use --login without --disk: write it into SPEC"),
        ("x.toml --print-spec", "cannot print the spec that is made: SPEC is used as it is; leave --print-spec out"),
        ("/none.toml", "cannot read the spec '/none.toml': No such file or directory"),
        ("--disk y --memory 2G", "argument --memory: '2G': did you mean 2GiB? It takes a size in whole MiB"),
        ("--disk y --cpus two", "argument --cpus: 'two': it takes an integer from 1 to 1024"),
        ("--disk y --port 22", "argument --port: '22': it takes a port of this machine and one of the guest, such as"),
        ("--disk y --port 0.0.0.0/22:22", "argument --port: '0.0.0.0/22:22': it takes a port of this machine"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_a_file_is_read(words: str, sentence: str) -> None:
    done = attempt(RUNNER, "try", *words.split())
    assert (done.returncode, done.stdout) == (Status.USAGE, "")
    assert sentence in done.stderr


@pytest.mark.parametrize(
    ("disk", "sentence"),
    [
        ("/none.img", "--disk: disk.path: '/none.img' does not exist\n"),
        ("/usr", "--disk: disk.path: '/usr' is a directory, not a file or block device\n"),
        (
            "/run/none.img",
            "cannot use '/run/none.img' (disk[0].path): a guest that is tried has a /run of its own; copy it",
        ),
    ],
)
def test_a_disk_that_no_guest_can_have_is_refused_before_anything_is_touched(disk: str, sentence: str) -> None:
    done = attempt(RUNNER, "try", "--disk", disk)
    assert (done.returncode, done.stdout) == (Status.REFUSED, "")
    assert sentence in done.stderr


def test_a_spec_that_names_what_its_guest_would_not_see_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('[boot]\nfirmware = "uefi"\n[[share]]\ntag = "media"\npath = "/run/media"\n')
    done = attempt(RUNNER, "try", spec)
    assert (done.returncode, done.stdout) == (Status.REFUSED, "")
    assert "cannot use '/run/media' (share[0].path): a guest that is tried has a /run of its own" in done.stderr


def test_the_spec_that_is_made_is_one_that_can_be_tried(tmp_path: Path) -> None:
    disk = tmp_path / "disk.img"
    disk.write_bytes(bytes(1 << 20))
    done = attempt(RUNNER, "try", "--disk", disk, "--login", "--cpus", "1", "--print-spec")
    assert done.returncode == 0, done.stderr
    checked = subprocess.run(
        (RUNNER, "plan", "--document-only", "-"), input=done.stdout, check=False, capture_output=True, text=True
    )
    assert checked.stdout == "standard input: right, 1 vCPU, 2GiB\n", checked.stderr


@pytest.mark.parametrize("number", [1, 2])
def test_a_disk_has_two_vcpus_unless_this_process_may_use_one_cpu_alone(tmp_path: Path, number: int) -> None:
    disk = tmp_path / "disk.img"
    disk.write_bytes(bytes(1 << 20))
    cpus = sorted(os.sched_getaffinity(0))[:number]
    done = attempt("taskset", "--cpu-list", ",".join(map(str, cpus)), RUNNER, "try", "--disk", disk, "--print-spec")
    assert json.loads(done.stdout)["cpu"]["count"] == len(cpus), done.stderr


def test_without_passt_the_way_out_is_said_to_be_missing_and_a_port_is_refused(tmp_path: Path) -> None:
    disk = tmp_path / "disk.img"
    disk.write_bytes(bytes(1 << 20))
    script = 'if at=$(command -v passt); then mount --bind /dev/null "$at"; fi; exec "$@"'
    without = ("unshare", "--mount", "sh", "-c", script, "sh", RUNNER, "try", "--disk", disk)
    shown = attempt(*without, "--print-spec")
    assert '"mode": "private"' in shown.stdout, shown.stderr
    refused = attempt(*without, "--port", "2222:22")
    assert refused.returncode == Status.REFUSED
    assert "cannot have a port lead to the guest: cannot find the program 'passt' in PATH; " in refused.stderr


def test_the_guest_is_given_the_size_of_a_terminal_that_has_one(guest: Path) -> None:
    """A terminal whose program has not set a size has 0 rows and 0 columns (ioctl_tty(2))."""
    share = PurePosixPath("/share")
    boot = [demo_spec(guest, share, size)["boot"] for size in (os.terminal_size((111, 33)), (0, 0), None)]
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


def test_a_guest_whose_kernel_cannot_be_fetched_is_missing_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho 'E: Failed to fetch …  404  Not Found' >&2; exit 100\n")
    (tmp_path / "apt-cache").write_text("#!/bin/sh\necho '  Depends: linux-image-6.12.0-cloud-amd64'\n")
    for name in ("apt-get", "apt-cache"):
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = [PROJECT / "examples/quickstart/make-guest", tmp_path / "guest"]
    done = subprocess.run(argv, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "404  Not Found" in done.stderr
    assert "where apt says 404, run apt-get update" in done.stderr
    assert not (tmp_path / "guest").exists()
