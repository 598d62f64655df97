"""The commands of examples/host/systemd/instance-runner@.service, run as systemd runs them, without systemd."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

from tests.support.program_runs import PROJECT, RUNNER, GuestFiles, until

UNIT = (PROJECT / "examples/host/systemd/instance-runner@.service").read_text()


def command(name: str) -> str:
    """Return a command of the unit as systemd has it after reading: lines joined, ``$$`` for a dollar."""
    [found] = re.findall(rf"^{name}=((?:.*\\\n)*.*)$", UNIT, re.MULTILINE)
    return str(found).replace("\\\n", " ").replace("$$", "$")


def test_the_runner_is_pid_1_and_ends_in_order_when_the_service_is_stopped(tmp_path: Path, guest: GuestFiles) -> None:
    tmp_path.chmod(0o755)
    spec, log = tmp_path / "web.toml", tmp_path / "log"
    boot = f'kernel = "{guest.kernel}"\ninitrd = "{guest.initrd}"\ncmdline = "console=ttyS0 quiet"'
    spec.write_text(f'[cpu]\ncount = 1\naccel = "tcg"\nplacement = "affinity"\n[boot]\n{boot}\n')
    start = command("ExecStart").replace("/usr/local/bin/instance-runner", str(RUNNER))
    start = start.replace("/etc/instance-runner/%i.toml", str(spec)).replace(
        "/run/instance-runner/%i", str(tmp_path / "s")
    )
    words = shlex.split(start)
    words[-1] += "\nwait $!"  # for its status, which systemd has as the parent that is left
    with log.open("wb") as output:
        main = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        until(lambda: "guest: done" in log.read_text(errors="replace") or main.poll() is not None, "the guest", 120)
        assert main.poll() is None, log.read_text()
        [init] = Path(f"/proc/{main.pid}/task/{main.pid}/children").read_text().split()
        assert Path(f"/proc/{init}/status").read_text().split("NSpid:")[1].split("\n")[0].split() == [init, "1"]
        os.kill(int(init), signal.SIGTERM)  # as KillMode=mixed does
        assert main.wait(60) == 0, log.read_text()
        assert "ended outcome=stopped status=0 faults=0" in log.read_text()
    finally:
        main.kill()
        main.wait()
