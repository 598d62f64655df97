"""The duties of PID 1, observed from outside: signals at any moment, orphans, faults of the host, bad input."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.kernel.procfs import Procfs
from tests.support.program_runs import FIRST_SECOND, ProgramRun, ProgramStarter, until
from tests.support.soak import FACTOR

RUNNER = Path(sys.executable).with_name("instance-runner")
FLOOD = """
import array, errno, os, resource, socket, sys
# As the user argv[1], send descriptors to itself until the kernel lets this user send no more, and leave them in flight.
resource.setrlimit(resource.RLIMIT_NOFILE, (5000, 5000))
os.setresuid(*[int(sys.argv[1])] * 3)
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 253))]  # SCM_MAX_FD
pairs = []
while True:
    pairs.append(socket.socketpair())
    pairs[-1][0].setblocking(False)
    try:
        while True:
            pairs[-1][0].sendmsg([b"x"], rights)
    except BlockingIOError:
        continue
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
        break
sys.stdin.read()
"""


@pytest.fixture
def blank(tmp_path: Path) -> str:
    """Return a spec with an empty disk, whose guest ignores the power button and has a second to power down."""
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    return f'[[disk]]\npath = "{tmp_path}/disk"\n[shutdown]\ngrace = 1\n'


def keeps_sigterm(pid: int) -> bool:
    """Return whether *pid* blocks or handles SIGTERM; ``unshare`` does not count, which blocks it only for a moment."""
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    kept = int(fields["SigBlk"], 16) | int(fields["SigCgt"], 16)
    return fields["Name"] != "unshare" and bool(kept >> (signal.SIGTERM - 1) & 1)


DELAYS = [
    *(
        pytest.param(each, marks=[pytest.mark.heart] if each in {5, 100} else [])
        for each in (1, 2, 5, 10, 20, 50, 100, 200, 500)
    ),
    *(pytest.param(each, marks=pytest.mark.soak) for each in (FIRST_SECOND if FACTOR else ())),
]
"""Milliseconds from the moment when ``env --block-signal`` has blocked the signals."""


@pytest.mark.parametrize("milliseconds", DELAYS)
def test_no_sigterm_is_lost(start: ProgramStarter, blank: str, milliseconds: int) -> None:
    """The kernel drops a SIGTERM for the PID 1 of a namespace that neither blocks nor handles it."""
    run = start(blank, boot=False)
    until(lambda: keeps_sigterm(run.pid()), "env to block SIGTERM")
    time.sleep(milliseconds / 1000)  # the moment is what is tested
    run.send(signal.SIGTERM)
    assert run.wait(20) in {0, 13}, run.log
    assert run.termination_log()["outcome"] in {"stopped", "forced_off"}


def test_without_blocked_signals_some_would_be_lost(tmp_path: Path) -> None:
    """Without `env --block-signal` the same program does not get a SIGTERM that is sent before Python runs."""
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    spec = tmp_path / "spec.toml"
    spec.write_text(f'[cpu]\naccel = "tcg"\n[[disk]]\npath = "{tmp_path}/disk"\n[shutdown]\ngrace = 1\n')
    command = (
        "unshare",
        "--fork",
        "--pid",
        "--mount-proc",
        "--kill-child",
        "--net",
        RUNNER,
        "run",
        "--state-dir",
        tmp_path / "state",
        spec,
    )
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := children.read_text().split()):
            pass
        os.kill(int(found[0]), signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_ways_to_ask(start: ProgramStarter, number: int) -> None:
    run = start()
    run.until_done()
    run.send(number)
    assert run.wait() == 0
    assert f"asked to stop reason={signal.Signals(number).name}" in run.log


def test_asked_again_and_again(start: ProgramStarter) -> None:
    """Ten SIGTERMs are one; ten thousand SIGUSR1 are none."""
    run = start()
    run.until_done()
    pid = run.pid()
    for _ in range(10_000):
        os.kill(pid, signal.SIGUSR1)
    run.send(*[signal.SIGTERM] * 10)
    with contextlib.suppress(ProcessLookupError):
        while run.process.poll() is None:
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.01)
    assert run.wait() == 0, run.log
    assert run.termination_log()["faults"] == []


def test_orphans_during_the_end(start: ProgramStarter) -> None:
    """Two thousand orphans end while the guest powers down; QEMU's status is still QEMU's."""
    run = start()
    run.until_done()
    storm = "import os\nfor _ in range(2000):\n    if os.fork() == 0:\n        os._exit(3)\nos._exit(0)"
    entering = ("nsenter", "--target", str(run.pid()), "--pid", "--", sys.executable, "-IS", "-c", storm)
    with subprocess.Popen(entering) as storming:
        assert run.stop() == 0, run.log
        storming.wait()
    assert run.termination_log()["faults"] == []


def test_zombies_do_not_gather(start: ProgramStarter, blank: str) -> None:
    run = start(blank.replace("grace = 1", "grace = 5"), boot=False)
    run.until_runs()
    orphan = (
        "nsenter",
        "--target",
        str(run.pid()),
        "--pid",
        "--",
        "sh",
        "-c",
        "for i in 1 2 3 4 5 6 7 8 9; do (sleep 0.0$i; exit $i) & done",
    )
    subprocess.run(orphan, check=True)

    def zombies() -> list[str]:
        result = []
        for child in Path(f"/proc/{run.pid()}/task/{run.pid()}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError):
                result += [child] if "\nState:\tZ" in Path(f"/proc/{child}/status").read_text() else []
        return result

    time.sleep(0.2)  # the longest of them lives for 0.09 s
    assert zombies() == []
    run.process.kill()
    run.wait()


@pytest.mark.parametrize(
    "name", ["qemu-system-x86", "virtiofsd", "dnsmasq", pytest.param("sleep", marks=pytest.mark.heart)]
)
def test_kill_any_child(start: ProgramStarter, tmp_path: Path, name: str) -> None:
    (tmp_path / "shared").mkdir()
    run = start(f'[[network]]\n[[share]]\ntag = "share"\npath = "{tmp_path}/shared"\n[shutdown]\ngrace = 3\n')
    run.until_done()
    for pid in run.descendants()[name]:
        os.kill(pid, signal.SIGKILL)
    if name == "qemu-system-x86":
        assert run.wait() == 20
        assert "QEMU was killed by SIGKILL" in run.termination_log()["detail"]
    elif name == "virtiofsd":
        assert run.wait() == 21
        assert "virtiofsd" in run.termination_log()["detail"]
    else:
        role = {"sleep": "anchor"}.get(name, name)
        run.until(f"{role} was killed by SIGKILL", lambda: run.log)
        run.until(
            "started" if name == "dnsmasq" else "starting it again",
            lambda: run.log.partition("starting it again")[1:][0] + run.log,
        )
        assert run.stop() == 0
    assert run.termination_log()["faults"] == []


def test_a_fault_of_the_teardown_is_the_outcome(start: ProgramStarter, blank: str) -> None:
    run = start(blank, boot=False)
    run.until_runs()
    (run.state / "receipt.json").unlink()
    assert run.stop() == 40
    verdict = run.termination_log()
    assert (verdict["status"], verdict["outcome"]) == (40, "dirty")
    assert "(forced_off), but not everything could be released" in verdict["detail"]
    assert len(verdict["faults"]) == 1


def test_kill_pid_1(start: ProgramStarter, tmp_path: Path) -> None:
    """The kernel ends the namespace with its PID 1; `nothing_left` checks that nothing remains."""
    (tmp_path / "shared").mkdir()
    run = start(f'[[network]]\n[[share]]\ntag = "share"\npath = "{tmp_path}/shared"\n')
    run.until_runs()
    run.send(signal.SIGKILL)
    assert run.wait() != 0


def test_not_pid_1(start: ProgramStarter, blank: str) -> None:
    run = start(blank, boot=False, namespaces=False)
    assert run.wait() == 30
    assert "cannot run as process" in run.log
    assert "--not-pid1" in run.log


def test_not_pid_1_but_asked_for(start: ProgramStarter, blank: str) -> None:
    """A development run: it adopts orphans, and its children die with it even of SIGKILL."""
    run = start(blank, boot=False, pid1=False)
    run.until_runs()
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(20) == 13
    run = start(blank, boot=False, pid1=False)
    run.until_runs()
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.wait(20) == -signal.SIGKILL


def test_the_console_has_no_reader(start: ProgramStarter) -> None:
    """A full pipe on both outputs: the guest boots, powers down, and the status is right."""
    reading, writing = os.pipe()
    run = start(
        "", "loglevel=7 ignore_loglevel", "--log-level", "debug", streams={"stdout": writing, "stderr": writing}
    )
    os.close(writing)
    run.until(
        "guest: done", lambda: (run.state / "console.log").read_text() if (run.state / "console.log").exists() else ""
    )
    assert run.stop() == 0
    assert run.termination_log()["outcome"] == "stopped"
    os.close(reading)


def test_outputs_are_closed(start: ProgramStarter, blank: str) -> None:
    run = start(
        blank,
        boot=False,
        namespaces=False,
        around=("sh", "-c", 'exec unshare --fork --pid --mount --mount-proc --kill-child --net "$@" >&- 2>&-', "sh"),
    )
    until((run.state / "ready").exists, "the guest to run")  # the receipt is there before: a stop would come too early
    assert run.stop() == 13


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system without a free block."""
    directory = tmp_path / "full"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "full", directory], check=True)
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    yield directory
    subprocess.run(["umount", directory], check=True)


def test_a_full_disk(start: ProgramStarter, full: Path, blank: str) -> None:
    """A receipt that cannot be written is a failed start, explained in one sentence; a full console log is a warning."""
    run = start(blank, "", "--state-dir", str(full), boot=False)
    assert run.wait() == 31
    assert f"cannot write '{full}/receipt.json': No space left on device" in run.log
    run = start(f'[console]\nlog = "{full}/filler"\n', "guest.then=poweroff")
    assert run.wait() == 10
    assert "the console's log file lacks output from here on: No space left on device" in run.log


def test_a_read_only_root(start: ProgramStarter, blank: str, full: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", full], check=True)
    run = start(blank, "", "--state-dir", str(full / "state"), boot=False)
    assert run.wait() == 30
    assert (
        f"cannot make the directory '{full}/state': Read-only file system; mount its file system for writing" in run.log
    )


def test_a_program_is_missing(start: ProgramStarter, blank: str) -> None:
    """It is reported before anything is changed."""
    run = start(blank, boot=False, environment={"PATH": os.environ["PATH"]})
    run.until_runs()
    run.send(signal.SIGTERM)
    run.wait(20)
    hidden = ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /usr/bin/qemu-system-x86_64 && exec "$@"', "sh")
    run = start(blank, boot=False, around=(*hidden, "unshare", "--fork", "--pid", "--mount-proc", "--kill-child"))
    assert run.wait() == 30
    assert "cannot find the program 'qemu-system-x86_64' in PATH; apt-get install qemu-system-x86" in run.log


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("[cpuu]\n", "cpuu: unknown key; did you mean 'cpu'?", marks=pytest.mark.heart),
        ('[[disk]]\npath = "/nowhere"\n', "disk[0].path: '/nowhere' does not exist"),
        ('[memory]\nsize = "900GiB"\n', "of overhead (QEMU, page tables, this program) do not fit"),
    ],
)
def test_bad_input_is_one_line_a_problem_and_no_traceback(start: ProgramStarter, text: str, sentence: str) -> None:
    run = start(text)
    assert run.wait() == 30
    assert sentence in run.log
    assert "Traceback" not in run.log
    assert len(run.log.splitlines()) == 2
    assert not run.state.exists(), "nothing was changed"
    assert run.termination_log()["outcome"] == "refused"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "usage: instance-runner"),
        (("fly",), "usage: instance-runner"),
        (("run",), "cannot read the spec '/etc/instance/spec.toml': No such file or directory"),
        (("run", "/nowhere"), "cannot read the spec '/nowhere': No such file or directory"),
        (("plan", "/nowhere"), "cannot read the spec '/nowhere': No such file or directory"),
    ],
)
def test_a_wrong_command_line(arguments: tuple[str, ...], sentence: str) -> None:
    result = subprocess.run([RUNNER, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert sentence in result.stderr


def test_output_that_cannot_be_written_is_one_line_on_standard_error(start: ProgramStarter) -> None:
    spec = start.spec("")
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run([RUNNER, "plan", spec], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (
        2,
        "instance-runner: cannot write the output: No space left on device\n",
    )
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([RUNNER, "plan", spec], capture_output=True, text=True, check=True, env=plain).stdout
    assert "\\u2192" in shown


def test_plan_changes_nothing_and_shows_what_run_would_do(start: ProgramStarter, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    spec = start.spec(f'[[network]]\n[[share]]\ntag = "share"\npath = "{tmp_path}/shared"\n')
    before = Path("/proc/net/dev").read_text().count("\n")
    shown = subprocess.run([RUNNER, "plan", spec], capture_output=True, text=True, check=True).stdout
    assert "guest 192.168.77.2/24" in shown
    plan = json.loads(
        subprocess.run([RUNNER, "plan", "--json", "-"], input=spec.read_bytes(), capture_output=True, check=True).stdout
    )
    assert plan["placement"]["backend"] == "affinity"
    assert Path("/proc/net/dev").read_text().count("\n") == before


def test_all_may_open_as_many_files_as_the_hard_limit_allows(start: ProgramStarter, tmp_path: Path) -> None:
    """Container runtimes begin with a soft limit of 1024, for programs that use select(2); a share has more files than that."""
    (tmp_path / "share").mkdir()
    spec = f'[[share]]\ntag = "share"\npath = "{tmp_path}/share"\n[shutdown]\ngrace = 1\n'
    run = start(spec, inside=("prlimit", "--nofile=1024:5000"))
    run.until_runs()
    children = run.descendants()
    for pid in (run.pid(), *children["qemu-system-x86"], *children["virtiofsd"]):
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(r"^Max open files +5000 +5000 ", limits, re.MULTILINE), limits
    run.stop()


@pytest.mark.skipif(Procfs().in_user_namespace(), reason="a user namespace has users of its own")
def test_what_the_user_of_one_pods_qemu_uses_up_is_not_short_in_another_pod(
    start: ProgramStarter, tmp_path: Path
) -> None:
    """QEMU must send descriptors to virtiofsd, and the kernel counts those in flight of each user, in all containers together."""
    (tmp_path / "share").mkdir()
    spec = f'[[share]]\ntag = "share"\npath = "{tmp_path}/share"\n[shutdown]\ngrace = 1\n'

    def started(number: int) -> ProgramRun:
        pod = {"POD_UID": f"00000000-0000-4000-8000-{number:012}"}
        run = start(spec, inside=("prlimit", "--nofile=1024:5000"), environment=pod)
        run.until_runs()
        return run

    [qemu] = started(1).descendants()["qemu-system-x86"]
    argv = (sys.executable, "-IS", "-c", FLOOD, str(Path(f"/proc/{qemu}").stat().st_uid))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
        assert flood.stdout is not None
        assert flood.stdout.readline() == "ETOOMANYREFS\n"
        started(2)
