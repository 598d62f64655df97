"""The README's first command, as a newcomer runs it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run"


@pytest.mark.heart
def test_the_quickstart_shows_a_virtual_machine_from_start_to_end() -> None:
    result = subprocess.run(
        [QUICKSTART, "--once"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    everything = result.stdout + result.stderr
    for text in (
        "placement: vcpu 0",
        "guest: address 192.168.77.2/24",
        "guest: power button",
        "ended outcome=stopped status=0 faults=0",
        "wrote 'xyzzy' into it; it powered down when asked to, and nothing is left",
    ):
        assert text in everything, everything


def test_a_wrong_argument_shows_the_usage() -> None:
    result = subprocess.run([QUICKSTART, "--twice"], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert "Usage: examples/quickstart/run [--once]" in result.stdout


def test_ctrl_c_ends_it_the_way_kubernetes_does() -> None:
    """On a terminal the interrupt goes to every process in the foreground."""
    # exec, because a shell other than bash would end by the interrupt itself, and lose its child's status.
    terminal = ("script", "--quiet", "--return", "--command", f"exec {shlex.quote(str(QUICKSTART))}", "/dev/null")
    with subprocess.Popen(terminal, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        seen = b""
        while b"guest: done" not in seen:
            data = os.read(process.stdout.fileno(), 1 << 16)
            assert data, seen.decode(errors="replace")
            seen += data
        process.stdin.write(b"\x03")
        process.stdin.flush()
        seen += process.stdout.read()
        process.wait(60)
    assert process.returncode == 0, seen.decode(errors="replace")
    assert b"asked to stop reason=SIGINT" in seen
    assert b"and nothing is left" in seen
