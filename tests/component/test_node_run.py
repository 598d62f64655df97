"""``tests/node/run`` with a QEMU that misbehaves: a node without a status, or with a wrong one, never passes."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_node import artefacts, command
from tests.emulated_node.artefacts import PROJECT

QEMU = f"""#!{sys.executable} -I
import os, signal, socket, sys, time
options = list(zip(sys.argv, sys.argv[1:]))
def chardev(name):
    value = next(value for option, value in options if option == "-chardev" and value.startswith(f"socket,id={{name}},"))
    return socket.socket(fileno=int(value.rsplit("fd=", 1)[1]))
word = next(value for option, value in options if option == "-append").rsplit("node.word=", 1)[1]
events, terminal = map(chardev, ("events", "terminal"))
log = next(value for option, value in options if value.startswith("file,id=console,")).rsplit("path=", 1)[1]
results = os.path.dirname(log)
open(log, "w").write("the kernel's last line\\n")
def send(event):
    events.sendall(f"{{event}}\\n".encode())
def report(tests, skipped=0):
    open(f"{{results}}/junit.xml", "w").write(
        f'<testsuites><testsuite tests="{{tests}}" skipped="{{skipped}}"/></testsuites>'
    )
exec(os.environ["QEMU_DOES"])
"""
CASES = {
    "hangs": ("signal.pause()", command.NEVER_CAME_UP, "the kernel's last line"),
    "dies at once": ("sys.exit('no such machine')", command.NEVER_CAME_UP, "no such machine"),
    "is another boot": ("send('up node-0'); signal.pause()", command.NEVER_CAME_UP, "never came up"),
    "dies later": ("send(f'up {word}')", command.NO_STATUS, "the kernel's last line"),
    "hangs later": ("send(f'up {word}'); signal.pause()", command.NO_STATUS, "gave no status"),
    "ends as another": ("send(f'up {word}'); send('done node-0 0')", command.NO_STATUS, "gave no status"),
    "has no report": ("send(f'up {word}'); send(f'done {word} 0')", command.NO_TESTS, "no test was executed"),
    "ran nothing": (
        "send(f'up {word}'); report(2, 2); send(f'done {word} 0')",
        command.NO_TESTS,
        "no test was executed",
    ),
    "failed": ("send(f'up {word}'); report(2); send(f'done {word} 1')", 1, "up after"),
    "passed": ("send(f'up {word}'); report(2); terminal.sendall(b'2 passed'); send(f'done {word} 0')", 0, "2 passed"),
}


def packed(content: bytes) -> bytes:
    """Return a bzImage that unpacks itself to *content*: two sectors of setup, code, the payload and its size, and more."""
    payload = subprocess.run(["zstd", "-cq"], input=content, check=True, stdout=subprocess.PIPE).stdout
    payload += struct.pack("<I", len(content))
    image = bytearray(1024)
    image[0x1F1] = 1
    image[0x248:0x250] = struct.pack("<2I", 64, len(payload))
    return bytes(image) + bytes(64) + payload + b"relocations"


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """Make a fake QEMU, and return an environment whose cache is full already."""
    for tool in ("uv", "setpriv", "busybox", "zstd"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing")
    fake = tmp_path / "qemu"
    fake.write_text(QEMU)
    fake.chmod(0o755)
    cache = tmp_path / "cache"
    cache.mkdir()
    for artefact in (artefacts.kernel(), artefacts.root(), artefacts.rom()):
        (cache / f"{artefact.name}-{artefact.key}").write_bytes(packed(b"a kernel"))
    return {**os.environ, "RUNNER_NODE_CACHE": str(cache)}


def run(place: Path, tools: dict[str, str], does: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a node whose QEMU *does* something else, with its results in *place*."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.emulated_node.command"),
            *("--accel", "tcg", "--emulator", str(place / "qemu"), "--results", str(place / "results"), *options),
        ],
        cwd=PROJECT,
        env={**tools, "QEMU_DOES": does},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("does", "status", "output"), CASES.values(), ids=CASES)
def test_the_status_is_that_of_the_tests(
    tmp_path: Path, tools: dict[str, str], does: str, status: int, output: str
) -> None:
    boot_timeout = "60" if "up {word}" in does else "1"
    done = run(tmp_path, tools, does, "--boot-timeout", boot_timeout, "--timeout", "1")
    assert done.returncode == status, done.stdout
    assert output in done.stdout
    if status == 0:
        assert (tmp_path / "results/guest-kernel").read_bytes() == b"a kernel"


def test_a_node_that_falls_silent_is_ended(tmp_path: Path, tools: dict[str, str]) -> None:
    does = "send(f'up {word}'); signal.pause()"
    done = run(tmp_path, tools, does, "--boot-timeout", "60", "--timeout", "60", "--alive-within", "1")
    assert done.returncode == command.NO_STATUS
    assert "the node hung: no sign of life for 1 s" in done.stdout
    assert "the kernel's last line" in done.stdout
    assert done.stdout.count("up after") == 1
