"""Attaching to a real QEMU: the serial console and the screen."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.program_runs import RUNNER, ProgramRun, ProgramStarter, until

ECHO = bytes.fromhex("bafd03 ec a801 74fb b2f8 ec ee ebf2").ljust(510, b"\0") + b"\x55\xaa"
"""A boot sector that writes every byte it receives on the first serial port back to it."""


def echoing(start: ProgramStarter, tmp_path: Path, more: str = "") -> ProgramRun:
    (tmp_path / "disk").write_bytes(ECHO + bytes(1 << 20))
    run = start(f'[[disk]]\npath = "{tmp_path}/disk"\n[shutdown]\ngrace = 1\n{more}', boot=False)
    run.until_runs()
    return run


@pytest.mark.heart
def test_the_console_from_a_terminal(start: ProgramStarter, tmp_path: Path) -> None:
    run = echoing(start, tmp_path)
    inside = ("nsenter", f"--target={run.pid()}", "--pid", "--mount")
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    seen = b""

    def sees(text: bytes) -> bool:
        nonlocal seen
        with contextlib.suppress(BlockingIOError):
            seen += os.read(ours, 1 << 16)
        return text in seen

    try:
        argv: list[str | Path] = [*inside, RUNNER, "console", "--state-dir", run.state, "--detach-key", "ctrl-a"]
        with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs) as client:
            until(lambda: sees(b"attached; Ctrl-a detaches"), "the greeting")
            # The firmware reads the keys that are typed before the boot sector runs.
            until(lambda: (os.write(ours, b"knock "), sees(b"knock knock"))[1], "an echo", 60)
            os.write(ours, b"\x01")
            until(lambda: sees(b"[detached]"), "the end")
            assert client.wait(30) == 0
    finally:
        os.close(ours)
        os.close(theirs)
    reading = subprocess.Popen(
        [*inside, RUNNER, "console", "--read-only", "--state-dir", run.state],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with reading:
        assert reading.stdout is not None
        assert b"reading only" in reading.stdout.readline()
        assert run.stop() == 13, "a boot sector does not react to the power button"
        rest = reading.stdout.read()
    assert b"knock" in rest, "a reader gets what was printed before it attached"
    # Its PID namespace ends with the runner, and may take it along before it has said so.
    if reading.returncode != -signal.SIGKILL:
        assert reading.returncode == 0
        assert b"[the instance has ended]" in rest
    assert b"knock" in (run.state / "console.log").read_bytes()


VIEWER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as viewer, viewer.makefile("rwb") as stream:
    viewer.settimeout(30)
    viewer.connect(sys.argv[1])
    assert stream.read(12) == b"RFB 003.008\\n"
    stream.write(b"RFB 003.008\\n")
    stream.flush()
    assert stream.read(2) == b"\\x01\\x01", "one security type, None: only root in the container gets here"
    stream.write(b"\\x01")
    stream.flush()
    assert stream.read(4) == bytes(4)
    stream.write(b"\\x01")
    stream.flush()
    width, height = (int.from_bytes(stream.read(2), "big") for _ in range(2))
    assert (width, height) >= (320, 200)
"""


def test_the_screen_by_vnc(start: ProgramStarter, tmp_path: Path) -> None:
    """Connect two viewers, one after the other, and before them one of another PID namespace; the protocol is RFB (RFC 6143)."""
    run = echoing(start, tmp_path, "[display]\nvnc = true\n")
    assert (run.state / "vnc.sock").stat().st_mode & 0o777 == 0o600
    inside = ("nsenter", f"--target={run.pid()}", "--pid", "--mount")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(30)
        stranger.connect(str(run.state / "vnc.sock"))
        assert stranger.recv(12) == b"", "the end of the connection"
    for _ in range(2):
        subprocess.run([*inside, sys.executable, "-I", "-c", VIEWER, run.state / "vnc.sock"], check=True, timeout=60)
    assert run.stop() == 13
    assert not (run.state / "vnc.sock").exists()
