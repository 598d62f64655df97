"""The commands of examples/host/systemd/instance-runner@.service, run as systemd runs them, without systemd."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.program_runs import FIRST_SECOND, PROJECT, RUNNER, GuestFiles, until
from tests.support.soak import some

UNIT = (PROJECT / "examples/host/systemd/instance-runner@.service").read_text()


def command(name: str) -> str:
    """Return a command of the unit as systemd has it after reading: lines joined, ``$$`` for a dollar."""
    [found] = re.findall(rf"^{name}=((?:.*\\\n)*.*)$", UNIT, re.MULTILINE)
    return str(found).replace("\\\n", " ").replace("$$", "$")


@contextmanager
def service(directory: Path, guest: GuestFiles) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start the unit's command; yield the shell, which stays for the status that systemd has as the parent, and the log."""
    directory.chmod(0o755)
    spec, log = directory / "web.toml", directory / "log"
    boot = f'kernel = "{guest.kernel}"\ninitrd = "{guest.initrd}"\ncmdline = "console=ttyS0 quiet"'
    shutdown = "[shutdown]\ngrace = 2\n"
    spec.write_text(f'[cpu]\ncount = 1\naccel = "tcg"\nplacement = "affinity"\n[boot]\n{boot}\n{shutdown}')
    start = command("ExecStart").replace("/usr/local/bin/instance-runner", str(RUNNER))
    start = start.replace("/etc/instance-runner/%i.toml", str(spec)).replace(
        "/run/instance-runner/%i", str(directory / "s")
    )
    words = shlex.split(start)
    words[-1] += "\nwait $!"
    with log.open("wb") as output:
        main = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield main, log
    finally:
        for each in (*children_of(main.pid), main.pid):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        main.wait()


def children_of(pid: int) -> list[int]:
    with suppress(FileNotFoundError):  # it has ended
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def test_the_runner_is_pid_1_and_ends_in_order_when_the_service_is_stopped(tmp_path: Path, guest: GuestFiles) -> None:
    with service(tmp_path, guest) as (main, log):
        until(lambda: "guest: done" in log.read_text(errors="replace") or main.poll() is not None, "the guest", 120)
        assert main.poll() is None, log.read_text()
        [init] = children_of(main.pid)
        pids = Path(f"/proc/{init}/status").read_text().split("NSpid:")[1].split("\n")[0].split()
        assert pids == [str(init), "1"]
        os.kill(init, signal.SIGTERM)  # as KillMode=mixed does
        assert main.wait(60) == 0, log.read_text()
        assert "ended outcome=stopped status=0 faults=0" in log.read_text()


@pytest.mark.heart
@pytest.mark.soak
def test_a_stop_at_any_moment_of_the_start_of_the_service_ends_it(tmp_path: Path, guest: GuestFiles) -> None:
    """From the moment when there is a PID 1: the kernel drops a signal that it neither blocks nor handles."""
    for milliseconds in (*range(6), *some(FIRST_SECOND, 4)):
        directory = tmp_path / f"{milliseconds}"
        directory.mkdir(exist_ok=True)
        with service(directory, guest) as (main, log):
            [init] = until(lambda: children_of(main.pid), "PID 1")
            time.sleep(milliseconds / 1000)  # the moment is what is tested
            os.kill(init, signal.SIGTERM)
            assert main.wait(60) in {0, 13}, (milliseconds, log.read_text())
            assert "asked to stop reason=SIGTERM" in log.read_text(), milliseconds
