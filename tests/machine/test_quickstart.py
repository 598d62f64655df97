"""The README's first command, as a newcomer runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run"


def test_the_quickstart_shows_a_virtual_machine_from_start_to_end() -> None:
    result = subprocess.run(
        [QUICKSTART, "--once"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    everything = result.stdout + result.stderr
    for words in (
        "placement: vcpu 0",
        "guest: address 192.168.77.2/24",
        "guest: power button",
        "ended outcome=stopped status=0 faults=0",
        "wrote 'xyzzy' into it; it powered down when asked to, and nothing is left",
    ):
        assert words in everything, everything


def test_a_wrong_argument_is_told_how_it_is_used() -> None:
    result = subprocess.run([QUICKSTART, "--twice"], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert "Usage: examples/quickstart/run [--once]" in result.stdout
