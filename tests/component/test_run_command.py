"""The command ``run`` as a whole: the real program on this host, with a QEMU that is a fake."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.kernel.files import closing
from tests.support.fake_host import FakeHost
from tests.support.fake_kernel import FAKE_KERNEL

RUN = (sys.executable, "-m", "runner", "run", "--not-pid1")


@pytest.fixture
def spec(fake_host: FakeHost) -> Path:
    """Return the spec of an instance that can be planned here."""
    kernel = fake_host.root / "kernel"
    kernel.write_bytes(FAKE_KERNEL)
    path = fake_host.root / "spec.toml"
    path.write_text(
        f'[instance]\nuser = "root"\n[cpu]\naccel = "tcg"\nplacement = "affinity"\n[boot]\nkernel = "{kernel}"\n'
    )
    return path


def run(fake_host: FakeHost, *arguments: str | Path, around: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command to its end with a fake QEMU whose guest shuts itself down; *around* goes before the command."""
    path = fake_host.program("qemu-system-x86_64", "fake_qemu.py", at_cont="shutdown")
    environment = {**os.environ, "PATH": f"{path.parent}:{os.environ['PATH']}"}
    command = [*around, *RUN, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)


def test_a_state_directory_may_be_named_by_a_link(fake_host: FakeHost, spec: Path) -> None:
    (fake_host.root / "volume").mkdir(mode=0o700)
    (fake_host.root / "link").symlink_to("volume")
    ended = run(fake_host, "--state-dir", fake_host.root / "link", spec)
    assert ended.returncode == 10, ended.stderr
    assert (fake_host.root / "link").readlink() == Path("volume")
    assert "guest: runs" in (fake_host.root / "volume" / "console.log").read_text()


@pytest.mark.parametrize("limit", [6, 8, 9, 12, 17])
def test_too_few_descriptors_are_the_hosts_fault(fake_host: FakeHost, spec: Path, limit: int) -> None:
    few = ("prlimit", f"--nofile={limit}")
    ended = run(fake_host, "--state-dir", fake_host.root / "state", spec, around=few)
    assert (ended.returncode, "Too many open files" in ended.stderr, "bug" in ended.stderr) == (31, True, False)


NO_DESCRIPTOR_LEFT = """
import resource, sys
import runner.__main__, runner.cli.run_instance, runner.instance.exit_report
async def ended(*_, **__):
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    return runner.instance.exit_report.ExitReport(20, "machine_died", "QEMU crashed")
runner.cli.run_instance.run_as_init = ended
runner.__main__.entry()
"""


def test_the_termination_log_needs_no_descriptor_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "verdict"
    path.write_text("of an earlier run, and longer than what follows" * 10)
    argv = (sys.executable, "-c", NO_DESCRIPTOR_LEFT, "run", "--termination-log", path, "runner/__init__.py")
    assert subprocess.run(argv, check=False, timeout=60).returncode == 20
    assert json.loads(path.read_text())["detail"] == "QEMU crashed"


@pytest.mark.parametrize(
    ("path", "around", "reason"),
    [("/dev/full", (), "No space left on device"), ("verdict", ("prlimit", "--fsize=40"), "File too large")],
)
def test_a_termination_log_without_room_is_left_empty(
    tmp_path: Path, path: str, around: tuple[str, ...], reason: str
) -> None:
    """Half a document would keep the kubelet from taking the log's last lines; the exit status is the same."""
    argv = (*around, *RUN, "--termination-log", str(tmp_path / path), "/no/such/spec")
    ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, f"cannot write the termination log: {reason}" in ended.stderr) == (2, True)
    assert Path(path).is_absolute() or (tmp_path / path).read_bytes() == b""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Return the state directory of a runner that was killed."""
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    for name in ("ready", "receipt.json", "console.log"):
        (directory / name).touch()
    return directory


WATCHED = """
import sys, runner.__main__
def watch(event, arguments):
    if event == "os.remove":
        print(arguments[0], *sorted({"trio", "runner.plan.instance"} & set(sys.modules)), flush=True)
sys.addaudithook(watch)
runner.__main__.entry()
"""


def test_what_a_killed_runner_has_left_is_gone_before_anything_else(left: Path) -> None:
    argv = (sys.executable, "-c", WATCHED, "run", "--state-dir", left, "/no/such/spec")
    ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "ready\nreceipt.json\n")
    assert [each.name for each in left.iterdir()] == ["console.log"]


@pytest.mark.parametrize("why", ["another runner runs", "others may write"])
def test_what_is_not_ours_stays(left: Path, why: str) -> None:
    with closing(os.open(left, os.O_RDONLY)) as fd:
        if why == "another runner runs":
            fcntl.flock(fd, fcntl.LOCK_EX)
        else:
            left.chmod(0o770)
        argv = (*RUN, "--state-dir", left, "/no/such/spec")
        assert subprocess.run(argv, check=False, capture_output=True, timeout=60).returncode == 2
    assert (left / "ready").exists()


def test_the_default_spec_is_where_the_manifests_put_it(fake_host: FakeHost) -> None:
    done = run(fake_host, "--state-dir", fake_host.root / "state")
    assert done.returncode == 2
    assert (
        "cannot read the spec '/etc/instance/spec.toml': No such file or directory; name a SPEC, or mount one there\n"
        in done.stderr
    )
