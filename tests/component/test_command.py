"""The program as a child process: its imports, and its end, which skips that of the interpreter and must lose no output."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest

from runner.base.errors import Status
from runner.cli.commands import COMMANDS

PROGRAM = (sys.executable, "-m", "runner")
PLAN = (
    "import atexit, sys, runner.__main__ as m, runner.cli.plan as p; p.main = lambda _: {}; "
    "sys.argv = ['', 'plan', 'spec']; {}; m.entry()"
)
ON_DEMAND = ("argcomplete", "h11", "prometheus_client", "pycdlib")
"""Libraries that PID 1 imports when a request or a spec needs them."""
CLI = Path(__file__).parents[2] / "runner/cli"


def loaded(*argv: str) -> set[str]:
    """Return the names of all modules that are loaded when the program has run with *argv*."""
    script = (
        "import sys, runner.__main__ as m; m.main(sys.argv[1:]); sys.stderr.write('loaded ' + ' '.join(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", script, *argv], check=True, capture_output=True, text=True)
    return set(ended.stderr.rpartition("loaded ")[2].split())


def test_the_version_is_read_on_request() -> None:
    done = subprocess.run([*PROGRAM, "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"instance-runner {metadata.version('instance-runner')}\n"
    controller = "from runner.controller.main import main; main()"
    done = subprocess.run([sys.executable, "-c", controller, "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"instance-cgroup-controller {metadata.version('instance-runner')}\n"
    assert "importlib.metadata" not in loaded("--help")


@pytest.mark.parametrize(
    ("words", "option"),
    [("version", "--version"), ("help", "--help"), ("help plan", "plan --help"), ("help ctl disk", "ctl disk --help")],
)
def test_a_word_does_what_the_option_does(words: str, option: str) -> None:
    by_word, by_option = (
        subprocess.run([*PROGRAM, *each.split()], check=True, capture_output=True, text=True)
        for each in (words, option)
    )
    assert by_word.stdout == by_option.stdout != ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("chekc", "unknown 'chekc'; did you mean 'check'?"),
        ("ctl disk atach", "unknown 'atach'; did you mean 'attach'?"),
        ("ctl disk attach", "the following arguments are required: PATH\n"),
    ],
)
def test_a_wrong_command_line_names_what_was_meant(words: str, sentence: str) -> None:
    ended = subprocess.run([*PROGRAM, *words.split()], check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert ended.stderr.startswith("usage: instance-runner")


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        ("plan --json --nodee x", "unknown option '--nodee'", "did you mean '--node'?"),
        ("ctl -o json disk atach", "argument COMMAND: unknown 'atach'", "did you mean 'attach'?"),
        ("check --json --zork", "unknown option '--zork'", "see `instance-runner check --help`"),
    ],
)
def test_a_wrong_command_line_that_asks_for_json_is_refused_in_json(words: str, message: str, remedy: str) -> None:
    ended = subprocess.run([*PROGRAM, *words.split()], check=False, capture_output=True, text=True)
    [problem] = json.loads(ended.stdout)["problems"]
    assert (ended.returncode, problem["message"], problem["remedy"]) == (2, message, remedy)
    assert f"instance-runner: {message}; {remedy}\n" in ended.stderr


INTERRUPTED = """
import importlib.machinery, os, signal, sys
name = os.path.splitext(os.path.basename(__file__))[0]
sys.path.remove(os.path.dirname(__file__))
del sys.modules[name]
os.kill(os.getpid(), signal.SIGINT)
"""
"""A module that comes before the library's of its name, and at whose import the program is interrupted."""


@pytest.mark.parametrize("imported", ["argparse", "attrs", "trio"])
@pytest.mark.parametrize("words", ["instance-runner plan none.toml", "instance-cgroup-controller"])
def test_an_interrupt_while_it_is_imported_ends_it_as_any_other_program(
    tmp_path: Path, words: str, imported: str
) -> None:
    (tmp_path / f"{imported}.py").write_text(INTERRUPTED)
    program, *arguments = words.split()
    done = subprocess.run(
        (Path(sys.executable).with_name(program), *arguments),
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) in {(-signal.SIGINT, ""), (128 + signal.SIGINT, "")}


def test_pid_1_writes_from_the_background_of_a_terminal() -> None:
    """The kernel cannot stop it by SIGTTOU, and would restart its first write to a terminal with `stty tostop` without end."""
    ours, theirs = pty.openpty()
    modes = termios.tcgetattr(theirs)
    modes[3] |= termios.TOSTOP
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    # The shell is the terminal's foreground; with `set -m` what it starts with & is a process group of its own.
    script = 'set -m; timeout -s KILL 20 unshare --fork --pid --mount-proc --kill-child "$@" & wait $!'
    pid_1 = (*PROGRAM, "run", "/none.toml")
    shell = subprocess.Popen(
        ("setsid", "--ctty", "sh", "-c", script, "sh", *pid_1),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # EIO: nothing has the terminal open any more
        while data := os.read(ours, 1 << 16):
            output += data
    os.close(ours)
    assert shell.wait() == Status.USAGE, output
    assert b"cannot read the spec '/none.toml'" in output


@pytest.mark.parametrize(
    ("prepared", "reason"),
    [
        ("true", "cannot use /proc: it is that of another PID namespace, in which this process is "),
        ("umount -l /proc", "cannot read /proc/self: no procfs is mounted at /proc"),
        (
            "mount -t proc -o subset=pid proc /proc",
            "cannot use /proc: it shows processes alone, and nothing of the machine",
        ),
        ("mount -t proc proc /proc; mount -t tmpfs none /sys", "cannot use /sys: no sysfs is mounted there"),
    ],
)
def test_a_proc_that_is_not_ours_is_refused_before_anything_is_touched(
    tmp_path: Path, prepared: str, reason: str
) -> None:
    (tmp_path / "spec.toml").write_text("")
    run = (*PROGRAM, "run", "--state-dir", str(tmp_path / "state"), str(tmp_path / "spec.toml"))
    script = f'{prepared}; exec "$@"'
    namespaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
    done = subprocess.run(
        (*namespaces, "sh", "-c", script, "sh", *run), check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, reason in done.stderr) == (Status.REFUSED, True), done.stderr
    assert not (tmp_path / "state").exists()


def test_what_cannot_be_read_is_no_output_that_cannot_be_written(tmp_path: Path) -> None:
    """With ProcSubset=pid of a unit of systemd, and without a single device."""
    (tmp_path / "spec.toml").write_text('[boot]\nfirmware = "/rom"\n')
    script = 'mount -t proc -o subset=pid proc /proc; mount -t tmpfs none /dev; exec "$@"'
    plan = ("unshare", "--mount", "--pid", "--fork", "sh", "-c", script, "sh", *PROGRAM, "plan", tmp_path / "spec.toml")
    done = subprocess.run(plan, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        Status.FAILED,
        "instance-runner: cannot read '/proc/cpuinfo': No such file or directory\n",
    )


def test_every_command_is_a_module_in_the_table() -> None:
    takers = {path.stem for path in CLI.glob("*.py") if "def add_arguments(" in path.read_text()}
    assert takers == set(COMMANDS)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_a_command_is_imported_only_on_use(command: str) -> None:
    commands = {f"runner.cli.{name}" for name in COMMANDS}
    found = loaded(*([command] if command else []), "--help")
    assert found & commands == ({f"runner.cli.{command}"} if command else set())
    if not command:
        assert "trio" not in found


def test_run_imports_nothing_that_only_other_commands_need() -> None:
    found = loaded("run", "/no/such/spec")
    shared = {name for name in found if name.startswith("runner.cli.")}
    assert shared == {f"runner.cli.{name}" for name in ("commands", "options", "run", "run_instance")}
    others = (
        *(
            "runner.check",
            "runner.inspect",
            "runner.controller",
            "runner.node_plan.node_plan",
            "runner.node_plan.report",
        ),
        *("runner.plan.render", "importlib.metadata", "yaml", *ON_DEMAND),
    )
    assert {name for name in found if name.startswith(others)} == set()


def test_probes_alone_do_not_import_what_writes_metrics() -> None:
    assert loaded("run", "--http=:0", "/no/such/spec") & {*ON_DEMAND} == {"h11"}


def test_an_error_has_its_sentence_and_status() -> None:
    ended = subprocess.run([*PROGRAM, "plan", "/no/such/spec"], check=False, capture_output=True, text=True)
    sentence = "instance-runner: cannot read the spec '/no/such/spec': No such file or directory\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", sentence)


def test_output_is_flushed_before_the_end() -> None:
    script = PLAN.format("print('word') or 7", "atexit.register(print, 'late')")
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "word\n", "")


def socket_whose_peer_has_gone() -> int:
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours.detach()


def terminal_that_hung_up() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def full_device() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def pipe_without_a_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


UNWRITABLE = [socket_whose_peer_has_gone, terminal_that_hung_up, full_device, pipe_without_a_reader]


@contextmanager
def opened(output: Callable[[], int]) -> Iterator[int]:
    fd = output()
    yield fd
    os.close(fd)


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return an environment in which Python buffers its output, or writes it at once."""
    return {**os.environ, "PYTHONUNBUFFERED": request.param}


@pytest.mark.parametrize("output", UNWRITABLE)
def test_an_output_that_cannot_be_written_leaves_the_status_of_run(
    output: Callable[[], int], environment: dict[str, str]
) -> None:
    script = (
        "import sys, runner.__main__ as m, runner.cli.run_instance as r\n"
        "async def ended(*_, **__): return r.ExitReport(20, 'machine_died', 'QEMU crashed')\n"
        "r.run_as_init = ended; sys.argv = ['', 'run', 'runner/__init__.py']; m.entry()"
    )
    with opened(output) as stdout, opened(output) as stderr:
        quiet = subprocess.run([sys.executable, "-c", script], check=False, stdout=stdout, env=environment)
        silent = subprocess.run(
            [sys.executable, "-c", script], check=False, stdout=stdout, stderr=stderr, env=environment
        )
    assert (quiet.returncode, silent.returncode) == (20, 20)


@pytest.mark.parametrize("argv", [["plan", "/no/such/spec"], ["run", "--no-such-option"]])
@pytest.mark.parametrize("output", UNWRITABLE)
def test_an_error_that_cannot_be_written_leaves_its_status(output: Callable[[], int], argv: list[str]) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with opened(output) as fd:
        ended = subprocess.run([*PROGRAM, *argv], check=False, stdout=fd, stderr=fd, env=environment)
    assert ended.returncode == 2


@pytest.mark.parametrize("argv", [["manual"], ["--version"]])
@pytest.mark.parametrize(
    ("output", "reason"),
    [(terminal_that_hung_up, "Input/output error"), (full_device, "No space left on device")],
)
def test_a_result_that_cannot_be_written_is_an_error(
    output: Callable[[], int], reason: str, argv: list[str], environment: dict[str, str]
) -> None:
    with opened(output) as fd:
        ended = subprocess.run(
            [*PROGRAM, *argv], check=False, stdout=fd, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert (ended.returncode, ended.stderr) == (2, f"instance-runner: cannot write the output: {reason}\n")


@pytest.mark.parametrize("output", [socket_whose_peer_has_gone, pipe_without_a_reader])
@pytest.mark.parametrize("argv", [["manual"], ["--version"]])
def test_a_reader_that_has_gone_is_no_error(
    output: Callable[[], int], argv: list[str], environment: dict[str, str]
) -> None:
    with opened(output) as fd:
        ended = subprocess.run([*PROGRAM, *argv], check=False, stdout=fd, stderr=subprocess.PIPE, env=environment)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_reader_that_has_gone_leaves_the_status() -> None:
    script = PLAN.format("print('word') or 7", "pass")
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with opened(pipe_without_a_reader) as fd:
        ended = subprocess.run(
            [sys.executable, "-c", script], check=False, stdout=fd, stderr=subprocess.PIPE, env=buffered
        )
    assert (ended.returncode, ended.stderr) == (7, b"")


def test_closed_standard_descriptors_are_filled() -> None:
    argv = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *PROGRAM, "check", "-"]
    assert subprocess.run(argv, check=False).returncode == 3  # an empty document is no spec
