"""The README's first command, as a newcomer runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.machine.test_try import terminal

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


def test_without_it_the_guests_shell_is_on_the_terminal() -> None:
    with terminal(QUICKSTART) as shown:
        shown.until_shell()
        shown.type("echo $((6 * 7))\r")
        shown.until(r"\n42\r\n")
        shown.type("\x1d")
        assert shown.wait() == 0, shown.seen
        assert shown.seen.endswith("[the guest has ended, and nothing of it is left]\r\n")
