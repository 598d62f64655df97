"""What PID 1 imports before it starts QEMU: its start waits for each of these modules, and they stay in its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.fake_kernel import FAKE_FIRMWARE

WATCHED = """
import sys, runner.__main__
def watch(event, arguments):
    if event == "subprocess.Popen" and any("qemu-system" in str(word) for word in arguments[1]):
        sys.stderr.write("loaded " + " ".join(sys.modules) + "\\n")
sys.addaudithook(watch)
runner.__main__.entry()
"""

PROJECT = Path(__file__).parents[2]
MINIMAL = """
[cpu]
accel = "tcg"
placement = "affinity"
[memory]
size = "32MiB"
"""

MODULES, LINES = 114, 18_600
"""Modules of this project, and their lines, that may be imported by then; among them the events, the gate of live changes and the store."""

OTHERS = "argparse encodings gettext importlib ipaddress json tomllib datetime mmap pwd fcntl resource qemu"
"""Modules beyond those that ``import trio`` loads, without their submodules and accelerators; with Python 3.11 trio loads
ipaddress, too."""


def loaded_by(*argv: str | Path, path: str = os.environ["PATH"]) -> set[str]:
    """Return the modules that Python, run with *argv*, says are loaded."""
    ended = subprocess.run(
        (sys.executable, *argv),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": path},
    )
    loaded = [line for line in ended.stderr.splitlines() if line.startswith("loaded ")]
    assert loaded, ended.stderr
    return set(loaded[0].split()[1:])


def test_only_what_a_minimal_document_needs_is_imported_before_qemu_starts(tmp_path: Path) -> None:
    program = tmp_path / "qemu-system-x86_64"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    spec = tmp_path / "spec.toml"
    (tmp_path / "firmware").write_bytes(FAKE_FIRMWARE)
    spec.write_text(f'{MINIMAL}[boot]\nfirmware = "{tmp_path}/firmware"\n')
    argv = ("-c", WATCHED, "run", "--not-pid1", "--state-dir", tmp_path / "state", spec)
    found = loaded_by(*argv, path=f"{tmp_path}:{os.environ['PATH']}")
    ours = [name for name in found if name.startswith("runner.")]
    files = [PROJECT.joinpath(*name.split(".")).with_suffix(".py") for name in ours]
    # Packages are directories, with an empty file.
    lines = sum(len(file.read_text().splitlines()) for file in files if file.exists())
    print(f"{len(ours)} modules of ours with {lines} lines")
    assert len(ours) <= MODULES, sorted(ours)
    assert lines <= LINES
    trio = loaded_by("-c", "import sys, trio; sys.stderr.write('loaded ' + ' '.join(sys.modules) + '\\n')")
    others = {name.partition(".")[0].removeprefix("_") for name in found - trio} - {"runner", "main__"}
    assert others <= set(OTHERS.split())
