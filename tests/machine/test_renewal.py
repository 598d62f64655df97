"""A runner is renewed under a real guest that counts, writes to a disk and to a share, and pings.

`RENEWALS=20 pytest tests/machine/test_renewal.py` renews it so many times.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.support.json_schemas import fitting
from tests.support.program_runs import RUNNER, ProgramRun, ProgramStarter, until
from tests.support.renewals import ProgramDirectory, make_program

TICKING = (
    "(i=0; while :; do echo tick $i; echo $i >>/mnt/ticks; echo $i | dd of=/dev/vda bs=512 conv=notrunc,fsync 2>/dev/null;"
    " i=$((i+1)); usleep 50000; done) &\n"
    "ping 192.168.77.1 >/tmp/pings &\n"
)


def type_in(run: ProgramRun, text: str) -> None:
    """Type *text* at the guest's console, and wait until it has passed on what it was sent."""
    client = (
        "import socket, sys\n"
        "line = socket.socket(socket.AF_UNIX)\n"
        "line.connect(sys.argv[1])\n"
        "line.sendall(b'{\"write\": true}\\n')\n"
        "line.recv(1 << 16)\n"
        "line.sendall(sys.argv[2].encode())\n"
        "line.settimeout(20)\n"
        "line.recv(1 << 16)\n"  # the guest echoes what it has read
    )
    argv = (*inside(run), "python3", "-c", client, f"{run.state}/console.sock", text)
    subprocess.run(argv, check=True, timeout=60)


def inside(run: ProgramRun) -> tuple[str, ...]:
    return ("nsenter", f"--target={run.pid()}", "--pid", "--mount")


def upgrade(run: ProgramRun, program: ProgramDirectory) -> Any:
    words = ("ctl", "--state-dir", str(run.state), "--json", "upgrade")
    argv = (*inside(run), str(RUNNER), *words, "--from", str(program.path), "--digest", program.digest)
    ended = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr + run.log
    return fitting("renewal", json.loads(ended.stdout))


def ticks(run: ProgramRun) -> list[int]:
    return [int(number) for number in re.findall(r"tick ([0-9]+)\r?$", run.console, re.MULTILINE)]


def test_a_guest_that_counts_misses_nothing(start: ProgramStarter, tmp_path: Path) -> None:
    share, disk = tmp_path / "share", tmp_path / "disk"
    share.mkdir()
    disk.write_bytes(bytes(1 << 20))
    program = make_program(tmp_path / "program")
    run = start(
        f'[[network]]\n[[share]]\ntag = "share"\npath = "{share}"\n[[disk]]\npath = "{disk}"\n', "guest.then=shell"
    )
    run.until_done()
    run.until("guest# ", lambda: run.console)
    type_in(run, TICKING)
    run.until("tick 5", lambda: run.console)
    before = run.descendants()
    for generation in range(1, int(os.environ.get("RENEWALS", "3")) + 1):
        assert upgrade(run, program)["runner"]["generation"] == generation
        seen = len(ticks(run))
        until(lambda: len(ticks(run)) > seen + 2, "the guest to tick on")  # noqa: B023 - in this round
    assert run.descendants() == before
    receipt = json.loads((run.state / "receipt.json").read_text())
    assert receipt["generation"] == generation
    type_in(run, "killall -INT ping; sleep 1; cat /tmp/pings\n")
    run.until("packet loss", lambda: run.console)
    assert ", 0% packet loss" in run.console
    assert run.stop() == 0, run.log
    counted = ticks(run)
    assert counted == list(range(len(counted)))
    written = [int(line) for line in (share / "ticks").read_text().split()]
    assert written == list(range(len(written)))
    assert len(written) >= len(counted) - 1
    assert int(disk.read_bytes()[:512].split(b"\n")[0]) >= len(written) - 2
    assert run.termination_log()["faults"] == []
