"""A runner is renewed under a guest that runs: real programs, real execs, a fake QEMU.

`RUNNER_SOAK=250 pytest tests/component/test_renewal.py -k many --timeout 0` renews it a thousand times.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.base.version import VERSION
from tests.support.program_runs import RUNNER, until
from tests.support.renewals import (
    ProgramDirectory,
    RenewableRun,
    RenewableStarter,
    failing,
    hook,
    make_program,
    until_idle,
)
from tests.support.soak import some, times

SHELL_DIGEST = "find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"

EVERYTHING = """
[[network]]
[[network]]
mode = "passt"
[[share]]
tag = "share"
path = "{root}/share"
[display]
vnc = true
[guest]
ready = "console:^up$"
[hotplug]
disks = 2
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ProgramDirectory:
    return make_program(tmp_path_factory.mktemp("programs") / "made")


@pytest.fixture
def program(made: ProgramDirectory, tmp_path_factory: pytest.TempPathFactory) -> ProgramDirectory:
    """Return a program of one's own, which may be changed."""
    path = tmp_path_factory.mktemp("program") / "program"
    shutil.copytree(made.path, path)
    subprocess.run(["chmod", "-R", "go-w", path], check=True)
    return ProgramDirectory(path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[RenewableStarter]:
    starter = RenewableStarter(tmp_path)
    yield starter
    starter.end()


def type_in(run: RenewableRun, text: str) -> None:
    """Type *text* at the guest's console."""
    client = (
        "import json, socket, sys\n"
        "line = socket.socket(socket.AF_UNIX)\n"
        "line.connect(sys.argv[1])\n"
        "line.sendall(json.dumps({'write': True}).encode() + b'\\n' + sys.argv[2].encode())\n"
        "sys.stdout.buffer.write(line.recv(4096))\n"
    )
    argv = run.command("python3", "-c", client, f"{run.state}/console.sock", text)
    subprocess.run(argv, check=True, capture_output=True, timeout=60)


def test_a_renewed_runner_goes_on_with_everything(start: RenewableStarter, made: ProgramDirectory) -> None:
    run = start(EVERYTHING, "--http", "127.0.0.1:9441")
    type_in(run, "up\r\n")
    run.until_logged("the guest is ready")
    disk = run.root / "late.img"
    disk.write_bytes(bytes(1 << 20))
    assert run.ctl("disk", "attach", disk, "format=raw").returncode == 0
    children, status, descriptors = run.children(), run.status(), run.descriptors()
    assert {"dnsmasq", "passt", "virtiofsd", "qemu-system-x86"} <= children.keys()
    assert status["runner"] == {"version": VERSION, "generation": 0, "digest": "", "outcome": None, "reason": ""}

    ended = run.upgrade(made)
    assert (ended.returncode, ended.stdout.split()[:2]) == (0, ["generation", "1"]), ended.stderr + run.log
    run.until_logged("the runner is renewed generation=1")

    after = run.status()
    assert run.children() == children
    assert (run.state / "ready").exists()
    until(lambda: run.receipt()["generation"] == 1, "the receipt of the new program")
    assert after["runner"] == {
        "version": VERSION,
        "generation": 1,
        "digest": made.digest,
        "outcome": "renewed",
        "reason": "",
    }
    assert after["uptime"] > status["uptime"]
    unchanged = {"restarts", "placement", "networks", "disks", "free_slots", "ready", "guest"}
    assert {key: after[key] for key in unchanged} == {key: status[key] for key in unchanged}
    assert Path(f"/proc/{run.pid}/comm").read_text() == "instance-runner\n"
    until(lambda: run.descriptors() <= descriptors + 1, "its last client to be closed, and nothing besides the archive")
    assert 'instance_runner_renewals_total{outcome="renewed"} 1.0' in run.metrics().stdout

    type_in(run, "still here\r\n")
    until(lambda: "still here" in run.console, "the console to be shown")
    assert run.ctl("disk", "detach", status["disks"][-1]["name"]).returncode == 0
    assert run.ctl("qmp", "query-status").returncode == 0
    [dnsmasq] = children["dnsmasq"]
    os.kill(dnsmasq, signal.SIGKILL)
    run.until_logged("dnsmasq was killed by SIGKILL")
    until(lambda: run.status()["restarts"] == {"dnsmasq": 1}, "dnsmasq to be started again")
    assert run.stop() == 0, run.log
    assert run.termination_log()["faults"] == []
    assert "the guest powered down when asked to" in run.log
    assert not run.state.exists() or {each.name for each in run.state.iterdir()} == {"console.log"}


@pytest.mark.soak
def test_many_renewals_lose_nothing_and_grow_nothing(start: RenewableStarter, made: ProgramDirectory) -> None:
    """The guest prints without a pause: each of its lines is there once, in order; descriptors and memory stay as they are."""
    run = start(EVERYTHING, qemu={"ticks": 0.002})
    assert run.upgrade(made).returncode == 0, run.log
    children, descriptors, memory = run.children(), run.descriptors(), run.rss()
    for generation in range(2, times(4) + 2):
        ended = run.upgrade(made)
        assert ended.returncode == 0, ended.stderr + run.log[-4000:]
        assert run.status()["runner"]["generation"] == generation
    ticks = [line for line in run.console.splitlines()[:-1] if line.startswith("tick ")]
    assert len(ticks) > 100
    assert ticks == [f"tick {number}" for number in range(len(ticks))]
    assert run.children() == children
    until(lambda: run.descriptors() <= descriptors, "its last client to be closed, and no descriptor besides")
    assert run.rss() < memory * 1.05
    assert run.stop() == 0


def spoil_owner(program: ProgramDirectory) -> None:
    (program.path / "runner" / "base" / "errors.py").chmod(0o666)


def spoil_directory(program: ProgramDirectory) -> None:
    program.path.chmod(0o1777)  # others may add modules there


def spoil_link(program: ProgramDirectory) -> None:
    (program.path / "link").symlink_to("/etc/passwd")


def spoil_import(program: ProgramDirectory) -> None:
    program.patch("instance/lifecycle.py", ("import trio\n", "import trio\nimport missing_package\n"))


def spoil_format(program: ProgramDirectory) -> None:
    program.patch(
        "instance/renewal/names.py",
        ("FORMAT: Final = 2\n", "FORMAT: Final = 3\n"),
        ("OLDEST: Final = 2\n", "OLDEST: Final = 3\n"),
    )


def spoil_field(program: ProgramDirectory) -> None:
    program.patch("protocol/qmp.py", ("    next_number: int\n", ""))


def spoil_holder(program: ProgramDirectory) -> None:
    program.patch("cli/resume.py", ("    state_of(document)\n\n", "    import os\n    os.kill(os.getpid(), 9)\n\n"))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (spoil_owner, "cannot renew the runner: cannot use"),
        (spoil_owner, "others than root may change it; give it to root, mode go-w"),
        (spoil_directory, "others than root may change it; give it to root, mode go-w"),
        (spoil_link, "it is neither a file nor a directory"),
        (spoil_import, "No module named 'missing_package'"),
        (spoil_format, "its format is 2, and this program knows 3"),
        (spoil_field, "conversation has no next_number here"),
        (spoil_holder, "could not be tried"),
    ],
)
def test_a_program_that_cannot_go_on_is_refused_and_nothing_is_executed(
    start: RenewableStarter, program: ProgramDirectory, spoil: Callable[[ProgramDirectory], None], sentence: str
) -> None:
    run = start()
    before = Path(f"/proc/{run.pid}/cmdline").read_bytes()
    digest = program.digest
    spoil(program)
    ended = run.upgrade(
        program, digest if spoil is spoil_link else program.digest if spoil is not spoil_owner else digest
    )
    assert ended.returncode == 4
    assert sentence in ended.stderr
    assert Path(f"/proc/{run.pid}/cmdline").read_bytes() == before
    assert run.status()["runner"]["generation"] == 0
    assert run.stop() == 0
    assert run.termination_log()["faults"] == []


@pytest.mark.parametrize("path", ["", "runner", ".."])
def test_a_program_that_the_guest_may_change_is_refused(
    start: RenewableStarter, program: ProgramDirectory, path: str
) -> None:
    run = start(f'[[share]]\ntag = "share"\npath = "{(program.path / path).resolve()}"\n')
    ended = run.upgrade(program)
    assert ended.returncode == 4
    assert f"the guest may change {str(program.path)!r} by the share 'share'; put the program elsewhere" in ended.stderr
    assert run.stop() == 0


def test_another_digest_than_the_directorys_is_refused(start: RenewableStarter, made: ProgramDirectory) -> None:
    run = start()
    ended = run.upgrade(made, "sha256:" + "0" * 64)
    assert ended.returncode == 4
    assert f"its digest is {made.digest}, not sha256:0000" in ended.stderr
    ended = run.upgrade(made, "md5:0")
    assert "'digest' must be sha256: and 64 hexadecimal digits" in ended.stderr
    ended = run.ctl("upgrade", "--from", "/nowhere", "--digest", made.digest)
    assert "cannot renew the runner: cannot use '/nowhere': No such file or directory" in ended.stderr
    assert run.status()["runner"]["generation"] == 0
    assert run.stop() == 0


def test_a_directory_that_is_changed_later_and_removed_is_of_no_consequence(
    start: RenewableStarter, made: ProgramDirectory, program: ProgramDirectory
) -> None:
    """Neither for a module that is imported for the first time then, nor for a fresh image after a fault, nor for the way back."""
    run = start("", "--http", "127.0.0.1:9441")
    digest = program.digest
    assert run.upgrade(program).returncode == 0, run.log
    evidence = program.path.parent / "evidence"
    first = "from __future__ import annotations\n"
    for module in ("instance/watch/metrics.py", "instance/renewal/first_stage.py"):
        program.patch(module, (first, f"{first}open({str(evidence)!r}, 'w').close()\n"))
    assert 'instance_runner_renewals_total{outcome="renewed"} 1.0' in run.metrics().stdout
    with failing(run, "epoll_wait:error=EIO:when=1"):
        run.until_logged("the runner continues after a fault of its own generation=2")
    shutil.rmtree(program.path)
    with failing(run, "epoll_wait:error=EIO:when=1"):
        run.until_logged("the runner continues after a fault of its own generation=3")
    assert run.status()["runner"]["digest"] == digest
    assert 'instance_runner_renewals_total{outcome="resumed"} 2.0' in run.metrics().stdout
    assert run.upgrade(made).returncode == 0, run.log
    assert not evidence.exists()
    assert run.stop() == 0
    assert run.termination_log()["faults"] == []


def test_the_digest_is_what_the_shell_says(program: ProgramDirectory) -> None:
    output = subprocess.run(
        ("sh", "-c", SHELL_DIGEST), cwd=program.path, check=True, capture_output=True, text=True
    ).stdout
    assert program.digest == f"sha256:{output.split()[0]}"


def do(path: Path, at: int, statements: str) -> None:
    """Have the program with the hook *path* execute *statements* before it takes over holder number *at*."""
    path.write_text(json.dumps({"at": at, "do": statements}))


HOLDERS = 58
"""Names under which an instance with everything, probes included, holds something; they are found one after the other."""


@pytest.mark.soak
def test_a_program_that_fails_at_any_step_gives_way_to_the_one_before(
    start: RenewableStarter, program: ProgramDirectory
) -> None:
    """Each holder fails to take over once: nothing is lost, and then it succeeds."""
    steps = hook(program)
    run = start(EVERYTHING, "--http", "127.0.0.1:9441", qemu={"ticks": 0.002})
    children, descriptors = run.children(), run.descriptors()
    for number, at in enumerate(some(range(1, HOLDERS + 1), 5), 1):
        do(steps, at, "raise OSError(24, 'no descriptor for ' + name)")
        ended = run.upgrade(program)
        assert ended.returncode == 4
        assert "no descriptor for" in ended.stderr, ended.stderr + run.log[-4000:]
        runner = run.status()["runner"]
        assert (runner["generation"], runner["outcome"], runner["digest"]) == (0, "fell_back", "")
        assert run.log.count("the runner is not renewed, and the previous program continues: OSError") == number
        assert run.children() == children
    do(steps, HOLDERS + 1, "raise OSError(24, 'there are more holders')")
    ended = run.upgrade(program)
    assert ended.returncode == 0, ended.stderr
    assert run.status()["runner"]["generation"] == 1
    until(lambda: run.descriptors() <= descriptors + 1, "its last client to be closed, and nothing besides the archive")
    ticks = [line for line in run.console.splitlines()[:-1] if line.startswith("tick ")]
    assert ticks == [f"tick {number}" for number in range(len(ticks))]
    assert run.stop() == 0
    assert run.termination_log()["faults"] == []


def test_a_program_that_hangs_gives_way_to_the_one_before(start: RenewableStarter, program: ProgramDirectory) -> None:
    steps = hook(program)
    run = start()
    do(steps, 3, "time.sleep(1000)")
    ended = run.upgrade(program)
    assert "it has not taken everything over within 10 s" in ended.stderr
    assert run.status()["runner"]["generation"] == 0
    assert run.stop() == 0


def test_a_program_has_more_time_on_a_host_where_its_child_was_slow(
    start: RenewableStarter, program: ProgramDirectory
) -> None:
    program.patch("cli/resume.py", ("    state_of(document)\n\n", "    import time\n    time.sleep(6)\n\n"))
    steps = hook(program)
    run = start()
    do(steps, 3, "time.sleep(11)")
    assert run.upgrade(program).returncode == 0, run.log
    assert run.stop() == 0


def test_a_program_that_leaves_a_holder_out_gives_way(start: RenewableStarter, program: ProgramDirectory) -> None:
    program.patch("instance/watch/readiness.py", ('panic="panic"', 'panic="panic:other"'))
    run = start()
    assert "cannot take over panic:other: the previous program did not hold it" in run.upgrade(program).stderr
    assert run.stop() == 0


def test_a_thread_in_the_wrong_place_is_no_place_to_commit(start: RenewableStarter, program: ProgramDirectory) -> None:
    steps = hook(program)
    run = start()
    anchor, vcpu = (
        next(each for each in run.receipt()["threads"] if each["role"] == role) for role in ("anchor", "vcpu")
    )
    do(steps, 1, f"os.sched_setaffinity({anchor['tid']}, {{{vcpu['allowed_cpus']}}})")
    ended = run.upgrade(program)
    assert "cannot place the threads: anchor" in ended.stderr, run.log
    assert run.status()["runner"]["outcome"] == "fell_back"
    assert run.stop() == 0


@pytest.mark.parametrize(("name", "status"), [("sleep", 0), ("dnsmasq", 0), ("virtiofsd", 21), ("qemu-system-x86", 20)])
@pytest.mark.parametrize("at", some(range(1, HOLDERS), 2))
def test_a_child_killed_during_a_renewal(
    start: RenewableStarter, program: ProgramDirectory, name: str, status: int, at: int
) -> None:
    """The kernel keeps the death; the table of what each death means holds as ever."""
    steps = hook(program)
    run = start(EVERYTHING)
    [victim, *_] = run.children()[name]
    inner = Path(f"/proc/{victim}/status").read_text().partition("NSpid:")[2].split()[1]
    do(steps, at, f"os.kill({inner}, signal.SIGKILL)")
    run.upgrade(program)
    if status:
        assert run.wait() == status, run.log
    else:
        run.until_logged("was killed by SIGKILL; starting it again")
        assert run.status()["runner"]["outcome"] is not None
        assert run.stop() == 0
    assert run.termination_log()["faults"] == []


@pytest.mark.parametrize("at", some(range(1, HOLDERS), 2))
def test_a_stop_requested_while_a_program_takes_over(
    start: RenewableStarter, program: ProgramDirectory, at: int
) -> None:
    steps = hook(program)
    run = start(EVERYTHING)
    do(steps, at, "os.kill(1, signal.SIGTERM)")
    run.upgrade(program)
    assert run.wait() == 0, run.log
    assert "asked to stop reason=SIGTERM" in run.log
    assert run.termination_log() == {
        "version": 1,
        "status": 0,
        "outcome": "stopped",
        "detail": "the guest powered down when asked to",
        "faults": [],
        "problems": [],
    }


@pytest.mark.parametrize("milliseconds", some(range(0, 4000, 100), 5))
def test_a_stop_at_any_moment_ends_the_guest_in_order(
    start: RenewableStarter, made: ProgramDirectory, milliseconds: int
) -> None:
    run = start()
    argv = run.command(RUNNER, "ctl", "--state-dir", run.state, "upgrade", "--from", made.path, "--digest", made.digest)
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        time.sleep(milliseconds / 1000)  # the moment is what is tested
        assert run.stop() == 0, run.log
    assert run.termination_log()["detail"] == "the guest powered down when asked to"


def test_a_qemu_that_is_stopped_is_no_hindrance(start: RenewableStarter, made: ProgramDirectory) -> None:
    run = start()
    [qemu] = run.children()["qemu-system-x86"]
    os.kill(qemu, signal.SIGSTOP)
    assert run.upgrade(made).returncode == 0, run.log
    ended = run.upgrade(made)  # the new program has asked QEMU how the guest is, and waits
    assert "cannot renew the runner now: a QMP command is being executed; ask again later" in ended.stderr
    os.kill(qemu, signal.SIGCONT)
    assert run.upgrade(made).returncode == 0, run.log
    assert run.stop() == 0


def test_a_full_state_directory_is_no_hindrance(start: RenewableStarter, made: ProgramDirectory) -> None:
    state = start.root / "run0" / "state"
    state.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "state", state], check=True)
    try:
        run = start(EVERYTHING, qemu={"ticks": 0.002})
        with (state / "filling").open("wb", buffering=0) as filling:
            subprocess.run(["cat", "/dev/zero"], stdout=filling, stderr=subprocess.DEVNULL, check=False)
        ended = run.upgrade(made)
        assert ended.returncode == 0, ended.stderr + run.log
        run.until_logged("the receipt is from before the renewal: cannot write")
        assert run.status()["runner"]["outcome"] == "renewed"
        assert run.receipt()["generation"] == 0
        (state / "filling").unlink()
        assert run.upgrade(made).returncode == 0
        until(lambda: run.receipt()["generation"] == 2, "the receipt")
        assert run.stop() == 0
        assert run.termination_log()["faults"] == []
    finally:
        subprocess.run(["umount", "--lazy", state], check=True)


def test_a_runner_that_is_not_pid_1_is_renewed_as_well(start: RenewableStarter, program: ProgramDirectory) -> None:
    """It adopts orphans still (PR_GET_CHILD_SUBREAPER), and its children end with it: both outlive exec."""
    steps = hook(program)
    run = start(EVERYTHING, "--not-pid1", pid1=False)
    prctl = "import ctypes; found = ctypes.c_int(); ctypes.CDLL(None).prctl(37, ctypes.byref(found))"
    do(steps, 1, f"{prctl}; assert found.value == 1 and os.getpid() != 1")
    assert run.upgrade(program).returncode == 0, run.log
    os.kill(run.children()["sleep"][0], signal.SIGKILL)
    until(lambda: run.status()["restarts"] == {"anchor": 1}, "the anchor to be started again")
    children = [pid for pids in run.children().values() for pid in pids]
    assert len(children) == 6
    os.kill(run.pid, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "its children to be gone")


def test_a_client_of_the_console_is_told_to_attach_again(start: RenewableStarter, made: ProgramDirectory) -> None:
    run = start()
    client = (
        "import socket, sys\n"
        "line = socket.socket(socket.AF_UNIX)\n"
        "line.connect(sys.argv[1])\n"
        "line.sendall(b'{}\\n')\n"
        "while data := line.recv(4096):\n"
        "    print(data.decode(), flush=True)\n"
    )
    argv = run.command("python3", "-c", client, f"{run.state}/console.sock")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as attached:
        assert attached.stdout is not None
        assert '"writes": false' in attached.stdout.readline()
        assert run.upgrade(made).returncode == 0
        assert "[the runner is renewed: attach again; the guest runs on]" in attached.stdout.read()
    assert run.stop() == 0


def test_down_and_up_again(start: RenewableStarter, made: ProgramDirectory, program: ProgramDirectory) -> None:
    """A newer program carries fields that the older one does not know, and leaves them out while they have their default."""
    program.patch(
        "instance/parts/daemons.py",
        ("    down: bool\n\n\n", "    down: bool\n    newer: int = 0\n\n\n"),
    )
    program.patch(
        "kernel/child_processes.py",
        ("    ended: int | None = None\n", "    ended: int | None = None\n    newer: int = 0\n"),
    )
    run = start(EVERYTHING, "--http", "127.0.0.1:9441")
    for generation, each in enumerate((program, made, program), 1):
        assert run.upgrade(each).returncode == 0, run.log
        assert run.status()["runner"] == {
            "version": VERSION,
            "generation": generation,
            "digest": each.digest,
            "outcome": "renewed",
            "reason": "",
        }
    assert run.stop() == 0


def newer_name(program: ProgramDirectory) -> None:
    """Have *program* hold one thing more, by a name that format 3 has first."""
    program.patch(
        "instance/renewal/names.py",
        ("FORMAT: Final = 2\n", "FORMAT: Final = 3\n"),
        ('    "panic": Name(str),\n', '    "panic": Name(str),\n    "newer": Name(int, since=3),\n'),
    )
    program.patch(
        "instance/watch/readiness.py",
        (
            "        signs = state.signs_of_life\n",
            '        signs = state.signs_of_life\n        held.value("newer", int)\n',
        ),
    )


def test_what_only_a_newer_program_holds_is_made(
    start: RenewableStarter, made: ProgramDirectory, program: ProgramDirectory
) -> None:
    """It is found by itself, and a program that knows nothing of it refuses."""
    newer_name(program)
    run = start(EVERYTHING, program=made)
    for generation in (1, 2):
        assert run.upgrade(program).returncode == 0, run.log
        assert run.status()["runner"]["generation"] == generation
    assert "its format is 3, and this program knows 2" in run.upgrade(made).stderr
    assert run.stop() == 0
    assert run.termination_log()["faults"] == []


def test_versions_that_do_not_understand_each_other_refuse_in_both_directions(
    start: RenewableStarter, made: ProgramDirectory, program: ProgramDirectory
) -> None:
    spoil_format(program)
    newer, older = start(program=program), start(program=made)
    assert "its format is 3, and this program knows 2" in newer.upgrade(made).stderr
    assert "its format is 2, and this program knows 3" in older.upgrade(program).stderr
    for run in (newer, older):
        assert run.status()["runner"]["generation"] == 0
        assert run.stop() == 0


# -- faults of its own


FAULTY = """async def _faulty(task: Any, tasks: list[Any] = []) -> None:
    import os
    tasks.append(task)
    number = len(tasks)
    async def watch() -> None:
        while True:
            try:
                with open({path!r}) as file:
                    wanted = file.read()
            except OSError:
                wanted = ""
            if wanted in (str(number), "any"):
                os.unlink({path!r})
                raise RuntimeError("injected into task " + str(number))
            await trio.sleep(0.02)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        result = await task()
        nursery.cancel_scope.cancel()
    return result


"""


def faulty(program: ProgramDirectory, *, forgiving: bool) -> Path:
    """Have *program* raise in the background task whose number, or ``any``, is in the returned file; the file goes."""
    path = program.path.parent / "fault"
    program.patch(
        "instance/supervisor.py",
        (
            "    try:\n        return await task()\n    except Exception as error:\n",
            "    try:\n        return await _faulty(task)\n    except Exception as error:\n",
        ),
        (
            "ENDS_WITHIN = 1.0",
            FAULTY.format(path=str(path)) + "ENDS_WITHIN = 1.0",
        ),
    )
    if forgiving:
        program.patch(
            "instance/renewal/upgrade.py", ("MOST_FAULTS, FORGIVEN = 2, 600.0", "MOST_FAULTS, FORGIVEN = 2, 0.0")
        )
    return path


TASKS = 22
"""Background tasks of an instance with everything, some of which end by themselves."""


@pytest.mark.soak
def test_a_fault_of_any_background_task_does_not_end_the_guest(
    start: RenewableStarter, program: ProgramDirectory
) -> None:
    fault = faulty(program, forgiving=True)
    run = start(EVERYTHING, "--http", "127.0.0.1:9441", program=program, qemu={"ticks": 0.002})
    children = run.children()
    survived, numbers = 0, some(range(1, TASKS + 1), 6)
    for number in numbers:
        fault.write_text(str(number))
        try:
            until(lambda: not fault.exists(), "the fault", timeout=5)
        except AssertionError:
            fault.unlink()  # this one has done its work, and ended
            continue
        survived += 1
        run.until_logged("the runner continues after a fault of its own generation=", survived)
        assert run.status()["runner"]["generation"] == survived
        assert run.children() == children
    assert survived >= len(numbers) - 4, run.log
    assert run.log.count("this is a bug of instance-runner:") == survived
    ticks = [line for line in run.console.splitlines()[:-1] if line.startswith("tick ")]
    assert ticks == [f"tick {each}" for each in range(len(ticks))]
    assert run.stop() == 0
    assert run.termination_log()["faults"] == []


def test_the_third_fault_in_ten_minutes_powers_the_guest_down(
    start: RenewableStarter, program: ProgramDirectory
) -> None:
    fault = faulty(program, forgiving=False)
    run = start(program=program)
    for survived in (1, 2):
        fault.write_text("any")
        run.until_logged("the runner continues after a fault of its own", survived)
    fault.write_text("any")
    assert run.wait() == 1, run.log
    assert "the runner has survived 2 faults of its own in 600 s, and not this one" in run.log
    assert "system_powerdown" in [each["command"] for each in run.records("command")]
    assert run.termination_log()["outcome"] == "bug"
    assert run.termination_log()["faults"] == []


# -- the end of the event loop


def test_an_event_loop_that_ends_does_not_end_the_guest(start: RenewableStarter) -> None:
    """A fresh image goes on with everything; the guest prints without a pause, and each of its lines is there once."""
    run = start(EVERYTHING, "--http", "127.0.0.1:9441", qemu={"ticks": 0.002})
    children = run.children()
    with failing(run, "epoll_wait:error=EIO:when=1"):
        run.until_logged("the runner continues after a fault of its own generation=1")
    assert run.children() == children
    assert run.status()["runner"]["outcome"] == "resumed"
    ticks = [line for line in run.console.splitlines()[:-1] if line.startswith("tick ")]
    assert ticks == [f"tick {number}" for number in range(len(ticks))]
    assert run.stop() == 0
    assert run.termination_log()["faults"] == []


def test_a_stop_that_the_event_loop_does_not_pass_on_is_obeyed(start: RenewableStarter) -> None:
    run = start(EVERYTHING)
    with failing(run, "epoll_wait:error=EIO:when=2") as trace:  # the signal ends the first
        until_idle(trace)
        assert run.stop() == 0, run.log
    assert "the runner continues after a fault of its own generation=1" in run.log
    assert "asked to stop reason=SIGTERM" in run.log
    assert run.termination_log()["detail"] == "the guest powered down when asked to"


def test_a_task_of_the_event_loop_that_fails_does_not_end_the_guest(start: RenewableStarter) -> None:
    """It reads what has woken the loop up; trio cancels everything when it ends."""
    run = start(EVERYTHING)
    with failing(run, "recvfrom:error=EIO:when=1") as trace:
        until_idle(trace)
        os.kill(run.children()["dnsmasq"][0], signal.SIGKILL)
        run.until_logged("the runner continues after a fault of its own generation=1")
        run.until_logged("dnsmasq was killed by SIGKILL; starting it again")
    assert run.stop() == 0, run.log
    assert run.termination_log()["faults"] == []


def test_a_wake_up_that_fails_does_not_end_the_event_loop(start: RenewableStarter) -> None:
    run = start(EVERYTHING)
    with failing(run, "sendto:error=ENOBUFS"):
        os.kill(run.children()["dnsmasq"][0], signal.SIGKILL)
        run.until_logged("dnsmasq was killed by SIGKILL; starting it again")
        until(lambda: "dnsmasq" in run.children(), "dnsmasq to be started again")
    assert run.stop() == 0, run.log
    assert "the event loop has ended" not in run.log


def test_where_no_program_can_be_executed_another_event_loop_powers_the_guest_down(start: RenewableStarter) -> None:
    run = start(EVERYTHING, "--http", "127.0.0.1:9441", qemu={"ticks": 0.1})
    with failing(run, "epoll_wait:error=EIO:when=1", "execve:error=ENOMEM"):
        assert run.wait() == 20, run.log
    assert "the runner cannot continue after a fault of its own: cannot execute" in run.log
    assert "system_powerdown" in [each["command"] for each in run.records("command")]
    assert run.termination_log()["outcome"] == "machine_died"
    assert run.termination_log()["detail"].endswith("; the guest powered down when asked to")
    assert run.termination_log()["faults"] == []
    assert not run.state.exists() or {each.name for each in run.state.iterdir()} == {"console.log"}


def test_where_no_event_loop_lasts_the_power_button_is_pressed_without_one(start: RenewableStarter) -> None:
    run = start("", qemu={"at_powerdown": None, "ticks": 0.1})
    with failing(run, "epoll_wait:error=EIO:when=1+5", "execve:error=ENOMEM"):
        assert run.wait() == 40, run.log
    assert "the guest is powered down without an event loop" in run.log
    assert [each["command"] for each in run.records("command")][-1] == "system_powerdown"
    [fault] = run.termination_log()["faults"]
    assert fault.startswith("could not release ")
    assert fault.endswith(": the event loop has ended")
    assert "machine_died" in run.termination_log()["detail"]


STEPS = """
class _Steps(trio.abc.Instrument):
    def __init__(self) -> None:
        self.names: list[str] = []

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.names.append(task.name)


STEPS = _Steps()

log = logging.getLogger("runner")
"""


COMMIT = """    held.at_commit(stage.commit)
    from runner.instance.outputs import STEPS
    held.at_commit(lambda: open({path!r}, "w").write(json.dumps(STEPS.names)))
"""


def test_everything_is_taken_over_in_one_step_of_the_event_loop(
    start: RenewableStarter, program: ProgramDirectory
) -> None:
    """No other task has run before the commit: nothing was read, reaped or logged that the program before would miss."""
    found = program.path.parent / "steps"
    program.patch(
        "instance/outputs.py",
        ('\nlog = logging.getLogger("runner")\n', STEPS),
        ("return trio.run(run)", "return trio.run(run, instruments=[STEPS])"),
    )
    program.patch(
        "cli/resume.py",
        (
            "    held.at_commit(stage.commit)\n",
            COMMIT.format(path=str(found)),
        ),
        ("import logging\n", "import json\nimport logging\n"),
    )
    run = start(EVERYTHING, "--http", "127.0.0.1:9441", "--log-format", "json")
    assert run.upgrade(program).returncode == 0, run.log
    names = json.loads(found.read_text())
    assert names[-1].endswith("Outputs._run.<locals>.run"), names
    assert [name for name in names if name.startswith("runner.")] == names[-1:]
    assert {name for name in names[:-1] if "trio" not in name.lower() and name != "<init>"} == set(), names
    assert run.stop() == 0
